"""pipeline.py against micro-batch accumulation on one device and against torch.distributed.pipelining."""

import contextlib
import copy
import csv
import functools
import gc
import itertools
import json
import re
import sys
import weakref
from types import SimpleNamespace

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, TORCHRUN, launch
from shared import OPTIMIZERS, assert_equal
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp
import ddp
import pipeline
from pipeline import SCHEDULES, Pipeline, build_schedule, parse, simulate

numbers = {"p": st.integers(1, 8), "m": st.integers(1, 24), "v": st.integers(1, 4)}


# ---- schedules, without processes


@given(name=st.sampled_from(SCHEDULES), **numbers)
def test_every_action_once_on_its_rank(name, p, m, v):
    schedule = build_schedule(name, p, m, v)
    kinds = "FIW" if name == "zero_bubble" else "FB"
    assert len(schedule) == p
    for rank, actions in enumerate(schedule):
        stages = range(rank, p * v, p)
        assert sorted(actions) == sorted(f"{s}{kind}{i}" for s in stages for kind in kinds for i in range(m))
        for s, kind in itertools.product(stages, kinds):  # gradients add up as in a loop over the micro-batches
            assert [i for stage, k, i in map(parse, actions) if (stage, k) == (s, kind)] == list(range(m))


def needed(action, last):
    """What the action depends on, written out again."""
    stage, kind, i = parse(action)
    if kind == "F":
        return {f"{stage - 1}F{i}"} if stage else set()
    if kind == "W":
        return {f"{stage}I{i}"}
    return {f"{stage}F{i}"} | ({f"{stage + 1}{kind}{i}"} if stage < last else set())


@given(name=st.sampled_from(SCHEDULES), f=st.integers(1, 3), b=st.integers(1, 3), **numbers)
def test_simulated_times_keep_what_depends_on_what(name, f, b, p, m, v):
    schedule = build_schedule(name, p, m, v)
    cost = {"F": f, "B": b, "I": b, "0F": 2 * f}
    times = simulate(schedule, cost)
    for actions in schedule:
        for before, action in zip([None, *actions], actions, strict=False):
            needs = [times.end[a] for a in needed(action, p * v - 1)] + [times.end[before] if before else 0]
            assert times.start[action] == max(needs)  # no sooner than it can, and no later
            stage, kind, _ = parse(action)
            assert times.end[action] - times.start[action] == cost.get(f"{stage}{kind}", cost.get(kind, 1))
    busy = sum(times.end[a] - times.start[a] for a in times.end)
    assert times.bubble_fraction == pytest.approx(1 - busy / (p * max(times.end.values())))


@given(b=st.integers(1, 5), **numbers)
def test_bubble_and_memory_are_the_closed_forms(b, p, m, v):
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


@given(name=st.sampled_from(SCHEDULES), forward_only=st.booleans(), **numbers)
def test_no_deadlock_even_when_sends_wait_for_their_receivers(name, forward_only, p, m, v):
    schedule = build_schedule(name, p, m, v)
    rank_of = {s: s % p for s in range(p * v)}
    if forward_only:
        schedule = [[a for a in actions if "F" in a] for actions in schedule]
    programs = [list(program) for program in pipeline.add_messages(schedule, rank_of)]
    assert [[step for step in program if isinstance(step, str)] for program in programs] == schedule
    sent, here = [0] * p, [set() for _ in range(p)]  # here: outputs that a rank has
    while any(programs):
        progress = False
        for rank, program in enumerate(programs):
            while program and isinstance(program[0], str):
                action, progress = program.pop(0), True
                assert needed(action, p * v - 1) <= here[rank]
                here[rank].add(action)
        for action in {step[0] for program in programs for step in program[:1]}:  # goes when both ends are at it
            ends = [rank for rank, program in enumerate(programs) if program and program[0][:1] == [action]]
            if len(ends) == 2:
                src, progress = rank_of[parse(action)[0]], True
                assert action in here[src]
                sent[src] += 1
                here[sum(ends) - src].add(action)
                for rank in ends:
                    programs[rank][0].pop(0)
                    programs[rank] = programs[rank][not programs[rank][0] :]
        assert progress, "deadlock"
    boundaries = [v * (p > 1) - (rank == p - 1 and p > 1) for rank in range(p)]
    back = [v * (p > 1) - (rank == 0 and p > 1) for rank in range(p)]
    assert sent == [m * (f + (0 if forward_only else b)) for f, b in zip(boundaries, back, strict=True)]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
         "0B0 (rank 0) waits for 1B0 (rank 1) waits for 1F0 (rank 1) waits for 1B1 (rank 1) waits for 1F1 (rank 1) "
         "waits for 0F1 (rank 0) waits for 0B0 (rank 0)"),
        ([["0B0", "0F0"]], "0B0 (rank 0) waits for 0F0 (rank 0) waits for 0B0"),
        ([["0F0", "0W0", "0I0"]], "0W0 (rank 0) waits for 0I0"),
        ([["0F0", "0B0"], ["1F0"]], "stage 1, micro-batch 0: F is done"),
        ([["0F0", "0F0", "0B0"]], "stage 0, micro-batch 0: FFB is done"),
        ([["0F0", "0B0", "0W0"]], "FBW is done"),
        ([["0F0", "0I0"]], "FI is done"),
        ([["0F0", "0B0", "0F2", "0B2"]], "stage 0, micro-batch 1: nothing is done"),
        ([["1F0", "1B0"]], "stage 0, micro-batch 0: nothing is done"),
        ([["0F0"], ["0B0"]], "stage 0 is on two ranks, 0 and 1"),
        ([[], []], "nothing is done"),
        ([["0F0", "0X0"]], "rank 0: '0X0' is not stage, F, B, I or W, micro-batch, as in '2F0'"),
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
    stages = [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None, is_last=False) for _ in range(v)
    ]
    return cls(stages, m)


