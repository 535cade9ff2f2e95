"""Data: JSON lines become Megatron-LM's token files, and each rank reads its samples from these.

Tokenizing takes hours, so it is done once. Training reads the tokens in a random order, so their
files are mapped into memory. Workers tokenize chunks of 1 MiB. The parent process writes the
results in the order of the input:

    oscar.jsonl                 {"text": "It was…"} ⏎ …
    PREFIX_text_document.bin    document 0 │ document 1 │ …   tokens of 16 bits, or of 32 bits if
                                the vocabulary has 65,500 or more
    PREFIX_text_document.idx    header │ lengths │ byte offsets │ first sequence of each document

For each epoch, GPTDataset shuffles the documents, joins their tokens into one long text, and cuts
this text every s tokens. Here s is 8, and each token is a character wide:

    document index  │ 7      │ 2             │ 9   │ 0            │ 4 …     documents, shuffled
    sample index    (0, 0)  (0, 8)  (1, 7)  (1, 15) (3, 1)  (3, 9)  …       one entry per cut
    samples         ├── 0 ──├── 1 ──├── 2 ──├── 3 ──├── 4 ──├── 5 ──┼ …
    sample 1                └───────┘ 8 inputs + the last target, the first input of sample 2

An entry of the sample index is a place in the document index and an offset in that document. The
shuffle index orders the samples: dataset[i] is sample shuffle[i]. Each epoch has its own three
indices.

A seed determines all of this, so training can resume at any step. Each data-parallel rank takes
a part of a step's samples, in the order of the ranks.

Cost:     A core tokenizes 80 MB of text per second into bytes, or 1.7 MB with GPT-2's vocabulary. A
          process takes some 30 MB of memory for an input of any size. The indices of an epoch take
          8 bytes per document and 16 per sample. Making them takes 2.6 s for 10 million documents
          and as many samples.
Run:      python data.py --input oscar.jsonl --output-prefix my-gpt2 --append-eod --workers 2
          Add --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt for GPT-2's tokens. That
          needs the package tokenizers. Without any flags it shows a demonstration.
Mirrors:  Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): tools/preprocess_data.py,
          IndexedDataset, GPTDataset
Left out: input that is a pipe; splitting into sentences; blends of data sets. Megatron's shuffle
          depends on the number of planned steps. Here each epoch is shuffled by itself. The tokens
          after its last whole sample are not used.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy"]
# ///

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
# 1. The format, little endian. PREFIX.bin has the tokens. PREFIX.idx says where documents lie.

# MAGIC, version 1, a key of DTYPES, number of sequences, number of documents + 1
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx in constant memory.

    The files have temporary names until publish() renames them. `stack` is an ExitStack. When it
    closes, it removes the files that still have temporary names.
    """

    def __init__(self, stack, prefix, vocab_size):
        self.prefix = prefix
        self.folder = Path(prefix).parent
        self.vocab_size = vocab_size
        self.code = 8 if vocab_size < 65500 else 4  # of the dtype, in DTYPES
        self.dtype = np.dtype(DTYPES[self.code])
        self.documents = 0  # written so far
        self.tokens = 0
        self.names = {}  # {final name: temporary name}
        files = []
        for kind in ("bin", "idx"):
            temporary = f"{prefix}.{kind}.{os.getpid()}.tmp"
            stack.callback(Path(temporary).unlink, missing_ok=True)
            files.append(stack.enter_context(open(temporary, "wb")))  # noqa: SIM115
            self.names[f"{prefix}.{kind}"] = temporary
        self.bin, self.idx = files
        # The index has all lengths, then all offsets, then all sequence numbers. Each document adds
        # a number to each of these columns, so a column is a file of its own until finish().
        columns = [tempfile.TemporaryFile(dir=self.folder) for _ in range(3)]  # noqa: SIM115
        self.columns = [stack.enter_context(column) for column in columns]

    def add(self, tokens, lengths):
        """Append documents. `tokens` is one array with the tokens of all of them, in order."""
        tokens = np.asarray(tokens)
        lengths = np.asarray(lengths, np.int64)
        is_integer = tokens.dtype.kind in "iu"
        if len(tokens) and not (is_integer and 0 <= tokens.min() <= tokens.max() < self.vocab_size):
            raise ValueError(
                f"{self.prefix}: tokens must be integers from 0 to {self.vocab_size - 1}, "
                f"got {tokens}"
            )
        self.bin.write(tokens.astype(self.dtype, copy=False).data)
        starts = self.tokens + np.cumsum(lengths) - lengths  # each document's first token
        offsets = starts * self.dtype.itemsize
        numbers = self.documents + np.arange(len(lengths))  # each document is one sequence
        additions = [lengths.astype("<i4"), offsets.astype("<i8"), numbers.astype("<i8")]
        for column, values in zip(self.columns, additions, strict=True):
            column.write(values.data)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def finish(self):
        """Write the index, and wait until both files are on the disk."""
        if self.tokens == 0:
            raise ValueError(f"{self.prefix}: there is no text to write")
        header = HEADER.pack(MAGIC, 1, self.code, self.documents, self.documents + 1)
        self.idx.write(header)
        # The last column has one more number: the end of the last document.
        self.columns[-1].write(np.array([self.documents], "<i8").data)
        for column in self.columns:
            column.seek(0)
            shutil.copyfileobj(column, self.idx)
        for file in (self.bin, self.idx):
            file.flush()
            os.fsync(file.fileno())


