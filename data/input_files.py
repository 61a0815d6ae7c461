"""What data/prepare.py reads: files that may be packed, downloads, and the documents in them.

A document is what END separates in a text, or one record of the other formats. Long ones come in pieces, so a few MiB
of a file are in memory at a time, whatever it unpacks to. A failure is a Problem: one sentence.
"""

import bz2
import codecs
import contextlib
import gzip
import json
import lzma
import re
import zlib
from pathlib import Path

try:
    from compression import zstd  # of Python 3.14
except ImportError:
    from backports import zstd

from messages import Problem

END = "<|endoftext|>"
BLOCK_BYTES = 1 << 20  # of a text that are read at once
MAX_LINE = 1 << 26  # bytes of a line of JSON
MAX_WORD = 1000  # characters within which a cut waits for the end of a word
MAX_ARRAY = 1 << 28  # bytes of a .json array, which is in memory as a whole
# pyarrow's own derive from ValueError and NotImplementedError.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError, ValueError, NotImplementedError)


@contextlib.contextmanager
def reading(path):
    """Opens a file. What goes wrong while it is read becomes a Problem."""
    try:
        with open(path, "rb") as file:
            yield file
    except READ_ERRORS as error:
        what = getattr(error, "strerror", None) or error
        raise Problem(f"{path}: cannot be read ({what}); fetch or write it again") from None


def innermost(error):
    """Returns what the system said, such as "Connection refused", where libraries wrapped it; else the error itself."""
    said = error
    while error := error.__cause__ or error.__context__:
        said = getattr(error, "strerror", None) or said
    return said


def download(url, sha256, instead):
    """Returns the path of a file in the cache; downloads it if it is not there. `instead` says what to do offline."""
    import pooch
    from tqdm import tqdm

    pooch.get_logger().setLevel("ERROR")
    name = re.sub(r"[^\w.-]", "_", url.split("//", 1)[1])
    with tqdm(total=1, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[1], leave=False, disable=None) as bar:
        get = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20)
        try:
            return pooch.retrieve(url, f"sha256:{sha256}", name, pooch.os_cache("nibble"), downloader=get)
        except (OSError, ValueError) as error:  # a failing connection, and another SHA-256
            raise Problem(f"{url} cannot be downloaded ({innermost(error)}): {instead}") from None


