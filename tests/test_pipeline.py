"""pipeline.py against micro-batch accumulation on one device, its schedules against torch.distributed.pipelining's.

That the schedules are complete, in order, free of deadlocks and short is said in claims.py. What holds of the
interpreter is in CLAIMS, at the end.
"""

import copy
import csv
import gc
import itertools
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pool
import pytest
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


def parse(action):
    return re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups()


# ---- schedules, without processes


def needed(action, last):
    """What the action depends on."""
    stage, kind, i = parse(action)
    stage = int(stage)
    if kind == "F":
        return {f"{stage - 1}F{i}"} if stage else set()
    if kind == "W":
        return {f"{stage}I{i}"}
    return {f"{stage}F{i}"} | ({f"{stage + 1}{kind}{i}"} if stage < last else set())


@given(name=st.sampled_from(SCHEDULES), f=st.integers(1, 3), b=st.integers(1, 3), **numbers)
def test_an_action_starts_as_soon_as_it_can_and_no_sooner(name, f, b, p, m, v):
    """So in the order of simulated time all that an action needs stands before it, also its rank's action before."""
    schedule = build_schedule(name, p, m, v)
    cost = {"F": f, "B": b, "I": b}
    times = simulate(schedule, cost)
    for actions in schedule:
        for before, action in zip([None, *actions], actions, strict=False):
            needs = [times.end[a] for a in needed(action, p * v - 1)] + [times.end[before] if before else 0]
            assert times.start[action] == max(needs)
            assert times.end[action] - times.start[action] == cost.get(parse(action)[1], 1)
    busy = sum(times.end[a] - times.start[a] for a in times.end)
    assert times.bubble_fraction == pytest.approx(1 - busy / (p * max(times.end.values())))


@given(b=st.integers(1, 5), **numbers)
def test_bubble_and_memory_are_the_docstrings_closed_forms(b, p, m, v):
    cost = {"F": 1, "B": b}
    for name in ("gpipe", "1f1b"):
        times = simulate(build_schedule(name, p, m), cost)
        assert times.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert times.peak_activations == [m if name == "gpipe" else min(p - rank, m) for rank in range(p)]
    naive = simulate(build_schedule("naive", p, m), cost)
    assert naive.bubble_fraction == pytest.approx(1 - 1 / p)
    assert naive.peak_activations == [1] * p
    rounds = 1 + m // 8
    interleaved = simulate(build_schedule("interleaved_1f1b", p, rounds * p, v), cost)
    assert interleaved.bubble_fraction == pytest.approx((p - 1) / (v * rounds * p + p - 1))
    zero_bubble = simulate(build_schedule("zero_bubble", p, m))
    assert zero_bubble.peak_activations == [min(p, m)] * p
    if m >= p:
        assert zero_bubble.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
         "0B0 waits for 1B0 waits for 1F0 waits for 1B1 waits for 1F1 waits for 0F1 waits for 0B0"),
        ([["0B0", "0F0"]], "0B0 waits for 0F0 waits for 0B0"),
        ([["0F0", "0W0", "0I0"]], "0W0 waits for 0I0"),
        ([["0F0", "0B0"], ["1F0"]], "of stage 1, micro-batch 0 'F' is done"),
        ([["0F0", "0B0", "0W0"]], "'FBW' is done"),
        ([["0F0", "0B0", "0F2", "0B2"]], "of stage 0, micro-batch 1 '' is done"),
        ([["0F0"], ["0B0"]], "of stage 0, micro-batch 0 'B' is done"),
        ([["0F0", "0X0"]], "'0X0' is not stage, F, B, I or W, micro-batch, as in '2F0'"),
    ],
)  # fmt: skip
def test_wrong_schedules_are_refused(schedule, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate(schedule)


@pytest.mark.parametrize("arguments", [("1f1b", 0, 1), ("gpipe", 1, 0), ("interleaved_1f1b", 2, 2, 0), ("2f2b", 1, 1)])
def test_there_is_no_such_schedule(arguments):
    with pytest.raises(ValueError, match=f"{arguments[0]}.*{arguments[1]} ranks, {arguments[2]} micro-batches.*1f1b"):
        build_schedule(*arguments)


def pytorchs(cls, p, m, v):
    stages = [SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None, is_last=0) for _ in range(v)]
    return cls(stages, m)


