"""pipeline.py against micro-batch accumulation on one device, its schedules against torch.distributed.pipelining's.

That the schedules are complete, in order, free of deadlocks and short is said in claims.py. What holds of the
interpreter is in CLAIMS, at the end.
"""

import copy
import csv
import gc
import inspect
import itertools
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pool
import pytest
import pytorchs
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from shared import OPTIMIZERS, Collectives, assert_equal, assert_same_parameters
from torch.distributed.pipelining import schedules as theirs
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, simulate

numbers = {"p": st.integers(1, 8), "m": st.integers(1, 24), "v": st.integers(1, 4)}


@given(b=st.integers(1, 5), **numbers)
def test_bubble_and_memory_are_the_docstrings_closed_forms(b, p, m, v):
    cost = {"F": 1, "B": b}
    for name in ("gpipe", "1f1b"):
        times = simulate(build_schedule(name, p, m), cost)
        assert times.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert times.peak_activations == [m if name == "gpipe" else min(p - rank, m) for rank in range(p)]
    naive, rounds = simulate(build_schedule("naive", p, m), cost), 1 + m // 8
    assert (naive.bubble_fraction, naive.peak_activations) == (pytest.approx(1 - 1 / p), [1] * p)
    interleaved = simulate(build_schedule("interleaved_1f1b", p, rounds * p, v), cost)
    assert interleaved.bubble_fraction == pytest.approx((p - 1) / (v * rounds * p + p - 1))
    zero_bubble = simulate(build_schedule("zero_bubble", p, m))
    assert zero_bubble.peak_activations == [min(p, m)] * p
    assert m < p or zero_bubble.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


