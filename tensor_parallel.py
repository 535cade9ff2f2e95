"""Tensor parallelism: t ranks compute every layer together, and each holds 1/t of its weights.

A transformer layer has two pairs of matrices: qkv and proj in attention, linear1 and linear2 in the
MLP. The first of a pair, A, is split by its outputs: each rank computes some heads, or some hidden
features. The second, B, is split by its inputs, which are the outputs of A, so nothing is sent
between the two. A sum over the ranks ends the pair.

              ┌── X A₀ → GELU, or attention → Y₀ B₀ ──┐                 rank 0
    X ── f ───┤                                       ├─── g ── Z       Z = Y₀ B₀ + Y₁ B₁
              └── X A₁ → GELU, or attention → Y₁ B₁ ──┘                 rank 1

Norms, dropout and residuals lie between the pairs. Every rank computes them on the whole X, with
equal dropout masks. With sequence parallelism, a rank computes them on 1/t of the sequence, with a
mask of its own. Then f gathers the sequence, and g leaves each rank its part of the sum.

                                       forward          backward
    f   copy_to_region                 nothing          all-reduce
    g   reduce_from_region             all-reduce       nothing
    f   gather_from_sequence           all-gather       reduce-scatter      sequence parallelism
    g   reduce_scatter_to_sequence     reduce-scatter   all-gather          sequence parallelism

Names and shapes, for sequence s, batch b, hidden size h, vocabulary V. `size` counts the features
that are split: 3h in qkv, h in proj, and 4h in the MLP.

    x, y                      (s, b, h)          the whole, which is equal on all ranks
    x_part, y_part            (s/t, b, h)        this rank's positions     sequence parallelism
    x_shard, y_shard          (s, b, size/t)     this rank's features, inside a pair
    weight_shard, bias_shard  (size/t, h), (size/t)                        column layer, A
    weight_shard, bias        (h, size/t), (h)                             row layer, B
    logits_shard              (s, b, V/t)        this rank's columns

Cost per rank, of a layer, for micro-batch b and a heads. Activations are in bytes, for 16 bits
(Korthikanti et al., §4). Of these, 5as²b are scores, which fused attention does not keep.

                            elements sent, × (t-1)/t    activations
    one device              0                           sbh (34 + 5as/h)
    tensor parallel         8bsh                        sbh (10 + 24/t + 5as/(ht))
    and sequence parallel   10bsh + 12h                 sbh (34 + 5as/h) / t

An all-reduce of n elements sends 2n, and a gather or a reduce-scatter n, also × (t-1)/t:

                                                sequence parallelism
                            forward  backward   forward  backward
    each of the two pairs   2bsh     2bsh       2bsh     3bsh     X is gathered again, not kept
    norms, row biases                                    12h      an all-reduce of 6h gradients
    outside of layers:
    embedding               2bsh                2bsh     bsh      an all-reduce also before x_part
    head                             2bsh       bsh      2bsh
    loss                    6bs                 6bs

Read section 1 for the idea (12 minutes), to section 4 for the technique (33), and the rest to use
it as a library (81).

Run:      torchrun --nproc-per-node 2 tensor_parallel.py [--sequence-parallel] [--idea]
Papers:   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053
          Korthikanti et al. 2022, sequence parallelism, arXiv 2205.05198
Mirrors:  megatron.core.tensor_parallel; torch.distributed.tensor.parallel.parallelize_module
Left out: more ranks than key and value heads; max_norm and scale_grad_by_freq of an embedding;
          hooks of parameters' gradients; gradients of gradients through column layers and the loss
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import fnmatch
import json
import math
import os
import signal
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch 2.13 renames the function, and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# --------------------------------------------------------------------------------------------------
# 1. The idea: operators f and g, each of which is the other's gradient, and layers that use them.


def identity(x, process_group):
    return x


def all_reduce(x, process_group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group)
    return total


class Conjugate(Function):
    """Applies `collective` in forward, and `conjugate` to the gradient in backward."""

    @staticmethod
    def forward(ctx, x, collective, conjugate, process_group):
        check_member(process_group)
        ctx.swapped = (conjugate, collective, process_group)
        return collective(x, process_group)

    @staticmethod
    def backward(ctx, grad):
        # apply(), so that these operators can be differentiated twice
        return Conjugate.apply(grad, *ctx.swapped), None, None, None


def copy_to_region(x, process_group=None):
    """f: return x. Every rank uses x, so the gradient of x is the sum of all ranks' gradients."""
    return Conjugate.apply(x, identity, all_reduce, process_group)


def reduce_from_region(x, process_group=None):
    """g: return the sum of all ranks' x.

    All ranks compute the same loss from the sum, so each has the gradient of the sum. It is also
    the gradient of each term. So backward passes it on unchanged.
    """
    return Conjugate.apply(x, all_reduce, identity, process_group)


def parallel_mlp(x, A_shard, B_shard, process_group=None):
    """GELU(x A) B for this rank's columns of A and rows of B. This is the whole idea.

    Here a matrix is (inputs, outputs). A_shard is A.chunk(t, dim=1)[rank], and B_shard is
    B.chunk(t, dim=0)[rank]. Attention has this rank's heads in place of GELU.
    """
    x = copy_to_region(x, process_group)
    y_shard = F.gelu(x @ A_shard)  # (…, size/t)
    return reduce_from_region(y_shard @ B_shard, process_group)


# The same as two layers. A weight is (outputs, inputs), as that of nn.Linear.


def column_linear(x, weight_shard, bias_shard=None, process_group=None):
    """The first matrix of a pair. Return (…, out/t): this rank's outputs, from the whole x."""
    x = copy_to_region(x, process_group)
    return F.linear(x, weight_shard, bias_shard)


def row_linear(x_shard, weight_shard, bias=None, process_group=None):
    """The second matrix. Return the whole output, from x_shard (…, in/t), this rank's inputs."""
    y = reduce_from_region(F.linear(x_shard, weight_shard), process_group)
    return y if bias is None else y + bias  # after the sum, so that the bias counts once


