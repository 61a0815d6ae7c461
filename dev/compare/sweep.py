"""Reads a sweep file: returns its list of runs, or says in which line something is wrong.

A sweep is TOML. [base] holds options of ./train that all runs share; each [[run]] adds its own. A list is an axis: the
entry stands for the product of its axes, and `each`, a list of tables, is one axis of several options at once. What
differs in the seed alone is one configuration, known by its name. Nothing here needs more than Python's own library.
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
RESERVED = "run resume sample dry-run profile fit list-formats list-presets completion version help".split()
# They change neither weights nor losses: a finished run stays one when they change.
NEUTRAL = ("print-every", "save-every", "keep")
# Where they lie may differ from machine to machine; what they hold is compared instead.
PATHS = ("data", "val")
STUDY_KEYS = ("title", "baseline", "picture", "keep-checkpoints", "base", "run")
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
    places: dict = field(repr=False)  # option or key: the FILE:LINE or --set that gives it; "": that of [[run]]
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
    picture: list  # names of the configurations in presets.png, which a README can show at page width
    runs: list  # in the order in which they run

    def configurations(self):
        """Returns {name: its runs} in the order of the file."""
        result = {}
        for run in sorted(self.runs, key=lambda run: run.order):
            result.setdefault(run.name, []).append(run)
        return result


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Lines:
    """Finds the lines of a TOML file's keys, which tomllib does not tell."""

    def __init__(self, text):
        self.lines = text.split("\n")
        self.tables = {("", 0): 1}  # (name, its how-many-eth): line of its header
        self.keys = {}
        seen, table = {}, ("", 0)
        for number, line in enumerate(self.lines, 1):
            header = re.match(r"\s*\[\[?\s*([\w.\"-]+)\s*\]", line)
            key = re.match(r"\s*\"?([\w-]+)\"?\s*=", line)
            if header:
                name = header[1].strip('"')
                seen[name] = seen.get(name, -1) + 1
                table = (name, seen[name])
                self.tables[table] = number
            elif key:
                self.keys.setdefault((table, key[1]), number)

    def of(self, table, key, value=None):
        """Returns the line of a key or table or, in a list over several lines, of the value or key in it."""
        header = (key, 0) if table == ("", 0) and (key, 0) in self.tables else table
        line = self.keys.get((table, key), self.tables.get(header, 1))
        others = [n for (t, k), n in self.keys.items() if n > line] + [n for n in self.tables.values() if n > line]
        for number in range(line, min(others, default=len(self.lines) + 1)):
            if value is not None and re.search(
                rf'["\'\s\[=,{{]{re.escape(value)}["\'\s\],}}=]', self.lines[number - 1] + " "
            ):
                return number
        return line


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
    """Turns the parsed TOML into runs."""

    def __init__(self, path, text, overrides, known):
        self.path, self.overrides, self.known = path, overrides, known
        self.lines = Lines(text)
        try:
            self.data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            raise Problem(f"{path}:{at[1] if at else len(self.lines.lines)}: not TOML: {error}") from None
        except (ValueError, RecursionError) as error:
            long = [n for n, line in enumerate(self.lines.lines, 1) if re.search(r"[\d_]{4300}", line)]
            why = str(error).split(";")[0]
            raise Problem(f"{path}:{long[0] if long else 1}: cannot be read: {why}; give a smaller value") from None

    def where(self, table, key, value=None):
        return f"{self.path}:{self.lines.of(table, key, value)}"

    def key_checked(self, place, key, own=()):
        """Refuses what is neither a key of the sweep nor an option of ./train."""
        if key in own or (self.known is None or key in self.known) and key not in RESERVED:
            return
        if key in RESERVED:
            raise Problem(f"{place}: --{key} is the sweep's own affair; leave it out")
        names = list(own) + [name for name in self.known if name not in RESERVED]
        raise Problem(f"{place}: unknown option {key}{nearest(key, names)} (./train --help lists all)")

    def base(self):
        table, options = ("base", 0), {}
        for key, value in self.data.get("base", {}).items():
            self.key_checked(self.where(table, key), key)
            if isinstance(value, list):
                raise Problem(f"{self.where(table, key)}: {key} is a list; a list belongs into a [[run]]")
            options[key] = value_text(value, self.where(table, key), key)
        for key, value in self.overrides.items():
            self.key_checked(f"--set {key}={value}", key)
            if key == "seed" and not SEED.fullmatch(value):
                raise Problem(f"--set seed={value}: give a whole number")
        return options

    def axes(self, table, entry):
        """Returns [[(option, value), ...] for each point of an axis] for each axis of a [[run]], the slowest first."""
        result = []
        for key, value in entry.items():
            if key in ("name", "group", "baseline", "turn"):
                continue
            self.key_checked(self.where(table, key), key, RUN_KEYS)
            if key == "each":
                result.append(self.each(table, value))
                continue
            values = value if isinstance(value, list) else [value]
            if not values:
                raise Problem(f"{self.where(table, key)}: {key} is an empty list; give it a value or leave it out")
            result.append([[(key, value_text(v, self.where(table, key), key))] for v in values])
        for key in entry:
            if any(key in point for point in entry.get("each", ())):
                its = self.where(table, "each", key)
                raise Problem(f"{self.where(table, key)}: {key} is in the run's each too ({its}); give it once")
        return result

    def each(self, table, value):
        where = self.where(table, "each")
        if not isinstance(value, list) or not value or not all(isinstance(v, dict) and v for v in value):
            raise Problem(f'{where}: each is a list of tables, such as each = [{{m = "dyn8", v = "udyn8"}}]')
        places = {key: self.where(table, "each", key) for point in value for key in point}
        for key, place in places.items():
            self.key_checked(place, key)
        return [[(key, value_text(its, places[key], key)) for key, its in point.items()] for point in value]

    def name(self, table, entry, options):
        """Returns the name of a configuration, with {option} replaced by its value."""
        template = entry.get("name", " ".join("{%s}" % k for k in entry if k not in RUN_KEYS + ("seed",)) or "run")
        if not template.strip():
            raise Problem(f"{self.where(table, 'name')}: name is a text, such as name = \"m {{m}}\"")

        def put(match):
            if match[1] not in options:
                raise Problem(f"{self.where(table, 'name')}: {match[0]} in the name is no option of this run")
            return options[match[1]]

        return re.sub(r"\{([\w-]+)\}", put, template)

    def turns(self, table, entry, seeds):
        """Returns {seed: turn}, from one number for all or from a list as long as that of the seeds."""
        turn = entry.get("turn", 1)
        turns = turn if isinstance(turn, list) else [turn] * len(seeds)
        if len(turns) != len(seeds) or not all(type(t) is int and abs(t) < 1 << 128 for t in turns):
            raise Problem(
                f"{self.where(table, 'turn')}: turn is a whole number, or one for each of the {len(seeds)} seeds"
            )
        return dict(zip(seeds, turns))

    def entry(self, number, entry, base):
        """Returns the runs of one [[run]]."""
        table = ("run", number)
        axes = self.axes(table, entry)
        if math.prod(map(len, axes)) > MOST_RUNS:
            raise Problem(f"{self.where(table, '')}: {math.prod(map(len, axes))} runs, over {MOST_RUNS}; shorten a list")
        points = [dict(itertools.chain(*point)) for point in itertools.product(*axes)]
        seeds = list(dict.fromkeys(point.get("seed", base.get("seed", "1")) for point in points))
        for seed in seeds:
            if not SEED.fullmatch(seed):
                raise Problem(f"{self.where(table, 'seed', seed)}: seed is {seed[:40]}; give whole numbers")
        turns = self.turns(table, entry, seeds)
        runs = []
        for point in points:
            options = {**USUAL, **base, **point, **self.overrides}
            places = {key: self.where(("base", 0), key) for key in base}
            places |= {key: self.where(table, key if key in entry else "each", value) for key, value in point.items()}
            places |= {key: f"--set {key}={value}" for key, value in self.overrides.items()}
            places |= {"": self.where(table, "")}
            places |= {key: self.where(table, key) for key in ("name", "baseline", "group") if key in entry}
            if is_zero(options.get("val-every", "")):
                raise Problem(f"{places['val-every']}: val-every is 0; a run is told by its last validation")
            seed = options.pop("seed", "1")
            runs.append(
                Run(
                    name=self.name(table, entry, {**options, "seed": seed}),
                    seed=int(seed),
                    options={k: v for k, v in options.items() if v != ""},
                    group=entry.get("group", "runs"),
                    baseline=entry.get("baseline", self.data["baseline"]),
                    turn=turns.get(seed, 1),
                    given=point,
                    places=places,
                )
            )
        return runs

    def check_kinds(self):
        """Checks that texts are texts, switches are true or false, and each [[run]] is a table."""
        for key, kind, what in (("title", str, "a text"), ("keep-checkpoints", bool, "true or false")):
            if not isinstance(self.data.get(key, kind()), kind):
                raise Problem(f"{self.where(('', 0), key)}: {key} is {what}")
        picture = self.data.get("picture", [])
        if not isinstance(picture, list) or len(picture) > 10 or not all(isinstance(name, str) for name in picture):
            raise Problem(f"{self.where(('', 0), 'picture')}: picture is a list of at most ten names")
        for number, entry in enumerate(self.data.get("run", [])):
            if not isinstance(entry, dict):
                raise Problem(f"{self.where(('', 0), 'run')}: write [[run]] for each run, with its options below")
            for key in ("name", "group", "baseline"):
                if not isinstance(entry.get(key, "-"), str) or not entry.get(key, "-").isprintable():
                    raise Problem(f"{self.where(('run', number), key)}: {key} is a text of one line")

    def sweep(self):
        for key in self.data:
            if key not in STUDY_KEYS:
                raise Problem(
                    f"{self.where(('', 0), key)}: unknown key {key}{nearest(key, STUDY_KEYS)}; options of ./train go "
                    "under [base]"
                )
        if not isinstance(self.data.get("base", {}), dict) or not isinstance(self.data.get("run", []), list):
            raise Problem(f"{self.path}:1: write [base] once and [[run]] for each run")
        self.check_kinds()
        if not isinstance(self.data.get("baseline"), str):
            raise Problem(f'{self.path}:1: there is no baseline; add a line such as baseline = "adamw32" above [base]')
        base = self.base()
        runs = [run for i, entry in enumerate(self.data.get("run", [])) for run in self.entry(i, entry, base)]
        if not runs:
            raise Problem(f"{self.path}:{len(self.lines.lines)}: there is no [[run]] in it; add one")
        self.check_names(runs)
        for order, run in enumerate(runs):
            run.order = order
        runs.sort(key=lambda run: run.turn)
        title = self.data.get("title", self.path.stem)
        return Sweep(
            self.path,
            self.path.stem,
            title,
            self.data["baseline"],
            self.data.get("keep-checkpoints", False),
            self.data.get("picture", []),
            runs,
        )

    def set_to_blame(self, run, other):
        """Returns the --set of an option that the file gives these two different values of, or None."""
        keys = [key for key in self.overrides if run.given.get(key) != other.given.get(key)]
        return f"--set {keys[0]}={self.overrides[keys[0]]}" if keys else None

    def check_names(self, runs):
        """A name is one configuration, with one group and baseline, a configuration has one name, and baselines are
        among them."""
        names, keys = {}, {}
        for run in runs:
            at = run.places.get("name", run.places[""])
            first = names.setdefault(run.name, run)
            twin = keys.setdefault(run.options_key(), run)
            typed = self.set_to_blame(run, twin if twin is not run else first)
            if typed and (twin is not run or first.options != run.options):
                raise Problem(f"{typed}: runs of {run.name} are told apart by it ({run.places['']}); leave it out")
            if first.options != run.options:
                differs = next(
                    k for k in {**first.options, **run.options} if first.options.get(k) != run.options.get(k)
                )
                raise Problem(
                    f"{at}: {run.name} is already the name of runs with another {differs} ({first.places['']})"
                )
            if twin is not run:
                raise Problem(
                    f"{at}: {run.label} has the same options as {twin.label} of {twin.places['']}; leave one out"
                )
            for key in ("group", "baseline"):
                its = getattr(first, key)
                if its != getattr(run, key):
                    place = run.places.get(key, run.places[""])
                    raise Problem(f"{place}: {run.name} has another {key} already, {its} ({first.places['']}); write that")
        for run in runs:
            place = run.places.get("baseline", self.where(("", 0), "baseline"))
            if run.baseline not in names:
                raise Problem(
                    f"{place}: baseline {run.baseline} is not the name of a run" + nearest(run.baseline, names)
                )
            if run.name == self.data["baseline"] != run.baseline:
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