def test_an_action_starts_as_soon_as_it_can():
    """After what its rank did before, and what it takes; where I and W stand for B, too, and B waits for I."""
    times = simulate([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1W0", "1I1", "1W1"]], {"F": 2, "I": 3})
    assert times.start == {"0F0": 0, "0F1": 2, "1F0": 2, "1I0": 4, "1F1": 7, "0B0": 7, "1W0": 9, "1I1": 10, "0B1": 13,
                           "1W1": 13}  # fmt: skip
    assert times.end == {a: start + {"F": 2, "B": 2, "I": 3, "W": 1}[a[1]] for a, start in times.start.items()}
    assert (times.bubble_fraction, times.peak_activations) == (pytest.approx(1 - 20 / 30), [2, 2])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
         "0B0 waits for 1B0 waits for 1F0 waits for 1B1 waits for 1F1 waits for 0F1 waits for 0B0"),
        ([["0B0", "0F0"]], "0B0 waits for 0F0 waits for 0B0"),
        ([["0F0", "0W0", "0I0"]], "0W0 waits for 0I0"),
        ([["0F0", "0B0", "0W0"]], "'FBW' is done"),
        ([["0F0", "0B0", "0F2", "0B2"]], "of stage 0, micro-batch 1 '' is done"),
        ([["0F0"], ["0B0"]], "of stage 0, micro-batch 0 'B' is done"),
        (("1f1b", 0, 1), "0 ranks, 1 micro-batches"),
        (("interleaved_1f1b", 2, 2, 0), "2 micro-batches, 0 stages each"),
        (("2f2b", 1, 1), "names: naive, gpipe, 1f1b"),
    ],
)  # fmt: skip
def test_wrong_schedules_are_refused(schedule, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate(schedule) if isinstance(schedule, list) else build_schedule(*schedule)


@given(**numbers)
def test_the_same_orders_as_pytorchs(p, m, v):
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        order = pytorchs.build_schedule("ScheduleInterleaved1F1B", p, m, v)
        assert build_schedule("interleaved_1f1b", p, m, v) == order
        assert build_schedule("zero_bubble", p, m) == pytorchs.build_schedule("ScheduleInterleavedZeroBubble", p, m)


V_SHAPED = [name for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") if hasattr(theirs, name)]  # torch ≥ 2.7
FORMATS = "format" in inspect.signature(theirs.ScheduleInterleaved1F1B._dump_csv).parameters


@pytest.mark.skipif(not FORMATS, reason=f"torch {torch.__version__} writes schedules in one format only")
@pytest.mark.parametrize("name", [*V_SHAPED, "ScheduleInterleaved1F1B"])
def test_csv_files_are_pytorchs(name, tmp_path):
    schedule = pytorchs.make_schedule(name, 4, 8, 2)
    schedule._dump_csv(tmp_path / "compute", format="compute_only")
    schedule._dump_csv(tmp_path / "comms", format="compute_comms")
    ours = pipeline.schedule_from_csv(tmp_path / "compute")
    assert pipeline.schedule_from_csv(tmp_path / "comms") == ours == pytorchs.build_schedule(name, 4, 8, 2)
    pipeline.schedule_to_csv(ours, tmp_path / "ours")
    assert list(csv.reader((tmp_path / "ours").open())) == ours
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert pytorchs.order_of(schedule, 4) == ours


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_layers(n, make=Layer):
    torch.manual_seed(1)
    return [make() for _ in range(n)]


def make_batch(step, rows, shape=(6,)):
    return torch.randn(2, rows, *shape, generator=torch.Generator().manual_seed(step)).unbind()


def loss_of_first(output, target):
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def make_pipeline(plain, schedule, m, loss_fn=F.mse_loss, **options):
    """-> a copy of this rank's stage, and the pipeline of it."""
    stage = copy.deepcopy(plain[pool.rank()])
    return stage, Pipeline(stage, schedule, m, loss_fn, pool.group(), **options)


def on_the_last(value):
    return value if pool.rank() == pool.world_size() - 1 else None


def accumulate(stages, inputs, targets, m, loss_fn=F.mse_loss):
    """One device, plainly: each micro-batch's loss counts by its samples. -> mean loss"""
    losses = []
    for x, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        y = (x,)
        for stage in stages:
            y = stage(*y)
            y = y if isinstance(y, tuple) else (y,)
        losses.append(loss_fn(y[0], target) * (len(x) / len(inputs)))
        losses[-1].backward()
    return torch.stack(losses).detach().sum()


def equals_one_device(make, schedule, m, v=1, shape=(6,)):
    """Losses, gradients, which add up from step to step, and parameters of this rank's stages; and the timeline."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v, make)
    actions = (build_schedule(schedule, p, m, v) if isinstance(schedule, str) else schedule)[rank]
    mine = sorted({int(re.match(r"\d+", action)[0]) for action in actions})
    stages = [copy.deepcopy(plain[s]) for s in mine]
    ours = Pipeline(stages if v > 1 else stages[0], schedule, m, loss_of_first, pool.group())
    optimizers = [OPTIMIZERS["sgd"](nn.ModuleList(module).parameters()) for module in (stages, plain)]
    for step in range(2):
        inputs, targets = make_batch(step, 2 * m, shape)
        loss = ours.step((inputs,) if 0 in mine else None, targets if p * v - 1 in mine else None)
        expected = accumulate(plain, inputs, targets, m)
        assert_equal(loss, expected if p * v - 1 in mine else None, exact=True)
        for o in optimizers:
            o.step()
        for s, stage in zip(mine, stages, strict=True):
            assert_same_parameters(stage, plain[s], True, f"{schedule}, m {m}, v {v}, step {step}, stage {s}")
    assert [action for action, *_ in ours.timeline] == actions
    times = [0, *itertools.chain(*((start, end) for _, start, end in ours.timeline))]
    assert times == sorted(times)
    if make is Branches:  # of a tuple, each tensor is put together along dimension 0
        outputs = ours.eval_step(inputs)
        assert outputs is None or [len(output) for output in outputs] == [2 * m] * 3 + [5 * m]


def the_idea_is_right():
    plain, (inputs, targets) = make_layers(pool.world_size()), make_batch(0, 8)
    stage = copy.deepcopy(plain[pool.rank()])
    loss = pipeline.gpipe_step(stage, 4, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    assert_equal(loss, on_the_last(accumulate(plain, inputs, targets, 4)), exact=False)
    assert_same_parameters(stage, plain[pool.rank()], exact=True)


class Branches(nn.Linear):
    """Passes on a tensor to train on, a mask without gradient, integers, and, strided, what the next does not use."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x, mask=None, rows=None, unused=None):
        if mask is None:
            mask, rows = x > 0, torch.arange(len(x)).flip(0)
        return torch.tanh(super().forward(x))[rows] * mask, mask, rows, (x * 2).transpose(0, 1)


class Again(nn.Module):
    """One weight in two places, over more than one dimension, a checkpoint, and autocast."""

    def __init__(self):
        super().__init__()
        self.linear, self.layer = nn.Linear(6, 6), Layer()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.layer, self.linear(torch.tanh(self.linear(x))), use_reentrant=False).float()


def partly_frozen():
    """Linear layers of all kinds: frozen, frozen weight, frozen bias, a weight computed from parameters."""
    frozen, weight, bias, normed = (nn.Linear(6, 6) for _ in range(4))
    for parameter in (*frozen.parameters(), weight.weight, bias.bias):
        parameter.requires_grad_(False)
    normed = nn.utils.parametrizations.weight_norm(normed)
    return nn.Sequential(frozen, nn.Tanh(), weight, nn.ReLU(), bias, nn.Tanh(), normed)


def through_what_is_frozen_nothing_is_sent_back(name):
    plain = [Layer().requires_grad_(False), nn.Tanh(), *make_layers(1)]
    stage, ours = make_pipeline(plain, name, 2)
    for _ in range(2):  # the first also tells shapes
        with Collectives() as seen:
            ours.step(*make_batch(0, 4))
        accumulate(plain, *make_batch(0, 4), 2)
    assert_same_parameters(stage, plain[pool.rank()], exact=True)
    assert ("recv_" in dict(seen.calls), "send" in dict(seen.calls)) == (pool.rank() > 0, pool.rank() < 2)


def shapes_dtypes_and_what_is_frozen_may_change_from_step_to_step(name):
    """And back; the last micro-batch is smaller."""
    rank, plain = pool.rank(), make_layers(pool.world_size())
    stage, ours = make_pipeline(plain, name, 4)
    cases = [(7, (6,)), (7, (3, 6)), (7, (6,)), (7, (6,)), (8, (6,))]
    for step, (rows, shape) in enumerate(cases):
        if step == 3:  # of the same shapes as the one before
            plain[0].requires_grad_(False)
            stage.requires_grad_(rank > 0)
        if step == 4:
            for module in (stage, *plain):
                module.double().zero_grad()
        inputs, targets = (t.to(plain[0].up.weight.dtype) for t in make_batch(step, rows, shape))
        loss = ours.step(inputs if rank == 0 else None, on_the_last(targets))  # the others do not see the new shapes
        assert_equal(loss, on_the_last(accumulate(plain, inputs, targets, 4)), exact=True)
        assert_same_parameters(stage, plain[rank], True, f"step {step}")


def the_mean_is_over_tokens_that_count():
    plain = [layer.double() for layer in make_layers(pool.world_size())]
    inputs, targets = make_batch(0, 6)[0].double(), torch.tensor([1, -100, -100, 0, 3, 5])
    stage, ours = make_pipeline(plain, "1f1b", 3, F.cross_entropy, weight=lambda target: (target != -100).sum())
    loss = ours.step(inputs, targets)
    expected = F.cross_entropy(nn.Sequential(*plain)(inputs), targets)  # of the whole batch at once
    expected.backward()
    assert_same_parameters(stage, plain[pool.rank()], exact=False)
    assert_equal(loss, on_the_last(expected.detach()), exact=False)


def evaluation_only_goes_forward(name, v):
    p, rank = pool.world_size(), pool.rank()
    plain, (inputs, targets) = make_layers(p * v), make_batch(0, 8)
    ours = Pipeline(copy.deepcopy(plain[rank::p]), name, 4, F.mse_loss, pool.group())
    ours.step(inputs, targets)
    gradients = [q.grad.clone() for q in ours.parameters()]
    with torch.no_grad():
        outputs = [nn.Sequential(*plain)(x) for x in inputs.chunk(4)]
        expected = torch.stack(list(map(F.mse_loss, outputs, targets.chunk(4)))).mean()
        assert_equal(ours.step(inputs, targets), on_the_last(expected), exact=True)
    assert_equal(ours.eval_step(inputs, targets), on_the_last(expected), exact=True)
    assert_equal(ours.eval_step(inputs), on_the_last(torch.cat(outputs)), exact=True)
    assert all(torch.equal(a, q.grad) for a, q in zip(gradients, ours.parameters(), strict=True))
    assert [a for a, *_ in ours.timeline] == [a for a in build_schedule(name, p, 4, v)[rank] if "F" in a]


def w_computes_the_gradients_of_linear_weights_and_nothing_else():
    """I none of them, and nothing is computed twice."""
    counts, fired = {}, {"I": [], "W": []}
    for name in ("1f1b", "zero_bubble"):
        plain = make_layers(2, lambda: nn.Sequential(Layer(), Again()))
        stage, ours = make_pipeline(plain, name, 2)
        run, running = ours._run, []
        ours._run = lambda action, run=run, running=running: (running.append(action[1]), run(action))
        for n, q in stage.named_parameters() if name == "zero_bubble" else ():
            q.register_post_accumulate_grad_hook(lambda q, n=n, running=running: fired[running[-1]].append(n))
        with FlopCounterMode(display=False) as counter:
            ours.step(*make_batch(0, 4, (5, 6)))
        counts[name] = counter.get_total_flops()
    assert counts["1f1b"] == counts["zero_bubble"]
    names = {n for n, _ in stage.named_parameters()}
    early = {n for n in names if "norm" in n}
    assert Counter(fired["I"]) == dict.fromkeys(early, 2)
    assert Counter(fired["W"]) == dict.fromkeys(names - early, 2)
    assert F.linear is pipeline.linear


def activations_are_freed_after_their_backward(name, m):
    gc.disable()  # freed by reference counts alone
    alive, most, leaving = Counter(), [], []
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Hardswish())  # which saves its input

    def watch(module, inputs, hidden):
        alive["now"] += 1
        most.append(alive["now"])
        weakref.finalize(hidden, alive.subtract, ["now"])

    stage[1].register_forward_hook(watch)
    ours = Pipeline(stage, name, m, F.mse_loss, pool.group())
    run = ours._run
    ours._run = lambda action: (run(action), leaving.append(len(ours._leaving)))
    ours.step(*make_batch(0, m))
    expected = simulate(build_schedule(name, pool.world_size(), m)).peak_activations[pool.rank()]
    found = max(most), alive["now"], max(leaving) <= 4  # messages on their way
    most.clear()
    ours.eval_step(*make_batch(0, m))
    gc.enable()
    assert (*found, max(most)) == (expected, 0, True, 1)


