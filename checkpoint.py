"""Checkpoints: any number of ranks writes one, any other number reads it, and a kill at any moment leaves a whole one.

A checkpoint does not know how many ranks wrote it. Each rank writes the pieces that it holds, with the whole's name and
their places in it, and reads what overlaps with the pieces that it wants. All pieces are boxes, a range of indices in
each dimension; a range of the flattened whole, as ZeRO and FSDP have it, is a few boxes. A 4 × 6 matrix:

    written by 3 ranks, 8 elements each      in these boxes       read by 2 ranks, 3 columns each
    0 0 0 0 0 0                              ┌─────────┐          A A A   B B B
    0 0 1 1 1 1                              ├──┬──────┤          A A A   B B B
    1 1 1 1 2 2                              ├──┴───┬──┤          A A A   B B B
    2 2 2 2 2 2                              └──────┴──┘          A A A   B B B

Of what several ranks hold the first is written; only places are sent. The checkpoint before is there until the end:

    each rank     tmp/RANK.bin: bytes, synced to the disk      all ranks: are all well?
    rank 0        tmp/index: names, places, checksums; rename tmp to 7; replace `latest`, which says 6, by 7; remove 5

Bytes per rank, N of them:     held besides    written          read              (Ψ parameters in fp32, Adam)
    gathered into one file     12Ψ on rank 0   12Ψ by rank 0    12Ψ
    here, sharded              a box           12Ψ/N            12Ψ/N, and the rest of boxes that lie across

Run:      torchrun --nproc-per-node 2 checkpoint.py          (python checkpoint.py is a world of one)
Paper:    Wan et al. 2025, ByteCheckpoint, arXiv 2407.20143, §3
Mirrors:  torch.distributed.checkpoint (DCP), Megatron-LM's dist_checkpointing
Left out: writing in the background, sharing out what is replicated, storage that is no directory which all ranks share.
          DCP's own format, by way of a state_dict's file: torch.distributed.checkpoint.format_utils
"""

import argparse
import copy
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import namedtuple
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the world is joined: else, by torch.optim, it holds the group for ever
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------------------------
# 1. The idea: what is read is where boxes overlap. A box is a (start, stop) for each dimension of the whole.


class Piece(namedtuple("Piece", "tensor shape offset")):
    """A tensor that lies at `offset` in a whole of `shape`."""

    @property
    def box(self):
        return tuple((i, i + n) for i, n in zip(self.offset, self.tensor.shape, strict=True))

    def at(self, box):  # -> a view of the part of it that is in the box
        return self.tensor[
            tuple(slice(i - o, j - o) for (i, j), o in zip(box, self.offset, strict=True))
        ]


def overlap(a, b):
    """-> the boxes, one or none, of what is in both"""
    both = tuple((max(i, k), min(j, l)) for (i, j), (k, l) in zip(a, b, strict=True))
    return [both] if all(i < j for i, j in both) else []


