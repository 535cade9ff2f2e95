"""GPT-2 on a grid of ranks: tensor × data × pipeline parallel, each from its own file, put together as by Megatron-LM.

Each of the L blocks is on one stage of the pipeline, each of its matrices is split over the tensor-parallel ranks of
the stage, and each pipeline trains on its own part of the batch. 8 ranks with --tp 2 --pp 2, so dp = 2:

                    stage 0: embedding, blocks 0 … L/2-1         stage 1: blocks L/2 … L-1, head
    batch, part 0   rank 0 ═══ rank 1                     ───→   rank 4 ═══ rank 5
                        ┊          ┊                                 ┊          ┊
    batch, part 1   rank 2 ═══ rank 3                     ───→   rank 6 ═══ rank 7

    ═══ tp: activations, in every layer     ───→ pp: activations, between stages     ┊ dp: gradients, once a step

Tensor-parallel ranks are neighbours, as they wait for each other in every layer: rank = (pp · DP + dp) · TP + tp.

What the axes must know of each other is in `Trainer`: the embedding is also the head, on another stage, so their
gradients are added; the loss is a mean over the tokens of the whole batch; the norm of the gradients counts each once;
dropout has a seed for each layer and micro-batch, wherever they are; a checkpoint is of no grid, and loads on any.

Cost per rank, in elements; Ψ parameters, L blocks, b sequences in each of m micro-batches, s tokens, h hidden size:

    held         parameters Ψ/(tp·pp), gradients as many, optimizer twice as many, with --zero1 over dp
    sent by tp   (8L/pp + 2 at each end) · m·bsh (tp-1)/tp, and the loss's 6·m·bs (tp-1)/tp
         by pp   m·bsh to each neighbour stage; between the first and the last the embedding's gradient
         by dp   2Ψ/(tp·pp) (dp-1)/dp, with and without --zero1

Run:      torchrun --nproc-per-node 4 parallel_3d.py [--tp 2 --pp 2] [--model gpt2-345m] [--compare]
          [--data PREFIX], of data.py; [--save DIR] [--load DIR], on any grid; Ctrl-C, SIGTERM to a rank: save, end
          TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 … goes on after a rank died (pytorch#135712)
Paper:    Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473
Mirrors:  Megatron-LM's pretrain_gpt.py
Left out: evaluation; context and expert parallelism
"""

import argparse
import gc
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import amp
import checkpoint
import data
import ddp
import pipeline
import tensor_parallel
import zero

# ---------------------------------------------------------------------------------------------------------------------
# 1. The grid.


class Grid:
    """`tp`, `dp` and `pp` are the sizes; of this rank, `at[axis]` is the position and `groups[axis]` the neighbours.

    `groups["ends"]` are the first and the last of pp. ValueError when tp · pp does not divide the world.
    """

    def __init__(self, tp, pp):
        world = dist.get_world_size()
        if tp < 1 or pp < 1 or world % (tp * pp):
            raise ValueError(
                f"--tp {tp} × --pp {pp} = {tp * pp} ranks must divide the world of {world}"
            )
        self.tp, self.dp, self.pp = tp, world // (tp * pp), pp
        ranks = torch.arange(world).view(pp, self.dp, tp)
        self.at = dict(
            zip(("pp", "dp", "tp"), (ranks == dist.get_rank()).nonzero()[0].tolist(), strict=True)
        )
        rows = {"tp": ranks.flatten(0, 1), "dp": ranks.mT.flatten(0, 1), "pp": ranks.flatten(1).T}
        if pp > 1:
            rows["ends"] = rows["pp"][:, [0, -1]]
        self.groups = {}
        for axis, lists in rows.items():  # all ranks make all groups
            self.groups[axis], _ = dist.new_subgroups_by_enumeration(
                lists.tolist(), timedelta(minutes=10)
            )

    def sum(self, number, *axes):
        """The sum of a tensor of one number over the ranks along `axes`: the same on all of them."""
        for axis in axes:
            dist.all_reduce(number, group=self.groups[axis])
        return number.item()


# ---------------------------------------------------------------------------------------------------------------------
# 2. The model (Radford et al. 2019): plain layers, and what makes them parallel. Activations: sequence, batch, hidden.