@given(**numbers)
def test_the_same_orders_as_pytorchs(p, m, v):
    if m % max(1, m // p) == 0:  # PyTorch refuses others
        order = pytorchs(theirs.ScheduleInterleaved1F1B, p, m, v).pipeline_order
        assert build_schedule("interleaved_1f1b", p, m, v) == pipeline.flat(
            [map(str, filter(None, order[r])) for r in range(p)]
        )
        if v == 1:
            order = pytorchs(theirs.ScheduleInterleavedZeroBubble, p, m, v).pipeline_order
            ours = pipeline.flat([map(str, filter(None, order[r])) for r in range(p)])
            assert build_schedule("zero_bubble", p, m) == ours
    if m >= p:
        order = theirs.Schedule1F1B._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
        ours = build_schedule("1f1b", p, m)
        for rank in range(p):  # PyTorch's list is off by one forward where it executes as we do
            assert [a for a in map(str, filter(None, order[rank])) if "B" in a] == [a for a in ours[rank] if "B" in a]


@pytest.mark.parametrize(
    "cls", [theirs.ScheduleZBVZeroBubble, theirs.ScheduleDualPipeV, theirs.ScheduleInterleaved1F1B]
)
def test_csv(cls, tmp_path):
    schedule = pytorchs(cls, 4, 8, 2)
    schedule._dump_csv(tmp_path / "compute", format="compute_only")
    schedule._dump_csv(tmp_path / "comms", format="compute_comms")
    ours = pipeline.schedule_from_csv(tmp_path / "compute")
    assert pipeline.schedule_from_csv(tmp_path / "comms") == ours
    assert ("OVERLAP_F_B" in (tmp_path / "compute").read_text()) == (cls is theirs.ScheduleDualPipeV)
    assert "SEND_F" in (tmp_path / "comms").read_text()
    assert simulate(ours).bubble_fraction < 0.5
    pipeline.schedule_to_csv(ours, tmp_path / "ours")
    assert pipeline.schedule_from_csv(tmp_path / "ours") == ours
    assert list(csv.reader((tmp_path / "ours").open())) == ours
    schedule.pipeline_order = {}
    schedule._load_csv(tmp_path / "ours")
    assert [[str(a) for a in schedule.pipeline_order[rank]] for rank in range(4)] == ours


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_split_makes_the_costliest_stage_cheapest(cost, n):
    layers = [nn.Linear(1, 1) for _ in cost]
    if n > len(cost):
        with pytest.raises(ValueError, match=f"{len(cost)} layers .* {n} stages"):
            pipeline.split(layers, n, cost)
        return
    stages = pipeline.split(layers, n, cost)
    assert [layer for stage in stages for layer in stage] == layers
    assert len(stages) == n
    assert all(len(stage) for stage in stages)
    of = dict(zip(layers, cost, strict=True))
    options = itertools.combinations(range(1, len(cost)), n - 1)
    best = min(max(sum(cost[a:b]) for a, b in itertools.pairwise([0, *cuts, len(cost)])) for cuts in options)
    assert max(sum(of[layer] for layer in stage) for stage in stages) == best


def test_split_by_parameters():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 200), nn.Linear(200, 2)]
    assert [len(stage) for stage in pipeline.split(layers, 2)] == [3, 1]
    assert [len(stage) for stage in pipeline.split(nn.Sequential(*layers), 3)] == [2, 1, 1]


def test_dropout_depends_on_the_microbatch():
    def draw(*which):
        with pipeline.microbatch_rng(*which):
            return torch.rand(4)

    before = torch.get_rng_state()
    seen = [draw(*which) for which in itertools.product((0, 1), repeat=4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(1, 0, 1, 0), seen[10])
    assert len({tuple(x.tolist()) for x in seen}) == 16


# ---- equality with one device


class Layer(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def make_layers(n, make=Layer, seed=1):
    torch.manual_seed(seed)
    return [make() for _ in range(n)]


def make_batch(step, rows, shape=(6,)):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, *shape, generator=generator), torch.randn(rows, *shape, generator=generator)


def accumulate(stages, inputs, targets, m, step=0, loss_fn=F.mse_loss, weights=None, seed=0):
    """One device, plainly. -> mean loss"""
    weights = weights or [len(x) for x in inputs.chunk(m)]
    losses = []
    for i, (x, target) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
        for s, stage in enumerate(stages):
            with pipeline.microbatch_rng(seed, step, i, s):
                x = stage(x)  # noqa: PLW2901
        loss = loss_fn(x, target)
        (loss * (weights[i] / sum(weights))).backward()
        losses.append(loss.detach())
    if len(set(weights)) == 1:
        return sum(losses) / m
    return sum(loss * w for loss, w in zip(losses, weights, strict=True)) / sum(weights)


def assert_same(ours, plain, exact=True, what=""):
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert_equal(a.grad, b.grad, exact, f"{what} gradient of {name}")
        assert_equal(a.detach(), b.detach(), exact, f"{what} {name}")


def check_against_one_device(make, schedule, m, v=1, steps=2, rows=2, optimizer="sgd", batch=make_batch, **kwargs):
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v, make)
    mine = plain[rank::p] if isinstance(schedule, str) else [
        plain[s] for s in sorted({parse(a)[0] for a in schedule[rank]})
    ]  # fmt: skip
    indices = [plain.index(stage) for stage in mine]
    ours = Pipeline(copy.deepcopy(mine), schedule, m, kwargs.get("loss_fn", F.mse_loss), pool.group(), seed=0)
    optimizers = [OPTIMIZERS[optimizer](params) for params in (ours.parameters(), nn.ModuleList(plain).parameters())]
    for step in range(steps):
        inputs, targets = batch(step, rows * m)
        for o in optimizers:
            o.zero_grad()
        loss = ours.step(inputs if 0 in indices else None, targets if p * v - 1 in indices else None)
        expected = accumulate(plain, inputs, targets, m, step, **kwargs)
        assert (loss is None) == (p * v - 1 not in indices)
        assert loss is None or torch.equal(loss, expected)
        assert [action for action, *_ in ours.timeline] == ours.schedule[rank]
        for o in optimizers:
            o.step()
        for index, stage in zip(indices, ours.stages.values(), strict=True):
            assert_same(stage, plain[index], what=f"{schedule}, m {m}, v {v}, step {step}, stage {index}")
    return ours


def body_schedules(cases):
    for name, m, v, optimizer in cases:
        check_against_one_device(Layer, name, m, v, optimizer=optimizer)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_is_bitwise_micro_batch_accumulation(p):
    one = [(name, m, 1) for name in SCHEDULES for m in range(1, 10)]
    several = [(name, m, v) for name in ("interleaved_1f1b", "zero_bubble") for m in range(1, 10, 2) for v in (2, 3)]
    optimizers = itertools.cycle(("sgd", "adamw", "momentum"))
    pool.run(
        p, body_schedules, [(*case, optimizer) for case, optimizer in zip(one + several, optimizers, strict=False)]
    )


