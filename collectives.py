"""Collectives: all-reduce and its kin, from nothing but send and receive. The other files stand on them.

An all-reduce replaces each rank's tensor by the sum of all. Four ways, on N ranks with n bytes each; L = ⌈log₂N⌉:

                         one after another, at best     sent by        the order in which
                         messages       bytes           the busiest    4 ranks' numbers are added
    to rank 0 and back   2(N-1)         2(N-1)n         (N-1)n         ((0 + 1) + 2) + 3
    tree                 2L             2Ln             Ln             (0 + 1) + (2 + 3)
    ring                 2(N-1)         2n(N-1)/N       2n(N-1)/N      part p of 4: from p + 1 on, p last
    recursive doubling   L              Ln              Ln             (0 + 1) + (2 + 3)   (L + 1, if N ≠ 2ᵏ)

A message of m bytes takes α + mβ seconds: latency, and 1/bandwidth. Small tensors want few messages, large ones few
bytes, and none can do with fewer than the ring: at N = 4 it wins from 8α/β bytes on, at N = 2 it only draws level.

All ranks end with the same bits. They need not be those of rank order: a rounded sum depends on its order, and the
ring's differs from part to part. 3 ranks that hold 1e8, 1 and -1e8 in each of 3 elements get [0, 1, 0] in float32.

Run:      torchrun --nproc-per-node 2 collectives.py          (python collectives.py is a world of one)
Papers:   Thakur, Rabenseifner & Gropp 2005, IJHPCA 19(1): all; Patarasuk & Yuan 2009, JPDC 69(2): the ring is optimal
Mirrors:  all_reduce, broadcast, reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single of torch.distributed
Left out: other operations than the sum, async_op, uneven gathers; a check that all ranks have one shape and dtype
"""

import argparse
import copy
import functools
import itertools
import os
import signal
import sys
import time
import timeit
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------------------------
# 1. Messages, (flat tensor, its receiver or sender in the group), and the idea: everything to rank 0, and back.


def start(group, send=None, receive=None):
    """Begin to send a message, to receive one, or both. -> works: until its wait(), what is sent must not change."""
    messages = ((dist.isend, send), (dist.irecv, receive))
    batch = [
        dist.P2POp(way, message[0], group=group, group_peer=message[1])
        for way, message in messages
        if message
    ]
    return dist.batch_isend_irecv(batch)  # both at once: of two that first send, both may wait


def exchange(group, send=None, receive=None):
    """The same, and wait for it."""
    for work in start(group, send, receive):
        work.wait()


