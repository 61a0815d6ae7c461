"""Calls libnibble_optim.so through ctypes; ../../nibble_optim.h describes each function. Tensors are addresses, so this
file needs neither torch nor NumPy. A status other than 0 becomes a Python exception with the library's sentence."""
import ctypes
import functools
import glob
import os
import re
import sys
import typing
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int64, c_void_p

VERSION = 6
ERROR_BYTES = 32768


class Tensor(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("rows", c_int64), ("cols", c_int64), ("first", c_int64), ("count", c_int64)]


class Group(ctypes.Structure):
    _fields_ = [("lr", c_double), ("weight_decay", c_double), ("beta1", c_float), ("beta2", c_float), ("eps", c_float),
                ("step", c_int64), ("lr_at", c_void_p)]


class Step(ctypes.Structure):
    _fields_ = [("weights", c_void_p), ("grads", c_void_p), ("group_of", c_void_p), ("group", POINTER(Group)),
                ("grad_scale", c_void_p), ("found_inf", c_void_p), ("step", c_int64), ("stream", c_void_p)]


class State(ctypes.Structure):
    _fields_ = [("name", c_char * 160), ("dtype", c_char_p), ("data", c_void_p), ("bytes", c_int64), ("run", c_int64),
                ("bits", c_int)]


class Place(ctypes.Structure):
    _fields_ = [("element", c_int64), ("owner", c_int), ("together", c_int)]


ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int64)


def _find():
    """Returns the library's path: NIBBLE_OPTIM_LIBRARY, in the package, or built in the repository around it."""
    here = os.path.dirname(os.path.abspath(__file__))
    built = os.path.join(here, "..", "..", "..", "build")
    places = [os.environ.get("NIBBLE_OPTIM_LIBRARY"), os.path.join(here, "libnibble_optim.so"),
              os.path.join(built, "lib", "libnibble_optim.so"), os.path.join(built, "cpu", "lib", "libnibble_optim.so")]
    if places[0] and not os.path.exists(places[0]):
        raise OSError(f"NIBBLE_OPTIM_LIBRARY={places[0]} is no file; name a libnibble_optim.so, or unset it")
    for place in places:
        if place and os.path.exists(place):
            return place
    raise OSError("libnibble_optim.so was not found in the package nibble_optim; install its wheel, or type make lib")


def _load(name, package):
    """Loads one of CUDA's libraries from PyPI's nvidia packages, where the loader does not look, so that
    libnibble_optim finds it."""
    for folder in sys.path:
        for pattern in (f"nvidia/cu13/lib/{name}.so.1[23]", f"nvidia/{package}/lib/{name}.so.1[23]"):
            for path in sorted(glob.glob(os.path.join(folder, pattern)), reverse=True):
                try:
                    return ctypes.CDLL(path)
                except OSError:
                    continue
    return None


@functools.lru_cache(None)
def library():
    """Returns the library, which the first call opens."""
    _load("libnvrtc", "cuda_nvrtc")
    library = ctypes.CDLL(_find())
    handle, status, error = c_void_p, c_int, c_char_p
    for name, result, arguments in [
            ("create", status, [POINTER(handle), POINTER(c_char_p), POINTER(Tensor), c_int, ALLOCATE, c_void_p,
                                c_void_p, error]),
            ("free", None, [handle]), ("step", status, [handle, POINTER(Step), error]),
            ("clock", status, [handle, POINTER(c_int64), c_void_p, error]),
            ("weights_changed", None, [handle, c_int]),
            ("state", c_int, [handle, c_int, c_int, POINTER(State)]), ("bytes", c_int64, [handle]),
            ("moment", status, [handle, c_int, c_char_p, c_void_p, c_int, c_void_p, error]),
            ("list", c_char_p, [c_char_p]), ("save", status, [handle, c_void_p, c_void_p, error]),
            ("load", status, [handle, c_void_p, c_int64, c_void_p, error]), ("loaded", None, [handle]),
            ("place", Place, [handle, c_int]), ("describe", c_char_p, [handle]),
            ("setting", c_char_p, [handle, c_char_p]), ("matches", c_int, [c_char_p, c_char_p]),
            ("gpus", c_int, []), ("version", c_int, [])]:
        function = getattr(library, "nibble_optim_" + name)
        function.restype, function.argtypes = result, arguments
    if library.nibble_optim_version() != VERSION:
        raise OSError(f"{library._name} has version {library.nibble_optim_version()} and this package needs {VERSION}")
    return library


