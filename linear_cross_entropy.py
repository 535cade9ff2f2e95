"""The loss over a large vocabulary without its logits: one chunk of words at a time.

The logits of T tokens over V words are the largest tensor of a step. The loss of a token needs only
three numbers of them:

    lse     log Σ exp(z) over the logits z of all words
    z_y     the logit of the target y. The loss is lse - z_y
    Σz      the sum of the logits, if labels are smoothed

The numbers of two sets of words give those of their union: lse = log(e^lse1 + e^lse2), and z_y and
Σz add up. So forward computes the logits of C words, keeps the three numbers, and drops the logits.
Backward computes them again. With lse, a chunk of the softmax needs no other chunk:

                 x (T, H)   weight, C rows      logits (T, C)        kept
    forward      ■        · ■                 = ■ → lse, z_y, Σz     lse (T)
                            ■ the next chunk  = ■ → merge
    backward     ■        · ■                 = ■ → softmax - target → gradients of x and these rows

If ranks split the rows of the weight, each rank's rows are one large chunk. The ranks exchange the
three numbers of each token, and merge them with the same formula.

Cost in elements, beyond input, weight and their gradients, for T tokens of size H:

                                 held, in a step   kept for backward   operations
    F.linear, F.cross_entropy    3TV               TV                  6THV
    section 1, chunks of tokens  4CV + VH          TH + VH             6THV
    here, chunks of words        2TC               T                   8THV: the logits twice
    over t ranks                 2TC               T                   8THV/t; sent 3T(t-1), and
                                 2TH(t-1)/t to sum the input's gradient, or to gather the input and
                                 to scatter its gradient, if ranks split the sequence

Each row of the weight's gradient is computed once, from all tokens. So in 16 bits it is as exact as
without chunks. Chunks of tokens would add to it in each chunk, and round each time.

Read section 1 for the idea (9 minutes), to section 3 for the technique (25), and the rest to use it
as a library (37).

Run:      torchrun --nproc-per-node 2 linear_cross_entropy.py       (or without torchrun)
Papers:   Wijmans et al. 2024, Cut Your Losses, arXiv 2411.09009; Hsu et al. 2024, Liger Kernel,
          2410.10989: gradients in forward; Shoeybi et al. 2019, Megatron-LM, 1909.08053, section 3
Mirrors:  torch.nn.functional.linear_cross_entropy; Megatron's smoothing ε·V/(V-1) is another
Left out: targets that are probabilities; weights of classes; gradients of gradients; kernels that
          keep a chunk on the chip
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import json
import math
import os
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch 2.13 renames these functions, and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --------------------------------------------------------------------------------------------------
# 1. The idea: chunks of tokens. Forward computes the gradients, too, so the logits are not kept.
#    Section 2 cuts the words instead.


class NaiveLinearCrossEntropy(torch.autograd.Function):
    """Return the sum of F.cross_entropy(x @ weight.T, target). x is (T, H), weight is (V, H)."""

    @staticmethod
    def forward(ctx, x, weight, target, chunk_size):
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        total = x.new_zeros(())
        for start in range(0, len(x), chunk_size):
            chunk = slice(start, start + chunk_size)
            log_softmax = (x[chunk] @ weight.T).log_softmax(-1)  # (chunk_size, V)
            column = target[chunk, None]
            total -= log_softmax.gather(1, column).sum()
            one = torch.ones_like(column, dtype=x.dtype)
            grad_logits = log_softmax.exp().scatter_add(1, column, -one)  # softmax - target
            grad_x[chunk] = grad_logits @ weight
            grad_weight += grad_logits.T @ x[chunk]
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None, None


# --------------------------------------------------------------------------------------------------
# 2. The technique: chunks of words. x is (T, H), weight is (rows, H), target and the loss are (T).


class Options(NamedTuple):
    vocab_size: int  # words of all ranks, without padding
    first: int  # this rank's first word
    label_smoothing: float
    z_loss: float  # the factor of lse² in the loss, which keeps logits near 0
    softcap: float | None  # c: logits are c · tanh(logit / c)
    chunk_size: int  # words in a chunk
    process_group: object  # whose ranks split the words, or None


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of each token. Keeps lse, besides its inputs."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, options):
        dtype = torch.promote_types(x.dtype, torch.float32)
        stats = x.new_zeros(3, len(x), dtype=dtype)  # lse, z_y and Σz of no words
        stats[0] = -math.inf
        for _, z, column, is_here in chunks(x, weight, bias, target, options):
            z_y = z.gather(1, column).where(is_here, 0.0)
            z_sum = z.sum(1) if options.label_smoothing else torch.zeros_like(stats[2])
            # If all logits are -inf, -inf - -inf would be NaN.
            largest = z.amax(1).clamp(min=torch.finfo(dtype).min)
            exps = z.sub_(largest[:, None]).exp_()
            lse = exps.sum(1).log() + largest
            of_chunk = torch.stack([lse, z_y.squeeze(1), z_sum])
            stats = merge(torch.stack([stats, of_chunk]))
        if options.process_group:
            of_ranks = gather(stats, options.process_group)
            stats = merge(of_ranks.unflatten(0, (-1, 3)))
        lse, z_y, z_sum = stats
        is_outside = (target < 0) | (target >= options.vocab_size)
        # This happens only on a GPU: on a CPU, check_targets() has raised an error.
        lse = lse.masked_fill(is_outside, math.nan)
        ctx.save_for_backward(x, weight, bias, target, lse)
        ctx.options = options
        smoothing = options.label_smoothing
        loss = lse - (1 - smoothing) * z_y - smoothing / options.vocab_size * z_sum
        return loss + options.z_loss * lse.square()

    @staticmethod
    def backward(ctx, grad):
        check_no_second_derivative()
        x, weight, bias, target, lse = ctx.saved_tensors
        options = ctx.options
        smoothing = options.label_smoothing
        grad_x = torch.zeros_like(x, dtype=lse.dtype)  # adds up in fp32
        grad_weight = torch.zeros_like(weight)  # stays 0 for padding
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_lse = grad * (1 + 2 * options.z_loss * lse)
        for rows, z, column, is_here in chunks(x, weight, bias, target, options):
            if options.softcap:
                slope = 1 - (z / options.softcap).square()
            softmax = z.sub_(lse[:, None]).exp_()
            grad_z = softmax.mul_(grad_lse[:, None])  # in the memory of z
            if smoothing:
                grad_z -= grad[:, None] * (smoothing / options.vocab_size)
            of_target = grad[:, None].where(is_here, 0.0) * (smoothing - 1)
            grad_z.scatter_add_(1, column, of_target)
            if options.softcap:
                grad_z *= slope
            grad_z = grad_z.to(x.dtype)
            grad_x += grad_z @ weight[rows]
            torch.mm(grad_z.T, x, out=grad_weight[rows])
            if bias is not None:
                grad_bias[rows] = grad_z.sum(0)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


def chunks(x, weight, bias, target, options):
    """Yield (rows, their logits, each target's column in them, whether it has one) of each chunk.

    The rows are a slice, logits (T, rows), and the others (T, 1). What is padding is left out.
    """
    stop = min(len(weight), options.vocab_size - options.first)
    for start in range(0, stop, options.chunk_size):
        rows = slice(start, min(start + options.chunk_size, stop))
        # Forward may run under autocast, and backward outside. Both must compute the same logits.
        with torch.autocast(x.device.type, enabled=False), torch._C.DisableTorchFunction():
            z = F.linear(x, weight[rows], None if bias is None else bias[rows])
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if options.softcap:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
        column = target[:, None] - (options.first + start)
        is_here = (column >= 0) & (column < z.shape[1])
        yield rows, z, column.where(is_here, 0), is_here


def merge(stats):
    """Return lse, z_y and Σz over all words from those of parts of the words, (parts, 3, T)."""
    lse, z_y, z_sum = stats.unbind(1)
    return torch.stack([lse.logsumexp(0), z_y.sum(0), z_sum.sum(0)])


# --------------------------------------------------------------------------------------------------
# 3. The words split over ranks. Each of t ranks has rows of the weight, and all have the same input
#    and targets, or each its part of the input.


def gather(x, process_group):
    """Return x of all ranks, one after the other along dimension 0."""
    t = dist.get_world_size(process_group)
    everyone = x.new_empty(t * len(x), *x.shape[1:])
    all_gather_single(everyone, x.contiguous(), group=process_group)
    return everyone


class WholeInput(torch.autograd.Function):
    """The input. Each rank computes the gradient through its own words. Their sum is the whole."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.process_group)
        return grad, None


class SplitInput(torch.autograd.Function):
    """The whole input from each rank's part of dimension 0, as Megatron's sequence parallelism.

    Backward sums the ranks' gradients of this rank's part: a reduce-scatter.
    """

    @staticmethod
    def forward(ctx, x_shard, process_group):
        ctx.process_group = process_group
        return gather(x_shard, process_group)

    @staticmethod
    def backward(ctx, grad):
        t = dist.get_world_size(ctx.process_group)
        own = torch.empty_like(grad)
        dist.all_to_all_single(own, grad.contiguous(), group=ctx.process_group)
        return own.unflatten(0, (t, -1)).sum(0), None


# --------------------------------------------------------------------------------------------------
# 4. The library: PyTorch's arguments, reductions, autocast, and checks.


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    chunk_size=1024,
):
    """F.cross_entropy(F.linear(input, linear_weight, linear_bias), target), without the logits.

    input is (…, H), linear_weight (V, H), linear_bias (V), and target (…). The loss is in fp32 or
    float64. reduction, ignore_index and label_smoothing are those of F.cross_entropy.
    z_loss: z_loss · lse² is added to the loss of each token.
    softcap: logits are softcap · tanh(logits / softcap), as Gemma's.
    chunk_size: the words whose logits are in memory at a time.
    """
    V = len(linear_weight)
    options = Options(V, 0, label_smoothing, z_loss, softcap, chunk_size, None)
    tensors = (input, linear_weight, linear_bias, target)
    check_arguments(*tensors, reduction, options)
    return reduced_loss(*tensors, reduction, ignore_index, options)


