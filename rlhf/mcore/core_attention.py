"""Attention over packed sequences on torch's scaled_dot_product_attention.

Used in place of transformer-engine's DotProductAttention when that is absent, on CPU and GPU.
Sequences of similar length run as one batch; nothing of the size of an attention mask exists.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

_FREE_PADDING_TOKENS = 16
_MAX_LENGTH_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences that run as one batch, each padded behind its end to the longest.

    Padding behind the end is free of masks: causal attention never looks there.
    """

    rows: Tensor  # [num_sequences * longest] int64, packed index to read; padding repeats the last
    num_sequences: int
    longest: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's record of a packed stream, with the batches that attention runs."""

    groups: tuple[SequenceGroup, ...] = ()
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """[T] int64: row of the concatenated group outputs that belongs to each packed token."""


def pack_sequences(cu_seqlens: Tensor) -> PackedSequences:
    """The record for sequences back to back; ``cu_seqlens`` [n + 1] from 0 to T."""
    borders = cu_seqlens.tolist()
    spans = [(a, b - a) for a, b in itertools.pairwise(borders) if b > a]
    longest = max(length for _, length in spans)
    groups, order = _batches(_similar_lengths(spans), borders[-1], cu_seqlens.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=groups,
        order=order,
    )


def _similar_lengths(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split (start, length) spans into groups that waste little when padded to their longest."""
    groups: list[list[tuple[int, int]]] = []
    limit = 0.0
    for span in sorted(spans, key=lambda s: (s[1], s[0])):
        if not groups or span[1] > limit:
            groups.append([])
            limit = max(span[1] * _MAX_LENGTH_RATIO, span[1] + _FREE_PADDING_TOKENS)
        groups[-1].append(span)
    return groups


def _batches(
    members: list[list[tuple[int, int]]], num_tokens: int, device: torch.device
) -> tuple[tuple[SequenceGroup, ...], Tensor]:
    """The groups, and for each packed token its row in their concatenated outputs."""
    groups = []
    order = torch.empty(num_tokens, dtype=torch.long)
    base = 0
    for spans in members:
        longest = spans[-1][1]
        starts = torch.tensor([start for start, _ in spans])
        lengths = torch.tensor([length for _, length in spans])
        offsets = torch.arange(longest)
        rows = starts[:, None] + offsets.minimum(lengths[:, None] - 1)
        real = offsets < lengths[:, None]
        order[rows[real]] = base + torch.arange(rows.numel()).view_as(rows)[real]
        base += rows.numel()
        groups.append(SequenceGroup(rows.flatten().to(device), len(spans), longest))
    return tuple(groups), order.to(device)


class SDPACoreAttention(MegatronModule):
    """Causal self-attention of packed sequences; GQA; heads are this rank's share.

    Takes what megatron gives to a core attention: query [T, heads, d], key and value
    [T, kv_heads, d], and a :class:`PackedSequences`. Returns [T, heads * d]. No collectives.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise ValueError("train.cp > 1 needs transformer-engine, which is not installed")
        if config.attention_dropout:
            raise ValueError(f"attention_dropout={config.attention_dropout} must be 0")
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "core attention runs packed sequences only"
        assert attention_mask is None and attention_bias is None
        groups = packed_seq_params.groups
        outputs = [self._attend(group, query, key, value) for group in groups]
        joined = outputs[0] if len(groups) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed_seq_params.order).flatten(1)

    def _attend(self, group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[num_sequences * longest, heads, d]"""
        shape = (group.num_sequences, group.longest)
        q, k, v = (
            x.index_select(0, group.rows).unflatten(0, shape).transpose(1, 2)
            for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)
