"""Mistakes in attention over a split sequence, and the claim that catches each."""

import importlib.util
from functools import partial

import pool
import torch
import torch.nn.functional as F

import context_parallel
from context_parallel import (
    AllToAll,
    Exchange,
    RingAttention,
    attend,
    attend_backward,
    gathered_attention,  # noqa: F401
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
    is_first = lse.isinf()
    output.copy_(torch.where(is_first, other_output, (output + other_output) / 2))
    lse.copy_(torch.logaddexp(lse, other_lse))


def tiles_of_the_first_step(step, *options):
    return tiles(0, *options)


def attend_in_16_bits(q, kv, output, lse, tile):
    """If the inputs have 16 bits."""
    attend(q, kv, output, lse, tile)
    output.copy_(output.to(kv.dtype))
    lse.copy_(lse.to(kv.dtype))


class LastStep:
    """The rank that computes with a block last adds nothing to the block's gradient."""

    def tiles(self, step, *options):
        self.is_here = 0 < step == pool.world_size() - 1
        return tiles(step, *options)

    def attend_backward(self, q, kv, lse, grad_output, delta, grad_q, grad_kv, tile):
        if self.is_here:
            grad_kv = torch.zeros_like(grad_kv)
        attend_backward(q, kv, lse, grad_output, delta, grad_q, grad_kv, tile)


class ForgetsTheScaleInBackward(RingAttention):
    @staticmethod
    def backward(ctx, grad_output):
        grad_q, *others = RingAttention.backward(ctx, grad_output)
        _, scale, _, _ = ctx.options
        return grad_q / scale, *others


def gradients_of_one_head(q, kv, lse, grad_output, delta, grad_q, grad_kv, tile):
    attend_backward(q, kv, lse, grad_output, delta, grad_q, torch.zeros_like(grad_kv), tile)
    q, lse, grad_output, delta = (x[:, :, :1] for x in (q, lse, grad_output, delta))
    attend_backward(q, kv, lse, grad_output, delta, q.clone(), grad_kv, tile)


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
    return torch.cat(parts.unbind(), dim)


def attention_without_scale(q, k, v, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


last = LastStep()
averages_outputs = with_mistake("ring_attention", merge=average)
mask_from_local_positions = with_mistake("ring_attention", tiles=tiles_of_the_first_step)
merges_in_16_bits = with_mistake("ring_attention", attend=attend_in_16_bits)
loses_the_last_ranks_gradients = with_mistake(
    "ring_attention", tiles=last.tiles, attend_backward=last.attend_backward
)
forgets_the_scale_in_backward = with_mistake(
    "ring_attention", RingAttention=ForgetsTheScaleInBackward
)
gradients_of_one_sharing_head = with_mistake(
    "ring_attention", attend_backward=gradients_of_one_head
)
overwrites_in_flight = with_mistake("ring_attention", Exchange=OverwritesInFlight)
zigzag_not_undone = with_mistake("ulysses_attention", join_parts=join_in_order_of_ranks)
keeps_the_gradient = with_mistake("ulysses_attention", AllToAll=KeepsTheGradient)
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
RIGHT = {"ring-attention": {"gathered_attention": ["equal_work", "keeps_its_part"]}}