def publish(*writers):
    """Finish the files of all writers, then give them their final names.

    The old index is removed first, and the new one gets its name last. So a crash never leaves an
    index beside tokens that it does not describe.
    """
    for writer in writers:
        writer.finish()
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # ignored until all files are renamed
                previous_handler = signal.signal(number, signal.SIG_IGN)
                stack.callback(signal.signal, number, previous_handler)
        for writer in writers:
            Path(f"{writer.prefix}.idx").unlink(missing_ok=True)
            for name, temporary in writer.names.items():  # the tokens, then the index
                os.replace(temporary, name)
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
    """Return (code of the dtype, number of sequences)."""
    size = os.path.getsize(name)
    start = np.fromfile(name, np.uint8, HEADER.size).tobytes()
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        raise ValueError(
            f"{name} has {size} bytes and begins with {start[:9]}, "
            f"but an index has {HEADER.size} bytes or more and begins with {MAGIC}"
        )
    _, version, code, sequences, documents = HEADER.unpack(start)
    if version != 1 or code not in DTYPES or sequences == 0:
        raise ValueError(
            f"{name} has version {version}, dtype code {code} and {sequences} sequences; "
            "expected version 1, a dtype code of 1 to 8 (DeepSpeed's 9 and 10 are not Megatron's) "
            "and 1 sequence or more"
        )
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise ValueError(
            f"{name} has {size} bytes, but an index of {sequences} sequences in "
            f"{documents - 1} documents has {expected}"
        )
    return code, sequences


class IndexedDataset:
    """The documents of PREFIX.bin and PREFIX.idx, mapped into memory. `[i]` is an array of tokens.

    It raises a ValueError if the files are truncated or have another format.
    """

    def __init__(self, prefix):
        self.prefix = prefix
        name = f"{prefix}.idx"
        code, sequences = read_header(name)
        index = np.asarray(np.memmap(name, mode="r"))[HEADER.size :]
        lengths, offsets, document_indices = np.split(index, [4 * sequences, 12 * sequences])
        self.sequence_lengths = lengths.view("<i4")  # tokens
        self.offsets = offsets.view("<i8")  # bytes
        self.document_indices = document_indices.view("<i8")  # each document's first sequence
        itemsize = np.dtype(DTYPES[code]).itemsize
        ends = itemsize * np.cumsum(self.sequence_lengths, dtype=np.int64)
        is_contiguous = self.offsets[0] == 0 and np.array_equal(self.offsets[1:], ends[:-1])
        if self.sequence_lengths.min() < 0 or not is_contiguous:
            raise ValueError(
                f"{name}: the offsets of its {sequences} sequences are not sums of the lengths"
            )
        size = os.path.getsize(f"{prefix}.bin")
        if size != ends[-1] or size == 0:
            raise ValueError(f"{prefix}.bin has {size} bytes, but {name} says {ends[-1]}")
        self.tokens = np.asarray(np.memmap(f"{prefix}.bin", DTYPES[code], "r"))

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, i):
        start = self.offsets[i] // self.tokens.itemsize
        return self.tokens[start : start + self.sequence_lengths[i]]

    def __reduce__(self):  # pickled as its name; a DataLoader's worker maps the files itself
        return IndexedDataset, (self.prefix,)


# --------------------------------------------------------------------------------------------------
# 2. Text to tokens: how one process tokenises one chunk of lines.


