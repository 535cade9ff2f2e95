"""data.py: Megatron-LM's files byte for byte, nothing half-written, samples by a seed."""

import json
import os
import pickle
import re
import resource
import signal
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

TEXTS = [
    "It was…",
    "",
    "a\x00b\n",
    "<|endoftext|>",
    " 世界 ",
    *(f"{n} line\r\n" * n for n in range(300)),
]
GOOD = b'{"text": "' + 1000 * b"x" + b'"}\n'


def as_megatron_writes(documents, code=8):
    """-> the bytes of PREFIX.bin and of PREFIX.idx"""
    n = len(documents)
    dtype = {8: "<u2", 4: "<i4"}[code]
    lengths = [len(document) for document in documents]
    offsets = (np.cumsum(lengths) - lengths) * int(dtype[-1])
    index = b"MMIDIDX\0\0" + np.array(1, "<i8").tobytes() + bytes([code])
    index += np.array([n, n + 1], "<i8").tobytes() + np.array(lengths, "<i4").tobytes()
    index += np.array([*offsets, *range(n + 1)], "<i8").tobytes()
    return np.concatenate(documents).astype(dtype).tobytes(), index


def written(prefix):
    return tuple(Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx"))


@pytest.mark.parametrize(("vocab_size", "code"), [(257, 8), (65499, 8), (65500, 4)])
def test_files_are_megatrons_byte_for_byte_and_read_back(vocab_size, code, tmp_path, monkeypatch):
    """An index never lies beside other tokens: the old one goes first, the new one comes last."""
    documents = [[0, vocab_size - 1, 7], [], [5], [*range(100)]]
    prefix = tmp_path / "x"
    replace = os.replace
    there = []

    def watched(*names):
        there.append(Path(f"{prefix}.idx").exists())
        replace(*names)

    monkeypatch.setattr(os, "replace", watched)
    for each in ([[1]], documents):
        write_indexed(prefix, iter(each), vocab_size)
    assert there == [False] * 4
    assert written(prefix) == as_megatron_writes(documents, code)
    indexed, pickled = IndexedDataset(prefix), pickle.dumps(IndexedDataset(prefix))
    assert not Path("/proc").exists() or f"{prefix}.bin" in Path("/proc/self/maps").read_text()
    assert len(pickled) < 300  # the name, not the content, goes to a DataLoader's workers
    for each in (indexed, pickle.loads(pickled)):
        assert [document.tolist() for document in each] == documents


# header of 34 bytes, lengths 8, offsets 16, documents 24
TOKENS, INDEX = as_megatron_writes([[1, 2, 3], [4, 5]])


def opened(index=INDEX, tokens=TOKENS):
    Path("x.idx").write_bytes(index)
    Path("x.bin").write_bytes(tokens)
    return IndexedDataset("x")


BE_INTEGERS = "integers from 0 to 256, unlike"
NOT_JSON = "1 error: in:2001: not JSON:"
WRONG = {  # message: the call, line or arguments that it is about. A status comes first
    f"{len(INDEX) - 1} bytes; 2 sequences in 2 documents are {len(INDEX)}": lambda: opened(
        INDEX[:-1]
    ),
    "begin with b'TNTIDX": lambda: opened(b"TNTIDX\0\0" + INDEX[8:]),
    "version 2, not 1": lambda: opened(INDEX[:9] + b"\2" + INDEX[10:]),
    "dtype 9, not 1 to 8": lambda: opened(INDEX[:17] + b"\x09" + INDEX[18:]),
    "idx: the offsets of its 2 sequences": lambda: opened(INDEX[:34] + b"\2" + INDEX[35:]),
    "offsets of its 2 sequences are not": lambda: opened(INDEX[:42] + b"\1" + INDEX[43:]),
    "9 bytes; x.idx says 10": lambda: opened(INDEX, b"123456789"),
    "2 sequences in 1 documents": lambda: GPTDataset(
        opened(INDEX[:26] + b"\2" + INDEX[27:-8]), 2, 1
    ),
    "sequence_length=5 must be 1 to 4": lambda: GPTDataset(opened(), 5, 1),
    "num_samples=0 1 or more": lambda: GPTDataset(opened(), 4, 0),
    "rank=2 0 to 1": lambda: part_of_batch(0, 8, 2, 2),
    f"{BE_INTEGERS} [257]": lambda: write_indexed("out_text_document", [[1], [257]], 257),
    f"{BE_INTEGERS} [-1]": lambda: write_indexed("out_text_document", [[1], [-1]], 257),
    f"{BE_INTEGERS} [0.5]": lambda: write_indexed("out_text_document", [[1], [0.5]], 257),
    f"{NOT_JSON} Expecting ',' delimiter: column 13 (char 12); nothing was": b'{"text": "a"',
    f"{NOT_JSON} 'utf-8' codec can't decode byte 0xff in position 10": b'{"text": "\xff"}',
    f"{NOT_JSON} maximum recursion depth": b"[" * 100_000,
    "1 error: in:2001: no key 'text' in ['text']; nothing was written": b'["text"]',
    "1 error: in:2001: no key 'text' in {'txt': 'a', 'id': 3}; nothing": b'{"txt": "a", "id": 3}',
    "1 error: in:2001: 'text' must be a string, not of type NoneType; nothing": b'{"text": null}',
    "1 error: in:2001: 'utf-8' codec can't encode character '\\ud800' in position 0": rb'{"text": "\ud800"}',
    "1 error: out_text_document: there is no text to write; nothing was written": b"",
    "1 error: . must be a regular file: workers read parts of it; nothing": "--input .",
    "1 error: [Errno 2] No such file or directory: 'no'; nothing": "--input no",
    "2 error: --workers must be positive": "--workers 0",
    "2 error: --workers must be positive, and --vocab-file needs --merge-file": "--merge-file part",
    "needs the package tokenizers: pip install tokenizers": "--vocab-file absent --merge-file merges",
    "1 error: whole has no <|endoftext|>, which --append-eod": "--vocab-file whole --merge-file merges --append-eod",
    "1 error: part lacks 255 of 256 bytes, such as": "--vocab-file part --merge-file merges",
    "1 error: whole, nothing: Error while reading BPE files": "--vocab-file whole --merge-file nothing",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_an_error_that_says_where_and_changes_nothing(
    words, tmp_path, monkeypatch, capsys
):
    wrong = WRONG[words]
    letters = map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])  # byte-level BPE's
    arguments = wrong if isinstance(wrong, str) else "--workers 2"
    line = wrong if isinstance(wrong, bytes) else b"0"
    if "absent" in arguments:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    elif "merge-file" in arguments:
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.chdir(tmp_path)
    write_indexed("out_text_document", [[1, 2, 3], [4, 5]], 257)
    Path("in").write_bytes(2000 * GOOD + line if line else b'{"text": ""}')
    Path("whole").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    Path("part").write_text('{"!": 0}')
    Path("merges").write_text("#version: 0.2\n")
    monkeypatch.setattr(
        sys, "argv", ["data.py", "--input", "in", "--output-prefix", "out", *arguments.split()]
    )
    with pytest.raises((ValueError, SystemExit)) as raised:
        wrong() if callable(wrong) else sys.exit(data.main())
    said = f"{raised.value} {capsys.readouterr().err}".strip()
    assert (words in said, "\n" in said) == (True, False), said
    assert (len(list(Path().glob("out*"))), written("out_text_document")) == (2, (TOKENS, INDEX))


