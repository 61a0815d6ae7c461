#!/usr/bin/env python3
"""Turns text into token shards that ./train reads.

    pip install -r data/requirements.txt
    python data/prepare.py tinyshakespeare --out data/shakespeare
    python data/prepare.py books.txt.xz more.jsonl --out data/corpus --val held_out.txt
    python data/prepare.py books.txt --train-bpe 8192 --out data/corpus    # with a vocabulary of its own
    python data/prepare.py --eval hellaswag lambada                        # questions for ./train --eval
    python data/prepare.py --from-nanogpt data/shakespeare_char            # nanoGPT's train.bin, val.bin, meta.pkl
    ./train --data data/corpus

An input is a .txt, .jsonl, .json (an array, or a record a line) or .parquet file, each but the last also packed by
gzip, xz, bzip2 or zstd, or the name of a public corpus, which is downloaded. `<|endoftext|>` in a text begins another
document. Text is encoded with GPT-2's byte-pair encoding, or with another of its kind (--tokenizer, --train-bpe;
vocabulary.py), by tiktoken; every document begins with the token <|endoftext|>. A document that cannot be used is left
out, counted and reported; a packed file, a .json array or a .parquet file that is broken stops the program.

Validation text is drawn by --seed from all inputs alike, unless --val names some. What is of several files is written
in an order of its own, so that its beginning is of all of them too.

The folder --out then holds
    train_000000.bin, ..., val_000000.bin, ...   256 int32 (magic 20240520, version 1, tokens, 0...), uint16 tokens
    vocab.json, merges.txt                       the vocabulary under Hugging Face's names, to decode samples
    tokenizer.json, tokenizer_config.json        the same for transformers, where it was trained here or came with them
    meta.json                                    counts of tokens and bytes (UTF-8 of the text), sources
It is written as OUT.tmp and renamed at the end, so OUT is complete whenever it exists. The shards do not depend on the
number of threads. Input is streamed, so memory is bounded but for the validation part and a .json array.
"""

import argparse
import collections
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from messages import MAKE, PREPARE, ROOT, VENV, Problem, here, say

try:
    import numpy as np
    from tqdm import tqdm

    import eval_files
    import nanogpt
    import vocabulary
    from input_files import CORPORA, Notes, download, input_kind, read_inputs
except ImportError as missing:
    say(f"prepare: error: {missing}; {VENV}", sys.stderr)
    sys.exit(2)

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
BATCH = 1 << 19  # characters that a thread is given at once
SMALL_VALIDATION = 1 << 17  # bytes of validation text (about 32,000 tokens) taken of a small corpus
BPE_CHARACTERS = 1 << 30  # --train-bpe reads this much of the training text


def draw(pieces, share, seed):
    """Yields (part, whether it begins a document, text) of each piece, where about `share` of the text is for "val".

    One piece is drawn from each 1 / share of them, so an input of many pieces gives its share. A document is one piece
    or, if it is long, several; one of another part than the one before begins a document.
    """
    generator, count, chosen, part = random.Random(seed), 0, -1, None
    for number, (begins, text) in enumerate(pieces):
        while chosen < number:
            chosen, count = int((count + generator.random()) / share), count + 1
        before, part = part, "val" if number == chosen else "train"
        yield part, begins or part != before, text