def body_naive():
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p, lambda: Layer(0.0))
    stage = copy.deepcopy(plain[rank])
    inputs, targets = make_batch(0, 6)
    loss = pipeline.gpipe_step(stage, 3, F.mse_loss, inputs, targets, inputs[:2], pool.group())
    expected = accumulate(plain, inputs, targets, 3)
    assert_same(stage, plain[rank])
    assert loss is None if rank < p - 1 else torch.allclose(loss, expected)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_naive_form(p):
    pool.run(p, body_naive)


def v_shaped(cls, p, m):
    order = pytorchs(cls, p, m, 2).pipeline_order
    return pipeline.flat([[str(a) for a in order[rank] if a] for rank in range(p)])


def body_v_shaped(name, m):
    check_against_one_device(Layer, v_shaped(getattr(theirs, name), pool.world_size(), m), m, 2)


@pytest.mark.parametrize(("name", "p", "m"), [("ScheduleZBVZeroBubble", 2, 3), ("ScheduleDualPipeV", 3, 7)])
def test_a_stage_layout_that_is_not_modulo(name, p, m):
    pool.run(p, body_v_shaped, name, m)


class Branches(nn.Module):
    """Passes on a dict of nested values: a tensor, integers, a mask without gradient, None, one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.scale = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int16))

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = {"x": (value, [value > 0, None]), "rows": torch.arange(len(value)), "unused": None, "calls": None}
        x, (mask, nothing) = value["x"]
        assert nothing is None
        self.calls += 1  # in place: what has been sent before must not change
        seen = self.calls if value["calls"] is None else value["calls"]
        x = self.first(x) * mask + self.scale(x)[value["rows"]] * seen.sum()
        return {"x": (torch.tanh(x), [mask, None]), "rows": value["rows"], "unused": self.unused(x), "calls": seen}


class Several(nn.Module):
    """Forward takes two arguments, as PyTorch's pipelining passes tuples on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, a, b):
        return self.linear(a) + b, a


def body_values(name, m, v):
    check_against_one_device(
        Branches, name, m, v, loss_fn=lambda output, target: F.mse_loss(output["x"][0], target), optimizer="adamw"
    )
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p, Several)
    ours = Pipeline(copy.deepcopy(plain[rank]), "1f1b", m, lambda y, target: F.mse_loss(y[0], target), pool.group())
    a, target = make_batch(0, 2 * m)
    ours.step((a, 2 * a), target)
    for x, t in zip(a.chunk(m), target.chunk(m), strict=True):
        value = x, 2 * x
        for stage in plain:
            value = stage(*value)
        (F.mse_loss(value[0], t) / m).backward()
    assert_same(ours.stages[str(rank)], plain[rank])


@pytest.mark.parametrize(
    ("name", "p", "v"), [("1f1b", 3, 1), ("zero_bubble", 2, 1), ("interleaved_1f1b", 2, 2), ("gpipe", 1, 3)]
)
def test_values_between_stages(name, p, v):
    pool.run(p, body_values, name, 3, v)


class Wrapped(nn.Module):
    """A `module` inside that takes other arguments; of what it returns, the last only a pipeline's end sees."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(6, 6)

    def forward(self, a, b):
        y = self.module(a) + b
        return y, b


class End(Several):
    def forward(self, a, b):
        y, _ = super().forward(a, b)
        return {"y": y, "sum": y.sum(), "cache": None}


def body_end():
    p, rank = pool.world_size(), pool.rank()
    stages = [make_layers(1, Wrapped)[0], make_layers(1, End)[0]]
    # a scalar among the targets is not cut, and says nothing about the number of samples
    loss_fn = lambda y, target: F.mse_loss(y["y"], target[1]) * target[0]  # noqa: E731
    ours = Pipeline(stages[rank], "1f1b", 2, loss_fn, pool.group())
    a, target = make_batch(0, 5)
    loss = ours.step((a, 2 * a), (torch.tensor(0.5), target))
    outputs = ours.eval_step((a, 2 * a))
    if rank == p - 1:
        parts = [stages[1](*make_layers(1, Wrapped)[0](x, 2 * x)) for x in a.chunk(2)]
        assert_equal(outputs["y"], torch.cat([part["y"] for part in parts]).detach(), exact=True)
        assert outputs["sum"] == [part["sum"] for part in parts]
        assert outputs["cache"] == [None, None]
        assert torch.allclose(loss, F.mse_loss(outputs["y"], target) / 2)


def test_what_the_last_stage_returns():
    pool.run(2, body_end)


class Unsendable(nn.Module):
    def forward(self, x):
        return {"input": x, "of": lambda: 0}


def body_unsendable():
    pipeline = Pipeline(Unsendable(), "1f1b", 2, lambda y, target: y["input"].sum(), pool.group())
    with pytest.raises((AttributeError, RuntimeError), match=r"pickle .*Unsendable\.forward\.<locals>\.<lambda>"):
        pipeline.step(*make_batch(0, 4))


def test_an_output_that_cannot_travel_is_an_error_on_all_ranks():
    pool.run(2, body_unsendable)


class Conjugate(nn.Module):
    """Its output is a view with a flag, as are the gradients of the next stage's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x):
        return (self.weight * x.conj()).conj()


def body_conjugate():
    check_against_one_device(Conjugate, "1f1b", 2, loss_fn=lambda y, target: (y - target).abs().square().mean())


def test_conjugate_views():
    pool.run(2, body_conjugate)


class LocalLoss(nn.Module):
    """Runs a backward of its own within forward, as layers that are trained on a loss beside them do."""

    def __init__(self):
        super().__init__()
        self.beside, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        if torch.is_grad_enabled():
            self.beside(x.detach()).square().mean().backward()
        return self.linear(x)