HUGGING_FACE = "https://huggingface.co/datasets/"
STORIES = HUGGING_FACE + "roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/TinyStoriesV2-GPT4-"
FINEWEB = HUGGING_FACE + "HuggingFaceFW/fineweb-edu/resolve/87f09149ef4734204d70ed1d046ddc9ca3f2b8f9/sample/10BT/"
FINEWEB_SHA256 = (
    "b1ba7b2ce4cb5ea6ef42dca40263eabb85f37700d01693a68e9b30a31d78e871",
    "3fcf2dc69cd52503986276d3d2d26a8c356d0f2ea28a0de4fdbda8cf87755693",
    "547ae182d132c9f06b6ce63149567208ea9f57630bfd9b1a2938e504f0c9ebd7",
    "22184e6eb25759ddd97783751ffc73e1705dfa2542e630dae1f2a8bac8ee6ddb",
    "33557ddd87a07a4ae6fcaf7a4789c7b484e5cc0c273ca12a65b74200e6d8748b",
    "e08d79927ecb377786572cd854817c748ceb8880878b1a0eb91abf8c85d505ea",
    "554fa2613c9261d6c9c396caab881de3160175794c6c3e1856bf28a0e9cb9b76",
    "4b7d1f697d4afff7f5f65cb7aa4d83acc6db716da4d46ea23399d0c50608c6e3",
    "a6d9dcc0c72ecd7c7f0173c2d06b3a4249a2ccaa94961469d1a522ca689bbf1a",
    "f836cd3c70b95776699eb6c356b2dbf702816e25dcf39992f5c80a29029d23c3",
    "e5a2eae25f057f0856a10bfae314c6ca8ea8bb08456d2131e9e89b2b8305e2f6",
    "db71cf0425bb3d1813a09f12ff1acd6dabdfb91a2e4f141960254ee5a7f036e7",
    "08b47a3e1c25161f796d2f8dbf99ccf60affdebdcea4910833d0d5783315551f",
    "b393f51fefab26cd6f4c8f65707c1924f6666c4961a0ebebe04bb57f7ec832de",
)
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPORA = {  # name: (training files, validation files), each a URL and the SHA-256 of what it must hold
    "tinyshakespeare": ([(SHAKESPEARE, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")], []),
    "tinystories": (
        [(STORIES + "train.txt", "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443")],
        [(STORIES + "valid.txt", "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d")],
    ),
    "fineweb-edu-10B": ([(f"{FINEWEB}{i:03d}_00000.parquet", FINEWEB_SHA256[i]) for i in range(14)], []),
}


def open_zstd(file):
    return zstd.open(file, options={zstd.DecompressionParameter.window_log_max: 31})


PACKINGS = (  # the pattern of the first bytes, what opens the file
    (rb"\x1f\x8b", gzip.open),
    (rb"\xfd7zXZ\x00|\x5d\x00\x00", lzma.open),
    (rb"BZh[1-9](1AY&SY|\x17rE8P)", bz2.open),
    (rb"\x28\xb5\x2f\xfd", open_zstd),
)


def unpacked(file):
    """Returns a binary stream of the contents of an open file, whose first bytes tell how it is packed."""
    head = file.peek(16)
    return next((opener(file) for signature, opener in PACKINGS if re.match(signature, head)), file)


def input_kind(path):
    """Returns "txt", "jsonl", "json" or "parquet" by the name's ending. A file without one holds text."""
    name = re.sub(r"\.(xz|lzma|gz|bz2|zst)$", "", Path(path).name.lower())
    ending = Path(name).suffix[1:] or "txt"
    if ending in ("txt", "jsonl", "json") or (ending == "parquet" and name == Path(path).name.lower()):
        return ending
    raise Problem(
        f"{path}: give a .txt, .jsonl, .json (each also .gz, .xz, .bz2 or .zst) or .parquet file, "
        f"or one of {', '.join(CORPORA)}"
    )


class Notes:
    """What is reported at the end: the first documents that cannot be used and are left out, and other notices."""

    def __init__(self):
        self.left_out, self.first, self.notices = 0, [], []

    def leave_out(self, sentence):
        self.left_out += 1
        self.first += [sentence] if len(self.first) < 5 else []


# The longest beginning of a text behind which a cut changes no token: GPT-2's pattern never matches across the border
# from a character that is not white space to white space, and never looks back.
SAFE_CUT = re.compile(r".*\S(?=[ \n])", re.DOTALL)
# The shortest such beginning, or what is before END.
WORD_END = re.compile(rf".*?(\S(?=[ \n])|(?={re.escape(END)}))", re.DOTALL)
LINE_END = re.compile(r"(\r?\n)?")


def cut(blocks, most):
    """Yields (whether it begins a document, text, lines before it) of the documents in a text, which comes in blocks.

    END begins a document, and a line end behind it is dropped. A document of more than `most` characters comes in
    pieces of about that. They have the tokens of the whole where a word ends, before a blank or a line end, within each
    `most` characters, or MAX_WORD if that is more. A document of white space alone is skipped.
    """
    blocks, text, at, more, begins, lines = iter(blocks), "", 0, True, True, 0
    longest = max(most, MAX_WORD)
    while more or at < len(text):
        if more and len(text) - at < 2 * longest:  # so a piece that is cut off has an END behind it as a whole
            block = next(blocks, None)
            more, text, at = block is not None, text[at:] + (block or ""), 0
            continue
        end = text.find(END, at, at + most + len(END))
        if end < 0 and len(text) - at <= most:
            end = len(text)
        elif end < 0:
            safe = SAFE_CUT.match(text, at, at + most + 1) or WORD_END.match(text, at, at + longest + len(END))
            end = min(safe.end() if safe else len(text), at + longest)
        separated, piece = text.startswith(END, end), text[at:end]
        if piece.strip() or not begins:
            yield begins, piece, lines
            begins = False
        if separated:
            begins, end = True, LINE_END.match(text, end + len(END)).end()
        lines += text.count("\n", at, end)
        at = end


def read_text(stream, path, most, notes):
    """Yields (whether it begins a document, text) of a .txt file. A piece that is not UTF-8 is left out."""
    head = stream.peek(512)[:512]
    if b"\0" in head:
        raise Problem(f"{path}: binary, not text; unpack an archive, or type iconv -f UTF-16 -t UTF-8")
    if head.startswith(b'{"'):
        notes.notices.append(f"{path} begins like JSON lines; name it .jsonl to take the texts alone")
    blocks = codecs.iterdecode(iter(lambda: stream.read(BLOCK_BYTES), b""), "utf-8-sig", "surrogateescape")
    broken = False
    for begins, text, lines in cut(blocks, most):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # a byte that is not UTF-8 was read as half of a surrogate pair
            line, byte, broken = 1 + lines + text.count("\n", 0, error.start), ord(text[error.start]) - 0xDC00, True
            notes.leave_out(f"{path}: line {line}: not UTF-8 (byte 0x{byte:02x}); type iconv -f LATIN1 -t UTF-8, or what it is")
            continue
        yield begins or broken, text
        broken = False


def lines_of(stream, path, most):
    """Yields (place, line) of the lines that are not blank. In place of one of more than `most` bytes there is a
    ValueError."""
    for number, line in enumerate(iter(lambda: stream.readline(most + 1), b""), 1):
        place = f"{path}: line {number}"
        if len(line) > most:
            while line and not line.endswith(b"\n"):
                line = stream.readline(BLOCK_BYTES)
            yield place, ValueError(f"longer than {most >> 20} MiB; write one record a line")
        elif line.strip():
            yield place, line


def read_json(stream, path):
    """Yields (place, record) of the elements of an array, or else (place, line)."""
    if not stream.peek(512).lstrip(codecs.BOM_UTF8 + b" \r\n\t").startswith(b"["):
        yield from lines_of(stream, path, MAX_LINE)
        return
    text = stream.read(MAX_ARRAY + 1)
    if len(text) > MAX_ARRAY:
        raise Problem(f"{path}: an array of more than {MAX_ARRAY >> 20} MiB; write a record a line (jq -c '.[]')")
    try:
        # A byte that is not UTF-8 becomes half of a surrogate pair, for which text_of refuses its record alone.
        records = json.loads(text.decode(json.detect_encoding(text), "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: not JSON ({error})") from None
    for number, record in enumerate(records, 1):
        yield f"{path}: element {number}", record


def read_parquet(file, path, field):
    """Yields (place, record) of the rows. In place of a text that is not UTF-8 there is a ValueError."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    names, number = table.schema_arrow.names, 0
    if field not in names:
        raise Problem(f'{path}: there is no field "{field}" but {", ".join(names)}: choose one with --field')
    for batch in table.iter_batches(batch_size=1024, columns=[field]):
        for value in batch.column(0):
            number += 1
            try:
                record = {field: value.as_py()}
            except ValueError as error:
                record = error
            yield f"{path}: row {number}", record


def text_of(record, field):
    """Returns the text of a record, which is JSON's line if it is bytes. Raises ValueError with a reason, which may stand
    in place of the record."""
    if isinstance(record, ValueError):
        raise record
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f'not a JSON object with a field "{field}"')
    if field not in record:
        found = ", ".join(list(record)[:8]) or "no field at all"
        raise ValueError(f'there is no field "{field}" but {found}: choose one with --field')
    if not isinstance(record[field], str):
        raise ValueError(f'field "{field}" is not a text')
    record[field].encode("utf-8")  # half of a surrogate pair, which JSON can spell, raises a ValueError
    return record[field]


def read_records(records, field, most, notes):
    """Yields (whether it begins a document, text) of the field in each record. One without a text is left out."""
    for place, record in records:
        try:
            text = text_of(record, field)
        except ValueError as error:
            notes.leave_out(f"{place}: {error}")
            continue
        for begins, piece, _ in cut([text], most):
            yield begins, piece


def read_inputs(paths, field, most, notes, bar):
    """Yields (whether it begins a document, text) of all files, as cut() gives them. Moves the progress bar."""
    for path in paths:
        kind, before = input_kind(path), bar.n
        with reading(path) as file:
            if kind == "txt":
                pieces = read_text(unpacked(file), path, most, notes)
            else:
                records = read_parquet(file, path, field) if kind == "parquet" else read_json(unpacked(file), path)
                pieces = read_records(records, field, most, notes)
            for piece in pieces:
                yield piece
                bar.update(before + file.tell() - bar.n)
