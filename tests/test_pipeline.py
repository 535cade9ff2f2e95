"""pipeline.py against micro-batch accumulation on one device and against torch.distributed.pipelining.

Bodies that run a pipeline take its class as their first argument.
"""

import copy
import csv
import functools
import gc
import itertools
import re
import weakref
from collections import Counter
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
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, simulate

numbers = {"p": st.integers(1, 8), "m": st.integers(1, 24), "v": st.integers(1, 4)}


def parse(action):
    return re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups()


# ---- schedules, without processes


@given(name=st.sampled_from(SCHEDULES), **numbers)
def test_every_action_once_on_its_rank_and_in_the_order_of_the_microbatches(name, p, m, v):
    schedule = build_schedule(name, p, m, v)
    kinds = "FIW" if name == "zero_bubble" else "FB"
    assert len(schedule) == p
    for rank, actions in enumerate(schedule):
        stages = range(rank, p * v, p)
        assert sorted(actions) == sorted(f"{s}{kind}{i}" for s in stages for kind in kinds for i in range(m))
        for s, kind in itertools.product(stages, kinds):  # gradients add up as in a loop over the micro-batches
            assert [a for a in actions if a.startswith(f"{s}{kind}")] == [f"{s}{kind}{i}" for i in range(m)]


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
    interleaved = simulate(build_schedule("interleaved_1f1b", p, m * p, v), cost)
    assert interleaved.bubble_fraction == pytest.approx((p - 1) / (v * m * p + p - 1))
    zero_bubble = simulate(build_schedule("zero_bubble", p, m))
    assert zero_bubble.peak_activations == [min(p, m)] * p
    if m >= p:
        assert zero_bubble.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


@given(name=st.sampled_from(SCHEDULES), **numbers)
def test_no_deadlock_even_when_sends_wait_for_their_receivers(name, p, m, v):
    """A rank's part of the order of simulated time is its list, and all that an action needs stands before it."""
    schedule = build_schedule(name, p, m, v)
    end = simulate(schedule).end
    order = {action: k for k, action in enumerate(sorted(end, key=end.get))}
    assert all(sorted(actions, key=order.get) == actions for actions in schedule)
    assert all(order[need] < order[action] for action in order for need in needed(action, p * v - 1))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
         "0B0 waits for 1B0 waits for 1F0 waits for 1B1 waits for 1F1 waits for 0F1 waits for 0B0"),
        ([["0B0", "0F0"]], "0B0 waits for 0F0 waits for 0B0"),
        ([["0F0", "0W0", "0I0"]], "0W0 waits for 0I0"),
        ([["0F0", "0B0"], ["1F0"]], "of stage 1, micro-batch 0 'F' is done"),
        ([["0F0", "0F0", "0B0"]], "of stage 0, micro-batch 0 'FFB' is done"),
        ([["0F0", "0B0", "0W0"]], "'FBW' is done"),
        ([["0F0", "0I0"]], "'FI' is done"),
        ([["0F0", "0B0", "0F2", "0B2"]], "of stage 0, micro-batch 1 '' is done"),
        ([["1F0", "1B0"]], "of stage 0, micro-batch 0 '' is done"),
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


layer_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=9) | st.integers(1, 9).map(lambda n: [1] * n)


