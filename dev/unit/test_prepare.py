#!/usr/bin/env python3
"""Tests of data/prepare.py: one line a case, `N passed, N failed, N skipped` last; exit status 1 when a case fails.

    python dev/unit/test_prepare.py [-k SUBSTRING]

Each case runs the script on small generated files in a temporary folder. The vocabulary is a made-up one of 256 bytes
and a few merges, so nothing is downloaded. Where a library that prepare.py needs is missing, all is skipped and the
exit status is 0.
"""

import array
import bz2
import ctypes
import gzip
import json
import lzma
import os
import pickle
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

try:
    from compression import zstd
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

from cases import ROOT, Folder, run_cases

MERGES = "Ġ t|h e|i n|r e|Ġt he|o n|Ġ Ġ|Ċ Ċ|e r|Ġ a|n d|Ġa nd|' s".split("|")


def byte_names():
    """Returns GPT-2's printable name of each byte, in the order of its tokens."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def write_vocabulary(folder, names=("encoder.json", "vocab.bpe")):
    tokens = {name: i for i, name in enumerate(byte_names().values())}
    for merge in MERGES:
        tokens[merge.replace(" ", "")] = len(tokens)
    tokens["<|endoftext|>"] = len(tokens)
    folder.mkdir()
    (folder / names[0]).write_text(json.dumps(tokens), "utf-8")
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", "utf-8")
    return len(tokens)


NOWHERE = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}


class Corpus:
    """Reads what prepare.py wrote, without its code."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.meta = json.loads((self.folder / "meta.json").read_text("utf-8"))
        names = {name: byte for byte, name in byte_names().items()}
        vocabulary = json.loads((self.folder / "vocab.json").read_text("utf-8"))
        self.end = vocabulary.pop("<|endoftext|>")
        self.text = {token: bytes(names[c] for c in name) for name, token in vocabulary.items()}

    def shards(self, part):
        """Returns the tokens of each shard. Checks the header against the file."""
        result = []
        paths = sorted(self.folder.glob(part + "_*.bin"))
        assert [p.name for p in paths] == [f"{part}_{i:06d}.bin" for i in range(len(paths))], paths
        for path in paths:
            data = path.read_bytes()
            header = memoryview(data[:1024]).cast("i")
            assert header[0] == 20240520 and header[1] == 1, "magic or version"
            assert len(data) == 1024 + 2 * header[2], (len(data), header[2])
            assert not any(header[3:]), "the rest of the header is 0"
            result.append(list(memoryview(data[1024:]).cast("H")))
        return result

    def tokens(self, part):
        return [token for shard in self.shards(part) for token in shard]

    def documents(self, part):
        """Returns the texts of a part. Checks that it begins with <|endoftext|>, and its counts in meta.json."""
        tokens = self.tokens(part)
        assert tokens and tokens[0] == self.end, "begins with <|endoftext|>"
        documents = []
        for token in tokens:
            if token == self.end:
                documents.append(bytearray())
            else:
                documents[-1] += self.text[token]
        counted = self.meta[part]["tokens"], self.meta[part]["bytes"]
        assert counted == (len(tokens), sum(map(len, documents))), (counted, len(tokens))
        return [document.decode() for document in documents]


