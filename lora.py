"""LoRA: freeze the model, and train for each chosen matrix a correction of low rank, a hundredth of its size.

    x ──┬── W (d × k), frozen, QLoRA: in 4 bits ──┬── y = W x + (α/r) B A x
        └── A (r × k) ── r numbers ── B (d × r) ──┘

B starts at zero: training starts from the pretrained model, bit for bit. Afterwards (α/r) B A is added to W (merge) and
costs nothing; or it stays beside W, in a file of its own, and is exchanged for another. Data-parallel, W is the same
on all ranks and has no gradient, so only those of A and B travel.

Cost per rank in elements, with Adam; Ψ parameters, Φ = Σ r(d + k) over the adapted matrices:

                          weights     gradients   optimizer   sent per step
    full fine-tuning         Ψ            Ψ          2Ψ       2Ψ(N-1)/N
    LoRA                     Ψ + Φ        Φ          2Φ       2Φ(N-1)/N
    QLoRA                    Ψ/4 + Φ      Φ          2Φ       2Φ(N-1)/N      (Ψ in 16 bits; in fact 4.127 bits for each)

Run:      torchrun --nproc-per-node 2 lora.py          (python lora.py is a world of one)
Papers:   Hu et al. 2021, LoRA, arXiv 2106.09685; Dettmers et al. 2023, QLoRA, 2305.14314; Kalajdzievski 2023, rsLoRA,
          2312.03732; Liu et al. 2024, DoRA, 2402.09353
Mirrors:  peft (get_peft_model, its layers and files), bitsandbytes (quantize_4bit)
Left out: several adapters at once, a rank per layer, grouped convolutions. Reducing during backward is ddp.py, sharded
          weights are fsdp.py: both take a model from inject_lora
"""

import argparse
import copy
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea.


def naive_lora(x, W, A, B, scaling):
    """(…, k) to (…, d). Only A and B want gradients, and W + scaling · B A, d × k, never exists."""
    return x @ W.t() + scaling * (x @ A.t() @ B.t())


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: layers that take the place of others, found by name.