def body_local_loss(schedule):
    check_against_one_device(LocalLoss, schedule, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_backward_within_forward(schedule):
    pool.run(2, body_local_loss, schedule)


class Sometimes(nn.Module):
    """Passes on a transposed layout, and something that the next stage uses in every other micro-batch only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls, self.seen = nn.Linear(6, 6), nn.Linear(6, 6), 0, []

    def forward(self, value):
        a, b = value if isinstance(value, tuple) else (value, value)
        self.seen.append(a.stride())
        self.calls += 1
        y = self.first(a) + self.second(b) if self.calls % 2 else self.first(a)
        return torch.tanh(y).t().contiguous().t(), y


def body_sometimes():
    ours = check_against_one_device(Sometimes, "1f1b", 4, rows=3, loss_fn=lambda y, target: F.mse_loss(y[0], target))
    if pool.rank():
        assert {stride for stage in ours.stages.values() for stride in stage.seen} == {(1, 3)}


def test_layouts_are_kept_and_gradients_may_be_missing():
    pool.run(2, body_sometimes)


class Layouts(nn.Linear):
    """The output of each micro-batch lies otherwise in memory: transposed, contiguous, with gaps, expanded."""

    def __init__(self, first):
        super().__init__(6, 6)
        self.calls = first

    def forward(self, x):
        y = torch.tanh(super().forward(x.contiguous()))  # contiguous: so that it is multiplied alike wherever it lay
        self.calls += 1
        ways = [y.t().contiguous().t(), y, y.repeat_interleave(2, 1)[:, ::2], y[:, :1].expand(-1, 6)]
        return ways[self.calls % 4]


def body_layouts():
    for first in range(4):
        check_against_one_device(functools.partial(Layouts, first), "1f1b", 4, rows=3)


def test_layouts_that_change():
    pool.run(2, body_layouts)


class Fickle(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.dtypes = [torch.float32] * 4

    def forward(self, x):
        return super().forward(x).to(self.dtypes.pop(0))


def body_fickle():
    p, rank = pool.world_size(), pool.rank()
    stage = make_layers(p, Fickle)[rank]
    ours = Pipeline(stage, "gpipe", 2, F.mse_loss, pool.group())
    ours.step(*make_batch(0, 4))
    stage.dtypes = [torch.float32, torch.float64 if rank == 0 else torch.float32, torch.float32, torch.float32]
    with pytest.raises(RuntimeError, match=r"its output was .* before, .* and is now .*float64"):
        ours.step(*make_batch(1, 4))
    stage.dtypes = [torch.float32] * 4
    ours.step(*make_batch(1, 4))


def test_an_output_that_changes_is_an_error():
    pool.run(2, body_fickle)


def body_shapes():
    """The last micro-batch is smaller; shapes, dtypes and what is frozen change from step to step, and back."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p)
    ours = Pipeline(copy.deepcopy(plain[rank]), "1f1b", 4, F.mse_loss, pool.group(), seed=0)
    for step, (rows, shape) in enumerate([(7, (6,)), (8, (6,)), (7, (3, 6)), (7, (6,)), (11, (2, 6))]):
        inputs, targets = make_batch(step, rows, shape)
        if step == 3:
            plain[0].requires_grad_(False)
            for stage in ours.stages.values() if rank == 0 else ():
                stage.requires_grad_(False)
        loss = ours.step(inputs, targets)
        expected = accumulate(plain, inputs, targets, 4, step)
        assert loss is None or torch.equal(loss, expected)
        assert_same(ours.stages[str(rank)], plain[rank], what=f"step {step}")
    ours.double()
    nn.ModuleList(plain).double()
    ours.zero_grad()
    nn.ModuleList(plain).zero_grad()
    inputs, targets = (t.double() for t in make_batch(5, 8))
    ours.step(inputs, targets)
    accumulate(plain, inputs, targets, 4, 5)
    assert_same(ours.stages[str(rank)], plain[rank])


def test_shapes_are_found_and_may_change():
    pool.run(3, body_shapes)


def body_weights():
    """Masked tokens: the batch's mean is over the tokens that count; a micro-batch may have none."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p, lambda: Layer(0.0).double())
    inputs = make_batch(0, 6)[0].double()
    targets = torch.tensor([1, -100, -100, -100, 3, 5])
    ours = Pipeline(
        copy.deepcopy(plain[rank]), "1f1b", 3, F.cross_entropy, pool.group(), weight=lambda t: (t != -100).sum()
    )
    loss = ours.step(inputs, targets)
    x = inputs
    for stage in plain:
        x = stage(x)
    expected = F.cross_entropy(x, targets)  # of the whole batch at once
    expected.backward()
    assert_same(ours.stages[str(rank)], plain[rank], exact=False)
    assert (loss is None) == (rank < p - 1)
    if loss is not None:
        assert_equal(loss, expected.detach(), exact=False)
        assert [round(loss.item(), 9) for loss in ours.losses][1] == 0


def test_the_mean_is_over_tokens():
    pool.run(2, body_weights)


# ---- backward in two


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, pipeline.defer_gradient(ctx.weight, lambda: (gradient * x).flatten(0, -2).sum(0))


class Mixed(nn.Module):
    """Linear layers in all their uses, next to what cannot be deferred."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True, norm_first=True)
        self.frozen, self.partly, self.again = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.partly.weight.requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.scale, self.checkpointed = nn.Parameter(torch.ones(6)), Layer()

    def forward(self, x):
        x = self.block(x) + self.again(self.again(self.frozen(x))) + self.partly(x.transpose(0, 1)).transpose(0, 1)
        x = Custom.apply(self.normed(x), self.scale)
        return checkpoint(self.checkpointed, x, use_reentrant=False) + self.again(x[:, 0]).unsqueeze(1)


def body_split():
    p, rank = pool.world_size(), pool.rank()
    check_against_one_device(Mixed, "zero_bubble", 4, batch=lambda step, rows: make_batch(step, rows, (5, 6)))
    counts, fired, running = {}, {"I": [], "W": []}, []
    for name in ("1f1b", "zero_bubble"):
        stage = make_layers(p, Mixed)[rank]
        ours = Pipeline(stage, name, 2, F.mse_loss, pool.group())
        if name == "zero_bubble":
            run = ours._run
            ours._run = lambda batch, action, run=run: (running.append(action), run(batch, action))
            for n, q in stage.named_parameters():
                if q.requires_grad:
                    q.register_post_accumulate_grad_hook(lambda q, n=n: fired[parse(running[-1])[1]].append(n))
        with Products() as counter:
            ours.step(*make_batch(0, 4, (5, 6)))
        counts[name] = counter.count
    assert counts["1f1b"] == counts["zero_bubble"]  # no product twice
    late = {n for n, _ in stage.named_parameters() if re.search("linear|in_proj|out_proj|again|scale|up|down", n)}
    assert set(fired["W"]) == late
    assert len(fired["W"]) == 2 * len(late)
    assert {re.sub(r"\d", "", n) for n in fired["I"]} >= {
        "block.norm.weight",
        "normed.bias",
        "partly.bias",
        "checkpointed.norm.bias",
    }
    assert set(fired["I"]) & late <= {"scale"}  # PyTorch runs the hooks of what a Function has as an input in any case
    assert F.linear is pipeline.linear


@pytest.mark.parametrize("p", [1, 2])
def test_weight_gradients_wait_for_w(p):
    pool.run(p, body_split)


class Cast(Layer):
    def __init__(self, autocast):
        super().__init__(0.0)
        self.autocast = autocast

    def forward(self, x):
        with self.autocast(dtype=torch.bfloat16):
            return super().forward(x)


def body_autocast():
    for autocast in (functools.partial(torch.autocast, "cpu"), amp.autocast):
        check_against_one_device(lambda autocast=autocast: Cast(autocast), "zero_bubble", 2)


def test_backward_in_two_under_autocast():
    pool.run(2, body_autocast)


# ---- memory


class Watched(nn.Module):
    alive = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        hidden = torch.tanh(self.linear(x))
        Watched.alive += 1
        self.most = max(getattr(self, "most", 0), Watched.alive)
        output = hidden * hidden.sin()
        for tensor in (hidden, output):
            weakref.finalize(tensor, lambda: setattr(Watched, "alive", Watched.alive - 0.5))
        return output


def body_memory(name, m):
    gc.disable()  # freed by reference counts alone
    try:
        p, rank = pool.world_size(), pool.rank()
        Watched.alive = 0
        stage, buffers = Watched(), []
        ours = Pipeline(stage, name, m, F.mse_loss, pool.group())

        def watch(batch, action, run=ours._run):
            run(batch, action)
            buffers.append(sum("F" in key for key in batch.sent))

        ours._run = watch
        ours.step(*make_batch(0, m))
        del ours._run, watch
        assert stage.most == simulate(build_schedule(name, p, m)).peak_activations[rank]
        assert max(buffers) <= stage.most  # what has been sent is not kept for longer
        assert buffers[-1] == 0
        assert Watched.alive == 0
        stage.most = 0
        ours.eval_step(make_batch(0, m)[0], make_batch(0, m)[1])
        assert stage.most == 1
        gone = weakref.ref(ours)
        del ours
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_are_freed_after_their_backward(name):
    pool.run(3, body_memory, name, 5)


def body_sent(name, m, v):
    p, rank = pool.world_size(), pool.rank()
    ours = Pipeline(make_layers(v), name, m, F.mse_loss, pool.group())
    inputs, targets = make_batch(0, 2 * m)
    for _ in range(2):  # the first also tells shapes
        with pipeline.SentBytes() as sent:
            ours.step(inputs, targets)
    bsh, control = 2 * 6 * 4, 2 * (p - 1) / p * 8 * (4 + m + 1)
    F_, B = (v - (rank == p - 1), v - (rank == 0)) if p > 1 else (0, 0)
    assert sent.total == pytest.approx(m * (F_ + B) * bsh + control)


@pytest.mark.parametrize(
    ("name", "p", "v"), [("gpipe", 3, 1), ("interleaved_1f1b", 2, 3), ("zero_bubble", 4, 1), ("1f1b", 1, 1)]
)
def test_sent_bytes(name, p, v):
    pool.run(p, body_sent, name, 4, v)


# ---- refinements


def body_data_parallel(name, cls):
    """2 pipelines of 2 stages, each stage in DistributedDataParallel with its other replica, against one device."""
    world = dist.get_rank()
    pipe, replica = divmod(world, 2)[1], divmod(world, 2)[0]
    pipes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = make_layers(2, lambda: Layer(0.0))
    stage = cls(copy.deepcopy(plain[replica]), process_group=replicas[replica], bucket_cap_mb=1e-4)
    ours = Pipeline(stage, name, 4, F.mse_loss, pipes[pipe])
    optimizers = [OPTIMIZERS["momentum"](m.parameters()) for m in (ours, nn.ModuleList(plain))]
    for step in range(2):
        for o in optimizers:
            o.zero_grad()
        ours.step(*make_batch(10 * step + pipe, 8))
        total = {}
        for r in range(2):
            nn.ModuleList(plain).zero_grad()
            accumulate(plain, *make_batch(10 * step + r, 8), 4)
            for q in plain[replica].parameters():
                total[q] = total.get(q, 0) + q.grad / 2
        for q, gradient in total.items():
            q.grad = gradient
        assert_same(stage.module, plain[replica])
        reduced = sum(q.grad.double().sum() for q in stage.parameters())
        both = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(both, reduced, group=replicas[replica])
        assert torch.equal(*both)
        for q in plain[1 - replica].parameters():
            q.grad = None
        for o in optimizers:
            o.step()
        for s, layer in enumerate(plain):  # take over the other stage from whoever has it
            for q in layer.parameters():
                dist.broadcast(q.data, 2 * s)


@pytest.mark.parametrize("cls", [ddp.DDP, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_data_parallel_on_orthogonal_groups(name, cls):
    pool.run(4, body_data_parallel, name, cls)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, forward):
        ctx.group, ctx.forward = group, forward
        return sum_over(x, group) if forward else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.forward else sum_over(gradient, ctx.group), None, None


def sum_over(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Half(nn.Module):
    """One of two tensor-parallel halves of a Layer's MLP: column-parallel, then row-parallel."""

    def __init__(self, layer, half, group):
        super().__init__()
        self.up, self.down, self.group = nn.Linear(6, 5), nn.Linear(5, 6, bias=False), group
        self.up.weight.data, self.up.bias.data = (
            t.data.chunk(2)[half].clone() for t in (layer.up.weight, layer.up.bias)
        )
        self.down.weight.data = layer.down.weight.data.chunk(2, 1)[half].clone()

    def forward(self, x):
        y = self.down(F.gelu(self.up(Reduce.apply(x, self.group, False))))
        return x + Reduce.apply(y, self.group, True)


def body_tensor_parallel(name):
    half, s = dist.get_rank() % 2, dist.get_rank() // 2
    pipes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = [layer.double() for layer in make_layers(2, lambda: Layer(0.0))]
    for layer in plain:
        layer.norm = nn.Identity()
    ours = Pipeline(Half(plain[s], half, halves[s]), name, 3, F.mse_loss, pipes[half])
    ours.double()
    inputs, targets = (t.double() for t in make_batch(0, 6))
    loss = ours.step(inputs, targets)
    expected = accumulate(plain, inputs, targets, 3)
    assert loss is None or abs(loss - expected) < 1e-12
    stage = ours.stages[str(s)]
    for (mine, dim), whole in zip(((stage.up, 0), (stage.down, 1)), (plain[s].up, plain[s].down), strict=True):
        assert_equal(mine.weight.grad, whole.weight.grad.chunk(2, dim)[half], exact=False)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_with_tensor_parallel_stages(name):
    pool.run(4, body_tensor_parallel, name)


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(12, 6)


def body_tied(name, v, frozen):
    """Embedding and head: one parameter on one device, two here."""
    p, rank = pool.world_size(), pool.rank()
    n = p * v

    def make():
        return [Embedding(), *make_layers(n - 2, seed=5), nn.Linear(6, 12, bias=False)] if n > 1 else None

    torch.manual_seed(rank)  # the ranks start different
    layers = [layer.double().requires_grad_(not frozen) for layer in make()]
    tied = [("0.weight", f"{n - 1}.weight")]
    ours = Pipeline(layers[rank::p], name, 4, F.cross_entropy, pool.group(), tied=tied, seed=0)
    first = [[q.detach() for q in layers[0].parameters()]]
    dist.broadcast_object_list(first, 0, group=pool.group())
    plain = [layer.double().requires_grad_(not frozen) for layer in make()]
    plain[0].weight.data.copy_(first[0][0])
    plain[n - 1].weight = plain[0].weight
    plain[1:-1] = [layer.double() for layer in make_layers(n - 2, seed=5)]
    for layer in ours.stages.values():
        layer.requires_grad_(True)
    if frozen:
        for layer in (*ours.stages.values(), *plain):
            for q in layer.parameters():
                q.requires_grad_(q.shape != (12, 6))
    model = nn.ModuleList(plain)
    optimizers = [OPTIMIZERS["adamw"](list(m.parameters())) for m in (ours, model)]
    for step in range(3):
        tokens = torch.randint(12, (8, 2), generator=torch.Generator().manual_seed(step))
        for o in optimizers:
            if step != 1:  # gradients of two steps add up
                o.zero_grad()
        ours.step(tokens[:, 0], tokens[:, 1])
        accumulate(plain, tokens[:, 0], tokens[:, 1], 4, step, F.cross_entropy)
        for s, stage in ours.stages.items():
            assert_same(stage, plain[int(s)], exact=False, what=f"step {step}, stage {s}")
        copies = [None] * p
        mine = [q.grad for q in ours.parameters() if q.shape == (12, 6)]
        dist.all_gather_object(copies, mine, group=pool.group())
        copies = [c for theirs in copies for c in theirs]
        assert all(frozen or torch.equal(copies[0], other) for other in copies)
        before = [q.grad.clone() for q in ours.parameters() if q.grad is not None]
        for norm_type in (2.0, float("inf")):
            ours_norm = ours.clip_grad_norm_(1e9, norm_type)
            assert torch.allclose(
                ours_norm, nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type), rtol=1e-12, atol=0
            )
        assert all(
            torch.equal(a, q.grad)
            for a, q in zip(before, [q for q in ours.parameters() if q.grad is not None], strict=True)
        )
        norm = ours.clip_grad_norm_(0.05)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms = [None] * p
        dist.all_gather_object(norms, norm.item(), group=pool.group())
        assert len(set(norms)) == 1
        for s, stage in ours.stages.items():
            assert_same(stage, plain[int(s)], exact=False, what=f"clipped in step {step}, stage {s}")
        for o in optimizers:
            o.step()


@pytest.mark.parametrize(
    ("name", "p", "v", "frozen"),
    [("1f1b", 3, 1, False), ("zero_bubble", 2, 1, False), ("interleaved_1f1b", 2, 2, True), ("gpipe", 1, 3, False)],
)
def test_tied_parameters_and_clipping(name, p, v, frozen):
    pool.run(p, body_tied, name, v, frozen)


def body_eval(name, v):
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p * v)
    ours = Pipeline(copy.deepcopy(plain[rank::p]), name, 4, F.mse_loss, pool.group())
    inputs, targets = make_batch(0, 7)
    ours.step(inputs, targets)
    gradients = [q.grad.clone() for q in ours.parameters()]
    for module in (ours, *plain):
        module.eval()
    with torch.no_grad():
        output = nn.Sequential(*plain)(inputs)
        loss = ours.step(inputs, targets)
    outputs = ours.eval_step(inputs)
    assert (loss is None) == (outputs is None) == (rank < p - 1)
    if loss is not None:
        assert torch.allclose(outputs, output, rtol=1e-5, atol=1e-6)
        assert torch.allclose(loss, F.mse_loss(output, targets), rtol=1e-6)
        assert torch.equal(loss, ours.eval_step(inputs, targets))
    else:
        ours.eval_step(inputs, targets)
    assert all(torch.equal(a, q.grad) for a, q in zip(gradients, ours.parameters(), strict=True))
    assert ours.steps == 1
    assert [action for action, *_ in ours.timeline] == [a for a in ours.schedule[rank] if "F" in a]


@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 3, 1), ("interleaved_1f1b", 2, 2)])
def test_eval(name, p, v):
    pool.run(p, body_eval, name, v)


