"""Data: JSON lines to Megatron-LM's token files, and token files to the same batches on every grid.

Tokenising takes hours, and training needs any sample at once. So the text is tokenised once, into
files that are mapped into memory. Workers tokenise chunks of 1 MiB. The first process writes what
they return, in the order of the input:

    oscar.jsonl                 {"text": "It was…"} ⏎ …
    PREFIX_text_document.bin    document 0 │ document 1 │ …   tokens of 16 bits, or of 32 bits if
                                the vocabulary has 65,500 or more
    PREFIX_text_document.idx    header │ lengths │ byte offsets │ first sequence of each document

For each epoch, GPTDataset shuffles the documents, joins them to one long text, and cuts it every s
tokens. Here s is 8:

    document index   the order             │ 7      │ 2             │ 9   │ 0            │ 4 …
    sample index     for each cut, place   (0, 0)  (0, 8)  (1, 7)  (1, 15) (3, 1)  (3, 9)  …
                     in the order, offset  ├── s ──├── s ──├── s ──├── s ──├── s ──├── s ──┼
    sample 1         s inputs + 1 target           └───────┘ the target is sample 2's first input
    shuffle index    [i] is sample shuffle[i]; the next epoch comes after the last sample

All of this follows from a seed, so training can resume at any step. Each data-parallel rank takes
a part of a step's samples, in the order of the ranks.

Cost:     A core tokenises 80 MB of text per second to bytes, and 1.7 MB with GPT-2's vocabulary.
          A process takes some 30 MB of memory, however long the input is. The indices of an epoch
          take 8 bytes per document and 16 per sample, and 2.6 s for 10 million of each.
Run:      python data.py --input oscar.jsonl --output-prefix my-gpt2 --append-eod --workers 2
          Add --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt for GPT-2's tokens. That
          needs the package tokenizers. Without any flags it shows a demonstration.
Mirrors:  Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): tools/preprocess_data.py,
          IndexedDataset, GPTDataset
Left out: input that is a pipe; splitting into sentences; blends of data sets; masks and positions
          that restart at each document. Megatron's shuffle depends on the number of planned steps.
          Here each epoch is shuffled by itself, and the tokens after its last whole sample are not
          read.
"""

import argparse
import functools
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

# --------------------------------------------------------------------------------------------------
# 1. The format, little endian: PREFIX.bin has the tokens, PREFIX.idx says where documents lie.

