"""checkpoint.py: any number of ranks reads what others wrote. Nothing half-written is ever read."""

import math
import re
import sys
from contextlib import suppress
from unittest.mock import Mock

import pool
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
from checkpoint import Piece, flat_pieces, load, load_whole, save, whole_piece


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """At most 2n - 1 pieces have each element once, in order, also of a buffer that is larger."""
    n = math.prod(shape)
    whole = whole_piece(torch.arange(n).view(shape))
    start = data.draw(st.integers(-3, n))
    stop = data.draw(st.integers(start, n + 3))
    flat = torch.arange(start, stop)

    pieces = flat_pieces(flat, shape, start)

    elements = []
    for piece in pieces:
        assert torch.equal(piece.tensor, whole.at(piece.box))
        assert torch._C._is_alias_of(piece.tensor, flat)
        elements += piece.tensor.flatten().tolist()
    assert elements == [*range(max(start, 0), min(stop, n))]
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def matrix(dtype=torch.float32):
    numbers = torch.arange(30.0).view(6, 5) * 1.7 - 9
    return numbers.to(dtype)


def in_flat_rows(tensor, ranks, rank):
    """This rank's rows, as two flat halves."""
    parts = tensor.tensor_split(ranks)
    start = sum(len(part) for part in parts[:rank])
    flat = parts[rank].flatten()
    half = math.ceil(len(flat) / 2)
    whole = (tensor.shape, [start, 0])
    first = flat_pieces(flat[:half], parts[rank].shape, 0, *whole)
    return first + flat_pieces(flat[half:], parts[rank].shape, half, *whole)


def flattened(tensor, ranks, rank):
    """As ZeRO's, with padding that belongs to no tensor."""
    size = math.ceil(tensor.numel() / ranks)
    flat = torch.cat([tensor.flatten(), tensor.new_zeros(ranks)])
    start = rank * size
    return flat_pieces(flat[start : start + size], tensor.shape, start)


def not_at_all(tensor, ranks, rank):
    return tensor


CUTS = {
    "flat to flat rows": (flattened, in_flat_rows),
    "flat rows to flat": (in_flat_rows, flattened),
    "whole to flat": (not_at_all, flattened),
}


def assert_are_parts_of(whole, pieces):
    for _, piece in checkpoint.named_pieces(pieces):
        assert torch.equal(piece.tensor, whole_piece(whole).at(piece.box))


@pytest.mark.parametrize("cuts", CUTS)
@pool.on(3)
def test_any_pieces_are_read_as_any_others(cuts, tmp_path):
    """One to four ranks load the same bits, and the extra of rank 0."""
    written, wanted = CUTS[cuts]
    tensor = matrix()
    pieces = {"a": written(tensor, 3, pool.rank()), "count": torch.tensor(7.0)}
    extra = {"step": pool.rank(), "nested": {"scale": 0.1, "list": [1, None]}}
    save(tmp_path, pieces, extra, pool.group())
    for readers in (1, 2, 3, 4):
        for reader in range(readers):
            empty = torch.zeros(6, 5)
            mine = {"a": wanted(empty, readers, reader)}
            assert load(tmp_path, mine, pool.group()) == extra | {"step": 0}
            assert_are_parts_of(tensor, mine)
    sizes = [path.stat().st_size for path in (tmp_path / "1").glob("*.bin")]
    assert sum(sizes) == tensor.nbytes + 4  # every element is written once


@pool.on(3)
def test_the_idea_gathers_a_file_that_other_cuts_can_load(tmp_path):
    path = tmp_path / "whole"
    pieces = {"a": in_flat_rows(matrix(), 3, pool.rank()), "count": torch.tensor(7.0)}
    checkpoint.gather_and_save(path, pieces, pool.group())
    empty = torch.zeros(6, 5)
    mine = {"a": flattened(empty, 3, pool.rank())}
    checkpoint.load_and_cut(path, mine)
    assert_are_parts_of(matrix(), mine)


def test_a_shard_of_a_parameter_becomes_pieces_of_its_weight_and_of_its_state():
    shard = torch.arange(3.0)
    step = torch.tensor(2.0)
    state = {"exp_avg": shard + 1, "step": step}
    pieces = checkpoint.shard_pieces([("a", [2, 3], 3, shard, state)])
    assert list(pieces) == ["weight/a", "exp_avg/a", "step/a"]
    assert pieces["step/a"] is step
    (piece,) = pieces["exp_avg/a"]
    assert torch.equal(piece.tensor, state["exp_avg"].view(1, 3))
    assert piece.box == ((1, 2), (0, 3))


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.complex64,
]


def test_a_state_dict_of_one_device_goes_in_and_out_in_any_dtype(tmp_path):
    state = {str(dtype): matrix(dtype).conj() for dtype in DTYPES}  # a view, if it is complex
    save(tmp_path, state)
    loaded = load_whole(tmp_path)
    assert list(loaded) == list(state)
    for name, value in state.items():
        assert torch.equal(value, loaded[name])


