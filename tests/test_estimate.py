"""estimate.py: the papers' numbers, those that this project measures, and what the command line prints."""

import json
import sys
from dataclasses import replace
from functools import partial

import pool
import pytest
import torch
from test_parallel_3d import options
from torch.utils.flop_counter import FlopCounterMode

import ddp
import estimate
import fsdp
import parallel_3d
import zero
from estimate import DEMO, GPT, MODELS, TECHNIQUES, Plan, activations, advise, footprint, model_states, traffic

GPT3, MT_NLG, ONE_T = MODELS["gpt3-175b"], GPT(105, 20480, 128, 51200, 2048), GPT(128, 25600, 160, 51200, 2048)
TABLE_1 = {  # ZeRO's: ranks: GB of model states with stage 1, 2, 3, for 7.5B, 128B and 1T parameters
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}


@pytest.mark.parametrize("ranks", TABLE_1)
def test_zeros_table_1(ranks):
    for psi, row in zip((7.5e9, 128e9, 1e12), TABLE_1[ranks], strict=True):
        for stage, gigabytes in zip((1, 2, 3), row, strict=True):
            states = sum(model_states(psi, ranks, f"zero{stage}")) / 1e9
            assert states == pytest.approx(gigabytes, rel=0.003, abs=0.006)


def test_what_seven_billion_parameters_take_on_eight():
    gigabytes = {technique: sum(model_states(7e9, 8, technique)) / 1e9 for technique in TECHNIQUES}
    assert gigabytes == {
        "ddp": 112, "zero1": 38.5, "zero2": 26.25, "zero2+offload": 14, "zero3": 14, "zero3+offload": 1.75,
    }  # fmt: skip
    assert model_states(7e9, 8, "zero1") == (14e9, 14e9, 10.5e9)
    assert model_states(7e9, 8, "zero2", mixed=False) == (28e9, 3.5e9, 7e9)


def test_parameters_of_gpt2_and_gpt3():
    known = {(12, 768, 12): 124_439_808, (24, 1024, 16): 354_823_168, (48, 1600, 25): 1_557_611_200}
    for (layers, hidden, heads), parameters in known.items():
        assert GPT(layers, hidden, heads, 50257, 1024).parameters() == parameters
    assert GPT3.parameters() == pytest.approx(175e9, rel=0.01)
    assert ONE_T.parameters() == pytest.approx(1e12, rel=0.01)
    llama = estimate.gpt_of(7e9)
    assert (llama.layers, llama.hidden, llama.parameters()) == (32, 4096, 7e9)


def test_narayanans_days():
    days = partial(estimate.training_time, recompute="full")
    assert round(days(estimate.gpt_of(175e9), 300e9, 1024, 140e12) / 86400) == 34
    assert round(days(ONE_T, 450e9, 3072, 163e12) / 86400) == 84
    assert days(GPT3, 1, 1, 1) / estimate.training_time(GPT3, 1, 1, 1) == 8 / 6


@pytest.mark.parametrize("tp", [1, 8])
def test_korthikantis_table_2(tp):
    """Bytes per layer, as the paper writes them."""
    s, b, h, a, t = 2048, 3, 12288, 96, tp
    kept = partial(activations, GPT3, b, tp)
    assert kept() / 96 == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert kept(True) / 96 == pytest.approx(s * b * h / t * (34 + 5 * a * s / h), rel=1e-12)
    assert kept(False, "selective") / 96 == s * b * h * (10 + 24 / t)
    assert kept(True, "selective") / 96 == 34 * s * b * h / t
    assert kept(True, "full") / 96 == 2 * s * b * h
    assert kept(flash=True) == kept(recompute="selective")


def test_korthikantis_figure_1():
    """On A100 of 80 GB tensor parallel only does not fit; selective recomputation and a split sequence do."""
    configs = [(GPT(48, 6144, 64, 51200, 2048), 4, 1), (GPT3, 1, 8), (MT_NLG, 1, 35), (ONE_T, 1, 64)]
    for model, micro_batch, pp in configs:
        plan = Plan(tp=8, pp=pp, micro_batch=micro_batch, accumulation=pp)
        parts = [footprint(model, replace(plan, flash=False)), footprint(model, replace(plan, sequence_parallel=True))]
        assert sum(parts[0].values()) > 80e9 > sum(parts[1].values())
        assert parts[1]["activations"] < 0.25 * parts[0]["activations"]


