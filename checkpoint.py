"""Checkpoints: saved by any number of ranks, loaded by any other number, and safe from crashes.

Each rank writes the pieces of tensors that it holds. An index says where each piece lies in its
whole tensor. To load, each rank reads the saved pieces that overlap with its own. Here two ranks
save three rows each of a 6 × 4 tensor w:

    save("checkpoints", {"w": Piece(rows, [6, 4], [3 * rank, 0])})

Three ranks load its columns. Rank 0 loads the first two:

    load("checkpoints", {"w": Piece(columns, [6, 4], [0, 0])})

A box is (start, stop) in each dimension of the whole tensor. Rank 0 finds:

    file          box of w in the file    overlap with rank 0's box    rank 0's piece, by file
    0.bin         (0, 3), (0, 4)          (0, 3), (0, 2)               0 0 · ·
                                                                       0 0 · ·
                                                                       0 0 · ·
    1.bin         (3, 6), (0, 4)          (3, 6), (0, 2)               1 1 · ·
                                                                       1 1 · ·
                                                                       1 1 · ·
    index         dtypes, shapes, boxes, checksums, and `extra` of the caller

The previous checkpoint stays until the new one is complete. Here it is 6:

    each rank     writes tmp/RANK.bin, waits until it is on the disk, and tells the others
    rank 0        writes tmp/index, renames tmp to 7, writes 7 into the file `latest`, removes 5

Bytes per rank, for Ψ fp32 parameters with Adam on N ranks:

                              extra memory          written         read
    gathered into one file    24Ψ on rank 0         12Ψ by rank 0   12Ψ, all of it in memory
    here, sharded             one box at a time     12Ψ/N           12Ψ/N, plus the rest of each box
    sharded, in background    12Ψ/N: copies         12Ψ/N

A load also holds one byte per element of the rank's pieces of one tensor: what is missing yet.

Read section 1 for the idea (9 minutes), to section 4 for the technique (27), and the rest to use
it as a library (44).

Run:      torchrun --nproc-per-node 2 checkpoint.py          (python checkpoint.py runs as one rank)
Paper:    Wan et al. 2025, ByteCheckpoint, arXiv 2407.20143, section 3
Mirrors:  torch.distributed.checkpoint (DCP), Megatron-LM's dist_checkpointing
Left out: sharing out the writing of tensors that all ranks hold; storage other than a shared
          directory; DCP's files (format_utils.dcp_to_torch_save converts them)
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy"]
# ///

import argparse
import atexit
import base64
import copy
import io
import itertools
import json
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist

# Its functions have `group=group.WORLD` as defaults, so an import after init_process_group() would
# keep the group alive.
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# 1. The idea: a piece knows where it lies in its whole tensor, so other ranks can cut differently.


class Piece(NamedTuple):
    """A tensor that is a box of a whole tensor."""

    tensor: torch.Tensor
    shape: list  # of the whole tensor
    offset: list  # index of the piece's first element in the whole tensor

    @property
    def box(self):
        sizes = self.tensor.shape
        return tuple((i, i + size) for i, size in zip(self.offset, sizes, strict=True))

    def at(self, box):
        """Return a view of the elements in `box`, which lies within this piece."""
        ranges = zip(box, self.offset, strict=True)
        slices = [slice(start - i, stop - i) for (start, stop), i in ranges]
        return self.tensor[tuple(slices)]


def gather_and_save(path, pieces, process_group=None):
    """Write one file of whole tensors. `pieces` is as in save() below."""
    mine = []
    for name, piece in named_pieces(pieces):
        # A view would be sent with all the memory behind it, and a tensor of a GPU to that GPU.
        tensor = piece.tensor.cpu().clone()
        mine.append((name, piece._replace(tensor=tensor)))
    is_first = dist.get_rank(process_group) == 0
    everyone = [None] * dist.get_world_size(process_group) if is_first else None
    dist.gather_object(mine, everyone, group=process_group, group_dst=0)
    if is_first:
        wholes = {}
        for name, piece in itertools.chain(*everyone):
            whole = wholes.setdefault(name, piece.tensor.new_empty(piece.shape))
            part = whole_piece(whole).at(piece.box)
            part.copy_(piece.tensor)
        torch.save(wholes, path)
    dist.barrier(process_group)  # the file is complete when a rank returns


def load_and_cut(path, pieces):
    wholes = torch.load(path, map_location="cpu")
    for name, piece in named_pieces(pieces):
        part = whole_piece(wholes[name]).at(piece.box)
        piece.tensor.copy_(part)


def named_pieces(pieces):
    """Yield (name, Piece) for each piece in the `pieces` argument of save() or load()."""
    for name, value in pieces.items():
        values = value if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, (torch.Tensor, Piece)) or not isinstance(name, str):
                raise ValueError(
                    f"{name!r} is a {type(each).__name__}: names must be strings, and have tensors "
                    "or lists of Pieces; put numbers and strings into extra"
                )
            yield name, each if isinstance(each, Piece) else whole_piece(each)


def whole_piece(tensor):
    return Piece(tensor, tensor.shape, [0] * tensor.dim())


# --------------------------------------------------------------------------------------------------
# 2. Boxes: a rank reads only where the saved pieces overlap with its own.


def overlap(a, b):
    """Return the box of the elements that are in both boxes. It may be empty."""
    box = []
    for (start_a, stop_a), (start_b, stop_b) in zip(a, b, strict=True):
        start = max(start_a, start_b)
        stop = min(stop_a, stop_b)
        box.append((start, max(start, stop)))
    return box


# --------------------------------------------------------------------------------------------------
# 3. Save: each rank writes a file. Rank 0 writes the index, and then the checkpoint is published.


def save_now(root, pieces, extra, process_group):
    """Write a checkpoint into the directory `root`. save() of section 5 has the details."""
    rank, mine, index = share_out(root, pieces, extra, process_group)
    index["files"] = on_all_ranks(process_group, write, root / "tmp" / f"{rank}.bin", mine)
    on_all_ranks(process_group, publish, root, rank, index)


def share_out(root, pieces, extra, process_group):
    """Return this rank, the pieces that it writes, and the index without its "files"."""
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    if rank == 0:
        # Left by a save that was killed. on_all_ranks() below is a barrier: no rank writes before.
        shutil.rmtree(root / "tmp", ignore_errors=True)
    wholes = {}  # {name: dtype and shape of the whole tensor}
    holders = {}  # {(name, box): ranks that hold it}; the first of them writes it
    descriptions = on_all_ranks(process_group, describe, pieces, extra)
    for holder, description in enumerate(descriptions):
        for name, whole, box in description:
            check_piece(name, whole, box, wholes.setdefault(name, whole))
            holders.setdefault((name, box), []).append(holder)
    check_copies(pieces, holders, process_group)
    held = named_pieces(pieces)
    mine = [(name, piece) for name, piece in held if holders[name, piece.box][0] == rank]
    return rank, mine, {"wholes": wholes, "extra": pack(extra)}


def on_all_ranks(process_group, function, *args):
    """Return the results of function(*args), by rank. If one rank fails, all raise its error."""
    try:
        result = function(*args)
    except Exception as error:
        result = picklable(error)
    results = [result]
    if dist.is_initialized():
        world_size = dist.get_world_size(process_group)
        if world_size < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in process_group")
        results *= world_size
        dist.all_gather_object(results, result, group=process_group)
    # From the last: in a background save, rank 0 waits for the others' notes, and its error may
    # only be that one of them is bad.
    for result in reversed(results):
        if isinstance(result, Exception):
            raise result
    return results


def picklable(error):
    """Return the error, or one with its text if it cannot be sent: the others would wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def describe(pieces, extra):
    """Return [(name, dtype and shape of the whole, box) for each piece]."""
    check_extra(extra)
    return [(name, dtype_and_shape(piece), piece.box) for name, piece in named_pieces(pieces)]


