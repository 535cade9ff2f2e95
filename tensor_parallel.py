"""Tensor parallelism: a group of ranks computes every layer together, and each holds 1/t of it.

In a step each rank multiplies by its shard of every weight matrix. The ranks add up their results
after attention and after the MLP, in forward and in backward.

A transformer layer has two pairs of matrices: qkv and proj, linear1 and linear2. The first matrix
of a pair is split by its outputs: each rank computes some heads, or some hidden features, from all
of X. The second matrix is split by its inputs: each rank already has the inputs that it needs. A
sum ends the pair.

              ┌── X A₀ → GELU, or attention → Y₀ B₀ ──┐                 rank 0
    X ── f ───┤                                       ├─── g ── Z       Z = Y₀ B₀ + Y₁ B₁
              └── X A₁ → GELU, or attention → Y₁ B₁ ──┘                 rank 1

Between the pairs all ranks do the same work on the same X. Sequence parallelism splits that work
too: norms, dropout and residuals see 1/t of the sequence. Each all-reduce becomes its two halves.

                                       forward          backward
    f   copy_to_region                 nothing          all-reduce
    g   reduce_from_region             all-reduce       nothing
    f   gather_from_sequence           all-gather       reduce-scatter
    g   reduce_scatter_to_sequence     reduce-scatter   all-gather

Cost per rank, for t ranks, micro-batch b, sequence s, hidden size h, a heads, vocabulary V. A rank
holds 1/t of the parameters, gradients and optimizer state, and all of the norms and row biases.
"sent" counts elements per layer and micro-batch, times (t-1)/t. "activations" counts bytes per
layer in 16 bits (Korthikanti et al., §4), with 2sbh for dropout masks and 5as/h for attention
scores. scaled_dot_product_attention keeps no scores: it computes them again in backward. The last
row counts once for the whole model.

                            sent               activations
    one device              0                  sbh (34 + 5as/h)
    tensor parallel         8bsh               sbh (10 + 24/t + 5as/(ht))
    and sequence parallel   10bsh + 12h        sbh (34 + 5as/h) / t
    embedding, head, loss   4bsh + 6bs         4bs V/t, in the loss

Sequence parallelism sends 2bsh more because f gathers its input again in backward, and 12h more
for the gradients of norms and row biases. At the head it sends 2bsh + 4h more.

Run:      torchrun --nproc-per-node 2 tensor_parallel.py [--sequence-parallel]
Papers:   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053
          Korthikanti et al. 2022, sequence parallelism, arXiv 2205.05198
Mirrors:  megatron.core.tensor_parallel; torch.distributed.tensor.parallel.parallelize_module
Left out: attention masks other than causal; more ranks than key and value heads; label smoothing
          (Megatron-LM has it); padding_idx, max_norm; norms other than LayerNorm; second
          derivatives
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

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # a later import keeps the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch 2.13 has a new name, and warns about the old one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --------------------------------------------------------------------------------------------------
# 1. The idea: the operators f and g. Each is the other's gradient.


class Operator(Function):
    """One collective in forward, another in backward.

    Autograd does not see a bare collective in the middle of a model: the gradients would be wrong,
    without an error. Neither collective changes the tensor that it is given.
    """

    @staticmethod
    def forward(ctx, x, process_group, forward_collective, backward_collective):
        rank_and_size(process_group)  # raises on a rank outside the group
        ctx.process_group = process_group
        ctx.backward_collective = backward_collective
        return forward_collective(x, process_group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.backward_collective(grad, ctx.process_group), None, None, None


def identity(x, process_group):
    return x


def all_reduce(x, process_group):
    """The sum of all ranks' x."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=process_group)
    return x


def copy_to_region(x, process_group=None):
    """f: every rank uses x, so the gradient of x is the sum of all ranks' gradients."""
    return Operator.apply(x, process_group, identity, all_reduce)


