"""Activation checkpointing: forget what a layer computed on its way, and compute it again when backward comes to it.

Three layers; x0 … x3 lie between them, a1 … a3 are what backward needs of their insides:

    forward    x0 ─ a1 ─ x1 ─ a2 ─ x2 ─ a3 ─ x3 ─ loss      kept: x0, x1, x2. a1, a2, a3 are freed at once
    backward                       x2 ─ a3                  layer 3 again, from x2; its gradients; a3 is freed
                         x1 ─ a2                            layer 2 again, from x1; its gradients; a2 is freed; …

Bytes kept for backward by l transformer layers in 16 bits, and operations per token in products with weights:

    nothing is checkpointed              l·sbh(34 + 5as/h)                         6Ψ
    attention's core is                  l·34sbh                                   6Ψ, and half the core's forward again
    all but the products with weights    l·20sbh                                   6Ψ, and the core's forward again
    every layer                          l·2sbh; one layer at a time + the rest    8Ψ: forward again
    k segments, all but the last         (k-1)·2sbh + l/k·sbh(34 + 5as/h)          8Ψ - 2Ψ/k
    offload_to_cpu                       the same bytes as the first, in host memory, and the weights; 6Ψ

b sequences of s tokens, h wide, a heads; Ψ parameters. Collectives in what is checkpointed are sent again.

Run:      torchrun --nproc-per-node 2 activation_checkpoint.py          (python activation_checkpoint.py: one rank)
Papers:   Chen et al. 2016, arXiv 1604.06174: √l segments; Korthikanti et al. 2022, 2205.05198, §4, 5: the bytes
Mirrors:  torch.utils.checkpoint (use_reentrant=False, selective), torch.autograd.graph.save_on_cpu
Left out: torch.compile, a function on several GPUs, torch_function modes around it (enter amp.py's autocast inside).
          Buffers that forward updates, as BatchNorm's, are updated twice
"""

import argparse
import copy
import functools
import itertools
import os
import signal
import sys
import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea, of one tensor, which must want a gradient. Dropout would draw anew, autocast be forgotten; parameters get
#    their gradients by .backward() alone: torch.autograd.grad does not see them.


class NaiveCheckpoint(torch.autograd.Function):  # NaiveCheckpoint.apply(function, x) -> function(x)
    @staticmethod
    def forward(ctx, function, x):  # autograd is off in here: nothing of the inside is kept
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one. Autograd sees all of `function`, and gradients go where they always go; only what it saves is swapped
#    for a number. The first that backward asks for has function run again, which saves the same in the same order.

kind_of = attrgetter("shape", "dtype", "device")
versions_of = functools.partial(tree_map_only, torch.Tensor, attrgetter("_version"))


class Complete(BaseException): ...  # ends a recomputation; no Exception, which function may catch


class KeepInput(torch.autograd.Function):
    """Its node saves a tensor as all nodes do: changed in place, it is an error; inside a segment, that forgets it."""

    @staticmethod
    def forward(ctx, wants_gradient, tensor):
        ctx.save_for_backward(tensor)
        return wants_gradient.clone()


class Segment:
    """A call of function: what it takes to repeat it; the kinds of what it saved; tensors, from repetition to use."""

    def __init__(self, function, inputs, preserve_rng_state):
        self.function, self.kept, self.kinds, self.tensors = function, {}, [], {}
        anchor = torch.empty(0, requires_grad=True)
        self.inputs = tree_map_only(
            torch.Tensor, functools.partial(KeepInput.apply, anchor), inputs
        )
        self.random = random_states() if preserve_rng_state else []
        kinds, cache = (
            ("cpu", "cuda")[: 1 + torch.cuda.is_available()],
            torch.is_autocast_cache_enabled(),
        )
        casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache)
            for kind in kinds
        ]
        self.modes = [torch.enable_grad(), *itertools.starmap(torch.autocast, casts)]

    def pack(self, tensor):
        self.kinds.append(kind_of(tensor))
        return len(self.kinds) - 1

    def unpack(self, number):
        if number not in self.tensors:  # the first of a backward; with retain_graph, of each
            self.recompute()
        return self.tensors.pop(number)

    def recompute(self):
        """Run function again, until all that it saved is there."""
        self.tensors = {}

        def fill(tensor):
            number, tensor = (
                len(self.tensors),
                tensor.detach(),
            )  # with its graph, it would keep itself for ever
            was, now = self.kinds[number], kind_of(tensor)
            if was != now:
                raise RuntimeError(
                    f"checkpoint: {self.function} saves {now} as tensor {number}, was {was}"
                )
            self.tensors[number] = tensor
            if len(self.tensors) == len(self.kinds):
                raise Complete
            return tensor  # and no number: function may itself call backward

        args, kwargs = tree_map_only(
            torch.Tensor, lambda kept: kept.grad_fn.saved_tensors[0], self.inputs
        )
        with ExitStack() as as_before:
            for mode in self.modes + [Keep(None, self.kept)] * bool(self.kept):
                as_before.enter_context(mode)
            as_before.callback(set_random_states, random_states() if self.random else [])
            set_random_states(self.random)
            try:
                with saved_tensors_hooks(fill, lambda tensor: tensor):
                    self.function(*args, **kwargs)
            except Complete:
                return
        number, before = len(self.tensors), len(self.kinds)
        raise RuntimeError(
            f"checkpoint: {self.function} saves {number} tensors, saved {before} before"
        )


