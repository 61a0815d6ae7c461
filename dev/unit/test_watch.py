#!/usr/bin/env python3
"""Tests of dev/runlog.py, dev/watch.py and dev/plot.py: one line a case, `N passed, N failed, N skipped` last.

    python dev/unit/test_watch.py [-k SUBSTRING]

The logs are made here, line by line. Cases with `page` in their names open the page in a headless Chromium and are skipped
where there is none.
"""

import functools
import http.client
import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from browser import Page, find_browser
from cases import ROOT, Folder, csv_rows, ended, json_lines, run_cases, wait_for

sys.path.insert(0, str(ROOT / "dev"))
RESUME_AT = 20


def train(step, loss=None, **more):
    loss = 8 / (1 + step / 10) if loss is None else loss
    record = {"type": "train", "step": step, "tokens": 512 * step, "time_s": 0.5 * step, "loss": loss, "lr": 0.003}
    return record | {"norm": 1.5, "step_s": 0.5, "tok_s": 1024.0, "skipped": 0} | more


def val(step, loss):
    return {"type": "val", "step": step, "tokens": 512 * step, "time_s": 0.5 * step, "loss": loss, "bpb": loss / 3}


def resume(step):
    return {"type": "resume", "step": step, "tokens": 0, "time_s": 0.0}


def evaluated(step, name, **scores):
    return {"type": "eval", "step": step, "tokens": 512 * step, "time_s": 1.0, "name": name} | scores


def sampled(step, prompt, text, index=0):
    return {"type": "sample", "step": step, "tokens": 9, "time_s": 1.0, "index": index, "prompt": prompt, "text": text}


OPTIONS = {"model": "nano", "lr": 0.003, "steps": 100}
CONFIG = {"type": "config", "options": OPTIONS, "device": "CPU", "parameters": 9}


