"""An implementation of --zero1 is called as PyTorch's class is: class(parameters, optimizer_class, **its arguments).

torch's DistributedDataParallel has averaged the gradients before the step. If the first argument is
named `module`, as ours is, the class gets the module and averages gradients itself; so does every
class under --zero2 and --zero3. A class under --zero3 has a method `module_state_dict()`.
"""

from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn

from claims.registry import (
    add_kind,
    check,
    claim,
    same,
)
from claims.training import ZERO, Trainer, trains

add_kind(
    "zero1",
    called=__doc__,
    make=partial(Trainer, "zero1"),
    ours="zero:Zero1",
    pytorchs="torch.distributed.optim:ZeroRedundancyOptimizer",
)
add_kind("zero2", called=__doc__, make=partial(Trainer, "zero2"), ours="zero:Zero2")
add_kind("zero3", called=__doc__, make=partial(Trainer, "zero3"), ours="zero:Zero3")


@claim("zero1 zero2", 3)
def state_is_sharded(make):
    """All ranks' optimizer states together are the whole one, and no rank has more than its share and one parameter."""
    model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(6)])
    trainer = make(model, "adamw")
    trainer.step([torch.randn(4, 20)])
    psi, values = sum(p.numel() for p in model.parameters()), vars(trainer.optimizer).values()
    inner = next((v for v in values if isinstance(v, torch.optim.Optimizer)), trainer.optimizer)
    mine = sum(
        t.numel()
        for state in inner.state.values()
        for t in state.values()
        if torch.is_tensor(t) and t.dim()
    )
    total = [None] * pool.world_size()
    dist.all_gather_object(total, mine, group=pool.group())
    check(
        2 * psi <= sum(total) < 2.1 * psi + 3 * 64,
        f"{sum(total)} elements of state for {psi} parameters",
    )
    check(
        max(total) <= 2 * psi / pool.world_size() + 800 + 64,
        f"a rank holds {max(total)} of {2 * psi}",
    )


def states_agree(trainer):
    if hasattr(trainer.optimizer, "consolidate_state_dict"):
        trainer.optimizer.consolidate_state_dict(to=0)
        if pool.rank():
            return
    ours, plain = (
        trainer.optimizer.state_dict()["state"],
        trainer.plain_optimizer.state_dict()["state"],
    )
    check(list(ours) == list(plain), f"state of parameters {list(ours)}")
    for index, state in plain.items():
        for key, value in state.items():
            same(
                torch.as_tensor(ours.get(index, {}).get(key, torch.nan)),
                value,
                f"state {index} {key}",
            )


def schedule(trainer):
    if not hasattr(trainer, "schedules"):
        optimizers = trainer.optimizer, trainer.plain_optimizer
        trainer.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers
        ]
    else:
        for each in trainer.schedules:
            each.step()


trains(
    "whole_state_dict",
    "The state dict is the plain optimizer's.",
    [2],
    ZERO,
    optimizer="adamw",
    after=states_agree,
)
trains(
    "schedulers",
    "A learning rate that a scheduler changes counts in the next step.",
    [2],
    ZERO,
    after=schedule,
)
