"""Builds the complete config of one training run from a scale, a method and a learning rate."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from config_utils.callbacks import (
    HeldOutCallback,
    JSONLinesMetricsCallback,
    OptionalWandBCallback,
    WindowSpeedMonitorCallback,
)
from config_utils.errors import UserError
from config_utils.methods import depth_connection
from config_utils.run_info import run_name
from config_utils.scales import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    ModelShape,
    Scale,
    load_scale,
)
from data_utils.shards import CorpusManifest, read_corpus
from olmo_core.config import Config, DType
from olmo_core.data import (
    NumpyDataLoaderConfig,
    NumpyFSLDatasetConfig,
    TokenizerConfig,
)
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.depth import DepthTransformerConfig
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup, OptimGroupOverride
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import (
    CheckpointerCallback,
    ConfigSaverCallback,
    GPUMemoryMonitorCallback,
)
from olmo_core.train.train_module import (
    TransformerDataParallelConfig,
    TransformerTrainModuleConfig,
)

GPUS = ("h100", "h200", "b200", "cpu")
PEAK_BF16_FLOPS = {"h100": 989e12, "h200": 989e12, "b200": 2250e12}
"""Dense BF16 FLOP/s from the vendor's datasheets; OLMo-core's own table takes an H200 for an A100."""


@dataclass
class ExperimentConfig(Config):
    """Everything that a run needs; ``config.json`` in every checkpoint."""

    run_name: str
    scale: str
    method: str
    gpu: str
    model: TransformerConfig
    dataset: NumpyFSLDatasetConfig
    data_loader: NumpyDataLoaderConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig
    metrics_interval: int
    seed: int
    depth_lr_scale: float = 1.0
    """The learning rate of the depth connection's own parameters over that of all others (:func:`scale_depth_lr`)."""


def tokenizer_config() -> TokenizerConfig:
    # An identifier that ai2-olmo-eval resolves to its packaged file; the usual one goes to a hub.
    return TokenizerConfig(
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        identifier="tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json",
    )


def model_config(
    shape: ModelShape, method: str, scale: Scale, seed: int = 0
) -> DepthTransformerConfig:
    """A Llama-style model (RMSNorm, SwiGLU, RoPE, untied embeddings) with the method's depth connection."""
    base = DepthTransformerConfig.llama_like(
        d_model=shape.d_model,
        vocab_size=tokenizer_config().padded_vocab_size(),
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        layer_norm_eps=shape.norm_eps,
        init_std=shape.init_std,
        init_seed=seed,
        feed_forward=FeedForwardConfig(hidden_size=shape.ffn_hidden_size, bias=False),
    )
    base.lm_head.bias = False
    assert isinstance(base, DepthTransformerConfig)
    return base.with_depth(depth_connection(method, scale))


def read_data(data_dir: Path) -> CorpusManifest:
    """
    The manifest of the tokenised corpus, whose files are there in full.

    :raises UserError: If the folder is no finished corpus, or one of another tokenizer.
    """
    corpus = read_corpus(data_dir)
    expected = {
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }
    for key, value in expected.items():
        if getattr(corpus.tokenizer, key) != value:
            raise UserError(
                f"{data_dir / 'manifest.json'}: {key} is {getattr(corpus.tokenizer, key)}, the models are built for "
                f"{value}; tokenise the data with the arguments in the README"
            )
    return corpus