GPT2 = namedtuple(
    "GPT2", "L h heads V P", defaults=(50257, 1024)
)  # layers, hidden, heads, vocabulary, positions
MODELS = {
    "gpt2-tiny": GPT2(4, 64, 4, V=257, P=128),
    "gpt2-124m": GPT2(12, 768, 12),
    "gpt2-345m": GPT2(24, 1024, 16),
    "gpt2-774m": GPT2(36, 1280, 20),
    "gpt2-1.5b": GPT2(48, 1600, 25),
}


class Embedding(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        self.word, self.position = (
            nn.Embedding(config.V, config.h),
            nn.Embedding(config.P, config.h),
        )
        self.dropout, self.enter = (
            nn.Dropout(dropout),
            lambda x: x,
        )  # or: scatter along the sequence

    def forward(self, tokens_bs):
        positions = self.position(torch.arange(tokens_bs.shape[1], device=tokens_bs.device))
        return self.dropout(self.enter(self.word(tokens_bs.T) + positions[:, None]))


class Block(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        h, self.head_dim = config.h, config.h // config.heads
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(h), nn.LayerNorm(h), nn.Dropout(dropout)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.linear1, self.linear2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.region = nullcontext  # in which the heads draw their dropout

    def forward(self, x_sbh):
        heads = (
            y.unflatten(-1, (-1, self.head_dim)).movedim(0, 2)
            for y in self.qkv(self.norm1(x_sbh)).chunk(3, -1)
        )
        dropout = self.dropout.p if self.training else 0.0
        with self.region() if dropout else nullcontext():
            y = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        x_sbh = x_sbh + self.dropout(self.proj(y.movedim(2, 0).flatten(2)))
        return x_sbh + self.dropout(
            self.linear2(F.gelu(self.linear1(self.norm2(x_sbh)), approximate="tanh"))
        )


class Head(nn.Sequential):
    def __init__(self, config, dropout):
        super().__init__(
            OrderedDict(
                norm=nn.LayerNorm(config.h), linear=nn.Linear(config.h, config.V, bias=False)
            )
        )


@torch.no_grad()
def build_layer(config, number, dropout=0.0, seed=0):
    """Layer `number` of the plain model: 0 is the embedding, L + 1 the head. Each has a seed of its own."""
    torch.manual_seed(seed * 10_000 + number)
    layer = (Embedding if number == 0 else Head if number == config.L + 1 else Block)(
        config, dropout
    )
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            residual = name in ("proj.weight", "linear2.weight")  # 2L of them add up
            parameter.normal_(std=0.02 / (2 * config.L) ** 0.5 if residual else 0.02)
        elif name.endswith("bias"):
            parameter.zero_()
    if number > config.L:  # starts as a copy of the embedding, which may be on another stage
        layer.linear.weight = build_layer(config, 0, seed=seed).word.weight
    return layer


class Stage(nn.Sequential):
    """Some layers of the model, {number: layer}, for one micro-batch after the other, from number `microbatch` on.

    Dropout has a seed for each layer and micro-batch, so that one device, which has all of both, draws the same masks.
    """

    def __init__(self, layers, seed=None):
        super().__init__()
        self._modules.update({str(number): layer for number, layer in layers.items()})
        self.microbatch, self.seed = 0, seed

    def forward(self, x):
        for number, layer in self.named_children():
            if self.seed is not None:
                torch.manual_seed(self.seed * 2**40 + self.microbatch * 2**10 + int(number))
            x = layer(x)
        self.microbatch += 1
        return x


def plain_model(config, dropout=0.0, seed=0):
    """The whole model on one device: (batch, sequence) tokens to (sequence, batch, V) logits."""
    layers = {number: build_layer(config, number, dropout, seed) for number in range(config.L + 2)}
    layers[config.L + 1].linear.weight = layers[0].word.weight
    return Stage(layers, seed if dropout else None)


PLAN = {
    "word": "vocab",
    "linear": "vocab",
    "qkv": "qkv",
    "proj": "row",
    "linear1": "column",
    "linear2": "row",
}
PLAN |= {"norm": "norm", "norm1": "norm", "norm2": "norm", "dropout": "dropout"}


def split_layer(layer, group, sequence_parallel):
    """Let a plain layer keep this rank's slices."""
    names = [name for name in layer._modules if name in PLAN]
    if not sequence_parallel:  # dropout of whole activations draws the same on all ranks
        names = [name for name in names if name != "dropout"]
    if isinstance(layer, Block):
        layer.region = lambda: tensor_parallel.parallel_region(group)
    elif isinstance(layer, Embedding) and sequence_parallel:
        layer.enter = lambda x: tensor_parallel.scatter_to_sequence(x, group)
    return tensor_parallel.parallelize(
        layer, {name: PLAN[name] for name in names}, group, sequence_parallel
    )


def layers_of_stage(config, stage, num_stages):
    """The numbers of its layers: as many blocks on each stage as on any, give or take one."""
    blocks = [1 + i for i in range(config.L) if i * num_stages // config.L == stage]
    return [0] * (stage == 0) + blocks + [config.L + 1] * (stage == num_stages - 1)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Training: first on one device, as plainly as possible, then on the grid.


def train_on_one_device(config, args, batches, device="cpu"):
    """Yields (loss, gradients' norm, model) after each step. What is to be in 16 bits is in fp32 here."""
    dtype = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    model = plain_model(config, args.dropout, args.seed).to(device, dtype)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)
    for number, (inputs, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (number + 1) / max(1, args.warmup))
        optimizer.zero_grad()
        loss, tokens = 0.0, (targets != -100).sum().clamp(min=1)
        for x, y in zip(
            inputs.split(args.micro_batch_size), targets.split(args.micro_batch_size), strict=True
        ):
            part = F.cross_entropy(model(x).flatten(0, 1), y.T.flatten(), reduction="sum") / tokens
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or math.inf).item()
        optimizer.step()
        yield loss, norm, model


class Trainer:
    """The stages of this rank, their optimizer, and the step. `args` are those of the command line."""

    def __init__(self, config, grid, args, device="cpu"):
        self.config, self.grid, self.args, self.device = config, grid, args, torch.device(device)
        self.dtype, self.steps = getattr(torch, args.dtype), 0  # done
        fixed = ("model", "optimizer", "seed", "global_batch_size", "sequence_length", "dropout")
        self.must_match = {name: getattr(args, name) for name in fixed}  # where it goes on
        self.num_stages = grid.pp * args.stages_per_rank
        self.microbatches = args.global_batch_size // max(args.micro_batch_size * grid.dp, 1)
        self.check_arguments()
        mine = range(grid.at["pp"], self.num_stages, grid.pp)
        self.numbers = [layers_of_stage(config, stage, self.num_stages) for stage in mine]
        layers = {}
        for number in itertools.chain(
            *self.numbers
        ):  # one after the other: no rank ever holds a whole stage
            layer = build_layer(config, number, args.dropout, args.seed)
            layers[number] = split_layer(layer, grid.groups["tp"], args.sequence_parallel).to(
                self.device, self.dtype
            )
        embedding, head = layers.get(0), layers.get(config.L + 1)
        if embedding and head:
            head.linear.weight = embedding.word.weight
        self.tied = embedding.word.weight if embedding else head.linear.weight if head else None
        seed = args.seed if args.dropout else None
        self.stages = nn.ModuleList(
            Stage({number: layers[number] for number in part}, seed) for part in self.numbers
        )
        self.parameters = list(self.stages.parameters())
        # In the norm, what several ranks hold counts on one: the first of tp, the first stage.
        split = {
            self.stages.get_parameter(name)
            for name, *_ in tensor_parallel.split_parameters(self.stages)
        }
        self.counted = {
            parameter for parameter in self.parameters if parameter in split or grid.at["tp"] == 0
        }
        if not embedding:
            self.counted.discard(self.tied)
        self.pipeline = pipeline.Pipeline(
            self.stages, args.schedule, self.microbatches, self.loss, grid.groups["pp"]
        )
        self.scaler = amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        optimizer, lr = getattr(torch.optim, args.optimizer), args.lr
        if args.zero1:  # has fp32 masters where the model is in 16 bits
            self.optimizer = zero.Zero1(self.stages, optimizer, grid.groups["dp"], lr=lr)
        else:
            self.optimizer = optimizer(self.parameters, lr=lr)
            if self.dtype.itemsize == 2:
                self.optimizer = amp.MixedPrecisionOptimizer(self.optimizer, self.dtype)

    def check_arguments(self):
        args, grid, config = self.args, self.grid, self.config
        tensor_parallel.check_divides("attention heads", config.heads, grid.tp)
        if args.sequence_parallel:
            tensor_parallel.check_divides("positions", args.sequence_length, grid.tp)
        multiple, size = args.micro_batch_size * grid.dp, args.global_batch_size
        if multiple < 1 or size < 1 or size % multiple:
            multiple = f"--micro-batch-size {args.micro_batch_size} × {grid.dp} data-parallel ranks"
            raise ValueError(f"--global-batch-size {size} must be a multiple of {multiple}")
        if not 1 <= self.num_stages <= config.L:
            raise ValueError(
                f"{self.num_stages} stages on {grid.pp} ranks; the model has {config.L} blocks"
            )
        if not 1 <= args.sequence_length <= config.P:
            raise ValueError(
                f"--sequence-length {args.sequence_length}; the model has {config.P} positions"
            )
        if not args.clip_grad >= 0:
            raise ValueError(f"--clip-grad {args.clip_grad}; it must be positive, or 0 for none")

    def step(self, inputs_bs, targets_bs):
        """One step on the global batch, targets of -100 masked. -> its loss and its gradients' norm, on all ranks.

        A gradient that is not finite, on any rank, leaves the parameters as they are on all.
        """
        grid, args, m, scale = self.grid, self.args, self.microbatches, self.scaler.get_scale()
        inputs, targets = (
            x.to(self.device).chunk(grid.dp)[grid.at["dp"]] for x in (inputs_bs, targets_bs)
        )
        # The loss of a micro-batch is the sum over its tokens times this: so the mean over micro-batches and pipelines
        # is the mean over the tokens of the batch, wherever they are.
        self.per_token = m * grid.dp / max(1, (targets_bs != -100).sum().item())
        for stage in self.stages:
            stage.microbatch = (self.steps * grid.dp + grid.at["dp"]) * m
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = args.lr * min(1.0, self.steps / max(1, args.warmup))
        self.optimizer.zero_grad()
        loss = self.pipeline.step(inputs, targets)
        if self.tied is not None and grid.pp > 1:  # it is used on the first stage and on the last
            dist.all_reduce(self.tied.grad, group=grid.groups["ends"])
        if not args.zero1:  # which averages by itself, as it clips or steps
            ddp.all_reduce_gradients(self.stages, grid.groups["dp"])
        norm = self.clip_grad_norm_(args.clip_grad or math.inf)
        self.optimizer.step() if math.isfinite(norm) else self.optimizer.zero_grad()
        if (
            self.scaler.is_enabled()
        ):  # the norm is the same on all ranks, and finite if all gradients are
            self.scaler._found[self.optimizer] = not math.isfinite(norm)
            self.scaler.update()
        loss = torch.zeros((), device=self.device) if loss is None else loss / scale / grid.dp
        return grid.sum(loss.double(), "pp", "dp"), norm

    def loss(self, logits, targets_bs):
        losses = tensor_parallel.vocab_parallel_cross_entropy(
            logits, targets_bs.T, self.grid.groups["tp"]
        )
        return self.scaler.scale(losses.sum() * self.per_token)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Divide the gradients by the scale of the loss, and clip them; -> the norm of all of them together."""
        grid, scale, counted = self.grid, self.scaler.get_scale(), self.counted.__contains__
        if self.args.zero1:
            for bucket in self.optimizer._buckets if self.scaler.is_enabled() else ():
                bucket.divisor = scale  # whose 16-bit gradients are means
            groups = [grid.groups["tp"], grid.groups["pp"]]
            return self.optimizer.clip_grad_norm_(
                max_norm, counted=counted, process_groups=groups
            ).item()
        if self.dtype.itemsize == 2:
            self.optimizer.unscale_()  # casts them up
        weights = self.optimizer.param_groups[0]["params"]  # the parameters, or their fp32 masters
        mine = [
            weight.grad for weight in itertools.compress(weights, map(counted, self.parameters))
        ]
        norm = grid.sum(nn.utils.get_total_norm(mine).double() ** 2, "tp", "pp") ** 0.5 / scale
        for weight in weights:
            weight.grad.mul_(min(1.0, max_norm / (norm + 1e-6)) / scale)
        return norm

    def full_state_dict(self):
        """The whole parameters of this rank's layers, under their names in the plain model. All tp ranks call it."""
        return {
            name: x
            for stage in self.stages
            for name, x in tensor_parallel.full_state_dict(stage).items()
        }


# ---------------------------------------------------------------------------------------------------------------------
# 4. Checkpoints, of no grid: pieces of the plain model's weights and of their optimizer's state, by name.


def save(trainer, directory):  # the number of steps is the state of lr, data and dropout, too
    extra = {
        "run": trainer.must_match,
        "step": trainer.steps,
        "scaler": trainer.scaler.state_dict(),
    }
    checkpoint.save(directory, pieces_of(trainer), extra)


@torch.no_grad()
def load(trainer, directory):
    """Go on from a checkpoint of any grid, schedule, --zero1, --dtype: it has what the optimizer updates."""
    _, stored, extra = checkpoint.open_latest(Path(directory))
    for name, value in trainer.must_match.items():
        if value != extra["run"][name]:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: the run in {directory} has {extra['run'][name]}"
            )
    if any(
        name.startswith("step/") for name in stored
    ):  # AdamW's; what has made no step has no state yet
        for _, _, weight, state in optimized(trainer):
            state.update(
                step=torch.tensor(0.0),
                **{x: torch.zeros_like(weight) for x in ("exp_avg", "exp_avg_sq")},
            )
    checkpoint.load(directory, pieces_of(trainer))
    trainer.steps = extra["step"]
    if trainer.scaler.is_enabled() and extra["scaler"]:
        trainer.scaler.load_state_dict(extra["scaler"])
    for bucket in trainer.optimizer._buckets if trainer.args.zero1 else ():
        bucket.shard.copy_(bucket.master)
        bucket.start_gather()
        bucket.finish_gather()
    if isinstance(trainer.optimizer, amp.MixedPrecisionOptimizer):
        trainer.optimizer._write_weights()


