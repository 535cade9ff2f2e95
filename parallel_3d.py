"""GPT-2 on a grid of ranks: tensor, pipeline and data parallelism at once, as in Megatron-LM.

A large model needs several ranks to hold it, and more ranks to train it in time. The pipeline
splits the layers into stages. Tensor parallelism splits the matrices of each layer. Data
parallelism splits the batch. In a step, each pipeline computes the gradients for its part of the
batch, data-parallel ranks average them, and each rank updates the parameters that it holds.
8 ranks with --tp 2 --pp 2, so dp = 2:

                    stage 0: embedding, blocks 1 … L/2      stage 1: blocks L/2+1 … L, head
    batch, part 0   rank 0 ═══ rank 1                ───→   rank 4 ═══ rank 5
                        ┊          ┊                            ┊          ┊
    batch, part 1   rank 2 ═══ rank 3                ───→   rank 6 ═══ rank 7

    ═══  tp: activations, in every layer         ───→  pp: activations, between stages
     ┊   dp: gradients, once per step            rank = (pp_rank · dp + dp_rank) · tp + tp_rank

Tensor-parallel ranks are neighbours, because they wait for each other in every layer.

Each technique is in its own file. This file is about the five places where they meet:

    tied embedding   The head uses the embedding's weight. If the head is on another stage, both
                     stages have a copy, and they add their gradients.
    loss             It is a mean over the unmasked tokens of the whole batch, not of a rank's part.
    gradient norm    It counts each parameter once, although some parameters are on several ranks.
    dropout          Each layer has its own seed for each micro-batch, so that masks depend neither
                     on the stage nor on the pipeline that computes them.
    checkpoint       It has the plain model's names and shapes, and loads on any other grid.

Cost per rank in elements, for Ψ parameters, L blocks, m micro-batches of b sequences, s tokens and
hidden size h:

    held         Ψ/(tp·pp) parameters, as many gradients, and twice as many moments of Adam.
                 --zero1 divides the moments by dp.
    sent by tp   8·m·bsh (tp-1)/tp in each of L/pp blocks, 2·m·bsh (tp-1)/tp in the embedding and in
                 the head, and 6·m·bs (tp-1)/tp in the loss (in float32 if --dtype has 16 bits), or
                 3·m·bs (tp-1) with --fused-loss, which holds no logits
         by pp   m·bsh to each neighbour stage. The first and the last stage also send the
                 gradient of the embedding.
         by dp   2Ψ/(tp·pp) (dp-1)/dp, with and without --zero1

Read section 1 for the plain model (18 minutes), to section 3 for the technique (52), and the rest
to use it as a library (64).

Run:      torchrun --nproc-per-node 4 parallel_3d.py [--tp 2 --pp 2] [--model gpt2-345m] [--compare]
          --data PREFIX reads the files that data.py writes. --reset-attention-mask,
          --reset-position-ids and --eod-mask-loss keep the documents in a sequence apart.
          --save DIR saves a checkpoint at intervals, at Ctrl-C and at SIGTERM. --load DIR
          continues from a checkpoint of any grid.
          To restart by itself after a rank dies, a run needs --save DIR and
          TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 … (see pytorch#135712)
Paper:    Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using
          Megatron-LM, arXiv 2104.04473
Mirrors:  Megatron-LM's pretrain_gpt.py
Left out: evaluation; context and expert parallelism (context_parallel.py, expert_parallel.py)
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import dataclasses
import gc
import itertools
import json
import math
import os
import signal
import statistics
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import amp
import checkpoint
import data
import ddp
import estimate
import flash_attention
import pipeline
import tensor_parallel
import zero
from linear_cross_entropy import vocab_parallel_linear_cross_entropy

# --------------------------------------------------------------------------------------------------
# 1. The model on one device (Radford et al. 2019). Activations are (sequence, batch, hidden).

IGNORE = -100  # the target of a masked token


class Embedding(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        self.word = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(dropout)
        self.sequence_group = None  # with sequence parallelism: the tp group

    def forward(self, tokens, positions=None):  # both (batch, sequence)
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.word(tokens.T) + self.position(positions.T.to(tokens.device))
        if self.sequence_group is not None:
            x = tensor_parallel.scatter_to_sequence(x, self.sequence_group)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        h = config.hidden
        self.head_dim = h // config.heads
        self.norm1 = nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.norm2 = nn.LayerNorm(h)
        self.linear1 = nn.Linear(h, 4 * h)
        self.linear2 = nn.Linear(4 * h, h)
        self.dropout = nn.Dropout(dropout)
        # With tensor parallelism: a context in which each rank draws masks for its own heads.
        self.dropout_region = nullcontext

    def forward(self, x, documents=None):  # (sequence, batch, hidden), (batch, sequence)
        qkv = self.qkv(self.norm1(x))
        q, k, v = map(self.split_heads, qkv.chunk(3, dim=-1))
        p = self.dropout.p if self.training else 0.0
        attend = partial(F.scaled_dot_product_attention, dropout_p=p, is_causal=True)
        with self.dropout_region() if p > 0 else nullcontext():
            y = flash_attention.each_document(attend, q, k, v, None, documents)
        y = y.movedim(2, 0).flatten(2)  # to (sequence, batch, hidden)
        x = x + self.dropout(self.proj(y))
        y = F.gelu(self.linear1(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.linear2(y))

    def split_heads(self, x):  # to (batch, heads, sequence, head_dim)
        return x.unflatten(-1, (-1, self.head_dim)).movedim(0, 2)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.linear = nn.Linear(config.hidden, config.vocab, bias=False)
        self.has_logits = True  # with --fused-loss, the loss takes the input of self.linear

    def forward(self, x):
        x = self.norm(x)
        return self.linear(x) if self.has_logits else x


@torch.no_grad()
def build_layer(config, number, dropout=0.0, seed=0):
    """Build a layer of the plain model. Layer 0 is the embedding and layer L + 1 is the head.

    Each layer has its own seed, so that a rank can build its own layers only.
    """
    torch.manual_seed(seed * 10_000 + number)
    if number == 0:
        layer = Embedding(config, dropout)
    elif number <= config.layers:
        layer = Block(config, dropout)
    else:
        layer = Head(config)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif name in ("proj.weight", "linear2.weight"):
            # The residual stream adds up the outputs of 2L such layers. With this std, the sum does
            # not grow with L.
            parameter.normal_(std=0.02 / math.sqrt(2 * config.layers))
        elif parameter.dim() == 2:
            parameter.normal_(std=0.02)
    if number > config.layers:  # the head is tied: it starts as a copy of the embedding
        layer.linear.weight = build_layer(config, 0, seed=seed).word.weight
    return layer


class Stage(nn.Sequential):
    """Consecutive layers of the model, given as {number: layer}.

    For dropout, each layer has its own seed for each micro-batch, so that masks depend neither on
    the stage nor on the pipeline. A stage computes micro-batches in order, so it can count them.
    """

    def __init__(self, layers, seed=None):
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self.seed = seed  # None: there is no dropout
        self.micro_batch = 0  # the number of the next one, from the start of training
        self.fields = [(None, None)]  # of each micro-batch of a step, from packed_fields()

    def forward(self, x):
        documents, positions = self.fields[self.micro_batch % len(self.fields)]
        for number, layer in self.named_children():
            if self.seed is not None:
                # room for 2**10 layers and 2**30 micro-batches
                seed = self.seed * 2**40 + self.micro_batch * 2**10
                torch.manual_seed(seed + int(number))
            if isinstance(layer, Embedding):
                x = layer(x, positions)
            else:
                x = layer(x, documents) if isinstance(layer, Block) else layer(x)
        self.micro_batch += 1
        return x


def tie_weights(embedding, head):
    """Let the head use the embedding's weight. Return the weight that both have.

    A rank without one of them gives None for it. If it has neither, return None.
    """
    if embedding is not None and head is not None:
        head.linear.weight = embedding.word.weight
    if embedding is not None:
        return embedding.word.weight
    if head is not None:
        return head.linear.weight
    return None


def plain_model(config, dropout=0.0, seed=0):
    """The whole model: (batch, sequence) tokens to (sequence, batch, vocab) logits."""
    numbers = range(config.layers + 2)
    layers = {number: build_layer(config, number, dropout, seed) for number in numbers}
    tie_weights(layers[0], layers[config.layers + 1])
    return Stage(layers, seed if dropout else None)


def learning_rate(args, step):
    """The rate rises linearly to --lr in the first --warmup steps. The first step is 1."""
    return args.lr * min(1.0, step / max(1, args.warmup))


def count_tokens(targets):
    """Return the number of unmasked tokens, or 1 if there are none: the loss is divided by it."""
    return max(1, (targets != IGNORE).sum().item())


def packed_fields(inputs, config, args):
    """Return [(documents, positions) of each micro-batch], or None for what no flag asks for."""
    documents, positions, _ = data.document_fields(inputs, config.vocab - 1)
    documents = documents.split(args.micro_batch_size)
    positions = positions.split(args.micro_batch_size)
    nothing = [None] * len(documents)
    if not args.reset_attention_mask:
        documents = nothing
    if not args.reset_position_ids:
        positions = nothing
    return list(zip(documents, positions, strict=True))


def train_on_one_device(config, args, batches, device="cpu"):
    """Train the plain model. Yield (loss, gradient norm, model) after each step.

    If --dtype has 16 bits, train in float32.
    """
    dtype = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    model = plain_model(config, args.dropout, args.seed)
    model.to(device, dtype)
    optimizer_class = getattr(torch.optim, args.optimizer)
    optimizer = optimizer_class(model.parameters(), lr=args.lr)
    for step, (inputs, targets) in enumerate(batches, start=1):
        optimizer.param_groups[0]["lr"] = learning_rate(args, step)
        optimizer.zero_grad()
        loss = 0.0
        model.fields = packed_fields(inputs, config, args)
        x_parts = inputs.to(device).split(args.micro_batch_size)
        y_parts = targets.to(device).split(args.micro_batch_size)
        for x, y in zip(x_parts, y_parts, strict=True):
            logits = model(x).flatten(0, 1)  # the sequence comes first, so y is transposed
            losses = F.cross_entropy(logits, y.T.flatten(), ignore_index=IGNORE, reduction="sum")
            part = losses / count_tokens(targets)
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
        optimizer.step()
        yield loss, norm.item(), model


# --------------------------------------------------------------------------------------------------
# 2. The grid, and the part of the model that a rank holds.


class Grid:
    """This rank's place on the grid, and its neighbours along each axis.

    The number of data-parallel ranks is dp = world size / (tp · pp). Raises ValueError if that is
    not a whole number.
    """

    def __init__(self, tp, pp):
        world_size = dist.get_world_size()
        if tp < 1 or pp < 1 or world_size % (tp * pp):
            product = f"--tp {tp} × --pp {pp} = {tp * pp} ranks"
            raise ValueError(f"{product} must divide the world of {world_size}")
        self.tp = tp
        self.pp = pp
        self.dp = world_size // (tp * pp)
        ranks = torch.arange(world_size).view(pp, self.dp, tp)  # consecutive ranks differ in tp
        place = (ranks == dist.get_rank()).nonzero()[0]
        self.pp_rank, self.dp_rank, self.tp_rank = place.tolist()
        # Each row is a group. Shapes: (pp · dp, tp), (pp · tp, dp) and (dp · tp, pp).
        self.tp_group = self.new_groups(ranks.flatten(0, 1))
        self.dp_group = self.new_groups(ranks.mT.flatten(0, 1))
        pipelines = ranks.flatten(1).T
        self.pp_group = self.new_groups(pipelines)
        # The first and the last rank of the pipeline. None on the ranks between them, or if pp = 1.
        self.ends_group = None
        if pp > 1:
            self.ends_group = self.new_groups(pipelines[:, [0, -1]])

    def new_groups(self, ranks):
        """Make a group of each row of `ranks`. Return the one that this rank is in, or None.

        Every rank must take part in making every group.
        """
        timeout = timedelta(minutes=10)
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return group


# How tensor_parallel.parallelize splits the layers inside an Embedding, a Block or a Head. Position
# embeddings are not split.
PLAN = {
    "word": "vocab",
    "linear": "vocab",
    "qkv": "qkv",
    "proj": "row",
    "linear1": "column",
    "linear2": "row",
    "norm": "norm",
    "norm1": "norm",
    "norm2": "norm",
    "dropout": "dropout",
}


def split_layer(layer, group, sequence_parallel):
    """Replace the matrices of a plain layer by this rank's slices of them."""
    plan = {name: PLAN[name] for name, _ in layer.named_children() if name in PLAN}
    if not sequence_parallel:
        plan.pop("dropout", None)  # all ranks have the same input and must draw the same mask
    if isinstance(layer, Block):
        layer.dropout_region = partial(tensor_parallel.parallel_region, group)
    if isinstance(layer, Embedding) and sequence_parallel:
        layer.sequence_group = group
    return tensor_parallel.parallelize(layer, plan, group, sequence_parallel)