def flat_pieces(flat, shape, start, whole=None, offset=None):
    """The elements in `flat`, from number `start` of a flattened tensor on, as Pieces: at most 2n - 1 in n dimensions.

    `flat` may begin before it (start < 0) and end behind it. It may lie at `offset` in a `whole`, as a slice of rows.
    """
    flat, start, pieces = flat[max(0, -start) : max(0, math.prod(shape) - start)], max(0, start), []
    sizes = [1, *shape]  # one dimension more: there may be none
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements at an index along d
    while len(flat):
        # Along the outermost dimension of which an index begins here and lies within `flat`: as far as that goes.
        d = next(d for d, row in enumerate(rows) if start % row == 0 and row <= len(flat))
        at = [start // row % n for row, n in zip(rows, sizes, strict=True)]
        n = min(len(flat) // rows[d], sizes[d] - at[d])
        part, flat = flat.split([n * rows[d], len(flat) - n * rows[d]])
        at = [i + o for i, o in zip(at[1:], offset or [0] * len(shape), strict=True)]
        pieces.append(Piece(part.view([1] * d + [n] + sizes[d + 1 :])[0], whole or shape, at))
        start += n * rows[d]
    return pieces


# ---------------------------------------------------------------------------------------------------------------------
# 2. The real one: files between, such that no kill, full disk or flipped bit makes wrong numbers of them.


def save(directory, pieces, extra=None, process_group=None):
    """Write a checkpoint into `directory`, which all ranks of `process_group` share. All of them must call this.

    `pieces`: by name what this rank has of a tensor, a Piece, a list of them, or all of it, a tensor. `extra`: what
    JSON can say; rank 0's is kept. What fails on one rank (a full disk) is raised on all, who still have the checkpoint
    before, and may go on. Two are kept.
    """
    root, rank = Path(directory), dist.get_rank(process_group) if dist.is_initialized() else 0
    mine, tensors, taken = [], {}, set()

    def begin():
        mine.extend(describe(pieces))
        if rank == 0:
            shutil.rmtree(root / "tmp", ignore_errors=True)  # of a save that was killed
            (root / "tmp").mkdir(parents=True)
        return [(name, whole, piece.box) for name, whole, piece in mine]

    for r, held in enumerate(on_all_ranks(begin, process_group)):
        for name, whole, box in held:
            if tensors.setdefault(name, {"whole": whole, "boxes": []})["whole"] != whole:
                raise ValueError(
                    f"{name} is {whole} on rank {r}, but {tensors[name]['whole']} on one before"
                )
            taken |= {(name, box)} if r < rank else set()  # that rank writes it
    todo = [(name, piece) for name, _, piece in mine if (name, piece.box) not in taken]
    for entries in on_all_ranks(lambda: write(root / "tmp" / f"{rank}.bin", todo), process_group):
        for name, entry in entries:
            tensors[name]["boxes"].append(entry)
    index = {"tensors": tensors, "extra": extra}
    on_all_ranks(lambda: publish(root, json.dumps(index)) if rank == 0 else None, process_group)


def load(directory, pieces, process_group=None):
    """Fill the tensors of `pieces`, which are as in save(), from the latest checkpoint in `directory`. -> its `extra`

    All ranks must call this. Raised on all, when some tensors may be filled and others not: ValueError where one is
    not there as a whole, or has another shape or dtype; OSError for a file that is missing or damaged.
    """
    read_from = on_all_ranks(lambda: read(Path(directory), pieces), process_group)
    if any(path != read_from[0][0] for path, _ in read_from):
        raise OSError(f"ranks found different checkpoints in {directory}: they must share it")
    return read_from[0][1]


def describe(pieces):
    """Yield (name, [dtype, shape] of the whole, Piece)."""
    for name, value in pieces.items():
        one = Piece(value, value.shape, [0] * value.dim()) if torch.is_tensor(value) else value
        many = [one] if isinstance(one, Piece) else one
        if not isinstance(many, list) or not all(isinstance(piece, Piece) for piece in many):
            kind = type(value).__name__
            raise ValueError(
                f"{name}: expected a tensor, a Piece or a list of Pieces, got {kind}; "
                "numbers and strings belong into extra"
            )
        for piece in many:
            dims = (piece.tensor.dim(), len(piece.shape), len(piece.offset))
            if len(set(dims)) > 1:
                raise ValueError(
                    f"{name}: tensor, shape and offset have {dims} dimensions; they must have as many"
                )
            if any(i < 0 or j > n for (i, j), n in zip(piece.box, piece.shape, strict=True)):
                raise ValueError(
                    f"{name}: {piece.box} is not within a whole of {list(piece.shape)}"
                )
            yield name, [str(piece.tensor.dtype).removeprefix("torch."), list(piece.shape)], piece


def on_all_ranks(function, process_group):
    """-> what function() returned on each rank. What it raised on any is raised on all, so that none waits in vain."""
    try:
        everyone = [function()]
    except Exception as error:
        everyone = [error]
    if dist.is_initialized():
        everyone *= dist.get_world_size(process_group)
        dist.all_gather_object(everyone, everyone[0], group=process_group)
    for error in everyone:
        if isinstance(error, Exception):
            raise error
    return everyone


def write(path, pieces):
    """-> [(name, (file, position in it in bytes, checksum, box)), …]"""
    entries = []
    with open(path, "wb") as file:
        for name, piece in pieces:
            data = piece.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            entries.append((name, (path.name, file.tell(), zlib.crc32(data), piece.box)))
            file.write(data)
    sync(path)
    return entries


def publish(root, index):
    """Make what is in tmp the latest checkpoint. A rename is done or is not; syncs keep it behind what is written."""
    numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())
    number = str(max(numbers, default=0) + 1)
    (root / "tmp" / "index").write_text(f"{zlib.crc32(index.encode())}\n{index}")
    (root / "next").write_text(number)
    sync(root / "tmp" / "index", root / "tmp", root / "next")
    os.rename(root / "tmp", root / number)
    sync(root)
    os.replace(root / "next", root / "latest")
    sync(root)
    for old in numbers[:-1]:
        shutil.rmtree(root / str(old), ignore_errors=True)


def sync(*paths):  # wait until files, or the names in directories, are on the disk
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def open_latest(root):
    """-> the directory, {name: {"whole": [dtype, shape], "boxes": entries of write()}}, and extra of a checkpoint"""
    path = root / (root / "latest").read_text()
    checksum, _, text = (path / "index").read_bytes().partition(b"\n")
    if checksum != str(zlib.crc32(text)).encode():
        raise OSError(
            f"{path / 'index'} is damaged: it has another checksum than when it was written"
        )
    return path, *json.loads(text).values()


@torch.no_grad()
def read(root, pieces):
    """-> the directory that was read, its extra"""
    path, tensors, extra = open_latest(root)
    for name, whole, piece in describe(pieces):
        there = tensors.get(name, {"whole": "nothing", "boxes": []})
        if there["whole"] != whole:
            raise ValueError(
                f"{path} has {there['whole']} of {name}, but {whole} is wanted: another model?"
            )
        missing = Piece(torch.ones(piece.tensor.shape, dtype=torch.bool), *whole[1:], piece.offset)
        for file, position, checksum, box in there["boxes"]:
            for both in overlap(piece.box, box):
                sizes = [j - i for i, j in box]
                data = numpy.fromfile(
                    path / file, "uint8", math.prod(sizes) * piece.tensor.itemsize, offset=position
                )
                if zlib.crc32(data) != checksum:
                    raise OSError(
                        f"{path / file} is damaged: {name} has another checksum than when it was written"
                    )
                tensor = torch.from_numpy(data).view(piece.tensor.dtype).view(sizes)
                piece.at(both).copy_(Piece(tensor, piece.shape, [i for i, _ in box]).at(both))
                missing.at(both).fill_(False)
        if missing.tensor.any():
            raise ValueError(
                f"{path}: no rank had all of {piece.box} of {name}, {whole}, when it was saved"
            )
    return path, extra


def load_whole(directory):
    """-> a state_dict of the latest checkpoint, in one process. The other way: save(directory, torch.load(file))."""
    wholes = {name: entry["whole"] for name, entry in open_latest(Path(directory))[1].items()}
    state_dict = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in wholes.items()
    }
    load(directory, state_dict)
    return state_dict


