"""LoRA: fine-tune a model too large to train in full, by small corrections to some matrices.

The matrix W is frozen. Backward computes gradients of the thin factors A and B only, and the ranks
average these. (If they have unequal numbers of tokens: docs/training_loops.md.)

    x ──┬── W (d × k), frozen; QLoRA: in 4 bits ──┬── y = W x + (α/r) B A x
        └── A (r × k) ── r numbers ── B (d × r) ──┘

B starts at zero, so training starts from the pretrained model, bit for bit. After training, merge()
makes the layers multiply by W + (α/r) B A, or save_adapter() writes A and B to a small file.

Elements per rank with Adam, for Ψ parameters and Φ = Σ r(d + k) over the adapted matrices. N ranks
send (N-1)/N times the last column per step.

                          weights     gradients   optimizer   sent
    full fine-tuning         Ψ            Ψ          2Ψ       2Ψ
    LoRA                     Ψ + Φ        Φ          2Φ       2Φ
    QLoRA                    Ψ/4 + Φ      Φ          2Φ       2Φ          (4.127 bits, not 16)
    LoRA over fsdp.py       (Ψ + Φ)/N    Φ/N        2Φ/N      2Ψ + 3Φ

fsdp.py gathers all weights twice, 2(Ψ + Φ), and reduce-scatters the gradients of A and B, Φ.

Read section 1 for the idea (7 minutes), to section 4 for the technique (21), and the rest to use
it as a library (36).

Run:      torchrun --nproc-per-node 2 lora.py            (--idea trains with section 1 alone)
          python lora.py runs one rank
Papers:   Hu et al. 2021, LoRA, arXiv 2106.09685; Dettmers et al. 2023, QLoRA, 2305.14314;
          Kalajdzievski 2023, rsLoRA, 2312.03732
Mirrors:  peft (get_peft_model, its layer and files); bitsandbytes (quantize_4bit, dequantize_4bit)
Left out: convolutions, embeddings, the in_proj_weight of nn.MultiheadAttention, DoRA, several
          adapters, .bin files (see peft); kernels that multiply 4-bit weights (see bitsandbytes)
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: train thin factors beside a frozen layer. QLoRA also rounds the layer to 4 bits.


class NaiveLoRA(nn.Module):
    """A frozen linear layer plus (α/r) B A."""

    def __init__(self, base, r=8, lora_alpha=16):
        super().__init__()
        weight = matrix_of(base)
        d, k = weight.shape
        dtype = torch.promote_types(weight.dtype, torch.float32)  # 16 bits lose small updates
        A = torch.empty(r, k, dtype=dtype, device=weight.device)
        self.lora_A = nn.Parameter(A.uniform_(-(k**-0.5), k**-0.5))  # like peft
        self.lora_B = nn.Parameter(A.new_zeros(d, r))
        self.scaling = lora_alpha / r
        self.base_layer = base.requires_grad_(False)

    def forward(self, x):  # (…, k) to (…, d), without building the d × k matrix B A
        return self.base_layer(x) + self.scaling * (x @ self.lora_A.t() @ self.lora_B.t())


def matrix_of(layer):
    """Return the weight as (d, k). The weight of transformers' Conv1D is (k, d)."""
    return layer.weight.t() if type(layer).__name__ == "Conv1D" else layer.weight


# A 4-bit code is an index into this table. Its values are quantiles of a normal distribution, so
# pretrained weights use all 16 about equally (Dettmers, §3).
NF4_TABLE = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    dtype=torch.float32,
)


def naive_nf4(weight, block_size=64):
    """Round a weight to 16 multiples of the largest magnitude in each block of its elements."""
    codes, absmax = quantize_blocks(weight, NF4_TABLE, block_size)  # a code takes 4 bits
    rounded = dequantize_blocks(codes, absmax, NF4_TABLE, block_size)
    return rounded.view_as(weight).to(weight.dtype)


