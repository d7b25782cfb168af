"""
Trains as ``launch.sh`` does, in one process, but with FSDP2 if ``SHARDED=1``: what one GPU can show of a run on several, with NCCL,
sharded parameters, the fastest kernels and compiled sublayers. ``test_fsdp_alone.py`` starts it:

    torchrun --standalone --nproc-per-node 1 tests/fsdp_alone.py METHOD GPU STEPS [OVERRIDE ...]

DATA_DIR and CHECKPOINT_DIR as for ``launch.sh``. From its fourth step on a recompilation is an error.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "paper-experiments" / "pretrain"), str(ROOT)]

WARM_UP_STEPS = 3


def main() -> int:
    import torch
    import train

    from config_utils.callbacks import GuardCallback
    from config_utils.experiment import build_experiment
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.train import prepare_training_environment
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

    method, gpu, steps, *overrides = sys.argv[1:]
    config = build_experiment(
        "90m", method, 1e-2, gpu=gpu, data_dir=Path(os.environ["DATA_DIR"]),
        checkpoint_dir=Path(os.environ["CHECKPOINT_DIR"]), steps=int(steps),
    ).merge(overrides)  # fmt: skip
    del config.trainer.callbacks["held_out"]  # its model has no gradients and is compiled anew
    if os.environ.get("SHARDED") == "1":
        on_cpu = gpu == "cpu"
        config.train_module.dp_config = TransformerDataParallelConfig(
            name=DataParallelType.fsdp,
            param_dtype=None if on_cpu else DType.bfloat16,
            reduce_dtype=DType.float32,
        )
        config.train_module.autocast_precision = None
        backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
        train.prepare_environment = lambda *args: prepare_training_environment(
            backend=backend, shared_filesystem=True
        )
    seen = 0
    check = GuardCallback.post_train_batch

    def post_train_batch(self: GuardCallback) -> None:
        nonlocal seen
        seen += 1
        check(self)
        torch._dynamo.config.error_on_recompile = seen >= WARM_UP_STEPS

    GuardCallback.post_train_batch = post_train_batch  # type: ignore[method-assign]
    return train.train(config)


if __name__ == "__main__":
    sys.exit(main())
