"""checkpoint.py: any number of ranks reads what others wrote. Nothing half-written is ever read."""

import collections
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import numpy
import pool
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
from checkpoint import Piece, flat_pieces, load, load_whole, save, whole_piece


def assert_are_parts_of(whole, pieces):
    for _, piece in checkpoint.named_pieces(pieces):
        expected = whole_piece(whole).at(piece.box)
        assert torch.equal(piece.tensor, expected)


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    """At most 2n - 1 pieces have each element once, in order, also of a buffer that is larger."""
    n = math.prod(shape)
    start = data.draw(st.integers(-3, n))
    stop = data.draw(st.integers(start, n + 3))
    flat = torch.arange(start, stop)

    pieces = flat_pieces(flat, shape, start)

    whole = torch.arange(n).view(shape)
    assert_are_parts_of(whole, {"a": pieces})
    flat.neg_()  # the pieces are views of it
    elements = []
    for piece in pieces:
        elements += piece.tensor.neg().flatten().tolist()
    expected = range(max(start, 0), min(stop, n))
    assert elements == list(expected)
    most = max(1, 2 * len(shape) - 1)
    assert len(pieces) <= most


MATRIX = torch.arange(30.0).view(6, 5) * 1.7 - 9


def in_flat_rows(tensor, ranks, rank):
    """This rank's rows, in flat parts of seven elements."""
    first = 6 * rank // ranks
    last = 6 * (rank + 1) // ranks
    rows = tensor[first:last]
    flat = rows.view(-1)
    pieces = []
    for start in range(0, len(flat), 7):
        part = flat[start : start + 7]
        pieces += flat_pieces(part, rows.shape, start, tensor.shape, [first, 0])
    return pieces


def flattened(tensor, ranks, rank):
    """As ZeRO's, with padding that belongs to no tensor."""
    size = math.ceil(tensor.numel() / ranks)
    padding = tensor.new_zeros(ranks)
    flat = torch.cat([tensor.flatten(), padding])
    shard = flat.split(size)[rank]
    return flat_pieces(shard, tensor.shape, rank * size)


CUTS = {
    "flat to flat rows": (flattened, in_flat_rows),
    "flat rows to flat": (in_flat_rows, flattened),
}


@pytest.mark.parametrize("cuts", CUTS)
@pool.on(3)
def test_any_pieces_are_read_as_any_others(cuts, tmp_path):
    """One to four ranks load the same bits, and the extra of rank 0."""
    written, wanted = CUTS[cuts]
    mine = written(MATRIX, 3, pool.rank())
    pieces = {"a": mine, "count": torch.tensor(7.0)}
    extra = {"step": pool.rank(), "list": [0.1, None]}
    save(tmp_path, pieces, extra, pool.group())
    for readers in (1, 2, 3, 4):
        for reader in range(readers):
            zeros = torch.zeros(6, 5)
            mine = {"a": wanted(zeros, readers, reader)}
            found = load(tmp_path, mine, pool.group())
            assert found == extra | {"step": 0}
            assert_are_parts_of(MATRIX, mine)
    files = (tmp_path / "1").glob("*.bin")
    written = sum(path.stat().st_size for path in files)
    assert written == MATRIX.nbytes + 4  # every element is written once


@pool.on(3)
def test_the_idea_gathers_a_file_that_other_cuts_can_load(tmp_path):
    pieces = {"a": in_flat_rows(MATRIX, 3, pool.rank())}
    checkpoint.gather_and_save(tmp_path / "whole", pieces, pool.group())
    zeros = torch.zeros(6, 5)
    mine = {"a": flattened(zeros, 3, pool.rank())}
    checkpoint.load_and_cut(tmp_path / "whole", mine)
    assert_are_parts_of(MATRIX, mine)


@pool.on(2)
def test_the_ideas_file_is_complete_when_any_rank_goes_on(tmp_path):
    write = torch.save

    def write_later(*args, **options):
        time.sleep(0.3)
        write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", write_later)
        checkpoint.gather_and_save(tmp_path / "whole", {"a": MATRIX}, pool.group())
    assert torch.equal(torch.load(tmp_path / "whole")["a"], MATRIX)


