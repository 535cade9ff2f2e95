"""Data: JSONL in, Megatron-LM's files of tokens out, and from them the same batches on every grid and in every run.

    oscar.jsonl                 {"text": "It was…"} ⏎ …   several processes tokenise a MiB each, one writes, in order
    PREFIX_text_document.bin    document 0 │ document 1 │ …   tokens back to back, 16 bits each, 32 from 65,500 on
    PREFIX_text_document.idx    header │ lengths │ byte offsets │ the sequence that each document begins with

GPTDataset takes the documents of an epoch, in a shuffled order, as one long text, which it cuts every s tokens:

    document index   that order            │ 7      │ 2             │ 9   │ 0            │ 4 …
    sample index     place in it, offset   (0, 0)  (0, 8)  (1, 7)  (1, 15) (3, 1)  (3, 9)  …
                     of each cut           ├── s ──├── s ──├── s ──├── s ──├── s ──├── s ──┼
    sample 1         s inputs and a target         └───────┘ s + 1 tokens: the last is sample 2's first
    shuffle index    [i] is sample shuffle[i]; after the last one comes the next epoch, shuffled anew

All this follows from a seed, so any step can be the first; its global batch is cut among data-parallel ranks in order.

Cost:     a second of a core for 80 MB, or 1.7 MB by GPT-2's vocabulary; some 30 MB in each process, whatever the input
          8 bytes a document and 16 a sample for the indices of an epoch; 2.6 s for 10 million of both, every epoch
Run:      python data.py --input oscar.jsonl --output-prefix my-gpt2 --append-eod --workers 2       (no flags: a demo)
          --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt: GPT-2's tokens, by the package tokenizers
Mirrors:  Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): tools/preprocess_data.py, IndexedDataset, GPTDataset
Left out: sentences, splits, blends; masks and positions that end with a document. Megatron's shuffle mixes epochs, and
          depends on how many steps are planned; ours are whole, and less than a sample at the end of one is not read
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# 1. The format: tokens in PREFIX.bin, where each document lies in PREFIX.idx; little endian, nothing aligned.

HEADER = struct.Struct(
    "<9sQBQQ"
)  # MAGIC, version 1, dtype's code, number of sequences, number of documents + 1
MAGIC, DTYPES = (
    b"MMIDIDX\0\0",
    {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"},
)


class IndexedWriter:
    """PREFIX.bin and .idx, in constant memory; until `publish` by other names, which `stack`, an ExitStack, removes."""

    def __init__(self, stack, prefix, vocab_size):
        self.prefix, self.vocab_size, self.code = prefix, vocab_size, 8 if vocab_size < 65500 else 4
        self.names = {
            f"{prefix}.{kind}": f"{prefix}.{kind}.{os.getpid()}.tmp" for kind in ("bin", "idx")
        }
        for name in self.names.values():
            stack.callback(Path(name).unlink, missing_ok=True)
        self.bin, self.idx = (stack.enter_context(open(name, "wb")) for name in self.names.values())  # noqa: SIM115
        self.folder, self.documents, self.tokens = Path(self.idx.name).parent, 0, 0
        self.parts = [
            stack.enter_context(tempfile.TemporaryFile(dir=self.folder))  # noqa: SIM115
            for _ in range(3)
        ]

    def add(self, tokens, lengths):
        """Append documents of these lengths, their tokens in one array, back to back."""
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, np.int64)
        if len(tokens) and not (
            tokens.dtype.kind in "iu" and 0 <= tokens.min() <= tokens.max() < self.vocab_size
        ):
            raise ValueError(
                f"{self.prefix}: tokens must be integers from 0 to {self.vocab_size - 1}, unlike {tokens}"
            )
        self.bin.write(tokens.astype(DTYPES[self.code], copy=False).data)
        offsets = (self.tokens + np.cumsum(lengths) - lengths) * np.dtype(
            DTYPES[self.code]
        ).itemsize
        numbers = np.arange(
            self.documents, self.documents + len(lengths)
        )  # each document is one sequence
        # in the index these stand one after the other, and all grow with each document: three files until the end
        for part, array, dtype in zip(
            self.parts, (lengths, offsets, numbers), ("<i4", "<i8", "<i8"), strict=True
        ):
            part.write(array.astype(dtype).data)
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + len(tokens)

    def finish(self):
        """Put the index together, and both files on the disk."""
        if self.tokens == 0:
            raise ValueError(f"{self.prefix}: there is no text to write")
        self.idx.write(HEADER.pack(MAGIC, 1, self.code, self.documents, self.documents + 1))
        self.parts[-1].write(np.array([self.documents], "<i8").data)
        for part in self.parts:
            part.seek(0)
            shutil.copyfileobj(part, self.idx)
        for file in (self.bin, self.idx):
            file.flush()
            os.fsync(file.fileno())


def publish(*writers):
    """Finish and rename all or none; old indices go first and new ones come last, so that none has another's tokens."""
    for writer in writers:
        writer.finish()
    with ExitStack() as stack:  # between two names it is too late to stop
        for number in (signal.SIGINT, signal.SIGTERM) * (
            threading.current_thread() is threading.main_thread()
        ):
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        for writer in writers:
            Path(f"{writer.prefix}.idx").unlink(missing_ok=True)
            for name, hidden in writer.names.items():
                os.replace(hidden, name)
            folder = os.open(writer.folder, os.O_RDONLY)
            os.fsync(folder)  # names are lost with the power as well
            os.close(folder)


