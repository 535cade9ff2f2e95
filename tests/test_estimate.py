"""estimate.py: the papers' numbers, numbers measured here, and the printed page."""

import json
import re
import sys
from dataclasses import replace
from functools import partial

import pool
import pytest
import torch
from test_parallel_3d import options

import ddp
import estimate
import parallel_3d
import zero
from estimate import GPT, MODELS, TECHNIQUES, Machine, Plan

GPT2, GPT3 = MODELS.values()
SEVEN_B = estimate.gpt_of(7e9)
SMALL = GPT(4, 64, 4, 256, 64)
MOE = replace(SMALL, experts=8, top_k=2)
PSI = SMALL.parameters()
BSH = 64 * 64  # elements of an activation of one sequence of SMALL
exactly = partial(pytest.approx, rel=1e-12)

# ---- published numbers


def test_model_states_are_those_of_the_zero_paper():
    """7B parameters on 8 GPUs, and 1T on 1024."""
    states = [estimate.model_states(7e9, 8, technique) for technique in TECHNIQUES]
    sums = [sum(parts) for parts in states]
    assert sums == [112e9, 38.5e9, 26.25e9, 14e9, 14e9, 1.75e9]
    assert states[2] == (14e9, 1.75e9, 10.5e9)
    zero3 = estimate.model_states(1e12, 1024, "zero3")
    assert sum(zero3) == exactly(15.625e9)


def test_parameters_are_those_published():
    assert GPT2.parameters() == 354_823_168
    assert GPT3.parameters() == 174_615_846_912
    assert (SEVEN_B.layers, SEVEN_B.hidden, SEVEN_B.parameters()) == (32, 4096, 7e9)
    assert estimate.gpt_of(175e9).layers == 96


@pytest.mark.parametrize("t", [1, 8])
def test_activations_are_those_of_korthikantis_table_2(t):
    sbh = 2048 * 3 * 12288
    scores = 5 * 96 * 2048 / 12288

    def per_layer(**how):
        return exactly(estimate.activations(GPT3, 3, t, **how) / 96)

    split = {"sequence_parallel": True}
    assert sbh * (10 + 24 / t + scores / t) == per_layer()
    assert sbh / t * (34 + scores) == per_layer(**split)
    assert sbh * (10 + 24 / t) == per_layer(recompute="selective")
    assert 34 * sbh / t == per_layer(**split, flash=True)
    assert 2 * sbh == per_layer(**split, recompute="full")


def test_days_are_those_of_narayanan():
    one_t = GPT(128, 25600, 160, 51200, 2048)
    seconds = [
        estimate.training_time(estimate.gpt_of(175e9), 300e9, 1024, 140e12, "full"),
        estimate.training_time(one_t, 450e9, 3072, 163e12, "full"),
    ]
    assert [round(n / 86400) for n in seconds] == [34, 84]


def test_operations_are_those_of_palm():
    psi = GPT3.parameters()
    lhs = GPT3.layers * GPT3.hidden * 2048
    assert estimate.flops_per_token(GPT3) == 6 * psi + 12 * lhs
    assert estimate.flops_per_token(GPT3, "selective") == 6 * psi + 16 * lhs
    assert estimate.flops_per_token(GPT3, "full") == 8 * psi + 16 * lhs
    assert estimate.flops_per_token(GPT3, frozen=True) == 4 * psi + 12 * lhs


def test_lora_trains_r_times_d_plus_k_and_qlora_freezes_in_4127_bits():
    h = GPT3.hidden
    qkv_and_projection = 4 * h + 2 * h
    mlp = 5 * h + 5 * h
    trained = 8 * GPT3.layers * (qkv_and_projection + mlp)
    weights = 2 * (GPT3.parameters() + trained)
    lora = estimate.lora_states(GPT3)
    qlora = estimate.lora_states(GPT3, quantize=True)
    assert lora == (weights, 2 * trained, 12 * trained)
    matrices = 12 * GPT3.layers * h**2
    assert 8 * (lora[0] - qlora[0]) == exactly((16 - 4.127) * matrices)