def pack(extra):
    """Return `extra` as text. JSON would turn integer keys into strings, and tuples into lists."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def unpack(text):
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def dtype_and_shape(piece):
    dtype = str(piece.tensor.dtype)
    return [dtype.removeprefix("torch."), list(piece.shape)]


def write(path, pieces):
    """Write pieces to a file. Return {name: [(position in bytes, checksum, box), …]}."""
    path.parent.mkdir(parents=True, exist_ok=True)  # it may exist: another rank made it
    boxes = {}
    with open(path, "wb") as file:
        for name, piece in pieces:
            data = bytes_of(piece.tensor)
            entry = (file.tell(), zlib.crc32(data), piece.box)
            boxes.setdefault(name, []).append(entry)
            file.write(data)
    sync(path)
    return boxes


def bytes_of(tensor):
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): one element may have another stride than 1, even if it is contiguous.
    return tensor.as_strided([tensor.numel()], [1]).view(torch.uint8).numpy()


def publish(root, rank, index):
    """On rank 0, make tmp the latest checkpoint.

    After a power failure, a new name must not be on the disk without its content. So a sync comes
    before each rename.
    """
    if rank != 0:
        return
    names = os.listdir(root)
    numbers = sorted(int(name) for name in names if name.isdigit())
    number = str(max(numbers, default=0) + 1)
    folder = root / "tmp"
    text = json.dumps(index)
    checksum = zlib.crc32(text.encode())
    (folder / "index").write_text(f"{checksum}\n{text}")
    (root / "next").write_text(number)
    sync(folder / "index", folder, root / "next")
    os.rename(folder, root / number)
    sync(root)
    os.replace(root / "next", root / "latest")
    sync(root)
    for old in numbers[:-1]:  # the previous checkpoint stays
        shutil.rmtree(root / str(old), ignore_errors=True)


def sync(*paths):
    """Wait until the contents of files, and the names in directories, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# 4. Load: each rank reads the boxes that overlap with its pieces.