def inject_lora(
    model, r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", use_rslora=False, quantize=None, **more
):
    """Put an adapter on the layers of `model` that `target_modules` names, freeze all else, and return `model`.

    Args:
        r, lora_alpha: the rank, and α: the correction is scaled by α/r; use_rslora: by α/√r.
        lora_dropout: probability that an element of the correction's input is dropped (not for embeddings).
        target_modules: as peft's, of nn.Linear, nn.Embedding and nn.Conv1d to 3d. A list has whole names or their last
            parts ("q_proj"), a string is a regular expression for whole names; "all-linear" is every nn.Linear but
            those in nn.MultiheadAttention, which reads their weights and never calls them.
        quantize: "nf4" keeps adapted nn.Linear weights in 4 bits (QLoRA); double_quant=True: their scales in 8.
        init_lora_weights=True: A is Kaiming-uniform, as peft's; "gaussian": normal, as the paper's. B is zero.
        use_dora=False: also train the norm of the weights of each output channel (DoRA).
        adapter_name="default": a model may hold several adapters; it uses the last injected, or set_adapter()'s.

    Raises:
        ValueError: an argument is unusable, or `target_modules` finds nothing, or layers that cannot be adapted.
    """
    config = LoRAConfig(r, lora_alpha, lora_dropout, target_modules, use_rslora, quantize, **more)
    targets = find_targets(model, config)
    if target_modules == "all-linear":  # peft takes this word for models of transformers only
        names = "|".join(re.escape(path) for places in targets.values() for path, *_ in places)
        config = dataclasses.replace(config, target_modules=names)
    model.requires_grad_(False)
    for layer, places in targets.items():
        if isinstance(layer, LoRALayer):
            layer.add_adapter(config)
        else:
            adapted = kind_of(layer)(layer, **vars(config))
            for _, parent, name in places:  # a layer used in two places stays one
                setattr(parent, name, adapted)
    set_adapter(model, config.adapter_name)
    return model


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """One adapter: inject_lora's arguments. The first seven are fields of peft's LoraConfig as well."""

    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: str | list = "all-linear"
    use_rslora: bool = False
    quantize: str | None = None
    init_lora_weights: bool | str = True
    use_dora: bool = False
    double_quant: bool = False
    adapter_name: str = "default"

    def __post_init__(self):
        if not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r is {self.r}; a rank is an integer, at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and below 1")
        if self.quantize not in (None, "nf4"):
            raise ValueError(f"quantize is {self.quantize!r}; it must be None or 'nf4'")
        if self.init_lora_weights not in (True, "gaussian"):
            raise ValueError(f"init_lora_weights is {self.init_lora_weights!r}; it must be True or 'gaussian'")

    @property
    def scaling(self):
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoRALayer(nn.Module):
    """A frozen layer, and adapters by name; the active one adds scaling · B A to the weight.

    LoRALinear(layer, r=8, …), LoRAEmbedding and LoRAConv take inject_lora's keywords.
    """

    files = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}  # peft's
    channel = 0  # the dimension of the weight along which output channels lie

    def __init__(self, base_layer, *args, **kwargs):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A, self.lora_B, self.lora_magnitude = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.configs = {}  # adapter name: its config
        self.unmerged = ()  # while merged: (the weight without adapter,), in a tuple to keep it out of state_dict()
        self.add_adapter(LoRAConfig(*args, **kwargs))

    def add_adapter(self, config):
        weight, name = self.base_layer.weight, config.adapter_name
        # 16 bits are too few to add up small updates: A and B have 32 at least, as peft's.
        options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        self.configs[name], self.active = config, name  # active None: the base layer alone
        self.lora_A[name], self.lora_B[name] = self.new_factors(config, options)
        if config.quantize and isinstance(self.base_layer, nn.Linear) and not isinstance(weight, NF4):
            del self.base_layer.weight  # from here on a module: state_dict() and .to() find its bytes
            self.base_layer.weight = quantize_nf4(weight, double_quant=config.double_quant)
        if config.use_dora:
            norm = self.norm()
            shape = norm.transpose(0, 1).shape if norm.dim() > 2 else norm.numel()  # those of peft's files
            self.lora_magnitude[name] = nn.Parameter(norm.reshape(shape))

    def new_factors(self, config, options):
        out, *others = self.base_layer.weight.shape  # of a convolution, A has the kernel, B one of size 1
        A = torch.empty(config.r, *others, **options)
        if config.init_lora_weights == "gaussian":
            nn.init.normal_(A, std=1 / config.r)
        else:
            nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        return nn.Parameter(A), nn.Parameter(torch.zeros(out, config.r, *[1] * (len(others) - 1), **options))

    def forward(self, x):
        y = self.base(x)
        if self.in_use():
            config = self.configs[self.active]
            # In the dtype of y, which is that of x, or autocast's. A and B are small: casting them costs little.
            A, B = self.lora_A[self.active].to(y.dtype), self.lora_B[self.active].to(y.dtype)
            if config.lora_dropout and x.is_floating_point():
                x = F.dropout(x, config.lora_dropout, self.training)
            y = self.correct(y, x, A, B, config.scaling)
            if config.use_dora:
                y = self.rescale(y)
        return y

    def in_use(self):
        if self.unmerged and self.training and torch.is_grad_enabled():
            raise ValueError(f"adapter {self.active!r} is merged, and A and B get no gradient; unmerge(model) to train")
        return self.active in self.configs and not self.unmerged

    def base(self, x):
        return self.base_layer(x)

    def delta(self):
        """scaling · B A, in the shape of the weight."""
        A, B = self.lora_A[self.active].flatten(1), self.lora_B[self.active].flatten(1)
        return (self.configs[self.active].scaling * B @ A).view(self.base_layer.weight.shape)

    @property
    def weight(self):
        """That of a plain layer of the same output. nn.TransformerEncoderLayer reads it in eval, instead of a call."""
        weight = dense(self.base_layer.weight)
        if not self.in_use():
            return weight
        adapted = weight + self.delta()
        if self.active in self.lora_magnitude:
            adapted = adapted * self.gain()
        return adapted.to(weight.dtype)

    bias = property(lambda self: self.base_layer.bias)

    # ---- DoRA: the weight is magnitude / norm · (W + scaling · B A), the norm being that of each output channel.

    def norm(self):
        weight = (dense(self.base_layer.weight) + self.delta()).detach()  # a constant to backward: Liu et al. §4.3
        others = [dimension for dimension in range(weight.dim()) if dimension != self.channel]
        return torch.linalg.vector_norm(weight, dim=others, keepdim=True)

    def gain(self):
        norm = self.norm()  # at the start equal to the magnitude, so that the gain is 1.0
        return self.lora_magnitude[self.active].view_as(norm) / norm.clamp_min(torch.finfo(norm.dtype).tiny)

    def rescale(self, y):
        gain = self.gain().squeeze(1 - self.channel).to(y.dtype)
        bias = getattr(self.base_layer, "bias", None)  # not to be rescaled
        return gain * y if bias is None else gain * y + (1 - gain) * bias.view_as(gain)


