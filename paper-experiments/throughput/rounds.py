"""
The rounds of the benchmark: every method once a round, in an order that rotates, each in a process of its own.
``rounds.sh`` is the way to start it; its header explains the settings.
"""

import argparse
import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import measure
import summarize
import timing

from config_utils.errors import UserError, run_cli
from config_utils.run_info import git_state, run_info
from config_utils.scales import load_scale

HERE = Path(__file__).resolve().parent
DEFAULT_METHODS = "preln attnres_block attnres_full mhc ldm ldm_k4"
KNOBS = (
    "seq",
    "tokens",
    "batch",
    "batches",
    "context",
    "chunk",
    "steps",
    "warmup",
    "profile",
    "seed",
)
"""Options that measure.py gets as they are; in the environment of rounds.sh by the same names in capitals."""


def rotated(methods: list[str], number: int) -> list[str]:
    """The order of round ``number`` (from 1): every method comes first once in as many rounds as there are methods."""
    shift = (number - 1) % len(methods)
    return methods[shift:] + methods[:shift]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode")
    parser.add_argument("scale")
    parser.add_argument("gpu")
    parser.add_argument("rounds")
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nproc")
    parser.add_argument("--timeout", default="900")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    for knob in KNOBS:
        parser.add_argument(f"--{knob}")
    opts, overrides = parser.parse_known_args(argv)
    opts.overrides = overrides

    if opts.mode not in measure.MODES:
        raise UserError(f"unknown mode '{opts.mode}': choose one of {', '.join(measure.MODES)}")
    if opts.gpu not in measure.GPUS:
        raise UserError(f"unknown GPU '{opts.gpu}': choose one of {', '.join(measure.GPUS)}")
    load_scale(opts.scale)
    for name in ("rounds", "timeout", "nproc"):
        text = getattr(opts, name)
        if text is not None:
            values = measure.numbers(text, name.upper())
            if len(values) > 1:
                raise UserError(f"{name.upper()} is one number, got '{text}'")
            setattr(opts, name, values[0])
    opts.methods = opts.methods.replace(",", " ").split()
    if not opts.methods or len(set(opts.methods)) < len(opts.methods):
        raise UserError(f"METHODS must name each method once, got '{' '.join(opts.methods)}'")
    # measure.py's own checks, before the first process starts.
    for text in opts.methods:
        method = measure.parse_method(text, opts.scale)
        measure_opts = measure.parse_args(measure_arguments(opts, text))
        if overrides := [*opts.overrides, *method.overrides]:
            try:
                measure.build_config(measure_opts, method, world_size=1)
            except UserError as e:
                hint = (
                    "; what only some methods have goes behind these: METHODS='preln ldm+model.block.depth.window=2'"
                    if opts.overrides and len(opts.methods) > 1
                    else ""
                )
                raise UserError(f"{text}: {e}{hint}") from None
    return opts


def measure_arguments(opts: argparse.Namespace, method: str) -> list[str]:
    arguments = [opts.mode, opts.scale, method, "--gpu", opts.gpu]
    for knob in KNOBS:
        if (value := getattr(opts, knob)) is not None:
            arguments += [f"--{knob}", value]
    if opts.no_compile:
        arguments.append("--no-compile")
    return arguments + opts.overrides


def measure_command(opts: argparse.Namespace, method: str, nproc: int, out: Path) -> list[str]:
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*command, str(HERE / "measure.py"), *measure_arguments(opts, method), "--out", str(out)]


def default_processes(opts: argparse.Namespace) -> int:
    """
    All GPUs for training, one for the rest.

    :raises UserError: If more are asked for than there are, or than the mode takes.
    """
    import torch

    if opts.mode != "train" and (opts.nproc or 1) > 1:
        raise UserError(f"{opts.mode} runs on one GPU: leave NPROC unset")
    if opts.gpu == "cpu" or opts.dry_run:
        return opts.nproc or 1
    here = torch.cuda.device_count()  # asks the driver; makes no context in this process
    if here == 0:
        raise UserError(f"this machine has no CUDA GPU: give cpu in the place of {opts.gpu}")
    if (opts.nproc or 1) > here:
        raise UserError(f"NPROC={opts.nproc}, but {here} GPUs are here")
    return opts.nproc or (here if opts.mode == "train" else 1)