def pieces_of(trainer):
    """{kind/name: where this rank's elements of a weight, or of its state, lie in the plain model's}"""
    names = {
        parameter: name for stage in trainer.stages for name, parameter in stage.named_parameters()
    }
    names[trainer.tied] = "0.word.weight"
    split = {
        layer._parameters[x]: (layer, x)
        for _, layer, x in tensor_parallel.split_parameters(trainer.stages)
    }
    pieces = {}
    for parameter, start, weight, state in optimized(trainer):
        places = places_of(parameter, *split.get(parameter, (None, None)))
        for kind, x in {"weight": weight.detach(), **state}.items():
            parts = (
                checkpoint.flat_pieces(x.view(-1), shape, start - begin, *at)
                for begin, shape, *at in places
            )
            pieces[f"{kind}/{names[parameter]}"] = list(itertools.chain(*parts)) if x.dim() else x
    return pieces


def optimized(trainer):
    """Yield (parameter, the number of its first element here, what the optimizer updates, its state)."""
    if not trainer.args.zero1:  # the parameters, or their fp32 masters
        for parameter, weight in zip(
            trainer.parameters, trainer.optimizer.param_groups[0]["params"], strict=True
        ):
            yield parameter, 0, weight, trainer.optimizer.state[weight]
    for bucket in trainer.optimizer._buckets if trainer.args.zero1 else ():
        for parameter, segment in zip(bucket.parameters, bucket.segments, strict=True):
            start = (
                bucket.rank * len(bucket.master) - parameter.storage_offset()
            )  # it lies in bucket.flat
            yield parameter, max(0, start), segment, trainer.optimizer._optimizer.state[segment]