class LoRALinear(LoRALayer):
    def forward(self, x):
        # As rows: autograd copies y when a view of it changes in place. Strided x stays: rows could round differently.
        y = super().forward(x.view(-1, x.shape[-1]) if x.is_contiguous() else x)
        return y.view(*x.shape[:-1], y.shape[-1])

    def base(self, x):
        weight = self.base_layer.weight
        return NF4Product.apply(x, weight, self.base_layer.bias) if isinstance(weight, NF4) else self.base_layer(x)

    def correct(self, y, x, A, B, scaling):
        hidden = F.linear(x, A)
        if y.dim() == 2:  # y += in one product: the correction by itself, of y's size, never exists
            return y.addmm_(hidden, B.t(), alpha=scaling)
        return y + F.linear(scaling * hidden, B)


class LoRAEmbedding(LoRALayer):
    """As peft's: A is zero and B normal, and B A has the shape of the transposed weight."""

    files = {"lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B", "lora_magnitude": "lora_magnitude_vector"}
    channel = 1

    def new_factors(self, config, options):
        V, C = self.base_layer.weight.shape
        A, B = torch.zeros(config.r, V, **options), torch.empty(C, config.r, **options)
        return nn.Parameter(A), nn.Parameter(nn.init.normal_(B))

    def delta(self):
        return self.configs[self.active].scaling * (self.lora_B[self.active] @ self.lora_A[self.active]).t()

    def correct(self, y, x, A, B, scaling):
        return y + scaling * F.embedding(x, A.t(), self.base_layer.padding_idx) @ B.t()


class LoRAConv(LoRALayer):
    def correct(self, y, x, A, B, scaling):
        convolution = (F.conv1d, F.conv2d, F.conv3d)[B.dim() - 3]
        return y + convolution(scaling * self.base_layer._conv_forward(x, A, None), B)  # strided and padded as W's


KINDS = {nn.Linear: LoRALinear, nn.Embedding: LoRAEmbedding}
KINDS |= {nn.Conv1d: LoRAConv, nn.Conv2d: LoRAConv, nn.Conv3d: LoRAConv}


def kind_of(layer):
    return next((kind for plain, kind in KINDS.items() if isinstance(layer, plain)), None)


def find_targets(model, config):
    """{layer: [(path, parent, name in parent), …]} of config.target_modules; ValueError with all that is wrong."""
    wanted, targets, problems, seen, inside = config.target_modules, {}, [], [], "."
    for path, layer in model.named_modules(remove_duplicate=False):
        if not path or path.startswith(inside):  # the model itself, or what an adapted layer consists of
            continue
        if isinstance(layer, LoRALayer):
            inside = f"{path}."
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        base = layer.base_layer if isinstance(layer, LoRALayer) else layer
        in_attention = isinstance(parent, nn.MultiheadAttention)
        if wanted == "all-linear":
            found = isinstance(base, nn.Linear) and not in_attention
        elif isinstance(wanted, str):
            found = re.fullmatch(wanted, path)
        else:
            found = any(f".{path}".endswith(f".{end}") for end in wanted)
        seen += [path] if kind_of(base) else []
        if not found:
            continue
        targets.setdefault(layer, []).append((path, parent, name))
        if not kind_of(base):
            problems.append(f"{path} is a {type(base).__name__}, not one of {', '.join(k.__name__ for k in KINDS)}")
        elif getattr(base, "groups", 1) > 1:
            problems.append(f"{path} has {base.groups} groups; a product B A corrects convolutions of one")
        elif in_attention and (config.lora_dropout or config.quantize):
            problems.append(f"nn.MultiheadAttention only reads {path}.weight: no lora_dropout, no quantize for it")
        elif layer is not base and (layer.unmerged or config.adapter_name in layer.configs):
            problems.append(f"{path} is merged, or has an adapter {config.adapter_name!r} already")
    if not targets:
        problems.append(f"target_modules {wanted!r} finds no layer; there are {', '.join(seen[:9]) or 'none'}")
    if problems:
        raise ValueError("; ".join(problems))
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# 3. When training is over: merge. And several adapters, switched by name.