# ---- failures


class Fragile(nn.Module):
    action = None  # where to fail

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def fail(self, kind, gradient=None):
        if self.action == f"{kind}{self.calls}":
            raise ZeroDivisionError("broken on purpose")

    def forward(self, x):
        self.fail("F")
        self.calls += 1
        y = self.linear(x)
        call = self.calls - 1
        if y.requires_grad:
            y.register_hook(
                lambda g: self.fail("B", g) if self.action == f"B{call}" and not setattr(self, "calls", call) else None
            )
        return y


def body_raises(name, where, action):
    p, rank = pool.world_size(), pool.rank()
    stage = make_layers(p, Fragile)[rank]
    ours = Pipeline(stage, name, 4, F.mse_loss, pool.group())
    errors = []
    for step in range(3):
        stage.calls = 0
        stage.action = action if rank == where and step == 1 - (action in ("F0", "B0")) else None
        try:
            ours.step(*make_batch(step, 8))
            errors.append(None)
        except (ZeroDivisionError, RuntimeError) as error:
            errors.append((type(error).__name__, str(error)))
        stage.zero_grad()
    stage.calls, plain = 0, make_layers(p, Fragile)
    ours.step(*make_batch(5, 8))  # and it works again
    accumulate(plain, *make_batch(5, 8), 4)
    assert_same(stage, plain[rank])
    return errors


