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
from checkpoint import Piece, flat_pieces, gather_and_save, load, load_and_cut, load_whole, save


def whole_of(tensor):
    return Piece(tensor, tensor.shape, [0] * tensor.dim())


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """At most 2n - 1 pieces have each element once, in order, also of a buffer that is larger."""
    n = math.prod(shape)
    whole = whole_of(torch.arange(n).view(shape))
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


def cut(how, tensor, ranks, rank):
    """This rank's pieces of a matrix."""
    if how == "whole":
        return tensor
    if how == "flat":  # as ZeRO's, with padding that belongs to no tensor
        size = math.ceil(tensor.numel() / ranks)
        flat = torch.cat([tensor.flatten(), tensor.new_zeros(ranks)])
        start = rank * size
        return flat_pieces(flat[start : start + size], tensor.shape, start)
    dim = 1 if how == "columns" else 0
    parts = tensor.tensor_split(ranks, dim)
    offset = [0, 0]
    offset[dim] = sum(part.shape[dim] for part in parts[:rank])
    part = parts[rank]
    if how != "flat rows":
        return Piece(part, tensor.shape, offset)
    half = math.ceil(part.numel() / 2)
    pieces = []
    for number, flat in enumerate(part.flatten().split(half)):
        pieces += flat_pieces(flat, part.shape, number * half, tensor.shape, offset)
    return pieces


def matrix(dtype=torch.float32):
    numbers = torch.arange(30.0).view(6, 5) * 1.7 - 9
    return numbers.to(dtype)


HOW = ["whole", "flat", "rows", "columns", "flat rows"]


@pytest.mark.parametrize("written", HOW)
@pytest.mark.parametrize("wanted", HOW)
@pool.on(3)
def test_any_pieces_are_read_as_any_others(written, wanted, tmp_path):
    """One to four ranks load the same bits."""
    tensor = matrix()
    whole = whole_of(tensor)
    save(tmp_path, {"a": cut(written, tensor, 3, pool.rank())}, None, pool.group())
    for readers in (1, 2, 3, 4):
        for reader in range(readers):
            mine = {"a": cut(wanted, torch.zeros(6, 5), readers, reader)}
            load(tmp_path, mine, pool.group())
            for _, piece in checkpoint.named_pieces(mine):
                assert torch.equal(piece.tensor, whole.at(piece.box))


@pytest.mark.parametrize("how", HOW)
@pool.on(3)
def test_every_element_is_written_once(how, tmp_path):
    tensor = matrix()
    pieces = {"a": cut(how, tensor, 3, pool.rank()), "count": torch.tensor(7.0)}
    save(tmp_path, pieces, None, pool.group())
    sizes = [(tmp_path / "1" / f"{rank}.bin").stat().st_size for rank in range(3)]
    assert sum(sizes) == tensor.nbytes + 4


DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_it_was_written(dtype, tmp_path):
    tensor = matrix(dtype).conj()  # a view, if it is complex
    save(tmp_path, {"a": tensor})
    mine = torch.zeros_like(tensor)
    load(tmp_path, {"a": mine})
    assert torch.equal(mine, tensor)


@pool.on(2)
def test_extra_is_that_of_rank_0_on_all(tmp_path):
    extra = {"step": pool.rank(), "nested": {"scale": 0.1, "list": [1, None]}}
    save(tmp_path, {}, extra, pool.group())
    assert load(tmp_path, {}, pool.group()) == extra | {"step": 0}


@pytest.mark.parametrize("wanted", ["whole", "rows", "columns"])
@pool.on(3)
def test_the_idea_gathers_a_file_that_other_cuts_can_load(wanted, tmp_path):
    tensor = matrix()
    mine = {"a": cut(wanted, torch.zeros(6, 5), 3, pool.rank())}
    pieces = {"a": cut("rows", tensor, 3, pool.rank()), "count": torch.tensor(7.0)}
    gather_and_save(tmp_path / "whole", pieces, pool.group())
    load_and_cut(tmp_path / "whole", mine)
    ((_, piece),) = checkpoint.named_pieces(mine)
    assert torch.equal(piece.tensor, whole_of(tensor).at(piece.box))


def test_a_state_dict_of_one_device_goes_in_and_out(tmp_path):
    state = torch.nn.Linear(3, 2, dtype=torch.bfloat16).state_dict()
    save(tmp_path, state)
    loaded = load_whole(tmp_path)
    assert list(loaded) == list(state)
    for name, value in state.items():
        assert torch.equal(value, loaded[name])


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


def fill_disk(patch, where):
    if where == "index":
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(checkpoint, "publish", full)
    elif pool.rank() == 1:
        full = Mock(return_value=open("/dev/full", "wb"))  # noqa: SIM115
        patch.setattr(checkpoint, "open", full, raising=False)


