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
from contextlib import nullcontext
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
    """Put an adapter on the layers of `model` that target_modules names, freeze all else, and return `model`.

    All arguments, `more` of them too: see LoRAConfig. ValueError: one is unusable, or names nothing, or names what
    cannot be adapted.
    """
    config = LoRAConfig(r, lora_alpha, lora_dropout, target_modules, use_rslora, quantize, **more)
    targets = find_targets(model, config)
    model.requires_grad_(False)
    for layer, paths in targets.items():
        if isinstance(layer, LoRALayer):
            layer.add_adapter(config)
        else:
            adapted = kind_of(layer)(layer, **vars(config))
            for path in paths:  # a layer used in two places stays one
                model.set_submodule(path, adapted)
    set_adapter(model, config.adapter_name)
    return model


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """One adapter. All but quantize, double_quant and adapter_name are fields of peft's LoraConfig as well."""

    r: int = 8
    lora_alpha: float = 16  # α: the correction is scaled by α/r
    lora_dropout: float = 0.0  # probability that an element of the correction's input is dropped (not for embeddings)
    # Of nn.Linear, nn.Embedding and nn.Conv1d to 3d. A list has whole names or their last parts ("q_proj"), a string is
    # a regular expression for whole names; "all-linear" is every nn.Linear but those in nn.MultiheadAttention, which
    # reads their weights and never calls them.
    target_modules: str | list = "all-linear"
    use_rslora: bool = False  # scaled by α/√r
    quantize: str | None = None  # "nf4": adapted nn.Linear weights in 4 bits (QLoRA)
    init_lora_weights: bool | str = True  # A Kaiming-uniform, as peft's; "gaussian": as the paper's. B is zero
    use_dora: bool = False  # also train the norm of the weights of each output channel (DoRA)
    double_quant: bool = False  # QLoRA: the scales of the 4 bits in 8
    adapter_name: str = "default"  # a model may hold several; it uses the last injected, or set_adapter()'s

    def __post_init__(self):
        if type(self.r) is not int or self.r < 1:  # True would be one
            raise ValueError(f"r is {self.r}; a rank is an integer, at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and below 1")
        if self.quantize not in (None, "nf4"):
            raise ValueError(f"quantize is {self.quantize!r}; it must be None or 'nf4'")
        if self.init_lora_weights not in (True, "gaussian"):
            raise ValueError(f"init_lora_weights is {self.init_lora_weights!r}; it must be True or 'gaussian'")
        name = self.adapter_name  # a key of nn.ParameterDict, which makes it an attribute
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ParameterDict(), name):
            raise ValueError(f"adapter_name is {name!r}; it must be a string without a dot, and no attribute of a dict")
        try:
            re.compile(self.pattern)
        except (TypeError, re.error) as error:
            raise ValueError(f"target_modules is {self.target_modules!r}: {error}") from None

    @property
    def pattern(self):
        wanted = self.target_modules
        return wanted if isinstance(wanted, str) else "|".join(rf"(.*\.)?{re.escape(end)}" for end in wanted)

    @property
    def scaling(self):
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoRALayer(nn.Module):
    """A frozen layer, and adapters by name, each of a LoRAConfig; the active one adds scaling · B A to the weight."""

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
        if config.quantize and isinstance(self.base_layer, nn.Linear):  # not a second time
            self.base_layer = NF4Linear(self.base_layer, config.double_quant)
        weight, name = self.base_layer.weight, config.adapter_name
        out, *others = weight.shape  # of a convolution, A has the kernel, B one of size 1
        # 16 bits are too few to add up small updates: A and B have 32 at least, as peft's.
        options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        self.lora_A[name] = nn.Parameter(torch.empty(config.r, *others, **options))
        self.lora_B[name] = nn.Parameter(torch.zeros(out, config.r, *[1] * (len(others) - 1), **options))
        if config.init_lora_weights == "gaussian":
            nn.init.normal_(self.lora_A[name], std=1 / config.r)
        else:
            nn.init.kaiming_uniform_(self.lora_A[name], a=math.sqrt(5))
        self.configs[name], self.active = config, name  # active None: the base layer alone
        if config.use_dora:
            self.lora_magnitude[name] = nn.Parameter(channel_norm(self))

    def forward(self, x):
        y = self.base_layer(x)
        if not self.in_use():
            return y
        config = self.configs[self.active]
        # In the dtype of y, which is that of x, or autocast's. A and B are small: casting them costs little.
        A, B = self.lora_A[self.active].to(y.dtype), self.lora_B[self.active].to(y.dtype)
        if config.lora_dropout and self.training and x.is_floating_point():
            x = F.dropout(x, config.lora_dropout)
            if config.use_dora:  # as peft's, it rescales what the dropped x gives, and leaves the rest of y
                base = self.base_layer(x)
                return y + (rescale(self, self.correct(base.clone(), x, A, B, config.scaling)) - base)
        y = self.correct(y, x, A, B, config.scaling)
        return rescale(self, y) if config.use_dora else y

    def in_use(self):
        if self.unmerged and self.training and torch.is_grad_enabled():
            raise ValueError(f"adapter {self.active!r} is merged, and A and B get no gradient; unmerge(model) to train")
        return self.active in self.configs and not self.unmerged

    def adapted(self):
        """W + scaling · B A, in the shape of W."""
        W, B, A = dense(self.base_layer.weight), self.lora_B[self.active], self.lora_A[self.active]
        return W + (self.configs[self.active].scaling * B.flatten(1) @ A.flatten(1)).view(W.shape)

    @property
    def weight(self):
        """That of a plain layer of the same output. nn.TransformerEncoderLayer reads it in eval, instead of a call."""
        if not self.in_use():
            return dense(self.base_layer.weight)
        weight = self.adapted()
        if self.active in self.lora_magnitude:
            weight *= dora_gain(self).view([-1 if i == self.channel else 1 for i in range(weight.dim())])
        return weight.to(self.base_layer.weight.dtype)

    bias = property(lambda self: getattr(self.base_layer, "bias", None))


