#!/usr/bin/env python3
"""Turns text into token shards that ./train reads.

    pip install -r data/requirements.txt
    python data/prepare.py tinyshakespeare --out data/shakespeare
    python data/prepare.py books.txt.xz more.jsonl --out data/corpus --val held_out.txt
    python data/prepare.py books.txt --train-bpe 8192 --out data/corpus    # with a vocabulary of its own
    python data/prepare.py --eval hellaswag lambada                        # questions for ./train --eval
    python data/prepare.py --from-nanogpt data/shakespeare_char            # nanoGPT's train.bin, val.bin, meta.pkl
    ./train --data data/corpus

An input is a .txt, .jsonl, .json (an array, or a document a line) or .parquet file, each but the last also packed by
gzip, xz, bzip2 or zstd, or the name of a public corpus, which is downloaded. In a .txt a line `<|endoftext|>` begins a
document; a .txt without one is one document. Text is encoded with GPT-2's byte-pair encoding, or with another of its
kind (--tokenizer, --train-bpe; vocabulary.py), by tiktoken; every document begins with the token <|endoftext|>.

Validation documents are drawn by --seed from all inputs alike, unless --val names some, and are written in an order of
their own, so that the first ones are of all inputs too. A document without a text is left out, and one with more white
space in a row than the tokenizer takes is encoded in pieces; both are counted and reported, and --strict stops there.

The folder --out then holds
    train_000000.bin, ..., val_000000.bin, ...   256 int32 (magic 20240520, version 1, tokens, 0...), uint16 tokens
    vocab.json, merges.txt                       the vocabulary under Hugging Face's names, to decode samples
    tokenizer.json, tokenizer_config.json        the same for transformers, where it was trained here or came with them
    meta.json                                    counts of tokens and bytes (UTF-8 of the text), sources
It is written as OUT.tmp and renamed at the end, so OUT is complete whenever it exists. The shards do not depend on the
number of workers. Input is streamed, so memory is bounded but for the validation part and a .json array. A long
document is encoded in pieces, cut where GPT-2's encoding never merges across, so the tokens are those of the whole.
"""

import argparse
import collections
import fcntl
import json
import math
import multiprocessing
import operator
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path

from input_files import CORPORA, END, MAKE, ROOT, VENV, Problem, find_inputs, here, holds_records, inline_pieces
from input_files import input_bytes, input_kind, make_folder, measure, place_of, read_inputs, safe_cut, say, text_of

try:
    import numpy as np
    from tqdm import tqdm

    import eval_files
    import nanogpt
    import vocabulary
    from vocabulary import MAX_SPACE
except ImportError as missing:
    print(f"prepare: error: {missing}; {VENV}", file=sys.stderr)
    sys.exit(2)

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
CHUNK_BYTES = 1 << 19  # documents are handed to a worker in chunks of at least this size
NOTED_PLACES = 10  # of a notice
SMALL_VALIDATION = 1 << 17  # bytes of validation text (about 32,000 tokens) taken of a small corpus
MAX_WORD = 1 << 20  # characters without white space: tiktoken takes 45 bytes of memory for each
BPE_BYTES = 1 << 30  # --train-bpe reads this much of the training text
BPE_MIN = 258  # tokens: 256 bytes, a merge, <|endoftext|>


