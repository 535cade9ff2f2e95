"""pipeline.py against micro-batch accumulation on one device. More is in claims/pipeline.py."""

import collections
import copy
import gc
import inspect
import re
import types
import weakref
from functools import partial
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
from shared import OPTIMIZERS, Collectives, assert_equal, assert_same_parameters, randn
from torch.distributed.pipelining import schedules as theirs
from torch.utils.checkpoint import checkpoint

import ddp
import fsdp
import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, parse, simulate

# torch >= 2.7. Down the ranks and up again: two stages meet on the last rank, and the first and the
# last are on rank 0.
V_SHAPED = [n for n in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") if hasattr(theirs, n)]
FORMATS = "format" in inspect.signature(theirs.ScheduleInterleaved1F1B._dump_csv).parameters

# ---- schedules, without a process


@given(p=st.integers(1, 8), m=st.integers(1, 16), b=st.integers(1, 5))
def test_bubbles_and_peaks_are_those_of_the_docstring(p, m, b):
    """If a backward takes b forwards."""
    gpipes_bubble = (p - 1) / (m + p - 1)
    expected = {
        "naive": (1 - 1 / p, [1] * p),
        "gpipe": (gpipes_bubble, [m] * p),
        "1f1b": (gpipes_bubble, [min(p - rank, m) for rank in range(p)]),
    }
    for name, (bubble, peaks) in expected.items():
        times = simulate(build_schedule(name, p, m), {"F": 1, "B": b})
        assert times.bubble_fraction == pytest.approx(bubble)
        assert times.peak_activations == peaks
    zero_bubble = simulate(build_schedule("zero_bubble", p, m))
    assert zero_bubble.peak_activations == [min(p, m)] * p
    if m >= p:
        assert zero_bubble.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


@given(p=st.integers(1, 8), m=st.integers(1, 16), v=st.integers(1, 4), b=st.integers(1, 5))
def test_interleaved_and_zero_bubble_are_pytorchs_action_by_action(p, m, v, b):
    times = simulate(build_schedule("interleaved_1f1b", p, b * p, v), {"F": 1, "B": b})
    assert times.bubble_fraction == pytest.approx((p - 1) / (v * b * p + p - 1))
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        interleaved = pytorchs.build_schedule("ScheduleInterleaved1F1B", p, m, v)
        assert build_schedule("interleaved_1f1b", p, m, v) == interleaved
        zero_bubble = pytorchs.build_schedule("ScheduleInterleavedZeroBubble", p, m)
        assert build_schedule("zero_bubble", p, m) == zero_bubble


@pytest.mark.skipif(not FORMATS, reason=f"torch {torch.__version__} writes one format only")
@pytest.mark.parametrize("name", [*V_SHAPED, "ScheduleInterleaved1F1B"])
def test_csv_files_are_pytorchs(name, tmp_path):
    schedule = pytorchs.make_schedule(name, 4, 8, 2)
    expected = pytorchs.order_of(schedule, 4)
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(tmp_path / form, format=form)
        assert pipeline.schedule_from_csv(tmp_path / form) == expected
    pipeline.schedule_to_csv(expected, tmp_path / "ours")
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert pytorchs.order_of(schedule, 4) == expected


IMPOSSIBLE = [
    ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "deadlocks: 0B0 and 1F1 would"),
    ([["0F0", "0B0", "0F2", "0B2"]], "deadlocks: 0F2 would"),
    ([["1F0", "1B0"]], "deadlocks: 1F0 would"),
    ([["0F0", "0W0", "0I0"]], "rank 0 runs FWI of stage 0 for micro-batch 0"),
    ([["0B0", "0F0"]], "rank 0 runs BF of stage 0 for micro-batch 0"),
    ([["0F0", "0B0", "0W0"]], "rank 0 runs FBW of stage 0 for micro-batch 0"),
    ([["0F0"], ["0B0"]], "rank 0 runs F of stage 0 for micro-batch 0"),
    ([["0F0", "0B0"], ["0F1", "0B1"]], "rank 0 runs FB of stage 0 for micro-batch 0"),
    ([[]], "empty"),
]