@pytest.mark.parametrize(("workers", "vocabulary"), [(1, "bytes"), (3, "bytes"), (2, "GPT-2's")])
def test_documents_are_in_order_whatever_the_number_of_workers(
    workers, vocabulary, tmp_path, monkeypatch, capsys
):
    """Hundreds of chunks, two keys, no newline at the end, empty texts left out, a progress bar."""
    files, encode, end = (), str.encode, 256
    if vocabulary == "GPT-2's":  # one of our own, as tokenizers' class has it
        bpe = pytest.importorskip(
            "tokenizers", reason="tokenizers is not installed"
        ).ByteLevelBPETokenizer
        (trained := bpe()).train_from_iterator(TEXTS, 300, special_tokens=["<|endoftext|>"])
        files = trained.save_model(str(tmp_path))
        encode, end = lambda text: bpe(*files).encode(text).ids, 0
    lines = [{"text": text, "other": str(n), "n": n} for n, text in enumerate(TEXTS)]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(data, "CHUNK", 2000)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", iter(range(10**6)).__next__)
    preprocess(
        tmp_path / "in",
        tmp_path / "out",
        ("other", "text", "other"),
        *files,
        append_eod=True,
        workers=workers,
    )
    for key in ("text", "other"):
        expected = [
            [*encode(line[key]), end] for line in lines if line[key]
        ]  # "<|endoftext|>" ends no document
        assert written(tmp_path / f"out_{key}_document") == as_megatron_writes(expected)
    bar = r"\r█{10}·{10}  5[1-4]%   \d+ documents   0\.0 MB/s   \d+ s left\x1b\[K\r.*\r█{20} 100%   305 documents .*"
    end = r"\r\x1b\[K\S+_other_document: 305 documents, [\d,]+ tokens, 0\.0 MB/s\n\S+: 303 .*, 2 empty left out, .*\n$"
    assert re.search(bar + end, capsys.readouterr().out)


