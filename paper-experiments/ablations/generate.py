"""
Writes ``configs/<variant>.yaml`` for every variant of the ablation series, and for your own methods, from the tables in
``config_utils/methods.py``: the depth connection in full at each scale of the series, and what differs from the default LDM.

    python paper-experiments/ablations/generate.py            # write
    python paper-experiments/ablations/generate.py --check    # exit 1 if a file is out of date
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from config_utils.errors import run_cli
from config_utils.methods import ABLATIONS, ALL_METHODS, depth_connection
from config_utils.scales import load_scale

CONFIGS = Path(__file__).resolve().parent / "configs"
SCALES = ("400m", "90m", "tiny")


def config(variant: str) -> dict[str, Any]:
    """The content of ``configs/<variant>.yaml``."""
    full = {s: depth_connection(variant, load_scale(s)).as_config_dict() for s in SCALES}
    out: dict[str, Any] = {"variant": variant}
    if variant in ABLATIONS or variant == "ldm_k4":
        base = depth_connection("ldm", load_scale("400m")).as_config_dict()
        out["base"] = "ldm"
        out["override"] = {k: v for k, v in full["400m"].items() if v != base[k]}
    out["depth"] = full
    return json.loads(json.dumps(out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    opts = parser.parse_args()
    texts = {
        CONFIGS / f"{variant}.yaml": "# Made by generate.py from config_utils/methods.py.\n"
        + yaml.safe_dump(config(variant), sort_keys=False)
        for variant in ALL_METHODS
    }
    stale = [p for p, text in texts.items() if not p.is_file() or p.read_text() != text]
    extra = [p for p in CONFIGS.glob("*.yaml") if p not in texts]
    if opts.check:
        for path in [*stale, *extra]:
            print(f"out of date: {path.name}; run generate.py", file=sys.stderr)
        return 1 if stale or extra else 0
    CONFIGS.mkdir(exist_ok=True)
    for path in extra:
        path.unlink()
    for path, text in texts.items():
        path.write_text(text)
    print(f"{len(texts)} configs in {CONFIGS.name}/")
    return 0


if __name__ == "__main__":
    run_cli(main)
