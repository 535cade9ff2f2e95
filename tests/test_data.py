"""data.py: files as Megatron-LM's, byte for byte; nothing half-written; samples by a seed, on any grid."""

import hashlib
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import ROOT, descendants, launch

import data
from data import GPTDataset, IndexedDataset, part_of_batch, preprocess, write_indexed

PROC = Path("/proc/self/maps")
TEXTS = ["It was…", "", "a\x00b\n", "<|endoftext|>", " 世界 ", *(f"{n} line\r\n" * n for n in range(300))]


def as_megatron_writes(documents, code=8):
    """-> bytes of .bin and .idx, put together value by value"""
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    n, lengths = len(documents), [len(document) for document in documents]
    tokens = b"".join(struct.pack(f"<{len(document)}{letter}", *document) for document in documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, n, n + 1) + struct.pack(f"<{n}i", *lengths)
    index += struct.pack(f"<{n}q", *(size * sum(lengths[:i]) for i in range(n)))
    return tokens, index + struct.pack(f"<{n + 1}q", *range(n + 1))


def written(prefix):
    return tuple(Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx"))


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def error_of(monkeypatch, capsys, *arguments):
    """-> exit status of the command line, what it wrote to stderr"""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(data.main())
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("vocab_size", "code"), [(257, 8), (65499, 8), (65500, 4)])
def test_files_are_megatrons_byte_for_byte_and_read_back(vocab_size, code, tmp_path):
    documents = [[0, vocab_size - 1, 7], [], [5], list(range(100))]
    write_indexed(tmp_path / "x", iter(documents), vocab_size)
    assert written(tmp_path / "x") == as_megatron_writes(documents, code)
    indexed = IndexedDataset(tmp_path / "x")
    assert [document.tolist() for document in indexed] == documents
    assert pickle.loads(pickle.dumps(indexed))[2].tolist() == [5]
    assert len(pickle.dumps(indexed)) < 300  # the name, not the content, goes to a DataLoader's workers
    for mapped in (True, False) if PROC.exists() else ():
        assert (str(tmp_path / "x.bin") in PROC.read_text()) == mapped
        indexed.close()
    for tokens in ([vocab_size], [-1], [0.5]):
        with pytest.raises(ValueError, match=f"integers from 0 to {vocab_size - 1}, unlike"):
            write_indexed(tmp_path / "x", [[1, 2], tokens], vocab_size)
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]
    assert written(tmp_path / "x") == as_megatron_writes(documents, code)


def test_no_index_stands_beside_the_tokens_of_another(tmp_path, monkeypatch):
    """Whenever it is stopped: the old one goes first, the new one comes last."""
    there, replace = [], os.replace
    index = tmp_path / "x.idx"
    monkeypatch.setattr(os, "replace", lambda *names: there.append(index.exists()) or replace(*names))
    for documents in ([[1]], [[2, 3]]):
        write_indexed(tmp_path / "x", documents, 257)
    assert there == [False] * 4


INDEX = as_megatron_writes([[1, 2, 3], [4, 5]])[1]
REFUSED = [
    ("idx", INDEX[:20], "20 bytes that begin with"),
    ("idx", INDEX[:-1], f"{len(INDEX) - 1} bytes; 2 sequences in 2 documents are {len(INDEX)}"),
    ("idx", INDEX + b"\0", f"are {len(INDEX)}"),
    ("idx", b"TNTIDX\0\0" + INDEX[8:], "begin with b'TNTIDX"),
    ("idx", INDEX[:9] + b"\2" + INDEX[10:], "version 2, not 1"),
    ("idx", INDEX[:17] + b"\x09" + INDEX[18:], "dtype 9, not 1 to 8"),
    ("idx", INDEX[:34] + struct.pack("<2i", 2, 3) + INDEX[42:], "offsets of its 2 sequences"),
    ("idx", INDEX[:34] + struct.pack("<2i", 3, 9) + INDEX[42:], "10 bytes; by .* they must be 24"),
    ("bin", b"123456789", "9 bytes; by .* they must be 10"),
]


