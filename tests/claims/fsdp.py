"""An implementation of --fsdp is called as PyTorch's function is: function(module, process_group=group).

It is called on submodules first and then on the root. A function that has no `process_group` gets
`mesh=`, a DeviceMesh, if it has that name. Its file has a function `full_state_dict(module)`, unless
parameters have a method `full_tensor()`.
"""

from functools import partial

import torch
import torch.nn as nn
from shared import loss_of
from torch.autograd.graph import saved_tensors_hooks

from claims.registry import (
    add_kind,
    check,
    claim,
)
from claims.tensor_parallel import local
from claims.training import Trainer

add_kind(
    "fsdp",
    called=__doc__,
    make=partial(Trainer, "fsdp"),
    ours="fsdp:fully_shard",
    pytorchs="torch.distributed.fsdp:fully_shard",
)


@claim("fsdp", 4)
def parameters_are_shards(make):
    """A rank holds 1/N of the parameters and gradients, up to a row of each."""
    trainer = make(nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)]))
    trainer.backward([torch.randn(2, 16)])
    parameters = list(trainer.model.parameters())
    for what, held in (("parameters", parameters), ("gradients", [p.grad for p in parameters])):
        elements = sum(local(tensor).numel() for tensor in held if tensor is not None)
        check(
            0 < elements <= 3 * 16 * 16 // 4 + 16,
            f"{elements} elements of {what}, of {3 * 16 * 16}",
        )


@claim("fsdp", 2)
def nothing_whole_is_kept(make):
    """Between forward and backward no whole parameter is in memory, saved for backward or not."""
    model, saved = nn.Sequential(*[nn.Linear(50, 50, bias=False) for _ in range(5)]), []
    trainer = make(model)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = loss_of(trainer.model(torch.randn(3, 50)))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    whole, own = (
        sum(size >= 50 * 50 * 4 for size in storages.values()),
        len(model) - len(trainer.units),
    )
    check(
        whole <= own, f"{whole} layers' whole weights are alive"
    )  # the root's own may stay until backward
    loss.backward()
