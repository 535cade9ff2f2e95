"""estimate.py: the papers' numbers, numbers measured here, and the printed page."""

import json
import re
import sys
from dataclasses import fields, replace

import pool
import pytest
import torch
from test_parallel_3d import options

import ddp
import estimate
import fsdp
import parallel_3d
import zero
from estimate import GPT, MODELS, TECHNIQUES, Machine, Plan

GPT2, GPT3 = MODELS.values()
MT_NLG = GPT(105, 20480, 128, 51200, 2048)
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
    sizes = {(12, 768, 12): 124_439_808, (24, 1024, 16): 354_823_168, (48, 1600, 25): 1_557_611_200}
    for shape, parameters in sizes.items():
        assert GPT(*shape, 50257, 1024).parameters() == parameters
    assert (GPT2.parameters(), GPT3.parameters()) == (354_823_168, 174_615_846_912)
    first_stage = (50257 + 1024) * 1024 + 12 * (12 * 1024**2 + 13 * 1024)
    assert GPT2.parameters(pp=2) == first_stage  # the last norm is on the last stage
    assert (SEVEN_B.layers, SEVEN_B.hidden, SEVEN_B.parameters()) == (32, 4096, 7e9)


def test_experts_multiply_the_mlps_and_expert_parallelism_divides_them():
    """Each block has E MLPs of 8h² + 5h and a router of hE, of which top_k MLPs are active."""
    h, layers = SMALL.hidden, SMALL.layers
    mlps = layers * (8 * h**2 + 5 * h)
    moe = replace(SMALL, experts=8, top_k=2)
    assert moe.parameters() == SMALL.parameters() + 7 * mlps + layers * h * 8
    assert moe.active_parameters() == SMALL.parameters() + mlps + layers * h * 2
    assert moe.parameters(ep=4) == moe.parameters() - 6 * mlps
    here = moe.parameters(ep=4)
    ddp, zero1, zero3 = (
        sum(estimate.states_of(moe, Plan(8, technique=name, ep=4)))
        for name in ("ddp", "zero1", "zero3")
    )
    assert (ddp, zero3) == (16 * here, 16 * moe.parameters() / 8)
    assert zero1 == 4 * here + 12 * moe.parameters() / 8
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
        34 * sbh / t: {"sequence_parallel": True, "recompute": "selective"},
        2 * sbh: {"sequence_parallel": True, "recompute": "full"},
    }
    for expected, how in per_layer.items():
        assert estimate.activations(GPT3, b, t, **how) / 96 == pytest.approx(expected, rel=1e-12)
    flash = estimate.activations(GPT3, b, t, flash=True)
    assert flash == estimate.activations(GPT3, b, t, recompute="selective")


