"""data.py: Megatron-LM's files byte for byte, nothing half-written, samples by a seed."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, descendants, launch

import data
from data import GPTDataset, IndexedDataset, part_of_batch, preprocess, write_indexed


def as_megatron_writes(documents, code=8):
    """Return the bytes of PREFIX.bin and of PREFIX.idx."""
    n = len(documents)
    dtype = {8: "<u2", 4: "<i4"}[code]
    lengths = [len(document) for document in documents]
    offsets = (np.cumsum(lengths) - lengths) * int(dtype[-1])
    index = b"MMIDIDX\0\0" + struct.pack("<qB", 1, code)
    index += struct.pack("<qq", n, n + 1)
    index += np.array(lengths, "<i4").tobytes()
    index += np.array([*offsets, *range(n + 1)], "<i8").tobytes()
    tokens = np.concatenate(documents).astype(dtype)
    return tokens.tobytes(), index


def written(prefix):
    tokens = Path(f"{prefix}.bin")
    index = Path(f"{prefix}.idx")
    return tokens.read_bytes(), index.read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- the format


@pytest.mark.parametrize(
    ("vocab_size", "code"),
    [(65499, 8), (65500, 4)],
)
def test_files_are_megatrons_byte_for_byte_and_read_back(vocab_size, code, folder):
    documents = [[0, vocab_size - 1, 7], [], [5], [*range(100)]]
    write_indexed("x", iter(documents), vocab_size)
    assert written("x") == as_megatron_writes(documents, code)
    indexed = IndexedDataset("x")
    assert [document.tolist() for document in indexed] == documents
    with pytest.raises(ValueError, match="must be 1 to 103"):
        GPTDataset(indexed, 104, 1)
    with pytest.raises(ValueError, match="seed=4294967296 0 to 4294967295"):
        GPTDataset(indexed, 9, 1, 2**32)


INTEGERS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@pytest.mark.parametrize("code", INTEGERS)
def test_tokens_of_all_of_megatrons_integers_are_read(code, folder):
    tokens = np.arange(5).astype(INTEGERS[code])
    header = b"MMIDIDX\0\0" + struct.pack("<qBqq", 1, code, 1, 2)
    lengths = np.array([5], "<i4").tobytes()
    Path("x.idx").write_bytes(header + lengths + struct.pack("<qqq", 0, 0, 1))
    Path("x.bin").write_bytes(tokens.tobytes())
    (document,) = IndexedDataset("x")
    assert document.dtype == tokens.dtype
    assert document.tolist() == [0, 1, 2, 3, 4]


def test_an_index_is_never_beside_the_tokens_of_another(folder, monkeypatch):
    """The old one goes first, the new comes last."""
    there = []
    real_replace = os.replace

    def replace(*names):
        there.append(Path("x.idx").exists())
        real_replace(*names)

    monkeypatch.setattr(os, "replace", replace)
    write_indexed("x", [[1]], 257)
    write_indexed("x", [[2]], 257)
    assert there == [False] * 4


def test_both_files_are_on_the_disk_whole_before_they_get_their_names(folder, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    write_indexed("x", [[1, 2, 3], [4, 5]], 257)
    assert sizes[:2] == [*map(len, written("x"))]


# header of 34 bytes, lengths 8, offsets 16, documents 24
TOKENS, INDEX = as_megatron_writes([[1, 2, 3], [4, 5]])


def test_control_c_does_not_part_the_files(folder, monkeypatch):
    """Signals are ignored until both have their names."""
    real_replace = os.replace

    def replace(*names):
        signal.raise_signal(signal.SIGINT)
        real_replace(*names)

    monkeypatch.setattr(os, "replace", replace)
    handler = Mock()
    previous = signal.signal(signal.SIGINT, handler)
    write_indexed("x", [[1, 2, 3], [4, 5]], 257)
    handler.assert_not_called()
    assert signal.signal(signal.SIGINT, previous) is handler


def test_any_thread_may_write(folder):
    """Although only the main thread may say what signals do."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            write_indexed,
            "x",
            [[1, 2, 3], [4, 5]],
            257,
        ).result()
    assert written("x") == (TOKENS, INDEX)


