"""Mistakes in attention over a split sequence, and the claim that catches each."""

from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

import context_parallel
from context_parallel import (
    AllToAll,
    Exchange,
    Ring,
    gathered_attention,  # noqa: F401
    ring_attention,
    ulysses_attention,
)


def with_mistake(attention, **replaced):
    """`attention`, with other functions or classes of context_parallel.py."""

    def wrong(q, k, v, causal=False, scale=None, zigzag=True):
        with mock.patch.multiple(context_parallel, **replaced):
            return attention(q, k, v, causal, scale, zigzag=zigzag)

    return wrong


def average(output, lse, other_output, other_lse):
    is_first = lse.isinf()
    output.copy_(torch.where(is_first, other_output, (output + other_output) / 2))
    lse.copy_(torch.logaddexp(lse, other_lse))


class MaskFromLocalPositions(Ring):
    def tiles(self, step, num_tokens):
        return super().tiles(0, num_tokens)


class MergesIn16Bits(Ring):
    """If the inputs have 16 bits."""

    def attend(self, q, kv, output, lse, tile):
        super().attend(q, kv, output, lse, tile)
        output.copy_(output.to(kv.dtype))
        lse.copy_(lse.to(kv.dtype))


class LosesTheLastRanksGradients(Ring):
    """The rank that computes with a block last adds nothing to the block's gradient."""

    def tiles(self, step, num_tokens):
        self.is_last = 0 < step == self.world_size - 1
        return super().tiles(step, num_tokens)

    def attend_backward(self, q, kv, lse, grad_output, delta, grad_q, grad_kv, tile):
        if self.is_last:
            grad_kv = torch.zeros_like(grad_kv)
        super().attend_backward(q, kv, lse, grad_output, delta, grad_q, grad_kv, tile)


class ForgetsTheScaleInBackward(Ring):
    def backward(self, *args):
        grad_q, grad_kv = super().backward(*args)
        return grad_q / self.scale, grad_kv


class GradientsOfOneSharingHead(Ring):
    def attend_backward(self, q, kv, lse, grad_output, delta, grad_q, grad_kv, tile):
        all_heads = (q, kv, lse, grad_output, delta, grad_q, torch.zeros_like(grad_kv), tile)
        super().attend_backward(*all_heads)
        q, lse, grad_output, delta = (x[:, :, :1] for x in (q, lse, grad_output, delta))
        super().attend_backward(q, kv, lse, grad_output, delta, q.clone(), grad_kv, tile)


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


def join_in_order_of_ranks(parts, dim, zigzag):
    return torch.cat(parts, dim)


def attention_without_scale(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


averages_outputs = with_mistake(ring_attention, merge=average)
mask_from_local_positions = with_mistake(ring_attention, Ring=MaskFromLocalPositions)
merges_in_16_bits = with_mistake(ring_attention, Ring=MergesIn16Bits)
loses_the_last_ranks_gradients = with_mistake(ring_attention, Ring=LosesTheLastRanksGradients)
forgets_the_scale_in_backward = with_mistake(ring_attention, Ring=ForgetsTheScaleInBackward)
gradients_of_one_sharing_head = with_mistake(ring_attention, Ring=GradientsOfOneSharingHead)
overwrites_in_flight = with_mistake(ring_attention, Exchange=OverwritesInFlight)
zigzag_not_undone = with_mistake(ulysses_attention, join_parts=join_in_order_of_ranks)
keeps_the_gradient = with_mistake(ulysses_attention, AllToAll=KeepsTheGradient)
forgets_the_scale = partial(ulysses_attention, attention=attention_without_scale)

MISTAKES = {
    "ring-attention": {
        "averages_outputs": "as_one_device",
        "mask_from_local_positions": "causal",
        "merges_in_16_bits": "bf16",
        "loses_the_last_ranks_gradients": "as_one_device",
        "forgets_the_scale_in_backward": "scale",
        "gradients_of_one_sharing_head": "shared_heads",
        "overwrites_in_flight": "as_one_device",
    },
    "ulysses-attention": {
        "zigzag_not_undone": "zigzag",
        "keeps_the_gradient": "as_one_device",
        "forgets_the_scale": "scale",
    },
}
RIGHT = {"ring-attention": {"gathered_attention": ["equal_work", "keeps_its_part", "disagreement"]}}