def build_experiment(
    scale_name: str,
    method: str,
    lr: float,
    *,
    gpu: str,
    world_size: int = 1,
    local_world_size: int | None = None,
    data_dir: Path | None = None,
    checkpoint_dir: Path = Path("checkpoints"),
    seed: int = 42,
    steps: int | None = None,
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
) -> ExperimentConfig:
    """
    :param gpu: The hardware, one of :data:`GPUS`; it decides the tokens in one forward pass and nothing of the maths.
    :param world_size: The number of processes, one a GPU.
    :param data_dir: The tokeniser's output; ``None`` only to print a config.
    :param steps: Train for this many steps instead of the recipe's; the schedule follows.

    :raises UserError: If anything does not fit.
    """
    scale = load_scale(scale_name)
    if gpu not in GPUS:
        raise UserError(f"unknown GPU '{gpu}': choose one of {', '.join(GPUS)}")
    if not 0 < lr < 1:
        raise UserError(f"the learning rate must lie between 0 and 1, got {lr}")
    recipe = scale.recipe
    steps = recipe.steps if steps is None else steps
    if steps < 1:
        raise UserError(f"STEPS must be at least 1, got {steps}")
    name = run_name(scale_name, method, lr, seed)
    model = model_config(scale.model, method, scale, seed)

    # The largest micro-batch of whole sequences that the hardware takes and that divides a rank's batch.
    sequences, rest = divmod(recipe.global_batch_size, recipe.sequence_length * world_size)
    if rest or sequences == 0:
        raise UserError(
            f"{world_size} processes cannot share a batch of {recipe.global_batch_size} tokens evenly in sequences "
            f"of {recipe.sequence_length}; use a divisor of {recipe.global_batch_size // recipe.sequence_length}"
        )
    most = max(1, scale.rank_microbatch_size[gpu] // recipe.sequence_length)
    micro = max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= most)

    on_cpu = gpu == "cpu"
    n_nodes = world_size // (local_world_size or world_size)
    dp_config = None
    if world_size > 1:
        dp_config = TransformerDataParallelConfig(
            name=DataParallelType.hsdp if n_nodes > 1 else DataParallelType.fsdp,
            param_dtype=None if on_cpu else DType.bfloat16,
            reduce_dtype=DType.float32,
        )
    no_decay = [f"*boundary.{p}" for p in model.depth.no_weight_decay()]

    save_folder = str((checkpoint_dir / name).resolve())
    work_dir = str((checkpoint_dir / ".dataset-cache").resolve())
    tokenizer = tokenizer_config()
    train_files, eval_files = ["DATA_DIR/train/*.npy"], ["DATA_DIR/eval/*.npy"]
    if data_dir is not None:
        corpus = read_data(data_dir)
        train_files = [str(p) for p in corpus.paths(data_dir, "train")]
        eval_files = [str(p) for p in corpus.paths(data_dir, "eval")]

    trainer = TrainerConfig(
        save_folder=save_folder,
        work_dir=work_dir,
        save_overwrite=True,
        max_duration=Duration.steps(steps),
        metrics_collect_interval=10,
        cancel_check_interval=2,  # steps until a SIGTERM is seen
        callbacks={
            "config_saver": ConfigSaverCallback(),
            "checkpointer": CheckpointerCallback(
                save_interval=recipe.checkpoint_interval,
                ephemeral_save_interval=recipe.ephemeral_checkpoint_interval,
                pre_train_checkpoint=False,
                max_checkpoints=None,  # the default of 3 deletes older checkpoints silently
            ),
            "metrics": JSONLinesMetricsCallback(),
            "wandb": OptionalWandBCallback(
                name=name,
                group=f"{scale_name}-{method}",
                project=wandb_project or "depth-memory",
                entity=wandb_entity,
            ),
        },
    )
    if not on_cpu:
        trainer.add_callback(
            "speed_monitor",
            WindowSpeedMonitorCallback(device_peak_flops_per_second=int(PEAK_BF16_FLOPS[gpu])),
        )
        trainer.add_callback("gpu_monitor", GPUMemoryMonitorCallback())
    if eval_files:
        trainer.add_callback(
            "held_out",
            HeldOutCallback(
                data_dir="DATA_DIR" if data_dir is None else str(data_dir.resolve()),
                tokenizer=tokenizer,
                sequence_length=recipe.sequence_length,
                eval_interval=recipe.eval_interval,
                max_windows=recipe.eval_windows,
            ),
        )

    return ExperimentConfig(
        run_name=name,
        scale=scale_name,
        method=method,
        gpu=gpu,
        model=model,
        dataset=NumpyFSLDatasetConfig(
            paths=train_files,
            sequence_length=recipe.sequence_length,
            tokenizer=tokenizer,
            work_dir=work_dir,
        ),
        data_loader=NumpyDataLoaderConfig(
            global_batch_size=recipe.global_batch_size,
            seed=seed,
            work_dir=work_dir,
            num_workers=0 if on_cpu else 4,
        ),
        train_module=TransformerTrainModuleConfig(
            rank_microbatch_size=micro * recipe.sequence_length,
            max_sequence_length=recipe.sequence_length,
            optim=AdamWConfig(
                lr=lr,
                betas=(recipe.beta1, recipe.beta2),
                eps=recipe.eps,
                weight_decay=recipe.weight_decay,
                fused=True,
                group_overrides=[
                    OptimGroupOverride(
                        params=["embeddings.weight", *no_decay], opts={"weight_decay": 0.0}
                    )
                ],
            ),
            scheduler=CosWithWarmup(
                warmup_fraction=recipe.warmup_fraction, alpha_f=recipe.final_lr_fraction
            ),
            max_grad_norm=recipe.max_grad_norm,
            compile_model=not on_cpu,
            dp_config=dp_config,
            # One process has no FSDP to hand out BF16 parameters; autocast does the same job.
            autocast_precision=DType.bfloat16 if world_size == 1 and not on_cpu else None,
        ),
        trainer=trainer,
        metrics_interval=recipe.metrics_interval,
        seed=seed,
    )


def scale_depth_lr(optim: AdamWConfig, parameters: Iterable[str], scale: float) -> None:
    """
    Give the parameters of the boundaries ``scale`` times the learning rate of the others. A logit of a boundary is a sum over
    d products, so a step of Adam moves it by up to d times the learning rate: more in a wider model, and more than it moves
    anything else.

    :param optim: Gets more ``group_overrides``; a parameter keeps the weight decay that it has there.
    :param parameters: The names of all parameters of the model.
    """
    if scale == 1.0:
        return
    left = [name for name in parameters if "boundary." in name]
    overrides = []
    for group in [*(optim.group_overrides or []), OptimGroupOverride(params=["*"], opts={})]:
        found = [name for name in left if any(fnmatch(name, p) for p in group.params)]
        left = [name for name in left if name not in found]
        others = [p for p in group.params if p != "*" and "boundary." not in p]
        if others:
            overrides.append(OptimGroupOverride(params=others, opts=group.opts))
        if found:
            opts = {**group.opts, "lr": scale * group.opts.get("lr", optim.lr)}
            overrides.append(OptimGroupOverride(params=found, opts=opts))
    optim.group_overrides = overrides


def env_path(name: str, default: str | None = None) -> Path | None:
    value = os.environ.get(name) or default
    return None if value is None else Path(value).expanduser()
