"""Vocabularies of GPT-2's kind: byte-pair encodings of bytes, within the words that GPT-2's pattern cuts.

Two files describe one. vocab.json maps the text of each token to its number, in an alphabet where every byte is one
printable character; merges.txt lists the pairs of tokens that become one token, the first of them first. Which numbers
the tokens have does not matter, so vocabularies that other programs trained are read as well. tiktoken encodes (by the
rank of a merge; a table turns ranks into numbers), the tokenizers library trains.
"""

import json
import os
import re
import shutil
import struct
from pathlib import Path

os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it would cache local files by their path, and serve stale ones
import numpy as np
import tiktoken
from crc32c import crc32c
from tiktoken_ext.openai_public import r50k_pat_str

from input_files import END, download
from messages import Problem

MAX_SPACE = 50000  # characters of white space in a row that tiktoken takes with certainty
MIN_VOCABULARY = 258  # 256 bytes, a merge, <|endoftext|>
MAX_VOCABULARY = 1 << 16  # a shard's tokens have 16 bits
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
OTHERS = "give a folder that holds one by --tokenizer, or leave that out for GPT-2's"
# A folder may lack the last three.
FILES = "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"


def make_alphabet():
    """Returns {character: byte} in the order of GPT-2's first 256 tokens: printable bytes, then U+0100 and on."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


ALPHABET = make_alphabet()


def to_bytes(text):
    """Returns the bytes of a token's text. One outside the alphabet was added by hand and stands for itself."""
    if all(character in ALPHABET for character in text):
        return bytes(ALPHABET[character] for character in text)
    return text.encode("utf-8")


class Vocabulary:
    """names: {text: number} of all tokens, with END if it has one; merges: ["left right", ...]; source: its file, for messages.

    added: {text: number} of tokens that were added later, at which a text is cut; the longest at a place counts.
    """

    def __init__(self, names, merges, source, added=()):
        self.names, self.merges, self.added = names, merges, dict(added)
        "".join([*names, *self.added]).encode("utf-8")  # half of a surrogate pair raises ValueError
        more = [number for text, number in self.added.items() if names.get(text) != number]
        every = [*names.values(), *more]
        if len(set(every)) < len(every) or not all(type(n) is int and n >= 0 for n in every):
            raise ValueError("each token has a number of its own")
        self.size, self.end = max(every) + 1, names.get(END)
        self.added_pattern = "|".join(map(re.escape, sorted(self.added, key=len, reverse=True)))
        ranks = {bytes([byte]): rank for rank, byte in enumerate(ALPHABET.values())}
        numbers = [names[character] for character in ALPHABET]
        for merge in merges:
            left, right = merge.split(" ")
            joined, number = to_bytes(left) + to_bytes(right), names[left + right]
            if left not in names or right not in names:
                raise ValueError(merge)
            if joined not in ranks:  # of two pairs that join to one text the first counts
                ranks[joined] = len(ranks)
                numbers.append(number)
        if self.size > MAX_VOCABULARY:
            raise Problem(f"{source}: {self.size} tokens do not fit in 16 bits; use one of at most {MAX_VOCABULARY}")
        self.numbers = np.array(numbers, np.uint16)
        self.tokenizer = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END: len(ranks)}
        )
        self.texts = [b""] * self.size  # of each token, in bytes
        for text, number in names.items():
            self.texts[number] = to_bytes(text)
        for text, number in self.added.items():
            self.texts[number] = text.encode("utf-8")
        # The bytes of text that each token stands for.
        self.lengths = np.array([len(text) * (i != self.end) for i, text in enumerate(self.texts)], np.int64)

    def encode_plain(self, text):
        return self.numbers[self.tokenizer.encode_to_numpy(text, allowed_special=set(), disallowed_special=())]

    def encode(self, text):
        """Returns the tokens of a text, whose white space is at most MAX_SPACE characters long, as uint16."""
        if not self.added:
            return self.encode_plain(text)
        pieces = re.split(f"({self.added_pattern})", text)  # every second one is an added token
        parts = [[self.added[piece]] if i % 2 else self.encode_plain(piece) for i, piece in enumerate(pieces)]
        return np.concatenate(parts).astype(np.uint16)

    def fingerprint(self):
        """Returns the fingerprint that data/README.md defines for evaluation files."""
        return crc32c(b"".join(struct.pack("<I", len(text)) + text for text in self.texts))

    def write(self, folder):
        (folder / "vocab.json").write_text(json.dumps(self.names, ensure_ascii=False), "utf-8")
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *self.merges]) + "\n", "utf-8")