def test_muons_and_dilocos_costs_are_those_of_their_docstrings():
    """Muon: 4Ψ/N held, 6Ψ(N-1)/N sent, or 4Ψ/N of shards. DiLoCo: 2Ψ(N-1)/N numbers, 8Ψ held."""
    assert estimate.muon_costs(512, 4) == (512, 6 * 512 * 3 / 4)
    assert estimate.muon_costs(512, 4, sharded=True) == (512, 4 * 512 / 4 * 3 / 4)
    assert estimate.diloco_costs(3e9, 3, 100) == (24e9, 160e6, 16e9)
    assert estimate.diloco_costs(256, 2, 1, 4, "int8") == (2048, 260, 260 / 4)


# ---- what was measured


@pytest.mark.parametrize("name", ["Zero1", "Zero2", "Zero3"])
@pool.on(2)
def test_the_demo_of_zero_holds_and_sends_what_is_stated(name):
    model = ddp.language_model()
    stage = getattr(zero, name)
    optimizer = stage(model, torch.optim.AdamW, pool.group(), bucket_cap_mb=2)
    batch = torch.randint(256, (1, 9))
    for _ in range(2):  # the first step makes Adam's state
        optimizer.zero_grad()
        with ddp.SentBytes() as sent:
            loss = ddp.language_loss(model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            held = zero.held_by(optimizer)
            optimizer.step()
    assert (*held, sent.total) == estimate.MEASURED[name]


GRIDS = {
    "tp = 4, sequences split": (4, 1, " --sequence-parallel"),
    "pp = 4": (1, 4, ""),
    "tp = 2, pp = 2": (2, 2, ""),
}


@pytest.mark.parametrize("grid", GRIDS)
@pool.on(4)
def test_parallel_3d_has_the_parameters_and_keeps_the_activations_that_are_estimated(grid):
    tp, pp, flags = GRIDS[grid]
    arguments = options(f"--sequence-length 64{flags}", "float32")
    trainer = parallel_3d.Trainer(SMALL, parallel_3d.Grid(tp, pp), arguments)
    numels = [None] * 4
    own = ddp.held_bytes(trainer.parameters)
    torch.distributed.all_gather_object(numels, own / 4)
    assert max(numels) == SMALL.parameters(tp, pp)

    saved = list(trainer.parameters)
    blocks = [layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block)]
    x = torch.randn(64 // tp if flags else 64, 1, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        torch.nn.Sequential(*blocks)(x)
    kept = ddp.held_bytes(saved) - own
    how = {"flash": True, "element": 4, "masks": False}
    expected = estimate.activations(SMALL, 1, tp, bool(flags), **how)
    assert kept == pytest.approx(expected / pp, rel=0.03)


# ---- bytes that a rank sends in a step of three micro-batches

ENDS = 2 * 2 * BSH  # the all-reduces of the embedding and of the head
LOSS = 6 * 64 * 4 / 2  # of 3 fp32 numbers for each token, as many 16-bit elements
TIED = 256 * 64
RING = 3 * 4 * 3 * BSH / 8
SENT = {
    "zero1 reduces and gathers once": (
        "dp",
        {"dp": 2, "technique": "zero1"},
        2 * PSI,
    ),
    "zero2 reduces each time": (
        "dp",
        {"dp": 2, "technique": "zero2"},
        (3 + 1) * PSI,
    ),
    "zero3 gathers twice besides": (
        "dp",
        {"dp": 2, "technique": "zero3"},
        3 * 3 * PSI,
    ),
    "lora only gathers": (
        "dp",
        {"dp": 2, "technique": "lora"},
        2 * 3 * PSI,
    ),
    "tp splits what dp sends": (
        "dp",
        {"dp": 2, "tp": 2},
        2 * SMALL.parameters(tp=2),
    ),
    "copies of shards reduce": (
        "copies",
        {"dp": 8, "technique": "zero3", "copies": 4},
        3 * 2 * PSI / 2 * 2 * 3 / 4,
    ),
    "4 all-reduces a block": (
        "tp",
        {"tp": 2},
        3 * (8 * 4 * BSH + ENDS + LOSS),
    ),
    "6 all-reduces, recomputed": (
        "tp",
        {"tp": 2, "recompute": "full"},
        3 * (12 * 4 * BSH + ENDS + LOSS),
    ),
    "split sequences gather once more, and sum gradients of norms and biases": (
        "tp",
        {"tp": 2, "sequence_parallel": True},
        3 * ((10 * 4 + 3 * 2) * BSH + (12 * 4 + 4) * 64 + LOSS),
    ),
    "no pipeline": (
        "pp",
        {"dp": 2},
        0,
    ),
    "ends of a pipeline": (
        "pp",
        {"pp": 2},
        2 * (3 * BSH + TIED),
    ),
    "the middle of a pipeline": (
        "pp",
        {"pp": 4, "accumulation": 8},
        2 * 8 * 2 * BSH,
    ),
    "split sequences in a pipeline": (
        "pp",
        {"pp": 2, "tp": 2, "sequence_parallel": True},
        2 * (3 * BSH + TIED) / 2,
    ),
    "keys and values twice, and gradients in fp32": (
        "cp",
        {"tp": 2, "cp": 4},
        RING * (4 + 4 + 8),
    ),
    "keys and values three times, recomputed": (
        "cp",
        {"tp": 2, "cp": 4, "recompute": "full"},
        RING * (4 + 8 + 8),
    ),
}


@pytest.mark.parametrize("what", SENT)
def test_bytes_sent_are(what):
    axis, plan, expected = SENT[what]
    found = estimate.traffic(SMALL, Plan(**{"accumulation": 3, **plan}))
    assert found[axis] == exactly(expected)


# ---- bytes that a rank holds

LAYERS = estimate.activations(GPT2, 1, flash=True)
STAGE = estimate.activations(GPT3, 1, flash=True) / 8
LOGITS = 14 * 2048 * 51200
HELD = {
    "zero3 works on 2 units and the gradients of 3": (
        "working",
        GPT2,
        Plan(8, 2, technique="zero3"),
        5 * 2 * 50257 * 1024 / 2,
    ),
    "lora on 2 units": (
        "working",
        GPT2,
        Plan(8, 2, technique="lora"),
        2 * 2 * 50257 * 1024 / 2,
    ),
    "recomputation on a layer": (
        "working",
        GPT2,
        Plan(recompute="full"),
        LAYERS / 24,
    ),
    "1f1b keeps a micro-batch": (
        "activations",
        GPT3,
        Plan(pp=8),
        STAGE,
    ),
    "for each stage below": (
        "activations",
        GPT3,
        Plan(pp=8, accumulation=64),
        8 * STAGE,
    ),
    "logits of the last stage, if it is the fullest": (
        "logits",
        GPT3,
        Plan(pp=8),
        LOGITS,
    ),
    "else none": (
        "logits",
        GPT3,
        Plan(pp=8, accumulation=64),
        0,
    ),
    "cp splits logits": (
        "logits",
        GPT3,
        Plan(cp=4),
        LOGITS / 4,
    ),
    "cp splits activations": (
        "activations",
        GPT2,
        Plan(cp=4, flash=False),
        LAYERS / 4,
    ),
    "cp splits states": (
        "optimizer",
        SMALL,
        Plan(2, cp=4, technique="zero1"),
        12 * PSI / 8,
    ),
    "copies of hybrid shards": (
        "optimizer",
        SMALL,
        Plan(8, technique="zero3", copies=4),
        12 * PSI / 2,
    ),
}


@pytest.mark.parametrize("what", HELD)
def test_bytes_held_are(what):
    part, model, plan, expected = HELD[what]
    assert estimate.footprint(model, plan)[part] == exactly(expected)


def test_experts_multiply_the_mlps_and_expert_parallelism_divides_them():
    mlps = SMALL.layers * (8 * 64**2 + 5 * 64)
    router = SMALL.layers * 64  # for each expert
    assert MOE.parameters() == PSI + 7 * mlps + 8 * router
    assert MOE.active_parameters() == PSI + mlps + 2 * router
    more = SMALL.layers * 16 * BSH
    assert estimate.activations(MOE, 1) == estimate.activations(SMALL, 1) + more
    here = MOE.parameters() - 6 * mlps
    split = MOE.parameters() / 8
    states = [estimate.states_of(MOE, Plan(8, technique=f"zero{n}", ep=4)) for n in (1, 3)]
    assert states == [[2 * here, 2 * here, 12 * split], [2 * split, 2 * split, 12 * split]]


def test_there_is_room_for_what_is_said_and_no_more():
    micro_batch, *_ = estimate.room(GPT2, "zero3", 8, 40e9)
    for more in (0, 1):
        plan = Plan(8, technique="zero3", micro_batch=micro_batch + more)
        parts = estimate.footprint(GPT2, plan)
        assert (sum(parts.values()) > 0.94 * 40e9) == bool(more)


# ---- seconds

GRID = Plan(2, 8, 2, "zero2", 1, 4, cp=2)


def times_of(plan):
    return estimate.step_times(GPT3, plan, Machine(8, 1e12, 1e12, 1e7, 1e8))


def test_only_tensor_parallel_ranks_share_a_node_and_a_bubble_is_pp_less_one_over_m():
    sent = estimate.traffic(GPT3, GRID)
    seconds = times_of(GRID)
    assert seconds["tp"] == sent["tp"] / 1e12
    assert seconds["cp"] == sent["cp"] / 1e7
    assert seconds["pp"] == sent["pp"] / 1e7
    busy = seconds["compute"] + seconds["tp"] + seconds["cp"]
    assert seconds["bubble"] == exactly(busy * (2 - 1) / 4)


SHARES = {"ddp": 1 / 6, "zero2": 2 / 3, "zero3": 1}


@pytest.mark.parametrize("technique", SHARES)
def test_messages_hide_behind_their_share_of_the_computation(technique):
    plan = replace(GRID, technique=technique)
    seconds = times_of(plan)
    sending = estimate.traffic(GPT3, plan)["dp"] / 1e7
    assert seconds["dp"] == exactly(sending - seconds["compute"] * SHARES[technique])
    assert times_of(Plan(2))["dp"] == 0


def test_hybrid_sharding_gathers_within_a_node_and_reduces_between_nodes():
    hybrid = Plan(8, technique="zero3", copies=4)
    sent = estimate.traffic(SMALL, hybrid)
    seconds = estimate.step_times(SMALL, hybrid, Machine(2, 1e18, 1e12, 1e7))
    exposed = sent["dp"] / 1e12 + sent["copies"] / 1e7 - seconds["compute"]
    assert seconds["dp"] == exactly(exposed)


def test_offload_sends_32_bytes_a_parameter():
    seconds = times_of(Plan(2, technique="zero2+offload"))
    assert seconds["host"] == exactly(32 * GPT3.parameters() / 2 / 1e8)


def test_a_step_between_sites_waits_for_what_the_delay_does_not_hide():
    """A message of 8 s, or fragments of 4 s, every 10 steps of 1 s."""
    slow = partial(estimate.time_between_sites, bandwidth=125e6, sync_every=10)
    assert slow(1.0, costs=(0, 0, 1e9)) == 1 + 8 / 10
    assert slow(1.0, costs=(0, 0, 500e6), fragments=2, delay=1) == 1 + 2 * 3 / 10
    assert slow(0.1, costs=(0, 100e6, 0)) == 0.8  # the network never rests


# ---- advice


def test_plans_fit_use_all_gpus_and_come_fastest_then_simplest_first():
    plans = estimate.advise(SEVEN_B, 8, 80e9)
    order = [(p.seconds, TECHNIQUES.index(p.technique), p.tp * p.pp * p.cp) for p in plans]
    assert order == sorted(order)
    for p in plans:
        assert p.memory <= 0.94 * 80e9
        assert p.dp * p.tp * p.pp * p.cp == 8
        assert estimate.global_batch(p.micro_batch, p.accumulation, p.dp) == 512


def test_the_simplest_technique_that_fits_comes_first():
    assert estimate.advise(GPT2, 8, 80e9)[0].technique == "ddp"
    assert estimate.advise(SEVEN_B, 8, 80e9)[0].technique == "zero1"  # 16Ψ do not fit
    slow_host = estimate.advise(SEVEN_B, 16, 40e9, host=1e8)
    assert "offload" not in slow_host[0].technique
    slow_network = estimate.advise(SEVEN_B, 16, 40e9, inter=1e8)
    assert slow_network[0].pp > 1


def test_every_grid_is_tried_with_what_it_can_split():
    plans = estimate.advise(SMALL, 4, 80e9, batch=4, gpus_per_node=2)
    grids = {(p.dp, p.tp, p.pp, p.cp) for p in plans}
    assert len(grids) == 10
    techniques = {1: set(), 2: set(), 4: set()}  # by the number of replicas
    for plan in plans:
        techniques[plan.replicas].add(plan.technique)
    assert techniques[1] == {"ddp", "zero2+offload"}
    assert techniques[2] == set(TECHNIQUES)
    assert {p.technique for p in plans if p.copies == 2} == {"zero3"}


def test_a_sequence_is_split_only_if_it_divides():
    odd = replace(SMALL, sequence=66)
    plans = estimate.advise(odd, 4, 80e9, batch=4)
    assert {plan.cp for plan in plans} == {1}
    assert {plan.tp for plan in plans if plan.sequence_parallel} == {2}


def test_lora_is_a_plan_if_nothing_else_fits_without_offload():
    plans = estimate.advise(SEVEN_B, 1, 24e9)
    assert {p.technique for p in plans} == {"zero2+offload", "lora", "qlora"}
    assert plans[0].technique == "qlora"  # lora must recompute, offload computes gradients too


def test_savings_are_differences_and_lines_that_are_kept_add_up():
    rows = estimate.savings(SEVEN_B, 8, 64)
    held = rows[0][2]
    for rule, saves, then in rows[1:]:
        assert saves == held - then
        if rule.keeps:
            held = then
    gigabytes = [round(then / 1e9, 1) for _, _, then in rows]
    assert gigabytes[:7] == [3825.2, 2162.7, 788.3, 122.6, 49.1, 36.8, 24.6]
    assert gigabytes[7:] == [26.6, 18.3, 4.9, 3.6, 14.9, 18.9, 16.3]
    rule, *_ = estimate.savings(replace(SEVEN_B, experts=2), 8, 64)[-1]
    assert rule.technique == "expert parallel, 2"


# ---- the command


@pytest.fixture
def run(monkeypatch, capsys):
    def run(arguments=""):
        monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments.split()])
        return f"{estimate.main()} {capsys.readouterr().out}"

    return run


