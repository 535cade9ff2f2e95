"""GPT-2 on a grid of ranks: tensor × data × pipeline parallel, each from its own file, put together as by Megatron-LM.

Each of the L blocks is on one stage of the pipeline, each of its matrices is split over the tensor-parallel ranks of
the stage, and each pipeline trains on its own part of the batch. 8 ranks with --tp 2 --pp 2, so dp = 2:

                    stage 0: embedding, blocks 0 … L/2-1         stage 1: blocks L/2 … L-1, head
    batch, part 0   rank 0 ═══ rank 1                     ───→   rank 4 ═══ rank 5         ═══ tp: activations, often
                        ┊          ┊                                 ┊          ┊          ──→ pp: activations, once
    batch, part 1   rank 2 ═══ rank 3                     ───→   rank 6 ═══ rank 7          ┊  dp: gradients, per step

Tensor-parallel ranks are neighbours, since they wait for each other in every layer: they should share a machine. Then
comes data, then pipeline, whose stages pass one tensor per micro-batch: rank = (pp · DP + dp) · TP + tp.

Cost per rank, in elements; Ψ parameters, L blocks, b sequences in each of m micro-batches, s tokens, h hidden size:

                 parameters, gradients     sent per step
    tp           Ψ/(tp·pp) each            (8L/pp + 2 at each end) · m·bsh (tp-1)/tp, and the loss's 6·m·bs (tp-1)/tp
    pp                                     m·bsh per neighbour stage, and for the tied embedding its Ψ once
    dp                                     2Ψ/(tp·pp) (dp-1)/dp, with and without --zero1
    optimizer    2Ψ/(tp·pp), with --zero1 over dp

Run:      torchrun --nproc-per-node 4 parallel_3d.py --tp 2 --pp 2 [--model gpt2-345m] [--compare]
Paper:    Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473
Mirrors:  Megatron-LM's pretrain_gpt.py
Left out: checkpoints, evaluation, data sets of tokens; context and expert parallelism
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import amp
import ddp
import pipeline
import tensor_parallel
import zero

# ---------------------------------------------------------------------------------------------------------------------
# 1. The grid.


class Grid:
    """Where this rank is: `tp`, `dp` and `pp` are the sizes, `at[axis]` the position, `group(axis)` its neighbours.

    ValueError when tp · pp does not divide the world.
    """

    AXES = ("pp", "dp", "tp")  # outermost first

    def __init__(self, tp=1, pp=1, device_type="cpu"):
        rank, world = dist.get_rank(), dist.get_world_size()
        if tp < 1 or pp < 1 or world % (tp * pp):
            raise ValueError(f"--tp {tp} × --pp {pp} = {tp * pp} ranks must divide the world of {world}")
        self.tp, self.dp, self.pp = tp, world // (tp * pp), pp
        self.at = {"tp": rank % tp, "dp": rank // tp % self.dp, "pp": rank // (tp * self.dp)}
        mesh = init_device_mesh(device_type, (pp, self.dp, tp), mesh_dim_names=self.AXES)
        # Weak, as everywhere: what holds a group keeps its threads running after destroy_process_group().
        self.groups = {axis: weakref.ref(mesh.get_group(axis)) for axis in self.AXES}
        self.device = torch.device(device_type)
        for axis, stride in {"tp": 1, "dp": tp, "pp": tp * self.dp}.items():
            neighbours = [rank + (i - self.at[axis]) * stride for i in range(getattr(self, axis))]
            assert self.at[axis] == mesh.get_local_rank(axis)
            assert neighbours == dist.get_process_group_ranks(self.group(axis))

    def group(self, axis):
        return self.groups[axis]()

    def sum(self, number, *axes, op=dist.ReduceOp.SUM):
        """The sum of a number over the ranks along `axes`: the same on all of them."""
        total = torch.tensor([number], dtype=torch.float64, device=self.device)
        for axis in axes:
            dist.all_reduce(total, op=op, group=self.group(axis))
        return total.item()


# ---------------------------------------------------------------------------------------------------------------------
# 2. The model: plain layers, and what makes them parallel. Activations are (sequence, batch, hidden).


@dataclass(frozen=True)
class GPT2:
    """Radford et al. 2019. Parameters: Vh + Ph + L(12h² + 13h) + 2h, the head tied to the embedding."""

    L: int
    h: int
    heads: int
    V: int = 50257
    P: int = 1024  # positions

    def parameters(self):
        return self.V * self.h + self.P * self.h + self.L * (12 * self.h**2 + 13 * self.h) + 2 * self.h


MODELS = {
    "gpt2-tiny": GPT2(4, 64, 4, V=260, P=128),
    "gpt2-124m": GPT2(12, 768, 12),
    "gpt2-345m": GPT2(24, 1024, 16),
    "gpt2-774m": GPT2(36, 1280, 20),
    "gpt2-1.5b": GPT2(48, 1600, 25),
}


class Embedding(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        self.word, self.position = nn.Embedding(config.V, config.h), nn.Embedding(config.P, config.h)
        self.dropout, self.enter = nn.Dropout(dropout), lambda x: x

    def forward(self, tokens_bs):
        positions = self.position(torch.arange(tokens_bs.shape[1], device=tokens_bs.device))
        return self.dropout(self.enter(self.word(tokens_bs.T) + positions[:, None]))


class Block(nn.TransformerEncoderLayer):
    def __init__(self, config, dropout):
        gelu = partial(F.gelu, approximate="tanh")
        super().__init__(config.h, config.heads, 4 * config.h, dropout, activation=gelu, norm_first=True)

    def forward(self, x_sbh):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x_sbh), x_sbh.device, x_sbh.dtype)
        return super().forward(x_sbh, src_mask=mask, is_causal=True)


class Head(nn.Module):
    def __init__(self, config, dropout):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(config.h), nn.Linear(config.h, config.V, bias=False)

    def forward(self, x_sbh):
        return self.linear(self.norm(x_sbh))


@torch.no_grad()
def build_layer(config, number, dropout=0.0, seed=0):
    """Layer `number` of the plain model: 0 is the embedding, L + 1 the head. Each has a seed of its own."""
    torch.manual_seed(seed * 10_000 + number)
    layer = (Embedding if number == 0 else Head if number == config.L + 1 else Block)(config, dropout)
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            residual = name in ("self_attn.out_proj.weight", "linear2.weight")  # 2L of them add up
            parameter.normal_(std=0.02 / (2 * config.L) ** 0.5 if residual else 0.02)
        elif name.endswith("bias"):
            parameter.zero_()
    return layer


def plain_model(config, dropout=0.0, seed=0):
    """The whole model on one device: (batch, sequence) tokens to (sequence, batch, V) logits."""
    layers = [build_layer(config, number, dropout, seed) for number in range(config.L + 2)]
    layers[-1].linear.weight = layers[0].word.weight
    return nn.Sequential(*layers)


def split_layer(layer, group, sequence_parallel):
    """Let a plain layer keep this rank's slices. The vocabulary is padded to a multiple of 128 · tp."""
    vocabulary = {"process_group": group, "make_vocab_size_divisible_by": 128}
    plan = {}
    if isinstance(layer, Embedding):
        layer.word = tensor_parallel.VocabParallelEmbedding.from_full(layer.word, **vocabulary)
        if sequence_parallel:
            layer.enter, plan = partial(enter_sequence, weakref.ref(group)), {"dropout": "dropout"}
    elif isinstance(layer, Head):
        vocabulary["sequence_parallel"] = sequence_parallel
        layer.linear = tensor_parallel.ColumnParallelLinear.from_full(layer.linear, **vocabulary)
        plan = {"norm": "norm"} if sequence_parallel else {}
    else:
        plan = {"": "layer"}
    return tensor_parallel.parallelize(layer, plan, group, sequence_parallel)