def test_lora_and_qlora():
    """r(d + k) for all matrices; QLoRA's 4.127 bits for what is in blocks."""
    h, layers = GPT3.hidden, GPT3.layers
    adapters = 8 * layers * ((h + 3 * h) + (h + h) + (h + 4 * h) + (4 * h + h))
    weights, gradients, state = estimate.lora_states(GPT3)
    assert (weights, gradients, state) == (2 * (GPT3.parameters() + adapters), 2 * adapters, 12 * adapters)
    in_4_bits = weights - estimate.lora_states(GPT3, quantize=True)[0]
    assert in_4_bits == pytest.approx((16 - 4.127) / 8 * 12 * layers * h * h)
    assert sum(estimate.lora_states(GPT3, 8)) == sum(estimate.lora_states(GPT3)) / 8


def body_demo(name):
    """-> bytes of parameters, gradients, optimizer state and of what a step sends, as the demos measure them."""
    torch.manual_seed(0)
    model, group, batch = ddp.language_model(), pool.group(), torch.randint(256, (8, 65))
    if name == "ddp":
        model = ddp.DDP(model, process_group=group, bucket_cap_mb=2, gradient_as_bucket_view=True)
    for layer in (*model, model) if name == "fsdp" else ():
        fsdp.fully_shard(layer, process_group=group)
    if name.startswith("Zero"):
        optimizer = getattr(zero, name)(model, torch.optim.AdamW, group, bucket_cap_mb=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with ddp.SentBytes() as sent:
            ddp.language_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            held = zero.held_by(optimizer) if name.startswith("Zero") else None
            optimizer.step()
    return *(held or ddp.held(model.parameters(), optimizer)), sent.total


@pytest.mark.parametrize("name", estimate.MEASURED)
def test_what_is_stated_as_measured_is(name):
    assert pool.run(2, body_demo, name) == [estimate.MEASURED[name]] * 2


def kept_by(blocks, x):
    """Bytes that `blocks` keep for their backward, parameters aside."""
    saved, own = [], {p.untyped_storage().data_ptr() for p in blocks.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        blocks(x.requires_grad_())
    return ddp.held_bytes(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in own)


def test_activations_of_the_demos():
    """Within 1%: means and variances of norms, log-sum-exps of attention are not in the formula."""
    model = ddp.language_model()
    assert sum(p.numel() for p in model.parameters()) == DEMO.parameters()
    expected = activations(DEMO, 8, flash=True, element=4, masks=False)
    assert kept_by(model[1:-2], torch.randn(8, 64, 192)) == pytest.approx(expected, rel=0.01)


CONFIG = parallel_3d.GPT2(4, 64, 4, V=256, P=64)
MODEL = GPT(4, 64, 4, 256, 64)


def body_trainer(tp, pp, flags=""):
    """-> what a rank holds, keeps in a micro-batch's forward, sends; its micro-batches"""
    args = options(f"--sequence-length 64 --dropout 0 {flags}", "float32")
    args.warmup = 0
    trainer = parallel_3d.Trainer(CONFIG, parallel_3d.Grid(tp, pp), args)
    batch = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(1))
    shape = (64 // (tp if args.sequence_parallel else 1), args.micro_batch_size, 64)
    blocks = torch.nn.Sequential(*(layer for layer in trainer.stages[0] if isinstance(layer, parallel_3d.Block)))
    kept = kept_by(blocks, torch.randn(shape))
    with parallel_3d.SentByAxis(trainer.grid) as sent:
        trainer.step(batch[:, :-1], batch[:, 1:])
    held = ddp.held(trainer.parameters, trainer.optimizer)
    return held, kept, sent.by_axis, trainer.microbatches


@pytest.mark.parametrize(
    ("tp", "pp", "flags"),
    [(1, 1, ""), (2, 1, ""), (4, 1, "--sequence-parallel"), (1, 2, ""), (1, 4, ""), (2, 2, "--sequence-parallel")],
)
def test_parallel_3d_holds_keeps_and_sends_what_is_estimated(tp, pp, flags):
    """Bytes within 3%, the most on any rank; and as many sequences per step on any grid."""
    dp = 4 // tp // pp
    held, kept, sent, microbatches = zip(*pool.run(4, body_trainer, tp, pp, flags), strict=True)
    plan = Plan(dp, tp, pp, micro_batch=2, accumulation=4 // dp, sequence_parallel=bool(flags), element=4)
    states = model_states(MODEL.parameters(tp, pp), 1, "ddp", mixed=False)
    assert [max(column) for column in zip(*held, strict=True)] == pytest.approx(states, rel=0.03)
    expected = activations(MODEL, 2, tp, bool(flags), flash=True, element=4, masks=False) / pp
    assert max(kept) == pytest.approx(expected, rel=0.07)  # at two sequences attention's output is copied: one of 16
    for axis, estimated in traffic(MODEL, plan).items():
        assert max(each[axis] for each in sent) == pytest.approx(estimated, rel=0.03, abs=600)
    assert set(microbatches) == {plan.accumulation}
    assert estimate.global_batch(2, plan.accumulation, dp) == 8  # tensor and pipeline ranks do not multiply samples


def test_operations_as_torch_counts_them():
    """6Ψ + 12lhs per token within 1%, for a GPT-2 of 124M without the positions, which are not multiplied."""
    with torch.device("meta"), FlopCounterMode(display=False) as forward:
        model, tokens = parallel_3d.plain_model(parallel_3d.MODELS["gpt2-124m"]), torch.zeros(1, 1024, dtype=torch.long)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(tokens)
    ours = estimate.flops_per_token(GPT(12, 768, 12, 50257, 1024))
    assert 3 * forward.get_total_flops() / 1024 == pytest.approx(ours, rel=0.01)


def test_plans_fit_and_are_sorted_and_use_all():
    plans = advise(estimate.gpt_of(7e9), 8, 80e9)
    assert plans[0].technique == "zero1"  # 16Ψ do not fit; nothing is faster
    assert all(plan.memory <= 80e9 and plan.dp * plan.tp * plan.pp == 8 for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert {estimate.global_batch(p.micro_batch, p.accumulation, p.dp) for p in plans} == {512}
    assert advise(MODELS["gpt2-345m"], 8, 80e9)[0].technique == "ddp"  # the simplest that fits
    assert advise(estimate.gpt_of(7e9), 8, 1e9) == []
    assert estimate.steps(1000, 3, 64) == 47


def test_every_grid_and_technique_is_tried():
    plans = advise(MODEL, 4, 80e9)
    assert {(p.tp, p.pp) for p in plans} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    for dp, techniques in ((1, {"ddp", "zero2+offload"}), (2, set(TECHNIQUES))):
        assert {p.technique for p in plans if p.dp == dp} == techniques


@pytest.mark.parametrize("slow", ["intra", "inter", "host"])
def test_a_slower_wire_never_helps_and_the_best_plan_avoids_it(slow):
    model = estimate.gpt_of(7e9)
    fast, slower = advise(model, 16, 40e9), advise(model, 16, 40e9, **{slow: 1e8})
    before = {(p.dp, p.tp, p.pp, p.technique, p.recompute): p.seconds for p in fast}
    assert all(p.seconds >= before[p.dp, p.tp, p.pp, p.technique, p.recompute] for p in slower)
    assert not (slow == "host" and slower[0].technique.endswith("offload"))
    if slow == "inter":  # only the pipeline crosses it
        assert slower[0].tp * slower[0].dp <= 8


def test_what_micro_batches_recomputation_units_and_offload_cost():
    """(m+1)Ψ and 3mΨ; 12bsh per layer instead of 8; first stage min(p, m) times; five units; 32 bytes a parameter."""
    psi, each = MODEL.parameters(), Plan(dp=2, accumulation=3)
    sent = [traffic(MODEL, replace(each, technique=t))["dp"] / psi for t in ("ddp", "zero1", "zero2", "zero3")]
    assert sent == [2, 2, 4, 9]
    full, none = (traffic(MODEL, Plan(tp=2, recompute=recompute))["tp"] for recompute in ("full", "none"))
    assert full - none == 4 * MODEL.layers * 64 * 64 * 2 / 2
    one, four, many = (footprint(GPT3, Plan(pp=8, accumulation=m))["activations"] for m in (1, 4, 64))
    assert (four / one, many / one) == (4, 8)
    for technique, units in (("zero3", 5), ("lora", 2), ("ddp", 0)):
        assert footprint(GPT3, Plan(dp=2, technique=technique))["working"] == units * 2 * GPT3.block()
    assert set(traffic(GPT3, Plan()).values()) == {0.0}  # alone
    assert footprint(MODEL, Plan())["logits"] == 14 * 64 * 256
    assert estimate.flops_per_token(GPT3, "full") / estimate.flops_per_token(GPT3) == pytest.approx(4 / 3)
    times = estimate.step_times(GPT3, Plan(dp=2, technique="zero2+offload"), 8, 1e12, 1e9, 1e9, 1e9)
    assert times["host"] == pytest.approx(32 * GPT3.parameters() / 2 / 1e9)
    assert estimate.step_times(GPT3, Plan(dp=2), 8, 1e12, 1e12, 1e9, 1e9)["data"] == 0  # hides behind computation
    times = estimate.step_times(GPT3, Plan(pp=8, accumulation=3), 8, 1e12, 1e9, 1e9, 1e9)
    assert times["bubble"] == pytest.approx(times["compute"] * 7 / 3)


def test_numbers_of_parameters():
    """GPT-2's as published; GPT-3's at its 51,200 padded tokens."""
    assert {name: model.parameters() for name, model in MODELS.items()} == {
        "gpt2-345m": 354_823_168,
        "gpt3-175b": 174_615_846_912,
    }


def test_savings_add_up():
    rows = estimate.savings(estimate.gpt_of(7e9), 8, 64)
    held = rows[0][2]
    for _, saves, then, keep in rows[1:]:
        assert saves == held - then
        held = then if keep else held
    saves = {name: saves for name, saves, _, _ in rows}
    assert (saves["zero1"], saves["zero2"]) == (73.5e9, 12.25e9)
    gigabytes = [3825.2, 2162.7, 788.3, 122.6, 117.3, 49.1, 36.8, 24.6, 26.6, 18.3, 4.9, 3.6, 14.9, 18.9]  # as it was
    assert [round(then / 1e9, 1) for _, _, then, _ in rows] == gigabytes


@pytest.mark.parametrize("technique", [*TECHNIQUES, "lora", "qlora"])
def test_there_is_room_for_that_and_no_more(technique):
    model, memory = MODELS["gpt2-345m"], 40e9
    room = estimate.room(model, technique, 8, memory)["room"]
    for more, fits in ((0, True), (1, False)):
        longer = replace(model, sequence=room["sequence"] + more)
        larger = estimate.gpt_of(room["parameters"] + 1e6 * more, model.sequence, model.vocab)
        for shape, micro_batch in ((model, room["micro_batch"] + more), (longer, 1), (larger, 1)):
            plan = Plan(8, technique=technique, micro_batch=micro_batch)
            assert (sum(footprint(shape, plan).values()) <= 0.94 * memory) == fits


WRONG = {
    "zero4.*one of ddp, zero1": lambda: model_states(7e9, 8, "zero4"),
    "ranks=0 must be positive": lambda: model_states(7e9, 0, "ddp"),
    "tp=5 must divide 96 heads": lambda: activations(GPT3, 1, tp=5),
    "recompute='some'": lambda: activations(GPT3, 1, recompute="some"),
    "multiple of the heads": lambda: GPT(2, 100, 3, 10, 10),
    "80 GB are 80e9": lambda: advise(GPT3, 8, 80),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_a_value_error_with_the_numbers(words):
    with pytest.raises(ValueError, match=words):
        WRONG[words]()


def page(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments])
    return estimate.main(), capsys.readouterr().out


def test_the_page_of_the_demos(monkeypatch, capsys):
    """In the form that run_all.sh reads, with what was measured; under torchrun the first rank says it."""
    status, text = page(monkeypatch, capsys)
    lines = text.splitlines()
    assert (status, lines[0].startswith("estimate · 2 ranks · 1.9M parameters · ")) == (0, True)
    assert "held/rank   params 7.5 MB   grads 7.5 MB   optimizer 15.0 MB      (ddp measured 7.5 / 7.5 / 15.0)" in lines
    assert "sent/rank   11.3 MB per step      (measured 11.3)" in lines
    assert any(line.startswith("vs measured within 1%: ") for line in lines)
    monkeypatch.setenv("RANK", "1")
    assert page(monkeypatch, capsys) == (0, "")


def test_the_page_says_when_it_differs(monkeypatch, capsys):
    monkeypatch.setitem(estimate.MEASURED, "fsdp", (3756288, 3756288, 7512784, 15025152))
    status, text = page(monkeypatch, capsys)
    assert (status, "NOT within 1%: 25.0" in text) == (1, True)


def test_pages_and_json(monkeypatch, capsys):
    show = partial(page, monkeypatch, capsys)
    _, text = show("--parameters", "7e9", "--gpus", "8", "--memory", "80")
    for words in ("zero1 ", "14.0 GB", "10.5 GB", "QLoRA", "8 × 1 × 1", "compute 100%"):
        assert words in text
    answer = json.loads(show("--model", "gpt3-175b", "--gpus", "1024", "--tokens", "300e9", "--json")[1])
    assert round(answer["days"][1]) == 34
    assert answer["plans"][0]["dp"] * answer["plans"][0]["tp"] * answer["plans"][0]["pp"] == 1024
    assert answer["techniques"]["zero3"]["parts"]["parameters"] == answer["parameters"] * 2 / 1024
    assert "no plan fits" in show("--parameters", "7e9", "--gpus", "1", "--memory", "10")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpus 0", "--gpus 0"),
        ("--memory nan", "--memory nan"),
        ("--gpus-per-node -8", "--gpus-per-node -8"),
        ("--model gpt2-345m --parameters 7e9", "not allowed with"),
    ],
)
def test_bad_values_are_one_line(arguments, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        page(monkeypatch, capsys, *arguments.split())
    error = capsys.readouterr().err
    assert (stopped.value.code, error.count("\n"), error[:7], words in error) == (2, 1, "error: ", True)
