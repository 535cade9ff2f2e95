"""DataParallel: one process drives all devices, with a thread each; what people used before DistributedDataParallel.

One step on N = 2 devices:

    batch ─ scatter ─┬→ device 0   module ─────────────→ output 0 ┬─ gather ─→ outputs → loss on device 0
                     └→ device 1   replica of it ──────→ output 1 ┘
                            ↑ replicate: parameters out           │
    device 0: module.grad = g₀ + g₁ ←── gradients back ───────────┘ backward

Only device 0 holds the model, its gradients and the optimizer. Each forward copies the parameters to the others, and
each backward adds their gradients into the one model: replicate is an operation of the graph, with a sum for its
gradient. Nothing is averaged; the outputs are one batch again, and the loss that is taken of them is the loss.

Why it gave way to one process per device: the threads share one interpreter, whose lock (GIL) only one holds at a
time; all parameters travel on each forward; and device 0 does, holds and receives more than the others. The demo
measures each of these.

Cost in elements; Ψ parameters, N devices:

                    device 0                                the others                     sent per step
    one device      4Ψ: parameters, gradients, Adam         -                              0
    DataParallel    4Ψ                                      Ψ, from forward to backward    2Ψ(N-1), by device 0 or to it
    DDP             4Ψ, and Ψ in buckets                    the same                       2Ψ(N-1)/N, by each

The pitfall: a module that returns its *loss* gives a vector of N means, one per chunk. Their mean is the loss of the
batch only while all chunks have one size; in the last, smaller batch of an epoch it is not. Return outputs.

Run:      torchrun --nproc-per-node 2 data_parallel.py        (python data_parallel.py leaves out the processes)
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, §2.2; Krizhevsky 2014, arXiv 1404.5997
Mirrors:  torch.nn.DataParallel
Left out: averaging by processes, which is ddp.py; several machines
"""

import argparse
import copy
import dataclasses
import math
import os
import statistics
import sys
import sysconfig
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# ---------------------------------------------------------------------------------------------------------------------
# The technique: four functions, and a module that calls them.


class DataParallel(nn.Module):
    """Runs `module` on chunks of the batch, one per device, and puts the outputs together.

    Args:
        module: the model, on devices[0]. It is trained, saved and read as ever; replicas live for one forward.
        devices: where the chunks go. One device may be named several times (None: all GPUs, or else the CPU).
        output_device: where the outputs are put together (None: devices[0]).
        dim: the dimension of the batch, in inputs and outputs.

    What a replica changes in place is lost, except on devices[0], whose buffers are the module's own: the running
    statistics of a batch norm are those of the first chunk.

    Raises:
        ValueError: no devices.  RuntimeError, from forward: a parameter or buffer is not on devices[0].
        What a replica raises is raised again, with the number of the replica and its device.

    Source: torch.nn.DataParallel, which takes the devices as device_ids.
    """

    def __init__(self, module, devices=None, output_device=None, dim=0):
        super().__init__()
        if devices is None:
            devices = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())] or ["cpu"]
        if not devices:
            raise ValueError("devices is empty; name at least one")
        self.module, self.dim = module, dim
        self.devices = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in devices]
        self.output_device = self.devices[0] if output_device is None else output_device

    def forward(self, *inputs, **kwargs):
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.device != self.devices[0]:
                raise RuntimeError(f"{name!r} is on {tensor.device}; the module must be on {self.devices[0]}")
        chunks = scatter((inputs, kwargs), self.devices, self.dim) if inputs or kwargs else [(inputs, kwargs)]
        if len(chunks) == 1:
            return self.module(*chunks[0][0], **chunks[0][1])
        devices = self.devices[: len(chunks)]
        replicas = replicate(self.module, devices)
        outputs = parallel_apply(replicas, *zip(*chunks, strict=True), devices)
        return gather(outputs, self.output_device, self.dim)


