"""The options of one boundary as the ``flexible`` kernels take them."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...config import HyperConnectionsConfig


@dataclass(frozen=True)
class BoundaryOptions:
    """What one boundary does with the streams, and the sizes that follow from it."""

    n_streams: int
    iterations: int
    previous: str
    """How the last sublayer's output joins the streams: ``first`` (they are copies of it), ``identity`` or ``sinkhorn``."""
    next: str
    """What is computed for the next sublayer: maps with ``sinkhorn`` or ``identity``, the last boundary's ``gate``, or
    nothing (``sum``)."""

    @staticmethod
    def of(config: "HyperConnectionsConfig", is_first: bool, is_last: bool) -> "BoundaryOptions":
        residual = str(config.residual_map)
        collapse = "gate" if config.collapse == "head" else "sum"
        return BoundaryOptions(
            config.n_streams,
            config.sinkhorn_iterations,
            "first" if is_first else residual,
            collapse if is_last else residual,
        )

    @cached_property
    def code(self) -> str:
        """One string for the ops, whose schemas have no place for a record."""
        return f"{self.n_streams},{self.iterations},{self.previous},{self.next}"

    @staticmethod
    @cache
    def decode(code: str) -> "BoundaryOptions":
        n_streams, iterations, previous, following = code.split(",")
        return BoundaryOptions(int(n_streams), int(iterations), previous, following)

    @property
    def has_maps(self) -> bool:
        """Whether ``post`` (and, with ``sinkhorn``, ``res``) are computed for the next boundary."""
        return self.next in ("identity", "sinkhorn")

    @cached_property
    def columns(self) -> int:
        """Columns of ``phi``."""
        n = self.n_streams
        return {"sinkhorn": n * n + 2 * n, "identity": 2 * n, "gate": n, "sum": 0}[self.next]

    @cached_property
    def alphas(self) -> int:
        return {"sinkhorn": 3, "identity": 2, "gate": 1, "sum": 0}[self.next]

    @cached_property
    def padded_columns(self) -> int:
        """The width of a product with ``phi`` on the tensor cores."""
        return max(16, 1 << max(0, self.columns - 1).bit_length())

    def parameter_sizes(self, d_model: int) -> list[int]:
        """Elements of phi, the gain, the bias and alpha."""
        return [self.n_streams * d_model * self.columns, d_model, self.columns, self.alphas]

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that all kernels share."""
        return {
            "N": self.n_streams,
            "COLUMNS": self.columns,
            "BN": self.padded_columns,
            "PREVIOUS": self.previous,
            "NEXT": self.next,
            "ITERATIONS": self.iterations,
        }
