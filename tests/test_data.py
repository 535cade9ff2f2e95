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
    """Return the bytes of PREFIX.bin and of PREFIX.idx."""
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
    """An index is never beside the tokens of another: the old one goes first, the new comes last."""
    documents = [[0, vocab_size - 1, 7], [], [5], [*range(100)]]
    prefix = tmp_path / "x"
    there = []
    real_replace = os.replace

    def replace(*names):
        there.append(Path(f"{prefix}.idx").exists())
        real_replace(*names)

    monkeypatch.setattr(os, "replace", replace)
    write_indexed(prefix, [[1]], vocab_size)
    write_indexed(prefix, iter(documents), vocab_size)
    assert there == [False] * 4
    assert written(prefix) == as_megatron_writes(documents, code)

    indexed = IndexedDataset(prefix)
    pickled = pickle.dumps(indexed)
    assert len(pickled) < 300  # the name, not the content, goes to a DataLoader's workers
    for each in (indexed, pickle.loads(pickled)):
        assert [document.tolist() for document in each] == documents
    if Path("/proc").exists():
        assert f"{prefix}.bin" in Path("/proc/self/maps").read_text()


# header of 34 bytes, lengths 8, offsets 16, documents 24
TOKENS, INDEX = as_megatron_writes([[1, 2, 3], [4, 5]])


def opened(index=INDEX, tokens=TOKENS):
    Path("x.idx").write_bytes(index)
    Path("x.bin").write_bytes(tokens)
    return IndexedDataset("x")


def write(*documents):
    write_indexed("out_text_document", documents, 257)


def changed(start, new):
    return opened(INDEX[:start] + new + INDEX[start + len(new) :])


BE_INTEGERS = "integers from 0 to 256, got"
NOT_JSON = "1 error: in:2001: not JSON:"
BPE = "--merge-file merges --vocab-file"
WRONG = {  # message: the call, line or arguments that it is about. A status comes first
    "81 bytes, but an index of 2 sequences in 2 documents": lambda: opened(INDEX[:-1]),
    "begins with b'TNTIDX": lambda: changed(0, b"TNTIDX"),
    "version 2, dtype code 8": lambda: changed(9, b"\2"),
    "dtype code 9 and 2 sequences": lambda: changed(17, b"\x09"),
    "idx: the offsets of its 2 sequences": lambda: changed(34, b"\2"),
    "offsets of its 2 sequences are not": lambda: changed(42, b"\1"),
    "9 bytes, but x.idx says 10": lambda: opened(INDEX, TOKENS[:-1]),
    "2 sequences in 1 documents": lambda: GPTDataset(
        opened(INDEX[:26] + b"\2" + INDEX[27:-8]), 2, 1
    ),
    "sequence_length=5 must be 1 to 4": lambda: GPTDataset(opened(), 5, 1),
    "seed=4294967296 0 to 4294967295": lambda: GPTDataset(opened(), 4, 1, 2**32),
    "num_samples=0 1 or more": lambda: GPTDataset(opened(), 4, 0),
    "rank=2 0 to 1": lambda: part_of_batch(0, 8, 2, 2),
    f"{BE_INTEGERS} [257]": lambda: write([1], [257]),
    f"{BE_INTEGERS} [-1]": lambda: write([1], [-1]),
    f"{BE_INTEGERS} [0.5]": lambda: write([1], [0.5]),
    f"{NOT_JSON} Expecting ',' delimiter: column 13 (char 12); nothing was": b'{"text": "a"',
    f"{NOT_JSON} 'utf-8' codec can't decode byte 0xff in position 10": b'{"text": "\xff"}',
    f"{NOT_JSON} maximum recursion depth": b"[" * 100_000,
    "1 error: in:2001: no key 'text' in ['text']; nothing was written": b'["text"]',
    "1 error: in:2001: no key 'text' in {'txt': 'a', 'id': 3}; nothing": b'{"txt": "a", "id": 3}',
    "1 error: in:2001: 'text' must be a string, not of type NoneType; nothing": b'{"text": null}',
    "1 error: in:2001: 'utf-8' codec can't encode character '\\ud800' in": rb'{"text": "\ud800"}',
    "json_keys=() must have one key or more": lambda: preprocess("in", "out", ()),
    "1 error: out_text_document: there is no text to write; nothing was written": b"",
    "1 error: . must be a regular file: workers read parts of it; nothing": "--input .",
    "1 error: [Errno 2] No such file or directory: 'no'; nothing": "--input no",
    "2 error: --workers must be positive": "--workers 0",
    "2 error: --workers must be positive, and --vocab-file needs --merge": "--merge-file part",
    "needs the package tokenizers: pip install tokenizers": f"{BPE} absent",
    "1 error: whole has no <|endoftext|>, which --append-eod": f"{BPE} whole --append-eod",
    "1 error: part lacks 255 of 256 bytes, such as": f"{BPE} part",
    "1 error: nothing, merges: Error while reading BPE files": f"{BPE} nothing",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_an_error_that_says_where_and_changes_nothing(
    words, tmp_path, monkeypatch, capsys
):
    wrong = WRONG[words]
    arguments = wrong if isinstance(wrong, str) else "--workers 2"
    if "absent" in arguments:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    elif "merge-file" in arguments:
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.chdir(tmp_path)
    write([1, 2, 3], [4, 5])
    last_line = wrong if isinstance(wrong, bytes) else b"0"
    Path("in").write_bytes(2000 * GOOD + last_line if last_line else b'{"text": ""}')
    letters = map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])  # byte-level BPE's
    Path("whole").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    Path("part").write_text('{"!": 0}')
    Path("merges").write_text("#version: 0.2\n")
    command = ["data.py", "--input", "in", "--output-prefix", "out", *arguments.split()]
    monkeypatch.setattr(sys, "argv", command)

    with pytest.raises((ValueError, SystemExit)) as raised:
        wrong() if callable(wrong) else sys.exit(data.main())

    said = f"{raised.value} {capsys.readouterr().err}".strip()
    assert words in said
    assert "\n" not in said
    assert len(list(Path().glob("out*"))) == 2
    assert written("out_text_document") == (TOKENS, INDEX)


