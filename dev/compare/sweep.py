"""Reads a sweep file: returns its list of runs, or says in which line something is wrong.

A sweep is TOML. [base] holds options of ./train that all runs share; each [[run]] adds its own. A list is an axis: the
entry stands for the product of its axes. `each`, a list of tables, makes an entry of each table and what stands beside it.
What differs in the seed alone is one configuration, known by its name. Nothing here needs more than Python's own library.
"""

import difflib
import hashlib
import itertools
import json
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from problem import Problem, file_name

# Of one start of the program, or set by the instrument itself.
RESERVED = "config run resume sample dry-run profile fit list-formats list-presets version help".split()
# They change neither weights nor losses: a finished run stays one when they change.
NEUTRAL = ("print-every", "save-every", "keep")
# Where they lie may differ from machine to machine; what they hold is compared instead.
PATHS = ("data", "val")
EACH = 'a list of tables, such as each = [{ m = "dyn8", v = "udyn8" }]'
# Keys that are no options of ./train, and what each of them is.
STUDY_KEYS = {
    "title": (str, "a text"), "baseline": (str, "the name of a run"), "picture": (list, "a list of names"),
    "like": (str, "a sweep file beside this one, whose [base] comes before this one's"),
    "keep-checkpoints": (bool, "true or false"), "seconds": (int, "a whole number of seconds"),
    "base": (dict, "written once, as [base]"), "run": (list, "written as [[run]] for each run"),
}  # fmt: skip
NO_GROUP = "runs"  # the group of runs for which the file names none
RUN_KEYS = {"name": (str, "a text"), "group": (str, "a text"), "baseline": (str, "the name of a run"), "each": (list, EACH)}
USUAL = {"sample-every": "0", "save-every": "0", "keep": "1"}


def slug(name, seed):
    return f"{file_name(name)}_s{seed}"


