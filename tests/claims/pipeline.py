"""An implementation of --pipeline-schedule is a function that returns lists of actions.

It runs nothing. function(ranks, micro_batches, stages_per_rank) returns one list for each rank.
Actions are PyTorch's, "{stage}{F|B|I|W}{micro-batch}": F is the forward, B the whole backward,
I the backward for the input and W the backward for the weights. So "0F3" is the forward of stage 0
for micro-batch 3. Stage s belongs to rank s % ranks. The function may refuse a size with a
ValueError. If its first argument is called `name`, it is called for each name in
`function.names`.
"""

import copy
import itertools
from functools import partial

import pool
import torch
import torch.nn as nn
import torch.nn.functional as F

import pipeline
from claims.registry import add_kind, check, claim, names_of, same


def make_schedules(implementation):
    """Return functions(ranks, micro-batches, stages per rank)."""
    if "name" not in names_of(implementation):
        return [implementation]
    names = getattr(implementation, "names", pipeline.SCHEDULES)
    return [partial(implementation, name) for name in names]


add_kind(
    "pipeline-schedule",
    called=__doc__,
    make=make_schedules,
    ours="pipeline:build_schedule",
    pytorchs="pytorchs:build_schedule",
)

SIZES = (  # ranks, micro-batches, stages per rank
    (1, 1, 1),
    (2, 2, 1),
    (2, 5, 1),
    (4, 8, 1),
    (4, 4, 2),
    (3, 6, 3),
    (4, 2, 1),
)


def schedules_of(make, sizes=SIZES):
    """Return (ranks, micro-batches, stages per rank, schedule) for the sizes that it accepts."""
    for schedule in make():
        for p, m, v in sizes:
            try:
                lists = schedule(p, m, v)
                yield p, m, v, [list(map(str, actions)) for actions in lists]
            except (ValueError, AssertionError):
                check((p, m, v) != (2, 2, 1), "it refuses 2 ranks with 2 micro-batches")


@claim("pipeline-schedule", 1)
def complete(make):
    """Each stage takes each micro-batch forward once and backward once, on the stage's rank."""
    for p, m, v, schedule in schedules_of(make):
        for rank, actions in enumerate(schedule):
            total = 0
            for stage, i in itertools.product(range(rank, p * v, p), range(m)):
                kinds = "".join(kind for kind in "FBIW" if f"{stage}{kind}{i}" in actions)
                what = f"{kinds or 'nothing'} of stage {stage} on micro-batch {i}"
                check(kinds in ("FB", "FIW"), f"rank {rank} of {p} runs {what} of {m}")
                total += len(kinds)
            check(len(actions) == total, f"rank {rank} of {p} runs an action too many")


@claim("pipeline-schedule", 1)
def no_deadlock(make):
    """No rank waits for an action that can only come later."""
    for p, m, _, schedule in schedules_of(make):
        try:
            pipeline.simulate(schedule)
        except ValueError as error:
            check(False, f"{p} ranks, {m} micro-batches: {str(error)[:100]}")


def runs_as_one_device(make, dtype=torch.float64, exact=False):
    sizes = ((2, 2, 1), (2, 5, 1), (2, 4, 2))
    for p, m, v, schedule in schedules_of(make, sizes):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p * v)]
        plain = nn.Sequential(*stages).to(dtype)
        own = slice(pool.rank(), None, p)
        mine = copy.deepcopy(plain)[own]
        inputs, targets = torch.randn(2, 2 * m, 6, dtype=dtype)

        runner = pipeline.Pipeline(list(mine), schedule, m, F.mse_loss, pool.group())
        loss = runner.step(inputs, targets)
        total = 0.0
        for x, y in zip(inputs.chunk(m), targets.chunk(m), strict=True):
            micro_loss = F.mse_loss(plain(x), y) / m
            micro_loss.backward()
            total += micro_loss.detach()

        pairs = zip(mine.named_parameters(), plain[own].parameters(), strict=True)
        for (name, parameter), expected in pairs:
            what = f"gradient of {name} with {m} micro-batches"
            same(parameter.grad, expected.grad, what, exact)
        if loss is not None:
            check(abs(loss - total) < 1e-6, "the loss is not the mean")


@claim("pipeline-schedule", 2)
def gradients(make):
    """A run of the schedule has the loss and the gradients of micro-batch accumulation."""
    runs_as_one_device(make)


@claim("pipeline-schedule", 2, about="property")
def gradients_bitwise(make):
    """Its gradients are bitwise those of micro-batch accumulation, in float32."""
    runs_as_one_device(make, torch.float32, exact=True)


@claim("pipeline-schedule", 1, about="property")
def bubble(make):
    """It idles no longer than GPipe, (p-1)/(m+p-1) of the time, or keeps fewer activations."""
    sizes = ((2, 4, 1), (4, 8, 1), (4, 16, 1))
    for p, m, v, schedule in schedules_of(make, sizes):
        times = pipeline.simulate(schedule)
        has_few = max(times.peak_activations) < m * v
        is_fast = times.bubble_fraction <= (p - 1) / (m + p - 1) + 1e-9
        check(has_few or is_fast, f"it idles for {times.bubble_fraction:.0%} of the time")