COUNTER = r" 5[1-4]%   \d+ documents   0\.0 MB/s   \d+ s left\x1b\[K\r.*\r100%   305 "
RESULT = (
    r"\S+_other_document: 305 documents, [\d,]+ tokens, 0\.0 MB/s\n\S+: 303 .*, 2 empty left out"
)


@pytest.mark.parametrize(("workers", "vocabulary"), [(1, "bytes"), (3, "bytes"), (2, "GPT-2's")])
def test_documents_are_in_order_whatever_the_number_of_workers(
    workers, vocabulary, tmp_path, monkeypatch, capsys
):
    """Hundreds of chunks, two keys, no newline at the end, empty texts left out, a counter."""
    files = ()
    encode = str.encode
    end = 256
    size = 257
    if vocabulary == "GPT-2's":  # one of our own, as tokenizers' class has it
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(TEXTS, 300, special_tokens=["<|endoftext|>"])
        files = trained.save_model(str(tmp_path))
        bpe = tokenizers.ByteLevelBPETokenizer(*files)
        encode = lambda text: bpe.encode(text).ids  # noqa: E731
        end = 0
        size = bpe.get_vocab_size()
    lines = [{"text": text, "other": str(n), "n": n} for n, text in enumerate(TEXTS)]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(data, "CHUNK", 2000)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", iter(range(10**6)).__next__)

    keys = ("other", "text", "other")
    preprocess(tmp_path / "in", tmp_path / "out", keys, *files, append_eod=True, workers=workers)

    for key in ("text", "other"):
        expected = [[*encode(line[key]), end] for line in lines if line[key]]
        assert written(tmp_path / f"out_{key}_document") == as_megatron_writes(expected)
    said = rf"(?s) vocabulary of {size} .*\r{COUNTER}.*\r\x1b\[K{RESULT}"
    assert re.search(said, capsys.readouterr().out)


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


def fill_disk(first, worker):
    resource.prlimit(first, resource.RLIMIT_FSIZE, (9, 9))


