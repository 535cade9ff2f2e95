"""Tensor parallelism: the ranks of a group cut every weight matrix into slices, and compute each layer together.

A transformer's matrices come in pairs. The first is cut by its outputs, so each rank computes some of the hidden
features, or of the heads, from all of X; the second is cut by its inputs, so it needs no others. A sum ends the pair:

              ┌── X A₀ → GELU, or attention → Y₀ B₀ ──┐                 rank 0
    X ── f ───┤                                       ├─── g ── Z       Z = Y₀ B₀ + Y₁ B₁
              └── X A₁ → GELU, or attention → Y₁ B₁ ──┘                 rank 1

    f   copy_to_region               forward nothing           backward all-reduce: X has a gradient from each rank
    g   reduce_from_region           forward all-reduce        backward nothing

Between the pairs all ranks do the same with the same X. Sequence parallelism splits that too: norms, dropout and
residuals see 1/t of the sequence, and each all-reduce becomes its two halves:

    f   gather_from_sequence         forward all-gather        backward reduce-scatter
    g   reduce_scatter_to_sequence   forward reduce-scatter    backward all-gather

Cost per rank for t ranks, batch b, sequence s, hidden h, heads a, vocabulary V: of Ψ parameters, gradients and
optimizer state 1/t, and all of norms and row biases. Per layer and micro-batch, elements sent, without their factor
(t-1)/t, and bytes of 16-bit activations kept for backward (Korthikanti et al., §4):

                            sent          activations
    one device              0             sbh (34 + 5as/h)
    tensor parallel         8bsh          sbh (10 + 24/t + 5as/(ht))
    and sequence parallel   8bsh + 2bsh   sbh (34 + 5as/h) / t; the 2bsh are f's all-gather again, in backward
    embedding, head, loss   4bsh + 6bs    4bs V/t, of the loss, in float32; no rank ever holds V of a token

2sbh of the activations are the masks of dropout, and 5as/h, scores, are not kept where scaled_dot_product_attention
recomputes them. Sequence parallelism also sums the gradients of norms over the ranks, 8h a layer, and sends 2bsh more
for embedding and head.

Run:      torchrun --nproc-per-node 2 tensor_parallel.py [--sequence-parallel]          (python …: a world of one)
Papers:   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, §3; Korthikanti et al. 2022, sequence parallelism,
          2205.05198, §4; Narayanan et al. 2021, 2104.04473, §3.2
Mirrors:  megatron.core.tensor_parallel; torch.distributed.tensor.parallel.parallelize_module
Left out: cross-attention, convolutions, communication in fp8, second-order gradients. Selective recomputation:
          torch.utils.checkpoint around the attention works as it is. Pipeline stages: pipeline.py; both, and data
          parallelism: parallel_3d.py
"""

import argparse
import copy
import math
import os
import statistics
import sys
import sysconfig
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import filter as fnfilter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch 2.13 renames both, and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: communication in pairs, each the gradient of the other. All do nothing in a group of one.


class Communicate(torch.autograd.Function):
    """`there(x, process_group)`, whose gradient is `back(gradient, process_group)`, whose gradient is `there` again."""

    @staticmethod
    def forward(ctx, x, there, back, process_group):
        ctx.conjugate = (back, there, process_group)
        return there(x, process_group)

    @staticmethod
    def backward(ctx, gradient):
        return Communicate.apply(gradient, *ctx.conjugate), None, None, None


def communicate(x, there, back, process_group):
    return x if world(process_group)[1] == 1 else Communicate.apply(x, there, back, process_group)


def copy_to_region(x, process_group=None):
    """f: the same x on all ranks, to where each computes something else with it. Backward: all-reduce."""
    return communicate(x, same, all_reduce, process_group)


def reduce_from_region(x, process_group=None):
    """g: the sum of the ranks' x. Backward: nothing, as all ranks have the same gradient."""
    return communicate(x, all_reduce, same, process_group)


def parallel_mlp(x, A, B, process_group=None):
    """GELU(x A) B, where this rank has some columns of A and those rows of B: the whole technique."""
    return reduce_from_region(F.gelu(copy_to_region(x, process_group) @ A) @ B, process_group)


# The same where activations between the pairs are split along dimension 0, the sequence:


def gather_from_sequence(x, process_group=None):
    """f: all ranks' x along dimension 0, to where each computes something else with it. Backward: reduce-scatter."""
    return communicate(x, all_gather, reduce_scatter, process_group)


def reduce_scatter_to_sequence(x, process_group=None):
    """g: this rank's part, along dimension 0, of the sum of the ranks' x. Backward: all-gather."""
    return communicate(x, reduce_scatter, all_gather, process_group)


# Between what is the same on all ranks, its gradient too, and what is split:


def scatter_to_region(x, process_group=None, dim=-1):
    """This rank's part of the same x; ValueError if it does not divide. Backward: all-gather."""
    return communicate(x, partial(own_part, dim=dim), partial(all_gather, dim=dim), process_group)


def gather_from_region(x, process_group=None, dim=-1):
    """All ranks' x, to where all compute the same. Backward: this rank's part."""
    return communicate(x, partial(all_gather, dim=dim), partial(own_part, dim=dim), process_group)


def scatter_to_sequence(x, process_group=None):
    """This rank's part of the sequence, as after an embedding."""
    return scatter_to_region(x, process_group, dim=0)


# What these are made of. A function begin_… returns another, which waits: its caller has something to do meanwhile.


def same(x, process_group):
    return x.view_as(x)


def own_part(x, process_group, dim=0):
    rank, t = world(process_group)
    check_divides("positions of the sequence (dimension 0)" if dim == 0 else "features", x.shape[dim], t)
    return x.chunk(t, dim)[rank].clone(memory_format=torch.contiguous_format)


def all_reduce(x, process_group):
    return begin_all_reduce(x.clone(memory_format=torch.contiguous_format), process_group)()