def layers_of_stage(config, stage, num_stages):
    """Return the numbers of a stage's layers. Two stages differ by at most one block."""
    L = config.layers
    blocks = [1 + i for i in range(L) if i * num_stages // L == stage]
    embedding = [0] if stage == 0 else []
    head = [L + 1] if stage == num_stages - 1 else []
    return embedding + blocks + head


def check_arguments(config, grid, args):
    tensor_parallel.check_divides("attention heads", config.heads, grid.tp)
    if args.sequence_parallel:
        tensor_parallel.check_divides("positions", args.sequence_length, grid.tp)
    size = args.global_batch_size
    multiple = args.micro_batch_size * grid.dp
    if multiple < 1 or size < 1 or size % multiple:
        text = f"--micro-batch-size {args.micro_batch_size} × {grid.dp} data-parallel ranks"
        raise ValueError(f"--global-batch-size {size} must be a multiple of {text}")
    stages = grid.pp * args.stages_per_rank
    if not 1 <= stages <= config.layers:
        blocks = f"the model has {config.layers} blocks, and each stage needs one"
        raise ValueError(f"{stages} stages on {grid.pp} ranks; {blocks}")
    if not 1 <= args.sequence_length <= config.sequence:
        positions = f"the model has {config.sequence} positions, so give 1 to {config.sequence}"
        raise ValueError(f"--sequence-length {args.sequence_length}; {positions}")
    if not args.clip_grad >= 0:
        raise ValueError(f"--clip-grad {args.clip_grad}; it must be positive, or 0 for none")


# --------------------------------------------------------------------------------------------------
# 3. Training on the grid.


class Trainer:
    """This rank's stages, their optimizer, and the step. `args` are the command line's flags."""

    def __init__(self, config, grid, args, device="cpu"):
        check_arguments(config, grid, args)
        self.config = config
        self.grid = grid
        self.args = args
        self.device = torch.device(device)
        self.dtype = getattr(torch, args.dtype)
        self.steps = 0  # the number of steps that are done
        # How far the run may be from one device. load() widens it if an earlier dtype was coarser.
        self.tolerance = {"float64": 1e-9, "float32": 1e-3}.get(args.dtype, 0.05)
        self.num_microbatches = args.global_batch_size // (args.micro_batch_size * grid.dp)
        num_stages = grid.pp * args.stages_per_rank
        own_stages = range(grid.pp_rank, num_stages, grid.pp)  # several if they are interleaved
        self.layer_numbers = [layers_of_stage(config, stage, num_stages) for stage in own_stages]
        self.stages = self.build_stages()
        layers = {name: layer for stage in self.stages for name, layer in stage.named_children()}
        self.embedding = layers.get("0")  # None on ranks without it
        self.head = layers.get(str(config.layers + 1))  # None on ranks without it
        if self.head is not None:
            self.head.has_logits = not args.fused_loss
        self.tied = tie_weights(self.embedding, self.head)  # the embedding's weight, or None
        self.parameters = list(self.stages.parameters())
        # {parameter split over tp: (its layer, its name there)}
        self.split = {
            getattr(layer, name): (layer, name)
            for _, layer, name in tensor_parallel.split_parameters(self.stages)
        }
        self.counted = self.find_counted()  # the parameters that this rank adds to the norm
        self.optimizer = self.build_optimizer()
        self.scaler = amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.pipeline = pipeline.Pipeline(
            self.stages, args.schedule, self.num_microbatches, self.loss_fn, grid.pp_group
        )

    def build_stages(self):
        """Build this rank's stages, with its slices of their layers."""
        args = self.args
        seed = args.seed if args.dropout else None
        stages = nn.ModuleList()
        for numbers in self.layer_numbers:
            layers = {}
            for number in numbers:
                # Split each layer before building the next: no rank ever holds a whole stage.
                layer = build_layer(self.config, number, args.dropout, args.seed)
                layer = split_layer(layer, self.grid.tp_group, args.sequence_parallel)
                layers[number] = layer.to(self.device, self.dtype)
            stages.append(Stage(layers, seed))
        return stages

    def find_counted(self):
        """Each tp rank counts its slices. The first also counts the parameters that are not split.

        The first stage counts the tied weight, so the stage of the head does not.
        """
        counted = set(self.split)
        if self.grid.tp_rank == 0:
            counted.update(self.parameters)
        if self.embedding is None:
            counted.discard(self.tied)
        return counted

    def build_optimizer(self):
        optimizer_class = getattr(torch.optim, self.args.optimizer)
        options = {"lr": self.args.lr}
        if self.device.type == "cuda":
            options["fused"] = True
        if self.args.zero1:  # it has float32 masters of 16-bit parameters
            return zero.Zero1(self.stages, optimizer_class, self.grid.dp_group, **options)
        optimizer = optimizer_class(self.parameters, **options)
        if self.dtype.itemsize == 2:
            return amp.MixedPrecisionOptimizer(optimizer, self.dtype)
        return optimizer

    def step(self, inputs, targets):
        """Train on the global batch, (batch, sequence). Return its loss and the gradient norm.

        All ranks return the same. If any gradient is not finite, no rank updates its parameters.
        """
        self.start_step(targets)
        inputs = inputs.chunk(self.grid.dp)[self.grid.dp_rank]
        for stage in self.stages:
            stage.fields = packed_fields(inputs, self.config, self.args)
        targets = targets.chunk(self.grid.dp)[self.grid.dp_rank]
        loss = self.pipeline.step(inputs, targets)
        self.reduce_gradients()
        norm = self.clip_grad_norm_(self.args.clip_grad or math.inf)
        numbers = torch.stack([self.mean_loss(loss), norm])
        # The host waits for the device here, because it decides whether to skip the update.
        loss, norm = numbers.tolist()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        self.scaler.record_found_inf(self.optimizer, not finite)
        self.scaler.update()
        return loss, norm

    def start_step(self, targets):
        # loss_fn() adds up the losses of a micro-batch's tokens. The pipeline then averages over m
        # micro-batches, and reduce_gradients() over dp ranks. The factors m and dp turn both means
        # into sums, and count_tokens() divides the sum by the tokens of the whole batch.
        m = self.num_microbatches
        self.token_weight = m * self.grid.dp / count_tokens(targets)
        # Number micro-batches in the order of one device: those of earlier steps come first, then
        # those of lower dp ranks in this step. Each rank's part of a batch has m micro-batches.
        parts_before = self.steps * self.grid.dp + self.grid.dp_rank
        for stage in self.stages:
            stage.micro_batch = parts_before * m
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.args, self.steps)
        self.optimizer.zero_grad()

    def loss_fn(self, output, targets):
        """`output` are logits, or the input of the head's matrix with --fused-loss."""
        options = {"process_group": self.grid.tp_group, "ignore_index": IGNORE}
        if self.args.fused_loss:
            losses = vocab_parallel_linear_cross_entropy(
                output,
                self.head.linear.weight,
                targets.T,
                reduction="none",
                vocab_size=self.config.vocab,
                sequence_parallel=self.args.sequence_parallel,
                **options,
            )
        else:
            losses = tensor_parallel.vocab_parallel_cross_entropy(output, targets.T, **options)
        return self.scaler.scale(losses.sum() * self.token_weight)

    def mean_loss(self, loss):
        """Return the whole batch's loss. The last rank of a pipeline gives its `loss`."""
        if loss is None:  # not the last rank
            loss = torch.zeros((), device=self.device)
        scale = self.scaler.get_scale()
        loss = loss.double() / (scale * self.grid.dp)
        dist.all_reduce(loss, group=self.grid.pp_group)
        dist.all_reduce(loss, group=self.grid.dp_group)
        return loss

    def reduce_gradients(self):
        if self.tied is not None and self.grid.ends_group is not None:
            dist.all_reduce(self.tied.grad, group=self.grid.ends_group)
        if not self.args.zero1:  # Zero1 averages them itself, before it clips them
            ddp.all_reduce_gradients(self.stages, self.grid.dp_group)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Divide the gradients by the loss scale and clip them. Return the whole model's norm."""
        groups = [self.grid.tp_group, self.grid.pp_group]  # the ranks that hold one model
        scale = self.scaler.get_scale()
        if self.args.zero1:
            if self.scaler.is_enabled():
                self.optimizer.unscale_(scale)  # reduces the gradients; step() divides them
            is_counted = self.counted.__contains__
            return self.optimizer.clip_grad_norm_(
                max_norm, counted=is_counted, process_groups=groups
            )
        if self.dtype.itemsize == 2:
            # Copy the gradients to the float32 masters. This does not divide them, because the
            # optimizer was built without a scaler. `factor` divides and clips at once.
            self.optimizer.unscale_()
        weights = self.optimizer.param_groups[0]["params"]  # the parameters, or their masters
        pairs = zip(self.parameters, weights, strict=True)
        counted = [weight.grad for parameter, weight in pairs if parameter in self.counted]
        own_norm = nn.utils.get_total_norm(counted)
        total = own_norm.double().square()
        for group in groups:
            dist.all_reduce(total, group=group)
        norm = total.sqrt() / scale
        factor = max_norm / (norm + 1e-6)
        factor = factor.clamp(max=1.0) / scale
        gradients = [weight.grad for weight in weights]
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def full_state_dict(self):
        """Return the whole parameters of this rank's layers. The tp ranks call it together."""
        state_dict = {}
        for stage in self.stages:
            state_dict |= tensor_parallel.full_state_dict(stage)
        return state_dict