def sent_bytes_are_the_docstrings(name, m, v):
    """And every transfer is waited for: an isend whose handle is dropped can hang, or send what its buffer becomes."""
    p, rank, handles = pool.world_size(), pool.rank(), []

    def watch(start):
        return lambda *args, **kwargs: handles.append(mock.Mock(wraps=start(*args, **kwargs))) or handles[-1]

    ours = Pipeline(make_layers(v), name, m, F.mse_loss, pool.group())
    ours.step(*make_batch(0, 2 * m))  # the first also tells shapes
    with mock.patch.object(dist, "isend", watch(dist.isend)), mock.patch.object(dist, "irecv", watch(dist.irecv)):
        with Collectives() as seen:
            ours.step(*make_batch(0, 2 * m))
        ours.eval_step(*make_batch(0, 2 * m))
    boundaries = (v - (rank == p - 1)) + (v - (rank == 0)) if p > 1 else 0
    assert seen.bytes_of("send") == m * boundaries * 2 * 6 * 4
    assert [call for call in seen.calls if call[0] not in ("send", "recv_")] == [("allreduce_", 16), ("allreduce_", 8)]
    assert len(handles) == 3 * m * boundaries
    assert all(handle.wait.called for handle in handles)


def a_stage_that_raises(name, where, kind, microbatch, bad_step):
    """Its error is raised there, told on all ranks, and the step after it is right."""
    rank, plain = pool.rank(), make_layers(pool.world_size())
    (stage, ours), calls = make_pipeline(plain, name, 4), itertools.count()

    def hook(module, inputs, output):
        if (rank, next(calls)) == (where, 4 * bad_step + microbatch):
            1 / 0 if kind == "F" else output.register_hook(lambda _: 1 / 0)

    stage.register_forward_hook(hook)
    told = f"rank {where} failed in {where}{kind}{microbatch} with ZeroDivisionError('division by zero')"
    error, text = (ZeroDivisionError, "division by zero") if rank == where else (RuntimeError, told)
    for step in range(2 + bad_step):
        stage.zero_grad()
        with pytest.raises(error, match=f"^{re.escape(text)}$") if step == bad_step else nullcontext():
            ours.step(*make_batch(step, 8))
        calls = itertools.count(4 * (step + 1))
    accumulate(plain, *make_batch(step, 8), 4)
    assert_same_parameters(stage, plain[rank], exact=True)


