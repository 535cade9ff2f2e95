"""Tensor parallelism: the ranks of a group cut every weight matrix into slices, and compute each layer together.

A transformer's matrices come in pairs. The first is cut by its outputs, so each rank computes some of the hidden
features, or of the heads, from all of X; the second is cut by its inputs, so it needs no others. A sum ends the pair:

              ┌── X A₀ → GELU, or attention → Y₀ B₀ ──┐                 rank 0
    X ── f ───┤                                       ├─── g ── Z       Z = Y₀ B₀ + Y₁ B₁
              └── X A₁ → GELU, or attention → Y₁ B₁ ──┘                 rank 1

Between the pairs all ranks do the same with the same X. Sequence parallelism splits that too: norms, dropout and
residuals see 1/t of the sequence, and each all-reduce becomes its two halves:
                                       forward          backward
    f   copy_to_region                 nothing          all-reduce: X has a gradient from each rank
    g   reduce_from_region             all-reduce       nothing
    f   gather_from_sequence           all-gather       reduce-scatter
    g   reduce_scatter_to_sequence     reduce-scatter   all-gather

Cost per rank for t ranks, batch b, sequence s, hidden h, heads a, vocabulary V: 1/t of parameters, gradients and
optimizer state, and all of norms and row biases. Per layer and micro-batch: elements sent, times (t-1)/t; and bytes of
16-bit activations (Korthikanti et al., §4; 2sbh are masks of dropout, 5as/h scores, which we compute again):
                            sent                activations
    one device              0                   sbh (34 + 5as/h)
    tensor parallel         8bsh                sbh (10 + 24/t + 5as/(ht))
    and sequence parallel   10bsh + 12h         sbh (34 + 5as/h) / t        f gathers again in backward; 12h: gradients
    embedding, head, loss   4bsh + 6bs          4bs V/t of the loss         of norms and biases; here 2bsh + 4h more

Run:      torchrun --nproc-per-node 2 tensor_parallel.py [--sequence-parallel]          (python …: a world of one)
Papers:   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198
Mirrors:  megatron.core.tensor_parallel; torch.distributed.tensor.parallel.parallelize_module
Left out: masks but causal; key and value heads copied over ranks; padding_idx, max_norm; norms but LayerNorm
"""

import argparse
import copy
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from fnmatch import filter as names_like
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

all_gather_single = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # before torch 2.13

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: communication in pairs, each the gradient of the other. Each function up to Communicate begins to move
# something along dimension 0, and returns another that waits and has the result: one can compute in between.


def rank_and_size(process_group):
    if (t := dist.get_world_size(process_group)) < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    return dist.get_rank(process_group), t


def check_divides(what, size, t):
    if size % t:
        fit = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        fit = " or ".join(fit.rsplit(", ", 1))
        raise ValueError(
            f"{size} {what} do not divide by {t} tensor-parallel ranks; use a world size of {fit}"
        )


def keep(x, process_group):
    return lambda: x


def own_part(x, process_group):
    rank, t = rank_and_size(process_group)
    check_divides("positions or features", len(x), t)
    return x.chunk(t)[rank].clone


def finish(work, parts):
    work.wait()
    return sum(parts[1:], parts[0])  # in rank order


def begin_all_reduce(x, process_group):
    x = x.clone(memory_format=torch.contiguous_format)
    return partial(finish, dist.all_reduce(x, group=process_group, async_op=True), [x])


def begin_all_gather(x, process_group):
    whole = x.new_empty(rank_and_size(process_group)[1] * x.shape[0], *x.shape[1:])
    return partial(
        finish,
        all_gather_single(whole, x.contiguous(), group=process_group, async_op=True),
        [whole],
    )


def begin_reduce_scatter(
    x, process_group
):  # an exchange and a sum: gloo's own is an all-reduce inside, and slower
    t = rank_and_size(process_group)[1]
    check_divides("positions or features", len(x), t)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    work = dist.all_to_all_single(received, x.contiguous(), group=process_group, async_op=True)
    return partial(finish, work, received.chunk(t))


class Communicate(torch.autograd.Function):
    """`there(x)`, whose gradient is `back(gradient)`, whose gradient is `there` again. Autograd does not see a bare
    collective: in the middle of a model it gives wrong gradients, and no error."""

    @staticmethod
    def forward(ctx, x, there, back, process_group):
        ctx.conjugate = (back, there, process_group)
        return there(x, process_group)()

    @staticmethod
    def backward(ctx, gradient):
        return Communicate.apply(gradient, *ctx.conjugate), None, None, None