@functools.cache  # once per process
def tokenizer(vocab_file=None, merge_file=None):
    """Return the function from UTF-8 to tokens, the vocabulary size and the end-of-document token.

    Without files, each byte is a token, and 256 is the end-of-document token. With GPT-2's files,
    the tokens are byte-level BPE's, and the end-of-document token is that of "<|endoftext|>", or
    None if the vocabulary lacks it. In a text, "<|endoftext|>" is tokenised like other characters.
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
    except Exception as error:  # the class that tokenizers raises
        raise ValueError(f"{vocab_file}, {merge_file}: {error}") from None
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = bpe.get_vocab()
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if missing:
        raise ValueError(
            f"{vocab_file} lacks {len(missing)} of 256 bytes, such as {missing[0]!r}: "
            "they would be lost"
        )
    size = max(vocabulary.values()) + 1
    eod = vocabulary.get("<|endoftext|>")
    return lambda utf8: bpe.encode(utf8.decode()).ids, size, eod


class Options(NamedTuple):
    """The arguments of encode() that are the same for all chunks."""

    input: str
    keys: list
    files: list  # vocab_file and merge_file for tokenizer(), absolute names
    append_eod: bool
    dtype: str  # of the tokens
    folder: str  # for the files in which workers return their tokens


class BadLine(ValueError):
    """args: the number of the line in its chunk, from 0, and the reason"""


def texts_of(line, keys):
    """Return the texts of a line under `keys`, in UTF-8. Raise ValueError if the line is bad."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        # For json, each text is line 1. write_all() adds the number of the line in the file.
        raise ValueError(f"not JSON: {str(error).replace('line 1 ', '')}") from None
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise ValueError(f"no key {key!r} in {record!r:.60}".replace("\n", " "))
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise ValueError(f"{key!r} must be a string, not of type {kind}")
    return [record[key].encode() for key in keys]  # a ValueError for half a surrogate pair


def lines_that_start_in(path, start, stop):
    """Return the lines, in bytes, that begin at start to stop - 1. Each line is in one chunk."""
    size = stop - start
    with open(path, "rb") as file:
        if start:
            # Skip the rest of the line that has byte start - 1, but not further than `stop`.
            file.seek(start - 1)
            file.readline(size + 1)
        lines = file.read(stop - file.tell())
        if lines and not lines.endswith(b"\n"):  # the last line ends after `stop`
            lines += file.readline()
    return lines


def encode(options, start, stop):
    """Tokenise the lines of a chunk into a file. Return the file's name and the number of lines.

    For each key, the file has two arrays: the tokens of all documents, and the documents' lengths.
    """
    tokenize, _, eod = tokenizer(*options.files)
    end = [eod] if options.append_eod else []
    # np.concatenate() below needs at least one array.
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
                document = tokenize(text)
                tokens[key] += [document, end]
                lengths[key].append(len(document) + len(end))
    name = os.path.join(options.folder, str(start))
    with open(name, "wb") as file:
        for key in options.keys:
            # "unsafe" allows lists of int, which are int64 to numpy.
            np.save(file, np.concatenate(tokens[key], dtype=options.dtype, casting="unsafe"))
            np.save(file, np.array(lengths[key], np.int64))
    return name, len(lines)


# --------------------------------------------------------------------------------------------------
# 3. Several processes tokenise all chunks.

CHUNK = 2**20  # bytes of input


def start_worker():
    # Ctrl-C reaches all processes. The first process then ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    parent_process().join()
    os._exit(1)  # the parent was killed, and nothing else would end this worker