def order_of(schedule, p):
    return pipeline.flat([[str(action) for action in schedule.pipeline_order[rank] if action] for rank in range(p)])


@given(**numbers)
def test_the_same_orders_as_pytorchs(p, m, v):
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        order = order_of(pytorchs(theirs.ScheduleInterleaved1F1B, p, m, v), p)
        assert build_schedule("interleaved_1f1b", p, m, v) == order
        order = order_of(pytorchs(theirs.ScheduleInterleavedZeroBubble, p, m, 1), p)
        assert build_schedule("zero_bubble", p, m) == order


V_SHAPED = [name for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") if hasattr(theirs, name)]  # torch ≥ 2.7


@pytest.mark.parametrize("name", [*V_SHAPED, "ScheduleInterleaved1F1B"])
def test_csv_files_are_pytorchs(name, tmp_path):
    schedule = pytorchs(getattr(theirs, name), 4, 8, 2)
    schedule._dump_csv(tmp_path / "compute", format="compute_only")
    schedule._dump_csv(tmp_path / "comms", format="compute_comms")
    ours = pipeline.schedule_from_csv(tmp_path / "compute")
    assert pipeline.schedule_from_csv(tmp_path / "comms") == ours
    assert ("OVERLAP_F_B" in (tmp_path / "compute").read_text()) == (name == "ScheduleDualPipeV")
    assert "SEND_F" in (tmp_path / "comms").read_text()
    assert simulate(ours).bubble_fraction < 0.5
    pipeline.schedule_to_csv(ours, tmp_path / "ours")
    assert pipeline.schedule_from_csv(tmp_path / "ours") == ours
    assert list(csv.reader((tmp_path / "ours").open())) == ours
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert order_of(schedule, 4) == ours


# ---- equality with one device


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
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, *shape, generator=generator), torch.randn(rows, *shape, generator=generator)


def loss_of_first(output, target):
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def stage_of(plain):
    """A copy of this rank's."""
    return copy.deepcopy(plain[pool.rank()])


def pipeline_of(stages, schedule, m, loss_fn=F.mse_loss, **options):
    return Pipeline(stages, schedule, m, loss_fn, pool.group(), **options)


def on_the_last(value):
    return value if pool.rank() == pool.world_size() - 1 else None


def accumulate(stages, inputs, targets, m, loss_fn=F.mse_loss):
    """One device, plainly: each micro-batch's loss counts by its samples. -> mean loss"""
    losses, xs = [], inputs.chunk(m)
    shares = [len(x) / len(inputs) for x in xs]
    for x, target, share in zip(xs, targets.chunk(m), shares, strict=True):
        y = (x,)
        for stage in stages:
            y = stage(*y)
            y = y if isinstance(y, tuple) else (y,)
        losses.append(loss_fn(y[0], target))
        (losses[-1] * share).backward()
    return (torch.stack(losses).detach() * losses[0].new_tensor(shares)).sum()