def communicate(there, back, x, process_group=None, dim=0):
    if rank_and_size(process_group)[1] == 1:
        return x
    return Communicate.apply(x.movedim(dim, 0), there, back, process_group).movedim(0, dim)


copy_to_region = partial(communicate, keep, begin_all_reduce)
reduce_from_region = partial(communicate, begin_all_reduce, keep)
gather_from_sequence = partial(communicate, begin_all_gather, begin_reduce_scatter)
reduce_scatter_to_sequence = partial(communicate, begin_reduce_scatter, begin_all_gather)
scatter_to_sequence = partial(
    communicate, own_part, begin_all_gather
)  # of what all have alike, gradients too
scatter_to_region = partial(communicate, own_part, begin_all_gather, dim=-1)
gather_from_region = partial(communicate, begin_all_gather, own_part, dim=-1)


def parallel_mlp(x, A, B, process_group=None):
    """GELU(x A) B, where this rank has some columns of A and those rows of B: the whole technique."""
    return reduce_from_region(F.gelu(copy_to_region(x, process_group) @ A) @ B, process_group)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The layers. `**split` is process_group=None, sequence_parallel=False; `**linear` that and bias=True.


class Span(NamedTuple):
    """Some rows, or columns, of a whole parameter that lie in a rank's shard."""

    shard_start: int  # where they begin in the shard
    start: int  # where they begin in the whole
    length: int


class ParallelLayer(nn.Module):
    """A plain layer's attributes, and this rank's slices of its parameters, under their names: along `dims`; what has
    none is the same on all ranks. A `stack` has parts of these relative sizes, (1, 1, 1) for q, k and v, and a rank
    1/t of each; `pad` adds rows of zeros, so that t divides them."""

    def __init__(
        self, plain, process_group=None, sequence_parallel=False, stack=(1,), pad=False, **dims
    ):
        super().__init__()
        self.__dict__ |= {
            name: value for name, value in vars(plain).items() if not name.startswith("_")
        }
        self.rank, self.world_size = rank_and_size(process_group)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.split_dims = dims
        self.stack = stack
        self.padding = -len(plain.weight) % self.world_size if pad else 0
        self.whole_shapes = {name: whole.shape for name, whole in plain.named_parameters()}
        self._parameters |= plain._parameters
        for name, whole in plain.named_parameters():
            if name in dims:
                self.check_divides(name)
            mine = self.shard(name, whole.detach()) if name in dims else whole.detach().clone()
            self.register_parameter(name, nn.Parameter(mine, whole.requires_grad))

    @classmethod
    def from_full(
        cls, plain, **keywords
    ):  # leaves the plain layer alone; the keywords are the constructor's
        return cls(None, None, plain=plain, **keywords)

    def check_divides(self, name):
        dim = self.split_dims[name]
        for share in self.stack:
            size = (self.whole_shapes[name][dim] + self.padding) * share // sum(self.stack)
            check_divides(("output", "input")[dim] + " features", size, self.world_size)

    def spans(self, name, rank=None):
        """Where this rank's shard of a parameter (or `rank`'s) lies in the whole: a Span for each part of the stack,
        none for what is only padding."""
        rank = self.rank if rank is None else rank
        whole_size = self.whole_shapes[name][self.split_dims[name]]
        padded_size = whole_size + self.padding
        shard_start = 0
        spans = []
        for share in self.stack:
            part_size = padded_size * share // sum(self.stack)
            length = part_size // self.world_size
            start = shard_start * self.world_size + length * rank
            if start < whole_size:
                spans.append(Span(shard_start, start, min(length, whole_size - start)))
            shard_start += length
        return spans

    def shard(self, name, whole):
        """This rank's shard of a whole parameter."""
        dim = self.split_dims[name]
        shape = list(whole.shape)
        shape[dim] = (shape[dim] + self.padding) // self.world_size
        shard = whole.new_zeros(shape)
        for shard_start, start, length in self.spans(name):
            shard.narrow(dim, shard_start, length).copy_(whole.narrow(dim, start, length))
        return shard

    def unshard(self, name, shards):
        """The whole parameter, from all ranks' shards."""
        dim = self.split_dims[name]
        whole = shards[0].new_empty(self.whole_shapes[name])
        for rank, shard in enumerate(shards):
            for shard_start, start, length in self.spans(name, rank):
                whole.narrow(dim, start, length).copy_(shard.narrow(dim, shard_start, length))
        return whole

    def shared(
        self, name
    ):  # a parameter that all ranks have; used on parts of the sequence, its gradient is their sum
        whole = self._parameters[name]
        return (
            copy_to_region(whole, self.process_group)
            if self.sequence_parallel and whole is not None
            else whole
        )