def quantize_blocks(tensor, table, block_size):
    """Return a code for each element, and the largest magnitude of each block, absmax.

    The code is the index in `table` of the value nearest to element / absmax, or of the lower one
    of two.
    """
    flat = tensor.detach().flatten().float()
    table = on_device(table, flat.device)
    blocks = F.pad(flat, (0, -len(flat) % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    # Like bitsandbytes, multiply by the reciprocal. clamp_min: a block may have only zeros.
    relative = blocks * (1 / absmax.clamp_min(1e-38)).unsqueeze(1)
    codes = torch.bucketize(relative, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    return codes.flatten()[: len(flat)].clone(), absmax  # a view would keep the padding in memory


def dequantize_blocks(codes, absmax, table, block_size):
    values = on_device(table, codes.device).index_select(0, codes.int())  # table[codes], but faster
    return values * absmax.repeat_interleave(block_size)[: len(codes)]


on_device = functools.cache(torch.Tensor.to)  # copies a table at the first call only


# --------------------------------------------------------------------------------------------------
# 2. The real one: a layer that replaces an nn.Linear. The caller names the layers to replace.


class LoRALinear(NaiveLoRA):
    """base(x) + scaling · B A dropout(x) for a frozen linear layer.

    scaling is lora_alpha/r, or lora_alpha/√r with use_rslora, so that a large r does not shrink the
    correction. quantize="nf4" stores the base's weight in 4 bits (section 3).
    """

    def __init__(
        self,
        base,
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        use_rslora=False,
        quantize=None,
        double_quant=False,
    ):
        check_options(r, lora_alpha, lora_dropout, use_rslora, quantize)
        check_is_whole(base.weight)
        super().__init__(base, r, lora_alpha)
        if use_rslora:
            self.scaling = lora_alpha / r**0.5
        self.lora_dropout = lora_dropout
        if quantize:
            self.base_layer = NF4(matrix_of(base), double_quant=double_quant)
            self.base_layer.bias = base.bias
        self.register_buffer("merged", None, persistent=False)  # merge() sets it
        self.train(base.training)

    def forward(self, x):
        if self.merged is not None:
            if self.training and torch.is_grad_enabled():
                raise ValueError("merged, so A and B get no gradient: call unmerge(model) to train")
            return F.linear(x, self.merged, self.bias)
        y = self.base_layer(x)
        x = F.dropout(x, self.lora_dropout, self.training)
        A = self.lora_A.to(y.dtype)  # the dtype of x, or autocast's
        B = self.lora_B.to(y.dtype)
        # `hidden` is (r, tokens): MKL takes up to 1.3 times as long if r is the last dimension.
        hidden = self.scaling * (A @ x.reshape(-1, x.shape[-1]).to(y.dtype).t())
        rows = torch.addmm(y.reshape(-1, len(B)), hidden.t(), B.t().contiguous())
        return rows.view_as(y)

    def _load_from_state_dict(self, *args):
        self.merged = None  # it has the old A and B
        super()._load_from_state_dict(*args)

    @property
    def weight(self):
        """W + scaling · B A, for merge(), and for modules such as nn.MultiheadAttention."""
        check_is_whole(self.lora_B)  # if it is sharded, so is W
        W = matrix_of(self.base_layer)  # QLoRA dequantizes it here
        return (W + self.scaling * self.lora_B @ self.lora_A).to(W.dtype)

    @property
    def bias(self):
        return self.base_layer.bias


def lora_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def inject_lora(
    model,
    r=8,
    lora_alpha=16,
    lora_dropout=0.0,
    target_modules="all-linear",
    use_rslora=False,
    quantize=None,
    double_quant=False,
):
    """Replace the target linear layers by LoRALinear, freeze all else, and return the model.

    target_modules is a regular expression that matches whole names; a list of names, or of their
    last parts, such as "q_proj"; or "all-linear", which leaves out a transformers model's output
    layer, as in peft.
    """
    if lora_layers(model):
        raise ValueError("the model has adapters already")
    target_modules, targets = find_targets(model, target_modules)
    adapted = {  # a layer with two names gets one LoRALinear
        layer: LoRALinear(layer, r, lora_alpha, lora_dropout, use_rslora, quantize, double_quant)
        for layer in targets.values()
    }
    model.requires_grad_(False)  # not A and B, which are not in the model yet
    for name, layer in targets.items():
        model.set_submodule(name, adapted[layer])
    model.lora_config = {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "use_rslora": use_rslora,
        "target_modules": target_modules,
    }
    return model


def find_targets(model, target_modules):
    """Return target_modules as save_adapter writes it, and {name: layer} of all that it matches."""
    layers = dict(model.named_modules(remove_duplicate=False))
    linear = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    }
    if target_modules == "all-linear":  # peft knows it for some models only, so names are written
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        names = [name for name, layer in linear.items() if layer is not head]
        target_modules = "|".join(map(re.escape, names))
    pattern = str(target_modules)  # that of None finds nothing
    if isinstance(target_modules, Iterable) and not isinstance(target_modules, str):
        pattern = "|".join(rf"(.*\.)?{re.escape(str(name))}" for name in target_modules)
    found = {name: layer for name, layer in layers.items() if re.fullmatch(pattern, name)}
    check_found(target_modules, found, linear)
    return target_modules, found


def trained_by(model):
    """Return the parameters that are not frozen: after inject_lora, A and B of each layer."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# --------------------------------------------------------------------------------------------------
# 3. QLoRA: frozen weights in 4 bits.


class NF4(nn.Module):
    """A frozen nn.Linear whose weight is rounded as by naive_nf4. The bytes are bitsandbytes'.

    An element takes 4 bits, and absmax 32 bits per block: 4.5 bits per element. double_quant
    subtracts the mean of all absmax, and quantizes the differences to 8 bits in blocks of 256. That
    makes 4.127 bits per element.
    """

    def __init__(self, weight, block_size=64, double_quant=False):
        super().__init__()
        self.shape = weight.shape
        self.dtype = weight.dtype  # of the weight when it is dequantized
        self.block_size = block_size
        self.bias = None
        codes, absmax = quantize_blocks(weight, NF4_TABLE, block_size)
        codes = F.pad(codes, (0, len(codes) % 2), value=7)  # 7 is the code of 0.0
        # uint8: two codes each, the first in the high half. Buffers, so state_dict() has them.
        self.register_buffer("packed", codes[::2] << 4 | codes[1::2])
        self.register_buffer("scales", None)  # with double_quant: float32, one for 256 blocks
        self.register_buffer("mean", None)  # with double_quant: float32, one
        if double_quant:  # absmax = DYNAMIC_TABLE[code] * scale + mean
            self.mean = absmax.mean(0, keepdim=True)
            absmax, self.scales = quantize_blocks(absmax - self.mean, DYNAMIC_TABLE, 256)
        self.register_buffer("absmax", absmax)  # per block: float32; its code with double_quant

    @property
    def weight(self):
        return dequantize_nf4(self)

    def forward(self, x):
        return LinearNF4.apply(x, self.bias, self)

    def _apply(self, fn, recurse=True):
        return super()._apply(keep_bytes(self, fn), recurse)


quantize_nf4 = NF4


def dequantize_nf4(nf4, dtype=None):
    """Return the rounded weight, by default in the dtype that it had."""
    absmax = nf4.absmax
    if nf4.mean is not None:
        absmax = dequantize_blocks(absmax, nf4.scales, DYNAMIC_TABLE, 256) + nf4.mean
    codes = torch.stack((nf4.packed >> 4, nf4.packed & 15), 1).flatten()
    weight = dequantize_blocks(codes[: nf4.shape.numel()], absmax, NF4_TABLE, nf4.block_size)
    return weight.view(nf4.shape).to(dtype or nf4.dtype)


class LinearNF4(torch.autograd.Function):
    """F.linear with a 4-bit weight. Backward dequantizes it again, so only 4 bits are kept."""

    @staticmethod
    def forward(ctx, x, bias, nf4):
        ctx.nf4 = nf4
        return F.linear(x, dequantize_nf4(nf4, x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        grad_bias = gradient.sum_to_size(gradient.shape[-1]) if ctx.needs_input_grad[1] else None
        return gradient @ dequantize_nf4(ctx.nf4, gradient.dtype), grad_bias, None


# --------------------------------------------------------------------------------------------------
# 4. After training: merge.


def merge(model):
    """Make every LoRALinear multiply by W + scaling · B A. W stays, for unmerge().

    With QLoRA the sum stays in 16 or 32 bits, because 4 bits would lose most of the correction.
    """
    for layer in lora_layers(model).values():
        layer.merged = layer.weight.detach()


def unmerge(model):
    """Go back to W and its adapter, bit for bit."""
    for layer in lora_layers(model).values():
        layer.merged = None


# --------------------------------------------------------------------------------------------------
# 5. The library: averaging, names of layers, checks, and files in peft's format.


def average_adapters(model, process_group=None):
    """Average the gradients of A and B over the ranks. Call it between backward and step.

    All ranks must start from the same A: call inject_lora after the same torch.manual_seed. Under
    ddp.py and fsdp.py, which average gradients, do not call this. With QLoRA, give ddp.py
    broadcast_buffers=False, or it sends the 4-bit weights before every forward.
    """
    ranks = dist.get_world_size(process_group)
    if ranks < 1:  # it is -1 on a rank outside of the group
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    parameters = trained_by(model)
    # A rank sends -0.0 for a parameter that it has not used, because all must send the same number
    # of elements. A sum is -0.0 only if all ranks sent that, because -0.0 + 0.0 is 0.0.
    gradients = [torch.full_like(p, -0.0) if p.grad is None else p.grad + 0.0 for p in parameters]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, group=process_group)
    flat /= ranks  # after the sum, so that the bits are those of one device that accumulates
    nn.utils.vector_to_parameters(flat, gradients)
    for parameter, mean in zip(parameters, gradients, strict=True):
        if parameter.grad is None and ((mean == 0) & mean.signbit()).all():
            continue  # no rank has used it, so the optimizer must not decay it
        # If the dtypes of the gradients differ, `flat` has a common one.
        parameter.grad = mean.to(parameter.dtype)


def dynamic_table():
    """Return bitsandbytes' 256 values for 8-bit codes, ascending (arXiv 2110.02861, §2.2).

    127 lie between 0 and 1, in 7 decades, each with twice as many as the one below it. The others
    are the negatives of these, 0 and 1.
    """
    table = [torch.arange(2)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        table += [middles, -middles]
    return torch.cat(table).sort().values


DYNAMIC_TABLE = dynamic_table()


def keep_bytes(nf4, fn):
    """Return an fn that moves the buffers, and casts only the bias.

    model.half() must not round the scales. It sets the dtype that dequantizing returns.
    """

    def move(tensor):
        return fn(tensor) if tensor is nf4.bias else tensor.to(fn(tensor).device)

    nf4.dtype = fn(torch.empty(0, dtype=nf4.dtype)).dtype
    return move


def check_options(r, lora_alpha, lora_dropout, use_rslora, quantize=None, target_modules=None):
    is_right = (
        (isinstance(r, Integral) and r is not True and r > 0)
        and (isinstance(lora_alpha, Real) and math.isfinite(lora_alpha))
        and (isinstance(lora_dropout, Real) and 0 <= lora_dropout < 1)
        and (isinstance(use_rslora, bool) and quantize in (None, "nf4"))
    )
    if not is_right:
        raise ValueError(
            f"{r=} must be an integer ≥ 1, {lora_alpha=} a number, {lora_dropout=} a number in "
            f"[0, 1), {use_rslora=} True or False, {quantize=} None or 'nf4'"
        )


def check_found(target_modules, found, linear):
    if not found or not found.keys() <= linear.keys():
        raise ValueError(
            f"target_modules {target_modules!r} finds {[*found]}; "
            f"it must find linear layers only, which are {[*linear]}"
        )


def check_is_whole(matrix):
    # fsdp.py's shards have this attribute. A matrix that zero.py has freed has strides of 0.
    if hasattr(matrix, "_sharded_parameter") or 0 in matrix.stride():
        raise ValueError(
            "this rank has only a shard of the weight. Call inject_lora before Zero3 or "
            "fully_shard, and merge in `with optimizer.full_parameters():`, or a model into which "
            "fsdp.full_state_dict(model) was loaded"
        )


# The fields of adapter_config.json that load_adapter uses, with the defaults of peft, not ours.
DEFAULTS = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "target_modules": None,
}
# Other fields, and values of fields, with which an adapter computes the same as ours.
ACCEPTED = """auto_mapping base_model_name_or_path ensure_weight_tying eva_config fan_in_fan_out
    inference_mode megatron_core peft_version qalora_group_size revision runtime_config task_type
    peft_type=LORA bias=none init_lora_weights=True init_lora_weights=gaussian
    init_lora_weights=orthogonal init_lora_weights=eva"""
ACCEPTED = {*DEFAULTS, *ACCEPTED.split()}


def adapter_state_dict(model, state_dict=None):
    """Return {peft's name: tensor}. Under fsdp.py, state_dict is its full_state_dict(model)."""
    state_dict = state_dict or model.state_dict()
    keys = [f"{name}.{factor}" for name in lora_layers(model) for factor in ("lora_A", "lora_B")]
    return {f"base_model.model.{key}.weight": state_dict[key] for key in keys}


def save_adapter(model, directory, state_dict=None):
    """Write files for peft.PeftModel.from_pretrained(base_model, directory). Call on one rank."""
    from safetensors.torch import save_file  # pip install safetensors

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", **model.lora_config}
    text = json.dumps(fields, indent=2, default=list)  # target_modules may be a set
    (directory / "adapter_config.json").write_text(text)
    save_file(adapter_state_dict(model, state_dict), directory / "adapter_model.safetensors")


def load_adapter(model, directory):
    """Read what save_adapter or peft wrote. Inject adapters if `model` has none. Return the model.

    If anything does not fit, a ValueError lists it, and nothing is copied.
    """
    from safetensors.torch import load_file  # pip install safetensors

    directory = Path(directory)
    config = read_config(directory / "adapter_config.json")
    if not hasattr(model, "lora_config"):
        inject_lora(model, **config)
    saved = load_file(directory / "adapter_model.safetensors")
    state_dict = adapter_state_dict(model)
    different = describe(config, saved) ^ describe(model.lora_config, state_dict)
    if different:
        raise ValueError(f"{directory} and the model differ in {sorted(different)}")
    for name, tensor in state_dict.items():
        tensor.copy_(saved[name])  # into the model: state_dict() does not copy
    unmerge(model)  # the merged weights had the old A and B
    return model


def describe(config, state_dict):
    """Return {(name, value or shape)}: what must be equal for the files and for the model."""
    values = {(name, config[name]) for name in ("r", "lora_alpha", "use_rslora")}
    return values | {(name, tensor.shape) for name, tensor in state_dict.items()}


def read_config(path):
    """Return inject_lora's arguments, or raise a ValueError."""
    fields = json.loads(path.read_text())
    wrong = [
        f"{name} {value!r}"
        for name, value in fields.items()
        if value and not {name, f"{name}={value}"} & ACCEPTED  # false, null, empty: it is not set
    ]
    if wrong:
        raise ValueError(f"{path}: not supported: {', '.join(wrong)}")
    config = {name: fields.get(name, default) for name, default in DEFAULTS.items()}
    check_options(**config)
    return config


# --------------------------------------------------------------------------------------------------
# Demo.


def train(demo, model, lr, title, average=average_adapters):
    demo.show(f"{title}:")
    demo.model = copy.deepcopy(model)
    demo.optimizer = torch.optim.AdamW(trained_by(demo.model), lr=lr)
    optimizer = torch.optim.AdamW(trained_by(model), lr=lr)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        average(model)
        optimizer.step()
        return loss

    def whole():
        return [parameter.grad for parameter in trained_by(model)], trained_by(model)

    demo.train(step, whole)
    held_here = held([*model.parameters(), *model.buffers()], optimizer)  # buffers hold the 4 bits
    weights, gradients, state = (f"{size / 1e6:.1f} MB" for size in held_here)
    held_line = f"weights {weights}, gradients {gradients}, optimizer {state}"
    demo.show(f"held: {held_line}; last loss {demo.losses[-1]:.3f}")
    return held_here


def show_merged(demo, layer):
    """Print how much of the correction is lost if the merged weight is rounded."""
    weight = layer.base_layer.weight
    correction = (layer.merged - weight).norm()
    error16 = (layer.merged - layer.merged.half()).norm() / correction
    error4 = (layer.merged - quantize_nf4(layer.merged).weight).norm() / correction
    demo.show(
        "merging     The error of rounding W + (α/r) B A, relative to (α/r) B A: "
        f"{error16:.1%} in 16 bits, {error4:.0%} in 4 bits"
    )


def main():
    demo = Demo(__doc__)
    plain = demo.start("lora", bitwise=demo.ranks <= 2)
    text = demo.text
    documentation = Path(argparse.__file__).with_name("pydoc_data") / "topics.py"
    demo.text = demo.read(documentation)
    train(demo, plain, 2e-3, "pretraining on Python's documentation", average_one_by_one)
    plain.zero_grad()
    demo.text = text
    on = f"fine-tuning on {Path(demo.args.data).name}"
    if demo.args.idea:
        return fine_tune_by_idea(demo, plain, on)
    train(demo, copy.deepcopy(plain), 1e-3, f"full {on}")
    names = ["linear1", "linear2"]
    qlora = copy.deepcopy(plain)
    inject_lora(qlora, target_modules=names, quantize="nf4", double_quant=True)
    train(demo, qlora, 3e-3, f"QLoRA {on}")
    lora = inject_lora(plain, target_modules=names)
    status = report(demo, train(demo, lora, 3e-3, f"LoRA {on}"))
    merge(lora)
    show_merged(demo, lora[1].linear1)
    counts = [f"{96 * 2 * r * (12288 + 12288):,} at r = {r}" for r in (1, 4, 8)]  # Σ r(d + k)
    demo.show("GPT-3       has 175 billion parameters. LoRA on W_q and W_v of its 96 layers trains")
    demo.show(f"            {', '.join(counts)}")
    return status


def report(demo, held_here):
    return demo.report(held_here, "2Φ(N-1)/N", 2 * held_here[1] * (demo.ranks - 1) / demo.ranks)


def fine_tune_by_idea(demo, plain, on):
    plain.requires_grad_(False)
    qlora = copy.deepcopy(plain)
    for model in (qlora, plain):
        for block in model[1:-2]:
            if model is qlora:
                block.linear1.weight.copy_(naive_nf4(block.linear1.weight))
                block.linear2.weight.copy_(naive_nf4(block.linear2.weight))
            block.linear1 = NaiveLoRA(block.linear1)
            block.linear2 = NaiveLoRA(block.linear2)
    status = report(demo, train(demo, qlora, 3e-3, f"QLoRA {on}", average_one_by_one))
    return max(status, report(demo, train(demo, plain, 3e-3, f"LoRA {on}", average_one_by_one)))


def average_one_by_one(model):
    for parameter in trained_by(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


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
