"""An implementation of --pipeline-schedule is a function, not a class that runs: it returns lists of actions.

function(ranks, micro_batches, stages_per_rank) returns one list for each rank. An action is
"{stage}{F|B|I|W}{micro-batch}", as PyTorch writes it: F is forward, B the whole backward, I the backward
for the input and W the backward for the weights; "0F3" is stage 0's forward of micro-batch 3. Stage s
belongs to rank s % ranks. If the function's first argument is `name`, it is called for each of
`function.names`. It may refuse a size with a ValueError.
"""

import copy
import itertools
from functools import partial

import pool
import torch
import torch.nn as nn
import torch.nn.functional as F

import pipeline
from claims.registry import (
    add_kind,
    check,
    claim,
    names_of,
    same,
)


def make_schedules(implementation):
    """-> functions (ranks, micro-batches, stages per rank) -> schedule; of ours, each by name."""
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


def schedules_of(
    make, sizes=((1, 1, 1), (2, 2, 1), (2, 5, 1), (4, 8, 1), (4, 4, 2), (3, 6, 3), (4, 2, 1))
):
    for schedule in make():
        for p, m, v in sizes:
            try:
                yield p, m, v, [list(map(str, actions)) for actions in schedule(p, m, v)]
            except (ValueError, AssertionError):  # it does not make such a schedule, and says so
                check((p, m, v) != (2, 2, 1), "refuses 2 ranks with 2 micro-batches")


@claim("pipeline-schedule", 1)
def complete(make):
    """Every stage takes every micro-batch forward once and backward once, on its rank."""
    for p, m, v, schedule in schedules_of(make):
        for rank, actions in enumerate(schedule):
            mine = {f"{stage}F{i}" for stage in range(rank, p * v, p) for i in range(m)}
            done = {kind: {a.replace(kind, "F") for a in actions if kind in a} for kind in "FBIW"}
            odd = (mine ^ done["F"]) | (mine ^ (done["B"] | done["I"]))
            check(
                not odd,
                f"{p} ranks, {m} micro-batches: rank {rank} has too few or too many of {sorted(odd)[:3]}",
            )
            check(
                not done["B"] & done["I"], f"backward of {sorted(done['B'] & done['I'])[:3]} twice"
            )
            check(done["W"] == done["I"], "an I without its W, or a W without I")
            check(len(actions) == len(set(actions)), "an action twice")


@claim("pipeline-schedule", 1)
def no_deadlock(make):
    """No rank waits for what can only come later, and nothing goes backward before it went forward."""
    for p, m, _v, schedule in schedules_of(make):
        try:
            pipeline.simulate(schedule)
        except ValueError as error:
            check(False, f"{p} ranks, {m} micro-batches: {str(error)[:100]}")


@claim("pipeline-schedule", 1)
def in_order(make):
    """Micro-batches go backward in their order, so that gradients add up as in a loop on one device."""
    for _, _, _, schedule in schedules_of(make):
        for actions in schedule:
            for stage, kind in itertools.product(
                {a.partition("F")[0] for a in actions if "F" in a}, "BIW"
            ):
                numbers = [
                    int(a.removeprefix(stage + kind)) for a in actions if a.startswith(stage + kind)
                ]
                check(
                    numbers == sorted(numbers),
                    f"stage {stage} takes micro-batches backward in the order {numbers}",
                )


@claim("pipeline-schedule", 1)
def bubble(make):
    """It idles no longer than GPipe, (p-1)/(m+p-1) of the time; or keeps fewer activations than all m."""
    for p, m, v, schedule in schedules_of(make, ((2, 4, 1), (4, 8, 1), (4, 16, 1))):
        times = pipeline.simulate(schedule)
        few = max(times.peak_activations) < m * v
        check(
            few or times.bubble_fraction <= (p - 1) / (m + p - 1) + 1e-9,
            f"idle for {times.bubble_fraction:.0%}",
        )


@claim("pipeline-schedule", 2)
def gradients(make):
    """Run, its gradients and its loss are bitwise those of micro-batch accumulation."""
    for p, m, v, schedule in schedules_of(make, ((2, 2, 1), (2, 5, 1), (2, 4, 2))):
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p * v)])
        mine = copy.deepcopy(plain)[pool.rank() :: p]
        inputs, targets = torch.randn(2, 2 * m, 6)
        loss = pipeline.Pipeline(
            list(mine), schedule, m, F.mse_loss, process_group=pool.group()
        ).step(inputs, targets)
        losses = [
            F.mse_loss(plain(x), y) / m
            for x, y in zip(inputs.chunk(m), targets.chunk(m), strict=True)
        ]
        for each in losses:
            each.backward()
        for ours, theirs in zip(
            mine.parameters(), plain[pool.rank() :: p].parameters(), strict=True
        ):
            same(ours.grad, theirs.grad, f"gradient with {m} micro-batches", exact=True)
        if loss is not None:
            check(abs(loss.item() - sum(losses).item()) < 1e-6, "the loss is not the mean")
