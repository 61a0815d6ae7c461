"""Reads a sweep file: returns its list of runs, or says in which line something is wrong.

A sweep is TOML. [base] holds options of ./train that all runs share; each [[run]] adds its own. A list is an axis: the
entry stands for the product of its axes. `each`, a list of tables, makes an entry of each table and what stands beside it.
What differs in the seed alone is one configuration, known by its name. Nothing here needs more than Python's own library.
"""

import difflib
import errno
import hashlib
import itertools
import json
import math
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from problem import Problem

# Of one start of the program, or set by the instrument itself.
RESERVED = "config run resume sample dry-run profile fit list-formats list-presets completion version help".split()
# They change neither weights nor losses: a finished run stays one when they change.
NEUTRAL = ("print-every", "save-every", "keep")
# Where they lie may differ from machine to machine; what they hold is compared instead.
PATHS = ("data", "val")
STUDY_KEYS = ("title", "baseline", "picture", "keep-checkpoints", "seconds", "base", "run")
RUN_KEYS = ("name", "group", "baseline", "turn", "each")
MOST_RUNS = 10000  # of one [[run]]
SEED = re.compile(r"[0-9]{1,30}")
USUAL = {"sample-every": "0", "save-every": "0", "keep": "1"}


def slug(name, seed):
    """Returns a readable file name, which differs for each name."""
    text = re.sub(r"[^A-Za-z0-9.+=-]+", "_", name)[:120]
    if text != name:
        text += "_" + hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{text}_s{seed}"


@dataclass
class Run:
    name: str  # of its configuration
    seed: int
    options: dict  # option of ./train: value as typed, without the seed
    group: str
    baseline: str  # name of the configuration it is compared to
    turn: int  # lower ones run first
    given: dict  # the options that [[run]] gives, not [base], with the seed, as in the file
    place: object = field(repr=False)  # place(KEY): the FILE:LINE or --set that gives an option or key; place(): [[run]]'s
    order: int = 0  # in the file
    plan: dict = field(default_factory=dict)  # what ./train --dry-run says: tokens, ...

    @property
    def own(self):
        return set(self.given) - {"seed"}

    @property
    def label(self):
        return f"{self.name} seed {self.seed}"

    def slug(self):
        return slug(self.name, self.seed)

    def options_key(self):
        """Returns a key that is the same for runs of the same options, wherever their data lies."""
        same = {k: v for k, v in self.options.items() if k not in NEUTRAL + PATHS}
        return digest({**same, "seed": str(self.seed)})


