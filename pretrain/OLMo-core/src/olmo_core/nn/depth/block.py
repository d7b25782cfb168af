"""A transformer block whose sublayers are joined by a depth connection."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attention import Attention
from olmo_core.nn.buffer_cache import BufferCache
from olmo_core.nn.feed_forward import FeedForward
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.transformer import (
    TransformerBlock,
    TransformerBlockConfig,
    TransformerBlockType,
    TransformerDataParallelWrappingStrategy,
)

from .connection import DepthBoundary, DepthConnectionConfig, State
from .input_gradient import join
from .preln import PreLNConfig


def norm_eps(layer_norm: LayerNormConfig | None, owner: str) -> float:
    """
    The epsilon of a norm that a boundary can fold in.

    :raises OLMoConfigurationError: If the norm is anything but an RMSNorm with a gain and without a bias.
    """
    if (
        layer_norm is None
        or layer_norm.name not in (LayerNormType.rms, LayerNormType.fused_rms)
        or layer_norm.bias is not False
        or layer_norm.elementwise_affine is False
    ):
        raise OLMoConfigurationError(
            f"{owner} of a depth-connected transformer must be an RMSNorm with a gain and without a bias "
            f"(name='rms', bias=False), got {layer_norm}"
        )
    return 1e-5 if layer_norm.eps is None else layer_norm.eps


class DepthTransformerBlock(TransformerBlock):
    """
    ``boundary -> attention -> boundary -> feed-forward``.

    The block takes and returns a *carry* ``(y, *state)``: the output of the sublayer before it (the embedding for the first block), which the block's
    own first boundary commits, and the depth connection's state. A boundary runs in the block whose
    sublayer it feeds, since FSDP2 gathers a block's parameters only for that block's forward.
    """

    def __init__(
        self,
        *,
        d_model: int,
        block_idx: int,
        n_layers: int,
        layer_norm: LayerNormConfig,
        depth: DepthConnectionConfig,
        joint_input_gradient: bool = False,
        init_device: str = "cpu",
        cache: BufferCache | None = None,
        **kwargs,
    ):
        super().__init__(
            d_model=d_model,
            block_idx=block_idx,
            n_layers=n_layers,
            layer_norm=layer_norm,
            init_device=init_device,
            cache=cache,
            **kwargs,
        )
        # The depth connection takes the place of the two residual streams.
        del self.attention_residual_stream
        del self.feed_forward_residual_stream
        self.depth_keeps_fp32 = depth.keeps_fp32
        self.compiles_sublayers = depth.state_grows

        def boundary(index: int) -> DepthBoundary:
            return depth.build(
                d_model=d_model,
                index=index,
                n_sublayers=2 * n_layers,
                eps=norm_eps(layer_norm, "the norm of a block"),
                init_device=init_device,
            )

        if joint_input_gradient:
            attention, feed_forward = self.attention, self.feed_forward
            if type(attention) is not Attention or type(feed_forward) is not FeedForward:
                raise OLMoConfigurationError(
                    "joint_input_gradient needs the default attention and feed-forward"
                )
            join(attention.w_q, attention.w_k, attention.w_v)
            join(feed_forward.w1, feed_forward.w3)
        self.attention_boundary = boundary(2 * block_idx)
        self.feed_forward_boundary = boundary(2 * block_idx + 1)

    def forward(  # type: ignore[override]
        self,
        carry: State,
        *,
        loss_div_factor: torch.Tensor | float | None = None,
        **kwargs,
    ) -> State:
        """
        :param carry: ``(y, *state)``; ``y`` is ``[B, T, D]``.
        :param kwargs: For the attention.
        """
        del loss_div_factor
        y, *rest = carry
        state, x = self.attention_boundary(tuple(rest), y, self.attention_norm.weight)
        y = self.attention(x, **kwargs)
        state, x = self.feed_forward_boundary(state, y, self.feed_forward_norm.weight)
        y = self.feed_forward(x)
        return (y, *state)

    def boundaries(self) -> tuple[DepthBoundary, DepthBoundary]:
        return self.attention_boundary, self.feed_forward_boundary

    def apply_compile(self) -> None:
        if self.compiles_sublayers:
            # One graph for the attention of all blocks and one for the feed-forward, whatever the length of the state: the
            # block form took 77 s to compile at 24 blocks, the full form more than 110. The model sees to the boundaries.
            self.attention.compile(fullgraph=False)
            self.feed_forward.compile(fullgraph=False)
        else:
            super().apply_compile()

    def apply_tp(self, *args, **kwargs) -> None:
        raise NotImplementedError(TP_ERROR)

    def apply_pp(self, *args, **kwargs) -> None:
        raise NotImplementedError(PP_ERROR)

    def apply_fsdp(
        self,
        dp_mesh: DeviceMesh | None = None,
        prefetch_factor: int = 0,
        wrapping_strategy: TransformerDataParallelWrappingStrategy = TransformerDataParallelWrappingStrategy.full,
        **fsdp_kwargs,
    ) -> None:
        # FSDP2 would cast every tensor that enters the block to BF16, mHC's FP32 maps too.
        mp_policy = replace(
            fsdp_kwargs.pop("mp_policy", MixedPrecisionPolicy()), cast_forward_inputs=False
        )
        shard_fp32(
            list(self.boundaries()), self.depth_keeps_fp32, dp_mesh, mp_policy, **fsdp_kwargs
        )
        super().apply_fsdp(
            dp_mesh=dp_mesh,
            prefetch_factor=prefetch_factor,
            wrapping_strategy=wrapping_strategy,
            mp_policy=mp_policy,
            **fsdp_kwargs,
        )


TP_ERROR = (
    "depth connections do not support tensor parallelism: a boundary mixes whole vectors of width d_model; "
    "use FSDP, HSDP or context parallelism"
)
PP_ERROR = (
    "depth connections do not support pipeline parallelism: a stage passes on one tensor, a boundary a tuple of them; "
    "use FSDP, HSDP or context parallelism"
)


def shard_fp32(
    boundaries: list[DepthBoundary],
    keeps_fp32: bool,
    dp_mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy,
    **fsdp_kwargs,
) -> None:
    """
    Give boundaries that keep FP32 parameters one FSDP2 unit of their own, without any cast. One unit for both
    boundaries of a block: they cost one extra collective a block instead of two.
    """
    with_parameters: list[nn.Module] = [b for b in boundaries if any(True for _ in b.parameters())]
    if keeps_fp32 and with_parameters:
        fully_shard(
            with_parameters,
            mesh=dp_mesh,
            mp_policy=replace(mp_policy, param_dtype=torch.float32, cast_forward_inputs=False),
            **fsdp_kwargs,
        )


@dataclass
class DepthTransformerBlockConfig(TransformerBlockConfig):
    """A Llama-style block with a depth connection."""

    depth: DepthConnectionConfig = field(default_factory=PreLNConfig)
    joint_input_gradient: bool = False
    """Queries, keys and values, and the two inner layers of the feed-forward, add up their input's gradient in their products; see :mod:`.input_gradient`."""

    def build(
        self,
        *,
        d_model: int,
        block_idx: int,
        n_layers: int,
        init_device: str = "cpu",
        cache: BufferCache | None = None,
    ) -> DepthTransformerBlock:
        if self.name != TransformerBlockType.default:
            raise OLMoConfigurationError(
                f"a depth-connected block has its norms before the sublayers (name='default'), got '{self.name}'"
            )
        if self.dropout or self.attention_residual_alpha or self.feed_forward_residual_alpha:
            raise OLMoConfigurationError(
                "a depth-connected block has no residual stream: leave dropout, attention_residual_alpha and "
                "feed_forward_residual_alpha unset"
            )
        if (
            self.layer_norm is None
            or self.feed_forward is None
            or self.feed_forward_moe is not None
        ):
            raise OLMoConfigurationError(
                "a depth-connected block needs layer_norm and feed_forward, and has no mixture of experts"
            )
        return DepthTransformerBlock(
            d_model=d_model,
            block_idx=block_idx,
            n_layers=n_layers,
            sequence_mixer=self.sequence_mixer,
            feed_forward=self.feed_forward,
            layer_norm=self.layer_norm,
            depth=self.depth,
            joint_input_gradient=self.joint_input_gradient,
            init_device=init_device,
            cache=cache,
        )