class Process:
    """
    A command in a session of its own. Its output goes to a file and, once it has ended, to ``log``.

    :param waits: It imports what it needs and waits for :meth:`run`; see ``measure.wait_for_turn``.
    """

    def __init__(self, command: list[str], log: Path, waits: bool = False):
        self.command, self.log, self.waits = command, log, waits
        self.output = tempfile.TemporaryFile()
        environment = os.environ | ({measure.WAIT_VARIABLE: "1"} if waits else {})
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
            env=environment,
        )

    def run(self, timeout: float) -> tuple[int | None, str]:
        """
        Its exit code, or ``None`` if it took too long, and the last line that it wrote. It and everything that it started are
        ended then, and when this process is interrupted.
        """
        try:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(b"\n")
                    self._process.stdin.close()
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.end()
        self.output.seek(0)
        written = self.output.read()
        with self.log.open("ab") as f:
            f.write(f"\n$ {shlex.join(self.command)}\n".encode() + written)
        lines = written.decode(errors="replace").strip().splitlines()
        return code, next((line.strip()[:400] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Processes:
    """The processes of these commands in turn; with ``ahead`` the next one is started when one is taken, and waits."""

    def __init__(self, commands: list[list[str]], log: Path, ahead: bool):
        self._commands, self._log, self._ahead = list(commands), log, ahead
        self._next: Process | None = None

    def take(self) -> Process:
        process = self._next or Process(self._commands.pop(0), self._log)
        self._next = None
        if self._ahead and self._commands:
            self._next = Process(self._commands.pop(0), self._log, waits=True)
        return process

    def close(self) -> None:
        if self._next is not None:
            self._next.end()


def run_to_json(process: Process, out: Path, timeout: float) -> dict[str, Any]:
    """
    What a process of measure.py wrote to ``out``. If it wrote nothing, ``status`` and ``error`` say how it ended.
    """
    import json

    out.unlink(missing_ok=True)
    code, last_words = process.run(timeout)
    try:
        return json.loads(out.read_text())
    except FileNotFoundError:
        pass
    finally:
        out.unlink(missing_ok=True)
    if code is None:
        return {"status": "timeout", "error": f"no result after {timeout} s (TIMEOUT)"}
    if code < 0:
        why = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
        return {"status": "failed", "error": f"ended by signal {-code}{why}"}
    return {"status": "failed", "error": last_words or f"exit code {code}"}


def environment_text(opts: argparse.Namespace) -> str:
    """The command that gives this run again."""
    words = []
    if opts.methods != DEFAULT_METHODS.split():
        words.append(f"METHODS={shlex.quote(' '.join(opts.methods))}")
    for knob in (*KNOBS, "nproc"):
        if (value := getattr(opts, knob)) is not None:
            words.append(f"{knob.upper()}={shlex.quote(str(value))}")
    if opts.no_compile:
        words.append("COMPILE=0")
    arguments = [opts.mode, opts.scale, opts.gpu, str(opts.rounds), *opts.overrides]
    return " ".join([*words, "rounds.sh", shlex.join(arguments)])


def settings_of(opts: argparse.Namespace, nproc: int) -> dict[str, Any]:
    """What the rounds of one run have in common, apart from the machine and the date."""
    return {
        "mode": opts.mode,
        "scale": opts.scale,
        "gpu": opts.gpu,
        "world_size": nproc,
        "methods": opts.methods,
        "options": {knob: getattr(opts, knob) for knob in KNOBS},
        "overrides": opts.overrides,
        "compile": not opts.no_compile,
        "command": environment_text(opts),
    }


def finished_rounds(opts: argparse.Namespace, out: Path, nproc: int) -> set[int]:
    """
    The whole rounds of this same command, which was stopped; none in a new folder.

    :raises UserError: If the folder holds the rounds of another command, of other code, or of a run that has ended.
    """
    if not any(out.glob("round-*.json")):
        return set()
    rounds = summarize.read_rounds(out)
    ours = settings_of(opts, nproc)
    same = all(
        all(r["settings"].get(k) == v for k, v in ours.items())
        and r["run"]["git"]["commit"] == git_state()["commit"]
        for r in rounds
    )
    done = {r["round"] for r in rounds if r["complete"]}
    if not same or len(done) >= opts.rounds:
        raise UserError(
            f"{out} holds the rounds of another run: set OUT to another folder, or move it away"
        )
    return done


def run_rounds(opts: argparse.Namespace, out: Path, nproc: int, done: set[int]) -> None:
    """:param done: Rounds that are kept from a run that was stopped; one that was cut off is measured again as a whole."""
    log, part = out / "log.txt", out / ".measurement.json"
    info = run_info()

    def canary() -> dict[str, Any]:
        command = [sys.executable, str(HERE / "measure.py"), "canary", "--gpu", opts.gpu]
        return run_to_json(Process([*command, "--out", str(part)], log), part, opts.timeout)

    before = canary()
    if "device" not in before:
        raise UserError(
            f"the first reading of the machine's speed failed: {before['error']} (see {log})"
        )
    settings = {
        **settings_of(opts, nproc),
        "device": before["device"],
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if done:
        kept = next(r["settings"] for r in summarize.read_rounds(out) if r["round"] in done)
        if kept["device"] != settings["device"]:
            raise UserError(
                f"{out} holds rounds of a {kept['device']}, this machine has a {settings['device']}: set OUT to "
                "another folder"
            )
        settings = kept  # the date of the start
    if opts.gpu != "cpu" and opts.gpu.upper() not in before["device"]:
        print(f"warning: {opts.gpu} was named, {before['device']} is here; MFU is of what is here")
    numbers = [n for n in range(1, opts.rounds + 1) if n not in done]
    commands = [
        measure_command(opts, method, nproc, part)
        for n in numbers
        for method in rotated(opts.methods, n)
    ]
    # On a CPU the imports of the next process would slow the one that measures.
    processes = Processes(
        commands, log, ahead=opts.gpu != "cpu" and nproc == 1 and (os.cpu_count() or 1) >= 4
    )
    with contextlib.closing(processes):
        for number in numbers:
            path = out / f"round-{number}.json"
            order = rotated(opts.methods, number)
            result: dict[str, Any] = {
                "round": number,
                "complete": False,
                "settings": settings,
                "order": order,
                "run": info,
                "canary_before": before,
                "canary_after": None,
                "rows": [],
            }
            for method in order:
                started = time.perf_counter()
                row = run_to_json(processes.take(), part, opts.timeout)
                row |= {"method": method, "process_seconds": time.perf_counter() - started}
                result["rows"].append(row)
                # Whole after every method: a run that is stopped leaves what it measured, and says that it was stopped.
                timing.write_json(path, result)
                print(f"round {number}/{opts.rounds}  {method}: {progress(row)}", flush=True)
            after = canary()
            if "device" in after:
                result["canary_after"] = before = after
            result["complete"] = True
            timing.write_json(path, result)


def progress(row: dict[str, Any]) -> str:
    seconds = f"({row['process_seconds']:.0f} s)"
    if row["status"] != "ok":
        return f"{row['status']}: {row['error']} {seconds}"
    parts = []
    for case in row["cases"]:
        where = f"{case['batch']} x {case['context']}: " if "batch" in case else ""
        what = case["status"]
        if what == "ok":
            what = f"{case['tokens_per_s']:,.0f} tokens/s, {case['ms']['median']:.2f} ms"
        parts.append(where + what)
    return "; ".join(parts) + f" [{row['backend']}] {seconds}"


def main(argv: list[str] | None = None) -> int:
    opts = parse_args(sys.argv[1:] if argv is None else argv)
    nproc = default_processes(opts)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = opts.out or Path("results/throughput") / f"{opts.mode}-{opts.scale}-{opts.gpu}-{stamp}"
    if opts.dry_run:
        print(f"# {opts.rounds} rounds into {out}; a canary before and after each")
        for number in range(1, opts.rounds + 1):
            for method in rotated(opts.methods, number):
                command = measure_command(opts, method, nproc, out / ".measurement.json")
                print(f"round {number}: {shlex.join(command)}")
        return 0
    done = finished_rounds(opts, out, nproc)
    if any(out.glob("round-*.json")):
        print(f"{out}: going on after {len(done)} whole rounds of {opts.rounds}", flush=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"OUT={out} cannot be made ({e.strerror}): set OUT to a folder") from None
    try:
        run_rounds(opts, out, nproc, done)
    except KeyboardInterrupt:
        print(f"stopped; summarize.py {out} shows what was measured", file=sys.stderr)
        return 130
    summarize.summarise_folder(out)
    return 0


if __name__ == "__main__":
    run_cli(main)