def test_the_page_of_the_demos_compares_with_what_they_measured(run, monkeypatch):
    page = run()
    assert page.startswith("0 estimate · 2 ranks · 1.9M parameters · 4 layers of 192, ")
    assert "(ddp measured 7.5 / 7.5 / 15.0)" in page
    assert "\nvs measured within 1%: " in page
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    page = run()
    assert page.startswith("1 ")
    assert "\nvs measured NOT within 1%: 25.0" in page


def test_the_page_has_the_sum_of_the_states_and_the_days(run):
    page = run("--parameters 7e9 --gpus 8 --memory 80")
    assert re.search(r"\nzero2 .* 26.25 GB ", page)
    assert re.search(r"\n8 × 1 × 1 × 1 +zero1 .* compute 100%\n", page)
    assert "\n300e9 tokens take 6ΨT/(nX) = 130.2 days, or 8ΨT/(nX) = 173.6 days" in page
    assert re.search(r"\ndiloco, H = 100 +56.00 GB +280.0 MB +28.00 GB +\d", page)
    assert "No plan fits" in run("--parameters 7e9 --gpus 1 --memory 4")


def test_json_has_what_the_page_has(run):
    flags = "--model gpt3-175b --gpus 1024 --tokens 300e9 --flops-per-gpu 70e12 --json"
    answer = json.loads(run(flags)[2:])
    parts = answer["techniques"]["zero3"]["parts"]
    assert parts["parameters"] == answer["parameters"] * 2 / 1024
    assert round(answer["days"][1]) == 68
    assert answer["plans"][0]["bound"] == "compute"


# ---- wrong use

WRONG = {
    "technique='zero4'": partial(estimate.model_states, 7e9, 8, "zero4"),
    "ranks=0": partial(estimate.model_states, 7e9, 0, "ddp"),
    "tp=5 must divide 96 heads": partial(estimate.activations, GPT3, 1, 5),
    "recompute='some'": partial(estimate.activations, GPT3, 1, recompute="some"),
    "a multiple of the heads": partial(GPT, 2, 100, 3, 10, 10),
    "top_k": partial(GPT, 2, 96, 3, 10, 10, experts=2, top_k=3),
    "80e9 for 80 GB": partial(estimate.advise, GPT3, 8, 80),
}


@pytest.mark.parametrize("words", WRONG)
def test_an_error_names_the_argument(words):
    with pytest.raises(ValueError, match=words):
        WRONG[words]()
