"""Attention Residuals (arXiv 2603.15031), full and block."""

from .config import AttnResConfig
from .module import AttnResBoundary

__all__ = ["AttnResBoundary", "AttnResConfig"]
