"""estimate.py: the papers' numbers, those that this project measures, and what the command line prints."""

import json
import re
import sys
from dataclasses import replace

import pool
import pytest
import torch
from test_parallel_3d import options

import ddp
import estimate
import fsdp
import parallel_3d
import zero
from estimate import (
    GPT,
    MODELS,
    TECHNIQUES,
    Plan,
    activations,
    advise,
    footprint,
    lora_states,
    model_states,
    traffic,
)

GPT3, MT_NLG, ONE_T = (
    MODELS["gpt3-175b"],
    GPT(105, 20480, 128, 51200, 2048),
    GPT(128, 25600, 160, 51200, 2048),
)
SEVEN_B, SMALL = estimate.gpt_of(7e9), GPT(4, 64, 4, 256, 64)
GRIDS = [
    (1, 1, ""),
    (2, 1, ""),
    (4, 1, "--sequence-parallel"),
    (1, 2, ""),
    (1, 4, ""),
    (2, 2, "--sequence-parallel"),
]
TABLE_1 = [
    (16000, 16000, 16000),
    (7000, 5500, 4000),
    (4187, 2218, 250),
    (4011, 2013, 15.6),
]  # ZeRO's, GB for 1T


def test_states_sizes_and_days_are_those_published():
    """ZeRO's table 1; LoRA's r(d + k), QLoRA's 4.127 bits; GPT-2's parameters; Narayanan's days, PaLM's operations."""
    ours = [
        [sum(model_states(1e12, N, f"zero{stage}")) / 1e9 for stage in (1, 2, 3)]
        for N in (1, 4, 64, 1024)
    ]
    assert ours == [pytest.approx(row, rel=0.003) for row in TABLE_1]
    assert [sum(model_states(7e9, 8, name)) / 1e9 for name in TECHNIQUES] == [
        112,
        38.5,
        26.25,
        14,
        14,
        1.75,
    ]
    assert model_states(7e9, 8, "zero2", mixed=False) == (28e9, 3.5e9, 7e9)
    h, layers, psi, lhs = (
        GPT3.hidden,
        GPT3.layers,
        GPT3.parameters(),
        GPT3.layers * GPT3.hidden * 2048,
    )
    trained = 8 * layers * ((h + 3 * h) + (h + h) + (h + 4 * h) + (4 * h + h))
    assert lora_states(GPT3) == (2 * (psi + trained), 2 * trained, 12 * trained)
    in_4_bits = 8 * lora_states(GPT3, 8, quantize=True)[0]
    assert in_4_bits == pytest.approx(2 * (psi + trained) - (16 - 4.127) / 8 * 12 * layers * h * h)
    sizes = {(12, 768, 12): 124_439_808, (24, 1024, 16): 354_823_168, (48, 1600, 25): 1_557_611_200}
    assert {shape: GPT(*shape, 50257, 1024).parameters() for shape in sizes} == sizes
    assert [model.parameters() for model in MODELS.values()] == [354_823_168, 174_615_846_912]
    assert (SEVEN_B.layers, SEVEN_B.hidden, SEVEN_B.parameters()) == (32, 4096, 7e9)
    runs = [(estimate.gpt_of(175e9), 300e9, 1024, 140e12), (ONE_T, 450e9, 3072, 163e12)]
    assert [round(estimate.training_time(*run, recompute="full") / 86400) for run in runs] == [
        34,
        84,
    ]
    assert (estimate.training_time(GPT3, 8, 1, 1), estimate.steps(1000, 3, 64)) == (8 * 6 * psi, 47)
    flops = [estimate.flops_per_token(GPT3, again) for again in ("none", "selective", "full")]
    assert flops == [6 * psi + 12 * lhs, 6 * psi + 16 * lhs, 8 * psi + 16 * lhs]


def test_activations_are_those_that_korthikanti_published():
    """Table 2, bytes per layer. Figure 1: A100 of 80 GB suffice without scores and with a split sequence only."""
    s, b, h, a = 2048, 3, 12288, 96
    for t in (1, 8):
        assert activations(GPT3, b, t) / 96 == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
        assert activations(GPT3, b, t, True) / 96 == pytest.approx(
            s * b * h / t * (34 + 5 * a * s / h), rel=1e-12
        )
        assert activations(GPT3, b, t, False, "selective") / 96 == s * b * h * (10 + 24 / t)
        assert activations(GPT3, b, t, flash=True) / 96 == s * b * h * (10 + 24 / t)
        assert activations(GPT3, b, t, True, "selective") / 96 == 34 * s * b * h / t
        assert activations(GPT3, b, t, True, "full") / 96 == 2 * s * b * h
    for model, b, pp in (
        (GPT(48, 6144, 64, 51200, 2048), 4, 1),
        (GPT3, 1, 8),
        (MT_NLG, 1, 35),
        (ONE_T, 1, 64),
    ):
        plan = Plan(tp=8, pp=pp, micro_batch=b, accumulation=pp)
        whole, split = (
            footprint(model, replace(plan, sequence_parallel=less, flash=less))
            for less in (False, True)
        )
        assert sum(whole.values()) > 80e9 > sum(split.values())