class Case(Folder):
    """A temporary folder with a vocabulary, and ways to run prepare.py in it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.environment = {"XDG_CACHE_HOME": str(self.folder / "cache")}
        self.vocabulary = write_vocabulary(self.folder / "vocabulary")

    def write(self, name, content):
        content = content.encode() if isinstance(content, str) else content
        pack = lzma.compress if name.endswith(".xz") else gzip.compress if name.endswith(".gz") else bytes
        (self.folder / name).write_bytes(pack(content))
        return name

    def run(self, *arguments, vocabulary="vocabulary", **environment):
        tokenizer = ["--tokenizer", vocabulary] if vocabulary else []
        return self.typed(sys.executable, ROOT / "data/prepare.py", *arguments, *tokenizer, **environment)

    def prepare(self, *arguments, out="out", said=(), **more):
        """Expects success and each text of `said`. Returns what was written."""
        done = self.run(*arguments, "--out", out, **more)
        assert done.returncode == 0, done.stderr
        for text in said:
            assert text in done.stdout, f"{text!r} is not in {done.stdout!r}"
        typed = shlex.split(done.stdout.split("next: ")[1])
        assert typed[-3:] == [str(ROOT / "train"), "--data", str(out)], typed
        assert not (self.folder / (out + ".tmp")).exists()
        return Corpus(self.folder / out)

    def refuse(self, expected, *arguments, **more):
        """Expects status 2, one sentence that holds `expected`, and nothing written."""
        out = [] if "--out" in arguments else ["--out", "refused"]
        self.refused(self.run(*arguments, *out, **more), "prepare: error: ", expected)
        assert not list(self.folder.glob("refused*")), "wrote something"


def sample(seed, size):
    """Returns text that is hard for a tokenizer: runs of white space, apostrophes, digits, accents, wide characters."""
    generator = random.Random(seed)
    words = "the| the|  |\n\n|\n|\t|and's|don't|1234|é|日本|😀|\u3000|\u00a0|\r\n|;:|in".split("|")
    text = ""
    while len(text) < size:
        text += generator.choice(words) + generator.choice(["", " ", " ", "\n"])
    return "x" + text + "."


def joined(documents):
    return "".join(f"<|endoftext|>\n{document}\n" for document in documents)


def test_round_trip_text(case):
    documents = [sample(i, 400) for i in range(40)]
    corpus = case.prepare(case.write("a.txt", joined(documents)), "--val-fraction", 0.2)
    val, train = corpus.documents("val"), corpus.documents("train")
    assert sorted(val + train) == sorted(document + "\n" for document in documents)
    assert train == [document + "\n" for document in documents if document + "\n" not in val]
    share = corpus.meta["val"]["bytes"] / (corpus.meta["val"]["bytes"] + corpus.meta["train"]["bytes"])
    assert len(val) == 8 and 0.17 < share < 0.23, share
    assert corpus.meta["vocabulary"] == case.vocabulary and corpus.meta["version"] == 1
    assert corpus.meta["tokenizer"] == "gpt2" and corpus.meta["sources"] == ["a.txt"]
    assert max(corpus.tokens("train")) < case.vocabulary


def test_separator_rules(case):
    text = "one\n<|endoftext|>\r\ntwo <|endoftext|>\n <|endoftext|>\n<|endoftext|>\n \n<|endoftext|>\nthree"
    corpus = case.prepare(case.write("a.txt", b"\xef\xbb\xbf" + text.encode()), "--val", case.write("v.txt", "v"))
    assert corpus.documents("train") == ["one\n", "two <|endoftext|>\n <|endoftext|>\n", "three"]
    corpus = case.prepare(case.write("m.txt", "the the\n"), "--val", "v.txt", out="merged")
    assert [corpus.text.get(t) for t in corpus.tokens("train")] == [None, b"t", b"he", b" the", b"\n"]


def test_jsonl(case):
    val = case.write("v.txt", "validation")
    lines = case.write("a.jsonl", '\ufeff{"body": "the"}\n\n{"body": "half a pair: \\ud83d", "n": 1}\n{"body": ""}')
    got = case.prepare(lines, "--val", val, "--field", "body")
    assert got.documents("val") == ["validation"]
    assert got.documents("train") == ["the", "half a pair: \ufffd"]


def test_parquet(case):
    import pyarrow.parquet

    documents = [sample(i, 300) for i in range(30)]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(30)), "text": documents}), case.folder / "a.parquet")
    corpus = case.prepare("a.parquet", "--val-fraction", 0.3)
    assert sorted(corpus.documents("val") + corpus.documents("train")) == sorted(documents)
    assert len(corpus.documents("val")) == 9
    pyarrow.parquet.write_table(pyarrow.table({"text": ["the", None, "", "in"]}), case.folder / "a.PARQUET")
    said = ["documents without a text, left out: 1 (a.PARQUET: row 2)\n"]
    assert case.prepare("a.PARQUET", "--val", "a.parquet", out="nulls", said=said).documents("train") == ["the", "in"]
    case.refuse('a.PARQUET: row 2: field "text" is null', "a.PARQUET", "--val", "a.parquet", "--strict")
    case.refuse("id, text", "a.parquet", "--field", "body")
    case.refuse('field "id" is int64 and not a text', "a.parquet", "--field", "id")
    case.refuse("cannot be read", case.write("b.parquet", "text"))


def test_workers_and_shards(case):
    documents = [sample(i, 30000) for i in range(20)] + [sample(99, 50000) * 22]
    name = case.write("a.txt", joined(documents))
    one = case.prepare(name, "--workers", 1, "--shard-tokens", 100000, out="one")
    many = case.prepare(name, "--workers", 3, "--shard-tokens", 100000, out="many")
    files = sorted(p.name for p in one.folder.iterdir())
    assert files == sorted(p.name for p in many.folder.iterdir()) and len(files) > 8
    for file in files:
        assert (one.folder / file).read_bytes() == (many.folder / file).read_bytes(), file
    assert {len(shard) for shard in one.shards("train")[:-1]} == {100000}
    assert 50000 <= len(one.shards("train")[-1]) < 150000
    val, train, documents = one.documents("val"), one.documents("train"), [text + "\n" for text in documents]
    drawn = [text for text in val if text in documents]
    (begins,) = [text for text in val if text not in documents]  # of the long document, which is too long to be drawn
    share = (1 << 17) / sum(len(text.encode()) for text in documents)
    assert 1 <= len(drawn) <= 2 and documents[-1].startswith(begins)
    assert abs(len(begins.encode()) / len(documents[-1].encode()) - share) < 0.002, share
    assert train == [text for text in documents[:-1] if text not in drawn] + [documents[-1][len(begins) :]]


def test_validation_is_of_all_inputs(case):
    """Each input gives its share of validation documents, whatever its kind, and the first ones are mixed."""
    texts = {name: [f"{name} {i} " + sample(i, 300) for i in range(60)] for name in ("a", "b", "c")}
    case.write("a.txt", joined(texts["a"]))
    case.write("b.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts["b"]))
    case.write("c.json.xz", json.dumps([{"text": text} for text in texts["c"]], indent=1))
    inputs = ("a.txt", "b.jsonl", "c.json.xz")
    val = case.prepare(*inputs, "--val-fraction", 0.2).documents("val")
    names = [text[0] for text in val]
    assert {name: names.count(name) for name in "abc"} == dict.fromkeys("abc", 12), names
    assert len(set(names[:12])) == 3 and names != sorted(names), names
    same = case.prepare(*inputs, "--val-fraction", 0.2, "--workers", 3, out="same")
    other = case.prepare(*inputs, "--val-fraction", 0.2, "--seed", 2, out="other").documents("val")
    assert same.documents("val") == val and sorted(other) != sorted(val) and len(other) == len(val)
    # Books of one document each are too long to be drawn: each gives its beginning.
    books = {name: name + " " + sample(ord(name), 20000) for name in "xyz"}
    corpus = case.prepare(*(case.write(name + ".txt", books[name]) for name in books), out="books")
    val, train = corpus.documents("val"), corpus.documents("train")
    assert sorted(text[0] for text in val) == ["x", "y", "z"] and len(train) == 3
    for begin in val:
        (rest,) = [text for text in train if begin + text == books[begin[0]]]
        assert 0.08 < len(begin) / len(books[begin[0]]) < 0.12
    # Little of a large corpus still has a validation part.
    case.prepare("a.txt", "--limit-tokens", 500, out="limited").documents("val")
    # Named validation files are mixed as well; a single one keeps its order.
    val = case.prepare("c.json.xz", "--val", "a.txt", "b.jsonl", out="named").documents("val")
    assert len({text[0] for text in val[:12]}) == 2 and len(val) == 120
    val = case.prepare("b.jsonl", "--val", "c.json.xz", out="single").documents("val")
    assert val == texts["c"]


def test_packed_by_contents_and_names(case):
    documents = [sample(i, 300) for i in range(12)]
    text, lines = joined(documents), "".join(json.dumps({"text": text}) + "\n" for text in documents)
    array, val = json.dumps([{"text": text} for text in documents]), case.write("v.txt", "validation")
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd.compress, "": bytes}
    for i, (ending, pack) in enumerate(packers.items()):
        cases = [("A.TXT", text), ("a.JsonL", lines), ("a.json", array), ("lines.json", lines), ("noending", text)]
        for j, (name, content) in enumerate((cases[i], cases[i - 1])):
            name = name + (ending.upper() if j else ending)
            (case.folder / name).write_bytes(pack(content.encode()))
            out = f"o{i}_{j}"
            got = case.prepare(name, "--val", val, out=out).documents("train")
            assert [text.rstrip("\n") for text in got] == [text.rstrip("\n") for text in documents], name
        # Packed, whatever the name says.
        (case.folder / "odd.txt").write_bytes(pack(text.encode()))
        assert len(case.prepare("odd.txt", "--val", val, out=f"odd{i}").documents("train")) == len(documents)
        if not ending:
            continue
        whole = pack(sample(7, 100000).encode())
        (case.folder / "a.bin.csv").write_bytes(whole)  # a packed file of an unknown kind is text
        case.prepare("a.bin.csv", "--val", val, out=f"csv{i}")
        for length in (len(whole) // 2, len(whole) - 5):
            (case.folder / ("cut.txt" + ending)).write_bytes(whole[:length])
            case.refuse("cut.txt" + ending + ": cannot be read", "cut.txt" + ending)
        (case.folder / ("plain.txt" + ending)).write_text("not packed")
        case.refuse("cannot be read (it is not packed, as its name says); fetch or write it again", "plain.txt" + ending)
    (case.folder / "a.lzma").write_bytes(lzma.compress(text.encode(), format=lzma.FORMAT_ALONE))
    assert len(case.prepare("a.lzma", "--val", val, out="lzma").documents("train")) == len(documents)
    said = ['name them .jsonl to take the field "text" alone: 1 (records.txt)']
    case.prepare(case.write("records.txt", lines), "--val", val, out="records", said=said)
    for name, content in (("a.tar.gz", b"a/file\0\0\0\0text"), ("utf16.txt", text.encode("utf-16-le"))):
        (case.folder / name).write_bytes(content if name.endswith("txt") else gzip.compress(content))
        case.refuse(f"{name}: binary, not text", name)
    two = zstd.compress(b"one\n") + zstd.compress(b"two\n")
    (case.folder / "two.txt.zst").write_bytes(two)
    assert case.prepare("two.txt.zst", "--val", val, out="two").documents("train") == ["one\ntwo\n"]


def test_bad_documents(case):
    """One document that cannot be encoded does not end the preparation of all others."""
    spaces = "a" + " " * 1_000_000 + "b" + "\n" * 1_000_000 + "c"
    rows = [{"text": "first"}, {"text": None}, {"text": " \n "}, {"text": spaces}, {"text": "last"}]
    lines = case.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    array = case.write("a.json", json.dumps(rows))
    val = case.write("v.txt", "validation")
    for name, what in ((lines, "line"), (array, "element")):
        said = [f"documents without a text, left out: 1 ({name}: {what} 2)\n"]
        said += [f"very long white space or words, encoded in pieces: 1 ({name}: {what} 4)\n"]
        for workers in (1, 2):
            got = case.prepare(name, "--val", val, "--force", "--workers", workers, said=said)
            assert got.documents("train") == ["first", spaces, "last"]
        case.refuse(f"{name}: {what} 2: field", name, "--val", val, "--strict")
    text = case.write("a.txt", joined(["first", "x\n" + spaces, "last"]))
    got = case.prepare(text, "--val", val, out="text", said=["encoded in pieces: 2 (a.txt: line 4, a.txt: line 5)\n"])
    assert got.documents("train") == ["first\n", "x\n" + spaces + "\n", "last\n"]
    case.refuse("a.txt: line 4: the text cannot be encoded", text, "--val", val, "--strict")
    bad = ['{"text": "first"}', '{"text": ', '{"body": "b"}', '{"text": 5}', "[1]", '{"text": "last"}']
    bad = case.write("bad_lines.jsonl", "\n".join(bad).encode() + b'\n{"text": "\xe9"}\n')
    for workers in (1, 2):
        said = ["cannot be read, left out: 5 (bad_lines.jsonl: line 2: not JSON"]
        got = case.prepare(bad, "--val", val, "--force", "--workers", workers, said=said)
        assert got.documents("train") == ["first", "last"]
    case.refuse("bad_lines.jsonl: line 2: not JSON", bad, "--val", val, "--strict")
    many = case.write("many.jsonl", '{"text": null}\n' * 50 + '{"text": "the"}\n')
    case.prepare(many, "--val", val, out="many", said=["left out: 50 (many.jsonl: line 1, ", "line 10, ...)\n"])
    case.write("nothing.txt", "")
    case.prepare("nothing.txt", text, "--val", val, out="nothing", said=["empty files: 1 (nothing.txt)\n"])
    case.refuse("nothing.txt: empty", "nothing.txt", text, "--strict")
    os.mkfifo(case.folder / "fifo.txt")
    case.refuse("fifo.txt: not a regular file", "fifo.txt")


MEASURED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import input_files
import prepare
input_files.MAX_LINE = prepare.MAX_WORD = 1 << 20
code = prepare.main(sys.argv[2:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
sys.exit(code)
"""