class LoRALinear(LoRALayer):
    def forward(self, x):
        # As rows: autograd copies y when a view of it changes in place. Strided x stays: rows could round differently.
        y = super().forward(x if x.dim() > 2 and not x.is_contiguous() else x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])

    def correct(self, y, x, A, B, scaling):
        # Both factors lie as r rows: matrices of r columns multiply several times slower, above all in backward (MKL).
        hidden = scaling * (A @ x.flatten(0, -2).t())
        rows, factors = y.flatten(0, -2), (hidden.t(), B.t().contiguous())
        base = self._modules["base_layer"]  # the attribute takes several times as long
        hooked = base._forward_hooks or base._backward_hooks or base._backward_pre_hooks
        if hooked or type(base) not in (nn.Linear, NF4Linear):  # who may keep y
            return torch.addmm(rows, *factors).view_as(y)
        rows.addmm_(*factors)  # y += in one product: the correction by itself, of y's size, never exists
        return y


def find_targets(model, config):
    """{layer: its paths} of what config.target_modules names; ValueError where it cannot be adapted."""
    wanted, pattern, name = config.target_modules, config.pattern, config.adapter_name
    targets, adaptable, inside = {}, [], "."
    for path, layer in model.named_modules(remove_duplicate=False):
        if not path or path.startswith(inside):  # the model itself, or what an adapted layer consists of
            continue
        inside, base = (f"{path}.", layer.base_layer) if isinstance(layer, LoRALayer) else (inside, layer)
        if layer is not base and layer.unmerged:
            raise ValueError(f"{path} is merged; unmerge(model) first")
        if layer is not base and name in layer.configs:
            known = dataclasses.replace(layer.configs[name], target_modules=wanted)
            if known != config:
                raise ValueError(f"{path} has an adapter {name!r} of another configuration, {known}; here: {config}")
        kind, parent = kind_of(base), model.get_submodule(path.rpartition(".")[0])
        adaptable += [path] if kind else []
        in_attention = isinstance(parent, nn.MultiheadAttention)
        if not (kind is LoRALinear and not in_attention if wanted == "all-linear" else re.fullmatch(pattern, path)):
            continue
        targets.setdefault(layer, []).append(path)
        if not kind:
            raise ValueError(f"{path} is a {type(base).__name__}, not one of {', '.join(k.__name__ for k in KINDS)}")
        if getattr(base, "groups", 1) > 1:
            raise ValueError(f"{path} has {base.groups} groups; a product B A corrects convolutions of one")
        if in_attention and (config.lora_dropout or config.quantize):
            raise ValueError(f"nn.MultiheadAttention only reads {path}.weight: no lora_dropout, no quantize for it")
        if layer is not base and name in layer.configs:
            raise ValueError(f"{path} has an adapter {name!r} already")
        if config.quantize and isinstance(base, nn.Linear):
            check_quantisable(base.weight, f"{path}.weight")
    if not targets:
        raise ValueError(f"target_modules {wanted!r} finds no layer; there are {', '.join(adaptable[:9]) or 'none'}")
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# 3. Other kinds of layers, and DoRA.


