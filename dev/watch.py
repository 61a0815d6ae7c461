#!/usr/bin/env python3
"""Serves a page that follows the runs of a folder while they train, from their log.jsonl alone, or exports them.

    pip install -r dev/requirements.txt
    python dev/watch.py runs                                     # then open http://127.0.0.1:6007
    python dev/watch.py runs --export csv --out tables           # once
    python dev/watch.py runs --export tensorboard --follow       # until Ctrl-C

RUNS is a folder of runs, at any depth, or one run; runs that begin later appear by themselves. The page needs no network:
bokeh's program comes from the Python package, and only this machine can reach it (on a server, type
`ssh -L 6007:127.0.0.1:6007 SERVER` at home). What a resumed run redoes replaces what was logged before (runlog.py).
"""

import functools
import http.server
import json
import sys
import threading
import time
from pathlib import Path

import watch_export
from colours import COLOURS
from problem import Parser, Problem, answered, needed, say
from runlog import KINDS, RunLog

HERE = Path(__file__).resolve().parent
PORT = 6007


class Runs:
    """Holds the logs of all runs below a folder, by their path in it. Only one thread at a time may call it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            found = "not a folder" if self.folder.exists() else "no such folder"
            raise Problem(f"{folder}: {found}; name one that holds runs, as ./train writes them (runs)")
        self.logs, self.lock = {}, threading.Lock()
        self.poll()
        if not self.logs:
            raise Problem(
                f"{folder}: there is no run in it (a folder with log.jsonl); begin one with ./train, or name another"
            )

    def poll(self):
        """Finds new runs and takes in what all logs have gained."""
        for path in sorted(self.folder.rglob("log.jsonl")):
            name = str(path.parent.relative_to(self.folder))
            if name == ".":
                name = path.parent.resolve().name
            if name not in self.logs:
                self.logs[name] = RunLog(path)
        for log in self.logs.values():
            try:
                log.poll()
            except OSError as error:  # removed, or not readable now
                log.bad = log.bad or (0, f"its log cannot be read ({error.strerror})")


def summary(name, log):
    try:
        age = time.time() - log.path.stat().st_mtime
    except OSError:
        age = 0.0
    options = log.config.get("options", {})
    return {
        "name": name,
        "age_s": max(0.0, round(age, 1)),
        "options": options,
        "steps": options.get("steps"),
        "device": log.config.get("device"),
        "parameters": log.config.get("parameters"),
        "resumes": len(log.resumes),
        "bad": log.complaint(),
    }


def news(runs, have):
    """Returns what a page that has the first `have[name][kind]` records of each run does not know yet."""
    with runs.lock:
        runs.poll()
        result = {}
        for name, log in runs.logs.items():
            its = have.get(name, {})
            same = its.get("changes") == log.changes
            gained = {kind: log.records[kind][its.get(kind, 0) if same else 0 :] for kind in KINDS}
            if not same or any(gained.values()):
                result[name] = {"changes": log.changes, "records": gained}
        return {"folder": str(runs.folder), "runs": [summary(*pair) for pair in runs.logs.items()], "news": result}


@functools.cache
def bokeh_program():
    with needed("watch", "-r dev/requirements.txt"):
        from bokeh.resources import Resources
    return "\n".join(Resources(mode="inline", components=["bokeh", "bokeh-api"]).js_raw).encode()


def files():
    """Returns {path: (type, contents)} of the files of the page."""
    program = (HERE / "watch.js").read_text("utf-8").replace("/*COLOURS*/[]", json.dumps(COLOURS))
    return {
        "/": ("text/html; charset=utf-8", (HERE / "watch.html").read_bytes()),
        "/watch.js": ("text/javascript; charset=utf-8", program.encode()),
        "/bokeh.js": ("text/javascript; charset=utf-8", bokeh_program()),
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers this machine's browser alone: a page of another origin cannot read what it asks for, and a foreign name
    that leads here (Host) is refused."""

    protocol_version = "HTTP/1.1"
    timeout = 20  # seconds that a client may be silent, with its thread

    def __init__(self, runs, contents, *more):
        self.runs, self.contents = runs, contents
        super().__init__(*more)

    def answer(self, status, kind, body):
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        if status != 200:
            self.send_header("Connection", "close")  # so a body that was not read is never taken for a request
        self.end_headers()
        self.wfile.write(body)

    def local(self):
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host in ("127.0.0.1", "localhost"):
            return True
        self.answer(403, "text/plain", b"only 127.0.0.1 and localhost are answered\n")
        return False

    def do_GET(self):
        if self.local():
            found = self.contents.get(self.path.partition("?")[0])
            self.answer(*((200, *found) if found else (404, "text/plain", b"there is no such page\n")))

    def do_POST(self):
        if not self.local():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 7:
            self.answer(400, "text/plain", b"Content-Length must be a number of at most 7 digits\n")
            return
        have = json.loads(self.rfile.read(int(length)))
        self.answer(200, "application/json", json.dumps(news(self.runs, have)).encode())

    def log_message(self, *_):
        pass


def serve(runs, port):
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, runs, files()))
    except OSError as error:
        raise Problem(f"--port {port}: {error.strerror}; type --port 0 for a free one") from None
    server.daemon_threads = True
    count = f"{len(runs.logs)} run" + "s" * (len(runs.logs) > 1)
    say(f"http://127.0.0.1:{server.server_port} follows {count} in {runs.folder}; Ctrl-C ends")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def main():
    parser = Parser(prog="watch", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("runs", nargs="?", default="runs", metavar="RUNS", help="folder of runs, or a run (default: %(default)s)")
    add("--port", type=int, metavar="N", help=f"of 127.0.0.1; 0: a free one (default: {PORT})")
    add("--export", choices=list(watch_export.WRITERS), help="write the runs there instead of serving a page")
    add("--follow", action="store_true", help="go on exporting until Ctrl-C")
    add("--out", metavar="DIR", help="of the export (default: export in RUNS)")
    options = parser.parse_args()
    if options.port is not None and options.export:
        raise Problem("--port is of the page, and --export writes files; leave one of them out")
    options.port = PORT if options.port is None else options.port
    if not 0 <= options.port < 1 << 16:
        raise Problem(f"--port {options.port}: give 0 to 65535")
    if not options.export and (options.follow or options.out):
        raise Problem("--follow and --out go with --export csv|tensorboard|wandb")
    runs = Runs(options.runs)
    if not options.export:
        serve(runs, options.port)
        return
    folder = Path(options.out) if options.out else runs.folder / "export"
    try:
        watch_export.export(runs, options.export, folder, options.follow)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Problem(f"--out {folder}: cannot be written ({error.strerror}); give another --out") from None


if __name__ == "__main__":
    sys.exit(answered("watch", main))
