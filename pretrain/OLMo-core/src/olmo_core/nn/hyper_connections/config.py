"""Configuration of manifold-constrained hyper-connections (mHC)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from olmo_core.config import StrEnum
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import BoundaryRecord, DepthConnectionConfig

from .module import HyperConnectionsBoundary


class StreamCollapse(StrEnum):
    """How the streams become one vector for the LM head; arXiv 2512.24880 leaves it open."""

    head = "head"
    """A learned sigmoid gate for each stream, as in DeepSeek-V4 (arXiv 2606.19348)."""
    sum = "sum"
    """The sum, as in Hyper-Connections (arXiv 2409.19606)."""


class ResidualMap(StrEnum):
    """What mixes the streams from one sublayer to the next."""

    sinkhorn = "sinkhorn"
    """``H_res`` of arXiv 2512.24880, by the Sinkhorn iteration."""
    identity = "identity"
    """``H_res = I``: the control for what the mixing brings (arXiv 2607.28611, 2606.03483)."""


@dataclass
class HyperConnectionsConfig(DepthConnectionConfig):
    """mHC (arXiv 2512.24880): parallel residual streams, mixed by maps close to the doubly stochastic matrices."""

    keeps_fp32: ClassVar[bool] = True

    n_streams: int = 4
    sinkhorn_iterations: int = 20
    alpha_init: float = 0.01
    phi_init_std: float = 0.02
    collapse: StreamCollapse = StreamCollapse.head
    residual_map: ResidualMap = ResidualMap.sinkhorn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_streams < 1 or self.sinkhorn_iterations < 1:
            raise OLMoConfigurationError(
                "mHC needs n_streams >= 1 and sinkhorn_iterations >= 1, got "
                f"{self.n_streams} and {self.sinkhorn_iterations}"
            )

    def build(
        self, *, d_model: int, index: int, n_sublayers: int, eps: float, init_device: str = "cpu"
    ) -> HyperConnectionsBoundary:
        return HyperConnectionsBoundary(
            self,
            d_model=d_model,
            index=index,
            n_sublayers=n_sublayers,
            eps=eps,
            init_device=init_device,
        )

    def num_flops_per_token(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        n = self.n_streams
        maps = self.num_params(d_model=d_model, index=index, n_sublayers=n_sublayers)
        # Forward: H_res X (2 n^2 D), H_post y (2 n D), H_pre X (2 n D); the backward is twice that.
        res = 2 * n * n if self.residual_map == "sinkhorn" else 0
        mixes = 2 * n * d_model + (res + 2 * n) * d_model * (index > 0)
        return 6 * maps + 3 * mixes

    def no_weight_decay(self) -> list[str]:
        return ["alpha", "bias"]

    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        """``M[l, i] = H_pre,l (prod of H_res) H_post,i^T``, with a vector of ones in the place of the embedding's post."""
        n = len(records)
        pre = records[0].coefficients["pre"]
        out = pre.new_zeros(*pre.shape[:-1], n, n)
        carried = [torch.ones_like(pre)]
        previous: dict[str, torch.Tensor] | None = None
        for reader, record in enumerate(records):
            c = record.coefficients
            if previous is not None:
                if "res" in previous:
                    res = previous["res"]
                    carried = [(res @ v[..., None])[..., 0] for v in carried]
                carried.append(previous["post"])
            for source, v in enumerate(carried):
                out[..., reader, source] = (c["pre"] * v).sum(dim=-1)
            previous = c
        return out

    def statistics(self, record: BoundaryRecord) -> dict[str, torch.Tensor]:
        out = super().statistics(record)
        c = record.coefficients
        out["pre gate"] = c["pre"].mean()
        if "post" in c:
            out["post gate"] = c["post"].mean()
        if "res" in c:
            out["sinkhorn row error"] = (c["res"].sum(dim=-1) - 1).abs().amax()
            out["sinkhorn column error"] = (c["res"].sum(dim=-2) - 1).abs().amax()
            out["largest res logit"] = c["res_logits"].abs().amax()
        return out