def load(directory, pieces, process_group=None):
    """Fill the tensors of `pieces` from the latest checkpoint. Return the `extra` of save().

    All ranks of `process_group` call this. If one rank fails, all raise its error: a ValueError if
    the checkpoint lacks elements or has another dtype or shape, an OSError if a file is missing or
    damaged. Some tensors may be filled already.
    """
    results = on_all_ranks(process_group, read, directory, pieces)
    paths, extras = zip(*results, strict=True)
    if len({*paths}) > 1:
        raise OSError(f"ranks found different checkpoints in {directory}, which they must share")
    return extras[0]


@torch.no_grad()
def read(directory, pieces):
    """Fill `pieces`. Return (directory of the checkpoint, its `extra`)."""
    path, index = open_latest(directory)
    held = {}  # {name: this rank's pieces of it}
    for name, piece in named_pieces(pieces):
        whole = dtype_and_shape(piece)
        check_piece(f"{path}: {name}", whole, piece.box, index["wholes"].get(name))
        held.setdefault(name, []).append(piece)
    for name, mine in held.items():
        missing = []  # for each piece: True where no saved box has filled it yet
        for piece in mine:
            mask = torch.ones_like(piece.tensor, dtype=torch.bool)
            missing.append(piece._replace(tensor=mask))
        for rank, boxes in enumerate(index["files"]):
            for position, checksum, box in boxes.get(name, []):
                fill(mine, missing, path / f"{rank}.bin", position, checksum, box)
        check_is_whole(f"{path} lacks elements of {name}", missing)
    return path, index["extra"]


def fill(pieces, missing, path, position, checksum, box):
    """Copy a saved box into the pieces that overlap with it. It is read once, if there are any."""
    saved = None
    for piece, is_missing in zip(pieces, missing, strict=True):
        common = overlap(piece.box, box)
        part = piece.at(common)
        if part.numel():
            saved = saved or read_box(path, position, checksum, box, piece)
            part.copy_(saved.at(common))
            is_missing.at(common).fill_(False)


def read_box(path, position, checksum, box, like):
    """Return the saved Piece. `like` is another piece of the same whole tensor."""
    sizes = [stop - start for start, stop in box]
    offset = [start for start, _ in box]
    nbytes = math.prod(sizes) * like.tensor.itemsize
    data = numpy.fromfile(path, "uint8", nbytes, offset=position)
    check_intact(path, zlib.crc32(data) == checksum)
    tensor = torch.from_numpy(data).view(like.tensor.dtype)
    return Piece(tensor.view(sizes), like.shape, offset)