@contextmanager
def flattened(tensor, group):
    """-> the elements side by side, as messages need them (a strided tensor has them back after), this rank, and N."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in process_group; only its members may call this"
        )
    gloo = f"{tensor.device.type}:gloo" in dist.get_backend_config(
        group
    )  # its messages lie in the host's memory
    x = tensor.detach().to("cpu" if gloo else tensor.device).contiguous().view(-1)
    yield x, dist.get_rank(group), dist.get_world_size(group)
    tensor.detach().copy_(x.view_as(tensor))  # does nothing where x is a view of it


def naive_all_reduce(tensor, process_group=None):
    """Replace `tensor`, of any shape, by its sum over the ranks. N = 4: 1 → 0 | 2 → 0 | 3 → 0 | 0 → 1 | …"""
    with flattened(tensor, process_group) as (x, rank, N):
        if rank:
            exchange(process_group, send=(x, 0))
            exchange(process_group, receive=(x, 0))
            return
        incoming = torch.empty_like(x)
        for other in range(1, N):
            exchange(process_group, receive=(incoming, other))
            x.add_(incoming)
        for other in range(1, N):
            exchange(process_group, send=(x, other))


# ---------------------------------------------------------------------------------------------------------------------
# 2. Few messages: a tree, where half of the ranks, then fewer, are at work; recursive doubling, where all are.


def tree_all_reduce(tensor, process_group=None):
    """Replace `tensor`, of any shape, by its sum over the ranks. N = 4: 1 → 0, 3 → 2 | 2 → 0 | 0 → 2 | 0 → 1, 2 → 3."""
    with flattened(tensor, process_group) as (x, rank, N):
        incoming = torch.empty_like(x)
        for distance in (2**k for k in range((N - 1).bit_length())):
            if rank % (2 * distance) == distance:
                exchange(process_group, send=(x, rank - distance))
            elif rank % (2 * distance) == 0 and rank + distance < N:
                exchange(process_group, receive=(incoming, rank + distance))
                x.add_(incoming)
        tree_broadcast(x, dist.get_global_rank(process_group or dist.group.WORLD, 0), process_group)


def tree_broadcast(tensor, src, process_group=None):
    """Replace `tensor`, of any shape, by that of `src`, a rank of the world. N = 4, src = 0: 0 → 2 | 0 → 1, 2 → 3."""
    with flattened(tensor, process_group) as (x, rank, N):
        number = (
            rank - dist.get_group_rank(process_group or dist.group.WORLD, src)
        ) % N  # as if src were rank 0
        for distance in (2**k for k in reversed(range((N - 1).bit_length()))):
            if number % (2 * distance) == distance:
                exchange(process_group, receive=(x, (rank - distance) % N))
            elif number % (2 * distance) == 0 and number + distance < N:
                exchange(process_group, send=(x, (rank + distance) % N))


def recursive_doubling_all_reduce(tensor, process_group=None):
    """Replace `tensor`, of any shape, by its sum over the ranks. N = 4: 0 ↔ 1, 2 ↔ 3 | 0 ↔ 2, 1 ↔ 3."""
    with flattened(tensor, process_group) as (x, rank, N):
        power, incoming = 1 << (N.bit_length() - 1), torch.empty_like(x)
        if rank >= power:  # folds in and out. N = 6: 4 → 0, 5 → 1 | as for 4 | 0 → 4, 1 → 5
            exchange(process_group, send=(x, rank - power))
            exchange(process_group, receive=(x, rank - power))
            return
        if rank + power < N:
            exchange(process_group, receive=(incoming, rank + power))
            x.add_(incoming)
        for distance in (2**k for k in range(power.bit_length() - 1)):
            exchange(process_group, send=(x, rank ^ distance), receive=(incoming, rank ^ distance))
            x.add_(incoming)  # as the other one does: a + b and b + a have the same bits
        if rank + power < N:
            exchange(process_group, send=(x, rank + power))


# ---------------------------------------------------------------------------------------------------------------------
# 3. Few bytes: a ring, around which each of N parts travels once to add up and once to be copied. All-to-all. Costs.


def ring(parts, steps, group, chunks=1):
    """In step s rank r sends parts[r - 1 - s] to rank r + 1; the parts are flat, none larger than the first. N = 4:

    s   rank 0  1  2  3                              s   rank 0  1  2  3
    0        3  0  1  2   its own                    3        0  1  2  3   the sum of all four,
    1        2  3  0  1   the sum of two             4        3  0  1  2   passed on
    2        1  2  3  0   the sum of three           5        2  3  0  1   passed on
    """
    rank, N = dist.get_rank(group), len(parts)

    def around(parts):
        scratch = torch.empty_like(parts[0])
        for step in steps:
            leaving, arriving = parts[(rank - 1 - step) % N], parts[(rank - 2 - step) % N]
            incoming = scratch[: len(arriving)] if step < N - 1 else arriving
            works = start(group, send=(leaving, (rank + 1) % N), receive=(incoming, (rank - 1) % N))
            yield  # while this travels, another chunk is added
            for work in works:
                work.wait()
            if step < N - 1:
                arriving.add_(incoming)

    for _ in itertools.zip_longest(
        *map(around, zip(*[part.tensor_split(chunks) for part in parts], strict=True))
    ):
        pass  # each in turn waits, adds, and sends on


def ring_all_reduce(tensor, process_group=None, *, chunks=1):
    """Replace `tensor`, of any shape, by its sum over the ranks."""
    with flattened(tensor, process_group) as (x, _, N):
        ring(
            x.tensor_split(N), range(2 * (N - 1)), process_group, chunks
        )  # sizes differ by 1 where N does not divide


def ring_reduce_scatter(tensor, process_group=None):
    """-> this rank's part of the sum over the ranks, along dimension 0, tensor.tensor_split(N)[rank]: half a ring."""
    total = torch.atleast_1d(tensor.detach()).clone(memory_format=torch.contiguous_format)
    with flattened(total, process_group) as (x, rank, N):
        parts = total.tensor_split(N)
        ring(x.split([part.numel() for part in parts]), range(N - 1), process_group)
    return parts[rank].clone()  # a view would keep all of them


def ring_all_gather(tensor, process_group=None):
    """-> all ranks' tensors, which have one shape, joined along dimension 0: the ring's other half."""
    whole = torch.cat(
        [torch.atleast_1d(tensor.detach())] * max(1, dist.get_world_size(process_group))
    )
    with flattened(whole, process_group) as (x, _, N):
        ring(x.tensor_split(N), range(N - 1, 2 * (N - 1)), process_group)
    return whole


def all_to_all(tensor, process_group=None):
    """-> part `rank` of each rank's tensor, cut in N along dimension 0. N = 4: r → r + 1 | r → r + 2 | r → r + 3."""
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    with (
        flattened(whole.clone(), process_group) as (x, rank, N),
        flattened(whole, process_group) as (y, _, _),
    ):
        if tensor.dim() == 0 or len(tensor) % N:
            raise ValueError(
                f"{tuple(tensor.shape)} must divide by {N} ranks along dimension 0; pad it to a multiple"
            )
        leaving, arriving = x.tensor_split(N), y.tensor_split(N)
        for to, source in (((rank + step) % N, (rank - step) % N) for step in range(1, N)):
            exchange(process_group, send=(leaving[to], to), receive=(arriving[source], source))
    return whole


