"""pipeline.py against micro-batch accumulation on one device, its schedules against PyTorch's; more is in tests/claims."""

import copy
import dataclasses
import gc
import inspect
import itertools
import re
import weakref
from collections import Counter
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

import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, parse, simulate

V_SHAPED = [
    name for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") if hasattr(theirs, name)
]  # torch ≥ 2.7
FORMATS = "format" in inspect.signature(theirs.ScheduleInterleaved1F1B._dump_csv).parameters


@given(p=st.integers(1, 8), m=st.integers(1, 16), v=st.integers(1, 4), b=st.integers(1, 5))
def test_schedules_cost_what_the_docstring_says_and_are_pytorchs(p, m, v, b):
    """Bubbles and peaks of the closed forms, where a backward takes b forwards; of two names PyTorch's very orders."""
    forms = {"gpipe": ((p - 1) / (m + p - 1), [m] * p), "naive": (1 - 1 / p, [1] * p)}
    forms["1f1b"] = forms["gpipe"][0], [min(p - rank, m) for rank in range(p)]
    for name, (bubble, peaks) in forms.items():
        times = simulate(build_schedule(name, p, m), {"F": 1, "B": b})
        assert (times.bubble_fraction, times.peak_activations) == (pytest.approx(bubble), peaks)
    interleaved = simulate(build_schedule("interleaved_1f1b", p, b * p, v), {"F": 1, "B": b})
    assert interleaved.bubble_fraction == pytest.approx((p - 1) / (v * b * p + p - 1))
    zero_bubble = simulate(build_schedule("zero_bubble", p, m))
    assert zero_bubble.peak_activations == [min(p, m)] * p
    assert m < p or zero_bubble.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        assert build_schedule("interleaved_1f1b", p, m, v) == pytorchs.build_schedule(
            "ScheduleInterleaved1F1B", p, m, v
        )
        assert build_schedule("zero_bubble", p, m) == pytorchs.build_schedule(
            "ScheduleInterleavedZeroBubble", p, m
        )


@pytest.mark.skipif(
    not FORMATS, reason=f"torch {torch.__version__} writes schedules in one format only"
)
@pytest.mark.parametrize("name", [*V_SHAPED, "ScheduleInterleaved1F1B"])
def test_csv_files_are_pytorchs(name, tmp_path):
    schedule = pytorchs.make_schedule(name, 4, 8, 2)
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(tmp_path / form, format=form)
        ours = pipeline.schedule_from_csv(tmp_path / form)
        assert ours == pytorchs.build_schedule(name, 4, 8, 2)
    pipeline.schedule_to_csv(ours, tmp_path / "ours")
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert pytorchs.order_of(schedule, 4) == ours


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(6),
            nn.Linear(6, 10),
            nn.Linear(10, 6, bias=False),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Linear layers frozen, in part, of computed weight, used twice, in a checkpoint; a tuple with what is not used."""

    def __init__(self):
        super().__init__()
        self.frozen, self.no_weight, self.no_bias, self.twice, normed = (
            nn.Linear(6, 6) for _ in range(5)
        )
        for parameter in (*self.frozen.parameters(), self.no_weight.weight, self.no_bias.bias):
            parameter.requires_grad_(False)
        self.normed, self.layer = nn.utils.parametrizations.weight_norm(normed), Layer()

    def forward(self, x, mask=None, rows=None, unused=None):
        mask, rows = (x > 0, torch.arange(len(x)).flip(0)) if mask is None else (mask, rows)
        y = x
        with torch.autocast("cpu", torch.bfloat16):
            for linear in (
                self.frozen,
                self.no_weight,
                self.twice,
                self.no_bias,
                self.normed,
                self.twice,
            ):
                y = (torch.tanh(linear(y)) + y).to(x.dtype)
            y = checkpoint(self.layer, y, use_reentrant=False).to(x.dtype)
        return y[rows] * mask, mask, rows, torch.cat([x, x], dim=-1)[..., ::2]


def make_layers(n, make=Layer):
    torch.manual_seed(1)
    return nn.ModuleList(make() for _ in range(n))


def make_batch(step, rows, shape=(6,), dtype=torch.float32):
    return (
        torch.randn(2, rows, *shape, generator=torch.Generator().manual_seed(step))
        .to(dtype)
        .unbind()
    )


def accumulate(stages, inputs, targets, m, weight=len):
    """One device, plainly: each micro-batch's loss counts by its weight. -> mean loss, outputs"""
    losses, outputs, weights = [], [], [float(weight(target)) for target in targets.chunk(m)]
    for x, target, share in zip(inputs.chunk(m), targets.chunk(m), weights, strict=True):
        y = (x,)
        for stage in stages:
            y = (stage(*y),) if isinstance(stage, Layer) else stage(*y)
        outputs.append(y)
        losses.append(F.mse_loss(y[0], target) * (share / sum(weights)))
        if torch.is_grad_enabled():
            losses[-1].backward()
    return torch.stack(losses).detach().sum(), [
        torch.cat(parts) for parts in zip(*outputs, strict=True)
    ]