def as_arguments(sentence):
    """Returns a sentence of the library with Python arguments in place of ./train's options."""
    names = {"override": "overrides", "beta1": "betas", "beta2": "betas"}

    def argument(option):
        return names.get(option, option.replace("-", "_"))

    sentence = re.sub(r"leave --([a-z][a-z0-9-]*) out", lambda found: f"leave {argument(found[1])} out", sentence)
    sentence = re.sub(r"type --[a-z0-9-]+ [FN](?=$|[ ,;])", "give a number", sentence)
    sentence = re.sub(r"\b(type|take|or|needs) --([a-z][a-z0-9-]*) ([^\s,;]+)",
                      lambda found: f'{found[1]} {argument(found[2])}={_quoted(found[3])}', sentence)
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda found: argument(found[1]), sentence)


def _quoted(value):
    return value if re.fullmatch(r"[-+.0-9e]+", value) else f'"{value}"'


def check(status, error):
    if status:
        kind = {1: RuntimeError, 2: ValueError, 3: MemoryError}[status]
        raise kind("nibble_optim: " + as_arguments(error.value.decode(errors="replace")))


def is_capturing():
    """Returns whether this thread captures a CUDA graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_dropped = []  # optimizers that are to be freed


def _free_dropped(library):
    """Frees them, but not during a capture, which freeing memory ends: the garbage collector runs at any time."""
    while _dropped and not is_capturing():
        library.nibble_optim_free(_dropped.pop())


class Handle:
    """One optimizer of the library. `tensors` are (name, rows, cols, first, count); `allocate(bytes)`, if given,
    returns the address of memory for states, or 0."""

    def __init__(self, settings, tensors, allocate=None, stream=None):
        self.library, self.handle = library(), c_void_p()
        if str(settings.get("device")).startswith("cuda") and "torch" not in sys.modules:  # torch has loaded its own
            _load("libcublasLt", "cublas")
        _free_dropped(self.library)
        self.error = ctypes.create_string_buffer(ERROR_BYTES)
        texts = [f"{key}={value}".encode() for key, value in settings.items() if value is not None]
        array = (Tensor * max(len(tensors), 1))(*[(name.encode(), *rest) for name, *rest in tensors])
        self.allocate = ALLOCATE((lambda _, count: allocate(count)) if allocate else 0)
        check(self.library.nibble_optim_create(ctypes.byref(self.handle), (c_char_p * (len(texts) + 1))(*texts, None),
                                               array, len(tensors), self.allocate, None, stream, self.error),
              self.error)
        self.now, self.groups = Step(), None

    def __del__(self):
        if getattr(self, "handle", None):
            _dropped.append(self.handle)
            self.handle = None
            _free_dropped(self.library)

    def step(self, weights, grads, group_of, groups, step, stream=None, grad_scale=None, found_inf=None):
        """Takes a step. weights and grads: array('Q') of addresses, 0 for a missing gradient; group_of: array('i');
        groups: tuples (lr, weight_decay, beta1, beta2, eps, step), and the address of lr or None."""
        now = self.now
        if self.groups is None or len(self.groups) != len(groups):
            self.groups = (Group * len(groups))()
        for to, values in zip(self.groups, groups):
            to.lr, to.weight_decay, to.beta1, to.beta2, to.eps, to.step, to.lr_at = (*values, None)[:7]
        now.weights, now.grads, now.group_of = (array.buffer_info()[0] for array in (weights, grads, group_of))
        now.group, now.step, now.stream = self.groups, step, stream
        now.grad_scale, now.found_inf = grad_scale, found_inf
        check(self.library.nibble_optim_step(self.handle, ctypes.byref(now), self.error), self.error)

    def clock(self, stream=None):
        """Returns the number of the last step, replayed graphs included; waits for the stream."""
        step = c_int64()
        check(self.library.nibble_optim_clock(self.handle, ctypes.byref(step), stream, self.error), self.error)
        return step.value

    def states(self, tensor=-1):
        """Yields (name, dtype, address, bytes, run, bits) for each state of a tensor, or for each whole array."""
        state, index = State(), 0
        while self.library.nibble_optim_state(self.handle, tensor, index, ctypes.byref(state)):
            yield state.name.decode(), state.dtype.decode(), state.data or 0, state.bytes, state.run, state.bits
            index += 1

    def moment(self, tensor, name, values, writes, stream=None):
        """Reads moment "m", "v" or "slow" of a tensor as fp32 into host memory at the address `values`, or writes it."""
        check(self.library.nibble_optim_moment(self.handle, tensor, name.encode(), values, writes, stream, self.error),
              self.error)

    def save(self, stream=None):
        blob = ctypes.create_string_buffer(self.library.nibble_optim_bytes(self.handle))
        check(self.library.nibble_optim_save(self.handle, blob, stream, self.error), self.error)
        return blob.raw

    def load(self, blob, stream=None):
        check(self.library.nibble_optim_load(self.handle, blob, len(blob), stream, self.error), self.error)

    def loaded(self):
        self.library.nibble_optim_loaded(self.handle)

    def weights_changed(self, tensor):
        self.library.nibble_optim_weights_changed(self.handle, tensor)

    def place(self, tensor):
        """Returns a tensor's place, with .element, .owner and .together; of the number behind the last one, the end."""
        return self.library.nibble_optim_place(self.handle, tensor)

    def describe(self):
        return self.library.nibble_optim_describe(self.handle).decode()

    def setting(self, key):
        value = self.library.nibble_optim_setting(self.handle, key.encode())
        return value.decode() if value is not None else None


