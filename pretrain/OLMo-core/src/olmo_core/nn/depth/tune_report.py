"""What the tune modules of all depth connections write: which machine and command, and results as they come."""

import json
import os
import sys
import time
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The GPU, the versions, the command and the time, the first entries of a report. Needs a CUDA GPU."""
    import triton

    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # A path of this machine says nothing to others.
    program = os.path.basename(sys.argv[0]) if spec is None else f"-m {spec.name}"
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write_json(path: str | os.PathLike | None, report: dict[str, Any]) -> None:
    """Write the whole report anew, so that a run which is stopped leaves what it has; nothing without a path."""
    if path:
        with open(f"{path}.tmp", "w") as f:
            json.dump(report, f, indent=1)
        os.replace(f"{path}.tmp", path)