@pytest.mark.parametrize(
    ("name", "where", "action"), [("1f1b", 1, "F2"), ("zero_bubble", 0, "F0"), ("gpipe", 2, "B1"), ("1f1b", 2, "B0")]
)
def test_a_stage_that_raises(name, where, action):
    everyone = pool.run(3, body_raises, name, where, action)
    step = 1 - (action in ("F0", "B0"))
    for rank, errors in enumerate(everyone):
        assert [bool(error) for error in errors] == [k == step for k in range(3)]
        kind, text = errors[step]
        assert kind == ("ZeroDivisionError" if rank == where else "RuntimeError")
        assert "broken on purpose" in text
        assert rank == where or text.startswith(f"rank {where} failed in {where}{action}"), text


def body_nan():
    p, rank = pool.world_size(), pool.rank()
    stage = make_layers(p)[rank]
    torch.manual_seed(rank)
    ours = Pipeline(stage, "1f1b", 4, F.mse_loss, pool.group())
    assert ours.seed == 0  # rank 0's
    inputs, targets = make_batch(0, 8)
    targets[5] = float("nan")
    with pytest.raises(RuntimeError, match="the loss of micro-batch 2 is nan"):
        ours.step(inputs, targets)
    assert ours.steps == 0
    ours.step(*make_batch(0, 8))


