"""DataParallel: one process drives all devices, a thread each; what people used before DistributedDataParallel.

    batch ─ scatter ─┬→ device 0   replica 0: a view of module ─→ output 0 ─┬─ gather ─→ outputs → loss, on device 0
                     └→ device 1   replica 1: a copy of it ─────→ output 1 ─┘                │
                           ↑ replicate: parameters out                                       │
    device 0: module.grad = g₀ + g₁ ←─────────────────────────── gradients back ←── backward ┘

Only device 0 has the model, its gradients and the optimizer. Each forward copies the parameters to the others, within
the graph, so that backward copies gradients back and adds them up. Nothing is averaged: the outputs are one batch again
and have one loss. It gave way to a process per device: all this passes device 0, and threads share one lock (the GIL).

    of Ψ parameters, N devices    held by device 0, and by the others         sent per step
    DataParallel                  4Ψ (gradients, Adam's state); Ψ in a step   2Ψ(N-1), by device 0 or to it
    DDP                           4Ψ, and Ψ in buckets; the same              2Ψ(N-1)/N, by each

Run:      python data_parallel.py    (torchrun --nproc-per-node 3 data_parallel.py: 3 devices, on each rank by itself)
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, §2.2; Krizhevsky 2014, arXiv 1404.5997
Mirrors:  torch.nn.DataParallel; left out: output_device and dim, small parameters copied as one, devices of two kinds
"""

import argparse
import copy
import functools
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# ---------------------------------------------------------------------------------------------------------------------
# Four functions, whose inputs and outputs are tensors, also in lists, tuples and dicts; and the module that calls them.


def scatter(inputs, devices, dim=0):
    """-> a list, the inputs of each device: tensors cut along `dim` as torch.chunk does, all else as it is.
    The list is shorter where there are fewer chunks. Raises ValueError if one tensor gives fewer than another.
    """
    N, (leaves, structure) = len(devices), tree_flatten(inputs)
    pieces = [leaf.chunk(N, dim) if torch.is_tensor(leaf) else [leaf] * N for leaf in leaves]
    if len({len(chunks) for chunks in pieces if torch.is_tensor(chunks[0])}) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves if torch.is_tensor(leaf)]
        raise ValueError(
            f"tensors of shapes {shapes} give different numbers of chunks for {N} devices"
        )
    rows = zip(devices, *pieces, strict=False)  # ends where the chunks do
    return [
        tree_unflatten([x.to(d) if torch.is_tensor(x) else x for x in row], structure)
        for d, *row in rows
    ]


def replicate(module, devices):
    """-> a replica of `module`, which is on devices[0], for each device; gradients of all flow back into it.
    Their parameters are plain tensors, the first's views: a Parameter would be a leaf, where the gradient stays.
    """
    replicas, tensors = [], {tensor: tensor for tensor in (*module.parameters(), *module.buffers())}
    for number, device in reversed([*enumerate(devices)]):
        # A chain of views, along which backward adds: in the order of the devices, whichever of them is done first.
        tensors = {own: tensor.view_as(tensor) for own, tensor in tensors.items()}
        copies = {
            own: tensor.to(device, copy=True) if number else tensor
            for own, tensor in tensors.items()
        }
        twins = {
            original: original._replicate_for_data_parallel() for original in module.modules()
        }  # shallow copies
        for original, twin in twins.items():
            twin._modules = {name: twins.get(child) for name, child in original._modules.items()}
            for name, tensor in (*original._parameters.items(), *original._buffers.items()):
                setattr(
                    twin, name, copies.get(tensor)
                )  # setattr: nn.LSTM keeps a list of its weights up with it
        replicas.insert(0, twins[module])
    return replicas


