"""What the scripts of this folder answer to a mistake: one sentence that begins with their name, and exit status 2."""

import argparse
import sys


class Problem(Exception):
    """Something the user can mend."""


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