class LoRAEmbedding(LoRALayer):
    """peft calls the transposes of these factors B and A."""

    files = {"lora_B": "lora_embedding_A", "lora_A": "lora_embedding_B", "lora_magnitude": "lora_magnitude_vector"}
    channel = 1

    def add_adapter(self, config):
        super().add_adapter(config)
        nn.init.normal_(self.lora_A[self.active])  # as peft's

    def correct(self, y, x, A, B, scaling):
        base = self.base_layer
        return y + scaling * F.embedding(x, B, base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq) @ A


class LoRAConv(LoRALayer):
    def correct(self, y, x, A, B, scaling):
        convolution = (F.conv1d, F.conv2d, F.conv3d)[B.dim() - 3]
        return y + convolution(scaling * self.base_layer._conv_forward(x, A, None), B)  # strided and padded as W's


KINDS = {nn.Linear: LoRALinear, nn.Embedding: LoRAEmbedding}
KINDS |= dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), LoRAConv)


def kind_of(layer):
    return next((kind for plain, kind in KINDS.items() if isinstance(layer, plain)), None)


# DoRA: the weight is magnitude / norm · (W + scaling · B A), the norm being that of each output channel.


def channel_norm(layer):
    weight = layer.adapted().detach()  # a constant to backward: Liu et al. §4.3
    others = [dimension for dimension in range(weight.dim()) if dimension != layer.channel]
    norm = torch.linalg.vector_norm(weight, dim=others)
    return norm if len(others) == 1 else norm.view(1, -1, *[1] * (len(others) - 1))  # the shapes of peft's files


def dora_gain(layer):
    norm = channel_norm(layer)  # at the start equal to the magnitude, so that the gain is 1.0
    return layer.lora_magnitude[layer.active] / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def rescale(layer, y):
    gain = dora_gain(layer).squeeze(0).to(y.dtype)  # an input to a convolution may be without a batch
    return gain * y if layer.bias is None else gain * y + (1 - gain) * layer.bias.view_as(gain).to(y.dtype)  # it stays


# ---------------------------------------------------------------------------------------------------------------------
# 4. When training is over: merge. And several adapters, switched by name.