# ---- crashes


def test_files_are_on_the_disk_before_their_names_are(tmp_path, monkeypatch):
    """A rank's file; the index, its directory and the number; then two renames."""
    fsync = Mock()
    monkeypatch.setattr("os.fsync", fsync)
    save(tmp_path, {"a": torch.tensor(0)}, 0)
    assert fsync.call_count == 6


def save_and_die(directory, value, number):
    """Save, killed before line `number` of those that write. Return whether it was killed."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line" and frame.f_code.co_name in ("write", "publish")
        if lines == number:
            raise SystemExit  # which nobody catches, as kill -9
        return trace

    with suppress(SystemExit):
        sys.settrace(trace)
        save(directory, {"a": torch.tensor(value)}, value)
    sys.settrace(None)
    return lines == number


def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path, monkeypatch):
    """load() has the old or the new one, and the next save() works."""
    monkeypatch.setattr("os.fsync", Mock())
    found = []
    number = 0
    is_killed = True
    while is_killed:
        save(tmp_path, {"a": torch.tensor(0)}, 0)
        number += 1
        is_killed = save_and_die(tmp_path, 1, number)
        a = torch.tensor(-1)
        assert load(tmp_path, {"a": a}) == a
        found.append(a.item())
    assert found == sorted(found)
    assert set(found[:-1]) == {0, 1}


@pool.on(2)
def test_a_full_disk_on_one_rank_is_raised_on_all(tmp_path):
    """The checkpoint before is still there."""
    whole = torch.arange(21)
    pieces = {"a": flattened(whole, 2, pool.rank())}
    save(tmp_path, pieces, None, pool.group())
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == 1:
            full = Mock(return_value=open("/dev/full", "wb"))  # noqa: SIM115
            patch.setattr(checkpoint, "open", full, raising=False)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path, pieces, None, pool.group())
    assert torch.equal(load_whole(tmp_path)["a"], whole)


def flip_a_bit(data):
    changed = bytearray(data)
    changed[len(data) // 2] ^= 4
    return changed


def cut_short(data):
    return data[:-1]


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short])
@pytest.mark.parametrize("name", ["0.bin", "index"])
def test_a_damaged_file_is_an_error_that_names_it(name, damage, tmp_path):
    save(tmp_path, {"a": torch.arange(21)})
    path = tmp_path / "1" / name
    data = path.read_bytes()
    path.write_bytes(damage(data))
    with pytest.raises(OSError, match=rf"1/{name} is damaged"):
        load_whole(tmp_path)


# ---- errors, on all ranks if one is wrong

A = torch.zeros(4, 3)
ROWS = Piece(A[:3], [4, 3], [0, 0])
OF_RANK_1 = {
    "no tensor": (
        save,
        3,
        "expected a string for the name, and a tensor",
    ),
    "past the end": (
        save,
        Piece(A, [4, 3], [1, 0]),
        "[4, 3] at [1, 0] does not fit",
    ),
    "before the start": (
        load,
        Piece(A, [9, 3], [-1, 0]),
        "does not fit",
    ),
    "another whole": (
        save,
        A[1:],
        "on rank 1, but ['float32', [4, 3]] on a lower rank",
    ),
    "another shape than the saved": (
        load,
        A[:, 1:],
        "a is ['float32', [4, 3]] in",
    ),
    "another dtype than the saved": (
        load,
        A.double(),
        "['float64', [4, 3]] here",
    ),
    "more than was saved": (
        load,
        A,
        "((0, 4), (0, 3)) was not saved whole",
    ),
}


@pytest.mark.parametrize("what", OF_RANK_1)
@pool.on(2)
def test_a_wrong_piece_on_one_rank_is_an_error_on_all(what, tmp_path):
    save(tmp_path, {"a": ROWS}, None, pool.group())
    call, piece, words = OF_RANK_1[what]
    pieces = {"a": piece if pool.rank() == 1 else ROWS}
    with pytest.raises(ValueError, match=re.escape(words)):
        call(tmp_path, pieces, process_group=pool.group())


@pool.on(2)
def test_ranks_that_find_different_checkpoints_are_an_error(tmp_path):
    inner = tmp_path / "inner"
    for directory in (tmp_path, inner):
        save(directory, {"a": ROWS}, None, pool.group())
    mine = inner if pool.rank() == 1 else tmp_path
    with pytest.raises(OSError, match="different checkpoints"):
        load(mine, {}, pool.group())


@pool.on(2)
def test_a_rank_outside_the_group_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"rank {pool.rank()} is not in process_group"):
        save(tmp_path, {"a": A}, process_group=dist.GroupMember.NON_GROUP_MEMBER)