def parallel_apply(modules, inputs, kwargs_tup=None, devices=None):
    """-> each module's output for its inputs (a tuple or a tensor) and kwargs, on its device, in a thread of its own
    with this one's modes and streams. Raises, once all have ended, what the lowest-numbered that failed raised.
    """
    inputs = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    devices = devices or [
        next(x.device for x in tree_leaves(args) if torch.is_tensor(x)) for args in inputs
    ]
    kwargs_tup, start = kwargs_tup or [{}] * len(modules), threading.Barrier(len(modules))
    with_gradients, kind = torch.is_grad_enabled(), torch.device(devices[0]).type
    autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
    streams = [
        torch.cuda.stream(torch.cuda.current_stream(d) if kind == "cuda" else None) for d in devices
    ]

    def work(number):
        start.wait()  # each in its thread: else, the pool takes one again that is done
        try:
            with (
                torch.set_grad_enabled(with_gradients),
                torch.autocast(kind, **autocast),
                streams[number],
            ):
                return modules[number](*inputs[number], **kwargs_tup[number])
        except Exception as error:
            error.args = (
                f"{type(error).__name__} in replica {number} on device {devices[number]}: {error}",
            )
            raise

    with ThreadPoolExecutor(len(modules)) as threads:
        return list(threads.map(work, range(len(modules))))


def gather(outputs, device, dim=0):
    """-> the outputs as one, on `device`: tensors joined along `dim`, scalars to a vector; None stays None."""

    def join(
        *pieces,
    ):  # TypeError for other types, as tree_map's ValueError for structures that differ
        if torch.is_tensor(pieces[0]) and pieces[0].dim() == 0:
            warnings.warn(
                "replicas return scalars, gathered as a vector: a mean of losses may not be the loss"
            )
        return (
            None
            if {*pieces} == {None}
            else torch.cat([torch.atleast_1d(x).to(device) for x in pieces], dim)
        )

    return tree_map(join, *outputs)


class DataParallel(nn.Module):
    """Runs `module`, which is on devices[0], on a chunk of the batch on each device; the output is on devices[0].
    devices: one may be named several times (None: all GPUs, or else the CPU). What forward changes in a replica is
    lost, except in place on devices[0]: the running statistics of a batch norm are those of the first chunk.
    """

    def __init__(self, module, devices=None):
        super().__init__()
        self.module, self.devices = (
            module,
            devices or [*range(torch.cuda.device_count())] or ["cpu"],
        )

    def forward(self, *inputs, **kwargs):
        if len(self.devices) == 1:
            return self.module(*inputs, **kwargs)
        chunks = scatter((inputs, kwargs), self.devices) if inputs or kwargs else [(inputs, kwargs)]
        replicas = replicate(self.module, self.devices[: len(chunks)])
        return gather(
            parallel_apply(replicas, *zip(*chunks, strict=True), self.devices), self.devices[0]
        )


# ---------------------------------------------------------------------------------------------------------------------
# Demo. A process alone has 2 devices; of N ranks each has N, and does all of it by itself.


