"""
Trainer callbacks that OLMo-core lacks: metrics as JSON lines, W&B that never stops a training run, the held-out
cross-entropy as ``eval/heldout.py`` defines it, speeds where the host does not wait for the device in every step, and a guard that
stops a run whose loss or gradient is not finite.
"""

import contextlib
import json
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from config_utils.errors import UserError
from olmo_core.aliases import PathOrStr
from olmo_core.data import TokenizerConfig
from olmo_core.distributed.utils import (
    all_gather_object,
    all_reduce_value,
    get_full_tensor,
    get_local_tensor,
    get_rank,
)
from olmo_core.nn.lm_head import LMOutputWithLoss
from olmo_core.train.callbacks import (
    Callback,
    CheckpointerCallback,
    ConfigSaverCallback,
    SpeedMonitorCallback,
    WandBCallback,
)
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC, MetricMergeStrategy, ReduceType
from olmo_core.utils import cuda_sync_debug_mode, get_default_device

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
            for line in self.path.read_text(errors="replace").splitlines():
                try:
                    if json.loads(line)["step"] <= self.step:
                        kept.append(line + "\n")
                except (json.JSONDecodeError, KeyError, TypeError):
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
    ``PPL``: the number of ``evaluation/run.sh``, in the precision of the training. OLMo-core's own evaluator sees each
    document's first window only and counts a position of loss zero for each document.
    """

    data_dir: str
    """The tokeniser's output."""
    tokenizer: TokenizerConfig
    sequence_length: int
    """Tokens in a window."""
    eval_interval: int
    """Steps between two evaluations."""
    max_windows: int | None = None
    """Read only so many windows of the text, the first ones."""

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

        module: Any = self.trainer.train_module
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
            max_windows=self.max_windows,
        )
        self.trainer.record_metric("eval/held-out/CE loss", result.cross_entropy)
        self.trainer.record_metric("eval/held-out/PPL", result.perplexity)
        log.info(
            "Held-out cross-entropy %.4f nats over %s tokens (%.1f s)",
            result.cross_entropy,
            f"{result.tokens:,d}",
            time.monotonic() - began,
        )


class Origin(NamedTuple):
    """Where on this process a batch first gives something that is not finite."""

    what: str
    """``output of blocks.3.feed_forward``, ``gradient of blocks.3.feed_forward.w2.weight``, ..."""
    rows: list[int] | None
    """The sequences of the batch that are concerned; ``None`` if they cannot be told apart."""
    rank: int = 0


@dataclass
class WindowSpeedMonitorCallback(SpeedMonitorCallback):
    """
    OLMo-core's speeds, over all steps since the host last waited for the device, recorded at the steps where it waits:
    :class:`GuardCallback` does before metrics are collected. In between the host is up to some steps ahead, and the time of
    one step on the host is not the device's. The averages of the whole run (``actual avg``) are as they were.
    """

    def __post_init__(self) -> None:
        self._window = _Window()

    def post_step(self) -> None:
        window = self._window
        window.steps += 1
        window.tokens += self._step_tokens
        window.flops += self._step_flops
        window.load_seconds += self._batch_load_time
        trainer = self.trainer
        waited = self.step % trainer.metrics_collect_interval == 0 or self.step == trainer.max_steps
        if not (waited or self._first_step):
            return
        first, began = self._first_step, self._step_last_logged
        self._step_tokens, self._step_flops = window.tokens, window.flops
        self._batch_load_time = window.load_seconds
        super().post_step()
        self._step_tokens = self._step_flops = 0
        self._window = _Window()
        latest = MetricMergeStrategy.latest
        load = window.load_seconds / window.steps
        name = "throughput/device/data loading (s)"
        trainer.record_metric(name, load, ReduceType.max, merge_strategy=latest)
        if not first:
            steps_per_second = window.steps / (self._step_last_logged - began)
            trainer.record_metric("throughput/device/BPS", steps_per_second, merge_strategy=latest)


@dataclass
class _Window:
    steps: int = 0
    tokens: int = 0
    flops: int = 0
    load_seconds: float = 0.0


class NonFiniteError(UserError):
    """The loss or a gradient is not finite; all processes raise it together."""


class LocalError(UserError):
    """What stops this process and concerns it alone, so that it has to say so whatever its rank is."""


