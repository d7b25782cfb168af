"""
Loading a checkpoint for evaluation without running anything that it contains.

A checkpoint is a folder with ``config.json`` and either ``model_and_optim/`` (OLMo-core's distributed format, with or
without the optimizer's state) or ``model.safetensors``: a ``stepN`` folder of a training run, or one learning rate's
folder of a release. ``config.json`` names Python classes and the distributed format is pickled, so both are read
with allow-lists: only config classes of this project's packages are built, and only the names in
:data:`PICKLE_NAMES` are unpickled. Tensors are read with ``weights_only=True``.
"""

import io
import json
import logging
import os
import pickle
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config_utils.errors import UserError
from config_utils.methods import ALL_METHODS
from config_utils.scales import available_scales, load_scale
from olmo_core.config import Config, DType
from olmo_core.data import TokenizerConfig
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import (
    DepthBackend,
    DepthConnectionConfig,
    DepthTransformerConfig,
)
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.transformer import Transformer, TransformerConfig

log = logging.getLogger(__name__)

CLASS_PREFIXES = ("olmo_core.", "config_utils.")
"""Packages whose config classes ``config.json`` may name."""

DEFAULT_SEQUENCE_LENGTH = 2048
"""Of a checkpoint whose config names none: what the paper's models were trained with."""


class KeyRename(NamedTuple):
    """One rule of :data:`KEY_RENAMES`."""

    pattern: str
    """Regular expression for a whole parameter name in the checkpoint."""
    replacement: str
    """The name in our model."""
    layout: str
    """Where that name comes from."""


KEY_RENAMES: tuple[KeyRename, ...] = (
    KeyRename(
        r"lm_head\.norm\.(weight)",
        r"final_norm.\1",
        "upstream OLMo-core Transformer (a PreLN model)",
    ),
)
"""
Foreign names -> ours; the place to add another layout. A rule is applied to a name that our model does not have, and only
if our model has the result and the checkpoint does not.
"""

PICKLE_NAMES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
    | {
        ("torch", str(t).removeprefix("torch."))
        for t in vars(torch).values()
        if isinstance(t, torch.dtype)
    }
)
"""What the metadata of a distributed checkpoint (``model_and_optim/.metadata``, a pickle) consists of."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredWeights(ABC):
    """The model's tensors in a checkpoint, by name; nothing is read before :meth:`read`."""

    specs: dict[str, TensorSpec]

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the dtype that it was saved in."""


class SafetensorsWeights(StoredWeights):
    """``model.safetensors``, with our model's parameter names."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as e:
            raise UserError(
                f"{path} is not a readable safetensors file ({e}); copy it again"
            ) from None
        self.specs = {}
        for name in self._file.keys():
            part = self._file.get_slice(name)
            self.specs[name] = TensorSpec(
                tuple(part.get_shape()), _SAFETENSORS_DTYPES[part.get_dtype()]
            )

    def read(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLE_NAMES:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Any:
    """
    The metadata of a distributed checkpoint, with nothing unpickled that is not in :data:`PICKLE_NAMES`.

    :raises FileNotFoundError: If there is none.
    :raises ValueError: If it is damaged or holds anything else.
    """
    try:
        with path.open("rb") as f:
            return _MetadataUnpickler(f).load()
    except FileNotFoundError:
        raise
    except Exception as e:  # damaged pickles raise anything
        raise ValueError(" ".join(str(e).split())[:200] or type(e).__name__) from None


def _read_slice(folder: Path, info: Any) -> bytes | None:
    """
    The bytes of one stored tensor: a zip archive, as ``torch.save`` writes it. ``None`` if they are not all there or differ
    from the checksums in the archive, which ``torch.load`` does not compare.
    """
    try:
        with (folder / info.relative_path).open("rb") as f:
            f.seek(info.offset)
            data = f.read(info.length)
        if len(data) != info.length:
            return None
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return data if archive.testzip() is None else None
    except (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile):
        return None


def _is_inside(info: Any) -> bool:
    name = info.relative_path
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def damage(path: Path, threads: int = 4) -> str | None:
    """
    What is wrong with a checkpoint of the trainer, if anything is: files that are missing, cut off or changed. Everything is
    read once, about a second for a gigabyte and thread.

    :param path: A ``stepN`` folder.
    """
    folder = path / "model_and_optim"
    try:
        storage = list(_read_metadata(folder / ".metadata").storage_data.items())
    except FileNotFoundError:
        return "model_and_optim/.metadata is missing"
    except (ValueError, AttributeError) as e:
        return f"model_and_optim/.metadata: {e}"
    states = sorted((path / "train").glob("rank*.pt"))
    if not states:
        return "train/rank0.pt is missing"
    for file in states:
        try:
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() is not None:
                    return f"train/{file.name}: checksums differ"
        except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile):
            return f"train/{file.name} is cut off or changed"
    if any(not _is_inside(info) for _, info in storage):
        return "model_and_optim/.metadata refers to a file outside the checkpoint"
    with ThreadPoolExecutor(threads) as pool:
        whole = pool.map(lambda entry: _read_slice(folder, entry[1]) is not None, storage)
        for (index, info), good in zip(storage, whole, strict=True):
            if not good:
                return f"model_and_optim/{info.relative_path}: '{index.fqn}' is cut off or changed"
    return None


