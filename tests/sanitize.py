"""
NVIDIA's compute-sanitizer over every kernel of the depth connections: forward, backward and inference of small stacks of
boundaries, with token counts and widths that fill no tile.

    python tests/sanitize.py                                  # memcheck and racecheck, the table on the terminal
    python tests/sanitize.py --tools memcheck --cases "mhc"   # one tool, the cases whose names hold a text
    python tests/sanitize.py --write                          # and the table into tests/README.md

Needs a CUDA GPU and ``compute-sanitizer`` (part of the CUDA toolkit) on the PATH or in ``$CUDA_HOME/bin``. The exit status is 1 if
a tool found anything or a case did not run. memcheck sees each tensor as an allocation of its own: torch's caching allocator is off. torch's own kernels are
not checked.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config_utils.errors import UserError, run_cli

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- sanitizer: begin -->", "<!-- sanitizer: end -->"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TIMEOUT_SECONDS = 300
"""For one process; racecheck took more than 190 s for all cases in one on an H200, torch's kernels checked as well."""
CASES_EACH = 2
"""Cases of one process: what a process that is stopped loses."""
NOT_OURS = "kns=at6native,kns=at::native"
"""torch's own kernels, by a part of their names, mangled or not: not checked."""

CASES: dict[str, dict[str, Any]] = {
    "ldm flexible, defaults": {"method": "ldm", "backend": "flexible", "d": 136},
    "ldm flexible, K = 16": {"method": "ldm", "backend": "flexible", "d": 264, "d_k": 16},
    "ldm flexible, delta rule, all carried": {
        "method": "ldm",
        "backend": "flexible",
        "d": 72,
        "d_k": 2,
        "update": "delta",
        "key_source": "input",
        "residual": "kept",
        "write_every": "block",
    },
    "ldm fast, K = 8, cluster": {"method": "ldm", "backend": "fast", "d": 2048},
    "ldm fast, K = 4": {"method": "ldm", "backend": "fast", "d": 192, "d_k": 4},
    "ldm fast, softmax keys": {
        "method": "ldm",
        "backend": "fast",
        "d": 1024,
        "key_activation": "softmax",
    },
    "ldm fast, windows of 4": {"method": "ldm", "backend": "fast", "d": 1024, "window": 4},
    "ldm fast_inference, K = 8": {"method": "ldm", "backend": "fast_inference", "d": 2048},
    "ldm fast_inference, K = 4": {
        "method": "ldm",
        "backend": "fast_inference",
        "d": 512,
        "d_k": 4,
    },
    "attnres flexible, full": {
        "method": "attnres",
        "backend": "flexible",
        "d": 1000,
        "block_size": 1,
    },
    "attnres flexible, block": {
        "method": "attnres",
        "backend": "flexible",
        "d": 136,
        "block_size": 3,
    },
    "mhc flexible, Sinkhorn": {"method": "mhc", "backend": "flexible", "d": 136},
    "mhc flexible, width 1024": {"method": "mhc", "backend": "flexible", "d": 1024},
    "mhc flexible, identity": {
        "method": "mhc",
        "backend": "flexible",
        "d": 72,
        "residual_map": "identity",
    },
    "preln": {"method": "preln", "backend": "auto", "d": 136},
    "mhc fast, cluster": {"method": "mhc", "backend": "fast", "d": 1024},
}
N_BOUNDARIES = 9
TOKENS = (1, 37)
DECODE_TOKENS = (1, 3, 70)


def run_case(name: str) -> None:
    """The boundaries of one case, with gradients in BF16 and without."""
    import torch

    from olmo_core.nn.attnres import AttnResConfig
    from olmo_core.nn.depth import PreLNConfig
    from olmo_core.nn.hyper_connections import HyperConnectionsConfig
    from olmo_core.nn.ldm import LDMConfig

    case = dict(CASES[name])
    config_class: Any = {
        "ldm": LDMConfig,
        "attnres": AttnResConfig,
        "mhc": HyperConnectionsConfig,
        "preln": PreLNConfig,
    }[case.pop("method")]
    d = case.pop("d")
    inference = case["backend"] == "fast_inference"
    config = config_class(**case)
    generator = torch.Generator(device="cuda").manual_seed(0)
    boundaries = []
    for index in range(N_BOUNDARIES):
        boundary = config.build(
            d_model=d, index=index, n_sublayers=N_BOUNDARIES - 1, eps=1e-6, init_device="cuda"
        )
        boundary.init_weights(generator)
        if inference:
            boundary.eval()
        boundaries.append(boundary)
    gain = torch.ones(d, device="cuda", dtype=torch.bfloat16, requires_grad=not inference)

    def stack(n_tokens: int) -> torch.Tensor:
        ys = [
            torch.randn(1, n_tokens, d, device="cuda", dtype=torch.bfloat16, generator=generator)
            for _ in boundaries
        ]
        state: tuple[torch.Tensor, ...] = ()
        total = torch.zeros((), device="cuda")
        for boundary, y in zip(boundaries, ys, strict=True):
            y.requires_grad_(torch.is_grad_enabled())
            state, x = boundary(state, y, gain)
            total = total + x.float().sum()
        return total

    if not inference:
        for n_tokens in TOKENS:
            stack(n_tokens).backward()
    with torch.no_grad():
        for n_tokens in DECODE_TOKENS:
            stack(n_tokens)
    torch.cuda.synchronize()
    backends = sorted({str(b.selected_backend) for b in boundaries})
    print(f"{name}: ran with {', '.join(backends)}", flush=True)