def vocab_parallel_linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    chunk_size=1024,
    vocab_size=None,
    sequence_parallel=False,
    process_group=None,
):
    """linear_cross_entropy, if each of t ranks has rows of the weight and of the bias: (V/t, H).

    Rank r has the words from r · V/t on. Rows from `vocab_size` on are padding. All ranks pass the
    same target, and the same input or, with `sequence_parallel`, each its part of dimension 0. All
    return the same loss, and the whole gradient of their input.
    """
    check_member(process_group)
    group = process_group or dist.group.WORLD
    tensors = (input, linear_weight, linear_bias, target)
    arguments = (label_smoothing, z_loss, softcap, chunk_size)
    others = (reduction, ignore_index, vocab_size, sequence_parallel)
    check_call(tensors, *arguments, *others, process_group=group)
    rows = len(linear_weight)
    V = vocab_size or rows * dist.get_world_size(group)
    options = Options(V, rows * dist.get_rank(group), *arguments, group)
    check_arguments(*tensors, reduction, options, sequence_parallel)
    whole = (SplitInput if sequence_parallel else WholeInput).apply(input, group)
    return reduced_loss(whole, *tensors[1:], reduction, ignore_index, options)


def tokens_per_rank(target, process_group=None, ignore_index=-100):
    """Return the unmasked tokens of all ranks over the number of ranks.

    If each rank divides its sum of losses by this, DDP's average is the mean over all tokens.
    """
    count = (target != ignore_index).sum()
    dist.all_reduce(count, group=process_group)
    return count / dist.get_world_size(process_group)


