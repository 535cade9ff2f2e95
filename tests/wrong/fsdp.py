"""Mistakes people make in fully_shard, and the claim that catches each."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from wrong.common import changed, gathered, summed


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece):
        return torch.cat(gathered(piece))

    @staticmethod
    def backward(ctx, gradient):
        return (
            summed(gradient).chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
        )


SummingGather = changed(
    Gather, backward=lambda ctx, gradient: Gather.backward(ctx, gradient) * dist.get_world_size()
)


def shard(parameter, gather):
    flat, shape, N = parameter.detach().flatten(), parameter.shape, dist.get_world_size()
    piece = F.pad(flat, (0, -len(flat) % N)).chunk(N)[dist.get_rank()].clone()
    piece = nn.Parameter(piece, parameter.requires_grad)
    piece.whole = lambda: gather.apply(piece)[: shape.numel()].view(shape)
    return piece


def keeps_what_it_gathers(
    module, gather=Gather, start=lambda parameter: parameter, due=lambda: True
):
    """Right, and all that there is to FSDP, but for memory: autograd keeps what has been gathered until backward."""
    pieces, wholes = (
        {},
        {},
    )  # (a module, a parameter's name): what it holds outside of forward, and in forward
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not hasattr(parameter, "whole"):
                pieces[owner, name] = owner._parameters[name] = shard(start(parameter), gather)

    def gather_all(*_):
        if due():
            wholes.update({place: piece.whole() for place, piece in pieces.items()})
        hold(wholes)

    def hold(tensors):
        for (owner, name), tensor in tensors.items():
            owner._parameters[name] = tensor

    module.register_forward_pre_hook(gather_all)
    module.register_forward_hook(
        lambda *_: hold(pieces), always_call=True
    )  # a recomputation may end before its end
    return module


def full_state_dict(module):
    return {name: parameter.whole() for name, parameter in module.named_parameters()}


sums_shards = partial(keeps_what_it_gathers, gather=SummingGather)
# The weights that are given are thrown away.
initialises_again = partial(keeps_what_it_gathers, start=nn.init.uniform_)
# Gathers for training only: an evaluation after the step finds what forward had.
stale_in_evaluation = partial(keeps_what_it_gathers, due=torch.is_grad_enabled)
# nn.utils.clip_grad_norm_ over pieces: every rank divides by another norm.
clips_by_its_own_norm = keeps_what_it_gathers


def shards_nothing(module):
    return module


MISTAKES = {  # of each kind: an implementation, and the claim that does not hold for it
    "fsdp": {
        "sums_shards": "mean_gradient",
        "initialises_again": "mean_gradient",
        "keeps_what_it_gathers": "nothing_whole_is_kept",
        "stale_in_evaluation": "evaluation",
        "clips_by_its_own_norm": "clipping",
        "shards_nothing": "parameters_are_shards",
    },
}
RIGHT = {  # what the mistakes are made in, and the claims that do not hold for it
    "fsdp": {
        "keeps_what_it_gathers": ["bitwise_at_four", "clipping", "nothing_whole_is_kept", "tied"],
    },
}