def cut_for_validation(data, at):
    """Returns where to cut a text near `at`: after a line end, else before a space, else between two characters."""
    near = min(len(data), at + max(at // 8, 1 << 12))  # what follows a long line or a long word is not near
    line = data.find(b"\n", at, near) + 1
    if 0 < line < len(data):
        return line
    space = safe_cut(data, at)
    if 0 < space < near:
        return space
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def draw(documents, share, seed):
    """Returns the numbers of about `share` of the documents, ascending: one from each of as many equal stretches."""
    wanted = min(max(1, round(documents * share)), documents - 1)
    generator = random.Random(seed)
    for i in range(wanted):
        yield int((i + generator.random()) * documents / wanted)


def split_validation(pieces, share, measured, seed):
    """Tags each piece "val" or "train". Whole documents, drawn by the seed, are for validation.

    A document that is longer than half the validation text gives `share` of itself instead, its beginning; a
    line of JSON, which cannot be cut, is drawn at any length. So each input gives about `share` of its bytes.
    """
    total, documents, sizes = measured
    sizes, drawn, number, part, left, begins = iter(sizes), draw(documents, share, seed), -1, "train", 0, False
    chosen = next(drawn, -1)
    for piece in pieces:
        if piece.begins:
            number, begins = number + 1, False
            size = next(sizes, 0) if piece.kind == "text" else len(piece.data)
            long = size > share * total / 2 and piece.kind in ("text", "row")
            while 0 <= chosen < number:
                chosen = next(drawn, -1)
            part, left = "val" if number == chosen and not long else "train", int(share * size) if long else 0
        if len(piece.data) < left:
            left -= len(piece.data)
            yield "val", piece
            continue
        if left:
            cut, left, begins = cut_for_validation(piece.data, left), 0, True
            lines = piece.data.count(b"\n", 0, cut) if piece.kind == "text" else 0
            if cut:
                yield "val", piece._replace(data=piece.data[:cut])
            piece = piece._replace(place=piece.place + lines, data=piece.data[cut:])
            if not piece.data:
                continue
        yield part, piece._replace(begins=piece.begins or begins)
        begins = False


def chunks(tagged):
    """Groups (part, piece) into (part, [piece, ...]) of about CHUNK_BYTES; the order within each part is kept."""
    filled = operator.itemgetter(1)
    groups, size = {"val": [], "train": []}, 0
    for part, piece in tagged:
        groups[part].append(piece)
        size += len(piece.data)
        if size >= CHUNK_BYTES:
            yield from filter(filled, groups.items())
            groups, size = {"val": [], "train": []}, 0
    yield from filter(filled, groups.items())


def shuffled(tokens, end, seed):
    """Returns the documents in `tokens`, each of which begins with the token `end`, in another order."""
    documents = np.split(tokens, np.flatnonzero(tokens == end)[1:])
    random.Random(seed).shuffle(documents)
    return np.concatenate(documents)


UNREADABLE = "documents that cannot be read, left out"  # of a long one the piece of about PIECE_BYTES


class Notes:
    """Counts what is reported at the end: how often it occurred in the input, and the first places."""

    def __init__(self):
        self.found = {}  # text: [count, places]

    def add(self, text, place, count=1):
        entry = self.found.setdefault(text, [0, []])
        entry[0] += count
        entry[1] += [place][: NOTED_PLACES + 1 - len(entry[1])]

    def join(self, other):
        for text, (count, places) in other.found.items():
            entry = self.found.setdefault(text, [0, []])
            entry[0] += count
            entry[1] += places[: NOTED_PLACES + 1 - len(entry[1])]

    def lines(self):
        for text, (count, places) in self.found.items():
            more = ", ..." if len(places) > NOTED_PLACES else ""
            yield f"  notice: {text}: {count} ({', '.join(places[:NOTED_PLACES])}{more})"


def readable_text(piece, field, strict, notes):
    """Returns the text of a piece. If it has none that can be encoded, returns None and makes a note."""
    try:
        text = text_of(piece, field)
    except Problem as problem:
        if strict:
            raise Problem(f"{problem}; leave --strict out to skip it") from None
        notes.add(UNREADABLE, str(problem))
        return None
    if text is None:
        if strict:
            raise Problem(f'{place_of(piece)}: field "{field}" is null; leave --strict out to skip it')
        notes.add("documents without a text, left out", place_of(piece))
        return None
    if piece.kind in ("json", "element") and not text.strip():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def long_places(text):
    """Returns where to cut a text so that no piece has more white space, or a longer word, than tiktoken takes."""
    runs = re.finditer(rf"\s{{{MAX_SPACE}}}|\s+|\S{{{MAX_WORD}}}|\S+", text)
    return [run.end() for run in runs if run.end() - run.start() == (MAX_SPACE if run[0].isspace() else MAX_WORD)]


class Encoder:
    """Encodes pieces of documents."""

    def __init__(self, folder):
        self.vocabulary = vocabulary.open_vocabulary(folder)
        self.end = self.vocabulary.end

    def tokens(self, text, piece, strict, notes):
        """Returns the tokens of a text. White space and words too long for tiktoken are encoded in pieces."""
        reason, cuts = "it has a very long word", long_places(text) if len(text) > MAX_WORD else []
        if not cuts:
            try:
                return self.vocabulary.encode(text)
            except ValueError as error:
                reason, cuts = error, long_places(text)
        if strict or not cuts:
            advice = "; leave --strict out to encode it in pieces" if cuts else ""
            raise Problem(f"{place_of(piece)}: the text cannot be encoded ({reason}){advice}")
        notes.add("very long white space or words, encoded in pieces", place_of(piece))
        cuts = [0, *cuts, len(text)]
        return np.concatenate([self.vocabulary.encode(text[begin:end]) for begin, end in zip(cuts, cuts[1:])])

    def encode(self, pieces, field, strict=False, inline=False, notes=None):
        """Returns the tokens of the pieces as uint16. With `inline`, END within a text begins a document."""
        notes, parts = Notes() if notes is None else notes, []
        for piece in chain.from_iterable(map(inline_pieces, pieces)) if inline else pieces:
            text = readable_text(piece, field, strict, notes)
            if text is None:
                continue
            found = text.count(END)
            if found and not inline:
                what = f"{END} within a text, encoded as text; --inline-separators begins a document there"
                notes.add(what, place_of(piece), found)
            for i, document in enumerate(text.split(END) if inline else [text]):
                if found and inline and not document.strip():
                    continue
                if piece.begins or i:
                    parts.append(np.array([self.end], np.uint16))
                parts.append(self.tokens(document, piece, strict, notes))
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


worker_encoder = None  # one a process


def start_worker(folder):
    global worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    parent = multiprocessing.parent_process()  # and where it is killed they end by themselves
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    worker_encoder = Encoder(folder)


def encode_in_worker(pieces, reading):
    notes = Notes()
    return worker_encoder.encode(pieces, *reading, notes), notes


def encode_all(parts, encoder, folder, reading, workers, notes):
    """Yields (part, input bytes, tokens) of every chunk, in order. At most 4 chunks per worker are in memory."""

    def size(pieces):
        return sum(len(piece.data) for piece in pieces)

    def finished(part, count, future):
        tokens, found = future.result()
        notes.join(found)
        return part, count, tokens

    if workers == 1:
        for part, pieces in parts:
            yield part, size(pieces), encoder.encode(pieces, *reading, notes)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside tqdm's thread
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(folder,))
    waiting = collections.deque()
    try:
        for part, pieces in parts:
            waiting.append((part, size(pieces), pool.submit(encode_in_worker, pieces, reading)))
            if len(waiting) >= 4 * workers:
                yield finished(*waiting.popleft())
        while waiting:
            yield finished(*waiting.popleft())
    except BrokenProcessPool:
        raise Problem("a worker was killed, probably for want of memory; try fewer with --workers") from None
    finally:
        for _, _, future in waiting:
            future.cancel()
        pool.shutdown()


class ShardWriter:
    """Writes train_000000.bin, train_000001.bin, ... of shard_tokens tokens each; counts tokens and bytes of text."""

    def __init__(self, folder, part, shard_tokens, limit, lengths):
        self.folder, self.part, self.shard_tokens, self.limit, self.lengths = folder, part, shard_tokens, limit, lengths
        self.file, self.shards, self.in_shard, self.tokens, self.bytes = None, 0, 0, 0, 0

    def path(self, shard):
        return self.folder / f"{self.part}_{shard:06d}.bin"

    def full(self):
        return self.limit is not None and self.tokens >= self.limit

    def write(self, tokens):
        if self.limit is not None:
            tokens = tokens[: max(0, self.limit - self.tokens)]
        self.tokens += len(tokens)
        self.bytes += int(self.lengths[tokens].sum())
        while len(tokens):
            if self.file is None:
                self.file, self.in_shard = open(self.path(self.shards), "wb"), 0
                self.file.write(bytes(HEADER_BYTES))
                self.shards += 1
            now = tokens[: self.shard_tokens - self.in_shard]
            self.file.write(now.astype("<u2").tobytes())
            self.in_shard += len(now)
            tokens = tokens[len(now) :]
            if self.in_shard == self.shard_tokens:
                self.end_shard()

    def end_shard(self):
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, self.in_shard
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.close()
        self.file = None

    def close(self):
        """Ends the last shard. A very short one is appended to the shard before: a shard must hold a window."""
        if self.file is None:
            return
        short = self.shards > 1 and self.in_shard < min(1 << 16, self.shard_tokens // 2)
        self.end_shard()
        if short:
            last = self.path(self.shards - 1)
            tail = last.read_bytes()[HEADER_BYTES:]
            last.unlink()
            self.shards -= 1
            self.in_shard += self.shard_tokens
            self.file = open(self.path(self.shards - 1), "r+b")
            self.file.seek(0, os.SEEK_END)
            self.file.write(tail)
            self.end_shard()


def check_ours(folder):
    """Raises a Problem unless a folder holds only what this program writes, so that it may be deleted."""
    ours = re.compile(r"(train|val)_\d{6}\.bin|meta\.json|[\w.-]+\.eval|" + "|".join(map(re.escape, vocabulary.FILES)))
    if not folder.is_dir() or folder.is_symlink() or not all(ours.fullmatch(entry.name) for entry in folder.iterdir()):
        raise Problem(f"{folder}: holds other things than a prepared corpus and is left alone; give another --out")


def make_own_folder(folder, out):
    """Makes the folder, without what an interrupted run left there, and locks it until this process ends."""
    make_folder(folder, out)
    check_ours(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Problem(f"{out}: another prepare.py is writing it; wait for that, or give another --out") from None
    except OSError:
        pass  # this file system cannot lock folders
    for entry in folder.iterdir():
        entry.unlink()


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(f"{message}; --help lists the options")


def number(low, high, kind, whole=True):
    """Returns what reads a number of this kind for argparse; one that is not whole lies between the bounds. 1e9 and
    1_000_000 are numbers."""

    def read(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if low <= value <= high and value == int(value) if whole else low < value < high:
            return int(value) if whole else value
        raise argparse.ArgumentTypeError(f"'{text}' was found; type {kind}")

    return read


def parse(arguments):
    parser = Parser(
        prog="prepare",
        description="Encodes text with GPT-2's byte-pair encoding into token shards for `./train --data OUT`.",
        epilog="To train on bytes (vocabulary 256) no preparation is needed: `./train --data FILE` takes any file.",
    )
    add = parser.add_argument
    count = number(1, 2**62, "a whole number from 1 on, such as 1000 or 1e9")
    sizes = BPE_MIN, vocabulary.MAX_VOCABULARY
    names = ", ".join(CORPORA)
    inputs = ".txt, .jsonl, .json (also .gz, .xz, .bz2, .zst), .parquet, or a corpus"
    add("inputs", nargs="*", metavar="INPUT", help=f"{inputs}: {names}")
    add("--out", metavar="DIR", help="folder to write (default: data/corpus)")
    add("--force", action="store_true", help="replace an earlier OUT")
    add("--val", nargs="+", metavar="FILE", help="validation text (default: documents of all INPUT, drawn by --seed)")
    add(
        "--val-fraction",
        type=number(0, 1, "a number between 0 and 1, such as 0.05", whole=False),
        metavar="F",
        help="fraction of INPUT for validation, where there is no --val "
        "(default: 0.005, but 128 KiB, at most a tenth, of a small corpus)",
    )
    add("--seed", type=int, default=1, metavar="N", help="draws the validation documents (default: %(default)s)")
    add("--strict", action="store_true", help="stop at a document that would be left out or encoded in pieces")
    add("--inline-separators", action="store_true", help=f"{END} begins a document anywhere, not only on its own line")
    add(
        "--field",
        default="text",
        metavar="NAME",
        help="field of a .jsonl, .json or .parquet file (default: %(default)s)",
    )
    add(
        "--tokenizer",
        metavar="DIR",
        help="folder with vocab.json and merges.txt, encoder.json and vocab.bpe, or tokenizer.json, of GPT-2's kind "
        "(default: ../shared/data/tokenizer beside the repository, else GPT-2's are downloaded)",
    )
    add(
        "--train-bpe",
        type=number(*sizes, f"a whole number from {sizes[0]} to {sizes[1]}, such as 8192"),
        metavar="N",
        help="train a vocabulary of N tokens on the training text (the first GiB of it) and use it",
    )
    add(
        "--eval",
        action="store_true",
        help="write evaluation files OUT/NAME.eval instead of shards; then INPUT is NAME=FILE.jsonl, or one of "
        f"{', '.join(eval_files.PUBLIC)}, and OUT is a folder of data/eval for each vocabulary unless --out says "
        "otherwise (--tokenizer bytes: for models of bytes)",
    )
    add(
        "--from-nanogpt",
        metavar="FOLDER",
        help="write shards of nanoGPT's train.bin and val.bin instead, with the vocabulary of its meta.pkl, else GPT-2's",
    )
    add("--shard-tokens", type=count, default=10**8, metavar="N", help="tokens in a shard (default: %(default)s)")
    add("--limit-tokens", type=count, metavar="N", help="stop after N training tokens")
    add("--workers", type=count, metavar="N", help="processes (default: one a core; 1 for little text)")
    options = parser.parse_args(arguments)
    if bool(options.inputs) == bool(options.from_nanogpt):
        parser.error("give INPUT or --from-nanogpt FOLDER, one of the two")
    if not options.eval:  # eval_files.py has its own
        options.out = options.out or "data/corpus"
    if options.tokenizer and options.train_bpe:
        parser.error("give --tokenizer or --train-bpe, not both")
    shards = ["val", "train_bpe", "workers", "strict", "inline_separators"]
    shards += ["val_fraction", "limit_tokens", "from_nanogpt"] if options.eval else []
    for name in shards if options.eval or options.from_nanogpt else ():
        if getattr(options, name):
            mode, option = "eval" if options.eval else "from-nanogpt", name.replace("_", "-")
            parser.error(f"--{option} does not go with --{mode}; leave --{option} out")
    if options.tokenizer == "bytes" and not options.eval:
        parser.error("bytes need no preparation: ./train --data FILE takes any file")
    if options.val and options.val_fraction:
        parser.error("give --val or --val-fraction, not both")
    if not 1000 <= options.shard_tokens <= 10**9:
        parser.error(f"--shard-tokens {options.shard_tokens} is not within 1000 and 1000000000")
    return options


def worker_count(asked, total):
    """Returns one worker per core, or none for a text so small that starting them would take longer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(asked or (cores if total >= 1 << 23 else 1), 256)


class Parts:
    """Holds the pieces of the training and the validation files, tagged "train" or "val", to be read more than once."""

    def __init__(self, options, train_files, validation_files):
        self.options, self.train_files, self.validation_files = options, train_files, validation_files
        self.measured = None
        if validation_files:
            self.share = 1.0
            self.bytes = sum(input_bytes(path, options.field) for path in train_files + validation_files)
            return
        self.measured = measure(train_files, options.field)
        self.bytes = self.measured[0]
        taken = min(self.bytes, 4 * options.limit_tokens) if options.limit_tokens else self.bytes
        self.share = options.val_fraction or max(0.005, min(0.1, SMALL_VALIDATION / max(taken, 1)))

    def tagged(self):
        pieces = read_inputs(self.train_files, self.options.field)
        if self.measured:
            yield from split_validation(pieces, self.share, self.measured, self.options.seed)
            return
        yield from (("val", piece) for piece in read_inputs(self.validation_files, self.options.field))
        yield from (("train", piece) for piece in pieces)

    def training_texts(self):
        """Yields the texts that a vocabulary is trained on: at most BPE_BYTES of the training part."""
        size, notes = 0, Notes()  # encoding will meet the same documents and note them
        for part, piece in self.tagged():
            text = readable_text(piece, self.options.field, self.options.strict, notes) if part == "train" else None
            if text is not None:
                yield text
                size += len(piece.data)
            if size >= BPE_BYTES:
                return


def prepare_vocabulary(options, parts, folder, notes):
    """Puts the vocabulary that is asked for into the folder."""
    if not options.train_bpe:
        vocabulary.copy_vocabulary(vocabulary.open_vocabulary(options.tokenizer), options.tokenizer, folder)
        return
    trained = vocabulary.train_vocabulary(parts.training_texts(), options.train_bpe, folder)
    if trained.size < options.train_bpe:
        text = "no more pairs come twice, so the vocabulary has fewer tokens than --train-bpe asked for"
        notes.add(text, f"of {options.train_bpe}", trained.size)


def write_shards(options, parts, encoder, folder, notes):
    """Writes all shards. Returns the writers of both parts."""
    limit, size = options.limit_tokens, encoder.vocabulary.lengths
    val_limit = max(int(parts.share * limit), 1 << 15) if limit and not parts.validation_files else None
    limits = {"train": limit, "val": val_limit}
    writers = {part: ShardWriter(folder, part, options.shard_tokens, limits[part], size) for part in limits}
    reading = options.field, options.strict, options.inline_separators
    results = encode_all(chunks(parts.tagged()), encoder, folder, reading, options.workers, notes)
    validation = [np.zeros(0, np.uint16)]  # is held back where its documents get another order
    mixed = not parts.validation_files or len(parts.validation_files) > 1
    with tqdm(total=parts.bytes, unit="B", unit_scale=True, desc="encode", disable=None) as bar:
        for part, size, tokens in results:
            if part == "val" and mixed:
                validation.append(tokens)
            else:
                writers[part].write(tokens)
            bar.update(size)
            if writers["train"].full() and (parts.validation_files or sum(map(len, validation))):
                break
        else:
            bar.update(max(0, parts.bytes - bar.n))  # separators and blank lines
    results.close()
    writers["val"].write(shuffled(np.concatenate(validation), encoder.end, options.seed))
    for writer in writers.values():
        writer.close()
    return writers


def check_parts(writers, train_files, notes):
    if UNREADABLE in notes.found and not (writers["train"].tokens and writers["val"].tokens):
        raise Problem(notes.found[UNREADABLE][1][0])
    if not writers["train"].tokens + writers["val"].tokens:
        raise Problem(f"{', '.join(train_files)}: empty, there is no text to encode")
    for part, advice in (
        ("train", "give more text, or validation text of its own by --val"),
        ("val", "give --val FILE"),
    ):
        if not writers[part].tokens:
            raise Problem(f"no text is left for the part {part}: {advice}")


def write_corpus(options, folder, train_files, validation_files):
    """Fills the folder and returns the contents of meta.json, and the notes."""
    notes = Notes()
    for path in train_files + validation_files:
        if os.path.getsize(path) == 0:
            if options.strict:
                raise Problem(f"{path}: empty; leave it, or --strict, out")
            notes.add("empty files", path)
        elif input_kind(path) == "txt" and holds_records(path, options.field):
            what = f'files of JSON lines, encoded as they are; name them .jsonl to take the field "{options.field}" alone'
            notes.add(what, path)
    for path in validation_files:
        if any(os.path.samefile(path, name) for name in train_files):
            notes.add("validation files that are trained on, so their loss says nothing of other texts", path)
    if options.tokenizer:
        vocabulary.open_vocabulary(options.tokenizer)  # a mistake there is told before the text is read
    parts = Parts(options, train_files, validation_files)
    prepare_vocabulary(options, parts, folder, notes)
    encoder = Encoder(folder)
    options.workers = worker_count(options.workers, parts.bytes)
    writers = write_shards(options, parts, encoder, folder, notes)
    check_parts(writers, train_files, notes)
    return write_meta(folder, encoder.vocabulary.size, writers, options.inputs + (options.val or [])), notes


def write_meta(folder, vocabulary_size, writers, sources):
    meta = {"version": 1, "vocabulary": vocabulary_size, "tokenizer": "gpt2"}
    for part, writer in writers.items():
        meta[part] = {"tokens": writer.tokens, "bytes": writer.bytes, "shards": writer.shards}
    meta["sources"] = sources
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    return meta


def write_nanogpt(options, folder):
    """Fills the folder from nanoGPT's and returns the contents of meta.json, and the notes."""
    notes, limits, options.workers = Notes(), {"train": options.limit_tokens, "val": None}, 1

    def writers(lengths):
        return {part: ShardWriter(folder, part, options.shard_tokens, limits[part], lengths) for part in limits}

    made, size = nanogpt.convert(options, folder, writers, notes)
    return write_meta(folder, size, made, [options.from_nanogpt]), notes


def next_command(out):
    """Returns a shell command that trains on the folder `out`, and that first builds ./train if it is not there."""
    train = f"{here('./train')} --data {shlex.quote(str(out))}"
    return train if (ROOT / "train").exists() else f"{MAKE} && {train}"


def prepare(options):
    started = time.time()
    out = Path(options.out)
    if out.exists() and not options.force:
        raise Problem(f"{out}: exists already; give another --out, or --force to replace it")
    if out.exists():
        check_ours(out)
    train_files, validation_files = find_inputs(options)  # none for --from-nanogpt
    folder = out.with_name(out.name + ".tmp")
    make_own_folder(folder, out)
    try:
        nano = options.from_nanogpt
        meta, notes = write_nanogpt(options, folder) if nano else write_corpus(options, folder, train_files, validation_files)
        if options.force and out.exists():
            check_ours(out)
            shutil.rmtree(out)
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    report(out, meta, notes, max(time.time() - started, 1e-3), options.workers)


def report(out, meta, notes, seconds, workers):
    speed = (meta["train"]["bytes"] + meta["val"]["bytes"]) / seconds / 1e6
    say(f"{out}: vocabulary {meta['vocabulary']}, {seconds:.1f} s, {speed:.1f} MB/s, processes: {workers}")
    for part in ("train", "val"):
        tokens, size, shards = (meta[part][key] for key in ("tokens", "bytes", "shards"))
        say(f"  {part:5} {tokens:>15,} tokens {size:>16,} bytes ({size / tokens:.3f} a token), shards: {shards}")
    for line in notes.lines():
        say(line)
    if meta["val"]["tokens"] < 1025:
        say(f"  few validation tokens: a window of the trainer must be shorter than {meta['val']['tokens']}")
    say(f"next: {next_command(out)}")


def main(arguments=None):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parse(arguments)
        eval_files.write_all(options) if options.eval else prepare(options)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads what is printed, which comes last
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Problem as problem:
        say(f"prepare: error: {problem}", sys.stderr)
        return 2
    except OSError as error:  # the disk is full, a folder cannot be written
        what = f"{error.filename or 'writing'}: {error.strerror or error}"
        say(f"prepare: error: {what}; free space, or give another --out", sys.stderr)
        return 2
    except MemoryError:
        print("prepare: error: out of memory; free some, or try fewer --workers", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
