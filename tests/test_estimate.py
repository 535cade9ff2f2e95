"""estimate.py: the papers' numbers, numbers measured here, and the printed page."""

import json
import re
import sys
from dataclasses import replace
from functools import partial

import pytest

import estimate
from estimate import GPT, MODELS, TECHNIQUES, Machine, Plan

GPT2, GPT3 = MODELS.values()
SEVEN_B = estimate.gpt_of(7e9)
SMALL = GPT(4, 64, 4, 256, 64)
MOE = replace(SMALL, experts=8, top_k=2)
PSI = SMALL.parameters()
BSH = 64 * 64  # elements of an activation of one sequence of SMALL
exactly = partial(pytest.approx, rel=1e-12)

# ---- published and measured numbers


def test_model_states_are_those_of_the_zero_paper():
    """7B parameters on 8 GPUs."""
    states = [estimate.model_states(7e9, 8, technique) for technique in TECHNIQUES]
    sums = [sum(parts) for parts in states]
    assert sums == [112e9, 38.5e9, 26.25e9, 14e9, 14e9, 1.75e9]
    assert states[2] == (14e9, 1.75e9, 10.5e9)


def test_parameters_are_those_published():
    assert GPT2.parameters() == 354_823_168
    assert GPT3.parameters() == 174_615_846_912
    assert SEVEN_B.layers == 32
    assert SEVEN_B.hidden == 4096
    assert SEVEN_B.parameters() == 7e9