def checkpoint(function, *args, preserve_rng_state=True, policy=None, **kwargs):
    """-> function(*args, **kwargs), and bitwise its gradients, but nothing of its inside is kept for backward.

    Random numbers (CPU's, current GPU's) and autocast are for the second time as for the first; whatever else it reads
    must be. policy(ATen operator, *its arguments, **…): is its output kept? None is, by default.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    segment = Segment(function, (args, kwargs), preserve_rng_state)
    with (
        saved_tensors_hooks(segment.pack, segment.unpack),
        Keep(policy, segment.kept) if policy else nullcontext(),
    ):
        return function(*args, **kwargs)


def random_states():  # of the CPU's generator, and the current GPU's
    gpu = (
        [torch.cuda.default_generators[torch.cuda.current_device()]]
        if torch.cuda.is_initialized()
        else []
    )
    return [(generator, generator.get_state()) for generator in (torch.default_generator, *gpu)]


def set_random_states(states):
    for generator, state in states:
        generator.set_state(state)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Selective: what takes long to compute, and is small, is kept after all.


class Keep(TorchDispatchMode):
    """Puts outputs of the operators that policy chooses into `kept`; without a policy, returns what is there."""

    def __init__(self, policy, kept):
        super().__init__()
        self.policy, self.kept, self.calls = policy, kept, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if shares_memory(func):  # a view, or in place: it must do so again
            return func(*args, **(kwargs or {}))
        self.calls[func] += 1
        call = func, self.calls[func]
        if self.policy is None and call in self.kept:
            outputs, versions, random = self.kept[call]
            if versions != versions_of(outputs):
                raise RuntimeError(
                    f"checkpoint: an output of {func} that policy keeps was changed in place"
                )
            set_random_states(random)  # who draws next draws what it drew
            return detached(outputs)
        outputs = func(*args, **(kwargs or {}))
        if self.policy and self.policy(func, *args, **(kwargs or {})):
            random = random_states() if torch.Tag.nondeterministic_seeded in func.tags else []
            self.kept[call] = detached(outputs), versions_of(outputs), random
        return outputs


def detached(
    outputs,
):  # from the graph, which would hold itself; changes in place still count for all
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


@functools.cache
def shares_memory(operator):
    return any(output.alias_info for output in operator._schema.returns)


def keep_products(operator, *args, **kwargs):
    """A policy: nn.Linear's outputs are kept, those of attention's core, many bytes and few operations, are not."""
    return operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Several layers at a time; and waiting in host memory, in place of computing again.


def checkpoint_sequential(layers, segments, x):
    """Run x through l layers in k about equal segments; the last, where backward begins, forgets nothing.

    Layers that keep a tensor each keep k - 1 + l/k, fewest at k = √l (Chen et al. §4.1); transformer layers, whose
    insides are many times what is between them, keep least at k = l.
    """
    if not 1 <= segments <= len(layers):
        raise ValueError(
            f"{len(layers)} layers do not make {segments} segments; take 1 to {len(layers)}"
        )
    ends = [len(layers) * i // segments for i in range(segments + 1)]
    for start, end in itertools.pairwise(ends):
        part = functools.partial(functools.reduce, lambda x, layer: layer(x), layers[start:end])
        x = part(x) if end == len(layers) else checkpoint(part, x)
    return x


@contextmanager
def offload_to_cpu():
    """What is saved for backward in here, weights too, waits in host memory: on a GPU pinned, copied asynchronously."""

    def pack(
        tensor,
    ):  # a copy even of what is there already: as it was, when it is changed in place later
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return host.copy_(tensor, non_blocking=True), tensor.device

    with saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1], non_blocking=True)):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


def main():
    demo = Demo()
    model = demo.start("activation_checkpoint", bitwise=demo.ranks <= 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(
            checkpoint_sequential(model, len(model), demo.part(inputs)), demo.part(targets)
        )
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= demo.ranks
        optimizer.step()
        return loss

    demo.train(
        step, lambda: ([parameter.grad for parameter in model.parameters()], model.parameters())
    )
    sent = 2 * held_bytes(model.parameters()) * (demo.ranks - 1) / demo.ranks
    status = demo.report(held(model.parameters(), optimizer), "2Ψ(N-1)/N", sent)
    l, h, a, s, b = 8, 128, 8, 128, 1
    demo.show(
        f"{l} layers in bf16, 5as/h = {5 * a * s // h}. Kept for backward: measured = by formula. Operations per"
    )
    demo.show(
        "token: 6Ψ in products with weights, 1Ψ in attention, and what is computed again. Time: with counting"
    )
    for name, kept, formula, operations, ms, same in measure(l, h, a, s, b, demo.device):
        line = f"{name:13} kept {kept:6.1f} sbh = {formula:4.0f}   operations {operations:.2f}Ψ   {ms:4.0f} ms"
        demo.show(f"{line}   gradients {'bitwise equal' if same else 'DIFFER'}")
        status = status or int(not same)
    return status


dropout = functools.partial(
    torch.native_dropout, p=0.1, train=True
)  # F.dropout's mask is of x's dtype on a CPU


def attention(q, k, v):  # (batch, heads, time, head_dim)
    future = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    return dropout((q @ k.mT * q.shape[-1] ** -0.5 + future).softmax(-1))[0] @ v


def layer(block, x, run=lambda core, *qkv: core(*qkv)):
    """A Block with dropout, and with attention's weights in memory: the layer of Korthikanti et al. §4.1."""
    q, k, v = (
        y.unflatten(-1, (-1, block.head_dim)).transpose(1, 2)
        for y in block.qkv(block.norm1(x)).chunk(3, -1)
    )
    x = x + dropout(block.proj(run(attention, q, k, v).transpose(1, 2).flatten(2)))[0]
    return x + dropout(block.linear2(F.gelu(block.linear1(block.norm2(x)))))[0]


