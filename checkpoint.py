"""Checkpoints: any number of ranks writes one, any other number reads it, and no kill loses one.

Each rank writes the pieces that it holds, and their places in the whole tensors. Each rank that
loads reads what overlaps with the pieces that it wants. So nothing in a checkpoint depends on how
many ranks wrote it, or on how they cut. A tensor w of 6 × 4 is saved by 2 ranks, 3 rows each:

    save("checkpoints", {"w": Piece(rows, [6, 4], [3 * rank, 0])})

and loaded by 3 ranks, columns 0 and 1, 2, 3:

    load("checkpoints", {"w": Piece(columns, [6, 4], [0, start])})            start is 0, 2 or 3

    files written                     rank 0's piece    rank 0 reads
    0.bin   w at (0, 3), (0, 4)       (0, 6), (0, 2)    (0, 3), (0, 2) from 0.bin     0 0 · ·
            ───────────────────                                                       0 0 · ·
    1.bin   w at (3, 6), (0, 4)                                                       0 0 · ·
                                                        (3, 6), (0, 2) from 1.bin     1 1 · ·
    index   where each piece lies,                                                    1 1 · ·
            checksums, `extra`                                                        1 1 · ·

The (start, stop) of each dimension make a box. ZeRO and FSDP hold ranges of flattened tensors; such
a range is a few boxes (flat_pieces). If several ranks hold the same box, the first writes it. The
checkpoint before stays until the new one is whole:

    each rank     tmp/RANK.bin, synced to the disk        all ranks: has everyone succeeded?
    rank 0        tmp/index; rename tmp to 7; replace `latest`, which says 6, by 7; remove 5

Bytes per rank, N ranks         held besides    written         read      (Ψ fp32 parameters, Adam)
    gathered into one file      12Ψ on rank 0   12Ψ by rank 0   12Ψ
    here, sharded               a box           12Ψ/N           12Ψ/N, and the rest of each box

Run:      torchrun --nproc-per-node 2 checkpoint.py          (python checkpoint.py runs as one rank)
Paper:    Wan et al. 2025, ByteCheckpoint, arXiv 2407.20143, section 3
Mirrors:  torch.distributed.checkpoint (DCP), Megatron-LM's dist_checkpointing
Left out: writing in the background; sharing out what all ranks hold; storage other than a directory
          that all ranks share. torch.distributed.checkpoint.format_utils converts DCP's format to a
          file that torch.load() reads, and load_whole() and save() go on from there.
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
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # an import after init_process_group keeps the group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: pieces are boxes of a whole tensor, and a rank reads where boxes overlap.


class Piece(NamedTuple):
    """A tensor that lies at `offset` in a whole of `shape`."""

    tensor: torch.Tensor
    shape: list  # of the whole
    offset: list  # an index in the whole for each dimension

    @property
    def whole(self):
        """What all pieces of a tensor have in common."""
        return [str(self.tensor.dtype).removeprefix("torch."), list(self.shape)]

    @property
    def box(self):
        """((start, stop) in the whole, for each dimension)"""
        sizes = self.tensor.shape
        return tuple((i, i + size) for i, size in zip(self.offset, sizes, strict=True))

    def at(self, box):
        """-> a view of the elements in `box`, which lies within this piece"""
        ranges = zip(box, self.offset, strict=True)
        return self.tensor[tuple(slice(i - offset, j - offset) for (i, j), offset in ranges)]


def overlap(a, b):
    """-> the box of what is in both boxes, or None"""
    both = tuple((max(i, k), min(j, l)) for (i, j), (k, l) in zip(a, b, strict=True))
    return both if all(i < j for i, j in both) else None


def flat_pieces(flat, shape, start, whole=None, offset=None):
    """-> the elements of `flat` as Pieces; at most 2n - 1 of a tensor of n dimensions.

    They lie in the flattened tensor from element `start` on. `flat` may begin before it (start < 0)
    and end behind it, as buckets do. The tensor may itself lie at `offset` in a `whole`.
    """
    flat = flat[max(0, -start) : max(0, math.prod(shape) - start)]
    start = max(0, start)
    sizes = [1, *shape]  # with a dimension in front, so that there is one
    rows = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]  # elements per index of d
    pieces = []
    while len(flat):
        d = 0  # the first dimension of which a row begins here and fits
        while start % rows[d] or rows[d] > len(flat):
            d += 1
        index = [start // row % size for row, size in zip(rows, sizes, strict=True)]
        count = min(len(flat) // rows[d], sizes[d] - index[d])
        n = count * rows[d]
        part = flat[:n].view([1] * d + [count] + sizes[d + 1 :])
        at = index[1:]
        if offset:
            at = [i + o for i, o in zip(at, offset, strict=True)]
        pieces.append(Piece(part[0], whole or shape, at))
        flat = flat[n:]
        start += n
    return pieces


def shard_pieces(shards):
    """-> {"weight/NAME" or "STATE/NAME": pieces} of parameters that are sharded flat.

    `shards` yields of each parameter its name, the whole shape, the number of the shard's first
    element, the shard, and its optimizer state, as shards() of zero.py and fsdp.py know them.
    """
    pieces = {}
    for name, shape, start, shard, state in shards:
        for kind, tensor in {"weight": shard.detach(), **state}.items():
            is_scalar = tensor.dim() == 0  # such as "step"
            pieces[f"{kind}/{name}"] = tensor if is_scalar else flat_pieces(tensor, shape, start)
    return pieces


# --------------------------------------------------------------------------------------------------
# 2. The real one: files in between. No kill, full disk or flipped bit makes wrong numbers of them.


def save(directory, pieces, extra=None, process_group=None):
    """Write a checkpoint into `directory`. All ranks of `process_group` call this, and share it.

    `pieces` has by name what this rank holds of a tensor: a Piece, a list of them, or a tensor, the
    whole. `extra` is what JSON can say; rank 0's is kept. An error on one rank, as a full disk, is
    raised on all, and the checkpoint before is still there. Two checkpoints are kept.
    """
    root = Path(directory)
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    mine = []  # (name, piece)

    def begin():
        mine.extend(named_pieces(pieces))
        if rank == 0:
            shutil.rmtree(root / "tmp", ignore_errors=True)  # of a save that was killed
            (root / "tmp").mkdir(parents=True)
        return [(name, piece.whole, piece.box) for name, piece in mine]

    def finish():
        if rank == 0:
            publish(root, json.dumps({"tensors": tensors, "extra": extra}))

    held = on_all_ranks(begin, process_group)
    tensors = agree(held)
    # A box that several ranks hold is written by the first of them.
    taken = {(name, box) for boxes in held[:rank] for name, _, box in boxes}
    todo = [(name, piece) for name, piece in mine if (name, piece.box) not in taken]
    path = root / "tmp" / f"{rank}.bin"
    for entries in on_all_ranks(lambda: write(path, todo), process_group):
        for name, entry in entries:
            tensors[name]["boxes"].append(entry)
    on_all_ranks(finish, process_group)


def agree(held):
    """-> {name: {"whole": …, "boxes": []}} of all ranks' [(name, whole, box)]"""
    tensors = {}
    for rank, boxes in enumerate(held):
        for name, whole, _ in boxes:
            first = tensors.setdefault(name, {"whole": whole, "boxes": []})["whole"]
            if whole != first:
                raise ValueError(f"{name} is {whole} on rank {rank}, but {first} on one before")
    return tensors