def test_a_shard_becomes_pieces_of_its_weight_and_of_its_state(tmp_path):
    shard = torch.arange(3.0)
    state = {
        "exp_avg": shard.bfloat16() + 1,
        "step": torch.tensor(2),
    }
    shards = [("a", [1, 3], 0, shard, state)]
    pieces = checkpoint.shard_pieces(shards)
    save(tmp_path, pieces)
    found = load_whole(tmp_path)
    assert torch.equal(found["weight/a"], shard.view(1, 3))
    assert torch.equal(found["exp_avg/a"], state["exp_avg"].view(1, 3))
    assert torch.equal(found["step/a"], state["step"])


# ---- what else a run must keep


def test_a_scheduler_continues_from_extra(tmp_path):
    """MultiStepLR has a Counter with integer keys, which JSON would turn into strings."""

    def make_scheduler():
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])

    uninterrupted = make_scheduler()
    uninterrupted.optimizer.step()  # or the scheduler warns
    uninterrupted.step()
    save(tmp_path, {}, {"scheduler": uninterrupted.state_dict()})
    resumed = make_scheduler()
    resumed.load_state_dict(load(tmp_path, {})["scheduler"])
    resumed.optimizer.step()
    for _ in range(4):
        uninterrupted.step()
        resumed.step()
        assert resumed.get_last_lr() == uninterrupted.get_last_lr()
    assert resumed.get_last_lr() == [pytest.approx(0.01)]


EXTRAS = {
    "integer keys": {1: {(2, 3): "a"}},
    "tuples": (1, (2.5, None), [True]),
    "random.getstate()": random.Random(0).getstate(),
    "a Counter": collections.Counter({3: 1}),
    "inf": [math.inf, -math.inf],
    "bytes": b"\x00\xff",
}


@pytest.mark.parametrize("what", EXTRAS)
def test_extra_comes_back_equal_and_of_the_same_type(what, tmp_path):
    save(tmp_path, {}, EXTRAS[what])
    found = load(tmp_path, {})
    assert found == EXTRAS[what]
    assert type(found) is type(EXTRAS[what])


def test_extra_may_hold_tensors_and_nan(tmp_path):
    state = torch.get_rng_state()
    save(tmp_path, {}, {"rng": state, "loss": math.nan})
    found = load(tmp_path, {})
    assert torch.equal(found["rng"], state)
    assert math.isnan(found["loss"])


@pytest.mark.parametrize(
    "extra",
    [numpy.zeros(2), range(3), Mock],
    ids=["array", "range", "class"],
)
@pool.on(2)
def test_extra_that_would_not_come_back_is_an_error_before_anything_is_written(extra, tmp_path):
    save(tmp_path, {}, "good", pool.group())
    with pytest.raises(ValueError, match="extra must be made of"):
        save(tmp_path, {}, extra if pool.rank() == 1 else 0, pool.group())
    assert load(tmp_path, {}, pool.group()) == "good"