def lora_layers(model, merged=None):
    """{path: layer}; ValueError where there is none, or `merged` is not None and some layer is not so."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALayer)}
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no adapters; inject_lora(model) first")
    if wrong := [path for path, layer in layers.items() if merged is not None and bool(layer.unmerged) != merged]:
        state, remedy = ("not merged", "merge") if merged else ("merged already", "unmerge")
        raise ValueError(f"{state}: {', '.join(wrong)}; {remedy}(model) first")
    return layers


def merge(model):
    """Make W + scaling · B A the weight of each layer, in the dtype of W. ValueError: twice, or on training after it.

    A quantised W becomes dense: rounding to 4 bits again would undo much of the adapter. The model must not be sharded.
    """
    for layer in lora_layers(model, merged=False).values():
        merged = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        # Another parameter, since W may be tied to a layer without adapter.
        layer.unmerged, layer.base_layer.weight = (layer.base_layer.weight,), merged


def unmerge(model):
    """Put back what merge(model) took out: the same bits, and tied if it was; ValueError when not merged."""
    for layer in lora_layers(model, merged=True).values():
        (weight,), layer.unmerged = layer.unmerged, ()
        del layer.base_layer.weight  # nn.Module refuses a module in the place of a parameter
        layer.base_layer.weight = weight


def set_adapter(model, adapter_name):
    """Use and train this adapter and no other (None: none); ValueError when no layer has it, or while merged."""
    layers = lora_layers(model, merged=False).values()
    known = {name for layer in layers for name in layer.configs}
    if adapter_name not in known | {None}:
        raise ValueError(f"no adapter {adapter_name!r}; there are {', '.join(sorted(known))}")
    for layer in layers:
        layer.active = adapter_name
        for factors in (layer.lora_A, layer.lora_B, layer.lora_magnitude):
            for name, parameter in factors.items():
                parameter.requires_grad_(name == adapter_name)


@contextmanager
def disable_adapters(model):
    """In here the model is the one from before inject_lora."""
    active = next(iter(lora_layers(model).values())).active
    set_adapter(model, None)
    try:
        yield
    finally:
        set_adapter(model, active)


# ---------------------------------------------------------------------------------------------------------------------
# Files in peft's format: adapter_config.json and adapter_model.safetensors; without that package, adapter_model.bin.


HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None
PEFT_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights", "use_dora")
# Fields that change what an adapter computes without a trace in the names and shapes of its tensors.
UNSUPPORTED = ("alpha_pattern", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "arrow_config")
UNSUPPORTED += ("kasa_config", "monteclora_config", "velora_config", "use_bdlora", "use_qalora", "exclude_modules")


def adapter_state_dict(model, adapter_name=None, state_dict=None):
    """{peft's key: tensor} of an adapter (None: the active one).

    state_dict: the whole model's, where this rank has shards of it (fsdp.py: full_state_dict(model)).
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    return {
        f"base_model.model.{path}.{file_name}": state_dict[key].detach()
        for path, layer in lora_layers(model).items()
        for own_name, file_name in layer.files.items()
        if (key := f"{path}.{own_name}.{adapter_name or layer.active}") in state_dict
    }


def save_adapter(model, directory, adapter_name=None, state_dict=None):
    """Write what peft's PeftModel.from_pretrained(base_model, directory) reads. Call it on one rank."""
    tensors = adapter_state_dict(model, adapter_name, state_dict)
    configs = [layer.configs.get(adapter_name or layer.active) for layer in lora_layers(model).values()]
    config, directory = next(filter(None, configs), None), Path(directory)
    if config is None:
        raise ValueError(f"no adapter {adapter_name!r} to save")
    fields = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "bias": "none"}
    fields |= {"fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None}
    fields |= {name: getattr(config, name) for name in PEFT_FIELDS}
    tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True, default=sorted))
    for stale in directory.glob("adapter_model.*"):
        stale.unlink()
    if HAS_SAFETENSORS:
        save_file = importlib.import_module("safetensors.torch").save_file
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, directory / "adapter_model.bin")


def load_adapter(model, directory, adapter_name="default"):
    """Read what save_adapter or peft wrote; -> model. Injects the adapter where the model does not have it.

    Raises:
        ValueError: the file needs what is left out here, or has other keys or shapes than the model: all are named,
            and nothing is copied.
        ImportError: it is a .safetensors file, and that package is missing.
    """
    directory = Path(directory)
    fields = json.loads((directory / "adapter_config.json").read_text())
    problems = [f"{name} {fields[name]!r} is not supported" for name in UNSUPPORTED if fields.get(name)]
    for name, supported in (("peft_type", "LORA"), ("bias", "none")):
        if fields.get(name, supported) != supported:
            problems.append(f"{name} {fields[name]!r} is not supported")
    config = {name: fields[name] for name in PEFT_FIELDS if name in fields} | {"adapter_name": adapter_name}
    if not (file := directory / "adapter_model.safetensors").exists():
        tensors = torch.load(directory / "adapter_model.bin", map_location="cpu", weights_only=True)
    elif HAS_SAFETENSORS:
        tensors = importlib.import_module("safetensors.torch").load_file(file)
    else:
        raise ImportError(f"to read {file}: pip install safetensors")
    if problems:
        raise ValueError(f"{directory}: {'; '.join(problems)}")
    if not any(adapter_name in getattr(layer, "configs", ()) for layer in model.modules()):
        inject_lora(model, **config)
    layers, own = lora_layers(model, merged=False), adapter_state_dict(model, adapter_name)
    state = {f"base_model.model.{key}": value for key, value in model.state_dict().items()}
    problems = [f"{key} is missing" for key in own if key not in tensors]
    for key, tensor in tensors.items():
        if key in own and own[key].shape != tensor.shape:
            problems.append(f"{key} is {tuple(tensor.shape)} in the file, {tuple(own[key].shape)} in the model")
        elif key not in own and not (key in state and torch.equal(state[key], tensor.to(state[key]))):
            problems.append(f"{key} is not in the model")  # peft adds adapted embeddings: those may be there
    if problems:
        raise ValueError(f"{directory} does not fit: {'; '.join(problems)}")
    for key, parameter in own.items():
        parameter.copy_(tensors[key])
    for layer in layers.values():
        if adapter_name in layer.configs:
            layer.configs[adapter_name] = dataclasses.replace(layer.configs[adapter_name], **config)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# QLoRA: frozen weights in 4 bits.