class Case(Folder):
    """A folder of runs that are written here, and ways to run the scripts in it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.runs = self.folder / "runs"

    def log(self, name, *records):
        """Appends lines to the log of a run."""
        folder = self.runs / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [record if isinstance(record, str) else json.dumps(record) + "\n" for record in records]
        with open(folder / "log.jsonl", "a") as file:
            file.write("".join(lines))
        return folder

    def run(self, script, *arguments, **environment):
        return self.typed(sys.executable, ROOT / "dev" / script, *arguments, **environment)

    def refuse(self, script, expected, *arguments, **environment):
        self.refused(self.run(script, *arguments, **environment), script.removesuffix(".py") + ": error: ", expected)

    def start(self, *arguments, **environment):
        return self.begun(sys.executable, ROOT / "dev" / "watch.py", *arguments, environment=environment)


class Server:
    """with Server(case) as port: watch.py serves the case's runs."""

    def __init__(self, case):
        self.process = case.start("runs", "--port", 0)
        self.said = self.process.stdout.readline()
        assert self.said.startswith("http://127.0.0.1:"), (self.said, self.process.stderr.read())
        self.port = int(self.said.split()[0].rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.port}/"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert ended(self.process, signal.SIGINT, 20) == (0, "", "")

    def ask(self, method, path, body=None, host=None):
        """Returns (status, type, contents) of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body, {"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()

    def news(self, have):
        status, _, told = self.ask("POST", "/news", json.dumps(have))
        assert status == 200, told
        return json.loads(told)


def steps(log, kind="train"):
    return [record["step"] for record in log.records[kind]]


def test_log_of_a_resume(case):
    """After a resume from step 20, steps 21 to 29 are those of the second process, and time goes on."""
    from runlog import RunLog

    first = [CONFIG, val(0, 8.0), *(train(step, loss=1.0) for step in range(1, 30)), val(25, 3.0)]
    log = RunLog(case.log("a", *first))
    assert log.poll() and not log.poll()
    assert steps(log) == list(range(1, 30)) and steps(log, "val") == [0, 25] and log.changes == 0
    case.log("a", {**CONFIG, "device": "other"}, resume(RESUME_AT))
    assert log.poll() and steps(log) == list(range(1, 21)) and steps(log, "val") == [0] and log.changes > 0
    case.log("a", *(train(step, loss=2.0, time_s=0.25 * (step - 20)) for step in range(21, 41)))
    assert log.poll() and log.config["device"] == "other" and log.resumes == [RESUME_AT]
    whole = RunLog(case.runs / "a" / "log.jsonl").read()
    for its in (log, whole):
        assert steps(its) == list(range(1, 41)), "every step once"
        assert [record["loss"] for record in its.records["train"]] == [1.0] * 20 + [2.0] * 20
        times = [record["time_s"] for record in its.records["train"]]
        assert times[19:22] == [10.0, 10.25, 10.5] and times == sorted(times)


def test_log_of_a_start_anew(case):
    """--resume auto where there was no checkpoint yet: a configuration without a resume drops what was before."""
    from runlog import RunLog

    case.log("a", {**CONFIG, "version": "1"}, val(0, 8.0), train(1), train(2), train(3))
    case.log("a", {**CONFIG, "version": "2"}, val(0, 7.0), train(1))
    log = RunLog(case.runs / "a").read()
    assert steps(log) == [1] and [its["loss"] for its in log.records["val"]] == [7.0] and log.config["version"] == "2"
    assert log.records["train"][0]["time_s"] == 0.5


def test_log_lines(case):
    """Half a line waits for its end, a bad one is reported, unknown ones are left out, a repeated step counts once."""
    from runlog import RunLog

    log = RunLog(case.log("a", CONFIG, train(1), '{"type": "train", "step": 2'))
    assert log.poll() and steps(log) == [1] and not log.poll()
    rest = ', "tokens": 9, "time_s": 1, "loss": null}\n'
    case.log("a", rest, {"type": "news", "step": 2}, "\n", val(2, 5.0), val(2, 6.0))
    assert log.poll() and steps(log) == [1, 2] and log.records["train"][1]["loss"] is None and log.bad is None
    assert [its["loss"] for its in log.records["val"]] == [6.0] and log.changes == 1
    evaluations = (evaluated(2, name, acc=0.5) for name in ("h", "l", "h"))
    case.log("a", *evaluations, *(sampled(2, "a", "b", i) for i in (0, 1, 1)))
    assert log.poll() and [its["name"] for its in log.records["eval"]] == ["l", "h"] and len(log.records["sample"]) == 2
    case.log("a", "[" * 100000 + "\n")
    case.log("a", "oh\n", '{"type": "train", "step": "3", "loss": 1}\n', '{"type": "train", "step": 3}\n', "[1]\n", train(3))
    assert log.poll() and steps(log) == [1, 2, 3] and log.bad[0] == 14, log.bad
    odd = [train(1) | {"step": step} for step in ("x", 1.5, True)]
    begun = RunLog(case.log("b", *odd, train(1), resume("x"), train(2), "[" * 100000)).read()
    assert steps(begun) == [1, 2] and begun.complaint() == 'line 1 of its log is not a record (step "x" is no whole number)'
    (case.runs / "a" / "log.jsonl").write_text(json.dumps(train(7)))
    assert not log.poll() and steps(log) == [] and steps(log.read()) == [7], "another file"


def test_news(case):
    """A page that asks again and again gets every record once, and all of them anew when some were dropped."""
    steps_of = lambda told, name: [record["step"] for record in told["news"][name]["records"]["train"]]
    case.log("a", CONFIG, *(train(step) for step in range(1, 30)))
    case.log("deep/b", CONFIG, train(1, loss=float("nan")))
    with Server(case) as server:
        assert server.said.endswith("follows 2 runs in runs; Ctrl-C ends\n"), server.said
        told = server.news({})
        assert [run["name"] for run in told["runs"]] == ["a", "deep/b"] and told["runs"][0]["options"]["lr"] == 0.003
        assert steps_of(told, "a") == list(range(1, 30)) and told["news"]["a"]["records"]["train"][0]["loss"] == 8 / 1.1
        assert told["news"]["deep/b"]["records"]["train"][0]["loss"] is None
        lengths = {name: len(steps_of(told, name)) for name in told["news"]}
        have = {name: {"changes": its["changes"], "train": lengths[name]} for name, its in told["news"].items()}
        assert server.news(have)["news"] == {}
        case.log("a", train(30), train(31))
        case.log("c", CONFIG, train(1))
        told = server.news(have)
        assert steps_of(told, "a") == [30, 31] and len(told["runs"]) == 3
        case.log("a", CONFIG, resume(RESUME_AT), train(21))
        told = server.news(have)
        assert steps_of(told, "a") == list(range(1, 22)) and told["runs"][0]["resumes"] == 1
        assert server.ask("GET", "/")[:2] == (200, "text/html; charset=utf-8")
        assert server.ask("GET", "/watch.js")[2].count(b"#0072B2") == 1
        assert len(server.ask("GET", "/bokeh.js")[2]) > 10**6
        assert server.ask("GET", "/../watch.py")[0] == 404 and server.ask("GET", "/", host="evil.example:80")[0] == 403
        assert server.ask("POST", "/news", "{}", host="evil.example")[0] == 403
        assert socket.socket().connect_ex(("127.0.0.2", server.port)), "it listens on 127.0.0.1 only"


def test_half_a_request(case):
    """A client that sends half a request holds its thread for a while only; a bad one is refused before its body comes."""
    import watch

    case.log("a", CONFIG, train(1))
    handler = type("Handler", (watch.Handler,), {"timeout": watch.Handler.timeout / 40})
    make = functools.partial(handler, watch.Runs(case.runs), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for host, more, expected in (
            ("localhost:1", "", b""),
            ("localhost:1", "Content-Length: 99\r\n\r\n{", b""),
            ("localhost:1", "Content-Length: -1\r\n\r\n", b"HTTP/1.1 400 "),
            ("localhost:1", "\r\n", b"HTTP/1.1 400 "),
            ("evil.example", "Content-Length: 99\r\n\r\n", b"HTTP/1.1 403 "),
        ):
            with socket.create_connection(server.server_address, timeout=20) as client:
                client.sendall(f"POST / HTTP/1.1\r\nHost: {host}\r\n{more}".encode())
                assert client.makefile("rb").read()[:13] == expected, (host, more)
        server.shutdown()


def test_errors(case):
    case.refuse("watch.py", "none: no such folder", "none")
    case.runs.mkdir()
    case.refuse("watch.py", "runs: there is no run in it")
    case.refuse("watch.py", "runs: there is no run in it", "--export", "csv")
    case.log("a", CONFIG, train(1))
    case.refuse("watch.py", "--port 70000: give 0 to 65535", "--port", 70000)
    case.refuse("watch.py", "--follow and --out go with --export", "--follow")
    case.refuse("watch.py", "--port is of the page", "--export", "csv", "--port", 1)
    case.refuse("watch.py", "invalid choice", "--export", "paper")
    case.refuse("watch.py", "log.jsonl: not a folder; name one that holds runs", case.runs / "a" / "log.jsonl")
    (case.folder / "file").write_text("")
    case.refuse("watch.py", "--out file: cannot be written (File exists)", "--export", "csv", "--out", "file")
    case.log("broken", CONFIG, "oh\n")
    told = case.run("watch.py", "--export", "csv", "--out", "tables").stdout
    assert "broken: 0 training steps, line 2 of its log is not a record" in told and "a: 1 training steps\n" in told, told
    command = f"{sys.executable} {ROOT}/dev/watch.py --export csv | true; exit ${{PIPESTATUS[0]}}"
    assert case.typed("bash", "-c", command, status=1).stderr == "", "nobody reads what is printed"
    with Server(case) as server:
        case.refuse("watch.py", "type --port 0 for a free one", "--port", server.port)
    (case.folder / "empty").mkdir()
    for name in ("tensorboardX", "wandb"):  # as if not installed
        (case.folder / "empty" / f"{name}.py").write_text("raise ImportError\n")
    for kind, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        case.refuse("watch.py", f"-m pip install {package}", "--export", kind, PYTHONPATH=str(case.folder / "empty"))
    (case.folder / "empty" / "torch.py").write_text("raise ImportError\n")
    for name in ("check_eval", "check_export"):
        done = case.run(f"reference/{name}.py", PYTHONPATH=str(case.folder / "empty"))
        case.refused(done, "", " -m pip install -r ", "dev/reference/requirements.txt`")
    case.refuse("plot.py", "give a run folder that holds a log.jsonl", "none")
    case.refuse("plot.py", "there is no loss in it yet", case.log("b", CONFIG))
    (case.folder / "cut.csv").write_text("combination,size,percent_of_copy\nadamw8,1g\n")
    case.refuse("plot.py", "give the file that dev/optim --csv wrote", case.folder / "cut.csv")
    case.refuse("plot.py", "line 2: not a record", case.log("c", CONFIG, "oh\n", train(1)))


def test_export_csv(case):
    case.log("deep/a", CONFIG, val(0, 8.0), train(1), train(2, loss=float("inf")), val(2, 6.0))
    case.log("deep/a", evaluated(2, "hellaswag", acc=0.25))
    other = case.log("deep_a", CONFIG, train(1))
    done = case.run("watch.py", "runs", "--export", "csv", "--out", "out")
    assert done.returncode == 0 and done.stdout.endswith("csv: 2 runs in out\n"), done
    assert len(csv_rows(case.folder / "out" / "deep_a.csv")) == 1, "another run has another file"
    shutil.rmtree(other)
    rows = csv_rows(case.folder / "out" / "deep_a_6fa53a.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert rows[2]["train/loss"] == "" and rows[2]["train/lr"] == "0.003"
    assert (rows[2]["val/loss"], rows[2]["eval/hellaswag/acc"], rows[1]["val/loss"]) == ("6.0", "0.25", "")
    process = case.start("runs", "--export", "csv", "--follow")
    assert process.stdout.readline() == "deep/a: 2 training steps\n"
    case.log("deep/a", train(3), CONFIG, resume(1), *map(train, (2, 3, 4)))
    case.log("b", CONFIG, train(1))
    wait_for((case.runs / "export" / "b.csv").exists)
    status, _, said = ended(process, signal.SIGINT, 20)
    assert status == 0, said
    rows = csv_rows(case.runs / "export" / "deep_a_6fa53a.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"] and rows[2]["train/loss"] != "", rows


# A module whose functions, and those of what they return, note their calls.
STUB = """
import json, sys
calls, resumed, summary = open("calls", "a"), False, {}
def __getattr__(name):
    def noted(*words, **named):
        print(json.dumps([name, *words, named]), file=calls, flush=True)
        return sys.modules[__name__]
    return noted
