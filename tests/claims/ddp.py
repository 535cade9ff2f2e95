"""An implementation of --ddp is called as PyTorch's class: class(module, process_group=group).

It also gets bucket_cap_mb=1e-6 in the claims about overlap, and find_unused_parameters=True in
those about unused parameters. An argument is left out if the class has no such name. What it
returns is called in forward, and has parameters(). If it has `finish_gradient_synchronization()`,
this is called after every backward that is not under no_sync(). The claims about accumulation need
no_sync(). If it has backward(loss), it is called instead of loss.backward(). Names of parameters
may have parts of wrappers in them, such as "module.".
"""

from datetime import timedelta
from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn
from shared import Collectives, loss_of, make_batch, make_model

from claims.registry import add_kind, check, claim, default_group, error_from, names_of, same_on_all
from claims.training import Trainer, own_batch

add_kind(
    "ddp",
    called=__doc__,
    make=partial(Trainer, "ddp"),
    ours="ddp:DistributedDataParallel",
    pytorchs="torch.nn.parallel:DistributedDataParallel",
)


@claim("ddp", 2)
def buffers(make):
    """Forward copies the buffers of rank 0 to all ranks."""
    model = make_model("batchnorm")
    trainer = make(model)
    for step in range(2):
        trainer.step([own_batch(step)])
    trainer.model(make_batch(0, 5))  # the same on all ranks, after rank 0's statistics have come
    same_on_all(model[1].running_mean, "the running mean")


@claim("ddp", 2)
def overflow(make):
    """The sum of two fp16 gradients does not overflow if their mean is finite."""
    model = nn.Linear(1, 1, bias=False).half()
    make(model).backward([torch.full((1, 1), 40000.0, dtype=torch.float16)], torch.sum)
    check(model.weight.grad.item() == 40000.0, f"{model.weight.grad.item()}, not 40000")


@claim("ddp", 2, about="property")
def no_sync_is_silent(make):
    """A backward under no_sync sends nothing."""
    trainer = make(make_model("plain"))
    for step in range(2):  # PyTorch's sends the order of its buckets once
        trainer.step([make_batch(0, step)])
    with Collectives() as seen, trainer.no_sync():
        output = trainer.model(own_batch(2))
        loss_of(output).backward()
    check(not seen.calls, f"it sends {seen.calls}")


def two_steps(make):
    """Return the model, and the collectives of the second step with a note of the last gradient."""
    has_small_buckets = "bucket_cap_mb" in names_of(make.args[-1])
    width = 6 if has_small_buckets else 2600  # a layer fills PyTorch's bucket of 25 MB
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 6))
    trainer = make(model, bucket_cap_mb=1e-6)
    trainer.step([own_batch(0)])  # PyTorch's first step has buckets of its own
    with Collectives() as seen:
        model[0].weight.register_hook(lambda _: seen.calls.append(("last gradient", 0)))
        trainer.step([own_batch(1)])
    return model, seen


@claim("ddp", 2, about="property")
def overlap(make):
    """Communication begins while backward still runs."""
    _, seen = two_steps(make)
    check(seen.calls[0] != ("last gradient", 0), "everything is sent after backward")


@claim("ddp", 2, about="property")
def sent_once(make):
    """Each gradient is handed to one all-reduce."""
    model, seen = two_steps(make)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    sent = seen.bytes_of("allreduce_")
    is_once = gradients <= sent < 1.5 * gradients  # more than once: flags of what is used
    check(is_once, f"{sent} bytes are all-reduced for {gradients} bytes of gradients")


@claim("ddp", 2, about="property")
def different_models(make):
    """Models of different shapes are an error on all ranks, at construction."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))  # PyTorch's class waits for it
    shapes = "a Linear(2, 2) on one rank and a Linear(2, 3) on the other"
    with default_group(group):
        make(nn.Linear(2, 2))
        with error_from(shapes):
            make(nn.Linear(2, 2 + pool.rank()))