@given(layer_sizes, st.integers(1, 9))
def test_split_makes_stages_of_about_the_same_size(sizes, n):
    layers = [nn.Linear(size, 1, bias=False) for size in sizes]
    n = min(n, len(sizes))
    stages = pipeline.split(nn.Sequential(*layers), n)
    assert [layer for stage in stages for layer in stage] == layers
    assert len(stages) == n
    assert all(len(stage) for stage in stages)
    if len(set(sizes)) == 1:
        assert {len(stage) for stage in stages} <= {len(sizes) // n, -(-len(sizes) // n)}


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


def check_against_one_device(
    cls, make, schedule, m, v=1, steps=3, rows=2, optimizer="sgd", batch=make_batch, loss_fn=F.mse_loss, exact=True
):
    """Losses, gradients and parameters of this rank's stages, for several steps. -> the pipeline"""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v, make)
    mine = range(rank, p * v, p) if isinstance(schedule, str) else sorted({int(parse(a)[0]) for a in schedule[rank]})
    stages = [copy.deepcopy(plain[s]) for s in mine]
    ours = cls(stages if v > 1 else stages[0], schedule, m, loss_fn, pool.group())
    optimizers = [OPTIMIZERS[optimizer](nn.ModuleList(module).parameters()) for module in (stages, plain)]
    for step in range(steps):
        inputs, targets = batch(step, rows * m)
        for o in optimizers:
            o.zero_grad()
        loss = ours.step(inputs if 0 in mine else None, targets if p * v - 1 in mine else None)
        expected = accumulate(plain, inputs, targets, m, loss_fn)
        assert_equal(loss, expected if p * v - 1 in mine else None, exact, "loss")
        for o in optimizers:
            o.step()
        for s, stage in zip(mine, stages, strict=True):
            assert_same_parameters(stage, plain[s], exact, f"{schedule}, m {m}, v {v}, step {step}, stage {s}")
    return ours


def body_schedules(cls, cases):
    for name, m, v, optimizer in cases:
        ours = check_against_one_device(cls, Layer, name, m, v, 2, optimizer=optimizer)
        assert [action for action, *_ in ours.timeline] == build_schedule(name, pool.world_size(), m, v)[pool.rank()]
        times = [0, *itertools.chain(*((start, end) for _, start, end in ours.timeline))]
        assert times == sorted(times)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_is_bitwise_micro_batch_accumulation(p):
    one = [(name, m, 1) for name in SCHEDULES for m in (1, 2, 3, 5)]
    several = [(name, m, v) for name in SCHEDULES for m, v in ((1, 2), (3, 2), (5, 3))]
    optimizers = itertools.cycle(("sgd", "adamw", "momentum"))
    cases = [(*case, optimizer) for case, optimizer in zip(one + several, optimizers, strict=False)]
    pool.run(p, body_schedules, Pipeline, cases)


def body_naive(step):
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p)
    stage = copy.deepcopy(plain[rank])
    inputs, targets = make_batch(0, 8)
    loss = step(stage, 4, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    expected = accumulate(plain, inputs, targets, 4)
    assert_same_parameters(stage, plain[rank], exact=True)
    assert loss is None if rank < p - 1 else torch.allclose(loss, expected)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_idea_is_right(p):
    pool.run(p, body_naive, pipeline.gpipe_step)


def body_v_shaped(cls, name, m):
    p = pool.world_size()
    check_against_one_device(cls, Layer, order_of(pytorchs(getattr(theirs, name), p, m, 2), p), m, 2)


@pytest.mark.parametrize(("name", "p", "m"), list(zip(V_SHAPED, (2, 3), (4, 7), strict=False)))
def test_a_stage_layout_that_is_not_modulo(name, p, m):
    """Stages down the ranks and up again: two of them meet on the last rank, first and last on the first."""
    pool.run(p, body_v_shaped, Pipeline, name, m)


class Branches(nn.Module):
    """Passes on three tensors: one to train on, a mask without gradient, and integers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask=None, rows=None):
        if mask is None:
            mask, rows = x > 0, torch.arange(len(x)).flip(0)
        return torch.tanh(self.linear(x))[rows] * mask, mask, rows


class Unused(nn.Linear):
    """Passes on a second tensor, which the next stage does not use."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x, unused=None):
        return super().forward(x), x * 2


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


def body_stages(cls, make, name, v):
    batch = functools.partial(make_batch, shape=(5, 6))
    check_against_one_device(cls, make, name, 3, v, optimizer="adamw", batch=batch, loss_fn=loss_of_first)


@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 3, 1), ("zero_bubble", 2, 1), ("interleaved_1f1b", 2, 2)])
@pytest.mark.parametrize("make", [Branches, Again, PartlyFrozen, Attention, Cast])
def test_stages_of_all_kinds(make, name, p, v):
    pool.run(p, body_stages, Pipeline, make, name, v)


