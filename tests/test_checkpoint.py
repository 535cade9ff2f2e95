"""checkpoint.py: any number of ranks reads what others wrote. Nothing half-written is ever read."""

import math
import re
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pool
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
from checkpoint import Piece, flat_pieces, load, load_whole, save

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
HOW = ["whole", "flat", "rows", "columns", "qkv"]
CASES = [(HOW[i // 5], HOW[i % 5], DTYPES[i % 8], 1 + i % 4) for i in range(25)]


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """At most 2n - 1 pieces have each element once, in order, also of a buffer that is larger."""
    n = math.prod(shape)
    start, whole = data.draw(st.integers(-3, n)), torch.arange(n).view(shape)
    flat = torch.arange(start, data.draw(st.integers(start, n + 3)))
    pieces = flat_pieces(flat, shape, start)
    assert [i for piece in pieces for i in piece.tensor.flatten().tolist()] == [
        i for i in flat.tolist() if 0 <= i < n
    ]
    assert all(
        torch.equal(piece.tensor, Piece(whole, shape, [0] * len(shape)).at(piece.box))
        for piece in pieces
    )
    assert all(
        piece.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for piece in pieces
    )
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def cut(how, tensor, ranks, rank):
    """This rank's pieces of a matrix: all; flat, as ZeRO's; rows; columns; rows of q, k and v."""
    shape, numel = list(tensor.shape), tensor.numel()
    if how == "whole":
        return tensor
    if how == "flat":
        size = -(-numel // ranks)
        flat = torch.cat(
            [tensor.flatten(), tensor.new_zeros(size * ranks - numel)]
        )  # padding is nobody's
        return flat_pieces(flat[rank * size : (rank + 1) * size], shape, rank * size)
    if how in ("rows", "columns"):
        dim = ["rows", "columns"].index(how)
        parts = tensor.tensor_split(ranks, dim)
        start = sum(part.shape[dim] for part in parts[:rank])
        return Piece(parts[rank], shape, [0, start] if dim else [start, 0])
    thirds, pieces = [third.tensor_split(ranks) for third in tensor.chunk(3)], []
    n, start = len(thirds[0][rank]), sum(len(part) for part in thirds[0][:rank])
    first, second = torch.cat([third[rank] for third in thirds]).flatten().tensor_split(2)
    for half, begins in ((first, 0), (second, len(first))):
        for number in range(3):
            at = [number * shape[0] // 3 + start, 0]
            pieces += flat_pieces(half, [n, shape[1]], begins - number * n * shape[1], shape, at)
    return pieces


@pytest.mark.parametrize(("written", "wanted", "dtype", "readers"), CASES)
@pool.on(3)
def test_any_pieces_are_read_as_any_others(written, wanted, dtype, readers, tmp_path):
    """Any number of ranks loads the same bits. Every element is written exactly once."""
    group, N, rank = pool.group(), pool.world_size(), pool.rank()
    tensor, extra = (
        torch.arange(30.0).view(6, 5) * 1.7 - 9,
        {"step": 3, "nested": {"scale": 0.1, "list": [1, None]}},
    )
    tensor = tensor.long() % 3 == 0 if dtype == "bool" else tensor.to(getattr(torch, dtype))
    save(tmp_path, {"a": cut(written, tensor, N, rank), "count": torch.tensor(7.0)}, extra, group)
    files = [tmp_path / (tmp_path / "latest").read_text() / f"{r}.bin" for r in range(N)]
    assert sum(file.stat().st_size for file in files) == tensor.nbytes + 4
    for reader in range(readers):
        mine, count = cut(wanted, torch.zeros_like(tensor), readers, reader), torch.tensor(0.0)
        assert (load(tmp_path, {"a": mine, "count": count}, group), count) == (extra, 7)
        for _, piece in checkpoint.named_pieces({"a": mine}):
            assert torch.equal(piece.tensor, Piece(tensor, tensor.shape, [0, 0]).at(piece.box))


def test_a_state_dict_of_one_device_goes_in_and_out(tmp_path):
    """And nothing of it is executed."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    torch.save(model.state_dict(), tmp_path / "file.pt")
    save(tmp_path, torch.load(tmp_path / "file.pt", mmap=True, weights_only=True), {"from": "file"})
    theirs, ours = model.state_dict(), load_whole(tmp_path)
    assert {
        name: torch.equal(value, ours[name]) for name, value in theirs.items()
    } == dict.fromkeys(ours, True)
    assert "pickle" not in Path(checkpoint.__file__).read_text()


def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path, monkeypatch):
    """Killed before each line that writes: load() has the old or the new one, and save() works."""

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line" and frame.f_code.co_name in ("begin", "write", "publish")
        if lines == number:
            raise SystemExit  # which nobody catches, as kill -9
        return trace

    monkeypatch.setattr("os.fsync", fsync := Mock())
    save(tmp_path, {"a": torch.tensor(0)}, 0)
    assert (
        fsync.call_count == 6
    )  # bytes, index, its names, the number; the directory's new name, the number's
    number, lines, found = 0, 0, []
    while lines == number:  # it was killed
        save(tmp_path, {"a": torch.tensor(0)}, 0)
        assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2
        number, lines = number + 1, 0
        with suppress(SystemExit):
            sys.settrace(trace)
            save(tmp_path, {"a": torch.tensor(1)}, 1)
        sys.settrace(None)
        a = torch.tensor(-1)
        assert load(tmp_path, {"a": a}) == a
        found.append(a.item())
    assert (found, set(found[:-1])) == (sorted(found), {0, 1})


@pytest.mark.parametrize("where", ["a rank's file", "index"])
@pool.on(2)
def test_a_full_disk_on_one_rank_is_raised_on_all(where, tmp_path):
    """The checkpoint before is still there, and the next is written as if nothing had been."""
    group, rank, whole = pool.group(), pool.rank(), torch.arange(21).view(7, 3)
    save(tmp_path, {"a": cut("flat", whole, 2, rank)}, None, group)
    with pytest.MonkeyPatch.context() as patch:
        if where == "index":
            patch.setattr(
                checkpoint, "publish", Mock(side_effect=OSError(28, "No space left on device"))
            )
        elif rank == 1:
            patch.setattr(
                checkpoint,
                "open",
                lambda path, mode: open("/dev/full", mode),  # noqa: SIM115
                raising=False,
            )
        with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device"):
            save(tmp_path, {"a": cut("flat", whole + 1, 2, rank)}, None, group)
    a = torch.zeros_like(whole)
    load(tmp_path, {"a": a}, group)
    assert torch.equal(a, whole)
    save(tmp_path, {"a": a + 2}, None, group)  # there is room again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "latest"]


@pytest.mark.parametrize("name", ["0.bin", "index"])
def test_any_flipped_bit_and_any_missing_file_is_an_error_that_names_it(name, tmp_path):
    save(tmp_path, {"a": torch.arange(21).view(7, 3)})
    path = tmp_path / "1" / name
    data = path.read_bytes()
    for at in (0, len(data) // 2, len(data) - 1, None):
        path.write_bytes(
            data[:-1] if at is None else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        )
        with pytest.raises(OSError, match=rf"1/{name} is damaged"):
            load_whole(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"1/{name}"):
        load_whole(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing/latest"):
        load(tmp_path / "nothing", {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (3, "lr: expected a tensor, a Piece or a list of Pieces, got int"),
        ({"b": torch.ones(2)}, "lr: expected a tensor, a Piece or a list of Pieces, got dict"),
        ([torch.ones(2)], "lr: expected a tensor, a Piece or a list of Pieces, got list"),
        (Piece(torch.ones(2), [2, 2], [0, 0]), "lr: tensor, shape and offset have (1, 2, 2)"),
    ],
)
@pool.on(2)
def test_what_is_no_piece_on_one_rank_is_an_error_on_all_that_names_the_entry(
    wrong, words, tmp_path
):
    save(tmp_path, {"lr": torch.ones(2)}, None, pool.group())
    pieces = {"lr": wrong if pool.rank() == 1 else torch.ones(2)}
    for call in (save, load):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(tmp_path, pieces, process_group=pool.group())


@pool.on(2)
def test_another_model_is_an_error_that_names_the_tensor(tmp_path):
    """On all ranks, where one finds it."""
    group, rank, a, folder = pool.group(), pool.rank(), torch.zeros(4, 3), tmp_path / "inner"
    rows = Piece(a[:3], [4, 3], [0, 0])
    save(tmp_path, {}, None, group)
    save(folder, {"a": rows}, None, group)
    for call, place, pieces, words in (
        (
            save,
            folder,
            {"a": torch.zeros(4 + rank, 3)},
            "a is ['float32', [5, 3]] on rank 1, but ['float32', [4, 3]]",
        ),
        (
            save,
            folder,
            {"a": Piece(a, [4, 3], [3, 0])},
            "a: ((3, 7), (0, 3)) is not within a whole of [4, 3]",
        ),
        (save, folder, {"a": Piece(a, [9, 3], [-1, 0])}, "a: ((-1, 3), (0, 3)) is not within"),
        (
            load,
            folder,
            {"a": a[:, :2]} if rank else {},
            "has ['float32', [4, 3]] of a, but ['float32', [4, 2]] is wan",
        ),
        (
            load,
            folder,
            {"a": a.double()} if rank else {},
            "of a, but ['float64', [4, 3]] is wanted",
        ),
        (load, folder, {"a": a} if rank else {}, "no rank had all of ((0, 4), (0, 3)) of a"),
        (load, folder, {"a": rows, "b": a}, "has nothing of b, but ['float32', [4, 3]] is wanted"),
        (load, folder if rank else tmp_path, {}, "ranks found different checkpoints in"),
    ):
        with pytest.raises((ValueError, OSError)) as raised:
            call(place, pieces, process_group=group)
        assert words in str(raised.value)
    assert list(checkpoint.open_latest(folder)[1]) == ["a"]
