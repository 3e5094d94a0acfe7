"""Multi-head latent attention (arXiv:2405.04434, section 2.1), with TE's parameter names.

Queries, and keys with values, go through a latent of low rank; a part of each query and key head
is rotated, and the rotated key part is one for all heads.

Ours and not megatron's module: rows of a folded stream carry their own positions, and megatron's
takes mocks of transformer-engine for the real one where that is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlhf.mcore.kernels import Rotate
from rlhf.weights.model_shape import MLAShape


@dataclass(frozen=True)
class LatentAttentionParts:
    """Classes of the projections."""

    replicated: Any
    column: Any
    norm_column: Any
    core_attention: Any
    row: Any


class LatentAttention(MegatronModule):
    """Hidden states [S / tp, 1, h] to the same, S rows of a packed input.

    Under TP needs sequence parallelism: each rank's heads give a part of the gradient of the
    shared latents, which the gather of the sequence sums. Collectives over TP: those of its
    projections, and a gather of the rotated key part.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionParts,
        layer_number: int,
        *,
        mla: MLAShape,
        softmax_scale: float,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        self._mla = mla
        self._tp_group = pg_collection.tp
        assert self._tp_group.size() == 1 or config.sequence_parallel, (
            f"latent attention with tp={self._tp_group.size()} needs sequence_parallel"
        )
        self._head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        parts, heads = submodules, config.num_attention_heads
        if mla.q_lora_rank is None:
            self.linear_q_proj = self._cut(parts.column, config.hidden_size, heads * self._head_dim)
        else:
            self.linear_q_down_proj = self._whole(parts.replicated, mla.q_lora_rank)
            self.linear_q_up_proj = self._cut(
                parts.norm_column, mla.q_lora_rank, heads * self._head_dim
            )
        self.linear_kv_down_proj = self._whole(
            parts.replicated, mla.kv_lora_rank + mla.qk_rope_head_dim
        )
        self.linear_kv_up_proj = self._cut(
            parts.norm_column, mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        )
        self.core_attention = build_module(
            parts.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=softmax_scale,
            k_channels=self._head_dim,
            v_channels=mla.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            parts.row,
            heads * mla.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self._tp_group,
        )

    def _whole(self, part: Any, output_size: int) -> Any:
        """A projection that every TP rank holds."""
        return build_module(
            part,
            self.config.hidden_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            parallel_mode="duplicated",
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )

    def _cut(self, part: Any, input_size: int, output_size: int) -> Any:
        """A projection whose outputs are heads, cut over TP."""
        return build_module(
            part,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self._tp_group,
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: Any, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As megatron calls an attention; ``packed_seq_params`` has the rotation of the rows."""
        query, key, value = self._heads(hidden_states, *packed_seq_params.rotation)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(
                query,
                key,
                value,
                attention_mask=None,
                attn_mask_type=AttnMaskType.causal,
                packed_seq_params=packed_seq_params,
            )

        if self.training and self.config.recompute_granularity == "selective":
            out = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        return self.linear_proj(out.reshape(out.shape[0], 1, -1))

    def _heads(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [S, heads / tp, nope + rope], value [S, heads / tp, v]."""
        mla = self._mla
        if mla.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.linear_q_down_proj(hidden)[0])
        latent, key_rope = self.linear_kv_down_proj(hidden)[0].split(
            [mla.kv_lora_rank, mla.qk_rope_head_dim], -1
        )
        if self.config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope, group=self._tp_group)
        key_value, _ = self.linear_kv_up_proj(latent.contiguous())
        query = query.squeeze(1).unflatten(-1, (-1, self._head_dim))
        key_value = key_value.squeeze(1).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        query_nope, query_rope = query.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        key_nope, value = key_value.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        query_rope = rotate_pairs(query_rope, cosine, sine)
        key_rope = rotate_pairs(key_rope, cosine, sine).expand(-1, key_nope.shape[1], -1)
        query = torch.cat([query_nope, query_rope], -1)
        key = torch.cat([key_nope, key_rope], -1)
        return query, key, value.contiguous()


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of neighbouring elements of [S, heads, d], as DeepSeek's weights have it.

    The result has the first elements of all pairs before the second ones; a product of two
    results is that of the usual order.
    """
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return Rotate.apply(halves, cosine, sine)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every TP rank holds whole, as TELinear's parallel mode duplicated."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(
                output_size,
                input_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        # On a sequence shard each TP rank sees other tokens: its gradient is summed over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Replicated over TP."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)
