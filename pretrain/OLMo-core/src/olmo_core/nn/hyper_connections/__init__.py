"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

from .config import HyperConnectionsConfig, ResidualMap, StreamCollapse
from .module import HyperConnectionsBoundary

__all__ = ["HyperConnectionsBoundary", "HyperConnectionsConfig", "ResidualMap", "StreamCollapse"]