class ColumnLinear(torch.autograd.Function):
    """F.linear(f(x)), where f is `there` in forward and `back` in backward. Better than the two composed: the gradient
    of x, for which the layers before wait, travels while that of the weight is computed; and what f gathers is not kept
    for backward, but gathered once more, during the first product. Korthikanti et al. 2022, §4.2.2."""

    @staticmethod
    def forward(ctx, x, weight, bias, there, back, process_group):
        ctx.f = there, back, process_group
        ctx.save_for_backward(x, weight)
        return F.linear(there(x, process_group)(), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x, weight), (there, back, process_group) = ctx.saved_tensors, ctx.f
        whole = there(x, process_group)
        grad_x = back(
            gradient @ weight.to(gradient.dtype), process_group
        )  # under autocast their dtypes differ
        gradient = gradient.reshape(-1, len(weight))
        grad_weight = gradient.t() @ whole().reshape(-1, x.shape[-1]).to(gradient.dtype)
        grad_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x(), grad_weight, grad_bias, None, None, None


class ColumnParallelLinear(ParallelLayer):
    """nn.Linear with its outputs split: the same (…, in) on all ranks, or with `sequence_parallel` this rank's part of
    dimension 0, to this rank's (…, out/t), or with `gather_output` to all. All ranks need the same random state: each
    draws the whole and keeps a slice. Outputs that are padding are -inf, as logits of no token."""

    def __init__(
        self, in_features, out_features, bias=True, *, gather_output=False, plain=None, **split
    ):
        super().__init__(
            plain or nn.Linear(in_features, out_features, bias), **split, weight=0, bias=0
        )
        self.gather_output = gather_output

    def forward(self, x):
        f = (
            (begin_all_gather, begin_reduce_scatter)
            if self.sequence_parallel
            else (keep, begin_all_reduce)
        )
        y = ColumnLinear.apply(
            x,
            self.weight,
            self.bias,
            *(f if self.world_size > 1 else (keep, keep)),
            self.process_group,
        )
        rows = len(self.weight)
        if (padding := min(rows, (self.rank + 1) * rows - self.out_features)) > 0:
            y = F.pad(y[..., :-padding], (0, padding), value=-math.inf)
        return (
            gather_from_region(y, self.process_group)[..., : self.out_features]
            if self.gather_output
            else y
        )


class RowParallelLinear(ParallelLayer):
    """nn.Linear with its inputs split: this rank's (…, in/t), or if not `input_is_parallel` all of it, to the same
    (…, out) on all ranks, or with `sequence_parallel` this rank's part. The bias is added once, after the sum."""

    def __init__(
        self, in_features, out_features, bias=True, *, input_is_parallel=True, plain=None, **split
    ):
        super().__init__(plain or nn.Linear(in_features, out_features, bias), **split, weight=1)
        self.input_is_parallel = input_is_parallel

    def forward(self, x):
        x = x if self.input_is_parallel else scatter_to_region(x, self.process_group)
        reduce = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
        y = reduce(F.linear(x, self.weight), self.process_group)
        return (
            y if self.bias is None else y + self.shared("bias").to(y.dtype)
        )  # under autocast they differ


class ParallelLayerNorm(
    ParallelLayer
):  # the nn.LayerNorm `plain`, with `sequence_parallel` of a part of the sequence
    def forward(self, x):
        return F.layer_norm(
            x, self.normalized_shape, self.shared("weight"), self.shared("bias"), self.eps
        )


def check_in_vocabulary(indices, V):
    """IndexError for an index on the CPU. On a GPU the host would have to wait for the answer in every step."""
    if indices.is_cpu and indices.numel():
        smallest, largest = torch.stack(indices.aminmax()).tolist()
        if smallest < 0 or largest >= V:
            wrong = smallest if smallest < 0 else largest
            raise IndexError(f"token {wrong} is not in the vocabulary of {V}: use 0 to {V - 1}")