"""


def test_export_tensorboard_and_wandb(case):
    for name in ("tensorboardX", "wandb"):
        (case.folder / f"{name}.py").write_text(STUB)
    noted = lambda: json_lines(case.folder / "calls")
    here = {"PYTHONPATH": str(case.folder)}
    first = [{**CONFIG, "unix_s": 1000}, val(0, 8.0), train(1), train(2, loss=float("nan"))]
    old = case.log("a", *first, sampled(2, "a", "b")) / "export" / "a" / "events.out.tfevents.old"
    old.parent.mkdir(parents=True)
    old.touch()
    assert case.run("watch.py", "runs/a", "--export", "tensorboard", **here).returncode == 0
    assert not old.exists(), "an export anew replaces the one before"
    lines = noted()
    assert ["add_scalar", "val/loss", 8.0, 0, {"walltime": 1000.0}] in lines
    assert ["add_text", "sample", "ab", 2, {"walltime": 1001.0}] in lines
    assert [line[3] for line in lines if line[1] == "train/loss"] == [1]
    (case.folder / "calls").unlink()
    process = case.start("runs", "--export", "wandb", "--follow", "--out", "wb", **here)
    assert process.stdout.readline() == "a: 2 training steps\n"
    case.log("a", train(3), CONFIG, resume(1), *map(train, (2, 3, 4, 5)))
    wait_for(lambda: {"step": 4} in [line[-1] for line in noted()])
    status, _, said = ended(process, signal.SIGINT, 20)
    assert status == 0, said
    first, *logged, last = noted()
    assert first[0] == "init" and first[1]["name"] == "a" and first[1]["config"] == CONFIG["options"] and last[0] == "finish"
    assert [line[-1]["step"] for line in logged] == [0, 1, 2, 3, 4, 5], "no step twice, none missing"


def test_plot(case):
    runs = [case.log(name, CONFIG, val(0, 8.0), *map(train, range(1, 50)), val(49, 2.0)) for name in ("a", "b")]
    for i, step in enumerate((10, 49)):
        case.log("a", evaluated(step, "hellaswag", acc=0.3 + i / 10, acc_norm=0.4))
    for axis in ("step", "tokens", "time"):
        done = case.run("plot.py", *runs, "-o", f"{axis}.png", "--x", axis, "--smooth", 4)
        assert done.returncode == 0 and (case.folder / f"{axis}.png").read_bytes().startswith(b"\x89PNG"), done
    tall, low = (case.folder / "step.png").read_bytes(), case.run("plot.py", runs[1], "-o", "b.png")
    assert low.returncode == 0
    height = [int.from_bytes(data[20:24], "big") for data in (tall, (case.folder / "b.png").read_bytes())]
    assert 1.8 < height[0] / height[1] < 2.2, "evaluations have a panel below the loss"
    seeds = [case.log(f"s{i}", CONFIG | {"options": OPTIONS | {"seed": i}}, val(1, 3.0 + i), train(1)) for i in (1, 2)]
    done = case.run("plot.py", *seeds, f"x={runs[0]}", "-o", "seeds.svg")
    shown = (case.folder / "seeds.svg").read_text()
    assert done.returncode == 0 and "s1  4.5000 ± 0.5000 (2 seeds)" in shown and "x  2.0000 (1 seed)" in shown, done
    records = [{"name": "a", "seed": i, "status": "done", "val": [[4, 2.5 + i]], "train": []} for i in (1, 2)]
    records = [json.dumps(its | {"tokens_per_step": 8, "tokens_per_second": 4}) for its in records]
    (case.folder / "runs.jsonl").write_text("\n".join(records) + "\n")
    done = case.run("plot.py", "study=runs.jsonl:a", "-o", "study.svg", "--x", "time")
    shown = (case.folder / "study.svg").read_text()
    assert done.returncode == 0 and "study  4.0000 ± 0.5000 (2 seeds)" in shown, done
    case.refuse("plot.py", "no run of 'b' is done in it; it has a", "runs.jsonl:b")
    done = case.run("plot.py", *(case.log(name, CONFIG, train(1)) for name in ("_x", "$x^$", os.fsdecode(b"\xff"))))
    assert done.returncode == 0 and not done.stderr, "the names of folders are no formulas, and may be of any bytes"
    (case.runs / "notes.txt").write_text("mine"), (case.runs / "empty").mkdir()
    done = case.run("plot.py", *sorted(case.runs.glob("[aben]*")))
    assert done.returncode == 0 and done.stderr.count("\n") == 2 == done.stderr.count("notice: left out: "), done
    case.refuse("plot.py", "cannot be read", case.runs / "a", case.runs / "none")


def coloured(png, colour):
    """Returns the columns in which a picture has the colour."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    pixels, width = picture.get_flattened_data(), picture.width
    return {i % width for i, pixel in enumerate(pixels) if pixel == wanted}


