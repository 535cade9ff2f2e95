"""checkpoint.py: what any ranks wrote any others read, bit by bit; what is killed, full or damaged is never wrong."""

import errno
import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pool
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
from checkpoint import Piece, flat_pieces, load, load_whole, save

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]


def numbered(shape, dtype=torch.int64, first=0):
    return torch.arange(first, first + math.prod(shape)).view(shape).to(dtype)


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """They have its elements in order, each once, at their places; at most 2n - 1; also of a buffer that is larger."""
    n = math.prod(shape)
    start, whole = data.draw(st.integers(-3, n)), numbered(shape)
    flat = torch.arange(start, data.draw(st.integers(start, n + 3)))
    pieces = flat_pieces(flat, shape, start)
    assert [i for piece in pieces for i in piece.tensor.flatten().tolist()] == [i for i in flat.tolist() if 0 <= i < n]
    assert all(torch.equal(piece.tensor, Piece(whole, shape, [0] * len(shape)).at(piece.box)) for piece in pieces)
    assert all(piece.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for piece in pieces)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def cut(how, tensor, ranks, rank):
    """This rank's pieces of a matrix: all of it; flat as ZeRO cuts; rows; columns; rows of q, k and v, cut in two."""
    shape, numel = list(tensor.shape), tensor.numel()
    if how == "whole":
        return tensor
    if how == "flat":
        size = -(-numel // ranks)
        flat = torch.cat([tensor.flatten(), tensor.new_zeros(size * ranks - numel)])  # padding is nobody's
        return flat_pieces(flat[rank * size : (rank + 1) * size], shape, rank * size)
    if how in ("rows", "columns"):
        dim = ["rows", "columns"].index(how)
        parts = tensor.tensor_split(ranks, dim)
        start = sum(part.shape[dim] for part in parts[:rank])
        return Piece(parts[rank], shape, [0, start] if dim else [start, 0])
    thirds = [third.tensor_split(ranks) for third in tensor.chunk(3)]
    n, start = len(thirds[0][rank]), sum(len(part) for part in thirds[0][:rank])
    first, second = torch.cat([third[rank] for third in thirds]).flatten().tensor_split(2)
    pieces = []
    for half, begins in ((first, 0), (second, len(first))):
        for number in range(3):
            at = [number * shape[0] // 3 + start, 0]
            pieces += flat_pieces(half, [n, shape[1]], begins - number * n * shape[1], shape, at)
    return pieces


def values_of(dtype, shape=(6, 5)):
    if dtype == "bool":
        return numbered(shape) % 3 == 0
    return (numbered(shape, torch.float64) * 1.7 - 9).to(getattr(torch, dtype))


def body_any_to_any(folder, written, wanted, dtype):
    tensor, group = values_of(dtype), pool.group()
    pieces = {"a": cut(written, tensor, pool.world_size(), pool.rank()), "count": torch.tensor(7.0)}
    save(folder, pieces, {"step": 3, "nested": {"scale": 0.1, "list": [1, None, "x"]}}, group)
    empty = torch.zeros_like(tensor)
    mine = cut(wanted, empty, pool.world_size(), pool.rank())
    count = torch.tensor(0.0)
    extra = load(folder, {"a": mine, "count": count}, group)
    assert extra == {"step": 3, "nested": {"scale": 0.1, "list": [1, None, "x"]}}
    assert count == 7
    for _, _, piece in checkpoint.describe({"a": mine}):
        assert torch.equal(piece.tensor, Piece(tensor, tensor.shape, [0, 0]).at(piece.box))
    return os.path.getsize(Path(folder) / "1" / f"{pool.rank()}.bin")


HOW = ["whole", "flat", "rows", "columns", "qkv"]
CASES = [(a, b, DTYPES[i % len(DTYPES)], 1 + i % 4) for i, (a, b) in enumerate(itertools.product(HOW, HOW))]


@pytest.mark.parametrize(("written", "wanted", "dtype", "ranks"), CASES)
def test_any_pieces_are_read_as_any_others(written, wanted, dtype, ranks, tmp_path):
    """Bitwise, at 1 to 4 ranks; every element, and what all hold, is written once, and nothing else."""
    sizes = pool.run(ranks, body_any_to_any, tmp_path, written, wanted, dtype)
    assert sum(sizes) == 30 * values_of(dtype).itemsize + 4
    assert load_whole(tmp_path)["a"].equal(values_of(dtype))


def body_save(folder, number, wanted=None):
    save(folder, {"a": cut("flat", numbered([7, 3], first=number), pool.world_size(), pool.rank())}, None, pool.group())


def body_load(folder):
    empty = torch.zeros(7, 3, dtype=torch.int64)
    load(folder, {"a": cut("columns", empty, pool.world_size(), pool.rank())}, pool.group())


def test_other_numbers_of_ranks(tmp_path):
    """Four write, three read; three write, one reads; a state_dict of one device goes in and out."""
    pool.run(4, body_save, tmp_path, 100)
    pool.run(3, body_load, tmp_path)
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    torch.save(model.state_dict(), tmp_path / "file.pt")
    save(tmp_path, torch.load(tmp_path / "file.pt", mmap=True, weights_only=True), {"from": "file"})
    whole = load_whole(tmp_path)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())


class Killed(BaseException):
    """Which nobody catches, as kill -9."""


def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path, monkeypatch):
    """Before each system call that save() makes in turn: load() has the old one or the new one, and save() goes on."""
    calls = []

    def step(name, function):
        def called(*args, **kwargs):
            calls.append(name)
            if len(calls) == stop_at:
                raise Killed
            return function(*args, **kwargs)

        return called

    for module, names in ((os, ["fsync", "rename", "replace"]), (shutil, ["rmtree"]), (Path, ["mkdir", "write_text"])):
        for name in names:
            monkeypatch.setattr(module, name, step(name, getattr(module, name)))
    monkeypatch.setattr(checkpoint, "open", step("open", open), raising=False)
    stop_at, last, seen, saved = 0, 0, set(), True
    save(tmp_path, {"a": torch.tensor(0)}, 0)
    for number in itertools.count(1):
        calls.clear()
        stop_at = number
        try:
            save(tmp_path, {"a": torch.tensor(number)}, number)
        except Killed:
            saved = False
        a = torch.tensor(-1)
        assert load(tmp_path, {"a": a}) == a.item()
        assert a.item() in (last, number)
        assert saved <= (a.item() == number)
        seen.add((calls[-1], a.item() == number))
        last = a.item()
        if saved:
            break
        saved = True
    assert {("rename", False), ("replace", False), ("rmtree", True)} <= seen
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2