def lora_layers(model, merged=None):
    """{path: layer}; ValueError where there is none, or `merged` is not None and some layer is not so."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALayer)}
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no adapters; inject_lora(model) first")
    if wrong := [path for path, layer in layers.items() if merged is not None and bool(layer.unmerged) != merged]:
        text = "not merged: {}; merge(model) first" if merged else "merged already: {}; unmerge(model) first"
        raise ValueError(text.format(", ".join(wrong)))
    return layers


def merge(model):
    """Make W + scaling · B A the weight of each layer, in the dtype of W. ValueError: twice, or on training after it.

    A quantised W becomes dense: rounding to 4 bits again would undo much of the adapter. The model must not be sharded.
    """
    for layer in lora_layers(model, merged=False).values():
        merged = nn.Parameter(layer.weight.detach().contiguous(), requires_grad=False)
        # Another parameter, since W may be tied to a layer without adapter.
        layer.unmerged, layer.base_layer.weight = (layer.base_layer.weight,), merged


def unmerge(model):
    """Put back what merge(model) took out: the same bits, and tied if it was; ValueError when not merged."""
    for layer in lora_layers(model, merged=True).values():
        (weight,), merged, layer.unmerged = layer.unmerged, layer.base_layer.weight, ()
        moved = weight.to(merged.device, merged.dtype)  # as the model, since; `weight` itself where it is NF4 or there
        del layer.base_layer.weight  # nn.Module refuses a module in the place of a parameter
        layer.base_layer.weight = moved if moved is weight else nn.Parameter(moved, requires_grad=False)


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


# ---------------------------------------------------------------------------------------------------------------------
# 5. Files in peft's format: adapter_config.json, and adapter_model.safetensors or, without that package, .bin.


safetensors = importlib.util.find_spec("safetensors") and importlib.import_module("safetensors.torch")
PEFT_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights", "use_dora")
# Fields that change what an adapter computes without a trace in the names and shapes of its tensors.
UNSUPPORTED = ("alpha_pattern", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "arrow_config")
UNSUPPORTED += ("kasa_config", "monteclora_config", "velora_config", "use_bdlora", "use_qalora")
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # others have changed the weights of the base model as well


def adapter_state_dict(model, adapter_name=None, state_dict=None):
    """{peft's key: tensor} of an adapter (None: the active one).

    state_dict: the whole model's, where this rank has shards of it (fsdp.py: full_state_dict(model)).
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    return {
        f"base_model.model.{path}.{layer.files[name]}": tensor.t() if isinstance(layer, LoRAEmbedding) else tensor
        for path, layer in lora_layers(model).items()
        for name in layer.files
        if (tensor := state_dict.get(f"{path}.{name}.{adapter_name or layer.active}")) is not None
    }


def save_adapter(model, directory, adapter_name=None, state_dict=None):
    """Write what peft's PeftModel.from_pretrained(base_model, directory) reads. Call it on one rank."""
    tensors, directory = adapter_state_dict(model, adapter_name, state_dict), Path(directory)
    configs = {path: layer.configs.get(adapter_name or layer.active) for path, layer in lora_layers(model).items()}
    if not (adapted := {path: config for path, config in configs.items() if config}):
        raise ValueError(f"no adapter {adapter_name!r} to save")
    config = next(iter(adapted.values()))
    fields = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "bias": "none"}
    fields |= {name: getattr(config, name) for name in PEFT_FIELDS}
    # Injected more than once; or as "all-linear", which peft takes for models of transformers only.
    if config.target_modules == "all-linear" or len({config.pattern for config in adapted.values()}) > 1:
        fields["target_modules"] = "|".join(map(re.escape, adapted))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True, default=sorted))
    for stale in directory.glob("adapter_model.*"):
        stale.unlink()
    tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    if safetensors:
        safetensors.save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, directory / "adapter_model.bin")


def load_adapter(model, directory, adapter_name="default"):
    """Read what save_adapter or peft wrote; -> model. Injects the adapter where the model does not have it.

    ValueError: it needs what is left out here, or has other keys or shapes than the model: all are named, none copied.
    """
    file = Path(directory) / "adapter_model.safetensors"
    fields = json.loads(file.with_name("adapter_config.json").read_text())
    supported = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(UNSUPPORTED)
    wrong = [name for name, value in supported.items() if (fields.get(name) or value) != value]
    wrong += [] if fields.get("init_lora_weights", True) in INITIAL else ["init_lora_weights"]
    if wrong:
        raise ValueError(f"{directory}: not supported: {', '.join(f'{name} {fields[name]!r}' for name in wrong)}")
    if not file.exists():
        tensors = torch.load(file.with_suffix(".bin"), map_location="cpu", weights_only=True)
    elif safetensors:
        tensors = safetensors.load_file(file)
    else:
        raise ImportError(f"to read {file}: pip install safetensors")
    config = {name: fields[name] for name in PEFT_FIELDS if name in fields}
    config |= {"adapter_name": adapter_name, "init_lora_weights": True}  # whichever it was
    undo = None
    if not any(adapter_name in getattr(layer, "configs", ()) for layer in model.modules()):
        undo = undo_of_inject(model, LoRAConfig(**config))
        inject_lora(model, **config)
    layers, own = lora_layers(model, merged=False), adapter_state_dict(model, adapter_name)
    base = {f"base_model.model.{key}": value for key, value in model.state_dict().items()}
    # peft adds adapted embeddings: those may be there.
    same = [key for key in tensors.keys() & base.keys() if torch.equal(base[key], tensors[key].to(base[key]))]
    theirs, ours = ({key: tuple(tensor.shape) for key, tensor in side.items()} for side in (tensors, own))
    if wrong := [key for key in ours | theirs if ours.get(key) != theirs.get(key) and key not in same]:
        text = "{} is {} in the file, {} in the model"
        sides = (text.format(key, theirs.get(key, "missing"), ours.get(key, "missing")) for key in wrong)
        if undo:
            undo()
        raise ValueError(f"{directory} does not fit: {'; '.join(sides)}")
    for key, parameter in own.items():
        parameter.copy_(tensors[key])
    for layer in layers.values():
        if adapter_name in layer.configs:
            layer.configs[adapter_name] = dataclasses.replace(layer.configs[adapter_name], **config)
    return model


