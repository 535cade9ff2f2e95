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
import functools
import json
import math
import os
import shutil
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