@dataclass
class Run:
    name: str  # of its configuration
    seed: int
    options: dict  # option of ./train: value as typed, without the seed
    group: str
    baseline: str  # name of the configuration it is compared to
    own: set  # the options that [[run]] gives, not [base], without the seed
    round: int  # runs of a lower one come first: the place of the seed among those of its entry
    place: object = field(repr=False)  # place(KEY): the FILE:LINE or --set that gives an option or key; place(): [[run]]'s
    order: int = 0  # in the file
    plan: dict = field(default_factory=dict)  # what ./train --dry-run says: tokens, ...

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
    """Returns a value as ./train is given it."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Problem(f"{where}: {key} is no value of an option; give a text, a number or a list of these")
    return value if isinstance(value, str) else repr(value)


def nearest(name, names):
    close = difflib.get_close_matches(name, names, 1, 0.8)
    return f"; did you mean {close[0]}?" if close else ""


class Reader:
    """Turns the text of a sweep into runs. A block is a pair of lines, from a header to the next."""

    def __init__(self, path, text, overrides, known):
        self.path, self.overrides, self.known = path, overrides, known
        self.lines = lines = text.split("\n")
        self.data = tomllib.loads(text)
        heads = [n for n, line in enumerate(lines, 1) if re.match(r"\s*\[\[?\s*[\w\"]", line)]
        ends = [*heads[1:], len(lines) + 1]
        self.blocks = [(n, end) for n, end in zip(heads, ends) if re.match(r"\s*\[\[", lines[n - 1])]
        self.base = next((pair for pair in zip(heads, ends) if "base" in lines[pair[0] - 1]), (1, 1))
        self.whole = (1, len(lines) + 1)

    def place(self, block, key=""):
        """Returns the line of a key in the block or [base], as tomllib does not tell it, or the block's first line."""
        if key in self.overrides:
            return f"--set {key}={self.overrides[key]}"
        wanted = rf'(^|[{{,\[])\s*"?{re.escape(key)}"?\s*[=\]]'
        lines = [n for n in (*range(*block), *range(*self.base)) if key and re.search(wanted, self.lines[n - 1])]
        return f"{self.path}:{[*lines, block[0]][0]}"

    def check_kinds(self, block, table, kinds):
        for key, (kind, what) in kinds.items():
            value = table.get(key, kind())
            if not isinstance(value, kind) or (kind is str and not value.isprintable()):
                raise Problem(f"{self.place(block, key)}: {key} is {what}")

    def key_checked(self, place, key, own=()):
        """Refuses what is neither a key of the sweep nor an option of ./train."""
        if key in own or (self.known is None or key in self.known) and key not in RESERVED:
            return
        if key in RESERVED:
            raise Problem(f"{place}: --{key} is the sweep's own affair; leave it out")
        names = list(own) + [name for name in self.known if name not in RESERVED]
        raise Problem(f"{place}: unknown option {key}{nearest(key, names)} (./train --help lists all)")

    def bases(self, data, *above):
        """Returns [base], behind those of the sweep that this one is like, which may be like another but those `above`."""
        like = data.get("like")
        if like in above:
            raise Problem(f"{self.path}: like = {like!r} leads back to itself; name another sweep file")
        others = self.bases(tomllib.loads((self.path.parent / like).read_text("utf-8-sig")), like, *above) if like else {}
        return others | data.get("base", {})

    def shared(self):
        """Returns the options of [base] and of the sweeps that this one is like."""
        options = {}
        for key, value in self.bases(self.data).items():
            place = self.place(self.base, key)
            self.key_checked(place, key)
            if isinstance(value, list):
                raise Problem(f"{place}: {key} is a list; a list belongs into a [[run]]")
            options[key] = value_text(value, place, key)
        for key in self.overrides:
            self.key_checked(self.place(self.whole, key), key)
        return options

    def entries(self, block, entry):
        """Yields an entry for each table of `each`, or the entry itself."""
        self.check_kinds(block, entry, RUN_KEYS)
        for row in entry.get("each", [{}]):
            if not isinstance(row, dict):
                raise Problem(f"{self.place(block, 'each')}: each is {EACH}")
            both = {key: value for key, value in entry.items() if key != "each"} | row
            yield from self.entries(block, both) if "each" in row else [both]

    def axes(self, block, entry):
        """Returns [(option, value), ...] for each axis of an entry, the slowest first."""
        result = []
        for key in (key for key in entry if key not in RUN_KEYS):
            values, place = entry[key] if isinstance(entry[key], list) else [entry[key]], self.place(block, key)
            self.key_checked(place, key, RUN_KEYS)
            if not values:
                raise Problem(f"{place}: {key} is an empty list; give it a value or leave it out")
            result.append([(key, value_text(value, place, key)) for value in values])
        return result

    def name(self, block, entry, options):
        """Returns the name of a configuration, with {option} replaced by its value."""

        def put(match):
            if match[1] not in options:
                raise Problem(f"{self.place(block, 'name')}: {match[0]} in the name is no option of this run")
            return options[match[1]]

        options_named = " ".join("{%s}" % key for key in entry if key not in (*RUN_KEYS, "seed"))
        return re.sub(r"\{([\w-]+)\}", put, entry.get("name") or options_named or "run")

    def runs(self, block, entry, base):
        """Yields the runs of an entry."""
        self.check_kinds(block, entry, RUN_KEYS)
        axes = self.axes(block, entry)
        seeds = []
        for point in map(dict, itertools.product(*axes)):
            options = {**USUAL, **base, **point, **self.overrides}
            seed = options.pop("seed", "1")
            if not seed.isdecimal():
                raise Problem(f"{self.place(block, 'seed')}: seed is {seed}; give whole numbers")
            if re.fullmatch("0+", options.get("val-every", "")):
                raise Problem(f"{self.place(block, 'val-every')}: val-every is 0; a run is judged by its last validation")
            seeds += [] if seed in seeds else [seed]
            yield Run(
                name=self.name(block, entry, {**options, "seed": seed}),
                seed=int(seed),
                options={k: v for k, v in options.items() if v != ""},
                group=entry.get("group", NO_GROUP),
                baseline=entry.get("baseline", self.data["baseline"]),
                own=set(point) - {"seed"},
                round=seeds.index(seed),
                place=lambda key="": self.place(block, key),
            )

    def sweep(self):
        data = self.data
        for key in data:
            if key not in STUDY_KEYS:
                hint = f"{nearest(key, STUDY_KEYS)}; options of ./train go under [base]"
                raise Problem(f"{self.place(self.whole, key)}: unknown key {key}{hint}")
        self.check_kinds(self.whole, data, STUDY_KEYS)
        tables = data.get("run", [])
        if "baseline" not in data or not tables:
            missing = "[[run]]" if "baseline" in data else 'baseline, such as baseline = "adamw32" above [base]'
            raise Problem(f"{self.path}:1: there is no {missing} in it; add one")
        if len(tables) > len(self.blocks) or not all(isinstance(entry, dict) for entry in tables):
            raise Problem(f"{self.place(self.whole, 'run')}: run is {STUDY_KEYS['run'][1]}, with its options below")
        base, pairs = self.shared(), list(zip(self.blocks, tables))
        runs = [run for block, table in pairs for entry in self.entries(block, table) for run in self.runs(block, entry, base)]
        self.check_names(runs)
        for order, run in enumerate(runs):
            run.order = order
        runs.sort(key=lambda run: run.round)
        keep, picture = data.get("keep-checkpoints", False), data.get("picture", [])
        title = data.get("title", self.path.stem)
        return Sweep(self.path, self.path.stem, title, data["baseline"], keep, picture, runs, data.get("seconds", 0))

    def check_names(self, runs):
        """A name is one configuration, with one group and baseline, a configuration has one name, and baselines are
        among them."""
        names, keys = {}, {}
        for run in runs:
            first, twin = names.setdefault(run.name, run), keys.setdefault(run.options_key(), run)
            if twin is not run:
                same = f"{run.label} has the same options as {twin.label} of {twin.place()}"
                raise Problem(f"{run.place('name')}: {same}; leave one out")
            mine, its = ({**each.options, "group": each.group, "baseline": each.baseline} for each in (run, first))
            for key in {**its, **mine}:
                if mine.get(key) != its.get(key):
                    known = f"runs with another {key} ({first.place()}: {its.get(key, 'none')})"
                    raise Problem(f"{run.place('name')}: {run.name} is already the name of {known}")
        for run in runs:
            if run.baseline not in names:
                hint, own = nearest(run.baseline, names), run.baseline != self.data["baseline"]
                place = run.place("baseline") if own else self.place(self.whole, "baseline")
                raise Problem(f"{place}: baseline {run.baseline} is not the name of a run{hint}")
        if names.get(self.data["baseline"], run).baseline != self.data["baseline"]:
            place = names[self.data["baseline"]].place("baseline")
            raise Problem(f"{place}: {self.data['baseline']} is the baseline of the whole sweep and has no other; leave this out")


def load(path, overrides=None, known=None):
    """Returns the Sweep of a file. `known`: names of ./train's options, or None if ./train cannot be asked."""
    path = Path(path)
    try:
        return Reader(path, path.read_text("utf-8-sig"), overrides or {}, known).sweep()
    except OSError as error:
        raise Problem(f"{error.filename}: cannot be read ({error.strerror}); name a sweep file") from None
    except ValueError as error:  # it is no TOML or no text
        at = re.search(r"line (\d+)", str(error))
        raise Problem(f"{path}:{at[1] if at else 1}: cannot be read: {str(error).split(';')[0]}") from None
