"""How the scripts of this folder report a mistake: in one sentence that begins with their name, with exit status 2."""

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import sys
from pathlib import Path


sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from messages import Problem, say


def write_whole(path, contents):
    """Writes a file of a text or bytes as a whole or not at all."""
    contents = contents.encode() if isinstance(contents, str) else contents
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(contents)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_name(name):
    """Returns a readable name for a file, which differs for each name."""
    text = re.sub(r"[^A-Za-z0-9.+=-]+", "_", name)[:120]
    return text if text == name else f"{text}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"


def here(path):
    """Returns a path as it is typed in the current folder."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)


def installs(packages):
    """Returns what to type where packages, or those of `-r FILE` in the repository, are missing, for the Python that runs."""
    if packages.startswith("-r "):
        packages = f"-r {here(Path(__file__).resolve().parents[1] / packages[3:])}"
    return f"type `{here(sys.executable)} -m pip install {packages}`"


@contextlib.contextmanager
def needed(name, packages):
    """with needed("plot", "torch"): its imports end the script of this name where a package is missing."""
    try:
        yield
    except ImportError as missing:
        say(f"{name}: error: {missing}; {installs(packages)}", sys.stderr)
        sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(f"{message}; --help lists the options")


def answered(name, run):
    """Calls run(), which returns an exit status or None. Returns the exit status and reports a Problem. Ctrl-C: 130."""
    try:
        return run() or 0
    except Problem as problem:
        say(f"{name}: error: {problem}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads what is printed, nor what is left of it at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # the disk is full, a folder cannot be written
        say(f"{name}: error: {error.filename or 'writing'}: {error.strerror or error}", sys.stderr)
        return 2