class MakesFolder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_extra_of_a_stranger_runs_no_code(tmp_path):
    """save() would refuse it."""
    text = checkpoint.pack(MakesFolder(tmp_path / "made"))
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.unpack(text)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("what", ["a generator's state", "a scalar", "one row", "a NaN"])
@pool.on(2)
def test_ranks_with_other_values_under_one_name_are_an_error_on_all(what, tmp_path):
    generator = torch.Generator().manual_seed(pool.rank())
    differs = {
        "a generator's state": generator.get_state(),
        "a scalar": torch.tensor(float(pool.rank())),
        "one row": Piece(ROWS[:1] + pool.rank(), [6, 5], [2, 0]),
        "a NaN": torch.tensor([1.0, math.nan if pool.rank() else 0.0]),
    }
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] hold different values of \('rng'"):
        save(tmp_path, {"rng": differs[what]}, None, pool.group())
    save(tmp_path, {f"rng {pool.rank()}": differs[what]}, None, pool.group())  # as it advises


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pool.on(2)
def test_a_copy_that_one_rank_cannot_read_is_an_error_on_all(bad_rank, background, tmp_path):
    """Such as one on a GPU, for which the host has no memory. Nobody waits for its checksum."""
    save(tmp_path, {"a": MATRIX}, "good", pool.group())
    fails = Mock(side_effect=MemoryError("no memory"))
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == bad_rank:
            patch.setattr(checkpoint, "bytes_of", fails)
        with pytest.raises(MemoryError, match="no memory"):
            save(tmp_path, {"a": MATRIX}, "lost", pool.group(), background=background)
    assert load(tmp_path, {}, pool.group()) == "good"


@pytest.mark.parametrize("bad_rank", [0, 1])
@pool.on(2)
def test_an_error_that_cannot_be_pickled_is_an_error_on_all(bad_rank, tmp_path):
    class LocalError(Exception):
        pass

    fails = Mock(side_effect=LocalError("quota exceeded"))
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == bad_rank:
            patch.setattr(checkpoint, "describe", fails)
        with pytest.raises(RuntimeError, match="LocalError: quota exceeded"):
            save(tmp_path, {"a": MATRIX}, None, pool.group())


# ---- in the background


@pool.on(2)
def test_a_background_save_has_the_values_of_the_step_that_saved(tmp_path):
    shard = torch.arange(15.0) + 15 * pool.rank()
    pieces = {"a": flat_pieces(shard, (6, 5), 15 * pool.rank())}
    is_copied = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        write = checkpoint.write
        patch.setattr(checkpoint, "write", lambda *args: is_copied.wait() and write(*args))
        handle = save(
            tmp_path,
            pieces,
            "step 1",
            pool.group(),
            background=True,
        )
        shard.zero_()  # training goes on
        assert not (tmp_path / "latest").exists()
        is_copied.set()
        handle.wait()
    found = torch.zeros(6, 5)
    assert load(tmp_path, {"a": found}, pool.group()) == "step 1"
    assert torch.equal(found, torch.arange(30.0).view(6, 5))


@pool.on(3)
def test_a_save_waits_for_the_one_before(tmp_path):
    """Without a wait(): five saves in a row, in the background and not, leave the last two."""
    for step in range(5):
        mine = torch.tensor([100 * step + pool.rank()])
        pieces = {"a": Piece(mine, [3], [pool.rank()])}
        save(
            tmp_path,
            pieces,
            step,
            pool.group(),
            background=step != 2,
        )
    save(tmp_path, pieces, step, pool.group())
    found = torch.zeros(3, dtype=torch.long)
    assert load(tmp_path, {"a": found}, pool.group()) == 4
    assert found.tolist() == [400, 401, 402]
    numbers = {path.name for path in tmp_path.glob("[0-9]*")}
    assert numbers == {"5", "6"}


def write_to_a_full_disk(path, *_):
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"0")


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("call", ["wait", "save"])
@pool.on(2)
def test_a_background_error_is_raised_on_all_ranks_at_the_next_call(call, bad_rank, tmp_path):
    save(tmp_path, {"a": MATRIX}, "good", pool.group())
    pieces = {"a": flattened(MATRIX, 2, pool.rank())}
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == bad_rank:
            patch.setattr(checkpoint, "write", write_to_a_full_disk)
        handle = save(tmp_path, pieces, "lost", pool.group(), background=True)
        again = {
            "wait": handle.wait,
            "save": lambda: save(tmp_path, pieces, 0, pool.group()),
        }
        with pytest.raises(OSError, match=rf"{tmp_path} was not saved: .*No space left"):
            again[call]()
    assert load(tmp_path, {}, pool.group()) == "good"
    save(tmp_path, pieces, "good again", pool.group())
    assert load(tmp_path, {}, pool.group()) == "good again"


BEGINNINGS = {
    "folder": (checkpoint.Path, "mkdir"),
    "note": (checkpoint.Path, "touch"),
    "copy": (checkpoint, "host_copy"),
    "thread": (threading.Thread, "start"),
}


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("what", BEGINNINGS)
@pool.on(2)
def test_a_background_save_that_cannot_begin_on_one_rank_is_an_error_on_all(
    what, bad_rank, tmp_path
):
    """At once. Rank 0 would wait for the note of the other for ten minutes."""
    save(tmp_path, {"a": MATRIX}, "good", pool.group())
    pieces = {"a": flattened(MATRIX, 2, pool.rank())}
    fails = Mock(side_effect=OSError("No space left"))
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == bad_rank:
            patch.setattr(*BEGINNINGS[what], fails)
        patch.setattr(checkpoint.read_note, "__defaults__", (1,))  # seconds of patience
        with pytest.raises(OSError, match=r"^No space left"):
            save(tmp_path, pieces, "lost", pool.group(), background=True)
    save(tmp_path, pieces, "good again", pool.group(), background=True).wait()
    assert load(tmp_path, {}, pool.group()) == "good again"


