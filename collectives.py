"""Collectives: all-reduce and its relatives, built from send and receive alone.

An all-reduce replaces the tensor of each rank with the sum over all ranks. This file has four
algorithms for it. In each step of the ring, every rank sends one part of its tensor to the next
rank. For N = 3, where a1 is part a of rank 1's tensor:

    step   rank 0 sends   rank 1 sends   rank 2 sends   and the next rank
    0      c0             a1             b2             adds it to its own part
    1      b2+b0          c0+c1          a1+a2          adds it: now the sum is complete
    2      a1+a2+a0       b2+b0+b1       c0+c1+c2       replaces its own part
    3      c0+c1+c2       a1+a2+a0       b2+b0+b1       replaces its own part

Cost, for N ranks that hold n bytes each, with L = ⌈log₂N⌉:

                          critical path                sent by the     the order in which the
                          messages       bytes         busiest rank    tensors of 4 ranks are added
    to rank 0 and back    2(N-1)         2(N-1)n       (N-1)n          ((0 + 1) + 2) + 3
    tree                  2L             2Ln           Ln              (0 + 1) + (2 + 3)
    ring                  2(N-1)         2n(N-1)/N     2n(N-1)/N       differs by part
    recursive doubling    L              Ln            Ln              (0 + 1) + (2 + 3)
                          (L + 1 messages and (L + 1)n bytes if N is not a power of two)

A message of m bytes takes α + mβ seconds: α is the latency and 1/β the bandwidth. The number of
messages matters for small tensors, and the number of bytes for large ones. No algorithm sends fewer
bytes than the ring. For N = 4 the ring is the fastest above 8α/β bytes. For N = 2 recursive
doubling is always faster, because it sends the same bytes in half the messages.

All ranks end with the same bits. A rounded sum depends on the order of its additions. The ring adds
part p of ranks p + 1, p + 2, …, p, in this order. For example, three ranks hold 1e8, 1 and -1e8 in
each of three float32 elements. Then the ring gives [0, 1, 0].

Read section 1 for the idea (9 minutes), to section 3 for the technique (20), and the rest to use it
as a library (26).

Run:      torchrun --nproc-per-node 2 collectives.py    (or: python collectives.py)
Papers:   Thakur, Rabenseifner & Gropp 2005, IJHPCA 19(1); Patarasuk & Yuan 2009, JPDC 69(2), which
          proves that the ring is optimal
Mirrors:  all_reduce, broadcast, reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single of
          torch.distributed
Left out: operations other than the sum, async_op, gathers of different sizes; a check that all
          ranks have the same shape and dtype
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import copy
import functools
import json
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

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import irecv, isend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: everything goes to rank 0, and back.


def start(group, *messages):
    """Start all messages at once. Return the works; call wait() on each.

    A message is (isend, tensor, destination) or (irecv, tensor, source). Ranks are numbered within
    the group. Do not change a tensor before its send is done.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensor, peer in messages
    ]
    return dist.batch_isend_irecv(operations)


def exchange(group, *messages):
    """Start all messages and wait for them.

    One call can send and receive at the same time. If two ranks waited for their sends to each
    other before they received, both could wait forever.
    """
    for work in start(group, *messages):
        work.wait()


def receive_and_add(total, source, group, *sends):
    """Add the tensor that arrives from `source` to `total`. `sends` are sent at the same time."""
    received = torch.empty_like(total)
    exchange(group, (irecv, received, source), *sends)
    total.add_(received)


@contextmanager
def flattened(tensor, group):
    """Return a flat, contiguous tensor of the same elements, this rank, and N.

    The flat tensor is a view if possible, and otherwise a copy. A copy is written back to `tensor`
    at the end of the `with` statement, even after a `return`.
    """
    # Messages must be contiguous. They are of bits in memory, which conj() does not change.
    x = tensor.detach().resolve_conj().resolve_neg().ravel()
    # gloo sends only from host memory. A group can have another backend for each device type.
    # get_backend_config raises a ValueError on a rank outside the group.
    if f"{x.device.type}:gloo" in dist.get_backend_config(group):
        x = x.cpu()
    rank = dist.get_rank(group)
    N = dist.get_world_size(group)
    yield x, rank, N
    if x.data_ptr() != tensor.data_ptr():  # x is a copy
        # After expand(), all elements along a dimension are one.
        elements = tuple(slice(None if stride else 1) for stride in tensor.stride())
        values = x.view_as(tensor)
        tensor.detach()[elements] = values[elements]


