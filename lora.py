"""LoRA: freeze the model, and train for each chosen matrix a correction of low rank, a hundredth of its size.

    x ──┬── W (d × k), frozen; QLoRA: in 4 bits ──┬── y = W x + (α/r) B A x
        └── A (r × k) ── r numbers ── B (d × r) ──┘

B starts at zero: training starts from the pretrained model, bit for bit. Afterwards (α/r) B A is added to W (merge), or
stays beside it, in a small file of its own. Data-parallel, only gradients of A and B travel: W has none.

Cost per rank in elements, with Adam; Ψ parameters, Φ = Σ r(d + k) over the adapted matrices:

                          weights     gradients   optimizer   sent per step
    full fine-tuning         Ψ            Ψ          2Ψ       2Ψ(N-1)/N
    LoRA                     Ψ + Φ        Φ          2Φ       2Φ(N-1)/N
    QLoRA                    Ψ/4 + Φ      Φ          2Φ       2Φ(N-1)/N      (4.127 bits where there were 16)

Run:      torchrun --nproc-per-node 2 lora.py          (python lora.py is a world of one)
Papers:   Hu et al. 2021, LoRA, arXiv 2106.09685; Dettmers et al. 2023, QLoRA, 2305.14314; rsLoRA, 2312.03732
Mirrors:  peft (get_peft_model, its layer and files), bitsandbytes (quantize_4bit, dequantize_4bit)
Left out: convolutions, embeddings, DoRA, several adapters, .bin files, weights that are read where no layer is called
          (nn.MultiheadAttention's; in eval nn.TransformerEncoderLayer's): peft. Products of 4 bits: bitsandbytes
"""

import argparse
import copy
import functools
import json
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea.


def naive_lora(x, W, A, B, scaling):
    """(…, k) to (…, d). Only A and B want gradients, and W + scaling · B A, d × k, never exists."""
    return x @ W.t() + scaling * (x @ A.t() @ B.t())


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: a layer that takes the place of nn.Linear, found by name.