FAILS_AT_THE_END = """
import sys, torch, checkpoint
checkpoint.write = lambda *_: open("/dev/full", "wb", buffering=0).write(b"0")
checkpoint.save(sys.argv[1], {"a": torch.ones(2)}, background=True)
"""


def test_a_background_error_at_the_end_of_the_process_is_printed(tmp_path):
    command = [sys.executable, "-c", FAILS_AT_THE_END, tmp_path]
    where = os.path.dirname(checkpoint.__file__)
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=where,
        timeout=120,
        check=True,
    )
    assert f"the checkpoint in {tmp_path} was not saved: [Errno 28]" in ended.stderr


def test_a_process_that_ends_has_published_its_last_background_save(tmp_path):
    child = os.fork()
    if child == 0:
        save(tmp_path, {"a": MATRIX}, "last", background=True)
        threading._shutdown()  # what the interpreter calls when the main thread ends
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(load_whole(tmp_path)["a"], MATRIX)


def test_a_process_killed_during_a_background_save_leaves_a_whole_checkpoint(tmp_path):
    save(tmp_path, {"a": MATRIX}, "first")
    for moment in ("write", "publish"):
        child = os.fork()
        if child == 0:
            setattr(checkpoint, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            save(tmp_path, {"a": -MATRIX}, "second", background=True).wait()
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert torch.equal(load_whole(tmp_path)["a"], MATRIX)
    save(tmp_path, {"a": -MATRIX}, "second", background=True).wait()
    assert load(tmp_path, {}) == "second"


def test_a_background_save_holds_one_copy(tmp_path):
    whole = torch.zeros(1000, 1000)
    rows = whole[::2]  # not dense
    tracked = []
    empty = torch.empty

    def tracked_empty(*args, **options):
        tracked.append(empty(*args, **options))
        return tracked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", tracked_empty)
        save(tmp_path, {"a": rows}, background=True).wait()
    assert sum(tensor.untyped_storage().nbytes() for tensor in tracked) == rows.nbytes


# ---- crashes


def test_what_a_killed_save_left_is_not_in_the_next_checkpoint(tmp_path):
    """Such as the note of a rank, which would say that its part is on the disk."""
    left = tmp_path / "tmp" / "1.json"
    left.parent.mkdir()
    left.write_text("{}")
    save(tmp_path, {"a": MATRIX})
    names = {path.name for path in tmp_path.glob("1/*")}
    assert names == {"index", "0.bin"}


def test_files_are_on_the_disk_before_their_names_are(tmp_path, monkeypatch):
    """A rank's file; the index, its directory and the number; then two renames."""
    fsync = Mock()
    monkeypatch.setattr("os.fsync", fsync)
    save(tmp_path, {"a": torch.tensor(0)})
    assert fsync.call_count == 6
    for call in fsync.call_args_list:
        with pytest.raises(OSError, match="Bad file descriptor"):  # it is closed
            os.fstat(*call.args)


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
    is_killed = True
    while is_killed:
        save(tmp_path, {"a": torch.tensor(0)}, 0)
        is_killed = save_and_die(tmp_path, 1, len(found) + 1)
        a = torch.tensor(-1)
        assert load(tmp_path, {"a": a}) == a
        found.append(a.item())
    assert found == sorted(found)
    assert set(found[:-1]) == {0, 1}
    kept = list(tmp_path.glob("[0-9]*"))
    assert len(kept) == 2


@pool.on(2)
def test_a_full_disk_on_one_rank_is_raised_on_all(tmp_path):
    """The checkpoint before is still there."""
    mine = flattened(MATRIX, 2, pool.rank())
    pieces = {"a": mine}
    save(tmp_path, pieces, None, pool.group())
    with pytest.MonkeyPatch.context() as patch:
        if pool.rank() == 1:
            full = Mock(return_value=open("/dev/full", "wb"))  # noqa: SIM115
            patch.setattr(checkpoint, "open", full, raising=False)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path, pieces, None, pool.group())
    assert torch.equal(load_whole(tmp_path)["a"], MATRIX)