def reduced_loss(x, weight, bias, target, reduction, ignore_index, options):
    ignored = target == ignore_index
    words = target.masked_fill(ignored, 0).long()
    check_targets(words, options.vocab_size)
    x, weight, bias = map(to_autocast_dtype, (x.reshape(-1, x.shape[-1]), weight, bias))
    losses = LinearCrossEntropy.apply(x, weight, bias, words.flatten(), options)
    losses = losses.view(target.shape).masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    count = 1 if reduction == "sum" else (~ignored).sum()
    return losses.sum() / count


def to_autocast_dtype(x):
    """Return x as PyTorch's autocast would give it to F.linear."""
    if x is None or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def check_arguments(x, weight, bias, target, reduction, options, sequence_parallel=False):
    t = dist.get_world_size(options.process_group) if options.process_group else 1
    shape = list(x.shape)  # of the whole input
    if sequence_parallel:
        shape[0] *= t
    fits = list(weight.shape[1:]) == shape[-1:] and list(target.shape) == shape[:-1]
    bias_fits = bias is None or bias.shape == weight.shape[:1]
    if not fits or not bias_fits or target.is_floating_point():
        raise ValueError(
            f"input {shape}, linear_weight {list(weight.shape)}, target {list(target.shape)} of "
            f"{target.dtype}: must be (…, H), (V, H) and (…) integers, and linear_bias (V)"
        )
    rows = t * len(weight)
    cap = options.softcap
    are_numbers = 0 < options.vocab_size <= rows and 0 <= options.label_smoothing <= 1
    are_positive = options.chunk_size > 0 and (cap is None or cap > 0)
    if reduction not in ("none", "mean", "sum") or not are_numbers or not are_positive:
        raise ValueError(
            f"{reduction=}, {options}: use none, mean or sum; vocab_size of at most {rows}; "
            "label_smoothing of 0 to 1; a positive chunk_size and softcap"
        )