@pytest.mark.parametrize(("kind", "content", "words"), REFUSED)
def test_truncated_and_foreign_files_are_refused(kind, content, words, tmp_path):
    write_indexed(tmp_path / "x", [[1, 2, 3], [4, 5]], 257)
    (tmp_path / f"x.{kind}").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_are_in_order_whatever_the_number_of_workers(workers, tmp_path, monkeypatch):
    """Hundreds of chunks, some of one long line; two keys; no newline at the end; empty texts, which are left out."""
    monkeypatch.setattr(data, "chunks", lambda path, chunks=data.chunks: chunks(path, 2000))
    source = jsonl(tmp_path / "in", [{"text": text, "other": str(n), "n": n} for n, text in enumerate(TEXTS)])
    source.write_bytes(source.read_bytes()[:-1])
    preprocess(source, tmp_path / "out", ("other", "text", "other"), append_eod=True, workers=workers)
    for key, texts in (("text", TEXTS), ("other", map(str, range(len(TEXTS))))):
        expected = [[*text.encode(), 256] for text in texts if text]
        assert written(tmp_path / f"out_{key}_document") == as_megatron_writes(expected)


def untraced(*arguments, work=data.work):
    tracemalloc.stop()
    work(*arguments)


def test_memory_does_not_grow_with_the_input(tmp_path, monkeypatch):
    """Of the process that reads and writes; those that tokenise have one chunk each, read ahead."""
    monkeypatch.setattr(data, "chunks", lambda path, chunks=data.chunks: chunks(path, 2**16))
    monkeypatch.setattr(data, "work", untraced)
    peaks, source = [], tmp_path / "in"
    for lines in (25_000, 100_000):
        source.write_bytes(b'{"text": "some words"}\n' * lines)
        tracemalloc.start()
        preprocess(source, tmp_path / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18  # lengths, offsets and numbers of 75,000 documents are 1.5 MB
    read = []
    for taken, (job, result) in enumerate(data.in_order(abs, ((read.append(n) or n,) for n in range(50)), 2)):
        assert (*job, result) == (taken, taken)
        assert len(read) <= taken + 1 + 2
    assert len(read) == 50


BAD = {
    b'{"text": "a"': "not JSON: Expecting ',' delimiter: column 13",
    b"": "not JSON: Expecting value: column 1",
    b'{"text": "\xff"}': "not JSON: 'utf-8' codec can't decode byte 0xff in position 10",
    b"[" * 100_000: "not JSON: maximum recursion depth",
    b'["text"]': "no key 'text' in ['text']",
    b'{"txt": "a", "id": 3}': "no key 'text' in {'txt': 'a', 'id': 3}",
    b'{"text": null}': "'text' is no string, but of type NoneType",
    rb'{"text": "\ud800"}': "surrogates not allowed",
}


@pytest.mark.parametrize("line", BAD, ids=BAD.values())
def test_a_bad_line_is_named(line):
    lines = b'{"text": "good"}\n' * 3 + line + b'\n{"text": "good"}'
    with pytest.raises(ValueError, match=r"^in:13: .*" + re.escape(BAD[line])):
        data.encode(("text",), True, (None, None), "<u2", "in", 10, lines)


ERRORS = [
    ("--input bad --output-prefix out --workers 2", 1, "bad:100001: not JSON: Expecting value: column 10 (char 9);"),
    ("--input nothing --output-prefix out", 1, "No such file or directory: 'nothing'"),
    ("--input empty --output-prefix out", 1, "out_text_document: there is no text to write"),
    ("--input empty --output-prefix out --vocab-file v", 2, "--merge-file come together"),
    ("--input empty --output-prefix out --workers 0", 2, "--workers must be positive"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), ERRORS)
def test_an_error_is_one_line_and_changes_nothing(arguments, status, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_indexed("out_text_document", [[1]], 257)
    jsonl(tmp_path / "empty", [{"text": ""}])
    (tmp_path / "bad").write_bytes(b'{"text": "good"}\n' * 100_000 + b'{"text": bad}\n{"text": "good"}')
    files, before = sorted(os.listdir(tmp_path)), written("out_text_document")
    code, error = error_of(monkeypatch, capsys, *arguments.split())
    assert (code, error.count("\n"), error[:7], words in error) == (status, 1, "error: ", True), error
    assert (sorted(os.listdir(tmp_path)), written("out_text_document")) == (files, before)


STOPPED = {  # status, what stderr says
    "SIGTERM": (143, ""),
    "Ctrl-C": (1, "error: interrupted; nothing was written\n"),
    "a worker dies": (1, "a worker was killed"),
    "the disk is full": (1, "File too large"),
    "killed": (-9, ""),  # what is half-written stays, but has no name that anyone reads
}


def ignores_interrupts(pid):
    ignored = re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(ignored, 16) >> (signal.SIGINT - 1) & 1


@pytest.mark.skipif(not PROC.exists(), reason="needs /proc, to see other processes")
@pytest.mark.parametrize("why", STOPPED)
def test_stopped_in_the_middle_nothing_half_written_and_no_process_is_left(why, tmp_path):
    os.mkfifo(tmp_path / "in")
    mark = f"LAUNCHED_BY_TEST={tmp_path}"
    limit = f"ulimit -f {1000 if why == 'the disk is full' else 'unlimited'}"
    command = f"{limit}; exec '{sys.executable}' '{ROOT}/data.py' --input in --output-prefix out --workers 2"
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=tmp_path, env=os.environ | dict([mark.split("=")]), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with open(tmp_path / "in", "wb", buffering=0) as pipe:  # once it is written, all is read but what the pipe holds
        pipe.write((json.dumps({"text": 1000 * "x"}) + "\n").encode() * 3000)
        workers = [pid for pid in descendants(mark) if pid != process.pid]
        assert why == "the disk is full" or (len(workers), len(os.listdir(tmp_path))) == (2, 3)
        if why in ("Ctrl-C", "SIGTERM"):
            end = time.monotonic() + 5  # for them to have started
            while not all(map(ignores_interrupts, workers)) and time.monotonic() < end:
                time.sleep(0.02)
            assert all(map(ignores_interrupts, workers))  # the first process sees to their end
            os.killpg(process.pid, signal.SIGINT if why == "Ctrl-C" else signal.SIGTERM)
        elif why != "the disk is full":
            os.kill(workers[0] if why == "a worker dies" else process.pid, signal.SIGKILL)
    stderr, end = process.communicate(timeout=30)[1], time.monotonic() + 5
    while descendants(mark) and time.monotonic() < end:
        time.sleep(0.02)
    assert descendants(mark) == []
    assert (process.returncode, STOPPED[why][1] in stderr) == (STOPPED[why][0], True), stderr
    assert stderr.count("\n") == bool(stderr)
    assert [name for name in os.listdir(tmp_path) if why != "killed" or name[-4:] != ".tmp"] == ["in"]


def test_gpt2s_tokens(tmp_path):
    """By a vocabulary of our own, as tokenizers' class has them."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator([*TEXTS, "the lines of the world"], 400, special_tokens=["<|endoftext|>"])
    vocab, merges = theirs.save_model(str(tmp_path))
    theirs = tokenizers.ByteLevelBPETokenizer(vocab, merges)
    source = jsonl(tmp_path / "in", ({"text": text} for text in TEXTS))
    preprocess(source, tmp_path / "out", ("text",), vocab, merges, append_eod=True, workers=2)
    expected = [[*theirs.encode(text).ids, 0] for text in TEXTS if text]
    assert all(0 not in document[:-1] for document in expected)  # "<|endoftext|>" in a text ends no document
    assert written(tmp_path / "out_text_document") == as_megatron_writes(expected)


VOCABULARIES = {
    "whole": "has no <|endoftext|>",
    "part": "lacks 255 of 256 bytes",
    "nothing": "Error while reading BPE files",
    "package": "takes the package tokenizers: pip install tokenizers",
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_in_which_text_would_be_lost_is_refused(name, tmp_path, monkeypatch):
    pre_tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed").pre_tokenizers
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "part").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "whole").write_text(json.dumps(letters))
    (tmp_path / "none").write_text("#version: 0.2\n")
    if name == "package":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=re.escape(VOCABULARIES[name])):
        preprocess(tmp_path / "none", tmp_path / "y", ("text",), str(tmp_path / name), str(tmp_path / "none"), True)


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1)


@given(lengths=LENGTHS, s=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_samples_are_the_cuts_of_the_shuffled_documents(lengths, s, seed, tmp_path_factory):
    """Each of an epoch once, whatever the number that is planned; any one first; empty documents do no harm."""
    s, prefix, numbers = min(s, sum(lengths) - 1), tmp_path_factory.mktemp("data") / "x", iter(range(sum(lengths)))
    write_indexed(prefix, [[next(numbers) for _ in range(length)] for length in lengths], 257)
    indexed, n = IndexedDataset(prefix), (sum(lengths) - 1) // s
    dataset, shorter = GPTDataset(indexed, s, 3 * n, seed), GPTDataset(indexed, s, 3 * n - 1, seed)
    for epoch in (2, 0, 1):
        documents, samples, shuffle = dataset.indices(epoch)
        assert (sorted(documents), sorted(shuffle), samples.shape) == ([*range(len(lengths))], [*range(n)], (n, 2))
        text = np.concatenate([indexed[d] for d in documents]).tolist()
        cuts = [text[j * s : j * s + s + 1] for j in range(n)]
        assert [indexed[documents[place]][offset] for place, offset in samples] == [cut[0] for cut in cuts]
        assert [dataset[epoch * n + i].tolist() for i in range(n)] == [cuts[j] for j in shuffle]
    assert all(np.array_equal(sample, dataset[i]) for i, sample in enumerate(shorter))
    assert len(list(shorter)) == len(shorter) == 3 * n - 1


def test_the_order_is_the_seeds_alone(tmp_path):
    """On every machine, with every numpy: pinned. Another seed and another epoch have another."""
    write_indexed(tmp_path / "x", [range(n, n + 9) for n in range(100)], 257)
    indexed = IndexedDataset(tmp_path / "x")
    orders = [np.concatenate(GPTDataset(indexed, 5, 1, n % 2).indices(n // 2), None).tolist() for n in range(3)]
    assert hashlib.sha256(str(orders[0]).encode()).hexdigest()[:16] == "e93fe7cb82fe792a"
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("size", [1, 6, 8, 13])
def test_the_global_batch_is_the_same_on_every_grid(size, tmp_path):
    write_indexed(tmp_path / "x", [range(n, n + 9) for n in range(40)], 257)
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), 5, 10 * size)
    for step in (0, 9):
        whole = torch.from_numpy(np.stack([dataset[step * size + i] for i in range(size)]))
        for ranks in range(1, 9):
            parts = [[dataset[i] for i in part_of_batch(step, size, rank, ranks)] for rank in range(ranks)]
            chunks = whole.chunk(ranks)
            assert all(np.array_equal(part, chunk) for part, chunk in zip(parts, chunks, strict=False))
            assert not any(parts[len(chunks) :])


WRONG = {
    "sequence_length=18: 1 to 17": lambda x: GPTDataset(x, 18, 1),
    "sequence_length=0": lambda x: GPTDataset(x, 0, 1),
    "num_samples=0: from 1": lambda x: GPTDataset(x, 17, 0),
    "seed=-1: 0 to 4294967295": lambda x: GPTDataset(x, 2, 1, -1),
    "rank=2 from 0 to 1": lambda x: part_of_batch(0, 8, 2, 2),
    "2 sequences in 1 documents": lambda x: GPTDataset(setattr(x, "document_indices", [0, 2]) or x, 2, 1),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_a_value_error_with_the_numbers(words, tmp_path):
    write_indexed(tmp_path / "x", [range(9), range(9)], 257)
    with pytest.raises(ValueError, match=words):
        WRONG[words](IndexedDataset(tmp_path / "x"))


def test_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    source = jsonl(tmp_path / "in", ({"text": "x" * 1000} for _ in range(3000)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(time, "monotonic", iter(range(10**6)).__next__)
    preprocess(source, tmp_path / "out")
    _, bars = capsys.readouterr().out.split("\n", 1)
    assert re.match(r"█{6}·{14}  35%   1,0\d\d documents   \d\.\d MB/s   \d+ s left\x1b\[K\r█{13}", bars)
    assert re.search(r"\r\x1b\[K\S+out_text_document: 3,000 documents, 3,000,000 tokens, \d\.\d MB/s\n$", bars)


def test_the_demonstration(tmp_path):
    """Of several ranks one shows it; nothing is left."""
    ranks = [launch([sys.executable, ROOT / "data.py"], "/", env={"RANK": n, "TMPDIR": str(tmp_path)}) for n in "01"]
    assert [(done.returncode, done.stderr, bool(done.stdout)) for done in ranks] == [(0, "", True), (0, "", False)]
    for words in ("data · ", "read back: each document as it was", "epoch 0: ", "; step 0, a batch of 8:"):
        assert words in ranks[0].stdout
    assert os.listdir(tmp_path) == []
