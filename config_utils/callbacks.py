"""Trainer callbacks that OLMo-core lacks: metrics as JSON lines, and W&B that never stops a training run."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from olmo_core.distributed.utils import get_rank
from olmo_core.train.callbacks import Callback, WandBCallback

log = logging.getLogger(__name__)


@dataclass
class JSONLinesMetricsCallback(Callback):
    """
    Appends every step's metrics to ``<save_folder>/metrics.jsonl``, one object a line with the key ``step``. After a
    resume the lines beyond the checkpoint are dropped first, so that each step stands there once.
    """

    fname: str = "metrics.jsonl"

    @property
    def path(self) -> Path:
        return Path(self.trainer.save_folder) / self.fname

    def pre_train(self) -> None:
        if get_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= self.step:
                        kept.append(line + "\n")
                except (json.JSONDecodeError, KeyError):
                    log.warning("%s: dropped a damaged line", self.path)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, self.path)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if get_rank() != 0:
            return
        with self.path.open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")


@dataclass
class OptionalWandBCallback(WandBCallback):
    """
    W&B where it can run: online with ``WANDB_API_KEY``, offline with ``WANDB_MODE=offline`` (no key needed). Otherwise,
    and whenever W&B fails to start, training goes on and the run says so once.
    """

    def pre_train(self) -> None:
        if not self.enabled or get_rank() != 0:
            return
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "disabled" or (mode == "online" and "WANDB_API_KEY" not in os.environ):
            log.info("W&B is off (no WANDB_API_KEY); metrics go to metrics.jsonl in the run folder")
            self.enabled = False
            return
        if mode == "offline":
            # The base class asks for a key in every mode, and polls the server for a cancel tag.
            os.environ.setdefault("WANDB_API_KEY", "offline")
            self.cancel_tags = None
        try:
            super().pre_train()
        except Exception as e:  # any failure of a logging service: never worth a training run
            log.warning("W&B did not start (%s); metrics go to metrics.jsonl in the run folder", e)
            self.enabled = False