def enter_sequence(group, x):
    return tensor_parallel.scatter_to_sequence(x, group())


def layers_of_stage(config, stage, num_stages):
    """The numbers of its layers: as many blocks on each stage as on any, give or take one."""
    blocks = [1 + i for i in range(config.L) if i * num_stages // config.L == stage]
    return [0] * (stage == 0) + blocks + [config.L + 1] * (stage == num_stages - 1)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Training on the grid.


class Trainer:
    """The stages of this rank, their optimizer, and the step. `args` are those of the command line."""

    def __init__(self, config, grid, args, device="cpu"):
        self.config, self.grid, self.args, self.device = config, grid, args, torch.device(device)
        self.dtype, self.scaler = getattr(torch, args.dtype), None
        self.num_stages = grid.pp * args.stages_per_rank
        self.microbatches = args.global_batch_size // max(args.micro_batch_size * grid.dp, 1)
        if problem := self.find_problem():
            raise ValueError(problem)
        mine = range(grid.at["pp"], self.num_stages, grid.pp)
        numbers = [layers_of_stage(config, stage, self.num_stages) for stage in mine]
        layers = {number: self.build(number) for number in itertools.chain(*numbers)}
        embedding, head = layers.get(0), layers.get(config.L + 1)
        if embedding and head:
            head.linear.weight = embedding.word.weight
        self.stages = nn.ModuleList(nn.Sequential(*(layers[number] for number in part)) for part in numbers)
        self.tied = embedding.word.weight if embedding else head.linear.weight if head else None
        self.counts_tied = embedding is not None  # on the first stage, not again on the last
        self.pipeline = self.make_pipeline()
        self.optimizer = self.make_optimizer()  # afterwards: the pipeline has made tied weights equal
        warm_up = lambda step: min(1.0, (step + 1) / max(1, args.warmup))  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.parameters = list(dict.fromkeys(self.stages.parameters()))

    def find_problem(self):
        args, grid, config = self.args, self.grid, self.config
        if args.global_batch_size != args.micro_batch_size * self.microbatches * grid.dp or self.microbatches < 1:
            return (
                f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size "
                f"{args.micro_batch_size} × {grid.dp} data-parallel ranks"
            )
        if self.num_stages > config.L or (grid.pp == 1 and args.stages_per_rank > 1):
            return f"{self.num_stages} stages on {grid.pp} ranks; the model has {config.L} blocks, and 1 rank 1 stage"
        if not 1 <= args.sequence_length <= config.P:
            return f"--sequence-length {args.sequence_length}; the model has {config.P} positions"
        if not args.clip_grad >= 0:
            return f"--clip-grad {args.clip_grad}; it must be positive, or 0 for none"
        if args.zero1 and self.dtype == torch.float16:
            return "--zero1 does not scale the loss, which float16 needs; use --dtype bfloat16"
        return None

    def build(self, number):
        layer = build_layer(self.config, number, self.args.dropout, self.args.seed)
        return split_layer(layer, self.grid.group("tp"), self.args.sequence_parallel).to(self.device, self.dtype)

    def make_pipeline(self):
        args, grid, stages, tied = self.args, self.grid, list(self.stages), []
        wrapped = grid.dp > 1 and not args.zero1  # which averages gradients itself
        if wrapped:
            stages = [ddp.DistributedDataParallel(stage, grid.group("dp")) for stage in stages]
        if grid.pp > 1:
            end = self.num_stages - 1
            names = "0.word.weight", f"{len(layers_of_stage(self.config, end, end + 1)) - 1}.linear.weight"
            tied = [[f"{stage}.{'module.' * wrapped}{name}" for stage, name in zip((0, end), names, strict=True)]]
        return pipeline.Pipeline(
            stages,
            args.schedule,
            self.microbatches,
            self.loss,
            grid.group("pp"),
            weight=lambda targets: (targets != -100).sum(),
            tied=tied,
            seed=args.seed * 10_000 + grid.at["dp"],  # dropout: its own in each data-parallel pipeline
        )

    def make_optimizer(self):
        make = partial(getattr(torch.optim, self.args.optimizer), lr=self.args.lr)
        if self.args.zero1:  # has fp32 masters where the model is in 16 bits
            return zero.Zero1(self.stages, make.func, self.grid.group("dp"), **make.keywords)
        optimizer = make(self.stages.parameters())
        if self.dtype.itemsize == 2:
            self.scaler = amp.GradScaler(self.device.type) if self.dtype == torch.float16 else None
            optimizer = amp.MixedPrecisionOptimizer(optimizer, self.dtype, self.scaler)
        return optimizer

    def loss(self, logits, targets_bs):
        """Mean over the micro-batch, times what makes the mean over pipelines that over the tokens of the batch."""
        losses = tensor_parallel.vocab_parallel_cross_entropy(
            logits, targets_bs.T, self.grid.group("tp"), vocab_size=self.config.V
        )
        mean = losses.sum() / (targets_bs != -100).sum() * self.share
        return mean if self.scaler is None else self.scaler.scale(mean)

    def step(self, inputs_bs, targets_bs):
        """One step on the global batch, targets of -100 masked. -> its loss and its gradients' norm, on all ranks.

        A gradient that is not finite, on any rank, leaves the parameters as they are on all.
        """
        grid = self.grid
        inputs, targets = (x.to(self.device).chunk(grid.dp)[grid.at["dp"]] for x in (inputs_bs, targets_bs))
        tokens = (targets != -100).sum().item()
        self.share = tokens * grid.dp / max(1.0, grid.sum(tokens, "dp"))
        self.optimizer.zero_grad()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        loss = self.pipeline.step(inputs, targets)
        norm = self.clip_grad_norm_(self.args.clip_grad)
        if math.isfinite(norm) or self.scaler:  # which skips the step by itself, on all ranks, and lowers the scale
            self.optimizer.step()
        self.schedule.step()
        return grid.sum(0.0 if loss is None else loss.item() / scale / grid.dp, "pp", "dp"), norm

    def counts(self, parameter):
        """Is this rank the one whose part of `parameter` is in the norm? What is replicated counts once."""
        split = getattr(parameter, "tensor_parallel", None) is not None
        return (split or self.grid.at["tp"] == 0) and (parameter is not self.tied or self.counts_tied)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients so that the norm of all of them is at most `max_norm`, unless that is 0; -> the norm."""
        model_parallel, max_norm = ("tp", "pp"), max_norm or float("inf")
        if self.args.zero1:
            groups = [self.grid.group(axis) for axis in model_parallel]
            return self.optimizer.clip_grad_norm_(max_norm, counted=self.counts, process_groups=groups).item()
        if isinstance(self.optimizer, amp.MixedPrecisionOptimizer):
            self.optimizer.unscale_()
            masters = itertools.chain(*(group["params"] for group in self.optimizer.param_groups))
            pieces = zip(self.parameters, (master.grad for master in masters), strict=True)
        else:
            pieces = [(parameter, parameter.grad) for parameter in self.parameters]
        pieces = [(parameter, gradient) for parameter, gradient in pieces if gradient is not None]
        mine = [g.norm(dtype=torch.float64) ** 2 for parameter, g in pieces if self.counts(parameter)]
        norm = self.grid.sum(float(sum(mine)), *model_parallel) ** 0.5
        if norm > max_norm:
            for _, gradient in pieces:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm


def train_on_one_device(config, args, batches):
    """The same without parallelism, as plainly as possible; yields (loss, gradients' norm, model) after each step."""
    model = plain_model(config, args.dropout, args.seed).to(getattr(torch, args.dtype))
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss, tokens = 0.0, (targets != -100).sum()
        for x, y in zip(inputs.split(args.micro_batch_size), targets.split(args.micro_batch_size), strict=True):
            part = F.cross_entropy(model(x).flatten(0, 1), y.T.flatten(), reduction="sum") / tokens
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or float("inf")).item()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (number + 1) / max(1, args.warmup))
        optimizer.step()
        yield loss, norm, model