class LoRALinear(nn.Module):
    """base(x) + scaling · B A dropout(x), (…, k) to (…, d); base, an nn.Linear, is frozen.

    scaling is lora_alpha/r; with use_rslora lora_alpha/√r, which does not fade as r grows. quantize: None, or "nf4" for
    an NF4 (section 5) in place of base, with double_quant at 4.127 bits. ValueError: an argument is unusable.
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
        super().__init__()
        if r < 1 or not 0 <= lora_dropout < 1 or quantize not in (None, "nf4"):
            raise ValueError(
                f"r={r} must be ≥ 1, {lora_dropout=} in [0, 1), {quantize=} None or 'nf4'"
            )
        W, (d, k) = base.weight, base.weight.shape
        dtype = torch.promote_types(
            W.dtype, torch.float32
        )  # 16 bits are too few to add up small updates
        A = torch.empty(r, k, dtype=dtype, device=W.device).uniform_(
            -(k**-0.5), k**-0.5
        )  # as peft's
        self.lora_A, self.lora_B = nn.Parameter(A), nn.Parameter(A.new_zeros(d, r))
        self.scaling, self.lora_dropout = lora_alpha / (r**0.5 if use_rslora else r), lora_dropout
        self.base_layer = quantize_nf4(W, double_quant=double_quant) if quantize else base
        self.base_layer.bias = base.bias
        self.base_layer.requires_grad_(False)
        self.register_buffer(
            "merged", None, persistent=False
        )  # from merge() to unmerge(): W + scaling · B A

    def forward(self, x):
        if self.merged is not None:
            if self.training and torch.is_grad_enabled():
                raise ValueError(
                    "merged, A and B get no gradient: unmerge(model) to train, or model.eval()"
                )
            return F.linear(x, self.merged, self.base_layer.bias)
        y, x = self.base_layer(x), F.dropout(x, self.lora_dropout, self.training)
        A, B = self.lora_A.to(y.dtype), self.lora_B.to(y.dtype)  # the dtype of x, or autocast's
        # (r, tokens), and Bᵀ as (r, d): long rows. Products with r long columns take up to 1.3 times as long (MKL).
        hidden = self.scaling * (A @ x.reshape(-1, x.shape[-1]).t())
        return torch.addmm(y.reshape(-1, y.shape[-1]), hidden.t(), B.t().contiguous()).view(y.shape)


def inject_lora(
    model,
    r=8,
    lora_alpha=16,
    lora_dropout=0.0,
    target_modules="all-linear",
    use_rslora=False,
    quantize=None,
    **more,
):
    """Put a LoRALinear in the place of each nn.Linear that target_modules names, and freeze all else; -> model.

    target_modules: a list of names, whole or from a dot on ("q_proj"); or one regular expression for whole names; or
    "all-linear". The rest, and `more` (double_quant), is LoRALinear's. ValueError: an argument is unusable.
    """
    if any(isinstance(layer, LoRALinear) for layer in model.modules()):
        raise ValueError("the model has adapters already")
    layers = dict(model.named_modules(remove_duplicate=False))
    linear = [path for path, layer in layers.items() if isinstance(layer, nn.Linear)]
    names = linear if target_modules == "all-linear" else target_modules
    pattern = (
        names
        if isinstance(names, str)
        else "|".join(rf"(.*\.)?{re.escape(name)}" for name in names)
    )
    targets = {
        path: layer for path, layer in layers.items() if path and re.fullmatch(pattern, path)
    }
    if not targets or not targets.keys() <= set(linear):
        raise ValueError(
            f"target_modules {names!r} finds {list(targets)}; there are nn.Linear {linear}"
        )
    config = {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "use_rslora": use_rslora,
    }
    adapted = {
        layer: LoRALinear(layer, **config, quantize=quantize, **more) for layer in targets.values()
    }
    model.requires_grad_(False)
    for path, layer in targets.items():  # a layer that is used in two places stays one
        model.set_submodule(path, adapted[layer])
    model.lora_config = {**config, "target_modules": names}  # for save_adapter
    return model


def trained_by(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def average_adapters(model, process_group=None):
    """Between backward and step: the mean over ranks of the gradients of what trains, in one all-reduce.

    All ranks must start from the same A: inject after the same torch.manual_seed. Or leave it to ddp.py (under QLoRA
    with broadcast_buffers=False, or the 4 bits, which are buffers, travel before every forward) or fsdp.py.
    """
    if (ranks := dist.get_world_size(process_group)) < 1:
        raise ValueError(f"rank {dist.get_rank()} is not a member of process_group")
    trained = trained_by(model)  # zeros for what only other ranks have used: all must send the same
    flat = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]
    )
    dist.all_reduce(flat, group=process_group)
    flat /= ranks  # after the sum, as one device that accumulates
    for parameter, mean in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = mean.view_as(parameter).to(parameter.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# 3. When training is over: merge.


def lora_layers(model):
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def merge(model):
    """From now on every adapted layer multiplies by W + scaling · B A, in W's dtype; W is kept beside it, for unmerge.

    The sum is dense even where W has 4 bits: in them it would lose much. Not under fsdp.py, where no rank has all of W.
    """
    for layer in lora_layers(model).values():
        W = layer.base_layer.weight
        layer.merged = (W + layer.scaling * layer.lora_B @ layer.lora_A).to(W.dtype).detach()


def unmerge(model):
    """Back to W and its adapter, bit for bit."""
    for layer in lora_layers(model).values():
        layer.merged = None


# ---------------------------------------------------------------------------------------------------------------------
# 4. Files in peft's format: adapter_config.json and adapter_model.safetensors (pip install safetensors).

CONFIG = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "target_modules": None,
}  # peft's defaults
SUPPORTED = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva"],
}
# What does not change what an adapter computes. Any other field that is set may, and is refused.
IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
}
IGNORED |= {
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}


def adapter_state_dict(model, state_dict=None):
    """{peft's key: tensor}. state_dict: under fsdp.py full_state_dict(model), where model.state_dict() has shards."""
    state_dict = model.state_dict() if state_dict is None else state_dict
    names = [f"{path}.{factor}" for path in lora_layers(model) for factor in ("lora_A", "lora_B")]
    return {f"base_model.model.{name}.weight": state_dict[name] for name in names}


def save_adapter(model, directory, state_dict=None):
    """Write what peft.PeftModel.from_pretrained(base_model, directory) reads. Call it on one rank."""
    from safetensors.torch import save_file

    (directory := Path(directory)).mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "bias": "none", "init_lora_weights": True, **model.lora_config}
    (directory / "adapter_config.json").write_text(
        json.dumps(fields, indent=2, default=list)
    )  # a set of names, too
    save_file(adapter_state_dict(model, state_dict), directory / "adapter_model.safetensors")


