"""What the scripts of this folder answer to a mistake: one sentence that begins with their name, and exit status 2."""

import argparse
import errno
import os
import shlex
import sys


class Problem(Exception):
    """Something the user can mend."""


def regular(path):
    """The path; an OSError where reading it could wait for ever, as a pipe or a device can make it."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def python_here(arguments):
    """A command of the Python that runs, whichever `python` is on the PATH."""
    here = os.path.relpath(sys.executable)
    return f"`{shlex.quote(sys.executable if here.startswith('..') else here)} {arguments}`"


def installs(packages):
    """Returns what to type where packages are missing."""
    return f"type {python_here(f'-m pip install {packages}')}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(f"{message}; --help lists the options")


def answered(name, run):
    """The exit status of run(), which returns one or None."""
    try:
        return run() or 0
    except Problem as problem:
        print(f"{name}: error: {problem}", file=sys.stderr)
        return 2
