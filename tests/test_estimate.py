"""estimate.py: the papers' numbers, numbers measured here, and the printed page."""

import json
import re
import sys
from dataclasses import replace

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


ZEROS_TABLE_1 = {  # GB for 1T parameters on so many GPUs, by stage
    1: (16000, 16000, 16000),
    4: (7000, 5500, 4000),
    64: (4187, 2218, 250),
    1024: (4011, 2013, 15.6),
}


def test_model_states_are_those_published():
    for ranks, gigabytes in ZEROS_TABLE_1.items():
        ours = [sum(estimate.model_states(1e12, ranks, f"zero{n}")) / 1e9 for n in (1, 2, 3)]
        assert ours == pytest.approx(gigabytes, rel=0.003)
    sums = [sum(estimate.model_states(7e9, 8, technique)) / 1e9 for technique in TECHNIQUES]
    assert sums == [112, 38.5, 26.25, 14, 14, 1.75]
    assert estimate.model_states(7e9, 8, "zero2") == (14e9, 1.75e9, 10.5e9)
    assert estimate.model_states(7e9, 8, "zero2", mixed=False) == (28e9, 3.5e9, 7e9)


def test_parameters_are_those_published():
    assert (GPT2.parameters(), GPT3.parameters()) == (354_823_168, 174_615_846_912)
    first_stage = (50257 + 1024) * 1024 + 12 * (12 * 1024**2 + 13 * 1024)
    assert GPT2.parameters(pp=2) == first_stage  # the last norm is on the last stage
    assert (SEVEN_B.layers, SEVEN_B.hidden, SEVEN_B.parameters()) == (32, 4096, 7e9)
    assert estimate.gpt_of(175e9).layers == 96


def test_experts_multiply_the_mlps_and_expert_parallelism_divides_them():
    """Each block has E MLPs of 8h² + 5h and a router of hE, of which top_k MLPs are active."""
    h, layers = SMALL.hidden, SMALL.layers
    mlps = layers * (8 * h**2 + 5 * h)
    moe = replace(SMALL, experts=8, top_k=2)
    here = moe.parameters(ep=4)
    assert moe.parameters() == SMALL.parameters() + 7 * mlps + layers * h * 8
    assert moe.active_parameters() == SMALL.parameters() + mlps + layers * h * 2
    assert here == moe.parameters() - 6 * mlps
    states = [estimate.states_of(moe, Plan(8, technique=f"zero{n}", ep=4)) for n in (1, 3)]
    split = moe.parameters() / 8
    assert states == [[2 * here, 2 * here, 12 * split], [2 * split, 2 * split, 12 * split]]
    assert estimate.activations(moe, 1) - estimate.activations(SMALL, 1) == layers * 16 * 64 * h


def test_lora_trains_r_times_d_plus_k_and_qlora_freezes_in_4127_bits():
    h, layers, psi = GPT3.hidden, GPT3.layers, GPT3.parameters()
    trained = 8 * layers * ((h + 3 * h) + (h + h) + (h + 4 * h) + (4 * h + h))
    assert estimate.lora_states(GPT3) == (2 * (psi + trained), 2 * trained, 12 * trained)
    in_4_bits = 8 * estimate.lora_states(GPT3, 8, quantize=True)[0]
    assert in_4_bits == pytest.approx(2 * (psi + trained) - (16 - 4.127) / 8 * 12 * layers * h * h)
    experts = replace(SMALL, experts=4, top_k=1)
    assert estimate.lora_states(experts)[1] == 2 * 8 * 4 * 64 * (6 + 4 * 10)


def test_days_and_operations_are_those_of_narayanan_and_palm():
    runs = [(estimate.gpt_of(175e9), 300e9, 1024, 140e12), (ONE_T, 450e9, 3072, 163e12)]
    seconds = [estimate.training_time(*run, recompute="full") for run in runs]
    assert [round(each / 86400) for each in seconds] == [34, 84]
    psi = GPT3.parameters()
    assert estimate.training_time(GPT3, 8, 1, 1) == 8 * 6 * psi
    assert estimate.steps(1000, 3, 64) == 47
    lhs = GPT3.layers * GPT3.hidden * 2048
    flops = [estimate.flops_per_token(GPT3, again) for again in ("none", "selective", "full")]
    assert flops == [6 * psi + 12 * lhs, 6 * psi + 16 * lhs, 8 * psi + 16 * lhs]
    assert estimate.flops_per_token(GPT3, frozen=True) == 4 * psi + 12 * lhs