# --------------------------------------------------------------------------------------------------
# 4. Checkpoints. They hold the weights of the plain model and the state of its optimizer, by name.

# The arguments that must not change when a run continues from a checkpoint.
FIXED = ("model", "optimizer", "seed", "global_batch_size", "sequence_length", "dropout")
FIXED += ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


def save(trainer, directory, background=False):
    """Save a checkpoint. Return what checkpoint.save() returns."""
    # The number of steps determines the learning rate, the data and, if --micro-batch-size is the
    # same, the seeds of dropout. Another size may use seeds of earlier steps again.
    extra = {
        "fixed": {name: getattr(trainer.args, name) for name in FIXED},
        "step": trainer.steps,
        "tolerance": trainer.tolerance,
        "scaler": trainer.scaler.state_dict(),
    }
    return checkpoint.save(directory, pieces_of(trainer), extra, background=background)


@torch.no_grad()
def load(trainer, directory):
    """Continue from a checkpoint. Its grid, schedule, --zero1 and --dtype may be different."""
    _, index = checkpoint.open_latest(Path(directory))
    extra = index["extra"]
    for name, stored in extra["fixed"].items():
        value = getattr(trainer.args, name)
        if value != stored:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {value}: the run in {directory} has {stored}")
    if any(name.startswith("step/") for name in index["wholes"]):
        # The checkpoint has "step/NAME", so its optimizer is AdamW, which creates its state in its
        # first step. Create it now, so that checkpoint.load() can fill it.
        for _, _, weight, state in updated_tensors(trainer):
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
    checkpoint.load(directory, pieces_of(trainer))
    trainer.steps = extra["step"]
    trainer.tolerance = max(trainer.tolerance, extra["tolerance"])
    if extra["scaler"]:
        trainer.scaler.load_state_dict(extra["scaler"])
    # The weights were loaded into the tensors that the optimizer updates. Copy them to the model.
    if trainer.args.zero1:
        trainer.optimizer.sync_parameters()
    elif trainer.dtype.itemsize == 2:
        trainer.optimizer.write_model_params()