def rule_options() -> typing.Dict[str, typing.Tuple[str, str, typing.List[str], str]]:
    """Returns the options of rules by name: choices separated by | ("F from 0 to 1": a number), the default, the rules
    that read it ([]: any may) and what it is. Those that parameter groups have are not among them."""
    def here(text):  # ./train alone knows auto, and the largest rate as --lr
        return as_arguments("; ".join(part for part in text.replace("/ --lr", "/ lr_max").split("; ") if "auto:" not in part))

    rows = (line.split("\t") for line in library().nibble_optim_list(b"options").decode().splitlines())
    return {name.replace("-", "_"): (values, default, re.findall(r"[^=|]+", needs)[1:], here(text))
            for name, values, default, needs, text in rows}


def options_text() -> str:
    """Returns a line for each option of rules: name, choices, default, the rules that read it, and what it is."""
    return "".join(f"{f'{name}={values} [{default}]':40} {', '.join(rules)}{': ' if rules else ''}{text}\n"
                   for name, (values, default, rules, text) in rule_options().items())


def options() -> None:
    """Prints the options of rules: name, choices, default, the rules that read it, and what it is."""
    print(options_text(), end="")


def gpus() -> int:
    """Returns how many GPUs the library can use."""
    return library().nibble_optim_gpus()


def matches(patterns: str, *names: str) -> bool:
    """Returns True if one of the patterns, which have | between them, matches one of the names, as in overrides."""
    return any(library().nibble_optim_matches(patterns.encode(), name.encode()) for name in names)


def presets() -> None:
    """Prints the presets with their rules and formats, as ./train --list-presets does."""
    print(library().nibble_optim_list(b"presets").decode(), end="")


def formats() -> None:
    """Prints the formats of weights, gradients and states, as ./train --list-formats does."""
    print(library().nibble_optim_list(b"formats").decode(), end="")