# ---------------------------------------------------------------------------------------------------------------------
# 4. What it costs: measured, and by formula.


class SentByAxis(ddp.SentBytes):
    """`by_axis`: the bytes that this rank sends along each axis of the grid."""

    def __init__(self, grid):
        super().__init__()
        self.axes = {grid.group(axis).group_name: axis for axis in grid.AXES}
        self.by_axis = dict.fromkeys(grid.AXES, 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.total > before:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # of tied parameters: along pp
            self.by_axis[self.axes.get(dist.ProcessGroup.unbox(group).group_name, "pp")] += self.total - before
        return result


def sent_by_formula(trainer):
    """Bytes that this rank sends in a step along each axis; without the few hundred by which ranks agree on sizes."""
    config, grid, args, itemsize = trainer.config, trainer.grid, trainer.args, trainer.dtype.itemsize
    t, h, m, bs = grid.tp, config.h, trainer.microbatches, args.micro_batch_size * args.sequence_length
    mine = range(grid.at["pp"], trainer.num_stages, grid.pp)
    blocks = sum(isinstance(layer, Block) for stage in trainer.stages for layer in stage)
    first, last = 0 in mine, trainer.num_stages - 1 in mine
    ends = first + last
    if args.sequence_parallel:  # the inputs of column-parallel layers are gathered again; norms' gradients summed
        tp = (10 * blocks + 3 * ends) * bs * h + (8 * blocks + 4 * last) * h
    else:
        tp = (8 * blocks + 2 * ends) * bs * h
    tp = tp * itemsize + 6 * last * bs * max(4, itemsize)  # the loss is in fp32 at least
    hops = 2 * len(mine) - ends if grid.pp > 1 else 0  # each stage sends to both neighbours, where it has them
    pp = m * hops * bs * h // (t if args.sequence_parallel else 1)
    if grid.pp > 1:  # the gradient of the tied embedding
        pp += 0 if trainer.tied is None else trainer.tied.numel()
    psi = sum(parameter.numel() for parameter in trainer.parameters)
    dp = 2 * psi * (grid.dp - 1) / grid.dp
    return {"tp": m * tp * (t - 1) / t, "pp": pp * itemsize, "dp": dp * itemsize}


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """`peak`: the most bytes that autograd has kept for backward at one time, parameters apart."""

    def __init__(self, parameters):
        super().__init__(self.pack, lambda kept: kept.tensor)
        self.users = {parameter.untyped_storage().data_ptr(): 1 for parameter in parameters}  # so they never count
        self.now = self.peak = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        self.count(storage, 1)
        return Kept(tensor, lambda: self.count(storage, -1))

    def count(self, storage, change):
        users = self.users[storage.data_ptr()] = self.users.get(storage.data_ptr(), 0) + change
        if users == max(change, 0):  # the first, or the last
            self.now += change * storage.nbytes()
            self.peak = max(self.peak, self.now)


class Kept:
    def __init__(self, tensor, forget):
        self.tensor, self.forget = tensor, forget

    def __del__(self):
        self.forget()


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2-tiny")
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks; data-parallel are those that are left"
    )
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel ranks")
    parser.add_argument("--schedule", choices=pipeline.SCHEDULES, default="1f1b")
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--zero1", action="store_true", help="split the optimizer over data-parallel ranks")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences that are computed at once")
    parser.add_argument("--global-batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--optimizer", choices=("AdamW", "SGD"), default="AdamW")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="steps to the full learning rate")
    parser.add_argument("--clip-grad", type=float, default=1.0, metavar="NORM", help="0: do not clip")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", metavar="FILE", help="text to train on, by bytes (default: the standard library)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", metavar="FILE", help="write a JSON object a line and step")
    parser.add_argument("--compare", action="store_true", help="one row for each grid that fits the world")
    parser.add_argument("--check", action="store_true", default=None, help="compare with one device (tiny: always)")
    return parser.parse_args(argv)