def load(directory, pieces, process_group=None):
    """Fill the tensors of `pieces`, as in save(), from the latest checkpoint. -> its `extra`

    All ranks call this. An error on one is raised on all, and some tensors may then be filled:
    ValueError if a tensor is not there as a whole or has another shape or dtype, OSError if a file
    is missing or damaged.
    """
    found = on_all_ranks(lambda: read(Path(directory), pieces), process_group)
    path, extra = found[0]
    if any(other != path for other, _ in found):
        raise OSError(f"ranks found different checkpoints in {directory}: they must share it")
    return extra


def named_pieces(pieces):
    """Yield (name, Piece) of what the caller of save() or load() passes."""
    for name, value in pieces.items():
        many = value if isinstance(value, list) else [value]
        if torch.is_tensor(value):
            many = [Piece(value, value.shape, [0] * value.dim())]
        for piece in many:
            if not isinstance(piece, Piece):
                kind = type(value).__name__
                raise ValueError(
                    f"{name}: expected a tensor, a Piece or a list of Pieces, got {kind}; "
                    "numbers and strings belong into extra"
                )
            check(name, piece)
            yield name, piece


def check(name, piece):
    dims = (piece.tensor.dim(), len(piece.shape), len(piece.offset))
    if len(set(dims)) > 1:
        raise ValueError(f"{name}: tensor, shape and offset have {dims} dimensions")
    for (start, stop), size in zip(piece.box, piece.shape, strict=True):
        if start < 0 or stop > size:
            raise ValueError(f"{name}: {piece.box} is not within a whole of {list(piece.shape)}")