def load_adapter(model, directory):
    """Read what save_adapter or peft wrote, into the adapters of `model`, which are injected if it has none; -> model.

    ValueError: all that the files have and this module has not, or that does not fit the model; nothing is copied.
    """
    from safetensors.torch import load_file

    fields = json.loads((Path(directory) / "adapter_config.json").read_text())
    others = [
        (name, value)
        for name, value in fields.items()
        if value and name not in CONFIG.keys() | IGNORED
    ]
    if wrong := [
        f"{name} {value!r}" for name, value in others if value not in SUPPORTED.get(name, [])
    ]:
        raise ValueError(f"{directory}: not supported: {', '.join(wrong)}")
    config = {name: fields.get(name, default) for name, default in CONFIG.items()}
    if not hasattr(model, "lora_config"):
        inject_lora(model, **config)
    theirs, ours = (
        load_file(Path(directory) / "adapter_model.safetensors"),
        adapter_state_dict(model),
    )
    pairs = [
        (name, config[name], model.lora_config[name]) for name in ("r", "lora_alpha", "use_rslora")
    ]
    for key in ours | theirs:
        pairs.append(
            (key, *(list(side[key].shape) if key in side else "missing" for side in (theirs, ours)))
        )
    if wrong := [
        f"{name} is {there} in the file, {here} in the model"
        for name, there, here in pairs
        if here != there
    ]:
        raise ValueError(f"{directory} does not fit: {'; '.join(wrong)}")
    for key, tensor in ours.items():
        tensor.copy_(theirs[key])
    unmerge(model)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# 5. QLoRA: frozen weights in 4 bits.

# Quantiles of a normal distribution, so that pretrained weights use all 16 alike (Dettmers et al. §3).
NF4_VALUES = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
)
NF4_VALUES += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
NF4_TABLE = torch.tensor(NF4_VALUES, dtype=torch.float32)
NF4_PAIRS = (
    torch.cartesian_prod(NF4_TABLE, NF4_TABLE).view(torch.int64).flatten()
)  # a byte's two values move as one
# bitsandbytes' 256 signed 8-bit values: 7 decades, each twice as fine as the one below (arXiv 2110.02861 §2.2).
EDGES = [torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32) for i in range(7)]
DECADES = torch.cat(
    [10.0 ** (i - 6) * ((edge[:-1] + edge[1:]) / 2) for i, edge in enumerate(EDGES)]
)
DYNAMIC_MAP = torch.cat([-DECADES, DECADES, torch.tensor([0.0, 1.0])]).sort().values
on = functools.cache(torch.Tensor.to)  # on(table, device): copied there once


def quantize_blocks(flat, values, block_size):
    """-> index of the nearest of `values` (of two, the lower) to each x / absmax of its block; absmax of each block."""
    blocks = F.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    relative = blocks * (1 / absmax.clamp_min(1e-38))[:, None]
    indices = torch.bucketize(relative, (values[:-1] + values[1:]) / 2).to(torch.uint8)
    return indices.flatten()[: flat.numel()].clone(), absmax


