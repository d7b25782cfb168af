"""
Trains one model with OLMo-core's trainer. ``launch.sh`` is the way to start it; by hand:

one GPU    python paper-experiments/pretrain/train.py 90m ldm 0.002 --gpu h200
8 GPUs     torchrun --nproc-per-node 8 paper-experiments/pretrain/train.py 400m ldm 0.001 --gpu b200
a CPU      python paper-experiments/pretrain/train.py tiny ldm 0.004 --gpu cpu

Environment: DATA_DIR (the tokeniser's output), CHECKPOINT_DIR (default ./checkpoints), SEED (42), STEPS (the recipe's),
WANDB_ENTITY, WANDB_PROJECT. Further arguments override the config: ``trainer.cancel_check_interval=5``. The run folder is
``$CHECKPOINT_DIR/<scale>-<method>-lr<lr>-seed<seed>``; a run that was stopped goes on from its last checkpoint.
"""

import argparse
import contextlib
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar, cast

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # config_utils, where nothing is installed

import rich
import torch
import yaml
from torch.distributed.checkpoint import CheckpointException

from config_utils.callbacks import GuardCallback, LocalError
from config_utils.errors import UserError, run_cli
from config_utils.experiment import (
    GPUS,
    ExperimentConfig,
    build_experiment,
    env_path,
    scale_depth_lr,
)
from config_utils.run_info import run_info, sha256
from eval.checkpoint import damage, restrict_unpickling
from olmo_core.distributed.utils import broadcast_object, get_local_world_size, get_rank
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth import DepthBackend, DepthTransformer
from olmo_core.train import prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import ConfigSaverCallback
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.utils import seed_all

log = logging.getLogger(__name__)
T = TypeVar("T")

LOCK_WAIT_S = 120.0
"""How long a start waits for a run folder that a process of another machine holds: a file server may keep a lost machine's lock."""
_HELD: list[Any] = []
"""The open lock of the run folder: closing it would let go."""


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scale", help="tiny, 90m, 400m, 1p5b or 1p7b")
    parser.add_argument("method", help="preln, attnres_full, attnres_block, mhc, ldm, ldm_k4, ...")
    parser.add_argument("lr", help="the peak learning rate")
    parser.add_argument("--gpu", default="cpu", help=f"the hardware: {', '.join(GPUS)}")
    parser.add_argument("--dry-run", action="store_true", help="print the config and exit")
    return parser.parse_known_args()


def number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{what} must be a number such as 0.001, got '{text}'") from None


def env_int(name: str, least: int = 0, most: int = 2**32 - 1) -> int | None:
    value = os.environ.get(name)
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"{name} must be a whole number, got '{value}'") from None
    if not least <= number <= most:
        raise UserError(f"{name} must be at least {least} and at most {most}, got {value}")
    return number


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((step, Path(path)) for step, path in Checkpointer.find_checkpoints(folder))


def newest_whole_checkpoint(config: ExperimentConfig) -> int | None:
    """
    The step that the run goes on from, if it has a checkpoint. One that is damaged is renamed, so that the run goes on
    from the one before it.

    :raises UserError: If all are damaged, or the checkpoint is of another model.
    """
    folder = Path(config.trainer.save_folder)
    damaged = []
    for step, path in reversed(checkpoints(folder)):
        if problem := damage(path):
            aside = path.with_name(f"{path.name}.damaged")
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.damaged{number}")
            path.rename(aside)
            log.warning("%s is damaged (%s); renamed to %s", path, problem, aside.name)
            damaged.append(f"{aside.name} ({problem})")
            continue
        # The trainer writes it last: a run that was killed at that moment has a whole checkpoint without one.
        if (path / "config.json").is_file():
            check_same_model(config, path)
        return step
    if damaged:
        raise UserError(
            f"{folder} has no whole checkpoint left: {', '.join(damaged)}; copy one back from elsewhere, or move the "
            "run folder away to train from the start"
        )
    return None