def test_a_loss_that_is_nan():
    pool.run(2, body_nan)


DIES = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
from pipeline import Pipeline

class Stage(torch.nn.Linear):
    def forward(self, x):
        if dist.get_rank() == 1 and pipeline.steps == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
pipeline = Pipeline(Stage(4, 4), "1f1b", 4, torch.nn.functional.mse_loss)
for step in range(3):
    pipeline.step(torch.ones(8, 4), torch.ones(8, 4))
print("finished")
"""


def test_a_rank_that_dies(tmp_path):
    (tmp_path / "script.py").write_text(DIES.format(root=str(ROOT)))
    done = launch([*TORCHRUN, "--nproc-per-node", "3", "script.py"], tmp_path, timeout=60)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert "finished" not in done.stdout


def body_refused(case):
    p, rank = pool.world_size(), pool.rank()
    wrong = rank == p - 1  # one rank alone: the others must hear of it
    stages, schedule, m, kwargs = nn.Linear(6, 6), "1f1b", 4, {}
    inputs, targets = make_batch(0, 8)
    if case == "schedule" and wrong:
        schedule = "gpipe"
    elif case == "stages" and wrong:
        stages = [stages, nn.Linear(6, 6)]
    elif case == "integers" and wrong:
        schedule = [[1, 2], [3, 4]]
    elif case == "ranks":
        schedule = build_schedule("1f1b", p + 1, m)
    elif case == "microbatches":
        schedule = build_schedule("1f1b", p, m + 1)
    elif case == "deadlock" and wrong:
        schedule = [["0B0", "0F0"]]
    elif case == "tied":
        kwargs = {"tied": [("0.weight", "1.bias")]}
    elif case == "name":
        kwargs = {"tied": [("0.weight", "1.wait")]}
    elif case == "chunk":
        inputs = inputs[:5]
    elif case == "nothing":
        inputs = None
    elif case == "targets":
        targets = None
    elif case == "mode":
        torch.set_grad_enabled(not wrong)
    elif case == "weights":
        kwargs = {"weight": lambda target: 0}
    elif case == "raises":
        kwargs = {"weight": lambda target: (target != -100).tokens}
    try:
        Pipeline(stages, schedule, m, F.mse_loss, pool.group(), **kwargs).step(inputs, targets)
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("schedule", "rank 1 has another schedule"),
        ("stages", "another schedule"),
        ("integers", "expected str"),
        ("ranks", "rank 0 of 2 has 1 stages and 4 micro-batches; the schedule is for 3 ranks"),
        ("microbatches", "and 5 micro-batches"),
        ("deadlock", "0B0 (rank 0) waits for 0F0"),
        ("tied", "must exist and be alike"),
        ("name", "tied parameters ['0.weight', '1.wait'] must exist and be alike: {'0.weight': "),
        ("chunk", "torch.chunk, not into 4; pass a batch of a multiple of 4 samples"),
        ("nothing", "inputs of shapes []"),
        ("targets", "targets of shapes []"),
        ("mode", "under torch.no_grad(), or none"),
        ("weights", "their sum must be positive"),
        ("raises", "'Tensor' object has no attribute 'tokens'"),
    ],
)
def test_wrong_use_is_an_error_on_every_rank(case, words):
    errors = pool.run(2, body_refused, case)
    assert errors[0] == errors[1]
    assert words in (errors[0] or "")


# ---- what mutations of pipeline.py have survived


class Tokens(nn.Module):
    """Integers in, so that only the parameters say in what dtype the outputs are."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(12, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x if x.is_floating_point() else self.embedding(x))


def body_unchanged_inputs(name):
    """What messages are like changes with the parameters alone; nothing to train; evaluation between steps."""
    p, rank = pool.world_size(), pool.rank()
    plain = make_layers(p, Tokens)
    ours = Pipeline(
        copy.deepcopy(plain[rank]), name, 3, F.mse_loss, pool.group(), tied=[("0.linear.weight", "1.linear.weight")]
    )
    for layer in plain[1:]:
        layer.linear.weight.data.copy_(plain[0].linear.weight.data)
    tokens, targets = torch.arange(9) % 12, make_batch(0, 9)[1]
    for step, dtype in enumerate((torch.float32, torch.float64)):
        for module in (ours, *plain):
            module.to(dtype).zero_grad()
        loss = ours.step(tokens, targets.to(dtype))
        expected = accumulate(plain, tokens, targets.to(dtype), 3, step)
        total = sum(layer.linear.weight.grad for layer in plain)
        for layer in plain:
            layer.linear.weight.grad = total
        assert_same(ours.stages[str(rank)], plain[rank])
        assert loss is None or torch.equal(loss, expected)  # three samples each: the plain mean, not a weighted one
        before = [parameter.grad for parameter in ours.parameters()]
        ours.eval_step(tokens, targets.to(dtype))
        assert all(a is q.grad for a, q in zip(before, ours.parameters(), strict=True))
    for module in (ours, *plain):
        module.requires_grad_(False)
        module.zero_grad()
    loss = ours.step(tokens, targets.double())
    expected = sum(
        F.mse_loss(plain[1](plain[0](x)), t) for x, t in zip(tokens.chunk(3), targets.double().chunk(3), strict=True)
    )
    assert loss is None or torch.equal(loss, expected / 3)
    assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_messages_follow_the_parameters(name):
    pool.run(2, body_unchanged_inputs, name)


