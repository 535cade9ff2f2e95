"""Mistakes in attention over a split sequence, and the claim that catches each."""

import importlib.util
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import context_parallel
from context_parallel import (
    AllToAll,
    Exchange,
    RingAttention,
    attend_backward,
    join_sequence,
    merge,
    ring_attention,
    split_sequence,
    tiles,
    ulysses_attention,
)


def with_mistake(name, **replaced):
    """A function of context_parallel.py, from a copy of it with other functions or classes."""
    spec = importlib.util.spec_from_file_location("with_mistake", context_parallel.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy).update(replaced)
    return getattr(copy, name)


def average(output, lse, other_output, other_lse):
    is_first = lse.isinf()[..., None]
    output.copy_(torch.where(is_first, other_output, (output + other_output) / 2))
    lse.copy_(torch.logaddexp(lse, other_lse))


def tiles_as_if_of_this_rank(kv, owner, rank, world_size, causal, *options):
    for sequences, rows, cols, _ in tiles(kv, owner, rank, world_size, False, *options):
        yield sequences, rows, cols, causal


def merge_in_16_bits(output, lse, other_output, other_lse):
    merge(output, lse, other_output, other_lse)
    output.copy_(output.bfloat16())
    lse.copy_(lse.bfloat16())


class ForgetsTheScaleInBackward(RingAttention):
    @staticmethod
    def backward(ctx, grad_output):
        grad_q, *others = RingAttention.backward(ctx, grad_output)
        scale, _ = ctx.options
        return grad_q / scale, *others


def gradients_of_one_head(grad_output, q, output, lse, k, *args):
    gradients = attend_backward(grad_output, q, output, lse, k, *args)
    copies = [head for head in range(1, k.shape[1]) if torch.equal(k[:, head], k[:, head - 1])]
    for gradient in gradients[1:]:
        gradient[:, copies] = 0
    return gradients


class OverwritesInFlight(Exchange):
    """The received block overwrites the one that this rank still sends and computes with."""

    def __init__(self, block, process_group):
        super().__init__(block, process_group)
        block.copy_(self.wait())
        self.works = []


class KeepsTheGradient(AllToAll):
    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


def leave_it_in_rank_order(parts, dim, zigzag):
    return torch.cat(parts, dim)


def gathered_attention(q, k, v, causal=False, scale=None, process_group=None, zigzag=True):
    """Right, but each rank gathers all keys, and masks by positions."""
    options = (causal, scale, process_group, zigzag, None)
    context_parallel.check_attention("gathered", q, k, v, *options)
    keys, values = join_sequence(torch.stack([k, v]), 3, process_group, zigzag)
    mask = None
    if causal:
        key_positions = torch.arange(keys.shape[2])
        query_positions = split_sequence(key_positions, 0, process_group, zigzag)
        mask = key_positions <= query_positions[:, None]
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)


def attention_without_scale(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def masks_documents(q, k, v, causal=False, process_group=None, documents=None):
    """Where a row sees no key of a block, the CPU kernel's log-sum-exp is 0, and not -inf."""
    N = dist.get_world_size(process_group)
    ids = F.pad(documents.diff(dim=1) != 0, (1, 0)).cumsum(1)
    own = split_sequence(ids, 1, process_group, False)
    keys, values = join_sequence(torch.stack([k, v]), 3, process_group, False).unbind()
    results = []
    for block in zip(*(x.chunk(N, 2) for x in (keys, values, ids[:, None])), strict=True):
        same = own[:, :, None] == block[2]
        mask = torch.zeros_like(same, dtype=q.dtype).masked_fill(~same, -torch.inf)[:, None]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        results.append(kernel(q, *block[:2], attn_mask=mask))
    outputs, lses = map(torch.stack, zip(*results, strict=True))
    return (lses.softmax(0)[..., None] * outputs).sum(0)


def merges_equal_ids(*args, documents=None, **options):
    """As if 1 0 1 were two documents, in the order of the ids: so 1 1 0."""
    return ring_attention(*args, documents=documents.sort(dim=1).values, **options)


averages_outputs = with_mistake("ring_attention", merge=average)
mask_from_local_positions = with_mistake("ring_attention", tiles=tiles_as_if_of_this_rank)
merges_in_16_bits = with_mistake("ring_attention", merge=merge_in_16_bits)
forgets_the_scale_in_backward = with_mistake(
    "ring_attention", RingAttention=ForgetsTheScaleInBackward
)
gradients_of_one_sharing_head = with_mistake(
    "ring_attention", attend_backward=gradients_of_one_head
)
overwrites_in_flight = with_mistake("ring_attention", Exchange=OverwritesInFlight)
zigzag_not_undone = with_mistake("ulysses_attention", to_sequence=leave_it_in_rank_order)
keeps_the_gradient = with_mistake("ulysses_attention", AllToAll=KeepsTheGradient)
forgets_the_scale = partial(ulysses_attention, attention=attention_without_scale)

MISTAKES = {
    "ring-attention": {
        "averages_outputs": "as_one_device",
        "mask_from_local_positions": "causal",
        "merges_in_16_bits": "bf16",
        "forgets_the_scale_in_backward": "scale",
        "gradients_of_one_sharing_head": "shared_heads",
        "overwrites_in_flight": "as_one_device",
        "masks_documents": "documents",
        "merges_equal_ids": "documents",
    },
    "ulysses-attention": {
        "zigzag_not_undone": "zigzag",
        "keeps_the_gradient": "as_one_device",
        "forgets_the_scale": "scale",
    },
}
CAUSES = {
    "ring-attention": {
        "mask_from_local_positions": "local_positions",
        "forgets_the_scale_in_backward": "scale_missing_in_gradient_of_q",
        "gradients_of_one_sharing_head": "gradient_of_one_sharing_head",
    },
    "ulysses-attention": {
        "zigzag_not_undone": "order_of_ranks_before",
        "forgets_the_scale": "scale_not_used",
    },
}
RIGHT = {"ring-attention": {"gathered_attention": ["keeps_its_part"]}}