def test_80_gb_suffice_without_scores_and_with_a_split_sequence_only():
    """Korthikanti et al., figure 1."""
    gpt_22b = GPT(48, 6144, 64, 51200, 2048)
    for model, micro_batch, pp in ((gpt_22b, 4, 1), (GPT3, 1, 8), (MT_NLG, 1, 35), (ONE_T, 1, 64)):
        plan = Plan(tp=8, pp=pp, micro_batch=micro_batch, accumulation=pp, flash=False)
        smaller = replace(plan, flash=True, sequence_parallel=True)
        assert sum(estimate.footprint(model, plan).values()) > 80e9
        assert sum(estimate.footprint(model, smaller).values()) < 80e9


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
def test_parallel_3d_holds_keeps_and_sends_what_is_estimated(tp, pp, flags):
    """Bytes within 3%, the most on any rank. Only data-parallel ranks multiply the batch."""
    dp = 4 // tp // pp
    split = bool(flags)
    args = options(f"--sequence-length 64 --dropout 0 {flags}", "float32")
    args.warmup = 0
    tokens = torch.randint(256, (8, 64))
    grid = parallel_3d.Grid(tp, pp)
    trainer = parallel_3d.Trainer(SMALL, grid, args)
    blocks = [layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        x = torch.randn(64 // (tp if split else 1), 1, 64, requires_grad=True)
        torch.nn.Sequential(*blocks)(x)
    with parallel_3d.SentByAxis(trainer.grid) as sent:
        trainer.step(tokens, tokens)
    kept = ddp.held_bytes([*saved, *trainer.parameters]) - ddp.held_bytes(trainer.parameters)
    by_axis = [sent.by_axis[axis] for axis in ("tp", "pp", "dp")]
    mine = (*ddp.held(trainer.parameters, trainer.optimizer), kept, *by_axis)
    ranks = [None] * 4
    torch.distributed.all_gather_object(ranks, mine)
    most = [max(column) for column in zip(*ranks, strict=True)]

    plan = Plan(dp, tp, pp, "ddp", 2, 4 // dp, sequence_parallel=split, element=4)
    states = estimate.model_states(SMALL.parameters(tp, pp), 1, "ddp", mixed=False)
    kept = estimate.activations(SMALL, 1, tp, split, "none", True, 4, False) / pp
    expected = estimate.traffic(SMALL, plan)
    assert most[:3] == pytest.approx(states, rel=0.03)
    assert most[3] == pytest.approx(kept, rel=0.03)
    assert most[4:] == pytest.approx([expected[x] for x in ("tp", "pp", "dp")], rel=0.03, abs=600)
    assert trainer.num_microbatches == plan.accumulation
    assert estimate.global_batch(2, plan.accumulation, dp) == 8


def test_plans_fit_use_all_gpus_and_are_sorted():
    plans = estimate.advise(SEVEN_B, 8, 80e9)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert all(p.memory <= 0.94 * 80e9 and p.dp * p.tp * p.pp * p.cp == 8 for p in plans)
    assert {estimate.global_batch(p.micro_batch, p.accumulation, p.dp) for p in plans} == {512}
    assert plans[0].technique == "zero1"  # 16Ψ do not fit
    assert estimate.advise(GPT2, 8, 80e9)[0].technique == "ddp"
    assert "offload" not in estimate.advise(SEVEN_B, 16, 40e9, host=1e8)[0].technique
    slow = estimate.advise(SEVEN_B, 16, 40e9, inter=1e8)[0]
    assert slow.tp * slow.dp * slow.cp <= 8  # only the pipeline crosses the slow network


def test_every_grid_is_tried_with_what_it_can_split():
    plans = estimate.advise(SMALL, 4, 80e9, batch=4)
    grids = {(t, p, c) for t in (1, 2, 4) for p in (1, 2, 4) for c in (1, 2, 4) if t * p * c < 5}
    assert {(p.tp, p.pp, p.cp) for p in plans} == grids
    assert {p.technique for p in plans if p.dp * p.cp == 1} == {"ddp", "zero2+offload"}
    assert {p.technique for p in plans if p.dp * p.cp == 2} == set(TECHNIQUES)
    odd = estimate.advise(replace(SMALL, sequence=66), 4, 80e9, batch=4)
    assert {(p.cp, p.tp, p.sequence_parallel) for p in odd} == {(1, 1, 0), (1, 2, 1), (1, 4, 0)}


def test_lora_is_a_plan_if_nothing_else_fits_without_offload():
    """7B on one card of 24 GB; on eight the adapters are on all, the frozen weights split."""
    plans = estimate.advise(SEVEN_B, 1, 24e9)
    assert {p.technique for p in plans} == {"zero2+offload", "lora", "qlora"}
    assert plans[0].technique == "qlora"  # lora must recompute, offload computes gradients too
    assert not any("lora" in p.technique for p in estimate.advise(SEVEN_B, 8, 24e9))
    both = [p for p in estimate.advise(GPT3, 16, 80e9) if "lora" in p.technique]
    assert {(p.tp, p.pp) for p in both} == {(1, 1)}
    plan = Plan(4, technique="lora", accumulation=3)
    assert estimate.traffic(SMALL, plan)["dp"] == 2 * 3 * 2 * SMALL.parameters() * 3 / 4


def test_context_parallelism_splits_a_sequence_that_does_not_fit():
    """Activations are 1/cp, states are split as by dp, keys and values travel cp-1 times."""
    long = replace(SEVEN_B, sequence=2**20)
    plans = estimate.advise(long, 64, 80e9, batch=4)
    assert plans
    assert all(p.cp > 1 or p.tp > 8 for p in plans)
    parts = estimate.footprint(GPT2, Plan(2, cp=4, technique="zero1", flash=False))
    whole = estimate.footprint(GPT2, Plan(8, technique="zero1"))
    for name in ("activations", "logits"):
        assert parts[name] == whole[name] / 4
    for name in ("parameters", "gradients", "optimizer"):
        assert parts[name] == whole[name]
    plan = Plan(tp=2, cp=4, accumulation=3)
    u = 64 / 4 * 64 / 2  # tokens × hidden on this rank
    assert estimate.traffic(SMALL, plan)["cp"] == 3 * 4 * 3 * u * (2 * 2 + 2 * 2 + 2 * 4)
    again = estimate.traffic(SMALL, replace(plan, recompute="full"))
    assert again["cp"] == 3 * 4 * 3 * u * (2 * 2 * 2 + 2 * 2 + 2 * 4)
    staged = replace(plan, pp=2)
    times = estimate.step_times(SMALL, staged, Machine(gpus_per_node=4, intra=2.0, inter=1.0))
    sent = estimate.traffic(SMALL, staged)
    assert (times["cp"], times["tp"]) == (sent["cp"], sent["tp"] / 2)  # 2 × 4 ranks: two nodes
    assert times["bubble"] == (times["compute"] + times["tp"] + times["cp"]) / 3


def test_tensor_parallel_traffic_is_its_formula():
    """8bsh per block, 2bsh per end, 3 numbers of 4 bytes a token twice in the loss."""

    def sent(**how):
        return estimate.tensor_parallel_traffic(10, 8, 2, 3, **how)

    assert sent() == ((8 * 3 + 2 * 2) * 80 * 2 + 6 * 10 * 4) / 2
    gathered_again = (2 * 3 + 2) * 80
    norms = (12 * 3 + 4) * 8
    assert sent(sequence_parallel=True) - sent() == (gathered_again + norms) * 2 / 2


def test_what_micro_batches_recomputation_and_units_cost():
    """(m+1)Ψ and 3mΨ; 12bsh per block instead of 8; min(p, m) micro-batches; five units."""
    psi = SMALL.parameters()
    sent = [
        estimate.traffic(SMALL, Plan(2, technique=f"zero{n}", accumulation=3))["dp"]
        for n in (1, 2, 3)
    ]
    assert sent == [2 * psi, 4 * psi, 9 * psi]
    full, none = (
        estimate.traffic(SMALL, Plan(tp=2, recompute=how))["tp"] for how in ("full", "none")
    )
    assert full - none == 4 * SMALL.layers * 64 * 64 * 2 / 2
    one, four, many = (
        estimate.footprint(GPT3, Plan(pp=8, accumulation=m))["activations"] for m in (1, 4, 64)
    )
    assert (four / one, many / one) == (4, 8)
    heads = [estimate.footprint(GPT3, Plan(pp=8, accumulation=m))["logits"] for m in (1, 64)]
    assert heads == [estimate.logits(GPT3, 1), 0]  # the last stage is fuller, then the first
    embedding = 50257 * 1024 / 2
    assert estimate.footprint(GPT2, Plan(8, 2, technique="zero3"))["working"] == 5 * 2 * embedding
    assert estimate.footprint(GPT2, Plan(8, 2, technique="lora"))["working"] == 2 * 2 * embedding


def test_what_wires_and_the_host_cost():
    """32 bytes a parameter to the host; a bubble of (p-1)/m; dp hides behind backward."""

    def times(plan):
        return estimate.step_times(GPT3, plan, Machine(8, 1e12, 1e12, 1e7, 1e8))

    offload = times(Plan(2, technique="zero2+offload"))
    assert offload["host"] == pytest.approx(32 * GPT3.parameters() / 2 / 1e8)
    assert times(Plan(2))["dp"] == 0
    stages = times(Plan(pp=8, accumulation=3))
    assert stages["bubble"] == pytest.approx(stages["compute"] * 7 / 3)
    nodes = Plan(2, 8, 2, "zero2", 1, 4)
    sent = estimate.traffic(GPT3, nodes)
    seconds = times(nodes)
    assert (seconds["tp"], seconds["pp"]) == (sent["tp"] / 1e12, sent["pp"] / 1e7)
    for technique, hidden in (("ddp", 1 / 6), ("zero2", 2 / 3), ("zero3", 1)):
        plan = replace(nodes, technique=technique)
        sent = estimate.traffic(GPT3, plan)["dp"] / 1e7
        assert times(plan)["dp"] == pytest.approx(sent - seconds["compute"] * hidden)


def test_savings_are_differences_and_lines_that_are_kept_add_up():
    rows = estimate.savings(SEVEN_B, 8, 64)
    held = rows[0][2]
    for rule, saves, then in rows[1:]:
        assert saves == held - then
        if rule.keeps:
            held = then
    gigabytes = [3825.17, 2162.73, 788.34, 122.57, 49.07, 36.82, 24.57, 26.63, 18.32, 4.87, 3.61]
    gigabytes += [14.89, 18.95, 16.34, 18.32]
    assert [round(then / 1e9, 2) for _, _, then in rows] == gigabytes
    moe = estimate.savings(replace(SEVEN_B, experts=8, top_k=2), 8, 64)
    assert moe[-1][0].technique == "expert parallel, 8"
    assert moe[-1][1] > 1e9
    assert estimate.savings(SEVEN_B, 64, 8)[-4][0].technique == "tensor parallel, 8"


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


def test_the_page_of_the_demos_as_run_all_reads_it(run, monkeypatch):
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
    *tables, legend = page.split("\n\n")[:-1]
    for table in tables[1:]:
        titles = re.split(r":? {2,}", table.partition("\n")[0])
        assert [title for title in titles[1:] if title != "if" and title not in legend] == []
    qlora = run("--parameters 7e9 --gpus 1 --memory 24")
    assert re.search(r"\n1 × 1 × 1 × 1 +qlora ", qlora)
    assert "no plan fits" in run("--parameters 7e9 --gpus 1 --memory 4")


def test_json_has_what_the_page_has(run):
    answer = json.loads(run("--model gpt3-175b --gpus 1024 --tokens 300e9 --json")[2:])
    parts = answer["techniques"]["zero3"]["parts"]
    assert parts["parameters"] == answer["parameters"] * 2 / 1024
    assert (round(answer["days"][1]), answer["plans"][0]["bound"]) == (34, "compute")


def test_help_has_units_and_the_defaults_that_hold(run, capsys):
    with pytest.raises(SystemExit):
        run("--help")
    words = " ".join(capsys.readouterr().out.split())
    for name, unit in (
        ("memory", "GB of 1e9 bytes"),
        ("sequence", "tokens"),
        ("batch", "sequences"),
    ):
        assert re.search(rf"--{name} [A-Z]+ [^-]*{unit}", words)
    for each in fields(Machine):
        flag = each.name.replace("_", "-")
        (default,) = re.findall(rf"--{flag} [A-Z_]+ [^()]*\(default ([^)]*)\)", words)
        assert float(default) == each.default


WRONG = {  # what is said of a call, of a command
    "ranks=8 must be positive, and technique='zero4' one of .'ddp', 'zero1'": (
        lambda: estimate.model_states(7e9, 8, "zero4")
    ),
    "technique='lora' one of": lambda: estimate.model_states(7e9, 8, "lora"),
    "tp=5 must divide 96 heads": lambda: estimate.activations(GPT3, 1, tp=5),
    "recompute='some'": lambda: estimate.activations(GPT3, 1, recompute="some"),
    "a multiple of the heads": lambda: GPT(2, 100, 3, 10, 10),
    "top_k at most the number of experts": lambda: GPT(2, 96, 3, 10, 10, experts=2, top_k=3),
    "80 GB are 80e9": lambda: estimate.advise(GPT3, 8, 80),
    "^2 error: --memory nan: must be from": "--memory nan",
    "^2 error: .*top_k at most": "--top-k 2",
    "^2 error: argument --gpus: invalid int": "--gpus many",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_an_error_in_one_line_with_the_numbers(words, monkeypatch, capsys):
    wrong = WRONG[words]
    monkeypatch.setattr(sys, "argv", ["estimate.py", *str(wrong).split()])
    with pytest.raises((ValueError, SystemExit)) as raised:
        wrong() if callable(wrong) else sys.exit(estimate.main())
    said = f"{raised.value} {capsys.readouterr().err}".strip()
    assert re.search(words, said)
    assert "\n" not in said