RUNS = [  # what each stage is, the schedule, micro-batches, stages on each rank
    *((Layer, name, 2, 1) for name in ("interleaved_1f1b", "zero_bubble")),
    # V: down the ranks and up again; two stages meet on the last rank, first and last on the first.
    *((Layer, name, 7, 2) for name in (*SCHEDULES, *V_SHAPED)),
    (Odd, "zero_bubble", 3, 1),
    (Odd, "interleaved_1f1b", 3, 2),
]


@pytest.mark.parametrize(("make", "name", "m", "v"), RUNS)
@pool.on(1, 3)
def test_trains_as_one_device(make, name, m, v):
    """Bitwise, while batches and what is frozen change; what is sent, waited for, alive and done when; evaluation."""
    gc.disable()  # freed by reference counts alone
    rank, S = pool.rank(), pool.world_size() * v
    schedule = (build_schedule if name in SCHEDULES else pytorchs.build_schedule)(
        name, pool.world_size(), m, v
    )
    rank_of = {parse(action)[0]: r for r, actions in enumerate(schedule) for action in actions}
    cuts = [s for s in range(S - 1) if rank_of[s] != rank_of[s + 1]]
    plain, mine = make_layers(S, make), [s for s in range(S) if rank_of[s] == rank]
    stages, last = copy.deepcopy(nn.ModuleList(plain[s] for s in mine)), S - 1 in mine
    weight = (
        (lambda target: (target > 0).sum()) if name == "1f1b" else len
    )  # as of tokens that are not masked
    loss_fn = F.mse_loss if make is Layer else lambda output, target: F.mse_loss(output[0], target)
    ours = Pipeline(stages, schedule, m, loss_fn, pool.group(), weight=weight)
    optimizer = OPTIMIZERS["sgd"]([*stages.parameters(), *plain.parameters()])
    alive, peaks, reached, handles = Counter(), [], Counter(), []

    def count(module, inputs):  # the input of a stage's last layer, which its backward needs
        alive["now"] += 1
        peaks.append(alive["now"])
        weakref.finalize(inputs[0].untyped_storage(), alive.subtract, ["now"])
        assert len(ours._leaving) <= 4  # messages on their way

    def watch(operations, start=dist.batch_isend_irecv):
        assert len(operations) == 1  # one global order of messages, not of batches
        new = [mock.Mock(wraps=work) for work in start(operations)]
        handles.extend(
            new
        )  # an isend whose handle is dropped can hang, or send what its buffer becomes
        return new

    for stage in stages:
        (stage.down if make is Layer else stage.layer.norm).register_forward_pre_hook(count)
    trained = [
        (n, parameter) for n, parameter in stages.named_parameters() if parameter.requires_grad
    ]
    for n, parameter in trained:
        key = lambda n=n: (schedule[rank][len(ours._timeline)][1], n)  # noqa: E731
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: reached.update([key()]))
    watched = mock.patch.object(dist, "batch_isend_irecv", watch)
    for step, (rows, *shape) in enumerate(
        [(2 * m, 5, 6)] * 2 + [(2 * m - 1, 6)] + [(2 * m, 6)] * 3
    ):
        frozen, dtype = (
            min(2, S - 1) if step > 2 else 0,
            torch.float64 if step > 4 else torch.float32,
        )
        nn.ModuleList([*plain[:frozen], *stages[: sum(s < frozen for s in mine)]]).requires_grad_(
            False
        )
        nn.ModuleList([plain, stages]).to(dtype)
        inputs, targets = make_batch(step, rows, shape, dtype)
        own = (
            (inputs,) if 0 in mine else None,
            targets if last else None,
        )  # others do not see the shapes
        with watched, Collectives() as seen:
            loss = ours.step(*own)
        expected, _ = accumulate(plain, inputs, targets, m, weight)
        assert_equal(loss, expected if last else None, exact=True)
        optimizer.step()
        for s, stage in zip(mine, stages, strict=True):
            assert_same_parameters(stage, plain[s], True, f"step {step}, stage {s}")
        times = [0, *itertools.chain(*(times for _, *times in ours.timeline))]
        assert ([action for action, *_ in ours.timeline], times) == (schedule[rank], sorted(times))
        assert alive["now"] == 0
        if make is Layer and step in (1, 4):  # in the others ranks tell each other shapes, too
            sends = [rank_of[s] for s in cuts] + [rank_of[s + 1] for s in cuts if s >= frozen]
            expected = sends.count(rank) * inputs.nbytes + 24 + 8  # two sums over all ranks
            assert sum(size for name, size in seen.calls if name != "recv_") == expected
    assert make is Odd or max(peaks) == simulate(schedule).peak_activations[rank]
    if (
        name == "zero_bubble"
    ):  # W computes the gradients of linear layers' weights, and nothing else
        assert reached == {
            ("I" if "norm" in n else "W", n): m * (6 if q.requires_grad else 3) for n, q in trained
        }
    again = [
        3 + 3 * (s >= frozen) if make is Odd else 0 for s in mine
    ]  # as its checkpoint says, and no more
    assert len(peaks) == m * sum(6 + steps for steps in again)
    peaks.clear()
    with watched, torch.no_grad():
        loss, outputs = accumulate(plain, inputs, targets, m, weight)
        found = ours.eval_step(own[0])
    assert_equal(ours.eval_step(*own), loss if last else None, exact=True)
    for output, expected in zip(
        [found] if torch.is_tensor(found) else found or (), outputs * last, strict=True
    ):
        assert_equal(output, expected, exact=True)
    assert [action for action, *_ in ours.timeline] == [
        action for action in schedule[rank] if "F" in action
    ]
    assert max(peaks) == 1
    assert all(handle.wait.called for handle in handles)
    assert F.linear is pipeline.linear
    gc.enable()