@pytest.mark.parametrize(("schedule", "words"), IMPOSSIBLE)
def test_an_impossible_schedule_is_an_error(schedule, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate(schedule)


# ---- results


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Linear layers that are frozen, have a computed weight, run twice or in a checkpoint, ...

    Returns a tuple, of which the next stage does not use the last tensor.
    """

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.no_weight = nn.Linear(6, 6)
        self.no_weight.weight.requires_grad_(False)
        self.no_bias = nn.Linear(6, 6)
        self.no_bias.bias.requires_grad_(False)
        self.first = nn.Linear(6, 6)
        self.strided = nn.Linear(6, 6)
        self.vector = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.layer = Layer()
        self.unused = nn.Linear(6, 6)
        self.ignored = nn.Linear(6, 6)
        self.hooked = nn.Linear(6, 6)

    def forward(self, x, mask=None, rows=None, skip=0.0, unused=None):
        if mask is None:
            mask = x > 0
            rows = torch.arange(len(x)).flip(0)
        if not self.hooked.weight._backward_hooks:  # a copy of the module does not have it
            self.hooked.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        x = self.hooked(torch.relu(self.hooked(x)))
        y = self.first(self.frozen(x)) + skip
        y = y + self.strided(y.transpose(0, -2)).transpose(0, -2)
        y = torch.relu_(self.twice(y)) + self.twice(y + self.vector(y.flatten(end_dim=-2).mean(0)))
        with torch.autocast(pool.device().type, torch.bfloat16):
            for linear in (self.no_weight, self.no_bias, self.normed):
                y = (torch.tanh(linear(y)) + y).to(x.dtype)
            y = checkpoint(self.layer, y, use_reentrant=False).to(x.dtype)
        y = y + NoGradient.apply(self.unused(y))
        return y[rows] * mask, mask, rows, torch.tanh(x), self.ignored(torch.cat([x, x]))[::2]


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


def make_batch(step, rows, shape=(6,), dtype=torch.float32):
    return randn((2, rows, *shape), step, torch.float32).to(dtype).unbind()


def accumulate(stages, inputs, targets, m):
    """One device, plainly: each micro-batch's loss counts by its samples. Return the mean."""
    losses = []
    for x, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        y = (x,)
        for stage in stages:
            y = stage(*y) if isinstance(stage, Odd) else (stage(*y),)
        losses.append(F.mse_loss(y[0], target) * (len(target) / len(targets)))
        if torch.is_grad_enabled():
            losses[-1].backward()
    return torch.stack(losses).detach().sum()


class Run:
    """This rank's part of a pipeline, and all of its stages on one device."""

    def __init__(self, make, name, m, v, wrap=copy.copy):
        build = build_schedule if name in SCHEDULES else pytorchs.build_schedule
        schedule = build(name, pool.world_size(), m, v)
        torch.manual_seed(1)
        self.m = m
        self.plain = nn.ModuleList(make() for _ in range(pool.world_size() * v))
        self.rank_of = pipeline.rank_of_stages(schedule)
        self.own = [s for s, rank in sorted(self.rank_of.items()) if rank == pool.rank()]
        self.actions = schedule[pool.rank()]
        self.stages = nn.ModuleList(wrap(copy.deepcopy(self.plain[s])) for s in self.own)
        loss_fn = (lambda y, target: F.mse_loss(y[0], target)) if make is Odd else F.mse_loss
        self.ours = Pipeline(self.stages, schedule, m, loss_fn, pool.group())

    def step(self, inputs, targets):
        """Ranks see only what they need, and find out shapes by themselves. Losses are the same."""
        is_last = len(self.plain) - 1 in self.own
        inputs_here = inputs if 0 in self.own else None
        loss = self.ours.step(inputs_here, targets if is_last else None)
        expected = accumulate(self.plain, inputs, targets, self.m)
        assert_equal(loss, expected if is_last else None, exact=True)

    def assert_same(self, what):
        for stage, number in zip(self.stages, self.own, strict=True):
            assert_same_parameters(stage, self.plain[number], True, f"{what}, stage {number}")

    def freeze(self, number):
        """The first `number` stages."""
        self.plain[:number].requires_grad_(False)
        self.stages[: sum(stage < number for stage in self.own)].requires_grad_(False)


RUNS = [  # what each stage is, the schedule, micro-batches, stages on each rank
    *((Layer, name, 2, 1) for name in ("interleaved_1f1b", "zero_bubble")),
    *((Layer, name, 7, 2) for name in (*SCHEDULES, *V_SHAPED)),
    (Odd, "zero_bubble", 3, 1),
    (Odd, "interleaved_1f1b", 3, 2),
]
BATCHES = [  # rows for each micro-batch, rows fewer, shape of a row, frozen stages, dtype
    *[(2, 0, (5, 6), 0, torch.float32)] * 2,
    (2, 1, (6,), 0, torch.float32),
    *[(2, 0, (6,), 2, torch.float32)] * 2,
    (2, 0, (5, 6), 2, torch.float64),
]


@pytest.mark.parametrize(("make", "name", "m", "v"), RUNS)
@pool.on(1, 3)
def test_trains_as_one_device(make, name, m, v):
    """Bitwise, over several steps, while the batch, the dtype and what is frozen change."""
    run = Run(make, name, m, v)
    optimizer = OPTIMIZERS["sgd"]([*run.stages.parameters(), *run.plain.parameters()])
    for step, (rows, fewer, shape, frozen, dtype) in enumerate(BATCHES):
        run.freeze(min(frozen, len(run.plain) - 1))
        nn.ModuleList([run.plain, run.stages]).to(dtype)
        inputs, targets = make_batch(step, rows * m - fewer, shape, dtype)
        run.step(inputs, targets)
        optimizer.step()
        run.assert_same(f"step {step}")
        times = [moment for _, *moments in run.ours.timeline for moment in moments]
        assert [action for action, *_ in run.ours.timeline] == run.actions
        assert times == sorted(times)
        assert times[0] >= 0
    with torch.no_grad():
        run.step(inputs, targets)
    assert len(run.ours.timeline) == m * v  # forwards only
    assert F.linear is pipeline.linear


@pytest.mark.parametrize(("name", "v"), [*((name, 2) for name in SCHEDULES), ("1f1b", 1)])
@pool.on(3)
def test_as_many_activations_are_alive_as_simulated_and_none_after_a_step(name, v):
    run = Run(Layer, name, 7, v)
    alive = collections.Counter()
    peaks = []

    def count(module, inputs):  # the input of a stage's last layer, which its backward needs
        alive["now"] += 1
        peaks.append(alive["now"])
        weakref.finalize(inputs[0].untyped_storage(), alive.subtract, ["now"])
        assert len(run.ours._transfers.sends) <= 4

    for stage in run.stages:
        stage.down.register_forward_pre_hook(count)
    gc.disable()  # freed by reference counts alone
    for step in range(2):
        run.step(*make_batch(step, 14))
        assert alive["now"] == 0
    assert max(peaks) == simulate(run.ours.schedule).peak_activations[pool.rank()]
    with torch.no_grad():
        peaks.clear()
        run.step(*make_batch(2, 14))
    assert max(peaks) == 1
    assert not run.ours._graphs  # which hold the inputs of stages
    gc.enable()


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", *V_SHAPED])
@pool.on(3)
def test_each_boundary_sends_activations_once_and_gradients_if_needed(name, frozen):
    """One message at a time, waited for, since over NCCL order is what prevents a deadlock."""
    run = Run(Layer, name, 7, 2)
    run.freeze(frozen)
    works = []

    def watch(operations, start=dist.batch_isend_irecv):
        assert len(operations) == 1
        works.extend(mock.Mock(wraps=work) for work in start(operations))
        return works[-1:]

    for step in range(2):  # in the first, ranks tell each other shapes as well
        inputs, targets = make_batch(step, 14)
        with mock.patch.object(dist, "batch_isend_irecv", watch), Collectives() as seen:
            run.step(inputs, targets)
    assert works
    assert all(work.wait.called for work in works)  # a dropped isend can hang
    sends = 0
    for stage in range(5):
        if run.rank_of[stage] != run.rank_of[stage + 1]:
            sends += run.rank_of[stage] == pool.rank()
            sends += run.rank_of[stage + 1] == pool.rank() and stage >= frozen
    sums = 24 + 8  # over all ranks, at the start and at the end
    sent = sum(size for name, size in seen.calls if name != "recv_")
    assert sent == sends * inputs.nbytes + sums


@pool.on(1, 3)
def test_w_computes_the_gradients_of_linear_layers_weights_and_nothing_else():
    run = Run(Layer, "zero_bubble", 4, 1)
    reached = collections.Counter()
    nodes = []  # which add to .grad
    for name, parameter in run.stages.named_parameters():

        def count(inputs, outputs, name=name):
            kind = parse(run.actions[len(run.ours.timeline)])[1]  # of the action that runs
            reached[kind, name] += 1

        nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(count)
    run.step(*make_batch(0, 8))
    expected = {("I", name): 4 for name in ("0.norm.weight", "0.norm.bias", "0.up.bias")}
    expected |= {("W", name): 4 for name in ("0.up.weight", "0.down.weight")}
    assert reached == expected


def group_of_one():
    return [dist.new_group([rank]) for rank in range(pool.world_size())][pool.rank()]


@pytest.mark.parametrize("wrap", [ddp.DistributedDataParallel, fsdp.fully_shard])
@pool.on(2)
def test_zero_bubble_computes_what_data_parallelism_reduces_before_it_does(wrap):
    """Else W adds to a gradient that is not read any more, or that has been averaged."""
    run = Run(Layer, "zero_bubble", 4, 1, partial(wrap, process_group=group_of_one()))
    for step in range(2):
        run.step(*make_batch(step, 8))
        plain = run.plain[pool.rank()]
        for ours, parameter in zip(run.stages.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.flatten(), parameter.grad.flatten())  # FSDP's are flat


@pool.on(2)
def test_pytorchs_data_parallelism_on_one_rank_is_refused_on_all():
    """It averages the gradients of one micro-batch only."""
    stage = nn.Linear(6, 6)
    group = group_of_one()
    if pool.rank() == 0:
        stage = nn.parallel.DistributedDataParallel(stage, process_group=group)
    with pytest.raises(ValueError, match=r"one micro-batch only; pass its \.module"):
        Pipeline([nn.Sequential(stage)], "1f1b", 4, F.mse_loss, pool.group())


@pool.on(2)
def test_autocast_may_begin_between_two_steps():
    run = Run(partial(nn.Linear, 6, 6), "1f1b", 4, 1)
    run.step(*make_batch(0, 8))
    with torch.autocast(pool.device().type, torch.bfloat16):
        run.step(*make_batch(1, 8))
    run.assert_same("after both")


@pytest.mark.cpu  # a GPU need not have both dtypes
@pool.on(2)
def test_the_dtype_of_autocast_may_change_between_two_steps():
    run = Run(partial(nn.Linear, 6, 6), "1f1b", 4, 1)
    for step, dtype in enumerate((torch.float16, torch.bfloat16)):
        with torch.autocast("cpu", dtype):
            run.step(*make_batch(step, 8))
    run.assert_same("after both")


@pool.on(2)
def test_the_idea_is_right():
    torch.manual_seed(1)
    plain = nn.ModuleList([Layer(), Layer()])
    stage = copy.deepcopy(plain[pool.rank()])
    inputs, targets = make_batch(0, 8)
    loss = pipeline.gpipe_step(stage, 4, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    expected = accumulate(plain, inputs, targets, 4)
    assert_equal(loss, expected if pool.rank() == 1 else None, exact=False)
    assert_same_parameters(stage, plain[pool.rank()], exact=True)
    with pytest.raises(RuntimeError, match="size of dim 0"):  # torch.chunk would make 4 of 5
        pipeline.gpipe_step(stage, 5, F.mse_loss, inputs, targets, inputs[:2], pool.group())


# ---- errors


def fails_in_backward(output):
    output.register_hook(lambda gradient: 1 / 0)


def cut_graph(output):
    return torch.zeros_like(output, requires_grad=True)


FAILS = {  # the action of rank 1 that fails: the schedule, in which step, how, and with what
    "1F2": ("1f1b", 0, lambda output: 1 / 0, "ZeroDivisionError"),
    "1I1": ("zero_bubble", 1, fails_in_backward, "ZeroDivisionError"),
    "1F0": ("gpipe", 1, torch.Tensor.double, "RuntimeError.*was .*float32.* and is now .*float64"),
    "1B2": ("1f1b", 1, cut_graph, r"RuntimeError.*was .*float32.* and is now \[None\]"),
}


@pytest.mark.parametrize("action", FAILS)
@pool.on(3)
def test_an_error_in_a_stage_is_told_on_all_ranks_and_the_next_step_is_right(action):
    name, bad_step, fault, error = FAILS[action]
    run = Run(Layer, name, 4, 1)
    outputs = []

    def hook(module, inputs, output):
        outputs.append(output)
        is_bad = len(outputs) == 4 * bad_step + parse(action)[2] + 1
        return fault(output) if is_bad and pool.rank() == 1 else None

    run.stages[0].register_forward_hook(hook)
    for step in range(bad_step):
        run.ours.step(*make_batch(step, 8))
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        run.ours.step(*make_batch(bad_step, 8))
    elsewhere = f"RuntimeError.*rank 1 failed in {action} with "
    assert re.match(error if pool.rank() == 1 else elsewhere + error, repr(raised.value))
    if pool.rank() == 1:
        assert run.ours.timeline[-1][0] == action  # no action runs after the one that failed
        outputs += [None] * 4  # the hook fails no more
    run.stages.zero_grad()
    run.step(*make_batch(bad_step + 1, 8))
    run.assert_same("after the error")


class Returns(nn.Linear):
    def __init__(self, value):
        super().__init__(6, 6)
        self.value = value

    def forward(self, x):
        return self.value


class RunsBackward(nn.Linear):
    def forward(self, x):
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


class ChangesInput(nn.Linear):
    def forward(self, x):
        x = 2 * x
        y = super().forward(x)
        x.add_(y.detach())
        return y


def detached_loss(output, target):
    return F.mse_loss(output, target).detach()


LISTS = build_schedule("1f1b", 2, 4)
TWO = [nn.Linear(6, 6), nn.Linear(6, 6)]
REFUSED = [  # what rank 0 is given instead of what is right, what rank 1 is, what both are told
    ({"stages": []}, {"stages": []}, "no schedule '1f1b' of 2 ranks, 4 micro-batches and 0 stages"),
    ({"schedule": "2f2b"}, {"schedule": "2f2b"}, "the name one of naive, gpipe, 1f1b"),
    ({"schedule": "2f2b"}, {}, ""),
    ({"stages": []}, {}, ""),
    ({"schedule": "gpipe"}, {}, "schedules differ"),
    ({"schedule": LISTS + LISTS[:1]}, {}, ""),
    ({"schedule": LISTS}, {"schedule": LISTS, "stages": TWO},
     "needs [(4, 1), (4, 1)] (micro-batches, stages) by rank; the ranks have [(4, 1), (4, 2)], or"),
    ({}, {"grad": False}, "1 of 2 ranks have gradients enabled"),
    ({"inputs": torch.ones(5, 6)}, {}, "5 samples of inputs into 3 micro-batches, not into 4"),
    ({"inputs": None}, {}, "inputs must be a tensor on the rank that takes them, not NoneType"),
    ({"inputs": (torch.ones(8, 6), "mask")}, {}, "inputs must be a tensor on the rank that takes"),
    ({}, {"targets": None}, "targets must be a tensor on the rank that takes them, not NoneType"),
    ({"stages": Returns({})}, {}, "the stage returned ['dict']; return a tensor or a tuple"),
    ({"stages": Returns(())}, {}, "the stage returned []; return a"),
    ({"schedule": "zero_bubble"}, {"schedule": "zero_bubble", "stages": RunsBackward(6, 6)},
     "a stage ran a backward in its forward"),
    ({"schedule": "zero_bubble"}, {"schedule": "zero_bubble", "stages": ChangesInput(6, 6)},
     "a stage changed the input of a linear layer in place"),
    ({}, {"loss_fn": detached_loss}, "does not require grad"),
    ({}, {"loss_fn": nn.MSELoss(reduction="none")}, "loss_fn returned (2, 6); return the mean"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "words"), REFUSED)
@pool.on(2)
def test_wrong_use_is_an_error_on_every_rank(first, second, words):
    """Also if only one rank sees that it is wrong."""
    inputs, targets = make_batch(0, 8)
    right = {"stages": nn.Linear(6, 6), "schedule": "1f1b", "grad": True}
    right |= {"inputs": inputs, "targets": targets, "loss_fn": F.mse_loss}
    given = types.SimpleNamespace(**(right | (second if pool.rank() else first)))

    def use():
        ours = Pipeline(given.stages, given.schedule, 4, given.loss_fn, pool.group())
        ours.step(given.inputs, given.targets)

    told = pytest.raises((ValueError, RuntimeError), match=re.escape(words))
    with torch.set_grad_enabled(given.grad), told:
        use()


# ---- devices


@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo"])
@pool.on(2)
def test_the_name_of_the_backend_does_not_matter(backend):
    group = dist.new_group(range(2), backend=backend)
    assert dist.get_backend(group) != "gloo"
    stage = [nn.Linear(6, 6), nn.Tanh()][pool.rank()]  # Tanh has no parameters to tell the device
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, group)
    loss = ours.step(*make_batch(0, 8))
    assert ours.device == torch.device("cpu")
    assert (loss is None) == (pool.rank() == 0)


@pytest.mark.parametrize("with_parameters", [[0], [1], []])
@pool.on(2)
def test_a_stage_without_parameters_is_on_the_other_stages_type_of_device(with_parameters):
    """Otherwise it would send from the CPU, and the other ranks would receive over NCCL."""
    stage = nn.Linear(6, 6, device="meta") if pool.rank() in with_parameters else nn.Tanh()
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, pool.group())
    assert ours.device.type == ("meta" if with_parameters else "cpu")


@pytest.mark.parametrize("stages", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("backend", "gpus_send"), [("gloo", "cpu"), ("nccl", "cuda:1")])
def test_gloo_alone_sends_from_the_hosts_memory(stages, backend, gpus_send):
    config = f"cpu:gloo,cuda:{backend}"
    with mock.patch.object(dist, "get_backend_config", return_value=config):
        transfers = pipeline.Transfers(None, torch.device(stages))
    assert str(transfers.device) == ("cpu" if stages == "cpu" else gpus_send)


@pool.on(1)
def test_inputs_and_targets_are_moved_to_the_stages_device():
    seen = []

    def loss_fn(output, target):
        seen.append((output.device.type, target.device.type))
        return F.mse_loss(output, target)

    ours = Pipeline(nn.Linear(6, 6, device="meta"), "gpipe", 2, loss_fn, pool.group())
    ours._transfers.device = "cpu"  # gloo sends no tensors on meta; a world of one has none to send
    with mock.patch.object(torch, "is_autocast_enabled", return_value=False):  # not for meta
        ours.step(*make_batch(0, 8))
    assert seen == [("meta", "meta")] * 2
