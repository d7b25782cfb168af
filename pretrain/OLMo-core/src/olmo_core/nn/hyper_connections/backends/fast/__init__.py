"""
mHC's ``fast`` backend: a CuTe DSL kernel for the forward of the boundaries between the first and the last, on NVIDIA Hopper
and Blackwell; the backward, the first and the last boundary are the ``flexible`` backend's. ``DESIGN.md`` tells how it
works. Import :mod:`.ops` only where :func:`unavailable` says that it can run: it imports Triton.
"""

from typing import TYPE_CHECKING

import torch

from ....ldm.backends.fast import cache
from .. import flexible
from . import launch_table
from .layout import STREAMS

if TYPE_CHECKING:
    from ...config import HyperConnectionsConfig


def refused(
    device: torch.device, dtype: torch.dtype, d_model: int, config: "HyperConnectionsConfig"
) -> str | None:
    """Why there can be no kernel for these, on disk or not, as one clause; ``None`` if there can."""
    if config.n_streams != STREAMS:
        return f"its kernel is for n_streams = {STREAMS}, not {config.n_streams}"
    if dtype != torch.bfloat16:
        return f"its streams are BF16, not {str(dtype).removeprefix('torch.')}"
    if launch_table.rule(d_model) is None:
        return (
            f"its kernel takes d_model in up to 8 blocks of {' or '.join(map(str, launch_table.COLUMNS))} columns, "
            f"not {d_model}"
        )
    if device.type != "cuda":
        return f"it needs a CUDA device, got '{device.type}'"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in cache.ARCHITECTURES:
        return (
            f"it needs NVIDIA Hopper or Blackwell (compute capability 9 or 10), got {major}.{minor}"
        )
    return flexible.unavailable(device, dtype, d_model, config.n_streams, interpreter=False)


def unavailable(
    device: torch.device,
    dtype: torch.dtype,
    d_model: int,
    config: "HyperConnectionsConfig",
    *,
    by_name: bool,
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param by_name: Whether it was asked for by its name: ``auto`` takes only what was timed on the GPU.
    """
    reason = refused(device, dtype, d_model, config)
    if reason is not None:
        return reason
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]
    residual = str(config.residual_map)
    if not by_name and not launch_table.timed(architecture, d_model, residual):
        return f"d_model {d_model} with residual_map {residual} was not timed on {architecture}"
    if cache.dsl_version() is None:
        spec = launch_table.spec(d_model, residual)
        if spec is None or not cache.has(spec, architecture):
            return "nvidia-cutlass-dsl (the extra 'cute') is not installed and no compiled kernel was found"
    return None
