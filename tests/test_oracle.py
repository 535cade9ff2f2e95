"""Each claim of tests/claims, of our implementations or of the one that an option names; and that it can fail."""

import importlib.util
import re
import sys

import claims
import pool
import pytest
import torch
import wrong
from launch import ROOT


def why_not(kind, name, spec, worlds=None):
    """-> "" where the claim holds, None where it is not offered, else why not, in a line."""
    for N in worlds or claims.CLAIMS[kind, name].worlds:
        try:
            answers = pool.run(N, claims.run, kind, name, spec)
        except AssertionError as error:  # it raised, died, or hung
            return (
                str(error).strip().splitlines()[-1]
                if "hang" not in str(error).splitlines()[0]
                else "it hangs"
            )
        finally:
            if name == "different_models":  # the ranks' connections may not survive it
                pool.shut_down(kill=True)
        if None in answers:
            return None
        if any(answers):
            return f"{next(filter(None, answers))} ({N} ranks)"
    return ""


def test_claim(kind, name, spec, verdicts):
    """`spec` is ours, or what --KIND names."""
    verdicts[kind, name] = answer = why_not(kind, name, spec)
    if answer is None:
        pytest.skip("not offered by this implementation")
    assert not answer, claims.CLAIMS[kind, name].sentence


@pytest.mark.parametrize(("kind", "implementation", "claim"), wrong.MISTAKES)
def test_a_wrong_implementation_is_caught(kind, implementation, claim, monkeypatch):
    monkeypatch.setattr(pool, "HANGS_AFTER", 4.0)
    assert why_not(kind, claim, implementation)


@pytest.mark.parametrize(("kind", "implementation", "lacking"), wrong.RIGHT)
def test_what_the_mistakes_are_made_in_is_right(kind, implementation, lacking):
    """But for what is said there."""
    names = [name for of, name in claims.CLAIMS if of == kind and name not in lacking]
    assert not {name: why for name in names if (why := why_not(kind, name, implementation))}


def test_another_file_by_its_path(tmp_path):
    """As a user names his own: path/to/file.py:Name."""
    (tmp_path / "mine.py").write_text((ROOT / "ddp.py").read_text())
    assert why_not("ddp", "mean_gradient", f"{tmp_path}/mine.py:DDP", [2]) == ""


HEADER = f"| kind | claims | ours | PyTorch {torch.__version__.partition('+')[0]}, peft |"


def verdict(kind, spec):
    """In a cell of README's table: what does not hold, and what is not offered."""
    answers = {name: why_not(kind, name, spec) for of, name in claims.CLAIMS if of == kind}
    print(
        *(f"{kind} {name}: {answer}" for name, answer in answers.items() if answer),
        sep="\n",
        file=sys.stderr,
    )
    fails = [name for name, answer in answers.items() if answer]
    missing = [name for name, answer in answers.items() if answer is None]
    parts = [
        f"{text}: {', '.join(names)}"
        for text, names in (("fails", fails), ("not offered", missing))
        if names
    ]
    return "; ".join(parts) or "all hold"


def row(kind):
    number = sum(of == kind for of, _ in claims.CLAIMS)
    theirs = verdict(kind, claims.PYTORCHS[kind]) if kind in claims.PYTORCHS else "has none"
    return f"| `--{kind}` | {number} | {verdict(kind, claims.OURS[kind])} | {theirs} |"


@pytest.mark.parametrize("kind", claims.PYTORCHS)
def test_readme_says_what_holds_for_pytorchs_own(kind):
    readme = (ROOT / "README.md").read_text()
    if HEADER not in readme:
        pytest.skip(f"README's table is of another version: {HEADER}")
    if kind == "lora" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    (line,) = re.findall(rf"^\| `--{kind}` .*$", readme, re.MULTILINE)
    _, number, *_, theirs = line.split(" | ")
    assert number == str(sum(of == kind for of, _ in claims.CLAIMS))
    assert theirs == f"{verdict(kind, claims.PYTORCHS[kind])} |"


if __name__ == "__main__":
    print(HEADER, "|---|---|---|---|", *map(row, claims.OURS), sep="\n")
