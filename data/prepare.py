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
number of threads. Input is streamed, so memory is bounded but for the validation part and a .json array. A long
document is encoded in pieces, cut where GPT-2's encoding never merges across, so the tokens are those of the whole.
"""

import argparse
import collections
import fcntl
import json
import math
import operator
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
    from input_files import CORPORA, END, download, holds_records, input_kind, is_utf8, make_folder, measure, place_of
    from input_files import read_inputs, safe_cut, text_of
except ImportError as missing:
    say(f"prepare: error: {missing}; {VENV}", sys.stderr)
    sys.exit(2)

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
CHUNK_BYTES = 1 << 19  # documents are handed to a thread in chunks of at least this size
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
        if left and is_utf8(piece.data):  # else it is left out as a whole, and counted once
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
    """Counts what is reported at the end: how often it occurred in the input, and the first places.

    With --strict, a document that would be left out or changed is a Problem instead.
    """

    def __init__(self, strict):
        self.strict, self.found = strict, {}  # text: [count, places]

    def add(self, text, places, count=1):
        entry = self.found.setdefault(text, [0, []])
        entry[0] += count
        entry[1] += places[: NOTED_PLACES + 1 - len(entry[1])]

    def add_or_stop(self, text, place, problem, instead="skip it"):
        if self.strict:
            raise Problem(f"{problem}; leave --strict out to {instead}")
        self.add(text, [place])

    def join(self, other):
        for text, (count, places) in other.found.items():
            self.add(text, places, count)

    def lines(self):
        for text, (count, places) in self.found.items():
            more = ", ..." if len(places) > NOTED_PLACES else ""
            yield f"  notice: {text}: {count} ({', '.join(places[:NOTED_PLACES])}{more})"


def repaired(text, piece, lines):
    """Returns a text that is `lines` lines behind the beginning of its piece, without halves of surrogate pairs, which
    JSON can spell and which are no characters. A byte that is not UTF-8, which text_of made such a half, is a Problem."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        at = error.start
    byte = ord(text[at]) - 0xDC00
    if not 0x80 <= byte <= 0xFF:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    where = place_of(piece, lines + text.count("\n", 0, at) if piece.kind == "text" else 0)
    raise Problem(f"{where}: not UTF-8 (byte 0x{byte:02x}); type iconv -f LATIN1 -t UTF-8, or what it is")


def texts_of(pieces, field, inline, notes):
    """Yields (whether it begins a document, text, place) of each piece, or with `inline` of each document in it, where
    END begins one. What has no text is left out and noted."""
    for piece in pieces:
        place, lines = place_of(piece), 0
        try:
            whole = text_of(piece, field)
        except Problem as problem:
            notes.add_or_stop(UNREADABLE, str(problem), problem)
            continue
        if whole is None:
            notes.add_or_stop("documents without a text, left out", place, f'{place}: field "{field}" is null')
            continue
        if piece.kind in ("line", "element") and not whole.strip():
            continue
        documents = whole.split(END) if inline else [whole]
        for i, text in enumerate(documents):
            begins, lines, before = piece.begins or i > 0, lines + text.count("\n"), lines
            try:
                text = repaired(text, piece, before)
            except Problem as problem:
                notes.add_or_stop(UNREADABLE, str(problem), problem)
                continue
            found = 0 if inline else text.count(END)
            if found:
                what = f"{END} within a text, encoded as text; --inline-separators begins a document there"
                notes.add(what, [place], found)
            if len(documents) == 1 or text.strip():
                yield begins, text, place


def long_places(text):
    """Returns where to cut a text so that no piece has more white space, or a longer word, than tiktoken takes."""
    most = vocabulary.MAX_SPACE
    runs = re.finditer(rf"\s{{{most}}}|\s+|\S{{{MAX_WORD}}}|\S+", text)
    return [run.end() for run in runs if run.end() - run.start() == (most if run[0].isspace() else MAX_WORD)]


def encode_text(words, text, place, notes):
    """Returns the tokens of a text. White space and words too long for tiktoken are encoded in pieces."""
    cuts = long_places(text) if len(text) > MAX_WORD else []
    try:
        if not cuts:
            return words.encode(text)
    except ValueError:
        cuts = long_places(text)
    problem = f"{place}: the text cannot be encoded (its white space or a word in it is very long)"
    what = "very long white space or words, encoded in pieces"
    notes.add_or_stop(what, place, problem, "encode it in pieces")
    return np.concatenate([words.encode(text[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(text)])])


def encode(words, pieces, field, inline, notes):
    """Returns the tokens of the pieces as uint16, each document after the token `words.end`."""
    parts = [np.zeros(0, np.uint16)]
    for begins, text, place in texts_of(pieces, field, inline, notes):
        if begins:
            parts.append(np.array([words.end], np.uint16))
        parts.append(encode_text(words, text, place, notes))
    return np.concatenate(parts)


