"""A transformer whose sublayers are joined by a depth connection, and its config."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.lm_head import LMHeadConfig, LMOutputWithLoss
from olmo_core.nn.transformer import (
    Transformer,
    TransformerBlockConfig,
    TransformerConfig,
    TransformerDataParallelWrappingStrategy,
    TransformerType,
)

from .attention_cache import install_kv_cache
from .block import (
    PP_ERROR,
    TP_ERROR,
    DepthTransformerBlock,
    DepthTransformerBlockConfig,
    norm_eps,
    shard_fp32,
)
from .connection import (
    BoundaryRecord,
    DepthBackend,
    DepthBoundary,
    DepthConnectionConfig,
    is_recording,
    record_boundaries,
)

if TYPE_CHECKING:
    from olmo_core.train.common import ReduceType

log = logging.getLogger(__name__)


class DepthTransformer(Transformer):
    """
    Like :class:`Transformer`, but a tuple ``(y, *state)`` travels from block to block, and the last boundary, a
    module of the model itself, stands where the LM head's norm stood.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_layers: int,
        block: TransformerBlockConfig | dict[str, TransformerBlockConfig],
        lm_head: LMHeadConfig,
        depth: DepthConnectionConfig,
        init_device: str = "cpu",
        **kwargs,
    ):
        super().__init__(
            d_model=d_model,
            n_layers=n_layers,
            block=block,
            lm_head=lm_head.replace(layer_norm=None),
            init_device=init_device,
            **kwargs,
        )
        eps = norm_eps(lm_head.layer_norm, "the norm of the LM head")
        assert lm_head.layer_norm is not None
        self.depth = depth
        self.final_norm = lm_head.layer_norm.build(d_model, init_device=init_device)
        self.final_boundary = depth.build(
            d_model=d_model,
            index=2 * n_layers,
            n_sublayers=2 * n_layers,
            eps=eps,
            init_device=init_device,
        )
        for boundary in self.boundaries():
            boundary.owns_state = True
        install_kv_cache(self)
        self.metrics_interval = 0
        """Measure the depth connection on one sequence every this many training steps; 0 never does."""
        self._metrics_step = 0
        self._probe: torch.Tensor | None = None
        self._selected_for: tuple[str, torch.dtype] | None = None
        self._compiles_references = False
        # The base class cached these before the modules above existed.
        for name in ("num_params", "num_non_embedding_params"):
            del self.__dict__[name]
            getattr(self, name)

    def boundaries(self) -> Iterator[DepthBoundary]:
        """All ``L + 1`` boundaries in order."""
        for block in self.blocks.values():
            yield from cast(DepthTransformerBlock, block).boundaries()
        yield self.final_boundary

    @torch.no_grad()
    def init_weights(self, **kwargs) -> torch.Generator:  # type: ignore[override]
        generator = super().init_weights(**kwargs)
        for boundary in self.boundaries():
            boundary.init_weights(generator)
        return generator

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        *,
        input_embeddings: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | LMOutputWithLoss:
        """
        See :meth:`Transformer.forward`.

        :param input_ids: ``[B, T]``, int64.
        :param input_embeddings: ``[B, T, D]``, used in the place of the embedding of ``input_ids``.
        :param labels: ``[B, T]``, int64.

        :returns: Logits ``[B, T, vocab_size]`` without ``labels``, else the losses.
        """
        if self.training and self.metrics_interval:
            self._probe = input_ids[:1].detach()
        input_ids, labels, all_block_kwargs, per_block_kwargs, lm_head_kwargs = (
            self._prepare_inputs(input_ids, labels, **kwargs)
        )
        if input_embeddings is None:
            y = self.embeddings(input_ids)
            if self.embed_scale is not None:
                y = y * self.embed_scale
            if self.embedding_norm is not None:
                y = self.embedding_norm(y)
        else:
            y = input_embeddings.to(self.device)
        # An embedding is not cast by autocast, but the sublayers' outputs are: without this the state is FP32
        # and moves twice the bytes.
        if torch.is_autocast_enabled(y.device.type):
            y = y.to(torch.get_autocast_dtype(y.device.type))

        self._select_backends(y)
        carry: tuple[torch.Tensor, ...] = (y,)
        # Nothing is marked dynamic as upstream does: dynamo would trace a symbolic size for every tensor of the state (97 s
        # instead of 27 s for AttnRes at 12 blocks), and training has one shape.
        for key, block in self.blocks.items():
            carry = block(carry, **all_block_kwargs, **per_block_kwargs.get(int(key), {}))
        y, *state = carry
        _, x = self.final_boundary(tuple(state), y, self.final_norm.weight)

        if labels is not None:
            lm_head_kwargs["labels"] = labels
        return self.lm_head(x, **lm_head_kwargs)

    def _select_backends(self, y: torch.Tensor) -> None:
        # Here and not in the boundaries: in a compiled block the choice would break the graph and compile twice.
        # Recording runs the reference, outside autocast and so in another dtype.
        if self._selected_for != (y.device.type, y.dtype) and not is_recording():
            for boundary in self.boundaries():
                backend = boundary.select_backend(y.device, y.dtype)
                if self._compiles_references and backend == DepthBackend.reference:
                    boundary.compile(fullgraph=False)
            self._selected_for = (y.device.type, y.dtype)

    def num_flops_per_token(self, seq_len: int) -> int:
        n_sublayers = 2 * self.n_layers
        return super().num_flops_per_token(seq_len) + sum(
            self.depth.num_flops_per_token(
                d_model=self.d_model, index=index, n_sublayers=n_sublayers
            )
            for index in range(n_sublayers + 1)
        )

    @torch.no_grad()
    def record(self, input_ids: torch.Tensor) -> list[BoundaryRecord]:
        """
        One forward pass without gradients that keeps what every boundary did.

        :param input_ids: ``[B, T]``, int64.
        """
        with record_boundaries() as records:
            self(input_ids, logits_to_keep=1)
        # FSDP keeps the LM head gathered until a backward that does not come here; the next training step would use it
        # as it was before the optimizer's step.
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return records

    def compute_auxiliary_metrics(
        self, reset: bool = True
    ) -> "dict[str, tuple[torch.Tensor, ReduceType | None]]":
        """
        Every :attr:`metrics_interval` steps: the depth connection's statistics over the boundaries (mean, and
        largest for errors and norms), from one sequence of the last batch. A pass of its own, so that the training
        pass pays nothing and compiles once.
        """
        from olmo_core.train.common import ReduceType

        del reset
        probe, self._probe = self._probe, None
        self._metrics_step += 1
        if probe is None or (self._metrics_step - 1) % self.metrics_interval:
            return {}
        values: dict[str, list[torch.Tensor]] = {}
        for record in self.record(probe):
            for name, value in self.depth.statistics(record).items():
                values.setdefault(name, []).append(value)
        out: dict[str, tuple[torch.Tensor, ReduceType | None]] = {}
        for name, per_boundary in values.items():
            stacked = torch.stack(per_boundary).float()
            out[f"depth/{name} (mean)"] = (stacked.mean(), ReduceType.mean)
            out[f"depth/{name} (max)"] = (stacked.max(), ReduceType.max)
        return out

    def reset_auxiliary_metrics(self) -> None:
        self._probe = None

    def apply_tp(self, *args, **kwargs) -> None:
        raise NotImplementedError(TP_ERROR)

    def apply_pp(self, *args, **kwargs) -> None:
        raise NotImplementedError(PP_ERROR)

    def apply_compile(self) -> None:
        # One graph for each kind of block, for a state that grows one for each boundary of the reference, and each again for
        # evaluation (no gradients). Beyond torch's limit of 8 a block would silently run eagerly.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 6 * self.n_layers + 16)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1024)
        config.fail_on_recompile_limit_hit = True
        super().apply_compile()
        if self.depth.state_grows:
            # Kernels gain nothing from a graph around them; only the reference is compiled, once it is known to be chosen.
            self._compiles_references = True
        else:
            self.final_boundary.compile(fullgraph=False)

    def apply_fsdp(  # type: ignore[override]
        self,
        dp_mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        pp_enabled: bool = False,
        prefetch_factor: int = 0,
        wrapping_strategy: TransformerDataParallelWrappingStrategy = TransformerDataParallelWrappingStrategy.full,
    ) -> None:
        shard_fp32(
            [self.final_boundary],
            self.depth.keeps_fp32,
            dp_mesh,
            MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        super().apply_fsdp(
            dp_mesh=dp_mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            pp_enabled=pp_enabled,
            prefetch_factor=prefetch_factor,
            wrapping_strategy=wrapping_strategy,
        )

    def apply_ddp(  # type: ignore[override]
        self,
        dp_mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype | None = None,
        **kwargs,
    ) -> None:
        if self.depth.keeps_fp32 and param_dtype not in (None, torch.float32):
            raise OLMoConfigurationError(
                f"DDP with param_dtype={param_dtype} would cast the depth connection's parameters, which must stay "
                "FP32: use FSDP, or DDP with FP32 parameters and autocast_precision"
            )
        super().apply_ddp(dp_mesh=dp_mesh, param_dtype=param_dtype, **kwargs)


@dataclass
class DepthTransformerConfig(TransformerConfig):
    """
    Config of a :class:`DepthTransformer`. The depth connection is ``block.depth``, the same for all blocks.
    """

    @property
    def depth(self) -> DepthConnectionConfig:
        connections = []
        for block in self.resolved_block_configs:
            if not isinstance(block, DepthTransformerBlockConfig):
                raise OLMoConfigurationError(
                    "every block of a DepthTransformerConfig must be a DepthTransformerBlockConfig, got "
                    f"{type(block).__name__}"
                )
            connections.append(block.depth)
        if any(c != connections[0] for c in connections):
            raise OLMoConfigurationError("all blocks must have the same depth connection")
        return connections[0]

    def with_depth(self, depth: DepthConnectionConfig) -> "DepthTransformerConfig":
        """The same model with another depth connection; also turns a plain Llama-style block into one that has it."""
        if not isinstance(self.block, TransformerBlockConfig) or self.block_overrides:
            raise OLMoConfigurationError("with_depth needs one block config for all blocks")
        fields = self.block.as_dict(recurse=False, exclude=("depth",))
        return self.replace(block=DepthTransformerBlockConfig(**fields, depth=depth))

    def build(self, *, init_device: str = "cpu") -> DepthTransformer:
        """
        Build the model.

        :param init_device: The device for the parameters; "meta" where they are initialised later.
        """
        if self.name != TransformerType.default:
            raise OLMoConfigurationError(
                f"a depth-connected transformer has name='default', got '{self.name}'"
            )
        kwargs = self.as_dict(recurse=False, exclude=("name", "dtype", "freeze_params"))
        model = DepthTransformer(
            **kwargs, depth=self.depth, dtype=self.dtype.as_pt(), init_device=init_device
        )
        if self.freeze_params:
            raise OLMoConfigurationError("freeze_params is not supported with depth connections")
        log.info(
            "Built model with %s: %s parameters, %s without the embedding",
            type(self.depth).__name__,
            f"{model.num_params:,d}",
            f"{model.num_non_embedding_params:,d}",
        )
        return model

    @property
    def num_params(self) -> int:
        n_sublayers = 2 * self.n_layers
        return super().num_params + sum(
            self.depth.num_params(d_model=self.d_model, index=index, n_sublayers=n_sublayers)
            for index in range(n_sublayers + 1)
        )

    @property
    def num_active_params(self) -> int:
        return self.num_params