def updated_tensors(trainer):
    """Yield (parameter, start, weight, state) for each weight that the optimizer updates.

    The weight is the parameter or its master, and `start` is 0. With ZeRO-1 the weight is this
    rank's range of the flattened parameter, and `start` is the index of its first element.
    """
    if trainer.args.zero1:
        parameters = dict(trainer.stages.named_parameters())
        for name, _, start, shard, state in trainer.optimizer.shards():
            yield parameters[name], start, shard, state
        return
    weights = trainer.optimizer.param_groups[0]["params"]  # the parameters, or their masters
    for parameter, weight in zip(trainer.parameters, weights, strict=True):
        yield parameter, 0, weight, trainer.optimizer.state[weight]


def pieces_of(trainer):
    """Return this rank's tensors as checkpoint.Pieces of the plain model's tensors.

    Keys are "weight/NAME", and for AdamW "exp_avg/NAME", "exp_avg_sq/NAME" and "step/NAME".
    """
    names = {}
    for stage in trainer.stages:
        for name, parameter in stage.named_parameters():
            names[parameter] = name
    if trainer.tied is not None:
        names[trainer.tied] = "0.word.weight"  # also on the last stage, which has it in the head
    pieces = {}
    for parameter, start, weight, state in updated_tensors(trainer):
        layer, weight_name = trainer.split.get(parameter, (None, None))
        boxes = tensor_parallel.boxes_of(layer, weight_name, parameter.shape)
        for kind, tensor in {"weight": weight.detach(), **state}.items():
            name = f"{kind}/{names[parameter]}"
            if tensor.dim() == 0:  # AdamW's number of steps
                pieces[name] = tensor
                continue
            pieces[name] = []
            flat = tensor.view(-1)
            for box in boxes:
                # flat[0] is this element of the box. It is negative if flat begins before the box.
                start_in_box = start - box.first
                pieces[name] += checkpoint.flat_pieces(
                    flat, box.shape, start_in_box, box.whole_shape, box.offset
                )
    return pieces


