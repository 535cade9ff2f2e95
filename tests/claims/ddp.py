"""An implementation of --ddp is called as PyTorch's class is: class(module, process_group=group).

Every argument but `module` is left out if the class has no such name. If the class has a method
`finish_gradient_synchronization()`, it is called after backward and before each step.
"""

from datetime import timedelta
from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import Collectives, loss_of, make_batch, make_model

from claims.registry import (
    add_kind,
    check,
    claim,
    default_group,
    error_from,
    same_on_all,
)
from claims.training import Trainer

add_kind(
    "ddp",
    called=__doc__,
    make=partial(Trainer, "ddp"),
    ours="ddp:DistributedDataParallel",
    pytorchs="torch.nn.parallel:DistributedDataParallel",
)


@claim("ddp", 2)
def buffers(make):
    """In forward, all ranks take over rank 0's buffers."""
    model = make_model("batchnorm")
    trainer = make(model)
    for step in range(2):
        trainer.step([make_batch(pool.rank(), step)])
    trainer.model(make_batch(0, 5))  # the same on all ranks, after rank 0's statistics have come
    same_on_all(model[1].running_mean, "the running mean")


@claim("ddp", 2)
def no_sync_is_silent(make):
    """A backward under no_sync sends nothing."""
    trainer = make(make_model("plain"))
    for step in range(2):  # PyTorch's sends once how its buckets are to be
        trainer.step([make_batch(0, step)])
    with Collectives() as seen, trainer.no_sync():
        loss_of(trainer.model(make_batch(0, 1))).backward()
    check(not seen.calls, f"sent {seen.calls}")


@claim("ddp", 2)
def overlap(make):
    """Communication begins while backward still runs. Each gradient is handed to an all-reduce once."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    trainer = make(model, bucket_cap_mb=1e-6)
    trainer.step([make_batch(pool.rank(), 0)])  # PyTorch's first step has buckets of its own
    with Collectives() as seen:
        model[0].weight.register_hook(
            lambda _: seen.calls.append(("the first layer's gradient", 0))
        )
        trainer.step([make_batch(pool.rank(), 1)])
    check(seen.calls[0] != ("the first layer's gradient", 0), "everything is sent after backward")
    gradients, sent = sum(p.nbytes for p in model.parameters()), seen.bytes_of("allreduce_")
    check(sent == gradients, f"{sent} bytes are sent for {gradients} of gradients")


@claim("ddp", 2)
def overflow(make):
    """The sum of two fp16 gradients whose mean is finite does not overflow."""
    model = nn.Linear(1, 1, bias=False).half()
    make(model).backward([torch.full((1, 1), 40000.0, dtype=torch.float16)], torch.sum)
    check(model.weight.grad.item() == 40000.0, f"{model.weight.grad.item()}, not 40000")


@claim("ddp", 2)
def different_models(make):
    """Models of other shapes on another rank are an error on all of them, at construction."""
    group = dist.new_group(
        [0, 1], timeout=timedelta(seconds=2)
    )  # PyTorch's notices when that is over
    with (
        default_group(group),
        error_from("a Linear(2, 2) on one rank and a Linear(2, 3) on the other"),
    ):
        make(nn.Linear(2, 2 + pool.rank()))