def undo_of_inject(model, config):
    """-> a function that takes out what inject_lora() is about to put in."""
    targets, trained = find_targets(model, config), [(p, p.requires_grad) for p in model.parameters()]
    active = [(layer, layer.active) for layer in model.modules() if isinstance(layer, LoRALayer)]

    def undo():
        for layer, paths in targets.items():
            for path in paths:
                model.set_submodule(path, layer)
        for layer, name in active:
            for named in (layer.configs, layer.lora_A, layer.lora_B, layer.lora_magnitude):
                if config.adapter_name in named:
                    del named[config.adapter_name]
            layer.active = name
        for parameter, flag in trained:
            parameter.requires_grad_(flag)

    return undo


# ---------------------------------------------------------------------------------------------------------------------
# 6. QLoRA: frozen weights in 4 bits.

# Quantiles of a normal distribution, so that pretrained weights use all 16 alike (Dettmers et al. §3).
NF4_VALUES = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4_VALUES += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
NF4_VALUES += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941)
NF4_VALUES += (0.7229568362236023, 1.0)


@torch.no_grad()
def quantize_nf4(weight, block_size=64, double_quant=False):
    """Round to the nearest of 16 values, relative to the largest of each block; -> what dequantize_nf4 takes.

    4 bits a value and 32 a block are 4.5 in all. double_quant: those 32, less their mean, in blocks of 256 to 8 bits,
    4.127 in all. As bitsandbytes, byte for byte; only of those 8 bits, its CPU kernel (0.50) takes one nearly as near
    now and then. ValueError: `weight` or block_size cannot be used.
    """
    if block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"block_size is {block_size}; it must be a power of 2 from 32 to 4096")
    check_quantisable(weight, "a weight")
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=weight.device)
    codes, absmax = quantize_blocks(weight.flatten().float(), values, block_size)
    packed = codes[::2] << 4 | F.pad(codes[1::2], (0, weight.numel() % 2), value=7)  # the first in the high half
    if not double_quant:
        return NF4(weight, block_size, packed, absmax)
    mean = absmax.mean(0, keepdim=True)
    return NF4(weight, block_size, packed, *quantize_blocks(absmax - mean, dynamic_map(weight.device), 256), mean)


def check_quantisable(weight, name):
    if not weight.is_floating_point() or weight.numel() == 0 or not torch.isfinite(weight).all():
        raise ValueError(f"{name} of {weight.dtype}, {tuple(weight.shape)}: to quantize, it must have finite floats")


@torch.no_grad()
def dequantize_nf4(quantized, dtype=None):
    """The rounded values, in the weight's shape; dtype None: in the weight's."""
    q, absmax, device = quantized, quantized.absmax, quantized.packed.device
    if q.mean is not None:
        absmax = dynamic_map(device)[absmax.int()] * q.scales.repeat_interleave(256)[: absmax.numel()] + q.mean
    values = torch.empty(absmax.numel(), q.block_size, dtype=dtype or q.dtype, device=device)
    missing = values.numel() // 2 - q.packed.numel()
    pairs = (F.pad(q.packed, (0, missing)) if missing else q.packed).view(torch.uint16)
    # One look-up takes two bytes to four values. In chunks, which stay in the cache from look-up to product.
    chunk = 2**19 // q.block_size
    for part, scale, out in zip(pairs.split(2**17), absmax[:, None].split(chunk), values.split(chunk), strict=True):
        quads = nf4_quads(device).index_select(0, part.int())
        torch.mul(quads.view(torch.float32).view_as(out), scale, out=out)
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

    def _apply(self, fn, recurse=True):  # as bytes: model.half() must not round the scales
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return super()._apply(lambda buffer: fn(buffer.view(torch.uint8)).view(buffer.dtype), recurse)