def scatter(inputs, devices, dim=0):
    """Cut all tensors in nested `inputs` along `dim`, as torch.chunk does; -> the inputs of each device, in a list.

    A batch of fewer rows than devices makes fewer chunks. What is not a tensor goes to every device as it is.
    Raises ValueError when one tensor makes fewer chunks than another.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    chunks = {id(tensor): tensor.chunk(len(devices), dim) for tensor in tensors}
    counts = {len(pieces) for pieces in chunks.values()} or {len(devices)}
    if len(counts) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"inputs of shapes {shapes} do not make one number of chunks for {len(devices)} devices")

    def piece(leaf, number, device):
        return chunks[id(leaf)][number].to(device, non_blocking=True) if id(leaf) in chunks else leaf

    return [
        tree_map(lambda leaf, number=number, device=device: piece(leaf, number, device), inputs)
        for number, device in enumerate(devices[: counts.pop()])
    ]


def replicate(module, devices):
    """-> a replica of `module` per device, through which gradients flow back into `module`."""
    parameters = list(module.parameters())
    copies = Broadcast.apply(devices, *parameters)
    replicas = []
    for number, device in enumerate(devices):
        mine = copies[number * len(parameters) : (number + 1) * len(parameters)]
        tensors = dict(zip(map(id, parameters), mine, strict=True))
        for buffer in module.buffers():  # on device 0 the module's own: what changes there lasts
            tensors[id(buffer)] = buffer.to(device, copy=True) if number > 0 else buffer
        replicas.append(rebuild(module, tensors, {}))
    return replicas


def rebuild(module, tensors, done):
    """A copy of `module` whose parameters and buffers are `tensors[id(original)]`."""
    if module not in done:
        replica = done[module] = module._replicate_for_data_parallel()  # shallow; an RNN copies more than a Linear
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else rebuild(child, tensors, done)
        for name, parameter in module._parameters.items():
            # As a plain attribute: a Parameter would be a leaf, where its gradient ends.
            setattr(replica, name, None if parameter is None else tensors[id(parameter)])
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors[id(buffer)]
    return done[module]


class Broadcast(torch.autograd.Function):
    """Tensors to their copies on each device; the gradient of a tensor is the sum of its copies' gradients."""

    @staticmethod
    def forward(ctx, devices, *tensors):
        copies = [tensor.view_as(tensor) for tensor in tensors]
        copies += [tensor.to(device, copy=True) for device in devices[1:] for tensor in tensors]
        ctx.device, ctx.tensors = devices[0], len(tensors)
        fixed = [not needed for needed in ctx.needs_input_grad[1:]] * len(devices)
        ctx.mark_non_differentiable(*(copy for copy, is_fixed in zip(copies, fixed, strict=True) if is_fixed))
        ctx.set_materialize_grads(False)  # .grad stays None where no replica used the parameter
        return tuple(copies)

    @staticmethod
    def backward(ctx, *gradients):
        sums = [None] * ctx.tensors
        for number, gradient in enumerate(gradients):  # in the order of the devices: the same sum on every run
            if gradient is not None:
                total, here = sums[number % ctx.tensors], gradient.to(ctx.device)
                sums[number % ctx.tensors] = here if total is None else total + here
        return None, *sums