@pytest.mark.parametrize("name", estimate.MEASURED)
@pool.on(2)
def test_what_is_stated_as_measured_is(name):
    """Bytes of parameters, gradients, optimizer state and of what a step sends, as the demos measure them."""
    model, group, batch = ddp.language_model(), pool.group(), torch.randint(256, (1, 9))
    if name == "ddp":
        model = ddp.DDP(model, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True)
    for layer in (*model, model) if name == "fsdp" else ():
        fsdp.fully_shard(layer, process_group=group)
    adam, sharded = torch.optim.AdamW, name.startswith("Zero")
    optimizer = (
        getattr(zero, name)(model, adam, group, bucket_cap_mb=2)
        if sharded
        else adam(model.parameters())
    )
    for _ in range(2):
        optimizer.zero_grad()
        with ddp.SentBytes() as sent:
            ddp.language_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            held = zero.held_by(optimizer) if sharded else None
            optimizer.step()
    assert (*(held or ddp.held(model.parameters(), optimizer)), sent.total) == estimate.MEASURED[
        name
    ]


@pytest.mark.parametrize(("tp", "pp", "flags"), GRIDS)
@pool.on(4)
def test_parallel_3d_holds_keeps_and_sends_what_is_estimated(tp, pp, flags):
    """Bytes within 3%, the most on any rank. Tensor and pipeline ranks do not multiply the sequences of a step."""
    args = options(f"--sequence-length 64 --dropout 0 {flags}", "float32")
    args.warmup, dp, tokens = 0, 4 // tp // pp, torch.randint(256, (8, 64))
    trainer = parallel_3d.Trainer(
        parallel_3d.GPT2(4, 64, 4, V=256, P=64), parallel_3d.Grid(tp, pp), args
    )
    saved, ranks = [], [None] * 4
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        x = torch.randn(64 // (tp if flags else 1), 1, 64, requires_grad=True)
        torch.nn.Sequential(
            *(layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block))
        )(x)
    with parallel_3d.SentByAxis(trainer.grid) as sent:
        trainer.step(tokens, tokens)
    kept = ddp.held_bytes([*saved, *trainer.parameters]) - ddp.held_bytes(trainer.parameters)
    mine = (
        *ddp.held(trainer.parameters, trainer.optimizer),
        kept,
        *(sent.by_axis[axis] for axis in ("tp", "pp", "dp")),
    )
    torch.distributed.all_gather_object(ranks, mine)
    most = [max(column) for column in zip(*ranks, strict=True)]
    plan = Plan(
        dp, tp, pp, micro_batch=2, accumulation=4 // dp, sequence_parallel=bool(flags), element=4
    )
    assert most[:3] == pytest.approx(
        model_states(SMALL.parameters(tp, pp), 1, "ddp", mixed=False), rel=0.03
    )
    assert most[3] == pytest.approx(
        activations(SMALL, 1, tp, bool(flags), "none", True, 4, False) / pp, rel=0.03
    )
    assert most[4:] == pytest.approx([*traffic(SMALL, plan).values()], rel=0.03, abs=600)
    assert (trainer.microbatches, estimate.global_batch(2, plan.accumulation, dp)) == (
        plan.accumulation,
        8,
    )


def test_plans_fit_and_are_sorted_and_use_all_in_every_way():
    plans, tried = advise(SEVEN_B, 8, 80e9), advise(SMALL, 4, 80e9, batch=4)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert {(p.memory <= 80e9, p.dp * p.tp * p.pp) for p in plans} == {(True, 8)}
    assert {estimate.global_batch(p.micro_batch, p.accumulation, p.dp) for p in plans} == {512}
    assert (plans[0].technique, advise(MODELS["gpt2-345m"], 8, 80e9)[0].technique) == (
        "zero1",
        "ddp",
    )  # 16Ψ do not fit
    assert {(p.tp, p.pp) for p in tried} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert {p.technique for p in tried if p.dp == 1} == {"ddp", "zero2+offload"}
    assert {p.technique for p in tried if p.dp == 2} == set(TECHNIQUES)
    slow = {wire: advise(SEVEN_B, 16, 40e9, **{wire: 1e8})[0] for wire in ("inter", "host")}
    assert "offload" not in slow["host"].technique
    assert slow["inter"].tp * slow["inter"].dp <= 8  # only the pipeline crosses it


