"""FP8: multiply matrices of 8-bit numbers. A power of two scales them into the range of 8 bits.

    x (fp32, bf16)  ── amax → scale ── x / scale, rounded ──→ x₈ ─┐
                                                                  ├─ x₈ W₈ᵀ, summed in 32 bits
    W (fp32, bf16)  ── amax → scale ── W / scale, rounded ──→ W₈ ─┘    │
                                                                       └─ · both scales ──→ y

A linear layer has three products: y = x Wᵀ, dx = dy W and dW = dyᵀ x. The weights stay parameters
in 16 or 32 bits. e4m3 has 3 bits of mantissa and ends at 448. e5m2 has 2 bits and ends at 57344.

    recipe       numbers that share a scale         formats                  what a rank must ask
                 of x and dy    of W                of x and W, of dy        others for
    tensorwise   all            all                 e4m3, e5m2               amax of a split tensor
    rowwise      those that a product sums          e4m3, e4m3               amax, if sums are split
    deepseek     1 × 128        128 × 128           e4m3, e4m3               nothing
    mxfp8        1 × 32         1 × 32              e4m3, e4m3               nothing

For a layer of Ψ weights with K inputs, T tokens on a rank and N ranks:

                            bytes kept for backward   sent by the rank, bytes
    in 16 bits, FSDP        2TK                       (N-1)/N · (2Ψ + 2Ψ + 2Ψ): gather twice, reduce
    in 8 bits, "shard"      TK                        (N-1)/N · ( Ψ +  Ψ + 2Ψ)

If three layers share one x, as q, k and v do, each keeps its own copy: 3TK bytes instead of 2TK.

Read section 1 for the idea (9 minutes), to section 4 for the technique (34), and the rest to use it
as a library (39).

Run:      torchrun --nproc-per-node 2 fp8.py [--recipe rowwise]   (--idea: section 1 alone)
          python fp8.py runs one rank
Papers:   Micikevicius et al. 2022, FP8 Formats, arXiv 2209.05433; DeepSeek-V3, 2412.19437, section
          3.3; Mishra et al. 2025, Recipes for MXFP8, 2506.08027: why scales are rounded up
Mirrors:  torchao.float8.convert_to_float8_training
Left out: nvfp4; delayed scaling, whose history of amax is a state in checkpoints; attention and
          other products of two activations; gradients of gradients, which raise an error
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Imported now, because a later import would keep the process group alive in default arguments.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# --------------------------------------------------------------------------------------------------
# 1. The idea: one scale per tensor. (Hardware multiplies 8-bit numbers. This casts them first.)


def to_fp8(x, dtype=E4M3):
    """Return x / scale in 8 bits, and the scale."""
    scale = power_of_two(x.abs().max().float() / torch.finfo(dtype).max)
    return (x.float() / scale).to(dtype), scale


def power_of_two(ratio):
    """Return the smallest power of two ≥ ratio, or NaN. Division by it rounds nothing."""
    bits = (ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000  # the exponent's bits, rounded up
    return bits.view(torch.float32).clamp_min(2.0**-126) + 0 * ratio  # NaN if the ratio is inf


class NaiveLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # (T, K) and (N, K) to (T, N)
        x8, x_scale, weight8, weight_scale = ctx.operands = [*to_fp8(x), *to_fp8(weight)]
        return (x8.float() @ weight8.float().t() * (x_scale * weight_scale)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x8, x_scale, weight8, weight_scale = ctx.operands
        dy8, dy_scale = to_fp8(dy, E5M2)  # gradients need more range, and less precision
        dx = dy8.float() @ weight8.float() * (dy_scale * weight_scale)
        # Autograd casts both gradients to the dtypes of the inputs.
        return dx, dy8.float().t() @ x8.float() * (dy_scale * x_scale)


def naive_linear(x, weight, bias=None):
    y = NaiveLinear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
    return y + (0 if bias is None else bias)


# --------------------------------------------------------------------------------------------------
# 2. Blocks of numbers that share a scale, and products of them.


class Quantized(NamedTuple):
    """A matrix in 8 bits. The block of rows × columns that `block` says has one scale."""

    values: torch.Tensor  # (R, C), E4M3 or E5M2
    scale: torch.Tensor  # (blocks in R, blocks in C), float32, powers of two
    block: tuple  # (rows, columns); None: all of them


RECIPES = {  # name: (block of x and dy, block of W, dtype of dy)
    "tensorwise": ((None, None), (None, None), E5M2),
    "rowwise": ((1, None), (1, None), E4M3),
    "deepseek": ((1, 128), (128, 128), E4M3),
    "mxfp8": ((1, 32), (1, 32), E4M3),
}


def quantize(x, block=(None, None), dtype=E4M3, split=None, process_group=None):
    """Return the matrix x in 8 bits. If x is a shard, `split` is the dimension that is split.

    Then the result is the shard of what one device has.
    """
    x = x.float()  # PyTorch's cast from float64 to 8 bits goes through fp32, too
    check_blocks_are_whole(x.shape, block, split)
    amax = amax_of_blocks(x.abs(), block)
    if split is not None and not block[split]:  # other ranks have the rest of the block
        # gloo's maximum loses a NaN, but not an inf. The scale of both is NaN.
        amax = amax.nan_to_num(torch.inf, torch.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=process_group)
    scale = power_of_two(amax / torch.finfo(dtype).max)
    values = x / scale_of_elements(scale, x.shape, block)
    return Quantized(values.to(dtype), scale, block)


def amax_of_blocks(magnitudes, block):
    """Return the largest of each block. The last blocks may be smaller than the others."""
    view = []  # blocks in R, rows of a block, blocks in C, columns of a block
    padding = []
    for length, wanted in zip(magnitudes.shape, block, strict=True):
        size = wanted or max(length, 1)  # None: one block has all of them
        count = -(-length // size) if wanted else 1
        view += [count, size]
        padding = [0, count * size - length, *padding]  # F.pad begins with the last dimension
    blocks = F.pad(magnitudes, padding).view(view)
    return blocks.amax((1, 3))


def scale_of_elements(scale, shape, block):
    """Return the scales in a shape that broadcasts with the matrix."""
    for dim in (0, 1):
        if scale.shape[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim)
            scale = scale.narrow(dim, 0, shape[dim])  # the last block may be smaller
    return scale


def dequantize(quantized, dtype=torch.float32):
    values, scale, block = quantized
    scale = scale_of_elements(scale, values.shape, block)
    return values.to(dtype) * scale.to(dtype)


def multiply(a, b, dtype):
    """Return a bᵀ, (M, K) and (N, K) to (M, N). Sums are in fp32, or in float64 if `dtype` is."""
    with torch.autocast(a.values.device.type, enabled=False), torch._C.DisableTorchFunction():
        if has_kernel(a, b, dtype):
            left = a.values.contiguous()
            right = b.values.contiguous().t()  # kernels want this operand by columns
            return torch._scaled_mm(left, right, a.scale, b.scale.t(), out_dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        left = dequantize(a, wide)
        right = dequantize(b, wide)
        return (left @ right.t()).to(dtype)


def has_kernel(a, b, dtype):
    """Return whether the device multiplies these numbers without a cast to fp32."""
    sizes = a.values.shape + b.values.shape
    if a.values.is_cuda and any(size % 16 for size in sizes):
        return False
    if a.block != b.block:
        return False
    return kernel_runs(
        a.values.device.type,
        a.block,
        a.values.dtype,
        b.values.dtype,
        dtype,
    )


@torch.compiler.assume_constant_result
def kernel_runs(*formats):
    """try_kernel(), whose answer torch.compile takes as a constant."""
    return try_kernel(*formats)


@functools.cache
def try_kernel(device_type, block, a_dtype, b_dtype, dtype):
    """Try a product. Which kernels exist depends on the device and on the versions."""
    if block not in ((None, None), (1, None)) or dtype == torch.float64:  # it sums in fp32
        return False
    ones = torch.ones(16, 16, device=device_type)
    scale = torch.ones(16 if block[0] else 1, 1, device=device_type)
    a = ones.to(a_dtype)
    b = ones.to(b_dtype).t()
    try:
        torch._scaled_mm(a, b, scale, scale.t(), out_dtype=dtype)
    except (RuntimeError, ValueError):
        return False
    return True


# --------------------------------------------------------------------------------------------------
# 3. The layer. Each product sums over the last dimension of both operands, so a matrix
#    is quantized by its rows for one product, and by its columns for another.


class Float8Linear(nn.Linear):
    """An nn.Linear whose products multiply 8-bit numbers. convert() makes it, or parallelize()."""

    recipe = "tensorwise"
    split = None  # how parallelize() has split the weight
    process_group = None

    def forward(self, x):
        device_type = x.device.type
        dtype = x.dtype  # of y
        if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
        rows = x.reshape(-1, x.shape[-1])
        y = Float8Product.apply(rows, self.weight, self, dtype)
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


def convert(model, recipe="tensorwise", filter=None):
    """Turn each nn.Linear for which filter(module, name) is true into a Float8Linear.

    Its parameters, hooks and names stay, so optimizers, ddp.py, zero.py and fsdp.py work as before.
    """
    check_recipe(recipe)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and (filter is None or filter(module, name)):
            module.__class__ = Float8Linear
            module.recipe = recipe
    return model


# After parallelize() of section 4: the dimension that is split over ranks, of x, of W and of dy.
SPLITS = {
    None: (None, None, None),
    "shard": (None, 0, None),  # as FSDP: ranks have other x, and gather W
    "column": (None, 0, 1),  # ranks have the same x, and compute other columns of y
    "row": (1, 1, None),  # ranks have other columns of x, and add up y
}


class Float8Product(torch.autograd.Function):
    """x Wᵀ, in 8 bits. Backward multiplies in 8 bits, too."""

    @staticmethod
    def forward(ctx, x, weight, layer, dtype):
        block, weight_block, _ = RECIPES[layer.recipe]
        split_x, split_weight, _ = SPLITS[layer.split]
        x8, x8_t = quantize_both_ways(x, block, E4M3, split_x, layer.process_group)
        weight8 = quantize(weight, weight_block, E4M3, split_weight, layer.process_group)
        if layer.split == "shard":
            weight8 = all_gather(weight8, 0, layer.process_group)
        ctx.save_for_backward(weight, x8_t.values, x8_t.scale)
        ctx.layer = layer
        ctx.x_dtype = x.dtype
        y = multiply(x8, weight8, dtype)
        if layer.split == "row":
            dist.all_reduce(y, group=layer.process_group)
        return y

    @staticmethod
    @once_differentiable  # otherwise, gradients of gradients would be wrong without an error
    def backward(ctx, dy):
        weight, *x8_t = ctx.saved_tensors
        layer = ctx.layer
        block, weight_block, dy_dtype = RECIPES[layer.recipe]
        _, split_weight, split_dy = SPLITS[layer.split]
        dy8, dy8_t = quantize_both_ways(dy, block, dy_dtype, split_dy, layer.process_group)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight8_t = quantize_transposed(
                weight, weight_block, E4M3, split_weight, layer.process_group
            )
            if layer.split == "shard":
                weight8_t = all_gather(weight8_t, 1, layer.process_group)
            dx = multiply(dy8, weight8_t, ctx.x_dtype)  # dy (Wᵀ)ᵀ
            if layer.split == "column":
                dist.all_reduce(dx, group=layer.process_group)
        if ctx.needs_input_grad[1]:
            dw = multiply(dy8_t, Quantized(*x8_t, block), weight.dtype)  # dyᵀ (xᵀ)ᵀ
            if layer.split == "shard":
                dw = reduce_scatter(dw, layer.process_group)
        return dx, dw, None, None


def quantize_both_ways(x, *how):
    """Return x and xᵀ in 8 bits. They are the same numbers if blocks are square."""
    x8 = quantize(x, *how)
    if x8.block[0] == x8.block[1]:
        return x8, Quantized(x8.values.t(), x8.scale.t(), x8.block)
    return x8, quantize_transposed(x, *how)


def quantize_transposed(x, block, dtype, split, process_group):
    if split is not None:
        split = 1 - split
    return quantize(x.t(), block, dtype, split, process_group)


# --------------------------------------------------------------------------------------------------
# 4. Ranks: who has which part of W, and what travels in 8 bits.


def parallelize(layer, split, process_group=None):
    """Split a Float8Linear over the ranks, in place. All ranks must have the same weight.

    "shard":  rows of the weight, which is gathered in 8 bits. Its gradients are the sum over all
              ranks' tokens. The bias stays whole, and its gradient is that of this rank's tokens.
    "column": rows of the weight and of the bias. y has this rank's columns.
    "row":    columns of the weight. x has this rank's columns, and y is the sum.
    """
    check_split(layer, split, process_group)
    _, dim, _ = SPLITS[split]
    ranks = dist.get_world_size(process_group)
    rank = dist.get_rank(process_group)
    parameters = [layer.weight]
    if split == "column" and layer.bias is not None:
        parameters.append(layer.bias)
    for parameter in parameters:
        parts = parameter.data.chunk(ranks, dim)
        parameter.data = parts[rank].clone()
    layer.split = split
    layer.process_group = process_group
    return layer


def all_gather(part, split, process_group=None):
    """Return the Quantized of one device, from all ranks' parts of it."""
    values = gather(part.values.view(torch.uint8), split, process_group)  # gloo has no float8
    scale = part.scale
    if part.block[split]:  # otherwise all ranks have all scales
        scale = gather(scale, split, process_group)
    return Quantized(values.view(part.values.dtype), scale, part.block)