# --------------------------------------------------------------------------------------------------
# 2. Sequence parallelism: another f and another g. Between the pairs, each rank has x_part, 1/t of
# the positions, in place of x. Dimension 0 is the sequence.


def gather_from_sequence(x_part, process_group=None):
    """f: return the whole sequence. All ranks use it, so backward adds up their gradients."""
    return Conjugate.apply(x_part, all_gather, reduce_scatter, process_group)


def reduce_scatter_to_sequence(x, process_group=None):
    """g: return this rank's part of the sum of all ranks' x."""
    return Conjugate.apply(x, reduce_scatter, all_gather, process_group)


def all_gather(x_part, process_group):
    x, work = start_all_gather(x_part, process_group)
    work.wait()
    return x


def start_all_gather(x_part, process_group):
    """Return x, which is complete after work.wait(), and work."""
    world_size = dist.get_world_size(process_group)
    x = x_part.new_empty(world_size * len(x_part), *x_part.shape[1:])
    work = all_gather_single(x, x_part.contiguous(), group=process_group, async_op=True)
    return x, work


def reduce_scatter(x, process_group):
    received, work = start_reduce_scatter(x, process_group)
    work.wait()
    return received.sum(0)


def start_reduce_scatter(x, process_group):
    """Return `received` and work. After work.wait(), received.sum(0) is this rank's result.

    An all-to-all on every backend, because gloo's reduce_scatter sends as much as an all-reduce.
    """
    world_size = dist.get_world_size(process_group)
    check_divides("positions", len(x), world_size)
    parts = x.unflatten(0, (world_size, -1)).contiguous()  # (t, s/t, …): one for each rank
    received = torch.empty_like(parts)  # (t, s/t, …): each rank's x at this rank's positions
    work = dist.all_to_all_single(received, parts, group=process_group, async_op=True)
    return received, work


def scatter_to_sequence(x, process_group=None):
    """Return this rank's part of an x that all ranks have.

    The model calls it once, after the embeddings of tokens and positions have been added up. Every
    rank has computed the whole x, so it needs the gradient of the whole, but it goes on with its
    part alone. So backward gathers the gradients of the parts.
    """
    return Conjugate.apply(x, own_part, all_gather, process_group)


def own_part(x, process_group):
    world_size = dist.get_world_size(process_group)
    # Features, if scatter_to_region() of section 6 has moved them to dimension 0.
    check_divides("positions or features", len(x), world_size)
    parts = x.chunk(world_size)
    return parts[dist.get_rank(process_group)].clone()  # a view would keep the whole x in memory


# --------------------------------------------------------------------------------------------------
# 3. The layers: how the parameters of a plain layer are cut, and a column layer that computes while
# it sends. As above, x is the whole, x_part is this rank's positions, and x_shard and y_shard are
# this rank's features.


class ParallelLayer(nn.Module):
    """A plain layer whose parameters are this rank's shards, under their old names.

        ColumnParallelLinear.from_full(linear)          a copy of an nn.Linear, of this class
        ColumnParallelLinear.from_full(qkv, stack=3)    of three stacked matrices: q, k and v

    For each parameter in split_dims the copy has what cut() returns. The library (section 6) sets

        process_group, rank, world_size
        sequence_parallel    whether the pair begins and ends with x_part
        size                 of the split dimension in the whole layer, for example V
        sizes                of the stacked matrices, for example [4, 4, 4]; else of the one matrix
    """

    split_dims = {}  # parameter: the dimension that is cut; every rank has the others whole

    @classmethod
    def from_full(cls, plain, **options):
        return shards_of(plain, cls, **options)

    def cut(self, name, whole):
        """Return this rank's part of each matrix, so that it has the same heads of q, k and v:

        whole     q q q q   k k k k   v v v v
        rank 0    q q       k k       v v
        rank 1        q q       k k       v v
        """
        dim = self.split_dims[name]
        matrices = whole.split(self.sizes, dim)
        parts = [matrix.chunk(self.world_size, dim)[self.rank] for matrix in matrices]
        return torch.cat(parts, dim)

    is_transposed = False  # True for transformers' Conv1D, whose weight is (inputs, outputs)

    def matrix(self):
        """Return this rank's shard of the weight, as (outputs, inputs)."""
        return self.weight.T if self.is_transposed else self.weight


class ColumnParallelLinear(ParallelLayer):
    """nn.Linear with its outputs split: an x of (…, in) gives y_shard (…, out/t).

    The input is the whole x, or with `sequence_parallel` this rank's x_part.
    """

    split_dims = {"weight": 0, "bias": 0}

    def forward(self, x):
        y_shard = ColumnLinear.apply(x, self.matrix(), self.bias, self)
        # F.linear may have returned a view. PyTorch forbids changing a view in place if a Function
        # has returned it. This makes it an ordinary result, with the same memory.
        return torch.ops.aten._unsafe_view(y_shard, y_shard.shape)


class ColumnLinear(Function):
    """The same as column_linear(), but backward computes while it sends.

    The input is x, or x_part. With sequence parallelism, backward gathers x_part again, so that x
    need not be kept (Korthikanti et al., §4.2.2). This is backward, from left to right in time:

                    input is x               input is x_part
        sends                  grad_x        x_part    grad_x
        computes    grad_x     grad_weight   grad_x    grad_weight
    """

    @staticmethod
    def forward(ctx, input, weight_shard, bias_shard, layer):
        ctx.layer = layer
        ctx.save_for_backward(input, weight_shard)
        # Autograd is off in here, so the gathered x is freed.
        x = all_gather(input, layer.process_group) if layer.sequence_parallel else input
        return F.linear(x, weight_shard, bias_shard)

    @staticmethod
    def backward(ctx, grad_y_shard):
        check_no_second_derivative()
        input, weight_shard = ctx.saved_tensors
        x = input
        group = ctx.layer.process_group
        sequence_parallel = ctx.layer.sequence_parallel
        if sequence_parallel:
            x, gathering = start_all_gather(input, group)
        dtype = grad_y_shard.dtype  # under autocast 16 bits; x and the weight may be in fp32
        grad_x = grad_y_shard @ weight_shard.to(dtype)  # this rank's term of the sum
        if sequence_parallel:
            received, sending = start_reduce_scatter(grad_x, group)
            gathering.wait()
        else:
            sending = dist.all_reduce(grad_x, group=group, async_op=True)  # in place
        grad_rows = grad_y_shard.reshape(-1, len(weight_shard))
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad_rows.t() @ x.to(dtype).reshape(-1, x.shape[-1])
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        sending.wait()
        grad_input = received.sum(0) if sequence_parallel else grad_x
        return grad_input, grad_weight, grad_bias, None  # autograd casts to inputs' dtypes