# magic, version 1, code of the dtype, number of sequences, number of documents + 1
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx in constant memory.

    The files have temporary names until publish(). `stack` is an ExitStack. When it closes, it
    removes the temporary files that are left.
    """

    def __init__(self, stack, prefix, vocab_size):
        self.prefix = prefix
        self.folder = Path(prefix).parent
        self.vocab_size = vocab_size
        self.code = 8 if vocab_size < 65500 else 4
        self.dtype = np.dtype(DTYPES[self.code])
        self.documents = 0  # written so far
        self.tokens = 0
        self.names = {}  # {final name: name until then}
        files = []
        for kind in ("bin", "idx"):
            hidden = f"{prefix}.{kind}.{os.getpid()}.tmp"
            stack.callback(Path(hidden).unlink, missing_ok=True)
            files.append(stack.enter_context(open(hidden, "wb")))  # noqa: SIM115
            self.names[f"{prefix}.{kind}"] = hidden
        self.bin, self.idx = files
        # In the index, all lengths come before all offsets, and these before all sequence numbers.
        # Each document adds to all three, so each has a file of its own until the end.
        self.columns = []
        for _ in range(3):
            column = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self.columns.append(stack.enter_context(column))

    def add(self, tokens, lengths):
        """Append documents of these lengths, whose tokens are back to back in one array."""
        tokens = np.asarray(tokens)
        lengths = np.asarray(lengths, np.int64)
        is_integer = tokens.dtype.kind in "iu"
        if len(tokens) and not (is_integer and 0 <= tokens.min() <= tokens.max() < self.vocab_size):
            raise ValueError(
                f"{self.prefix}: tokens must be integers from 0 to {self.vocab_size - 1}, "
                f"unlike {tokens}"
            )
        self.bin.write(tokens.astype(self.dtype, copy=False).data)
        starts = self.tokens + np.cumsum(lengths) - lengths
        offsets = starts * self.dtype.itemsize
        numbers = self.documents + np.arange(len(lengths))  # each document is one sequence
        rows = [lengths.astype("<i4"), offsets.astype("<i8"), numbers.astype("<i8")]
        for column, values in zip(self.columns, rows, strict=True):
            column.write(values.data)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def finish(self):
        """Put the index together, and sync both files to the disk."""
        if self.tokens == 0:
            raise ValueError(f"{self.prefix}: there is no text to write")
        header = HEADER.pack(MAGIC, 1, self.code, self.documents, self.documents + 1)
        self.idx.write(header)
        self.columns[-1].write(np.array([self.documents], "<i8").data)
        for column in self.columns:
            column.seek(0)
            shutil.copyfileobj(column, self.idx)
        for file in (self.bin, self.idx):
            file.flush()
            os.fsync(file.fileno())


def publish(*writers):
    """Finish the files of all writers, then give them their final names.

    The old index is removed first and the new one comes last, so an index is never beside the
    tokens of another.
    """
    for writer in writers:
        writer.finish()
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # ignored until all have their names
                before = signal.signal(number, signal.SIG_IGN)
                stack.callback(signal.signal, number, before)
        for writer in writers:
            Path(f"{writer.prefix}.idx").unlink(missing_ok=True)
            for name, hidden in writer.names.items():
                os.replace(hidden, name)
            folder = os.open(writer.folder, os.O_RDONLY)
            os.fsync(folder)  # without it a crash can undo the renames
            os.close(folder)


def write_indexed(prefix, documents, vocab_size):
    """Write `documents`, an iterable of sequences of tokens, to PREFIX.bin and PREFIX.idx."""
    with ExitStack() as stack:
        writer = IndexedWriter(stack, prefix, vocab_size)
        for document in documents:
            writer.add(document, [len(document)])
        publish(writer)


def read_header(name):
    """-> code of the dtype, number of sequences"""
    size = os.path.getsize(name)
    start = np.fromfile(name, np.uint8, HEADER.size).tobytes()
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        raise ValueError(
            f"{name}: {size} bytes that begin with {start[:9]}, "
            f"but an index has {HEADER.size} or more and begins with {MAGIC}"
        )
    _, version, code, sequences, documents = HEADER.unpack(start)
    if version != 1 or code not in DTYPES or sequences == 0:
        raise ValueError(
            f"{name}: version {version}, not 1; dtype {code}, not 1 to 8; "
            f"or {sequences} sequences, not 1 or more"
        )
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise ValueError(
            f"{name}: {size} bytes; {sequences} sequences in {documents - 1} documents "
            f"are {expected}"
        )
    return code, sequences


class IndexedDataset:
    """The documents of PREFIX.bin and PREFIX.idx, mapped into memory: `[i]` is an array.

    ValueError if the files are truncated, or are not Megatron-LM's.
    """

    def __init__(self, prefix):
        self.prefix = prefix
        name = f"{prefix}.idx"
        code, sequences = read_header(name)
        index = np.asarray(np.memmap(name, mode="r"))[HEADER.size :]
        lengths, offsets, starts = np.split(index, [4 * sequences, 12 * sequences])
        self.sequence_lengths = lengths.view("<i4")  # tokens
        self.offsets = offsets.view("<i8")  # bytes
        self.document_indices = starts.view("<i8")  # each document's first sequence
        itemsize = np.dtype(DTYPES[code]).itemsize
        ends = itemsize * np.cumsum(self.sequence_lengths, dtype=np.int64)
        is_contiguous = self.offsets[0] == 0 and np.array_equal(self.offsets[1:], ends[:-1])
        if self.sequence_lengths.min() < 0 or not is_contiguous:
            raise ValueError(
                f"{name}: the offsets of its {sequences} sequences are not sums of their lengths"
            )
        size = os.path.getsize(f"{prefix}.bin")
        if size != ends[-1] or size == 0:
            raise ValueError(f"{prefix}.bin: {size} bytes; {name} says {ends[-1]}")
        self.tokens = np.asarray(np.memmap(f"{prefix}.bin", DTYPES[code], "r"))

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, i):
        start = self.offsets[i] // self.tokens.itemsize
        return self.tokens[start : start + self.sequence_lengths[i]]

    def __reduce__(self):  # a DataLoader's worker maps the files itself
        return IndexedDataset, (self.prefix,)


# --------------------------------------------------------------------------------------------------
# 2. Text to tokens: one process and one chunk of lines.


@functools.cache  # once per process
def tokenizer(vocab_file=None, merge_file=None):
    """-> function from UTF-8 to tokens, size of the vocabulary, token that ends a document

    Without files each byte is a token, and 256 ends a document. With GPT-2's files tokens are those
    of byte-level BPE, and "<|endoftext|>" ends a document. It is None if the vocabulary lacks it.
    "<|endoftext|>" in a text does not end a document.
    """
    if vocab_file is None:
        return lambda utf8: np.frombuffer(utf8, np.uint8), 257, 256
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers

        bpe = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    except ImportError:
        raise ValueError(
            "a vocabulary file needs the package tokenizers: pip install tokenizers"
        ) from None
    except Exception as error:  # tokenizers raises no other class
        raise ValueError(f"{vocab_file}, {merge_file}: {error}") from None
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = bpe.get_vocab()
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if missing:
        raise ValueError(
            f"{vocab_file} lacks {len(missing)} of 256 bytes, such as {missing[0]!r}: "
            "text would be lost"
        )
    end = vocabulary.get("<|endoftext|>")
    return lambda utf8: bpe.encode(utf8.decode()).ids, max(vocabulary.values()) + 1, end


class Options(NamedTuple):
    """What encode() needs besides a chunk."""

    input: str
    keys: list
    files: tuple  # vocabulary and merges, or None and None
    append_eod: bool
    dtype: str
    folder: str  # for results


class BadLine(ValueError):
    """args: the number of the line in its chunk, from 0, and what is wrong with it."""


def texts_of(line, keys):
    """-> the texts of a line under `keys`, in UTF-8, or a ValueError that says what is wrong"""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        # json counts the lines of this one text.
        raise ValueError(f"not JSON: {str(error).replace('line 1 ', '')}") from None
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise ValueError(f"no key {key!r} in {record!r:.60}".replace("\n", " "))
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise ValueError(f"{key!r} must be a string, not of type {kind}")
    return [record[key].encode() for key in keys]  # ValueError for half a surrogate pair


def lines_that_start_in(path, start, stop):
    """-> the lines that begin in bytes start to stop of a file, so each line is in one chunk"""
    size = stop - start
    with open(path, "rb") as file:
        if start > 0:  # skip the rest of a line that begins before
            file.seek(start - 1)
            file.readline(size + 1)  # no further than `stop`
        lines = file.read(stop - file.tell())
        if lines and not lines.endswith(b"\n"):
            lines += file.readline()
    return lines


def encode(options, start, stop):
    """Tokenise the lines of a chunk into a file. -> its name, the number of lines"""
    tokenize, _, eod = tokenizer(*options.files)
    end = [eod] if options.append_eod else []
    tokens = {key: [np.empty(0, options.dtype)] for key in options.keys}
    lengths = {key: [] for key in options.keys}
    lines = lines_that_start_in(options.input, start, stop)
    lines = lines.removesuffix(b"\n").split(b"\n") if lines else []
    for number, line in enumerate(lines):
        try:
            texts = texts_of(line, options.keys)
        except ValueError as error:
            raise BadLine(number, str(error)) from None
        for key, text in zip(options.keys, texts, strict=True):
            if text:
                found = tokenize(text)
                tokens[key] += [found, end]
                lengths[key].append(len(found) + len(end))
    name = os.path.join(options.folder, str(start))
    with open(name, "wb") as file:
        for key in options.keys:
            np.save(file, np.concatenate(tokens[key], dtype=options.dtype, casting="unsafe"))
            np.save(file, np.array(lengths[key], np.int64))
    return name, len(lines)


# --------------------------------------------------------------------------------------------------
# 3. All chunks, by several processes.

CHUNK = 2**20  # bytes of input


def start_worker():
    # Ctrl-C reaches all processes. The first process then ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    parent_process().join()
    os._exit(1)  # The parent was killed, and nothing else would end this worker.


def in_order(function, jobs, workers):
    """Yield function(*job) for each of `jobs`, in order. At most 2 · workers + 1 are under way.

    If a worker is killed, this raises an OSError, and multiprocessing.Pool would hang. Jobs and
    results must be smaller than 4 kB, because it would hang, too, if a worker were killed in the
    middle of a longer message.
    """
    pool = ProcessPoolExecutor(workers, initializer=start_worker)
    waiting = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise OSError("a worker was killed; did it run out of memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A bar on a terminal; in a log a line every 30 seconds."""

    def __init__(self, size):
        self.size = size  # bytes of input
        self.start = time.monotonic()
        self.shown = 0.0  # seconds from the start to the last line
        self.on_terminal = sys.stdout.isatty()

    def show(self, done, documents):
        seconds = time.monotonic() - self.start
        if seconds - self.shown > (0.2 if self.on_terminal else 30):
            self.shown = seconds
            part = done / self.size
            bar = f"{'█' * int(20 * part):·<20} {part:4.0%}   {documents:,} documents"
            speed = f"{done / 1e6 / seconds:.1f} MB/s   {seconds / part - seconds:.0f} s left"
            end = "\x1b[K\r" if self.on_terminal else "\n"
            print(f"{bar}   {speed}", end=end, flush=True)

    def clear(self):
        print(end="\x1b[K" if self.on_terminal else "", flush=True)