def run_cases(names: list[str]) -> int:
    failed = 0
    for name in names:
        try:
            run_case(name)
        except Exception as e:  # one case must not hide the others
            failed += 1
            print(f"{name}: FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)
    return 1 if failed else 0


def find_sanitizer() -> str:
    """
    :raises UserError: If it is not there.
    """
    home = os.environ.get("CUDA_HOME", os.environ.get("CUDA_PATH", ""))
    path = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.path.join(home, "bin")
    )
    if path is None:
        raise UserError(
            "compute-sanitizer is not on the PATH: install the CUDA toolkit, or set CUDA_HOME to its folder"
        )
    return path


PRINT_LIMIT = 1000
"""Reports of one process that are printed. With 20, four of eight processes stopped there: 80 of 2,405 were seen."""
MAX_HAZARDS = "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS"
INDIRECT = "--racecheck-indirect-barrier-dependency"
"""
Has racecheck follow what is ordered through a third thread. A warp of LDM's fast kernels waits for its lanes (``bar.warp.sync``) and one
lane arrives at the mbarrier for all of them; version 2025.3.1 reports the other lanes' accesses with the option as without it.
"""


def options_of(sanitizer: str) -> dict[str, list[str]]:
    """Options of each tool, as this version of compute-sanitizer spells them; those that it does not know are left out."""
    help_text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    common: list[str] = []
    for option in ("--kernel-name-exclude", "--kernel-regex-exclude"):
        if option in help_text:
            common = [option, NOT_OURS]
            break
    indirect = [INDIRECT, "yes"] if INDIRECT in help_text else []
    return {tool: common + (indirect if tool == "racecheck" else []) for tool in TOOLS}