def body_frozen_and_unused(cls, name):
    """Through what is frozen nothing is sent back; what nobody uses gets zeros."""
    p, rank = pool.world_size(), pool.rank()
    frozen = [Layer().requires_grad_(False), nn.Tanh(), Layer()]
    for plain in (frozen, make_layers(p, Unused)):
        stage = copy.deepcopy(plain[rank])
        ours = cls(stage, name, 2, loss_of_first, pool.group())
        with Collectives() as seen:
            ours.step(*make_batch(0, 4))
        accumulate(plain, *make_batch(0, 4), 2)
        assert_same_parameters(stage, plain[rank], exact=True)
        assert rank == 0 or ("recv_" in dict(seen.calls))
        assert rank < p - 1 or ("send" in dict(seen.calls)) == isinstance(stage, Unused)


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_what_is_frozen_or_unused(name):
    pool.run(3, body_frozen_and_unused, Pipeline, name)


def body_shapes(cls, name):
    """The last micro-batch is smaller; shapes, dtypes and what is frozen change from step to step, and back."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p)
    stage = copy.deepcopy(plain[rank])
    ours = cls(stage, name, 4, F.mse_loss, pool.group())
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
        loss, expected = ours.step(inputs, targets), accumulate(plain, inputs, targets, 4)
        assert_equal(loss, expected if rank == p - 1 else None, exact=True)
        assert_same_parameters(stage, plain[rank], True, f"step {step}")


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_shapes_are_found_and_may_change(name):
    pool.run(3, body_shapes, Pipeline, name)


def body_weights(cls):
    """Masked tokens: the batch's mean is over the tokens that count."""
    p, rank = pool.world_size(), pool.rank()
    plain = [layer.double() for layer in make_layers(p)]
    inputs, targets = make_batch(0, 6)[0].double(), torch.tensor([1, -100, -100, 0, 3, 5])
    stage = copy.deepcopy(plain[rank])
    ours = cls(stage, "1f1b", 3, F.cross_entropy, pool.group(), weight=lambda target: (target != -100).sum())
    loss = ours.step(inputs, targets)
    expected = F.cross_entropy(nn.Sequential(*plain)(inputs), targets)  # of the whole batch at once
    expected.backward()
    assert_same_parameters(stage, plain[rank], exact=False)
    assert_equal(loss, expected.detach() if rank == p - 1 else None, exact=False)


def test_the_mean_is_over_tokens():
    pool.run(2, body_weights, Pipeline)


