"""DataParallel: one process drives all devices, with one thread for each.

In a step, the process copies the model to every device, runs a chunk of the batch on each, and
joins the outputs on device 0. In backward, each device computes the gradients of its copy, and
device 0 adds them up. The optimizer works on device 0 alone.

    batch ─ scatter ─┬→ device 0   replica 0: the module's memory ─→ output 0 ─┬─ gather ─→ outputs
                     └→ device 1   replica 1: copies ──────────────→ output 1 ─┘               │
                          ↑ replicate: parameters out                                          ↓
    device 0: module.grad = g0 + g1 ←──────────────── gradients back ←──────────── backward ← loss

Nothing is averaged, because the joined outputs are one batch with one loss.

Cost for Ψ parameters, with Adam, on N devices, in elements:

                    held by device 0        held by each other device   sent per step
    DataParallel    4Ψ                      Ψ while the step runs       2Ψ(N-1) to or from device 0
    DDP             4Ψ, and Ψ in buckets    the same                    2Ψ(N-1)/N by each rank

DDP has replaced DataParallel. It runs one process for each device. In DataParallel all traffic goes
through device 0, and the threads share one interpreter lock.

Read section 1 for the idea (4 minutes), to section 2 for the technique (16), and the rest to use
it as a library (18).

Run:      python data_parallel.py                                 two devices, or the CPU as two
          python data_parallel.py --idea                          trains with section 1 alone
          torchrun --nproc-per-node 3 data_parallel.py            each of 3 ranks uses 3 devices
Paper:    Li et al. 2020, PyTorch Distributed, arXiv 2006.15704, section 2.2
Mirrors:  torch.nn.DataParallel
Left out: output_device and dim; coalesced copies of small parameters; devices of two types;
          sparse gradients
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import json
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# --------------------------------------------------------------------------------------------------
# 1. The idea: autograd records how parameters are copied, so backward returns their gradients.


def data_parallel(module, x, devices):
    """Run one chunk of `x` on each device, one after another. `module` is on devices[0]."""
    states = dict(module.named_parameters()) | dict(module.named_buffers())
    chunks = x.chunk(len(devices))
    outputs = []
    for device, chunk in zip(devices, chunks, strict=False):
        copies = {name: tensor.to(device) for name, tensor in states.items()}
        output = torch.func.functional_call(module, copies, chunk.to(device))
        outputs.append(output.to(devices[0]))
    return torch.cat(outputs)


# --------------------------------------------------------------------------------------------------
# 2. The technique: all devices work at the same time, each with a module of its own, a replica.
# Inputs and outputs are tensors, or lists, tuples and dicts of tensors.


def scatter(inputs, devices, dim=0):
    """Return a list with the inputs of each device.

    Tensors are split along `dim` as by torch.chunk; everything else goes to all devices. The list
    is shorter than `devices` if there are fewer chunks, and empty if there are no inputs.
    """
    leaves, structure = tree_flatten(inputs)
    chunks_of_leaves = []
    shapes = {}  # {number of chunks: shape of a tensor that gives this number}
    for leaf in leaves:
        chunks = [leaf] * len(devices)
        if torch.is_tensor(leaf):
            pieces = leaf.chunk(len(devices), dim)
            shapes[len(pieces)] = tuple(leaf.shape)
            chunks = map(torch.Tensor.to, pieces, devices)
        chunks_of_leaves.append(chunks)
    if len(shapes) > 1:
        raise ValueError(
            f"{len(devices)} devices: the tensors give different numbers of chunks, with shapes "
            f"{shapes}; make them equally long in dimension {dim}"
        )
    by_device = zip(*chunks_of_leaves, strict=False)  # ends when the chunks of the tensors end
    return [tree_unflatten(chunks, structure) for chunks in by_device]


def rebuild(module, copy_of):
    """Return a copy of `module` that has `copy_of[x]` in place of each parameter or buffer x."""
    clones = {part: part._replicate_for_data_parallel() for part in module.modules()}  # shallow
    for original, clone in clones.items():
        if isinstance(original, nn.Embedding | nn.EmbeddingBag) and original.sparse:
            raise ValueError(f"{original}: gradients between devices are dense, set sparse=False")
        clone.named_parameters = check_is_no_replica  # parameters() calls it
        clone.state_dict = check_is_no_replica
        for name, child in original._modules.items():
            clone._modules[name] = clones.get(child)  # a child may be None
        for name, tensor in (original._parameters | original._buffers).items():
            # The copy stays a plain tensor. At a Parameter, a leaf, backward would stop.
            # setattr is needed because nn.LSTM then updates its own list of weights.
            setattr(clone, name, copy_of.get(tensor))
    return clones[module]


def replicate(module, devices):
    """Return a replica of `module`, which is on devices[0], for each device.

    Replica 0 shares the module's memory. The gradients of all replicas flow back into `module`.
    """
    tensors = [*module.parameters(), *module.buffers()]
    views = tensors
    replicas = []
    for index in reversed(range(len(devices))):
        # The last replica copies views of the tensors. Each replica before it copies views of
        # those views. Backward adds along this chain: always first g0 + g1, and then g2.
        views = [view.view_as(view) for view in views]
        copies = [view.to(devices[index], copy=index > 0) for view in views]
        copy_of = dict(zip(tensors, copies, strict=True))
        replicas.append(rebuild(module, copy_of))
    return replicas[::-1]


def device_of(inputs):
    for leaf in tree_leaves(inputs):
        if torch.is_tensor(leaf):
            return leaf.device
    raise ValueError("parallel_apply needs `devices` if the inputs of a module have no tensor")


def parallel_apply(modules, inputs, kwargs_tup=None, devices=None):
    """Call the modules at the same time, each on its device, and return the outputs.

    `inputs` has a tensor or a tuple for each module. Each thread runs in the caller's grad mode,
    autocast mode and streams. If any raise, the others finish. Then the exception of the first one
    is raised.
    """
    inputs = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    kwargs_tup = kwargs_tup or [{}] * len(modules)
    devices = devices or [device_of(args) for args in inputs]
    grad_enabled = torch.is_grad_enabled()
    device_type = torch.device(devices[0]).type
    autocast_enabled = torch.is_autocast_enabled(device_type)
    autocast_dtype = torch.get_autocast_dtype(device_type)
    streams = [None] * len(modules)
    if device_type == "cuda":
        streams = [torch.cuda.current_stream(device) for device in devices]

    def call(index):
        autocast = torch.autocast(device_type, autocast_dtype, autocast_enabled)
        stream = torch.cuda.stream(streams[index])  # does nothing if it is None
        try:
            with torch.set_grad_enabled(grad_enabled), autocast, stream:
                return modules[index](*inputs[index], **kwargs_tup[index])
        except Exception as error:
            error.args = [
                f"{type(error).__name__} in replica {index} on device {devices[index]}: {error}"
            ]
            raise

    with ThreadPoolExecutor(len(modules)) as threads:
        outputs = threads.map(call, range(len(modules)))
    return list(outputs)


def gather(outputs, device, dim=0):
    """Join the outputs of all devices on `device`: tensors along `dim`, scalars into a vector.

    None stays None. Other types raise a TypeError. Structures that differ raise a ValueError.
    """

    def join(*pieces):
        if all(piece is None for piece in pieces):
            return None
        if torch.is_tensor(pieces[0]) and pieces[0].dim() == 0:
            warnings.warn(
                "the scalars become a vector; its mean is wrong if the chunks differ in length"
            )
        on_device = [torch.atleast_1d(piece).to(device) for piece in pieces]
        return torch.cat(on_device, dim)

    return tree_map(join, *outputs)


class DataParallel(nn.Module):
    """Runs `module`, which is on devices[0], on all devices. The output is on devices[0].

    Devices may repeat. None stands for all GPUs, or for the CPU if there are none. Changes that
    forward makes to a replica are lost. Only in-place changes in replica 0 remain, because it
    shares the module's memory: a batch norm has the running statistics of the first chunk.
    """

    def __init__(self, module, devices=None):
        super().__init__()
        self.module = module
        gpus = range(torch.cuda.device_count())
        self.devices = devices or list(gpus) or ["cpu"]

    def forward(self, *inputs, **kwargs):
        if len(self.devices) == 1:
            return self.module(*inputs, **kwargs)
        # Without inputs there are no chunks. The module then runs once, on devices[0].
        chunks = scatter((inputs, kwargs), self.devices) or [(inputs, kwargs)]
        devices = self.devices[: len(chunks)]
        replicas = replicate(self.module, devices)
        inputs, kwargs = zip(*chunks, strict=True)
        return gather(parallel_apply(replicas, inputs, kwargs, devices), devices[0])


# --------------------------------------------------------------------------------------------------
# 3. The library: checks.


def check_is_no_replica(*args, **kwargs):
    """Stands in for methods of a replica. They would return nothing, because it has only copies."""
    raise RuntimeError(
        "a replica has no parameters(): use those of the DataParallel, after forward"
    )


# --------------------------------------------------------------------------------------------------
# Demo. Without torchrun it uses 2 devices. With it, each of N ranks does all the work on N devices.


def main():
    demo = Demo(__doc__)
    N = max(2, demo.ranks)
    devices = ["cpu"] * N
    if demo.device.type == "cuda":
        first = demo.device.index
        devices = [(first + number) % torch.cuda.device_count() for number in range(N)]
    module = demo.start("data_parallel", bitwise=N == 2, parts=N)
    model = DataParallel(module, devices)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def mean_loss(outputs, targets):
        losses = map(language_loss, outputs.chunk(N), targets.chunk(N))
        return sum(losses) / N  # one device adds them in the same order

    def step(inputs, targets):
        optimizer.zero_grad()
        outputs = data_parallel(module, inputs, devices) if demo.args.idea else model(inputs)
        loss = mean_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    def whole():
        return [parameter.grad for parameter in module.parameters()], module.parameters()

    demo.train(step, whole)
    if demo.args.idea:
        return report_idea(demo, module, devices, optimizer)
    return report_one_step(demo, module, devices, optimizer, mean_loss)


class MovedBytes(TorchFunctionMode):
    """Adds up the bytes of the parameters that .to() gets, which may be on the device already."""

    total = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and isinstance(args[0], nn.Parameter):
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def report_idea(demo, module, devices, optimizer):
    N = len(devices)
    here = held(module.parameters(), optimizer)
    with MovedBytes() as moved:
        data_parallel(module, demo.batch(0)[0], devices)
    # Parameters go out and gradients come back, except for device 0, which keeps its own.
    demo.sent.total = 2 * moved.total * (N - 1) / N
    return demo.report(here, "2Ψ(N-1)", 2 * here[0] * (N - 1))


def report_one_step(demo, module, devices, optimizer, mean_loss):
    """Run one more step, and print what it moves, what it holds, and a pitfall of its loss."""
    N = len(devices)
    here = held(module.parameters(), optimizer)
    replicas = replicate(module, devices)
    copies = []  # the tensors of all replicas but the first
    for part in nn.ModuleList(replicas[1:]).modules():
        copies += filter(torch.is_tensor, vars(part).values())
    sent_back = []  # bytes of each gradient
    for tensor in copies:
        tensor.register_hook(lambda gradient: sent_back.append(gradient.nbytes))
    # Two sequences for each device, but one for the last.
    inputs, targets = (tensor[: 2 * N - 1] for tensor in demo.batch(0))
    outputs = gather(parallel_apply(replicas, scatter(inputs, devices)), devices[0])
    loss = language_loss(outputs, targets)
    loss.backward()
    demo.sent.total = held_bytes(copies) + sum(sent_back)
    status = demo.report(here, "2Ψ(N-1)", 2 * here[0] * (N - 1))
    of_first = f"{sum(here) / 1e6:.1f} MB"
    of_other = f"{held_bytes(copies) / (N - 1) / 1e6:.1f} MB"
    mean = mean_loss(outputs, targets)
    demo.show("traffic     device 0 sends parameters to the other devices, and receives gradients")
    demo.show(f"memory      device 0: {of_first}; each other device: {of_other} during a step")
    demo.show(f"pitfall     {2 * N - 1} sequences: the loss of the joined outputs is {loss:.4f}.")
    demo.show(f"            The mean of the replicas' losses, {mean:.4f}, is wrong: the last")
    demo.show("            replica has one sequence, but counts as much as those that have two.")
    return status


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
