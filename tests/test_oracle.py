"""Each claim, about our implementations or the one that an option names; and that it can fail."""

import importlib.util
import re
import sys

import environment
import pool
import pytest
import torch
import wrong
from claims import KINDS
from claims.registry import resolve
from claims.verdicts import by_group, group_of, is_clear, judge, names_of_claims
from launch import ROOT


@pytest.fixture(autouse=True)
def _skip_muon_before_torch_2_9(request):
    parameters = getattr(request.node, "callspec", None)
    is_muon = parameters and parameters.params.get("kind") == "muon"
    if is_muon and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon to compare with")


def test_claim(kind, name, spec, remember):
    """`spec` is ours, or what --KIND names."""
    verdict = judge(kind, name, spec)

    remember((kind, name), verdict)
    is_ours = spec == KINDS[kind].ours
    if verdict.outcome == "not run":
        pytest.skip(f"{verdict.outcome}: {verdict.why}")
    group = group_of(kind, name, verdict)
    if group in ("refuses", "lacks", "not offered") and not is_ours:  # which is not wrong
        pytest.skip(group)
    assert group == "holds", verdict.why


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "claim"), wrong.MISTAKES)
def test_a_wrong_implementation_is_caught(kind, implementation, claim, monkeypatch):
    """By a claim that looks and finds something wrong, not by a crash."""
    monkeypatch.setattr(pool, "HANGS_AFTER", 8.0)

    verdict = judge(kind, claim, implementation)

    assert verdict.outcome == "fails", verdict


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "lacking"), wrong.RIGHT)
def test_what_the_mistakes_are_made_in_is_right(kind, implementation, lacking):
    """It lacks what is listed beside it, and nothing else."""
    verdicts = {name: judge(kind, name, implementation) for name in names_of_claims(kind)}

    bad = {name: verdict for name, verdict in verdicts.items() if verdict.is_bad}
    assert bad.keys() == set(lacking), bad


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "claim", "outcome"), wrong.UNUSUAL)
def test_an_unusual_implementation_is_not_called_wrong(kind, implementation, claim, outcome):
    assert judge(kind, claim, implementation).outcome == outcome


@pytest.mark.cpu
def test_the_verdict_says_which_dtype_a_claim_held_in():
    in_float32 = "wrong.unusual:attention_in_blocks_of_64"

    assert judge("attention", "as_dense", in_float32).why == "float32"
    assert judge("attention", "as_dense", KINDS["attention"].ours).why == "float64"


# ---- how it fails


MINE = """
import torch
import torch.distributed as dist

class {name}(torch.nn.Module):
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

    def write(forward):
        (tmp_path / "mine.py").write_text(MINE.format(name="MyDDP", forward=forward))
        return f"{tmp_path}/mine.py:MyDDP"

    return write


@pytest.mark.cpu
def test_a_class_that_crashes_on_one_rank_shows_that_ranks_own_exception(mine):
    verdict = judge("ddp", "mean_gradient", mine(CRASHES), [2])

    assert verdict.outcome == "raises"
    assert "AssertionError: rank 1 is broken, at " in verdict.why
    assert "mine.py:11 in forward (rank 1 of 2)" in verdict.why


@pytest.mark.cpu
def test_a_class_that_hangs_costs_its_own_claim_only(mine, monkeypatch):
    monkeypatch.setattr(pool, "HANGS_AFTER", 2.0)

    verdicts = [judge("ddp", "mean_gradient", mine(forward), [2]) for forward in (HANGS, "pass")]

    assert verdicts[0].outcome == "hangs"
    assert "ranks [0] hang after 2 s, of 2" in verdicts[0].why
    assert "rank 0, at" in verdicts[0].why
    assert "mine.py:11 in forward" in verdicts[0].why
    assert verdicts[1].outcome == "fails"  # and the workers are there again


@pytest.mark.cpu
def test_after_three_hangs_other_claims_are_not_run(mine, monkeypatch):
    monkeypatch.setattr(pool, "HANGS_AFTER", 0.5)
    spec = mine(HANGS)

    outcomes = [judge("ddp", "mean_gradient", spec, [2]).outcome for _ in range(4)]

    assert outcomes == ["hangs", "hangs", "hangs", "not run"]


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
def test_the_users_file_is_executed_once_in_each_process(mine, tmp_path):
    spec = mine("pass")
    with (tmp_path / "mine.py").open("a") as file:
        file.write(f"open({str(tmp_path / 'log')!r}, 'a').write('executed ')")

    for claim in ("mean_gradient", "momentum"):
        judge("ddp", claim, spec, [2])

    assert (tmp_path / "log").read_text().split() == ["executed"] * 3  # two workers, and here


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("spec", "words"),
    {
        "mine.py": "with a colon between",
        "nowhere.py:MyDDP": "there is no file {folder}/nowhere.py",
        "nowhere.ddp:MyDDP": "there is no module nowhere in {folder}",
        "mine.py:Yours": "mine.py has no class or function Yours; it has MyDDP",
        "broken.py:MyDDP": "broken.py raised ZeroDivisionError: division by zero",
    }.items(),
)
def test_a_name_that_is_not_there_is_an_error(mine, tmp_path, spec, words):
    mine("pass")
    (tmp_path / "broken.py").write_text("1 / 0")

    with pytest.raises(ValueError, match=re.escape(words.format(folder=tmp_path))):
        resolve(spec)


def test_the_users_file_does_not_take_the_place_of_ours(mine, tmp_path):
    mine("pass")
    (tmp_path / "mine.py").rename(tmp_path / "pool.py")

    assert resolve("pool.py:MyDDP").__name__ == "MyDDP"
    assert sys.modules["pool"] is pool


# ---- README's table


PACKAGES = {"lora": "peft", "diloco": "torchft"}  # that have what is not in torch
HEADER = f"| kind | claims | ours | PyTorch {torch.__version__.partition('+')[0]}, peft |"


def cell(kind, spec):
    """Which claims do not hold, and which properties it lacks."""
    verdicts = {name: judge(kind, name, spec) for name in names_of_claims(kind)}
    for name, verdict in verdicts.items():
        if verdict.outcome != "holds":
            print(kind, name, *verdict, file=sys.stderr)
    groups = by_group(kind, verdicts).items()
    return "; ".join(f"{group}: {', '.join(names)}" for group, names in groups) or "all hold"


def row(kind):
    number = len(names_of_claims(kind))
    theirs = cell(kind, KINDS[kind].pytorchs) if KINDS[kind].pytorchs else "has none"
    return f"| `--{kind}` | {number} | {cell(kind, KINDS[kind].ours)} | {theirs} |"


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.pytorchs])
def test_readme_says_what_holds_for_pytorchs_own(kind):
    readme = (ROOT / "README.md").read_text()
    if HEADER not in readme:
        pytest.skip(f"README's table is of another version: {HEADER}")
    package = PACKAGES.get(kind, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (line,) = re.findall(rf"^\| `--{kind}` .*$", readme, re.MULTILINE)
    _, number, *_, theirs = line.split(" | ")

    assert number == str(len(names_of_claims(kind)))
    assert theirs == f"{cell(kind, KINDS[kind].pytorchs)} |"


if __name__ == "__main__":
    print(HEADER, "|---|---|---|---|", *map(row, KINDS), sep="\n")