def all_gather(x, process_group, dim=0):
    whole = begin_all_gather(x, process_group)()
    return whole if dim == 0 else torch.cat(whole.chunk(world(process_group)[1]), dim)


def reduce_scatter(x, process_group):
    return begin_reduce_scatter(x, process_group)()


def begin_all_reduce(x, process_group):
    """In place."""
    return partial(finish, dist.all_reduce(x, group=process_group, async_op=True), [x])


def begin_all_gather(x, process_group):
    whole = x.new_empty(world(process_group)[1] * x.shape[0], *x.shape[1:])
    return partial(finish, all_gather_single(whole, x.contiguous(), group=process_group, async_op=True), [whole])


def begin_reduce_scatter(x, process_group):
    t = world(process_group)[1]
    check_divides("positions of the sequence (dimension 0)", x.shape[0], t)
    x, shape = x.contiguous(), (x.shape[0] // t, *x.shape[1:])
    if dist.get_backend(process_group) == "gloo":  # its reduce-scatter is an all-reduce inside, in an order of its own
        parts = x.new_empty(t, *shape)
        work = dist.all_to_all_single(parts, x.view(parts.shape), group=process_group, async_op=True)
    else:
        parts = [x.new_empty(shape)]
        work = reduce_scatter_single(*parts, x, group=process_group, async_op=True)
    return partial(finish, work, parts)


def finish(work, parts):
    work.wait()
    return sum(parts[1:], parts[0])  # in rank order


# ---------------------------------------------------------------------------------------------------------------------
# 2. The pair of linear layers. Each draws the whole parameters, as nn.Linear does, and keeps this rank's slices.


class ParallelModule(nn.Module):
    """Holds this rank's slices of a plain layer's parameters, under their names there.

    What is `**split` below: process_group (None: the default group), and sequence_parallel, for activations that are
    split along dimension 0 before the pair of layers and after.
    """

    LIKE = ()  # attributes of the plain layer that this one has too, and its constructor takes
    shardings = {}  # name -> Sharding; a parameter that is not here is the same on all ranks
    gather_again = True  # False (sequence parallelism): keep gathered inputs for backward, and send less

    def __init__(self, *plain, process_group=None, sequence_parallel=False, **keywords):
        super().__init__(*plain, **keywords)
        self.sequence_parallel, (self.rank, self.t) = sequence_parallel, world(process_group)
        # Weak: a group that someone holds on to after destroy_process_group() may abort the process at its exit.
        self._process_group = weakref.ref(dist.group.WORLD if process_group is None else process_group)

    process_group = property(lambda self: self._process_group())

    @classmethod
    def from_full(cls, layer, **keywords):
        """This rank's slices of a plain `layer`; the keywords are the constructor's."""
        with torch.device("meta"):  # draws no random numbers
            new = cls(**{name: getattr(layer, name) for name in cls.LIKE}, **keywords)
        for path, module in new.named_modules():
            module._take(layer.get_submodule(path), **module.shardings)
        return new.train(layer.training)

    def _take(self, layer, **shardings):
        """Be like the plain `layer`, with this rank's slices of its parameters; a sharding for each that is split."""
        for name in self.LIKE:
            setattr(self, name, getattr(layer, name))
        self.shardings = {name: how for name, how in shardings.items() if layer._parameters[name] is not None}
        self._parameters |= layer._parameters
        for name, whole in layer.named_parameters(recurse=False):
            shard = shardings[name].cut(whole, self.rank) if name in shardings else whole.clone()
            self.register_parameter(name, nn.Parameter(shard.detach(), whole.requires_grad))
        self._mark()

    def _mark(self):
        for name, sharding in self.shardings.items():
            self._parameters[name].tensor_parallel = sharding
        return self

    def _apply(self, *args, **keywords):  # it may make new parameters, as copy.deepcopy does
        return super()._apply(*args, **keywords)._mark()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark()

    def _load_from_state_dict(self, *args):  # with assign=True it does as well
        super()._load_from_state_dict(*args)
        self._mark()


class ColumnParallelLinear(ParallelModule):
    """nn.Linear with its outputs split over the ranks: the same (…, in) on all ranks to this rank's (…, out/t).

    `gather_output` returns all of (…, out). With `sequence_parallel` the input is this rank's part along dimension 0,
    and the output of all parts. ValueError when out_features does not divide by t; unless, for the head of a language
    model, it is padded as VocabParallelEmbedding's. Then `head.weight = embedding.weight` ties the two, and logits of
    padding are -inf: never predicted, no part of a loss. Shoeybi et al. 2019, §3.
    """

    LIKE = ("in_features", "out_features")
    matrices = 1  # one above the other, each of them split

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        gather_output=False,
        sequence_parallel=False,
        process_group=None,
        make_vocab_size_divisible_by=None,
    ):
        super().__init__(process_group=process_group, sequence_parallel=sequence_parallel)
        self.gather_output = gather_output
        part = divide("output features", out_features // self.matrices, self.t, make_vocab_size_divisible_by)
        self.padding = part.rows - len(part.held(self.rank))
        sharding = Sharding(0, self.matrices * (part,))
        self._take(nn.Linear(in_features, out_features, bias), weight=sharding, bias=sharding)

    def forward(self, x):
        y = column_linear(self, x, self.weight, self.bias)
        if self.padding:
            y = F.pad(y[..., : -self.padding], (0, self.padding), value=-math.inf)
        return gather_from_region(y, self.process_group)[..., : self.out_features] if self.gather_output else y


class RowParallelLinear(ParallelModule):
    """nn.Linear with its inputs split over the ranks: this rank's (…, in/t) to the same (…, out) on all ranks.

    With `input_is_parallel=False` the input is the same (…, in) on all ranks. With `sequence_parallel` the output is
    this rank's part along dimension 0. The bias is added once, after the sum. ValueError when in_features or, in
    forward, dimension 0 does not divide by t. Shoeybi et al. 2019, §3; Korthikanti et al. 2022, §4.2.2.
    """

    LIKE = ("in_features", "out_features")

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        input_is_parallel=True,
        sequence_parallel=False,
        process_group=None,
    ):
        super().__init__(process_group=process_group, sequence_parallel=sequence_parallel)
        self.input_is_parallel = input_is_parallel
        part = divide("input features", in_features, self.t)
        self._take(nn.Linear(in_features, out_features, bias), weight=Sharding(1, (part,)))

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.process_group)
        reduce = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
        # After the sum a rank may have some positions only; the bias' gradient is of all: before the sum, it adds 0.
        zero = None if self.bias is None else self.bias - self.bias.detach()
        y = reduce(F.linear(x, self.weight, zero), self.process_group)
        return y if zero is None else y + self.bias.detach().to(y.dtype)  # under autocast they differ


