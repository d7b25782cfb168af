"""Configuration of Attention Residuals."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import BoundaryRecord, DepthConnectionConfig

from .module import AttnResBoundary


@dataclass
class AttnResConfig(DepthConnectionConfig):
    """
    Attention Residuals (arXiv 2603.15031). ``block_size`` counts sublayers: 1 is the full form; the paper's block
    form has about 8 blocks, ``block_size = L / 8``. The last block may be shorter. The embedding is a source of its own.
    """

    keeps_fp32: ClassVar[bool] = True
    state_grows: ClassVar[bool] = True

    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise OLMoConfigurationError(
                f"AttnRes needs block_size >= 1 sublayers, got {self.block_size}"
            )

    def build(
        self, *, d_model: int, index: int, n_sublayers: int, eps: float, init_device: str = "cpu"
    ) -> AttnResBoundary:
        return AttnResBoundary(
            self,
            d_model=d_model,
            index=index,
            n_sublayers=n_sublayers,
            eps=eps,
            init_device=init_device,
        )

    def num_sources(self, index: int) -> int:
        """The number of tensors that boundary ``index`` mixes."""
        return 1 if index == 0 else 2 + (index - 1) // self.block_size

    def num_flops_per_token(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        del n_sublayers
        # For each source: square, logit and mix (6 D) forward, twice that backward.
        return 0 if index == 0 else 18 * self.num_sources(index) * d_model

    def no_weight_decay(self) -> list[str]:
        return ["query", "gain"]

    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        """The weight of the source that holds output ``i``: the output itself, its block's sum, or the partial sum."""
        n = len(records)
        shape = records[0].h.shape[:-1]
        out = records[0].coefficients["weights"].new_zeros(*shape, n, n)
        for reader, record in enumerate(records):
            for source in range(reader + 1):
                slot = 0 if source == 0 else 1 + (source - 1) // self.block_size
                out[..., reader, source] = record.coefficients["weights"][..., slot]
        return out

    def statistics(self, record: BoundaryRecord) -> dict[str, torch.Tensor]:
        out = super().statistics(record)
        weights = record.coefficients["weights"]
        if weights.shape[-1] > 1:
            out["depth attention entropy (nats)"] = torch.special.entr(weights).sum(dim=-1).mean()
        return out