def parallel_apply(modules, inputs, kwargs_tup=None, devices=None):
    """-> the output of each module for its `inputs` (a tuple, or one tensor) and kwargs, each in a thread of its own.

    devices: where each computes (None: where its inputs are). A thread takes over autocast and whether gradients are
    recorded. The first exception, in the order of the modules, is raised once all threads have ended.
    """
    inputs = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    if devices is None:
        devices = [next(x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)) for args in inputs]
    with_gradients, kind = torch.is_grad_enabled(), torch.device(devices[0]).type
    autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
    outputs, errors = {}, {}

    def work(number, device):
        stream = torch.cuda.stream(torch.cuda.current_stream(device)) if kind == "cuda" else nullcontext()
        try:
            with torch.set_grad_enabled(with_gradients), torch.autocast(kind, **autocast), stream:
                outputs[number] = modules[number](*inputs[number], **kwargs_tup[number])
        except Exception as error:
            error.args = (f"Caught {type(error).__name__} in replica {number} on device {device}: {error}",)
            errors[number] = error

    threads = [threading.Thread(target=work, args=numbered) for numbered in enumerate(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [outputs[number] for number in range(len(modules))]


def gather(outputs, device, dim=0):
    """Concatenate along `dim`, on `device`, the tensors at the same place in each of the nested `outputs`.

    Raises ValueError when dicts have different keys, TypeError for what can't be put together.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0 and dim == 0:
            warnings.warn(
                "outputs are scalars: gathered as a vector. The mean of losses of uneven chunks is not the loss"
            )
            outputs = [output.unsqueeze(0) for output in outputs]
        return torch.cat([output.to(device, non_blocking=True) for output in outputs], dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError(f"replicas return dicts of different keys: {[list(output) for output in outputs]}")
        return type(first)((key, gather([output[key] for output in outputs], device, dim)) for key in first)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{n: gather([getattr(output, n) for output in outputs], device, dim) for n in names})
    if isinstance(first, (list, tuple)):
        make = first._make if hasattr(first, "_make") else type(first)
        return make(gather(items, device, dim) for items in zip(*outputs, strict=True))
    raise TypeError(f"a module in DataParallel can't return {type(first).__name__}: it is not made of tensors")


# ---------------------------------------------------------------------------------------------------------------------
# Demo. The other ranks look on while rank 0 runs the threads; then all of them show what processes do.


def main():
    N = max(2, int(os.environ.get("WORLD_SIZE", "1")))
    demo = Demo(bitwise=2, parts=N)
    gpus = torch.cuda.device_count() if demo.device.type == "cuda" else 0
    devices = [torch.device("cuda", number % gpus) if gpus else demo.device for number in range(N)]
    model = DataParallel(copy.deepcopy(demo.model), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        losses = torch.zeros(N, device=demo.device, dtype=next(model.parameters()).dtype)
        if demo.rank == 0:
            optimizer.zero_grad()
            chunks = zip(model(inputs).chunk(N), targets.chunk(N), strict=True)
            losses = torch.stack([language_loss(logits, target) for logits, target in chunks])
            losses.mean().backward()
            optimizer.step()
            losses = losses.detach()
        dist.broadcast(losses, 0)
        return losses[demo.rank]

    def state():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.broadcast(parameter.data, 0)
            dist.broadcast(parameter.grad, 0)
        return [parameter.grad for parameter in model.parameters()], model.parameters()

    demo.train(step, state)
    held_here, psi = held(model.parameters(), optimizer), held_bytes(demo.model.parameters())
    demo.sent = moved_bytes(model, *demo.batch(0))
    status = demo.report("data_parallel", held_here, "2Ψ(N-1)", 2 * psi * (N - 1))
    demo.show(f"devices     {', '.join(map(str, devices))}: held by the first; each other holds Ψ during a step")
    compare_with_processes(demo, model)
    show_pitfall(demo, model)
    demo.leave(status)


def moved_bytes(model, inputs, targets):
    """Bytes of parameters that go to the other devices, and of gradients that come back, in one step."""
    moved = []
    replicas = replicate(model.module, model.devices)
    for replica in replicas[1:]:
        for tensor in {
            id(t): t for m in replica.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)
        }.values():
            moved.append(tensor.nbytes)
            tensor.register_hook(lambda gradient: moved.append(gradient.nbytes))
    outputs = parallel_apply(replicas, scatter(inputs, model.devices))
    language_loss(gather(outputs, inputs.device), targets).backward()
    model.zero_grad()
    return sum(moved)


def compare_with_processes(demo, model, rounds=10):
    """Show what a step with threads consists of, and the same step with a process per chunk: medians in ms."""
    times, N, devices = {}, len(model.devices), model.devices

    def timed(what, function, *args):
        start = time.perf_counter()
        result = function(*args)
        if demo.device.type == "cuda":
            torch.cuda.synchronize()
        times.setdefault(what, []).append(1e3 * (time.perf_counter() - start))
        return result

    def train_by_processes(inputs, targets):
        language_loss(demo.model(inputs.chunk(N)[demo.rank]), targets.chunk(N)[demo.rank]).backward()
        dist.all_reduce(torch.cat([parameter.grad.flatten() for parameter in demo.model.parameters()]))

    for number in range(rounds):
        inputs, targets = demo.batch(number)
        model.zero_grad()
        demo.model.zero_grad()
        if demo.rank == 0:
            chunks = timed("scatter", scatter, inputs, devices)
            replicas = timed("replicate", replicate, model.module, devices)
            timed("one by one", lambda r=replicas, c=chunks: [m(chunk) for m, chunk in zip(r, c, strict=True)])
            outputs = timed("parallel_apply", parallel_apply, replicas, chunks)
            outputs = timed("gather", gather, outputs, demo.device)
            timed("backward", language_loss(outputs, targets).backward)
        dist.barrier()
        if demo.ranks > 1:
            timed("processes", train_by_processes, inputs, targets)
    if demo.rank == 0:
        ms = {what: statistics.median(values) for what, values in times.items()}
        parts = ("scatter", "replicate", "parallel_apply", "gather", "backward")
        steps = " · ".join(f"{part} {ms[part]:.1f}" for part in parts)
        demo.show(f"threads     {steps} = {sum(ms[part] for part in parts):.0f} ms")
        speedup = ms["one by one"] / ms["parallel_apply"]
        demo.show(f"            parallel_apply is {speedup:.2f} times as fast as its {N} forwards one after another")
        also = f"{ms['processes']:.0f} ms" if demo.ranks > 1 else "start this file with torchrun to compare"
        demo.show(f"processes   forward, all-reduced backward = {also}")


class LossInside(nn.Module):
    """The pitfall: a module that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return language_loss(self.model(inputs), targets).unsqueeze(0)


def show_pitfall(demo, model):
    inputs, targets = (tensor[: 2 * len(model.devices) - 1] for tensor in demo.batch(0))  # the last chunk is smaller
    with torch.no_grad():
        mean_of_losses = DataParallel(LossInside(model.module), model.devices)(inputs, targets).mean()
        loss = language_loss(model(inputs), targets)
    demo.show(
        f"pitfall     a batch of {len(inputs)}: mean of the chunks' losses {mean_of_losses:.4f}, its loss {loss:.4f}"
    )


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