def changed(start, new):
    return INDEX[:start] + new + INDEX[start + len(new) :]


DAMAGED = {
    "81 bytes, but an index of 2 sequences in 2 documents": INDEX[:-1],
    "begins with b'TNTIDX": changed(0, b"TNTIDX"),
    "version 2": changed(9, b"\2"),
    "the offsets of its 2 sequences are not": changed(34, b"\2"),
    r"10 bytes, but x\.idx says 12": changed(38, b"\3"),
}


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_index_is_an_error_that_says_what_is_wrong(words, folder):
    Path("x.idx").write_bytes(DAMAGED[words])
    Path("x.bin").write_bytes(TOKENS)
    with pytest.raises(ValueError, match=words):
        IndexedDataset("x")


@pytest.mark.parametrize("token", [257, -1, 0.5])
def test_what_is_no_token_is_an_error_and_the_old_files_stay(token, folder):
    write_indexed("x", [[1, 2, 3], [4, 5]], 257)
    with pytest.raises(ValueError, match="integers from 0 to 256"):
        write_indexed("x", [[1], [token]], 257)
    assert written("x") == (TOKENS, INDEX)
    assert sorted(os.listdir()) == ["x.bin", "x.idx"]


# ---- text to tokens

TEXTS = [
    "It was…",
    "",
    "a\x00b\n",
    "<|endoftext|>",
    " 世界 ",
    *(f"{n} line\r\n" * n for n in range(300)),
]


def write_input():
    """Without a newline at the end."""
    records = [{"text": text, "other": str(n)} for n, text in enumerate(TEXTS)]
    text = "\n".join(map(json.dumps, records))
    Path("in").write_text(text)


def test_documents_of_several_workers_are_in_order(folder, monkeypatch):
    """Hundreds of chunks, two keys, empty texts left out."""
    monkeypatch.setattr(data, "CHUNK", 2000)
    write_input()
    preprocess(
        "in",
        "out",
        ("other", "text", "other"),
        append_eod=True,
        workers=3,
    )
    texts = [[*text.encode(), 256] for text in TEXTS if text]
    numbers = [[*b"%d" % n, 256] for n in range(len(TEXTS))]
    assert written("out_text_document") == as_megatron_writes(texts)
    assert written("out_other_document") == as_megatron_writes(numbers)


def test_tokens_are_those_of_the_vocabulary(folder):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, 300, special_tokens=["<|endoftext|>"])
    files = trained.save_model(".")
    write_input()
    preprocess(
        "in",
        "out",
        ("text",),
        *files,
        append_eod=True,
        workers=2,
    )
    bpe = tokenizers.ByteLevelBPETokenizer(*files)
    texts = [[*bpe.encode(text).ids, 0] for text in TEXTS if text]
    assert written("out_text_document") == as_megatron_writes(texts)


def test_a_vocabulary_that_would_lose_bytes_is_an_error(folder):
    pytest.importorskip("tokenizers")
    Path("merges").write_text("#version: 0.2\n")
    Path("part").write_text('{"!": 0}')
    write_input()
    with pytest.raises(ValueError, match="lacks 255 of 256 bytes"):
        preprocess("in", "out", ("text",), "part", "merges")


def test_a_vocabulary_without_an_end_of_document_is_an_error_that_names_it(folder):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, 300)
    files = trained.save_model(".")
    write_input()
    with pytest.raises(ValueError, match=r"vocab\.json has no <\|endoftext\|>"):
        preprocess("in", "out", ("text",), *files, append_eod=True)


GOOD = b'{"text": "' + 1000 * b"x" + b'"}\n'
LINES = {
    "not JSON: Expecting ',' delimiter: column 13": b'{"text": "a"',
    "no key 'text' in ['text']": b'["text"]',
    "'text' must be a string, not of type NoneType": b'{"text": null}',
    "'utf-8' codec can't encode character '\\ud800'": rb'{"text": "\ud800"}',
}


