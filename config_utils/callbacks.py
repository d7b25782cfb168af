"""
Trainer callbacks that OLMo-core lacks: metrics as JSON lines, W&B that never stops a training run, and the held-out
cross-entropy as ``eval/heldout.py`` defines it.
"""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from olmo_core.data import TokenizerConfig
from olmo_core.distributed.utils import get_rank
from olmo_core.nn.lm_head import LMOutputWithLoss
from olmo_core.train.callbacks import Callback, WandBCallback
from olmo_core.utils import get_default_device

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


@dataclass
class HeldOutCallback(Callback):
    """
    Cross-entropy on the held-out shards during training and at its end: ``eval/held-out/CE loss``, in nats per token, and
    ``PPL``: the number of ``evaluation/run.sh``, in the precision of the training. OLMo-core's own evaluator sees each document's first window only and counts a position of loss zero
    for each document.
    """

    data_dir: str
    """The tokeniser's output."""
    tokenizer: TokenizerConfig
    sequence_length: int
    """Tokens in a window."""
    eval_interval: int
    """Steps between two evaluations."""
    max_batches: int | None = None
    """Read only so many batches of the text."""

    def post_step(self) -> None:
        # The last step's evaluation is that of post_train.
        if self.step % self.eval_interval == 0 and self.step != self.trainer.max_steps:
            self.evaluate()

    def post_train(self) -> None:
        # Not after a SIGTERM: a cluster that takes the machine back waits for seconds.
        if self.step == self.trainer.max_steps:
            self.evaluate()

    def evaluate(self) -> None:
        from eval.heldout import IGNORE, HeldoutData, evaluate_heldout

        module = self.trainer.train_module
        device = get_default_device()
        batch_size = max(1, module.eval_batch_spec.rank_batch_size // self.sequence_length)

        def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            output = module.eval_batch({"input_ids": inputs}, labels=targets)
            assert isinstance(output, LMOutputWithLoss)
            return output.ce_loss

        assert module.label_ignore_index == IGNORE
        began = time.monotonic()
        result = evaluate_heldout(
            loss,
            HeldoutData(Path(self.data_dir), self.tokenizer),
            device=device,
            sequence_length=self.sequence_length,
            byte_lengths=np.zeros(self.tokenizer.padded_vocab_size(), dtype=np.int64),
            pad_token_id=self.tokenizer.pad_token_id,
            batch_size=batch_size,
            max_batches=self.max_batches,
        )
        self.trainer.record_metric("eval/held-out/CE loss", result.cross_entropy)
        self.trainer.record_metric("eval/held-out/PPL", result.perplexity)
        log.info(
            "Held-out cross-entropy %.4f nats over %s tokens (%.1f s)",
            result.cross_entropy,
            f"{result.tokens:,d}",
            time.monotonic() - began,
        )