def body_full(folder, where):
    save(folder, {"a": cut("flat", numbered([7, 3]), pool.world_size(), pool.rank())}, None, pool.group())

    def full(path, mode):
        return open("/dev/full" if pool.rank() == 1 else path, mode)

    def publish_full(root, index):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = checkpoint.publish
    if where == "index":
        checkpoint.publish = publish_full
    else:
        checkpoint.open = full
    try:
        with pytest.raises(OSError, match="No space left on device") as raised:
            save(folder, {"a": cut("flat", numbered([7, 3]) + 1, pool.world_size(), pool.rank())}, None, pool.group())
        assert raised.value.errno == errno.ENOSPC
    finally:
        checkpoint.publish = before
        checkpoint.__dict__.pop("open", None)
    a = torch.zeros(7, 3, dtype=torch.int64)
    load(folder, {"a": a}, pool.group())
    assert torch.equal(a, numbered([7, 3]))
    save(folder, {"a": a + 2}, None, pool.group())  # there is room again
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("where", ["a rank's file", "index"])
def test_a_full_disk_on_one_rank_is_raised_on_all(where, tmp_path):
    """The checkpoint before is still there, and the next is written as if nothing had been."""
    assert pool.run(2, body_full, tmp_path, where) == [["1", "2", "latest"]] * 2


def test_any_flipped_bit_and_any_missing_file_is_an_error_that_names_it(tmp_path):
    pool.run(2, body_save, tmp_path, 0)
    for name, byte in itertools.product(["0.bin", "1.bin", "index"], [0, 0.5, -1]):
        path = tmp_path / "1" / name
        data = path.read_bytes()
        at = int(byte * len(data)) if byte >= 0 else len(data) - 1
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(OSError, match=rf"1/{name} is damaged"):
            load_whole(tmp_path)
        path.write_bytes(data[:-1])
        with pytest.raises(OSError, match=rf"1/{name} is damaged"):
            load_whole(tmp_path)
        path.unlink()
        with pytest.raises(FileNotFoundError, match=rf"1/{name}"):
            load_whole(tmp_path)
        path.write_bytes(data)
    load_whole(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing/latest"):
        load(tmp_path / "nothing", {})


def body_wrong(folder):
    group, rank, a = pool.group(), pool.rank(), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"a is \['float32', \[5, 3\]\] on rank 1, but \['float32', \[4, 3\]\]"):
        save(folder, {"a": torch.zeros(4 + rank, 3)}, None, group)
    with pytest.raises(ValueError, match=r"a: \(\(3, 7\), \(0, 3\)\) is not within a whole of \[4, 3\]"):
        save(folder, {"a": Piece(a, [4, 3], [3, 0])}, None, group)
    save(folder, {"a": Piece(a[:3], [4, 3], [0, 0])}, None, group)
    for wanted, message in (
        (a[:, :2], r"has \['float32', \[4, 3\]\] of a, but \['float32', \[4, 2\]\] is wanted"),
        (a.double(), r"of a, but \['float64', \[4, 3\]\] is wanted"),
        (a, r"no rank had all of \(\(0, 4\), \(0, 3\)\) of a"),
    ):
        with pytest.raises(ValueError, match=message):
            load(folder, {"a": wanted} if rank == 1 else {}, group)  # what one rank wants is refused on all
    with pytest.raises(ValueError, match=r"has nothing of b, but \['float32', \[4, 3\]\] is wanted"):
        load(folder, {"a": Piece(a[:3], [4, 3], [0, 0]), "b": a}, group)
    with pytest.raises(OSError, match="ranks found different checkpoints in"):
        load(Path(folder) / ("." if rank else ".."), {}, group)


def test_another_model_is_an_error_that_names_the_tensor(tmp_path):
    folder = tmp_path / "inner"
    save(tmp_path, {})
    pool.run(2, body_wrong, folder)
    index = json.loads((folder / "1" / "index").read_text().partition("\n")[2])
    assert list(index["tensors"]) == ["a"]


def test_reading_executes_nothing():
    assert "pickle" not in Path(checkpoint.__file__).read_text()