# ---------------------------------------------------------------------------------------------------------------------
# Demo.


class Sharded:
    """zero.py's cut: parameters side by side in `flat`, 1/N of it trained by each rank of `group`."""

    def __init__(self, model, group=None):
        self.model, self.group, self.rank, self.N = (
            model,
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        self.flat = F.pad(flat, (0, -len(flat) % self.N))
        self.gradients, start = torch.zeros_like(self.flat), 0
        for parameter in model.parameters():
            own, start = slice(start, start + parameter.numel()), start + parameter.numel()
            parameter.data, parameter.grad = (
                x[own].view_as(parameter) for x in (self.flat, self.gradients)
            )
        self.shard = self.flat.chunk(self.N)[self.rank]
        self.optimizer = torch.optim.AdamW([self.shard], lr=1e-3)
        moments = {name: torch.zeros_like(self.shard) for name in ("exp_avg", "exp_avg_sq")}
        self.optimizer.state[self.shard] = {"step": torch.tensor(0.0), **moments}

    def step(self, inputs, targets):
        self.gradients.zero_()
        losses, parts = (
            [],
            dist.get_world_size(),
        )  # each takes its share of them: one order of addition, whatever N
        for part in range(self.rank * parts // self.N, (self.rank + 1) * parts // self.N):
            losses.append(
                language_loss(self.model(inputs.chunk(parts)[part]), targets.chunk(parts)[part])
            )
            losses[-1].backward()
        received = torch.empty_like(self.gradients)
        dist.all_to_all_single(received, self.gradients, group=self.group)
        self.shard.grad = sum(received.chunk(self.N)) / parts  # in rank order: a reduce-scatter
        self.optimizer.step()
        dist.all_to_all_single(
            self.flat, self.shard.repeat(self.N), group=self.group
        )  # an all-gather
        return (
            torch.stack(losses).mean() if dist.get_rank() < self.N else None
        )  # of the same ones, one

    def pieces(self):  # what this rank has of each parameter and its moments, to be saved or loaded
        flats = {"weight": self.shard, **self.optimizer.state[self.shard]}
        pieces, start = (
            {"step": flats.pop("step")},
            self.rank * len(self.shard),
        )  # of the shard, in a parameter
        for name, parameter in self.model.named_parameters():
            pieces |= {
                f"{kind}/{name}": flat_pieces(flat, parameter.shape, start)
                for kind, flat in flats.items()
            }
            start -= parameter.numel()
        return pieces


def main():
    demo = Demo()
    run, stops = (
        Sharded(demo.start("checkpoint", bitwise=True)),
        [-(-n * demo.args.steps // 3) for n in (1, 2)],
    )
    directory = [tempfile.mkdtemp() if demo.rank == 0 else None]
    dist.broadcast_object_list(directory, 0)

    def whole():
        nonlocal run
        dist.all_to_all_single(run.gradients, run.shard.grad.repeat(run.N), group=run.group)
        gradients = [parameter.grad for parameter in run.model.parameters()]
        done = len(demo.losses)
        if done in stops:  # stop; start anew, with other weights and no state; go on
            if demo.rank < run.N:
                save(directory[0], run.pieces(), {"steps": done}, run.group)
            dist.barrier()
            alone = [dist.new_group([rank]) for rank in range(demo.ranks)][
                demo.rank
            ]  # each rank a world of its own
            run = Sharded(language_model().to(run.flat), alone if done == stops[0] else None)
            extra = load(directory[0], run.pieces(), run.group)
            dist.all_to_all_single(run.flat, run.shard.repeat(run.N), group=run.group)
            demo.show(
                f"saved       after {extra['steps']} steps; loaded on {run.N} rank{'s' * (run.N > 1)}"
            )
        return gradients, run.model.parameters()

    demo.train(lambda *batch: run.step(*batch), whole)  # noqa: PLW0108  the run changes
    if demo.rank == 0:
        shutil.rmtree(directory[0])
    sent = 2 * held_bytes(demo.model.parameters()) * (demo.ranks - 1) / demo.ranks
    return demo.report(held([*run.model.parameters(), run.shard], run.optimizer), "2Ψ(N-1)/N", sent)


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
