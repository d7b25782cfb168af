"""
The fault campaign: real processes are killed, run out of disk or find damaged files, then the same command runs again. It must
say where it goes on, and end with bitwise the losses (or files) of a run that nothing happened to.

    python tests/faults.py                       # all cases, a table on stdout; about half an hour on two busy cores
    python tests/faults.py --case sigterm        # one case
    python tests/faults.py --write               # all, and the table into tests/README.md

Everything runs on a CPU with a model of 1.6M parameters, through the launchers that a user starts. The cases with a full disk
mount a small tmpfs, which needs root; they are skipped elsewhere, with the reason.
"""

import argparse
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRETRAIN = ROOT / "paper-experiments" / "pretrain"
README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
RUN = "tiny-ldm-lr4e-3-seed42"
STEPS, SAVE_INTERVAL = 12, 4
SMALL = (
    "model.d_model=16",
    "model.n_layers=2",
    "model.block.feed_forward.hidden_size=32",
    "dataset.sequence_length=64",
    "train_module.max_sequence_length=64",
    "train_module.rank_microbatch_size=64",
    "data_loader.global_batch_size=128",
    "trainer.metrics_collect_interval=1",
    f"trainer.callbacks.checkpointer.save_interval={SAVE_INTERVAL}",
    "trainer.callbacks.checkpointer.ephemeral_save_interval=null",
    "trainer.callbacks.held_out.sequence_length=64",
    "trainer.callbacks.held_out.max_windows=1",
)
LOSS = "train/CE loss"
DEADLINE = 400
"""Seconds for one process; a start takes 15 s of CPU time, and other work may share the cores."""


class Failure(AssertionError):
    """The campaign found something that does not keep working."""


class Skipped(Exception):
    """A case cannot run here; the message says why."""


@dataclass
class Outcome:
    """One row of the table."""

    fault: str
    happened: str
    lost: str
    equal: str


@dataclass
class Finished:
    """A process that ended."""

    code: int
    text: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("error: ")]


def expect(condition: Any, what: str) -> None:
    if not condition:
        raise Failure(what)


def losses(run: Path) -> dict[int, float]:
    """Step -> training loss; JSON has the shortest decimals that give the same float."""
    out = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                metrics = json.loads(line)
                if LOSS in metrics:
                    out[metrics["step"]] = metrics[LOSS]
    return out


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Change bits of one byte."""
    with path.open("r+b") as f:
        f.seek(offset)
        (byte,) = f.read(1)
        f.seek(offset)
        f.write(bytes([byte ^ mask]))


def cut(path: Path) -> None:
    """Lose the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def words(seed: int, count: int) -> str:
    import random

    rng = random.Random(seed)
    stock = (
        "the river runs past old mills and gardens where children read maps of naïve stars".split()
    )
    return " ".join(rng.choice(stock) + str(rng.randrange(100)) for _ in range(count))