def body_losses(cls, m):
    """Gradients add up from step to step; a loss that is not finite is returned, and the next step works."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p)
    stage = copy.deepcopy(plain[rank])
    ours = cls(stage, "1f1b", m, F.mse_loss, pool.group())
    for step in range(2):
        ours.step(*make_batch(step, 2 * m))
        accumulate(plain, *make_batch(step, 2 * m), m)
    assert_same_parameters(stage, plain[rank], exact=True)
    inputs, targets = make_batch(0, 2 * m)
    loss = ours.step(inputs, targets * float("inf"))
    assert loss is None if rank < p - 1 else loss.isinf()
    for module in (stage, *plain):
        module.zero_grad()
    loss, expected = ours.step(inputs, targets), accumulate(plain, inputs, targets, m)
    assert_equal(loss, expected if rank == p - 1 else None, exact=True)
    assert_same_parameters(stage, plain[rank], exact=True)


def test_losses():
    pool.run(2, body_losses, Pipeline, 3)


def body_eval(cls, name, v):
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v)
    ours = cls([copy.deepcopy(stage) for stage in plain[rank::p]], name, 4, F.mse_loss, pool.group())
    inputs, targets = make_batch(0, 8)
    ours.step(inputs, targets)
    gradients = [q.grad.clone() for q in ours.parameters()]
    with torch.no_grad():
        output = torch.cat([nn.Sequential(*plain)(x) for x in inputs.chunk(4)])
        expected = torch.stack([F.mse_loss(*part) for part in zip(output.chunk(4), targets.chunk(4), strict=True)])
        losses = [ours.step(inputs, targets)]
    losses.append(ours.eval_step(inputs, targets))
    for loss in losses:
        assert_equal(loss, expected.mean() if rank == p - 1 else None, exact=True)
    assert_equal(ours.eval_step(inputs), output if rank == p - 1 else None, exact=True)
    assert all(torch.equal(a, q.grad) for a, q in zip(gradients, ours.parameters(), strict=True))
    forward = [a for a in build_schedule(name, p, 4, v)[rank] if "F" in a]
    assert [action for action, *_ in ours.timeline] == forward


@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 3, 1), ("interleaved_1f1b", 2, 2)])
def test_evaluation(name, p, v):
    pool.run(p, body_eval, Pipeline, name, v)


def body_tuples(cls):
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p, Branches)
    ours = cls(copy.deepcopy(plain[rank]), "1f1b", 2, loss_of_first, pool.group())
    inputs = make_batch(0, 4)[0]
    given = inputs, inputs < 0, torch.tensor([1, 0, 0, 1])
    outputs = ours.eval_step(given)
    if rank == p - 1:
        parts = [plain[1](*plain[0](*part)) for part in zip(*(t.chunk(2) for t in given), strict=True)]
        for ours_, whole in zip(outputs, map(torch.cat, zip(*parts, strict=True)), strict=True):
            assert_equal(ours_, whole.detach(), exact=True)


def test_a_tuple_goes_in_and_comes_out():
    pool.run(2, body_tuples, Pipeline)


# ---- what it costs


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def body_split(cls):
    """I computes no gradient of a linear layer's weights, W nothing else, and nothing is computed twice."""
    p, rank = pool.world_size(), pool.rank()
    counts, fired, running = {}, {"I": [], "W": []}, []
    for name in ("1f1b", "zero_bubble"):
        stage = make_layers(p, lambda: nn.Sequential(Attention(), Layer(), Again()))[rank]
        ours = cls(stage, name, 2, F.mse_loss, pool.group())
        if name == "zero_bubble":
            run = ours._run
            ours._run = lambda action, run=run: (running.append(parse(action)[1]), run(action))
            for n, q in stage.named_parameters():
                q.register_post_accumulate_grad_hook(lambda q, n=n: fired[running[-1]].append(n))
        with Products() as counter:
            ours.step(*make_batch(0, 4, (5, 6)))
        counts[name] = counter.count
    assert counts["1f1b"] == counts["zero_bubble"]
    names = {n for n, _ in stage.named_parameters()}
    early = {n for n in names if "norm" in n}
    assert Counter(fired["I"]) == dict.fromkeys(early, 2)
    assert Counter(fired["W"]) == dict.fromkeys(names - early, 2)
    assert F.linear is pipeline.linear


@pytest.mark.parametrize("p", [1, 2])
def test_weight_gradients_wait_for_w(p):
    pool.run(p, body_split, Pipeline)


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


def body_memory(cls, name, m):
    gc.disable()  # freed by reference counts alone
    try:
        stage = Watched()
        ours, most = cls(stage, name, m, F.mse_loss, pool.group()), []
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


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_are_freed_after_their_backward(name):
    pool.run(3, body_memory, Pipeline, name, 7)


def body_sent(cls, name, m, v):
    p, rank = pool.world_size(), pool.rank()
    ours = cls(make_layers(v), name, m, F.mse_loss, pool.group())
    for _ in range(2):  # the first also tells shapes
        with Collectives() as seen:
            ours.step(*make_batch(0, 2 * m))
    boundaries = (v - (rank == p - 1)) + (v - (rank == 0)) if p > 1 else 0
    assert seen.bytes_of("send") == m * boundaries * 2 * 6 * 4
    others = [call for call in seen.calls if call[0] not in ("send", "recv_")]
    assert others == [("allreduce_", 16), ("allreduce_", 8)]


