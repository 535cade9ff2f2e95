"""Each claim, about our implementations or the one that an option names; and that it can fail."""

import importlib.util
import re
import sys

import environment
import pool
import pytest
import torch
import wrong
from claims import KINDS, causes, verdicts
from claims.registry import resolve
from claims.verdicts import by_group, group_of, is_clear, judge, names_of_claims
from launch import ROOT


@pytest.fixture(autouse=True)
def _skip_muon_before_torch_2_9(request):
    if "[muon" in request.node.name and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon to compare with")


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


CAUSES = {(kind, implementation): cause for kind, implementation, cause in wrong.CAUSES}


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "claim"), wrong.MISTAKES)
def test_a_wrong_implementation_is_caught(kind, implementation, claim, monkeypatch):
    """By a claim that looks and finds something wrong, not by a crash. And its cause is named."""
    monkeypatch.setattr(pool, "HANGS_AFTER", 8.0)

    verdict = judge(kind, claim, implementation)
    found = causes.find(kind, implementation, {claim: verdict})

    assert verdict.outcome == "fails", verdict
    assert found.cause == CAUSES.get((kind, implementation), "")


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "lacking"), wrong.RIGHT)
def test_what_the_mistakes_are_made_in_is_right(kind, implementation, lacking):
    """Of the claims that catch mistakes, those listed beside it do not hold, and no others."""
    catching = {claim for of, _, claim in wrong.MISTAKES if of == kind}
    verdicts = {claim: judge(kind, claim, implementation) for claim in catching.union(lacking)}

    bad = {claim: verdict for claim, verdict in verdicts.items() if verdict.is_bad}
    assert bad.keys() == set(lacking), bad


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "implementation", "claim", "outcome"), wrong.UNUSUAL)
def test_an_unusual_implementation_is_not_called_wrong(kind, implementation, claim, outcome):
    verdict = judge(kind, claim, implementation)

    assert verdict.outcome == outcome
    assert causes.find(kind, implementation, {claim: verdict}) == causes.NONE


@pytest.mark.cpu
def test_the_verdict_says_which_dtype_a_claim_held_in():
    verdict = judge("attention", "as_dense", "wrong.unusual:attention_in_blocks_of_64")
    assert verdict == ("holds", "float32")


# ---- what it looks like


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], ""),
        (["summed"], "summed"),
        (["summed", "not_reduced"], ""),  # either would be a guess
        (["not_added_up", "not_waited_for"], "not_waited_for"),  # which was seen to change
        (["frozen_train", "frozen_move"], "frozen_train"),  # which says more
    ],
)
def test_a_cause_is_named_only_if_it_is_the_only_one(held, expected):
    assert causes.decide(held) == expected


def test_the_sentence_has_the_factor_in_each_world():
    says = causes.say(causes.CAUSES["summed"], [1, 2, 3])
    assert "is 2.000 times the right one on 2 ranks and 3.000 times on 3: they are summed" in says


SUMS = """
import copy
import torch
import torch.distributed as dist

class Sums(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        dist.all_reduce(parameter.grad)

    def forward(self, x):
        return self.module(x)

class NeverWaits(Sums):
    def reduce(self, parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True)

class SendsFloat32(Sums):
    def reduce(self, parameter):
        gradient = parameter.grad.float()
        dist.all_reduce(gradient)
        parameter.grad.copy_(gradient / dist.get_world_size())

class SumsAndUnties(Sums):
    def __init__(self, module):
        for name, layer in module.named_children():
            setattr(module, name, copy.deepcopy(layer))
        super().__init__(module)
"""


def find_cause(spec, claims):
    return causes.find("ddp", spec, {claim: judge("ddp", claim, spec) for claim in claims})


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(SUMS)
    return str(path)


@pytest.mark.cpu
def test_claims_that_the_cause_does_not_explain_are_wrong(sums):
    found = find_cause(f"{sums}:SumsAndUnties", ["mean_gradient", "tied", "momentum", "buffers"])
    assert found[:1] + found[2:] == ("summed", "mean_gradient", ("mean_gradient", "momentum"))


@pytest.mark.cpu
def test_a_mean_over_the_ranks_is_evidence():
    spec = "wrong.moe:RouterNotAveraged"
    verdict = judge("moe", "as_one_device", spec)
    found = causes.find("moe", spec, {"as_one_device": verdict})
    assert found.cause == "router_not_averaged"


@pytest.mark.cpu
def test_an_all_reduce_that_is_not_waited_for_is_seen(sums):
    found = find_cause(f"{sums}:NeverWaits", ["mean_gradient"])
    assert found.cause == "not_waited_for_divided"


@pytest.mark.cpu
def test_the_table_begins_with_the_cause(sums):
    spec = f"{sums}:SumsAndUnties"
    answers = {name: judge("ddp", name, spec) for name in ("mean_gradient", "tied", "momentum")}
    found = causes.find("ddp", spec, answers)
    lines = list(verdicts.table("ddp", answers, found))
    assert lines[0] == "What it looks like:"
    assert "Mend mean_gradient first. 1 other" in lines[2]
    assert lines[-2:] == ["wrong: mean_gradient, tied", "explained by the cause: momentum"]
    momentum = verdicts.as_json("ddp", "momentum", spec, answers["momentum"], found)
    assert momentum["explained by cause"]


@pytest.mark.cpu
def test_what_crashes_has_no_cause():
    assert causes.sentence("ddp", "wrong.unusual:always_raises") == ""


@pytest.mark.cpu
def test_float32_inside_is_named(sums):
    assert verdicts.FLOAT32_INSIDE in judge("ddp", "float64", f"{sums}:SendsFloat32").why


@pytest.mark.cpu
def test_a_right_implementation_has_no_cause():
    assert causes.sentence("ddp", "wrong.unusual:AveragesEachBackward") == ""


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
