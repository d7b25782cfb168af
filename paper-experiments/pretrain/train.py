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
import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # config_utils, where nothing is installed

import rich
import torch
import yaml

from config_utils.errors import UserError, run_cli
from config_utils.experiment import GPUS, ExperimentConfig, build_experiment, env_path
from config_utils.run_info import run_info, sha256
from olmo_core.distributed.utils import get_local_world_size, get_rank
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.train import prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import ConfigSaverCallback
from olmo_core.utils import seed_all

log = logging.getLogger(__name__)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scale", help="tiny, 90m, 400m, 1p5b or 1p7b")
    parser.add_argument("method", help="preln, attnres_full, attnres_block, mhc, ldm, ldm_k4, ...")
    parser.add_argument("lr", type=float, help="the peak learning rate")
    parser.add_argument("--gpu", default="cpu", help=f"the hardware: {', '.join(GPUS)}")
    parser.add_argument("--dry-run", action="store_true", help="print the config and exit")
    return parser.parse_known_args()


def env_int(name: str) -> int | None:
    value = os.environ.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} must be a whole number, got '{value}'") from None


def check_same_model(config: ExperimentConfig) -> int | None:
    """
    The newest checkpoint's step in the run folder, if there is one.

    :raises UserError: If that checkpoint is of another model.
    """
    folder = Path(config.trainer.save_folder)
    steps = sorted(
        (int(p.name.removeprefix("step")), p)
        for p in folder.glob("step*")
        if p.name.removeprefix("step").isdigit() and (p / ".metadata.json").is_file()
    )
    if not steps:
        return None
    step, path = steps[-1]
    saved = json.loads((path / "config.json").read_text())["model"]
    if saved != config.model.as_config_dict():
        ours = config.model.as_config_dict()
        different = sorted(k for k in saved.keys() | ours.keys() if saved.get(k) != ours.get(k))
        raise UserError(
            f"{path} holds a checkpoint of another model (its {', '.join(different)} differ); move that run folder "
            "away or set another CHECKPOINT_DIR"
        )
    return step


def main() -> int:
    opts, overrides = parse_args()
    for override in overrides:
        if override.startswith("-") and "=" not in override:
            raise UserError(f"unknown option '{override}'; see --help")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
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
        opts.lr,
        gpu=opts.gpu,
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        data_dir=None if opts.dry_run else data_dir,
        checkpoint_dir=checkpoint_dir,
        seed=42 if seed is None else seed,
        steps=env_int("STEPS"),
        wandb_project=os.environ.get("WANDB_PROJECT"),
        wandb_entity=os.environ.get("WANDB_ENTITY"),
    )
    if overrides:
        try:
            config = config.merge(overrides)
        except Exception as e:  # the decoder raises many kinds
            raise UserError(f"cannot apply {' '.join(overrides)} to the config: {e}") from None
    if opts.dry_run:
        plain = json.loads(json.dumps(config.as_config_dict()))  # YAML knows no enums
        print(yaml.safe_dump(plain, sort_keys=False), end="")
        return 0
    resumed_from = check_same_model(config)
    return train(config, resumed_from)


def train(config: ExperimentConfig, resumed_from: int | None) -> int:
    """:returns: The exit status: 143 (128 + SIGTERM) if the run was stopped before its end, so that nothing goes on with it."""
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    backend = None
    if distributed:
        backend = "gloo" if config.gpu == "cpu" else "cpu:gloo,cuda:nccl"
    if config.gpu == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare_training_environment(backend=backend, shared_filesystem=True)
    seed_all(config.seed)
    log.info(
        "Run folder %s: %s",
        config.trainer.save_folder,
        "a new run" if resumed_from is None else f"going on from step {resumed_from}",
    )

    try:
        model = config.model.build(init_device="meta")
        model.metrics_interval = config.metrics_interval
        train_module = config.train_module.build(model)
        dataset = config.dataset.build()
        data_loader = config.data_loader.build(
            dataset, dp_process_group=train_module.dp_process_group
        )
        trainer = config.trainer.build(train_module, data_loader)
    except OLMoConfigurationError as e:
        raise UserError(f"{config.run_name}: {e}") from None

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
    trainer.fit()
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


if __name__ == "__main__":
    run_cli(main)
