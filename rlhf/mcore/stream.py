"""What the model runs of a micro-batch: every token once whose hidden state is needed.

Samples of one prompt begin alike, and a causal model gives equal hidden states to equal beginnings.
So the sequences of a micro-batch are folded into a tree of tokens, and every linear layer, norm and
head sees each node once; only attention reads the keys and values of a shared beginning once per
sequence. Tokens behind the last one that is asked for are left out; for log-probabilities that is
the one before the last trained token. Results are those of the unfolded sequences, up to rounding.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.mcore.core_attention import PackedSequences, Path, batch_paths
from rlhf.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Stream:
    """A micro-batch as the model takes it.

    The head sees the rows ``needed``; its output i is made from row ``needed[source[i]]``. For
    log-probabilities output i belongs to trained token i and scores ``targets[i]``.
    """

    tokens: Tensor  # [1, S] int64
    packed: PackedSequences
    needed: Tensor  # [u] int64, rows whose hidden state the head needs
    source: Tensor  # [n] int64, index into ``needed``
    targets: Tensor  # [n] int64, the token after each; of meaning where that one is trained
    members: Tensor
    """[sequences, S] bool: which sequences run through a row, each up to the last token that is
    asked for. A row of none is padding: nothing reads its output."""
    made_here: Tensor | None = None
    """Under context parallelism, bool: which outputs of the micro-batch are these n; see
    :func:`rlhf.mcore.context.join_outputs`."""


def predicting(micro: MicroBatch) -> Tensor:
    """[T] bool: the tokens whose hidden state predicts a trained token, each its predecessor.

    Raises:
        AssertionError: the first token of a sequence is trained; nothing predicts it.
    """
    starts = micro.cu_seqlens[:-1].long()
    wrong = starts[micro.mask[starts]]
    assert not len(wrong), f"the first token of a sequence, {wrong.tolist()}, cannot be trained"
    return micro.mask.roll(-1)


def fold(micro: MicroBatch, multiple: int, short: int = 0, asked: Tensor | None = None) -> Stream:
    """The tree of ``micro``, padded to a multiple of ``multiple`` rows; see the module's text.

    ``short``: see :func:`batch_paths`. ``asked`` [T] bool: the tokens whose hidden state is needed,
    if not those that :func:`predicting` names; the head's outputs are in their order.

    Raises:
        AssertionError: the first token of a sequence is trained; nothing predicts it.
    """
    rows = (predicting(micro) if asked is None else asked).nonzero().squeeze(1)
    tree = _Tree()
    borders, marks = micro.cu_seqlens.tolist(), rows.tolist()
    tokens = micro.tokens.tolist()
    for start, stop in itertools.pairwise(borders):
        own = marks[bisect_left(marks, start) : bisect_left(marks, stop)]
        if own:
            tree.add(tokens[start : own[-1] + 1], [row - start for row in own])
    if not tree.paths:  # nothing is asked for: one token keeps all stages at work
        tree.add(tokens[:1], [])
    padding = [0] * (-len(tree.tokens) % multiple)
    needed, source = torch.tensor(tree.asked, dtype=torch.long).unique(return_inverse=True)
    device = micro.tokens.device
    return Stream(
        tokens=torch.tensor([tree.tokens + padding], device=device),
        packed=batch_paths(tree.paths, tree.positions + padding, device, short),
        needed=needed.to(device),
        source=source.to(device),
        targets=micro.tokens.roll(-1)[rows],
        members=_members(tree.sequences, len(tree.tokens) + len(padding)).to(device),
    )


def keep_whole(micro: MicroBatch, asked: Tensor | None = None) -> Stream:
    """``micro`` as it is, for attention kernels that know plain sequences only.

    ``asked``: see :func:`fold`.
    """
    rows = (predicting(micro) if asked is None else asked).nonzero().squeeze(1)
    longest = int(micro.cu_seqlens.diff().max())
    sequences = [
        range(start, int(own.max()) + 1)
        for start, stop in itertools.pairwise(micro.cu_seqlens.tolist())
        if len(own := rows[(rows >= start) & (rows < stop)])
    ]
    return Stream(
        tokens=micro.tokens[None],
        packed=PackedSequences(
            qkv_format="thd",
            positions=micro.positions,
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        needed=rows,
        source=torch.arange(len(rows), device=rows.device),
        targets=micro.tokens.roll(-1)[rows],
        members=_members(sequences, len(micro.tokens)).to(rows.device),
    )


def _members(sequences: Sequence[Sequence[int]], num_rows: int) -> Tensor:
    out = torch.zeros(len(sequences), num_rows, dtype=torch.bool)
    for i, rows in enumerate(sequences):
        out[i, torch.tensor(rows)] = True
    return out


class _Tree:
    """Nodes are numbered in the order of the sequences; a node is a token after its parent."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.sequences: list[list[int]] = []  # nodes of each, up to the last one asked for
        self.asked: list[int] = []  # node of every token that is asked for, in order
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tokens: Sequence[int], asked: Sequence[int]) -> None:
        """A sequence, and the offsets in it of the tokens whose hidden state is needed."""
        known = len(self.tokens)
        rows: list[int] = []
        node = -1
        for position, token in enumerate(tokens):
            node = self._children.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.positions.append(position)
            rows.append(node)
        self.asked += [rows[offset] for offset in asked]
        if asked:
            self.sequences.append(rows)
        if len(self.tokens) > known:  # otherwise every row has its output from an earlier path
            self.paths.append(Path(rows, len(rows) - (len(self.tokens) - known)))