class RowParallelLinear(ParallelLayer):
    """nn.Linear with its inputs split: x_shard (…, in/t) gives a y of (…, out).

    It returns the whole y, or with `sequence_parallel` this rank's y_part.
    """

    split_dims = {"weight": 1}

    def forward(self, x_shard):
        g = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
        y = g(F.linear(x_shard, self.matrix()), self.process_group)
        if self.bias is None:
            return y
        bias = self.bias
        if self.sequence_parallel:
            # A rank adds the bias at its own positions only. f adds up the gradients of the bias.
            bias = copy_to_region(bias, self.process_group)
        return y + bias.to(y.dtype)  # under autocast the dtypes differ


# --------------------------------------------------------------------------------------------------
# 4. The vocabulary: a rank has some rows of the embedding and some columns of the logits, which are
# never gathered. The head is a ColumnParallelLinear. If t does not divide V, section 6 adds rows of
# zeros to the weights, and makes their logits -inf.


class VocabParallelEmbedding(ParallelLayer):
    """nn.Embedding with its rows split. All ranks pass the same tokens, and return the same x."""

    split_dims = {"weight": 0}

    def forward(self, tokens):
        check_tokens(tokens, self.size)  # V, without padding
        row, is_local = locate(tokens, self.rank, len(self.weight))
        x = F.embedding(row, self.weight).masked_fill(~is_local.unsqueeze(-1), 0.0)
        return reduce_from_region(x, self.process_group)


def locate(tokens, rank, size):
    """Each rank has `size` rows. Return each token's row on `rank`, and whether it is there.

    The row of other tokens is 0.
    """
    row = tokens - rank * size
    is_local = (row >= 0) & (row < size)
    return row.where(is_local, 0), is_local


class VocabParallelCrossEntropy(Function):
    """For each token, loss = log Σ exp(logits - maximum) - (logits[target] - maximum).

    Without the maximum, exp() could overflow. One all-reduce finds it. Another adds up two numbers
    per token: Σ exp() over this rank's columns, and logits[target] - maximum, or 0 on ranks without
    the target.
    vocab_parallel_cross_entropy(), in section 5, adds ignored tokens and label smoothing.
    """

    @staticmethod
    def forward(ctx, logits_shard, target, process_group):
        target = target.unsqueeze(-1)
        rank = dist.get_rank(process_group)
        column, is_local = locate(target, rank, logits_shard.shape[-1])
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.amax(-1, keepdim=True).contiguous()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, process_group)
        own_target = (logits.gather(-1, column) - maximum).where(is_local, 0.0)
        exp = (logits - maximum).exp_()
        sums = torch.stack((exp.sum(-1, keepdim=True), own_target))
        total, of_target = all_reduce(sums, process_group)
        loss = total.log() - of_target
        # The gradient of the logits is softmax, minus 1 at the target. It takes the memory of exp.
        grad_logits = exp.div_(total)
        grad_logits.scatter_add_(-1, column, -is_local.to(total.dtype))
        ctx.save_for_backward(grad_logits)  # all that is kept: 4bs V/t bytes in fp32
        return loss.squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        check_no_second_derivative()
        (grad_logits,) = ctx.saved_tensors
        return grad_logits * grad.unsqueeze(-1), None, None


# A training step of sections 1 to 4. All ranks read the same tokens, and start with the same seed:
#
#     embedding        all-reduce; with sequence parallelism, scatter_to_sequence() makes x x_part
#     each layer       twice x + pair(norm(x)), where a pair is f, A, GELU or attention, B, g
#     norm, head       f, A
#     loss             two all-reduces
#     backward         the same in reverse order, with the conjugates
#     optimizer        on the shards, and on what is whole, which stays equal on all ranks
#
# A norm of x_part has only a part of its gradient. SumsGradients, in section 7, applies f to its
# parameters, so backward adds the parts up. Dropout of x_part or of a shard needs another mask on
# each rank: section 7 draws it.


# --------------------------------------------------------------------------------------------------
# 5. The library: what a training loop calls.


def parallelize(module, plan, process_group=None, sequence_parallel=False):
    """Make layers of `module` this rank's shards of them, in place. Return the module.

    `plan` is {name of a layer, or a pattern like "layers.*.linear1": kind}. The kinds:

    "column", "row"     the first and the second matrix of a pair: nn.Linear, transformers' Conv1D
    "qkv", "swiglu"     a first matrix that stacks q, k and v, or gate and up, all equal in size
    (2048, 512, 512)    a first matrix that stacks matrices of these sizes
    "vocab"             an embedding or a head
    "dropout"           a dropout inside a pair; with `sequence_parallel` also between the pairs
    "norm"              a norm between the pairs, only needed with `sequence_parallel`
    "replicated_with_grad_allreduce"
                        a module inside a pair that is not split, such as Qwen3's q_norm

    Seed all ranks alike before the model is made. If plans or weights differ, every rank raises
    ValueError. With `sequence_parallel` call scatter_to_sequence() after the embedding.

    Mistakes without an error:
    - "qkv" for grouped-query attention cuts the matrix into thirds. Give the sizes.
    - A rank has fewer heads. A view with the whole model's num_heads is no error, but makes thinner
      heads, or shorter sequences. Write view(…, -1, head_dim), or divide the attribute by t after
      parallelize(): num_heads of Whisper, n_heads of T5, split_size of GPT-2.
    - "dropout" on a residual without `sequence_parallel` draws another mask on each rank.
    - Without "replicated_with_grad_allreduce" replicas drift apart, which check_input() does not
      find under FSDP.
    """
    facts = describe(module, plan, sequence_parallel)
    what = "plan and weights (seed all ranks alike before the model is made)"
    check_same_on_all_ranks(what, facts, process_group)
    split_by_plan(module, plan, process_group, sequence_parallel)
    return module