def byte_vocabulary():
    """Returns the vocabulary of a model that reads bytes: no merges, and no token that begins a document."""
    return Vocabulary(ALPHABET, [], "bytes")


def check_words(whole, path):
    """Raises a Problem if tokenizer.json does not describe byte-pair encoding of bytes within the words of GPT-2."""
    model, cut = whole.get("model") or {}, whole.get("pre_tokenizer") or {}
    plain = cut.get("type") == "ByteLevel" and not cut.get("add_prefix_space") and cut.get("use_regex", True)
    others = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges", "dropout")
    if model.get("type", "BPE") != "BPE" or not plain or whole.get("normalizer") or any(map(model.get, others)):
        kind = "of GPT-2's kind (byte-level BPE with its pattern of words)"
        raise Problem(f"{path}: holds no tokenizer {kind}; {OTHERS}")


def read_added(tokens, path):
    """Returns the tokens that a tokenizer.json adds as Vocabulary has them, and END's.

    END is none of them, since in a text it stands for its characters.
    """
    added, end = {}, {}
    for token in tokens:
        text = token["content"]
        if text == END:
            end = {END: token["id"]}
            continue
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if flags or not text or re.search(r"\S\s", text):  # a long document is cut where white space begins
            what = flags[0] if flags else "white space within it" if text else "no text"
            raise Problem(f"{path}: its added token {json.dumps(text)} has {what}, which nothing here encodes; {OTHERS}")
        added[text] = token["id"]
    return added, end


def read_files(files):
    """Returns (names, merges, added tokens) of a vocabulary's files, and of tokenizer.json or added_tokens.json beside
    them."""
    names, merges, added = None, None, []
    if len(files) == 2:
        names, merges = json.loads(files[0].read_text("utf-8")), files[1].read_text("utf-8").rstrip("\n").split("\n")
        merges = merges[merges[0].startswith("#version") :]
    path, other = (files[0].with_name(name) for name in ("tokenizer.json", "added_tokens.json"))
    if path.is_file():
        whole = json.loads(path.read_text("utf-8"))
        check_words(whole, path)
        added = whole.get("added_tokens") or []
    elif other.is_file():
        texts, path = json.loads(other.read_text("utf-8")), other
        added = [{"content": text, "id": number} for text, number in texts.items()]
    if names is None:  # merges are texts or pairs of texts
        names, merges = dict(whole["model"]["vocab"]), whole["model"]["merges"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    added, end = read_added(added, path)
    numbers = [*names.values(), *added.values()]
    return {**names, END: names.get(END, end.get(END, max(numbers) + 1))}, merges, added


def find_files(folder):
    """Returns the files of a vocabulary: two of the folder, or tokenizer.json alone, or none."""
    for names in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"), ("tokenizer.json",)):
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    return []


def find_gpt2():
    """Returns GPT-2's files, from the folder that NIBBLE_GPT2 names or downloaded."""
    instead = "give a folder with encoder.json and vocab.bpe by --tokenizer"
    return find_files(Path(os.environ.get("NIBBLE_GPT2", "/nowhere"))) or [
        Path(download(GPT2 + name, sha256, instead)) for name, sha256 in GPT2_SHA256.items()
    ]


def open_vocabulary(folder=None):
    """Opens the vocabulary of a folder; None means GPT-2's."""
    files = find_files(Path(folder)) if folder else find_gpt2()
    if not files:
        what = "holds no" if os.path.isdir(folder) else "is no folder with"
        raise Problem(f"{folder}: {what} vocab.json and merges.txt, encoder.json and vocab.bpe, or tokenizer.json; {OTHERS}")
    try:
        names, merges, added = read_files(files)
        return Vocabulary(names, merges, str(files[0]), added)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        both = f"{files[0]} and {files[1].name} are" if len(files) == 2 else f"{files[0]} is"
        raise Problem(f"{both} no byte-pair vocabulary like GPT-2's; {OTHERS}") from None


def copy_vocabulary(vocabulary, source, folder):
    """Writes the vocabulary's files into a folder, and those of its own folder that transformers reads."""
    vocabulary.write(folder)
    for name in FILES[2:] if source else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def train_vocabulary(texts, size, folder):
    """Trains a vocabulary of `size` tokens, or fewer where no more pairs come twice, on an iterator of texts. Writes it into
    the folder, also as tokenizer.json for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[END], initial_alphabet=sorted(ALPHABET), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False}
    config.update(dict.fromkeys(("bos_token", "eos_token", "unk_token"), END))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    vocabulary = open_vocabulary(folder)
    vocabulary.write(folder)
    return vocabulary