def places_of(parameter, layer, name):
    """[(where a part of the flattened slice begins, its shape, the whole's, its offset there), …]: of qkv three."""
    local, places, at = list(parameter.shape), [], 0
    if layer is None:
        return [(0, local, local, [0] * len(local))]
    dim = layer.split_dims[name]
    whole = [n * layer.world_size - layer.padding if d == dim else n for d, n in enumerate(local)]
    for share in layer.stack:
        n, shape, offset = local[dim] * share // sum(layer.stack), list(local), [0] * len(local)
        offset[dim] = at * layer.world_size + n * layer.rank
        shape[dim] = max(0, min(n, whole[dim] - offset[dim]))  # padding is nobody's
        places.append((at * math.prod(local[dim + 1 :]), shape, whole, offset))
        at += n
    return places


# ---------------------------------------------------------------------------------------------------------------------
# 5. What it costs: measured, and by formula.


class SentByAxis(ddp.SentBytes):
    """`by_axis`: the bytes that this rank sends along each axis of the grid."""

    def __init__(self, grid):
        super().__init__()
        self.by_axis = dict.fromkeys(("tp", "pp", "dp"), 0.0)
        self.axes = {grid.groups[axis].group_name: axis for axis in self.by_axis}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, result = self.total, super().__torch_dispatch__(func, types, args, kwargs)
        if self.total > before:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            self.by_axis[self.axes.get(dist.ProcessGroup.unbox(group).group_name, "pp")] += (
                self.total - before
            )
        return result