def test_memory_is_bounded(case):
    """A small packed file does not fill the memory, whatever it unpacks to."""
    case.write("v.txt", "validation")
    for name, begins, mebibytes, ends, said in (
        ("a.jsonl.zst", b'{"text": "', 512, b'"}\n{"text": "the"}\n', "left out: 1 (a.jsonl.zst: line 1: longer than"),
        ("a.json.zst", b'["', 512, b'"]', "a.json.zst: an array of more than 256 MiB; write a document a line"),
        ("a.txt.zst", b"", 12, b"", "12,582,912 bytes"),
    ):
        with zstd.open(case.folder / name, "wb") as file:
            file.write(begins)
            for _ in range(mebibytes):
                file.write(b"a" * (1 << 20))
            file.write(ends)
        assert (case.folder / name).stat().st_size < 1 << 17
        words = [name, "--val", "v.txt", "--out", name + "d", "--workers", "1", "--tokenizer", "vocabulary"]
        done = case.typed(sys.executable, "-c", MEASURED, ROOT / "data", *words)
        assert said in done.stdout + done.stderr and "Traceback" not in done.stderr, done
        assert int(done.stdout.rpartition("peak")[2]) < (900 if "array" in said else 400), (name, done.stdout)


def test_strange_texts(case):
    """Escapes and halves of characters in names are not printed; what is not a text is refused by one sentence."""
    val = case.write("v.txt", "validation")
    lines = case.write("a.jsonl", '{"\\ud800\\u001b]0;x\\u0007": 1}\n{"text": "the"}\n')
    case.prepare(lines, "--val", val, said=['no field "text" but ??]0;x?'])
    good, secret = case.folder / "vocabulary", case.folder / "secret"
    secret.write_text("machine a login b password c")
    (good / "tokenizer_config.json").symlink_to(secret)
    case.refuse("tokenizer_config.json: a link, whose contents would be published", val, "--out", "p")
    (good / "tokenizer_config.json").unlink()
    cached = case.folder / "cache/nibble/raw.githubusercontent.com_karpathy_char-rnn_master_data_tinyshakespeare_input.txt"
    cached.parent.mkdir(parents=True)
    cached.write_text("not Shakespeare")
    case.refuse("cannot be downloaded", "tinyshakespeare", **NOWHERE)