def read_parts(options, notes, what):
    """Yields (part, whether it begins a document, text) of all inputs, the validation files first."""
    size, val_size = (sum(map(os.path.getsize, files)) for files in (options.train_files, options.val_files))
    most = vocabulary.MAX_SPACE
    with tqdm(total=size + val_size, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        if options.val_files:
            for part, files in (("val", options.val_files), ("train", options.train_files)):
                for begins, text in read_inputs(files, options.field, most, notes, bar):
                    yield part, begins, text
            return
        taken = min(size, 4 * options.limit_tokens) if options.limit_tokens else size
        share = options.val_fraction or max(0.005, min(0.1, SMALL_VALIDATION / max(taken, 1)))
        unit = max(64, int(share * taken / 8))  # so about eight places or more give validation text
        pieces = read_inputs(options.train_files, options.field, min(most, unit), notes, bar)
        yield from draw(pieces, share, options.seed)


def batches(pieces):
    """Groups pieces into lists of about BATCH characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[2])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def in_threads(function, items, workers):
    """Yields function(item) of all items, in order. At most 4 items a thread are in memory."""
    waiting = collections.deque()
    with ThreadPoolExecutor(workers) as pool:  # tiktoken lets other threads run while it encodes
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def shuffled(tokens, end, seed):
    """Returns the documents in `tokens`, each of which begins with the token `end`, in another order."""
    documents = np.split(tokens, np.flatnonzero(tokens == end)[1:])
    random.Random(seed).shuffle(documents)
    return np.concatenate(documents)


def encode_all(pieces, words, options):
    """Yields (part, tokens) of all pieces. The validation part comes at the end, in another order if it is of several files."""
    end = np.array([words.end], np.uint16)

    def encode(batch):
        tokens = {"train": [end[:0]], "val": [end[:0]]}
        for part, begins, text in batch:
            tokens[part] += [end, words.encode(text)] if begins else [words.encode(text)]
        return {part: np.concatenate(arrays) for part, arrays in tokens.items()}

    validation, left = [], options.limit_tokens or sys.maxsize
    for tokens in in_threads(encode, batches(pieces), options.workers):
        validation.append(tokens["val"])
        yield "train", tokens["train"][:left]
        left = max(0, left - len(tokens["train"]))
        if not left and any(map(len, validation)):
            break
    tokens = np.concatenate(validation)
    yield "val", tokens if len(options.val_files) == 1 else shuffled(tokens, words.end, options.seed)


class ShardWriter:
    """Writes train_000000.bin, train_000001.bin, ... of shard_tokens tokens each; counts tokens and bytes of text."""

    def __init__(self, folder, part, shard_tokens, lengths):
        self.folder, self.part, self.shard_tokens, self.lengths = folder, part, shard_tokens, lengths
        self.file, self.shards, self.tokens, self.bytes = None, 0, 0, 0

    def write(self, tokens):
        self.bytes += int(self.lengths[tokens].sum())
        while len(tokens):
            within = self.tokens % self.shard_tokens
            if within == 0:
                self.close()
                self.file = open(self.folder / f"{self.part}_{self.shards:06d}.bin", "wb")
                self.file.write(bytes(HEADER_BYTES))
                self.shards += 1
            now, tokens = np.split(tokens, [self.shard_tokens - within])
            self.file.write(now.astype("<u2").tobytes())
            self.tokens += len(now)

    def close(self):
        if self.file:
            header = np.zeros(256, "<i4")
            header[:3] = MAGIC, VERSION, (self.file.tell() - HEADER_BYTES) // 2
            self.file.seek(0)
            self.file.write(header.tobytes())
            self.file.close()


def check_ours(folder):
    """Raises a Problem unless a folder holds only what this program writes, so that it may be deleted."""
    ours = re.compile(r"(train|val)_\d{6}\.bin|meta\.json|[\w.-]+\.eval|" + "|".join(map(re.escape, vocabulary.FILES)))
    if not folder.is_dir() or folder.is_symlink() or not all(ours.fullmatch(entry.name) for entry in folder.iterdir()):
        raise Problem(f"{folder}: holds other things than a prepared corpus and is left alone; give another --out")


def number(low, high, convert=int):
    """Returns what reads a number between two bounds for argparse. A whole one may be 1000, 1e9 or 1_000_000."""

    def read(text):
        try:
            if low <= float(text) <= high and float(text) == convert(float(text)):
                return convert(float(text))
        except ValueError:
            pass
        kind = "whole number" if convert is int else "number"
        raise argparse.ArgumentTypeError(f"'{text}' was found; type a {kind} from {low} to {high}")

    return read


COUNT = number(1, 10**15)
OPTIONS = (  # name, the value's name in --help, what argparse is told besides, what it is
    ("inputs", "INPUT", {"nargs": "*"},
     f".txt, .jsonl, .json (also .gz, .xz, .bz2, .zst), .parquet, or a corpus: {', '.join(CORPORA)}"),
    ("--out", "DIR", {}, "folder to write (default: data/corpus)"),
    ("--force", None, {}, "replace an earlier OUT"),
    ("--val", "FILE", {"nargs": "+", "default": []}, "validation text (default: drawn from all INPUT by --seed)"),
    ("--val-fraction", "F", {"type": number(1e-6, 0.9, float)},
     "fraction of INPUT for validation (default: 0.005, but 128 KiB, at most a tenth, of a small corpus)"),
    ("--seed", "N", {"type": int, "default": 1}, "draws the validation text (default: %(default)s)"),
    ("--field", "NAME", {"default": "text"}, "field of a .jsonl, .json or .parquet file (default: %(default)s)"),
    ("--tokenizer", "DIR", {},
     "folder with vocab.json and merges.txt, encoder.json and vocab.bpe, or tokenizer.json, of GPT-2's kind "
     "(default: that of NIBBLE_GPT2, else GPT-2's are downloaded)"),
    ("--train-bpe", "N", {"type": number(vocabulary.MIN_VOCABULARY, vocabulary.MAX_VOCABULARY)},
     "train a vocabulary of N tokens on the training text (the first GiB of it) and use it"),
    ("--eval", None, {},
     "write evaluation files OUT/NAME.eval instead of shards; then INPUT is NAME=FILE.jsonl, or one of "
     f"{', '.join(eval_files.PUBLIC)}, and OUT is a folder of data/eval for each vocabulary unless --out says "
     "otherwise (--tokenizer bytes: for models of bytes)"),
    ("--from-nanogpt", "FOLDER", {},
     "write shards of nanoGPT's train.bin and val.bin instead, with the vocabulary of its meta.pkl, else GPT-2's"),
    ("--shard-tokens", "N", {"type": number(1000, 10**9), "default": 10**8}, "tokens in a shard (default: %(default)s)"),
    ("--limit-tokens", "N", {"type": COUNT}, "stop after N training tokens"),
    ("--workers", "N", {"type": number(1, 256)}, "threads (default: one a core)"),
)  # fmt: skip
APART = {  # options that do not go together
    "eval": ("val", "val_fraction", "train_bpe", "from_nanogpt", "limit_tokens", "workers"),
    "from_nanogpt": ("val", "train_bpe", "workers"),
    "train_bpe": ("tokenizer",),
    "val": ("val_fraction",),
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(f"{message}; --help lists the options")


def parse(arguments):
    parser = Parser(
        prog="prepare",
        description="Encodes text with GPT-2's byte-pair encoding into token shards for `./train --data OUT`.",
        epilog="To train on bytes (vocabulary 256) no preparation is needed: `./train --data FILE` takes any file.",
    )
    for name, value, more, what in OPTIONS:
        parser.add_argument(name, help=what, **({"metavar": value, **more} if value else {"action": "store_true"}))
    options = parser.parse_args(arguments)
    for name, others in APART.items():
        for other in others if getattr(options, name) else ():
            if getattr(options, other):
                found, given = (f"--{word.replace('_', '-')}" for word in (other, name))
                parser.error(f"{found} does not go with {given}; leave {found} out")
    if bool(options.inputs) == bool(options.from_nanogpt):
        parser.error("give INPUT or --from-nanogpt FOLDER, one of the two")
    if options.tokenizer == "bytes" and not options.eval:
        parser.error("bytes need no preparation: ./train --data FILE takes any file")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.workers = options.workers or cores
    if not options.eval:  # eval_files.py has a folder for each vocabulary
        options.out = options.out or "data/corpus"
    return options


def find_inputs(options):
    """Sets train_files and val_files of the options. It downloads named corpora."""
    files = {"train": [], "val": []}
    for part, path in [("train", path) for path in options.inputs] + [("val", path) for path in options.val]:
        if part == "train" and path in CORPORA and not os.path.exists(path):
            instead = f"without network type {PREPARE} FILE --out {shlex.quote(options.out)}"
            parts = ("train",) if options.val or options.val_fraction else ("train", "val")
            for part, source in zip(parts, CORPORA[path]):
                files[part] += [download(*file, instead) for file in source]
            continue
        if os.path.isdir(path):
            raise Problem(f"{path}: a folder; give its files, such as {path}/*.txt")
        if not os.path.isfile(path):
            raise Problem(f"{path}: no such file; give a file or one of {', '.join(CORPORA)}")
        input_kind(path)
        files[part].append(path)
    options.train_files, options.val_files = files["train"], files["val"]


def train_words(options, folder, notes):
    """Trains the vocabulary of --train-bpe on the training part."""

    def texts():
        size = 0
        for part, _, text in read_parts(options, Notes(), "train vocabulary"):
            if size >= BPE_CHARACTERS:
                return
            if part == "train":
                yield text
                size += len(text)

    words = vocabulary.train_vocabulary(texts(), options.train_bpe, folder)
    if words.size < options.train_bpe:
        notes.notices.append(f"no more pairs come twice, so the vocabulary has {words.size} tokens and not {options.train_bpe}")
    return words


def text_parts(options, folder, notes):
    """Writes the vocabulary. Returns its size, the lengths of its tokens, and (part, tokens) of all inputs."""
    find_inputs(options)
    for path in options.val_files:
        if any(os.path.samefile(path, name) for name in options.train_files):
            notes.notices.append(f"{path} is trained on too, so its validation loss says nothing of other texts")
    if options.train_bpe:
        words = train_words(options, folder, notes)
    else:
        words = vocabulary.open_vocabulary(options.tokenizer)
        vocabulary.copy_vocabulary(words, options.tokenizer, folder)
    return words.size, words.lengths, encode_all(read_parts(options, notes, "encode"), words, options)


def write_shards(folder, parts, shard_tokens, lengths, notes):
    """Writes the shards of (part, tokens). Returns the writers of both parts."""
    writers = {part: ShardWriter(folder, part, shard_tokens, lengths) for part in ("train", "val")}
    for part, tokens in parts:
        writers[part].write(tokens)
    for part, advice in (("train", "give more text"), ("val", "give more text, or some of its own by --val FILE")):
        writers[part].close()
        if not writers[part].tokens:
            raise Problem(notes.first[0] if notes.first else f"no text is found for the part {part}; {advice}")
    return writers


def write_meta(folder, size, writers, sources):
    meta = {"version": 1, "vocabulary": size, "tokenizer": "gpt2", "sources": sources}
    for part, writer in writers.items():
        meta[part] = {"tokens": writer.tokens, "bytes": writer.bytes, "shards": writer.shards}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")


def prepare(options):
    started, out, notes = time.time(), Path(options.out), Notes()
    if out.name in ("", ".."):
        raise Problem(f"--out {out}: the folder needs a name of its own; type --out data/corpus, or another one")
    folder = out.with_name(out.name + ".tmp")
    if out.exists() and not options.force:
        raise Problem(f"{out}: exists already; give another --out, or --force to replace it")
    if out.exists():
        check_ours(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        remove = f"rm -r {shlex.quote(str(folder))}"
        raise Problem(f"{folder}: another prepare.py writes it or was killed; wait, or type {remove}") from None
    try:
        convert = nanogpt.convert if options.from_nanogpt else text_parts
        size, lengths, parts = convert(options, folder, notes)
        writers = write_shards(folder, parts, options.shard_tokens, lengths, notes)
        write_meta(folder, size, writers, [options.from_nanogpt] if options.from_nanogpt else options.inputs + options.val)
        if out.exists():
            shutil.rmtree(out)
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    report(out, size, writers, notes, max(time.time() - started, 1e-3), options.workers)


def report(out, size, writers, notes, seconds, threads):
    speed = sum(writer.bytes for writer in writers.values()) / seconds / 1e6
    say(f"{out}: vocabulary {size}, {seconds:.1f} s, {speed:.1f} MB/s, threads: {threads}")
    for part, writer in writers.items():
        rate = f"({writer.bytes / writer.tokens:.3f} a token), shards: {writer.shards}"
        say(f"  {part:5} {writer.tokens:>15,} tokens {writer.bytes:>16,} bytes {rate}")
    if notes.left_out:
        more = "; ..." if notes.left_out > len(notes.first) else ""
        say(f"  left out {notes.left_out:>12,} that cannot be used: {'; '.join(notes.first)}{more}")
    for line in notes.notices:
        say(f"  notice: {line}")
    train = f"{here('./train')} --data {shlex.quote(str(out))}"
    say(f"next: {train}" if (ROOT / "train").exists() else f"next: {MAKE} && {train}")


def main(arguments=None):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parse(arguments)
        eval_files.write_all(options) if options.eval else prepare(options)
        return 0
    except KeyboardInterrupt:
        say("prepare: interrupted; nothing was written", sys.stderr)
        return 130
    except BrokenPipeError:  # Nobody reads what is printed. Shards are there by then, but evaluation files may not all be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1 if options.eval else 0
    except Problem as found:
        problem = found
    except ImportError as missing:
        problem = f"{missing}; {VENV}"
    except OSError as error:  # the disk is full, a folder cannot be written
        problem = f"{error.filename or 'writing'}: {error.strerror or error}; free space, allow it, or give another --out"
    say(f"prepare: error: {problem}", sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