# ---------------------------------------------------------------------------------------------------------------------
# 3. Refinement: the gradient of a column layer's input, for which others wait, travels while that of its weight is
# computed. Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication; Korthikanti et al. 2022, §4.2.2.


def column_linear(layer, x, weight, bias):
    """F.linear of copy_to_region(x), or of gather_from_sequence(x) where layer.sequence_parallel."""
    if layer.t == 1:
        return F.linear(x, weight, bias)
    again = layer.sequence_parallel and layer.gather_again
    return ColumnLinear.apply(x, weight, bias, layer.process_group, layer.sequence_parallel, again)


class ColumnLinear(torch.autograd.Function):
    """With `again`, the whole sequence is not kept for backward but gathered again, during the first product."""

    @staticmethod
    def forward(ctx, x, weight, bias, process_group, sequence_parallel, again):
        whole = all_gather(x, process_group) if sequence_parallel else x
        ctx.process_group, ctx.sequence_parallel, ctx.again = process_group, sequence_parallel, again
        ctx.save_for_backward(x if again else whole, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad[:3]
        whole = begin_all_gather(x, ctx.process_group) if ctx.again and for_weight else lambda: x
        if for_x:
            begin = begin_reduce_scatter if ctx.sequence_parallel else begin_all_reduce
            reduced = begin(gradient @ weight.to(gradient.dtype), ctx.process_group)  # under autocast they differ
        gradient = torch.atleast_2d(gradient).flatten(0, -2)
        grad_weight = gradient.t() @ torch.atleast_2d(whole()).flatten(0, -2).to(gradient.dtype) if for_weight else None
        grad_bias = gradient.sum(0) if for_bias else None
        return reduced() if for_x else None, grad_weight, grad_bias, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# 4. Slices of a parameter: which rank holds what.


@dataclass(frozen=True)
class Part:
    size: int  # in the whole parameter
    rows: int  # on each rank. What these are too many in all, at the end, is padding: zeros
    copies: int = 1  # so many consecutive ranks hold the same rows

    def held(self, rank):
        """The rows of the whole that the rank holds."""
        start = min(self.size, rank // self.copies * self.rows)
        return range(start, min(self.size, start + self.rows))


@dataclass(frozen=True)
class Sharding:
    """`parameter.tensor_parallel` of one that is split over the group; a replicated parameter has no such attribute.

    Along `dim`, the whole parameter is a concatenation of parts (of q, k and v, say), each split over the ranks.
    """

    dim: int
    parts: tuple
    rows = property(lambda self: [part.rows for part in self.parts])

    def cut(self, whole, rank):
        """The rank's slice of `whole`, a copy."""
        pieces, after = [], [0, 0] * (whole.dim() - 1 - self.dim)  # F.pad counts from the last dimension
        for part, piece in zip(self.parts, whole.split([part.size for part in self.parts], self.dim), strict=True):
            held = part.held(rank)
            mine = piece.narrow(self.dim, held.start, len(held))
            pieces.append(F.pad(mine, [*after, 0, part.rows - len(held)]))
        return torch.cat(pieces, self.dim)

    def join(self, shards):
        """The whole, from all ranks' slices: (rank, …)."""
        dim = self.dim
        wholes = [
            piece[:: part.copies].movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, part.size)
            for part, piece in zip(self.parts, shards.split(self.rows, dim + 1), strict=True)
        ]
        return torch.cat(wholes, dim)


def divide(what, size, t, divisible_by=None):
    """`size` split over t ranks: evenly, or padded to a multiple of `divisible_by` on each."""
    if divisible_by is None:
        check_divides(what, size, t)
        return Part(size, size // t)
    return Part(size, -(-size // (t * divisible_by)) * divisible_by)


# ---------------------------------------------------------------------------------------------------------------------
# 5. The vocabulary: embedding and loss of what no rank holds whole.


class VocabParallelEmbedding(ParallelModule):
    """nn.Embedding with its rows split over the ranks: the same integers (…) to the same (…, embedding_dim).

    The vocabulary is padded, with rows that nothing looks up, to a multiple of `make_vocab_size_divisible_by` on each
    rank (Megatron: 128); with None it is not, and ValueError when it does not divide by t. IndexError for an integer
    outside of the vocabulary. Shoeybi et al. 2019, §3.
    """

    LIKE = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(
        self, num_embeddings, embedding_dim, *, process_group=None, padding_idx=None, make_vocab_size_divisible_by=1
    ):
        super().__init__(process_group=process_group)
        part = divide("entries of the vocabulary", num_embeddings, self.t, make_vocab_size_divisible_by)
        self.held = part.held(self.rank)
        self._take(nn.Embedding(num_embeddings, embedding_dim, padding_idx), weight=Sharding(0, (part,)))

    @classmethod
    def from_full(cls, layer, **keywords):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise ValueError("max_norm, scale_grad_by_freq and sparse gradients are not supported")
        return super().from_full(layer, **keywords)

    def forward(self, tokens):
        check_range("token", tokens, self.num_embeddings)
        rows, elsewhere = locate(tokens, self.held)
        padding = self.padding_idx - self.held.start if self.padding_idx in self.held else None
        x = F.embedding(rows, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_region(x, self.process_group)


def locate(integers, held):
    """Their positions in the range that this rank holds; and which are elsewhere, whose positions are 0."""
    elsewhere = (integers < held.start) | (integers >= held.stop)
    return (integers - held.start).masked_fill(elsewhere, 0), elsewhere


def vocab_parallel_cross_entropy(
    logits_shard, target, process_group=None, ignore_index=-100, label_smoothing=0.0, *, z_loss=0.0, vocab_size=None
):
    """F.cross_entropy(logits, target, reduction="none") where logits, (…, V), are split over the ranks: the loss (…).

    Args:
        logits_shard: (…, V/t). 16-bit logits are computed with, and their loss returned, in float32.
        target: (…), the same on all ranks. The loss is zero where it is `ignore_index`.
        z_loss: adds z_loss · (log Σ exp logits)² (PaLM, Chowdhery et al. 2022, §5).
        vocab_size: the vocabulary without padding (None: V; logits of -inf do no harm, except to label smoothing).

    IndexError for a target outside of the vocabulary. Sends three all-reduces of one number per token, one of them of
    two with label smoothing. Shoeybi et al. 2019, §3.
    """
    padded = world(process_group)[1] * logits_shard.shape[-1]
    V = vocab_size or padded
    if padded < V:
        raise ValueError(f"vocab_size is {V}, but all ranks' shards have {padded} logits")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(f"target is {tuple(target.shape)}; logits {tuple(logits_shard.shape)} need one per token")
    target = target.unsqueeze(-1)
    ignored = target == ignore_index
    check_range("target", target.masked_fill(ignored, 0), V)
    return CrossEntropy.apply(logits_shard, target, ignored, process_group, V, label_smoothing, z_loss).squeeze(-1)


class CrossEntropy(torch.autograd.Function):
    """log z - (1-ε) x_target - ε mean x; z = Σ exp x, x less its maximum, ε label smoothing."""

    @staticmethod
    def forward(ctx, logits, target, ignored, process_group, V, smoothing, z_loss):
        rank, t = world(process_group)
        reduce = partial(dist.all_reduce, group=process_group) if t > 1 else lambda x, op=None: None
        held = Part(V, logits.shape[-1]).held(rank)
        real = len(held)  # columns that are no padding
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        x[..., real:] = -math.inf
        maximum = x.amax(-1, keepdim=True)
        reduce(maximum, op=dist.ReduceOp.MAX)
        x -= maximum
        column, elsewhere = locate(target, held)
        x_target = x.gather(-1, column).masked_fill(elsewhere, 0.0)
        reduce(x_target)
        mean = [x[..., :real].sum(-1, keepdim=True) / V] if smoothing else []
        probabilities = x.exp_()
        sums = torch.stack([probabilities.sum(-1, keepdim=True), *mean])
        reduce(sums)
        probabilities /= sums[0]
        log_z = sums[0].log()
        loss = log_z - (1 - smoothing) * x_target
        if smoothing:
            loss -= smoothing * sums[1]
        log_z += maximum
        if z_loss:  # else the square of large logits may overflow, and 0 · inf is nan
            loss += z_loss * log_z.square()
        ctx.save_for_backward(probabilities, column, elsewhere, ignored, log_z)
        ctx.scalars = logits.dtype, real, V, smoothing, z_loss
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        probabilities, column, elsewhere, ignored, log_z = ctx.saved_tensors
        dtype, real, V, smoothing, z_loss = ctx.scalars
        gradient = gradient.masked_fill(ignored, 0.0)
        grad_logits = probabilities * (gradient * (1 + 2 * z_loss * log_z))
        if smoothing:
            grad_logits[..., :real] -= gradient * (smoothing / V)
        at_target = gradient.masked_fill(elsewhere, 0.0) * (smoothing - 1)
        return grad_logits.scatter_add_(-1, column, at_target).to(dtype), *[None] * 6


# ---------------------------------------------------------------------------------------------------------------------
# 6. A transformer layer: (sequence, batch, hidden) to the same, the same on all ranks or split along dimension 0.


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP, each with a norm before it (`norm_first`: GPT-2) or after (BERT), dropout and a residual.

    `dropout` is of attention probabilities as well. Other arguments are those of ParallelSelfAttention, process_group
    and sequence_parallel among them. Korthikanti et al. 2022, figures 4 and 5.
    """

    def __init__(
        self, hidden_size, num_heads, ffn_hidden_size=None, activation="gelu", norm_first=True, bias=True, **attention
    ):
        super().__init__()
        split = {name: attention[name] for name in ("process_group", "sequence_parallel") if name in attention}
        Norm, Dropout = nn.LayerNorm, nn.Dropout
        if split.get("sequence_parallel"):
            Norm, Dropout = partial(SequenceParallelLayerNorm, **split), partial(ParallelDropout, **split)
        self.norm_first, dropout = norm_first, attention.get("dropout", 0.0)
        self.self_attn = ParallelSelfAttention(hidden_size, num_heads, bias=bias, **attention)
        self.mlp = ParallelMLP(hidden_size, ffn_hidden_size or 4 * hidden_size, activation, bias, **split)
        self.norm1, self.norm2 = Norm(hidden_size, bias=bias), Norm(hidden_size, bias=bias)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)

    def forward(self, x, attn_mask=None):
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), attn_mask))
            return x + self.dropout2(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.dropout1(self.self_attn(x, attn_mask)))
        return self.norm2(x + self.dropout2(self.mlp(x)))


class ParallelMLP(nn.Module):
    """linear2(activation(linear1(x))), its hidden features split over the ranks: (…, hidden) to (…, hidden).

    `activation` is gelu, gelu_tanh, relu or swiglu (Shazeer 2020; linear1 is gate above up), or a function of features
    one by one. ValueError when ffn_hidden_size does not divide by t. Shoeybi et al. 2019, §3.
    """

    def __init__(self, hidden_size, ffn_hidden_size, activation="gelu", bias=True, **split):
        super().__init__()
        self.activation = ACTIVATIONS.get(activation, activation)
        if not callable(self.activation):
            raise ValueError(f"activation is {activation!r}; use {', '.join(ACTIVATIONS)}, or a function")
        First = GateAndUp if self.activation is swiglu else ColumnParallelLinear
        self.linear1 = First(hidden_size, First.matrices * ffn_hidden_size, bias, **split)
        self.linear2 = RowParallelLinear(ffn_hidden_size, hidden_size, bias, **split)

    def forward(self, x):
        return self.linear2(self.activation(self.linear1(x)))


class GateAndUp(ColumnParallelLinear):
    matrices = 2


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "swiglu": swiglu}


class ParallelSelfAttention(ParallelModule):
    """nn.MultiheadAttention of x with itself, with the same parameters, its heads split over the ranks.

    With fewer `num_kv_heads` than heads (grouped-query attention, Ainslie et al. 2023) several heads share keys and
    values; with fewer than ranks, several ranks hold the same, and sum their gradients. `dropout` is of attention
    probabilities; `batch_first`: (batch, sequence, hidden). ValueError when heads do not divide. Shoeybi et al., §3.
    """

    LIKE = ("embed_dim", "num_heads", "dropout", "batch_first")

    def __init__(
        self, embed_dim, num_heads, num_kv_heads=None, dropout=0.0, bias=True, causal=True, batch_first=False, **split
    ):
        super().__init__(**split)
        kv_heads, t = num_kv_heads or num_heads, self.t
        if embed_dim % num_heads or num_heads % kv_heads:
            problem = f"must divide embed_dim, {embed_dim}, and be a multiple of num_kv_heads, {kv_heads}"
            raise ValueError(f"{num_heads} attention heads {problem}")
        check_divides("attention heads", num_heads, t)
        if t % kv_heads:
            check_divides("key and value heads", kv_heads, t)
        self.causal, self.head_dim = causal, embed_dim // num_heads
        copies = max(1, t // kv_heads)
        kv = Part(kv_heads * self.head_dim, kv_heads * self.head_dim * copies // t, copies)
        self.qkv = Sharding(0, (Part(embed_dim, embed_dim // t), kv, kv))
        full = nn.MultiheadAttention(embed_dim, num_heads, dropout, bias, batch_first=batch_first)
        if kv_heads < num_heads:
            full.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(embed_dim + 2 * kv.size, embed_dim)))
            full.in_proj_bias = nn.Parameter(torch.zeros(embed_dim + 2 * kv.size)) if bias else None
        self._take(full, in_proj_weight=self.qkv, in_proj_bias=self.qkv)
        self.out_proj = RowParallelLinear.from_full(full.out_proj, **split)

    @classmethod
    def from_full(cls, layer, **keywords):
        if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:
            raise ValueError("kdim, vdim, add_bias_kv and add_zero_attn are not supported")
        return super().from_full(layer, **keywords)

    def forward(self, x, attn_mask=None, causal=None):
        """`attn_mask` as in F.scaled_dot_product_attention; `causal` instead of the constructor's."""
        qkv = column_linear(self, x, self._sum_copies(self.in_proj_weight), self._sum_copies(self.in_proj_bias))
        s = int(self.batch_first)  # the sequence's dimension, which attention wants to be the last but one
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).movedim(s, 2) for y in qkv.split(self.qkv.rows, -1))
        causal, dropout = self.causal if causal is None else causal, self.dropout if self.training else 0.0
        with parallel_region(self.process_group, x.device) if dropout else nullcontext():
            grouped = k.shape != q.shape
            y = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, enable_gqa=grouped)
        return self.out_proj(y.movedim(2, s).flatten(2))

    def _sum_copies(self, parameter):
        """The parameter; the gradients of k and v are summed over the ranks that hold copies of them."""
        _, kv, _ = self.qkv.parts
        if parameter is None or kv.copies == 1:
            return parameter

        def add(gradient, process_group):
            mine, copied = gradient.split([len(gradient) - 2 * kv.rows, 2 * kv.rows])
            everyone = all_gather(copied[None], process_group).unflatten(0, (-1, kv.copies))
            return torch.cat((mine, everyone[self.rank // kv.copies].sum(0)))

        return Communicate.apply(parameter, same, add, self.process_group)


class SequenceParallelLayerNorm(ParallelModule, nn.LayerNorm):
    """nn.LayerNorm of a part of the sequence: its parameters' gradients are summed over the ranks."""

    LIKE = ("normalized_shape", "eps", "elementwise_affine")

    def forward(self, x):
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        if parameters and self.t > 1:  # stacked, for one all-reduce
            parameters = copy_to_region(torch.stack(parameters), self.process_group)
        return F.layer_norm(x, self.normalized_shape, *parameters, eps=self.eps)


# ---- Dropout: inside a parallel region, and on a part of the sequence, every rank draws its own.


def model_parallel_seed(seed, process_group=None):
    """Seed the default generators, alike on all ranks. Only in a parallel_region() do ranks draw differently then.

    ValueError when the ranks' seeds differ. Data-parallel replicas and pipeline stages want seeds of their own.
    """
    seeds = [None] * world(process_group)[1]
    dist.all_gather_object(seeds, seed, group=process_group)
    if len(set(seeds)) > 1:
        raise ValueError(f"ranks that split a model need one seed; theirs are {seeds}")
    torch.manual_seed(seed)


@contextmanager
def parallel_region(process_group=None, device="cpu"):
    """Random numbers in here differ by rank, and afterwards agree again.

    Megatron-LM keeps a second generator. Here the region's seed is drawn from the first, so that who restores that one
    alone, as torch.utils.checkpoint does, gets the same dropout again.
    """
    rank, t = world(process_group)
    if t == 1:
        yield
        return
    seed, cuda = torch.randint(2**48, (), device="cpu").item() + rank, torch.device(device).type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield


class ParallelDropout(ParallelModule, nn.Dropout):
    """nn.Dropout in a parallel region."""

    LIKE = ("p", "inplace")

    def forward(self, x):
        with parallel_region(self.process_group, x.device) if self.training and self.p else nullcontext():
            return super().forward(x)


# ---------------------------------------------------------------------------------------------------------------------
# 7. A plain model becomes parallel, by a plan of names.


def parallelize(module, plan, process_group=None, sequence_parallel=False):
    """Swap layers of a plain `module`, in place, for this rank's slices of them; -> module.

    Args:
        plan: {name: kind}. Names may be patterns, as "layers.*.linear1". Kinds: "column", "row"; "vocab" for an
            nn.Embedding and the nn.Linear of a head; "attention" for nn.MultiheadAttention; "dropout" for one between
            column and row; "layer" for all these of an nn.TransformerEncoderLayer.
        sequence_parallel: layers of the plan take and return parts of dimension 0, whichever that is; "norm" and
            "dropout" are for those between, which a "layer" includes.

    Tied weights stay tied. ValueError, which names the layer, when one is missing or does not fit.
    """
    chosen, swaps = {}, {}  # name -> kind, plain layer -> this rank's slices of it
    layers = dict(module.named_modules(remove_duplicate=False))
    for pattern, kind in plan.items():
        kinds = {"": kind} if kind != "layer" else LAYER | BETWEEN if sequence_parallel else LAYER
        for name in fnfilter(layers, pattern) or [pattern]:  # which the next loop refuses
            chosen |= {f"{name}.{part}".strip("."): kind for part, kind in kinds.items()}
    for name, kind in chosen.items():
        if not name or name not in layers:  # what holds the module is not known here
            raise ValueError(f"no layer is named {name!r}; there are {', '.join(filter(None, layers))}")
        layer, keywords = layers[name], {"process_group": process_group}
        slices = [from_full for known, plain, from_full in KINDS if known == kind and isinstance(layer, plain)]
        if not slices:
            fits = ", ".join(f"{kind} for {plain.__name__}" for kind, plain, _ in KINDS)
            raise ValueError(f"{name}: {type(layer).__name__} cannot be {kind!r}; there are {fits}")
        if isinstance(layer, nn.Linear | nn.MultiheadAttention):
            keywords["sequence_parallel"] = sequence_parallel
        try:
            swaps[layer] = slices[0](layer, **keywords)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    tie(module, swaps)
    for parent in list(module.modules()):
        parent._modules |= {name: swaps[child] for name, child in parent._modules.items() if child in swaps}
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # no fast path for inference: it would take the slices for the whole
            if isinstance(parent.linear1, ColumnParallelLinear):
                parent.dropout = ParallelDropout.from_full(parent.dropout, process_group=process_group)
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return module


def tie(module, swaps):
    """Where layers of `module` share a parameter, let those that replace them share theirs."""
    replaces = {old.get_submodule(path): new for old, top in swaps.items() for path, new in top.named_modules()}
    users = {}  # parameter -> who has it: the new layer or None, the name there, and the whole name
    for path, old in module.named_modules():
        for name, parameter in old.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((replaces.get(old), name, f"{path}.{name}"))
    for tied in users.values():
        if len({new and (new.shardings.get(name),) for new, name, _ in tied}) > 1:
            names = ", ".join(path for *_, path in tied)
            raise ValueError(f"{names} are one parameter: the plan must split all alike")
        first, name_in_first, _ = tied[0]
        for new, name, _ in tied[1:]:
            if new:
                new.register_parameter(name, first._parameters[name_in_first])


class ParallelMultiheadAttention(ParallelSelfAttention):
    """Called as nn.TransformerEncoderLayer calls its self_attn."""

    _qkv_same_embed_dim = True  # nn.TransformerEncoderLayer asks

    def forward(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, is_causal=False, **unused
    ):
        alone = query is key and key is value and query.dim() == 3 and not need_weights
        if not alone or (attn_mask is not None and attn_mask.dim() > 2):
            raise ValueError("attention is of one batch with itself, need_weights=False, one mask for all heads")
        if is_causal and key_padding_mask is None:
            attn_mask = None  # it says the same
        masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]]
        # Of numbers to add. In one of bools, True is what may not be seen: 0 is the logarithm of 1, -inf of 0.
        masks = [(~m).to(query.dtype).log() if m.dtype == torch.bool else m for m in masks if m is not None]
        return super().forward(query, sum(masks) if masks else None, is_causal and attn_mask is None), None


KINDS = [
    ("column", nn.Linear, ColumnParallelLinear.from_full),
    ("row", nn.Linear, RowParallelLinear.from_full),
    ("vocab", nn.Linear, partial(ColumnParallelLinear.from_full, make_vocab_size_divisible_by=1)),
    ("vocab", nn.Embedding, VocabParallelEmbedding.from_full),
    ("attention", nn.MultiheadAttention, ParallelMultiheadAttention.from_full),
    ("dropout", nn.Dropout, ParallelDropout.from_full),
    ("norm", nn.LayerNorm, SequenceParallelLayerNorm.from_full),
]
LAYER = {"self_attn": "attention", "linear1": "column", "linear2": "row"}
BETWEEN = {"norm1": "norm", "dropout1": "dropout", "norm2": "norm", "dropout2": "dropout"}


# ---------------------------------------------------------------------------------------------------------------------
# 8. The whole model: its norm, and its state.


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, process_group=None):
    """torch.nn.utils.clip_grad_norm_ of the whole model; -> its norm, identical on all ranks. All must call it.

    `parameters` may be a module, or one. Those without .grad, the same on all ranks, are left out.
    """
    parameters = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    some, rank = parameters[0].grad if parameters else torch.zeros(()), world(process_group)[0]
    counted = [some.new_zeros(1)]  # all ranks' together are the whole model's gradients, once
    for parameter in parameters:
        if sharding := getattr(parameter, "tensor_parallel", None):
            pieces = zip(sharding.parts, parameter.grad.split(sharding.rows, sharding.dim), strict=True)
            counted += [piece for part, piece in pieces if rank % part.copies == 0]
        elif rank == 0:
            counted.append(parameter.grad)
    dtype = torch.float64 if any(parameter.grad.dtype == torch.float64 for parameter in parameters) else torch.float32
    norm = partial(torch.linalg.vector_norm, ord=norm_type, dtype=dtype)
    mine = norm(torch.stack([norm(piece) for piece in counted]))
    total = norm(all_gather(mine[None], process_group))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale.to(parameter.grad))
    return total


def sharded(module):
    """(name, the module that holds it, Sharding) of each parameter of `module` that is split."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, sharding in getattr(owner, "shardings", {}).items():
            yield f"{path}.{name}".strip("."), owner, sharding


@torch.no_grad()
def gather_whole(module, tensors):
    """{name: this rank's tensor} to {name: the plain model's}: parameters, gradients, … All ranks must call it."""
    whole, gathered = dict(tensors), {}
    for name, owner, sharding in sharded(module):
        if (mine := tensors.get(name)) is not None:
            if mine not in gathered:  # else tied
                gathered[mine] = sharding.join(all_gather(mine.detach()[None], owner.process_group))
            whole[name] = gathered[mine]
    return whole


def full_state_dict(module):
    """What the plain module's state_dict() would be, on every rank. All ranks must call it."""
    state_dict = module.state_dict(keep_vars=True)  # tied parameters are one object
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in gather_whole(module, state_dict).items()}