def equals_one_device(make, schedule, m, v=1, shape=(6,)):
    """Losses, gradients, which add up from step to step, and parameters of this rank's stages; and the timeline."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v, make)
    actions = (build_schedule(schedule, p, m, v) if isinstance(schedule, str) else schedule)[rank]
    mine = sorted({int(parse(action)[0]) for action in actions})
    stages = [copy.deepcopy(plain[s]) for s in mine]
    ours = pipeline_of(stages if v > 1 else stages[0], schedule, m, loss_of_first)
    optimizers = [OPTIMIZERS["sgd"](nn.ModuleList(module).parameters()) for module in (stages, plain)]
    for step in range(2):
        inputs, targets = make_batch(step, 2 * m, shape)
        loss = ours.step(inputs if 0 in mine else None, targets if p * v - 1 in mine else None)
        expected = accumulate(plain, inputs, targets, m)
        assert_equal(loss, expected if p * v - 1 in mine else None, exact=True)
        for o in optimizers:
            o.step()
        for s, stage in zip(mine, stages, strict=True):
            assert_same_parameters(stage, plain[s], True, f"{schedule}, m {m}, v {v}, step {step}, stage {s}")
    assert [action for action, *_ in ours.timeline] == actions
    times = [0, *itertools.chain(*((start, end) for _, start, end in ours.timeline))]
    assert times == sorted(times)


def every_schedule_is_bitwise_micro_batch_accumulation(cases):
    for name, (m, v) in itertools.product(SCHEDULES, cases):
        equals_one_device(Layer, name, m, v)


def the_idea_is_right():
    plain, (inputs, targets) = make_layers(pool.world_size()), make_batch(0, 8)
    stage = stage_of(plain)
    loss = pipeline.gpipe_step(stage, 4, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    expected = accumulate(plain, inputs, targets, 4)
    assert_same_parameters(stage, plain[pool.rank()], exact=True)
    assert loss is on_the_last(loss)
    assert loss is None or torch.allclose(loss, expected)


def v_shaped_stages_equal_one_device(name, m):
    """Down the ranks and up again: two stages meet on the last rank, first and last on the first."""
    p = pool.world_size()
    equals_one_device(Layer, order_of(pytorchs(getattr(theirs, name), p, m, 2), p), m, 2)


class Branches(nn.Module):
    """Passes on a tensor to train on, a mask without gradient, integers, and what the next stage does not use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask=None, rows=None, unused=None):
        if mask is None:
            mask, rows = x > 0, torch.arange(len(x)).flip(0)
        return torch.tanh(self.linear(x))[rows] * mask, mask, rows, x * 2


class Again(nn.Module):
    """One weight in two places, over more than one dimension, and a checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear, self.layer = nn.Linear(6, 6), Layer()

    def forward(self, x):
        return checkpoint(self.layer, self.linear(torch.tanh(self.linear(x))), use_reentrant=False)


class PartlyFrozen(nn.Module):
    """Linear layers of all kinds: frozen, frozen weight, frozen bias, a weight computed from parameters."""

    def __init__(self):
        super().__init__()
        self.frozen, self.weight, self.bias = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.weight.weight.requires_grad_(False)
        self.bias.bias.requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.normed(torch.tanh(self.bias(torch.relu(self.weight(torch.tanh(self.frozen(x)))))))


class Attention(nn.TransformerEncoderLayer):
    """PyTorch's own, whose products take transposed views."""

    def __init__(self):
        super().__init__(6, 2, 12, dropout=0.0, batch_first=True)