def restrict_unpickling() -> None:
    """
    For OLMo-core's own reader, which the trainer resumes with: ``torch.load`` unpickles tensors and plain data only, although
    that reader asks for everything. :func:`damage` has checked the metadata, which it unpickles by other means.
    """
    import numpy as np

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    # NumPy's random state is an array in the trainer's state; NumPy 1 and 2 name the function differently.
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    allowed += [(reconstruct, f"{module}._reconstruct") for module in modules]
    torch.serialization.add_safe_globals(allowed)


class DistributedWeights(StoredWeights):
    """
    The ``model.*`` tensors of OLMo-core's distributed format. OLMo-core's own reader unpickles the metadata and every
    tensor without restriction; this one reads the same files with allow-lists.
    """

    PREFIX = "model."

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / ".metadata"
        try:
            metadata = _read_metadata(path)
            state_dict_metadata = metadata.state_dict_metadata
            storage = {(i.fqn, tuple(i.offset or ())): s for i, s in metadata.storage_data.items()}
        except FileNotFoundError:
            raise UserError(
                f"{folder} has no .metadata: the checkpoint was not written to its end; use another step"
            ) from None
        except (ValueError, AttributeError, TypeError) as e:
            raise UserError(
                f"{path} is not the metadata of an OLMo-core checkpoint ({e}); copy it again, or use a release "
                "with model.safetensors"
            ) from None
        self._tensors = {
            key.removeprefix(self.PREFIX): (key, entry)
            for key, entry in state_dict_metadata.items()
            if key.startswith(self.PREFIX) and hasattr(entry, "chunks")
        }
        self._storage = storage
        self.specs = {
            name: TensorSpec(tuple(entry.size), entry.properties.dtype)
            for name, (_, entry) in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        key, entry = self._tensors[name]
        out = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        covered = 0
        for chunk in entry.chunks:
            info = self._storage.get((key, tuple(chunk.offsets)))
            part = None if info is None else self._read_part(info)
            if part is None or part.shape != chunk.sizes:
                raise UserError(
                    f"{self.folder}: a part of '{key}' is missing or damaged; copy the checkpoint again"
                )
            target = out
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(part)
            covered += part.numel()
        if covered != out.numel():
            raise UserError(f"{self.folder}: '{key}' is incomplete; copy the checkpoint again")
        return out

    def _read_part(self, info: Any) -> torch.Tensor | None:
        if not _is_inside(info):
            raise UserError(
                f"{self.folder}/.metadata refers to a file outside the checkpoint: {info.relative_path}"
            )
        data = _read_slice(self.folder, info)
        if data is None:
            return None
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
            return None
        return tensor if isinstance(tensor, torch.Tensor) else None


@dataclass
class Checkpoint:
    """What is known of a checkpoint before any weight is read."""

    path: Path
    config: dict[str, Any]
    """The whole of ``config.json``; only the parts below were turned into objects."""
    model_config: TransformerConfig
    tokenizer_config: TokenizerConfig
    sequence_length: int
    """Of the training, in tokens."""

    @property
    def method(self) -> str:
        """The method's name as ``launch.sh`` takes it; ``ldm (custom)`` and the like for options without a name."""
        return self.config.get("method") or method_name(self.model_config)

    @property
    def scale(self) -> str | None:
        """The scale's name as ``launch.sh`` takes it, if it is one of ours."""
        return self.config.get("scale") or scale_name(self.model_config)

    @property
    def step(self) -> int | None:
        """The training step: of the folder's name, or as a release recorded it."""
        if m := _STEP.fullmatch(self.path.name):
            return int(m[1])
        return self.config.get("release", {}).get("step")

    @property
    def run(self) -> str | None:
        """The run's name, ``400m-ldm-lr1e-3-seed42``."""
        name = self.config.get("run_name") or self.config.get("release", {}).get("run")
        return name or (
            self.path.resolve().parent.name if _STEP.fullmatch(self.path.name) else None
        )

    @property
    def learning_rate(self) -> float | None:
        return self.config.get("train_module", {}).get("optim", {}).get("lr")


@dataclass
class LoadedCheckpoint(Checkpoint):
    """A checkpoint and its model, in evaluation mode."""

    model: Transformer = field(repr=False)
    device: torch.device
    dtype: torch.dtype
    """Of the weights and activations; the depth connection's own parameters may be FP32 beside it."""


_STEP = re.compile(r"step(\d+)")


def method_name(config: TransformerConfig) -> str:
    """
    The method of a model, as ``launch.sh`` takes it: ``preln``, ``attnres_full``, ``ldm_k4``, ... Options without a name
    are those of a method and ``(custom)``.
    """
    if not isinstance(config, DepthTransformerConfig):
        block = config.block
        return "preln" if getattr(block, "name", None) == "default" else "olmo-core"
    depth = config.depth
    own_scale = scale_name(config)
    scales = [load_scale(name) for name in ([own_scale] if own_scale else available_scales())]
    named = [(name, factory(scale)) for scale in scales for name, factory in ALL_METHODS.items()]
    for name, known in named:
        if depth == known.replace(backend=depth.backend):
            return name
    if isinstance(depth, AttnResConfig):
        return "attnres_block"
    if isinstance(depth, LDMConfig):
        name = "ldm" if depth.d_k == 8 else f"ldm_k{depth.d_k}"
        plain = LDMConfig(d_k=depth.d_k, backend=depth.backend)
        return name if depth == plain else f"{name} (custom)"
    for name, known in named:
        if type(depth) is type(known):
            return f"{name} (custom)"
    return type(depth).__name__


def scale_name(config: TransformerConfig) -> str | None:
    """The scale of ``paper-experiments/pretrain/configs`` with this depth and width."""
    for name in available_scales():
        shape = load_scale(name).model
        if (shape.n_layers, shape.d_model) == (config.n_layers, config.d_model):
            return name
    return None


def read_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """
    Read and check ``config.json``; no weights.

    :raises UserError: If the folder is no checkpoint; the message says what it is instead.
    """
    path = Path(path)
    config_path = path / "config.json"
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise UserError(
            f"{path} {what}; a checkpoint is a folder such as $CHECKPOINT_DIR/<run>/step47684"
        )
    if not config_path.is_file():
        raise UserError(_not_a_checkpoint(path))
    try:
        config = json.loads(config_path.read_text())
        model_data, tokenizer_data = config["model"], _tokenizer_data(config)
        sequence_length = _sequence_length(config)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(
            f"{config_path} is not the config of a training run ({type(e).__name__}: {e}); it needs the key 'model'"
        ) from None
    for name in ("train_module", "train_module.optim", "release"):
        part: Any = config
        for key in name.split("."):
            part = part.get(key, {})
        if not isinstance(part, dict):
            raise UserError(f"{config_path}: '{name}' is not a mapping")
    model_config = _build_config(TransformerConfig, model_data, f"{config_path}, 'model'")
    tokenizer_config = _build_config(
        TokenizerConfig, tokenizer_data, f"{config_path}, 'dataset.tokenizer'"
    )
    return Checkpoint(path, config, model_config, tokenizer_config, sequence_length)


def _not_a_checkpoint(path: Path) -> str:
    inside = sorted((p for p in path.iterdir() if (p / "config.json").is_file()), key=_natural)
    if inside:
        names = [p.name for p in inside]
        shown = ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
        kind = "a run folder" if _STEP.fullmatch(names[0]) else "a folder of checkpoints"
        return f"{path} is {kind}, not a checkpoint: add one of {shown}"
    if path.name in ("model_and_optim", "train"):
        return f"{path} is a part of a checkpoint: pass the folder above it, {path.parent}"
    return f"{path} is not a checkpoint: it has no config.json, nor has any folder in it"


def _natural(path: Path) -> tuple[int, str]:
    m = _STEP.fullmatch(path.name)
    return (int(m[1]) if m else -1, path.name)


def _tokenizer_data(config: dict[str, Any]) -> dict[str, Any]:
    for owner in (config.get("dataset", {}), config):
        if "tokenizer" in owner:
            return owner["tokenizer"]
    default = TokenizerConfig.gpt_neox_olmo_dolma_v1_5()
    if config["model"]["vocab_size"] in (default.vocab_size, default.padded_vocab_size()):
        return default.as_config_dict()
    raise KeyError("dataset.tokenizer")


def _sequence_length(config: dict[str, Any]) -> int:
    for owner, key in (("dataset", "sequence_length"), ("train_module", "max_sequence_length")):
        value = (config.get(owner) or {}).get(key)
        if isinstance(value, int) and value > 0:
            return value
    return DEFAULT_SEQUENCE_LENGTH


def _build_config(base: type[Config], data: Any, where: str) -> Any:
    """``base.from_dict`` for a stranger's data."""
    for name in _class_names(data):
        _check_class(name, where)
    try:
        out = base.from_dict(data)
    except Exception as e:  # the decoder raises many kinds
        raise UserError(f"{where} cannot be read: {' '.join(str(e).split())[:300]}") from None
    if not isinstance(out, base):
        raise UserError(f"{where} describes a {type(out).__name__}, not a {base.__name__}")
    return out


def _class_names(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        if Config.CLASS_NAME_FIELD in data:
            yield data[Config.CLASS_NAME_FIELD]
        for value in data.values():
            yield from _class_names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _class_names(value)


def _check_class(name: Any, where: str) -> None:
    if not isinstance(name, str) or not name.startswith(CLASS_PREFIXES):
        raise UserError(
            f"{where} names the class {name!r}; a checkpoint may name only config classes of "
            f"{', '.join(p.rstrip('.') for p in CLASS_PREFIXES)}"
        )
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(import_module(module), attribute)
    except (ImportError, AttributeError):
        raise UserError(
            f"{where} names the class {name}, which this version does not have: the checkpoint was written by other "
            "code; write its config.json with this project's classes (eval/README of the evaluation says how)"
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        raise UserError(f"{where} names {name}, which is not a config class")


def open_weights(path: Path) -> StoredWeights:
    """
    The stored weights of a checkpoint folder; ``model.safetensors`` if it is there, else ``model_and_optim/``.

    :raises UserError: If there are none, or their index cannot be read.
    """
    if (path / "model.safetensors").is_file():
        return SafetensorsWeights(path / "model.safetensors")
    if (path / "model_and_optim").is_dir():
        return DistributedWeights(path / "model_and_optim")
    raise UserError(
        f"{path} has a config.json but no weights (neither model_and_optim/ nor model.safetensors): "
        "it was not written, or not downloaded, to its end"
    )


def match_keys(
    expected: Mapping[str, Iterable[int]], stored: Mapping[str, TensorSpec], where: str
) -> dict[str, str]:
    """
    Pair the model's parameters with the stored tensors.

    :param expected: Name -> shape in the model.
    :param where: What the two are, for the message.

    :returns: Name in the model -> name in the checkpoint.

    :raises UserError: If a name or a shape differs after :data:`KEY_RENAMES`.
    """
    names = {name: name for name in stored if name in expected}
    for name in stored:
        if name in expected:
            continue
        for rename in KEY_RENAMES:
            if not re.fullmatch(rename.pattern, name):
                continue
            ours = re.sub(rename.pattern, rename.replacement, name)
            if ours in expected and ours not in names:
                names[ours] = name
                log.info("%s is called %s in the checkpoint (%s)", ours, name, rename.layout)
                break
    missing = [n for n in expected if n not in names]
    used = set(names.values())
    unexpected = [n for n in stored if n not in used]
    shapes = [
        f"{n} ({list(stored[s].shape)} in the checkpoint, {list(expected[n])} in the model)"
        for n, s in names.items()
        if tuple(expected[n]) != stored[s].shape
    ]
    problems = [
        f"{len(found)} {what}: {', '.join(found[:4])}{', ...' if len(found) > 4 else ''}"
        for what, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
        )
        if found
    ]
    if problems:
        looks = looks_like(stored)
        raise UserError(
            f"{where}: the weights do not fit the model that config.json describes: {'; '.join(problems)}; "
            f"by their names they are of {looks}; a foreign layout can be added to KEY_RENAMES in eval/checkpoint.py"
        )
    return names


def looks_like(names: Iterable[str]) -> str:
    """The method that parameter names speak of, for messages."""
    names = list(names)
    last = {n.rsplit(".", 1)[-1] for n in names if "boundary." in n}
    if "phi" in last:
        return "mhc"
    if "b_query" in last:
        return "ldm"
    if "query" in last:
        return "attnres"
    if last:
        return "a method that this table does not know"
    return "preln" if any(n.startswith("blocks.") for n in names) else "no method of ours"


def default_device() -> torch.device:
    """This process's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU, as trained; FP32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build_model(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """
    The model of a config with parameters of ``dtype``, apart from those that the depth connection keeps in FP32; its
    backend is chosen for this machine, whatever the training used.
    """
    config = config.copy()

    def adapt(c: Config) -> None:
        if hasattr(c, "dtype"):
            c.dtype = DType.from_pt(dtype)
        if isinstance(c, DepthConnectionConfig):
            c.backend = DepthBackend.auto

    config.apply(adapt)
    return config.build(init_device=str(device))


def load_checkpoint(
    path: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedCheckpoint:
    """
    Load a checkpoint for evaluation.

    :param path: A ``stepN`` folder, or one learning rate's folder of a release.
    :param device: Default: this process's GPU, else the CPU.
    :param dtype: Of weights and activations; default BF16 on a GPU and FP32 on a CPU.

    :raises UserError: In one sentence, if it is no checkpoint or its weights do not fit.
    """
    checkpoint = read_checkpoint(path)
    device = default_device() if device is None else torch.device(device)
    dtype = default_dtype(device) if dtype is None else dtype
    weights = open_weights(checkpoint.path)
    names = check_weights(checkpoint, weights)
    model = build_model(checkpoint.model_config, dtype, device)
    with torch.no_grad():
        for ours, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(weights.read(names[ours]))
    model.eval()
    return LoadedCheckpoint(**vars(checkpoint), model=model, device=device, dtype=dtype)


def check_weights(checkpoint: Checkpoint, weights: StoredWeights) -> dict[str, str]:
    """:func:`match_keys` of a checkpoint, without building the model in memory."""
    try:
        meta = build_model(checkpoint.model_config, torch.float32, torch.device("meta"))
    except Exception as e:  # sizes and names that no class checks
        why = " ".join(str(e).split()) or type(e).__name__
        raise UserError(
            f"the model that {checkpoint.path / 'config.json'} describes cannot be built: {why}"
        ) from None
    expected = {name: tuple(t.shape) for name, t in meta.state_dict().items()}
    return match_keys(expected, weights.specs, f"{checkpoint.path} (method {checkpoint.method})")