def vocab_parallel_cross_entropy(
    logits_shard,
    target,
    process_group=None,
    ignore_index=-100,
    label_smoothing=0.0,
    vocab_size=None,
):
    """F.cross_entropy(logits, target, reduction="none") for a logits_shard of (…, V/t).

    `target` is (…) and the same on all ranks. The loss is (…), in float32 or float64.
    Columns from `vocab_size` on are padding, and never count. By default it is the size of the head
    in the graph of the logits, or under no_grad() of the last head that ran, or all columns count.
    """
    check_loss_arguments(logits_shard, target, label_smoothing, vocab_size, process_group)
    columns = logits_shard.shape[-1]
    V = vocab_size or size_of_head(logits_shard, columns * dist.get_world_size(process_group))
    ignored = target == ignore_index
    target = target.masked_fill(ignored, 0)
    check_tokens(target, V)
    rank = dist.get_rank(process_group)
    words_shard = logits_shard[..., : max(V - rank * columns, 0)]
    padding = columns - words_shard.shape[-1]
    if padding:
        logits_shard = F.pad(words_shard, (0, padding), value=-math.inf)
    loss = VocabParallelCrossEntropy.apply(logits_shard, target, process_group)
    if label_smoothing:
        # (1 - ε) loss - ε mean(log softmax) is loss + ε (logits[target] - mean(logits)).
        column, is_local = locate(target.unsqueeze(-1), rank, columns)
        of_target = logits_shard.gather(-1, column).where(is_local, 0.0).squeeze(-1)
        above_mean = of_target - words_shard.sum(-1, dtype=loss.dtype) / V
        loss = loss + label_smoothing * reduce_from_region(above_mean, process_group)
    # On a GPU check_tokens() does not raise: the product makes loss and gradient NaN.
    loss = loss * torch.ones_like(loss).masked_fill(is_outside(target, V), math.nan)
    return loss.masked_fill(ignored, 0.0)


@torch.no_grad()
def clip_grad_norm_(module, max_norm, process_group=None, norm_type=2.0):
    """Clip by the norm of the whole model's gradients, and return it. All ranks call this."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: use a positive number, or inf")
    of_layers = {getattr(layer, own_name) for _, layer, own_name in split_parameters(module)}
    device = next((parameter.device for parameter in module.parameters()), None)
    norms = [torch.zeros((), device=device)]  # of this rank's gradients
    for parameter in module.parameters():
        if parameter.grad is not None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            norm = torch.linalg.vector_norm(parameter.grad, norm_type, dtype=dtype)
            # Every rank has the gradient of a parameter that is not split. Count it once. Split
            # modules of other files have only the attribute, which a copied parameter has lost.
            is_split = parameter in of_layers or hasattr(parameter, "differ_between_ranks")
            copies = 1 if is_split else dist.get_world_size(process_group)
            norms.append(norm / copies ** (1 / norm_type))
    own_norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    norms_of_ranks = gather_from_region(own_norm.view(1), process_group)
    total_norm = torch.linalg.vector_norm(norms_of_ranks, norm_type)
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, total_norm)
    return total_norm


def full_state_dict(module):
    """The plain module's state_dict(), on every rank. All ranks call this."""
    state_dict = dict(module.state_dict())
    for name, layer, own_name in split_parameters(module):
        state_dict[name] = unshard(layer, state_dict[name], layer.split_dims[own_name])
    return state_dict


def load_full_state_dict(module, state_dict):
    """Load this rank's shards of a plain module's state dict, or of full_state_dict()."""
    state_dict = dict(state_dict)
    for name, layer, own_name in split_parameters(module):
        whole = state_dict[name]
        if whole.shape[layer.split_dims[own_name]] != layer.size:
            raise ValueError(
                f"{name}: {whole.shape} in state_dict; the split dimension must be {layer.size}"
            )
        state_dict[name] = shard(layer, own_name, whole)
    return module.load_state_dict(state_dict)


# --------------------------------------------------------------------------------------------------
# 6. The library: how a layer is split.


class ColumnParallelEmbedding(ParallelLayer):
    """nn.Embedding with its columns split: T5's relative_attention_bias has one per head."""

    split_dims = {"weight": 1}

    def forward(self, tokens):
        return F.embedding(tokens, self.weight, self.padding_idx)


# (kind, class of the plain layer): class of the parallel layer
LAYERS = {
    ("column", nn.Linear): ColumnParallelLinear,
    ("column", nn.Embedding): ColumnParallelEmbedding,
    ("row", nn.Linear): RowParallelLinear,
    ("vocab", nn.Linear): ColumnParallelLinear,
    ("vocab", nn.Embedding): VocabParallelEmbedding,
}


def split_by_plan(module, plan, *options):
    layers = dict(module.named_modules(remove_duplicate=False))
    kinds = {}  # layer: its name and its kind
    for pattern, kind in plan.items():
        names = fnmatch.filter(layers, pattern)
        if not names:
            raise ValueError(f"no layer is named {pattern!r}; named_modules() has the names")
        kinds |= {layers[name]: (name, kind) for name in names}
    for layer, (name, kind) in kinds.items():
        try:
            change_kind(layer, kind, *options)
        except ValueError as error:
            raise ValueError(f"{name!r} cannot be {kind!r}: {error}") from None
    take_shards(module)
    for layer in layers.values():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # collectives do not take nested tensors


