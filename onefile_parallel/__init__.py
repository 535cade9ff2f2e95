"""The technique files as modules: `from onefile_parallel.fsdp import fully_shard`. And claims().

In a clone of the project the files lie one directory up, and each runs alone. The build of the
wheel copies them, and the oracle in tests/, into this package. They import nothing of each other,
but for parallel_3d and parallel_5d, which `onefile-parallel run` starts.
"""

import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def claims(kind, implementation):
    """Return a test for pytest that has a case for each claim about an implementation.

    In a test file of yours, `test_mine = onefile_parallel.claims("ddp", MyDDP)`. `kind` is an
    option of `onefile-parallel check`, and the implementation a class or function of a module, or
    a string such as "mine.py:MyDDP". A claim that is wrong fails. One that is refused, lacking or
    not offered is skipped. The claims run in processes of their own, once for all cases.
    """
    import pytest

    spec = implementation if isinstance(implementation, str) else spec_of(implementation)

    @pytest.mark.parametrize("claim", names_of_claims(kind))
    def test_claim(claim):
        answer = verdicts(kind, spec)[claim]
        if answer["verdict"] not in ("holds", "wrong"):
            pytest.skip(f"{answer['verdict']}: {answer['finding']}")
        assert answer["verdict"] == "holds", f"{answer['sentence']} {answer['finding']}"

    return test_claim


def spec_of(implementation):
    """Return "FILE.py:NAME", or "package.module:NAME" if its module may import relatively."""
    name = implementation.__qualname__
    module = inspect.getmodule(implementation)
    if "." in name or module is None:
        raise ValueError(f"{name} must be at the top level of a module, so that workers find it")
    return f"{module.__name__ if module.__package__ else module.__file__}:{name}"


@functools.cache
def names_of_claims(kind):
    return list(verdicts(kind, None))


@functools.cache
def verdicts(kind, spec):
    """Return {claim: what `check --json` says of it}. Without `spec` only the names are right."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts"
        command = [sys.executable, "-m", "onefile_parallel", "check", "--json", str(path)]
        command += ["--collect-only"] if spec is None else []
        command += [f"--{kind}"] if spec is None else [f"--{kind}", spec]
        paths = [str(Path(__file__).parent.parent), *sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not path.exists():
            raise ValueError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        page = json.loads(path.read_text())
    return {answer["claim"]: answer for answer in page["claims"]}