def test_page_grows(case):
    """The page shows a run, its curve grows while the run does, and a resume leaves no step twice."""
    if not find_browser():
        return "skipped: no chromium; type `apt-get install chromium`"
    from colours import COLOURS

    case.log("a", CONFIG, val(0, 8.0), *map(train, range(1, 12)))
    case.log("b", {**CONFIG, "options": {"model": "nano", "lr": 0.001, "steps": 100}}, *map(train, range(1, 101)))
    curve = "runs.get('a').curves.get('loss ').source.data"
    with Server(case) as server, Page(server.url) as page:
        assert page.wait("typeof runs !== 'undefined' && runs.size === 2 && runs.get('a').curves.size > 3")
        assert page.evaluate(f"{curve}.x.length") == 11 and page.evaluate(f"{curve}.y[0]") == 8 / 1.1
        time.sleep(1)  # for the drawing
        narrow = coloured(page.screenshot(), COLOURS[0])
        case.log("a", *map(train, range(12, 91)), val(90, 1.5))
        assert page.wait(f"{curve}.x.length === 90")
        time.sleep(1)
        wide = coloured(page.screenshot(), COLOURS[0])
        assert len(narrow) > 8 and max(wide) > max(narrow) + 300, (max(narrow), max(wide))
        body = page.evaluate("document.body.innerText")
        assert "step 90 of 100" in body and "1.5000" in body and "--lr\t0.003\t0.001" in body, body
        case.log("a", CONFIG, resume(50), train(51, loss=4.0))
        assert page.wait(f"{curve}.x.length === 51")
        assert page.evaluate(f"new Set({curve}.x).size") == 51 and page.evaluate(f"{curve}.y[50]") == 4.0
        evaluations = evaluated(51, "hellaswag", acc_norm=0.31), evaluated(51, "lambada", acc=0.4, perplexity=21.5)
        case.log("a", sampled(51, "<b>to", " be"), *evaluations)
        assert page.wait("document.querySelector('pre')?.innerText === '<b>to be'"), "text is no markup"
        assert page.evaluate("!figures.eval.box.hidden && figures.memory.box.hidden")
        body = page.evaluate("document.body.innerText")
        assert "hellaswag\t31.0 %" in body and "lambada, perplexity\t21.50\t–" in body, body
        # What was hidden stays hidden while its run grows.
        page.evaluate("document.querySelector('.run').click()")
        case.log("a", train(52))
        assert page.wait(f"{curve}.x.length === 52")
        assert page.evaluate("runs.get('a').curves.get('loss ').glyph.visible") is False
        where = page.evaluate("performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin)")
        assert set(where) == {server.url[:-1]} and not page.errors, (where, page.errors)


