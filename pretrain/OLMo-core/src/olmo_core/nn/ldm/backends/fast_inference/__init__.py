"""
The ``fast_inference`` backend: CuTe DSL kernels for LDM's default family without gradients, on NVIDIA Hopper and Blackwell.
A decode kernel for up to a few hundred tokens; for more, the forward kernels of :mod:`..fast` with nothing saved, in windows where
:func:`prefill_window` says so. ``DESIGN.md`` tells how they work. Import :mod:`.ops` only where :func:`unavailable` says that it can run: it imports Triton.
"""

from typing import TYPE_CHECKING

import torch

from .. import fast
from ..fast import cache
from . import launch_table

if TYPE_CHECKING:
    from ...config import LDMConfig


def unavailable(
    device: torch.device, dtype: torch.dtype, d_model: int, config: "LDMConfig", *, by_name: bool
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param by_name: Whether it was asked for by its name: else only shapes that were timed on the GPU are taken.
    """
    reason = fast.refused(device, dtype, d_model, config)
    if reason is not None:
        return reason
    d_k = config.d_k
    if launch_table.rule(d_model, d_k, 1) is None:
        return f"its decode kernel takes no d_model {d_model}"
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]
    if not by_name and not launch_table.timed(architecture, d_model, d_k):
        return f"d_model {d_model} with d_k {d_k} was not timed on {architecture}"
    if cache.dsl_version() is None:
        specs = launch_table.all_specs(
            architecture, d_model, d_k, str(config.key_activation), str(config.forget)
        )
        if not all(cache.has(s, architecture) for s in specs):
            return "nvidia-cutlass-dsl (the extra 'cute') is not installed and no compiled inference kernels were found"
    return None


def prefill_window(
    device: torch.device, d_model: int, config: "LDMConfig", window: int, *, by_name: bool
) -> int:
    """
    The window of prefill where the backend can run: ``window``, that of training, or 1 where its kernels can neither be
    found nor compiled.

    :param by_name: Whether the backend was asked for by its name: else at most what was timed for the shape, 1 if nothing was.
    """
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]
    key = (architecture, d_model, config.d_k)
    if not by_name:
        window = min(window, launch_table.TIMED_WINDOWS.get(key, 1))
    if window == 1 or cache.dsl_version() is not None:
        return window
    specs = launch_table.window_specs(
        architecture,
        d_model,
        config.d_k,
        str(config.key_activation),
        str(config.forget),
        window,
    )
    return window if all(cache.has(s, architecture) for s in specs) else 1
