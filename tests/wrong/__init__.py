"""Wrong on purpose: common mistakes, each in a few lines, and the claim that catches each.

A cause is a name in claims/causes.py's lists. Where CAUSES has none, the oracle must not name one.
Most mistakes shipped somewhere. The implementations in RIGHT are right. Mistakes are made in
them, and the claims listed with them say what they lack. UNUSUAL ones are right as well.
"""

import importlib
from pathlib import Path

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def listed(what):
    """Return [(kind, "wrong.file:name", what is listed with the name)]."""
    found = []
    for file in FILES:
        module = importlib.import_module(f"wrong.{file}")
        for kind, names in getattr(module, what, {}).items():
            found += [(kind, f"wrong.{file}:{name}", value) for name, value in names.items()]
    return found


MISTAKES = listed("MISTAKES")  # and the claim that does not hold
CAUSES = listed("CAUSES")  # and the cause that the oracle names. It names none for the others
RIGHT = listed("RIGHT")  # and the claims that do not hold
UNUSUAL = []  # (kind, "wrong.file:name", claim, outcome)
for _kind, _spec, _outcomes in listed("UNUSUAL"):
    UNUSUAL += [(_kind, _spec, *each) for each in _outcomes.items()]