def write_all(options, workers, writers):
    """Tokenise the input and append it to the writers. -> the number of lines"""
    size = os.path.getsize(options.input)
    progress = Progress(size)
    jobs = ((options, start, start + CHUNK) for start in range(0, size, CHUNK))
    lines = 0
    with closing(in_order(encode, jobs, workers)) as results:
        try:
            for number, (name, more) in enumerate(results, 1):
                with open(name, "rb") as file:
                    for writer in writers:
                        tokens = np.load(file)
                        lengths = np.load(file)
                        writer.add(tokens, lengths)
                os.unlink(name)
                lines += more
                progress.show(min(number * CHUNK, size), lines)
        except BadLine as error:
            number, words = error.args
            raise ValueError(f"{options.input}:{lines + number + 1}: {words}") from None
        finally:
            progress.clear()
    return lines


def vocabulary_size(files, append_eod):
    _, size, eod = tokenizer(*files)
    if append_eod and eod is None:
        raise ValueError(f"{files[0]} has no <|endoftext|>, which --append-eod appends")
    return size


def preprocess(
    input,
    output_prefix,
    json_keys=("text",),
    vocab_file=None,
    merge_file=None,
    append_eod=False,
    workers=1,
):
    """Tokenise the JSON lines of `input` to OUTPUT_PREFIX_KEY_document.bin and .idx for each key.

    Empty texts are left out. A wrong line raises a ValueError that begins with FILE:LINE. No file
    is then new or changed.
    """
    files = (vocab_file, merge_file)
    keys = list(dict.fromkeys(json_keys))
    megabytes = os.path.getsize(input) / 1e6
    if not os.path.isfile(input):
        raise ValueError(f"{input} must be a regular file: workers read parts of it")
    vocab_size = vocabulary_size(files, append_eod)
    words = f"{megabytes:,.1f} MB · {vocab_size:,} tokens · --workers {workers}"
    print(f"data · {input}, {words}", flush=True)
    start = time.monotonic()
    with ExitStack() as stack:
        writers = []
        for key in keys:
            writers.append(IndexedWriter(stack, f"{output_prefix}_{key}_document", vocab_size))
        temporary = tempfile.TemporaryDirectory(dir=writers[0].folder, suffix=".tmp")
        folder = stack.enter_context(temporary)
        options = Options(str(input), keys, files, append_eod, writers[0].dtype.str, folder)
        lines = write_all(options, workers, writers)
        publish(*writers)
    show_result(writers, lines, megabytes / (time.monotonic() - start))