def an_output_that_changes_is_an_error():
    stage, ours = make_pipeline([nn.Linear(6, 6)] * 2, "gpipe", 2)
    ours.step(*make_batch(0, 4))
    if pool.rank() == 0:
        stage.register_forward_hook(lambda module, inputs, output: output.double())
    with pytest.raises(RuntimeError, match=r"was .*float32.* for inputs of the same shapes, and is now .*float64"):
        ours.step(*make_batch(1, 4))


REFUSED = {  # what is given instead, on the last rank or on all, and what the error says
    "schedule": (lambda last: {"schedule": "gpipe" if last else "1f1b"}, "schedules differ"),
    "stages": (lambda last: {"schedule": build_schedule("1f1b", 2, 4), "stages": [nn.Linear(6, 6)] * (1 + last)},
               r"are \[\[4, 1\], \[4, 2\]\], or schedules differ; the schedule needs \[\(4, 1\), \(4, 1\)\]"),
    "microbatches": (lambda last: {"schedule": build_schedule("1f1b", 2, 5)}, r"needs \[\(5, 1\), \(5, 1\)\]"),
    "mode": (lambda last: {"grad": not last}, "1 of 2 ranks have gradients enabled"),
    "samples": (lambda last: {"inputs": torch.ones(5, 6)}, "5 samples into 3 micro-batches, not into 4"),
    "no targets": (lambda last: {"targets": None}, "None"),
}  # fmt: skip


