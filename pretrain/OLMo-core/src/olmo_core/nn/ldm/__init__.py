"""Linear Depth Memory (arXiv 2610.18809); see ``backends/BACKENDS.md``."""

from .config import (
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
from .module import LDMBoundary

__all__ = [
    "Forget",
    "ForgetGranularity",
    "ForgetStart",
    "KeyActivation",
    "KeySource",
    "KeyStart",
    "LDMBoundary",
    "LDMConfig",
    "MemoryDtype",
    "QueryActivation",
    "QuerySource",
    "Residual",
    "Update",
    "WriteEvery",
]
