"""What the model runs of a micro-batch: every token once whose hidden state is needed.

Samples of one prompt begin alike, and a causal model gives equal hidden states to equal beginnings.
So the sequences of a micro-batch are folded into a tree of tokens, and every linear layer, norm and
head sees each node once; only attention reads the keys and values of a shared beginning once per
sequence. Tokens behind the last trained one, and the last trained one itself, predict nothing and
are left out. Results are those of the unfolded sequences, up to rounding.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf.mcore.core_attention import Path, batch_paths
from rlhf.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Stream:
    """A micro-batch as the model takes it.

    The head turns the rows ``needed`` into distributions; trained token i of the micro-batch is
    scored by distribution ``source[i]``.
    """

    tokens: Tensor  # [1, S] int64
    packed: PackedSeqParams
    needed: Tensor  # [u] int64, rows whose hidden state predicts a trained token
    source: Tensor  # [n] int64, index into ``needed``
    targets: Tensor  # [n] int64, the trained tokens in their order


def fold(micro: MicroBatch, multiple: int, short: int = 0) -> Stream:
    """The tree of ``micro``, padded to a multiple of ``multiple`` rows; see the module's text.

    ``short``: see :func:`batch_paths`.

    Raises:
        AssertionError: the first token of a sequence is trained; nothing predicts it.
    """
    trained = micro.mask.nonzero().squeeze(1)
    tree = _Tree()
    borders, marks = micro.cu_seqlens.tolist(), trained.tolist()
    tokens = micro.tokens.tolist()
    for start, stop in itertools.pairwise(borders):
        own = marks[bisect_left(marks, start) : bisect_left(marks, stop)]
        if own:
            assert own[0] > start, f"the first token of a sequence, {start}, cannot be trained"
            tree.add(tokens[start : own[-1]], [t - 1 - start for t in own])
    if not tree.paths:  # nothing is trained: one token keeps all stages at work
        tree.add(tokens[:1], [])
    padding = [0] * (-len(tree.tokens) % multiple)
    needed, source = torch.tensor(tree.predicting, dtype=torch.long).unique(return_inverse=True)
    device = micro.tokens.device
    return Stream(
        tokens=torch.tensor([tree.tokens + padding], device=device),
        packed=batch_paths(tree.paths, tree.positions + padding, device, short),
        needed=needed.to(device),
        source=source.to(device),
        targets=micro.tokens[trained],
    )


def keep_whole(micro: MicroBatch) -> Stream:
    """``micro`` as it is, for attention kernels that know plain sequences only."""
    trained = micro.mask.nonzero().squeeze(1)
    starts = micro.cu_seqlens[:-1].long()
    assert not micro.mask[starts].any(), "the first token of a sequence cannot be trained"
    longest = int(micro.cu_seqlens.diff().max())
    needed, source = (trained - 1).unique(return_inverse=True)
    return Stream(
        tokens=micro.tokens[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        needed=needed,
        source=source,
        targets=micro.tokens[trained],
    )


class _Tree:
    """Nodes are numbered in the order of the sequences; a node is a token after its parent."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.predicting: list[int] = []  # node of every trained token, in order
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tokens: Sequence[int], predicting: Sequence[int]) -> None:
        """A sequence, and the offsets in it of the nodes that predict its trained tokens."""
        known = len(self.tokens)
        rows: list[int] = []
        node = -1
        for position, token in enumerate(tokens):
            node = self._children.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.positions.append(position)
            rows.append(node)
        self.predicting += [rows[offset] for offset in predicting]
        if len(self.tokens) > known:  # otherwise every row has its output from an earlier path
            self.paths.append(Path(rows, len(rows) - (len(self.tokens) - known)))