def gather(part, dim, process_group):
    part = part.contiguous()
    ranks = dist.get_world_size(process_group)
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part, group=process_group)
    return torch.cat(parts, dim)


def reduce_scatter(x, process_group):
    """Return this rank's rows of the sum, which is added up in the order of the ranks."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=process_group)
    ranks = dist.get_world_size(process_group)
    total, *others = parts.chunk(ranks)
    for part in others:
        total = total + part
    return total


# --------------------------------------------------------------------------------------------------
# 5. The library: checks.


def check_recipe(recipe):
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} must be one of {', '.join(RECIPES)}")


def check_blocks_are_whole(shape, block, split):
    if split is not None and block[split] and shape[split] % block[split]:
        raise ValueError(
            f"a shard of {tuple(shape)} cuts a block of {block}: its dimension {split} must be a "
            f"multiple of {block[split]}"
        )


def rows_of_a_block(layer):
    """Return what the rows of the weight, and its columns, must be a multiple of in a shard."""
    _, weight_block, _ = RECIPES[layer.recipe]
    return max(size or 1 for size in weight_block)


def check_split(layer, split, process_group):
    """Raise ValueError unless all ranks can split the layer, and do it alike."""
    if not split or split not in SPLITS:
        raise ValueError(f"split={split!r} must be 'shard', 'column' or 'row'")
    if not isinstance(layer, Float8Linear) or layer.split:
        raise ValueError(f"{layer} must be a Float8Linear that is not split yet: call convert()")
    weight = layer.weight
    facts = [split, layer.recipe, weight.shape, weight.dtype, layer.bias is None]
    check_same_on_all_ranks("layer", facts, process_group)
    ranks = dist.get_world_size(process_group)
    length = weight.shape[SPLITS[split][1]]
    unit = rows_of_a_block(layer)
    if length % (ranks * unit):
        raise ValueError(
            f"{length} {'inputs' if split == 'row' else 'outputs'} do not divide by {ranks} ranks "
            f"into shards of a multiple of {unit}, as {layer.recipe} needs them"
        )


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
    flags = {"--recipe": {"choices": [*RECIPES], "default": "tensorwise", "help": "of 8 bits"}}
    demo = Demo(__doc__, flags)
    model = demo.start("fp8", bitwise=True)
    fp32 = copy.deepcopy(model)
    if demo.args.idea:
        for each in (model, demo.model):
            use_idea(each)
        return train(demo, model, [])
    for each in (model, demo.model):  # one device multiplies in 8 bits, too
        convert(each, demo.args.recipe)
    sharded = [layer for layer in model.modules() if can_split(layer, demo.ranks)]
    for layer in sharded:
        parallelize(layer, "shard")
    status = train(demo, model, sharded)
    demo.show()
    compare_recipes(demo, fp32)
    return status


def use_idea(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = functools.partial(naive_linear, weight=layer.weight, bias=layer.bias)


def can_split(layer, ranks):
    """Return whether shards of the layer are of whole blocks. Otherwise it stays whole."""
    if not isinstance(layer, Float8Linear):
        return False
    return layer.weight.shape[0] % (rows_of_a_block(layer) * ranks) == 0


def train(demo, model, sharded):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = {layer.weight for layer in sharded}

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        for parameter in model.parameters():
            if parameter not in weights:
                add_in_order_of_ranks(parameter.grad)
            parameter.grad /= demo.ranks
        optimizer.step()
        return loss

    def whole():
        tensors = [parameter.grad for parameter in model.parameters()], [*model.parameters()]
        return [
            [
                gather(tensor.detach(), 0, None) if parameter in weights else tensor
                for tensor, parameter in zip(each, model.parameters(), strict=True)
            ]
            for each in tensors
        ]

    demo.train(step, whole)
    N = demo.ranks
    psi = N * sum(weight.numel() for weight in weights)  # of the layers that are split
    others = held_bytes([each for each in model.parameters() if each not in weights])
    itemsize = next(model.parameters()).itemsize
    sent = (2 + itemsize) * psi * (N - 1) / N + others * (N - 1)
    formula = f"(1+1+{itemsize})Ψ(N-1)/N + others"
    return demo.report(held(model.parameters(), optimizer), formula, sent)


def add_in_order_of_ranks(gradient):
    everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, gradient)
    gradient.zero_()
    for each in everyone:
        gradient += each


def compare_recipes(demo, fp32):
    """Train the model in fp32 and with each recipe, on one device. Print how far apart they are."""
    demo.show("Each recipe on one device, against fp32, with rank 0's part of the batches:")
    demo.show("            error of the first logits   loss    vs fp32")
    logits = {}
    losses = {}
    for recipe in ("fp32", *RECIPES):
        model = copy.deepcopy(fp32)
        if recipe != "fp32":
            convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(demo.args.steps):
            inputs, targets = (each.chunk(demo.ranks)[0] for each in demo.batch(number))
            optimizer.zero_grad()
            outputs = model(inputs)
            logits.setdefault(recipe, outputs.detach())
            loss = language_loss(outputs, targets)
            loss.backward()
            optimizer.step()
        losses[recipe] = loss.item()
        error = (logits[recipe] - logits["fp32"]).norm() / logits["fp32"].norm()
        change = losses[recipe] / losses["fp32"] - 1
        demo.show(f"{recipe:12}{error:25.2%}   {losses[recipe]:.3f}   {change:+.2%}")


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