def quantize_nf4(weight, block_size=64, double_quant=False):
    """Round to the nearest of 16 values, relative to the largest of each block; -> NF4.

    4 bits a value and 32 a block are 4.5 in all. double_quant: those 32, less their mean, in blocks of 256 to 8 bits,
    4.127 in all. As bitsandbytes, byte for byte (its CPU kernel takes one of those 8 bits nearly as near now and then).
    """
    codes, absmax = quantize_blocks(
        weight.detach().flatten().float(), on(NF4_TABLE, weight.device), block_size
    )
    packed = codes[::2] << 4 | F.pad(codes[1::2], (0, weight.numel() % 2), value=7)  # 7: 0.0
    if not double_quant:
        return NF4(weight, block_size, packed, absmax)
    mean = absmax.mean(0, keepdim=True)
    return NF4(
        weight,
        block_size,
        packed,
        *quantize_blocks(absmax - mean, on(DYNAMIC_MAP, weight.device), 256),
        mean,
    )


def dequantize_nf4(q, dtype=None):
    """The rounded values, in the shape that was quantized, and in its dtype (None) or another."""
    absmax, device, n = q.absmax, q.packed.device, q.shape.numel()
    if q.mean is not None:
        absmax = (
            on(DYNAMIC_MAP, device)[absmax.int()] * q.scales.repeat_interleave(256)[: len(absmax)]
            + q.mean
        )
    values = on(NF4_PAIRS, device).index_select(0, q.packed.int()).view(torch.float32)[:n]
    values *= absmax[:, None].expand(-1, q.block_size).flatten()[:n]
    return values.view(q.shape).to(dtype or q.dtype)


class NF4(nn.Module):
    """A weight in 4 bits; called, the frozen nn.Linear that has it. state_dict() has its bytes, .to() moves them."""

    def __init__(self, weight, block_size, packed, absmax, scales=None, mean=None):
        super().__init__()
        self.shape, self.dtype, self.block_size, self.bias = (
            weight.shape,
            weight.dtype,
            block_size,
            None,
        )
        self.register_buffer("packed", packed)  # uint8, two values each, the first in the high half
        self.register_buffer(
            "absmax", absmax
        )  # of each block, float32; with double_quant uint8, and
        self.register_buffer("scales", scales)  # of each 256 of those, float32
        self.register_buffer("mean", mean)  # of all, float32

    weight = property(dequantize_nf4)

    def forward(
        self, x
    ):  # checkpoint: autograd keeps the 4 bits, and dequantises again in backward
        return checkpoint(
            lambda x: F.linear(x, dequantize_nf4(self, x.dtype), self.bias), x, use_reentrant=False
        )

    def _apply(self, fn, recurse=True):  # buffers as bytes: model.half() must not round the scales
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        return super()._apply(
            lambda t: fn(t) if t is self.bias else fn(t.view(torch.uint8)).view(t.dtype), recurse
        )


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def train(demo, model, lr, what):
    demo.show(f"{what}:")
    demo.model = copy.deepcopy(model)
    optimizer, demo.optimizer = (
        torch.optim.AdamW(trained_by(m), lr=lr) for m in (model, demo.model)
    )

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        average_adapters(model)
        optimizer.step()
        return loss

    demo.train(
        step, lambda: ([parameter.grad for parameter in trained_by(model)], trained_by(model))
    )
    return held([*model.parameters(), *model.buffers()], optimizer)  # buffers: the 4 bits


