"""`onefile-parallel learn`: write it yourself, and the oracle says what does not hold yet.

learn                 lists the lessons, in the order in which to take them
learn LESSON          writes a skeleton, such as my_ddp.py, into the current directory
learn LESSON --check  tries the claims one after the other, and stops at the first that fails
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import environment  # before torch

from learn import HINTS, LESSONS, SKELETONS


def main():
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if "--help" in sys.argv or len(names) > 1:
        print(__doc__)
        return 0 if "--help" in sys.argv else 2
    if not names:
        return show_lessons()
    (name,) = names
    if name not in LESSONS:
        print(f"error: there is no lesson {name}; one of {', '.join(LESSONS)}")
        return 2
    return check(name) if "--check" in sys.argv else begin(name)


def file_of(name):
    return Path(environment.CALLED_FROM) / f"my_{name.replace('-', '_')}.py"


def skeleton_of(name):
    return (SKELETONS / f"{name.replace('-', '_')}.py").read_text()


def show_lessons():
    for number, name in enumerate(LESSONS, 1):
        title = skeleton_of(name).partition("\n")[0].strip('"')
        mark = "begun" if file_of(name).exists() else ""
        print(f"{number:2}  {name:22} {mark:6} {title}")
    print("\n`learn all-reduce` writes the first skeleton.")
    return 0


def begin(name):
    path = file_of(name)
    if path.exists():
        print(f"error: {path.name} is there already; `learn {name} --check` tries it")
        return 2
    path.write_text(skeleton_of(name))
    print(f"{path.name} has the signature, the formula and what to do. Then: learn {name} --check")
    return 0


def check(name):
    """Stop at the first claim that does not hold. Return the exit status."""
    from claims import verdicts

    path = file_of(name)
    if not path.exists():
        print(f"error: there is no {path.name} here; `learn {name}` writes it")
        return 2
    lesson = LESSONS[name]
    spec = f"{path}:{lesson.name}"
    claims = lesson.claims.split()
    for number, claim in enumerate(claims, 1):
        verdict = verdicts.judge(name, claim, spec)
        holds = verdict.outcome == "holds"
        word = "holds" if holds else "does not hold yet"
        print(f"{number} of {len(claims)}  {claim:24} {word}", flush=True)
        if not holds:
            explain(name, claim, spec, verdict)
            return 1
    return congratulate(name)


def explain(name, claim, spec, verdict):
    from claims import CLAIMS

    print(f"\n  {CLAIMS[name, claim].sentence}")
    for line in verdict.why.splitlines():
        print(f"  {line}")
    cause = cause_of(name, spec)
    if cause:
        print(f"\n  {cause}")
    print(f"\n  Hint: {HINTS[claim]}")
    print(f"  Ours: {LESSONS[name].ours}")


def cause_of(name, spec):
    try:
        from claims import causes
    except ImportError:
        return ""
    return causes.sentence(name, spec)


def congratulate(name):
    from claims import KINDS, verdicts

    others = len(verdicts.names_of_claims(name)) - len(LESSONS[name].claims.split())
    names = list(LESSONS)
    following = names[names.index(name) + 1 :][:1]
    mine = len(file_of(name).read_text().splitlines())
    print(
        f"\nAll hold. Yours has {mine} lines. Ours: {LESSONS[name].ours}. The file's next sections"
    )
    print(
        f"make {KINDS[name].ours} of it, which holds {others} more claims. To try these on yours:"
    )
    print(f"  check --{name} {file_of(name).name}:{LESSONS[name].name}")
    if following:
        print(f"Next: learn {following[0]}")
    return 0


if __name__ == "__main__":
    status = main()
    if "pool" in sys.modules:  # its import takes seconds, and only --check needs it
        sys.modules["pool"].shut_down()
    sys.exit(status)
