"""An implementation of --zero1 is called as class(parameters, optimizer_class, **its arguments).

So is PyTorch's. DistributedDataParallel has averaged the gradients before the step, and is what is
called. A class whose first argument is named `module`, as ours is, gets the module and averages
the gradients itself. So does every class under --zero2 and --zero3: class(module, optimizer_class,
process_group=group, **arguments). A function may be called, too. It returns the optimizer, or
(model, optimizer) if another module than the given one is to be called. An attribute `model` of the
optimizer does the same. If the model or the optimizer has backward(loss), it is called instead of
loss.backward(). Names of parameters may have parts of wrappers in them, such as "module.".

The optimizer has zero_grad() and step(), and param_groups for the claim about schedulers. Claims
look for these methods of the optimizer or the model: no_sync(), clip_grad_norm_(max_norm) ->
norm (or None if the step clips), state_dict(), consolidate_state_dict(0) before it on all ranks,
full_gradients() -> {name: gradient} after backward. Gradients that DistributedDataParallel has
averaged are clipped by torch.nn.utils.clip_grad_norm_. Under --zero3 module_state_dict() is needed.
"""

from functools import partial

import pool
import torch
import torch.distributed as dist
import torch.nn as nn

from claims.registry import NotOffered, add_kind, check, claim, same
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


def elements_of_state(optimizer):
    """In the state of the optimizer, or of the one inside it. Scalars do not count."""
    inside = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    state = getattr((inside or [optimizer])[0], "state", None)
    if state is None:
        raise NotOffered("no state")
    tensors = [value for entry in state.values() for value in entry.values()]
    return sum(tensor.numel() for tensor in tensors if torch.is_tensor(tensor) and tensor.dim())


def on_all_ranks(value):
    everyone = [None] * pool.world_size()
    dist.all_gather_object(everyone, value, group=pool.group())
    return everyone


@claim("zero1 zero2", 3, about="property")
def state_is_sharded(make):
    """No rank holds more than its share of the optimizer state and one parameter's."""
    model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(6)])
    trainer = make(model, "adamw")
    trainer.step([torch.randn(4, 20)])
    held = on_all_ranks(elements_of_state(trainer.optimizer))
    whole = 2 * 6 * 20 * 20
    padding = 64 * len(held)
    check(whole <= sum(held) < 1.05 * whole + padding, f"ranks hold {held} of {whole} elements")
    share = whole / len(held)
    check(max(held) <= share + 2 * 20 * 20 + 64, f"a rank holds too much: {held} of {whole}")


def states_agree(trainer):
    if hasattr(trainer.optimizer, "consolidate_state_dict"):
        trainer.optimizer.consolidate_state_dict(0)
        if pool.rank() > 0:
            return
    if not hasattr(trainer.optimizer, "state_dict"):
        raise NotOffered("no state_dict")
    ours = trainer.optimizer.state_dict()["state"]
    plain = trainer.plain_optimizer.state_dict()["state"]
    check(list(ours) == list(plain), f"it has the state of parameters {list(ours)}")
    for index, entry in plain.items():
        for key, value in entry.items():
            mine = torch.as_tensor(ours.get(index, {}).get(key, torch.nan))
            same(mine, value, f"state {index} {key}")


def schedule(trainer):
    """Halve both learning rates after each step, as a scheduler does."""
    if not hasattr(trainer.optimizer, "param_groups"):
        raise NotOffered("no param_groups")
    for optimizer in (trainer.optimizer, trainer.plain_optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


trains(
    "whole_state_dict",
    "state_dict() is that of the plain optimizer.",
    [2],
    ZERO,
    optimizer="adamw",
    after=states_agree,
    about="property",
)
trains(
    "schedulers",
    "A learning rate that a scheduler changes counts in the next step.",
    [2],
    ZERO,
    after=schedule,
)