def test_page_zooms(case):
    """A drag in one plot zooms all of them, and what is in sight then is drawn in full."""
    if not find_browser():
        return "skipped: no chromium; type `apt-get install chromium`"
    case.log("a", CONFIG, *(train(step, loss=9.0 if step == 4321 else None) for step in range(1, 20001)))
    data = "runs.get('a').curves.get('loss ').source.data"
    with Server(case) as server, Page(server.url) as page:
        assert page.wait("typeof runs !== 'undefined' && runs.size === 1 && runs.get('a').curves.size > 3")
        assert 1000 < page.evaluate(f"{data}.x.length") < 2100 and page.evaluate(f"Math.max(...{data}.y)") == 9.0
        time.sleep(1)
        box = page.evaluate("(box => [box.left, box.top, box.width])(figures.loss.box.getBoundingClientRect())")
        points = [(box[0] + part * box[2], box[1] + 100 * (1 + part)) for part in (0.3, 0.35, 0.4)]
        kinds = ("mousePressed", "mouseMoved", "mouseReleased")
        for kind, (x, y) in zip(kinds, points):
            page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
            time.sleep(0.1)
        assert page.wait("figures.speed.plot.x_range.end - figures.speed.plot.x_range.start < 3e6")
        low, high = page.evaluate("[figures.loss.plot.x_range.start, figures.loss.plot.x_range.end]")
        inside = [512 * step for step in range(1, 20001) if low <= 512 * step <= high]
        assert page.wait(f"{data}.x[0] > 0.9 * {low} && {data}.x.at(-1) < 1.1 * {high}")
        assert page.evaluate(f"{data}.x.length") >= min(1000, len(inside)), (len(inside), low, high)
        page.evaluate("(s => { s.value = 5; s.dispatchEvent(new Event('input')); })(document.getElementById('smooth'))")
        assert page.wait("runs.get('a').curves.has('loss  unsmoothed')")
        for axis in ("step", "time_s"):
            changed = f"s => {{ s.value = '{axis}'; s.dispatchEvent(new Event('change')); }}"
            page.evaluate(f"({changed})(document.getElementById('axis'))")
        assert page.wait(f"{data}.x.at(-1) === 10000") and not page.errors, page.errors


def test_profile_names_rows_of_bench(case):
    """The ranges of --profile have the names of `make bench`'s rows, and `data` besides."""
    source = "".join((ROOT / path).read_text() for path in ("train_gpt2.cu", "kernels/linear.cuh", "optim/model/step.cu"))
    named = set(re.findall(r'named\((?:\w->)?dev, "([^"]+)"\)', source))
    row = r'\b(?:account\(a, |(?:layer|back)\()"([^"]+)"'
    rows = set(re.findall(row, (ROOT / "dev" / "bench.cu").read_text()))
    assert len(rows) > 15 and named == rows | {"data"}, named ^ rows


def missing_tools():
    done = subprocess.run([sys.executable, "-c", "import matplotlib, bokeh"], capture_output=True)
    return "type `make venv`" if done.returncode else None


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing_tools()))
