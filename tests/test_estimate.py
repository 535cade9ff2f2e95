"""estimate.py: the papers' numbers, numbers measured here, and the printed page."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial

import pool
import pytest
import torch
from test_muon import step_of_a_fake_rank
from test_parallel_3d import options

import ddp
import estimate
import fsdp
import parallel_3d
import zero
from estimate import GPT, MODELS, TECHNIQUES, Machine, Plan

GPT2, GPT3 = MODELS.values()
ONE_T = GPT(128, 25600, 160, 51200, 2048)
SEVEN_B = estimate.gpt_of(7e9)
SMALL = GPT(4, 64, 4, 256, 64)
PSI = SMALL.parameters()
BSH = 64 * 64  # elements of an activation of one sequence of SMALL
exactly = partial(pytest.approx, rel=1e-12)

# ---- the model and its states

ZEROS_TABLE_1 = {  # GB for 1T parameters on so many GPUs, with stages 1, 2 and 3
    1: (16000, 16000, 16000),
    4: (7000, 5500, 4000),
    64: (4187, 2218, 250),
    1024: (4011, 2013, 15.6),
}


@pytest.mark.parametrize("ranks", ZEROS_TABLE_1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_model_states_are_those_of_zeros_table(ranks, stage):
    states = estimate.model_states(1e12, ranks, f"zero{stage}")
    published = ZEROS_TABLE_1[ranks][stage - 1]
    assert sum(states) / 1e9 == pytest.approx(published, rel=0.003)


def test_model_states_of_7b_parameters_on_8_gpus():
    states = [estimate.model_states(7e9, 8, technique) for technique in TECHNIQUES]
    sums = [sum(parts) for parts in states]
    assert sums == [112e9, 38.5e9, 26.25e9, 14e9, 14e9, 1.75e9]
    assert estimate.model_states(7e9, 8, "zero2") == (14e9, 1.75e9, 10.5e9)


def test_in_fp32_adam_takes_16_bytes_too():
    assert estimate.model_states(7e9, 8, "zero2", mixed=False) == (28e9, 3.5e9, 7e9)


def test_parameters_are_those_published():
    assert GPT2.parameters() == 354_823_168
    assert GPT3.parameters() == 174_615_846_912


def test_the_first_stage_has_the_embeddings_and_the_last_has_the_last_norm():
    embeddings = (50257 + 1024) * 1024
    block = 12 * 1024**2 + 13 * 1024
    assert GPT2.parameters(pp=2) == embeddings + 12 * block


def test_a_model_of_a_given_size_has_a_common_shape():
    assert (SEVEN_B.layers, SEVEN_B.hidden) == (32, 4096)
    assert SEVEN_B.parameters() == 7e9
    assert estimate.gpt_of(175e9).layers == 96


MLPS = SMALL.layers * (8 * 64**2 + 5 * 64)
ROUTER = SMALL.layers * 64  # for each expert
MOE = replace(SMALL, experts=8, top_k=2)


def test_experts_multiply_the_mlps():
    assert MOE.parameters() == PSI + 7 * MLPS + 8 * ROUTER
    assert MOE.active_parameters() == PSI + MLPS + 2 * ROUTER
    more = SMALL.layers * 16 * BSH
    assert estimate.activations(MOE, 1) == estimate.activations(SMALL, 1) + more


def test_expert_parallelism_divides_the_mlps():
    here = MOE.parameters() - 6 * MLPS
    assert MOE.parameters(ep=4) == here
    split = MOE.parameters() / 8
    one, three = (Plan(8, technique=name, ep=4) for name in ("zero1", "zero3"))
    assert estimate.states_of(MOE, one) == [2 * here, 2 * here, 12 * split]
    assert estimate.states_of(MOE, three) == [2 * split, 2 * split, 12 * split]


def test_lora_trains_r_times_d_plus_k():
    h = GPT3.hidden
    qkv = h + 3 * h
    projection = h + h
    mlp = (h + 4 * h) + (4 * h + h)
    trained = 8 * GPT3.layers * (qkv + projection + mlp)
    weights = 2 * (GPT3.parameters() + trained)
    assert estimate.lora_states(GPT3) == (weights, 2 * trained, 12 * trained)
    _, gradients, _ = estimate.lora_states(replace(SMALL, experts=4))
    assert gradients == 2 * 8 * SMALL.layers * 64 * (6 + 4 * 10)


def test_qlora_freezes_in_4127_bits():
    matrices = 12 * GPT3.layers * GPT3.hidden**2
    lora, _, _ = estimate.lora_states(GPT3, 8)
    qlora, _, _ = estimate.lora_states(GPT3, 8, quantize=True)
    assert 8 * (lora - qlora) == exactly((16 - 4.127) / 8 * matrices)


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


# ---- what was measured


def held_and_sent(model, optimizer, held_by):
    """Bytes of parameters, gradients and optimizer state, and bytes sent in the second step."""
    batch = torch.randint(256, (1, 9))
    for _ in range(2):
        optimizer.zero_grad()
        with ddp.SentBytes() as sent:
            loss = ddp.language_loss(model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            held = held_by()
            optimizer.step()
    return *held, sent.total


@pytest.mark.parametrize("name", ["Zero1", "Zero2", "Zero3"])
@pool.on(2)
def test_zero_holds_and_sends_what_is_stated(name):
    model = ddp.language_model()
    stage = getattr(zero, name)
    optimizer = stage(model, torch.optim.AdamW, pool.group(), bucket_cap_mb=2)
    found = held_and_sent(model, optimizer, lambda: zero.held_by(optimizer))
    assert found == estimate.MEASURED[name]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pool.on(2)
def test_ddp_and_fsdp_hold_and_send_what_is_stated(name):
    model = ddp.language_model()
    group = pool.group()
    if name == "ddp":
        model = ddp.DDP(model, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True)
    else:
        for layer in (*model, model):
            fsdp.fully_shard(layer, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    held_and_sent(model, optimizer, tuple)  # the first step makes Adam's state
    found = held_and_sent(model, optimizer, lambda: ddp.held(model.parameters(), optimizer))
    assert found == estimate.MEASURED[name]


GRIDS = [
    (2, 1, False),
    (4, 1, True),
    (1, 2, False),
    (1, 4, False),
    (2, 2, True),
]


def trainer_of(tp, pp, split):
    flags = "--sequence-length 64" + split * " --sequence-parallel"
    grid = parallel_3d.Grid(tp, pp)
    return parallel_3d.Trainer(SMALL, grid, options(flags, "float32"))


@pytest.mark.parametrize(("tp", "pp", "split"), GRIDS)
@pool.on(4)
def test_parallel_3d_has_the_parameters_and_the_batch_that_are_estimated(tp, pp, split):
    trainer = trainer_of(tp, pp, split)
    own = sum(parameter.numel() for parameter in trainer.parameters)
    numels = [None] * 4
    torch.distributed.all_gather_object(numels, own)
    assert max(numels) == SMALL.parameters(tp, pp)
    assert estimate.global_batch(2, trainer.num_microbatches, 4 // tp // pp) == 8


@pytest.mark.parametrize(("tp", "pp", "split"), GRIDS)
@pool.on(4)
def test_parallel_3d_keeps_the_activations_that_are_estimated(tp, pp, split):
    trainer = trainer_of(tp, pp, split)
    blocks = [layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block)]
    saved = list(trainer.parameters)
    x = torch.randn(64 // tp if split else 64, 1, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        torch.nn.Sequential(*blocks)(x)
    kept = ddp.held_bytes(saved) - ddp.held_bytes(trainer.parameters)
    expected = estimate.activations(SMALL, 1, tp, split, flash=True, element=4, masks=False)
    assert kept == pytest.approx(expected / pp, rel=0.03)


@pytest.mark.cpu
def test_muon_holds_and_sends_what_is_estimated():
    """6Ψ(N-1)/N bytes in fp32, and 4Ψ/N of them over shards. The rank that counts has its share."""
    sent, elements = step_of_a_fake_rank(4, 1, [(8, 8)] * 8)
    assert estimate.muon_costs(512, 4) == (4 * elements, sent.bytes)
    assert estimate.muon_costs(512, 4, sharded=True) == (512, 512 * 3 / 4)


# ---- bytes that a rank sends, with three micro-batches

LOSS = 6 * 64 * 4  # bytes: 3 numbers of 4 bytes for each token, reduced


def sent(axis, **plan):
    plan = Plan(**{"accumulation": 3, **plan})
    bytes_by_axis = estimate.traffic(SMALL, plan)
    return exactly(bytes_by_axis[axis])


def test_zero2_reduces_every_micro_batch_and_zero3_gathers_twice_besides():
    assert sent("dp", dp=2, technique="zero1") == 2 * PSI
    assert sent("dp", dp=2, technique="zero2") == (3 + 1) * PSI
    assert sent("dp", dp=2, technique="zero3") == 3 * 3 * PSI
    assert sent("dp", dp=4, technique="lora") == 2 * 3 * PSI * 2 * 3 / 4


def test_hybrid_sharding_reduces_over_the_copies():
    plan = {"dp": 8, "technique": "zero3", "copies": 4}
    assert sent("dp", **plan) == 3 * 3 * PSI
    assert sent("copies", **plan) == 3 * 2 * PSI / 2 * 2 * 3 / 4


def test_tensor_parallel_ranks_average_their_own_parameters():
    assert 2 * SMALL.parameters(tp=2) == sent("dp", dp=2, tp=2)


def test_tensor_parallelism_reduces_four_activations_a_block_and_six_if_it_recomputes():
    ends = 2 * 2 * BSH
    blocks = 8 * 4 * BSH
    again = 12 * 4 * BSH
    assert sent("tp", tp=2) == 3 * ((blocks + ends) * 2 + LOSS) / 2
    assert sent("tp", tp=2, recompute="full") == 3 * ((again + ends) * 2 + LOSS) / 2


def test_sequence_parallelism_gathers_inputs_again_and_sums_gradients_of_norms_and_biases():
    elements = (10 * 4 + 3 * 2) * BSH
    elements += (12 * 4 + 4) * 64  # norms and biases
    expected = 3 * (elements * 2 + LOSS) / 2
    assert expected == sent("tp", tp=2, sequence_parallel=True)


def test_a_pipeline_sends_an_activation_to_each_neighbour():
    tied = 256 * 64
    assert sent("pp", dp=2) == 0
    assert (3 * BSH + tied) * 2 == sent("pp", pp=2)
    middle = 8 * 2 * BSH  # stages in the middle send most
    assert sent("pp", pp=4, accumulation=8) == middle * 2
    assert (3 * BSH + tied) / 2 * 2 == sent("pp", pp=2, tp=2, sequence_parallel=True)


def test_ring_attention_sends_keys_and_values_in_forward_and_their_gradients_in_backward():
    elements = 3 * 4 * 3 * BSH / 8
    gradients = 2 * 4  # bytes, in fp32
    assert elements * (4 + 4 + gradients) == sent("cp", tp=2, cp=4)
    assert elements * (4 + 8 + gradients) == sent("cp", tp=2, cp=4, recompute="full")


# ---- bytes that a rank holds


def part_of(part, model, *sizes, **plan):
    plan = Plan(*sizes, **plan)
    parts = estimate.footprint(model, plan)
    return exactly(parts[part])


def test_zero3_works_on_the_parameters_of_two_units_and_the_gradients_of_three():
    embedding = 2 * 50257 * 1024 / 2  # bytes of the largest unit
    assert 5 * embedding == part_of("working", GPT2, 8, 2, technique="zero3")
    assert 2 * embedding == part_of("working", GPT2, 8, 2, technique="lora")


def test_full_recomputation_works_on_one_layer():
    layer = estimate.activations(GPT2, 1, flash=True) / 24
    assert layer == part_of("working", GPT2, recompute="full")


def test_1f1b_keeps_a_micro_batch_for_each_stage_below():
    kept = estimate.activations(GPT3, 1, flash=True) / 8
    assert kept == part_of("activations", GPT3, pp=8, accumulation=1)
    assert 4 * kept == part_of("activations", GPT3, pp=8, accumulation=4)
    assert 8 * kept == part_of("activations", GPT3, pp=8, accumulation=64)


def test_logits_count_only_if_the_last_stage_is_the_fullest():
    logits = 14 * 2048 * 51200
    assert logits == part_of("logits", GPT3, pp=8, accumulation=1)
    assert part_of("logits", GPT3, pp=8, accumulation=64) == 0


def test_context_parallelism_splits_tokens_and_optimizer_states():
    logits = 14 * 1024 * 50257
    activations = 24 * 34 * 1024 * 1024
    states = 12 * GPT2.parameters() / 8
    assert part_of("logits", GPT2, 2, cp=4) == logits / 4
    assert part_of("activations", GPT2, 2, cp=4, flash=False) == activations / 4
    assert states == part_of("optimizer", GPT2, 2, cp=4, technique="zero1")


@pytest.mark.parametrize("technique", estimate.STAGES)
def test_there_is_room_for_what_is_said_and_no_more(technique):
    micro_batch, sequence, millions = estimate.room(GPT2, technique, 8, 40e9)
    plan = Plan(8, technique=technique)
    for more in (0, 1):
        larger = estimate.gpt_of(1e6 * (millions + more), GPT2.sequence, GPT2.vocab)
        longer = replace(GPT2, sequence=sequence + more)
        wider = replace(plan, micro_batch=micro_batch + more)
        for model, its_plan in ((GPT2, wider), (longer, plan), (larger, plan)):
            parts = estimate.footprint(model, its_plan)
            assert (sum(parts.values()) > 0.94 * 40e9) == bool(more)


# ---- seconds


@pytest.mark.parametrize(
    ("model", "tokens", "gpus", "flops", "days"),
    [
        (
            estimate.gpt_of(175e9),
            300e9,
            1024,
            140e12,
            34,
        ),
        (ONE_T, 450e9, 3072, 163e12, 84),
    ],
    ids=["GPT-3", "1T"],
)
def test_days_are_those_of_narayanan(model, tokens, gpus, flops, days):
    seconds = estimate.training_time(model, tokens, gpus, flops, "full")
    assert round(seconds / 86400) == days


def test_operations_are_those_of_palm():
    psi = GPT3.parameters()
    lhs = GPT3.layers * GPT3.hidden * 2048
    assert estimate.training_time(GPT3, 8, 1, 1) == 8 * 6 * psi
    assert estimate.flops_per_token(GPT3) == 6 * psi + 12 * lhs
    assert estimate.flops_per_token(GPT3, "selective") == 6 * psi + 16 * lhs
    assert estimate.flops_per_token(GPT3, "full") == 8 * psi + 16 * lhs
    assert estimate.flops_per_token(GPT3, frozen=True) == 4 * psi + 12 * lhs


def test_the_last_step_may_be_smaller():
    assert estimate.steps(1000, 3, 64) == 47


def test_dilocos_costs_are_those_of_its_docstring():
    """8Ψ bytes held; 2Ψ(N-1)/N numbers sent every H steps, 1/P of them at once."""
    assert estimate.diloco_costs(3e9, 3, 100) == (24e9, 160e6, 16e9)
    assert estimate.diloco_costs(3e9, 3, 100, 4, "bf16") == (24e9, 80e6, 2e9)
    assert estimate.diloco_costs(256, 2, 1, compress="int8") == (2048, 260, 260)


def test_a_step_between_sites_waits_for_what_the_delay_does_not_hide():
    """A message of 8 s, or fragments of 4 s, every 10 steps of 1 s."""

    def time(step, sent_at_once, sync_every=10, **how):
        costs = (0, 100e6, sent_at_once)
        return estimate.time_between_sites(step, 125e6, costs, sync_every=sync_every, **how)

    assert time(1.0, 1e9) == 1 + 8 / 10
    assert time(1.0, 500e6, fragments=2, delay=1) == 1 + 2 * 3 / 10
    assert time(1.0, 500e6, fragments=2, delay=4) == 1
    assert time(0.5, 1e9, delay=9) == 0.5 + 3.5 / 10
    assert time(0.1, 1e9, 100, delay=99) == 0.8  # the network never rests


def times_of(plan):
    return estimate.step_times(GPT3, plan, Machine(8, 1e12, 1e12, 1e7, 1e8))


def test_offload_sends_32_bytes_a_parameter():
    seconds = times_of(Plan(2, technique="zero2+offload"))
    assert seconds["host"] == exactly(32 * GPT3.parameters() / 2 / 1e8)


GRID = Plan(2, 8, 2, "zero2", 1, 4, cp=2)


def test_only_tensor_parallel_ranks_share_a_node_and_a_bubble_is_pp_less_one_over_m():
    sent = estimate.traffic(GPT3, GRID)
    seconds = times_of(GRID)
    assert seconds["tp"] == sent["tp"] / 1e12
    assert seconds["cp"] == sent["cp"] / 1e7
    assert seconds["pp"] == sent["pp"] / 1e7
    busy = seconds["compute"] + seconds["tp"] + seconds["cp"]
    assert seconds["bubble"] == exactly(busy * (2 - 1) / 4)


@pytest.mark.parametrize(
    ("technique", "share"),
    [
        ("ddp", 1 / 6),
        ("zero2", 2 / 3),
        ("zero3", 1),
    ],
    ids=str,
)
def test_messages_hide_behind_their_share_of_the_computation(technique, share):
    plan = replace(GRID, technique=technique)
    seconds = times_of(plan)
    sending = estimate.traffic(GPT3, plan)["dp"] / 1e7
    assert seconds["dp"] == exactly(sending - seconds["compute"] * share)
    assert times_of(Plan(2))["dp"] == 0


def test_hybrid_sharding_holds_more_and_gathers_within_a_node():
    sharded = Plan(8, technique="zero3")
    hybrid = replace(sharded, copies=4)
    sent = estimate.traffic(SMALL, hybrid)
    seconds = estimate.step_times(SMALL, hybrid, Machine(2, 1e18, 1e12, 1e7))
    exposed = sent["dp"] / 1e12 + sent["copies"] / 1e7 - seconds["compute"]
    assert seconds["dp"] == exactly(exposed)
    states = estimate.states_of(SMALL, sharded)
    assert estimate.states_of(SMALL, hybrid) == [4 * size for size in states]


# ---- advice


def rank_of(plan):
    """First the fastest, then the simplest."""
    simplicity = TECHNIQUES.index(plan.technique)
    return plan.seconds, simplicity, plan.tp * plan.pp * plan.cp


def test_plans_fit_use_all_gpus_and_are_sorted():
    plans = estimate.advise(SEVEN_B, 8, 80e9)
    assert plans == sorted(plans, key=rank_of)
    for p in plans:
        assert p.memory <= 0.94 * 80e9
        assert p.dp * p.tp * p.pp * p.cp == 8
        assert estimate.global_batch(p.micro_batch, p.accumulation, p.dp) == 512


def best(*arguments, **options):
    return estimate.advise(*arguments, **options)[0]


def test_the_simplest_technique_that_fits_comes_first():
    assert best(GPT2, 8, 80e9).technique == "ddp"
    assert best(SEVEN_B, 8, 80e9).technique == "zero1"  # 16Ψ do not fit
    assert "offload" not in best(SEVEN_B, 16, 40e9, host=1e8).technique


def test_only_the_pipeline_crosses_a_slow_network():
    slow = best(SEVEN_B, 16, 40e9, inter=1e8)
    assert slow.tp * slow.dp * slow.cp <= 8


def test_a_long_sequence_is_split():
    long = replace(SEVEN_B, sequence=2**20)
    assert all(p.cp > 1 or p.tp > 8 for p in estimate.advise(long, 64, 80e9, batch=4))


def test_parameters_may_be_sharded_within_nodes_only():
    plans = estimate.advise(SMALL, 8, 80e9, gpus_per_node=4)
    assert {p.technique for p in plans if p.copies == 2} == {"zero3"}


def test_every_grid_is_tried_with_what_it_can_split():
    plans = estimate.advise(SMALL, 4, 80e9, batch=4)
    sizes = itertools.product((1, 2, 4), repeat=3)
    grids = {grid for grid in sizes if math.prod(grid) <= 4}
    assert {(p.tp, p.pp, p.cp) for p in plans} == grids
    techniques = {1: set(), 2: set(), 4: set()}  # by the number of replicas
    for plan in plans:
        techniques[plan.replicas].add(plan.technique)
    assert techniques[1] == {"ddp", "zero2+offload"}
    assert techniques[2] == set(TECHNIQUES)


def test_there_are_at_most_as_many_stages_as_layers():
    assert estimate.divisors(15, 4) == [1, 3]


def test_a_sequence_that_does_not_divide_is_not_split():
    odd = replace(SMALL, sequence=66)
    plans = estimate.advise(odd, 4, 80e9, batch=4)
    assert {plan.cp for plan in plans} == {1}
    assert {plan.tp for plan in plans if plan.sequence_parallel} == {2}


def test_lora_is_a_plan_if_nothing_else_fits_without_offload():
    plans = estimate.advise(SEVEN_B, 1, 24e9)
    assert {p.technique for p in plans} == {"zero2+offload", "lora", "qlora"}
    assert plans[0].technique == "qlora"  # lora must recompute, offload computes gradients too


def test_lora_is_no_plan_if_all_parameters_can_be_trained():
    plans = estimate.advise(SEVEN_B, 8, 24e9)
    assert {p.technique for p in plans} <= set(TECHNIQUES)


def test_lora_is_tried_without_tensor_or_pipeline_parallelism():
    plans = estimate.advise(GPT3, 16, 80e9)
    assert {(p.tp, p.pp) for p in plans if "lora" in p.technique} == {(1, 1)}


def test_savings_are_differences_and_lines_that_are_kept_add_up():
    rows = estimate.savings(SEVEN_B, 8, 64)
    held = rows[0][2]
    for rule, saves, then in rows[1:]:
        assert saves == held - then
        if rule.keeps:
            held = then
    gigabytes = [3825.17, 2162.73, 788.34, 122.57, 49.07, 36.82, 24.57, 26.63, 18.32, 4.87, 3.61]
    gigabytes += [14.89, 18.95, 16.34]
    assert [round(then / 1e9, 2) for _, _, then in rows] == gigabytes


def test_savings_leave_out_what_changes_nothing():
    names = [rule.technique for rule, _, _ in estimate.savings(SEVEN_B, 8, 64)]
    assert names[-3:] == ["tensor parallel, 8", "pipeline parallel, 8", "context parallel, 8"]
    experts = replace(SEVEN_B, experts=8, top_k=2)
    rule, saves, _ = estimate.savings(experts, 8, 64)[-1]
    assert rule.technique == "expert parallel, 8"
    assert saves > 1e9


# ---- the command


@pytest.fixture
def run(monkeypatch, capsys):
    def run(arguments=""):
        monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments.split()])
        return f"{estimate.main()} {capsys.readouterr().out}"

    return run


def test_the_page_of_the_demos_compares_with_what_they_measured(run):
    page = run()
    assert page.startswith("0 estimate · 2 ranks · 1.9M parameters · 4 layers of 192, ")
    assert "params 7.5 MB   grads 7.5 MB   optimizer 15.0 MB" in page
    assert "(ddp measured 7.5 / 7.5 / 15.0)" in page
    assert "\nvs measured within 1%: " in page


def test_a_wrong_estimate_fails(run, monkeypatch):
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    page = run()
    assert page.startswith("1 ")
    assert "\nvs measured NOT within 1%: 25.0" in page


def test_under_torchrun_only_the_first_rank_prints(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run() == "0 "


def test_the_page_has_the_sum_of_the_states_and_the_days(run):
    page = run("--parameters 7e9 --gpus 8 --memory 80")
    for row in ("zero1 .* 38.50 GB", "zero2 .* 26.25 GB", "zero3 .* 14.00 GB"):
        assert re.search(rf"\n{row} ", page)
    assert re.search(r"\n8 × 1 × 1 × 1 +zero1 .* compute 100%\n", page)
    assert "\n300e9 tokens take 6ΨT/(nX) = 130.2 days, or 8ΨT/(nX) = 173.6 days" in page
    ddp = r"\nddp in bf16 +0.0 MB +14.00 GB +14.00 GB +154 s\n"  # 14e9 bytes at 125e6 a second
    assert re.search(ddp, page)
    assert re.search(r"\ndiloco, H = 100 +56.00 GB +280.0 MB +28.00 GB +\d", page)


def test_the_page_explains_every_column(run):
    page = run("--parameters 7e9 --gpus 8 --memory 80")
    _, *tables, _, legend = page.split("\n\n")
    legend += " if"
    for table in tables:
        header, _, _ = table.partition("\n")
        titles = re.split(r":? {2,}", header)
        assert [title for title in titles[1:] if title not in legend] == []


def test_the_page_says_that_no_plan_fits(run):
    assert "No plan fits" in run("--parameters 7e9 --gpus 1 --memory 4")


def test_json_has_what_the_page_has(run):
    flags = "--model gpt3-175b --gpus 1024 --tokens 300e9 --flops-per-gpu 70e12 --json"
    answer = json.loads(run(flags)[2:])
    parts = answer["techniques"]["zero3"]["parts"]
    assert parts["parameters"] == answer["parameters"] * 2 / 1024
    assert round(answer["days"][1]) == 68
    assert answer["plans"][0]["bound"] == "compute"


# ---- wrong use


@pytest.mark.parametrize(
    ("parameters", "ranks", "technique", "word"),
    [
        (7e9, 8, "zero4", "technique='zero4'"),
        (7e9, 8, "lora", "technique='lora'"),
        (7e9, 0, "ddp", "ranks=0"),
        (0, 8, "ddp", "parameters=0"),
    ],
)
def test_a_wrong_argument_of_model_states_is_named(parameters, ranks, technique, word):
    with pytest.raises(ValueError, match=word):
        estimate.model_states(parameters, ranks, technique)


def test_heads_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="tp=5 must divide 96 heads"):
        estimate.activations(GPT3, 1, 5)
    with pytest.raises(ValueError, match="a multiple of the heads"):
        GPT(2, 100, 3, 10, 10)


def test_an_unknown_recomputation_is_an_error():
    with pytest.raises(ValueError, match="recompute='some'"):
        estimate.activations(GPT3, 1, recompute="some")


def test_more_active_experts_than_experts_are_an_error():
    with pytest.raises(ValueError, match="top_k"):
        GPT(2, 96, 3, 10, 10, experts=2, top_k=3)


def test_memory_is_in_bytes():
    with pytest.raises(ValueError, match="80e9 for 80 GB"):
        estimate.advise(GPT3, 8, 80)


@pytest.mark.parametrize("flags", ["--memory nan", "--top-k 2", "--gpus many"])
def test_a_wrong_command_is_an_error_in_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["estimate.py", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(estimate.main())
    assert re.fullmatch("error: .*\n", capsys.readouterr().err)
