"""Causal attention over sequences that share beginnings, on torch's scaled_dot_product_attention.

Used in place of transformer-engine's DotProductAttention when that is absent, on CPU and GPU.
Sequences of similar length run as one batch; nothing of the size of an attention mask exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlhf.mcore.kernels import Rotate

_FREE_PADDING_TOKENS = 16
_MAX_LENGTH_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class Path:
    """One sequence: its rows from the first token on, ``num_shared`` of them on earlier paths."""

    rows: Sequence[int]
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class PathGroup:
    """Sequences that run as one batch, each padded behind its end to the longest.

    Padding behind the end needs no mask: causal attention never looks there.
    """

    rows: Tensor  # [num_paths * longest] int64, the row of each token; padding repeats the last
    num_paths: int
    longest: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's record of a packed input, for rows that several sequences share."""

    groups: tuple[PathGroup, ...] = ()
    place: Tensor | None = None
    """[S] int64: where a row's output is in the concatenated outputs of the groups."""
    positions: Tensor | None = None
    """[S] int64: position of each row in its sequence."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine [S, 1, d / 2] of the rotary embedding."""


def batch_paths(
    paths: Sequence[Path], positions: Sequence[int], device: torch.device
) -> PackedSequences:
    """Group ``paths`` by similar length; ``positions`` [S] of the rows in their sequences.

    A row on several paths takes its output from the first. Rows on no path (padding) get the output
    of some other row; nothing may read them.
    """
    groups: list[PathGroup] = []
    place = torch.zeros(len(positions), dtype=torch.long)
    base = 0
    for members in _similar_lengths(paths):
        longest = len(members[-1].rows)
        rows = torch.tensor([_padded(path.rows, longest) for path in members])
        first = torch.tensor([[path.num_shared] for path in members])
        stop = torch.tensor([[len(path.rows)] for path in members])
        offset = torch.arange(longest)
        own = (offset >= first) & (offset < stop)
        place[rows[own]] = base + torch.arange(rows.numel()).view_as(rows)[own]
        base += rows.numel()
        groups.append(PathGroup(rows.flatten().to(device), len(members), longest))
    return PackedSequences(
        qkv_format="thd",
        groups=tuple(groups),
        place=place.to(device),
        positions=torch.tensor(positions, device=device),
    )


def _padded(rows: Sequence[int], length: int) -> list[int]:
    return [*rows, *[rows[-1]] * (length - len(rows))]


def _similar_lengths(paths: Sequence[Path]) -> list[list[Path]]:
    """Groups that waste little when padded to their longest, which stands last."""
    groups: list[list[Path]] = []
    limit = 0.0
    for path in sorted(paths, key=lambda p: len(p.rows)):
        length = len(path.rows)
        if not groups or length > limit:
            groups.append([])
            limit = max(length * _MAX_LENGTH_RATIO, length + _FREE_PADDING_TOKENS)
        groups[-1].append(path)
    return groups


class SDPACoreAttention(MegatronModule):
    """Causal self-attention with grouped queries; heads are this rank's share.

    Takes what megatron gives to a core attention, queries and keys before the rotary embedding:
    query [S, heads, d], key and value [S, kv_heads, d], and a :class:`PackedSequences`. Returns
    [S, heads * d]. No collectives.
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
        assert not config.attention_dropout, f"{config.attention_dropout=} must be 0"
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
        packed = packed_seq_params
        assert packed is not None, "core attention runs packed sequences only"
        assert packed.rotation is not None
        assert packed.place is not None
        assert attention_mask is None
        assert attention_bias is None
        query, key = (Rotate.apply(x, *packed.rotation) for x in (query, key))
        outputs = [self._attend(group, query, key, value) for group in packed.groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed.place).flatten(1)

    def _attend(self, group: PathGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[num_paths * longest, heads, d]"""
        shape = (group.num_paths, group.longest)
        q, k, v = (
            x.index_select(0, group.rows).unflatten(0, shape).transpose(1, 2)
            for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)
