"""FSDP: as ZeRO-3, but unit by unit, and the optimizer is any of torch.optim over the shards.

    held per rank: 4Ψ/N, and during a step the unit that runs. Sent: 3Ψ(N-1)/N

my_fully_shard is called on blocks first and then on the whole model, whose unit is what is left.
Afterwards module.parameters() are this rank's shards, and their .grad the shards of the mean.
You need: torch.distributed.all_gather_into_tensor, reduce_scatter_tensor, and the hooks
register_forward_pre_hook, register_forward_hook, register_full_backward_hook of nn.Module.
"""


def my_fully_shard(module):
    """Replace each parameter by a Parameter that holds this rank's shard. Return the module."""
    # Before forward: gather the shards, and put whole tensors in the place of the parameters.
    # After forward: put the shards back, and free the whole tensors.
    # In backward: the same again, and reduce-scatter the gradients, divided by N, to the shards.
    return module


def full_state_dict(module):
    """Return the whole parameters by name, on every rank."""
    return module.state_dict()