def open_latest(directory):
    """Return (directory of the latest checkpoint, its index, which is a dict as in save())."""
    number = Path(directory, "latest").read_text()
    path = Path(directory, number)
    checksum, _, text = (path / "index").read_bytes().partition(b"\n")
    check_intact(path / "index", b"%d" % zlib.crc32(text) == checksum)
    index = json.loads(text)
    index["extra"] = unpack(index["extra"])
    return path, index


# --------------------------------------------------------------------------------------------------
# 5. The library: saves in the background, checks, state_dicts, and the pieces of a flattened tensor
#    of ZeRO or FSDP.


def save(directory, pieces, extra=None, process_group=None, background=False):
    """Write a checkpoint into the shared `directory`. All ranks of `process_group` call this.

    `pieces` maps the name of each tensor to the part that this rank holds: a Piece, a list of
    Pieces, or the whole tensor. Ranks that hold the same box must hold the same values. `extra` is
    rank 0's: any nesting of dicts, lists, tuples, numbers, strings and tensors. If one rank fails,
    for example because its disk is full, all raise its error. The last two checkpoints are kept.

    With `background`, return a BackgroundSave as soon as the pieces are copied to host memory. A
    thread then writes the copies. Its wait(), the next save(), and the end of the process wait for
    it. The first two raise its errors. The end only prints this rank's error, and the exit status
    does not tell, so call wait() after the last save.
    """
    root = Path(directory).absolute()
    if root in unfinished:
        unfinished[root].wait()
    if background:
        return BackgroundSave(root, pieces, extra, process_group)
    return save_now(root, pieces, extra, process_group)


unfinished = {}  # {directory: its BackgroundSave}


class BackgroundSave:
    """A checkpoint that a thread writes. Threads use no collectives: training uses them meanwhile.

    So each rank tells rank 0 by a note, a file, that its part is on the disk.
    """

    def __init__(self, root, pieces, extra, process_group):
        self.root = root
        self.process_group = process_group
        rank, mine, index = share_out(root, pieces, extra, process_group)
        world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        copies = []
        thread = ThreadPoolExecutor(1)  # the end of the process waits for it
        # All ranks learn of an error here. In the thread, rank 0 would wait for the note in vain.
        on_all_ranks(process_group, self.prepare, rank, mine, copies, thread)
        save = thread.submit(self.save, rank, world_size, copies, index)
        self.result = save.result  # a method: waits, and raises the thread's error
        unfinished[root] = self

    def prepare(self, rank, pieces, copies, thread):
        """Make this rank's note, while there is space for it. Append host copies to `copies`."""
        thread.submit(int)  # does nothing, but starts the thread, which may fail, too
        folder = self.root / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rank}.tmp").touch()
        for name, piece in pieces:
            copies.append((name, piece._replace(tensor=host_copy(piece.tensor))))

    def save(self, rank, world_size, pieces, index):
        folder = self.root / "tmp"
        note = folder / f"{rank}.tmp"
        try:
            boxes = write(folder / f"{rank}.bin", pieces)
            note.write_text(json.dumps(boxes))
        finally:
            note.rename(folder / f"{rank}.json")
        if rank == 0:
            notes = [folder / f"{writer}.json" for writer in range(world_size)]
            publish(self.root, rank, index | {"files": list(map(read_note, notes))})

    def wait(self):
        """Wait until the checkpoint is complete. All ranks call this. If one failed, all raise."""
        unfinished.pop(self.root, None)
        try:
            on_all_ranks(self.process_group, self.result)
        except Exception as error:
            raise OSError(f"the checkpoint in {self.root} was not saved: {error}") from error


@atexit.register  # runs after the threads have ended
def print_errors():
    for root, unfinished_save in unfinished.items():
        try:
            unfinished_save.result()
        except Exception as error:
            print(f"error: the checkpoint in {root} was not saved: {error}", file=sys.stderr)