class Cast(Layer):
    """What it returns is not contiguous."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float().transpose(0, 1).contiguous().transpose(0, 1)


def stages_of_all_kinds_equal_one_device(make, name, v):
    equals_one_device(make, name, 3, v, shape=(5, 6))


def through_what_is_frozen_nothing_is_sent_back(name):
    rank, plain = pool.rank(), [Layer().requires_grad_(False), nn.Tanh(), *make_layers(1)]
    stage = stage_of(plain)
    with Collectives() as seen:
        pipeline_of(stage, name, 2).step(*make_batch(0, 4))
    accumulate(plain, *make_batch(0, 4), 2)
    assert_same_parameters(stage, plain[rank], exact=True)
    assert rank == 0 or "recv_" in dict(seen.calls)
    assert rank < 2 or "send" not in dict(seen.calls)


def shapes_dtypes_and_what_is_frozen_may_change_from_step_to_step(name):
    """And back; the last micro-batch is smaller."""
    rank, plain = pool.rank(), make_layers(pool.world_size())
    stage = stage_of(plain)
    ours = pipeline_of(stage, name, 4)
    cases = [(7, (6,)), (8, (6,)), (7, (3, 6)), (7, (6,)), (7, (6,)), (11, (2, 6)), (8, (6,))]
    for step, (rows, shape) in enumerate(cases):
        if step == 4:  # of the same shapes as the one before
            plain[0].requires_grad_(False)
            stage.requires_grad_(rank > 0)
        if step == 6:
            for module in (stage, *plain):
                module.double().zero_grad()
        dtype = next(stage.parameters()).dtype
        inputs, targets = (t.to(dtype) for t in make_batch(step, rows, shape))
        loss = ours.step(inputs if rank == 0 else None, on_the_last(targets))  # the others do not see the new shapes
        assert_equal(loss, on_the_last(accumulate(plain, inputs, targets, 4)), exact=True)
        assert_same_parameters(stage, plain[rank], True, f"step {step}")


def the_mean_is_over_tokens_that_count():
    plain = [layer.double() for layer in make_layers(pool.world_size())]
    inputs, targets = make_batch(0, 6)[0].double(), torch.tensor([1, -100, -100, 0, 3, 5])
    stage = stage_of(plain)
    ours = pipeline_of(stage, "1f1b", 3, F.cross_entropy, weight=lambda target: (target != -100).sum())
    loss = ours.step(inputs, targets)
    expected = F.cross_entropy(nn.Sequential(*plain)(inputs), targets)  # of the whole batch at once
    expected.backward()
    assert_same_parameters(stage, plain[pool.rank()], exact=False)
    assert_equal(loss, on_the_last(expected.detach()), exact=False)


def evaluation_only_goes_forward(name, v):
    p, rank = pool.world_size(), pool.rank()
    plain, (inputs, targets) = make_layers(p * v), make_batch(0, 8)
    ours = pipeline_of([copy.deepcopy(stage) for stage in plain[rank::p]], name, 4)
    ours.step(inputs, targets)
    gradients = [q.grad.clone() for q in ours.parameters()]
    with torch.no_grad():
        output = torch.cat([nn.Sequential(*plain)(x) for x in inputs.chunk(4)])
        expected = torch.stack([F.mse_loss(*part) for part in zip(output.chunk(4), targets.chunk(4), strict=True)])
        losses = [ours.step(inputs, targets)]
    for loss in (*losses, ours.eval_step(inputs, targets)):
        assert_equal(loss, on_the_last(expected.mean()), exact=True)
    assert_equal(ours.eval_step(inputs), on_the_last(output), exact=True)
    assert all(torch.equal(a, q.grad) for a, q in zip(gradients, ours.parameters(), strict=True))
    forward = [a for a in build_schedule(name, p, 4, v)[rank] if "F" in a]
    assert [action for action, *_ in ours.timeline] == forward


def a_tuple_goes_in_and_comes_out():
    plain, inputs = make_layers(2, Branches), make_batch(0, 4)[0]
    given = inputs, inputs < 0, torch.tensor([1, 0, 0, 1])
    outputs = pipeline_of(stage_of(plain), "1f1b", 2).eval_step(given)
    parts = [plain[1](*plain[0](*part)) for part in zip(*(t.chunk(2) for t in given), strict=True)]
    for whole, found in zip(map(torch.cat, zip(*parts, strict=True)), outputs or (), strict=False):
        assert_equal(found, whole.detach(), exact=True)
    assert (outputs is None) == (pool.rank() == 0)


# ---- what it costs


def w_computes_the_gradients_of_linear_weights_and_nothing_else():
    """I none of them, and nothing is computed twice."""
    counts, fired, running = {}, {"I": [], "W": []}, []
    for name in ("1f1b", "zero_bubble"):
        stage = make_layers(2, lambda: nn.Sequential(Attention(), Layer(), Again()))[pool.rank()]
        ours = pipeline_of(stage, name, 2)
        if name == "zero_bubble":
            run = ours._run
            ours._run = lambda action, run=run: (running.append(parse(action)[1]), run(action))
            for n, q in stage.named_parameters():
                q.register_post_accumulate_grad_hook(lambda q, n=n: fired[running[-1]].append(n))
        with FlopCounterMode(display=False) as counter:
            ours.step(*make_batch(0, 4, (5, 6)))
        counts[name] = counter.get_total_flops()
    assert counts["1f1b"] == counts["zero_bubble"]
    names = {n for n, _ in stage.named_parameters()}
    early = {n for n in names if "norm" in n}
    assert Counter(fired["I"]) == dict.fromkeys(early, 2)
    assert Counter(fired["W"]) == dict.fromkeys(names - early, 2)
    assert F.linear is pipeline.linear


class Watched(nn.Module):
    """Counts the micro-batches whose activations are alive."""

    alive = most = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        hidden = torch.tanh(self.linear(x))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(hidden, lambda: setattr(self, "alive", self.alive - 1))
        return hidden * hidden.sin()


def activations_are_freed_after_their_backward(name, m):
    gc.disable()  # freed by reference counts alone
    try:
        stage, most = Watched(), []
        ours = pipeline_of(stage, name, m)
        run = ours._run
        ours._run = lambda action: (run(action), most.append(len(ours._leaving)))
        ours.step(*make_batch(0, m))
        assert stage.most == simulate(build_schedule(name, pool.world_size(), m)).peak_activations[pool.rank()]
        assert stage.alive == 0
        assert max(most) <= 4  # messages on their way
        stage.most = 0
        ours.eval_step(*make_batch(0, m))
        assert stage.most == 1
    finally:
        gc.enable()


def sent_bytes_are_the_docstrings(name, m, v):
    p, rank = pool.world_size(), pool.rank()
    ours = pipeline_of(make_layers(v), name, m)
    for _ in range(2):  # the first also tells shapes
        with Collectives() as seen:
            ours.step(*make_batch(0, 2 * m))
    boundaries = (v - (rank == p - 1)) + (v - (rank == 0)) if p > 1 else 0
    assert seen.bytes_of("send") == m * boundaries * 2 * 6 * 4
    others = [call for call in seen.calls if call[0] not in ("send", "recv_")]
    assert others == [("allreduce_", 16), ("allreduce_", 8)]


def every_transfer_is_waited_for():
    """An isend whose handle is dropped can hang, or send what its buffer has become."""
    handles = []

    def watch(start):
        return lambda *args, **kwargs: handles.append(mock.Mock(wraps=start(*args, **kwargs))) or handles[-1]

    with mock.patch.object(dist, "isend", watch(dist.isend)), mock.patch.object(dist, "irecv", watch(dist.irecv)):
        ours = pipeline_of(make_layers(2), "interleaved_1f1b", 4)
        ours.step(*make_batch(0, 8))
        ours.eval_step(*make_batch(0, 8))
    assert handles
    assert all(handle.wait.called for handle in handles)


# ---- failures


def broken(*_):
    raise ZeroDivisionError("broken on purpose")


def a_stage_that_raises(name, where, kind, microbatch, bad_step):
    """Its error is raised there, told on all ranks, and the step after it is right."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p)
    stage = stage_of(plain)
    ours, calls = pipeline_of(stage, name, 4), itertools.count()

    def hook(module, inputs, output):
        if (rank, next(calls)) == (where, 4 * bad_step + microbatch):
            broken() if kind == "F" else output.register_hook(broken)

    stage.register_forward_hook(hook)
    action = f"{where}{'I' if (name, kind) == ('zero_bubble', 'B') else kind}{microbatch}"
    told = f"rank {where} failed in {action} with ZeroDivisionError('broken on purpose')"
    error, text = (ZeroDivisionError, "broken on purpose") if rank == where else (RuntimeError, told)
    for step in range(2 + bad_step):
        stage.zero_grad()
        with pytest.raises(error, match=f"^{re.escape(text)}$") if step == bad_step else nullcontext():
            ours.step(*make_batch(step, 8))
        calls = itertools.count(4 * (step + 1))
    accumulate(plain, *make_batch(step, 8), 4)
    assert_same_parameters(stage, plain[rank], exact=True)