def encode_all(parts, words, options):
    """Yields (part, input bytes, tokens, notes) of every chunk, in order. At most 4 chunks a thread are in memory."""

    def encode_chunk(part, pieces):
        notes = Notes(options.strict)
        tokens = encode(words, pieces, options.field, options.inline_separators, notes)
        return part, sum(len(piece.data) for piece in pieces), tokens, notes

    waiting = collections.deque()
    with ThreadPoolExecutor(options.workers) as pool:  # tiktoken lets other threads run while it encodes
        for part, pieces in parts:
            waiting.append(pool.submit(encode_chunk, part, pieces))
            if len(waiting) >= 4 * options.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class ShardWriter:
    """Writes train_000000.bin, train_000001.bin, ... of shard_tokens tokens each; counts tokens and bytes of text.

    A shard must hold a window, so the last one has at least `least` tokens: fewer go into the shard before, which stays
    open until there are as many.
    """

    def __init__(self, folder, part, shard_tokens, limit, lengths):
        self.folder, self.part, self.shard_tokens, self.limit, self.lengths = folder, part, shard_tokens, limit, lengths
        self.least = min(1 << 16, shard_tokens // 2)
        self.file, self.shards, self.in_shard, self.tokens, self.bytes = None, 0, shard_tokens, 0, 0
        self.rest = np.zeros(0, np.uint16)

    def full(self):
        return self.limit is not None and self.tokens >= self.limit

    def write(self, tokens):
        if self.limit is not None:
            tokens = tokens[: max(0, self.limit - self.tokens)]
        self.tokens += len(tokens)
        self.bytes += int(self.lengths[tokens].sum())
        self.rest = np.concatenate([self.rest, tokens])
        while len(self.rest) and (self.in_shard < self.shard_tokens or len(self.rest) >= self.least):
            if self.in_shard == self.shard_tokens:
                self.begin_shard()
            self.append(self.shard_tokens - self.in_shard)

    def begin_shard(self):
        self.end_shard()
        self.file, self.in_shard = open(self.folder / f"{self.part}_{self.shards:06d}.bin", "wb"), 0
        self.file.write(bytes(HEADER_BYTES))
        self.shards += 1

    def append(self, count):
        now, self.rest = self.rest[:count], self.rest[count:]
        self.file.write(now.astype("<u2").tobytes())
        self.in_shard += len(now)

    def end_shard(self):
        if self.file:
            header = np.zeros(256, "<i4")
            header[:3] = MAGIC, VERSION, self.in_shard
            self.file.seek(0)
            self.file.write(header.tobytes())
            self.file.close()

    def close(self):
        if len(self.rest) and not self.shards:
            self.begin_shard()
        if self.file:
            self.append(len(self.rest))
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
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    words, held_out = (parser.add_mutually_exclusive_group().add_argument for _ in range(2))
    count = number(1, 2**62, "a whole number from 1 on, such as 1000 or 1e9")
    share = number(0, 1, "a number between 0 and 1, such as 0.05", whole=False)
    size = number(BPE_MIN, vocabulary.MAX_VOCABULARY, f"a whole number from {BPE_MIN} to {vocabulary.MAX_VOCABULARY}, such as 8192")
    shard = number(1000, 10**9, "a whole number from 1000 to 1e9")
    names = ", ".join(CORPORA)
    what = f".txt, .jsonl, .json (also .gz, .xz, .bz2, .zst), .parquet, or a corpus: {names}"
    add("inputs", nargs="*", metavar="INPUT", help=what)
    add("--out", metavar="DIR", help="folder to write (default: data/corpus)")
    add("--force", action="store_true", help="replace an earlier OUT")
    what = "validation text (default: documents of all INPUT, drawn by --seed)"
    held_out("--val", nargs="+", default=[], metavar="FILE", help=what)
    what = "fraction of INPUT for validation (default: 0.005, but 128 KiB, at most a tenth, of a small corpus)"
    held_out("--val-fraction", type=share, metavar="F", help=what)
    add("--seed", type=int, default=1, metavar="N", help="draws the validation documents (default: %(default)s)")
    add("--strict", action="store_true", help="stop at a document that would be left out or encoded in pieces")
    add("--inline-separators", action="store_true", help=f"{END} begins a document anywhere, not only on its own line")
    what = "field of a .jsonl, .json or .parquet file (default: %(default)s)"
    add("--field", default="text", metavar="NAME", help=what)
    what = "folder with vocab.json and merges.txt, encoder.json and vocab.bpe, or tokenizer.json, of GPT-2's kind "
    what += "(default: that of NIBBLE_GPT2, else GPT-2's are downloaded)"
    words("--tokenizer", metavar="DIR", help=what)
    what = "train a vocabulary of N tokens on the training text (the first GiB of it) and use it"
    words("--train-bpe", type=size, metavar="N", help=what)
    what = "write evaluation files OUT/NAME.eval instead of shards; then INPUT is NAME=FILE.jsonl, or one of "
    what += f"{', '.join(eval_files.PUBLIC)}, and OUT is a folder of data/eval for each vocabulary unless --out says "
    what += "otherwise (--tokenizer bytes: for models of bytes)"
    add("--eval", action="store_true", help=what)
    what = "write shards of nanoGPT's train.bin and val.bin instead, with the vocabulary of its meta.pkl, else GPT-2's"
    add("--from-nanogpt", metavar="FOLDER", help=what)
    add("--shard-tokens", type=shard, default=10**8, metavar="N", help="tokens in a shard (default: %(default)s)")
    add("--limit-tokens", type=count, metavar="N", help="stop after N training tokens")
    add("--workers", type=count, metavar="N", help="threads (default: one a core)")
    options = parser.parse_args(arguments)
    if bool(options.inputs) == bool(options.from_nanogpt):
        parser.error("give INPUT or --from-nanogpt FOLDER, one of the two")
    if not options.eval:  # eval_files.py has its own
        options.out = options.out or "data/corpus"
    others = ["val", "train_bpe", "workers", "strict", "inline_separators"] if options.eval or options.from_nanogpt else []
    others += ["val_fraction", "limit_tokens", "from_nanogpt"] if options.eval else []
    for name in filter(vars(options).get, others):
        mode, option = "eval" if options.eval else "from-nanogpt", name.replace("_", "-")
        parser.error(f"--{option} does not go with --{mode}; leave --{option} out")
    if options.tokenizer == "bytes" and not options.eval:
        parser.error("bytes need no preparation: ./train --data FILE takes any file")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.workers = min(options.workers or cores, 256)
    return options


def find_inputs(options):
    """Returns the training and the validation files. It downloads named corpora."""
    files = {"train": [], "val": []}
    for part, path in [("train", path) for path in options.inputs] + [("val", path) for path in options.val]:
        if os.path.isfile(path):
            input_kind(path)
            files[part].append(path)
        elif os.path.isdir(path):
            raise Problem(f"{path}: a folder; give its files, such as {path}/*.txt")
        elif os.path.exists(path):
            raise Problem(f"{path}: not a regular file; write its contents into one")
        elif part == "val" or path not in CORPORA:
            raise Problem(f"{path}: no such file; give a file or one of {', '.join(CORPORA)}")
        else:
            instead = f"without network type {PREPARE} FILE --out {shlex.quote(options.out)}"
            parts = ("train",) if options.val or options.val_fraction else ("train", "val")
            for part, source in zip(parts, CORPORA[path]):
                files[part] += [download(*file, instead) for file in source]
    return files["train"], files["val"]


class Parts:
    """Holds the pieces of the training and the validation files, tagged "train" or "val", to be read more than once."""

    def __init__(self, options, train_files, validation_files):
        self.options, self.train_files, self.validation_files = options, train_files, validation_files
        self.measured = measure(train_files, options.field) if not validation_files else None
        if self.measured:
            size = self.measured[0]
            taken = min(size, 4 * options.limit_tokens) if options.limit_tokens else size
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
        size, notes = 0, Notes(self.options.strict)  # encoding will meet the same documents and note them
        for part, piece in self.tagged():
            if size >= BPE_BYTES:
                return
            for _, text, _ in texts_of([piece] if part == "train" else [], self.options.field, False, notes):
                yield text
                size += len(piece.data)


def write_shards(options, parts, words, folder, notes):
    """Writes all shards. Returns the writers of both parts."""
    limit = options.limit_tokens
    limits = {"train": limit, "val": max(int(parts.share * limit), 1 << 15) if limit and parts.measured else None}
    writers = {part: ShardWriter(folder, part, options.shard_tokens, limits[part], words.lengths) for part in limits}
    results = encode_all(chunks(parts.tagged()), words, options)
    validation = [np.zeros(0, np.uint16)]  # is held back where its documents get another order
    mixed = len(parts.validation_files) != 1
    total = parts.measured and parts.measured[0]
    with tqdm(total=total, unit="B", unit_scale=True, desc="encode", disable=None) as bar:
        for part, size, tokens, found in results:
            notes.join(found)
            if part == "val" and mixed:
                validation.append(tokens)
            else:
                writers[part].write(tokens)
            bar.update(size)
            if writers["train"].full() and (parts.validation_files or sum(map(len, validation))):
                break
    results.close()
    writers["val"].write(shuffled(np.concatenate(validation), words.end, options.seed))
    for writer in writers.values():
        writer.close()
    return writers


def check_parts(writers, train_files, notes):
    missing = [part for part, writer in writers.items() if not writer.tokens]
    if missing and UNREADABLE in notes.found:
        raise Problem(notes.found[UNREADABLE][1][0])
    if len(missing) == 2:
        raise Problem(f"{', '.join(train_files)}: empty, there is no text to encode")
    advice = {"train": "give more text, or validation text of its own by --val", "val": "give --val FILE"}
    for part in missing:
        raise Problem(f"no text is left for the part {part}: {advice[part]}")


def write_corpus(options, folder, train_files, validation_files, notes):
    """Fills the folder. Returns the size of the vocabulary and the writers of both parts."""
    for path in train_files + validation_files:
        if os.path.getsize(path) == 0:
            notes.add_or_stop("empty files", path, f"{path}: empty")
        elif input_kind(path) == "txt" and holds_records(path, options.field):
            what = f'files of JSON lines, encoded as they are; name them .jsonl to take the field "{options.field}" alone'
            notes.add(what, [path])
    for path in validation_files:
        if any(os.path.samefile(path, name) for name in train_files):
            notes.add("validation files that are trained on, so their loss says nothing of other texts", [path])
    # A mistake in --tokenizer is told before the text is read.
    words = None if options.train_bpe else vocabulary.open_vocabulary(options.tokenizer)
    parts = Parts(options, train_files, validation_files)
    if words:
        vocabulary.copy_vocabulary(words, options.tokenizer, folder)
    else:
        words = vocabulary.train_vocabulary(parts.training_texts(), options.train_bpe, folder)
        if words.size < options.train_bpe:
            what = "no more pairs come twice, so the vocabulary has fewer tokens than --train-bpe asked for"
            notes.add(what, [f"of {options.train_bpe}"], words.size)
    writers = write_shards(options, parts, words, folder, notes)
    check_parts(writers, train_files, notes)
    return words.size, writers


def write_nanogpt(options, folder, notes):
    """Fills the folder from nanoGPT's. Returns the same."""
    size, lengths, parts = nanogpt.convert(options, folder, notes)
    writers = {}
    for part, tokens in parts.items():
        limit = options.limit_tokens if part == "train" else None
        writers[part] = ShardWriter(folder, part, options.shard_tokens, limit, lengths)
        for block in tokens:
            writers[part].write(block)
        writers[part].close()
    return size, writers


def write_meta(folder, size, writers, sources):
    meta = {"version": 1, "vocabulary": size, "tokenizer": "gpt2"}
    for part, writer in writers.items():
        meta[part] = {"tokens": writer.tokens, "bytes": writer.bytes, "shards": writer.shards}
    meta["sources"] = sources
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")


def prepare(options):
    started, out, notes = time.time(), Path(options.out), Notes(options.strict)
    if out.exists() and not options.force:
        raise Problem(f"{out}: exists already; give another --out, or --force to replace it")
    if out.exists():
        check_ours(out)
    files = find_inputs(options)  # none for --from-nanogpt
    folder = out.with_name(out.name + ".tmp")
    make_own_folder(folder, out)
    try:
        nano = options.from_nanogpt
        size, writers = write_nanogpt(options, folder, notes) if nano else write_corpus(options, folder, *files, notes)
        write_meta(folder, size, writers, [nano] if nano else options.inputs + options.val)
        if options.force and out.exists():
            check_ours(out)
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
    for line in notes.lines():
        say(line)
    if writers["val"].tokens < 1025:
        say(f"  few validation tokens: a window of the trainer must be shorter than {writers['val'].tokens}")
    train = f"{here('./train')} --data {shlex.quote(str(out))}"
    say(f"next: {train}" if (ROOT / "train").exists() else f"next: {MAKE} && {train}")


def stop(number, _):
    print("prepare: interrupted; nothing was written", file=sys.stderr)
    sys.exit(128 + number)


def main(arguments=None):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        options = parse(arguments)
        eval_files.write_all(options) if options.eval else prepare(options)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # nobody reads what is printed, which comes last
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Problem as found:
        problem = found
    except ImportError as missing:
        problem = f"{missing}; {VENV}"
    except OSError as error:  # the disk is full, a folder cannot be written
        what = f"{error.filename or 'writing'}: {error.strerror or error}"
        problem = f"{what}; free space, or give another --out"
    except MemoryError:
        problem = "out of memory; free some, or try fewer --workers"
    say(f"prepare: error: {problem}", sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