def host_copy(tensor):
    """Copy a tensor, because training overwrites it while the thread writes the copy."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


def read_note(path, patience=600):
    """Wait for a rank's note, at most `patience` seconds. Return what its write() returned."""
    deadline = time.monotonic() + patience
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    text = path.read_text()
    if not text.endswith("}"):
        raise OSError(f"rank {path.stem} could not write its part")
    return json.loads(text)


def check_intact(path, is_intact):
    if not is_intact:
        raise OSError(f"{path} is damaged: its checksum is wrong")


def check_is_whole(what, missing):
    for piece in missing:
        if piece.tensor.any():
            raise ValueError(f"{what}: {piece.box} was not saved whole")


def check_extra(extra):
    try:
        unpack(pack(extra))
    except Exception as error:
        raise ValueError(
            "extra must be made of dicts, lists, tuples, sets, numbers, strings and tensors "
            f"(torch.from_numpy makes one of an array): {error}"
        ) from error


def checksums_of_copies(pieces, holders):
    """Return {(name, box): checksum} of the boxes that other ranks hold, too."""
    return {
        (name, piece.box): zlib.crc32(bytes_of(piece.tensor))
        for name, piece in named_pieces(pieces)
        if len(holders[name, piece.box]) > 1
    }


def check_copies(pieces, holders, process_group):
    """Raise ValueError on all ranks if ranks hold different values of one box."""
    everyone = on_all_ranks(process_group, checksums_of_copies, pieces, holders)
    for key, ranks in holders.items():
        if len({everyone[rank].get(key) for rank in ranks}) > 1:
            raise ValueError(
                f"ranks {ranks} hold different values of {key}, of which one would be saved: give "
                f"each its own name, such as {key[0]!r} + str(rank), or broadcast rank 0's before"
            )


def check_piece(name, whole, box, expected):
    """Raise an error if `box` of a tensor of this dtype and shape is no piece of the expected."""
    ranges = zip(box, whole[1], strict=True)
    fits = all(start >= 0 and stop <= size for (start, stop), size in ranges)
    if not fits or whole != expected:
        raise ValueError(f"{name}: {box} of {whole} is no piece of {expected}: another model?")


def load_whole(directory):
    """Return the latest checkpoint as a state_dict of whole tensors, in one process."""
    _, index = open_latest(directory)
    state_dict = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in index["wholes"].items()
    }
    read(directory, state_dict)
    return state_dict


