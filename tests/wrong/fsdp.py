"""Mistakes in sharding parameters, and the claim that catches each."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import fsdp
from wrong.common import gathered, summed


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece):
        return torch.cat(gathered(piece))

    @staticmethod
    def backward(ctx, gradient):
        N = dist.get_world_size()
        return summed(gradient).chunk(N)[dist.get_rank()] / N


def shard(parameter):
    """Return this rank's piece as a parameter, with `whole()`."""
    N = dist.get_world_size()
    flat = parameter.detach().flatten()
    shape = parameter.shape
    piece = F.pad(flat, (0, -len(flat) % N)).chunk(N)[dist.get_rank()].clone()
    piece = nn.Parameter(piece, parameter.requires_grad)
    piece.whole = lambda: Gather.apply(piece)[: shape.numel()].view(shape)
    return piece


def unchanged(parameter):
    return parameter


def always():
    return True


def keeps_what_it_gathers(module, start=unchanged, is_due=always):
    """FSDP's results, but not its memory: autograd keeps what has been gathered until backward."""
    pieces = {}  # (a module, a parameter's name): what the module holds outside of forward
    wholes = {}  # and in forward
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not hasattr(parameter, "whole"):
                pieces[owner, name] = owner._parameters[name] = shard(start(parameter))

    def gather_all(*_):
        if is_due():
            wholes.update({place: piece.whole() for place, piece in pieces.items()})
        hold(wholes)

    def hold(tensors):
        for (owner, name), tensor in tensors.items():
            owner._parameters[name] = tensor

    module.register_forward_pre_hook(gather_all)
    # always_call: a recomputation may stop before its end.
    module.register_forward_hook(lambda *_: hold(pieces), always_call=True)
    return module


def forgets_the_other_copies(module, mesh):
    """Each copy of the shards trains alone."""
    return fsdp.fully_shard(module, process_group=mesh.get_group("shard"))


def full_state_dict(module):
    if hasattr(module, "_fsdp_unit"):
        return fsdp.full_state_dict(module)
    return {name: parameter.whole() for name, parameter in module.named_parameters()}


def clip_grad_norm_(module, max_norm):
    """Every rank clips by the norm of its pieces."""
    if hasattr(module, "_fsdp_unit"):
        return fsdp.clip_grad_norm_(module, max_norm)
    return nn.utils.clip_grad_norm_(module.parameters(), max_norm)


# It throws the given weights away.
initialises_again = partial(keeps_what_it_gathers, start=nn.init.uniform_)
# It gathers for training only, so an evaluation after the step uses the weights before it.
stale_in_evaluation = partial(keeps_what_it_gathers, is_due=torch.is_grad_enabled)
clips_by_its_own_norm = keeps_what_it_gathers


def shards_nothing(module):
    return module


MISTAKES = {
    "fsdp": {
        "initialises_again": "mean_gradient",
        "keeps_what_it_gathers": "nothing_whole_is_kept",
        "stale_in_evaluation": "evaluation",
        "clips_by_its_own_norm": "clipping",
        "shards_nothing": "parameters_are_shards",
        "forgets_the_other_copies": "hybrid",
    },
}
CAUSES = {
    "fsdp": {
        "initialises_again": "given_weights_lost",
        "stale_in_evaluation": "stale_evaluation",
        "clips_by_its_own_norm": "norm_of_own_part",
        "forgets_the_other_copies": "copies_apart",
    },
}
RIGHT = {
    "fsdp": {
        "keeps_what_it_gathers": ["nothing_whole_is_kept", "tied", "clipping", "bitwise_at_four"],
    },
}