@given(st.lists(st.sampled_from([b"", b"a", b"bcd\r"])), st.booleans(), st.integers(1, 9))
def test_each_line_is_in_one_chunk(tmp_path, lines, ended, size):
    text = b"\n".join(lines) + b"\n" * ended
    (tmp_path / "in").write_bytes(text)
    starts = range(0, len(text), size)
    parts = [data.lines_that_start_in(tmp_path / "in", n, n + size) for n in starts]
    assert b"".join(parts) == text
    filled = [part for part in parts if part]
    assert all(part.endswith(b"\n") for part in filled[:-1])


def test_memory_does_not_grow_with_the_input(tmp_path, monkeypatch):
    """Neither with its bytes, 460 kB, nor with what the index has of its documents, 400 kB."""
    (tmp_path / "in").write_bytes(b'{"text": "some words"}\n' * 20_000)
    monkeypatch.setattr(data, "CHUNK", 2**14)
    tracemalloc.start()
    preprocess(tmp_path / "in", tmp_path / "out")
    assert tracemalloc.get_traced_memory()[1] < 2**18
    tracemalloc.stop()


def test_jobs_are_taken_as_results_are_needed():
    """At most 2 · workers chunks and one more are in flight, so memory is bounded."""
    taken = []
    jobs = ((n,) for n in range(99) if not taken.append(n))
    results = data.in_order(abs, jobs, 3)
    assert [next(results), next(results)] == [0, 1]
    assert len(taken) == 8
    results.close()


def stop_group(number):
    return lambda first, worker: os.killpg(first, number)


STOPPED = {  # status, what stderr says, what is done to the first process and a worker
    "SIGTERM": (143, "", stop_group(signal.SIGTERM)),
    "Ctrl-C": (1, "error: interrupted; nothing was written\n", stop_group(signal.SIGINT)),
    "a worker dies": (
        1,
        "a worker was killed",
        lambda first, worker: os.kill(worker, signal.SIGKILL),
    ),
    "full disk": (
        1,
        "File too large",
        lambda first, worker: resource.prlimit(first, resource.RLIMIT_FSIZE, (9, 9)),
    ),
    "killed": (-9, "", lambda first, worker: os.kill(first, signal.SIGKILL)),
}