@pytest.mark.parametrize("t", [1, 8])
def test_activations_are_those_of_korthikantis_table_2(t):
    s, b, h, a = 2048, 3, 12288, 96
    sbh = s * b * h
    scores = 5 * a * s / h
    per_layer = {
        sbh * (10 + 24 / t + scores / t): {},
        sbh / t * (34 + scores): {"sequence_parallel": True},
        sbh * (10 + 24 / t): {"recompute": "selective"},
        34 * sbh / t: {"sequence_parallel": True, "flash": True},
        2 * sbh: {"sequence_parallel": True, "recompute": "full"},
    }
    for expected, how in per_layer.items():
        assert estimate.activations(GPT3, b, t, **how) / 96 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", estimate.MEASURED)
@pool.on(2)
def test_what_is_stated_as_measured_is(name):
    """Bytes of parameters, gradients and optimizer state, and bytes sent per step."""
    model = ddp.language_model()
    group = pool.group()
    batch = torch.randint(256, (1, 9))
    if name == "ddp":
        model = ddp.DDP(model, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True)
    if name == "fsdp":
        for layer in (*model, model):
            fsdp.fully_shard(layer, process_group=group)
    is_zero = name.startswith("Zero")
    if is_zero:
        optimizer = getattr(zero, name)(model, torch.optim.AdamW, group, bucket_cap_mb=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with ddp.SentBytes() as sent:
            ddp.language_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            held = zero.held_by(optimizer) if is_zero else None
            optimizer.step()
    held = held or ddp.held(model.parameters(), optimizer)
    assert (*held, sent.total) == estimate.MEASURED[name]


GRIDS = [(1, 1, ""), (2, 1, ""), (4, 1, "--sequence-parallel"), (1, 2, ""), (1, 4, "")]
GRIDS += [(2, 2, "--sequence-parallel")]


@pytest.mark.parametrize(("tp", "pp", "flags"), GRIDS)
@pool.on(4)
def test_parallel_3d_has_what_is_estimated(tp, pp, flags):
    """Parameters, the global batch, and activations within 3%, the most on any rank."""
    split = bool(flags)
    args = options(f"--sequence-length 64 {flags}", "float32")
    trainer = parallel_3d.Trainer(SMALL, parallel_3d.Grid(tp, pp), args)
    blocks = [layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        x = torch.randn(64 // (tp if split else 1), 1, 64, requires_grad=True)
        torch.nn.Sequential(*blocks)(x)
    kept = ddp.held_bytes([*saved, *trainer.parameters]) - ddp.held_bytes(trainer.parameters)
    expected = estimate.activations(SMALL, 1, tp, split, "none", True, 4, False) / pp
    assert kept == pytest.approx(expected, rel=0.03)
    numels = [None] * 4
    torch.distributed.all_gather_object(numels, sum(map(torch.numel, trainer.parameters)))
    assert max(numels) == SMALL.parameters(tp, pp)
    assert estimate.global_batch(2, trainer.num_microbatches, 4 // tp // pp) == 8


PSI = SMALL.parameters()
BSH = 64 * 64  # elements of an activation of one sequence
LOSS = 6 * 64 * 4  # bytes: 3 numbers of 4 bytes for each token, reduced
TRAFFIC = [  # axis, plan with three micro-batches, bytes that a rank sends per step
    ("dp", {"dp": 2, "technique": "zero1"}, 2 * PSI),
    ("dp", {"dp": 2, "technique": "zero2"}, (3 + 1) * PSI),
    ("dp", {"dp": 2, "technique": "zero3"}, 3 * 3 * PSI),
    ("dp", {"dp": 8, "technique": "zero3", "copies": 4}, 3 * 3 * PSI),
    ("copies", {"dp": 8, "technique": "zero3", "copies": 4}, 3 * 2 * PSI / 2 * 2 * 3 / 4),
    ("dp", {"dp": 4, "technique": "lora"}, 2 * 3 * PSI * 2 * 3 / 4),
    ("dp", {"dp": 2, "tp": 2}, 2 * SMALL.parameters(tp=2)),
    ("tp", {"tp": 2}, 3 * ((8 * 4 + 2 * 2) * BSH * 2 + LOSS) / 2),
    ("tp", {"tp": 2, "recompute": "full"}, 3 * ((12 * 4 + 2 * 2) * BSH * 2 + LOSS) / 2),
    (  # it gathers inputs again, and sums the gradients of norms and biases
        "tp",
        {"tp": 2, "sequence_parallel": True},
        3 * (((10 * 4 + 3 * 2) * BSH + (12 * 4 + 4) * 64) * 2 + LOSS) / 2,
    ),
    ("pp", {"dp": 2}, 0),
    ("pp", {"pp": 2}, (3 * BSH + 256 * 64) * 2),
    ("pp", {"pp": 4, "accumulation": 8}, 8 * 2 * BSH * 2),  # stages in the middle send most
    ("pp", {"pp": 2, "tp": 2, "sequence_parallel": True}, (3 * BSH + 256 * 64) / 2 * 2),
    ("cp", {"tp": 2, "cp": 4}, 3 * 4 * 3 * BSH / 8 * (2 * 2 + 2 * 2 + 2 * 4)),
    ("cp", {"tp": 2, "cp": 4, "recompute": "full"}, 3 * 4 * 3 * BSH / 8 * (2 * 6 + 2 * 4)),
]


@pytest.mark.parametrize(("axis", "plan", "expected"), TRAFFIC)
def test_traffic_is_its_formula(axis, plan, expected):
    plan = Plan(**{"accumulation": 3, **plan})
    assert estimate.traffic(SMALL, plan)[axis] == pytest.approx(expected, rel=1e-12)


EMBEDDING = 50257 * 1024 / 2  # the largest unit of GPT2 if tp is 2
KEPT = estimate.activations(GPT3, 1, flash=True) / 8  # by a stage of 8, of a micro-batch
AGAIN = estimate.activations(GPT2, 1, flash=True) / 24  # by the layer that is computed again
MEMORY = [  # model, plan, part, bytes
    (GPT2, Plan(8, 2, technique="zero3"), "working", 5 * 2 * EMBEDDING),
    (GPT2, Plan(8, 2, technique="lora"), "working", 2 * 2 * EMBEDDING),
    (GPT2, Plan(recompute="full"), "working", AGAIN),
    (GPT3, Plan(pp=8, accumulation=1), "activations", KEPT),
    (GPT3, Plan(pp=8, accumulation=4), "activations", 4 * KEPT),
    (GPT3, Plan(pp=8, accumulation=64), "activations", 8 * KEPT),
    (GPT3, Plan(pp=8, accumulation=1), "logits", 14 * 2048 * 51200),
    (GPT3, Plan(pp=8, accumulation=64), "logits", 0),  # the first stage is fuller than the last
    (GPT2, Plan(2, cp=4, flash=False), "logits", 14 * 1024 * 50257 / 4),
    (GPT2, Plan(2, cp=4, flash=False), "activations", 24 * 34 * 1024 * 1024 / 4),
    (GPT2, Plan(2, cp=4, technique="zero1"), "optimizer", 12 * GPT2.parameters() / 8),
]


@pytest.mark.parametrize(("model", "plan", "part", "expected"), MEMORY)
def test_memory_is_its_formula(model, plan, part, expected):
    assert estimate.footprint(model, plan)[part] == pytest.approx(expected, rel=1e-12)


def test_dilocos_costs_are_those_of_its_docstring():
    """8Ψ bytes held; 2Ψ(N-1)/N numbers sent every H steps, 1/P of them at once."""
    assert estimate.diloco_costs(3e9, 3, 100) == (24e9, 160e6, 16e9)
    assert estimate.diloco_costs(3e9, 3, 100, 4, "bf16") == (24e9, 80e6, 2e9)
    assert estimate.diloco_costs(256, 2, 1, compress="int8") == (2048, 260, 260)


def test_a_step_between_sites_waits_for_what_the_delay_does_not_hide():
    """A message of 8 s, or fragments of 4 s, every 10 steps of 1 s."""
    time = estimate.time_between_sites
    whole = (0, 100e6, 1e9)
    halves = (0, 100e6, 500e6)
    assert time(1.0, 125e6, whole, sync_every=10) == 1 + 8 / 10
    assert time(1.0, 125e6, halves, sync_every=10, fragments=2, delay=1) == 1 + 2 * 3 / 10
    assert time(1.0, 125e6, halves, sync_every=10, fragments=2, delay=4) == 1
    assert time(0.5, 125e6, whole, sync_every=10, delay=9) == 0.5 + 3.5 / 10
    assert time(0.1, 125e6, whole, sync_every=100, delay=99) == 0.8  # the network never rests


def test_what_wires_and_the_host_cost():
    """32 bytes a parameter to the host; a bubble of (p-1)/m; dp hides behind backward."""

    def times(plan):
        return estimate.step_times(GPT3, plan, Machine(8, 1e12, 1e12, 1e7, 1e8))

    offload = times(Plan(2, technique="zero2+offload"))
    assert offload["host"] == pytest.approx(32 * GPT3.parameters() / 2 / 1e8)
    assert times(Plan(2))["dp"] == 0
    plan = Plan(2, 8, 2, "zero2", 1, 4, cp=2)
    sent = estimate.traffic(GPT3, plan)
    seconds = times(plan)
    assert seconds["tp"] == sent["tp"] / 1e12
    assert (seconds["cp"], seconds["pp"]) == (sent["cp"] / 1e7, sent["pp"] / 1e7)  # between nodes
    busy = seconds["compute"] + seconds["tp"] + seconds["cp"]
    assert seconds["bubble"] == pytest.approx(busy * (2 - 1) / 4)
    for technique, hidden in (("ddp", 1 / 6), ("zero2", 2 / 3), ("zero3", 1)):
        plan = replace(plan, technique=technique)
        sent = estimate.traffic(GPT3, plan)["dp"] / 1e7
        assert times(plan)["dp"] == pytest.approx(sent - seconds["compute"] * hidden)


def test_hybrid_sharding_holds_more_and_gathers_within_a_node():
    machine = Machine(2, 1e18, 1e12, 1e7)
    sharded = Plan(8, technique="zero3")
    hybrid = replace(sharded, copies=4)

    sent = estimate.traffic(SMALL, hybrid)
    seconds = estimate.step_times(SMALL, hybrid, machine)
    states = [sum(estimate.states_of(SMALL, plan)) for plan in (sharded, hybrid)]

    assert states[1] == 4 * states[0]
    exposed = sent["dp"] / 1e12 + sent["copies"] / 1e7 - seconds["compute"]
    assert seconds["dp"] == pytest.approx(exposed)
    plans = estimate.advise(SMALL, 8, 80e9, gpus_per_node=4)
    assert any(plan.copies == 2 and plan.technique == "zero3" for plan in plans)


def test_plans_fit_use_all_gpus_and_are_sorted():
    plans = estimate.advise(SEVEN_B, 8, 80e9)
    order = [(p.seconds, TECHNIQUES.index(p.technique), p.tp * p.pp * p.cp) for p in plans]
    assert order == sorted(order)
    assert all(p.memory <= 0.94 * 80e9 and p.dp * p.tp * p.pp * p.cp == 8 for p in plans)
    assert {estimate.global_batch(p.micro_batch, p.accumulation, p.dp) for p in plans} == {512}
    assert plans[0].technique == "zero1"  # 16Ψ do not fit
    assert estimate.advise(GPT2, 8, 80e9)[0].technique == "ddp"
    assert "offload" not in estimate.advise(SEVEN_B, 16, 40e9, host=1e8)[0].technique
    slow = estimate.advise(SEVEN_B, 16, 40e9, inter=1e8)[0]
    assert slow.tp * slow.dp * slow.cp <= 8  # only the pipeline crosses the slow network
    long = estimate.advise(replace(SEVEN_B, sequence=2**20), 64, 80e9, batch=4)
    assert {p.cp > 1 or p.tp > 8 for p in long} == {True}


def test_every_grid_is_tried_with_what_it_can_split():
    plans = estimate.advise(SMALL, 4, 80e9, batch=4)
    grids = {(t, p, c) for t in (1, 2, 4) for p in (1, 2, 4) for c in (1, 2, 4) if t * p * c < 5}
    assert {(p.tp, p.pp, p.cp) for p in plans} == grids
    assert {p.technique for p in plans if p.dp * p.cp == 1} == {"ddp", "zero2+offload"}
    assert {p.technique for p in plans if p.dp * p.cp == 2} == set(TECHNIQUES)
    assert estimate.divisors(15, 4) == [1, 3]  # 5 stages are too many for 4 layers
    odd = estimate.advise(replace(SMALL, sequence=66), 4, 80e9, batch=4)
    assert {(p.cp, p.tp, p.sequence_parallel) for p in odd} == {(1, 1, 0), (1, 2, 1), (1, 4, 0)}


def test_lora_is_a_plan_if_nothing_else_fits_without_offload():
    plans = estimate.advise(SEVEN_B, 1, 24e9)
    assert {p.technique for p in plans} == {"zero2+offload", "lora", "qlora"}
    assert plans[0].technique == "qlora"  # lora must recompute, offload computes gradients too
    assert not any("lora" in p.technique for p in estimate.advise(SEVEN_B, 8, 24e9))
    both = [p for p in estimate.advise(GPT3, 16, 80e9) if "lora" in p.technique]
    assert {(p.tp, p.pp) for p in both} == {(1, 1)}


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
    names = "ddp in fp32, micro-batch 64; 16 bits, fp32 masters; flash attention; "
    names += "micro-batch 1, accumulated; zero1; zero2; zero2+offload; zero3, FSDP; "
    names += "full recomputation; LoRA, r = 8; QLoRA, r = 8; "
    names += "tensor parallel, 8; pipeline parallel, 8; context parallel, 8"
    assert "; ".join(rule.technique for rule, _, _ in rows) == names
    assert "".join("-+"[rule.keeps] for rule, _, _ in rows) == "++++++-++-----"
    moe = estimate.savings(replace(SEVEN_B, experts=8, top_k=2), 8, 64)
    assert moe[-1][0].technique == "expert parallel, 8"
    assert moe[-1][1] > 1e9
    assert estimate.savings(SEVEN_B, 64, 8)[-3][0].technique == "tensor parallel, 8"


@pytest.mark.parametrize("technique", estimate.STAGES)
def test_there_is_room_for_what_is_said_and_no_more(technique):
    micro_batch, sequence, millions = estimate.room(GPT2, technique, 8, 40e9)
    plan = Plan(8, technique=technique)
    for more in (0, 1):
        larger = estimate.gpt_of(1e6 * (millions + more), GPT2.sequence, GPT2.vocab)
        held = [
            estimate.footprint(GPT2, replace(plan, micro_batch=micro_batch + more)),
            estimate.footprint(replace(GPT2, sequence=sequence + more), plan),
            estimate.footprint(larger, plan),
        ]
        assert [sum(parts.values()) > 0.94 * 40e9 for parts in held] == [more] * 3


@pytest.fixture
def run(monkeypatch, capsys):
    def run(arguments=""):
        monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments.split()])
        return f"{estimate.main()} {capsys.readouterr().out}"

    return run


def test_the_page_of_the_demos_compares_with_what_they_measured(run, monkeypatch):
    page = run()
    assert page.startswith("0 estimate · 2 ranks · 1.9M parameters · 4 layers of 192, ")
    held = "params 7.5 MB   grads 7.5 MB   optimizer 15.0 MB      (ddp measured 7.5 / 7.5 / 15.0)"
    assert f"\nheld/rank   {held}\n" in page
    assert "\nvs measured within 1%: " in page
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    wrong = r"(?s)1 .* 11.3 MB per step      \(measured 15.0\)\nvs measured NOT within 1%: 25.0"
    assert re.match(wrong, run())
    monkeypatch.setenv("RANK", "1")  # under torchrun only the first rank prints
    assert run() == "0 "


def test_the_page_has_the_sum_of_the_states_and_explains_every_column(run):
    page = run("--parameters 7e9 --gpus 8 --memory 80")
    for row in ("zero1 .* 38.50 GB", "zero2 .* 26.25 GB", "zero3 .* 14.00 GB"):
        assert re.search(rf"\n{row} ", page)
    assert re.search(r"\n8 × 1 × 1 × 1 +zero1 .* compute 100%\n", page)
    assert "\n300e9 tokens take 6ΨT/(nX) = 130.2 days, or 8ΨT/(nX) = 173.6 days" in page
    _, *tables, _, legend = page.split("\n\n")
    for table in tables:
        titles = re.split(r":? {2,}", table.partition("\n")[0])
        assert [title for title in titles[1:] if title != "if" and title not in legend] == []
    ddp = r"\nddp in bf16 +0.0 MB +14.00 GB +14.00 GB +154 s\n"  # 14e9 bytes at 125e6 a second
    assert re.search(ddp, page)
    assert re.search(r"\ndiloco, H = 100 +56.00 GB +280.0 MB +28.00 GB +\d", page)
    assert "No plan fits" in run("--parameters 7e9 --gpus 1 --memory 4")


def test_json_has_what_the_page_has(run):
    flags = "--model gpt3-175b --gpus 1024 --tokens 300e9 --flops-per-gpu 70e12 --json"
    answer = json.loads(run(flags)[2:])
    parts = answer["techniques"]["zero3"]["parts"]
    assert parts["parameters"] == answer["parameters"] * 2 / 1024
    assert (round(answer["days"][1]), answer["plans"][0]["bound"]) == (68, "compute")


WRONG = [  # call, arguments, words of the error
    (estimate.model_states, (7e9, 8, "zero4"), "ranks=8 must be .* technique='zero4' one of"),
    (estimate.model_states, (7e9, 8, "lora"), "technique='lora' one of"),
    (estimate.model_states, (7e9, 0, "ddp"), "ranks=0 must be positive"),
    (estimate.model_states, (0, 8, "ddp"), "parameters=0 and ranks=8 must be positive"),
    (estimate.activations, (GPT3, 1, 5), "tp=5 must divide 96 heads"),
    (estimate.activations, (GPT3, 1, 1, False, "some"), "recompute='some'"),
    (GPT, (2, 100, 3, 10, 10), "a multiple of the heads"),
    (GPT, (2, 96, 3, 10, 10, None, 2, 3), "top_k at most the number of experts"),
    (estimate.advise, (GPT3, 8, 80), "memory=80 in bytes: 80e9 for 80 GB"),
]


@pytest.mark.parametrize(("call", "arguments", "words"), WRONG)
def test_a_wrong_call_is_a_value_error_with_the_numbers(call, arguments, words):
    with pytest.raises(ValueError, match=words):
        call(*arguments)


@pytest.mark.parametrize("flags", ["--memory nan", "--top-k 2", "--gpus many"])
def test_a_wrong_command_is_an_error_in_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["estimate.py", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(estimate.main())
    assert re.fullmatch("error: .*\n", capsys.readouterr().err)


@pytest.mark.cpu
def test_muon_holds_and_sends_what_is_estimated():
    """6Ψ(N-1)/N bytes in fp32, and 4Ψ/N of them over shards. The rank that counts has its share."""
    shapes = [(8, 8)] * 8
    psi = 8 * 8 * 8
    sent, elements = step_of_a_fake_rank(4, 1, shapes)
    assert estimate.muon_costs(psi, 4) == (4 * elements, sent.bytes)
    assert estimate.muon_costs(psi, 4, sharded=True) == (psi, 4 * psi / 4 * 3 / 4)