def change_kind(layer, kind, process_group, sequence_parallel):
    """Make a plain layer one of this kind, in place."""
    if kind == "dropout" and type(layer) is nn.Dropout:
        add_base(layer, ParallelDropout, process_group)
        return  # a dropout of another class ends in the error below
    if kind in ("norm", "replicated_with_grad_allreduce"):
        if [*layer.children(), *layer.buffers()] or isinstance(layer, ParallelLayer):
            raise ValueError(f"{layer} has buffers or layers in it, or is split")
        if kind != "norm" or sequence_parallel:
            add_base(layer, SumsGradients, process_group)
        return
    stack = kind if isinstance(kind, tuple) else {"qkv": 3, "swiglu": 2}.get(kind, 1)
    if stack != 1:
        kind = "column"  # of several matrices
    plain_class = nn.Linear if is_conv1d(layer) else type(layer)
    if (kind, plain_class) not in LAYERS:
        raise ValueError(f"it is {layer}; use one of {list(LAYERS)}")
    check_plain(layer)
    parallel_class = LAYERS[kind, plain_class]
    pad = kind == "vocab"
    split_layer(layer, parallel_class, process_group, sequence_parallel, stack, pad)


def shards_of(plain, parallel_class, **options):
    """Return a parallel layer with this rank's shards of `plain`, an nn.Linear or nn.Embedding."""
    check_plain(plain)  # a copy would lack its hooks
    layer = copy.deepcopy(plain)
    split_layer(layer, parallel_class, **options)
    take_shards(layer)
    return layer


def split_layer(
    layer,
    parallel_class,
    process_group=None,
    sequence_parallel=False,
    stack=1,  # the number of stacked matrices, if they are equal in size, or their sizes
    pad=False,  # append rows of zeros, up to a multiple of the number of ranks
    gather_output=False,
    input_is_parallel=True,
):
    """Make a plain layer a parallel one, in place. take_shards() cuts its parameters."""
    check_member(process_group)
    pad = pad or parallel_class is VocabParallelEmbedding
    if stack != 1 and (pad or not input_is_parallel):
        raise ValueError(f"{stack=} excludes pad=True and input_is_parallel=False")
    if is_conv1d(layer):
        layer.is_transposed = True
        split_dims = parallel_class.split_dims
        layer.split_dims = split_dims | {"weight": 1 - split_dims["weight"]}
    layer.__class__ = parallel_class
    layer.process_group = process_group
    layer.sequence_parallel = sequence_parallel
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    layer.differ_between_ranks = ranks  # so that DDP, ZeRO and FSDP do not average over them
    layer.world_size = len(ranks)
    layer.rank = dist.get_rank(process_group)
    layer.size = layer.weight.shape[layer.split_dims["weight"]]  # of the whole, without padding
    layer.padding = -layer.size % len(ranks) if pad else 0  # the number of rows of zeros
    layer.sizes = sizes_of_matrices(layer, stack)
    add_hooks(layer, pad, gather_output, input_is_parallel)