@dataclass
class Sweep:
    path: Path
    name: str
    title: str
    baseline: str
    keep: bool  # checkpoints stay
    picture: list  # names of the configurations in picture.png and bytes.png, which a README can show
    runs: list  # in the order in which they run
    seconds: int = 0  # of training that a run has, whatever its speed; 0: --steps says how long it is

    def configurations(self):
        """Returns {name: its runs} in the order of the file."""
        result = {}
        for run in sorted(self.runs, key=lambda run: run.order):
            result.setdefault(run.name, []).append(run)
        return result


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def value_text(value, where, key):
    """Returns a value as ./train is given it. Python itself refuses to write integers of more than 4300 digits."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        shown = json.dumps(value, default=str) if isinstance(value, bool) else f"a {type(value).__name__}"
        raise Problem(f"{where}: {key} is {shown}; give a text, a number or a list of these")
    if isinstance(value, int) and abs(value) >= 1 << 128:
        raise Problem(f"{where}: {key} is an integer of more than 128 bits; give a smaller one")
    if isinstance(value, str) and "\0" in value:
        raise Problem(f"{where}: {key} holds a NUL character; leave it out")
    return value if isinstance(value, str) else repr(value)


def is_zero(text):
    """Returns whether ./train reads the text as 0: so it does 00."""
    try:
        return int(text) == 0
    except ValueError:
        return False


def nearest(name, names):
    close = difflib.get_close_matches(name, names, 1, 0.8)
    return f"; did you mean {close[0]}?" if close else ""


class Reader:
    """Turns the text of a sweep into runs. A block is a pair of lines, from a header to the next."""

    def __init__(self, path, text, overrides, known):
        self.path, self.overrides, self.known = path, overrides, known
        self.lines = lines = text.split("\n")
        try:
            self.data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            raise Problem(f"{path}:{at[1] if at else len(lines)}: not TOML: {error}") from None
        except (ValueError, RecursionError) as error:
            long = [n for n, line in enumerate(lines, 1) if re.search(r"[\d_]{4300}", line)]
            why = str(error).split(";")[0]
            raise Problem(f"{path}:{long[0] if long else 1}: cannot be read: {why}; give a smaller value") from None
        heads = [n for n, line in enumerate(lines, 1) if re.match(r"\s*\[\[?\s*[\w\"]", line)]
        ends = [*heads[1:], len(lines) + 1]
        self.blocks = [(n, end) for n, end in zip(heads, ends) if re.match(r"\s*\[\[", lines[n - 1])]
        self.base = next((pair for pair in zip(heads, ends) if "base" in lines[pair[0] - 1]), (1, 1))

    def place(self, block=None, key="", value=None):
        """Returns the line of a key or, behind it, of a value: in the block or [base], for None where it is first; tomllib
        does not tell. A key that is not found has the block's first line."""
        if key in self.overrides:
            return f"--set {key}={self.overrides[key]}"
        begin, end = block or (1, len(self.lines) + 1)
        wanted = rf'(^|[{{,\[])\s*"?{re.escape(key)}"?\s*[=\]]'
        for first, last in ((begin, end), self.base):
            found = [n for n in range(first, last) if key and re.search(wanted, self.lines[n - 1])]
            if found:
                is_value = rf'["\'\s\[=,{{]{re.escape(value or "")}["\'\s\],}}=]'
                after = (n for n in range(found[0], last) if value and re.search(is_value, self.lines[n - 1] + " "))
                return f"{self.path}:{next(after, found[0])}"
        return f"{self.path}:{begin}"

    def key_checked(self, place, key, own=()):
        """Refuses what is neither a key of the sweep nor an option of ./train."""
        if key in own or (self.known is None or key in self.known) and key not in RESERVED:
            return
        if key in RESERVED:
            raise Problem(f"{place}: --{key} is the sweep's own affair; leave it out")
        names = list(own) + [name for name in self.known if name not in RESERVED]
        raise Problem(f"{place}: unknown option {key}{nearest(key, names)} (./train --help lists all)")

    def shared(self):
        """Returns the options of [base]."""
        options = {}
        for key, value in self.data.get("base", {}).items():
            place = self.place(self.base, key)
            self.key_checked(place, key)
            if isinstance(value, list):
                raise Problem(f"{place}: {key} is a list; a list belongs into a [[run]]")
            options[key] = value_text(value, place, key)
        for key, value in self.overrides.items():
            self.key_checked(f"--set {key}={value}", key)
            if key == "seed" and not SEED.fullmatch(value):
                raise Problem(f"--set seed={value}: give a whole number")
        return options

    def entries(self, block, entry):
        """Yields an entry for each table of `each`, or the entry itself."""
        rows = entry.get("each", [{}])
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise Problem(f'{self.place(block, "each")}: each is a list of tables, such as each = [{{m = "dyn8", v = "udyn8"}}]')
        for row in rows:
            both = {key: value for key, value in entry.items() if key != "each"} | row
            yield from self.entries(block, both) if "each" in row else [both]

    def axes(self, block, entry):
        """Returns [(option, value), ...] for each axis of an entry, the slowest first."""
        result = []
        for key in (key for key in entry if key not in RUN_KEYS):
            values = entry[key] if isinstance(entry[key], list) else [entry[key]]
            self.key_checked(self.place(block, key), key, RUN_KEYS)
            if not values:
                raise Problem(f"{self.place(block, key)}: {key} is an empty list; give it a value or leave it out")
            result.append([(key, value_text(v, self.place(block, key), key)) for v in values])
        return result

    def name(self, block, entry, options):
        """Returns the name of a configuration, with {option} replaced by its value."""
        template = entry.get("name", " ".join("{%s}" % k for k in entry if k not in RUN_KEYS + ("seed",)) or "run")
        if not template.strip():
            raise Problem(f"{self.place(block, 'name')}: name is a text, such as name = \"m {{m}}\"")

        def put(match):
            if match[1] not in options:
                raise Problem(f"{self.place(block, 'name')}: {match[0]} in the name is no option of this run")
            return options[match[1]]

        return re.sub(r"\{([\w-]+)\}", put, template)

    def runs(self, block, entry, base):
        """Yields the runs of an entry."""
        for key in ("name", "group", "baseline"):
            if not isinstance(entry.get(key, "-"), str) or not entry.get(key, "-").isprintable():
                raise Problem(f"{self.place(block, key)}: {key} is a text of one line")
        axes = self.axes(block, entry)
        if math.prod(map(len, axes)) > MOST_RUNS:
            raise Problem(f"{self.place(block)}: {math.prod(map(len, axes))} runs, over {MOST_RUNS}; shorten a list")
        points = [dict(point) for point in itertools.product(*axes)]
        seeds = list(dict.fromkeys(point.get("seed", base.get("seed", "1")) for point in points))
        for seed in seeds:
            if not SEED.fullmatch(seed):
                raise Problem(f"{self.place(block, 'seed', seed)}: seed is {seed[:40]}; give whole numbers")
        turn = entry.get("turn", 1)
        turns = turn if isinstance(turn, list) else [turn] * len(seeds)
        if len(turns) != len(seeds) or not all(type(t) is int and abs(t) < 1 << 128 for t in turns):
            say = f"turn is a whole number, or one for each of the {len(seeds)} seeds"
            raise Problem(f"{self.place(block, 'turn')}: {say}")
        for point in points:
            options = {**USUAL, **base, **point, **self.overrides}
            if is_zero(options.get("val-every", "")):
                raise Problem(f"{self.place(block, 'val-every')}: val-every is 0; a run is told by its last validation")
            seed = options.pop("seed", "1")
            yield Run(
                name=self.name(block, entry, {**options, "seed": seed}),
                seed=int(seed),
                options={k: v for k, v in options.items() if v != ""},
                group=entry.get("group", "runs"),
                baseline=entry.get("baseline", self.data["baseline"]),
                turn=dict(zip(seeds, turns)).get(seed, 1),
                given=point,
                place=lambda key="", point=point: self.place(block, key, point.get(key)),
            )

    def check_kinds(self):
        """Checks the keys above [base], and that each [[run]] is a table."""
        data = self.data
        for key in data:
            if key not in STUDY_KEYS:
                hint = f"{nearest(key, STUDY_KEYS)}; options of ./train go under [base]"
                raise Problem(f"{self.place(None, key)}: unknown key {key}{hint}")
        for key, kind, what in (
            ("title", str, "a text"),
            ("keep-checkpoints", bool, "true or false"),
            ("picture", list, "a list of at most ten names"),
            ("seconds", int, "a whole number of seconds"),
        ):
            if not isinstance(data.get(key, kind()), kind):
                raise Problem(f"{self.place(None, key)}: {key} is {what}")
        picture = data.get("picture", [])
        if len(picture) > 10 or not all(isinstance(name, str) for name in picture):
            raise Problem(f"{self.place(None, 'picture')}: picture is a list of at most ten names")
        if not isinstance(data.get("base", {}), dict) or not isinstance(data.get("run", []), list):
            raise Problem(f"{self.path}:1: write [base] once and [[run]] for each run")
        if not all(isinstance(entry, dict) for entry in data.get("run", [])) or len(data.get("run", [])) > len(self.blocks):
            raise Problem(f"{self.place(None, 'run')}: write [[run]] for each run, with its options below")
        if not isinstance(data.get("baseline"), str):
            raise Problem(f'{self.path}:1: there is no baseline; add a line such as baseline = "adamw32" above [base]')

    def sweep(self):
        self.check_kinds()
        data, base = self.data, self.shared()
        tables = list(zip(self.blocks, data.get("run", [])))
        runs = [run for at, table in tables for entry in self.entries(at, table) for run in self.runs(at, entry, base)]
        if not runs:
            raise Problem(f"{self.path}:{len(self.lines)}: there is no [[run]] in it; add one")
        self.check_names(runs)
        for order, run in enumerate(runs):
            run.order = order
        runs.sort(key=lambda run: run.turn)
        keep, picture = data.get("keep-checkpoints", False), data.get("picture", [])
        title = data.get("title", self.path.stem)
        return Sweep(self.path, self.path.stem, title, data["baseline"], keep, picture, runs, data.get("seconds", 0))

    def check_names(self, runs):
        """A name is one configuration, with one group and baseline, a configuration has one name, and baselines are
        among them."""
        names, keys = {}, {}
        for run in runs:
            first, twin = names.setdefault(run.name, run), keys.setdefault(run.options_key(), run)
            other = twin if twin is not run else first
            typed = [key for key in self.overrides if run.given.get(key) != other.given.get(key)]
            differ = [k for k in {**first.options, **run.options} if first.options.get(k) != run.options.get(k)]
            if typed and (twin is not run or differ):
                raise Problem(f"{run.place(typed[0])}: runs of {run.name} are told apart by it ({run.place()}); leave it out")
            at, known = run.place("name"), first.place()
            if differ:
                raise Problem(f"{at}: {run.name} is already the name of runs with another {differ[0]} ({known})")
            if twin is not run:
                same = f"{run.label} has the same options as {twin.label} of {twin.place()}"
                raise Problem(f"{at}: {same}; leave one out")
            for key in ("group", "baseline"):
                its = getattr(first, key)
                if its != getattr(run, key):
                    raise Problem(f"{run.place(key)}: {run.name} has another {key} already, {its} ({known}); write that")
        for run in runs:
            own = run.baseline != self.data["baseline"]
            place = run.place("baseline") if own else self.place(None, "baseline")
            if run.baseline not in names:
                raise Problem(f"{place}: baseline {run.baseline} is not the name of a run" + nearest(run.baseline, names))
            if own and run.name == self.data["baseline"]:
                raise Problem(f"{place}: {run.name} is the baseline of the whole sweep and has no other; leave this out")


def load(path, overrides=None, known=None):
    """Returns the Sweep of a file. `known`: names of ./train's options, or None if ./train cannot be asked."""
    path = Path(path)
    try:
        if path.is_fifo() or path.is_char_device():  # reading it could wait for ever
            raise OSError(errno.EINVAL, "not a regular file")
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); name a sweep file"
        ) from None
    return Reader(path, text, overrides or {}, known).sweep()