STOPPED = {  # status, what stderr says, what is done to the first process and a worker
    "SIGTERM": (143, "", lambda first, worker: os.killpg(first, signal.SIGTERM)),
    "Ctrl-C": (1, "error: interrupted; nothing", lambda first, _: os.killpg(first, signal.SIGINT)),
    "a worker dies": (1, "was killed", lambda first, worker: os.kill(worker, signal.SIGKILL)),
    "full disk": (1, "File too large", fill_disk),
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
    command = ["env", "--default-signal=INT", sys.executable, ROOT / "data.py"]  # pytest ignores it
    command += ["--input", long_input, "--output-prefix", "out", "--workers", "2"]
    environment = {**os.environ, "LAUNCHED_BY_TEST": str(tmp_path)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, **pipes
    )
    hidden = tmp_path / f"out_text_document.bin.{process.pid}.tmp"
    while process.poll() is None and not (hidden.exists() and hidden.stat().st_size):
        time.sleep(0.002)
    workers = {*descendants(f"LAUNCHED_BY_TEST={tmp_path}")} - {process.pid}
    stop(process.pid, min(workers))
    _, stderr = process.communicate(timeout=30)  # ends when the last process that writes is gone
    assert len(workers) == 2
    assert process.returncode == status
    assert words in stderr.decode()
    assert stderr.count(b"\n") == bool(stderr), stderr
    left = [name for name in os.listdir(tmp_path) if status != -9 or not name.endswith(".tmp")]
    assert left == []


@given(
    st.lists(st.integers(0, 9)).filter(lambda x: sum(x) > 1),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_samples_are_the_cuts_of_the_shuffled_documents(tmp_path, lengths, s, seed):
    """An epoch has each sample once, whatever number is planned. Empty documents do no harm."""
    s = min(s, sum(lengths) - 1)
    n = (sum(lengths) - 1) // s
    documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    write_indexed(tmp_path / "x", documents, 1000)
    indexed = IndexedDataset(tmp_path / "x")
    dataset = GPTDataset(indexed, s, 3 * n, seed)
    longer = GPTDataset(indexed, s, 3 * n + 1, seed)
    for epoch in (2, 0, 1):
        order, samples, shuffle = dataset.indices(epoch)
        assert sorted(order) == [*range(len(lengths))]
        assert sorted(shuffle) == [*range(n)]
        assert samples.shape == (n, 2)
        text = np.concatenate([indexed[d] for d in order]).tolist()
        expected = [text[j * s : j * s + s + 1] for j in shuffle]
        assert [dataset[epoch * n + i].tolist() for i in range(n)] == expected
    assert len(list(dataset)) == len(dataset) == 3 * n
    for i, sample in enumerate(dataset):
        assert np.array_equal(longer[i], sample)


def test_the_order_is_the_seeds_alone(tmp_path):
    """On every machine, with every numpy: pinned. Another seed and another epoch have another."""
    write_indexed(tmp_path / "x", [range(9)] * 4, 257)
    indexed = IndexedDataset(tmp_path / "x")
    pinned = {(0, 0): "02313564102", (1, 0): "03213256140", (0, 1): "12036405132"}
    for (seed, epoch), expected in pinned.items():
        documents, _, shuffle = GPTDataset(indexed, 5, 1, seed).indices(epoch)
        assert "".join(map(str, [*documents, *shuffle])) == expected


@pytest.mark.parametrize(
    ("size", "ranks"), [(1, 1), (1, 8), (6, 4), (8, 3), (8, 8), (13, 5), (13, 8)]
)
def test_every_grid_cuts_batches_as_torch_does(size, ranks):
    parts = [[*part_of_batch(9, size, rank, ranks)] for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(9 * size, 10 * size).chunk(ranks)]
    assert parts == chunks + [[]] * (ranks - len(chunks))
    assert part_of_batch(9, size) == range(9 * size, 10 * size)


def test_the_demonstration(tmp_path):
    """One of several ranks shows it. Nothing is left."""
    command = [sys.executable, ROOT / "data.py"]
    first = launch(command, "/", env={"RANK": "0", "TMPDIR": tmp_path})
    second = launch(command, "/", env={"RANK": "1", "TMPDIR": tmp_path})
    assert (first.returncode, first.stderr) == (0, "")
    assert (second.returncode, second.stderr, second.stdout) == (0, "", "")
    assert re.search(
        "all documents are unchanged.*\nepoch 0: .*; step 0, a batch of 8:", first.stdout
    )
    assert os.listdir(tmp_path) == []
