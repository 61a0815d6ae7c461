"""What data/prepare.py reads: files that may be packed, downloads, and the documents in them.

Each reader yields pieces of documents and holds a few MiB of them at a time, whatever the file unpacks to. A failure is
a Problem: one sentence.
"""

import array
import bz2
import collections
import errno
import gzip
import json
import lzma
import os
import re
import zlib
from pathlib import Path

try:
    from compression import zstd  # of Python 3.14
except ImportError:
    from backports import zstd

from messages import Problem


def make_folder(folder, out):
    """Makes the folder that --out OUT asks for, and those above it. The folder may exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"--out {out}: the folder cannot be made ({error.strerror}); give another --out") from None


def read_own(path):
    """Returns the bytes of a file that will be copied to where it may be published. A link may lead to a secret, so it
    follows none but those in the cache of Hugging Face's hub, to ../../blobs/HASH."""
    path = Path(path)
    if path.is_symlink() and re.fullmatch(r"\.\./\.\./blobs/[0-9a-f]+", os.readlink(path)):
        path = path.parent / os.readlink(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise damaged(path, error) from None
        raise Problem(f"{path}: a link, whose contents would be published; put the file itself there") from None


END = "<|endoftext|>"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 20  # a longer document is encoded in pieces of about this size
MAX_ARRAY = 1 << 28  # bytes of a .json array, which is in memory as a whole
MAX_LINE = 1 << 26  # bytes of a line of JSON, or of a text without white space


def lines_of(stream, most=MAX_LINE):
    """Yields the lines of a stream; None for one of more than `most` bytes, which is never in memory as a whole."""
    while line := stream.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
        yield None


def open_zstd(path):
    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: 31})


PACKINGS = (  # the pattern of the first bytes, what opens the file
    (rb"\x1f\x8b", gzip.open),
    (rb"\xfd7zXZ\x00|\x5d\x00\x00", lzma.open),
    (rb"BZh[1-9](1AY&SY|\x17rE8P)", bz2.open),
    (rb"\x28\xb5\x2f\xfd", open_zstd),
)
PACKED_NAME = re.compile(r"\.(xz|lzma|gz|bz2|zst)$", re.IGNORECASE)
# pyarrow's own derive from ValueError and NotImplementedError.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError, ValueError, NotImplementedError)


def damaged(path, error):
    """Returns the sentence for a file that cannot be read to its end."""
    return Problem(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); fetch or write it again")


def look(path):
    """Returns (what opens the file, whether it is packed, whether it is .parquet), judged by its first bytes."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise damaged(path, error) from None
    for signature, opener in PACKINGS:
        if re.match(signature, head):
            return opener, True, False
    if head and PACKED_NAME.search(str(path)):
        raise damaged(path, "it is not packed, as its name says")
    return (lambda path: open(path, "rb")), False, head.startswith(b"PAR1")


def open_input(path):
    """Returns a binary stream of the file's contents, unpacked."""
    return look(path)[0](path)


def input_kind(path):
    """Returns the kind of the contents by the name's ending. Packed files of other names, or without one, hold text."""
    _, packed, parquet = look(path)
    ending = "parquet" if parquet else Path(PACKED_NAME.sub("", Path(path).name).lower()).suffix[1:]
    if ending in ("txt", "jsonl", "json") or (ending == "parquet" and not packed):
        return ending
    if ending != "parquet" and (packed or not ending):
        return "txt"
    raise Problem(
        f"{path}: give a .txt, .jsonl, .json (each also .gz, .xz, .bz2 or .zst) or .parquet file, "
        f"or one of {', '.join(CORPORA)}"
    )


def download(url, sha256, instead):
    """Downloads a file into the cache, unless it is there, and returns its path. `instead` says what to do without a
    network."""
    import pooch
    from tqdm import tqdm

    pooch.get_logger().setLevel("ERROR")
    name = re.sub(r"[^\w.-]", "_", url.split("//", 1)[1])
    with tqdm(total=1, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[1], leave=False, disable=None) as bar:
        get = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20)
        try:
            return pooch.retrieve(url, f"sha256:{sha256}", name, pooch.os_cache("nibble"), downloader=get)
        except (OSError, ValueError) as error:  # a failing connection, and another SHA-256
            raise Problem(f"{url} cannot be downloaded ({error}): {instead}") from None


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


# A run of consecutive bytes of one document (kind "text"), one line of a .jsonl file ("line"; "long" without the line if
# that is too long), one element of a .json array ("element"), or one row of a .parquet file ("row", or "null").
# place: the line, element or row that it begins at, for messages.
Piece = collections.namedtuple("Piece", "path kind place begins data")


def place_of(piece, lines=0):
    """Returns where a piece is, or what is so many lines after its beginning."""
    what = {"element": "element", "row": "row", "null": "row"}.get(piece.kind, "line")
    return f"{piece.path}: {what} {piece.place + lines}"