def an_output_that_changes_is_an_error():
    stage = nn.Linear(6, 6)
    ours = pipeline_of(stage, "gpipe", 2)
    ours.step(*make_batch(0, 4))
    stage.register_forward_hook(lambda module, inputs, output: output.double())
    words = r"the output was .*float32.* for inputs of the same shapes, and is now .*float64"
    with pytest.raises(RuntimeError, match=words):
        ours.step(*make_batch(1, 4))


REFUSED = {  # what is given instead, on the last rank or on all, and what the error says
    "schedule": (lambda last: {"schedule": "gpipe" if last else "1f1b"}, "or schedules differ"),
    "stages": (lambda last: {"schedule": build_schedule("1f1b", 2, 4), "stages": [nn.Linear(6, 6)] * (1 + last)},
               "are [[4, 1], [4, 2]], or schedules differ; the schedule needs [(4, 1), (4, 1)]"),
    "microbatches": (lambda last: {"schedule": build_schedule("1f1b", 2, 5)}, "the schedule needs [(5, 1), (5, 1)]"),
    "mode": (lambda last: {"grad": not last}, "1 of 2 ranks have gradients enabled"),
}  # fmt: skip


def wrong_use_is_a_value_error_on_every_rank(case):
    batch = dict(zip(("inputs", "targets"), make_batch(0, 8), strict=True))
    usual = {"stages": nn.Linear(6, 6), "schedule": "1f1b", "grad": True, **batch}
    stages, schedule, grad, inputs, targets = (usual | REFUSED[case][0](pool.rank() == 1)).values()
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=re.escape(REFUSED[case][1])):
        pipeline_of(stages, schedule, 4).step(inputs, targets)