@pytest.mark.parametrize(
    ("name", "p", "v"), [("gpipe", 3, 1), ("interleaved_1f1b", 2, 3), ("zero_bubble", 4, 1), ("1f1b", 1, 1)]
)
def test_sent_bytes_are_the_docstrings(name, p, v):
    pool.run(p, body_sent, Pipeline, name, 4, v)


def body_waits(cls, name, v):
    """An isend whose handle is dropped can hang, or send what its buffer has become."""
    handles = []

    def watch(start):
        return lambda *args, **kwargs: handles.append(mock.Mock(wraps=start(*args, **kwargs))) or handles[-1]

    with mock.patch.object(dist, "isend", watch(dist.isend)), mock.patch.object(dist, "irecv", watch(dist.irecv)):
        ours = cls(make_layers(v), name, 4, F.mse_loss, pool.group())
        ours.step(*make_batch(0, 8))
        ours.eval_step(*make_batch(0, 8))
    assert handles
    assert all(handle.wait.called for handle in handles)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_every_transfer_is_waited_for(name, v):
    pool.run(2, body_waits, Pipeline, name, v)


# ---- failures


class Fragile(nn.Module):
    """Fails in `action`, "F2" or "B0"."""

    action, calls = None, 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def fail(self, action):
        if action == self.action:
            raise ZeroDivisionError("broken on purpose")

    def forward(self, x):
        call, self.calls = self.calls, self.calls + 1
        self.fail(f"F{call}")
        y = self.linear(x)
        y.register_hook(lambda gradient: self.fail(f"B{call}"))
        return y


def body_raises(cls, name, where, action, bad_step):
    p, rank = pool.world_size(), pool.rank()
    plain, stage = make_layers(p, Fragile), make_layers(p, Fragile)[rank]
    ours, errors = cls(stage, name, 4, F.mse_loss, pool.group()), []
    for step in range(3):
        stage.calls, stage.action = 0, action if (rank, step) == (where, bad_step) else None
        stage.zero_grad()
        try:
            ours.step(*make_batch(step, 8))
            errors.append(None)
        except (ZeroDivisionError, RuntimeError) as error:
            errors.append((type(error).__name__, str(error)))
    accumulate(plain, *make_batch(2, 8), 4)  # the step after it is right
    assert_same_parameters(stage, plain[rank], exact=True)
    return errors


@pytest.mark.parametrize("bad_step", [0, 1])
@pytest.mark.parametrize(
    ("name", "where", "action"), [("1f1b", 1, "F2"), ("zero_bubble", 0, "F0"), ("gpipe", 2, "B1"), ("1f1b", 2, "B0")]
)
def test_a_stage_that_raises(name, where, action, bad_step):
    for rank, errors in enumerate(pool.run(3, body_raises, Pipeline, name, where, action, bad_step)):
        assert [bool(error) for error in errors] == [step == bad_step for step in range(3)]
        kind, text = errors[bad_step]
        assert kind == ("ZeroDivisionError" if rank == where else "RuntimeError")
        action_there = action.replace("B", "I") if name == "zero_bubble" else action
        told = f"rank {where} failed in {where}{action_there} with ZeroDivisionError('broken on purpose')"
        assert text == ("broken on purpose" if rank == where else told)


class Fickle(nn.Linear):
    dtype = torch.float32

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return super().forward(x.float()).to(self.dtype)


def body_fickle(cls):
    stage = Fickle()
    ours = cls(stage, "gpipe", 2, F.mse_loss, pool.group())
    ours.step(*make_batch(0, 4))
    stage.dtype = torch.float64
    with pytest.raises(
        RuntimeError, match=r"the output was .*float32.* for inputs of the same shapes, and is now .*float64"
    ):
        ours.step(*make_batch(1, 4))
    ours.step(*make_batch(1, 4))


