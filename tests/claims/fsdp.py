"""An implementation of --fsdp is called as function(module, process_group=group).

It is called on submodules first and then on the root, and returns the module. A function
without `process_group` gets `mesh`, a DeviceMesh of one dimension. Its file has a function
`full_state_dict(module)`, unless the sharded parameters have a method `full_tensor()`.
"""

from functools import partial

import torch
import torch.nn as nn
from shared import loss_of
from torch.autograd.graph import saved_tensors_hooks

from claims.registry import add_kind, check, claim
from claims.training import Trainer

add_kind(
    "fsdp",
    called=__doc__,
    make=partial(Trainer, "fsdp"),
    ours="fsdp:fully_shard",
    pytorchs="torch.distributed.fsdp:fully_shard",
)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@claim("fsdp", 4, about="property")
def parameters_are_shards(make):
    """A rank holds 1/N of the parameters and gradients, up to a row of each."""
    trainer = make(nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)]))
    trainer.backward([torch.randn(2, 16)])
    parameters = list(trainer.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = 3 * 16 * 16
    for what, held in (("parameters", parameters), ("gradients", gradients)):
        elements = sum(local(tensor).numel() for tensor in held)
        check(0 < elements <= whole // 4 + 16, f"a rank holds {elements} of {whole} {what}")


@claim("fsdp", 2, about="property")
def nothing_whole_is_kept(make):
    """No whole parameter is in memory between forward and backward, saved for backward or not."""
    model = nn.Sequential(*[nn.Linear(50, 50, bias=False) for _ in range(5)])
    trainer = make(model)
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(trainer.model(torch.randn(3, 50)))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    whole = sum(size >= 50 * 50 * 4 for size in storages.values())
    own = len(model) - len(trainer.units)  # the root's own may stay until backward
    check(whole <= own, f"the whole weights of {whole} layers are alive")
    loss.backward()