def body_waits(name, v):
    """Each transfer is waited for: an isend whose handle is dropped can hang, or send what its buffer has become."""
    made, waited, wait = [], [], pipeline.Message.wait
    init = pipeline.Message.__init__

    def watched_init(message, *args):
        init(message, *args)
        made.append(message)

    pipeline.Message.__init__ = watched_init
    pipeline.Message.wait = lambda message: (waited.append(message), wait(message))
    try:
        ours = Pipeline(make_layers(v), name, 4, F.mse_loss, pool.group())
        most = []

        def watch(batch, action, run=ours._run):
            run(batch, action)
            most.append(sum("F" not in key for key in batch.sent))

        ours._run = watch
        ours.step(*make_batch(0, 8))
        ours.eval_step(*make_batch(0, 8))
    finally:
        pipeline.Message.__init__, pipeline.Message.wait = init, wait
    assert {id(message) for message in made} <= {id(message) for message in waited}
    assert max(most) <= v  # of gradients, only the last message of each stage is kept


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)])
def test_every_transfer_is_waited_for(name, v):
    pool.run(2, body_waits, name, v)


class Transposed(nn.Module):
    """Linear layers on an input that is not contiguous: PyTorch then multiplies, and sums for the bias, otherwise."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(240, 6, bias=False)

    def forward(self, x):
        wide = x.repeat(1, 1, 40).transpose(0, 1)
        return x + self.first(x.transpose(0, 1)).transpose(0, 1) + self.second(wide).transpose(0, 1)


def body_transposed():
    check_against_one_device(
        Transposed, "zero_bubble", 2, rows=33, batch=lambda step, rows: make_batch(step, rows, (50, 6))
    )


def test_split_linear_of_what_is_not_contiguous():
    pool.run(2, body_transposed)


class Optional(nn.Module):
    """Forward requires one argument, so it gets the tuple, although it would take two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair, scale=1.0):
        a, b = pair
        return self.linear(a) * scale + b, a


class NoSync(nn.Module):
    """As DistributedDataParallel around a stage, forward takes anything, and its stage's says what."""

    def __init__(self):
        super().__init__()
        self.module, self.seen = Several(), []

    @contextlib.contextmanager
    def no_sync(self):
        self.seen.append("no_sync")
        yield

    def forward(self, *args):
        if len(args) == 1:
            self.seen.append(type(self.module).__name__)
        return self.module(*args)


def body_arguments(m, make):
    stage = make()
    ours = Pipeline(stage, "gpipe", m, lambda y, target: F.mse_loss(y[0], target), pool.group())
    a, target = make_batch(0, 3 * m)
    ours.step((a, 2 * a), target)
    if isinstance(stage, NoSync):  # reduces once, in the last backward, and is whole again
        assert stage.seen == ["no_sync"] * m + ["Identity"]
        assert isinstance(stage.module, Several)


@pytest.mark.parametrize("make", [Optional, NoSync])
def test_arguments_of_a_stage(make):
    pool.run(2, body_arguments, 3, make)


def body_empty_parameter():
    stage = nn.Linear(6, 6)
    stage.empty = nn.Parameter(torch.zeros(0, 3))
    stage.register_forward_hook(lambda module, args, y: y + module.empty.sum())
    ours = Pipeline(stage, "1f1b", 2, F.mse_loss, pool.group())
    ours.step(*make_batch(0, 4))
    assert ours.clip_grad_norm_(1.0, float("inf")) > 0


def test_clipping_with_an_empty_parameter():
    pool.run(2, body_empty_parameter)


# ---- torch.distributed.pipelining


def body_pytorch(name, m):
    """The same model, loss and gradients; our schedule in PyTorch's runtime."""
    p, rank = pool.world_size(), pool.rank()
    v = 2 if name in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    layers = [layer.double() for layer in make_layers(p * v, lambda: Layer(0.0))]
    cls = getattr(theirs, f"Schedule{name}", theirs._PipelineScheduleRuntime)
    layout = list(range(p)) * v if name != "ZBVZeroBubble" else [*range(p), *reversed(range(p))]
    mine = [s for s in range(p * v) if layout[s] == rank]
    modules = [copy.deepcopy(layers[s]) for s in mine]
    stages = [
        pipelining.PipelineStage(module, s, p * v, torch.device("cpu"), group=pool.group())
        for s, module in zip(mine, modules, strict=True)
    ]
    torch_schedule = cls(stages[0] if name in ("GPipe", "1F1B") else stages, m, loss_fn=F.mse_loss)
    ours_schedule = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved_1f1b"}.get(name, "zero_bubble")
    if name == "ZBVZeroBubble":
        ours_schedule = v_shaped(cls, p, m)
    elif name == "ours":
        order = build_schedule("zero_bubble", p, m)
        torch_schedule._prepare_schedule_with_comms(
            {r: [theirs._Action.from_str(a) for a in order[r]] for r in range(p)}
        )
    ours = Pipeline([copy.deepcopy(layers[s]) for s in mine], ours_schedule, m, F.mse_loss, pool.group())
    inputs, targets = (t.double() for t in make_batch(0, 2 * m))
    losses, last = [], p * v - 1 in mine
    torch_schedule.step(*((inputs,) if 0 in mine else ()), **({"target": targets, "losses": losses} if last else {}))
    loss = ours.step(inputs, targets)
    for module, stage in zip(modules, ours.stages.values(), strict=True):
        assert_same(stage, module, exact=False)
    if last:
        assert_equal(loss, sum(losses).detach() / m, exact=False)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ours"])
def test_equal_to_pytorchs_pipelining(name):
    pool.run(2, body_pytorch, name, 4)


# ---- the demo


def test_the_demo_draws_and_traces(tmp_path):
    arguments = ["--steps", "2", "--schedule", "zero_bubble", "--microbatches", "3", "--batch-size", "6"]
    command = [*TORCHRUN, "--nproc-per-node", "2", ROOT / "pipeline.py", *arguments]
    done = launch([*command, "--action-ms", "20", "--trace", "trace.json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    predicted, measured = (float(n) for n in re.findall(r"bubble (\d+)%", done.stdout))
    assert abs(predicted - measured) < 15
    rows = re.findall(r"rank [01] +(\|.*)", done.stdout)
    assert len(rows) == 4
    for row, actions in zip(rows, build_schedule("zero_bubble", 2, 3) * 2, strict=True):
        assert re.findall(r"\|(\d[FIW]\d)", row) == actions
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == 2 * 18
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in events)


def test_the_demo_refuses_more_stages_than_layers(tmp_path):
    done = launch([sys.executable, ROOT / "pipeline.py", "--stages-per-rank", "9"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: 1 ranks with 9 stages each: the model has 7 layers; use fewer\n"
