"""
Depth connections: how the output of one sublayer reaches the inputs of later ones. The protocol, PreLN, and a
transformer that runs any of them; the methods are in :mod:`olmo_core.nn.ldm`, :mod:`olmo_core.nn.attnres` and
:mod:`olmo_core.nn.hyper_connections`.
"""

from .block import DepthTransformerBlock, DepthTransformerBlockConfig
from .connection import (
    BoundaryRecord,
    DepthBackend,
    DepthBoundary,
    DepthConnectionConfig,
    State,
    record_boundaries,
)
from .model import DepthTransformer, DepthTransformerConfig
from .preln import PreLNBoundary, PreLNConfig
from .retrieval import retrieval_map

__all__ = [
    "BoundaryRecord",
    "DepthBackend",
    "DepthBoundary",
    "DepthConnectionConfig",
    "DepthTransformer",
    "DepthTransformerBlock",
    "DepthTransformerBlockConfig",
    "DepthTransformerConfig",
    "PreLNBoundary",
    "PreLNConfig",
    "State",
    "record_boundaries",
    "retrieval_map",
]
