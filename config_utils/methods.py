"""Named experiments: a depth connection for each name, the base plus one override named for what it changes."""

from collections.abc import Callable

from config_utils.errors import UserError
from config_utils.scales import Scale
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig, PreLNConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import (
    Forget,
    ForgetGranularity,
    ForgetStart,
    KeyActivation,
    KeySource,
    KeyStart,
    LDMConfig,
    MemoryDtype,
    QueryActivation,
    QuerySource,
    Residual,
    Update,
    WriteEvery,
)

_Factory = Callable[[Scale], DepthConnectionConfig]


def _ldm(**override) -> _Factory:
    return lambda scale: LDMConfig(**override)


PAPER_METHODS: dict[str, _Factory] = {
    "preln": lambda scale: PreLNConfig(),
    "attnres_full": lambda scale: AttnResConfig(block_size=1),
    "attnres_block": lambda scale: AttnResConfig(block_size=scale.attnres_block_size),
    "mhc": lambda scale: HyperConnectionsConfig(),
    "ldm": _ldm(),
    "ldm_k4": _ldm(d_k=4),
}
"""The methods of the main runs."""

ABLATIONS: dict[str, _Factory] = {
    "ldm_k1": _ldm(d_k=1),
    "ldm_k2": _ldm(d_k=2),
    "ldm_k16": _ldm(d_k=16),
    "delta_rule": _ldm(update=Update.delta),
    "no_forget": _ldm(forget=Forget.none),
    "static_forget": _ldm(forget=Forget.static),
    "scalar_forget": _ldm(forget_granularity=ForgetGranularity.scalar),
    "wide_forget": _ldm(forget_start=ForgetStart.wide),
    "softmax_key": _ldm(key_activation=KeyActivation.softmax),
    "linear_key": _ldm(key_activation=KeyActivation.none),
    "input_key": _ldm(key_source=KeySource.input),
    "block_key": _ldm(key_start=KeyStart.block),
    "block_key_wide_forget": _ldm(key_start=KeyStart.block, forget_start=ForgetStart.wide),
    "uniform_key": _ldm(key_start=KeyStart.uniform),
    "static_key": _ldm(key_source=KeySource.static),
    "output_query": _ldm(query_source=QuerySource.output),
    "static_query": _ldm(query_source=QuerySource.static),
    "sigmoid_query": _ldm(query_activation=QueryActivation.sigmoid),
    "linear_query": _ldm(query_activation=QueryActivation.none),
    "block_write": _ldm(write_every=WriteEvery.block),
    "with_residual": _ldm(residual=Residual.kept),
    "float8_memory": _ldm(memory_dtype=MemoryDtype.float8),
}
"""The ablations of LDM: the default with one option changed, or two starts together."""

OWN_METHODS: dict[str, _Factory] = {}
"""Yours: ``"highway": lambda scale: HighwayConfig()``. The README says what else a method needs."""

ALL_METHODS = {**PAPER_METHODS, **ABLATIONS, **OWN_METHODS}


def depth_connection(method: str, scale: Scale) -> DepthConnectionConfig:
    """
    :raises UserError: If there is no such method.
    """
    if method not in ALL_METHODS:
        own = f"one of yours: {', '.join(OWN_METHODS)}, " if OWN_METHODS else ""
        raise UserError(
            f"unknown method '{method}': choose one of {', '.join(PAPER_METHODS)}, "
            f"{own}or an ablation: {', '.join(ABLATIONS)}"
        )
    return ALL_METHODS[method](scale)