class Process:
    """A command in a session of its own, with its output in a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], **options: Any):
        self.log, self.began = log, time.monotonic()
        with log.open("wb") as f:
            self.popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=options.pop("stderr", f),
                start_new_session=True,
                **options,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], what: str, pause: float = 0.02) -> None:
        while not condition():
            if self.popen.poll() is not None:
                raise Failure(
                    f"{what}: the process ended before, with {self.popen.returncode}:\n{self.tail}"
                )
            if time.monotonic() - self.began > DEADLINE:
                self.kill()
                raise Failure(f"{what}: not within {DEADLINE} s:\n{self.tail}")
            time.sleep(pause)

    @property
    def tail(self) -> str:
        return "\n".join(self.text.splitlines()[-15:])

    def kill(self) -> None:
        """As a machine that stops: the command and everything that it started, at once."""
        # torchrun gives each rank a session of its own.
        found, new = [], [self.popen.pid]
        while new:
            found += new
            new = [child for pid in new for child in children(pid)]
        for kill, number in [(os.killpg, self.popen.pid), *((os.kill, pid) for pid in found)]:
            with contextlib.suppress(ProcessLookupError):
                kill(number, signal.SIGKILL)
        self.popen.wait()

    def finish(self) -> Finished:
        try:
            code = self.popen.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"still running after {DEADLINE} s:\n{self.tail}") from None
        return Finished(code, self.text, time.monotonic() - self.began)


class Campaign:
    """The folder that the cases work in, and the undisturbed runs that they are compared with."""

    def __init__(self, work: Path):
        self.work = work
        self.count = 0

    def environment(self, **changes: Any) -> dict[str, str]:
        keep = {
            k: v
            for k, v in os.environ.items()
            if k
            not in (
                "DATA_DIR",
                "CHECKPOINT_DIR",
                "SEED",
                "STEPS",
                "DRY_RUN",
                "NPROC",
                "OUT",
                "METHODS",
            )
        }
        fixed = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        return {**keep, **fixed, **{k: str(v) for k, v in changes.items()}}

    def start(
        self, command: list[Any], env: dict[str, Any] | None = None, **options: Any
    ) -> Process:
        self.count += 1
        log = self.work / f"log-{self.count:03d}.txt"
        return Process([str(c) for c in command], log, self.environment(**(env or {})), **options)

    def train(self, checkpoints: Path, data: Path | None = None, nproc: int = 1) -> Process:
        return self.start(
            ["bash", PRETRAIN / "launch.sh", "--gpu", "cpu", "tiny", "ldm", "0.004", *SMALL],
            {
                "DATA_DIR": data or self.data,
                "CHECKPOINT_DIR": checkpoints,
                "STEPS": STEPS,
                "NPROC": nproc,
            },
        )

    def tokenise(self, out: Path, source: Path, *more: str) -> Process:
        return self.start(
            [
                *(sys.executable, "data_utils/tokenize_from_pretrain_datasets.py"),
                *("--train-parquet-glob", source / "train" / "*.parquet"),
                *("--eval-parquet-path", source / "eval" / "held.parquet"),
                *("--output-dir", out, "--workers", "1", "--skip-existing", *more),
            ]
        )

    def parquet(self, name: str, shards: int, documents: int) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = self.work / name
        for i in range(shards + 1):
            path = folder / (f"train/{i:03d}.parquet" if i < shards else "eval/held.parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [words(10_000 * i + k, 300) for k in range(documents)]
            pq.write_table(pa.table({"text": texts}), path, row_group_size=max(1, documents // 2))
        return folder

    @cached_property
    def source(self) -> Path:
        return self.parquet("parquet", 2, 8)

    @cached_property
    def data(self) -> Path:
        done = self.tokenise(self.work / "data", self.source).finish()
        expect(done.code == 0, f"the tokeniser failed:\n{done.text}")
        return self.work / "data"

    def baseline(self, nproc: int = 1) -> Path:
        """The run folder of an undisturbed run."""
        folder = self.work / f"undisturbed-{nproc}"
        if not folder.exists():
            done = self.train(folder, nproc=nproc).finish()
            expect(done.code == 0, f"the undisturbed run failed:\n{done.text[-3000:]}")
            expect(sorted(losses(folder / RUN)) == list(range(1, STEPS + 1)), "steps are missing")
        return folder / RUN

    def interrupted(self, name: str) -> Path:
        """A CHECKPOINT_DIR as a run leaves it that was killed after its second checkpoint."""
        folder = self.work / name
        shutil.copytree(self.baseline(), folder / RUN)
        shutil.rmtree(folder / RUN / f"step{STEPS}")
        lines = (folder / RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= 2 * SAVE_INTERVAL + 1]
        (folder / RUN / "metrics.jsonl").write_text("".join(kept))
        return folder

    def resume(
        self,
        checkpoints: Path,
        expected: int | None,
        reached: int,
        data: Path | None = None,
        nproc: int = 1,
    ) -> tuple[str, str, str]:
        """
        The same command again, to its end.

        :param expected: The step that it must say that it goes on from; ``None``: a new run.
        :param reached: The step that the disturbed run had reached.

        :returns: What it said, the time lost, and whether the losses are the undisturbed run's.
        """
        process = self.train(checkpoints, data, nproc)
        run = checkpoints / RUN
        # Until the resumed run has dropped the lines beyond its checkpoint, those are the disturbed run's.
        said = "a new run" if expected is None else f"going on from step {expected}"
        process.wait_for(lambda: said in process.text or "Starting epoch" in process.text, said)
        expect(said in process.text, f"the run does not say '{said}':\n{process.tail}")
        process.wait_for(lambda: "Starting epoch" in process.text, "the first step")
        process.wait_for(lambda: reached in losses(run), f"step {reached}")
        seconds = time.monotonic() - process.began
        done = process.finish()
        expect(done.code == 0, f"the same command failed again:\n{done.text[-3000:]}")
        ours, theirs = losses(run), losses(self.baseline(nproc))
        expect(ours == theirs, f"other losses than the undisturbed run: {ours} against {theirs}")
        expect((run / f"step{STEPS}" / ".metadata.json").is_file(), "no last checkpoint")
        lost = f"{reached - (expected or 0)} steps; {seconds:.0f} s until step {reached} again"
        return f"the same command: {said}", lost, f"yes, {len(ours)} losses"


Case = Callable[[Campaign], Outcome]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# -- killed -------------------------------------------------------------------------------------


@case
def kill_in_step(c: Campaign) -> Outcome:
    folder = c.work / "kill-step"
    process = c.train(folder)
    process.wait_for(lambda: 2 * SAVE_INTERVAL - 2 in losses(folder / RUN), "step 6")
    process.kill()
    reached = max(losses(folder / RUN))
    expect(reached < 2 * SAVE_INTERVAL, "killed too late")
    said, lost, equal = c.resume(folder, SAVE_INTERVAL, reached)
    return Outcome("kill -9 during a step", f"step {SAVE_INTERVAL} kept; {said}", lost, equal)


@case
def kill_in_checkpoint(c: Campaign) -> Outcome:
    for attempt in range(3):
        folder = c.work / f"kill-checkpoint-{attempt}"
        process = c.train(folder)
        step = folder / RUN / f"step{2 * SAVE_INTERVAL}"
        begun = (step, step.with_name(step.name + "-tmp"))
        process.wait_for(lambda: any(p.exists() for p in begun), "the second checkpoint", 0.0005)  # noqa: B023
        process.kill()
        if not (step / ".metadata.json").exists():
            break
    else:
        raise Failure("the checkpoint was always complete before the kill")
    left = ", ".join(sorted(p.name for p in (folder / RUN).glob(f"{step.name}*")))
    reached = max(losses(folder / RUN))
    said, lost, equal = c.resume(folder, SAVE_INTERVAL, reached)
    return Outcome(
        "kill -9 while a checkpoint is written",
        f"an incomplete {left}, which is not used; {said}",
        lost,
        equal,
    )


@case
def kill_before_config(c: Campaign) -> Outcome:
    folder = c.interrupted("kill-config")
    step = folder / RUN / f"step{2 * SAVE_INTERVAL}"
    (step / "config.json").unlink()
    with (folder / RUN / "metrics.jsonl").open("ab") as f:
        f.write(b'{"step": 10, "train/CE lo')
    said, lost, equal = c.resume(folder, 2 * SAVE_INTERVAL, 2 * SAVE_INTERVAL + 1)
    expect((step / "config.json").is_file(), "config.json was not written again")
    return Outcome(
        "killed between a checkpoint and its config.json, and within a line of metrics.jsonl",
        f"config.json written again, the half line dropped; {said}",
        lost,
        equal,
    )


@case
def sigterm(c: Campaign) -> Outcome:
    folder = c.work / "sigterm"
    process = c.train(folder)
    process.wait_for(lambda: SAVE_INTERVAL + 1 in losses(folder / RUN), "step 5")
    began = time.monotonic()
    os.kill(process.popen.pid, signal.SIGTERM)
    done = process.finish()
    seconds = time.monotonic() - began
    expect(done.code == 143, f"exit code {done.code}:\n{process.tail}")
    saved = max(int(p.parent.name[4:]) for p in (folder / RUN).glob("step*/.metadata.json"))
    expect(saved == max(losses(folder / RUN)), "the last step was not saved")
    said, lost, equal = c.resume(folder, saved, saved)
    return Outcome(
        "SIGTERM", f"exit 143 after {seconds:.0f} s with step {saved} saved; {said}", lost, equal
    )


@case
def rank_dies(c: Campaign) -> Outcome:
    c.baseline(2)
    folder = c.work / "rank"
    process = c.train(folder, nproc=2)
    process.wait_for(lambda: SAVE_INTERVAL + 2 in losses(folder / RUN), "step 6")
    (rank,) = [pid for pid in children(process.popen.pid) if variable(pid, "RANK") == "1"]
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    done = process.finish()
    seconds = time.monotonic() - began
    expect(done.code not in (0, None), "the launcher did not notice")
    reached = max(losses(folder / RUN))
    said, lost, equal = c.resume(folder, SAVE_INTERVAL, reached, nproc=2)
    return Outcome(
        "kill -9 of rank 1 of 2 under torchrun",
        f"the other rank ended too, exit {done.code} after {seconds:.0f} s; {said}",
        lost,
        equal,
    )


@case
def other_process_count(c: Campaign) -> Outcome:
    one, two = losses(c.baseline(1)), losses(c.baseline(2))
    noise = max(abs(one[step] - two[step]) for step in one)
    folder = c.work / "processes"
    for nproc, begin in ((1, 0), (2, SAVE_INTERVAL)):
        process = c.train(folder, nproc=nproc)
        if begin:
            process.wait_for(lambda: f"going on from step {SAVE_INTERVAL}" in process.text, "4")  # noqa: B023
        step = folder / RUN / f"step{begin + SAVE_INTERVAL}" / ".metadata.json"
        what = f"the checkpoint of step {begin + SAVE_INTERVAL}"
        process.wait_for(step.exists, what, 0.001)
        process.kill()
    done = c.train(folder).finish()
    expect(done.code == 0, f"the last start failed:\n{done.text[-3000:]}")
    expect(f"going on from step {2 * SAVE_INTERVAL}" in done.text, done.text[-3000:])
    ours = losses(folder / RUN)
    expect(ours.keys() == one.keys(), f"steps {sorted(ours)}")
    worst = max(abs(ours[step] - one[step]) for step in one)
    # The same numbers are added up in another order; a step on other data or a state that was lost is 1e-2 and more.
    expect(worst <= max(4 * noise, 1e-6), f"{worst:.1e} nats apart; undisturbed {noise:.1e}")
    return Outcome(
        "kill -9 and another number of processes: 1, then 2 (FSDP), then 1",
        f"going on from step {SAVE_INTERVAL}, then from step {2 * SAVE_INTERVAL}",
        f"the steps since the checkpoint; {done.seconds:.0f} s for the last start",
        f"to {worst:.0e} nats; 1 and 2 undisturbed processes to {noise:.0e}",
    )


@case
def second_start(c: Campaign) -> Outcome:
    undisturbed = losses(c.baseline())
    folder = c.work / "twice"
    process = c.train(folder)
    process.wait_for(lambda: 2 in losses(folder / RUN), "step 2")
    os.kill(
        process.popen.pid, signal.SIGSTOP
    )  # else it may end before the second one has imported everything
    done = c.train(folder).finish()
    os.kill(process.popen.pid, signal.SIGCONT)
    expect(done.code == 2 and len(done.errors) == 1, done.text[-3000:])
    expect(f"process {process.popen.pid} on" in done.errors[0], done.errors[0])
    first = process.finish()
    expect(first.code == 0, first.text[-3000:])
    expect(losses(folder / RUN) == undisturbed, "other losses than the undisturbed run")
    return Outcome(
        "the same command while the run goes on",
        f'exit 2 after {done.seconds:.0f} s: "... is the folder of a run that is going on (process ...)"; the run ends',
        "nothing",
        f"yes, {len(undisturbed)} losses",
    )


def children(parent: int) -> list[int]:
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                out.append(int(stat.parent.name))
    return out


def variable(pid: int, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{name}=".encode()):
                return entry.decode().partition("=")[2]
    return None


@case
def kill_in_tokenising(c: Campaign) -> Outcome:
    source = c.parquet("parquet-large", 5, 200)
    whole = c.tokenise(c.work / "whole", source).finish()
    expect(whole.code == 0, whole.text)
    out = c.work / "cut"
    process = c.tokenise(out, source)
    process.wait_for(lambda: any((out / "train").glob("*.json")), "the first shard", 0.001)
    process.kill()
    kept = len(list((out / "train").glob("*.json")))
    expect(not (out / "manifest.json").exists() and 0 < kept < 5, "not killed in the middle")
    done = c.tokenise(out, source).finish()
    expect(done.code == 0 and f"{kept} skipped" in done.text, done.text)
    expect(snapshot(out) == snapshot(c.work / "whole"), "the files differ")
    return Outcome(
        "kill -9 while tokenising",
        f"{kept} of 6 shards finished; the same command: {6 - kept} shards tokenised, {kept} skipped",
        f"the shard in work; {done.seconds:.0f} s for the rest",
        f"yes, {len(snapshot(out))} files",
    )


@case
def kill_in_evaluation(c: Campaign) -> Outcome:
    data = c.parquet("parquet-held-out", 1, 60)
    expect(c.tokenise(c.work / "data-held-out", data).finish().code == 0, "the tokeniser failed")
    checkpoint = c.baseline() / f"step{STEPS}"
    out = c.work / "results" / "result.json"
    command = ["bash", PRETRAIN / "evaluation" / "run.sh", checkpoint, out, "--device", "cpu"]
    command += ["--tasks", "none", "--data-dir", c.work / "data-held-out", "--batch-size", "4"]

    # Its progress is for terminals, so it gets one.
    master, slave = pty.openpty()
    seen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 4096):
                seen.extend(data)

    process = c.start(command, stderr=slave)
    os.close(slave)
    threading.Thread(target=read, daemon=True).start()
    process.wait_for(lambda: re.search(rb"held-out text: [1-9]", seen), "the first batches", 0.005)
    process.kill()
    began = time.monotonic()
    left = [p.name for p in out.parent.iterdir()]
    expect(left == [], f"a killed evaluation left {left}")
    done = c.start(command).finish()
    expect(done.code == 0, done.text)
    seconds = time.monotonic() - began
    again = out.with_name("again.json")
    command[3] = again
    expect(c.start(command).finish().code == 0, "the second evaluation failed")
    one, two = (json.loads(p.read_text())["heldout"] for p in (out, again))
    for result in (one, two):
        result.pop("seconds")
    expect(one == two, f"{one} against {two}")
    return Outcome(
        "kill -9 during evaluation (run.sh)",
        "no result file; the same command starts the evaluation again",
        f"the evaluation; {seconds:.0f} s for a new one",
        f"yes, {one['tokens']:,d} tokens' cross-entropy",
    )


@case
def kill_in_benchmark(c: Campaign) -> Outcome:
    out = c.work / "rounds"
    env = {"METHODS": "preln", "OUT": out, "STEPS": 1, "WARMUP": 1, "SEQ": 32, "TOKENS": 32}
    command = [
        "bash",
        ROOT / "paper-experiments/throughput/rounds.sh",
        "train",
        "tiny",
        "cpu",
        "2",
        *SMALL[:3],
    ]
    process = c.start(command, env)
    measured = b"measure.py train"  # in the log, once for each method and round
    log = out / "log.txt"
    process.wait_for(
        lambda: log.is_file() and log.read_bytes().count(measured) == 2, "the second round"
    )
    process.kill()
    orphans(c.work)
    whole = json.loads((out / "round-1.json").read_text())
    expect(whole["complete"], "round 1 is not whole")
    done = c.start(command, env).finish()
    expect(done.code == 0, f"the same command failed:\n{done.text[-3000:]}")
    said = f"{out}: going on after 1 whole rounds of 2"
    expect(said in done.text, f"it does not say '{said}':\n{done.text[-3000:]}")
    expect(json.loads((out / "round-1.json").read_text()) == whole, "round 1 was changed")
    summary = json.loads((out / "summary.json").read_text())
    expect(summary["rounds"] == 2 and not summary["incomplete_rounds"], "rounds are missing")
    return Outcome(
        "kill -9 during a benchmark round",
        "round 1 kept; the same command: going on after 1 whole rounds of 2",
        f"the round in work; {done.seconds:.0f} s for it",
        "round 1 unchanged (times are not repeatable)",
    )


def orphans(work: Path) -> None:
    """Measurements run in sessions of their own, and a kill -9 leaves the one that is running: wait for it to end."""
    deadline = time.monotonic() + 120
    mark = str(work).encode()
    while time.monotonic() < deadline:
        running = False
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = command.read_bytes()
                running = running or (b"measure.py" in text and mark in text)
        if not running:
            return
        time.sleep(0.2)


# -- a full disk --------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Callable[[], None]]:
    """A tmpfs; gives a function that makes room on it."""
    if os.geteuid() != 0:
        raise Skipped("mounting a tmpfs needs root")
    folder.mkdir(parents=True, exist_ok=True)

    def mount(*options: str) -> None:
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
        if done.returncode != 0:
            raise Skipped(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")

    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")
    try:
        yield lambda: mount("-o", "remount,size=1g")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@case
def full_disk_checkpoint(c: Campaign) -> Outcome:
    folder = c.work / "disk"
    # A checkpoint has 20 MB: there is room for one and a half.
    with small_disk(folder, 30) as make_room:
        done = c.train(folder).finish()
        expect(done.code == 2 and len(done.errors) == 1, f"exit {done.code}:\n{done.text[-3000:]}")
        error = done.errors[0]
        expect("cannot write" in error and f"step{SAVE_INTERVAL}" in error, error)
        reached = max(losses(folder / RUN))
        make_room()
        said, lost, equal = c.resume(folder, SAVE_INTERVAL, reached)
        shown = re.search(r"\((.*?)\)", error)
    return Outcome(
        "full disk while a checkpoint is written",
        f"exit 2, one sentence ({shown[1] if shown else error}); {said}",
        lost,
        equal,
    )


@case
def full_disk_tokenising(c: Campaign) -> Outcome:
    source = c.parquet("parquet-disk", 3, 200)
    whole = c.tokenise(c.work / "whole-disk", source).finish()
    expect(whole.code == 0, whole.text)
    out = c.work / "disk-tokens"
    with small_disk(out, 1) as make_room:
        done = c.tokenise(out, source).finish()
        expect(done.code == 2 and len(done.errors) == 1, f"exit {done.code}:\n{done.text}")
        kept = len(list(out.glob("*/*.json")))
        expect(not (out / "manifest.json").exists(), "half a corpus has a manifest")
        make_room()
        again = c.tokenise(out, source).finish()
        expect(again.code == 0 and f"{kept} skipped" in again.text, again.text)
        expect(snapshot(out) == snapshot(c.work / "whole-disk"), "the files differ")
    return Outcome(
        "full disk while tokenising",
        f"exit 2, one sentence, {kept} shards kept; the same command: {kept} skipped, the rest tokenised",
        f"the shard in work; {again.seconds:.0f} s for the rest",
        "yes, all files",
    )


# -- damaged files ------------------------------------------------------------------------------


def damaged_checkpoint(
    c: Campaign, name: str, fault: str, change: Callable[[Path], None]
) -> Outcome:
    folder = c.interrupted(name)
    step = folder / RUN / f"step{2 * SAVE_INTERVAL}"
    change(step)
    said, lost, equal = c.resume(folder, SAVE_INTERVAL, 2 * SAVE_INTERVAL + 1)
    aside = step.with_name(f"{step.name}.damaged")
    expect(aside.is_dir(), "the damaged checkpoint was not kept")
    return Outcome(fault, f"noticed and renamed to {aside.name}; {said}", lost, equal)


def largest(step: Path) -> Path:
    return max((step / "model_and_optim").glob("*.distcp"), key=lambda p: p.stat().st_size)


@case
def truncated_checkpoint(c: Campaign) -> Outcome:
    return damaged_checkpoint(
        c, "cut-checkpoint", "truncated checkpoint file", lambda step: cut(largest(step))
    )


@case
def flipped_checkpoint(c: Campaign) -> Outcome:
    def change(step: Path) -> None:
        path = largest(step)
        flip(path, path.stat().st_size // 2)

    return damaged_checkpoint(
        c, "flip-checkpoint", "one flipped bit in a checkpoint's tensor", change
    )


@case
def truncated_checkpoint_index(c: Campaign) -> Outcome:
    return damaged_checkpoint(
        c,
        "cut-index",
        "truncated index (.metadata) of a checkpoint",
        lambda step: cut(step / "model_and_optim" / ".metadata"),
    )


@case
def flipped_trainer_state(c: Campaign) -> Outcome:
    def change(step: Path) -> None:
        path = step / "train" / "rank0.pt"
        data = path.read_bytes()
        flip(path, data.index(b"global_step"), 0x40)

    return damaged_checkpoint(c, "flip-state", "one flipped bit in the trainer's state", change)


def damaged_data(c: Campaign, name: str, fault: str, change: Callable[[Path], None]) -> Outcome:
    """Training refuses, the tokeniser repairs, training goes on."""
    data = c.work / f"{name}-data"
    shutil.copytree(c.data, data)
    change(data)
    folder = c.interrupted(name)
    done = c.train(folder, data).finish()
    expect(done.code == 2 and len(done.errors) == 1, f"exit {done.code}:\n{done.text[-3000:]}")
    expect("Traceback" not in done.text, done.text[-3000:])
    repaired = c.tokenise(data, c.source).finish()
    expect(repaired.code == 0, repaired.text)
    expect(snapshot(data) == snapshot(c.data), "the tokeniser did not repair the corpus")
    said, lost, equal = c.resume(folder, 2 * SAVE_INTERVAL, 2 * SAVE_INTERVAL + 1, data)
    what = done.errors[0].removeprefix("error: ").replace(str(c.work) + "/", "").replace("|", "\\|")
    what = what if len(what) < 110 else what[:100].rsplit(" ", 1)[0] + " ..."
    return Outcome(
        fault,
        f'exit 2: "{what}"; the tokeniser with --skip-existing repairs it; {said}',
        lost,
        equal,
    )


@case
def truncated_manifest(c: Campaign) -> Outcome:
    return damaged_data(
        c, "cut-manifest", "truncated corpus manifest", lambda data: cut(data / "manifest.json")
    )


@case
def flipped_manifest(c: Campaign) -> Outcome:
    def change(data: Path) -> None:
        text = (data / "manifest.json").read_bytes()
        flip(data / "manifest.json", text.index(b'"tokens": ') + len(b'"tokens": '))

    return damaged_data(c, "flip-manifest", "one flipped bit in the corpus manifest", change)


@case
def truncated_tokens(c: Campaign) -> Outcome:
    return damaged_data(
        c, "cut-tokens", "truncated token file", lambda data: cut(data / "train" / "000.npy")
    )


@case
def flipped_tokens(c: Campaign) -> Outcome:
    def change(data: Path) -> None:
        import numpy as np

        # Ids beyond the vocabulary; training reads every sequence of 64, so one bit in each.
        for path in sorted((data / "train").glob("*.npy")):
            ids = np.fromfile(path, dtype="<u2")
            for start in range(0, len(ids) - 64, 64):
                here = start + int(
                    np.argmax(
                        (ids[start : start + 64] < 32768) & (ids[start : start + 64] > 17_600)
                    )
                )
                if 17_600 < ids[here] < 32_768:
                    flip(path, 2 * here + 1, 0x80)

    return damaged_data(
        c, "flip-tokens", "flipped bits in token files, ids beyond the vocabulary", change
    )


# -- the script ---------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| fault | what happened | time lost | bitwise equal |",
        "|---|---|---|---|",
        *(f"| {o.fault} | {o.happened} | {o.lost} | {o.equal} |" for o in outcomes),
    ]
    return "\n".join(lines)


def write(text: str, several: bool) -> None:
    """Put the table between the marks in README.md."""
    from config_utils.run_info import git_state

    state = git_state()
    commit = f"{(state['commit'] or 'unknown')[:10]}{' with changes' if state['dirty'] else ''}"
    when = datetime.now(UTC).date().isoformat()
    how = " (several calls with --keep)" if several else ""
    about = f"`python tests/faults.py --write`{how}, {when}, {os.cpu_count()} CPU cores shared with other work, commit {commit}."
    content = README.read_text()
    before, rest = content.split(BEGIN)
    _, after = rest.split(END)
    temporary = README.with_suffix(".tmp")
    temporary.write_text(f"{before}{BEGIN}\n{about}\n\n{text}\n{END}{after}")
    os.replace(temporary, README)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="only this one")
    parser.add_argument("--write", action="store_true", help="the table into tests/README.md")
    parser.add_argument(
        "--keep", type=Path, help="work in this folder and keep it; later calls add to its table"
    )
    opts = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    work = opts.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    work.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(work.resolve())
    seen, failed = campaign.work / "outcomes.json", 0
    outcomes: dict[str, Outcome] = {}
    if seen.is_file():
        outcomes = {k: Outcome(**o) for k, o in json.loads(seen.read_text()).items()}
    try:
        for name in opts.case or CASES:
            began = time.monotonic()
            try:
                outcome = CASES[name](campaign)
            except Skipped as e:
                outcome = Outcome(name, f"skipped: {e}", "", "")
            except Exception as e:  # one case must not cost the others
                failed += 1
                outcome = Outcome(name, "FAILED", "", "no")
                print(f"{name}: FAILED: {type(e).__name__}: {e}", flush=True)
            outcomes[name] = outcome
            seen.write_text(json.dumps({k: vars(o) for k, o in outcomes.items()}, indent=1))
            print(
                f"{name} ({time.monotonic() - began:.0f} s): {outcome.happened}; {outcome.lost}; "
                f"equal: {outcome.equal}",
                flush=True,
            )
    finally:
        if opts.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    text = table([outcomes[name] for name in CASES if name in outcomes])
    print("\n" + text)
    if opts.write:
        write(text, several=opts.keep is not None)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