def locate(indices, V, rows, rank):
    """-> the row of this rank's shard for each index, 0 if there is none; whether there is one; and whether the
    index is outside the vocabulary."""
    start = rank * rows
    here = (indices >= start) & (indices < start + rows)
    return (indices - start).where(here, 0), here, (indices < 0) | (indices >= V)


class VocabParallelEmbedding(ParallelLayer):
    """nn.Embedding with its rows split over the ranks, and padded to a multiple of t. All see the same integers.

    A token outside the vocabulary is an IndexError on the CPU. On a GPU its embedding is NaN, and so are the loss and
    the gradients: no kernel asserts, and the host does not wait for the GPU.
    """

    def __init__(self, num_embeddings, embedding_dim, *, plain=None, **split):
        plain = plain or nn.Embedding(num_embeddings, embedding_dim)
        if plain.padding_idx is not None or plain.max_norm is not None:
            raise ValueError(f"{plain}: it must have no padding_idx, and no max_norm")
        super().__init__(plain, **split, pad=True, weight=0)

    def forward(self, tokens):
        check_in_vocabulary(tokens, self.num_embeddings)
        return self.masked_lookup(tokens)

    def masked_lookup(self, tokens):
        rows = len(self.weight)
        row, here, outside = locate(tokens, self.num_embeddings, rows, self.rank)
        # where() would give the result the layout of `here`; dropout draws its masks in that order.
        x = F.embedding(row, self.weight).masked_fill(~here.unsqueeze(-1), 0.0)
        x = x.masked_fill(outside.unsqueeze(-1), math.nan)
        return reduce_from_region(x, self.process_group)


def vocab_parallel_cross_entropy(
    logits_shard, target, process_group=None, ignore_index=-100, label_smoothing=0.0
):
    """F.cross_entropy(logits, target, reduction="none") where logits, (…, V), are split over the ranks: the loss (…).
    `logits_shard` is (…, V/t), -inf where there is no such entry; `target` is (…), the same on all ranks. It is
    log Σ exp x - x_target, of x less its maximum, in float32 or more: a few numbers per token to send, never logits.
    A target outside the vocabulary is an IndexError on the CPU, and a loss and gradients of NaN on a GPU."""
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"targets {tuple(target.shape)}, logits {tuple(logits_shard.shape)}: one target per token"
        )
    (rank, t), rows, ignored = (
        rank_and_size(process_group),
        logits_shard.shape[-1],
        target == ignore_index,
    )
    target = target.masked_fill(ignored, 0)
    check_in_vocabulary(target, t * rows)
    column, here, outside = locate(target, t * rows, rows, rank)
    x = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    maximum = x.detach().amax(-1, keepdim=True)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, process_group)
    x = x - maximum.masked_fill(outside.unsqueeze(-1), math.nan)
    tokens = torch.arange(target.numel(), device=x.device)
    x_target = x.reshape(-1, rows)[tokens, column.flatten()].view_as(
        target
    )  # gather() would keep x too
    loss = reduce_from_region(x.exp().sum(-1), process_group).log()
    loss = loss - (1 - label_smoothing) * reduce_from_region(
        x_target.where(here, 0.0), process_group
    )
    if label_smoothing:
        exist = x > -math.inf  # what does not is padding, and not in the mean
        sums = torch.stack((x.where(exist, 0.0).sum(-1), exist.sum(-1, dtype=x.dtype)))
        total, V = reduce_from_region(sums, process_group)
        loss = loss - label_smoothing * total / V
    return loss.masked_fill(ignored, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# 3. A transformer layer: (sequence, batch, hidden) to the same, the same on all ranks or split along dimension 0.


def model_parallel_seed(seed, process_group=None):
    """Seed the generators, with the same seed on all ranks: only in a parallel_region() do they draw differently."""
    torch.manual_seed(seed)


@contextmanager
def parallel_region(process_group=None):
    """Random numbers in here differ by rank, and afterwards agree again. The seed is drawn from the default generator:
    who restores that, as torch.utils.checkpoint does, gets the same dropout. (Megatron-LM keeps a second one.)"""
    rank, t = rank_and_size(process_group)
    seed = torch.randint(2**48, (1,), device="cpu").tolist()[0] + rank if t > 1 else None
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus, enabled=t > 1):
        if t > 1:
            torch.manual_seed(seed)
        yield