def run_chunk(sanitizer: list[str], tool: str, names: list[str], log: Path) -> dict[str, Any]:
    """One tool over some cases, in one process; ``sanitizer`` is the command with its options."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if tool == "racecheck":
        environment[MAX_HAZARDS] = "1000000"
    limit = ["--print-limit", str(PRINT_LIMIT)]
    command = [*sanitizer, "--tool", tool, *limit, sys.executable, __file__]
    began = time.monotonic()
    with log.open("w") as stream:
        try:
            code: int | None = subprocess.run(
                [*command, "--child", *names],
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    text = log.read_text(errors="replace")
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    # racecheck: "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; the others "ERROR SUMMARY: 0 errors".
    # What is displayed stops at the limit; the numbers in brackets do not.
    found = re.findall(r"(\d+) (?:errors?|warnings?)", summary[-1]) if summary else []
    return {
        "tool": tool,
        "summary": summary[-1] if summary else "the tool did not finish",
        "findings": sum(map(int, found)) if found else None,
        "exit_status": code,
        "cases_run": re.findall(r"^(.+): ran with (.+)$", text, re.M),
        "cases_failed": re.findall(r"^(.+): FAILED (.+)$", text, re.M),
        "kernels_with_findings": sorted(set(re.findall(r" at (?:.*in )?([\w:<>]+)\+0x", text))),
        "seconds": round(time.monotonic() - began, 1),
    }


def run_tool(
    sanitizer: list[str],
    tool: str,
    names: list[str],
    logs: Path,
    jobs: int,
    save: Callable[[dict], None],
) -> dict[str, Any]:
    """
    One tool over all cases, a few to a process.

    :param jobs: Processes at the same time.
    :param save: Called with the result so far after each process.
    """
    result: dict[str, Any] = {
        "tool": tool,
        "findings": 0,
        "cases_run": [],
        "cases_failed": [],
        "kernels_with_findings": [],
        "summaries": [],
        "seconds": 0.0,
        "complete": False,
    }
    chunks = [names[i : i + CASES_EACH] for i in range(0, len(names), CASES_EACH)]
    done = 0

    def run(i: int) -> tuple[int, dict[str, Any]]:
        return i, run_chunk(sanitizer, tool, chunks[i], logs / f"{tool}-{i}.log")

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, i) for i in range(len(chunks))]):
            i, found = future.result()
            if found["findings"] is None:
                # Without its summary nothing is known of what ran, though it printed that it ran.
                result["cases_failed"] += [(name, found["summary"]) for name in chunks[i]]
            else:
                result["findings"] += found["findings"]
                for key in ("cases_run", "cases_failed", "kernels_with_findings"):
                    result[key] += found[key]
            result["summaries"].append(found["summary"])
            result["seconds"] = round(result["seconds"] + found["seconds"], 1)
            done += len(chunks[i])
            result["complete"] = done == len(names)
            print(
                f"{tool}: {done} of {len(names)} cases, {result['findings']} findings", flush=True
            )
            save(result)
    return result


def table(report: dict[str, Any]) -> str:
    lines = [
        f"`python tests/sanitize.py`, {report['date']}, {report['gpu']}, {report['version']}, torch {report['torch']}, "
        f"triton {report['triton']}, commit {report['commit']}.",
        "",
        "| tool | cases | findings | seconds |",
        "|---|---|---|---|",
    ]
    for r in report["tools"]:
        failed = "".join(f"; not run: {name} ({why})" for name, why in r["cases_failed"])
        kernels = ", ".join(sorted(set(r["kernels_with_findings"])))
        found = f"{r['findings']}" + (f" in {kernels}" if kernels else "")
        lines.append(
            f"| {r['tool']} | {len(r['cases_run'])} of {len(report['cases'])}{failed} | {found} | {r['seconds']} |"
        )
    lines += ["", "Cases: " + "; ".join(report["cases"]) + "."]
    return "\n".join(lines)


def write_table(text: str) -> None:
    content = README.read_text()
    start, rest = content.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    temporary = README.with_suffix(".tmp")
    temporary.write_text(f"{start}{BEGIN}\n{text}\n{END}{after}")
    os.replace(temporary, README)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS[:2]))
    parser.add_argument("--cases", default="", help="only cases whose names hold this text")
    parser.add_argument("--jobs", type=int, default=4, help="processes of a tool at once (4)")
    parser.add_argument("--out", type=Path, help="the report as JSON")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"))
    parser.add_argument("--write", action="store_true", help="the table into tests/README.md")
    parser.add_argument("--child", nargs="+", choices=list(CASES), help=argparse.SUPPRESS)
    opts = parser.parse_args()
    if opts.child:
        return run_cases(opts.child)
    import torch

    from config_utils.run_info import git_state

    names = [name for name in CASES if opts.cases in name]
    if not names:
        raise UserError(f"no case's name holds '{opts.cases}': the cases are {'; '.join(CASES)}")
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU is visible: compute-sanitizer checks kernels on a GPU")
    sanitizer = find_sanitizer()
    # Compiled once without the sanitizer, so that the tools find warm caches and can run at the same time.
    warm = run_cases(names)
    opts.logs.mkdir(parents=True, exist_ok=True)
    options = options_of(sanitizer)
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    import triton

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": (git_state()["commit"] or "unknown")[:10],
        "gpu": torch.cuda.get_device_name(),
        "version": (re.findall(r"Version \S+", version) or ["compute-sanitizer"])[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cases": names,
        "tools": [],
    }
    results: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def save(result: dict[str, Any]) -> None:
        with lock:
            results[result["tool"]] = result
            report["tools"] = [results[t] for t in opts.tools if t in results]
            if opts.out:
                temporary = opts.out.with_suffix(".tmp")
                temporary.write_text(json.dumps(report, indent=1))
                os.replace(temporary, opts.out)

    with ThreadPoolExecutor(len(opts.tools)) as pool:
        tools = list(
            pool.map(
                lambda tool: run_tool(
                    [sanitizer, *options[tool]], tool, names, opts.logs, opts.jobs, save
                ),
                opts.tools,
            )
        )
    text = table(report)
    print(text)
    if opts.write:
        write_table(text)
    clean = all(r["findings"] == 0 and not r["cases_failed"] for r in tools)
    return 0 if clean and warm == 0 else 1


if __name__ == "__main__":
    run_cli(main)
