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
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
from checkpoint import Piece, flat_pieces, gather_and_save, load, load_and_cut, load_whole, save

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
HOW = ["whole", "flat", "rows", "columns", "flat rows"]
CASES = [(HOW[i // 5], HOW[i % 5], DTYPES[i % 8], 1 + i % 4) for i in range(25)]


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """At most 2n - 1 pieces have each element once, in order, also of a buffer that is larger."""
    n = math.prod(shape)
    whole = Piece(torch.arange(n).view(shape), shape, [0] * len(shape))
    start = data.draw(st.integers(-3, n))
    flat = torch.arange(start, data.draw(st.integers(start, n + 3)))

    pieces = flat_pieces(flat, shape, start)

    elements = [i for piece in pieces for i in piece.tensor.flatten().tolist()]
    assert elements == [i for i in flat.tolist() if 0 <= i < n]
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    for piece in pieces:
        assert torch.equal(piece.tensor, whole.at(piece.box))
        assert piece.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def cut(how, tensor, ranks, rank):
    """This rank's pieces of a matrix: all; flat, as ZeRO's; rows; columns; rows in flat halves."""
    if how == "whole":
        return tensor
    shape = list(tensor.shape)
    if how == "flat":
        size = -(-tensor.numel() // ranks)
        padding = tensor.new_zeros(size * ranks - tensor.numel())  # belongs to no tensor
        mine = torch.cat([tensor.flatten(), padding])[rank * size :][:size]
        return flat_pieces(mine, shape, rank * size)
    dim = int(how == "columns")
    parts = tensor.tensor_split(ranks, dim)
    offset = [0, 0]
    offset[dim] = sum(part.shape[dim] for part in parts[:rank])
    if how != "flat rows":
        return Piece(parts[rank], shape, offset)
    half = -(-parts[rank].numel() // 2)
    pieces = []
    for number, flat in enumerate(parts[rank].flatten().split(half)):
        pieces += flat_pieces(flat, parts[rank].shape, number * half, shape, offset)
    return pieces


@pytest.mark.parametrize(("written", "wanted", "dtype", "readers"), CASES)
@pool.on(3)
def test_any_pieces_are_read_as_any_others(written, wanted, dtype, readers, tmp_path):
    """Any number of ranks loads the same bits. Every element is written exactly once."""
    tensor = torch.arange(30.0).view(6, 5) * 1.7 - 9
    tensor = tensor.long() % 3 == 0 if dtype == "bool" else tensor.to(getattr(torch, dtype))
    tensor = tensor.conj()  # a view, if it is complex
    whole = Piece(tensor, tensor.shape, [0, 0])
    extra = {"step": 3, "nested": {"scale": 0.1, "list": [1, None]}}

    pieces = {"a": cut(written, tensor, 3, pool.rank()), "count": torch.tensor(7.0)}
    save(tmp_path, pieces, extra, pool.group())

    latest = tmp_path / (tmp_path / "latest").read_text()
    sizes = [(latest / f"{rank}.bin").stat().st_size for rank in range(3)]
    assert sum(sizes) == tensor.nbytes + 4
    for reader in range(readers):
        mine = cut(wanted, torch.zeros_like(tensor), readers, reader)
        count = torch.tensor(0.0)
        assert load(tmp_path, {"a": mine, "count": count}, pool.group()) == extra
        assert count == 7
        for _, piece in checkpoint.named_pieces({"a": mine}):
            assert torch.equal(piece.tensor, whole.at(piece.box))


@pytest.mark.parametrize("wanted", ["whole", "rows", "columns"])
@pool.on(3)
def test_the_idea_gathers_a_file_that_other_cuts_can_load(wanted, tmp_path):
    tensor = torch.arange(30.0).view(6, 5)
    mine = cut(wanted, torch.zeros(6, 5), 3, pool.rank())

    pieces = {"a": cut("rows", tensor, 3, pool.rank()), "count": torch.tensor(7.0)}
    gather_and_save(tmp_path / "whole", pieces, pool.group())
    load_and_cut(tmp_path / "whole", {"a": mine})

    ((_, piece),) = checkpoint.named_pieces({"a": mine})
    assert torch.equal(piece.tensor, Piece(tensor, tensor.shape, [0, 0]).at(piece.box))


def test_a_state_dict_of_one_device_goes_in_and_out(tmp_path):
    """And nothing of it is executed."""
    state = torch.nn.Linear(3, 2, dtype=torch.bfloat16).state_dict()
    save(tmp_path, state)
    loaded = load_whole(tmp_path)
    assert list(loaded) == list(state)
    for name, value in state.items():
        assert torch.equal(value, loaded[name])
    assert "pickle" not in Path(checkpoint.__file__).read_text()


def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path, monkeypatch):
    """Killed before each line that writes: load() has the old or the new one, and save() works."""

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line" and frame.f_code.co_name in ("write", "publish")
        if lines == number:
            raise SystemExit  # which nobody catches, as kill -9
        return trace

    fsync = Mock()
    monkeypatch.setattr("os.fsync", fsync)
    save(tmp_path, {"a": torch.tensor(0)}, 0)
    # a rank's file; index, its directory and the number; then two renames
    assert fsync.call_count == 6
    number = 0
    lines = 0
    found = []
    while lines == number:  # it was killed
        save(tmp_path, {"a": torch.tensor(0)}, 0)
        assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2
        number += 1
        lines = 0
        with suppress(SystemExit):
            sys.settrace(trace)
            save(tmp_path, {"a": torch.tensor(1)}, 1)
        sys.settrace(None)
        a = torch.tensor(-1)
        assert load(tmp_path, {"a": a}) == a
        found.append(a.item())
    assert found == sorted(found)
    assert set(found[:-1]) == {0, 1}


@pytest.mark.parametrize("where", ["a rank's file", "index"])
@pool.on(2)
def test_a_full_disk_on_one_rank_is_raised_on_all(where, tmp_path):
    """The checkpoint before is still there, and the next is written as if nothing had been."""
    group = pool.group()
    whole = torch.arange(21).view(7, 3)
    save(tmp_path, {"a": cut("flat", whole, 2, pool.rank())}, None, group)
    with pytest.MonkeyPatch.context() as patch:
        if where == "index":
            full = Mock(side_effect=OSError(28, "No space left on device"))
            patch.setattr(checkpoint, "publish", full)
        elif pool.rank() == 1:
            full = Mock(return_value=open("/dev/full", "wb"))  # noqa: SIM115
            patch.setattr(checkpoint, "open", full, raising=False)
        with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device"):
            save(tmp_path, {"a": cut("flat", whole + 1, 2, pool.rank())}, None, group)
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
    damaged = [data[:-1]]
    for at in (0, len(data) // 2, len(data) - 1):
        damaged.append(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(OSError, match=rf"1/{name} is damaged"):
            load_whole(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"1/{name}"):
        load_whole(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing/latest"):
        load(tmp_path / "nothing", {})


A = torch.zeros(4, 3)
ROWS = Piece(A[:3], [4, 3], [0, 0])
NO_PIECE = "'a': expected a string for the name, and a tensor, a Piece or a list of Pieces, got"
NO_FIT = "does not fit into a whole of"
WRONG = [  # what rank 1 saves or loads as "a", and the error on both ranks
    ("save load", 3, f"{NO_PIECE} int"),
    ("save load", {"b": A}, f"{NO_PIECE} dict"),
    ("save load", [A], f"{NO_PIECE} list"),
    ("save load", Piece(A[0], [4, 3], [0, 0]), f"a: a piece of [3] at [0, 0] {NO_FIT} [4, 3]"),
    ("save load", Piece(A, [4, 3], [1, 0]), f"a: a piece of [4, 3] at [1, 0] {NO_FIT} [4, 3]"),
    ("save load", Piece(A, [9, 3], [-1, 0]), f"a: a piece of [4, 3] at [-1, 0] {NO_FIT} [9, 3]"),
    ("save", A[1:], "a is ['float32', [3, 3]] on rank 1, but ['float32', [4, 3]] on a lower rank"),
    ("load", A[:, 1:], "a is ['float32', [4, 3]] in"),
    ("load", A.double(), ", but ['float64', [4, 3]] here"),
    ("load", A, "lacks elements of a ['float32', [4, 3]]: ((0, 4), (0, 3)) was not saved whole"),
]


@pytest.mark.parametrize(("calls", "wrong", "words"), WRONG)
@pool.on(2)
def test_a_wrong_piece_on_one_rank_is_an_error_on_all_that_names_it(calls, wrong, words, tmp_path):
    save(tmp_path, {"a": ROWS}, None, pool.group())
    mine = wrong if pool.rank() == 1 else ROWS
    for call in calls.split():
        with pytest.raises(ValueError, match=re.escape(words)):
            getattr(checkpoint, call)(tmp_path, {"a": mine}, process_group=pool.group())


@pool.on(2)
def test_wrong_names_directories_and_groups_are_errors(tmp_path):
    group = pool.group()
    folder = tmp_path / "inner"
    for each in (tmp_path, folder):
        save(each, {"a": ROWS}, None, group)
    with pytest.raises(ValueError, match="b is missing in"):
        load(folder, {"a": ROWS, "b": A}, group)
    with pytest.raises(OSError, match="ranks found different checkpoints in"):
        load(folder if pool.rank() else tmp_path, {}, group)
    for call in (save, load):
        with pytest.raises(ValueError, match=r"^0: expected a string"):
            call(folder, {0: A}, process_group=group)
        with pytest.raises(ValueError, match=f"rank {pool.rank()} is not in process_group"):
            call(folder, {"a": A}, process_group=dist.GroupMember.NON_GROUP_MEMBER)
