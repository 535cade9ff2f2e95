"""Mixtral on a grid of ranks: FSDP × tensor × context × expert × pipeline parallelism at once.

This is the stack of torchtitan and DeepSeek. The pipeline splits the layers into stages. Tensor
parallelism splits the matrices of attention, and the sequence between them. Context parallelism
splits the sequence in attention, too. FSDP splits what is left of the parameters over the ranks
that have other sequences or other parts of a sequence. Experts are split over any ranks of a stage,
because all of them have other tokens. 8 ranks with --pp 2 --cp 2 --tp 2 --ep 2:

                 stage 0: embedding, blocks 1, 2            stage 1: blocks 3, 4, head
                 tp 0             tp 1                      tp 0             tp 1
    cp 0:        rank 0  ═══════  rank 1          ───→      rank 4  ═══════  rank 5
    chunks 0, 3  experts 0-3      experts 4-7               experts 0-3      experts 4-7
                   ┊                ┊                         ┊                ┊
    cp 1:        rank 2  ═══════  rank 3          ───→      rank 6  ═══════  rank 7
    chunks 1, 2  experts 0-3      experts 4-7               experts 0-3      experts 4-7

    ═══  tp: activations, in every layer. Here also ep: rows of tokens, to their experts and back
     ┊   cp: keys and values, in every layer. FSDP: parameters and gradients, once per step
    ───→ pp: activations, between stages

    rank = (((pp_rank · replicate + replicate_rank) · shard + shard_rank) · cp + cp_rank) · tp
           + tp_rank

`shard` is what is left of the world. FSDP splits a parameter over shard × cp ranks, because the
ranks of a context also need the same parameters. With --replicate there are copies of these shards.
For experts, the shard · cp · tp ranks of a stage and replica are one row, cut into runs of `ep`
neighbours. A run has all experts, and FSDP splits an expert over the ranks at the same place of all
runs (arXiv 2504.14960).

Each technique is in its own file. This file is about the places where they meet:

    loss             It is divided by the number of unmasked tokens of the whole batch. So every
                     gradient is a sum over ranks. With means, experts would need another divisor.
    norms, routers   They are whole on all tp ranks, but each tp rank has a part of the sequence.
                     Their gradients are added up over tp, once per step.
    positions        Attention gathers the sequence over tp, but not over cp.
    zigzag           cp cuts the sequence first, then tp. The length is a multiple of
                     lcm(2·cp, cp·tp).
    micro-batches    The batch is cut into them first, and then over replicas and shards. Otherwise
                     the auxiliary loss, a product of means, would depend on the grid.
    auxiliary loss   The model's loss is on the last stage. An MoE block gives its auxiliary loss
                     the gradient 1 in its own backward.
    gradient norm    It counts each element once.
    gradients        FSDP sends them after a stage's last backward.
    Muon             With --optimizer muon, each matrix of a block has an owner among the ranks of
                     the stage. The owner gathers the momentum, whatever axes split the matrix.
    documents        With --packed, every rank knows those of whole sequences: cp needs them, and
                     positions start again in each.
    checkpoint       It has the plain model's names and shapes, and loads on any other grid.

Sent per rank and step, in elements. A rank has m micro-batches of T tokens in attention, and T/t
between. h is the hidden size, K the number of key heads and d their size, k the experts per token,
Ψ the parameters in a stage's slices, and F = shard · cp:

    tp           times (t-1)/t: 5mTh in attention, 5mTh in a dense MLP, 3mTh in the embedding,
                 3mTh + 6mT in the head and the loss, 2 per element of the norms and routers.
                 With --fused-loss, which holds no logits: 2mTh + 3mTt
                 5: gather the input, scatter the output; in backward the reverse of both, and
                 the input gathered again for the weight's gradient
    cp           6mTKd/t · (c-1) in attention
    ep           4mkTh/t · (ep-1)/ep on average in an MoE layer, and counts
    pp           mTh/t to each neighbour stage
    FSDP         2Ψ(F-1)/F, and with R replicas 2Ψ/F · (R-1)/R; the same for experts

Read section 1 for the model (17 minutes), to section 3 for the technique (42), and the rest for
Muon, to save and to load (52). It takes another 20 if you do not know the files that it combines.

Run:      torchrun --nproc-per-node 8 parallel_5d.py [--model llama-tiny] [--pp 2 --cp 2 --tp 2]
Papers:   Liang et al. 2024, TorchTitan, arXiv 2410.06511; Liu et al. 2025, MoE Parallel Folding,
          2504.14960; DeepSeek-V3, 2412.19437
Mirrors:  torchtitan; Megatron-LM's MoE training
Left out: tied embeddings, dropout, shared experts, tensor parallelism inside an expert, more tp
          ranks than key heads
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import gc
import itertools
import json
import math
import os
import sys
import zlib
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import context_parallel
import data
import expert_parallel
import fsdp
import muon
import pipeline
import tensor_parallel
from activation_checkpoint import checkpoint as recompute
from context_parallel import ring_attention
from flash_attention import each_document
from linear_cross_entropy import vocab_parallel_linear_cross_entropy

# --------------------------------------------------------------------------------------------------
# 1. The model on one device: Llama, or Mixtral if it has experts. Activations are (sequence, batch,
#    hidden).

IGNORE = -100  # the target of a masked token


class Config(NamedTuple):
    layers: int = 4
    hidden: int = 64
    heads: int = 8  # of queries
    kv_heads: int = 4  # of keys and values
    ffn: int = 128  # hidden size of the MLP, or of an expert
    vocab: int = 256
    experts: int = 0  # 0: all MLPs are dense
    top_k: int = 0  # experts per token
    dense_layers: int = 0  # the first blocks, which have a dense MLP although there are experts
    theta: float = 10_000.0  # of the rotary embedding
    eps: float = 1e-5  # of the norms


MODELS = {
    "llama-tiny": Config(),
    "mixtral-tiny": Config(
        ffn=96,
        experts=8,
        top_k=2,
        theta=1e6,
    ),
    "deepseek-tiny": Config(
        ffn=96,
        experts=8,
        top_k=3,
        dense_layers=1,
        eps=1e-6,
    ),
}


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config.vocab, config.hidden)
        self.tp_group = None  # on the grid: each rank of it gets a part of the sequence

    def forward(self, tokens):  # (batch, sequence)
        x = self.word(tokens.T)
        if self.tp_group is None:
            return x
        return tensor_parallel.scatter_to_sequence(x, self.tp_group)


class Attention(nn.Module):
    """Causal attention with rotary embeddings. `qkv` stacks the matrices of q, k and v."""

    def __init__(self, config):
        super().__init__()
        self.heads = [config.heads, config.kv_heads, config.kv_heads]  # of q, of k, of v
        self.head_dim = config.hidden // config.heads
        self.theta = config.theta
        self.qkv = nn.Linear(config.hidden, sum(self.heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.cp_group = None  # on the grid: each rank of it has a part of the sequence

    def forward(self, x, documents=None, positions=None):  # both of the whole sequence, (batch, S)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).movedim(0, 2)
        t = sum(self.heads) // heads.shape[1]  # tensor-parallel ranks, each with 1/t of the heads
        q, k, v = heads.split([number // t for number in self.heads], dim=1)  # (batch, heads, S, D)
        if positions is None:
            length = q.shape[2] * (1 if self.cp_group is None else self.cp_group.size())
            positions = torch.arange(length, device=x.device)[None]
        if self.cp_group is not None:
            positions = context_parallel.split_sequence(positions, 1, self.cp_group)
        angles = rotary_angles(positions, self.head_dim, self.theta)
        q = rotate(q, angles)
        k = rotate(k, angles)
        if self.cp_group is None:
            attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            y = each_document(attend, q, k, v, None, documents)
        else:  # the tokens of all tp ranks, because qkv has gathered the sequence over tp
            y = ring_attention(
                q,
                k,
                v,
                causal=True,
                process_group=self.cp_group,
                documents=documents,
            )
        return self.proj(y.movedim(2, 0).flatten(2))


def rotary_angles(positions, D, theta):
    """Angles (batch, 1, S, D/2) for positions (batch, S) (Su et al. 2021, arXiv 2104.09864)."""
    halves = torch.arange(0, D, 2, dtype=torch.float64, device=positions.device)
    return positions[:, None, :, None] * theta ** (-halves / D)


def rotate(x, angles):
    """Rotary embedding of x (batch, heads, S, D), in halves."""
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden, config.eps)
        self.has_experts = config.experts > 0 and number > config.dense_layers
        if self.has_experts:
            self.mlp = expert_parallel.MoE(config.hidden, config.ffn, config.experts, config.top_k)
        else:
            self.mlp = MLP(config)
        self.aux_weight = 0.0  # on the grid: of the auxiliary loss of a micro-batch

    def forward(self, x, *fields):
        x = x + self.attention(self.norm1(x), *fields)
        y = self.mlp(self.norm2(x))
        if self.has_experts and self.aux_weight:
            y = WithLoss.apply(y, self.aux_weight * self.mlp.aux_loss)
        return x + y


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.linear = nn.Linear(config.hidden, config.vocab, bias=False)
        self.loss_of = None  # --fused-loss: a function of the input and the weight of the matrix

    def forward(self, x):
        x = self.norm(x)
        return self.loss_of(x, self.linear.weight) if self.loss_of else self.linear(x)


class Stage(nn.Sequential):
    """Consecutive layers of the model, given as {number: layer}."""

    def __init__(self, layers, recomputes=False):
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self.recomputes = recomputes  # backward computes the activations of the blocks again
        self.fields = None  # packed: yields (documents, positions) of one micro-batch after another

    def forward(self, x):
        fields = next(self.fields) if self.fields else ()
        for layer in self:
            if not isinstance(layer, Block):
                x = layer(x)
            else:
                x = recompute(layer, x, *fields) if self.recomputes else layer(x, *fields)
        return x


@torch.no_grad()
def build_layer(config, number, seed=0):
    """Build layer 0, the embedding; a block; or layer L + 1, the head. Each has its own seed."""
    torch.manual_seed(seed * 10_000 + number)
    if number == 0:
        layer = Embedding(config)
    elif number <= config.layers:
        layer = Block(config, number)
    else:
        layer = Head(config)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
    return layer


def plain_model(config, seed=0):
    """The whole model: (batch, sequence) tokens to (sequence, batch, vocab) logits."""
    numbers = range(config.layers + 2)
    return Stage({number: build_layer(config, number, seed) for number in numbers})


def packed_fields(inputs, device):
    """Yield (documents, positions) of each micro-batch. A line of text is a document."""
    documents, positions, _ = data.document_fields(inputs, ord("\n"))
    return zip(documents.to(device), positions.to(device), strict=True)


def count_tokens(targets):
    """Return the number of unmasked tokens, or 1 if there are none."""
    return max(1, (targets != IGNORE).sum().item())


# --------------------------------------------------------------------------------------------------
# 2. The grid: which rank is in which groups, and what it holds of a layer.


class Grid:
    """This rank's place on the grid, and a process group for each set of axes that communicates."""

    def __init__(self, args):
        self.sizes = sizes_of(args, dist.get_world_size())  # (pp, replicate, shard, cp, tp)
        self.pp, self.replicate, self.shard, self.cp, self.tp = self.sizes
        ranks = torch.arange(dist.get_world_size()).view(self.sizes)
        place = (ranks == dist.get_rank()).nonzero()[0]
        self.pp_rank, self.replicate_rank, self.shard_rank, _, self.tp_rank = place.tolist()
        self.pp_group = self.new_groups(ranks, 0)
        self.replicate_group = self.new_groups(ranks, 1)
        self.fsdp_group = self.new_groups(ranks, 2, 3)  # shard × cp
        self.cp_group = self.new_groups(ranks, 3)
        self.tp_group = self.new_groups(ranks, 4)
        self.model_group = self.new_groups(ranks, 0, 2, 3, 4)  # the ranks that hold one replica
        self.stage_group = self.new_groups(ranks, 2, 3, 4)  # they hold a stage once
        # For experts, the ranks of a stage and replica form another grid, of (efsdp, ep).
        by_expert = ranks.view(self.pp, self.replicate, -1, args.ep)
        self.efsdp_group = self.new_groups(by_expert, 2)
        self.ep_group = self.new_groups(by_expert, 3)
        self.edp_group = self.new_groups(by_expert, 1, 2)  # all ranks with the same experts

    def new_groups(self, ranks, *axes):
        """Make a group of the ranks that differ in these axes only, for all. Return this rank's."""
        last = tuple(range(-len(axes), 0))
        rows = ranks.movedim(axes, last).flatten(-len(axes)).flatten(0, -2)
        timeout = timedelta(minutes=10)
        group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        return group

    def own_sequences(self, batch, num_microbatches):
        """Return this rank's sequences of each micro-batch, (m, b, S), of a batch (B, S)."""
        parts = batch.unflatten(0, (num_microbatches, self.replicate, self.shard, -1))
        return parts[:, self.replicate_rank, self.shard_rank]

    def own_part(self, batch, num_microbatches):
        """Return this rank's part of each micro-batch, (m · b, S/cp), of a batch (B, S)."""
        own = self.own_sequences(batch, num_microbatches).flatten(0, 1)
        return context_parallel.split_sequence(own, 1, self.cp_group)


