"""Causal attention over sequences that share beginnings.

Used in place of transformer-engine's DotProductAttention where that is absent or cannot serve: on a
CPU, and for float32.
Sequences of similar length run as one batch: short ones, on a CPU, as plain matrix products of the
queries that are not shared; others by torch's scaled_dot_product_attention, without a mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
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
    """Sequences that run as one batch, each padded behind its end by repeating its last row.

    Padding behind the end needs no mask: causal attention never looks there.
    """

    num_paths: int
    keys: Tensor  # [num_paths * num_keys] int64, rows
    num_keys: int
    queries: Tensor  # [num_paths * num_queries] int64, rows; all of the keys or each path's own
    num_queries: int
    hidden: Tensor | None  # [num_paths, 1, num_queries, num_keys] bool; None: causal, all queries
    short: bool = False  # plain matrix products are faster than torch's kernel


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's record of a packed input, for rows that several sequences share."""

    groups: tuple[PathGroup, ...] = ()
    place: Tensor | None = None
    """[S] int64: where a row's output is in the concatenated outputs of the groups."""
    positions: Tensor | None = None
    """[S] int64: position of each row in its sequence."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine [S, 1, rotary_dim / 2] of the rotary embedding."""


def batch_paths(
    paths: Sequence[Path], positions: Sequence[int], device: torch.device, short: int = 0
) -> PackedSequences:
    """Group ``paths`` by similar length; ``positions`` [S] of the rows in their sequences.

    A row on several paths takes its output from the first. Rows on no path (padding) get the output
    of some other row; nothing may read them. Groups of up to ``short`` rows per path run as plain
    products.
    """
    groups: list[PathGroup] = []
    place = torch.zeros(len(positions), dtype=torch.long)
    base = 0
    for members in _similar_lengths(paths):
        group = _group(members, short)
        queries = group.queries.view(group.num_paths, -1)
        lengths = torch.tensor([[len(p.rows)] for p in members])
        shared = torch.tensor([[p.num_shared] for p in members])
        offset = torch.arange(group.num_queries) + (shared if group.hidden is not None else 0)
        own = (offset >= shared) & (offset < lengths)
        place[queries[own]] = base + torch.arange(queries.numel()).view_as(queries)[own]
        base += queries.numel()
        groups.append(_to(group, device))
    return PackedSequences(
        qkv_format="thd",
        groups=tuple(groups),
        place=place.to(device),
        positions=torch.tensor(positions, device=device),
    )