@pytest.fixture(scope="module")
def long_input(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "in"
    path.write_bytes(100_000 * GOOD)  # 100 MB take half a second or more
    return path


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc, to see other processes")
@pytest.mark.parametrize(("status", "words", "stop"), STOPPED.values(), ids=STOPPED)
def test_stopped_in_the_middle_nothing_half_written_and_no_process_is_left(
    status, words, stop, long_input, tmp_path
):
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        ROOT / "data.py",
    ]  # pytest may ignore it
    command += ["--input", long_input, "--output-prefix", "out", "--workers", "2"]
    environment = {**os.environ, "LAUNCHED_BY_TEST": str(tmp_path)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    hidden = tmp_path / f"out_text_document.bin.{process.pid}.tmp"
    while process.poll() is None and not (hidden.exists() and hidden.stat().st_size):
        time.sleep(0.002)
    workers = {*descendants(f"LAUNCHED_BY_TEST={tmp_path}")} - {process.pid}
    stop(process.pid, min(workers))
    _, stderr = process.communicate(
        timeout=30
    )  # ends when the last process that could write is gone
    assert len(workers) == 2
    assert (process.returncode, stderr.count(b"\n")) == (status, bool(stderr)), stderr
    assert words in stderr.decode()
    assert [name for name in os.listdir(tmp_path) if status != -9 or name[-4:] != ".tmp"] == []


@given(
    st.lists(st.integers(0, 9)).filter(lambda x: sum(x) > 1),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_samples_are_the_cuts_of_the_shuffled_documents(tmp_path, lengths, s, seed):
    """An epoch has each sample once, whatever number is planned. Empty documents do no harm."""
    s, n = min(s, sum(lengths) - 1), (sum(lengths) - 1) // min(s, sum(lengths) - 1)
    write_indexed(tmp_path / "x", np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]), 1000)
    dataset, longer = (
        GPTDataset(IndexedDataset(tmp_path / "x"), s, planned, seed)
        for planned in (3 * n, 3 * n + 1)
    )
    for epoch in (2, 0, 1):
        documents, samples, shuffle = dataset.indices(epoch)
        assert (sorted(documents), sorted(shuffle), samples.shape) == (
            [*range(len(lengths))],
            [*range(n)],
            (n, 2),
        )
        text = np.concatenate([dataset.indexed[d] for d in documents]).tolist()
        cuts = [text[j * s : j * s + s + 1] for j in range(n)]
        assert [dataset[epoch * n + i].tolist() for i in range(n)] == [cuts[j] for j in shuffle]
    assert all(np.array_equal(longer[i], sample) for i, sample in enumerate(dataset))
    assert len(list(dataset)) == len(dataset) == 3 * n


def test_the_order_is_the_seeds_alone_and_every_grid_cuts_batches_as_torch_does(tmp_path):
    """On every machine, with every numpy: pinned. Another seed and another epoch have another."""
    write_indexed(tmp_path / "x", [range(9)] * 4, 257)
    orders = [
        GPTDataset(IndexedDataset(tmp_path / "x"), 5, 1, n % 2).indices(n // 2) for n in range(3)
    ]
    shuffled = ["".join(map(str, [*documents, *shuffle])) for documents, _, shuffle in orders]
    assert shuffled == ["02313564102", "03213256140", "12036405132"]
    for size, ranks in ((1, 1), (1, 8), (6, 4), (8, 3), (8, 8), (13, 5), (13, 8)):
        parts = [[*part_of_batch(9, size, rank, ranks)] for rank in range(ranks)]
        chunks = [chunk.tolist() for chunk in torch.arange(9 * size, 10 * size).chunk(ranks)]
        assert parts == chunks + [[]] * (ranks - len(chunks))


def test_the_demonstration(tmp_path):
    """Of several ranks one shows it; nothing is left."""
    first, second = (
        launch([sys.executable, ROOT / "data.py"], "/", env={"RANK": n, "TMPDIR": tmp_path})
        for n in "01"
    )
    assert (first.returncode, first.stderr, second.returncode, second.stderr, second.stdout) == (
        0,
        "",
        0,
        "",
        "",
    )
    assert re.search(
        "(?s)data · .*: each document as it was,.*epoch 0: .*; step 0, a batch of 8:", first.stdout
    )
    assert os.listdir(tmp_path) == []