def main():
    demo, names = Demo(), ["linear1", "linear2"]
    plain, text = demo.start("lora", bitwise=demo.ranks <= 2), demo.text
    prose = (Path(argparse.__file__).with_name("pydoc_data") / "topics.py").read_bytes()
    demo.text = torch.frombuffer(bytearray(prose), dtype=torch.uint8)
    train(demo, plain, 2e-3, "pretraining on Python's documentation")
    plain.zero_grad()
    demo.text = text
    qlora = inject_lora(
        copy.deepcopy(plain), target_modules=names, quantize="nf4", double_quant=True
    )
    full, lora = copy.deepcopy(plain), inject_lora(plain, target_modules=names)
    for name, model, lr in (("full", full, 1e-3), ("QLoRA", qlora, 3e-3), ("LoRA", lora, 3e-3)):
        here = train(demo, model, lr, f"{name} fine-tuning on {Path(demo.args.data).name}")
        weights, gradients, state = (f"{n / 1e6:.1f} MB" for n in here)
        demo.show(
            f"held: weights {weights}, gradients {gradients}, optimizer {state}; last loss {demo.losses[-1]:.3f}"
        )
    status = demo.report(
        here, "2Φ(N-1)/N", 2 * here[1] * (demo.ranks - 1) / demo.ranks
    )  # of the last, LoRA
    merge(lora)
    W, merged = lora[1].linear1.base_layer.weight, lora[1].linear1.merged
    error16, error4 = (
        (merged - w).norm() / (merged - W).norm()
        for w in (merged.half(), quantize_nf4(merged).weight)
    )
    demo.show(
        f"merging     W + (α/r) B A is off by {error16:.1%} of (α/r) B A in 16 bits, by {error4:.0%} in 4 again"
    )
    counts = ", ".join(
        f"{96 * 2 * r * (12288 + 12288):,} at r = {r}" for r in (1, 4, 8)
    )  # Φ = Σ r(d + k)
    demo.show(
        f"GPT-3       LoRA on W_q and W_v of its 96 layers trains {counts}, of 175 billion parameters"
    )
    return status


# --------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, trained by all ranks and by one device.
# This section is the same in every file.


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
    """Adds up the bytes that this rank sends. A collective counts as its ring algorithm sends."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {"allreduce_": (2, 0), "broadcast_": (1, 0), "_allgather_base_": (1, 0)}
    RING |= {"_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1)}

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.total += self.sent_by(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent_by(self, operator, args):
        if operator in ("send", "recv_"):
            return args[0][0].nbytes if operator == "send" else 0
        rounds, payload = self.RING[operator]  # KeyError: an unknown operator is not 0 bytes
        handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(handle)
        if operator == "alltoall_base_" and args[4]:  # the rows that each rank gets
            rows = sum(args[4]) - args[4][group.rank()]
            return rows * args[payload][:1].nbytes
        size = sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return rounds * size * (group.size() - 1) / group.size()


def held_bytes(tensors):
    """The bytes of the storages behind `tensors`. A storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(parameters, optimizer):
    """The bytes of parameters, of gradients, and of optimizer state."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = filter(torch.is_tensor, tree_leaves(list(optimizer.state.values())))
    return held_bytes(parameters), held_bytes(gradients), held_bytes(state)


def choose_device(name):
    """This rank's device, and the backend that it can use: NCCL wants a GPU for each local rank."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL 2.30 or newer
    return device, "nccl" if enough or may_share else "gloo"


def join_world(device, backend):
    """Initialize the default group: NCCL if all ranks on all machines can use it, else gloo."""
    timeout = timedelta(seconds=120)
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    else:  # without torchrun
        store, rank, ranks = dist.HashStore(), 0, 1
    store.set(f"backend/{rank}", backend)
    backends = {store.get(f"backend/{peer}") for peer in range(ranks)}
    backend = "nccl" if backends == {b"nccl"} else "gloo"
    options = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


