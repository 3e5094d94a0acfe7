"""Which modules a decoder layer is made of.

On a GPU with transformer-engine installed, its modules. Without, plain torch modules with the same
parameter names and the same cuts over TP, so that one weight table and one checkpoint format serve
both.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from rlhf.config.schema import ExpertsSection
from rlhf.mcore.core_attention import SDPACoreAttention
from rlhf.mcore.grouped_linear import ColumnGroupedLinear, RowGroupedLinear
from rlhf.mcore.kernels import RMSNormFunction, SwiGLUFunction
from rlhf.mcore.mla import LatentAttention, LatentAttentionParts, ReplicatedLinear
from rlhf.mcore.moe import expert_layer_spec
from rlhf.mcore.rope import softmax_scale
from rlhf.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Kernels:
    """Whose modules a layer is made of."""

    gpu: bool
    engine: bool
    """Linear layers, norms and activation are those of transformer-engine and megatron."""
    engine_attention: bool
    """So is attention: micro-batches then stay whole sequences."""


def choose_kernels(dtype: torch.dtype) -> Kernels:
    """What this process runs for a model of ``dtype``."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    return kernels_for(torch.cuda.is_available(), installed, dtype)


def kernels_for(gpu: bool, installed: bool, dtype: torch.dtype) -> Kernels:
    """The rule of :func:`choose_kernels`, from ``installed`` transformer-engine or not."""
    engine = gpu and installed  # its kernels have no CPU form
    # packed sequences (THD) are attended in 16 bits only
    return Kernels(gpu, engine, engine and dtype in (torch.bfloat16, torch.float16))


@dataclass(frozen=True)
class _Parts:
    """Classes of the modules that a layer is made of."""

    norm: Any
    norm_column: Any
    column: Any
    row: Any
    replicated: Any
    core_attention: Any
    activation: Any
    grouped_column: Any
    grouped_row: Any

    def mlp(self, first: Any) -> MLPSubmodules:
        return MLPSubmodules(linear_fc1=first, linear_fc2=self.row, activation_func=self.activation)

    @property
    def grouped(self) -> MLPSubmodules:
        return MLPSubmodules(
            linear_fc1=self.grouped_column,
            linear_fc2=self.grouped_row,
            activation_func=self.activation,
        )


def decoder_spec(
    config: TransformerConfig, shape: ModelShape, experts: ExpertsSection, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and virtual chunk, as the model's shape has them."""
    parts = _choose_parts(choose_kernels(config.params_dtype))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer(shape, experts, parts, shape.has_experts(n)) for n in numbers],
        layer_norm=parts.norm,
    )


def _layer(
    shape: ModelShape, experts: ExpertsSection, parts: _Parts, has_experts: bool
) -> ModuleSpec:
    """Norms are part of the linear layer behind them, where there is one and only one."""
    if has_experts:
        assert shape.moe is not None
        mlp = expert_layer_spec(shape.moe, experts, parts.mlp(parts.column), parts.grouped)
    else:
        mlp = ModuleSpec(module=MLP, submodules=parts.mlp(parts.norm_column))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if shape.mla is None else parts.norm,
            self_attention=_attention(shape, parts),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm if has_experts else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(shape: ModelShape, parts: _Parts) -> ModuleSpec:
    if shape.mla is not None:
        head_dim = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim
        return ModuleSpec(
            module=LatentAttention,
            params={"mla": shape.mla, "softmax_scale": softmax_scale(shape, head_dim)},
            submodules=LatentAttentionParts(
                replicated=parts.replicated,
                column=parts.column,
                norm_column=parts.norm_column,
                core_attention=parts.core_attention,
                row=parts.row,
            ),
        )
    qk_norm = parts.norm if shape.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.norm_column,
            core_attention=parts.core_attention,
            linear_proj=parts.row,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _choose_parts(kernels: Kernels) -> _Parts:
    parts = _transformer_engine_parts() if kernels.engine else _torch_parts()
    return parts if kernels.engine_attention else replace(parts, core_attention=SDPACoreAttention)


def _transformer_engine_parts() -> _Parts:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    provider = TESpecProvider()
    return _Parts(
        norm=provider.layer_norm(),
        norm_column=provider.column_parallel_layer_norm_linear(),
        column=provider.column_parallel_linear(),
        row=provider.row_parallel_linear(),
        replicated=provider.linear(),
        core_attention=provider.core_attention(),
        activation=None,
        grouped_column=te.TEColumnParallelGroupedLinear,
        grouped_row=te.TERowParallelGroupedLinear,
    )


def _torch_parts() -> _Parts:
    return _Parts(
        norm=RMSNorm,
        norm_column=NormColumnParallelLinear,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        replicated=ReplicatedLinear,
        core_attention=SDPACoreAttention,
        activation=SwiGLU,
        grouped_column=ColumnGroupedLinear,
        grouped_row=RowGroupedLinear,
    )


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(
        torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    # On a sequence shard each TP rank sees other tokens: its gradient is summed over TP.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dim; runs on sequence shards as it is."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return RMSNormFunction.apply(x, self.weight, self.eps)


class SwiGLU(torch.nn.Module):
    """Gated activation: first half gate, second half up; no parameters."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return SwiGLUFunction.apply(x)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing to save; megatron's MLP asks each of its modules."""
        return {}


class NormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then a linear layer cut over its outputs; transformer-engine's parameter names."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        gather_output: bool = False,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            stride=stride,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
        )
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        eps = self.config.layernorm_epsilon
        normed = RMSNormFunction.apply(x, self.layer_norm_weight, eps)
        return super().forward(normed, *args, **kwargs)