@pytest.mark.parametrize("name", ["0.bin", "index"])
def test_a_damaged_file_is_an_error_that_names_it(name, tmp_path):
    save(tmp_path, {"a": MATRIX})
    path = tmp_path / "1" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4  # one bit
    for damaged in (data, data[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=f"1/{name} is damaged"):
            load_whole(tmp_path)


# ---- errors, on all ranks if one is wrong

ROWS = MATRIX[:3]
TOP = Piece(ROWS, [6, 5], [0, 0])
OF_RANK_1 = {
    "save past the end": (save, Piece(MATRIX, [6, 5], [1, 0])),
    "save another whole": (save, MATRIX[1:]),
    "load another dtype": (load, ROWS.double()),
    "load more than was saved": (load, MATRIX),
}


@pytest.mark.parametrize("what", OF_RANK_1)
@pool.on(2)
def test_a_wrong_piece_on_one_rank_is_an_error_on_all(what, tmp_path):
    save(tmp_path, {"a": TOP}, None, pool.group())
    call, piece = OF_RANK_1[what]
    pieces = {"a": piece if pool.rank() == 1 else TOP}
    with pytest.raises(ValueError, match=r"no piece|lacks elements"):
        call(tmp_path, pieces, process_group=pool.group())


def test_a_name_that_is_no_string_is_an_error_before_anything_is_written(tmp_path):
    """JSON would turn it into a string, which load() does not find."""
    with pytest.raises(ValueError, match="names must be strings"):
        save(tmp_path, {0: ROWS})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("whole", [MATRIX[:1, 3], MATRIX[:1, :1], MATRIX[2, 3]])
def test_a_single_element_of_a_larger_tensor_comes_back(whole, tmp_path):
    save(tmp_path, {"a": whole})
    loaded = torch.zeros_like(whole)
    load(tmp_path, {"a": loaded})
    assert torch.equal(loaded, whole)


def test_a_piece_has_as_many_dimensions_as_its_whole(tmp_path):
    with pytest.raises(ValueError, match="argument 2 is longer"):
        save(tmp_path, {"a": Piece(ROWS[0], [6, 5], [0])})
    assert not list(tmp_path.iterdir())


def test_only_boxes_that_overlap_are_read(tmp_path):
    bottom = Piece(ROWS, [6, 5], [3, 0])
    save(tmp_path, {"a": [TOP, bottom]})
    path = tmp_path / "1" / "0.bin"
    first_box = path.read_bytes()[: ROWS.nbytes]
    path.write_bytes(first_box)
    load(tmp_path, {"a": TOP})


def test_a_saved_box_is_read_once_for_all_pieces_that_overlap(tmp_path, monkeypatch):
    """As flat shards of ZeRO need up to 2n - 1 pieces of a tensor."""
    bottom = Piece(MATRIX[3:], [6, 5], [3, 0])
    save(tmp_path, {"a": [TOP, bottom], "b": MATRIX})
    read_box = Mock(side_effect=checkpoint.read_box)
    monkeypatch.setattr(checkpoint, "read_box", read_box)
    pieces = {"a": flat_pieces(torch.zeros(25), [6, 5], 3), "b": torch.zeros(6, 5)}
    load(tmp_path, pieces)
    assert len(pieces["a"]) == 3
    assert read_box.call_count == 2 + 1
    assert_are_parts_of(MATRIX, pieces)


@pool.on(2)
def test_the_idea_builds_whole_tensors_on_rank_0_alone(tmp_path):
    pieces = {"a": flattened(MATRIX, 2, pool.rank())}
    whole_piece = Mock(side_effect=checkpoint.whole_piece)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "whole_piece", whole_piece)
        checkpoint.gather_and_save(tmp_path / "whole", pieces, pool.group())
    assert whole_piece.called == (pool.rank() == 0)
    assert torch.equal(torch.load(tmp_path / "whole")["a"], MATRIX)


@pool.on(2)
def test_ranks_that_find_different_checkpoints_are_an_error(tmp_path):
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        save(directory, {"a": MATRIX}, None, pool.group())
    mine = directories[pool.rank()]
    with pytest.raises(OSError, match="different checkpoints"):
        load(mine, {}, pool.group())