def sent_by_formula(trainer):
    """Bytes that this rank sends in a step along each axis; without the few hundred by which ranks agree on numbers."""
    config, grid, args, itemsize = (
        trainer.config,
        trainer.grid,
        trainer.args,
        trainer.dtype.itemsize,
    )
    t, m, bs, h = (
        grid.tp,
        trainer.microbatches,
        args.micro_batch_size * args.sequence_length,
        config.h,
    )
    numbers = [number for stage in trainer.numbers for number in stage]
    first, last = 0 in numbers, config.L + 1 in numbers
    blocks, ends = len(numbers) - first - last, first + last
    tp = (8 * blocks + 2 * ends) * bs * h
    if (
        args.sequence_parallel
    ):  # inputs are gathered again in backward; norms' and row biases' gradients are summed
        tp += (2 * blocks + ends) * bs * h + (12 * blocks + 4 * last) * h
    tp = tp * itemsize + 6 * last * bs * max(4, itemsize)  # the loss is in fp32 at least
    hops = (
        2 * len(trainer.numbers) - ends if grid.pp > 1 else 0
    )  # to both neighbours, where a stage has them
    pp = m * hops * bs * h // (t if args.sequence_parallel else 1) + (
        trainer.tied.numel() if hops and ends else 0
    )
    dp = 2 * sum(parameter.numel() for parameter in trainer.parameters) * (grid.dp - 1) / grid.dp
    return {"tp": m * tp * (t - 1) / t, "pp": pp * itemsize, "dp": dp * itemsize}


