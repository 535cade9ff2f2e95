"""data.py: Megatron-LM's files byte for byte, nothing half-written, samples by a seed."""

import json
import os
import pickle
import re
import resource
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
    index = b"MMIDIDX\0\0" + struct.pack("<qB", 1, code)
    index += struct.pack("<qq", n, n + 1)
    index += np.array(lengths, "<i4").tobytes()
    index += np.array([*offsets, *range(n + 1)], "<i8").tobytes()
    tokens = np.concatenate(documents).astype(dtype)
    return tokens.tobytes(), index


def written(prefix):
    return tuple(Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx"))


@pytest.mark.parametrize(
    ("vocab_size", "code"),
    [(257, 8), (65499, 8), (65500, 4)],
)
def test_files_are_megatrons_byte_for_byte_and_read_back(vocab_size, code, tmp_path):
    documents = [[0, vocab_size - 1, 7], [], [5], [*range(100)]]
    prefix = tmp_path / "x"
    write_indexed(prefix, iter(documents), vocab_size)
    assert written(prefix) == as_megatron_writes(documents, code)
    indexed = IndexedDataset(prefix)
    assert [document.tolist() for document in indexed] == documents


def test_an_index_is_never_beside_the_tokens_of_another(tmp_path, monkeypatch):
    """The old one goes first, the new comes last."""
    there = []
    real_replace = os.replace

    def replace(*names):
        there.append((tmp_path / "x.idx").exists())
        real_replace(*names)

    monkeypatch.setattr(os, "replace", replace)
    write_indexed(tmp_path / "x", [[1]], 257)
    write_indexed(tmp_path / "x", [[2]], 257)
    assert there == [False] * 4


def test_a_dataset_is_pickled_by_name_and_tokens_are_not_read_at_once(tmp_path):
    write_indexed(tmp_path / "x", [range(257)], 257)
    pickled = pickle.dumps(IndexedDataset(tmp_path / "x"))
    assert len(pickled) < 300
    copied = pickle.loads(pickled)
    assert copied[0].tolist() == [*range(257)]
    if Path("/proc").exists():
        assert "x.bin" in Path("/proc/self/maps").read_text()


# header of 34 bytes, lengths 8, offsets 16, documents 24
TOKENS, INDEX = as_megatron_writes([[1, 2, 3], [4, 5]])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(index=INDEX, tokens=TOKENS):
    Path("x.idx").write_bytes(index)
    Path("x.bin").write_bytes(tokens)
    return IndexedDataset("x")


def changed(start, new):
    return INDEX[:start] + new + INDEX[start + len(new) :]


DAMAGED = {
    "81 bytes, but an index of 2 sequences in 2 documents": INDEX[:-1],
    "begins with b'TNTIDX": changed(0, b"TNTIDX"),
    "version 2": changed(9, b"\2"),
    "dtype code 9": changed(17, b"\x09"),
    "the offsets of its 2 sequences": changed(34, b"\2"),
    "offsets of its 2 sequences are not": changed(42, b"\1"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_index_is_an_error_that_says_what_is_wrong(words):
    with pytest.raises(ValueError, match=words):
        opened(DAMAGED[words])


@pytest.mark.usefixtures("folder")
def test_tokens_that_are_cut_short_are_an_error():
    with pytest.raises(ValueError, match=r"9 bytes, but x\.idx says 10"):
        opened(INDEX, TOKENS[:-1])


@pytest.mark.usefixtures("folder")
def test_samples_need_a_sequence_for_each_document():
    index = INDEX[:26] + b"\2" + INDEX[27:-8]
    with pytest.raises(ValueError, match="2 sequences in 1 documents"):
        GPTDataset(opened(index), 2, 1)


ARGUMENTS = {
    "sequence_length=5 must be 1 to 4": (5, 1),
    "seed=4294967296 0 to 4294967295": (4, 1, 2**32),
    "num_samples=0 1 or more": (4, 0),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", ARGUMENTS)
def test_a_dataset_that_cannot_be_made_names_the_number(words):
    with pytest.raises(ValueError, match=words):
        GPTDataset(opened(), *ARGUMENTS[words])


def test_a_rank_outside_the_grid_is_an_error():
    with pytest.raises(ValueError, match="rank=2 0 to 1"):
        part_of_batch(0, 8, 2, 2)


@pytest.mark.parametrize("token", [257, -1, 0.5])
def test_what_is_no_token_is_an_error_and_the_old_files_stay(token, tmp_path):
    prefix = tmp_path / "x"
    write_indexed(prefix, [[1, 2, 3], [4, 5]], 257)
    with pytest.raises(ValueError, match=re.escape(f"integers from 0 to 256, got [{token}]")):
        write_indexed(prefix, [[1], [token]], 257)
    assert written(prefix) == (TOKENS, INDEX)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def fails(folder, monkeypatch, capsys):
    """Run the command. Return the error, which is in one line, and changes nothing."""

    def fails(arguments="", lines=GOOD):
        Path("in").write_bytes(lines)
        before = {path: path.stat().st_mtime for path in folder.iterdir()}
        command = ["data.py", "--input", "in", "--output-prefix", "out", *arguments.split()]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            sys.exit(data.main())
        assert {path: path.stat().st_mtime for path in folder.iterdir()} == before
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return fails


LINES = {
    "not JSON: Expecting ',' delimiter: column 13": b'{"text": "a"',
    "not JSON: 'utf-8' codec can't decode byte 0xff": b'{"text": "\xff"}',
    "not JSON: maximum recursion depth": b"[" * 100_000,
    "no key 'text' in ['text']": b'["text"]',
    "no key 'text' in {'txt': 'a', 'id': 3}": b'{"txt": "a", "id": 3}',
    "'text' must be a string, not of type NoneType": b'{"text": null}',
    "'utf-8' codec can't encode character '\\ud800'": rb'{"text": "\ud800"}',
}


@pytest.mark.parametrize("words", LINES)
def test_a_wrong_line_is_an_error_with_its_number(words, fails):
    error = fails("--workers 2", 2000 * GOOD + LINES[words])
    assert f"error: in:2001: {words}" in error
    assert "nothing was written" in error


COMMANDS = {
    "--input .": ". must be a regular file",
    "--input no": "No such file or directory: 'no'",
    "--workers 0": "--workers must be positive",
    "--merge-file part": "--vocab-file needs --merge",
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_wrong_command_is_an_error(arguments, fails):
    assert COMMANDS[arguments] in fails(arguments)


def test_a_file_without_text_is_an_error(fails):
    assert "there is no text" in fails(lines=b'{"text": ""}')


@pytest.mark.usefixtures("folder")
def test_preprocessing_needs_a_key():
    with pytest.raises(ValueError, match="one key or more"):
        preprocess("in", "out", ())


BPE = "--merge-file merges --vocab-file"


def write_vocabulary(name, vocabulary):
    Path(name).write_text(json.dumps(vocabulary))
    Path("merges").write_text("#version: 0.2\n")


def test_a_vocabulary_needs_the_package_tokenizers(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in fails(f"{BPE} any")


def test_a_vocabulary_without_an_end_of_document_is_an_error(fails):
    pytest.importorskip("tokenizers")
    letters = map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])  # byte-level BPE's
    write_vocabulary("letters", {letter: n for n, letter in enumerate(letters)})
    assert "no <|endoftext|>" in fails(f"{BPE} letters --append-eod")


def test_a_vocabulary_without_all_bytes_is_an_error(fails):
    pytest.importorskip("tokenizers")
    write_vocabulary("part", {"!": 0})
    assert "lacks 255 of 256 bytes" in fails(f"{BPE} part")


def test_a_vocabulary_that_is_not_there_is_an_error(fails):
    pytest.importorskip("tokenizers")
    assert "nothing, merges: Error while reading BPE files" in fails(f"{BPE} nothing")


LINES_OF_JSON = [
    {
        "text": text,
        "other": str(n),
        "n": n,
    }
    for n, text in enumerate(TEXTS)
]


def write_input(path):
    """Without a newline at the end."""
    path.write_text("\n".join(map(json.dumps, LINES_OF_JSON)))


def assert_written(prefix, key, encode, end):
    expected = [[*encode(line[key]), end] for line in LINES_OF_JSON if line[key]]
    assert written(f"{prefix}_{key}_document") == as_megatron_writes(expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_are_in_order_whatever_the_number_of_workers(workers, tmp_path, monkeypatch):
    """Hundreds of chunks, two keys, empty texts left out."""
    monkeypatch.setattr(data, "CHUNK", 2000)
    write_input(tmp_path / "in")
    keys = ("other", "text", "other")
    preprocess(tmp_path / "in", tmp_path / "out", keys, append_eod=True, workers=workers)
    for key in ("text", "other"):
        assert_written(tmp_path / "out", key, str.encode, 256)


def test_tokens_are_those_of_the_vocabulary(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, 300, special_tokens=["<|endoftext|>"])
    files = trained.save_model(str(tmp_path))
    write_input(tmp_path / "in")
    preprocess(tmp_path / "in", tmp_path / "out", ("text",), *files, append_eod=True, workers=2)
    bpe = tokenizers.ByteLevelBPETokenizer(*files)
    assert_written(tmp_path / "out", "text", lambda text: bpe.encode(text).ids, 0)
    assert f" vocabulary of {bpe.get_vocab_size()} " in capsys.readouterr().out


COUNTER = r" 5[1-4]%   \d+ documents   0\.0 MB/s   \d+ s left\x1b\[K\r.*\r100%   305 "
RESULT = r"out_text_document: 303 documents, [\d,]+ tokens, 2 empty left out, 0\.0 MB/s\n"


@pytest.mark.usefixtures("folder")
def test_a_terminal_shows_a_counter_and_the_result(monkeypatch, capsys):
    monkeypatch.setattr(data, "CHUNK", 2000)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", iter(range(10**6)).__next__)
    write_input(Path("in"))
    preprocess("in", "out")
    assert re.search(rf"(?s)\r{COUNTER}.*\r\x1b\[K{RESULT}", capsys.readouterr().out)


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
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


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
    ("size", "ranks"),
    [
        (1, 1),
        (1, 8),
        (6, 4),
        (8, 3),
        (8, 8),
        (13, 5),
        (13, 8),
    ],
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
