"""Mistakes in splitting a transformer block, and the claim that catches each."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from claims.tp_block import split

from tensor_parallel import parallelize


def forgets_norms_inside(block, process_group):
    """Each rank has the gradient of its own heads only, and replicas drift apart."""
    names = block._modules.keys() & {"q_norm", "k_norm"}
    norms = {name: block._modules.pop(name) for name in sorted(names)}
    split(block, process_group)
    for name, norm in norms.items():
        block.add_module(name, norm)
    return without_checks(block)


def without_checks(block):
    """Ours would find the mistake."""
    block.proj._forward_pre_hooks.clear()
    block.down._forward_pre_hooks.clear()
    return block


def reduces_norms_again(block, process_group):
    """At each backward, also what was reduced by the one before."""

    def reduce(parameter):
        dist.all_reduce(parameter.grad)

    forgets_norms_inside(block, process_group)
    for name in sorted(block._modules.keys() & {"q_norm", "k_norm"}):
        norm = getattr(block, name)
        norm.weight.register_post_accumulate_grad_hook(reduce)
    return block


class AddsItsBiasOnEveryRank(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.row = row
        self.weight = row.weight
        self.bias = row.bias
        row.bias = None

    def forward(self, x):
        return self.row(x) + dist.get_world_size() * self.bias


def adds_biases_on_every_rank(block, process_group):
    split(block, process_group)
    block.proj = AddsItsBiasOnEveryRank(block.proj)
    block.down = AddsItsBiasOnEveryRank(block.down)
    return block


class ForgetsF(nn.Module):
    """The gradient of its input is this rank's part."""

    def __init__(self, column):
        super().__init__()
        self.weight = column.weight
        self.bias = column.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def forgets_f(block, process_group):
    split(block, process_group)
    for name in ("q", "k", "v", "gate", "up"):
        column = getattr(block, name)
        setattr(block, name, ForgetsF(column))
    return without_checks(block)


class SomeHeads(nn.Module):
    """Of k or v: whole heads, which the ranks choose by themselves."""

    def __init__(self, whole, heads):
        super().__init__()
        rows = (torch.as_tensor(heads)[:, None] * 8 + torch.arange(8)).flatten()
        self.weight = nn.Parameter(whole.weight.detach()[rows])
        self.bias = nn.Parameter(whole.bias.detach()[rows])

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def chooses_key_heads(block, process_group, choose):
    keys = {name: block._modules.pop(name) for name in ("k", "v")}
    split(block, process_group)
    for name, whole in keys.items():
        heads = choose(whole.out_features // 8, process_group.rank())
        block.add_module(name, SomeHeads(whole, heads))
    return without_checks(block)


def keeps_key_heads_whole(block, process_group):
    """The rank's queries use the first of them, though others share theirs."""
    return chooses_key_heads(block, process_group, lambda heads, rank: range(heads))


def takes_every_other_key_head(block, process_group):
    """Neighbours share a key head: rank 1 has the first one, as rank 0."""
    return chooses_key_heads(block, process_group, lambda heads, rank: [rank % heads])


def reduces_in_each_forward(block, process_group):
    """A checkpoint runs forward twice."""

    def before(norm, _):
        def reduce(parameter):
            handle.remove()
            dist.all_reduce(parameter.grad)

        handle = norm.weight.register_post_accumulate_grad_hook(reduce)

    forgets_norms_inside(block, process_group)
    for name in sorted(block._modules.keys() & {"q_norm", "k_norm"}):
        getattr(block, name).register_forward_pre_hook(before)
    return block


def cuts_qkv_in_one_piece(block, process_group):
    """A rank then has the queries of all heads, and another the values."""
    if hasattr(block, "qkv"):
        parallelize(block, {"qkv": "column", "proj": "row"}, process_group)
    return block


def forgets_norms_between(block, process_group, sequence_parallel=False):
    """Each rank has the gradient of its own part of the sequence."""
    norms = {name: block._modules.pop(name) for name in ("norm1", "norm2")}
    kept = {name: nn.Identity() for name in norms}
    for name, identity in kept.items():
        block.add_module(name, identity)
    split_linears(block, process_group, sequence_parallel)
    for name, norm in norms.items():
        block.add_module(name, norm)
    return block


def split_linears(block, process_group, sequence_parallel):
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), "column") | {"proj": "row", "down": "row"}
    parallelize(block, plan, process_group, sequence_parallel)


def same_masks_inside(block, process_group):
    inside = block._modules.pop("dropout_inside", None)
    split(block, process_group)
    if inside is not None:
        block.add_module("dropout_inside", inside)
    return block


def seeds_each_rank(block, process_group):
    split(block, process_group)
    torch.manual_seed(process_group.rank())
    return block


MISTAKES = {
    "tp-block": {
        "forgets_norms_inside": "norms_inside",
        "reduces_norms_again": "accumulation",
        "keeps_key_heads_whole": "grouped_queries",
        "takes_every_other_key_head": "fewer_key_heads_than_ranks",
        "reduces_in_each_forward": "checkpointed_block",
        "adds_biases_on_every_rank": "block",
        "forgets_f": "block",
        "cuts_qkv_in_one_piece": "fused",
        "forgets_norms_between": "sequence_parallel",
        "same_masks_inside": "dropout_differs",
        "seeds_each_rank": "dropout_agrees",
    },
}
CAUSES = {
    "tp-block": {
        "forgets_norms_inside": "norms_not_summed",
        "adds_biases_on_every_rank": "biases_on_every_rank",
        "forgets_f": "column_inputs_not_summed",
    },
}
RIGHT = {}