def on_all_ranks(function, process_group):
    """-> what function() returned on each rank. An error on any rank is raised on all of them."""
    try:
        result = function()
    except Exception as error:
        result = error
    results = [result]
    if dist.is_initialized():
        results *= dist.get_world_size(process_group)
        dist.all_gather_object(results, result, group=process_group)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def write(path, pieces):
    """-> [(name, (file, position in bytes, checksum, box)), …]"""
    entries = []
    with open(path, "wb") as file:
        for name, piece in pieces:
            tensor = piece.tensor.detach().cpu().contiguous()
            data = tensor.view(-1).view(torch.uint8).numpy()
            entry = (path.name, file.tell(), zlib.crc32(data), piece.box)
            entries.append((name, entry))
            file.write(data)
    sync(path)
    return entries


def publish(root, index):
    """Make tmp the latest checkpoint. Syncs keep each rename behind what was written before it."""
    numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())
    number = str(max(numbers, default=0) + 1)
    checksum = zlib.crc32(index.encode())
    (root / "tmp" / "index").write_text(f"{checksum}\n{index}")
    (root / "next").write_text(number)
    sync(root / "tmp" / "index", root / "tmp", root / "next")
    os.rename(root / "tmp", root / number)
    sync(root)
    os.replace(root / "next", root / "latest")
    sync(root)
    for old in numbers[:-1]:
        shutil.rmtree(root / str(old), ignore_errors=True)