# ---------------------------------------------------------------------------------------------------------------------
# Demo.

FLAGS = {
    "--model": {"choices": MODELS, "default": "gpt2-tiny"},
    "--tp": {"type": int, "help": "tensor-parallel ranks; data-parallel are those that are left"},
    "--pp": {
        "type": int,
        "help": "pipeline-parallel ranks; without --tp and --pp both are 2 where the world has them",
    },
    "--schedule": {"choices": pipeline.SCHEDULES, "default": "1f1b"},
    "--stages-per-rank": {"type": int, "default": 1},
    "--sequence-parallel": {"action": "store_true"},
    "--zero1": {"action": "store_true", "help": "split the optimizer over data-parallel ranks"},
    "--micro-batch-size": {
        "type": int,
        "default": 2,
        "help": "sequences that are computed at once",
    },
    "--global-batch-size": {
        "type": int,
        "default": 16,
        "help": "sequences per step, over all ranks",
    },
    "--sequence-length": {"type": int, "default": 64},
    "--dtype": {
        "choices": ("float64", "float32", "bfloat16", "float16"),
        "help": "default: float64 where compared",
    },
    "--optimizer": {"choices": ("AdamW", "SGD"), "default": "AdamW"},
    "--lr": {"type": float, "default": 1e-3},
    "--warmup": {
        "type": int,
        "default": 0,
        "metavar": "STEPS",
        "help": "steps to the full learning rate",
    },
    "--clip-grad": {"type": float, "default": 1.0, "metavar": "NORM", "help": "0: do not clip"},
    "--dropout": {"type": float, "default": 0.0},
    "--metrics": {"metavar": "FILE", "help": "write a JSON object a line and step"},
    "--save": {
        "metavar": "DIR",
        "help": "go on from the checkpoint here, if any; write more, the last at a Ctrl-C",
    },
    "--save-interval": {"type": int, "default": 100, "metavar": "STEPS"},
    "--load": {"metavar": "DIR", "help": "go on from this checkpoint, if there is none in --save"},
    "--compare": {"action": "store_true", "help": "one row for each grid that fits the world"},
    "--check": {"action": "store_true", "help": "compare with one device (tiny: always)"},
}
HEADER = (
    "tp × pp × dp",
    "params",
    "grads",
    "optimizer",
    "tp",
    "pp",
    "dp",
    "tokens/s",
    "vs 1 device",
)