PUBLISHED = {  # experts, top_k, layers, hidden size, of an expert, parameters, active parameters
    "Mixtral 8x7B": (8, 2, 32, 4096, 14336, 46.7e9, 12.9e9),
    "Mixtral 8x22B": (8, 2, 56, 6144, 16384, 140.6e9, 39.1e9),
    "Qwen3-30B-A3B": (128, 8, 48, 2048, 768, 30.5e9, 3.3e9),
    "DeepSeek-V3": (256, 8, 61, 7168, 2048, 671e9, 37e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_of_a_mixture_is_near_the_published_one(name):
    """An expert of Mixtral has three matrices: as many elements as two of 1.5 times the size."""
    experts, top_k, layers, hidden, ffn, parameters, active = PUBLISHED[name]
    published = GPT(
        layers,
        hidden,
        hidden // 128,
        50257,
        2048,
        parameters,
        experts,
        top_k,
    )
    published = replace(published, ffn=1.5 * ffn / hidden)
    guessed = estimate.gpt_of(parameters, experts=experts, top_k=top_k)
    assert guessed.parameters() == parameters
    assert guessed.active_parameters() == pytest.approx(active, rel=0.2)
    kept = [estimate.activations(model, 1, flash=True) for model in (guessed, published)]
    assert kept[0] == pytest.approx(kept[1], rel=0.3)
    trained = [sum(estimate.lora_states(model)) for model in (guessed, published)]
    assert trained[0] == pytest.approx(trained[1], rel=0.3)


def test_layers_are_the_nearest_multiple_of_8():
    """28 layers of 12h² parameters, with h = 128 · 28, are 4.32e9."""
    layers = [estimate.gpt_of(parameters).layers for parameters in (4.3e9, 4.4e9)]
    assert layers == [24, 32]


def test_a_step_takes_a_global_batch_and_the_last_one_what_is_left():
    assert estimate.steps(1000, 3, 64) == 47  # 46.9


def test_the_command_lines_mixture_has_the_shape_of_its_experts():
    flags = {"parameters": 46.7e9, "experts": 8, "top_k": 2, "sequence": 4096}
    model = estimate.model_of(flags)
    assert model.layers == 32
    assert model.hidden == model.sequence == 4096


def test_parameters_of_a_rank_are_those_that_parallel_3d_has():
    grids = [(1, 4), (2, 2), (4, 1)]  # tp, pp
    per_rank = [SMALL.parameters(*grid) for grid in grids]
    assert per_rank == [70464, 62656, 59456]


def test_activations_are_those_of_korthikantis_table_2():
    sbh = 2048 * 3 * 12288
    scores = 5 * 96 * 2048 / 12288

    def per_layer(**how):
        return exactly(estimate.activations(GPT3, 3, 8, **how) / 96)

    assert sbh * (10 + 24 / 8 + scores / 8) == per_layer()
    assert sbh / 8 * (34 + scores) == per_layer(sequence_parallel=True)
    assert sbh * (10 + 24 / 8) == per_layer(recompute="selective") == per_layer(flash=True)
    assert 2 * sbh == per_layer(recompute="full")


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


# ---- bytes that a rank sends in a step of three micro-batches

TIED = 256 * 64
ENDS = 2 * 2 * BSH  # the all-reduces of the embedding and of the head
LOSS = 6 * 64 * 4 / 2  # of 3 fp32 numbers for each token, as many 16-bit elements
TP_SPLIT = (10 * 4 + 3 * 2) * BSH + (12 * 4 + 4) * 64 + LOSS
SENT = {
    "zero2 reduces each time": ("dp", 4 * PSI, {"dp": 2, "technique": "zero2"}),
    "zero3 gathers twice besides": ("dp", 9 * PSI, {"dp": 2, "technique": "zero3"}),
    "lora only gathers": ("dp", 6 * PSI, {"dp": 2, "technique": "lora"}),
    "copies reduce": (
        "copies",
        3 * 2 * PSI / 2 * 2 * 3 / 4,
        {"dp": 8, "technique": "zero3", "copies": 4},
    ),
    "6 all-reduces a block, recomputed": (
        "tp",
        3 * (12 * 4 * BSH + ENDS + LOSS),
        {"tp": 2, "recompute": "full"},
    ),
    "split sequences gather once more, and sum gradients of norms and biases": (
        "tp",
        3 * TP_SPLIT,
        {"tp": 2, "sequence_parallel": True},
    ),
    "the middle of a pipeline": ("pp", 2 * 8 * 2 * BSH, {"pp": 4, "accumulation": 8}),
    "ends of a pipeline with split sequences": (
        "pp",
        2 * (3 * BSH + TIED) / 2,
        {"pp": 2, "tp": 2, "sequence_parallel": True},
    ),
    "keys and values three times, recomputed, and gradients in fp32": (
        "cp",
        3 * 4 * 3 * BSH / 8 * (4 + 8 + 8),
        {"tp": 2, "cp": 4, "recompute": "full"},
    ),
}


@pytest.mark.parametrize("what", SENT)
def test_bytes_sent_are(what):
    axis, expected, plan = SENT[what]
    found = estimate.traffic(SMALL, Plan(**{"accumulation": 3, **plan}))
    assert found[axis] == exactly(expected)


# ---- bytes that a rank holds


def test_a_loss_in_chunks_of_words_holds_two_fp32_numbers_of_a_chunks_logits():
    """As linear_cross_entropy.py's table and test say."""
    tokens = 2 * GPT2.sequence
    assert estimate.logits(GPT2, 2, chunk_size=1024) == 4 * 2 * tokens * 1024


LAYERS = estimate.activations(GPT2, 1, flash=True)
STAGE = estimate.activations(GPT3, 1, flash=True) / 8
HELD = {
    "zero3 works on 2 units and the gradients of 3": (
        "working",
        GPT2,
        Plan(8, 2, technique="zero3"),
        5 * 2 * 50257 * 1024 / 2,
    ),
    "recomputation works on a layer": (
        "working",
        GPT2,
        Plan(recompute="full"),
        LAYERS / 24,
    ),
    "1f1b keeps a micro-batch for each stage": (
        "activations",
        GPT3,
        Plan(pp=8, accumulation=64),
        8 * STAGE,
    ),
    "logits of the last stage, if it is the fullest": (
        "logits",
        GPT3,
        Plan(pp=8),
        14 * 2048 * 51200,
    ),
    "cp splits activations": (
        "activations",
        GPT2,
        Plan(cp=4, flash=False),
        LAYERS / 4,
    ),
    "cp and dp split states, but not copies of shards": (
        "optimizer",
        SMALL,
        Plan(2, cp=4, technique="zero3", copies=4),
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
    assert states[0] == [2 * here, 2 * here, 12 * split]
    assert states[1] == [2 * split, 2 * split, 12 * split]


# ---- seconds

GRID = Plan(2, 8, 2, "zero2", 1, 4, cp=2)


def times_of(plan):
    machine = Machine(8, 1e12, 1e12, 1e7, 1e8)
    return estimate.step_times(GPT3, plan, machine)


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


def test_hybrid_sharding_gathers_within_a_node_and_reduces_between_nodes():
    hybrid = Plan(8, technique="zero3", copies=4)
    sent = estimate.traffic(SMALL, hybrid)
    seconds = estimate.step_times(
        SMALL,
        hybrid,
        Machine(2, 1e18, 1e12, 1e7),
    )
    exposed = sent["dp"] / 1e12 + sent["copies"] / 1e7 - seconds["compute"]
    assert seconds["dp"] == exactly(exposed)


def test_with_fp8_gathers_and_products_with_matrices_cost_half():
    """Of zero3, which gathers twice. Gradients are in 16 bits, and attention's products too."""
    sent = partial(estimate.data_parallel_traffic, 1e9, 8, element=2)
    assert sent("zero3", fp8=True) == exactly((1 + 1 + 2) * 1e9 * 7 / 8)
    for technique in ("ddp", "zero2", "lora"):
        assert sent(technique, fp8=True) == sent(technique)
    operations = partial(estimate.flops_per_token, SMALL)
    matrices = 2 * SMALL.active_parameters()
    assert operations() - operations(fp8=True) == exactly(3 * matrices / 2)
    plain, *_ = estimate.advise(SEVEN_B, 64, 80e9)
    faster, *_ = estimate.advise(SEVEN_B, 64, 80e9, fp8=True)
    assert faster.times["compute"] < 0.6 * plain.times["compute"]


def test_offload_sends_32_bytes_a_parameter():
    seconds = times_of(Plan(2, technique="zero2+offload"))
    assert seconds["host"] == exactly(32 * GPT3.parameters() / 2 / 1e8)
    assert seconds["dp"] == 0  # hidden


# ---- advice


def test_plans_fit_use_all_gpus_and_come_fastest_then_simplest_first():
    plans = estimate.advise(SEVEN_B, 8, 80e9)
    order = []
    for plan in plans:
        place = TECHNIQUES.index(plan.technique)
        order.append((plan.seconds, place, plan.tp * plan.pp * plan.cp))
    assert order == sorted(order)
    assert plans[0].technique == "zero1"  # ddp's 16Ψ do not fit
    for p in plans:
        assert p.memory <= 0.94 * 80e9
        assert p.dp * p.tp * p.pp * p.cp == 8
        assert estimate.global_batch(p.micro_batch, p.accumulation, p.dp) == 512


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


def test_lora_is_a_plan_if_nothing_else_fits_without_offload():
    plans = estimate.advise(SEVEN_B, 1, 24e9)
    assert {p.technique for p in plans} == {"zero2+offload", "lora", "qlora"}
    assert plans[0].technique == "qlora"  # lora must recompute, offload computes gradients too


def test_each_rule_of_the_advice_holds_less_than_what_it_builds_on():
    rows = estimate.savings(SEVEN_B, 8, 64)
    gigabytes = [round(then / 1e9) for _, _, then in rows]
    assert gigabytes == [3825, 2163, 788, 123, 49, 37, 25, 27, 18, 5, 4, 15, 19, 16]


def test_no_rule_splits_over_the_ranks_of_one_gpu():
    rows = estimate.savings(SEVEN_B, 1, 64)
    assert not [rule for rule, _, _ in rows if "parallel" in rule.technique]


def test_a_rule_saves_what_it_holds_less_than_the_last_rule_that_stays():
    """ZeRO-3 does not build on offload, whose plan holds less."""
    rows = {rule.technique: (saved, then) for rule, saved, then in estimate.savings(SEVEN_B, 8, 64)}
    saved, then = rows["zero3, FSDP"]
    assert saved == rows["zero2"][1] - then > 0


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
    assert "\nvs measured within 1%: " in page
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    page = run()
    assert page.startswith("1 ")
    assert "\nvs measured NOT within 1%: 25.0" in page


def test_the_page_has_the_states_the_plans_the_sites_and_the_days(run):
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


WRONG = {
    "recompute='some'": partial(estimate.activations, GPT3, 1, recompute="some"),
    "80e9 for 80 GB": partial(estimate.advise, GPT3, 8, 80),
}


@pytest.mark.parametrize("words", WRONG)
def test_an_error_names_the_argument(words):
    with pytest.raises(ValueError, match=words):
        WRONG[words]()