def flat_pieces(flat, shape, start, whole_shape=None, offset=None):
    """Cut a range of a flattened tensor of `shape` into Pieces. flat[0] is element `start` of it.

    Elements of `flat` before the tensor (start < 0) and after it, as in buckets, are left out. The
    tensor may itself be a box, at `offset` in a whole tensor of `whole_shape`.
    In n dimensions, a range needs at most 2n - 1 pieces. For example, elements 2 to 10 of 3 × 4:

        · · 0 0
        1 1 1 1
        2 2 2 ·
    """
    stop = max(0, math.prod(shape) - start)
    flat = flat.view(-1)[max(0, -start) : stop]
    if 0 in shape:
        return [Piece(flat.view(shape), whole_shape or shape, offset or [0] * len(shape))]
    start = max(0, start)
    sizes = [1, *shape]  # a leading dimension, because a scalar has none
    # A row of dimension d fixes the indices up to d, and spans all dimensions after d.
    row_sizes = [math.prod(shape[d:]) for d in range(len(sizes))]  # elements in a row of d
    pieces = []
    while len(flat):
        # Take rows of the outermost dimension whose next row is whole in `flat`.
        d = 0
        while start % row_sizes[d] or row_sizes[d] > len(flat):
            d += 1
        index = numpy.unravel_index(start, sizes)
        row_size = row_sizes[d]
        rows = min(len(flat) // row_size, sizes[d] - index[d])
        size = rows * row_size
        tensor = flat[:size].view([1] * d + [rows, *shape[d:]])[0]
        place = numpy.add(index[1:], offset or 0).tolist()
        pieces.append(Piece(tensor, whole_shape or shape, place))
        flat = flat[size:]
        start += size
    return pieces


def shard_pieces(shards):
    """Return pieces "weight/NAME" and "STATE/NAME", such as "exp_avg/NAME", of flat shards.

    `shards` is as fsdp.shards() yields it: for each parameter its name, its whole shape, `start`,
    the shard, and the shard's optimizer state. shard[0] is element `start` of the flattened
    parameter. Zero1.shards() yields the same.
    """
    pieces = {}
    for name, shape, start, shard, state in shards:
        for kind, tensor in {"weight": shard.detach(), **state}.items():
            is_scalar = tensor.dim() == 0  # such as "step": all ranks hold it
            pieces[f"{kind}/{name}"] = tensor if is_scalar else flat_pieces(tensor, shape, start)
    return pieces


# --------------------------------------------------------------------------------------------------
# Demo: sharded training that is saved twice, and loaded on one rank, then on all ranks.


class Sharded:
    """A minimal ZeRO: parameters are views of `flat`, and each rank of `group` updates a shard."""

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
        """Return the mean loss of this rank's parts of the batch."""
        self.gradients.zero_()
        # A group of any size adds the same parts in the same order, so its sums are the same.
        parts = dist.get_world_size()
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
        total = sum(received.chunk(self.world_size))  # a reduce-scatter that adds in rank order
        self.shard.grad = total / parts  # the mean of all parts
        self.optimizer.step()
        self.gather(self.flat, self.shard)
        # A rank alone in its group has the loss of the whole batch. Then only rank 0 returns it.
        return torch.stack(losses).mean() if dist.get_rank() < self.world_size else None

    def gather(self, whole, shard):
        """Fill `whole` with the shards of all ranks."""
        dist.all_to_all_single(whole, shard.repeat(self.world_size), group=self.group)

    def pieces(self):
        """Return this rank's pieces of the parameters and the optimizer state, to save or load."""
        return shard_pieces(self.shards())

    def shards(self):
        state = self.optimizer.state[self.shard]
        start = self.rank * len(self.shard)
        for name, parameter in self.model.named_parameters():
            yield name, parameter.shape, start, self.shard, state
            start -= parameter.numel()  # the next parameter begins that much later


def restart(demo, run, directory, group):
    """Save, make a new model, and load it on the ranks of `group`."""
    path = f"{directory}/whole"
    done = len(demo.losses)
    saves = demo.rank < run.world_size
    if saves and demo.args.idea:
        gather_and_save(path, run.pieces(), run.group)
    elif saves:
        save(directory, run.pieces(), {"steps": done}, run.group)
    dist.barrier()
    run = Sharded(language_model().to(run.flat), group)
    if demo.args.idea:
        load_and_cut(path, run.pieces())
    else:
        done = load(directory, run.pieces(), run.group)["steps"]
    run.gather(run.flat, run.shard)
    dist.barrier()  # the next save writes the same file
    ranks = f"{run.world_size} rank{'s' * (run.world_size > 1)}"
    demo.show(f"saved       after step {done}; loaded on {ranks}")
    return run


def main():
    demo = Demo(__doc__)
    run = Sharded(demo.start("checkpoint", bitwise=True))
    directory = [tempfile.mkdtemp() if demo.rank == 0 else None]
    dist.broadcast_object_list(directory, 0)
    alone = [dist.new_group([rank]) for rank in range(demo.ranks)][demo.rank]
    first, second = [math.ceil(n * demo.args.steps / 3) for n in (1, 2)]
    stops = {second: None, first: alone}  # where it loads: on all ranks, on one rank

    def whole():
        """Return gradients and parameters to compare. At a stop, the parameters are loaded."""
        nonlocal run
        run.gather(run.gradients, run.shard.grad)
        gradients = [parameter.grad for parameter in run.model.parameters()]
        done = len(demo.losses)
        if done in stops:
            run = restart(demo, run, directory[0], stops[done])
        return gradients, run.model.parameters()

    demo.train(lambda *batch: run.step(*batch), whole)  # noqa: PLW0108  restart() replaces run
    if demo.rank == 0:
        shutil.rmtree(directory[0])
    sent = 2 * held_bytes(demo.model.parameters()) * (demo.ranks - 1) / demo.ranks
    return demo.report(held([*run.model.parameters(), run.shard], run.optimizer), "2Ψ(N-1)/N", sent)


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
