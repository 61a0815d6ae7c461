"""Runs what is left of a sweep: as many processes at once as there are slots, until all is done or the budget is spent.

A slot is a GPU, or the CPU; `jobs` of them share one. Each run has a folder of its own under `work`, where ./train
writes; its record goes to the file `records`. A run whose folder holds a checkpoint goes on from there, one without begins anew.
Children end with this process, however it ends, so that no two write to one folder.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import record
from sweep import Problem
from trainer import ROOT

TELL_EVERY = 30.0  # seconds between lines of progress where there is no terminal
TRIAL = 120  # steps of the run that measures how many fit into a study's `seconds`
PATIENCE = 60.0  # seconds in which a child may write its checkpoint after SIGTERM


def gpus_at_hand(environment):
    """Returns names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return [str(i) for i, line in enumerate(x for x in listed.split("\n") if x.startswith("GPU "))]


def slots(gpus, jobs):
    """Returns [(GPU or None, which of its jobs)]: first one job on each GPU."""
    return [(gpu, job) for job in range(jobs) for gpu in gpus or [None]]


def die_with_parent():
    """Asks in the child, before ./train, for SIGKILL when the parent is gone (Linux's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def tell(text, end="\n"):
    """Prints while the terminal, or the reader of the pipe, is there. No run is lost because nobody listens."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        sys.stdout = open(os.devnull, "w")