def predict(algorithm, ranks, nbytes, latency, bandwidth):
    """-> seconds by the α–β model: nothing is added, and no two messages share a wire or a core. algorithm: a function
    of this file, or its name; latency: seconds; bandwidth: bytes per second; nbytes: of the whole tensor.
    """
    name, N, L = (
        getattr(algorithm, "__name__", algorithm).removesuffix("_all_reduce"),
        ranks,
        (ranks - 1).bit_length(),
    )
    of_all = {
        "naive": 2 * (N - 1),
        "tree": 2 * L,
        "tree_broadcast": L,
        "recursive_doubling": L + (N < 2**L),
    }
    of_a_part = {
        "ring": 2 * (N - 1),
        "ring_reduce_scatter": N - 1,
        "ring_all_gather": N - 1,
        "all_to_all": N - 1,
    }
    if N < 1 or name not in of_all | of_a_part:
        raise ValueError(
            f"{name} on {ranks} ranks: needs 1 or more, and one of {', '.join(of_all | of_a_part)}"
        )
    messages, size = (of_all[name], nbytes) if name in of_all else (of_a_part[name], nbytes / N)
    return messages * (latency + size / bandwidth)


# ---------------------------------------------------------------------------------------------------------------------
# Demo: trains with each all-reduce in the place of DDP's; then what each takes, measured, and predicted from ping-pong.


def main():
    demo = Demo(steps=8)
    N, L = demo.ranks, (demo.ranks - 1).bit_length()
    functions = {naive_all_reduce: ("Ψ(N-1)", N - 1), tree_all_reduce: ("Ψ⌈log₂N⌉", L)}
    functions |= {
        ring_all_reduce: ("2Ψ(N-1)/N", 2 * (N - 1) / N),
        recursive_doubling_all_reduce: ("Ψ⌈log₂N⌉", L),
    }
    status = max([train(demo, function, *sent) for function, sent in functions.items()])
    if N > 1:
        measure(
            demo,
            {function.__name__.removesuffix("_all_reduce"): function for function in functions},
        )
    return status


def train(demo, all_reduce, formula, times):
    exact = (
        demo.ranks <= 2 or all_reduce is naive_all_reduce
    )  # which adds in rank order, as one device
    model = demo.start(f"collectives {all_reduce.__name__.removesuffix('_all_reduce')}", exact)
    optimizer, parameters = torch.optim.AdamW(model.parameters(), lr=1e-3), list(model.parameters())

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        all_reduce(total := nn.utils.parameters_to_vector(p.grad for p in parameters))
        nn.utils.vector_to_parameters(total / demo.ranks, (p.grad for p in parameters))
        optimizer.step()
        return loss

    demo.train(step, lambda: ([parameter.grad for parameter in parameters], parameters))
    return demo.report(held(parameters, optimizer), formula, times * held_bytes(parameters))


def measure(demo, functions):
    N, rank, x, pair = (
        demo.ranks,
        demo.rank,
        torch.full((2**24,), 0.0, device=demo.device),
        dist.new_group([0, 1]),
    )
    ping_pong = functools.partial(
        lambda x: [tree_broadcast(x, src, pair) for src in (0, 1) if rank < 2]
    )
    alpha, large = (seconds(ping_pong, x[:n]) / 2 for n in (1, 2**22))
    bandwidth = 2**24 / (large - alpha)
    demo.show(
        f"\nping-pong   α = {1e6 * alpha:.0f} µs, by 4 bytes; 1/β = {bandwidth / 1e9:.2f} GB/s, by 16 MB"
    )
    demo.show(
        f"ms (α–β)    {''.join(f'{name:20}' for name in functions)}fastest (by α–β, as if ranks shared no cores)"
    )
    for size in (2**10, 2**14, 2**18, 2**22, 2**26):
        ms = {name: 1e3 * seconds(function, x[: size // 4]) for name, function in functions.items()}
        model = {name: 1e3 * predict(name, N, size, alpha, bandwidth) for name in functions}
        cells = "".join(f"{f'{ms[name]:.2f} ({model[name]:.2f})':20}" for name in functions)
        demo.show(
            f"  {size // 1024:5d} KB  {cells}{min(ms, key=ms.get)} ({min(model, key=model.get)})"
        )
    ms = [
        1e3 * seconds(functools.partial(ring_all_reduce, chunks=chunks), x)
        for chunks in (1, 2, 4, 8)
    ]
    pay = "they pay" if min(ms) < 0.9 * ms[0] else "no gain here"
    demo.show(
        f"chunks      1, 2, 4, 8 of 64 MB on the ring: {', '.join(f'{t:.0f}' for t in ms)} ms: {pay}"
    )


def seconds(
    function, tensor
):  # of a call, of which rank 0 never ends early; the best, as what else runs only adds
    calls = max(1, min(5, 2**22 // tensor.nbytes))
    rounds = timeit.repeat(
        lambda: (function(tensor), tensor[0].item()), dist.barrier, number=calls, repeat=3 * calls
    )
    return min(rounds) / calls


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