def show_result(writers, lines, rate):
    for writer in writers:
        left_out = lines - writer.documents
        empty = f", {left_out:,} empty left out" if left_out else ""
        counts = f"{writer.documents:,} documents, {writer.tokens:,} tokens"
        print(f"{writer.prefix}: {counts}{empty}, {rate:.1f} MB/s")


# --------------------------------------------------------------------------------------------------
# 4. Tokens to samples, and samples to ranks.


class GPTDataset:
    """`[i]` is sample i of `num_samples`: sequence_length + 1 tokens (int64).

    It reads `indexed` for as many epochs as it needs. Only one epoch's indices are in memory, so
    read the samples in order.
    """

    def __init__(self, indexed, sequence_length, num_samples, seed=0):
        tokens = int(indexed.sequence_lengths.sum(dtype=np.int64))
        documents = len(indexed.document_indices) - 1
        if not 1 <= sequence_length < tokens or num_samples < 1 or not 0 <= seed < 2**32:
            raise ValueError(
                f"{sequence_length=} must be 1 to {tokens - 1}, {num_samples=} 1 or more, "
                f"and {seed=} 0 to 4294967295"
            )
        if len(indexed) != documents:
            raise ValueError(
                f"{len(indexed)} sequences in {documents} documents: "
                "preprocess without --split-sentences"
            )
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.seed = seed
        self.samples_per_epoch = (tokens - 1) // sequence_length
        self.epoch = None  # the epoch of the indices in memory
        self.epoch_indices = None

    def __len__(self):
        return self.num_samples

    def indices(self, epoch):
        """-> document index (documents,), sample index (samples, 2), shuffle index (samples,)"""
        if self.epoch != epoch:
            self.epoch_indices = self.make_indices(epoch)
            self.epoch = epoch
        return self.epoch_indices

    def make_indices(self, epoch):
        # RandomState never changes its numbers, unlike default_rng (NEP 19)
        random = np.random.RandomState([self.seed, epoch])
        documents = random.permutation(len(self.indexed))
        lengths = self.indexed.sequence_lengths[documents]
        ends = np.cumsum(lengths, dtype=np.int64)
        cuts = self.sequence_length * np.arange(self.samples_per_epoch)
        # The first document that ends after the cut. Empty ones are skipped.
        places = np.searchsorted(ends, cuts, side="right")
        offsets = cuts - (ends - lengths)[places]
        samples = np.stack([places, offsets], axis=1).astype(np.int32)
        return documents, samples, random.permutation(len(samples))

    def __getitem__(self, i):
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        epoch, i = divmod(i, self.samples_per_epoch)
        documents, samples, shuffle = self.indices(epoch)
        place, offset = samples[shuffle[i]].tolist()
        parts = []
        missing = self.sequence_length + 1
        while missing:
            part = self.indexed[documents[place]][offset : offset + missing]
            parts.append(part)
            missing -= len(part)
            place += 1
            offset = 0
        return np.concatenate(parts, dtype=np.int64)


