"""An implementation of --fsdp is called as function(module, process_group=group).

It is called on submodules first and then on the root. What it returns for a submodule takes its
place, and what it returns for the root is called in forward. A function without `process_group`
gets `mesh`, a DeviceMesh of one dimension. For hybrid sharding it gets `mesh` of two dimensions,
(replicate, shard). An optimizer of torch.optim trains the parameters of the root.

Its file has a function `full_state_dict(module)`, unless the sharded parameters are DTensors.
Claims also look for no_sync(module), clip_grad_norm_(module, max_norm) -> norm (for DTensors,
torch.nn.utils.clip_grad_norm_ is called), and full_gradients(module) -> {name: gradient} after
backward. Methods of the root will do as well. Names of parameters may have parts of wrappers in
them, such as "_fsdp_wrapped_module.".
"""

from functools import partial

import environment
import torch
import torch.nn as nn
from shared import loss_of, make_model
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from claims.registry import add_kind, check, claim
from claims.training import Trainer, clip, stay_replicas, trains_as_one_device

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
    holds_a_part(make, 4)


def holds_a_part(make, N, **options):
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    trainer = make(model, **options)
    batch = torch.randn(2, 16)
    trainer.backward([batch])
    parameters = list(trainer.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = 3 * 16 * 16
    for what, held in (("parameters", parameters), ("gradients", gradients)):
        elements = sum(local(tensor).numel() for tensor in held)
        check(0 < elements <= whole // N + 16, f"a rank holds {elements} of {whole} {what}")


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
        output = trainer.model(torch.randn(3, 50))
        loss = loss_of(output)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    whole = sum(size >= 50 * 50 * 4 for size in storages.values())
    own = len(model) - len(trainer.units)  # the root's own may stay until backward
    check(whole <= own, f"the whole weights of {whole} layers are alive")
    loss.backward()


def two_by_two():
    """A mesh of two copies, each sharded over two ranks."""
    return init_device_mesh(environment.DEVICE_TYPE, (2, 2), mesh_dim_names=("replicate", "shard"))


@claim("fsdp", 4)
def hybrid(make):
    """With copies of the shards, AdamW and clipping by the norm train as on one device."""
    trains_as_one_device(make, optimizer="adamw", before=clip, mesh=two_by_two())


@claim("fsdp", 4)
def hybrid_copies(make):
    """With copies of the shards, all copies have the same bits after each step, in float32."""
    mesh = two_by_two()
    trainer = make(make_model("plain"), "adamw", mesh=mesh)
    stay_replicas(trainer)


@claim("fsdp", 4, about="property")
def hybrid_shards(make):
    """With two copies on four ranks, a rank holds half of the parameters and gradients."""
    holds_a_part(make, 2, mesh=two_by_two())
