"""Each claim can fail: on common mistakes, whose cause is named, and on nothing that is right."""

import pool
import pytest
import wrong
from claims import causes, verdicts
from claims.verdicts import judge

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
import time
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
        time.sleep(0.1 * (dist.get_rank() == 0))  # else it may be done in time by chance
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
