"""
Runs many arms of the ablation series on one machine, several at once on each GPU, and keeps one JSON file of each.

    python paper-experiments/ablations/series.py --gpu h200 --overlap 0.25 ldm preln softmax_key
    python paper-experiments/ablations/series.py --gpu h200 ldm:42,43,44 ldm@0.001 ldm:42x1167 ldm+model.init_method=llama
    python paper-experiments/ablations/series.py --gpu cpu --scale tiny preln ldm      # minutes; it ranks nothing

An arm is ``VARIANT[@LR][:SEED[,SEED ...]][xSTEPS][+OVERRIDE ...]``. What has a result in ``--out`` already is skipped, so the same command
goes on after a stop. A run of 400 steps at 90m trains for 47 s on an H200, after 40 s in which it imports, builds and compiles. With
``--overlap 0.25`` the next run of a GPU starts when the one before has taken a quarter of its steps. ``--slots`` above 1 starts several
together, which is slower than one after the other once they train. The speed of runs that shared a GPU says nothing and is left out of the
results. Environment: as for ``launch.sh`` (DATA_DIR, CHECKPOINT_DIR).
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config_utils.errors import UserError, run_cli
from config_utils.run_info import REPOSITORY, result_name, run_name

HERE = Path(__file__).resolve().parent
RESULTS = REPOSITORY / "results" / "ablations"
DEFAULT_STEPS = {"tiny": 110, "90m": 400, "400m": 14_305}
DEFAULT_LR = {"tiny": 0.004, "90m": 0.002, "400m": 0.001}
_ARM = re.compile(
    r"(?P<variant>\w+?)(@(?P<lr>[\d.e-]+))?(:(?P<seeds>[\d,]+))?(x(?P<steps>\d+))?(?P<overrides>(\+[\w.]+=[^+]+)*)"
)


@dataclass(frozen=True)
class Run:
    scale: str
    variant: str
    lr: float
    seed: int
    steps: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return run_name(self.scale, self.variant, self.lr, self.seed)

    @property
    def result(self) -> str:
        return result_name(self.name, self.steps, self.overrides)


def parse_arm(text: str, scale: str) -> list[Run]:
    """
    The runs of one arm, one for each seed.

    :raises UserError: If the text is no arm or the variant has no config.
    """
    match = _ARM.fullmatch(text)
    if match is None:
        raise UserError(
            f"'{text}' is no arm: write VARIANT[@LR][:SEED[,SEED ...]][xSTEPS][+OVERRIDE ...], such as ldm@0.001:42,43"
        )
    variant = match["variant"]
    if not (HERE / "configs" / f"{variant}.yaml").is_file():
        known = ", ".join(sorted(p.stem for p in (HERE / "configs").glob("*.yaml")))
        raise UserError(f"unknown variant '{variant}': choose one of {known}")
    try:
        lr = float(match["lr"]) if match["lr"] else DEFAULT_LR[scale]
        seeds = [int(s) for s in (match["seeds"] or "42").split(",")]
    except ValueError:
        raise UserError(f"'{text}': the learning rate or a seed is not a number") from None
    steps = int(match["steps"] or DEFAULT_STEPS[scale])
    overrides = tuple(match["overrides"].split("+")[1:])
    return [Run(scale, variant, lr, seed, steps, overrides) for seed in seeds]


class StartTurn:
    """On one GPU: a run starts when the run before it has trained for a while."""

    POLL_SECONDS = 0.5

    def __init__(self, fraction: float | None):
        self.fraction = fraction
        self._turn = threading.Lock()

    def wait(self) -> None:
        if self.fraction is not None:
            self._turn.acquire()

    def pass_on(self) -> None:
        if self.fraction is not None:
            self._turn.release()

    def watch(self, process: subprocess.Popen, log: Path, steps: int, timeout: float | None) -> int:
        """
        Wait for the end of the process and give the turn away on the way. Returns the exit status.

        :raises subprocess.TimeoutExpired: After ``timeout`` seconds.
        """
        if self.fraction is None:
            return process.wait(timeout)
        began = time.monotonic()
        try:
            while process.poll() is None:
                taken = re.findall(r"\[step=(\d+)/", log.read_text(errors="replace"))
                if taken and int(taken[-1]) >= self.fraction * steps:
                    break
                if timeout is not None and time.monotonic() - began > timeout:
                    raise subprocess.TimeoutExpired(process.args, timeout)
                time.sleep(self.POLL_SECONDS)
        finally:
            self.pass_on()
        left = None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)
        return process.wait(left)


class Processes:
    """The runs that train now. They are in sessions of their own, so that a signal to this process does not reach them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self.stopped = False

    def start(
        self, command: list[str], environment: dict[str, str], stream: IO[str]
    ) -> subprocess.Popen | None:
        """``None`` after :meth:`stop`."""
        with self._lock:
            if self.stopped:
                return None
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def end(self, process: subprocess.Popen) -> None:
        """Kill the run if it has not ended."""
        with self._lock:
            self._running.discard(process)
        self._kill(process)
        process.wait()

    def stop(self) -> None:
        """Kill all runs and let none start."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def execute(
    run: Run,
    device: str | None,
    opts: argparse.Namespace,
    turn: StartTurn,
    processes: Processes,
) -> str:
    """Train one run and collect it. Returns what to say about it."""
    root = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints/ablations"))
    # Runs of different lengths have the same name and may go on at the same time.
    checkpoints = root / "".join([f"steps{run.steps}", *(f"+{o}" for o in run.overrides)])
    folder = checkpoints / run.name
    environment = {
        **os.environ,
        "SCALE": run.scale,
        "LR": str(run.lr),
        "SEED": str(run.seed),
        "STEPS": str(run.steps),
        "CHECKPOINT_DIR": str(checkpoints),
        "NPROC": "1",
    }
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    log = root / "logs" / f"{run.result.removesuffix('.json')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    turn.wait()
    began = time.monotonic()
    with log.open("w") as stream:
        command = ["bash", str(HERE / "launch.sh"), run.variant, opts.gpu, *run.overrides]
        process = processes.start(command, environment, stream)
        if process is None:
            turn.pass_on()
            return "not started"
        try:
            code = turn.watch(process, log, run.steps, opts.timeout)
        except subprocess.TimeoutExpired:
            return f"stopped after {opts.timeout:.0f} s, see {log}"
        finally:
            processes.end(process)
    if processes.stopped:
        return f"stopped, see {log}"
    if code != 0:
        return f"failed with exit status {code}, see {log}"
    collect = [
        sys.executable,
        str(HERE / "collect.py"),
        "save",
        str(folder),
        "--out",
        str(opts.out),
    ]
    if opts.slots > 1 or opts.overlap is not None:
        collect.append("--shared-gpu")
    done = subprocess.run(collect, capture_output=True, text=True)
    if done.returncode != 0:
        return f"trained, but could not be collected: {done.stderr.strip()}"
    if opts.discard:
        shutil.rmtree(folder)
    return f"{done.stdout.strip()}, {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--gpu", required=True, help="h100, h200, b200 or cpu, as for launch.sh")
    parser.add_argument("--scale", default="90m", choices=list(DEFAULT_STEPS), help="(90m)")
    parser.add_argument("--slots", type=int, default=1, help="runs at once on each GPU (1)")
    parser.add_argument(
        "--overlap",
        type=float,
        metavar="FRACTION",
        help="two runs at once on each GPU: the next one starts when this part of the steps is taken",
    )
    parser.add_argument("--devices", default="0", help="indices of the GPUs, such as 0,1 (0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the results (results/ablations in the repository)",
    )
    parser.add_argument("--timeout", type=float, help="seconds after which a run is given up")
    parser.add_argument(
        "--discard", action="store_true", help="remove a run's checkpoints once it is collected"
    )
    opts = parser.parse_args()
    if opts.slots < 1:
        raise UserError(f"--slots must be at least 1, got {opts.slots}")
    if opts.overlap is not None:
        if not 0 <= opts.overlap <= 1 or opts.slots > 1:
            raise UserError(
                f"--overlap is a part of the steps, 0 to 1, and takes no --slots; got {opts.overlap}"
            )
        opts.slots = 2
    opts.out = opts.out.resolve()
    runs = list(dict.fromkeys(r for arm in opts.arms for r in parse_arm(arm, opts.scale)))
    todo = [r for r in runs if not (opts.out / r.result).is_file()]
    skipped = len(runs) - len(todo)
    said = f"{len(runs)} runs, {skipped} of them have a result already in {opts.out}"
    if skipped:
        said += ": skipped; to run them anew, give another --out and CHECKPOINT_DIR"
    print(said, flush=True)
    queue: SimpleQueue[Run] = SimpleQueue()
    for run in todo:
        queue.put(run)
    failures: list[Run] = []
    processes = Processes()

    def work(device: str | None, turn: StartTurn) -> None:
        while True:
            try:
                run = queue.get_nowait()
            except Empty:
                return
            if processes.stopped:
                return
            said = execute(run, device, opts, turn, processes)
            if not (opts.out / run.result).is_file():
                failures.append(run)
            what = " ".join([run.name, f"x{run.steps}", *run.overrides])
            print(f"{what}: {said}; {queue.qsize()} to start", flush=True)

    devices = [None] if opts.gpu == "cpu" else opts.devices.split(",")
    turns = [StartTurn(opts.overlap) for _ in devices]
    threads = [
        threading.Thread(target=work, args=(device, turn))
        for _ in range(opts.slots)
        for device, turn in zip(devices, turns, strict=True)
    ]
    # A scheduler's SIGTERM is as Ctrl-C; a shell starts what it runs in the background with SIGINT ignored.
    before = {
        s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        processes.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        print("stopped: the same command goes on", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise UserError(
            f"{len(failures)} runs have no result: {', '.join(r.result for r in failures)}"
        )
    return 0


if __name__ == "__main__":
    run_cli(main)