def in_order(function, jobs, workers):
    """Yield function(*job) for each of `jobs`, in order. At most 2 · workers + 1 are under way.

    If a worker is killed, this raises an OSError. multiprocessing.Pool would hang. Jobs and results
    must be smaller than 4 kB. If a worker were killed while it sent a longer message, this would
    hang, too.
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


def write_all(options, workers, writers):
    """Tokenise the input and append it to the writers. Return the number of lines."""
    size = os.path.getsize(options.input)
    progress = Progress(size)
    jobs = ((options, start, start + CHUNK) for start in range(0, size, CHUNK))
    lines = 0
    with closing(in_order(encode, jobs, workers)) as results:
        try:
            for chunks, (name, lines_in_chunk) in enumerate(results, 1):
                with open(name, "rb") as file:
                    for writer in writers:
                        tokens = np.load(file)
                        lengths = np.load(file)
                        writer.add(tokens, lengths)
                os.unlink(name)
                lines += lines_in_chunk
                progress.show(min(chunks * CHUNK, size), lines)
        except BadLine as error:
            number, reason = error.args
            raise ValueError(f"{options.input}:{lines + number + 1}: {reason}") from None
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

    Empty texts are left out. A bad line raises a ValueError that begins with FILE:LINE. No file is
    then created or changed.
    """
    files = [name and os.path.abspath(name) for name in (vocab_file, merge_file)]  # cache keys
    keys = list(dict.fromkeys(json_keys))
    if not keys or isinstance(json_keys, str):
        raise ValueError(f"{json_keys=} must be a list of one key or more, such as ['text']")
    megabytes = os.path.getsize(input) / 1e6  # an OSError if there is no such file
    if not os.path.isfile(input):
        raise ValueError(f"{input} must be a regular file: workers read parts of it")
    vocab_size = vocabulary_size(files, append_eod)
    settings = f"{megabytes:,.1f} MB · vocabulary of {vocab_size:,} · --workers {workers}"
    print(f"data · {input}, {settings}", flush=True)
    start = time.monotonic()
    with ExitStack() as stack:
        writers = [
            IndexedWriter(stack, f"{output_prefix}_{key}_document", vocab_size) for key in keys
        ]
        temporary = tempfile.TemporaryDirectory(dir=writers[0].folder, suffix=".tmp")
        folder = stack.enter_context(temporary)
        options = Options(str(input), keys, files, append_eod, writers[0].dtype.str, folder)
        lines = write_all(options, workers, writers)
        publish(*writers)
    show_result(writers, lines, megabytes / (time.monotonic() - start))


class Progress:
    """A counter on a terminal, and a line every 30 seconds in a log."""

    def __init__(self, size):
        self.size = size  # bytes of input
        self.start = time.monotonic()
        self.shown = 0.0  # seconds from the start to the last line
        self.on_terminal = sys.stdout.isatty()

    def show(self, done, documents):
        seconds = time.monotonic() - self.start
        if seconds - self.shown > (0.2 if self.on_terminal else 30):
            self.shown = seconds
            fraction = done / self.size
            counts = f"{fraction:4.0%}   {documents:,} documents   {done / 1e6 / seconds:.1f} MB/s"
            end = "\x1b[K\r" if self.on_terminal else "\n"
            print(f"{counts}   {seconds / fraction - seconds:.0f} s left", end=end, flush=True)

    def clear(self):
        print(end="\x1b[K" if self.on_terminal else "", flush=True)


def show_result(writers, lines, rate):
    for writer in writers:
        left_out = lines - writer.documents
        empty = f", {left_out:,} empty left out" if left_out else ""
        counts = f"{writer.documents:,} documents, {writer.tokens:,} tokens"
        print(f"{writer.prefix}: {counts}{empty}, {rate:.1f} MB/s")


# --------------------------------------------------------------------------------------------------
# 4. Tokens to samples, and samples to ranks.