def open_parquet(path, field):
    """Returns the file, the size of its column of text and the number of rows."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        schema = file.schema_arrow
    except READ_ERRORS as error:
        raise damaged(path, error) from None
    if field not in schema.names:
        raise Problem(f'{path}: there is no field "{field}" but {", ".join(schema.names)}: choose one with --field')
    kind = schema.field(field).type
    if not re.fullmatch(r"(large_)?string(_view)?|null|dictionary<values=string.*", str(kind)):
        raise Problem(f'{path}: field "{field}" is {kind} and not a text; choose another with --field')
    column, groups = file.schema.names.index(field), map(file.metadata.row_group, range(file.num_row_groups))
    return file, sum(group.column(column).total_uncompressed_size for group in groups), file.metadata.num_rows


def safe_cut(data, start):
    """Returns a position in data, from start on, where both parts encode to the tokens of the whole; 0: there is none.

    GPT-2's pattern never matches across the border from a character that is not white space to white space, and never
    looks back, so a cut in front of a space or line feed that follows such a character is exact.
    """
    for match in re.compile(rb"[^\s](?=[ \n])").finditer(data, start):
        before = bytes(data[max(0, match.end() - 4) : match.end()]).decode("utf-8", "ignore")
        if before and not before[-1].isspace():
            return match.end()
    return 0


def is_utf8(data):
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def read_text(path):
    """Yields the pieces of a .txt file, without lines `<|endoftext|>` and documents of white space.

    A piece that is not UTF-8 will be left out, so the one after it begins a document.
    """
    separator = END.encode()
    data, begins, place, line_number, line_starts, searched = bytearray(), True, 1, 1, True, 0
    with open_input(path) as stream:
        while True:
            line = stream.readline(PIECE_BYTES)
            if line_number == 1 and line_starts:
                line = line.removeprefix(BYTE_ORDER_MARK)
                if b"\0" in line[:512]:
                    raise Problem(f"{path}: binary, not text; unpack an archive, or type iconv -f UTF-16 -t UTF-8")
            ends = line_starts and line.rstrip(b"\r\n") == separator
            if (ends or not line) and data:
                if not begins or data.strip():
                    yield Piece(path, "text", place, begins, bytes(data))
                data, searched = bytearray(), 0
            if not line:
                return
            line_starts = line.endswith(b"\n")
            line_number += line_starts
            if ends:
                begins, place = True, line_number
                continue
            data += line
            if len(data) >= PIECE_BYTES:
                cut = safe_cut(data, max(searched, PIECE_BYTES // 2))
                if not cut and len(data) >= MAX_LINE:  # no text has such a word: cut it before its last character
                    cut = next((at for at in range(len(data) - 1, len(data) - 5, -1) if data[at] & 0xC0 != 0x80), len(data))
                searched = max(0, len(data) - 4)
                if cut:
                    piece = Piece(path, "text", place, begins, bytes(data[:cut]))
                    yield piece
                    place += data.count(b"\n", 0, cut)
                    data, begins, searched = data[cut:], not is_utf8(piece.data), 0


def read_jsonl(path):
    with open_input(path) as stream:
        for number, line in enumerate(lines_of(stream), 1):
            if line is None:
                yield Piece(path, "long", number, True, b"")
                continue
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield Piece(path, "line", number, True, line)


def read_parquet(path, field):
    row = 0
    for batch in open_parquet(path, field)[0].iter_batches(batch_size=1024, columns=[field]):
        for value in batch.column(0):
            row += 1
            try:
                text = value.as_py()
                data = b"" if text is None else text.encode()
            except UnicodeDecodeError:  # is told of when the piece is encoded
                data = text = value.as_buffer().to_pybytes()
            if text is None or data:
                yield Piece(path, "null" if text is None else "row", row, True, data)


def read_json(path):
    """Yields the elements of an array, which is read as a whole. Any other file has one document per line."""
    with open_input(path) as stream:
        if not stream.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from read_jsonl(path)
            return
    with open_input(path) as stream:
        text = stream.read(MAX_ARRAY + 1)
    if len(text) > MAX_ARRAY:
        raise Problem(f"{path}: an array of more than {MAX_ARRAY >> 20} MiB; write a document a line (jq -c '.[]')")
    try:
        records = json.loads(text.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape"))
        for number, record in enumerate(records, 1):
            try:  # a bad byte is kept, since its element alone is left out
                data = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:  # half of a surrogate pair that JSON spelled
                data = json.dumps(record).encode()
            yield Piece(path, "element", number, True, data)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: not JSON ({error})") from None


def read_inputs(paths, field):
    readers = {"txt": read_text, "json": read_json, "jsonl": read_jsonl, "parquet": lambda path: read_parquet(path, field)}
    for path in paths:
        try:
            yield from readers[input_kind(path)](path)
        except READ_ERRORS as error:
            raise damaged(path, error) from None


def measure(paths, field):
    """Returns what the draw of validation documents needs: all bytes, how many documents, the sizes in .txt."""
    total, documents, sizes = 0, 0, array.array("q")
    for path in paths:
        if input_kind(path) == "parquet":
            _, size, rows = open_parquet(path, field)
            total, documents = total + size, documents + rows
            continue
        for piece in read_inputs([path], field):
            total += len(piece.data)
            documents += piece.begins
            if piece.kind == "text" and piece.begins:
                sizes.append(0)
            if piece.kind == "text":
                sizes[-1] += len(piece.data)
    return total, documents, sizes


def text_of(piece, field):
    """Returns the text of a piece, None for a null. A byte that is not UTF-8 becomes half of a surrogate pair. Raises a
    Problem if there is no text."""
    if piece.kind == "null":
        return None
    where = place_of(piece)
    if piece.kind == "long":
        raise Problem(f"{where}: longer than {MAX_LINE >> 20} MiB")
    text = piece.data.decode("utf-8", "surrogateescape")
    if piece.kind in ("text", "row"):
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise Problem(f'{where}: not a JSON object with a field "{field}"')
    if field not in record:
        found = ", ".join(list(record)[:8]) or "no field at all"
        raise Problem(f'{where}: there is no field "{field}" but {found}: choose one with --field')
    if record[field] is not None and not isinstance(record[field], str):
        raise Problem(f'{where}: field "{field}" is not a text')
    return record[field]


def holds_records(path, field):
    """Returns whether the first line of a text is a JSON object with this field."""
    try:
        with open_input(path) as stream:
            record = json.loads(stream.readline(PIECE_BYTES))
    except (*READ_ERRORS, RecursionError):
        return False
    return isinstance(record, dict) and field in record