def load_full_state_dict(module, state_dict, strict=True):
    """Load this rank's slices of what full_state_dict(), with any number of ranks, or the plain module returned."""
    cuts = {n: s.cut(state_dict[n], owner.rank) for n, owner, s in sharded(module) if n in state_dict}
    return module.load_state_dict({**state_dict, **cuts}, strict)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the above.


def world(process_group):
    """This rank in the group, and the group's size."""
    if (t := dist.get_world_size(process_group)) < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    return dist.get_rank(process_group), t


def check_divides(what, size, t):
    if size % t:
        fit = [str(n) for n in range(1, min(size, 128) + 1) if size % n == 0]
        fit = " or ".join([", ".join(fit[:-1]), fit[-1]] if fit[1:] else fit)
        near = f"{size - size % t} or {size - size % t + t}" if size > t else t
        problem = f"{size} {what} do not divide by {t} tensor-parallel ranks"
        raise ValueError(f"{problem}; use a world size of {fit}, or {near} {what}")


def check_range(what, integers, size):
    wrong = ((integers < 0) | (integers >= size)).any()
    if integers.is_cuda:
        torch._assert_async(~wrong)  # without a synchronisation, as PyTorch's own
    elif not integers.is_meta and wrong:
        raise IndexError(f"a {what} is outside of [0, {size}): they are {integers.min()} to {integers.max()}")


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    switch = {"action": "store_true", "help": "norms and residuals of a part of the tokens on each rank"}
    demo = Demo(parts=1, add_arguments=lambda parser: parser.add_argument("--sequence-parallel", **switch))
    sp, t, model, problem = demo.args.sequence_parallel, demo.ranks, copy.deepcopy(demo.model), None
    plan = {"0.tokens": "vocab", "[1-4]": "layer", "6": "vocab"} | ({"5": "norm"} if sp else {})
    try:
        check_divides("sequences in the batch", demo.batch_size if sp else t, t)
        parallelize(model, plan, sequence_parallel=sp)
    except ValueError as error:
        problem = error
    demo.stop_if(problem)
    if sp:  # dimension 0 of these (B, T, C) is the batch: any split of the tokens will do
        model[0].register_forward_hook(lambda module, inputs, output: scatter_to_sequence(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        parameters = dict(model.named_parameters())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        return (gather_whole(model, tensors).values() for tensors in (gradients, parameters))

    demo.train(step, whole)
    l, h, bs = 4, 192, demo.batch_size * demo.T
    formula, sent = "((8l+4)bsh+6bs)(t-1)/t", (8 * l + 4) * bs * h + 6 * bs
    if sp:  # the norms' gradients: 4h of each layer, 2h of the last one
        formula, sent = "((10l+6)bsh+6bs+(8l+4)h)(t-1)/t", (10 * l + 6) * bs * h + 6 * bs + (8 * l + 4) * h
    sent *= next(model.parameters()).element_size() * (t - 1) / t
    status = demo.report("tensor_parallel", held(model.parameters(), optimizer), formula, sent)
    demo.leave(status)


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model, in this world and on one device. The same text in every file.


class Embed(nn.Module):
    """(B, T) integers to (B, T, C): token plus position. B batch, T time, C channels, V vocabulary."""

    def __init__(self, V, T, C):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)

    def forward(self, tokens_BT):
        return self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """(B, T, C) to (B, T, C): causal self-attention and MLP, each after a norm and around a residual."""

    def __init__(self, C, heads):
        super().__init__(C, heads, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x_BTC):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], x_BTC.device, x_BTC.dtype)
        return super().forward(x_BTC, src_mask=mask, is_causal=True)