def wrong_use_is_an_error_on_every_rank(case):
    """Also where only the rank that takes a batch sees that it is wrong."""
    batch = dict(zip(("inputs", "targets"), make_batch(0, 8), strict=True))
    usual = {"stages": nn.Linear(6, 6), "schedule": "1f1b", "grad": True, **batch}
    change, words = REFUSED[case]
    stages, schedule, grad, inputs, targets = (usual | change(pool.rank() == 1)).values()
    errors = (ValueError, RuntimeError, AttributeError) if {"inputs", "targets"} & change(False).keys() else ValueError
    with torch.set_grad_enabled(grad), pytest.raises(errors, match=words):
        Pipeline(stages, schedule, 4, F.mse_loss, pool.group()).step(inputs, targets)


# What holds: on how many ranks, of which body, and its arguments.
KINDS = [Branches, Again, partly_frozen]
CLAIMS = [
    *((3, equals_one_device, Layer, name, 5, 2) for name in SCHEDULES),
    *((4, equals_one_device, Layer, name, 2, 1) for name in ("interleaved_1f1b", "zero_bubble")),
    (1, equals_one_device, Layer, "1f1b", 3, 1),
    # Down the ranks and up again: two stages meet on the last rank, first and last on the first.
    *((3, equals_one_device, Layer, pytorchs.build_schedule(name, 3, 7, 2), 7, 2) for name in V_SHAPED),
    *((3, equals_one_device, make, "zero_bubble", 3, 1, (5, 6)) for make in KINDS),
    (2, equals_one_device, Branches, "interleaved_1f1b", 3, 2, (5, 6)),
    (3, the_idea_is_right),
    *((3, through_what_is_frozen_nothing_is_sent_back, name) for name in ("gpipe", "zero_bubble")),
    *((3, shapes_dtypes_and_what_is_frozen_may_change_from_step_to_step, name) for name in ("1f1b", "zero_bubble")),
    (2, the_mean_is_over_tokens_that_count),
    (2, evaluation_only_goes_forward, "interleaved_1f1b", 2),
    (2, w_computes_the_gradients_of_linear_weights_and_nothing_else),
    *((3, activations_are_freed_after_their_backward, name, 7) for name in ("gpipe", "1f1b")),
    (2, sent_bytes_are_the_docstrings, "interleaved_1f1b", 4, 3),
    (3, sent_bytes_are_the_docstrings, "zero_bubble", 4, 1),
    (3, a_stage_that_raises, "1f1b", 1, "F", 2, 0),
    (3, a_stage_that_raises, "zero_bubble", 1, "I", 1, 1),
    (2, an_output_that_changes_is_an_error),
    *((2, wrong_use_is_an_error_on_every_rank, case) for case in REFUSED),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[1].__name__}-{claim[0]}")
def test_that(claim):
    pool.run(*claim)