def sizes_of(args, world_size):
    """Return the sizes of the axes (pp, replicate, shard, cp, tp). `shard` is what is left."""
    shard = world_size // (args.pp * args.replicate * args.cp * args.tp)
    return args.pp, args.replicate, shard, args.cp, args.tp


def layers_of_stage(config, stage, num_stages):
    """Return the numbers of a stage's layers. Two stages differ by at most one block."""
    L = config.layers
    blocks = [1 + i for i in range(L) if i * num_stages // L == stage]
    embedding = [0] if stage == 0 else []
    head = [L + 1] if stage == num_stages - 1 else []
    return embedding + blocks + head


def tensor_parallel_plan(layer):
    """Norms and routers stay plain: reduce_whole() adds up their gradients, once per step."""
    if isinstance(layer, Embedding):
        return {"word": "vocab"}
    if isinstance(layer, Head):
        return {"linear": "vocab"}
    attention = layer.attention
    # Rows of q, k and v in the stacked matrix. A tuple is a column layer that slices each of them.
    qkv = tuple(number * attention.head_dim for number in attention.heads)
    plan = {"attention.qkv": qkv, "attention.proj": "row"}
    return plan if layer.has_experts else plan | {"mlp.gate_up": "swiglu", "mlp.down": "row"}


def split_over_tp(layer, grid):
    """Replace matrices by this rank's slices.

    Return {name: boxes}: where its parameters lie in the whole ones.
    """
    plan = tensor_parallel_plan(layer)
    tensor_parallel.parallelize(layer, plan, grid.tp_group, sequence_parallel=True)
    boxes = {}
    for name, parameter in layer.named_parameters():
        owner, _, own_name = name.rpartition(".")
        owner = layer.get_submodule(owner)
        boxes[name] = tensor_parallel.boxes_of(owner, own_name, parameter.shape)
    if isinstance(layer, Embedding):
        layer.tp_group = grid.tp_group
    if isinstance(layer, Block):
        layer.attention.cp_group = grid.cp_group
    return boxes


def split_experts(moe, grid):
    """Give this rank 1/ep of the experts, in dimension 0. Return their boxes by name."""
    expert_parallel.parallelize(moe, grid.ep_group, grid.edp_group, loss="sum")
    boxes = {}
    for name, parameter in moe.experts.named_parameters():
        number = len(parameter)
        whole = [number * grid.ep_group.size(), *parameter.shape[1:]]
        offset = [number * grid.ep_group.rank(), 0, 0]
        boxes[f"mlp.experts.{name}"] = [tensor_parallel.Box(0, parameter.shape, whole, offset)]
    return boxes


# --------------------------------------------------------------------------------------------------
# 3. Training on the grid.


class WithLoss(torch.autograd.Function):
    """Return x. Backward gives `loss` the gradient 1, as if it were added to the model's loss.

    All ranks have the same auxiliary loss, but the gradient of each reaches its own tokens only.
    """

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


class Trainer:
    """This rank's stages, their optimizer, and the step. `args` are the command line's flags."""

    def __init__(self, config, args, device, dtype):
        self.config = config
        self.args = args
        self.device = device
        self.dtype = dtype
        self.sum_dtype = torch.promote_types(dtype, torch.float32)  # of shards and gradients
        self.grid = Grid(args)
        self.steps = 0  # the number of steps that are done
        self.boxes = {}  # name: where this rank's slice of the parameter lies in the whole one
        num_stages = self.grid.pp * args.stages_per_rank
        own_stages = range(self.grid.pp_rank, num_stages, self.grid.pp)  # several: interleaved
        self.layer_numbers = [layers_of_stage(config, stage, num_stages) for stage in own_stages]
        self.stages = nn.ModuleList(map(self.build_stage, self.layer_numbers))
        names = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.parameters = list(names.values())  # shards
        self.whole = [p for name, p in names.items() if self.is_whole(name)]
        self.optimizers = self.make_optimizers(names)  # AdamW, and with --optimizer muon Muon
        self.optimizer = self.optimizers[0]
        self.pipeline = pipeline.Pipeline(
            self.stages,
            args.schedule,
            args.microbatches,
            self.loss_fn,
            self.grid.pp_group,
            backward_context=self.backward_context,
        )

    def build_stage(self, numbers):
        """Shard each layer before the next is built, so that no rank holds a whole stage."""
        layers = {number: self.build_layer(number) for number in numbers}
        stage = Stage(layers, self.args.recompute)
        return fsdp.fully_shard(stage, **self.fsdp_options(self.grid.fsdp_group))

    def build_layer(self, number):
        layer = build_layer(self.config, number, self.args.seed)
        layer.to(self.device, self.sum_dtype)
        boxes = split_over_tp(layer, self.grid)
        if isinstance(layer, Block) and layer.has_experts:
            layer.aux_weight = self.args.aux_weight / self.args.microbatches
            boxes |= split_experts(layer.mlp, self.grid)
            # All ranks of a stage have other tokens. So experts are sharded over other ranks.
            fsdp.fully_shard(layer.mlp.experts, **self.fsdp_options(self.grid.efsdp_group))
        self.boxes |= {f"{number}.{name}": some for name, some in boxes.items()}
        return fsdp.fully_shard(layer, **self.fsdp_options(self.grid.fsdp_group))

    def fsdp_options(self, group):
        return {
            "process_group": group,
            "replicate_group": self.grid.replicate_group if self.grid.replicate > 1 else None,
            "mp_policy": fsdp.MixedPrecisionPolicy(self.dtype, self.sum_dtype),
            "gradient_divide_factor": 1.0,  # the loss is divided already, so gradients are added up
        }

    def is_whole(self, name):
        """Whether all tp ranks have this parameter, and use it for their parts of the sequence."""
        box = self.boxes[name][0]
        return ".experts." not in name and list(box.shape) == list(box.whole_shape)

    def backward_context(self, stage, is_last):
        return nullcontext() if is_last else fsdp.no_sync(stage)

    def step(self, inputs, targets):
        """Train on the whole batch, (batch, sequence). Return its loss and the gradient norm.

        All ranks return the same. The loss is without the auxiliary one.
        """
        self.steps += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # The pipeline takes the mean over micro-batches. The factor m makes it a sum.
        m = self.args.microbatches
        self.token_weight = m / count_tokens(targets)
        if getattr(self.args, "packed", False):
            sequences = self.grid.own_sequences(inputs, m)
            for stage in self.stages:
                stage.fields = packed_fields(sequences, self.device)
        inputs = self.grid.own_part(inputs, m).to(self.device)
        targets = self.grid.own_part(targets, m).to(self.device)
        if self.args.fused_loss:
            self.fuse_loss(targets.chunk(m))
        with ExitStack() as stack:  # FSDP gathers once per step, not once per micro-batch
            for stage in self.stages:
                stack.enter_context(fsdp.keep_unsharded(stage))
            loss = self.pipeline.step(inputs, targets)
        self.reduce_whole()
        norm = self.clip_grad_norm_(self.args.clip_grad or math.inf).item()
        if math.isfinite(norm):  # otherwise no rank steps
            for optimizer in self.optimizers:
                optimizer.step()
        return self.sum_loss(loss), norm

    def loss_fn(self, output, targets):
        """`output` are logits or, with --fused-loss, the loss of each token."""
        if not self.args.fused_loss:
            output = tensor_parallel.vocab_parallel_cross_entropy(
                output, targets.T, self.grid.tp_group, ignore_index=IGNORE
            )
        return output.sum() * self.token_weight

    def reduce_whole(self):
        """Add up the gradients of norms and routers over tp: each rank has a part of the tokens."""
        gradients = [p.grad for p in self.whole if p.grad is not None]
        if self.grid.tp > 1:
            expert_parallel.average(gradients, [(self.grid.tp_group, 1)])  # divides the sum by 1

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Count each element once: shards on their rank, whole parameters on tp rank 0 only."""
        whole = set(self.whole)
        counted = [p for p in self.parameters if self.grid.tp_rank == 0 or p not in whole]
        gradients = [p.grad for p in counted if p.grad is not None]
        own_norm = nn.utils.get_total_norm(gradients)
        total = own_norm.to(self.device, torch.float64).square()
        dist.all_reduce(total, group=self.grid.model_group)
        norm = total.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    def sum_loss(self, loss):
        """Add up the loss of all parts of the batch. The last stage has them, on all tp ranks."""
        if loss is None or self.grid.tp_rank > 0:
            loss = torch.zeros((), device=self.device)
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item()

    # The library's part. Section 4 has the functions.

    def make_optimizers(self, named_parameters):
        return make_optimizers(self, named_parameters)

    def fuse_loss(self, targets_of_micro_batches):
        fuse_loss(self, targets_of_micro_batches)


# --------------------------------------------------------------------------------------------------
# 4. The library: the fused loss; Muon; checkpoints, with the plain model's names and shapes; the
#    names of transformers.


def fuse_loss(trainer, targets_of_micro_batches):
    """Let the head compute the loss, because FSDP gathers its weight in its forward only."""
    targets = iter(targets_of_micro_batches)

    def loss_of(x, weight):
        return vocab_parallel_linear_cross_entropy(
            x,
            weight,
            next(targets).T,
            reduction="none",
            ignore_index=IGNORE,
            vocab_size=trainer.config.vocab,
            sequence_parallel=True,
            process_group=trainer.grid.tp_group,
        )

    for stage in trainer.stages:
        for layer in stage:
            if isinstance(layer, Head):
                layer.loss_of = loss_of


def is_for_muon(name, args):
    """Muon trains the matrices of the blocks, without routers. AdamW trains the rest."""
    if getattr(args, "optimizer", None) != "muon" or ".gate." in name:
        return False
    return ".attention." in name or ".mlp." in name


def muon_options(args):
    return {
        "lr": args.lr,
        "adjust_lr_fn": "match_rms_adamw",
    }


def make_optimizers(trainer, named_parameters):
    args = trainer.args
    others = [p for name, p in named_parameters.items() if not is_for_muon(name, args)]
    optimizer = torch.optim.AdamW(others, lr=args.lr)
    if len(others) == len(named_parameters):
        return [optimizer]
    return [optimizer, make_muon(trainer, optimizer)]


def make_muon(trainer, adamw):
    """The owner of a matrix gathers it over the ranks of the stage, whatever split it."""
    shapes = {}
    boxes = {}
    shards = [fsdp.shards(stage, adamw) for stage in trainer.stages]
    for name, _, start, shard, _ in itertools.chain(*shards):
        if is_for_muon(name, trainer.args):
            pieces = pieces_of_shard(trainer, name, start, shard.detach())
            first = trainer.boxes[name][0]
            shapes[shard] = first.whole_shape
            boxes[shard] = [(piece.tensor.shape, piece.offset) for piece in pieces]
    options = muon_options(trainer.args)
    options["process_group"] = trainer.grid.stage_group
    optimizer = muon.ShardedMuon(shapes, shapes, boxes=boxes, **options)
    optimizer.state = adamw.state  # one for both, as checkpoints want it
    return optimizer


def pieces_of_shard(trainer, name, start, tensor):
    """Return what is in this rank's shard as checkpoint.Pieces of the plain model's tensor."""
    pieces = []
    for box in trainer.boxes[name]:
        # The shard begins at element `start` of the slice, and the box at `first`.
        pieces += checkpoint.flat_pieces(
            tensor, box.shape, start - box.first, box.whole_shape, box.offset
        )
    return pieces


def pieces_of(trainer):
    """Return this rank's shards as checkpoint.Pieces of the plain model's tensors.

    Keys are "weight/NAME", "exp_avg/NAME", "exp_avg_sq/NAME" and "step/NAME", and of Muon
    "momentum_buffer/NAME".
    """
    pieces = {}
    for stage in trainer.stages:
        for name, _, start, shard, state in fsdp.shards(stage, trainer.optimizer):
            for kind, tensor in {"weight": shard.detach(), **state}.items():
                key = f"{kind}/{name}"
                if tensor.dim() == 0:  # AdamW's number of steps
                    pieces[key] = tensor
                    continue
                pieces[key] = pieces_of_shard(trainer, name, start, tensor)
    return pieces


# The arguments that decide what one device computes. Another grid computes the same.
FIXED = [
    "model",
    "seed",
    "batch_size",
    "microbatches",
    "sequence_length",
    "packed",
    "lr",
    "clip_grad",
    "aux_weight",
    "data_checksum",
    "optimizer",
]


def save(trainer, directory, background=False):
    fixed = {name: getattr(trainer.args, name, None) for name in FIXED}
    extra = {"model": trainer.args.model, "step": trainer.steps, "fixed": fixed}
    checkpoint.save(directory, pieces_of(trainer), extra, background=background)


def check_same_run(args, directory):
    """Raise ValueError if the run in `directory` computes something else than this one."""
    _, index = checkpoint.open_latest(Path(directory))
    for name, stored in index["extra"]["fixed"].items():
        value = getattr(args, name, None)
        if value != stored:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {value}: the run in {directory} has {stored}")


@torch.no_grad()
def load(trainer, directory):
    """Continue from a checkpoint of any grid."""
    _, index = checkpoint.open_latest(Path(directory))
    model = index["extra"]["model"]
    if model != trainer.args.model:
        raise ValueError(f"--model {trainer.args.model}: {directory} has {model}")
    for shard in trainer.parameters:  # AdamW creates its state in the first step
        trainer.optimizer.state[shard] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(shard),
            "exp_avg_sq": torch.zeros_like(shard),
        }
    for optimizer in trainer.optimizers[1:]:
        for shard in optimizer.param_groups[0]["params"]:
            optimizer.state[shard] = {"momentum_buffer": torch.zeros_like(shard)}
    checkpoint.load(directory, pieces_of(trainer))
    trainer.steps = index["extra"]["step"]


TRANSFORMERS = {  # the names in transformers, after "model.layers.N." if they are of a block
    "word.weight": ["model.embed_tokens.weight"],
    "norm1.weight": ["input_layernorm.weight"],
    "attention.qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "attention.proj.weight": ["self_attn.o_proj.weight"],
    "norm2.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down.weight": ["mlp.down_proj.weight"],
    "norm.weight": ["model.norm.weight"],
    "linear.weight": ["lm_head.weight"],
}


def transformers_names(name, config):
    """Return the names of the matrices that our parameter stacks, and their numbers of rows."""
    number, _, own_name = name.partition(".")
    is_block = 1 <= int(number) <= config.layers
    prefix = f"model.layers.{int(number) - 1}." if is_block else ""
    theirs = TRANSFORMERS.get(own_name, [own_name])  # of an MoE the names are the same
    head_dim = config.hidden // config.heads
    rows = [config.ffn] * len(theirs)
    if own_name == "attention.qkv.weight":
        rows = [n * head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
    return [prefix + name for name in theirs], rows


def to_transformers(state_dict, config):
    """Return a state dict of plain_model(config) with the names of LlamaForCausalLM, or Mixtral."""
    result = {}
    for name, tensor in state_dict.items():
        theirs, rows = transformers_names(name, config)
        parts = [tensor] if len(theirs) == 1 else tensor.split(rows)
        result |= dict(zip(theirs, parts, strict=True))
    return result


def from_transformers(state_dict, config):
    with torch.device("meta"):
        names = plain_model(config).state_dict()
    result = {}
    for name in names:
        theirs, _ = transformers_names(name, config)
        result[name] = torch.cat([state_dict[their] for their in theirs])
    return result


# --------------------------------------------------------------------------------------------------
# Demo. The command line, what a rank sends by formula, and the comparison with one device.

DEFAULT = "(default: %(default)s)"
RANKS = 8  # run_all.sh starts so many
AXES = ("pp", "replicate", "cp", "tp", "ep")
FLAGS = {
    "--model": {"choices": MODELS, "default": "mixtral-tiny", "help": DEFAULT},
    "--pp": {"type": int, "help": "pipeline-parallel ranks"},
    "--replicate": {"type": int, "help": "copies of the shards"},
    "--cp": {"type": int, "help": "context-parallel ranks"},
    "--tp": {"type": int, "help": "tensor-parallel ranks"},
    "--ep": {
        "type": int,
        "help": "ranks that share the experts, of the shard · cp · tp ranks of a stage; without "
        "these five flags, a grid with as many axes as the ranks allow",
    },
    "--schedule": {"choices": pipeline.SCHEDULES, "default": "1f1b", "help": DEFAULT},
    "--stages-per-rank": {"type": int, "default": 1, "help": f"for interleaved_1f1b {DEFAULT}"},
    "--microbatches": {"type": int, "default": 4, "help": f"of a batch {DEFAULT}"},
    "--batch-size": {"type": int, "default": 16, "help": f"sequences, of all ranks {DEFAULT}"},
    "--sequence-length": {"type": int, "default": 32, "help": DEFAULT},
    "--optimizer": {
        "choices": ["adamw", "muon"],
        "default": "adamw",
        "help": f"muon: for the matrices of the blocks {DEFAULT}",
    },
    "--lr": {"type": float, "default": 1e-3, "help": f"learning rate {DEFAULT}"},
    "--clip-grad": {"type": float, "default": 1.0, "help": f"largest norm, 0: none {DEFAULT}"},
    "--aux-weight": {"type": float, "default": 0.01, "help": f"of the auxiliary loss {DEFAULT}"},
    "--fused-loss": {"action": "store_true", "help": "the loss without its logits"},
    "--recompute": {"action": "store_true", "help": "blocks' activations in backward"},
    "--packed": {"action": "store_true", "help": "a line of text is a document of its own"},
    "--metrics": {"metavar": "FILE", "help": "write a line of JSON per step to FILE"},
    "--save": {"metavar": "DIR", "help": "save a checkpoint in DIR after every step"},
    "--save-background": {"action": "store_true", "help": "train on while a thread writes"},
    "--load": {"metavar": "DIR", "help": "continue from the checkpoint in DIR, of any grid"},
}


class Session(fsdp.Demo):
    """The command line, the world, and the data."""

    def __init__(self):
        super().__init__(__doc__, FLAGS, steps=4)
        args = self.args
        self.config = MODELS[args.model]
        self.dtype = getattr(torch, args.dtype or "float64")
        if all(getattr(args, axis) is None for axis in AXES):
            choose_grid(args, self.ranks, self.config)
        for axis in AXES:
            setattr(args, axis, 1 if getattr(args, axis) is None else getattr(args, axis))
        try:
            check_arguments(args, self.config, self.ranks)
        except ValueError as error:
            self.stop(str(error))
        if args.load and not (Path(args.load) / "latest").exists():
            self.stop(f"--load {args.load}: it has no checkpoint")
        args.data_checksum = zlib.crc32(self.text.numpy())
        if len(self.text) <= args.sequence_length:
            self.stop(f"--data {args.data}: {len(self.text)} bytes; give more than a sequence")
        if args.idea:
            self.stop("--idea: this file has none of its own; run the files that it combines")
        fsdp.join_world(self.device)

    def batch(self, number):
        """Inputs and targets of a step, (batch, sequence), on the CPU."""
        args = self.args
        length = args.sequence_length
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + number)
        shape = (args.batch_size, 1)
        starts = torch.randint(len(self.text) - length, shape, generator=generator)
        window = self.text[starts + torch.arange(length + 1)].long()
        return window[:, :-1], window[:, 1:]


def choose_grid(args, ranks, config):
    """Give each axis two ranks, as long as they last: tp, cp, pp, then replicas."""
    for axis in ("tp", "cp", "pp", "replicate"):
        setattr(args, axis, 2 if ranks % 2 == 0 else 1)
        ranks //= getattr(args, axis)
    args.ep = 2 if config.experts and args.tp == 2 else 1


def check_arguments(args, config, world_size):
    """Raise ValueError if the grid does not fit the ranks, the model or the batch."""
    counts = {"microbatches", "batch_size", "sequence_length", "stages_per_rank", *AXES}
    for name in sorted(counts):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    product = args.pp * args.replicate * args.cp * args.tp
    axes = f"--pp {args.pp} × --replicate {args.replicate} × --cp {args.cp} × --tp {args.tp}"
    must_divide(f"{axes} = {product} ranks", product, f"the world of {world_size}", world_size)
    _, _, shard, cp, tp = sizes_of(args, world_size)
    must_divide(f"--tp {tp}", tp, f"{config.kv_heads} key heads", config.kv_heads)
    must_divide(f"--tp {tp}", tp, f"{config.ffn} features of an MLP", config.ffn)
    if config.experts == 0 and args.ep > 1:
        raise ValueError(f"--ep {args.ep}: {args.model} has no experts; leave it out")
    stage = f"the {shard * cp * tp} ranks of a stage (shard {shard} × cp {cp} × tp {tp})"
    must_divide(f"--ep {args.ep}", args.ep, stage, shard * cp * tp)
    must_divide(f"--ep {args.ep}", args.ep, f"{config.experts} experts", config.experts)
    multiple = math.lcm(2 * cp, cp * tp)
    length = args.sequence_length
    must_divide(
        f"2 · cp and cp · tp, so {multiple},", multiple, f"--sequence-length {length}", length
    )
    size = args.batch_size
    parts = args.microbatches * args.replicate * shard
    text = f"--microbatches {args.microbatches} × replicate {args.replicate} × shard {shard}"
    must_divide(f"{text} = {parts}", parts, f"--batch-size {size}", size)
    stages = args.pp * args.stages_per_rank
    if stages > config.layers:
        text = f"--pp {args.pp} × --stages-per-rank {args.stages_per_rank} = {stages} stages"
        raise ValueError(f"{text}: {args.model} has {config.layers} blocks, and a stage needs one")
    if not args.clip_grad >= 0:
        raise ValueError(f"--clip-grad {args.clip_grad}: give a positive norm, or 0 for none")
    pipeline.build_schedule(args.schedule, args.pp, args.microbatches, args.stages_per_rank)


def must_divide(what, divisor, whole, size):
    if size % divisor:
        raise ValueError(f"{what} must divide {whole}")


class SentByAxis(fsdp.SentBytes):
    """Adds up the bytes that this rank sends along each axis of the grid."""

    def __init__(self, grid):
        super().__init__()
        self.by_axis = dict.fromkeys(("tp", "cp", "ep", "fsdp", "replicate", "pp"), 0.0)
        named = [("tp", grid.tp_group), ("cp", grid.cp_group), ("ep", grid.ep_group)]
        named += [("fsdp", grid.fsdp_group), ("fsdp", grid.efsdp_group)]
        named += [("replicate", grid.replicate_group), ("pp", grid.pp_group)]
        self.axes = {group.group_name: axis for axis, group in named}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.c10d.alltoall_base_.default and args[4]:
            # The rows of tokens. This rank sends args[4][i] rows of args[1] to rank i.
            group = dist.ProcessGroup.unbox(args[2])
            self.total += (sum(args[4]) - args[4][group.rank()]) * args[1][:1].nbytes
        if self.total > before:
            handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            name = dist.ProcessGroup.unbox(handle).group_name
            if name in self.axes:  # not those of the loss and the norm
                self.by_axis[self.axes[name]] += self.total - before
        return result


def train_on_one_device(config, args, batches, device, dtype):
    """Train the plain model. Yield (loss without auxiliary, gradient norm, model) of each step."""
    model = plain_model(config, args.seed).to(device, torch.promote_types(dtype, torch.float32))
    by_muon = [p for name, p in model.named_parameters() if is_for_muon(name, args)]
    others = [p for name, p in model.named_parameters() if not is_for_muon(name, args)]
    optimizers = [torch.optim.AdamW(others, lr=args.lr)]
    if by_muon:  # torch.optim.Muon takes no stacks of experts
        alone, _ = dist.new_subgroups(1)
        optimizers.append(muon.Muon(by_muon, process_group=alone, **muon_options(args)))
    m = args.microbatches
    for inputs, targets in batches:
        model.zero_grad()
        weight = 1 / count_tokens(targets)
        loss = 0.0
        if getattr(args, "packed", False):
            model.fields = packed_fields(inputs.unflatten(0, (m, -1)), device)
        for x, y in zip(inputs.to(device).chunk(m), targets.to(device).chunk(m), strict=True):
            logits = model(x).flatten(0, 1)  # the sequence comes first, so y is transposed
            losses = F.cross_entropy(logits, y.T.flatten(), ignore_index=IGNORE, reduction="sum")
            layers = [block.mlp for block in model[1:-1] if block.has_experts]
            aux_loss = sum(layer.aux_loss for layer in layers)
            (losses * weight + args.aux_weight / m * aux_loss).backward()
            loss += losses.item() * weight
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
        for optimizer in optimizers:
            optimizer.step()
        yield loss, norm.item(), model


def sent_by_formula(trainer):
    """The bytes of the docstring, but for ep, whose rows depend on the data."""
    args = trainer.args
    config = trainer.config
    grid = trainer.grid
    m = args.microbatches
    T = args.batch_size // (m * grid.replicate * grid.shard) * args.sequence_length // grid.cp
    numbers = list(itertools.chain(*trainer.layer_numbers))
    blocks = [number for number in numbers if 1 <= number <= config.layers]
    dense = [n for n in blocks if config.experts == 0 or n <= config.dense_layers]
    times_forward = 2 if args.recompute else 1
    # f and g of tensor parallelism: forward sends 2 of the 5
    passes = (3 + 2 * times_forward) * (len(blocks) + len(dense))
    passes += 3 * (0 in numbers) + 3 * (config.layers + 1 in numbers)
    whole = sum(shard.numel() for shard in trainer.whole)
    has_head = config.layers + 1 in numbers
    passes -= args.fused_loss * has_head  # it keeps the gathered input
    numbers_of_loss = 3 * grid.tp if args.fused_loss else 6
    tp = m * T * config.hidden * passes + 2 * whole + numbers_of_loss * m * T * has_head
    keys = m * T * config.kv_heads // grid.tp * config.hidden // config.heads
    cp = (4 + 2 * times_forward) * keys * len(blocks)
    borders = 2 * len(trainer.layer_numbers) - (0 in numbers) - (config.layers + 1 in numbers)
    pp = borders * m * T * config.hidden // grid.tp if grid.pp > 1 else 0
    sharded = 0.0
    copied = 0.0
    for name, boxes in trainer.boxes.items():
        slice_size = sum(math.prod(box.shape) for box in boxes)
        F = (grid.efsdp_group if ".experts." in name else grid.fsdp_group).size()
        sharded += 2 * slice_size * (F - 1) / F
        copied += 2 * slice_size / F * (grid.replicate - 1) / grid.replicate
    elements = {"tp": tp * (grid.tp - 1) / grid.tp, "cp": cp * (grid.cp - 1), "pp": pp}
    elements |= {"fsdp": sharded, "replicate": copied}
    return {axis: number * trainer.dtype.itemsize for axis, number in elements.items()}


def largest_difference(trainer, plain):
    """Between this rank's pieces of the parameters and the plain model's."""
    state_dict = plain.state_dict()
    largest = 0.0
    for key, piece in checkpoint.named_pieces(pieces_of(trainer)):
        kind, _, name = key.partition("/")
        if kind == "weight" and piece.tensor.numel():
            whole = checkpoint.Piece(state_dict[name], piece.shape, [0] * len(piece.shape))
            difference = (piece.tensor - whole.at(piece.box)).abs().max()
            largest = max(largest, difference.nan_to_num(torch.inf).item())
    return largest


def max_over_ranks(number, device):
    number = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def main():
    session = Session()
    args = session.args
    trainer = Trainer(session.config, args, session.device, session.dtype)
    if args.load:
        try:
            check_same_run(args, args.load)
            load(trainer, args.load)
        except ValueError as error:
            session.stop(str(error))
    show_header(session, trainer)
    plain = train_on_one_device(
        session.config, args, map(session.batch, range(args.steps)), session.device, session.dtype
    )
    plain = itertools.islice(plain, trainer.steps, None)  # one device computes all steps
    largest = 0.0
    times = []
    mode = "a" if args.load else "w"
    with open(args.metrics if args.metrics and session.rank == 0 else os.devnull, mode) as metrics:
        for number in range(trainer.steps, args.steps):
            sent = SentByAxis(trainer.grid)
            batch = session.batch(number)
            start = session.now()
            with sent if number + 1 == args.steps else nullcontext():  # counting takes time
                loss, norm = trainer.step(*batch)
            times.append(session.now() - start)
            session.show(f"step {number + 1}/{args.steps}   loss {loss:.3f}   norm {norm:.3f}")
            line = {"step": number + 1, "loss": loss, "grad_norm": norm}
            print(json.dumps(line), file=metrics, flush=True)
            plain_loss, plain_norm, model = next(plain)
            largest = max(largest, abs(loss - plain_loss), abs(norm - plain_norm))
            largest = max(largest, largest_difference(trainer, model))
            if args.save:
                is_last = number + 1 == args.steps
                save(trainer, args.save, background=args.save_background and not is_last)
    if not times:
        session.show(f"nothing to do: {args.load} is at step {trainer.steps}")
        return 0
    return report(session, trainer, max_over_ranks(largest, session.device), sent, times)


def show_header(session, trainer):
    grid = trainer.grid
    world = f"{session.ranks} rank{'s' if session.ranks > 1 else ''}"
    world += f" · {session.device.type}/{dist.get_backend()}"
    size = sum(p.numel() for p in plain_model(session.config).parameters()) / 1e6
    what = f"{size:.1f}M parameters in {session.args.dtype or 'float64'}"
    session.show(f"parallel_5d · {world} · {what} · {session.steps}")
    axes = f"pp {grid.pp} × replicate {grid.replicate} × shard {grid.shard}"
    axes += f" × cp {grid.cp} × tp {grid.tp}, ep {session.args.ep}"
    session.show(f"grid        {axes}")
    if session.args.load:
        session.show(f"loaded      {session.args.load} after step {trainer.steps}")


def report(session, trainer, largest, sent, times):
    """Print the result. Return 1 if the grid and one device differ."""
    tolerance = {"float64": 1e-9, "float32": 1e-3}.get(session.args.dtype or "float64", 0.05)
    agree = largest <= tolerance
    verdict = f"{'' if agree else 'NOT '}equal within {tolerance}: {largest:.0e}"
    session.show(f"vs 1 device loss, gradient norm and parameters {verdict}")
    sizes = [f"{size / 1e6:.2f} MB" for size in fsdp.held(trainer.parameters, trainer.optimizer)]
    session.show(f"held/rank   params {sizes[0]}   grads {sizes[1]}   optimizer {sizes[2]}")
    total = sum(sent.by_axis.values())
    session.show(f"sent/rank   {total / 1e6:.2f} MB per step, by rank 0")
    formulas = sent_by_formula(trainer)
    for axis, size in sent.by_axis.items():
        formula = f"formula {formulas[axis] / 1e6:.2f}" if axis in formulas else "as tokens choose"
        session.show(f"  {axis:9} {size / 1e6:6.2f} MB   {formula}")
    session.show(f"time        {1e3 * sorted(times)[len(times) // 2]:.0f} ms per step")
    return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    gc.collect()  # drop objects that hold a group: gloo's threads may abort at exit
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)