class ParallelDropout(
    ParallelLayer
):  # the nn.Dropout `plain`, between a pair, or of a part of the sequence
    def forward(self, x):
        with parallel_region(self.process_group) if self.training and self.p else nullcontext():
            return F.dropout(x, self.p, self.training)


class ParallelMLP(nn.Module):
    """linear2(gelu(linear1(x))), its hidden features split; for "swiglu" (Shazeer 2020) linear1 is gate above up."""

    def __init__(self, hidden_size, ffn_hidden_size, activation="gelu", **linear):
        super().__init__()
        self.parts = parts = 1 + ["gelu", "swiglu"].index(activation)
        self.linear1 = ColumnParallelLinear(
            hidden_size, parts * ffn_hidden_size, stack=(1,) * parts, **linear
        )
        self.linear2 = RowParallelLinear(ffn_hidden_size, hidden_size, **linear)

    def forward(self, x):
        gate, *up = self.linear1(x).chunk(self.parts, -1)
        return self.linear2(F.silu(gate) * up[0] if up else F.gelu(gate))


class ParallelSelfAttention(nn.Module):
    """Causal attention, its heads split over the ranks. With fewer `num_kv_heads` several share one (2305.13245)."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, dropout=0.0, **linear):
        super().__init__()
        kv_heads, t = num_kv_heads or num_heads, rank_and_size(linear.get("process_group"))[1]
        check_divides("attention heads", num_heads, t)
        check_divides("key and value heads", kv_heads, t)
        self.head_dim, self.dropout = hidden_size // num_heads, dropout
        self.heads, stack = (
            (num_heads // t, kv_heads // t, kv_heads // t),
            (num_heads, kv_heads, kv_heads),
        )
        self.qkv = ColumnParallelLinear(
            hidden_size, sum(stack) * self.head_dim, stack=stack, **linear
        )
        self.proj = RowParallelLinear(hidden_size, hidden_size, **linear)

    def forward(self, x):
        heads = (
            self.qkv(x).unflatten(-1, (-1, self.head_dim)).movedim(0, 2)
        )  # (batch, heads, sequence, head_dim)
        q, k, v = heads.split(self.heads, 1)
        p = self.dropout if self.training else 0.0
        with parallel_region(self.qkv.process_group) if p else nullcontext():
            y = F.scaled_dot_product_attention(
                q, k, v, None, p, is_causal=True, enable_gqa=k.shape != q.shape
            )
        return self.proj(y.movedim(2, 0).flatten(2))


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP, each after a norm, before dropout, and around a residual. Korthikanti et al., figure 5."""

    def __init__(
        self,
        hidden_size,
        num_heads,
        ffn_hidden_size=None,
        num_kv_heads=None,
        activation="gelu",
        dropout=0.0,
        **linear,
    ):
        super().__init__()
        group, sp = linear.get("process_group"), linear.get("sequence_parallel", False)
        self.norm1, self.norm2 = (
            ParallelLayerNorm(nn.LayerNorm(hidden_size), group, sp) for _ in range(2)
        )
        self.dropout = ParallelDropout(nn.Dropout(dropout), group) if sp else nn.Dropout(dropout)
        self.self_attn = ParallelSelfAttention(
            hidden_size, num_heads, num_kv_heads, dropout, **linear
        )
        self.mlp = ParallelMLP(
            hidden_size, ffn_hidden_size or 4 * hidden_size, activation, **linear
        )

    def forward(self, x):
        x = x + self.dropout(self.self_attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


# ---------------------------------------------------------------------------------------------------------------------
# 4. The whole model: from a plain one, its norm, its state.

KINDS = {
    ("column", nn.Linear): ColumnParallelLinear.from_full,
    ("qkv", nn.Linear): partial(ColumnParallelLinear.from_full, stack=(1, 1, 1)),
    ("swiglu", nn.Linear): partial(ColumnParallelLinear.from_full, stack=(1, 1)),
    ("row", nn.Linear): RowParallelLinear.from_full,
    ("vocab", nn.Linear): partial(ColumnParallelLinear.from_full, pad=True),
    ("vocab", nn.Embedding): VocabParallelEmbedding.from_full,
    ("norm", nn.LayerNorm): ParallelLayerNorm,
    ("dropout", nn.Dropout): ParallelDropout,
}


def parallelize(module, plan, process_group=None, sequence_parallel=False):
    """Swap layers in `module` for this rank's slices of them; -> module. Tied weights stay tied. `plan` is {name or
    pattern, as "layers.*.linear1": kind}: "column", "row"; "qkv" and "swiglu", columns in a stack of three or two;
    "vocab", an embedding or a head; "dropout" between a pair. With `sequence_parallel` layers take and return parts of
    dimension 0, also "dropout" and "norm". ValueError, with its name, for one that does not fit."""
    layers = dict(module.named_modules(remove_duplicate=False))
    swaps, slices, split = (
        {},
        {},
        {"process_group": process_group, "sequence_parallel": sequence_parallel},
    )
    for pattern, kind in plan.items():
        for name in names_like(layers, pattern) or [pattern]:
            layer = layers.get(name)
            try:
                swaps[layer] = KINDS[kind, type(layer)](layer, **split)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{name!r} is {layer}, and cannot be {kind!r}: {error}") from None
    for path, old in layers.items():
        new = swaps.get(old, old)
        for name, whole in old.named_parameters(recurse=False):
            mine = slices.setdefault(
                whole, new._parameters[name]
            )  # layers that share it share the slice
            if mine.shape != new._parameters[name].shape:
                raise ValueError(
                    f"{path}.{name} is tied to a parameter that the plan splits in another way"
                )
            new.register_parameter(name, mine)
    everyone = [None] * rank_and_size(process_group)[1]
    mine = {f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()}
    dist.all_gather_object(everyone, mine, group=process_group)
    if differ := set.union(*everyone) - set.intersection(*everyone):
        raise ValueError(f"the ranks' models differ: {', '.join(sorted(differ))}")
    for parent in list(module.modules()):
        parent._modules |= {
            name: swaps[child] for name, child in parent._modules.items() if child in swaps
        }
    return swaps.get(module, module)


def split_parameters(module):
    """(name, the layer that holds it, its name there) of each parameter of `module` that is split."""
    for path, layer in module.named_modules(remove_duplicate=False):
        for name in getattr(layer, "split_dims", {}):
            if layer._parameters[name] is not None:
                yield f"{path}.{name}".strip("."), layer, name


@torch.no_grad()
def clip_grad_norm_(module, max_norm, process_group=None):
    """torch.nn.utils.clip_grad_norm_ of the whole model; -> its norm, identical on all ranks. All must call it."""
    split, rank = (
        {module.get_parameter(name) for name, *_ in split_parameters(module)},
        rank_and_size(process_group)[0],
    )
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    counted = [
        p.grad if p in split or rank == 0 else p.grad.new_zeros(()) for p in parameters
    ]  # what all hold: once
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in counted
    ]
    total = torch.linalg.vector_norm(begin_all_gather(torch.stack(norms), process_group)())
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