def part_of_batch(step, size, rank=0, ranks=1):
    """-> range of this rank's samples in a step of `size` samples, as torch.chunk cuts a batch"""
    if step < 0 or size < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"{step=} must be 0 or more, {size=} 1 or more, and {rank=} 0 to {ranks - 1}"
        )
    rows = -(-size // ranks)
    start = min(rank * rows, size)
    stop = min(start + rows, size)
    return range(step * size + start, step * size + stop)


# --------------------------------------------------------------------------------------------------
# Demo.


def demonstrate():
    """Tokenise the standard library, read it back, show step 0. -> 1 if it came back changed"""
    paths = sorted(Path(argparse.__file__).parent.glob("*.py"))
    texts = {path.name: path.read_bytes() for path in paths if path.stat().st_size}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "library.jsonl")
        prefix = Path(folder, "library")
        lines = [json.dumps({"text": text.decode()}) + "\n" for text in texts.values()]
        source.write_text("".join(lines))
        preprocess(source, prefix, append_eod=True, workers=2)
        indexed = IndexedDataset(f"{prefix}_text_document")
        read_back = [tokens[:-1].astype(np.uint8).tobytes() for tokens in indexed]
        is_same = read_back == list(texts.values())
        verdict = "as it was" if is_same else "NOT as it was"
        print(f"read back: each document {verdict}, with token 256 at its end")
        show_batch(GPTDataset(indexed, 1024, 8), list(texts))
    return int(not is_same)


def show_batch(dataset, names):
    """Print, for each sample of step 0, its rank of 1, 2 and 4, where it lies, how it begins."""
    documents, samples, shuffle = dataset.indices(0)
    n = len(dataset)
    length = dataset.sequence_length
    print(f"epoch 0: {len(samples):,} samples of {length} + 1 tokens; step 0, a batch of {n}:")
    print("  [i]   rank of 1, 2, 4   sample   begins in              ends in                with")
    for i in range(n):
        owners = []
        for ranks in (1, 2, 4):
            owners += [str(r) for r in range(ranks) if i in part_of_batch(0, n, r, ranks)]
        ends = []
        for place, offset in samples[shuffle[i] :][:2].tolist():
            ends.append(f"{names[documents[place]]}:{offset:,}")
        text = dataset[i][:30].clip(0, 255).astype(np.uint8).tobytes().decode("utf-8", "replace")
        where = f"{shuffle[i]:>6,}   {ends[0]:20}   {ends[-1]:20}"
        print(f"  [{i}]           {'  '.join(owners)}   {where}   {text!r}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}\n")


def main():
    if len(sys.argv) == 1:
        return demonstrate()
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="a JSON object in each line")
    add(
        "--output-prefix", required=True, metavar="PREFIX", help="for PREFIX_KEY_document.bin, .idx"
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="of texts; default text")
    add("--vocab-file", metavar="FILE", help="gpt2-vocab.json; without it tokens are bytes")
    add("--merge-file", metavar="FILE", help="gpt2-merges.txt")
    add("--append-eod", action="store_true", help="end each document with a token of its own")
    add("--workers", type=int, default=1, help="processes that tokenise; default 1")
    args = parser.parse_args()
    if args.workers < 1 or (args.vocab_file is None) != (args.merge_file is None):
        parser.error("--workers must be positive, and --vocab-file needs --merge-file")
    try:
        preprocess(**vars(args))
    except (OSError, ValueError, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted'}; nothing was written", file=sys.stderr)
        return 1
    return 0


def stop(number, frame):
    sys.exit(143)  # an exception, so that what is half-written is removed


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":  # the first rank under torchrun
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