def a_wrong_batch_is_an_error_on_every_rank(inputs, targets, words):
    """Only the rank that takes it sees that it is wrong."""
    ours = pipeline_of(nn.Linear(6, 6), "1f1b", 4)
    for _ in range(2):
        with pytest.raises((ValueError, AttributeError, RuntimeError), match=words):
            ours.step(inputs, targets)
        ours.step(*make_batch(0, 8))


# ---- what holds: ranks, body, its arguments

KINDS = [Branches, Again, PartlyFrozen, Attention, Cast]
CLAIMS = [
    (1, every_schedule_is_bitwise_micro_batch_accumulation, [(2, 1), (3, 2)]),
    (3, every_schedule_is_bitwise_micro_batch_accumulation, [(1, 1), (5, 1), (3, 2)]),  # (m, v)
    (4, every_schedule_is_bitwise_micro_batch_accumulation, [(2, 1), (5, 3)]),
    *((p, the_idea_is_right) for p in (1, 3)),
    *((p, v_shaped_stages_equal_one_device, name, m) for name, p, m in zip(V_SHAPED, (2, 3), (4, 7), strict=False)),
    *((3, stages_of_all_kinds_equal_one_device, make, "zero_bubble", 1) for make in KINDS),
    *((2, stages_of_all_kinds_equal_one_device, make, "interleaved_1f1b", 2) for make in KINDS),
    *((3, through_what_is_frozen_nothing_is_sent_back, name) for name in ("gpipe", "zero_bubble")),
    *((3, shapes_dtypes_and_what_is_frozen_may_change_from_step_to_step, name) for name in ("1f1b", "zero_bubble")),
    (2, the_mean_is_over_tokens_that_count),
    (3, evaluation_only_goes_forward, "1f1b", 1),
    (2, evaluation_only_goes_forward, "interleaved_1f1b", 2),
    (2, a_tuple_goes_in_and_comes_out),
    (2, w_computes_the_gradients_of_linear_weights_and_nothing_else),
    *((3, activations_are_freed_after_their_backward, name, 7) for name in ("gpipe", "1f1b")),
    (1, sent_bytes_are_the_docstrings, "1f1b", 4, 1),
    (2, sent_bytes_are_the_docstrings, "interleaved_1f1b", 4, 3),
    (3, sent_bytes_are_the_docstrings, "zero_bubble", 4, 1),
    (2, every_transfer_is_waited_for),
    (3, a_stage_that_raises, "1f1b", 1, "F", 2, 0),
    (3, a_stage_that_raises, "zero_bubble", 0, "F", 0, 1),
    (3, a_stage_that_raises, "zero_bubble", 1, "B", 1, 1),
    (3, a_stage_that_raises, "gpipe", 2, "B", 0, 0),
    (2, an_output_that_changes_is_an_error),
    *((2, wrong_use_is_a_value_error_on_every_rank, case) for case in REFUSED),
    (3, a_wrong_batch_is_an_error_on_every_rank, torch.ones(5, 6), torch.ones(8, 6), "5 samples into 3 .* not into 4"),
    (3, a_wrong_batch_is_an_error_on_every_rank, torch.ones(8, 6), None, "None"),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[1].__name__}-{claim[0]}")
def test_that(claim):
    pool.run(*claim)