def check_no_second_derivative():
    """Raise RuntimeError in a backward() under create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of gradients are left out; use F.cross_entropy")


def check_targets(words, V):
    """Raise IndexError on a CPU. On a GPU the host would wait, so there the loss is NaN."""
    if words.is_cpu:
        outside = words[(words < 0) | (words >= V)]
        if len(outside):
            raise IndexError(f"targets {outside.tolist()} are not in a vocabulary of {V} words")


def check_member(process_group):
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group")


agreed = weakref.WeakKeyDictionary()  # process group: the calls that all its ranks have made


def check_call(tensors, *arguments, process_group):
    """Raise ValueError on all ranks unless all make the same call. Each call is checked once.

    So it does not find that some ranks repeat an earlier call while others make a new one.
    """
    facts = [(x.shape, x.dtype, x.requires_grad) for x in tensors if x is not None]
    call = f"{facts}, {arguments}"
    known = agreed.setdefault(process_group, set())
    if call not in known:
        check_same_on_all_ranks("call", [call], process_group)
        known.add(call)


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
    demo = Demo(__doc__)
    model = demo.start("linear_cross_entropy", parts=1)
    V = len(model[-1].weight)
    if not demo.args.idea:
        split_head(model[-1], demo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    summed = list(model.parameters()) if demo.args.idea else []  # gradients of parts of the batch

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = loss_of(demo, model, V, inputs, targets)
        loss.backward()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss * demo.ranks if demo.args.idea else loss  # the demo takes the mean over ranks

    def whole():
        tensors = list(model.parameters())
        gradients = [parameter.grad for parameter in tensors]
        if not demo.args.idea:
            for list_of_tensors in (tensors, gradients):
                rows = gather(list_of_tensors[-1].detach(), dist.group.WORLD)
                list_of_tensors[-1] = rows[:V]
        return gradients, tensors

    demo.train(step, whole)
    formula, sent = sent_in_step(demo, model)
    status = demo.report(held(model.parameters(), optimizer), formula, sent)
    if demo.rank == 0:
        show_large_vocabulary(demo)
    return status


def loss_of(demo, model, V, inputs, targets):
    """With --idea, the loss of this rank's part of the batch, and otherwise of the whole batch."""
    weight = model[-1].weight
    if demo.args.idea:
        hidden = model[:-1](demo.part(inputs)).flatten(0, 1)
        own = demo.part(targets).flatten()
        return NaiveLinearCrossEntropy.apply(hidden, weight, own, 64) / targets.numel()
    options = {"vocab_size": V, "chunk_size": 64}
    return vocab_parallel_linear_cross_entropy(model[:-1](inputs), weight, targets, **options)


def split_head(head, demo):
    """Leave this rank's rows of the weight. The last rank may have rows of zeros, too."""
    missing = -len(head.weight) % demo.ranks
    padded = F.pad(head.weight.detach(), (0, 0, 0, missing))
    head.weight = nn.Parameter(demo.part(padded).clone())


def sent_in_step(demo, model):
    """Return the formula and the bytes."""
    N = demo.ranks
    if demo.args.idea:
        return "2Ψ(N-1)/N", 2 * held_bytes(model.parameters()) * (N - 1) / N
    weight = model[-1].weight
    T = 8 * 64 * N  # all ranks have the whole batch
    elements = 3 * T * (N - 1) + 2 * T * weight.shape[1] * (N - 1) / N
    return "3T(N-1) + 2TH(N-1)/N", elements * weight.element_size()


def show_large_vocabulary(demo):
    """Forward and backward on one device, in fp32."""
    T, H, V = 512, 192, 50_000
    x = torch.randn(T, H, device=demo.device)
    weight = torch.randn(V, H, device=demo.device) / 10
    target = torch.randint(V, (T,), device=demo.device)
    ways = {
        "F.cross_entropy": lambda x, weight: F.cross_entropy(x @ weight.T, target),
        "section 1": lambda x, weight: NaiveLinearCrossEntropy.apply(x, weight, target, 64) / T,
        "here": lambda x, weight: linear_cross_entropy(x, weight, target),
    }
    demo.show(
        f"One device, {T} tokens of size {H}, {V} words: kept for backward, besides input and"
    )
    demo.show("weight, and time of forward and backward")
    for name, loss_of in ways.items():
        kept, ms = measure(loss_of, x, weight)
        demo.show(f"  {name:16} {kept / 1e6:7.1f} MB {ms:7.0f} ms")


def measure(loss_of, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    saved = []

    def keep(x):
        saved.append(x)
        return x

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = loss_of(*inputs)
    gradients = torch.autograd.grad(loss, inputs)
    gradients[0].sum().item()  # waits until the GPU has finished
    took = 1e3 * (time.perf_counter() - start)
    return held_bytes([*saved, *inputs]) - held_bytes(inputs), took


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