class NF4Linear(nn.Module):
    """A frozen nn.Linear with its weight in 4 bits; while merged it has a plain one."""

    def __init__(self, linear, double_quant):
        super().__init__()
        self.weight, self.bias = quantize_nf4(linear.weight, double_quant=double_quant), linear.bias

    def forward(self, x):
        product = NF4Product.apply if isinstance(self.weight, NF4) else F.linear
        return product(x, self.weight, self.bias)


KINDS[NF4Linear] = LoRALinear


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
    return torch.tensor(NF4_VALUES, dtype=torch.float32)[nibbles].view(torch.complex128).flatten().to(device)


@functools.cache
def dynamic_map(device):
    """bitsandbytes' 256 signed 8-bit values: 7 decades, each twice as fine as the one below (arXiv 2110.02861 §2.2)."""
    edges = [torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32) for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * ((edge[:-1] + edge[1:]) / 2) for i, edge in enumerate(edges)])
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Data parallelism: what does not train does not travel.


def average_adapters(model, process_group=None):
    """Call this between backward and step: the mean over ranks of what trains, in one all-reduce.

    Ranks must start from the same A: from the same seed, or in ddp.py, which broadcasts, checks, and overlaps.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Unused on this rank only? All ranks must issue the same collectives.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # in the widest of their dtypes
    dist.all_reduce(flat, group=process_group)
    flat /= dist.get_world_size(process_group)
    for parameter, mean in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = mean.view_as(parameter).to(parameter.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Demo.

TARGETS = ("linear1", "linear2")


def train(demo, name, model, lr, compare=False):
    """Data-parallel; -> bytes held (weights, gradients, optimizer), and a line about it."""
    trained, times = [parameter for parameter in model.parameters() if parameter.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=lr)

    def step(inputs, targets):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = language_loss(model(inputs.chunk(demo.ranks)[demo.rank]), targets.chunk(demo.ranks)[demo.rank])
        loss.backward()
        average_adapters(model)
        optimizer.step()
        times.append(time.perf_counter() - start)
        return loss

    if compare:
        demo.train(step, lambda: ([parameter.grad for parameter in trained], trained))
    else:
        for number in range(demo.args.steps):
            step(*demo.batch(number))
    held_here = held_bytes([*model.parameters(), *model.buffers()]), *held(trained, optimizer)[1:]
    inputs, targets = demo.batch(-1)  # not one of the steps'
    with torch.no_grad():
        loss = language_loss(model.eval()(inputs), targets)
    size, mb, ms = sum(p.numel() for p in trained), sum(held_here) / 1e6, 1e3 * statistics.median(times)
    return held_here, f"{name:12}{size:9,} trained   held {mb:4.1f} MB   loss {loss:.3f}   {ms:.0f} ms per step"


def main():
    demo = Demo(bitwise=2)
    demo.stop_if(demo.read_text(None))
    pretrained = demo.model
    train(demo, "", pretrained, lr=2e-3)
    topics = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"  # prose, after source code
    demo.stop_if(demo.read_text(demo.args.data or topics))

    lora = inject_lora(copy.deepcopy(pretrained), target_modules=TARGETS)
    demo.model = copy.deepcopy(lora)
    trained = [parameter for parameter in demo.model.parameters() if parameter.requires_grad]
    demo.model.parameters = lambda: trained  # what it compares
    demo.optimizer = torch.optim.AdamW(trained, lr=3e-3)
    held_here, line = train(demo, "LoRA", lora, lr=3e-3, compare=True)
    del demo.model.parameters
    N, weights = demo.ranks, [layer.base_layer.weight for layer in lora_layers(lora).values()]
    phi = sum(8 * sum(weight.shape) * weight.element_size() for weight in weights)
    status = demo.report("lora", held_here, "2Φ(N-1)/N", 2 * phi * (N - 1) / N)

    demo.show(train(demo, "full", copy.deepcopy(pretrained), lr=1e-3)[1])
    demo.show(line)
    qlora = inject_lora(pretrained, target_modules=TARGETS, quantize="nf4", double_quant=True)
    demo.show(train(demo, "QLoRA", qlora, lr=3e-3)[1])
    layer = next(iter(lora_layers(qlora).values()))
    exact = layer.weight.detach()
    size = (exact - dense(layer.base_layer.weight)).norm()
    errors = [(merged - exact).norm() / size for merged in (exact.bfloat16(), dense(quantize_nf4(exact)))]
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
