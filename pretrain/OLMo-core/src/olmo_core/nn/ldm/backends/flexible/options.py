"""The options of one boundary as the ``flexible`` kernels take them."""

from dataclasses import astuple, dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...config import LDMConfig

MAPS = ("forget", "beta", "key", "query")


@dataclass(frozen=True)
class BoundaryOptions:
    """The options of one boundary, and where its maps lie in the packed weights."""

    d_k: int
    key_activation: str
    key_source: str
    query_source: str
    query_activation: str
    forget: str
    gates: int
    """Forget gates: ``d_k`` or 1."""
    delta: bool
    write: bool
    residual: bool

    @staticmethod
    def of(config: "LDMConfig", write: bool) -> "BoundaryOptions":
        """The options of a boundary after the first; ``write=False``: one that only reads."""
        return BoundaryOptions(
            d_k=config.d_k,
            key_activation=str(config.key_activation),
            key_source=str(config.key_source),
            query_source=str(config.query_source),
            query_activation=str(config.query_activation),
            forget=str(config.forget),
            gates=1 if config.forget_granularity == "scalar" else config.d_k,
            delta=config.update == "delta",
            write=write,
            residual=config.residual == "kept",
        )

    @cached_property
    def code(self) -> str:
        """One string for the ops, whose schemas have no place for a record."""
        return ",".join(str(int(v) if isinstance(v, bool) else v) for v in astuple(self))

    @staticmethod
    @cache
    def decode(code: str) -> "BoundaryOptions":
        d_k, *names, forget, gates, delta, write, residual = code.split(",")
        key, key_source, query_source, query = names
        return BoundaryOptions(
            int(d_k),
            key,
            key_source,
            query_source,
            query,
            forget,
            int(gates),
            delta == "1",
            write == "1",
            residual == "1",
        )

    @cached_property
    def maps(self) -> dict[str, tuple[str, int, int]]:
        """Source, first row and number of rows of each map that exists."""
        source = {
            "forget": "output" if self.write and self.forget == "dynamic" else "static",
            "beta": "output" if self.write and self.delta else "static",
            "key": self.key_source if self.write else "static",
            "query": self.query_source,
        }
        size = {"forget": self.gates, "beta": 1, "key": self.d_k, "query": self.d_k}
        # Maps of one source side by side, so that one product gives all their gradients.
        rows: dict[str, tuple[str, int, int]] = {}
        row = 0
        for name in sorted(MAPS, key=lambda name: source[name] != "output"):
            if source[name] != "static":
                rows[name] = (source[name], row, size[name])
                row += size[name]
        return rows

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """First row and number of rows of the maps of each source."""
        groups: dict[str, tuple[int, int]] = {}
        for source, row, n in self.maps.values():
            first, before = groups.get(source, (row, 0))
            groups[source] = (first, before + n)
        return groups

    @cached_property
    def n_rows(self) -> int:
        return sum(n for _, _, n in self.maps.values())

    @cached_property
    def n_biases(self) -> int:
        """Columns of the biases' partial sums: query, key, forget, beta, padded so that rows stay aligned."""
        return -(-(2 * self.d_k + self.gates + 1) // 4) * 4

    @cached_property
    def rows(self) -> dict[str, int]:
        """The first row of each map and their number, by the kernels' names."""
        rows: dict[str, int] = {}
        for m in MAPS:
            _, row, n = self.maps.get(m, ("", 0, 0))
            rows |= {f"{m.upper()}_ROW": row, f"{m.upper()}_N": n}
        return rows

    def parameter_sizes(self, d_model: int) -> list[int]:
        """Elements of the maps in the order of their rows, the gain, the four biases, padding."""
        biases = [self.d_k, self.d_k, self.gates, 1]
        return [
            *(n * d_model for _, _, n in self.maps.values()),
            d_model,
            *biases,
            self.n_biases - sum(biases),
        ]

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that the forward and the backward kernel share."""
        return {
            "K": self.d_k,
            "GATES": self.gates,
            "ROWS": self.n_rows,
            "BIASES": self.n_biases,
            **self.rows,
            "WRITE": self.write,
            "KEY_SOURCE": self.key_source,
            "KEY_ACTIVATION": self.key_activation,
            "QUERY_SOURCE": self.query_source,
            "QUERY_ACTIVATION": self.query_activation,
            "FORGET": self.forget,
            "DELTA": self.delta,
            "RESIDUAL": self.residual,
        }