def sync(*paths):
    """Wait until files, or the names in directories, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def check_sum(path, data, checksum):
    if zlib.crc32(data) != checksum:
        raise OSError(f"{path} is damaged: its checksum is not the one that was written")


def open_latest(root):
    """-> the latest checkpoint's directory, {name: {"whole": …, "boxes": [write()'s]}}, extra"""
    path = root / (root / "latest").read_text()
    checksum, _, text = (path / "index").read_bytes().partition(b"\n")
    check_sum(path / "index", text, int(checksum) if checksum.isdigit() else None)
    index = json.loads(text)
    return path, index["tensors"], index["extra"]


@torch.no_grad()
def read(root, pieces):
    """Fill `pieces`. -> the directory that was read, its extra"""
    path, tensors, extra = open_latest(root)
    for name, piece in named_pieces(pieces):
        saved = tensors.get(name, {"whole": "nothing", "boxes": []})
        if saved["whole"] != piece.whole:
            raise ValueError(
                f"{path} has {saved['whole']} of {name}, but {piece.whole} is wanted: "
                "is it of another model?"
            )
        missing = piece._replace(tensor=torch.ones_like(piece.tensor, dtype=torch.bool))
        for file, position, checksum, box in saved["boxes"]:
            both = overlap(piece.box, box)
            if both is not None:  # of a scalar the box is ()
                part = read_box(path / file, position, checksum, box, piece)
                piece.at(both).copy_(part.at(both))
                missing.at(both).fill_(False)
        if missing.tensor.any():
            raise ValueError(
                f"{path}: no rank had all of {piece.box} of {name}, {piece.whole}, "
                "when it was saved"
            )
    return path, extra


def read_box(path, position, checksum, box, like):
    """-> the Piece in `box` of a file; `like` is another of the same whole"""
    sizes = [stop - start for start, stop in box]
    offset = [start for start, _ in box]
    nbytes = math.prod(sizes) * like.tensor.itemsize
    data = numpy.fromfile(path, "uint8", nbytes, offset=position)
    check_sum(path, data, checksum)
    tensor = torch.from_numpy(data).view(like.tensor.dtype)
    return Piece(tensor.view(sizes), like.shape, offset)


def load_whole(directory):
    """-> a state_dict of the latest checkpoint. Any process may call this alone, as rank 0 does to
    export a model; save(directory, state_dict) is the other way."""
    _, tensors, _ = open_latest(Path(directory))
    state_dict = {}
    for name, entry in tensors.items():
        dtype, shape = entry["whole"]
        state_dict[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    read(Path(directory), state_dict)
    return state_dict


# --------------------------------------------------------------------------------------------------
# Demo.


class Sharded:
    """ZeRO at its plainest: parameters side by side in `flat`; each rank of `group` trains 1/N."""

    def __init__(self, model, group=None):
        self.model = model
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        self.flat = F.pad(flat, (0, -len(flat) % self.world_size))
        self.gradients = torch.zeros_like(self.flat)
        start = 0
        for parameter in model.parameters():
            stop = start + parameter.numel()
            parameter.data = self.flat[start:stop].view_as(parameter)
            parameter.grad = self.gradients[start:stop].view_as(parameter)
            start = stop
        self.shard = self.flat.chunk(self.world_size)[self.rank]
        self.optimizer = torch.optim.AdamW([self.shard], lr=1e-3)
        self.optimizer.state[self.shard] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(self.shard),
            "exp_avg_sq": torch.zeros_like(self.shard),
        }

    def step(self, inputs, targets):
        """-> the mean loss of this rank's parts of the batch"""
        self.gradients.zero_()
        parts = dist.get_world_size()  # whatever the group: the same sums in the same order
        first = self.rank * parts // self.world_size
        end = (self.rank + 1) * parts // self.world_size
        losses = []
        for part in range(first, end):
            logits = self.model(inputs.chunk(parts)[part])
            loss = language_loss(logits, targets.chunk(parts)[part])
            loss.backward()
            losses.append(loss)
        received = torch.empty_like(self.gradients)
        dist.all_to_all_single(received, self.gradients, group=self.group)
        total = sum(received.chunk(self.world_size))  # in rank order: a reduce-scatter
        self.shard.grad = total / parts  # the mean of all parts
        self.optimizer.step()
        self.gather(self.flat, self.shard)
        # Where every rank is a world of its own, rank 0's loss is that of all parts.
        return torch.stack(losses).mean() if dist.get_rank() < self.world_size else None

    def gather(self, whole, shard):
        """All ranks' shards, by an all-to-all, which adds nothing."""
        dist.all_to_all_single(whole, shard.repeat(self.world_size), group=self.group)

    def pieces(self):
        """What this rank has of each parameter and its moments, to save or to load."""
        return shard_pieces(self.shards())

    def shards(self):
        state = self.optimizer.state[self.shard]
        start = self.rank * len(self.shard)
        for name, parameter in self.model.named_parameters():
            yield name, parameter.shape, start, self.shard, state
            start -= parameter.numel()


def main():
    demo = Demo()
    run = Sharded(demo.start("checkpoint", bitwise=True))
    stops = [-(-n * demo.args.steps // 3) for n in (1, 2)]
    directory = [tempfile.mkdtemp() if demo.rank == 0 else None]
    dist.broadcast_object_list(directory, 0)
    alone = [dist.new_group([rank]) for rank in range(demo.ranks)][demo.rank]

    def restart(done):
        """Save; forget everything; load, after the first stop on one rank, then on all of them."""
        nonlocal run
        if demo.rank < run.world_size:
            save(directory[0], run.pieces(), {"steps": done}, run.group)
        dist.barrier()
        run = Sharded(language_model().to(run.flat), alone if done == stops[0] else None)
        extra = load(directory[0], run.pieces(), run.group)
        run.gather(run.flat, run.shard)
        ranks = f"{run.world_size} rank{'s' * (run.world_size > 1)}"
        demo.show(f"saved       after {extra['steps']} steps; loaded on {ranks}")

    def whole():
        run.gather(run.gradients, run.shard.grad)
        gradients = [parameter.grad for parameter in run.model.parameters()]
        done = len(demo.losses)
        if done in stops:
            restart(done)
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
    """The bytes of the storages behind `tensors`. A shared storage counts once."""
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
        """Print the result (README, "What the lines mean"). Return 1 if a rank differs."""
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