def naive_all_reduce(tensor, process_group=None):
    """Replace `tensor` with its sum over the ranks. N = 4: 1 → 0 | 2 → 0 | 3 → 0 | 0 → 1 | …"""
    with flattened(tensor, process_group) as (x, rank, N):
        if rank > 0:
            exchange(process_group, (isend, x, 0))
            exchange(process_group, (irecv, x, 0))
            return
        for other in range(1, N):
            receive_and_add(x, other, process_group)
        for other in range(1, N):
            exchange(process_group, (isend, x, other))


# --------------------------------------------------------------------------------------------------
# 2. Few steps: in a tree and in recursive doubling, several messages travel at the same time.


def parent_and_children(number, N):
    """Return the parent and the children of a rank in a tree with root 0.

    Clear the lowest 1 bit of a rank's number to get its parent: 6 = 0b110 has the parent 4 = 0b100.
    N = 4: 0 has the children 1 and 2, and 2 has the child 3.
    """
    children = [child for child in range(1, N) if child & (child - 1) == number]
    return number & (number - 1), children


def global_ranks(process_group):
    """Return the global rank of each rank of the group."""
    return dist.get_process_group_ranks(process_group or dist.group.WORLD)  # 2.6 refuses None


def tree_all_reduce(tensor, process_group=None):
    """Replace `tensor` with its sum over the ranks. N = 4: 1 → 0, 3 → 2 | 2 → 0 | and back."""
    with flattened(tensor, process_group) as (x, rank, N):
        parent, children = parent_and_children(rank, N)
        for child in children:
            receive_and_add(x, child, process_group)
        if rank > 0:
            exchange(process_group, (isend, x, parent))
        # The root is rank 0 of the group. tree_broadcast() takes its global rank.
        tree_broadcast(x, global_ranks(process_group)[0], process_group)


def tree_broadcast(tensor, src, process_group=None):
    """Replace `tensor` with that of the global rank `src`. N = 4, src = 0: 0 → 2 | 0 → 1, 2 → 3."""
    with flattened(tensor, process_group) as (x, rank, N):
        root = global_ranks(process_group).index(src)
        number = (rank - root) % N  # the root has number 0
        parent, children = parent_and_children(number, N)
        if number > 0:
            exchange(process_group, (irecv, x, (parent + root) % N))
        for child in reversed(children):  # the largest subtree first: it takes the longest
            exchange(process_group, (isend, x, (child + root) % N))


def recursive_doubling_all_reduce(tensor, process_group=None):
    """Replace `tensor` with its sum over the ranks. N = 4: 0 ↔ 1, 2 ↔ 3 | 0 ↔ 2, 1 ↔ 3.

    If N is not a power of two, only the first ranks do this. Each of the others first sends its
    tensor to one of them, and gets the sum at the end.
    N = 6: 4 → 0, 5 → 1 | as above | 0 → 4, 1 → 5.
    """
    with flattened(tensor, process_group) as (x, rank, N):
        power = 1 << (N.bit_length() - 1)  # the largest power of two up to N
        if rank >= power:
            exchange(process_group, (isend, x, rank - power))
            exchange(process_group, (irecv, x, rank - power))
            return
        if rank + power < N:
            receive_and_add(x, rank + power, process_group)
        distance = 1
        while distance < power:
            other = rank ^ distance
            # Both ranks get the same bits, because a + b is b + a.
            receive_and_add(x, other, process_group, (isend, x, other))
            distance *= 2
        if rank + power < N:
            exchange(process_group, (isend, x, rank + power))


# --------------------------------------------------------------------------------------------------
# 3. Few bytes: the ring. N parts travel around it, first to be added up, and then to be copied.


def reduce_scatter_parts(parts, rank, group):
    """Add up the contiguous `parts` over the ranks. At the end, only parts[rank] is the full sum.

    In each step, every part moves to the next rank, which adds its own. Part r starts at rank
    r + 1. After N - 1 steps it is at rank r.
    """
    N = len(parts)
    for step in range(N - 1):
        leaving = parts[(rank - 1 - step) % N]
        arriving = parts[(rank - 2 - step) % N]
        send = (isend, leaving, (rank + 1) % N)
        receive_and_add(arriving, (rank - 1) % N, group, send)


def reduce_scatter_in_chunks(parts, rank, group, chunks):
    """As reduce_scatter_parts(), but while one chunk is added, the next ones are in transit."""
    N = len(parts)
    for step in range(N - 1):
        leaving = parts[(rank - 1 - step) % N].tensor_split(chunks)
        arriving = parts[(rank - 2 - step) % N].tensor_split(chunks)
        additions = []  # (works, total, received)
        for chunk, total in zip(leaving, arriving, strict=True):
            received = torch.empty_like(total)
            send = (isend, chunk, (rank + 1) % N)
            works = start(group, send, (irecv, received, (rank - 1) % N))
            additions.append((works, total, received))
        for works, total, received in additions:
            for work in works:
                work.wait()
            total.add_(received)