def sizes_of_matrices(layer, stack):
    whole = layer.size + layer.padding
    sizes = [whole // stack] * stack if isinstance(stack, int) else list(stack)
    if sum(sizes) != whole:
        raise ValueError(f"matrices of {sizes} do not add up to {whole}")
    for size in sizes:
        check_divides("features", size, layer.world_size)
    return sizes


def take_shards(module):
    """Put this rank's shard into each parameter that is split. Tied parameters stay tied."""
    splits = {}  # parameter: how its first layer splits it, or None
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            dim = getattr(layer, "split_dims", {}).get(name)
            split = None if dim is None else (dim, layer.sizes)
            if splits.setdefault(parameter, split) != split:
                raise ValueError(f"{path}.{name} is tied, but the plan splits it in two ways")
            is_cut = hasattr(parameter, "differ_between_ranks")  # by a layer that shares it
            if split and not is_cut:
                parameter.data = shard(layer, name, parameter.data)
                parameter.differ_between_ranks = layer.differ_between_ranks


def shard(layer, name, whole):
    """Return this rank's shard of a whole parameter, to which rows of zeros are added."""
    dim = layer.split_dims[name]
    padded = F.pad(whole.movedim(dim, -1), (0, layer.padding)).movedim(-1, dim)
    return layer.cut(name, padded)


def split_parameters(module):
    """For each parameter that is split, yield its name in `module`, its layer, its name there."""
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for name in layer.split_dims:
                if getattr(layer, name) is not None:
                    yield f"{path}.{name}".strip("."), layer, name


def unshard(layer, shard, dim):
    """Return the whole of a parameter, gradient or output, which is split along `dim`."""
    parts = shard.split([size // layer.world_size for size in layer.sizes], dim)
    matrices = [gather_from_region(part, layer.process_group, dim) for part in parts]
    return torch.cat(matrices, dim).narrow(dim, 0, layer.size)  # without the padding


def scatter_to_region(x, process_group=None, dim=-1):
    """Return this rank's part of an x that all ranks have."""
    return scatter_to_sequence(x.movedim(dim, 0), process_group).movedim(0, dim)


def gather_from_region(x_shard, process_group=None, dim=-1):
    """Return the whole. Unlike after gather_from_sequence(), all ranks go on to compute the same.

    So their gradients are equal, and are not summed.
    """
    whole = Conjugate.apply(x_shard.movedim(dim, 0), all_gather, own_part, process_group)
    return whole.movedim(0, dim)


def add_hooks(layer, pad, gather_output, input_is_parallel):
    """Make a layer scatter or check its input, hide its padding, and gather its output."""
    if isinstance(layer, RowParallelLinear):
        layer.register_forward_pre_hook(check_input if input_is_parallel else scatter_input)
    if isinstance(layer, ColumnParallelLinear) and pad:
        layer.register_forward_hook(after_head)
    if isinstance(layer, VocabParallelEmbedding):
        # First: the user's hooks see its x.
        layer.register_forward_hook(after_embedding, prepend=True, with_kwargs=True)
    if gather_output:
        layer.register_forward_hook(gather_output_of)


def scatter_input(layer, inputs):
    return scatter_to_region(*inputs, layer.process_group)


def gather_output_of(layer, inputs, y_shard):
    return unshard(layer, y_shard, -1)


latest = weakref.WeakValueDictionary()  # "head": the one that ran last


@torch.no_grad()
def after_head(layer, inputs, logits_shard):
    """Make the logits of padding -inf, which softmax ignores."""
    first_of_padding = layer.size - layer.rank * logits_shard.shape[-1]  # negative: all are padding
    logits_shard[..., max(0, first_of_padding) :] = -math.inf
    if not torch.compiler.is_compiling():
        latest["head"] = layer


def after_embedding(layer, inputs, kwargs, x):
    """Give the row of padding_idx no gradient. On a GPU unknown tokens are NaN."""
    (tokens,) = (*inputs, *kwargs.values())
    if x.requires_grad and layer.padding_idx is not None:
        is_padding = (tokens == layer.padding_idx).unsqueeze(-1)
        x.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))
    # masked_fill() keeps the strides of x, on which the mask of dropout depends. where() may not.
    return x.masked_fill(is_outside(tokens, layer.size).unsqueeze(-1), math.nan)


def size_of_head(logits_shard, columns):
    """Return the vocabulary's size: that of the head, or the number of all ranks' columns.

    The head is in the graph: ColumnLinear's nodes have the layer that forward has set on ctx. If it
    is not, as under no_grad(), it is the one that ran last.
    """
    nodes = nodes_inside_pair([logits_shard])
    heads = [node.layer for node in nodes if hasattr(node, "layer")] or latest.values()
    for head in heads:
        if isinstance(head, ParallelLayer) and head.size + head.padding == columns:
            return head.size
    return columns


def nodes_inside_pair(tensors):
    """Walk the graph from `tensors` back to the nearest column layers or operators."""
    waiting = [tensor.grad_fn for tensor in tensors]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ not in ("ColumnLinearBackward", "ConjugateBackward"):
            waiting += [next_node for next_node, _ in node.next_functions]
    return seen - {None}


# --------------------------------------------------------------------------------------------------
# 7. The library: modules that are not split.


def add_base(module, base, process_group):
    """Make `base` the first base of the module's class, in place."""
    if not isinstance(module, base):
        plain_class = type(module)
        module.__class__ = type(plain_class.__name__, (base, plain_class), {})
        module.process_group = process_group


class SumsGradients:
    """For a module that sees some positions, or inside a pair some heads: f sums its gradients."""

    def forward(self, *args, **kwargs):
        parameters = self._parameters
        self._parameters = {
            name: parameter if parameter is None else copy_to_region(parameter, self.process_group)
            for name, parameter in parameters.items()
        }
        try:
            return super().forward(*args, **kwargs)
        finally:  # a checkpoint may stop its recomputation in here, by raising
            self._parameters = parameters


class ParallelDropout:
    """For nn.Dropout: each rank draws its own mask."""

    def forward(self, x):
        with parallel_region(self.process_group, self.training and self.p > 0):
            return super().forward(x)


@contextmanager
def parallel_region(process_group=None, enabled=True):
    """Random numbers differ by rank inside the region, and agree again after it.

    All ranks need the same random state before it: seed them alike. The default generator draws the
    region's seed. A checkpoint restores it, and so repeats the masks.
    """
    if dist.get_world_size(process_group) == 1 or not enabled:
        yield
        return
    seed = torch.randint(2**48, (), device="cpu").item()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        torch.manual_seed(seed + dist.get_rank(process_group))
        yield


# --------------------------------------------------------------------------------------------------
# 8. The library: where a shard lies in its whole parameter, for checkpoints.


class Box(NamedTuple):
    """A block of a whole parameter, which is consecutive in this rank's flattened shard."""

    first: int  # the index of its first element in the flattened shard
    shape: list
    whole_shape: list  # of the parameter
    offset: list  # the indices of its first element in the whole parameter


def boxes_of(layer, name, shape):
    """Return the boxes of this rank's shard, which has this `shape`: one for each matrix."""
    shape = list(shape)
    dim = getattr(layer, "split_dims", {}).get(name)
    if dim is None:
        return [Box(0, shape, shape, [0] * len(shape))]
    if dim > 0 and (len(layer.sizes) > 1 or layer.padding):
        raise ValueError(
            f"{name} has several matrices, or padding, along dimension {dim}, so they are "
            "interleaved in memory; split an nn.Linear, or save full_state_dict()"
        )
    whole_shape = shape.copy()
    whole_shape[dim] = layer.size
    boxes = []
    start = 0  # of the matrix in the whole, along dim
    for size in layer.sizes:
        part_size = size // layer.world_size
        first_in_whole = start + layer.rank * part_size
        size_of_box = min(part_size, layer.size - first_in_whole)  # without the padding
        if size_of_box > 0:
            first = start // layer.world_size * math.prod(shape[dim + 1 :])
            box_shape = shape.copy()
            box_shape[dim] = size_of_box
            offset = [0] * len(shape)
            offset[dim] = first_in_whole
            boxes.append(Box(first, box_shape, whole_shape, offset))
        start += size
    return boxes


# --------------------------------------------------------------------------------------------------
# 9. The library: checks.


def check_divides(what, size, world_size):
    if size % world_size:
        fit = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"{size} {what} are not divisible by {world_size} tensor-parallel ranks; "
            f"use a world size in {fit}"
        )


def is_conv1d(plain):
    """Whether `plain` is transformers' Conv1D: an nn.Linear with a weight of (inputs, outputs)."""
    return type(plain).__name__ == "Conv1D"


def check_plain(layer):
    """Raise ValueError if a parallel layer would not do all that the plain layer does."""
    hooks = [[p._backward_hooks, p._post_accumulate_grad_hooks] for p in layer.parameters()]
    options = [getattr(layer, name, None) for name in ("max_norm", "scale_grad_by_freq")]
    if any(map(any, hooks)) or any(options) or "weight" not in layer._parameters:
        raise ValueError(
            "gradient hooks of parameters, max_norm, scale_grad_by_freq, and a weight that is "
            "not a parameter are left out"
        )


def is_outside(tokens, V):
    return (tokens < 0) | (tokens >= V)


def check_tokens(tokens, V):
    """Raise IndexError on the CPU if tokens are outside a vocabulary of V.

    On a GPU the host would wait for this, so there their embedding, loss and gradient are NaN.
    """
    if tokens.is_cpu:
        outside = tokens[is_outside(tokens, V)]
        if len(outside):
            raise IndexError(
                f"tokens {outside.tolist()} are not in a vocabulary of {V}; use 0 to {V - 1}"
            )