def test_inline_separators(case):
    text = "one<|endoftext|>two <|endoftext|>\nthree\n<|endoftext|>\nfour<|endoftext|> <|endoftext|>five"
    name, val = case.write("a.txt", text), case.write("v.jsonl", '{"text": "x<|endoftext|>y"}')
    said = ["notice: <|endoftext|> within a text", "--inline-separators", ": 5 (v.jsonl: line 1, a.txt: line 1, a.txt: line 4)\n"]
    corpus = case.prepare(name, "--val", val, said=said)
    assert corpus.documents("train") == [text.split("<|endoftext|>\nfour")[0], "four" + text[-31:]]
    corpus = case.prepare(name, "--val", val, "--inline-separators", out="inline")
    assert corpus.documents("train") == ["one", "two ", "\nthree\n", "four", "five"]
    assert corpus.documents("val") == ["x", "y"]


def test_unicode_tables(case):
    """data/unicode.h and dev/reference/words.txt are what tiktoken says today."""
    case.typed(sys.executable, ROOT / "dev/reference/make_unicode.py", "--check", status=0)


def test_long_document_in_pieces(case):
    """A document cut into small pieces has the tokens of the whole."""
    sys.path.insert(0, str(ROOT / "data"))
    import input_files
    import prepare

    case.prepare(case.write("v.txt", "the"), "--val", "v.txt")
    import vocabulary

    words, notes = vocabulary.open_vocabulary(case.folder / "out"), prepare.Notes(False)
    whole, pieces = input_files.PIECE_BYTES, 0
    try:
        for seed in range(30):
            path = case.folder / case.write("a.txt", sample(seed, 3000))
            input_files.PIECE_BYTES = whole
            want = prepare.encode(words, input_files.read_text(path), "text", False, notes).tolist()
            input_files.PIECE_BYTES = 50
            parts = list(input_files.read_text(path))
            assert b"".join(part.data for part in parts) == path.read_bytes()
            for part in parts:
                lines_before = path.read_bytes()[: sum(len(p.data) for p in parts[: parts.index(part)])].count(b"\n")
                assert part.place == 1 + lines_before, "line number"
            assert prepare.encode(words, parts, "text", False, notes).tolist() == want, seed
            pieces += len(parts)
    finally:
        input_files.PIECE_BYTES = whole
    assert pieces > 1000, pieces


