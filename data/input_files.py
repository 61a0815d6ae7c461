"""What data/prepare.py reads from: files that may be packed, and downloads. A failure is a Problem: one sentence."""

import bz2
import errno
import gzip
import hashlib
import http.client
import io
import lzma
import os
import re
import shlex
import urllib.error
import urllib.request
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def here(path):
    """Returns a path of the repository as it is typed in the current folder."""
    return path if Path.cwd() == ROOT else shlex.quote(str(ROOT / path))


MAKE = "make" if Path.cwd() == ROOT else f"make -C {here('')}"
PREPARE = f"{here('.venv/bin/python')} {here('data/prepare.py')}"
VENV = f"type `{MAKE} venv`, and {PREPARE} instead"  # where a package is missing


class Problem(Exception):
    """A mistake that the user can correct. It is reported in one sentence, and the exit status is 2."""


# What could control a terminal, as text_disarm of data/text.c has it, and halves of surrogate pairs.
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def say(line, file=None):
    """Prints a line that may quote what a stranger wrote: names of files, fields and runs."""
    print(CONTROL.sub("?", str(line)), file=file, flush=True)


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


MAX_LINE = 1 << 26  # bytes of a line of JSON, or of a text without white space


def lines_of(stream, most=MAX_LINE):
    """Yields the lines of a stream; None for one of more than `most` bytes, which is never in memory as a whole."""
    while True:
        line = stream.readline(most + 1)
        if not line:
            return
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
        yield None


class ZstdFile(io.RawIOBase):
    """Reads the contents of zstd's frames one after another. A file that ends within a frame raises EOFError."""

    PACKED = 1 << 10  # bytes at a time: they unpack to at most 32 MiB

    def __init__(self, path):
        try:
            import zstandard
        except ImportError:
            raise Problem(f"a .zst file needs zstandard; {VENV}") from None
        self.library, self.file = zstandard, open(path, "rb")
        self.frame, self.packed, self.ready = None, b"", b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.ready:
            if self.frame and self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
            block = self.packed or self.file.read(self.PACKED)
            self.packed = b""
            if not block:
                if self.frame:
                    raise EOFError("it ends within its packed data")
                return 0
            try:
                self.frame = self.frame or self.library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                self.ready = memoryview(self.frame.decompress(block))
            except self.library.ZstdError as error:
                raise OSError(str(error)) from None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self):
        self.file.close()
        super().close()


PACKINGS = (  # the pattern of the first bytes, what opens the file
    (rb"\x1f\x8b", gzip.open),
    (rb"\xfd7zXZ\x00|\x5d\x00\x00", lzma.open),
    (rb"BZh[1-9](1AY&SY|\x17rE8P)", bz2.open),
    (rb"\x28\xb5\x2f\xfd", lambda path: io.BufferedReader(ZstdFile(path), 1 << 20)),
)
OTHERS = (  # the pattern of the first bytes, what such a file is: nothing here unpacks it
    (rb"PK\x03\x04", "a zip archive; unzip it"),
    (rb"7z\xbc\xaf", "a 7z archive; unpack it"),
    (rb"Rar!\x1a", "a rar archive; unpack it"),
    (rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", "lz4 data; unpack it by lz4 -d"),
    (rb"LZIP\x01", "lzip data; unpack it by lzip -d"),
    (rb"x[\x01\x9c\xda]", "zlib data; unpack it"),
    (rb"%PDF-", "a PDF document; convert it by pdftotext"),
    (rb"\x93NUMPY", "a NumPy array, not text"),
)
PACKED_NAME = re.compile(r"\.(xz|lzma|gz|bz2|zst)$", re.IGNORECASE)


def first_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError as error:
        raise damaged(path, error) from None


def unpacker(path):
    """Returns the function that opens a packed file, judged by its contents; None if it is not packed."""
    head = first_bytes(path)
    for signature, opener in PACKINGS:
        if re.match(signature, head):
            return opener
    for signature, what in OTHERS:
        if re.match(signature, head):
            raise Problem(f"{path}: {what}")
    if head and PACKED_NAME.search(str(path)):
        raise damaged(path, "it is not packed, as its name says")
    return None


def open_input(path):
    """Returns a binary stream of the file's contents, unpacked."""
    opener = unpacker(path)
    return opener(path) if opener else open(path, "rb")


def damaged(path, error):
    """Returns the sentence for a file that cannot be read to its end."""
    return Problem(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); fetch or write it again")


# pyarrow's own derive from ValueError and NotImplementedError.
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, NotImplementedError)


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibble"


def download(url, sha256, instead):
    """Downloads a file into the cache, once, and returns its path. `instead` says what to do without a network."""
    path = cache_folder() / re.sub(r"[^\w.-]", "_", url.split("//", 1)[1])
    if not path.exists():
        fetch(url, path, instead)
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    if found.hexdigest() == sha256:
        return path
    path.unlink()
    raise Problem(f"{url}: another file than it was: its SHA-256 is {found.hexdigest()}; {instead}")


def fetch(url, path, instead):
    from tqdm import tqdm

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # another program may download the same
    try:
        with urllib.request.urlopen(url, timeout=30) as response, open(partial, "wb") as file:
            total = int(response.headers.get("Content-Length") or 0)
            with tqdm(total=total or None, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[1], disable=None) as bar:
                while True:
                    block = response.read(1 << 20)
                    if not block:
                        break
                    file.write(block)
                    bar.update(len(block))
            if total and file.tell() != total:
                raise OSError(f"{file.tell()} of {total} bytes came")
        os.replace(partial, path)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise Problem(f"{url} cannot be downloaded ({getattr(error, 'reason', None) or error}): {instead}") from None
    finally:
        partial.unlink(missing_ok=True)