# --------------------------------------------------------------------------------------------------
# Demo. What a rank sends and holds: counted, and by formula.


class SentByAxis(ddp.SentBytes):
    """Adds up the bytes that this rank sends along each axis of the grid."""

    def __init__(self, grid):
        super().__init__()
        self.by_axis = {"tp": 0.0, "pp": 0.0, "dp": 0.0}  # bytes that this rank sends
        self.axes = {grid.tp_group.group_name: "tp", grid.dp_group.group_name: "dp"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.total > before:
            # The group is the only ScriptObject among the arguments of a collective.
            handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(handle)
            axis = self.axes.get(group.group_name, "pp")  # the pipeline, or its two ends
            self.by_axis[axis] += self.total - before
        return result


def sent_by_formula(trainer):
    """Bytes that this rank sends per step, without a few hundred for the loss and the norm."""
    grid = trainer.grid
    args = trainer.args
    element = trainer.dtype.itemsize
    m = trainer.num_microbatches
    tokens = args.micro_batch_size * args.sequence_length
    hidden = trainer.config.hidden
    embedding = trainer.embedding is not None
    head = trainer.head is not None
    blocks = sum(map(len, trainer.layer_numbers)) - embedding - head
    neighbours = 0  # how often this rank's stages border on another rank's
    tied = 0
    if grid.pp > 1:
        neighbours = 2 * len(trainer.layer_numbers) - embedding - head
        tied = 0 if trainer.tied is None else trainer.tied.numel()
    parameters = sum(parameter.numel() for parameter in trainer.parameters)
    tp = estimate.tensor_parallel_traffic(
        tokens, hidden, grid.tp, blocks, embedding, head, element, args.sequence_parallel
    )
    if args.fused_loss and head:  # it gathers 3 numbers of a token, and keeps the gathered input
        loss = (3 * grid.tp - 6) * tokens * max(4, element)
        again = tokens * hidden * element if args.sequence_parallel else 0
        tp += (loss - again) * (grid.tp - 1) / grid.tp
    if args.sequence_parallel:
        tokens //= grid.tp
    pp = estimate.pipeline_traffic(tokens, hidden, neighbours, m, tied, element)
    dp = estimate.data_parallel_traffic(parameters, grid.dp, element=element)
    return {"tp": m * tp, "pp": pp, "dp": dp}


def held_bytes(trainer):
    """Bytes of parameters, gradients and optimizer state on this rank."""
    optimizer = trainer.optimizer
    if trainer.args.zero1:
        return zero.held_by(optimizer)
    params, grads, state = ddp.held(trainer.parameters, optimizer)
    if trainer.dtype.itemsize == 2:
        state += ddp.held_bytes(optimizer.param_groups[0]["params"])  # the masters
    return params, grads, state


def held_by_one_device(trainer):
    size = trainer.dtype.itemsize
    masters = 4 if size == 2 else 0
    moments = 2 * max(4, size) if trainer.args.optimizer == "AdamW" else 0
    psi = trainer.config.parameters()
    return psi * size, psi * size, psi * (masters + moments)


# --------------------------------------------------------------------------------------------------
# The command line.

MODELS = {  # layers, hidden size, heads, vocabulary, positions
    "gpt2-tiny": estimate.GPT(4, 64, 4, 257, 128),
    "gpt2-124m": estimate.GPT(12, 768, 12, 50257, 1024),
    "gpt2-345m": estimate.GPT(24, 1024, 16, 50257, 1024),
    "gpt2-774m": estimate.GPT(36, 1280, 20, 50257, 1024),
    "gpt2-1.5b": estimate.GPT(48, 1600, 25, 50257, 1024),
}
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT = "(default: %(default)s)"


def number(default, text, metavar=None):
    """A flag with a number."""
    help_text = f"{text} {DEFAULT}"
    return {"type": type(default), "default": default, "metavar": metavar, "help": help_text}


def switch(text):
    return {"action": "store_true", "help": text}


PACKED = {  # Megatron-LM's flags, for files of data.py with --append-eod
    "--reset-attention-mask": switch("a token sees only its own document"),
    "--reset-position-ids": switch("positions start again in each document"),
    "--eod-mask-loss": switch("no loss for what follows an end of document"),
}
FLAGS = {
    **PACKED,
    "--model": {"choices": MODELS, "default": "gpt2-tiny", "help": DEFAULT},
    "--tp": {"type": int, "help": "tensor-parallel ranks; dp is the number of ranks / (tp · pp)"},
    "--pp": {"type": int, "help": "pipeline ranks; without --tp and --pp, each is 2 if possible"},
    "--schedule": {"choices": pipeline.SCHEDULES, "default": "1f1b", "help": DEFAULT},
    "--stages-per-rank": number(1, "for interleaved_1f1b"),
    "--sequence-parallel": switch("split the sequence over tp as well"),
    "--fused-loss": switch("the loss without its logits, by linear_cross_entropy.py"),
    "--zero1": switch("split the optimizer over data-parallel ranks"),
    "--micro-batch-size": number(2, "sequences that a rank computes at once"),
    "--global-batch-size": number(16, "sequences per step, on all ranks together"),
    "--sequence-length": number(64, "tokens in a sequence"),
    "--dtype": {"choices": DTYPES, "help": "(default: float64 with --check, otherwise float32)"},
    "--optimizer": {"choices": ("AdamW", "SGD"), "default": "AdamW", "help": DEFAULT},
    "--lr": number(1e-3, "learning rate"),
    "--warmup": number(0, "steps in which the learning rate rises to --lr", "STEPS"),
    "--clip-grad": number(1.0, "the largest norm of the gradients, or 0 not to clip", "NORM"),
    "--dropout": number(0.0, "probability"),
    "--metrics": {"metavar": "FILE", "help": "write a line of JSON per step to FILE"},
    "--peak": {
        "type": float,
        "metavar": "TFLOPS",
        "help": f"a device's peak, to print the share of it (known: {', '.join(estimate.PEAKS)})",
    },
    "--save": {"metavar": "DIR", "help": "save checkpoints in DIR; continue from one in DIR"},
    "--save-interval": number(100, "steps between checkpoints", "STEPS"),
    "--save-background": switch("train on while a thread writes a checkpoint"),
    "--load": {
        "metavar": "DIR",
        "help": "continue from DIR, unless the --save DIR has a checkpoint",
    },
    "--compare": switch("train on each grid that fits the ranks"),
    "--check": switch("train on one device too, and compare (gpt2-tiny always does)"),
}
RANKS = 4  # run_all.sh starts so many
COSTS = ("params", "grads", "optimizer", "tp", "pp", "dp")  # the table's columns in MB


class Session(ddp.Demo):
    """The command line, the world, and the data."""

    def __init__(self):
        super().__init__(__doc__, FLAGS, steps=10)
        args = self.args
        self.config = MODELS[args.model]
        args.check = args.check or args.model == "gpt2-tiny"
        args.dtype = args.dtype or ("float64" if args.check else "float32")
        if args.save_interval < 1:
            self.stop(f"--save-interval {args.save_interval}: give 1 or more")
        if args.save and args.compare:
            self.stop("--save is for one grid; leave it out, or leave out --compare")
        if args.idea:
            self.stop("--idea: this file has none of its own; run the files that it combines")
        ddp.join_world(self.device)
        self.metrics = None  # the file, once a run has opened it
        self.signals = []  # the signals that arrived: SIGINT or SIGTERM
        if args.save:
            signal.signal(signal.SIGINT, self.note_signal)
            signal.signal(signal.SIGTERM, self.note_signal)

    def note_signal(self, number, frame):
        self.signals.append(number)

    def read(self, name):
        """Return a text, or None if NAME.idx exists, which open_samples() opens. Set is_indexed."""
        self.is_indexed = os.path.exists(f"{name}.idx")
        if self.is_indexed:
            return None
        for flag in PACKED:
            if getattr(self.args, flag[2:].replace("-", "_")):
                self.stop(f"{flag}: a text has no ends of documents; give --data PREFIX of data.py")
        text = super().read(name)
        needed = self.args.sequence_length + 1
        if len(text) < needed:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need {needed}")
        return text

    def open_samples(self):
        args = self.args
        count = args.steps * args.global_batch_size
        indexed = data.IndexedDataset(args.data)
        self.samples = data.GPTDataset(indexed, args.sequence_length, count, args.seed)

    def batch(self, number):
        """Inputs and targets of a step, (global batch, sequence), on the CPU."""
        size = self.args.global_batch_size
        length = self.args.sequence_length
        if self.is_indexed:
            numbers = data.part_of_batch(number, size, 0, 1)
            window = torch.stack([torch.from_numpy(self.samples[i]) for i in numbers])
        else:
            generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
            starts = torch.randint(len(self.text) - length, (size, 1), generator=generator)
            window = self.text[starts + torch.arange(length + 1)]
        window = window.long()
        inputs = window[:, :-1]
        targets = window[:, 1:]
        if self.args.eod_mask_loss:
            targets = targets.masked_fill(inputs == self.config.vocab - 1, IGNORE)
        return inputs, targets

    def grids(self):
        """Return [(tp, pp)], the grids to train on."""
        args = self.args
        if args.compare:
            return self.fitting_grids()
        if args.tp is None and args.pp is None:
            tp = 2 if self.ranks % 2 == 0 else 1
            pp = 2 if self.ranks % 4 == 0 else 1
            return [(tp, pp)]
        return [(1 if args.tp is None else args.tp, 1 if args.pp is None else args.pp)]

    def fitting_grids(self):
        """Return the grids of all ranks that check_arguments() accepts."""
        grids = []
        sizes = range(1, self.ranks + 1)
        products = itertools.product(sizes, sizes)
        for tp, pp in (pair for pair in products if self.ranks % math.prod(pair) == 0):
            grid = SimpleNamespace(tp=tp, pp=pp, dp=self.ranks // (tp * pp))
            try:
                check_arguments(self.config, grid, self.args)
                grids.append((tp, pp))
            except ValueError as error:
                reason = error
        if not grids:
            self.stop(f"--compare: no grid fits; {reason}")
        return grids

    def max_over_ranks(self, numbers):
        """Return the largest value of each number on any rank."""
        numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def speed(self, seconds):
        """Return tokens per second, and the share of the devices' peak: None if it is unknown."""
        args = self.args
        tokens_per_second = args.global_batch_size * args.sequence_length / seconds
        peak = args.peak
        if peak is None and self.device.type == "cuda":
            peak = estimate.peak_of(torch.cuda.get_device_name(self.device))
        if peak is None:
            return tokens_per_second, None
        model = dataclasses.replace(self.config, sequence=args.sequence_length)
        flops = tokens_per_second * estimate.flops_per_token(model)
        return tokens_per_second, flops / (peak * 1e12 * self.ranks)


class Run:
    """Trains on one grid, and on one device to compare. Prints the results, saves checkpoints."""

    def __init__(self, session, tp, pp):
        self.session = session
        self.args = session.args
        self.losses = []
        self.times = []  # seconds of each step
        self.plain_times = []  # seconds of each step on one device
        self.differences = []  # largest absolute differences from one device
        self.pending = None  # a checkpoint that a thread writes
        try:
            self.begin(tp, pp)
        except (OSError, ValueError) as error:
            session.stop(error)

    def line(self, label, text):
        """Print a line of results."""
        self.session.show(f"{label:<12}{text}")

    def begin(self, tp, pp):
        """Make the trainer. Load the checkpoint in --save, or else the one in --load."""
        session = self.session
        args = self.args
        self.trainer = Trainer(session.config, Grid(tp, pp), args, session.device)
        if session.is_indexed:
            session.open_samples()
        ranks = f"{session.ranks} rank{'s' if session.ranks > 1 else ''}"
        size = f"{session.config.parameters() / 1e6:.1f}M parameters in {args.dtype}"
        backend = f"{session.device.type}/{dist.get_backend()}"
        session.show(f"parallel_3d · {ranks} · {backend} · {size} · {session.steps}")
        grid = f"tp {tp} × pp {pp} × dp {self.trainer.grid.dp}"
        self.line("grid", f"{grid} · {args.model}")
        directory = args.load
        if args.save and os.path.exists(os.path.join(args.save, "latest")):
            directory = args.save
        if directory:
            if not os.path.exists(os.path.join(directory, "latest")):
                raise ValueError(f"--load {directory}: it has no checkpoint")
            load(self.trainer, directory)
            self.line("loaded", f"{directory} after step {self.trainer.steps}")
        if session.metrics is None:
            # Append if a checkpoint was loaded.
            name = args.metrics if args.metrics and session.rank == 0 else os.devnull
            mode = "a" if self.trainer.steps > 0 else "w"
            session.metrics = open(name, mode)  # noqa: SIM115

    def train(self):
        """Return a row of the table, or None if no step was left or if a signal ended the run."""
        session = self.session
        plain = self.train_plain()
        for number in range(self.trainer.steps, self.args.steps):
            batch = session.batch(number)
            is_last = number + 1 == self.args.steps
            sent = SentByAxis(self.trainer.grid)
            start = session.now()
            with sent if is_last else nullcontext():  # counting takes time
                loss, norm = self.trainer.step(*batch)
            middle = session.now()
            expected = next(plain)
            self.plain_times.append(session.now() - middle)
            self.times.append(middle - start)
            self.losses.append(loss)
            self.show_progress(loss, norm)
            if expected is not None:
                self.add_differences(loss, norm, *expected)
            if self.args.save and self.save():
                return None
        return self.report(sent) if self.losses else None

    def train_plain(self):
        """Return an iterator over one device's (loss, norm, model), or over None if not --check."""
        args = self.args
        # Each tp rank draws the dropout masks of its own heads. One device would draw others.
        other_masks = self.trainer.grid.tp > 1 and args.dropout > 0
        if not args.check or other_masks:
            return itertools.repeat(None)
        batches = map(self.session.batch, range(args.steps))
        steps = train_on_one_device(self.session.config, args, batches, self.session.device)
        # One device loads no checkpoint. It computes all steps, and islice drops those loaded.
        return itertools.islice(steps, self.trainer.steps, None)

    def add_differences(self, loss, norm, plain_loss, plain_norm, plain):
        expected = plain.state_dict()
        for name, parameter in self.trainer.full_state_dict().items():
            difference = (parameter - expected[name]).abs().max()
            self.differences.append(difference.item())
        self.differences.append(abs(loss - plain_loss))
        self.differences.append(abs(norm - plain_norm))

    def save(self):
        """Save a checkpoint if it is time. Return whether a signal to stop reached any rank."""
        args = self.args
        steps = self.trainer.steps
        stop = torch.tensor(len(self.session.signals), device=self.session.device)
        dist.all_reduce(stop)
        is_last = bool(stop) or steps == args.steps
        if is_last or steps % args.save_interval == 0:
            if self.pending is not None:
                self.attempt(self.pending.wait, "in the background")
            reason = ", stopped by a signal" if stop else ""
            background = args.save_background and not is_last
            writer = partial(save, self.trainer, args.save, background)
            self.attempt(writer, f"after step {steps}{reason}")
        return bool(stop)

    def attempt(self, write, when):
        """Call write(). If it raises an OSError, all ranks raise it, and they go on training."""
        try:
            self.pending = write()
        except OSError as error:
            self.line("NOT saved", f"{when}: {error}")
        else:
            label = "saved" if self.pending is None else "saving"
            self.line(label, f"{self.args.save} {when}")

    def show_progress(self, loss, norm):
        """Print a line, and write the step's metrics."""
        grid = self.trainer.grid
        steps = self.trainer.steps
        tokens_per_second, share_of_peak = self.session.speed(self.times[-1])
        is_gpu = self.session.device.type == "cuda"
        metrics = {
            "step": steps,
            "loss": loss,
            "grad_norm": norm,
            "lr": self.trainer.optimizer.param_groups[0]["lr"],
            "seconds": self.times[-1],
            "tokens_per_second": tokens_per_second,
            "share_of_peak": share_of_peak,
            "max_memory_allocated": torch.cuda.max_memory_allocated() if is_gpu else None,
            "tp": grid.tp,
            "pp": grid.pp,
            "dp": grid.dp,
        }
        print(json.dumps(metrics), file=self.session.metrics, flush=True)
        line = f"step {steps}/{self.args.steps}   loss {loss:.3f}   grad norm {norm:.3f}"
        line += f"   {tokens_per_second:,.0f} tokens/s"
        line += "" if share_of_peak is None else f"   {share_of_peak:.1%} of peak"
        self.session.show(line)

    def report(self, sent):
        """Print the results. Return a row of the table: of each cost the maximum over all ranks."""
        session = self.session
        grid = self.trainer.grid
        formula = sum(sent_by_formula(self.trainer).values())
        costs = [*held_bytes(self.trainer), *sent.by_axis.values(), sent.total, formula]
        largest = session.max_over_ranks(costs)
        *cells, total, formula = [f"{cost / 1e6:.1f}" for cost in largest]
        params, grads, state, *_ = cells
        plain_held = " / ".join(f"{cost / 1e6:.1f}" for cost in held_by_one_device(self.trainer))
        self.line("loss", f"{self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        verdict = self.verdict()
        held = f"params {params} MB   grads {grads} MB   optimizer {state} MB"
        self.line("held/rank", f"{held}      (1 device: {plain_held})")
        self.line("sent/rank", f"{total} MB per step      formula tp+pp+dp = {formula} MB")
        seconds = statistics.median(self.times)
        plain_ms = f"{1e3 * statistics.median(self.plain_times):.0f}" if self.differences else "-"
        self.line("time", f"{1e3 * seconds:.0f} ms per step      (1 device: {plain_ms})")
        if session.device.type == "cuda":
            (memory,) = session.max_over_ranks([torch.cuda.max_memory_allocated()])
            self.line("memory/rank", f"{memory / 1e9:.2f} GB at most, with activations")
        tokens_per_second, _ = session.speed(seconds)
        sizes = f"{grid.tp} × {grid.pp} × {grid.dp}"
        return [sizes, *cells, f"{tokens_per_second:,.0f}", verdict]

    def verdict(self):
        differences = torch.tensor([0.0, *self.differences]).nan_to_num(nan=math.inf)
        (largest,) = self.session.max_over_ranks([differences.max()])
        if not self.differences:
            return "-"
        tolerance = self.trainer.tolerance
        agree = largest <= tolerance
        equal = f"{'' if agree else 'NOT '}equal within {tolerance}: {largest:.0e}"
        result = f"loss, gradient norm and parameters {equal} over {self.session.steps}"
        self.line("vs 1 device", result)
        return "ok" if agree else "DIFFERS"


def main():
    session = Session()
    rows = [Run(session, tp, pp).train() for tp, pp in session.grids()]
    if None in rows:
        return 0
    session.show(
        "MB, maximum over all ranks. Held: params, grads, optimizer. Sent per step: tp, pp, dp."
    )
    for row in (["tp × pp × dp", *COSTS, "tokens/s", "vs 1 device"], *rows):
        session.show("  ".join(f"{cell:>11}" for cell in row))
    return int(any(row[-1] == "DIFFERS" for row in rows))


if __name__ == "__main__":
    status = main()
    gc.collect()  # drop objects that hold a group: gloo's threads may abort at exit
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)