def batch_cut_sequences(
    borders: Sequence[int], held: Sequence[Tensor], rank: int, positions: Tensor, short: int
) -> PackedSequences:
    """Group whole sequences by similar length, for queries of the rows of one rank only.

    Args:
        borders: of the sequences in the micro-batch.
        held: [S / cp] each, the rows of the micro-batch that each rank of the context-parallel
            group holds; an equal share of every sequence, sequence after sequence. Keys stand in
            this order.
        positions: [S / cp] int64 of this rank's rows in their sequences.
        short: as for :func:`batch_paths`.
    """
    cp, own = len(held), held[rank]
    gathered = torch.cat(list(held)).argsort()  # row of the micro-batch -> row of the keys
    groups: list[PathGroup] = []
    place = torch.zeros(len(own), dtype=torch.long)
    base = 0
    for members in _similar_lengths([Path(range(a, b)) for a, b in itertools.pairwise(borders)]):
        num_keys, num_queries = len(members[-1].rows), len(members[-1].rows) // cp
        keys = torch.tensor([_padded(p.rows, num_keys) for p in members])
        mine = [range(p.rows.start // cp, p.rows.stop // cp) for p in members]
        queries = torch.tensor([_padded(rows, num_queries) for rows in mine])
        at = own[queries] - keys[:, :1]
        hidden = torch.arange(num_keys) > at[:, None, :, None]
        for number, rows in enumerate(mine):
            start = base + number * num_queries
            place[rows.start : rows.stop] = torch.arange(start, start + len(rows))
        base += queries.numel()
        group = PathGroup(
            len(members),
            gathered[keys].flatten(),
            num_keys,
            queries.flatten(),
            num_queries,
            hidden,
            num_keys <= short,
        )
        groups.append(_to(group, positions.device))
    return PackedSequences(
        qkv_format="thd",
        groups=tuple(groups),
        place=place.to(positions.device),
        positions=positions,
    )


def _similar_lengths(paths: Sequence[Path]) -> list[list[Path]]:
    """Groups that waste little when padded to their longest, which stands last.

    Paths that share rows stand apart from those that do not: they have few queries.
    """
    groups: list[list[Path]] = []
    for shares in (False, True):
        limit = 0.0
        some = [path for path in paths if (path.num_shared > 0) == shares]
        for path in sorted(some, key=lambda p: len(p.rows)):
            length = len(path.rows)
            if length > limit:
                groups.append([])
                limit = max(length * _MAX_LENGTH_RATIO, length + _FREE_PADDING_TOKENS)
            groups[-1].append(path)
    return groups


def _group(members: Sequence[Path], short: int) -> PathGroup:
    num_keys = len(members[-1].rows)
    keys = torch.tensor([_padded(path.rows, num_keys) for path in members])
    if num_keys > short:
        return PathGroup(len(members), keys.flatten(), num_keys, keys.flatten(), num_keys, None)
    own = [path.rows[path.num_shared :] for path in members]
    num_queries = max(map(len, own))
    queries = torch.tensor([_padded(rows, num_queries) for rows in own])
    shared = torch.tensor([path.num_shared for path in members])
    at = shared[:, None] + torch.arange(num_queries)
    hidden = torch.arange(num_keys) > at[:, None, :, None]
    return PathGroup(
        len(members), keys.flatten(), num_keys, queries.flatten(), num_queries, hidden, short=True
    )


def _padded(rows: Sequence[int], length: int) -> list[int]:
    return [*rows, *[rows[-1]] * (length - len(rows))]


def _to(group: PathGroup, device: torch.device) -> PathGroup:
    return replace(
        group,
        keys=group.keys.to(device),
        queries=group.queries.to(device),
        hidden=None if group.hidden is None else group.hidden.to(device),
    )


class SDPACoreAttention(MegatronModule):
    """Causal self-attention with grouped queries; heads are this rank's share.

    Takes what megatron gives to a core attention, queries and keys before the rotary embedding:
    query [S, heads, d], key [S, kv_heads, d], value [S, kv_heads, dv], and a
    :class:`PackedSequences`. Returns [S, heads * dv]. Under context parallelism S is this rank's
    share of the rows, and keys and values are gathered over the group (their gradients are summed
    and scattered back).

    Latent attention names the width of its heads, ``k_channels``, and rotates them itself.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        assert not config.attention_dropout, f"{config.attention_dropout=} must be 0"
        self._rotates = k_channels is None
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

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
        assert packed.place is not None
        assert attention_mask is None
        assert attention_bias is None
        if self._rotates:
            assert packed.rotation is not None
            query, key = (Rotate.apply(x, *packed.rotation) for x in (query, key))
        if self._cp_group is not None:
            both = torch.cat([key, value], -1)
            both = gather_from_sequence_parallel_region(both, group=self._cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        outputs = [self._attend(group, query, key, value) for group in packed.groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed.place).flatten(1)

    def _attend(self, group: PathGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[num_paths * num_queries, heads, dv]"""
        q = query.index_select(0, group.queries).unflatten(0, (group.num_paths, -1))
        k, v = (
            x.index_select(0, group.keys).unflatten(0, (group.num_paths, -1)).transpose(1, 2)
            for x in (key, value)
        )
        if group.short:
            return self._plain(q, k, v, group.hidden)
        if q.device.type == "cpu":  # the bfloat16 kernel's backward pass is many times slower
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            attn_mask=None if group.hidden is None else ~group.hidden,
            is_causal=group.hidden is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1).to(query.dtype)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """query [p, q, heads, d], key and value [p, groups, k, d or dv] to [p * q, heads, dv]."""
        num_paths, num_queries, heads, width = query.shape
        groups = key.shape[1]
        # the heads of a group are more queries of its keys
        q = query.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4) * self.scale
        scores = torch.bmm(q.reshape(num_paths * groups, -1, width), key.flatten(0, 1).mT)
        scores = scores.view(num_paths, heads, num_queries, -1).masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1).view(num_paths * groups, -1, scores.shape[-1])
        out = torch.bmm(weights, value.flatten(0, 1))
        out = out.view(num_paths, groups, -1, num_queries, value.shape[-1])
        return out.permute(0, 3, 1, 2, 4).reshape(num_paths * num_queries, heads, -1)