def test_what_micro_batches_recomputation_and_wires_cost():
    """(m+1)Ψ and 3mΨ; 12bsh per layer instead of 8; first stage min(p, m) times; five units; 32 bytes a parameter."""
    assert [
        traffic(SMALL, Plan(2, 1, 1, f"zero{n}", 1, 3))["dp"] / SMALL.parameters()
        for n in (1, 2, 3)
    ] == [2, 4, 9]
    full, none = (
        traffic(SMALL, Plan(tp=2, recompute=recompute))["tp"] for recompute in ("full", "none")
    )
    assert full - none == 4 * SMALL.layers * 64 * 64 * 2 / 2
    one, four, many = (
        footprint(GPT3, Plan(pp=8, accumulation=m))["activations"] for m in (1, 4, 64)
    )
    assert (four / one, many / one) == (4, 8)
    assert (
        footprint(MODELS["gpt2-345m"], Plan(8, 2, technique="zero3"))["working"]
        == 5 * 2 * 50257 * 1024 / 2
    )
    plans = [
        Plan(2, technique="zero2+offload"),
        Plan(2),
        Plan(pp=8, accumulation=3),
        Plan(2, 8, 2, "zero2", 1, 4),
    ]
    offload, hidden, stages, nodes = (
        estimate.step_times(GPT3, plan, 8, 1e12, 1e12, 1e7, 1e8) for plan in plans
    )
    assert (offload["host"], hidden["data"]) == (pytest.approx(32 * GPT3.parameters() / 2 / 1e8), 0)
    assert stages["bubble"] == pytest.approx(stages["compute"] * 7 / 3)
    sent = {
        axis: size / (1e12 if axis == "tp" else 1e7)
        for axis, size in traffic(GPT3, plans[-1]).items()
    }
    assert (nodes["tensor"], nodes["pipeline"]) == (
        sent["tp"],
        sent["pp"],
    )  # in nodes of eight, and between them
    assert nodes["data"] == pytest.approx(sent["dp"] - nodes["compute"] * 2 / 3)


def test_savings_add_up_and_there_is_room_for_that_and_no_more():
    _, saves, then, keep = zip(*estimate.savings(SEVEN_B, 8, 64), strict=True)
    before = [then[max(k for k in range(row) if keep[k])] for row in range(1, len(then))]
    assert saves == (0, *(held - now for held, now in zip(before, then[1:], strict=True)))
    gigabytes = [
        3825.17,
        2162.73,
        788.34,
        122.57,
        117.28,
        49.07,
        36.82,
        24.57,
        26.63,
        18.32,
        4.87,
        3.61,
        14.89,
        18.95,
    ]
    assert [round(held / 1e9, 2) for held in then] == gigabytes  # as it was
    for technique in (*TECHNIQUES, "lora", "qlora"):
        most, model = (
            estimate.room(MODELS["gpt2-345m"], technique, 8, 40e9)["room"],
            MODELS["gpt2-345m"],
        )
        for more in (0, 1):
            shapes = [
                (model, most["micro_batch"] + more),
                (replace(model, sequence=most["sequence"] + more), 1),
            ]
            shapes.append(
                (estimate.gpt_of(most["parameters"] + 1e6 * more, model.sequence, model.vocab), 1)
            )
            held = [
                sum(footprint(shape, Plan(8, technique=technique, micro_batch=b)).values())
                for shape, b in shapes
            ]
            assert [each > 0.94 * 40e9 for each in held] == [more] * 3


def test_pages_of_the_demos_as_run_all_reads_it_of_others_and_json(monkeypatch, capsys):
    def show(arguments=""):
        monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments.split()])
        return f"{estimate.main()} {capsys.readouterr().out}"

    held = "\nheld/rank   params 7.5 MB   grads 7.5 MB   optimizer 15.0 MB      (ddp measured 7.5 / 7.5 / 15.0)\n"
    for words in (
        "0 estimate · 2 ranks · 1.9M parameters · 4 layers of 192, ",
        held,
        "\nvs measured within 1%: ",
    ):
        assert words in show()
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    assert re.match(
        "(?s)1 .* 11.3 MB per step      \\(measured 15.0\\)\nvs measured NOT within 1%: 25.0",
        show(),
    )
    states = r"(?s)\nzero1 +14\.0 GB +14\.0 GB +10\.5 GB .*QLoRA.*\n8 × 1 × 1 .* compute 100%\n"
    assert re.search(states, show("--parameters 7e9 --gpus 8 --memory 80"))
    assert "no plan fits" in show("--parameters 7e9 --gpus 1 --memory 10")
    answer = json.loads(show("--model gpt3-175b --gpus 1024 --tokens 300e9 --json")[2:])
    states = answer["techniques"]["zero3"]["parts"]["parameters"]
    assert (round(answer["days"][1]), states) == (34, answer["parameters"] * 2 / 1024)
    monkeypatch.setenv("RANK", "1")  # under torchrun the first one says it
    assert show() == "0 "


WRONG = {  # what is said of a call, of a command
    "ranks=8 must be positive.*zero4.*one of ddp, zero1": lambda: model_states(7e9, 8, "zero4"),
    "tp=5 must divide 96 heads": lambda: activations(GPT3, 1, tp=5),
    "recompute='some'": lambda: activations(GPT3, 1, recompute="some"),
    "multiple of the heads": lambda: GPT(2, 100, 3, 10, 10),
    "80 GB are 80e9": lambda: advise(GPT3, 8, 80),
    "^2 error: --memory nan: it must be from": "--memory nan",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_an_error_in_one_line_with_the_numbers(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["estimate.py", *str(WRONG[words]).split()])
    with pytest.raises((ValueError, SystemExit)) as raised:
        WRONG[words]() if callable(WRONG[words]) else estimate.main()
    said = f"{raised.value} {capsys.readouterr().err}".strip()
    assert (bool(re.search(words, said)), "\n" in said) == (True, False), said