def reduce_from_region(x, process_group=None):
    """g: the sum of all ranks' x. All ranks have the same gradient of the sum."""
    return Operator.apply(x, process_group, all_reduce, identity)


def parallel_mlp(x, A, B, process_group=None):
    """GELU(x A) B for this rank's columns of A and rows of B. This is the whole technique."""
    x = copy_to_region(x, process_group)
    return reduce_from_region(F.gelu(x @ A) @ B, process_group)


def rank_and_size(process_group):
    world_size = dist.get_world_size(process_group)
    if world_size < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    return dist.get_rank(process_group), world_size


# --------------------------------------------------------------------------------------------------
# 2. The other operators: scatter and gather, and f and g of sequence parallelism.


def split(x, process_group):
    """This rank's part of dimension 0."""
    rank, world_size = rank_and_size(process_group)
    check_divides("positions or features", len(x), world_size)
    return x.chunk(world_size)[rank].clone()


def all_gather(x, process_group):
    """All ranks' x, concatenated along dimension 0."""
    _, world_size = rank_and_size(process_group)
    gathered = x.new_empty(world_size * len(x), *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group=process_group)
    return gathered


def reduce_scatter(x, process_group):
    """This rank's part of dimension 0 of the sum of all ranks' x."""
    _, world_size = rank_and_size(process_group)
    check_divides("positions", len(x), world_size)
    # gloo's reduce-scatter is an all-reduce inside, and sends twice as much as this exchange.
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=process_group)
    return received.unflatten(0, (world_size, -1)).sum(0)


def check_divides(what, size, world_size):
    if size % world_size:
        fit = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"{size} {what} do not divide by {world_size} tensor-parallel ranks; "
            f"use a world size in {fit}"
        )


def scatter_to_sequence(x, process_group=None):
    """This rank's part of an x that all ranks have, along dimension 0."""
    return Operator.apply(x, process_group, split, all_gather)


def scatter_to_region(x, process_group=None):
    """This rank's part of an x that all ranks have, along the last dimension."""
    return scatter_to_sequence(x.movedim(-1, 0), process_group).movedim(0, -1)


def gather_from_region(x, process_group=None):
    """All ranks' parts of the last dimension. All ranks have the same gradient of the whole."""
    x = x.movedim(-1, 0)
    return Operator.apply(x, process_group, all_gather, split).movedim(0, -1)


def gather_from_sequence(x, process_group=None):
    """f of sequence parallelism: every rank uses the whole, so the ranks' gradients are added."""
    return Operator.apply(x, process_group, all_gather, reduce_scatter)


def reduce_scatter_to_sequence(x, process_group=None):
    """g of sequence parallelism: this rank's part of the sum of all ranks' x."""
    return Operator.apply(x, process_group, reduce_scatter, all_gather)


# --------------------------------------------------------------------------------------------------
# 3. The layers. from_full() makes a parallel layer from a plain one. A constructor makes the plain
# layer first. `options` are ParallelLayer's: process_group, sequence_parallel, stack and pad.