def check_input(layer, inputs):
    """Raise ValueError if a parameter is between the node that sums gradients and a row layer.

    As a hook this also turns off the fast path of nn.TransformerEncoderLayer in evaluation, which
    would take the shards for whole weights.
    """
    for node in nodes_inside_pair(inputs):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "differ_between_ranks"):
            raise ValueError(
                f"a parameter of {tuple(parameter.shape)} is between a column and a row layer, so "
                "a rank has only a part of its gradient; give its module the kind "
                "'replicated_with_grad_allreduce'. If it is this rank's slice of a parameter, set "
                "its attribute differ_between_ranks, a list of the ranks that have slices"
            )


def check_loss_arguments(logits_shard, target, label_smoothing, vocab_size, process_group):
    check_member(process_group)
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(f"{target.shape=}, {logits_shard.shape=}: each token needs one target")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=}: use a number from 0 to 1")
    columns = logits_shard.shape[-1] * dist.get_world_size(process_group)
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise ValueError(f"{vocab_size=}: the ranks have {columns} columns; use 1 to {columns}")


def check_no_second_derivative():
    """Raise RuntimeError in a backward() under create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of gradients are left out; use layers that are not split")


def describe(module, plan, sequence_parallel):
    """Return what must be the same on all ranks."""
    facts = [f"plan {plan}", f"{sequence_parallel=}"]
    for name, parameter in module.named_parameters():
        has_no_sum = parameter.is_meta or hasattr(parameter, "differ_between_ranks")
        total = None if has_no_sum else parameter.sum().item()
        facts.append(f"{name} {tuple(parameter.shape)} {parameter.dtype} with sum {total}")
    return facts


def check_member(process_group):
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")


def check_same_on_all_ranks(what, facts, process_group=None):
    """Raise ValueError on all ranks of the group unless they give the same `facts`, in order.

    Collectives of different sizes or dtypes abort the process or return garbage, so the ranks
    compare what they are about to communicate. What only one rank finds wrong is a fact, too.
    """
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")
    mine = [f"{number}: {fact}" for number, fact in enumerate(facts)]
    everyone = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            here = sorted(set(theirs).difference(everyone[0]))
            there = sorted(set(everyone[0]).difference(theirs))
            raise ValueError(
                f"all ranks must have the same {what}: rank {rank} has {here}, rank 0 {there}"
            )


# --------------------------------------------------------------------------------------------------
# Demo.


def main():
    flag = {"action": "store_true", "help": "split the sequence in norms, dropout and residuals"}
    demo = Demo(__doc__, {"--sequence-parallel": flag})
    if 6 % demo.ranks:
        demo.stop(f"6 attention heads are not divisible by {demo.ranks} ranks; use 1, 2, 3 or 6")
    sequence_parallel = demo.args.sequence_parallel
    if demo.args.idea and sequence_parallel:
        demo.stop("--sequence-parallel needs section 2; leave out --idea")
    model = demo.start("tensor_parallel", parts=1)
    if demo.args.idea:
        split_by_the_idea(model)
    else:
        plan = {"0": "vocab", "*.qkv": "qkv", "*.proj": "row", "*.linear1": "column"}
        # "0" is the embedding, "5" the last norm, and "6" the head.
        plan |= {"*.linear2": "row", "*.norm?": "norm", "5": "norm", "6": "vocab"}
        parallelize(model, plan, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        # Dimension 0 is the batch here: each rank gets a part of the batch.
        model[0].register_forward_hook(lambda module, inputs, output: scatter_to_sequence(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        logits = model(inputs)
        if demo.args.idea:  # the head is whole
            loss = language_loss(logits, targets)
        else:
            loss = vocab_parallel_cross_entropy(logits, targets).mean()
        loss.backward()
        optimizer.step()
        return loss

    def gather_whole():
        return whole_gradients(model).values(), full_state_dict(model).values()

    join = partial(join_naive, model, demo.model)
    demo.train(step, join if demo.args.idea else gather_whole)
    formula, elements = sent_by_formula(demo)
    sent = elements * model[0].weight.itemsize
    return demo.report(held(model.parameters(), optimizer), formula, sent)


def sent_by_formula(demo):
    """What a rank sends per step, as a formula and in elements.

    With sequence parallelism, scatter_to_sequence() and the head send bsh more each, and the last
    norm sends 4h.
    """
    t = demo.ranks
    l = 4
    h = 192
    bs = demo.batch(0)[0].numel()
    if demo.args.idea:
        formula = "8l bsh"
        sent = 8 * l * bs * h
    elif demo.args.sequence_parallel:
        formula = "(10l+6)bsh + 6bs + (12l+4)h"
        sent = (10 * l + 6) * bs * h + 6 * bs + (12 * l + 4) * h
    else:
        formula = "(8l+4)bsh + 6bs"
        sent = (8 * l + 4) * bs * h + 6 * bs
    return f"({formula})(t-1)/t", sent * (t - 1) / t


def whole_gradients(module):
    """{name: whole gradient}, on every rank."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, layer, own_name in split_parameters(module):
        if gradients.get(name) is not None:
            dim = layer.split_dims[own_name]
            gradients[name] = unshard(layer, gradients[name], dim)
    return gradients


class Naive(nn.Module):
    """A layer of the plain model: this rank's shards, and a function of section 1 as forward."""

    def __init__(self, plain, function, dims, matrices=1):
        super().__init__()
        self.function = function
        self.dims = dims  # parameter: the dimension that is split
        self.matrices = matrices  # how many are stacked, q, k and v for example
        for name, whole in plain.named_parameters():
            shard = self.shard(name, whole.detach()) if name in dims else whole
            self.register_parameter(name, nn.Parameter(shard))

    def forward(self, x):
        return self.function(x, self.weight, self.bias)

    def shard(self, name, whole):
        dim = self.dims[name]
        matrices = whole.movedim(dim, 0).chunk(self.matrices)
        parts = [own_part(matrix, None) for matrix in matrices]
        return torch.cat(parts).movedim(0, dim)

    def join(self, name, shard):
        if name not in self.dims:
            return shard
        dim = self.dims[name]
        parts = shard.chunk(self.matrices, dim)
        return torch.cat([gather_from_region(part, dim=dim) for part in parts], dim)