def all_gather_parts(parts, rank, group):
    """Copy parts[r] of each rank r to all ranks. Part r starts at rank r."""
    N = len(parts)
    for step in range(N - 1):
        leaving = parts[(rank - step) % N]
        arriving = parts[(rank - 1 - step) % N]
        send = (isend, leaving, (rank + 1) % N)
        exchange(group, send, (irecv, arriving, (rank - 1) % N))


def ring_all_reduce(tensor, process_group=None, *, chunks=1):
    """Replace `tensor` with its sum over the ranks. With `chunks`, additions overlap messages."""
    with flattened(tensor, process_group) as (x, rank, N):
        parts = x.tensor_split(N)
        if chunks > 1:
            reduce_scatter_in_chunks(parts, rank, process_group, chunks)
        else:
            reduce_scatter_parts(parts, rank, process_group)
        all_gather_parts(parts, rank, process_group)


def ring_reduce_scatter(tensor, process_group=None):
    """Return total.tensor_split(N)[rank], where `total` is the sum over the ranks."""
    total = tensor.detach().clone()
    with flattened(total, process_group) as (x, rank, N):
        parts = x.view_as(total).tensor_split(N)  # along dimension 0, unlike ring_all_reduce()
        reduce_scatter_parts(parts, rank, process_group)
    return total.tensor_split(N)[rank].clone()  # a view would keep all of the parts


def ring_all_gather(tensor, process_group=None):
    """Return the tensors of all ranks, which have the same shape, joined along dimension 0."""
    own = torch.atleast_1d(tensor.detach())
    # The world size is -1 on a rank outside the group. flattened() then raises a ValueError.
    whole = torch.cat([own] * max(1, dist.get_world_size(process_group)))
    # Part `rank` of `whole` is this rank's own tensor. The other parts are overwritten.
    with flattened(whole, process_group) as (x, rank, N):
        all_gather_parts(x.tensor_split(N), rank, process_group)
    return whole


# --------------------------------------------------------------------------------------------------
# 4. The library: all-to-all, and the time of each algorithm.


def all_to_all(tensor, process_group=None):
    """Return the parts that the N ranks send to this rank, joined along dimension 0.

    Each tensor is cut into N equal parts along dimension 0. Part i goes to rank i. N = 4: rank r
    sends to r + 1 | r + 2 | r + 3.
    """
    whole = tensor.detach().clone()
    with flattened(whole, process_group) as (x, rank, N):
        if tensor.ndim == 0 or len(tensor) % N:
            raise ValueError(
                f"dimension 0 of {tuple(tensor.shape)} must be a multiple of {N} ranks; pad it"
            )
        arriving = x.tensor_split(N)  # the rank's own part stays where it is
        leaving = x.clone().tensor_split(N)
        for step in range(1, N):
            to = (rank + step) % N
            source = (rank - step) % N
            send = (isend, leaving[to], to)
            exchange(process_group, send, (irecv, arriving[source], source))
    return whole


def predict(algorithm, ranks, nbytes, latency, bandwidth):
    """Return the seconds by the α–β model: additions are free, and messages share no wire.

    algorithm: a function of this file, or its name; nbytes: the size of the whole tensor;
    latency: α in seconds; bandwidth: 1/β in bytes per second.
    """
    name = getattr(algorithm, "__name__", algorithm).removesuffix("_all_reduce")
    L = (ranks - 1).bit_length()
    whole = latency + nbytes / bandwidth  # seconds to send the whole tensor
    part = latency + nbytes / max(1, ranks) / bandwidth  # seconds to send one of N parts
    seconds = {
        "naive": 2 * (ranks - 1) * whole,
        "tree": 2 * L * whole,
        "tree_broadcast": L * whole,
        "recursive_doubling": (L if ranks == 2**L else L + 1) * whole,
        "ring": 2 * (ranks - 1) * part,
        "ring_reduce_scatter": (ranks - 1) * part,
        "ring_all_gather": (ranks - 1) * part,
        "all_to_all": (ranks - 1) * part,
    }
    if ranks < 1 or name not in seconds:
        raise ValueError(
            f"{name} on {ranks} ranks: expected 1 rank or more, and one of {', '.join(seconds)}"
        )
    return seconds[name]


