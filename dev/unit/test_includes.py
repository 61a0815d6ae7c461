"""Which file may include which: no cycle between files, and folders depend on each other in one direction only.

    python3 dev/unit/test_includes.py

The top level uses optim, kernels and data; optim uses kernels and data's base; kernels uses data's base; data uses
itself; the base uses only the base. dev may use anything, and nothing but test_gpt2.cu uses dev. The exceptions are
listed by name.
"""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = {"errors", "text", "files", "clock", "json", "memory", "signals", "linkage", "option",
        "rule_options"}  # of data/
MAY = {"top": {"top", "optim", "kernels", "data", "base"}, "optim": {"optim", "kernels", "base"},
       "kernels": {"kernels", "base"}, "data": {"data", "base"}, "base": {"base"}}
EXCEPTIONS = {("kernels/feeder.cuh", "data/loader.h"),  # copies what the loader reads to the device
              ("test_gpt2.cu", "dev/unit/tensors.h"), ("test_gpt2.cu", "dev/unit/files.h"),
              ("test_gpt2.cu", "dev/unit/skips.h"), ("test_gpt2.cu", "dev/unit/plans.h"),
              ("test_gpt2.cu", "dev/unit/checkpoints.h")}


def folder(path):
    parts = path.split("/")
    if parts[0] == "data" and parts[-1].split(".")[0] in BASE:
        return "base"
    return parts[0] if len(parts) > 1 else "top"


def read_includes():
    files = [file for pattern in ("*.cu", "*.h", "*/**/*.cu", "*/**/*.cuh", "*/**/*.h", "*/**/*.c")
             for file in ROOT.glob(pattern) if file.relative_to(ROOT).parts[0] not in ("build", ".venv")]
    graph = {}
    for file in files:
        names = re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.M)
        graph[str(file.relative_to(ROOT))] = [str((file.parent / name).resolve().relative_to(ROOT)) for name in names]
    return graph


def wrong_directions(graph):
    return [f"{a} includes {b}" for a, names in graph.items() for b in names if folder(a) != "dev"
            and folder(b) not in MAY[folder(a)] and (a, b) not in EXCEPTIONS]


def cycles(graph):
    done, found = set(), []

    def visit(path, stack):
        if path in stack:
            found.append(" -> ".join(stack[stack.index(path):] + [path]))
        elif path not in done:
            for name in graph.get(path, ()):
                visit(name, stack + [path])
            done.add(path)

    for path in graph:
        visit(path, [])
    return found


graph = read_includes()
assert len(graph) > 100 and graph["kernels/feeder.cuh"], "the files were not found"
assert cycles({"a": ["b"], "b": ["a"]}) and not cycles({"a": ["b"], "b": []}), "cycles are not found"
assert wrong_directions({"data/files.c": ["kernels/common.cuh"]}), "wrong directions are not found"
problems = wrong_directions(graph) + cycles(graph)
problems += [f"{a} includes {b}, which is not there" for a in graph for b in graph[a] if not (ROOT / b).is_file()]
for problem in problems:
    print("FAIL ", problem)
print(f"{int(not problems)} passed, {int(bool(problems))} failed, 0 skipped")
raise SystemExit(bool(problems))