class Alive(TorchDispatchMode):
    """The memory of all that is computed in here, as long as somebody else refers to it."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if not shares_memory(func):
            self.storages.update(
                tensor.untyped_storage()
                for tensor in tree_leaves(outputs)
                if torch.is_tensor(tensor)
            )
        return outputs

    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages)


def measure(l, h, a, s, b, device):
    """A step through l layers each way: sbh bytes kept, and by formula; Ψ operations per token; ms; bitwise equal?"""
    blocks = language_model(h, a, l).to(device, torch.bfloat16)[1:-2]
    x, layers = (
        torch.randn(b, s, h, dtype=torch.bfloat16, device=device),
        [functools.partial(layer, B) for B in blocks],
    )
    inside, weights, expected = 34 + 5 * a * s / h, 24 * h / (s * b), None
    ways = [
        *(
            (f"{k} segments", k, lambda layer: layer, 2 * (k - 1) + inside * l / k)
            for k in (1, 2, 4)
        ),
        ("every layer", 1, lambda layer: functools.partial(checkpoint, layer), 2 * l),
        (
            "not products",
            1,
            lambda layer: functools.partial(checkpoint, layer, policy=keep_products),
            20 * l,
        ),
        ("core", 1, lambda layer: functools.partial(layer, run=checkpoint), 34 * l),
        ("offload", 1, offload_to_cpu(), (inside + weights) * l),
    ]
    for name, segments, how, formula in ways:
        blocks.zero_grad()
        torch.manual_seed(0)
        start = time.perf_counter()
        with FlopCounterMode(display=False) as flops, Alive() as alive:
            y = checkpoint_sequential(list(map(how, layers)), segments, x)
            kept = alive.bytes() / (s * b * h)
            y.sum().backward()
        ms, gradients = (
            1e3 * (time.perf_counter() - start),
            [parameter.grad for parameter in blocks.parameters()],
        )
        expected = expected or gradients
        operations = flops.get_total_flops() / (s * b * 12 * h * h * l)
        yield name, kept, formula, operations, ms, all(map(torch.equal, gradients, expected))


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