@pool.on(2)
def test_the_idea_is_right():
    plain, (inputs, targets), rank = make_layers(2), make_batch(0, 8), pool.rank()
    stage = copy.deepcopy(plain[rank])
    loss = pipeline.gpipe_step(stage, 4, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    expected, _ = accumulate(plain, inputs, targets, 4)
    assert_equal(loss, expected if rank == 1 else None, exact=False)
    assert_same_parameters(stage, plain[rank], exact=True)


FAILS = {  # the action of rank 1 that fails: the schedule, in which step, how, and with what
    "1F2": ("1f1b", 0, lambda output: 1 / 0, "ZeroDivisionError"),
    "1I1": (
        "zero_bubble",
        1,
        lambda output: output.register_hook(lambda _: 1 / 0) and None,
        "ZeroDivisionError",
    ),
    "1F0": (
        "gpipe",
        1,
        lambda output: output.double(),
        "RuntimeError.*was .*float32.* and is now .*float64",
    ),
}


@pytest.mark.parametrize("action", FAILS)
@pool.on(3)
def test_a_stage_that_fails(action):
    """Its error is raised there, told on all ranks, and the step after it is right."""
    rank, plain, calls, (name, bad_step, fault, error) = (
        pool.rank(),
        make_layers(3),
        [],
        FAILS[action],
    )
    stage = copy.deepcopy(plain[rank])
    ours = Pipeline(stage, name, 4, F.mse_loss, pool.group())

    def hook(module, inputs, output):
        calls.append(step)
        return (
            fault(output)
            if (rank, step, calls.count(step)) == (1, bad_step, parse(action)[2] + 1)
            else None
        )

    stage.register_forward_hook(hook)
    for step in range(2 + bad_step):
        stage.zero_grad()
        try:
            told = str(ours.step(*make_batch(step, 8)))
        except (ZeroDivisionError, RuntimeError) as raised:
            told = repr(raised)
        elsewhere = f"RuntimeError.*rank 1 failed in {action} with " if rank != 1 else ""
        assert re.match(elsewhere + error if step == bad_step else "None|tensor", told)
    accumulate(plain, *make_batch(step, 8), 4)
    assert_same_parameters(stage, plain[rank], exact=True)


F4 = build_schedule("1f1b", 2, 4)


@dataclasses.dataclass
class Mask:
    x: object


class Returns(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 6)
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        return self.kind(x=y) if self.kind is dict else self.kind(y)


def with_none(x):
    return x, None


REFUSED = [  # what is given to rank 0 instead of what is right, to rank 1 (None: the same), and what both are told
    ({"schedule": [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]}, None, "1B1 waits for 1F1 waits for"),
    ({"schedule": [["0F0", "0W0", "0I0"], []]}, None, "0W0 waits for 0I0 waits for 0W0"),
    ({"schedule": [["0F0", "0B0", "0W0"], []]}, None, "'FBW' is done"),
    ({"schedule": [["0F0", "0B0", "0F2", "0B2"], []]}, None, "of stage 0, micro-batch 1 '' is done"),
    ({"schedule": [["0F0"], ["0B0"]]}, None, "of stage 0, micro-batch 0 'B' is done"),
    ({"stages": []}, None, "'1f1b' of 2 ranks, 4 micro-batches, 0 stages each"),
    ({"schedule": "2f2b"}, None, "names: naive, gpipe, 1f1b"),
    ({"schedule": "1f1b"}, {"schedule": "gpipe"}, "schedules differ"),
    ({"schedule": F4}, {"schedule": F4, "stages": [nn.Linear(6, 6)] * 2},
     "are [[4, 1], [4, 2]], or schedules differ; the schedule needs [(4, 1), (4, 1)]"),
    ({"grad": True}, {"grad": False}, "1 of 2 ranks have gradients enabled"),
    ({"inputs": torch.ones(5, 6)}, None, "5 samples into 3 micro-batches, not into 4"),
    ({"targets": None}, None, "targets must be a tensor on the rank that takes them, not NoneType"),
    ({"inputs": None}, None, "inputs must be a tensor on the rank that takes them, not NoneType"),
    ({"inputs": (torch.ones(8, 6), "mask")}, None, "inputs must be a tensor on the rank that takes them, not str"),
    ({"stages": Returns(dict)}, None, "stage 0 returned dict; a stage returns a tensor or a tuple of tensors"),
    ({"stages": Returns(Mask)}, None, "stage 0 returned Mask; a stage returns"),
    ({"stages": Returns(with_none)}, None, "stage 0 returned Tensor, NoneType; a stage returns"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "words"), REFUSED)
@pool.on(2)
def test_wrong_use_is_an_error_on_every_rank(first, second, words):
    """Also where only the rank that takes a batch sees that it is wrong."""
    batch = dict(zip(("inputs", "targets"), make_batch(0, 8), strict=True))
    usual = {"stages": nn.Linear(6, 6), "schedule": "1f1b", "grad": True, **batch}
    stages, schedule, grad, inputs, targets = (
        usual | (second if second and pool.rank() else first)
    ).values()
    errors = (ValueError, RuntimeError) if isinstance(stages, Returns) else ValueError
    with torch.set_grad_enabled(grad), pytest.raises(errors, match=re.escape(words)):
        Pipeline(stages, schedule, 4, F.mse_loss, pool.group()).step(inputs, targets)


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo"])
@pool.on(2)
def test_messages_lie_where_the_tensors_do_whatever_the_backend_is_called(backend):
    group = dist.new_group(range(2), backend=backend)
    assert dist.get_backend(group) != "gloo"
    stage = [nn.Linear(6, 6), nn.Tanh()][
        pool.rank()
    ]  # a stage without parameters hears of the other
    loss = Pipeline(stage, "1f1b", 4, F.mse_loss, group).step(*make_batch(0, 8))
    assert (loss is None) == (pool.rank() == 0)


WIRES = [
    ("cpu", "cpu:gloo", "cpu"),
    ("cpu", "cpu:gloo,cuda:nccl", "cpu"),
    ("cuda:1", "cpu:gloo,cuda:gloo", "cpu"),
    ("cuda:1", "cpu:gloo,cuda:nccl", "cuda:1"),
    ("cuda:1", "cuda:nccl", "cuda:1"),
]


@pytest.mark.parametrize(("device", "config", "wire"), WIRES)
def test_gloo_alone_sends_from_the_hosts_memory(device, config, wire):
    assert pipeline.wire_device(torch.device(device), config) == torch.device(wire)


@pool.on(1)
def test_inputs_and_targets_are_moved_to_the_stages_device():
    seen = []

    def loss_fn(output, target):
        seen.append((output.device.type, target.device.type))
        return F.mse_loss(output, target)

    ours = Pipeline(nn.Linear(6, 6, device="meta"), "gpipe", 2, loss_fn, pool.group())
    ours._wire = "cpu"  # gloo sends no tensors on meta; a world of one has none to send
    ours.step(*make_batch(0, 8))
    assert seen == [("meta", "meta")] * 2


@pool.on(1)
def test_the_timeline_on_a_gpu_is_that_of_its_stream():
    """From events, which nothing waits for until somebody asks."""
    clock, waited = itertools.count(), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = next(clock)

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            return end.ms - self.ms

    ours = Pipeline(nn.Linear(6, 6), "gpipe", 2, F.mse_loss, pool.group())
    real_now = pipeline.now

    def gpus_now(device):
        return real_now(torch.device("cuda"))

    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(pipeline, "now", gpus_now),
    ):
        ours.step(*make_batch(0, 8))
    assert not waited
    times = {"0F0": (1, 2), "0F1": (3, 4), "0B0": (5, 6), "0B1": (7, 8)}
    assert ours.timeline == [(a, s / 1e3, e / 1e3) for a, (s, e) in times.items()]
    assert waited