# Quantiles of a normal distribution, so that pretrained weights use all 16 alike (Dettmers et al. §3).
NF4_VALUES = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4_VALUES += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
NF4_VALUES += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941)
NF4_VALUES += (0.7229568362236023, 1.0)


@torch.no_grad()
def quantize_nf4(weight, block_size=64, double_quant=False):
    """Round to the nearest of 16 values, relative to the largest of each block; -> what dequantize_nf4 takes.

    4 bits a value and 32 a block are 4.5 in all. double_quant: those 32, less their mean, in blocks of 256 to 8 bits,
    4.127 in all. As bitsandbytes, byte for byte; only of those 8 bits, its CPU kernel (0.50) takes a neighbour now and
    then, where two are nearly as near. ValueError: `weight` or block_size cannot be used.
    """
    if block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"block_size is {block_size}; it must be a power of 2 from 32 to 4096")
    if not weight.is_floating_point() or weight.numel() == 0 or not torch.isfinite(weight).all():
        raise ValueError(f"a weight of {weight.dtype}, {tuple(weight.shape)}: it must have values, all finite floats")
    values = torch.tensor(NF4_VALUES, device=weight.device)
    codes, absmax = quantize_blocks(weight.flatten().float(), values, block_size)
    packed = codes[::2] << 4 | F.pad(codes[1::2], (0, weight.numel() % 2), value=7)  # the first in the high half
    if not double_quant:
        return NF4(weight, block_size, packed, absmax)
    mean = absmax.mean(0, keepdim=True)
    return NF4(weight, block_size, packed, *quantize_blocks(absmax - mean, dynamic_map(weight.device), 256), mean)


