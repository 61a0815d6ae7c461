"""nanoGPT's folders: train.bin and val.bin hold uint16 tokens alone, meta.pkl may hold a vocabulary of texts.

prepare.py --from-nanogpt DIR writes shards of them. Without meta.pkl the tokens are GPT-2's, or those of --tokenizer.
"""

import itertools
import json
import pickle
from pathlib import Path

import numpy as np

from messages import Problem
from vocabulary import ALPHABET, MAX_VOCABULARY, copy_vocabulary, open_vocabulary

META_BYTES = 1 << 26
SHARD_MAGIC = (20240520).to_bytes(4, "little")
BLOCK = 1 << 24  # tokens that are converted at a time


class Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries. Any other thing in a pickle names code, which never runs."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names the code {module}.{name}")


def read_meta(path):
    """Returns (number of tokens, their texts or None) of a meta.pkl."""
    try:
        if path.stat().st_size > META_BYTES:
            raise ValueError("it is too large")
        with open(path, "rb") as file:
            meta = Plain(file).load()
        texts = meta.get("itos")
        if isinstance(texts, dict):
            texts = [texts[i] for i in range(len(texts))]
        size = meta.get("vocab_size", len(texts or ()))
        if type(size) is not int or not 1 <= size <= MAX_VOCABULARY:
            raise ValueError(f"its vocab_size is not within 1 and {MAX_VOCABULARY}")
        if texts is not None and not (len(texts) == size == len(set(texts)) and all(texts)):
            raise ValueError("its itos is no list of vocab_size different texts")
        return size, texts and [text.encode("utf-8") for text in texts]
    except Exception as error:  # a damaged pickle may raise anything
        raise Problem(f"{path}: cannot be read ({error}); write it again, or take it away for GPT-2's tokens") from None


def open_tokens(path):
    """Returns the tokens of a file as an array that is read when it is used."""
    size = path.stat().st_size
    if not size or size % 2:
        raise Problem(f"{path}: {size} bytes are no uint16 tokens; copy it again")
    tokens = np.memmap(path, "<u2", "r")
    if tokens[:2].tobytes() == SHARD_MAGIC:
        raise Problem(f"{path}: a shard of tokens already; type ./train --data {path}")
    if len(tokens) % 2 == 0 and not tokens[1 : 2 * BLOCK : 2].any():
        raise Problem(f"{path}: holds uint32 tokens; write them as uint16")
    return tokens


def blocks_of(part, path, tokens, size):
    """Yields (part, block of uint16) of the tokens of a vocabulary of this size."""
    for block in (tokens[at : at + BLOCK] for at in range(0, len(tokens), BLOCK)):
        if block.max() >= size:
            advice = "name its tokenizer's folder by --tokenizer"
            raise Problem(f"{path}: holds token {block.max()}, and the vocabulary has {size}; {advice}")
        yield part, block.astype(np.uint16)


def write_vocabulary(meta, tokenizer, folder, notes):
    """Writes the vocabulary of a meta.pkl, or where there is none that of --tokenizer or GPT-2's. Returns its size and the
    lengths of its tokens."""
    if tokenizer or not meta.is_file():
        vocabulary = open_vocabulary(tokenizer)
        copy_vocabulary(vocabulary, tokenizer, folder)
        return vocabulary.size, vocabulary.lengths
    size, texts = read_meta(meta)
    if not texts:
        notes.notices.append(f"{meta} has no texts of tokens, so no samples and no bits per byte; name a folder by --tokenizer")
        return size, np.zeros(size, np.int64)
    names = {byte: name for name, byte in ALPHABET.items()}
    tokens = {"".join(names[byte] for byte in text): i for i, text in enumerate(texts)}
    (folder / "vocab.json").write_text(json.dumps(tokens, ensure_ascii=False), "utf-8")
    return size, np.array([len(text) for text in texts], np.int64)


def convert(options, folder, notes):
    """Writes the vocabulary. Returns its size, the lengths of its tokens, and (part, block of tokens) of both parts."""
    source = Path(options.from_nanogpt)
    train, val = source / "train.bin", source / "val.bin"
    if not train.is_file():
        raise Problem(f"{source}: holds no train.bin; name a folder of nanoGPT's, such as data/shakespeare_char")
    if val.is_file() and options.val_fraction:
        raise Problem(f"{source}: has a val.bin; leave --val-fraction out, or move that file away")
    size, lengths = write_vocabulary(source / "meta.pkl", options.tokenizer, folder, notes)
    tokens = open_tokens(train)
    if val.is_file():
        held_out = open_tokens(val)
    else:
        tokens, held_out = np.split(tokens, [len(tokens) - int((options.val_fraction or 0.05) * len(tokens))])
    parts = ("train", train, tokens[: options.limit_tokens]), ("val", val if val.is_file() else train, held_out)
    return size, lengths, itertools.chain.from_iterable(blocks_of(*part, size) for part in parts)
