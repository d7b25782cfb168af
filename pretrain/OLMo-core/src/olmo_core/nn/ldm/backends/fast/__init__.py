"""
The ``fast`` backend: CuTe DSL kernels for training with LDM's default family, on NVIDIA Hopper and Blackwell. ``DESIGN.md``
tells how they work. Import :mod:`.ops` only where :func:`unavailable` says that it can run: it imports Triton, for the
kernels that it shares with the flexible backend.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from . import cache, launch_table

if TYPE_CHECKING:
    from ...config import LDMConfig


def refused_option(config: "LDMConfig") -> str | None:
    """The first option that the kernels are not written for, as one clause; ``None`` if there is none."""
    family = {
        "d_k": launch_table.SLOTS,
        "key_activation": ("two_sigmoid", "softmax"),
        "key_source": ("output",),
        "query_source": ("memory",),
        "query_activation": ("softmax",),
        "update": ("additive",),
        "write_every": ("sublayer",),
        "residual": ("none",),
    }
    if config.forget != "none":
        family["forget_granularity"] = ("slot",)
    for option, values in family.items():
        value = getattr(config, option)
        if value not in values:
            names = ", ".join(str(v) for v in values)
            return f"its kernels have {option} = {names}, not {value}"
    return None


def refused(
    device: torch.device, dtype: torch.dtype, d_model: int, config: "LDMConfig"
) -> str | None:
    """Why there can be no kernels for these, on disk or not, as one clause; ``None`` if there can."""
    reason = refused_option(config)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"its states are BF16, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"it needs a CUDA device, got '{device.type}'"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    if launch_table.rule("forward", d_model, config.d_k) is None:
        return (
            f"its kernels take d_model up to {launch_table.max_width(config.d_k)} that splits into blocks of a multiple "
            f"of 64 columns, not {d_model}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in cache.ARCHITECTURES:
        return (
            f"it needs NVIDIA Hopper or Blackwell (compute capability 9 or 10), got {major}.{minor}"
        )
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def unavailable(
    device: torch.device, dtype: torch.dtype, d_model: int, config: "LDMConfig", *, by_name: bool
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param by_name: Whether it was asked for by its name: ``auto`` takes only shapes that were timed on the GPU.
    """
    reason = refused(device, dtype, d_model, config)
    if reason is not None:
        return reason
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]
    window = launch_table.window(d_model, config.d_k, config.window)
    if by_name and config.window and window != config.window:
        return (
            f"its kernels have no window of {config.window} boundaries for d_k {config.d_k}: it takes up to "
            f"{launch_table.MAX_WINDOW[config.d_k]}"
        )
    stores8 = config.memory_dtype == "float8"
    if by_name and stores8 and window == 1:
        return (
            f"memory_dtype = float8 needs a window, and its kernels have none for d_k {config.d_k}"
        )
    if not by_name and not launch_table.timed(architecture, d_model, config.d_k):
        return f"d_model {d_model} with d_k {config.d_k} was not timed on {architecture}"
    if cache.dsl_version() is None:
        specs = launch_table.specs(
            architecture,
            d_model,
            config.d_k,
            str(config.key_activation),
            str(config.forget),
            window,
            stores8 and window > 1,
        )
        if not all(cache.has(s, architecture) for s in specs):
            return "nvidia-cutlass-dsl (the extra 'cute') is not installed and no compiled kernels were found"
    return None