def write_indexed(prefix, documents, vocab_size):
    """Write `documents`, an iterable of sequences of tokens below `vocab_size`, to PREFIX.bin and PREFIX.idx."""
    with ExitStack() as stack:
        writer = IndexedWriter(stack, prefix, vocab_size)
        for document in documents:
            writer.add(document, [len(document)])
        publish(writer)


class IndexedDataset:
    """The documents of PREFIX.bin and .idx, mapped: `[i]` is an array. ValueError: truncated, or foreign."""

    def __init__(self, prefix):
        self.prefix, (idx, bin) = (
            prefix,
            (os.path.getsize(f"{prefix}.{kind}") for kind in ("idx", "bin")),
        )
        start = np.fromfile(f"{prefix}.idx", np.uint8, HEADER.size).tobytes()
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            raise ValueError(
                f"{prefix}.idx: {idx} bytes that begin with {start[:9]}, not {HEADER.size} with {MAGIC}"
            )
        _, version, code, n, documents = HEADER.unpack(start)
        if version != 1 or code not in DTYPES or n == 0:
            raise ValueError(
                f"{prefix}.idx: version {version}, not 1; dtype {code}, not 1 to 8; or {n} sequences"
            )
        if idx != (whole := HEADER.size + 12 * n + 8 * documents):
            raise ValueError(
                f"{prefix}.idx: {idx} bytes; {n} sequences in {documents - 1} documents are {whole}"
            )
        parts = np.split(
            np.asarray(np.memmap(f"{prefix}.idx", mode="r"))[HEADER.size :], [4 * n, 12 * n]
        )
        self.sequence_lengths, self._offsets, self.document_indices = map(
            np.ndarray.view, parts, ("<i4", "<i8", "<i8")
        )
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64) * np.dtype(DTYPES[code]).itemsize
        if (
            self.sequence_lengths.min() < 0
            or self._offsets[0] != 0
            or (self._offsets[1:] != ends[:-1]).any()
        ):
            raise ValueError(
                f"{prefix}.idx: the offsets of its {n} sequences are not the sums of their lengths"
            )
        if bin != ends[-1] or bin == 0:
            raise ValueError(f"{prefix}.bin: {bin} bytes; by {prefix}.idx they must be {ends[-1]}")
        self._tokens = np.asarray(np.memmap(f"{prefix}.bin", DTYPES[code], "r"))

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, i):
        start = self._offsets[i] // self._tokens.itemsize
        return self._tokens[start : start + self.sequence_lengths[i]]

    def __reduce__(self):  # the workers of a DataLoader map the files themselves
        return IndexedDataset, (self.prefix,)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Text to tokens: lines of JSON, a MiB at a time, by several processes, in the order of the file.


