"""Each claim, about our implementations or the one that an option names."""

import importlib.util
import re
import sys

import environment
import pool
import pytest
import torch
from claims import KINDS, verdicts
from claims.registry import resolve
from claims.verdicts import by_group, group_of, is_clear, judge, names_of_claims
from launch import ROOT


def test_claim(kind, name, spec, remember):
    """`spec` is ours, or what --KIND names."""
    verdict = judge(kind, name, spec)

    remember((kind, name), verdict)
    if verdict.outcome == "not run":
        pytest.skip(f"not run: {verdict.why}")
    group = group_of(kind, name, verdict)
    is_ours = spec == KINDS[kind].ours
    if group in ("refuses", "lacks", "not offered") and not is_ours:  # which is not wrong
        pytest.skip(group)
    assert group == "holds", verdict.why


@pytest.mark.cpu
def test_experts_on_eight_ranks(monkeypatch):
    """The pool has four workers. This test starts eight, and ends them."""
    pool.shut_down(kill=True)
    monkeypatch.setattr(pool, "planned", lambda: ("gloo", 8))

    ours = judge("moe-mesh", "three_dimensions", KINDS["moe-mesh"].ours)
    others = judge("moe-mesh", "three_dimensions", "wrong.moe_mesh:SumsOverTensorRanks")
    pool.shut_down(kill=True)

    assert ours.outcome == "holds", ours
    assert others.outcome == "fails", others


# ---- how it fails


MINE = """
import torch
import torch.distributed as dist

class MyDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        {forward}
        return self.module(x)
"""
CRASHES = "assert dist.get_rank() == 0, 'rank 1 is broken'"
HANGS = "while dist.get_rank() == 0: pass"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the user's own class, into the directory that the user stands in."""
    monkeypatch.setattr(environment, "CALLED_FROM", str(tmp_path))

    def write(forward, file="mine.py"):
        (tmp_path / file).write_text(MINE.format(forward=forward))
        return f"{tmp_path}/{file}:MyDDP"

    return write


@pytest.mark.cpu
def test_a_class_that_crashes_on_one_rank_shows_that_ranks_own_exception(mine):
    verdict = judge("ddp", "mean_gradient", mine(CRASHES), [2])

    assert verdict.outcome == "raises"
    assert "AssertionError: rank 1 is broken, at " in verdict.why
    assert "mine.py:11 in forward (rank 1 of 2)" in verdict.why


@pytest.mark.cpu
def test_after_a_hang_the_workers_are_there_again_for_others(mine, monkeypatch):
    monkeypatch.setattr(pool, "HANGS_AFTER", 2.0)
    monkeypatch.setattr(verdicts, "MOST_HANGS", 1)

    first = judge("ddp", "mean_gradient", mine(HANGS), [2])
    second = judge("ddp", "momentum", mine(HANGS), [2])
    others = judge("ddp", "mean_gradient", mine("pass", "others.py"), [2])

    assert first.outcome == "hangs"
    assert re.match(r"ranks \[0\] hang after 2 s, of 2\nrank 0, at .*mine.py:11", first.why)
    assert second.outcome == "not run"
    assert others.outcome == "fails"  # it does not average


@pytest.mark.parametrize(
    ("exception", "expected"),
    {
        "ValueError: 3 heads do not divide by 2 ranks": True,
        "IndexError: index 3 is out of range": False,
        "TypeError: 'NoneType' object is not subscriptable": False,
        "RuntimeError: Timed out waiting 20000ms for send operation to complete": False,
    }.items(),
)
def test_an_accident_is_not_a_refusal(exception, expected):
    assert is_clear(exception) == expected


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("spec", "words"),
    {
        "mine.py": "with a colon between",
        "nowhere.py:MyDDP": "nowhere.py raised FileNotFoundError: .*/nowhere.py",
        "nowhere.ddp:MyDDP": "there is no module nowhere in ",
        "mine.py:Yours": "mine.py has no class or function Yours; it has MyDDP",
        "broken.py:MyDDP": "broken.py raised IndentationError",
    }.items(),
)
def test_a_name_that_is_not_there_is_an_error(mine, spec, words):
    mine("pass")
    mine("pass\n  oops", "broken.py")

    with pytest.raises(ValueError, match=words):
        resolve(spec)


def test_the_users_file_is_executed_once_and_takes_no_place_of_ours(mine):
    spec = mine("pass", "pool.py")

    assert resolve(spec) is resolve(spec)
    assert sys.modules["pool"] is pool


# ---- README's table


PACKAGES = {"lora": "peft", "diloco": "torchft"}  # that have what is not in torch
HEADER = f"| kind | claims | ours | PyTorch {torch.__version__.partition('+')[0]}, peft |"


def cell(kind, spec):
    """Which claims do not hold, and which properties it lacks."""
    answers = {name: judge(kind, name, spec) for name in names_of_claims(kind)}
    for name, verdict in answers.items():
        if verdict.outcome != "holds":
            print(kind, name, *verdict, file=sys.stderr)
    groups = by_group(kind, answers).items()
    return "; ".join(f"{group}: {', '.join(names)}" for group, names in groups) or "all hold"


def row(kind, ours):
    theirs = KINDS[kind].pytorchs
    answer = cell(kind, theirs) if theirs else "has none"
    return f"| `--{kind}` | {len(names_of_claims(kind))} | {ours} | {answer} |"


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
def test_readme_says_what_holds_for_pytorchs_own(kind):
    readme = (ROOT / "README.md").read_text()
    if HEADER not in readme:
        pytest.skip(f"README's table is of another version: {HEADER}")
    package = PACKAGES.get(kind, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")

    expected = row(kind, "all hold")  # a column for the reasons follows
    assert any(line.startswith(expected) for line in readme.splitlines())


if __name__ == "__main__":
    rows = [row(kind, cell(kind, KINDS[kind].ours)) for kind in KINDS]
    print(HEADER, "|---|---|---|---|", *rows, sep="\n")