def split_by_the_idea(model):
    """Embedding, norms and head stay whole on every rank."""
    by_rows = {"weight": 0, "bias": 0}
    by_columns = {"weight": 1}
    for block in model[1:5]:
        block.qkv = Naive(block.qkv, column_linear, by_rows, matrices=3)
        block.proj = Naive(block.proj, row_linear, by_columns)
        block.linear1 = Naive(block.linear1, column_linear, by_rows)
        block.linear2 = Naive(block.linear2, row_linear, by_columns)


def join_naive(model, plain):
    """The whole gradients and parameters, in the order of the plain model."""
    gradients = []
    parameters = []
    for name, _ in plain.named_parameters():
        path, _, own_name = name.rpartition(".")
        layer = model.get_submodule(path)
        parameter = getattr(layer, own_name)
        for tensors, ours in ((gradients, parameter.grad), (parameters, parameter.detach())):
            is_naive = isinstance(layer, Naive)
            tensors.append(layer.join(own_name, ours) if is_naive else ours)
    return gradients, parameters


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


class Demo:
    """Trains with a technique, trains the same model on one device, and compares the two."""

    def __init__(self, description, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dtypes = ["float64", "float32", "bfloat16"]
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.error = self.stop
        shared = {
            "--idea": {"action": "store_true", "help": "train with section 1 alone"},
            "--steps": {"type": int, "default": steps, "help": "of training"},
            "--seed": {"type": int, "default": 0, "help": "of the model and the batches"},
            "--device": {"choices": devices, "default": devices[-1]},
            "--dtype": {"choices": dtypes, "help": "(default: that of the claim)"},
            "--data": {"metavar": "FILE", "default": argparse.__file__, "help": "to train on"},
        }
        for flag, options in (shared | (flags or {})).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.steps = f"{self.args.steps} step{'s' * (self.args.steps > 1)}"
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        gpu = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        self.device = torch.device("cpu" if self.args.device == "cpu" else f"cuda:{gpu}")
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        """End with status 2. Every rank finds the same error, so one per machine prints it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr, flush=True)
            # torchrun ends its own report with the message in this file.
            error = json.dumps({"message": f"error: {message}", "timestamp": time.time()})
            Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).write_text(error)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one ends
        os._exit(2)

    def show(self, line=""):
        if self.rank == 0:
            print(line, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Return a copy of the plain model. One device takes the batch in `parts`."""
        join_world(self.device)
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        dtype = "float64" if self.tolerance else "float32"
        if self.args.dtype not in (None, dtype, "float64"):
            self.tolerance = torch.inf  # claims nothing
        dtype = self.args.dtype or dtype
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(self.device, getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        name += " idea" if self.args.idea else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        where = f"{self.device.type}/{dist.get_backend()}"
        size = sum(map(torch.numel, self.model.parameters())) / 1e6
        self.show(f"{name} · {ranks} · {where} · {size:.1f}M parameters in {dtype} · {self.steps}")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def train(self, step, whole):
        """Compare gradients and parameters, `whole()`, after each step(inputs, targets) -> loss."""
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = []  # the largest of each tensor, in each step
        for number in range(self.args.steps):
            batch = self.batch(number)
            start = self.now()
            is_last = number + 1 == self.args.steps
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            loss = torch.tensor([x for x in losses if x is not None], dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                self.differences.append((ours - theirs).abs().max().item())
            if number % -(-self.args.steps // 3) == 0:  # three lines in all
                self.show(f"step {number + 1}/{self.args.steps}   loss {loss.item():.3f}")

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            losses.append(language_loss(self.model(x), y))
            losses[-1].backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_div_(gradients, self.parts)  # 3 parts would round differently before the sum
        self.optimizer.step()
        return [torch.stack(losses).mean().detach().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, held_here, formula, sent):
        """Print the result (docs/running.md). Return 1 if a rank differs."""
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        elif self.tolerance == torch.inf:
            verdict = f"differ by up to {largest:.0e}"
        plain = held(self.model.parameters(), self.optimizer)
        params, grads, state, *plain = (f"{size / 1e6:.1f}" for size in [*held_here, *plain])
        held_line = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device loss, gradients and parameters {verdict} over {self.steps}")
        self.show(f"held/rank   {held_line}      (1 device: {' / '.join(plain)})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


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
    """Adds up the bytes that this rank sends. Collectives count as their ring algorithms send."""

    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_uneven = name == "alltoall_base_" and args[4]  # such exchanges do not count
        if name == "send":
            self.total += args[0][0].nbytes
        elif "c10d" in func.namespace and name != "recv_" and not is_uneven:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            N = dist.ProcessGroup.unbox(group).size()
            inputs = args[0] if args[1] is group else args[1]  # outputs may come first
            # How often the inputs go around the ring. An operator that is not named counts once.
            rounds = {"allreduce_": 2, "allgather_": N, "_allgather_base_": N}.get(name, 1)
            size = sum(tensor.nbytes for tensor in tree_leaves(inputs))
            self.total += rounds * size * (N - 1) / N
        return func(*args, **(kwargs or {}))


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


def join_world(device):
    """Connect the ranks, unless they are connected: by NCCL if each has a GPU of its own."""
    if dist.is_initialized():
        return
    options = {"backend": "gloo", "timeout": timedelta(seconds=120)}
    world = dist.HashStore(), 0, 1  # without torchrun there is one rank
    if "RANK" in os.environ:
        world = next(dist.rendezvous("env://", timeout=options["timeout"]))
    store, rank, ranks = world
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A rank may see no GPU but its own, so only its UUID says whether another rank has it, too.
        store.set(f"gpu {rank}", str(torch.cuda.get_device_properties(device).uuid))
        gpus = {store.get(f"gpu {number}") for number in range(ranks)}
        if len(gpus) == ranks or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            options |= {"backend": "nccl", "device_id": device}
            os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # torch 2.7 may hang
    dist.init_process_group(store=store, rank=rank, world_size=ranks, **options)


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)