@functools.cache  # one in each process
def tokenizer(vocab_file=None, merge_file=None):
    """-> function of UTF-8 to tokens, size of the vocabulary, the token of a document's end (or None).

    Without files a token is a byte, and 256 the end; with GPT-2's, byte-level BPE. <|endoftext|> in a text is but text.
    """
    if vocab_file is None:
        return lambda utf8: np.frombuffer(utf8, np.uint8), 257, 256
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers

        bpe = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    except ImportError:
        raise ValueError(
            "a vocabulary file takes the package tokenizers: pip install tokenizers"
        ) from None
    except Exception as error:  # tokenizers raises no other
        raise ValueError(f"{vocab_file}, {merge_file}: {error}") from None
    bpe.pre_tokenizer, vocabulary = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        bpe.get_vocab(),
    )
    if missing := [
        letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in vocabulary
    ]:
        raise ValueError(
            f"{vocab_file} lacks {len(missing)} of 256 bytes, {missing[0]!r} for one: text would be lost"
        )
    return (
        lambda utf8: bpe.encode(utf8.decode()).ids,
        max(vocabulary.values()) + 1,
        vocabulary.get("<|endoftext|>"),
    )


def texts_of(line, keys):
    """-> the texts of a line under `keys`, in UTF-8, or a ValueError that says what is wrong with it."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"not JSON: {str(error).replace('line 1 ', '')}"
        ) from None  # its one line is not the file's
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise ValueError(f"no key {key!r} in {record!r:.60}".replace("\n", " "))
        if not isinstance(record[key], str):
            raise ValueError(f"{key!r} is no string, but of type {type(record[key]).__name__}")
    return [record[key].encode() for key in keys]  # half a surrogate pair is a ValueError, too


def encode(keys, append_eod, files, dtype, name, first, lines):
    """-> for each key (tokens, lengths) of these lines, the first of which is number `first` of file `name`"""
    tokenize, _, eod = tokenizer(*files)
    end = [eod] if append_eod else []
    found = [([end[:0]], []) for _ in keys]
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first):
        try:
            texts = texts_of(line, keys)
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {error}") from None
        for text, (tokens, lengths) in zip(texts, found, strict=True):
            if text:
                tokens += [tokenize(text), end]
                lengths.append(len(tokens[-2]) + len(end))
    return [
        (np.concatenate(tokens, dtype=dtype, casting="unsafe"), lengths)
        for tokens, lengths in found
    ]


def work(function, pipe, other):
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they may reach all processes; the first sees to our end
        signal.signal(number, signal.SIG_IGN)
    other.close()  # if the first is killed, nobody is left to hold it, and recv raises
    with suppress(EOFError, OSError):
        while job := pipe.recv():
            try:
                pipe.send(function(*job))
            except ValueError as error:
                pipe.send(error)


def in_order(function, jobs, workers):
    """-> (job, function(*job)) for each of `jobs`, in order; `workers` processes have one at a time, in turn."""
    pool, given = (
        [],
        [None] * workers,
    )  # multiprocessing's own pools read all jobs at once, and hang if one is killed
    try:
        for _ in given:
            pipe, other = multiprocessing.Pipe()
            process = multiprocessing.Process(
                target=work, args=(function, other, pipe), daemon=True
            )
            process.start()
            pool.append((process, pipe))
            other.close()
        for job, n in zip(
            itertools.chain(jobs, given.copy()), itertools.cycle(range(workers)), strict=False
        ):
            (_, pipe), before = pool[n], given[n]
            answer, given[n] = before and pipe.recv(), job
            if job:
                pipe.send(job)
            if isinstance(answer, Exception):
                raise answer
            if before:
                yield before, answer
    except (EOFError, OSError) as error:
        if getattr(error, "errno", None) and not isinstance(error, ConnectionError):
            raise  # the input cannot be read; an answer that ends in the middle has no number
        raise OSError("a worker was killed; did it run out of memory?") from None
    finally:
        for process, _ in pool:
            process.kill()


def chunks(path, size=2**20):
    """-> (path, number of the first line, lines), about `size` bytes of whole lines at a time"""
    first = 1
    with open(path, "rb") as file:
        while lines := file.read(size) + file.readline():
            yield path, first, lines
            first += lines.count(b"\n")


def preprocess(
    input,
    output_prefix,
    json_keys=("text",),
    vocab_file=None,
    merge_file=None,
    append_eod=False,
    workers=1,
):
    """Tokenise the JSON lines of `input` to OUTPUT_PREFIX_KEY_document.bin and .idx for each key; print what, how fast.

    Empty texts are left out. ValueError FILE:LINE for a line that is not as it must be; then no file is new or changed.
    """
    keys, files, size = (
        [*dict.fromkeys(json_keys)],
        (vocab_file, merge_file),
        os.path.getsize(input),
    )
    _, vocab_size, eod = tokenizer(*files)
    if append_eod and eod is None:
        raise ValueError(f"{vocab_file} has no <|endoftext|>, which --append-eod appends")
    print(
        f"data · {input}, {size / 1e6:,.1f} MB · {vocab_size:,} tokens · --workers {workers}",
        flush=True,
    )
    start, shown, documents, done, terminal = time.monotonic(), 0, 0, 0, sys.stdout.isatty()
    with ExitStack() as stack:
        stack.callback(
            print, end="\x1b[K" if terminal else "", flush=True
        )  # what is left of the bar
        writers = [
            IndexedWriter(stack, f"{output_prefix}_{key}_document", vocab_size) for key in keys
        ]
        function = functools.partial(encode, keys, append_eod, files, DTYPES[writers[0].code])
        for (*_, lines), encoded in stack.enter_context(
            closing(in_order(function, chunks(input), workers))
        ):
            for writer, arrays in zip(writers, encoded, strict=True):
                writer.add(*arrays)
            documents, done = (
                documents + lines.count(b"\n") + (lines[-1:] != b"\n"),
                done + len(lines),
            )
            part, seconds = done / max(size, done), time.monotonic() - start
            if seconds - shown > (0.2 if terminal else 30):
                shown, speed = (
                    seconds,
                    f"{done / 1e6 / seconds:.1f} MB/s   {seconds / part - seconds:.0f} s left",
                )
                line = (
                    f"{'█' * int(20 * part):·<20} {part:4.0%}   {documents:,} documents   {speed}"
                )
                print(line, end="\x1b[K\r" if terminal else "\n", flush=True)
        publish(*writers)
    rate = done / 1e6 / (time.monotonic() - start)
    for writer in writers:
        empty = (
            f", {documents - writer.documents:,} empty left out"
            if documents > writer.documents
            else ""
        )
        print(
            f"{writer.prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens{empty}, {rate:.1f} MB/s"
        )


# ---------------------------------------------------------------------------------------------------------------------
# 3. Tokens to samples, and samples to ranks.


class GPTDataset:
    """`[i]`: sample i of `num_samples`, sequence_length + 1 tokens (int64), from as many epochs of `indexed` as needed.

    The indices of an epoch are made when a sample of it is asked for after one of another: go through them in order.
    """

    def __init__(self, indexed, sequence_length, num_samples, seed=0):
        tokens, documents = (
            indexed.sequence_lengths.sum(dtype=np.int64),
            len(indexed.document_indices) - 1,
        )
        if not 1 <= sequence_length < tokens or num_samples < 1 or not 0 <= seed < 2**32:
            raise ValueError(
                f"{sequence_length=}: 1 to {tokens - 1}; {num_samples=}: from 1; {seed=}: 0 to 4294967295"
            )
        if len(indexed) != documents:
            raise ValueError(
                f"{len(indexed)} sequences in {documents} documents: preprocess without --split-sentences"
            )
        self.indexed, self.sequence_length, self.num_samples, self.seed = (
            indexed,
            sequence_length,
            num_samples,
            seed,
        )
        self.samples_per_epoch, self._made = int(tokens - 1) // sequence_length, (None, None)

    def __len__(self):
        return self.num_samples

    def indices(self, epoch):
        """-> document index (documents,), sample index (samples, 2), shuffle index (samples,)"""
        if self._made[0] != epoch:
            random = np.random.RandomState(
                [self.seed, epoch]
            )  # its numbers are frozen, unlike default_rng's (NEP 19)
            documents = random.permutation(len(self.indexed))
            lengths = self.indexed.sequence_lengths[documents]
            ends, cuts = (
                np.cumsum(lengths, dtype=np.int64),
                self.sequence_length * np.arange(self.samples_per_epoch),
            )
            places = np.searchsorted(
                ends, cuts, side="right"
            )  # the first document to end after the cut
            samples = np.stack([places, cuts - ends[places] + lengths[places]], axis=1).astype(
                np.int32
            )
            self._made = epoch, (documents, samples, random.permutation(len(samples)))
        return self._made[1]

    def __getitem__(self, i):
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        epoch, i = divmod(i, self.samples_per_epoch)
        documents, samples, shuffle = self.indices(epoch)
        place, offset = samples[shuffle[i]].tolist()
        sample, filled = np.empty(self.sequence_length + 1, np.int64), 0
        while filled < len(sample):
            piece = self.indexed[documents[place]][offset : offset + len(sample) - filled]
            sample[filled : filled + len(piece)] = piece
            place, offset, filled = place + 1, 0, filled + len(piece)
        return sample


def part_of_batch(step, size, rank=0, ranks=1):
    """-> range of what rank has of the samples step·size to (step + 1)·size - 1, cut as torch.chunk cuts a batch"""
    if step < 0 or size < 1 or not 0 <= rank < ranks:
        raise ValueError(f"{step=} from 0 on, {size=} from 1 on, {rank=} from 0 to {ranks - 1}")
    rows = -(-size // ranks)
    return range(step * size + min(rank * rows, size), step * size + min((rank + 1) * rows, size))


# ---------------------------------------------------------------------------------------------------------------------
# 4. The command line; without flags, a demonstration.


def demonstrate():
    """The standard library to files and back; what step 0 trains on, and who. -> 0 where all came back"""
    paths = sorted(
        path for path in Path(argparse.__file__).parent.glob("*.py") if path.stat().st_size
    )
    texts = {path.name: path.read_bytes() for path in paths}
    with tempfile.TemporaryDirectory() as folder:
        source, prefix = Path(folder, "library.jsonl"), Path(folder, "library")
        source.write_text(
            "".join(json.dumps({"text": text.decode()}) + "\n" for text in texts.values())
        )
        preprocess(source, prefix, append_eod=True, workers=2)
        indexed = IndexedDataset(f"{prefix}_text_document")
        same = [tokens[:-1].astype(np.uint8).tobytes() for tokens in indexed] == list(
            texts.values()
        )
        print(
            f"read back: each document {'as it was' if same else 'NOT as it was'}, and token 256 at its end"
        )
        show_batch(GPTDataset(indexed, 1024, 8), list(texts))
    return int(not same)


def show_batch(dataset, names):
    """Step 0: which data-parallel rank of three grids has each sample, where it begins and ends, and its text."""
    (documents, samples, shuffle), n = dataset.indices(0), len(dataset)
    print(
        f"epoch 0: {len(samples):,} samples of {dataset.sequence_length} + 1 tokens; step 0, a batch of {n}:"
    )
    print("  [i]   rank of 1, 2, 4   sample   begins in              ends in                with")
    for i in part_of_batch(0, n):
        ranks = "  ".join(
            str(rank) for d in (1, 2, 4) for rank in range(d) if i in part_of_batch(0, n, rank, d)
        )
        ends = [
            f"{names[documents[place]]}:{offset:,}"
            for place, offset in samples[shuffle[i] :][:2].tolist()
        ]
        text = bytes(dataset[i][:30].clip(0, 255).astype(np.uint8)).decode("utf-8", "replace")
        print(
            f"  [{i}]           {ranks}   {shuffle[i]:>6,}   {ends[0]:20}   {ends[-1]:20}   {text!r}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error, add = lambda message: parser.exit(2, f"error: {message}\n"), parser.add_argument
    add("--input", required=True, metavar="FILE", help="a JSON object on each line")
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="for PREFIX_KEY_document.bin and .idx",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="that have the texts; default text",
    )
    add("--vocab-file", metavar="FILE", help="gpt2-vocab.json; without it, tokens are bytes")
    add("--merge-file", metavar="FILE", help="gpt2-merges.txt")
    add("--append-eod", action="store_true", help="a token at the end of each document")
    add(
        "--workers",
        type=int,
        default=1,
        help="processes that tokenise, beside one that reads and writes; default 1",
    )
    if len(sys.argv) == 1:
        return demonstrate()
    a = parser.parse_args()
    if a.workers < 1 or (a.vocab_file is None) != (a.merge_file is None):
        parser.error("--workers must be positive, --vocab-file and --merge-file come together")
    try:
        preprocess(**vars(a))
    except (OSError, ValueError, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted'}; nothing was written", file=sys.stderr)
        return 1
    return 0


if (
    __name__ == "__main__" and os.environ.get("RANK", "0") == "0"
):  # under torchrun the first rank does it
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an exception: what is half-written is removed
    sys.exit(main())