def language_model(C=192, heads=6, layers=4, T=64, V=256):
    """A causal transformer over bytes: (B, T) integers to (B, T, V) logits."""
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(Embed(V, T, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends: to single ranks, and in collectives by their ring algorithms."""

    # operator: (position of its payload, how often each byte goes around the ring)
    RING = {"allreduce_": (0, 2), "broadcast_": (0, 1), "_allgather_base_": (0, 1)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.RING:
            position, rounds = self.RING[name]
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.total += rounds * (N - 1) / N * sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        elif name == "send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):
    """Bytes that parameters, gradients and optimizer state hold on this rank."""
    parameters = list(parameters)
    state = [tensor for tensor in tree_leaves(list(optimizer.state.values())) if isinstance(tensor, torch.Tensor)]
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Joins the world, trains a technique and the same model on one device side by side, compares, and prints.

    One device accumulates the batch in `parts` (None: one per rank). Up to `bitwise` ranks on the CPU the two must be
    bitwise equal in float32; else the demo runs in float64, and they must be within 1e-9.
    """

    T = 64  # tokens in a sequence

    def __init__(self, bitwise=0, parts=None, add_arguments=lambda parser: None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--batch-size", type=int, help="sequences per step, over all ranks (default: 8 per rank)")
        parser.add_argument("--data", metavar="FILE", help="text to train on (default: the standard library's source)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--seed", type=int, default=0)
        add_arguments(parser)
        self.args = parser.parse_args()
        self.join_world()
        self.parts = parts or self.ranks
        self.batch_size = 8 * self.ranks if self.args.batch_size is None else self.args.batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        if self.batch_size < 1 or self.batch_size % self.parts:
            problem = f"--batch-size {self.batch_size}: must be a multiple of {self.parts}, to share it out evenly"
        if self.args.device == "cuda" and self.device.type == "cpu":
            problem = "--device cuda: torch sees no GPU"
        self.stop_if(problem)
        self.bitwise = self.ranks <= bitwise and self.device.type == "cpu"
        self.reset()

    def reset(self):
        """Make the model on one device anew, the same on every rank."""
        torch.manual_seed(self.args.seed)
        self.model = language_model(T=self.T).to(self.device, torch.float32 if self.bitwise else torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def join_world(self):
        """As torchrun says, or as a world of one."""
        # Imported after init_process_group (torch.optim does so), its default arguments would keep the group for ever:
        # destroy_process_group() would not end gloo's threads, which now and then abort the process at its exit.
        import torch.distributed.nn.functional

        gpus = torch.cuda.device_count() if self.args.device != "cpu" else 0
        self.device, backend = torch.device("cpu"), "gloo"
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(self.device)
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: a GPU each
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def read_text(self, path):
        files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            return f"--data {path}: {error.strerror}"
        if len(text) <= self.T:
            return f"--data {path}: {len(text)} bytes; one sequence and its targets take {self.T + 1}"
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return None

    def stop_if(self, problem):
        """When any rank has a problem, rank 0 prints it, and all ranks exit with status 2."""
        problems = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.show(f"error: {next(filter(None, problems))}", file=sys.stderr)
            self.leave(2)

    def leave(self, status):
        dist.barrier()  # who leaves early breaks the others' connections
        dist.destroy_process_group()
        sys.exit(status)

    def show(self, text, **kwargs):
        if self.rank == 0:
            print(text, flush=True, **kwargs)

    def batch(self, step):
        """Inputs and targets of all ranks, (B, T) each."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + step)
        starts = torch.randint(len(self.text) - self.T, (self.batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(self.T + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, inputs, targets):
        """Accumulate the gradients of the parts, in rank order; -> their losses."""
        self.optimizer.zero_grad()
        losses = []
        for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(part), part_targets)
            loss.backward()
            losses.append(loss.item())
        for parameter in self.model.parameters():
            parameter.grad /= self.parts  # after the sum: before it, at 3 parts, rounds differently
        self.optimizer.step()
        return losses

    def train(self, step, state):
        """`step(inputs, targets)` trains on the global batch, -> the loss of this rank's part.
        `state()` -> gradients, parameters: whole, in the order of the plain model."""
        self.losses, self.times, self.times_one_device = [], [], []
        self.largest = dict.fromkeys(("loss", "gradient", "parameter"), 0.0)
        for number in range(self.args.steps):
            batch, sent = self.batch(number), SentBytes()
            start = time.perf_counter()
            with sent if number == 0 else nullcontext():  # counting takes time
                loss = step(*batch).item()
            self.times.append(time.perf_counter() - start)
            self.sent = sent.total or (self.sent if number else 0.0)
            start = time.perf_counter()
            losses = self.step_on_one_device(*batch)
            self.times_one_device.append(time.perf_counter() - start)
            self.losses.append(statistics.mean(losses))
            gradients, parameters = state()
            self.compare("loss", [loss], [losses[self.rank % self.parts]])
            self.compare("gradient", gradients, [parameter.grad for parameter in self.model.parameters()])
            self.compare("parameter", parameters, self.model.parameters())
            if sys.stderr.isatty():
                self.show(f"\rstep {number + 1}/{self.args.steps}\r", end="", file=sys.stderr)

    def compare(self, what, ours, plain):
        for a, b in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
            difference = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            self.largest[what] = max(self.largest[what], math.inf if math.isnan(difference) else difference)

    def report(self, name, held_here, formula, sent):
        """Print what every demo prints; -> the exit status, 1 when a rank differs from one device."""
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, self.largest)
        largest = {what: max(rank[what] for rank in everyone) for what in self.largest}
        tolerance = 0.0 if self.bitwise else 1e-9
        agree = max(largest.values()) <= tolerance
        verdict = ", ".join(f"max |Δ{what}| {difference:.1e}" for what, difference in largest.items())
        verdict += f", {'' if agree else 'NOT '}equal within {tolerance:g}{'' if self.bitwise else ' in float64'}"
        if not any(largest.values()):
            verdict = f"loss, gradients and parameters bitwise equal over {self.args.steps} steps"
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        size = f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f}M parameters"
        ms, ms_one_device = (1e3 * statistics.median(times) for times in (self.times, self.times_one_device))
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        self.show(f"{name} · {world} · {size} · {self.args.steps} steps")
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    main()