class GPTDataset:
    """Samples for training. `[i]`, for i < num_samples, has sequence_length + 1 tokens (int64).

    The samples come from as many epochs of the dataset `indexed` as they need. Read them in order,
    because only one epoch's indices are in memory.
    """

    def __init__(self, indexed, sequence_length, num_samples, seed=0):
        tokens = int(indexed.sequence_lengths.sum(dtype=np.int64))
        documents = len(indexed.document_indices) - 1
        if not 1 <= sequence_length < tokens or num_samples < 1 or not 0 <= seed < 2**32:
            raise ValueError(
                f"{sequence_length=} must be 1 to {tokens - 1}, {num_samples=} 1 or more, "
                f"and {seed=} 0 to 4294967295"
            )
        if indexed[0].dtype.kind not in "iu":
            raise ValueError(
                f"the files have {indexed[0].dtype}, which are no tokens. (DeepSpeed writes other "
                "dtype codes than Megatron.)"
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
        self.samples_per_epoch = (tokens - 1) // sequence_length  # 1 token is only a target
        self.epoch = None  # the epoch of the indices in memory
        self.epoch_indices = None  # the three that make_indices() returned

    def __len__(self):
        return self.num_samples

    def indices(self, epoch):
        """Return the document index (documents,), sample index (samples, 2), shuffle (samples,)."""
        if self.epoch != epoch:
            self.epoch_indices = self.make_indices(epoch)
            self.epoch = epoch
        return self.epoch_indices

    def make_indices(self, epoch):
        # Every version of NumPy gives the same numbers from RandomState, but not from default_rng
        # (NEP 19).
        random = np.random.RandomState([self.seed, epoch])
        documents = random.permutation(len(self.indexed))
        lengths = self.indexed.sequence_lengths[documents]
        ends = np.cumsum(lengths, dtype=np.int64)
        cuts = self.sequence_length * np.arange(self.samples_per_epoch)
        # A cut lies in the first document that ends after it. That is never an empty document.
        places = np.searchsorted(ends, cuts, side="right")
        offsets = cuts - (ends - lengths)[places]
        samples = np.stack([places, offsets], axis=1).astype(np.int32)
        return documents, samples, random.permutation(len(samples))

    def __getitem__(self, i):
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        epoch, i_in_epoch = divmod(i, self.samples_per_epoch)
        documents, samples, shuffle = self.indices(epoch)
        place, offset = samples[shuffle[i_in_epoch]].tolist()
        parts = []
        remaining = self.sequence_length + 1  # tokens
        while remaining:
            part = self.indexed[documents[place]][offset : offset + remaining]
            parts.append(part)
            remaining -= len(part)
            place += 1
            offset = 0
        return np.concatenate(parts, dtype=np.int64)


def document_fields(tokens, eod):
    """Return (documents, positions, loss mask) of packed `tokens` (…, S), each (…, S), Megatron's.

    documents    number of each token's document. An eod token belongs to the one that it ends.
                 With --reset-attention-mask, a token sees only its own document.
    positions    place of each token in its document, for --reset-position-ids
    loss mask    0.0 where the *input* is eod, for --eod-mask-loss, otherwise 1.0

    Each has the type of `tokens`: an array, or a tensor on the same device.
    """
    is_eod = np.asarray(tokens.cpu() if hasattr(tokens, "cpu") else tokens) == eod
    documents = is_eod.cumsum(-1) - is_eod
    here = np.arange(is_eod.shape[-1])
    starts = np.zeros_like(documents)
    starts[..., 1:] = np.where(is_eod, here + 1, 0)[..., :-1]
    positions = here - np.maximum.accumulate(starts, axis=-1)
    fields = (documents, positions, (~is_eod).astype(np.float32))
    if hasattr(tokens, "new_tensor"):
        import torch

        return tuple(torch.from_numpy(field).to(tokens.device) for field in fields)
    return fields


def part_of_batch(step, size, rank=0, ranks=1):
    """Return the range of this rank's samples in a step of `size`, cut as torch.chunk() cuts."""
    if step < 0 or size < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"{step=} must be 0 or more, {size=} 1 or more, and {rank=} 0 to {ranks - 1}"
        )
    per_rank = -(-size // ranks)  # rounded up
    start = min(rank * per_rank, size)
    stop = min(start + per_rank, size)
    return range(step * size + start, step * size + stop)


# --------------------------------------------------------------------------------------------------
# Demo: tokenise the standard library's Python files, and show the samples of a step.


def demonstrate():
    """Tokenise the standard library, read it, and show step 0. Return 1 if a text has changed."""
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
        verdict = "all documents are unchanged" if is_same else "some documents have CHANGED"
        print(f"read back: {verdict}; token 256 ends each")
        show_batch(GPTDataset(indexed, 1024, 8), list(texts))
    return int(not is_same)


def show_batch(dataset, names):
    """Print each sample of step 0: its rank among 1, 2 and 4 ranks, its place and its text."""
    documents, samples, shuffle = dataset.indices(0)
    n = len(dataset)
    length = dataset.sequence_length
    print(f"epoch 0: {len(samples):,} samples of {length} + 1 tokens; step 0, a batch of {n}:")
    print("  [i]   rank of 1, 2, 4   sample   begins in              ends in                text")
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
    add("--input", required=True, metavar="FILE", help="has a JSON object in each line")
    output = "writes PREFIX_KEY_document.bin and .idx"
    add("--output-prefix", required=True, metavar="PREFIX", help=output)
    keys = "keys of the texts; default: text"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    add("--vocab-file", metavar="FILE", help="gpt2-vocab.json; without it, each byte is a token")
    add("--merge-file", metavar="FILE", help="gpt2-merges.txt")
    add("--append-eod", action="store_true", help="add a token at the end of each document")
    add("--workers", type=int, default=1, help="number of processes; default: 1")
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
    sys.exit(143)  # raises an exception, so that temporary files are removed


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":  # under torchrun, rank 0
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