@pytest.mark.parametrize("where", ["a rank's file", "index"])
@pool.on(2)
def test_a_full_disk_on_one_rank_is_raised_on_all(where, tmp_path):
    """The checkpoint before is still there, and the next is written as if nothing had been."""
    group = pool.group()
    whole = torch.arange(21).view(7, 3)
    pieces = {"a": cut("flat", whole, 2, pool.rank())}
    others = {"a": cut("flat", whole + 1, 2, pool.rank())}
    save(tmp_path, pieces, None, group)
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, where)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path, others, None, group)
    a = torch.zeros_like(whole)
    load(tmp_path, {"a": a}, group)
    assert torch.equal(a, whole)
    save(tmp_path, pieces, None, group)  # there is room again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "latest"]


@pytest.mark.parametrize(
    "at",
    [0, 0.5, 1],
    ids=["first byte", "middle", "last byte"],
)
@pytest.mark.parametrize("name", ["0.bin", "index"])
def test_a_flipped_bit_is_an_error_that_names_the_file(name, at, tmp_path):
    save(tmp_path, {"a": torch.arange(21)})
    path = tmp_path / "1" / name
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)
    with pytest.raises(OSError, match=rf"1/{name} is damaged"):
        load_whole(tmp_path)


@pytest.mark.parametrize("name", ["0.bin", "index"])
def test_a_file_that_is_cut_short_or_missing_is_an_error_that_names_it(name, tmp_path):
    save(tmp_path, {"a": torch.arange(21)})
    path = tmp_path / "1" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=rf"1/{name} is damaged"):
        load_whole(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"1/{name}"):
        load_whole(tmp_path)


def test_a_directory_without_a_checkpoint_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing/latest"):
        load(tmp_path / "nothing", {})


A = torch.zeros(4, 3)
ROWS = Piece(A[:3], [4, 3], [0, 0])


def assert_refused(call, directory, mine, words):
    """On both ranks, if rank 1 saves or loads `mine` as "a"."""
    pieces = {"a": mine if pool.rank() == 1 else ROWS}
    with pytest.raises(ValueError, match=re.escape(words)):
        call(directory, pieces, process_group=pool.group())


WRONG = {
    "a number": (3, "'a': expected a string for the name, and a tensor"),
    "a list of tensors": ([A], "'a': expected a string for the name, and a tensor"),
    "a lost dimension": (Piece(A[0], [4, 3], [0, 0]), "[3] at [0, 0] does not fit"),
    "past the end": (Piece(A, [4, 3], [1, 0]), "[4, 3] at [1, 0] does not fit"),
    "before the start": (Piece(A, [9, 3], [-1, 0]), "[4, 3] at [-1, 0] does not fit"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("call", [save, load])
@pool.on(2)
def test_a_wrong_piece_on_one_rank_is_an_error_on_all(call, case, tmp_path):
    save(tmp_path, {"a": ROWS}, None, pool.group())
    assert_refused(call, tmp_path, *WRONG[case])


@pool.on(2)
def test_ranks_that_save_another_shape_of_a_tensor_are_named(tmp_path):
    words = "a is ['float32', [3, 3]] on rank 1, but ['float32', [4, 3]] on a lower rank"
    assert_refused(save, tmp_path, A[1:], words)


UNLIKE = {
    "another shape": (A[:, 1:], "a is ['float32', [4, 3]] in"),
    "another dtype": (A.double(), "['float64', [4, 3]] here"),
    "elements that were not saved": (A, "((0, 4), (0, 3)) was not saved whole"),
}


@pytest.mark.parametrize("case", UNLIKE)
@pool.on(2)
def test_a_tensor_unlike_the_saved_one_is_an_error_on_all(case, tmp_path):
    save(tmp_path, {"a": ROWS}, None, pool.group())
    assert_refused(load, tmp_path, *UNLIKE[case])


def test_a_tensor_that_was_not_saved_is_named(tmp_path):
    save(tmp_path, {"a": A})
    with pytest.raises(ValueError, match="b is missing"):
        load(tmp_path, {"b": A})


@pytest.mark.parametrize("call", [save, load])
def test_a_name_that_is_no_string_is_an_error(call, tmp_path):
    save(tmp_path, {"a": A})
    with pytest.raises(ValueError, match=r"^0: expected a string"):
        call(tmp_path, {0: A})


@pool.on(2)
def test_ranks_that_find_different_checkpoints_are_an_error(tmp_path):
    inner = tmp_path / "inner"
    for directory in (tmp_path, inner):
        save(directory, {"a": ROWS}, None, pool.group())
    mine = inner if pool.rank() == 1 else tmp_path
    with pytest.raises(OSError, match="different checkpoints"):
        load(mine, {}, pool.group())


@pytest.mark.parametrize("call", [save, load])
@pool.on(2)
def test_a_rank_outside_the_group_is_an_error(call, tmp_path):
    with pytest.raises(ValueError, match=f"rank {pool.rank()} is not in process_group"):
        call(tmp_path, {"a": A}, process_group=dist.GroupMember.NON_GROUP_MEMBER)