def test_an_output_that_changes_is_an_error():
    pool.run(2, body_fickle, Pipeline)


REFUSED = {  # what is given instead, on the last rank or on all, and what the error says
    "schedule": (lambda last: {"schedule": "gpipe" if last else "1f1b"}, "or schedules differ"),
    "stages": (lambda last: {"schedule": build_schedule("1f1b", 2, 4), "stages": [nn.Linear(6, 6)] * (1 + last)},
               "are [[4, 1], [4, 2]], or schedules differ; the schedule needs [(4, 1), (4, 1)]"),
    "microbatches": (lambda last: {"schedule": build_schedule("1f1b", 2, 5)}, "the schedule needs [(5, 1), (5, 1)]"),
    "mode": (lambda last: {"grad": not last}, "1 of 2 ranks have gradients enabled"),
}  # fmt: skip


def body_refused(cls, case):
    batch = dict(zip(("inputs", "targets"), make_batch(0, 8), strict=True))
    usual = {"stages": nn.Linear(6, 6), "schedule": "1f1b", "m": 4, "grad": True, **batch}
    stages, schedule, m, grad, inputs, targets = (usual | REFUSED[case][0](pool.rank() == 1)).values()
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=re.escape(REFUSED[case][1])):
        cls(stages, schedule, m, F.mse_loss, pool.group()).step(inputs, targets)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_a_value_error_on_every_rank(case):
    pool.run(2, body_refused, Pipeline, case)


def body_not_a_batch(cls, inputs, targets, words):
    """Only the rank that takes it sees that it is wrong."""
    ours = cls(nn.Linear(6, 6), "1f1b", 4, F.mse_loss, pool.group())
    for _ in range(2):
        with pytest.raises((ValueError, AttributeError, RuntimeError), match=words):
            ours.step(inputs, targets)
        ours.step(*make_batch(0, 8))


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (torch.ones(5, 6), torch.ones(8, 6), "5 samples into 3 micro-batches, not into 4"),
        (torch.ones(8, 6), None, "None"),
    ],
)
def test_a_wrong_batch_is_an_error_on_every_rank(inputs, targets, words):
    pool.run(3, body_not_a_batch, Pipeline, inputs, targets, words)


# ---- torch.distributed.pipelining


def body_pytorch(cls, name, m):
    p, rank = pool.world_size(), pool.rank()
    v = 2 if name in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    layers = [layer.double() for layer in make_layers(p * v)]
    schedule_class = getattr(theirs, f"Schedule{name}")
    layout = list(range(p)) * v if name != "ZBVZeroBubble" else [*range(p), *reversed(range(p))]
    mine = [s for s in range(p * v) if layout[s] == rank]
    modules, ours = ([copy.deepcopy(layers[s]) for s in mine] for _ in range(2))
    stages = [
        pipelining.PipelineStage(module, s, p * v, torch.device("cpu"), group=pool.group())
        for s, module in zip(mine, modules, strict=True)
    ]
    torch_schedule = schedule_class(stages[0] if name in ("GPipe", "1F1B") else stages, m, loss_fn=F.mse_loss)
    schedule = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved_1f1b"}.get(name)
    if name == "ZBVZeroBubble":
        schedule = order_of(pytorchs(schedule_class, p, m, 2), p)
    inputs, targets = (t.double() for t in make_batch(0, 2 * m))
    losses, last = [], p * v - 1 in mine
    torch_schedule.step(*((inputs,) if 0 in mine else ()), **({"target": targets, "losses": losses} if last else {}))
    loss = cls(ours, schedule, m, F.mse_loss, pool.group()).step(inputs, targets)
    for stage, module in zip(ours, modules, strict=True):
        assert_same_parameters(stage, module, exact=False)
    assert_equal(loss, torch.stack(losses).mean().detach() if last else None, exact=False)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_equal_to_pytorchs_pipelining(name):
    pool.run(2, body_pytorch, Pipeline, name, 4)
