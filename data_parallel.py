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
import os
import signal
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