class ParallelLayer(nn.Module):
    """This rank's shard of a plain layer. Attributes and parameters have the plain layer's names.

    A weight may consist of several matrices, one above the other, as q, k and v do. Then each
    matrix is split by itself, and the shard has a part of each.
    """

    split_dims = {}  # parameter: the dimension that is split; the others are the same on all ranks

    def __init__(
        self,
        plain,
        process_group=None,
        sequence_parallel=False,
        stack=(1,),  # the relative sizes of the matrices; (1, 1, 1) for q, k and v
        pad=False,  # add rows of zeros at the end, until the ranks divide the rows
    ):
        super().__init__()
        for name, value in vars(plain).items():
            if not name.startswith("_"):  # in_features, normalized_shape, p, …
                setattr(self, name, value)
        self.rank, self.world_size = rank_and_size(process_group)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        size = plain.weight.shape[self.split_dims["weight"]] if self.split_dims else 0
        self.padding = -size % self.world_size if pad else 0  # rows, of all ranks together
        size += self.padding
        self.matrix_sizes = [size * share // sum(stack) for share in stack]  # rows, or columns
        for matrix_size in self.matrix_sizes:
            check_divides("features", matrix_size, self.world_size)
        self.whole_shapes = {name: whole.shape for name, whole in plain.named_parameters()}
        self._parameters |= plain._parameters  # for a bias that is None
        for name, whole in plain.named_parameters():
            shard = self.shard(name, whole.detach())
            self.register_parameter(name, nn.Parameter(shard, whole.requires_grad))

    @classmethod
    def from_full(cls, plain, **options):
        """This rank's shard of `plain`, which stays as it is."""
        return cls(None, None, plain=plain, **options)  # the sizes are plain's

    def shard(self, name, whole):
        """This rank's shard of a whole parameter."""
        if name not in self.split_dims:
            return whole.clone()
        dim = self.split_dims[name]
        if self.padding:
            zeros = whole.new_zeros(self.padding, *whole.shape[1:])
            whole = torch.cat((whole, zeros))
        matrices = whole.split(self.matrix_sizes, dim)
        parts = [matrix.chunk(self.world_size, dim)[self.rank] for matrix in matrices]
        return torch.cat(parts, dim)

    def unshard(self, name, shard):
        """The whole parameter, from the shards of all ranks."""
        dim = self.split_dims[name]
        shards = all_gather(shard.unsqueeze(0), self.process_group)
        sizes = [size // self.world_size for size in self.matrix_sizes]
        parts = shards.split(sizes, dim + 1)  # one tensor per matrix, with the parts of all ranks
        matrices = [part.movedim(0, dim).flatten(dim, dim + 1) for part in parts]
        whole = torch.cat(matrices, dim)
        return whole.narrow(dim, 0, self.whole_shapes[name][dim])  # without the padding

    def replicated(self, name):
        """A parameter that is not split. Ranks with parts of the sequence add up its gradients."""
        parameter = getattr(self, name)
        if parameter is None or not self.sequence_parallel:
            return parameter
        return copy_to_region(parameter, self.process_group)


class ColumnLinear(Function):
    """F.linear(f(x), weight, bias), fused for two reasons (Korthikanti et al., §4.2.2).

    The gradient of x travels while the gradient of the weight is computed. The gathered sequence
    is not kept for backward: it is gathered again, while the gradient of x is computed.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, sequence_parallel, process_group):
        ctx.sequence_parallel = sequence_parallel
        ctx.process_group = process_group
        ctx.save_for_backward(x, weight)
        if sequence_parallel:
            x = all_gather(x, process_group)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, weight = ctx.saved_tensors
        length = len(x)  # of this rank's part of dimension 0
        options = {"group": ctx.process_group, "async_op": True}
        if ctx.sequence_parallel:
            whole_x = x.new_empty(*grad_y.shape[:-1], x.shape[-1])
            gathering = all_gather_single(whole_x, x.contiguous(), **options)
        # Under autocast the dtypes of grad_y, x and weight differ.
        grad_x = (grad_y @ weight.to(grad_y.dtype)).contiguous()
        if ctx.sequence_parallel:
            received = torch.empty_like(grad_x)
            reducing = dist.all_to_all_single(received, grad_x, **options)
            gathering.wait()
            x = whole_x
        else:
            reducing = dist.all_reduce(grad_x, **options)
        grad_y = grad_y.reshape(-1, len(weight))
        grad_weight = grad_y.t() @ x.reshape(-1, x.shape[-1]).to(grad_y.dtype)
        grad_bias = grad_y.sum(0) if ctx.needs_input_grad[2] else None
        reducing.wait()
        if ctx.sequence_parallel:
            grad_x = received.unflatten(0, (-1, length)).sum(0)  # over ranks
        return grad_x, grad_weight, grad_bias, None, None


class ColumnParallelLinear(ParallelLayer):
    """nn.Linear with its outputs split. All ranks' (…, in) becomes this rank's (…, out/t).

    With `sequence_parallel` the input is this rank's part of dimension 0. With `gather_output` the
    output is whole on all ranks. Padded outputs are -inf, so that as logits they change nothing.
    All ranks need the same random state, because each draws the whole weight and keeps its shard.
    """

    split_dims = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        gather_output=False,
        plain=None,
        **options,
    ):
        super().__init__(plain or nn.Linear(in_features, out_features, bias), **options)
        self.gather_output = gather_output

    def forward(self, x):
        y = ColumnLinear.apply(
            x, self.weight, self.bias, self.sequence_parallel, self.process_group
        )
        if self.padding:
            rows = len(self.weight)
            feature = self.rank * rows + torch.arange(rows, device=y.device)
            y = y.masked_fill(feature >= self.out_features, -math.inf)
        if self.gather_output:
            y = gather_from_region(y, self.process_group)[..., : self.out_features]
        return y


class RowParallelLinear(ParallelLayer):
    """nn.Linear with its inputs split. This rank's (…, in/t) becomes (…, out) on all ranks.

    With `sequence_parallel` the output is this rank's part of dimension 0. Without
    `input_is_parallel` the input is whole. The bias is added once, after the sum.
    """

    split_dims = {"weight": 1}

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        input_is_parallel=True,
        plain=None,
        **options,
    ):
        super().__init__(plain or nn.Linear(in_features, out_features, bias), **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.process_group)
        g = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
        y = g(F.linear(x, self.weight), self.process_group)
        bias = self.replicated("bias")
        return y if bias is None else y + bias.to(y.dtype)  # under autocast their dtypes differ


class ParallelLayerNorm(ParallelLayer):
    """nn.LayerNorm. With `sequence_parallel` each rank normalizes its part of the sequence."""

    def forward(self, x):
        weight = self.replicated("weight")
        bias = self.replicated("bias")
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


# --------------------------------------------------------------------------------------------------
# 4. The vocabulary: each rank has some rows of the embedding and some columns of the logits.


def locate(tokens, V, rows, rank):
    """Three tensors: a token's row in this shard, or 0; is it in this shard; is it in no shard.

    A token in no shard is an IndexError on the CPU. On a GPU, the host would have to wait for the
    check in every step.
    """
    nowhere = (tokens < 0) | (tokens >= V)
    if nowhere.is_cpu and nowhere.any():
        raise IndexError(f"tokens {tokens[nowhere].tolist()}: a vocabulary of {V} has 0 to {V - 1}")
    row = tokens - rank * rows
    here = (row >= 0) & (row < rows)
    return row.where(here, 0), here, nowhere


class VocabParallelEmbedding(ParallelLayer):
    """nn.Embedding with its rows split. All ranks look up the same tokens, and get the same rows.

    A token outside the vocabulary is an IndexError on the CPU. On a GPU its embedding is NaN, and
    the loss and the gradients become NaN: no kernel asserts, and the host does not wait.
    """

    split_dims = {"weight": 0}

    def __init__(self, num_embeddings, embedding_dim, *, plain=None, **options):
        plain = plain or nn.Embedding(num_embeddings, embedding_dim)
        if plain.padding_idx is not None or plain.max_norm is not None:
            raise ValueError(f"{plain}: padding_idx and max_norm are not supported")
        super().__init__(plain, pad=True, **options)

    def forward(self, tokens):
        row, here, nowhere = locate(tokens, self.num_embeddings, len(self.weight), self.rank)
        # where() would give x the strides of `here`. Dropout draws its mask in memory order, so the
        # mask would not be that of one device.
        x = F.embedding(row, self.weight).masked_fill(~here.unsqueeze(-1), 0.0)
        x = x.masked_fill(nowhere.unsqueeze(-1), math.nan)
        return reduce_from_region(x, self.process_group)


class VocabParallelCrossEntropy(Function):
    """loss = log Σ exp(x) - x[target]; its gradient is softmax(x), minus 1 at the target.

    The ranks send three numbers per token: the maximum, the sum and the target's logit.
    """

    @staticmethod
    def forward(ctx, logits, target, process_group):
        rank, world_size = rank_and_size(process_group)
        rows = logits.shape[-1]
        # A target in the padding, whose logit is -inf, has an infinite loss.
        column, here, nowhere = locate(target, rows * world_size, rows, rank)
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        maximum = x.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, process_group)
        maximum.masked_fill_(nowhere, math.nan)  # and so the token's loss and gradient
        x = x - maximum.unsqueeze(-1)
        tokens = torch.arange(len(target), device=x.device)
        x_target = x[tokens, column].where(here, 0.0)
        x.exp_()
        total, x_target = all_reduce(torch.stack((x.sum(-1), x_target)), process_group)
        grad_x = x.div_(total.unsqueeze(-1))  # in place: backward keeps one tensor of this size
        grad_x[tokens, column] -= here.to(x.dtype)
        ctx.save_for_backward(grad_x)
        return total.log() - x_target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad.unsqueeze(-1), None, None


def vocab_parallel_cross_entropy(
    logits_shard, target, process_group=None, ignore_index=-100, label_smoothing=0.0
):
    """F.cross_entropy(logits, target, reduction="none") for logits that are split over the ranks.

    `logits_shard` is (…, V/t), -inf where it is padding. `target` is (…), the same on all ranks.
    The loss is (…), in float32 or float64. A target outside the vocabulary is an IndexError on the
    CPU. On a GPU its loss and gradient are NaN.
    """
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(f"{target.shape=}, {logits_shard.shape=}: each token needs one target")
    if label_smoothing:
        raise ValueError(f"{label_smoothing=} is not supported; leave it at 0")
    logits = logits_shard.reshape(-1, logits_shard.shape[-1])
    ignored = target == ignore_index
    target = target.masked_fill(ignored, 0)
    loss = VocabParallelCrossEntropy.apply(logits, target.flatten(), process_group)
    return loss.view(target.shape).masked_fill(ignored, 0.0)


# --------------------------------------------------------------------------------------------------
# 5. A transformer layer, from (sequence, batch, hidden) to the same shape.


def model_parallel_seed(seed, process_group=None):
    """Seed all ranks alike, in any group. They draw different numbers in a parallel_region()."""
    torch.manual_seed(seed)


@contextmanager
def parallel_region(process_group=None):
    """Random numbers differ by rank inside the region, and agree again after it.

    The region's seed comes from the default generator. torch.utils.checkpoint restores that
    generator, so it repeats the same dropout. Megatron-LM keeps a second generator instead.
    """
    rank, world_size = rank_and_size(process_group)
    if world_size == 1:
        yield
        return
    seed = torch.randint(2**48, (), device="cpu").item()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        torch.manual_seed(seed + rank)
        yield


class ParallelDropout(ParallelLayer):
    """nn.Dropout inside a pair, or on a part of the sequence: each rank draws its own mask."""

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        with parallel_region(self.process_group):
            return F.dropout(x, self.p)


class ParallelMLP(nn.Module):
    """linear2(gelu(linear1(x))); for "swiglu" linear2(silu(gate) * up), with both in linear1."""

    def __init__(self, hidden_size, ffn_hidden_size, activation="gelu", **options):
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation={activation!r}: use 'gelu' or 'swiglu'")
        stack = (1, 1) if activation == "swiglu" else (1,)
        features = len(stack) * ffn_hidden_size
        self.activation = activation
        self.linear1 = ColumnParallelLinear(hidden_size, features, stack=stack, **options)
        self.linear2 = RowParallelLinear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x):
        x = self.linear1(x)
        if self.activation == "gelu":
            return self.linear2(F.gelu(x))
        gate, up = x.chunk(2, -1)
        return self.linear2(F.silu(gate) * up)


class ParallelSelfAttention(nn.Module):
    """Causal attention with its heads split. Query heads may share key and value heads (GQA)."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, dropout=0.0, **options):
        super().__init__()
        _, world_size = rank_and_size(options.get("process_group"))
        num_kv_heads = num_kv_heads or num_heads
        check_divides("attention heads", num_heads, world_size)
        check_divides("key and value heads", num_kv_heads, world_size)
        stack = (num_heads, num_kv_heads, num_kv_heads)
        self.local_heads = [heads // world_size for heads in stack]  # of q, k and v, on this rank
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        features = sum(stack) * self.head_dim
        self.qkv = ColumnParallelLinear(hidden_size, features, stack=stack, **options)
        self.proj = RowParallelLinear(hidden_size, hidden_size, **options)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qkv = qkv.movedim(0, 2)  # (batch, heads, sequence, head_dim)
        q, k, v = qkv.split(self.local_heads, 1)
        p = self.dropout if self.training else 0.0
        with parallel_region(self.qkv.process_group) if p else nullcontext():
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=p, is_causal=True, enable_gqa=k.shape != q.shape
            )
        return self.proj(y.movedim(2, 0).flatten(2))


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP, each with a norm before it, dropout after it, and a residual around it."""

    def __init__(
        self,
        hidden_size,
        num_heads,
        ffn_hidden_size=None,
        num_kv_heads=None,
        activation="gelu",
        dropout=0.0,
        bias=True,
        **options,
    ):
        super().__init__()
        self.norm1 = ParallelLayerNorm(nn.LayerNorm(hidden_size), **options)
        self.norm2 = ParallelLayerNorm(nn.LayerNorm(hidden_size), **options)
        self.dropout = nn.Dropout(dropout)
        if options.get("sequence_parallel"):
            self.dropout = ParallelDropout(self.dropout, **options)
        self.self_attn = ParallelSelfAttention(
            hidden_size, num_heads, num_kv_heads, dropout, bias=bias, **options
        )
        ffn_hidden_size = ffn_hidden_size or 4 * hidden_size
        self.mlp = ParallelMLP(hidden_size, ffn_hidden_size, activation, bias=bias, **options)

    def forward(self, x):
        x = x + self.dropout(self.self_attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


# --------------------------------------------------------------------------------------------------
# 6. The whole model: make it from a plain one, clip its gradients, save and load it.

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
    """Swap layers of `module` for this rank's shards of them, in place. Return the module.

    `plan` is {name or pattern like "layers.*.linear1": kind}. The kinds are "column", "row", "qkv"
    and "swiglu" (the columns of three and of two matrices), "vocab" (an embedding or a head) and
    "dropout" (inside a pair). Tied weights stay tied.

    With `sequence_parallel`, layers take and return parts of dimension 0. The plan also names the
    norms ("norm") and the dropout between the pairs. An embedding returns the whole sequence: call
    scatter_to_sequence() after it.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    options = {"process_group": process_group, "sequence_parallel": sequence_parallel}
    swaps = {}  # plain layer: its parallel layer
    for pattern, kind in plan.items():
        for name in names_like(layers, pattern) or [pattern]:
            layer = layers.get(name)  # None if no layer has the name, which is then a KeyError
            try:
                swaps[layer] = KINDS[kind, type(layer)](layer, **options)
            except (KeyError, RuntimeError, ValueError) as error:
                raise ValueError(f"{name!r} is {layer}, and cannot be {kind!r}: {error}") from None
    tie(layers, swaps)
    check_same_model(module, process_group)
    for name, layer in layers.items():
        if layer in swaps:
            module.set_submodule(name, swaps[layer])
    return module


def tie(layers, swaps):
    """Layers that share a parameter share its shard."""
    shards = {}  # whole parameter: its shard
    for path, plain in layers.items():
        layer = swaps.get(plain, plain)
        for name, whole in plain.named_parameters(recurse=False):
            mine = getattr(layer, name)
            shard = shards.setdefault(whole, mine)
            if shard.shape != mine.shape:
                raise ValueError(
                    f"{path}.{name} is tied to a parameter that the plan splits in another way"
                )
            layer.register_parameter(name, shard)


def check_same_model(module, process_group):
    """ValueError if parameters' names, shapes or dtypes differ by rank."""
    mine = {f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()}
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    differ = set.union(*everyone) - set.intersection(*everyone)
    if differ:
        raise ValueError(f"the ranks' models differ: {', '.join(sorted(differ))}")


def split_parameters(module):
    """Yield (name, the layer that holds it, its name there) for each parameter that is split."""
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for name in layer.split_dims:
                if getattr(layer, name) is not None:
                    yield f"{path}.{name}".strip("."), layer, name


@torch.no_grad()
def clip_grad_norm_(module, max_norm, process_group=None):
    """Clip the gradients by the norm of the whole model's. Return it. All ranks must call this."""
    _, world_size = rank_and_size(process_group)
    split = {getattr(layer, own) for _, layer, own in split_parameters(module)}
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    square = 0.0
    for parameter in parameters:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        norm = torch.linalg.vector_norm(parameter.grad, dtype=dtype)
        copies = 1 if parameter in split else world_size  # of its gradient
        square += norm.square() / copies
    total_norm = all_reduce(square, process_group).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


@torch.no_grad()
def full_state_dict(module):
    """The plain module's state_dict(), on every rank. All ranks must call this."""
    state_dict = dict(module.state_dict())
    for name, layer, own in split_parameters(module):
        state_dict[name] = layer.unshard(own, state_dict[name])
    return state_dict


def load_full_state_dict(module, state_dict):
    """Load this rank's shards of a plain module's state dict, or of full_state_dict()."""
    state_dict = dict(state_dict)
    for name, layer, own in split_parameters(module):
        whole = state_dict[name]
        if whole.shape != layer.whole_shapes[own]:
            raise ValueError(f"{name}: {whole.shape} in state_dict, not {layer.whole_shapes[own]}")
        state_dict[name] = layer.shard(own, whole)
    return module.load_state_dict(state_dict)


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    help = "split the sequence between the pairs of matrices"
    demo = Demo({"--sequence-parallel": {"action": "store_true", "help": help}})
    t = demo.ranks
    sequence_parallel = demo.args.sequence_parallel
    if 6 % t:
        demo.stop(f"6 attention heads do not divide by {t} ranks; use 1, 2, 3 or 6")
    model = demo.start("tensor_parallel", parts=1)
    plan = {"0": "vocab", "*.qkv": "qkv", "*.proj": "row", "*.linear1": "column"}
    plan |= {"*.linear2": "row", "*.norm?": "norm", "5": "norm", "6": "vocab"}
    parallelize(model, plan, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        # Dimension 0 is the batch here. Norms and residuals may be split along either.
        model[0].register_forward_hook(lambda module, inputs, output: scatter_to_sequence(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        return whole_gradients(model).values(), full_state_dict(model).values()

    demo.train(step, whole)
    layers = 4
    h = 192
    bs = demo.batch(0)[0].numel()
    formula = "((8l+4)bsh + 6bs)(t-1)/t"
    sent = (8 * layers + 4) * bs * h + 6 * bs
    if sequence_parallel:
        formula = "((10l+6)bsh + 6bs + (12l+4)h)(t-1)/t"
        sent += (2 * layers + 2) * bs * h + (12 * layers + 4) * h
    sent_bytes = 8 * sent * (t - 1) / t  # float64
    return demo.report(held(model.parameters(), optimizer), formula, sent_bytes)


def whole_gradients(module):
    """{name: whole gradient}, on every rank."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, layer, own in split_parameters(module):
        if gradients.get(name) is not None:
            gradients[name] = layer.unshard(own, gradients[name])
    return gradients


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
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
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
        """Print the result (README, "What the lines mean"). Return 1 if a rank differs."""
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