class Session(ddp.Demo):
    """Trains on a grid, or on several, beside one device, and prints."""

    def __init__(self):
        ddp.__doc__ = __doc__  # whose first line --help shows
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--data")
        self.prefix = parser.parse_known_args()[0].data
        self.is_indexed = os.path.exists(f"{self.prefix}.idx")
        sys.argv += ["--data", __file__] if self.is_indexed else []  # a text, which is not used
        super().__init__(FLAGS, steps=10)
        args, self.config = self.args, MODELS[self.args.model]
        with torch.device("meta"):
            self.psi = sum(parameter.numel() for parameter in plain_model(self.config).parameters())
        args.check = args.check or args.model == "gpt2-tiny"
        args.dtype = args.dtype or ("float64" if args.check else "float32")
        self.metrics, self.signals = None, []
        for number in (signal.SIGINT, signal.SIGTERM) if args.save else ():
            signal.signal(number, lambda number, _: self.signals.append(number))

    def grids(self):  # -> (tp, pp) of each
        tp, pp, sizes = self.args.tp, self.args.pp, range(1, self.ranks + 1)
        if self.args.compare:
            fit = [
                (tp, pp)
                for tp in sizes
                for pp in sizes
                if self.ranks % (tp * pp) == self.config.heads % tp == 0
            ]
            return [(tp, pp) for tp, pp in fit if pp * self.args.stages_per_rank <= self.config.L]
        if tp is None and pp is None:
            return [(2 if self.ranks % 2 == 0 else 1, 2 if self.ranks % 4 == 0 else 1)]
        return [(1 if tp is None else tp, 1 if pp is None else pp)]

    def batch(self, number):  # -> inputs, targets of a step, (global batch, sequence)
        B, T = self.args.global_batch_size, self.args.sequence_length
        if self.is_indexed:
            window = torch.stack(
                [torch.from_numpy(self.tokens[i]) for i in data.part_of_batch(number, B, 0, 1)]
            )
        else:
            generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
            window = self.text[
                torch.randint(len(self.text) - T, (B, 1), generator=generator) + torch.arange(T + 1)
            ]
        window = window.to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def begin(self, tp, pp):
        """-> the trainer, which has gone as far as the checkpoint in --save, else in --load, if any"""
        args = self.args
        trainer = Trainer(self.config, Grid(tp, pp), args, self.device)
        if self.is_indexed:
            samples, indexed = args.steps * args.global_batch_size, data.IndexedDataset(self.prefix)
            self.tokens = data.GPTDataset(indexed, args.sequence_length, samples, args.seed)
        world = (
            f"{self.ranks} rank{'s' * (self.ranks > 1)} · {self.device.type}/{dist.get_backend()}"
        )
        self.show(f"parallel_3d · {world} · {self.psi / 1e6:.1f}M parameters · {args.steps} steps")
        self.show(
            f"grid        tp {tp} × pp {pp} × dp {trainer.grid.dp} · {args.model} · {args.dtype}"
        )
        if args.save_interval < 1 or (args.save and args.compare):
            raise ValueError(
                f"--save-interval {args.save_interval}: must be at least 1; --save not with --compare"
            )
        directory = (
            args.save
            if args.save and os.path.exists(os.path.join(args.save, "latest"))
            else args.load
        )
        if directory and not os.path.exists(os.path.join(directory, "latest")):
            raise ValueError(f"--load {directory}: it has no checkpoint")
        if directory:
            load(trainer, directory)
            self.show(f"loaded      {directory} after step {trainer.steps}")
        if self.metrics is None:  # steps that are done again have a second line
            path, mode = (
                args.metrics if args.metrics and self.rank == 0 else os.devnull,
                "a" if trainer.steps else "w",
            )
            self.metrics = open(path, mode)  # noqa: SIM115
        return trainer

    def run(self, tp, pp):
        """Train on one grid. -> a row of the table; None where it was told to stop, or had nothing to do"""
        args, history, differences, plain = self.args, [], [], itertools.repeat(None)
        try:
            trainer = self.begin(tp, pp)
        except (OSError, ValueError) as error:
            self.stop(error)
        if args.check and (
            tp == 1 or args.dropout == 0
        ):  # heads on several ranks draw dropout of their own
            plain = train_on_one_device(
                self.config, args, map(self.batch, range(args.steps)), self.device
            )
        plain = itertools.islice(plain, trainer.steps, None)
        for number in range(trainer.steps, args.steps):
            batch, sent, start = self.batch(number), SentByAxis(trainer.grid), time.perf_counter()
            with sent if number == args.steps - 1 else nullcontext():  # it takes time
                loss, norm = trainer.step(*batch)
            middle = time.perf_counter()
            expected, end = next(plain), time.perf_counter()
            history.append((loss, middle - start, end - middle))
            self.progress(trainer, loss, norm, middle - start)
            if expected:
                mine, theirs = trainer.full_state_dict(), expected[2].state_dict()
                differences += [(mine[name] - theirs[name]).abs().max().item() for name in mine]
                differences += [abs(loss - expected[0]), abs(norm - expected[1])]
            if args.save and self.save(trainer):
                return None
        return (
            self.report(trainer, *zip(*history, strict=True), differences, sent)
            if history
            else None
        )

    def save(self, trainer):
        """Save, if it is time to. -> whether any rank has been told to stop"""
        args, stop = self.args, torch.tensor(len(self.signals), device=self.device)
        dist.all_reduce(stop)
        if stop or trainer.steps % args.save_interval == 0 or trainer.steps == args.steps:
            try:
                save(trainer, args.save)
                self.show(
                    f"saved       {args.save} after step {trainer.steps}{', told to stop' if stop else ''}"
                )
            except OSError as error:  # on all ranks
                self.show(f"NOT saved   after step {trainer.steps}: {error}")
        return bool(stop)

    def progress(self, trainer, loss, norm, seconds):
        """A line for each step, and one of JSON."""
        now = {axis: getattr(trainer.grid, axis) for axis in ("tp", "pp", "dp")} | {
            "step": trainer.steps
        }
        now |= {
            "loss": loss,
            "grad_norm": norm,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "seconds": seconds,
        }
        now["tokens_per_second"] = self.args.global_batch_size * self.args.sequence_length / seconds
        print(json.dumps(now), file=self.metrics, flush=True)
        line = "step {step}/{steps}   loss {loss:.3f}   grad norm {grad_norm:.3f}   {tokens_per_second:,.0f} tokens/s"
        self.show(line.format(**now, steps=self.args.steps))

    def report(self, trainer, losses, seconds, seconds_plain, differences, sent):
        """Print, of each cost, the most that any rank has."""
        args, grid, optimizer = self.args, trainer.grid, trainer.optimizer
        held = zero.held_by(optimizer) if args.zero1 else ddp.held(trainer.parameters, optimizer)
        if isinstance(optimizer, amp.MixedPrecisionOptimizer):
            held = *held[:2], held[2] + ddp.held_bytes(optimizer.param_groups[0]["params"])
        numbers = [
            *held,
            *sent.by_axis.values(),
            sent.total,
            sum(sent_by_formula(trainer).values()),
        ]
        numbers.append(torch.tensor([0.0, *differences]).nan_to_num(nan=math.inf).max())
        numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *cells, total, formula, _ = (f"{number / 1e6:.1f}" for number in numbers.tolist())
        tolerance, size, verdict = (
            {"float64": 1e-9, "float32": 1e-3}.get(args.dtype, 0.05),
            trainer.dtype.itemsize,
            "-",
        )
        state = 4 * (size == 2) + 2 * max(4, size) * (args.optimizer == "AdamW")  # masters, moments
        plain = " / ".join(f"{self.psi * each / 1e6:.1f}" for each in (size, size, state))
        ms, ms_plain = (
            f"{1e3 * statistics.median(column):.0f}" for column in (seconds, seconds_plain)
        )
        self.show(f"loss        {losses[0]:.3f} → {losses[-1]:.3f}")
        if differences:
            verdict = "ok" if numbers[-1] <= tolerance else "DIFFERS"
            words = (
                f"{'' if verdict == 'ok' else 'NOT '}equal within {tolerance}: {numbers[-1]:.0e}"
            )
            self.show(
                f"vs 1 device loss, gradients' norm and parameters {words} over {args.steps} steps"
            )
        held = "params {} MB   grads {} MB   optimizer {} MB".format(*cells)
        self.show(f"held/rank   {held}      (1 device: {plain})")
        self.show(f"sent/rank   {total} MB per step      formula tp+pp+dp = {formula} MB")
        self.show(
            f"time        {ms} ms per step      (1 device: {ms_plain if differences else '-'})"
        )
        rate = args.global_batch_size * args.sequence_length / statistics.median(seconds)
        return f"{grid.tp} × {grid.pp} × {grid.dp}", *cells, f"{rate:,.0f}", verdict


def main():
    session = Session()
    rows = [session.run(tp, pp) for tp, pp in session.grids()]
    if None in rows:
        return 0
    session.show(
        "The most on any rank, in MB: held; sent per step along each axis. Does one device train the same?"
    )
    for row in (HEADER, *rows):
        session.show("  ".join(f"{cell:>11}" for cell in row))
    return int("DIFFERS" in {row[-1] for row in rows})


if __name__ == "__main__":
    status = main()
    gc.collect()  # who still holds a group keeps gloo's threads, which may abort the process at its exit
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)