class Demo:
    """Trains with a technique and, beside it, the same model on one device, and compares the two.

    If the technique claims to be bitwise equal, they train in float32, otherwise in float64.
    """

    def __init__(self, flags=None, steps=30):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error = self.stop
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--device", choices=devices, default=devices[-1])
        parser.add_argument("--data", metavar="FILE", default=argparse.__file__, help="a text")
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        self.text = self.read(self.args.data)
        if self.args.steps < 1:
            self.stop(f"--steps {self.args.steps}: give 1 or more")
        self.device, backend = choose_device(self.args.device)
        join_world(self.device, backend)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def read(self, name):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            self.stop(f"--data {name}: {error.strerror.lower()}")
        if len(text) < 66:
            self.stop(f"--data {name}: {len(text)} bytes; a sequence and its targets need 66")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: every rank finds the same error

    def show(self, line="", end="\n"):
        if self.rank == 0:
            print(line, end=end, flush=True)

    def start(self, name, bitwise=False, parts=None):
        """Make the plain model, and return a copy of it. One device takes the batch in `parts`."""
        self.parts = parts or self.ranks
        self.tolerance = 0.0 if bitwise and self.device.type == "cpu" else 1e-9
        torch.manual_seed(self.args.seed)
        dtype = torch.float64 if self.tolerance else torch.float32
        self.model = language_model().to(self.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        world += f" · {self.device.type}/{dist.get_backend()}"
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(self, number):
        """Inputs and targets of step `number`, (batch, time): 8 sequences of 64 bytes a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def part(self, batch):
        return batch.chunk(self.ranks)[self.rank]

    def step_on_one_device(self, inputs, targets):
        """Return the loss, the gradients and the parameters, in one list."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        losses = []
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.parts), targets.chunk(self.parts), strict=True):
            loss = language_loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in parameters:
            parameter.grad /= self.parts  # after the sum: 3 parts would round differently before it
        self.optimizer.step()
        gradients = [parameter.grad for parameter in parameters]
        return [torch.stack(losses).mean().cpu(), *gradients, *parameters]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def train(self, step, whole):
        """Compare after each `step(inputs, targets)`, which returns this rank's loss, or None.

        `whole()` returns the gradients and the parameters as the plain model has them.
        """
        self.losses = []  # of the whole batch, one per step
        self.times = []  # per step, in seconds: (the technique's, one device's)
        self.differences = [0.0]
        for number in range(self.args.steps):
            batch = self.batch(number)
            is_last = number + 1 == self.args.steps
            start = self.now()
            with SentBytes() if is_last else nullcontext() as self.sent:  # counting takes time
                loss = step(*batch)
            middle = self.now()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, self.now() - middle))
            losses = [None] * self.ranks
            dist.all_gather_object(losses, None if loss is None else loss.item())
            losses = [loss for loss in losses if loss is not None]
            loss = torch.tensor(losses, dtype=plain[0].dtype).mean()
            self.losses.append(loss.item())
            gradients, parameters = whole()
            for ours, theirs in zip([loss, *gradients, *parameters], plain, strict=True):
                if not torch.equal(ours, theirs):
                    self.differences.append((ours - theirs).abs().max().item())
            self.show_progress(number + 1)

    def show_progress(self, done):
        line = f"step {done}/{self.args.steps}   loss {self.losses[-1]:.3f}"
        if sys.stdout.isatty():
            self.show(line, end="\r")
        elif (done - 1) % -(-self.args.steps // 3) == 0:  # a log gets three lines
            self.show(line)

    def report(self, held_here, formula, sent):
        """Print what the README explains. Return the exit status: 1 if a rank found a difference."""
        differences = torch.tensor(self.differences, device=self.device)
        largest = differences.nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = largest.item() <= self.tolerance
        verdict = f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
        if largest == 0:
            verdict = "bitwise equal"
        verdict = f"loss, gradients and parameters {verdict} over {self.args.steps} steps"
        params, grads, state = (f"{size / 1e6:.1f} MB" for size in held_here)
        plain_held = held(self.model.parameters(), self.optimizer)
        plain = " / ".join(f"{size / 1e6:.1f}" for size in plain_held)
        measured = f"{self.sent.total / 1e6:.1f} MB per step"
        ms, plain_ms = (1e3 * torch.tensor(self.times)).median(dim=0).values.tolist()
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(f"vs 1 device {verdict}")
        held_line = f"params {params}   grads {grads}   optimizer {state}"
        self.show(f"held/rank   {held_line}      (1 device: {plain})")
        self.show(f"sent/rank   {measured}      formula {formula} = {sent / 1e6:.1f} MB")
        self.show(f"time        {ms:.0f} ms per step      (1 device: {plain_ms:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # a rank that exits early drops its peers' connections
    dist.destroy_process_group()
    sys.exit(status)