def check_same_model(config: ExperimentConfig, path: Path) -> None:
    """
    :raises UserError: If a checkpoint is of another model.
    """
    try:
        saved = json.loads((path / "config.json").read_text())["model"]
        assert isinstance(saved, dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(
            f"{path / 'config.json'} is damaged; copy it from another checkpoint of this run, or remove it"
        ) from None
    ours = json.loads(json.dumps(config.model.as_config_dict()))
    with contextlib.suppress(Exception):
        # What an older version did not know has its default; one that cannot be read so is compared as it stands.
        whole = type(config.model).from_dict(saved)
        saved = json.loads(json.dumps(whole.as_config_dict()))
    if saved != ours:
        there, here = leaves(saved), leaves(ours)
        different = [
            f"model.{name} is {there.get(name)} there and {here.get(name)} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        more = f", and {len(different) - 4} more" if len(different) > 4 else ""
        raise UserError(
            f"{path} holds a checkpoint of another model ({', '.join(different[:4])}{more}); move that run folder "
            "away or set another CHECKPOINT_DIR"
        )


def leaves(config: Any, name: str = "") -> dict[str, Any]:
    """The values of a nested config by their paths."""
    if isinstance(config, dict):
        items = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, list):
        items = [(str(i), value) for i, value in enumerate(config)]
    else:
        return {name: config}
    return {
        k: v for key, value in items for k, v in leaves(value, f"{name}.{key}".lstrip(".")).items()
    }


def hold(folder: Path) -> None:
    """
    Keep other runs out of a run folder until this process ends, however it ends. The lock is the process's own: worker processes
    that outlive it do not have it.

    :raises UserError: If another process trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a+")
    host, end, said = socket.gethostname(), time.monotonic() + LOCK_WAIT_S, False
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks: go on unprotected
        lock.seek(0)
        pid, _, where = lock.read().strip().partition(" ")
        who = f"process {pid or 'unknown'} on {where or 'an unknown machine'}"
        if where == host or time.monotonic() > end:
            raise UserError(
                f"{folder} is the folder of a run that is going on ({who}): wait for its end, or set another "
                "CHECKPOINT_DIR or SEED"
            )
        if not said:
            log.warning("%s is held by %s: waiting %.0f s for it", folder, who, LOCK_WAIT_S)
            said = True
        time.sleep(1.0)
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()} {host}\n")
    lock.flush()
    _HELD.append(lock)


def check_backends(config: ExperimentConfig, model: DepthTransformer) -> None:
    """
    Before anything is written: can the backend run that the config names?

    :raises OLMoConfigurationError: If not; the message says why.
    """
    module = config.train_module
    dtype = module.autocast_precision or (module.dp_config and module.dp_config.param_dtype)
    device = torch.device("cpu" if config.gpu == "cpu" else "cuda")
    for boundary in model.boundaries():
        if boundary.backend not in (DepthBackend.auto, DepthBackend.reference):
            boundary.select_backend(device, dtype.as_pt() if dtype else torch.float32)


def check_values(config: ExperimentConfig) -> None:
    """
    What an override can break without any class of the config noticing it.

    :raises UserError: If a value is out of its range.
    """
    trainer, module, tokenizer = config.trainer, config.train_module, config.dataset.tokenizer
    held_out = trainer.callbacks.get("held_out")
    for name, value in (
        ("trainer.metrics_collect_interval", trainer.metrics_collect_interval),
        ("trainer.cancel_check_interval", trainer.cancel_check_interval),
        ("metrics_interval", config.metrics_interval),
        ("trainer.callbacks.held_out.eval_interval", getattr(held_out, "eval_interval", 1)),
        ("trainer.callbacks.held_out.sequence_length", getattr(held_out, "sequence_length", 1)),
        ("data_loader.global_batch_size", config.data_loader.global_batch_size),
        ("train_module.rank_microbatch_size", module.rank_microbatch_size),
        ("model.d_model", config.model.d_model),
        ("model.n_layers", config.model.n_layers),
    ):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if module.max_grad_norm is not None and not module.max_grad_norm > 0:
        raise UserError(
            f"train_module.max_grad_norm must be above 0 or null, got {module.max_grad_norm}"
        )
    if not 0 < config.depth_lr_scale <= 100:
        raise UserError(f"depth_lr_scale must lie between 0 and 100, got {config.depth_lr_scale}")
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens"
        )
    for name in ("eos_token_id", "pad_token_id"):
        if not 0 <= getattr(tokenizer, name) < tokenizer.vocab_size:
            raise UserError(
                f"dataset.tokenizer.{name} is {getattr(tokenizer, name)}, which is no token of the {tokenizer.vocab_size}"
            )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def write_error(error: BaseException) -> str | None:
    """The reason, if an exception comes from a file that could not be written."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    for e in causes(error):
        if isinstance(e, OSError) and e.errno in full:
            return os.strerror(e.errno)
        # torch's writer, and exceptions that a distributed save carries as text
        for number in full:
            if os.strerror(number) in str(e):
                return os.strerror(number)
        if "PytorchStreamWriter failed" in str(e) or "file write failed" in str(e):
            return "a file could not be written; is the disk full?"
    return None


def main() -> int:
    opts, overrides = parse_args()
    for override in overrides:
        if override.startswith("-") and "=" not in override:
            raise UserError(f"unknown option '{override}'; see --help")
    world_size = env_int("WORLD_SIZE", least=1) or 1
    data_dir = env_path("DATA_DIR")
    if data_dir is None and not opts.dry_run:
        raise UserError("DATA_DIR is not set; set it to the tokeniser's --output-dir")
    if data_dir is not None and not data_dir.is_dir() and not opts.dry_run:
        raise UserError(
            f"DATA_DIR={data_dir} is not a folder; set it to the tokeniser's --output-dir"
        )
    if opts.gpu != "cpu" and not torch.cuda.is_available() and not opts.dry_run:
        raise UserError(
            f"--gpu {opts.gpu}: this machine has no CUDA GPU; --gpu cpu trains on the CPU"
        )
    checkpoint_dir = env_path("CHECKPOINT_DIR", "checkpoints")
    assert checkpoint_dir is not None
    seed = env_int("SEED")
    config = build_experiment(
        opts.scale,
        opts.method,
        number(opts.lr, "the learning rate"),
        gpu=opts.gpu,
        world_size=world_size,
        local_world_size=env_int("LOCAL_WORLD_SIZE", least=1) or world_size,
        data_dir=None if opts.dry_run else data_dir,
        checkpoint_dir=checkpoint_dir,
        seed=42 if seed is None else seed,
        steps=env_int("STEPS", least=1),
        wandb_project=os.environ.get("WANDB_PROJECT"),
        wandb_entity=os.environ.get("WANDB_ENTITY"),
    )
    if overrides:
        try:
            config = config.merge(overrides)
        except Exception as e:  # the decoder raises many kinds
            why = " ".join(str(e).split())
            raise UserError(f"cannot apply {' '.join(overrides)} to the config: {why}") from None
    check_values(config)
    if opts.dry_run:
        plain = json.loads(json.dumps(config.as_config_dict()))  # YAML knows no enums
        print(yaml.safe_dump(plain, sort_keys=False), end="")
        return 0
    try:
        Path(config.trainer.save_folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"{config.trainer.save_folder} cannot be made ({e.strerror}); set CHECKPOINT_DIR to a folder"
        ) from None
    return train(config, overrides)


def on_first_process(function: Callable[..., T], *args: Any) -> T:
    """
    Call a function on the first process only; all get its result.

    :raises UserError: On all, if it does on the first.
    """
    result: T | None = None
    error: str | None = None
    if get_rank() == 0:
        try:
            result = function(*args)
        except UserError as e:
            error = str(e)
    result, error = broadcast_object((result, error))
    if error is not None:
        raise UserError(error)
    return cast(T, result)


def prepare_environment(gpu: str, data_workers: int = 0) -> None:
    """
    Process group (under torchrun), logging and device of this process, as OLMo-core prepares them, but without a default device,
    and with a quicker start of the data loader's workers.
    """
    backend = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "gloo" if gpu == "cpu" else "cpu:gloo,cuda:nccl"
    if gpu == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare_training_environment(backend=backend, shared_filesystem=True)
    # A process that trains alone gets a default device from OLMo-core: a mode that every method of a tensor goes through in
    # Python, so that the host takes 2.5 times as long for a boundary (LDM `fast`, window of 4: 127 us instead of 50 on a CPU, with
    # stubs for the kernels). It also puts each number that is logged on the GPU by itself, which waits for the GPU.
    # Nothing needs it: under torchrun there is none.
    torch.set_default_device(None)
    if data_workers > 0:
        # OLMo-core has each of them start as a new Python ("spawn"), which imports all of this again: 14 s on a machine with 16
        # cores, before the first step of every epoch. The fork server imports it once, while the model is built, and
        # has no CUDA context, which a worker must not inherit.
        multiprocessing.set_start_method("forkserver", force=True)
        # By name: the preload of "__main__" does nothing in Python 3.11 and 3.12.
        multiprocessing.set_forkserver_preload(
            ["config_utils.callbacks", "config_utils.experiment", "eval.checkpoint"]
        )
        forkserver.ensure_running()


def end_with_trainer() -> None:
    """In a worker of the data loader. PyTorch has it end with its parent, which is the fork server, and that waits for its workers."""
    while (
        trainer := multiprocessing.parent_process()
    ) is None:  # this module is read before it is known
        time.sleep(0.1)
    trainer.join()
    os._exit(1)


def train(config: ExperimentConfig, overrides: Sequence[str] = ()) -> int:
    """:returns: The exit status: 143 (128 + SIGTERM) if the run was stopped before its end, so that nothing goes on with it."""
    prepare_environment(config.gpu, config.data_loader.num_workers)
    seed_all(config.seed)
    restrict_unpickling()
    on_first_process(hold, Path(config.trainer.save_folder))
    resumed_from = on_first_process(newest_whole_checkpoint, config)
    log.info(
        "Run folder %s: %s",
        config.trainer.save_folder,
        "a new run" if resumed_from is None else f"going on from step {resumed_from}",
    )

    try:
        model = config.model.build(init_device="meta")
        model.metrics_interval = config.metrics_interval
        check_backends(config, cast(DepthTransformer, model))
        names = (name for name, _ in model.named_parameters())
        scale_depth_lr(config.train_module.optim, names, config.depth_lr_scale)
        train_module = config.train_module.build(model)
        dataset = config.dataset.build()
        data_loader = config.data_loader.build(
            dataset, dp_process_group=train_module.dp_process_group
        )
        trainer = config.trainer.build(train_module, data_loader)
        guard = GuardCallback()
        trainer.add_callback("guard", guard)
    except OLMoConfigurationError as e:
        raise UserError(f"{config.run_name}: {' '.join(str(e).split())}") from None
    except Exception as e:
        if not overrides:
            raise
        why = " ".join(str(e).split()) or type(e).__name__
        raise UserError(
            f"{config.run_name} cannot be built with {' '.join(overrides)}: {why}"
        ) from None

    for callback in trainer.callbacks.values():
        if isinstance(callback, ConfigSaverCallback):
            callback.config = config.as_config_dict()
    if get_rank() == 0:
        folder = Path(config.trainer.save_folder)
        folder.mkdir(parents=True, exist_ok=True)
        info = run_info()
        if data_dir := env_path("DATA_DIR"):
            info["data_manifest_sha256"] = sha256(data_dir / "manifest.json")
        info["resumed_from_step"] = resumed_from
        info["local_world_size"] = get_local_world_size()
        with (folder / "runs.jsonl").open("a") as f:
            f.write(json.dumps(info) + "\n")
        if rich.get_console().is_terminal:
            rich.print(f"[bold]{config.run_name}[/bold]: {model.num_params:,d} parameters")
    try:
        trainer.fit()
    except UserError:
        raise
    except (Exception, CheckpointException) as e:  # the latter is a BaseException
        if (known := user_error(e, guard, config)) is None:
            raise
        raise known from e
    step, last_step = trainer.global_step, trainer.max_steps
    teardown_training_environment()
    if last_step is not None and step < last_step:
        log.warning(
            "Stopped at step %d of %d with a checkpoint; the same command goes on from there",
            step,
            last_step,
        )
        return 143
    return 0


def user_error(
    error: BaseException, guard: GuardCallback, config: ExperimentConfig
) -> UserError | None:
    """One sentence for a failed training, if the reason is known."""
    for e in causes(error):
        if isinstance(e, UserError):
            return e
        # OLMo-core's collator; from a worker process the message comes within a traceback.
        if found := re.search(r"Token IDs \[.*?\] outside valid range \S+ \S+\)", str(e)):
            return LocalError(
                f"after step {guard.step}: {found[0]}, so a token file is damaged: run the tokeniser again with "
                "--skip-existing, then this command"
            )
    if reason := write_error(error):
        steps = checkpoints(Path(config.trainer.save_folder))
        last = f"the last whole checkpoint is {steps[-1][1]}" if steps else "there is no checkpoint"
        return LocalError(
            f"cannot write into {config.trainer.save_folder} ({reason}); {last}: make room and run the same command again"
        )
    if isinstance(error, OLMoConfigurationError):
        return UserError(f"{config.run_name}: {' '.join(str(error).split())}")
    if (step := guard.bad_step()) is not None:
        return UserError(guard.describe(step, together=False))
    return None


def cli() -> int:
    """One message for a mistake, whatever the number of processes."""
    try:
        return main()
    except UserError as e:
        if os.environ.get("RANK", "0") != "0" and not isinstance(e, LocalError):
            return 2
        raise


if __name__ == "__mp_main__":
    threading.Thread(target=end_with_trainer, daemon=True).start()

if __name__ == "__main__":
    run_cli(cli)