class Session(ddp.Demo):
    """Joins the world, reads the text, trains on a grid or on several, and prints."""

    def __init__(self):
        self.args = arguments()
        self.join_world()
        self.T, self.batch_size = self.args.sequence_length, self.args.global_batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        self.config = MODELS[self.args.model]
        if self.args.check is None:
            self.args.check = self.args.model == "gpt2-tiny" and self.args.dropout == 0
        self.metrics_begun = False
        self.stop_if(problem)

    def grids(self):
        if not self.args.compare:
            return [(self.args.tp, self.args.pp)]
        fits = [
            (tp, pp)
            for tp in range(1, self.ranks + 1)
            for pp in range(1, self.ranks + 1)
            if self.ranks % (tp * pp) == 0
        ]
        return [(tp, pp) for tp, pp in fits if self.config.heads % tp == 0]

    def run(self, tp, pp):
        """Train on one grid; -> a row of the table."""
        trainer = problem = None
        try:
            trainer = Trainer(self.config, Grid(tp, pp, self.device.type), self.args, self.device)
        except ValueError as error:
            problem = str(error)
        self.stop_if(problem)
        grid, steps, history = trainer.grid, self.args.steps, []
        for number in range(steps):
            saved, sent, start = SavedBytes(trainer.parameters), SentByAxis(grid), time.perf_counter()
            measured = number == min(1, steps - 1)  # it takes time; and in the first step ranks also agree on shapes
            with saved if measured else nullcontext(), sent if measured else nullcontext():
                loss, norm = trainer.step(*self.batch(number))
            if measured:
                costs = sent.by_axis, saved.peak
            history.append(
                {"step": number + 1, "loss": loss, "grad_norm": norm, "lr": trainer.schedule.get_last_lr()[0]}
            )
            history[-1]["seconds"] = time.perf_counter() - start
            history[-1]["tokens_per_second"] = self.batch_size * self.T / history[-1]["seconds"]
            self.progress(history[-1], grid)
        return self.row(trainer, history, *costs)

    def progress(self, now, grid):
        """A line per step: on a terminal with the time left and, in the end, replaced by the result."""
        line = "step {step}/{steps}  loss {loss:.4f}  grad norm {grad_norm:.3f}  lr {lr:.2e}  {tokens_per_second:,.0f}"
        line = line.format(**now, steps=self.args.steps) + " tokens/s"
        if sys.stderr.isatty():
            line = f"\r{line}  {now['seconds'] * (self.args.steps - now['step']):.0f} s left\033[K"
            self.show(line, end="" if now["step"] < self.args.steps else "\r\033[K", file=sys.stderr)
        elif not self.args.check:
            self.show(line)
        if self.args.metrics and self.rank == 0:
            with open(self.args.metrics, "a" if now["step"] > 1 or self.metrics_begun else "w") as file:
                self.metrics_begun = True
                file.write(json.dumps({"tp": grid.tp, "pp": grid.pp, "dp": grid.dp} | now) + "\n")

    def row(self, trainer, history, sent, activations):
        """Report one grid, of each cost the most that any rank has. -> its row of the table; does it agree?"""
        optimizer = trainer.optimizer
        held = zero.held_by(optimizer) if self.args.zero1 else ddp.held(trainer.parameters, optimizer)
        if isinstance(optimizer, amp.MixedPrecisionOptimizer):
            masters = itertools.chain(*(group["params"] for group in optimizer.param_groups))
            held = (*held[:2], held[2] + ddp.held_bytes(masters))
        everyone, formula = [None] * self.ranks, sent_by_formula(trainer)
        sent, formula = ([by_axis[axis] for axis in ("tp", "pp", "dp")] for by_axis in (sent, formula))
        dist.all_gather_object(everyone, [*held, activations, *sent, *formula, sum(sent), sum(formula)])
        most = [f"{max(values) / 1e6:.1f}" for values in zip(*everyone, strict=True)]
        verdict, agree, ms_one_device = self.check(history) if self.args.check else ("not compared", None, "-")
        grid, ms = trainer.grid, 1e3 * statistics.median(now["seconds"] for now in history)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        psi, plain = self.config.parameters(), self.config.parameters() * trainer.dtype.itemsize / 1e6
        self.show(f"parallel_3d · {world} · {psi / 1e6:.1f}M parameters · {len(history)} steps")
        self.show(f"grid        tp {grid.tp} × pp {grid.pp} × dp {grid.dp} · {self.args.model} · {self.args.dtype}")
        self.show(f"loss        {history[0]['loss']:.3f} → {history[-1]['loss']:.3f}")
        self.show(f"vs 1 device {verdict}")
        held = "   ".join(
            f"{name} {size} MB" for name, size in zip(("params", "grads", "optimizer"), most, strict=False)
        )
        self.show(f"held/rank   {held}      (1 device: {plain:.1f} / {plain:.1f} / {2 * plain:.1f})")
        self.show(f"sent/rank   {most[10]} MB per step      formula tp+pp+dp = {most[11]} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device})\n")
        rate = f"{1e3 * self.batch_size * self.T / ms:,.0f}"
        return (
            f"{grid.tp} × {grid.pp} × {grid.dp}",
            *most[:4],
            *most[4:7],
            rate,
            {None: "-", True: "ok", False: "DIFFERS"}[agree],
        ), agree

    def check(self, history):
        """Train on one device, on every rank. -> what the difference is, whether it is small, and the time per step."""
        batches = (self.batch(number) for number in range(self.args.steps))
        start, plain = time.perf_counter(), []
        for loss, norm, _ in train_on_one_device(self.config, self.args, batches):
            plain.append((loss, norm))
        ms = 1e3 * (time.perf_counter() - start) / self.args.steps
        differences = [
            max(abs(now[key] - values[i]) for now, values in zip(history, plain, strict=True))
            for i, key in enumerate(("loss", "grad_norm"))
        ]
        tolerance = {"float64": 1e-9, "float32": 1e-3}.get(self.args.dtype, 0.05)
        agree = self.all_agree(max(differences) <= tolerance)  # NaN is not
        text = "max |Δloss| {:.1e}, max |Δgrad_norm| {:.1e}, ".format(*differences)
        return f"{text}{'' if agree else 'NOT '}equal within {tolerance:g}", agree, f"{ms:.0f}"

    def all_agree(self, mine):
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, mine)
        return all(everyone)


HEADER = ("tp × pp × dp", "params", "grads", "optimizer", "activations", "tp", "pp", "dp", "tokens/s", "vs 1 device")


def main():
    session = Session()
    rows, agree = zip(*(session.run(tp, pp) for tp, pp in session.grids()), strict=True)
    session.show("the most on any rank, in MB: held, and sent per step along each axis")
    for row in (HEADER, *rows):
        session.show("  ".join(f"{cell:>11}" for cell in row))
    session.leave(1 if False in agree else 0)


if __name__ == "__main__":
    main()
