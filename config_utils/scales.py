"""Model scales: one YAML file for each in ``paper-experiments/pretrain/configs``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from config_utils.errors import UserError

CONFIG_DIR = Path(__file__).resolve().parents[1] / "paper-experiments" / "pretrain" / "configs"
VOCAB_SIZE = 50_280
EOS_TOKEN_ID = 50_279
PAD_TOKEN_ID = 1


@dataclass(frozen=True)
class ModelShape:
    d_model: int
    n_layers: int
    """Blocks; the number of sublayers is twice that."""
    n_heads: int
    ffn_hidden_size: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: int = 500_000
    norm_eps: float = 1e-6
    init_std: float = 0.02


@dataclass(frozen=True)
class Recipe:
    sequence_length: int
    """Tokens."""
    global_batch_size: int
    """Tokens in one optimizer step over all GPUs."""
    steps: int
    eval_interval: int
    """Steps between evaluations on the held-out shard."""
    checkpoint_interval: int
    """Steps between checkpoints that are kept for ever."""
    ephemeral_checkpoint_interval: int | None = None
    """Steps between checkpoints that the next one replaces: what a crash costs at most."""
    eval_windows: int | None = None
    """Windows of the held-out shard for one evaluation, the first ones; all of them if unset."""
    metrics_interval: int = 10
    """Steps between measurements of the depth connection (gates, entropies, norms)."""
    warmup_fraction: float = 0.1
    final_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Scale:
    name: str
    model: ModelShape
    recipe: Recipe
    attnres_block_size: int
    """Sublayers in a block of ``attnres_block``: about an eighth of all sublayers."""
    rank_microbatch_size: dict[str, int]
    """Tokens in one forward pass, by hardware (``cpu``, ``h100``, ``h200``, ``b200``)."""

    @property
    def n_sublayers(self) -> int:
        return 2 * self.model.n_layers


def available_scales() -> list[str]:
    """Smallest first."""
    scales = [load_scale(path.stem) for path in CONFIG_DIR.glob("*.yaml")]
    return [s.name for s in sorted(scales, key=lambda s: (s.model.d_model, s.model.n_layers))]


def load_scale(name: str) -> Scale:
    """
    Read ``configs/<name>.yaml``.

    :raises UserError: If there is no such scale, or a key is missing, unknown or of the wrong type.
    """
    path = CONFIG_DIR / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIG_DIR.glob("*.yaml")))
        raise UserError(f"unknown scale '{name}': choose one of {known}")
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is no YAML ({' '.join(str(e).split())})") from None
    top = _checked(Scale, data, path, skip=("name",))
    return Scale(
        name=name,
        model=ModelShape(**_checked(ModelShape, top.pop("model"), path)),
        recipe=Recipe(**_checked(Recipe, top.pop("recipe"), path)),
        **top,
    )


def _checked(cls: Any, data: Any, path: Path, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping for {cls.__name__}, got {data!r}")
    known = {f.name: f for f in fields(cls) if f.name not in skip}
    if unknown := sorted(set(data) - set(known)):
        raise UserError(f"{path}: {cls.__name__} has no key {', '.join(map(repr, unknown))}")
    from dataclasses import MISSING

    required = {n for n, f in known.items() if f.default is MISSING}
    if missing := sorted(required - set(data)):
        raise UserError(f"{path}: {cls.__name__} needs {', '.join(map(repr, missing))}")
    for key, value in data.items():
        kind = str(known[key].type).removeprefix("<class '").removesuffix("'>")
        if value is None and kind.endswith("| None"):
            continue
        kind = kind.removesuffix(" | None")
        if kind == "int" and type(value) is not int:
            raise UserError(f"{path}: {key} must be a whole number, got {value!r}")
        if kind == "float" and type(value) not in (int, float):
            # YAML reads 1e-6 without a dot as a string.
            raise UserError(f"{path}: {key} must be a number, got {value!r} (write 1.0e-6)")
        if kind in ("int", "float") and (value < 0 or (kind == "int" and value == 0)):
            raise UserError(f"{path}: {key} must be above 0, got {value}")
        if kind.startswith("dict") and not isinstance(value, dict):
            raise UserError(f"{path}: {key} must be a mapping, got {value!r}")
    return dict(data)