def hang_up(number, frame):
    """The terminal is gone: nothing can be written there, and the shell may tell of it once more."""
    signal.signal(number, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    raise KeyboardInterrupt


def duration(seconds):
    s = int(seconds + 0.5)
    return f"{s} s" if s < 60 else f"{s // 60}m{s % 60:02}s" if s < 3600 else f"{s // 3600}h{s // 60 % 60:02}m"


@dataclass
class Job:
    run: object
    slot: tuple
    folder: Path
    process: subprocess.Popen
    first: int  # step at which it began
    resumes: int  # of its log before this start
    started: float
    hung: bool = False

    def silence(self):
        """Returns seconds since it last wrote to its log, or began."""
        try:
            written = time.time() - (self.folder / "log.jsonl").stat().st_mtime
        except OSError:
            written = math.inf
        return min(written, time.monotonic() - self.started)


class Runner:
    def __init__(self, sweep, trainer, work, records, jobs, gpus, until, silence, commit):
        self.sweep, self.trainer, self.work, self.records = sweep, trainer, work, records
        self.jobs, self.silence, self.commit = jobs, silence, commit
        self.free = slots(gpus, jobs)
        self.begin, self.until = time.monotonic(), until
        self.active, self.stopping = [], False
        self.done_tokens = 0
        self.rates, self.parts = [], []  # tokens a second of this start, starts included: of whole runs, of resumed ones
        self.shown, self.width = time.monotonic() - TELL_EVERY + 5, 0
        self.count = {"done": 0, "diverged": 0, "died": 0}

    # One run.

    def steps_in_time(self, run, folder, environment):
        """Returns how many steps the study's `seconds` allow, by the later steps of a short run, which is made once."""
        kept = folder / "steps.txt"
        if not kept.is_file():
            short = {"steps": str(TRIAL), "warmup": "0", "val-every": "1000000", "save": "none"}
            options = {key: value for key, value in run.options.items() if key not in ("save-every", "keep")} | short
            command = self.trainer.command(replace(run, options=options), f"--run={folder}/trial")
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(command, cwd=ROOT, env=environment, preexec_fn=die_with_parent, **quiet)
            took = [step["step_s"] for step in record.read_log(folder / "trial").records["train"][TRIAL // 4 :]]
            kept.write_text(str(int(self.sweep.seconds / statistics.median(took)) if took else TRIAL))
        return int(kept.read_text())

    def start(self, run, slot):
        folder = self.work / run.slug()
        key = {"options": run.options_key(), "data": self.trainer.data_key(run)}
        marker = folder / "sweep.json"
        same = marker.is_file() and marker.read_text() == json.dumps(key)
        saved = record.checkpoint(folder) if same else None
        if not saved:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(key))
        environment = dict(os.environ)
        if slot[0] is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot[0]
        resumes = len(record.read_log(folder).resumes)
        more = [f"--run={folder}"] + (["--resume=auto"] if saved else [])
        if self.sweep.seconds:
            run.plan["steps"] = self.steps_in_time(run, folder, environment)
            more.append(f"--steps={run.plan['steps']}")
        with (folder / "stdout.txt").open("a") as out, (folder / "stderr.txt").open("w") as err:
            process = subprocess.Popen(
                self.trainer.command(run, *more),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops its children
                preexec_fn=die_with_parent,
            )
        first = int(saved.name.removeprefix("step_")) if saved else 0
        self.active.append(Job(run, slot, folder, process, first, resumes, time.monotonic()))

    def finish(self, job):
        """Writes the record of a job that has ended, unless this process stopped it."""
        self.active.remove(job)
        self.free.insert(0, job.slot)
        seconds = time.monotonic() - job.started
        resumed = record.read_log(job.folder).resumes[job.resumes :]
        job.first = resumed[-1] if resumed else 0  # a checkpoint that cannot be read is not gone on from
        words = (job.folder / "stderr.txt").read_text("utf-8", "replace")
        result = record.make(job.run, job.folder, job.process.returncode, words, self.trainer.weights)
        if self.stopping and result["status"] == "died":
            return
        if job.hung and result["status"] == "died":
            reached = record.last_step(job.folder)
            result["reason"] = f"hung: nothing in its log for {duration(self.silence)} at step {reached} of {result['steps']}"
        steps = max(0, record.last_step(job.folder) - job.first)
        tokens = steps * result["tokens_per_step"]
        self.done_tokens += tokens
        if result["status"] == "done" and 4 * steps >= result["steps"]:  # of less, the start is too much of it
            (self.rates if job.first == 0 else self.parts).append(tokens / seconds)
        result |= {
            "data_key": self.trainer.data_key(job.run),
            "seconds": round(seconds, 1),
            "resumed_at": job.first,
            "sharing": self.jobs,
            "commit": self.commit or result["commit"],
        }
        record.write(self.records, result)
        self.count[result["status"]] += 1
        # A run that died may be mended and go on from its checkpoint.
        if not self.sweep.keep and result["status"] != "died":
            for saved in job.folder.glob("step_*"):
                shutil.rmtree(saved)
        loss = result["final_loss"]
        told = f"val {loss:.4f}" if loss is not None else f"{result['status']}: {result['reason']}"
        self.say(f"{job.run.label}  {told}  {duration(seconds)}")

    # All of them.

    def in_time(self, run):
        """Returns whether a run would end in time, judged by those that have ended."""
        tokens = run.plan["tokens_per_step"] * run.plan["steps"]
        slowest = min(self.rates or self.parts, default=None)
        seconds = 1.2 * self.sweep.seconds or (tokens / slowest if slowest else 0)
        return time.monotonic() + seconds < self.until

    def progress(self, waiting):
        """Prints one line: on a terminal over itself, elsewhere after 5 seconds and then twice a minute."""
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if now - self.shown < (0.5 if terminal else TELL_EVERY):
            return
        self.shown = now
        done, left = self.done_tokens, 0
        for job in self.active:
            each, step = job.run.plan["tokens_per_step"], record.last_step(job.folder)
            job.first = min(job.first, step)
            done += max(0, step - job.first) * each
            left += max(0, job.run.plan["steps"] - step) * each
        left += sum(run.plan["tokens_per_step"] * run.plan["steps"] for run in waiting)
        elapsed = now - self.begin
        eta = duration(left * elapsed / done) if done else "?"
        names = ", ".join(
            f"{j.run.label} {100 * record.last_step(j.folder) // max(1, j.run.plan['steps'])}%" for j in self.active[:4]
        )
        names += ", ..." if len(self.active) > 4 else ""
        line = f"{len(waiting)} waiting, {len(self.active)} running ({names})  {done / elapsed:.3g} tokens/s  eta {eta}"
        if terminal:
            line = line[: shutil.get_terminal_size().columns - 1]
            tell("\r" + line.ljust(self.width), end="")
            self.width = len(line)
        else:
            tell(line)

    def say(self, line):
        tell(("\r" if self.width else "") + line.ljust(self.width))
        self.width = 0

    def stop(self):
        """Sends SIGTERM, so that the runs save and end, and SIGKILL to those that do not, or at a second Ctrl-C."""
        self.say(f"stopping {len(self.active)} runs; type the same command to go on")
        for job in self.active:
            job.process.terminate()
        until = time.monotonic() + PATIENCE
        try:
            while any(job.process.poll() is None for job in self.active) and time.monotonic() < until:
                time.sleep(0.05)
        except KeyboardInterrupt:
            pass
        for job in list(self.active):
            if job.process.poll() is None:
                job.process.kill()
            job.process.wait()
            self.finish(job)

    @contextlib.contextmanager
    def locked(self):
        """Keeps other run.py from writing to these run folders or records. The folder of the records is locked
        itself: a lock file would lie among the report's files."""
        out = self.records.parent
        self.work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        places = (self.work / "lock", os.O_WRONLY | os.O_CREAT, "--work"), (out, os.O_RDONLY, "--out")
        with contextlib.ExitStack() as at_end:
            for path, flags, option in places:
                number = os.open(path, flags, 0o666)
                at_end.callback(os.close, number)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if path == out and not isinstance(error, BlockingIOError):
                        continue  # this file system cannot lock folders
                    place = out if path == out else path.parent
                    raise Problem(
                        f"{place}: another run.py is at work there; wait for it, or give another {option}"
                    ) from None
            yield

    def go(self, left):
        """Runs what `left` returns when no other start can end runs any more. True when everything was run, or was found
        not to fit the budget; False after Ctrl-C, SIGTERM or SIGHUP."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, hang_up)
        with self.locked():
            waiting = left()
            try:
                while waiting or self.active:
                    while waiting and self.free and self.in_time(waiting[0]):
                        self.start(waiting.pop(0), self.free.pop(0))
                    if waiting and not self.active and not self.in_time(waiting[0]):
                        self.say(f"the budget is spent: {len(waiting)} runs wait for the next start")
                        break
                    for job in [job for job in self.active if job.process.poll() is not None]:
                        self.finish(job)
                    for job in self.active:
                        if job.silence() > self.silence:
                            job.hung = True
                            job.process.kill()
                    self.progress(waiting)
                    time.sleep(0.05)
            except KeyboardInterrupt:
                self.stopping = True
                self.stop()
            finally:  # whatever else went wrong here, nothing is left running
                for job in self.active:
                    job.process.kill()
        return not self.stopping