@torch.no_grad()
def full_state_dict(module, gradients=False):
    """What the plain module's state_dict() would be, or {name: whole gradient}, on every rank."""
    whole = (
        {name: p.grad for name, p in module.named_parameters()}
        if gradients
        else dict(module.state_dict())
    )
    for name, layer, own in split_parameters(module):
        if whole.get(name) is not None:
            whole[name] = layer.unshard(
                own, begin_all_gather(whole[name][None], layer.process_group)()
            )
    return whole


def load_full_state_dict(module, state_dict):
    """Load this rank's slices of what full_state_dict(), with any number of ranks, or the plain module returned."""
    shards = {}
    for name, layer, own in split_parameters(module):
        whole = state_dict[name]
        if whole.shape != layer.whole_shapes[own]:
            shape = tuple(layer.whole_shapes[own])
            raise ValueError(f"{name} is {tuple(whole.shape)} in state_dict, {shape} in the model")
        shards[name] = layer.shard(own, whole)
    return module.load_state_dict({**state_dict, **shards})


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo(
        {
            "--sequence-parallel": {
                "action": "store_true",
                "help": "split what is between the pairs as well",
            }
        }
    )
    t, sp = demo.ranks, demo.args.sequence_parallel
    if 6 % t:
        demo.stop(f"6 attention heads do not divide by {t} ranks; use 1, 2, 3 or 6")
    model = demo.start("tensor_parallel", parts=1)
    plan = {
        "0": "vocab",
        "*.qkv": "qkv",
        "*.proj": "row",
        "*.linear1": "column",
        "*.linear2": "row",
        "6": "vocab",
    }
    parallelize(model, plan | {"*.norm?": "norm", "5": "norm"}, sequence_parallel=sp)
    if sp:  # along dimension 0, here the batch: to norms and residuals it is all the same
        model[0].register_forward_hook(lambda module, inputs, output: scatter_to_sequence(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        return full_state_dict(model, gradients=True).values(), full_state_dict(model).values()

    demo.train(step, whole)
    l, h, bs = 4, 192, demo.batch(0)[0].numel()
    formula = "((10l+6)bsh + 6bs + (12l+4)h)(t-1)/t" if sp else "((8l+4)bsh + 6bs)(t-1)/t"
    sent = 6 * bs + ((10 * l + 6) * bs * h + (12 * l + 4) * h if sp else (8 * l + 4) * bs * h)
    return demo.report(
        held(model.parameters(), optimizer), formula, 8 * sent * (t - 1) / t
    )  # float64: 8 bytes


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim = C // heads
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        self.linear1 = nn.Linear(C, 4 * C)
        self.linear2 = nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C)
        q, k, v = map(self.split_heads, self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))

    def split_heads(self, x):  # (batch, time, C) to (batch, heads, time, head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def language_model(C=192, heads=6, layers=4, V=256):
    blocks = [Block(C, heads) for _ in range(layers)]
    # No position embedding: the causal mask alone tells positions apart.
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends. A collective counts as its ring algorithm sends."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.total += self.sent_by(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent_by(self, operator, args):
        if operator in ("send", "recv_"):
            return args[0][0].nbytes if operator == "send" else 0
        rounds, payload = self.RING[operator]  # KeyError: an unknown operator is not 0 bytes
        handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(handle)
        if operator == "alltoall_base_" and args[4]:  # the rows that each rank gets
            rows = sum(args[4]) - args[4][group.rank()]
            return rows * args[payload][:1].nbytes
        size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return rounds * size * (group.size() - 1) / group.size()


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def choose_device(name):
    """This rank's device, and the backend that it can use: NCCL wants a GPU for each local rank."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 or newer
    return device, "nccl" if enough or may_share else "gloo"


def join_world(device, backend):
    """Initialize the default group: NCCL if all ranks on all machines can use it, else gloo."""
    timeout = timedelta(seconds=120)
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    else:  # without torchrun
        store, rank, ranks = dist.HashStore(), 0, 1
    store.set(f"backend/{rank}", backend)
    backends = {store.get(f"backend/{peer}") for peer in range(ranks)}
    backend = "nccl" if backends == {b"nccl"} else "gloo"
    options = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


class Demo:
    """Trains with a technique and, beside it, the same model on one device, and compares the two.

    If the technique claims to be bitwise equal, they train in float32, otherwise in float64.
    """

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error = self.stop
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=devices, default=devices[-1])
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="a text")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")
        self.device, backend = choose_device(self.args.device)
        join_world(self.device, backend)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: every rank finds the same error

    def show(self, line="", end="\n"):
        if self.rank == 0:
            print(line, end=end, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`."""
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        dtype = torch.float64 if self.tolerance else torch.float32
        self.model = language_model().to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        world += f" · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: 3 parts would round differently before it
        self.optimizer.step()
        gradients = [parameter.grad for parameter in parameters]
        return [torch.stack(losses).mean().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def train(self, step, whole):
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
        for number in range(self.args.steps):
            batch = self.batch(number)
            is_last = number + 1 == self.args.steps
            start = self.now()
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            self.show_progress(number + 1)

    def show_progress(self, done):
        line = f"step {done}/{self.args.steps}   loss {self.losses[-1]:.3f}"
        if sys.stdout.isatty():
            self.show(line, end="\r")
        elif (done - 1) % -(-self.args.steps // 3) == 0:  # a log gets three lines
            self.show(line)

    def report(self, held_here, formula, sent):
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
        differences = torch.tensor(self.differences, device=self.device)
        largest = differences.nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain_held = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain_held)
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        held_line = f"params {params}   grads {grads}   optimizer {state}"
        self.show(f"held/rank   {held_line}      (1 device: {plain})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)