def main():
    demo = Demo()
    N, gpus = max(2, demo.ranks), torch.cuda.device_count() if demo.device.type == "cuda" else 0
    devices = [
        (torch.cuda.current_device() + number) % gpus if gpus else "cpu" for number in range(N)
    ]
    model = DataParallel(demo.start("data_parallel", bitwise=N == 2, parts=N), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        losses = map(language_loss, model(inputs).chunk(N), targets.chunk(N))
        loss = sum(losses) / N  # as one device adds it up
        loss.backward()
        optimizer.step()
        return loss

    demo.train(
        step, lambda: ([parameter.grad for parameter in model.parameters()], model.parameters())
    )
    here, replicas, back = held(model.parameters(), optimizer), replicate(model.module, devices), []
    inputs, targets = (
        tensor[: 2 * N - 1] for tensor in demo.batch(0)
    )  # 2 sequences a device, but 1 for the last
    copies = [
        t
        for m in nn.ModuleList(replicas[1:]).modules()
        for t in vars(m).values()
        if torch.is_tensor(t)
    ]
    for tensor in copies:
        tensor.register_hook(lambda gradient: back.append(gradient.nbytes))
    outputs = gather(parallel_apply(replicas, scatter(inputs, devices)), devices[0])
    mean, loss = (
        sum(map(language_loss, outputs.chunk(N), targets.chunk(N))) / N,
        language_loss(outputs, targets),
    )
    loss.backward()
    demo.sent.total = held_bytes(copies) + sum(back)
    status = demo.report(here, "2Ψ(N-1)", 2 * here[0] * (N - 1))
    first, other = sum(here) / 1e6, held_bytes(copies) / (N - 1) / 1e6
    demo.show(
        "traffic     all by device 0 or to it: parameters out, gradients back. DDP: 2Ψ(N-1)/N by each rank"
    )
    demo.show(
        f"memory      device 0: {first:.1f} MB, as one device; each other: {other:.1f} MB, a replica, for a step"
    )
    demo.show(
        f"pitfall     {len(inputs)} sequences: the gathered outputs' loss is {loss:.4f}, the mean of replicas'"
    )
    demo.show(
        f"            losses {mean:.4f}: there the last one's only row counts double. Let forward return outputs"
    )
    return status


# ---------------------------------------------------------------------------------------------------------------------
# Demo, set-up: a small language model on real text, in this world and on one device. The same text in every file.


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.head_dim, self.norm1, self.norm2 = C // heads, nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.linear1, self.linear2 = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):  # (batch, time, C); q, k, v: (batch, heads, time, head_dim)
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


def language_model(
    C=192, heads=6, layers=4, V=256
):  # knows of positions what the causal mask tells
    blocks = [Block(C, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(V, C), *blocks, nn.LayerNorm(C), nn.Linear(C, V, bias=False))


def language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends; those of collectives as their ring algorithms send them."""

    # operator: (how often its payload goes around the ring, which argument the payload is)
    RING = {
        "allreduce_": (2, 0),
        "broadcast_": (1, 0),
        "_allgather_base_": (1, 0),
        "_reduce_scatter_base_": (1, 1),
    }
    RING = RING | {"alltoall_base_": (1, 1), "send": (1, 0), "recv_": (0, 0)}
    total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            rounds, payload = self.RING[
                func.__name__.split(".")[0]
            ]  # KeyError: what is not known is not 0 bytes
            N = next(
                dist.ProcessGroup.unbox(arg).size()
                for arg in args
                if isinstance(arg, torch.ScriptObject)
            )
            times = 1 if func.__name__.startswith("send") else rounds * (N - 1) / N
            self.total += times * sum(tensor.nbytes for tensor in tree_leaves(args[payload]))
        return func(*args, **(kwargs or {}))


def held_bytes(tensors):
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def held(
    parameters, optimizer
):  # -> bytes of the storages behind parameters, gradients and optimizer state
    parameters, state = (
        list(parameters),
        filter(torch.is_tensor, tree_leaves(list(optimizer.state.values()))),
    )
    return (
        held_bytes(parameters),
        held_bytes([p.grad for p in parameters if p.grad is not None]),
        held_bytes(state),
    )


class Demo:
    """Trains a technique and the same model on one device, step by step, and compares: in float64 where not bitwise."""

    def __init__(self, flags=None):
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.error, devices = self.stop, ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
        parser.add_argument(
            "--data", metavar="FILE", default=argparse.__file__, help="text to train on"
        )
        parser.add_argument("--device", choices=devices, default=devices[-1])
        numbers = {"--steps": {"type": int, "default": 30}, "--seed": {"type": int, "default": 0}}
        for flag, options in {**numbers, **(flags or {})}.items():
            parser.add_argument(flag, **options)
        self.args = parser.parse_args()
        text = Path(self.args.data).read_bytes() if Path(self.args.data).is_file() else b""
        if self.args.steps < 1 or len(text) < 66:
            self.stop(
                f"--steps {self.args.steps}, --data {self.args.data}, {len(text)} bytes: needs 1 step, 66 bytes"
            )
        self.text, self.device = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8),
            torch.device(self.args.device),
        )
        if gpus := torch.cuda.device_count() if self.args.device == "cuda" else 0:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        backend = (
            "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"
        )  # NCCL: one GPU a rank
        alone = (
            {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        )
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **alone)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.show = (
            functools.partial(print, flush=True) if self.rank == 0 else lambda *args, **kwargs: None
        )
        self.part = lambda batch: batch.chunk(self.ranks)[self.rank]

    def stop(self, message):
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # with the group as it is: it is wrong on all ranks

    def start(
        self, name, bitwise=False, parts=None
    ):  # -> a copy of the plain model, which takes `parts` of a batch
        self.parts, self.tolerance = (
            parts or self.ranks,
            0.0 if bitwise and self.device.type == "cpu" else 1e-9,
        )
        torch.manual_seed(self.args.seed)
        self.model = language_model().to(
            self.device, torch.float64 if self.tolerance else torch.float32
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        world = (
            f"{self.ranks} rank{'s' * (self.ranks > 1)} · {self.device.type}/{dist.get_backend()}"
        )
        size = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        self.show(f"{name} · {world} · {size:.1f}M parameters · {self.args.steps} steps")
        return copy.deepcopy(self.model)

    def batch(
        self, number
    ):  # -> inputs, targets of a step, (batch, time): 8 sequences of 64 bytes for each rank
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + number)
        starts = torch.randint(len(self.text) - 64, (8 * self.ranks, 1), generator=generator)
        window = self.text[starts + torch.arange(65)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]

    def step_on_one_device(self, *batch):  # -> [loss, *gradients, *parameters]
        losses, parameters = (
            [],
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
        )
        self.optimizer.zero_grad()
        for inputs, targets in zip(*(tensor.chunk(self.parts) for tensor in batch), strict=True):
            losses.append(language_loss(self.model(inputs), targets))
            losses[-1].backward()
        for parameter in parameters:
            parameter.grad /= (
                self.parts
            )  # after the sum: before it, 3 parts would round differently
        self.optimizer.step()
        return [
            torch.stack(losses).mean().cpu(),
            *(parameter.grad for parameter in parameters),
            *parameters,
        ]

    def train(
        self, step, whole
    ):  # step(inputs, targets) -> this rank's loss or None; whole() -> gradients, parameters
        self.losses, self.times, self.differences, terminal = [], [], [0.0], sys.stdout.isatty()
        for number in range(self.args.steps):
            batch, losses, start = self.batch(number), [None] * self.ranks, time.perf_counter()
            with (
                SentBytes() if number == self.args.steps - 1 else nullcontext() as self.sent
            ):  # it takes time
                loss = step(*batch)
            loss, middle = None if loss is None else loss.item(), time.perf_counter()
            plain = self.step_on_one_device(*batch)
            self.times.append((middle - start, time.perf_counter() - middle))
            dist.all_gather_object(losses, loss)
            loss = torch.tensor(
                [loss for loss in losses if loss is not None], dtype=plain[0].dtype
            ).mean()
            self.losses.append(loss.item())
            pairs = zip(
                [loss, *(tensor for kind in whole() for tensor in kind)], plain, strict=True
            )
            self.differences += [
                (a - b).abs().max().item() for a, b in pairs if not torch.equal(a, b)
            ]
            if terminal or number % -(-self.args.steps // 3) == 0:
                self.show(
                    f"step {number + 1}/{self.args.steps}   loss {loss:.3f}",
                    end="\r" if terminal else "\n",
                )

    def report(
        self, held_here, formula, sent
    ):  # -> the exit status: 1 where any rank differs from one device
        largest = torch.tensor(self.differences, device=self.device).nan_to_num(nan=torch.inf).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agree = bool(largest <= self.tolerance)
        words = (
            f"{'' if agree else 'NOT '}equal within {self.tolerance}: {largest:.0e}"
            if largest
            else "bitwise equal"
        )
        params, grads, state = (f"{n / 1e6:.1f} MB" for n in held_here)
        plain = " / ".join(f"{n / 1e6:.1f}" for n in held(self.model.parameters(), self.optimizer))
        ms = 1e3 * torch.tensor(self.times).median(dim=0).values
        self.show(f"loss        {self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        self.show(
            f"vs 1 device loss, gradients and parameters {words} over {self.args.steps} steps"
        )
        self.show(
            f"held/rank   params {params}   grads {grads}   optimizer {state}      (1 device: {plain})"
        )
        self.show(
            f"sent/rank   {self.sent.total / 1e6:.1f} MB per step      formula {formula} = {sent / 1e6:.1f} MB"
        )
        self.show(f"time        {ms[0]:.0f} ms per step      (1 device: {ms[1]:.0f})")
        return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    dist.barrier()  # who leaves early breaks the others' connections
    dist.destroy_process_group()
    sys.exit(status)
