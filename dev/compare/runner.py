"""Runs what is left of a sweep: as many processes at once as there are slots, until all is done or the budget is spent.

A slot is a GPU, or the CPU; `jobs` of them share one. Each run has a folder of its own under `work`, where ./train
writes; its record goes to the file `records`. A run whose folder holds a checkpoint goes on from there, one without begins anew.
Children end with this process, however it ends, so that no two write to one folder.
"""

import contextlib
import ctypes
import fcntl
import json
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
from runlog import RunLog
from sweep import Problem
from trainer import ROOT

TELL_EVERY = 30.0  # seconds between lines of progress
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
    return [str(i) for i in range(len([line for line in listed.split("\n") if line.startswith("GPU ")]))]


def die_with_parent():
    """Asks in the child, before ./train, for SIGKILL when the parent is gone (Linux's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def tell(line):
    """Prints while the terminal, or the reader of the pipe, is there. No run is lost because nobody listens."""
    try:
        print(line, flush=True)
    except OSError:
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
    gpu: str  # or None
    folder: Path
    process: subprocess.Popen
    first: int  # step at which it began
    log: RunLog
    started: float
    hung: bool = False

    def silence(self):
        """Returns seconds since it last wrote to its log, or began."""
        since_start, log = time.monotonic() - self.started, self.log.path
        return min(time.time() - log.stat().st_mtime, since_start) if log.exists() else since_start

    def step(self):
        """Returns the step that it has reached."""
        if self.log.path.exists():
            self.log.poll()
        return self.log.last("train").get("step", 0)


class Runner:
    def __init__(self, sweep, trainer, gpus, options):
        """`options`: those of the command line."""
        self.sweep, self.trainer, self.options = sweep, trainer, options
        self.work, self.records = options.work, options.out / record.FILE
        self.free = (gpus or [None]) * options.jobs  # first one job on each GPU
        self.active, self.stopping = [], False
        self.begin, self.done_tokens = time.monotonic(), 0
        self.rates = []  # tokens a second of the runs that have ended, starts included
        self.shown = self.begin - TELL_EVERY + 5
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
            log = RunLog(folder / "trial" / "log.jsonl").read(missing_ok=True)
            took = [step["step_s"] for step in log.records["train"][TRIAL // 4 :]]
            kept.write_text(str(int(self.sweep.seconds / statistics.median(took)) if took else TRIAL))
        return int(kept.read_text())

    def start(self, run, gpu):
        folder = self.work / run.slug()
        key = json.dumps({"options": run.options_key(), "data": self.trainer.data_key(run)})
        marker = folder / "sweep.json"
        saved = record.checkpoint(folder) if marker.is_file() and marker.read_text() == key else None
        if not saved:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(key)
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        more = [f"--run={folder}"] + (["--resume=auto"] if saved else [])
        if self.sweep.seconds:
            run.plan["steps"] = self.steps_in_time(run, folder, environment)
            more.append(f"--steps={run.plan['steps']}")
        with (folder / "stdout.txt").open("a") as out, (folder / "stderr.txt").open("w") as err:
            # In a session of its own Ctrl-C reaches this process alone, which then stops its children.
            how = {"cwd": ROOT, "env": environment, "start_new_session": True, "preexec_fn": die_with_parent}
            command = self.trainer.command(run, *more)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **how)
        first = int(saved.name.removeprefix("step_")) if saved else 0
        self.active.append(Job(run, gpu, folder, process, first, RunLog(folder / "log.jsonl"), time.monotonic()))

    def finish(self, job):
        """Writes the record of a job that has ended, unless this process stopped it."""
        self.active.remove(job)
        self.free.insert(0, job.gpu)
        seconds = time.monotonic() - job.started
        words = (job.folder / "stderr.txt").read_text("utf-8", "replace")
        result = record.make(job.run, job.folder, job.process.returncode, words, self.trainer.weights)
        if self.stopping and result["status"] == "died":
            return
        if job.hung and result["status"] == "died":
            said = f"hung: nothing in its log for {duration(self.options.silence)}"
            result["reason"] = f"{said} at step {job.step()} of {result['steps']}"
        steps = max(0, job.step() - result["resumed_at"])
        tokens = steps * result["tokens_per_step"]
        self.done_tokens += tokens
        if result["status"] == "done" and 4 * steps >= result["steps"]:  # of less, the start is too much of it
            self.rates.append(tokens / seconds)
        result |= {
            "data_key": self.trainer.data_key(job.run),
            "seconds": round(seconds, 1),
            "sharing": self.options.jobs,
        }
        record.write(self.records, result)
        self.count[result["status"]] += 1
        # A run that died may be mended and go on from its checkpoint.
        if not self.sweep.keep and result["status"] != "died":
            for saved in job.folder.glob("step_*"):
                shutil.rmtree(saved)
        loss = result["final_loss"]
        told = f"val {loss:.4f}" if loss is not None else f"{result['status']}: {result['reason']}"
        tell(f"{job.run.label}  {told}  {duration(seconds)}")

    # All of them.

    def in_time(self, run):
        """Returns whether a run would end in time, judged by those that have ended."""
        tokens = run.plan["tokens_per_step"] * run.plan["steps"]
        seconds = 1.2 * self.sweep.seconds or (tokens / min(self.rates) if self.rates else 0)
        return time.monotonic() + seconds < self.options.until

    def progress(self, waiting):
        """Prints one line after 5 seconds and then twice a minute."""
        now = time.monotonic()
        if now - self.shown < TELL_EVERY:
            return
        self.shown, done, names = now, self.done_tokens, []
        left = sum(run.plan["tokens_per_step"] * run.plan["steps"] for run in waiting)
        for job in self.active:
            each, steps, step = job.run.plan["tokens_per_step"], job.run.plan["steps"], job.step()
            done += max(0, step - job.first) * each
            left += max(0, steps - step) * each
            names.append(f"{job.run.label} {100 * step // max(1, steps)}%")
        eta = duration(left * (now - self.begin) / done) if done else "?"
        shown = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
        speed = f"{done / (now - self.begin):.3g} tokens/s"
        tell(f"{len(waiting)} waiting, {len(self.active)} running ({shown})  {speed}  eta {eta}")

    def stop(self):
        """Sends SIGTERM, so that the runs save and end, and SIGKILL to those that do not, or at a second Ctrl-C."""
        tell(f"stopping {len(self.active)} runs; type the same command to go on")
        for job in self.active:
            job.process.terminate()
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(KeyboardInterrupt):
            while any(job.process.poll() is None for job in self.active) and time.monotonic() < until:
                time.sleep(0.05)
        for job in list(self.active):
            if job.process.poll() is None:
                job.process.kill()
            job.process.wait()
            self.finish(job)

    @contextlib.contextmanager
    def locked(self):
        """Keeps other run.py from writing to these run folders or records. The folders are locked themselves: a lock file
        would lie among the report's files."""
        with contextlib.ExitStack() as at_end:
            for folder, option in (self.work, "--work"), (self.records.parent, "--out"):
                folder.mkdir(parents=True, exist_ok=True)
                number = os.open(folder, os.O_RDONLY)
                at_end.callback(os.close, number)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    hint = f"wait for it, or give another {option}"
                    raise Problem(f"{folder}: another run.py is at work there; {hint}") from None
            yield

    def go(self, waiting):
        """Runs them, while no other start can. True when everything was run, or was found not to fit the budget; False
        after Ctrl-C, SIGTERM or SIGHUP."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, hang_up)
        try:
            while waiting or self.active:
                while waiting and self.free and self.in_time(waiting[0]):
                    self.start(waiting.pop(0), self.free.pop(0))
                if waiting and not self.active and not self.in_time(waiting[0]):
                    tell(f"the budget is spent: {len(waiting)} runs wait for the next start")
                    break
                for job in [job for job in self.active if job.process.poll() is not None]:
                    self.finish(job)
                for job in self.active:
                    if job.silence() > self.options.silence:
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