# --------------------------------------------------------------------------------------------------
# Demo: train with each all-reduce in place of DDP's, then time each one.


def main():
    demo = Demo(__doc__, steps=8)
    N = demo.ranks
    L = (N - 1).bit_length()
    status = train(demo, naive_all_reduce, "Ψ(N-1)", N - 1)
    if demo.args.idea:
        return status
    statuses = [
        status,
        train(demo, tree_all_reduce, "Ψ⌈log₂N⌉", L),
        train(demo, ring_all_reduce, "2Ψ(N-1)/N", 2 * (N - 1) / N),
        train(demo, recursive_doubling_all_reduce, "Ψ⌈log₂N⌉", L),
    ]
    if N > 1:
        measure(demo)
    return max(statuses)


def train(demo, all_reduce, formula, multiple):
    """Train with `all_reduce`. The busiest rank sends `multiple` times the gradients' bytes."""
    # The naive all-reduce adds in rank order, like the one device that the demo compares with.
    bitwise = demo.ranks <= 2 or all_reduce is naive_all_reduce
    name = all_reduce.__name__.removesuffix("_all_reduce")
    model = demo.start(f"collectives {name}", bitwise)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = language_loss(model(demo.part(inputs)), demo.part(targets))
        loss.backward()
        gradients = [parameter.grad for parameter in parameters]
        total = nn.utils.parameters_to_vector(gradients)
        all_reduce(total)
        nn.utils.vector_to_parameters(total / demo.ranks, gradients)
        optimizer.step()
        return loss

    def whole():
        """Return gradients and parameters, which the demo compares with one device's."""
        return [parameter.grad for parameter in parameters], parameters

    demo.train(step, whole)
    return demo.report(held(parameters, optimizer), formula, multiple * held_bytes(parameters))


def measure(demo):
    """Time each all-reduce, and show the α–β model's prediction. A ping-pong measures α and β."""
    x = torch.zeros(2**24, device=demo.device)
    pair = dist.new_group([0, 1])

    def ping_pong(tensor):
        if demo.rank < 2:
            tree_broadcast(tensor, 0, pair)
            tree_broadcast(tensor, 1, pair)

    latency = seconds(ping_pong, x[:1]) / 2
    bandwidth = 2**24 / (seconds(ping_pong, x[: 2**22]) / 2 - latency)
    alpha = f"α = {1e6 * latency:.0f} µs, measured with 4 bytes"
    beta = f"1/β = {bandwidth / 1e9:.2f} GB/s, measured with 16 MB"
    demo.show(f"\nping-pong   {alpha}; {beta}")
    functions = {
        "naive": naive_all_reduce,
        "tree": tree_all_reduce,
        "ring": ring_all_reduce,
        "recursive_doubling": recursive_doubling_all_reduce,
    }
    header = "".join(f"{name:20}" for name in functions)
    demo.show(f"ms (α–β)    {header}fastest (predicted, for ranks that share no cores)")
    for size in (2**10, 2**14, 2**18, 2**22, 2**26):
        measured = {}
        predicted = {}
        cells = ""
        for name, function in functions.items():
            measured[name] = 1e3 * seconds(function, x[: size // 4])
            predicted[name] = 1e3 * predict(name, demo.ranks, size, latency, bandwidth)
            cells += f"{f'{measured[name]:.2f} ({predicted[name]:.2f})':20}"
        fastest = min(measured, key=measured.get)
        demo.show(f"  {size // 1024:5d} KB  {cells}{fastest} ({min(predicted, key=predicted.get)})")
    times = []
    for chunks in (1, 2, 4, 8):
        all_reduce = functools.partial(ring_all_reduce, chunks=chunks)
        times.append(1e3 * seconds(all_reduce, x))
    verdict = "chunks are faster" if min(times) < 0.9 * times[0] else "no gain"
    listed = ", ".join(f"{ms:.0f}" for ms in times)
    demo.show(f"chunks      64 MB on the ring in 1, 2, 4, 8 chunks: {listed} ms; {verdict}")


def seconds(function, tensor):
    """Return the shortest time of a call, because other programs can only make it longer."""
    calls = max(1, min(5, 2**22 // tensor.nbytes))

    def call():
        function(tensor)
        tensor[0].item()  # waits for a GPU

    # Each round begins with a barrier. Rank 0 takes part in every call, and prints its time. A
    # small tensor gets more rounds and more calls in each, because its times vary more.
    rounds = timeit.repeat(call, dist.barrier, number=calls, repeat=3 * calls)
    return min(rounds) / calls


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