@pytest.mark.parametrize("words", LINES)
def test_a_wrong_line_is_an_error_with_its_number_and_nothing_is_written(words, folder):
    Path("in").write_bytes(2000 * GOOD + LINES[words])
    expected = re.escape(f"in:2001: {words}")
    with pytest.raises(ValueError, match=expected):
        preprocess("in", "out", workers=2)
    assert os.listdir() == ["in"]


def test_it_says_how_much_was_read_and_left_out(folder, capsys):
    Path("in").write_bytes(2000 * GOOD + b'{"text": ""}\n')  # 1,013 bytes a line
    start = time.monotonic()
    preprocess("in", "out")
    slowest = 2.026 / (time.monotonic() - start)
    printed = capsys.readouterr().out
    assert "in, 2.0 MB · vocabulary of 257 · --workers 1\n" in printed
    assert "2,000 documents, 2,000,000 tokens, 1 empty left out, " in printed
    (rate,) = re.findall(r"(\S+) MB/s\n", printed)
    assert float(rate) > slowest - 0.1


def test_a_counter_on_a_terminal_is_cleared(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Path("in").write_bytes(GOOD)
    preprocess("in", "out")
    assert "\x1b[K" in capsys.readouterr().out.splitlines()[-1]


def test_memory_does_not_grow_with_the_input(folder, monkeypatch):
    """Neither with its bytes, 460 kB, nor with what the index has of its documents, 400 kB."""
    Path("in").write_bytes(b'{"text": "some words"}\n' * 20_000)
    monkeypatch.setattr(data, "CHUNK", 2**14)
    tracemalloc.start()
    preprocess("in", "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


STOPPED = {  # status, what stderr says
    "a worker": (1, "was killed"),
    "the first process": (-9, ""),
}


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc, to see other processes")
@pytest.mark.parametrize("killed", STOPPED)
def test_killed_in_the_middle_nothing_half_written_and_no_process_is_left(killed, folder):
    status, words = STOPPED[killed]
    Path("in").write_bytes(100_000 * GOOD)  # 100 MB take half a second or more
    flags = ["--input", "in", "--output-prefix", "out", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "data.py", *flags],
        env={**os.environ, "LAUNCHED_BY_TEST": str(folder)},
        stderr=subprocess.PIPE,
    )
    hidden = Path(f"out_text_document.bin.{process.pid}.tmp")
    while process.poll() is None and not (hidden.exists() and hidden.stat().st_size):
        time.sleep(0.002)
    workers = {*descendants(f"LAUNCHED_BY_TEST={folder}")} - {process.pid}
    victim = min(workers) if killed == "a worker" else process.pid
    os.kill(victim, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)  # ends when the last process that writes is gone
    Path("in").unlink()
    assert len(workers) == 2
    assert process.returncode == status
    assert words in stderr.decode()
    left = {path.suffix for path in folder.iterdir()}
    assert left <= ({".tmp"} if status == -9 else set())


# ---- tokens to samples


@given(
    st.lists(st.integers(0, 9)).filter(lambda x: sum(x) > 1),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_samples_are_the_cuts_of_the_shuffled_documents(tmp_path, lengths, s, seed):
    """An epoch has each sample once, whatever number is planned. Empty documents do no harm."""
    total = sum(lengths)
    s = min(s, total - 1)
    n = (total - 1) // s
    ends = np.cumsum(lengths)
    documents = np.split(np.arange(total), ends[:-1])
    write_indexed(tmp_path / "x", documents, 1000)
    indexed = IndexedDataset(tmp_path / "x")
    dataset = GPTDataset(indexed, s, 3 * n, seed)
    for epoch in (2, 0, 1):
        order, _, shuffle = dataset.indices(epoch)
        assert sorted(order) == [*range(len(lengths))]
        assert sorted(shuffle) == [*range(n)]
        text = np.concatenate([indexed[d] for d in order]).tolist()
        expected = [text[j * s : j * s + s + 1] for j in shuffle]
        assert [dataset[epoch * n + i].tolist() for i in range(n)] == expected
    assert len(list(dataset)) == 3 * n


def test_the_order_is_the_seeds_alone(folder):
    """On every machine, with every numpy: pinned. Another seed and another epoch have another."""
    write_indexed("x", [range(9)] * 4, 257)
    pinned = {
        (0, 0): "02313564102",
        (1, 0): "03213256140",
        (0, 1): "12036405132",
    }
    for (seed, epoch), expected in pinned.items():
        dataset = GPTDataset(IndexedDataset("x"), 5, 1, seed)
        documents, _, shuffle = dataset.indices(epoch)
        assert "".join(map(str, [*documents, *shuffle])) == expected


GRIDS = [(1, 8), (6, 4), (13, 8)]  # sizes of a batch, ranks


@pytest.mark.parametrize(("size", "ranks"), GRIDS)
def test_every_grid_cuts_batches_as_torch_does(size, ranks):
    parts = [[*part_of_batch(9, size, rank, ranks)] for rank in range(ranks)]
    batch = torch.arange(9 * size, 10 * size)
    chunks = [chunk.tolist() for chunk in batch.chunk(ranks)]
    assert parts == chunks + [[]] * (ranks - len(chunks))


def test_a_rank_that_is_not_there_has_no_part_of_a_batch():
    with pytest.raises(ValueError, match="rank=2 0 to 1"):
        part_of_batch(0, 4, rank=2, ranks=2)


def as_megatron(tokens, eod):
    """Its loop over one sequence (megatron/core/datasets/gpt_dataset.py), with all three flags."""
    mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
    positions = np.arange(len(tokens))
    previous = 0
    for i in np.flatnonzero(tokens == eod):
        mask[i + 1 :, : i + 1] = False
        positions[i + 1 :] -= i + 1 - previous
        previous = i + 1
    return mask, positions, np.where(tokens == eod, np.float32(0), np.float32(1))


@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_document_fields_are_megatrons(rows):
    tokens = np.array(rows)
    fields = data.document_fields(tokens, 0)
    of_tensor = data.document_fields(torch.tensor(rows), 0)
    for field, tensor in zip(fields, of_tensor, strict=True):
        assert torch.equal(torch.from_numpy(field), tensor)
    for row, documents, positions, loss_mask in zip(tokens, *fields, strict=True):
        sees = np.tril(documents[:, None] == documents)
        expected = as_megatron(row, 0)
        for ours, theirs in zip((sees, positions, loss_mask), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)


def test_json_keys_as_one_string_are_an_error(folder):
    Path("texts").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"'text' must be a list"):
        preprocess("texts", "out", json_keys="text")
    assert [path.name for path in folder.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("code", "word"),
    [(6, "float64"), (7, "float32"), (9, "DeepSpeed")],
)
def test_dtype_codes_that_are_no_tokens_are_an_error(code, word, folder):
    """DeepSpeed's 9 is u4. Floating-point numbers would be truncated to tokens."""
    _, index = as_megatron_writes([[1, 2], [3]])
    index = bytearray(index)
    index[17] = code
    itemsize = np.dtype(data.DTYPES.get(code, "u4")).itemsize
    offset = 34 + 2 * 4 + 8  # of the second document
    index[offset : offset + 8] = struct.pack("<q", 2 * itemsize)
    Path("p.idx").write_bytes(index)
    Path("p.bin").write_bytes(bytes(3 * itemsize))
    with pytest.raises(ValueError, match=word):
        GPTDataset(IndexedDataset("p"), 2, 1)


def test_the_demonstration_leaves_nothing(tmp_path):
    done = launch([sys.executable, ROOT / "data.py"], "/", env={"RANK": "0", "TMPDIR": tmp_path})
    assert (done.returncode, done.stderr) == (0, "")
    assert "all documents are unchanged" in done.stdout
    assert os.listdir(tmp_path) == []
