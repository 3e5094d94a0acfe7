"""Which modules a decoder layer is made of.

On a GPU with transformer-engine installed, its modules. Without, plain torch modules with the same
parameter names and the same cuts over TP, so that one weight table and one checkpoint format serve
both.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
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
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rlhf.mcore.core_attention import SDPACoreAttention
from rlhf.mcore.kernels import RMSNormFunction, SwiGLUFunction


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


def decoder_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and virtual chunk: dense, RMSNorm, gated MLP."""
    kernels = choose_kernels(config.params_dtype)
    parts = _transformer_engine_parts() if kernels.engine else _torch_parts()
    if not kernels.engine_attention:
        parts["core_attention"] = SDPACoreAttention
    qk_norm = parts["norm"] if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts["norm_column"],
            core_attention=parts["core_attention"],
            linear_proj=parts["row"],
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=parts["norm_column"],
            linear_fc2=parts["row"],
            activation_func=parts["activation"],
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=parts["norm"])


def _transformer_engine_parts() -> dict[str, Any]:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    provider = TESpecProvider()
    return {
        "norm": provider.layer_norm(),
        "norm_column": provider.column_parallel_layer_norm_linear(),
        "row": provider.row_parallel_linear(),
        "core_attention": provider.core_attention(),
        "activation": None,
    }


def _torch_parts() -> dict[str, Any]:
    return {
        "norm": RMSNorm,
        "norm_column": NormColumnParallelLinear,
        "row": RowParallelLinear,
        "activation": SwiGLU,
    }


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