@torch.no_grad()
def dequantize_nf4(quantized, dtype=None):
    """The rounded values, in the weight's shape; dtype None: in the weight's."""
    q, block_size = quantized, quantized.block_size
    absmax = q.absmax
    if q.mean is not None:
        scales = q.scales.repeat_interleave(256)[: absmax.numel()]
        absmax = dynamic_map(q.device)[absmax.int()] * scales + q.mean
    # One look-up takes two bytes to four values. In chunks, which stay in the cache from look-up to product.
    chunk, table = 2**19 // block_size, nf4_quads(q.device)
    missing = absmax.numel() * block_size // 2 - q.packed.numel()
    packed = (F.pad(q.packed, (0, missing)) if missing else q.packed).view(torch.uint16)
    values = torch.empty(absmax.numel(), block_size, dtype=dtype or q.dtype, device=q.device)
    for i in range(0, len(values), chunk):
        indices = packed[i * block_size // 4 : (i + chunk) * block_size // 4].int()
        quads = table.index_select(0, indices).view(torch.float32).view(-1, block_size)
        torch.mul(quads, absmax[i : i + chunk, None], out=values[i : i + chunk])
    return values.flatten()[: q.shape.numel()].view(q.shape)


class NF4(nn.Module):
    """A weight in 4 bits. It is a module so that state_dict() has its bytes and .to() moves them."""

    def __init__(self, weight, block_size, packed, absmax, scales=None, mean=None):
        super().__init__()
        self.shape, self.dtype, self.block_size = weight.shape, weight.dtype, block_size
        self.register_buffer("packed", packed)  # uint8, two values each
        self.register_buffer("absmax", absmax)  # of each block, float32; with double_quant uint8, and
        self.register_buffer("scales", scales)  # of each 256 of those, float32
        self.register_buffer("mean", mean)  # of all, float32

    device = property(lambda self: self.packed.device)
    nbytes = property(lambda self: sum(buffer.nbytes for buffer in self.buffers()))

    def _apply(self, fn, recurse=True):  # as bytes: model.half() must not round the scales
        return super()._apply(lambda buffer: fn(buffer.view(torch.uint8)).view(buffer.dtype), recurse)


class NF4Product(torch.autograd.Function):
    """x Wᵀ + bias. Backward dequantises W again: between the two only the 4 bits are kept."""

    @staticmethod
    def forward(ctx, x, quantized, bias):
        ctx.quantized = quantized
        return F.linear(x, dequantize_nf4(quantized, x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ dequantize_nf4(ctx.quantized, gradient.dtype), None, None


def dense(weight):
    return dequantize_nf4(weight) if isinstance(weight, NF4) else weight


def quantize_blocks(flat, values, block_size):
    """-> index of the nearest of `values` (of two, the lower) to each x / absmax of its block; absmax of each block."""
    blocks = F.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    relative = blocks * (1 / absmax.clamp_min(1e-38))[:, None]
    indices = torch.bucketize(relative, (values[:-1] + values[1:]) / 2).to(torch.uint8)
    return indices.flatten()[: flat.numel()].clone(), absmax


@functools.cache
def nf4_quads(device):
    """For two bytes, as one little-endian number, their four float32 values; complex128, to move 16 bytes at once."""
    nibbles = torch.arange(2**16)[:, None] >> torch.tensor([4, 0, 12, 8]) & 15
    return torch.tensor(NF4_VALUES)[nibbles].view(torch.complex128).flatten().to(device)


@functools.cache
def dynamic_map(device):
    """bitsandbytes' 256 signed 8-bit values: 7 decades, each twice as fine as the one below (arXiv 2110.02861 §2.2)."""
    edges = [torch.linspace(0.1, 1, 2**i + 1) for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * ((edge[:-1] + edge[1:]) / 2) for i, edge in enumerate(edges)])
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism: what does not train does not travel.


def average_adapters(model, process_group=None):
    """Call this between backward and step: the mean over ranks of what trains, in one all-reduce for each dtype.

    Ranks must start from the same A: from the same seed, or in ddp.py, which broadcasts, checks, and overlaps.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
        same = [parameter for parameter in trained if parameter.dtype == dtype]
        # Unused on this rank only? All ranks must issue the same collectives.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=process_group)
        flat /= dist.get_world_size(process_group)
        for parameter, mean in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad = mean.view_as(parameter)


# ---------------------------------------------------------------------------------------------------------------------
# Demo.

TARGETS = ("linear1", "linear2")


class Trained(nn.Sequential):
    """A model whose parameters() are those that train: Demo compares all that there are."""

    def parameters(self, recurse=True):
        return (parameter for parameter in super().parameters(recurse) if parameter.requires_grad)


class Trainer:
    """Trains what is trainable in `model`, data-parallel."""

    def __init__(self, demo, model, lr):
        self.demo, self.model, self.times = demo, Trained(model), []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, inputs, targets):
        start, ranks, rank = time.perf_counter(), self.demo.ranks, self.demo.rank
        self.optimizer.zero_grad()
        loss = language_loss(self.model(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank])
        loss.backward()
        average_adapters(self.model)
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)
        return loss

    def train(self):
        for number in range(self.demo.args.steps):
            self.step(*self.demo.batch(number))
        return self

    @torch.no_grad()
    def show(self, name):
        trained = sum(parameter.numel() for parameter in self.model.parameters())
        weights = held_bytes([*self.model[0].parameters(), *self.model.buffers()])
        total = (weights + sum(held(self.model.parameters(), self.optimizer)[1:])) / 1e6
        inputs, targets = self.demo.batch(-1)  # not one of the steps'
        loss, ms = language_loss(self.model.eval()(inputs), targets), 1e3 * statistics.median(self.times)
        self.demo.show(f"{name:12}{trained:9,} trained   held {total:4.1f} MB   loss {loss:.3f}   {ms:.0f} ms per step")


def main():
    demo = Demo(bitwise=2)
    demo.stop_if(demo.read_text(None))
    pretrained = demo.model
    Trainer(demo, pretrained, lr=2e-3).train()
    topics = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"  # prose, after source code
    demo.stop_if(demo.read_text(demo.args.data or topics))

    lora = Trainer(demo, inject_lora(copy.deepcopy(pretrained), target_modules=TARGETS), lr=3e-3)
    demo.model = copy.deepcopy(lora.model)
    demo.optimizer = torch.optim.AdamW(demo.model.parameters(), lr=3e-3)
    demo.train(lora.step, lambda: ([parameter.grad for parameter in lora.model.parameters()], lora.model.parameters()))
    demo.model, N = demo.model[0], demo.ranks
    weights = [layer.base_layer.weight for layer in lora_layers(demo.model).values()]
    phi = sum(8 * sum(weight.shape) * weight.element_size() for weight in weights)
    held_here = held(lora.model[0].parameters(), lora.optimizer)
    status = demo.report("lora", held_here, "2Φ(N-1)/N", 2 * phi * (N - 1) / N)

    Trainer(demo, copy.deepcopy(pretrained), lr=1e-3).train().show("full")
    lora.show("LoRA")
    qlora = inject_lora(pretrained, target_modules=TARGETS, quantize="nf4", double_quant=True)
    Trainer(demo, qlora, lr=3e-3).train().show("QLoRA")
    layer = next(iter(lora_layers(qlora).values()))
    exact, size = layer.weight.detach(), layer.delta().norm()
    errors = [(merged - exact).norm() / size for merged in (exact.bfloat16(), dequantize_nf4(quantize_nf4(exact)))]
    demo.show("merging     adds an error of {:.1%} of the adapter in bfloat16, {:.0%} back in 4 bits".format(*errors))
    demo.show("GPT-3       " + ", ".join(f"r = {r}: {gpt3_parameters(r):,}" for r in (1, 4, 8)) + " trained")
    demo.leave(status)


def gpt3_parameters(r):
    """Hu et al., table 4: W_q and W_v of 96 layers. On the meta device, where 175B parameters take no memory."""
    layers = [nn.ModuleDict({name: nn.Linear(12288, 12288, device="meta") for name in "qkv"}) for _ in range(96)]
    model = inject_lora(nn.ModuleList(layers), r=r, target_modules=("q", "v"))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model, in this world and on one device. The same text in every file.


class Embed(nn.Module):
    """(B, T) integers to (B, T, C): token plus position. B batch, T time, C channels, V vocabulary."""

    def __init__(self, V, T, C):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)

    def forward(self, tokens_BT):
        return self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """(B, T, C) to (B, T, C): causal self-attention and MLP, each after a norm and around a residual."""

    def __init__(self, C, heads):
        super().__init__(C, heads, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x_BTC):
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], x_BTC.device, x_BTC.dtype)
        return super().forward(x_BTC, src_mask=mask, is_causal=True)


def language_model(C=192, heads=6, layers=4, T=64, V=256):
    """A causal transformer over bytes: (B, T) integers to (B, T, V) logits."""
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(Embed(V, T, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits_BTV, targets_BT):
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends: to single ranks, and in collectives by their ring algorithms."""

    # operator: (position of its payload, how often each byte goes around the ring)
    RING = {"allreduce_": (0, 2), "broadcast_": (0, 1), "_allgather_base_": (0, 1)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.RING:
            position, rounds = self.RING[name]
            N = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.total += rounds * (N - 1) / N * sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        elif name == "send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(parameters, optimizer):
    """Bytes that parameters, gradients and optimizer state hold on this rank."""
    parameters = list(parameters)
    state = [tensor for tensor in tree_leaves(list(optimizer.state.values())) if isinstance(tensor, torch.Tensor)]
    return held_bytes(parameters), held_bytes([p.grad for p in parameters if p.grad is not None]), held_bytes(state)


class Demo:
    """Joins the world, trains a technique and the same model on one device side by side, compares, and prints.

    One device accumulates the batch in `parts` (None: one per rank). Up to `bitwise` ranks on the CPU the two must be
    bitwise equal in float32; else the demo runs in float64, and they must be within 1e-9.
    """

    T = 64  # tokens in a sequence

    def __init__(self, bitwise=0, parts=None, add_arguments=lambda parser: None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--batch-size", type=int, help="sequences per step, over all ranks (default: 8 per rank)")
        parser.add_argument("--data", metavar="FILE", help="text to train on (default: the standard library's source)")
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        parser.add_argument("--seed", type=int, default=0)
        add_arguments(parser)
        self.args = parser.parse_args()
        self.join_world()
        self.parts = parts or self.ranks
        self.batch_size = 8 * self.ranks if self.args.batch_size is None else self.args.batch_size
        problem = self.read_text(self.args.data)
        if self.args.steps < 1:
            problem = f"--steps {self.args.steps}: at least 1"
        if self.batch_size < 1 or self.batch_size % self.parts:
            problem = f"--batch-size {self.batch_size}: must be a multiple of {self.parts}, to share it out evenly"
        if self.args.device == "cuda" and self.device.type == "cpu":
            problem = "--device cuda: torch sees no GPU"
        self.stop_if(problem)
        self.bitwise = self.ranks <= bitwise and self.device.type == "cpu"
        self.reset()

    def reset(self):
        """Make the model on one device anew, the same on every rank."""
        torch.manual_seed(self.args.seed)
        self.model = language_model(T=self.T).to(self.device, torch.float32 if self.bitwise else torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def join_world(self):
        """As torchrun says, or as a world of one."""
        # Imported after init_process_group (torch.optim does so), its default arguments would keep the group for ever:
        # destroy_process_group() would not end gloo's threads, which now and then abort the process at its exit.
        import torch.distributed.nn.functional

        gpus = torch.cuda.device_count() if self.args.device != "cpu" else 0
        self.device, backend = torch.device("cpu"), "gloo"
        if gpus:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            torch.cuda.set_device(self.device)
            backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"  # NCCL: a GPU each
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def read_text(self, path):
        files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            return f"--data {path}: {error.strerror}"
        if len(text) <= self.T:
            return f"--data {path}: {len(text)} bytes; one sequence and its targets take {self.T + 1}"
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return None

    def stop_if(self, problem):
        """When any rank has a problem, rank 0 prints it, and all ranks exit with status 2."""
        problems = [None] * self.ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.show(f"error: {next(filter(None, problems))}", file=sys.stderr)
            self.leave(2)

    def leave(self, status):
        dist.barrier()  # who leaves early breaks the others' connections
        dist.destroy_process_group()
        sys.exit(status)

    def show(self, text, **kwargs):
        if self.rank == 0:
            print(text, flush=True, **kwargs)

    def batch(self, step):
        """Inputs and targets of all ranks, (B, T) each."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + step)
        starts = torch.randint(len(self.text) - self.T, (self.batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(self.T + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, inputs, targets):
        """Accumulate the gradients of the parts, in rank order; -> their losses."""
        self.optimizer.zero_grad()
        losses = []
        for part, part_targets in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(part), part_targets)
            loss.backward()
            losses.append(loss.item())
        for parameter in self.model.parameters():
            parameter.grad /= self.parts  # after the sum: before it, at 3 parts, rounds differently
        self.optimizer.step()
        return losses

    def train(self, step, state):
        """`step(inputs, targets)` trains on the global batch, -> the loss of this rank's part.
        `state()` -> gradients, parameters: whole, in the order of the plain model."""
        self.losses, self.times, self.times_one_device = [], [], []
        self.largest = dict.fromkeys(("loss", "gradient", "parameter"), 0.0)
        for number in range(self.args.steps):
            batch, sent = self.batch(number), SentBytes()
            start = time.perf_counter()
            with sent if number == 0 else nullcontext():  # counting takes time
                loss = step(*batch).item()
            self.times.append(time.perf_counter() - start)
            self.sent = sent.total or (self.sent if number else 0.0)
            start = time.perf_counter()
            losses = self.step_on_one_device(*batch)
            self.times_one_device.append(time.perf_counter() - start)
            self.losses.append(statistics.mean(losses))
            gradients, parameters = state()
            self.compare("loss", [loss], [losses[self.rank % self.parts]])
            self.compare("gradient", gradients, [parameter.grad for parameter in self.model.parameters()])
            self.compare("parameter", parameters, self.model.parameters())
            if sys.stderr.isatty():
                self.show(f"\rstep {number + 1}/{self.args.steps}\r", end="", file=sys.stderr)

    def compare(self, what, ours, plain):
        for a, b in zip(map(torch.as_tensor, ours), map(torch.as_tensor, plain), strict=True):
            difference = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            self.largest[what] = max(self.largest[what], math.inf if math.isnan(difference) else difference)

    def report(self, name, held_here, formula, sent):
        """Print what every demo prints; -> the exit status, 1 when a rank differs from one device."""
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, self.largest)
        largest = {what: max(rank[what] for rank in everyone) for what in self.largest}
        tolerance = 0.0 if self.bitwise else 1e-9
        agree = max(largest.values()) <= tolerance
        verdict = ", ".join(f"max |Δ{what}| {difference:.1e}" for what, difference in largest.items())
        verdict += f", {'' if agree else 'NOT '}equal within {tolerance:g}{'' if self.bitwise else ' in float64'}"
        if not any(largest.values()):
            verdict = f"loss, gradients and parameters bitwise equal over {self.args.steps} steps"
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        size = f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f}M parameters"
        ms, ms_one_device = (1e3 * statistics.median(times) for times in (self.times, self.times_one_device))
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} · {self.device.type}/{dist.get_backend()}"
        self.show(f"{name} · {world} · {size} · {self.args.steps} steps")
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        self.show(f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})")
        self.show(f"sent/rank   {self.sent / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {ms_one_device:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    main()