@dataclass
class GuardCallback(Callback):
    """
    Stops a run whose loss or gradient is not finite, before a checkpoint is written from it, and says at which step, on
    which data and in which layer that began; reports spikes of the loss.

    The host does not wait for the device in every step. Each step leaves its verdict on the device, and once one is bad the
    optimizer changes nothing any more (``found_inf`` of PyTorch's fused AdamW). So the parameters are still those of the bad
    step when the verdict is read: whenever the trainer collects metrics, and before each checkpoint. Then that
    step's batch, which is kept until here, runs once more with hooks.
    """

    priority: ClassVar[int] = 2  # the checkpointer's is 1

    spike_window: int = 100
    """Steps that a loss is compared with."""
    spike_after: int = 50
    """Steps before the first comparison."""
    spike_deviations: float = 6.0
    """A spike is a loss so many standard deviations above the mean."""

    _NEVER: ClassVar[int] = 1 << 62

    def __post_init__(self) -> None:
        self._batches: dict[int, dict[str, torch.Tensor]] = {}
        self._bad_step: torch.Tensor | None = None
        self._first_step: int | None = None
        self._losses: deque[float] = deque(maxlen=self.spike_window)

    def state_dict(self) -> dict[str, Any]:
        # The trainer asks for this right before it writes a checkpoint, and at no other time.
        self.check()
        return {"losses": list(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.extend(state_dict.get("losses", []))

    def post_checkpoint_loaded(self, path: PathOrStr) -> None:
        # Killed after a checkpoint's last file and before its config.json, a run leaves one that only it can read.
        if get_rank() == 0 and not (Path(path) / "config.json").is_file():
            for callback in self.trainer.callbacks.values():
                if isinstance(callback, ConfigSaverCallback):
                    callback.post_checkpoint_saved(path)

    def pre_train(self) -> None:
        train_module: Any = self.trainer.train_module
        train_module.optim.register_step_pre_hook(
            lambda optimizer, args, kwargs: self._before_update(optimizer)
        )

    def pre_step(self, batch: dict[str, Any]) -> None:
        self._batches[self.step] = {k: batch[k] for k in ("input_ids", "index") if k in batch}
        if self._first_step is None:
            self._first_step = self.step

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        loss = self.trainer.get_metric(TRAIN_CE_LOSS_METRIC)
        norm = self.trainer.get_metric("total grad norm", namespace="optim")
        if norm is None:  # no clipping
            train_module: Any = self.trainer.train_module
            grads = [p.grad for p in train_module.model.parameters() if p.grad is not None]
            norm = get_full_tensor(nn.utils.get_total_norm(grads))
        bad = ~torch.isfinite(norm)
        if loss is not None:
            bad = bad | ~torch.isfinite(loss)
        if self._bad_step is None:
            self._bad_step = torch.full_like(bad, self._NEVER, dtype=torch.int64)
        here = torch.where(bad, self.step, self._NEVER)
        self._bad_step = torch.minimum(self._bad_step, here)
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = (self._bad_step < self._NEVER).float()  # type: ignore[attr-defined]

    def post_train_batch(self) -> None:
        trainer = self.trainer
        due = self.step % trainer.metrics_collect_interval == 0
        # The trainer collects metrics after the first step, after the last, and before each checkpoint.
        due = due or self.step in (self._first_step, trainer.max_steps)
        for callback in trainer.callbacks.values():
            if isinstance(callback, CheckpointerCallback) and callback.enabled:
                for interval in (callback.save_interval, callback.ephemeral_save_interval):
                    due = due or (interval is not None and self.step % interval == 0)
                due = due or self.step in (callback.fixed_steps or ())
        if due:
            self.check()

    def post_train(self) -> None:
        self.check()

    def bad_step(self) -> int | None:
        """The first step of this process with a loss or gradient that is not finite; waits for the device."""
        if self._bad_step is None:
            return None
        with cuda_sync_debug_mode(0):
            step = int(self._bad_step.item())
        return None if step == self._NEVER else step

    def check(self) -> None:
        """
        All processes call it in the same step.

        :raises NonFiniteError: If a loss or gradient was not finite on any of them.
        """
        step = self.bad_step()
        with cuda_sync_debug_mode(0):
            first = all_reduce_value(
                self._NEVER if step is None else step, self.trainer.device, dist.ReduceOp.MIN
            )
        if first != self._NEVER:
            raise NonFiniteError(self.describe(first))
        self._batches.clear()

    def describe(self, step: int, together: bool = True) -> str:
        """
        One sentence on a bad step.

        :param together: All processes are here, so that the batch can be run again.
        """
        batch = self._batches.get(step, {})
        found = None
        if together and batch:
            # Its warnings are about metrics that the second run of the batch records again.
            logging.disable(logging.WARNING)
            try:
                found = find_origin(self.trainer.train_module, batch)
            finally:
                logging.disable(logging.NOTSET)
        mine = (found, _data_indices(batch, found.rows if found else None), get_rank())
        everyone = all_gather_object(mine) if together else [mine]
        # A gradient is a sum over all processes; an output is where it began.
        outputs = [m for m in everyone if m[0] and m[0].what.startswith("output")]
        origin, indices, rank = (outputs or [m for m in everyone if m[0]] or everyone)[0]
        where = (
            f"it began in the {origin.what}" if origin else "running that batch again shows nothing"
        )
        on = f" on rank {rank}" if len(everyone) > 1 else ""
        try:
            last = Checkpointer.latest_checkpoint(self.trainer.save_folder)
            kept = f"the last good checkpoint is {last}"
        except FileNotFoundError:
            kept = "there was no checkpoint yet"
        return (
            f"step {step}: the loss or a gradient is not finite; {where} ({indices}{on}); {kept}, and nothing was saved "
            "after it: run again with a lower learning rate, or leave this batch out with "
            f"'trainer.steps_to_skip=[{{start: {step}, stop: {step + 1}}}]'"
        )

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        loss = metrics.get(TRAIN_CE_LOSS_METRIC)
        if loss is None or get_rank() != 0:
            return
        if len(self._losses) >= self.spike_after:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + self.spike_deviations * deviation:
                metrics["train/CE loss spike"] = loss - mean
                log.warning(
                    "Loss spike at step %d: %.4f, against %.4f +- %.4f in the %d steps before",
                    step,
                    loss,
                    mean,
                    deviation,
                    len(self._losses),
                )
        self._losses.append(loss)


def _data_indices(batch: dict[str, Any], rows: list[int] | None) -> str:
    """``data indices 3, 17``: positions in the training set of a batch's sequences, or of some of them."""
    if "index" not in batch:
        return "data indices unknown"
    indices = batch["index"].flatten().tolist()
    if rows is not None:
        indices = [indices[r] for r in rows]
    shown = ", ".join(map(str, indices[:8]))
    return f"data indices {shown}" + (f", ... {len(indices)} in all" if len(indices) > 8 else "")


@contextlib.contextmanager
def _watch(model: nn.Module, sequences: int) -> Iterator[list[Origin]]:
    """The first module in the block whose output is not finite, as a list of one; a module ends after its parts."""
    found: list[Origin] = []
    rows_before = [0, 0]  # sequences in the micro-batches before this one, and in this one

    def start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        rows_before[:] = [sum(rows_before), ids.shape[0]]

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if found:
                return
            for tensor in torch.utils._pytree.tree_leaves(output):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    continue
                bad = ~torch.isfinite(get_local_tensor(tensor.detach()))
                if not bool(bad.any()):
                    continue
                first, here = rows_before
                rows = list(range(here))
                if bad.dim() > 1 and bad.shape[0] == here:
                    rows = bad.flatten(1).any(dim=1).nonzero().flatten().tolist()
                where = f"output of {name}" if name else "output of the model"
                found.append(Origin(where, [min(first + r, sequences - 1) for r in rows]))
                return

        return hook

    handles: list[Any] = [model.register_forward_pre_hook(start, prepend=True, with_kwargs=True)]
    handles += [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def find_origin(train_module: Any, batch: dict[str, torch.Tensor]) -> Origin | None:
    """
    Run a batch forward and backward once more and find where it first gives something that is not finite. All
    processes call it together; the gradients are left empty.

    :param batch: ``input_ids``, int64 ``[B, T]``, and what else the data loader gives.
    """

    def bad(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and not bool(torch.isfinite(get_local_tensor(tensor)).all())

    model = train_module.model
    parameters = list(model.named_parameters())
    damaged = [name for name, p in parameters if bad(p.detach())]
    with torch.compiler.set_stance("force_eager"), _watch(model, len(batch["input_ids"])) as found:
        train_module.zero_grads()
        train_module.train_batch(dict(batch), dry_run=True)
    # The gradient flows from the loss to the embedding: it began in the last of these.
    gradients = [name for name, p in parameters if bad(p.grad)]
    train_module.zero_grads()
    if damaged:
        return Origin(f"parameter {damaged[0]}, which is not finite itself", None)
    if found:
        return found[0]
    if gradients:
        return Origin(f"gradient of {gradients[-1]}", None)
    return None