def library(case):
    """Compiles data/*.c and loads it. Returns None without a compiler."""
    sources = sorted(map(str, (ROOT / "data").glob("*.c")))
    made = case.folder / "data.so"
    try:
        done = subprocess.run(
            ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-O0", "-w", "-pthread", *sources, "-o", made, "-lm"],
            capture_output=True,
        )
    except OSError:
        return None
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(made))
    loaded.tokenizer_open.restype = ctypes.c_void_p
    return loaded


def encode_by_c(loaded, folder, text):
    error, data = ctypes.create_string_buffer(8192), text.encode()
    tokenizer = ctypes.c_void_p(loaded.tokenizer_open(str(folder).encode(), error))
    assert tokenizer.value, error.value
    tokens = (ctypes.c_int * len(data))()
    count = loaded.tokenizer_encode(tokenizer, data, ctypes.c_int64(len(data)), tokens, len(data))
    vocabulary, end = loaded.tokenizer_vocabulary(tokenizer), loaded.tokenizer_end(tokenizer)
    loaded.tokenizer_close(tokenizer)
    return list(tokens[:count]), vocabulary, end


def test_bad_bytes(case):
    """A document with a byte that is no UTF-8 is left out and counted, whatever holds it; the others are kept."""
    val, good = case.write("v.txt", "in"), [sample(i, 300) for i in range(6)]
    text = joined(good[:3]).encode() + b"<|endoftext|>\nbad \xff\n" + joined(good[3:]).encode()
    array = json.dumps([{"text": text} for text in (*good, "b@d")], ensure_ascii=False).encode().replace(b"b@d", b"b\xffd")
    for name, content, place in (("a.txt", text, "line "), ("b.txt.gz", text, "line "), ("c.json", array, "element 7")):
        said = ["cannot be read, left out: 1", "not UTF-8 (byte 0xff)", place]
        got = case.prepare(case.write(name, content), "--val", val, out="o-" + name, said=said).documents("train")
        assert [text.rstrip("\n") for text in got] == [text.rstrip("\n") for text in good]
        case.refuse("leave --strict out", name, "--val", val, "--strict")
    one = case.write("one.txt", b"the re\xff the\n" * 200)
    said = ["left out: 2 (one.txt: line 1: not UTF-8"]  # it is not counted once for each part
    case.prepare(one, "a.txt", "--val-fraction", 0.1, out="one", said=said)
    inline = " <|endoftext|> ".join(["one", "b\udcffd", "two"]).encode("utf-8", "surrogateescape")
    got = case.prepare(case.write("d.txt", inline), "--val", val, "--inline-separators", out="inline").documents("train")
    assert got == ["one ", " two"], got
    # The piece of a long document is left out, and what follows begins a document.
    long = ("the red man\n" * 300000).encode()
    got = case.prepare(case.write("e.txt", long[:2500000] + b"\xff" + long[2500000:]), "--val", val, out="long")
    got = got.documents("train")
    assert len(got) == 2 and len(long) - (1 << 21) < sum(map(len, got)) < len(long) and long.startswith(got[0].encode())
    import pyarrow.parquet

    texts = pyarrow.array([b"one", b"b\xffd", b"two"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), case.folder / "f.parquet")
    assert case.prepare("f.parquet", "--val", val, out="rows").documents("train") == ["one", "two"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_from_nanogpt(case):
    """The tokens stay; a vocabulary of characters comes along, and without one GPT-2's; a pickle runs no code."""
    text, nano = "wörld of the red\n" * 500, case.folder / "nano"
    characters = sorted(set(text))
    tokens = [characters.index(c) for c in text]
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": {}}
    nano.mkdir()
    (nano / "meta.pkl").write_bytes(pickle.dumps(meta))

    def shard(folder, part):
        return list(memoryview((case.folder / folder / f"{part}_000000.bin").read_bytes()[1024:]).cast("H"))

    (nano / "train.bin").write_bytes(array.array("H", tokens))
    (nano / "val.bin").write_bytes(array.array("H", tokens[:700]))
    done = case.run("--from-nanogpt", nano, "--out", "o16", vocabulary=None)
    assert done.returncode == 0 and shard("o16", "train") == tokens and shard("o16", "val") == tokens[:700], done
    names = {name: byte for byte, name in byte_names().items()}
    stored = json.loads((case.folder / "o16" / "vocab.json").read_text("utf-8"))
    assert [bytes(names[c] for c in name).decode() for name in stored] == characters
    counts = json.loads((case.folder / "o16" / "meta.json").read_text())
    assert counts["vocabulary"] == len(characters) and counts["train"]["bytes"] == len(text.encode())
    loaded = library(case)
    assert not loaded or encode_by_c(loaded, case.folder / "o16", text[:99])[0] == tokens[:99]
    case.refuse("o16: holds no train.bin", "--from-nanogpt", "o16", vocabulary=None)
    case.refuse("leave --strict out", "--from-nanogpt", nano, "--strict", vocabulary=None)
    case.refuse("leave --val-fraction out", "--from-nanogpt", nano, "--val-fraction", 0.1, vocabulary=None)
    (nano / "meta.pkl").write_bytes(pickle.dumps({**meta, "itos": Evil()}))
    case.refuse("it names the code posix.mkdir", "--from-nanogpt", nano, vocabulary=None)
    assert not (case.folder / "evil").exists()
    for broken in (b"", b"junk", pickle.dumps([1]), pickle.dumps({**meta, "vocab_size": 70000}), pickle.dumps({"itos": [1]})):
        (nano / "meta.pkl").write_bytes(broken)
        case.refuse("meta.pkl: cannot be read", "--from-nanogpt", nano, vocabulary=None)
    (nano / "meta.pkl").unlink(), (nano / "val.bin").unlink()
    done = case.run("--from-nanogpt", nano, "--val-fraction", 0.2, "--out", "cut")
    assert done.returncode == 0 and shard("cut", "val") == tokens[-len(tokens) // 5 :], done
    (nano / "train.bin").write_bytes(array.array("H", [300]))
    case.refuse(f"holds token 300, and the vocabulary has {case.vocabulary}", "--from-nanogpt", nano)
    (nano / "train.bin").write_bytes(b"odd")
    case.refuse("train.bin: 3 bytes are no uint16", "--from-nanogpt", nano)


def test_single_document_split(case):
    text = "".join(f"line {i} and the rest é\n" for i in range(2000))
    corpus = case.prepare(case.write("a.txt", text), "--val-fraction", 0.1)
    (val,), (train,) = corpus.documents("val"), corpus.documents("train")
    assert val + train == text and val.endswith("\n") and abs(len(val) / len(text) - 0.1) < 0.002
    # A line end that is far behind the place of the cut is none to cut at.
    text = "word " * 20000 + "\n" + "line\n" * 100
    corpus = case.prepare(case.write("c.txt", text), "--val-fraction", 0.1, out="c")
    (val,), (train,) = corpus.documents("val"), corpus.documents("train")
    assert val + train == text and abs(len(val) / len(text) - 0.1) < 0.002
    text = "日本" * 3000
    corpus = case.prepare(case.write("b.txt", text), "--val-fraction", 0.1, out="b")
    (val,), (train,) = corpus.documents("val"), corpus.documents("train")
    assert val + train == text and len(val) == 600


def test_default_validation_share(case):
    corpus = case.prepare(case.write("a.txt", joined(["the " * 500] * 50)), out="it's an out")
    assert len(corpus.documents("val")) == 5 and len(corpus.documents("train")) == 45


def test_limit_and_force(case):
    name = case.write("a.txt", joined([sample(i, 5000) for i in range(300)]))
    corpus = case.prepare(name, "--limit-tokens", 70000, "--shard-tokens", "3e4", "--workers", 2)
    corpus.documents("train")
    assert [len(shard) for shard in corpus.shards("train")] == [30000, 40000]
    case.refuse("exists already", name, "--out", "out")
    corpus = case.prepare(name, "--limit-tokens", 50000, "--force")
    assert corpus.meta["train"]["tokens"] == 50000
    (corpus.folder / "notes").write_text("mine")
    case.refuse("left alone", name, "--out", "out", "--force")
    assert (corpus.folder / "notes").exists()


def test_killed_and_twice(case):
    """Killed, it leaves nothing under the name OUT, which a second one refuses to write meanwhile."""
    name = case.write("a.txt", sample(1, 100_000) * 150)
    command = [sys.executable, str(ROOT / "data" / "prepare.py"), name, "--tokenizer", "vocabulary", "--workers", "2", "--out", "o"]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = subprocess.Popen(command, cwd=case.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not list(case.folder.glob("o.tmp/train_*.bin")):
            assert process.poll() is None and time.sleep(0.05) is None
        case.refuse("o: another prepare.py is writing it; wait for that", case.write("b.txt", "the\n" * 99), "--out", "o")
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == status and not (case.folder / "o").exists(), process.returncode
    case.prepare("b.txt", out="o")


def test_errors(case):
    good = case.write("good.txt", "the the\n" * 100)
    case.refuse("none.txt: no such file", "none.txt")
    case.refuse("no such file", good, "--val", "none.txt")
    case.prepare(good, "--val", "./good.txt", out="same", said=["validation files that are trained on", "1 (./good.txt)"])
    case.refuse("a folder", "vocabulary")
    case.refuse(".jsonl", case.write("a.csv", "a,b"))
    case.refuse("empty.txt: empty, there is no text", case.write("empty.txt", ""))
    case.refuse("blank.txt: empty, there is no text", case.write("blank.txt", "\n<|endoftext|>\n \n"))
    case.refuse('line 2: there is no field "text" but body', case.write("f.jsonl", '\n{"body": "a"}\n'))
    case.refuse('field "text" is not a text', case.write("n.jsonl", '{"text": 1}\n'))
    case.refuse("--val", case.write("one.jsonl", '{"text": "a"}\n'))
    case.refuse("--shard-tokens", good, "--shard-tokens", 10)
    case.refuse("--workers: 'x' was found; type a whole number", good, "--workers", "x")
    case.refuse("--val-fraction: '1' was found; type a number between", good, "--val-fraction", 1)
    case.refuse("INPUT")


def test_no_network(case):
    parts = {"tinyshakespeare": "input.txt", "tinystories": "train.txt", "fineweb-edu-10B": "000_00000"}
    for name, part in parts.items():
        case.refuse(part, name, **NOWHERE)
    assert not list((case.folder / "cache").glob("**/*.part"))


def missing():
    """Returns what to type where a library is not there."""
    tools = [sys.executable, "-c", "import crc32c, numpy, pooch, pyarrow, tiktoken, tokenizers, tqdm"]
    there = zstd and subprocess.run(tools, capture_output=True).returncode == 0
    return "" if there else "type `pip install -r data/requirements.txt`"


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing()))
