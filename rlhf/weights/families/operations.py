"""The operations of the family tables: how a layout cuts full tensors and stacks the cuts.

Each operation describes one local parameter of one rank: its shape, and which rectangle of which
full tensor lies where in it. Tensor names are relative to the table (a layer's prefix is added by
the interpreter). Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rlhf.dist.layout import LayoutError
from rlhf.weights.block_scales import (
    BLOCK,
    scale_box,
    scale_name,
    scale_shape,
    split_blocks,
)
from rlhf.weights.piece import FLOAT8, FLOAT32, Box, full_box, show_box
from rlhf.weights.spread import EXPERT

Shape = tuple[int, ...]
GroupName = Literal["tp", "attention", "dense", "shared", "expert"]
"""Over which ranks a parameter is cut; sizes in ``layouts.py``.

``tp``: the tensor-parallel group. ``expert``: of one expert (Megatron's etp, the engine's tp / ep).
The engine's alone: ``attention`` (tp / dp), ``dense`` (MLP of a layer without experts in a model
with experts), ``shared`` (shared experts).
"""


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's place among the ranks that share the cuts of a parameter."""

    size: int
    index: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What an operation needs to know of the model and of the rank."""

    shapes: Mapping[str, Shape]  # full tensors, by the names that the table uses
    groups: Mapping[GroupName, Group]
    num_kv_heads: int
    padded_vocab: int  # rows of a vocabulary tensor over all ranks, padding included
    experts: Sequence[int] = ()  # global numbers of the rank's routed experts


@dataclass(frozen=True, slots=True)
class Part:
    """``tensor[region]`` lies at ``local`` of the parameter."""

    tensor: str
    region: Box
    local: Box
    transposed: bool = False  # as in a piece


@dataclass(frozen=True, slots=True)
class Laid:
    """A local parameter: its shape and what it is made of."""

    shape: Shape
    parts: tuple[Part, ...]
    dtype: str | None = None  # where it is not the model's

    def of_expert(self, number: int) -> Laid:
        """The same of one expert's tensors."""
        parts = (
            replace(part, tensor=part.tensor.replace(EXPERT, str(number))) for part in self.parts
        )
        return Laid(self.shape, tuple(parts), self.dtype)


class Operation(Protocol):
    """One local parameter out of full tensors."""

    def lay(self, frame: Frame) -> Laid:
        """The parameter of the rank that ``frame`` describes."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows [start, stop) of a tensor."""

    tensor: str
    start: int
    stop: int


def _block(rows: int, group: Group) -> tuple[int, int]:
    """The contiguous share of ``rows`` of one group member."""
    assert rows % group.size == 0, f"{rows} rows over {group.size} ranks: the layout check failed"
    share = rows // group.size
    return share * group.index, share * (group.index + 1)


def _stack(frame: Frame, cuts: Sequence[Cut], num_rows: int | None = None) -> Laid:
    """Row blocks one below the other; ``num_rows`` keeps room for padding rows at the end."""
    rest = frame.shapes[cuts[0].tensor][1:]
    parts, at = [], 0
    for cut in cuts:
        size = cut.stop - cut.start
        if size == 0:
            continue
        tail = full_box(rest)
        parts.append(Part(cut.tensor, ((cut.start, cut.stop), *tail), ((at, at + size), *tail)))
        at += size
    return Laid((at if num_rows is None else num_rows, *rest), tuple(parts))


@dataclass(frozen=True, slots=True)
class Whole:
    """Replicated: every rank holds the tensor; ``dtype`` where it is not the model's."""

    tensor: str
    dtype: str | None = None

    def lay(self, frame: Frame) -> Laid:
        shape = frame.shapes[self.tensor]
        part = Part(self.tensor, full_box(shape), full_box(shape))
        return Laid(shape, (part,), self.dtype)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Replicated: whole tensors one below the other."""

    tensors: tuple[str, ...]

    def lay(self, frame: Frame) -> Laid:
        return _stack(frame, [Cut(t, 0, frame.shapes[t][0]) for t in self.tensors])


@dataclass(frozen=True, slots=True)
class Rows:
    """Dim 0 of each tensor is cut over the group; a rank stacks its blocks (gate above up)."""

    tensors: tuple[str, ...]
    group: GroupName = "tp"

    def lay(self, frame: Frame) -> Laid:
        group = frame.groups[self.group]
        cuts = [Cut(t, *_block(frame.shapes[t][0], group)) for t in self.tensors]
        return _stack(frame, cuts)


@dataclass(frozen=True, slots=True)
class Cols:
    """Dim 1 of a matrix is cut over the group."""

    tensor: str
    group: GroupName = "tp"

    def lay(self, frame: Frame) -> Laid:
        rows, cols = frame.shapes[self.tensor]
        start, stop = _block(cols, frame.groups[self.group])
        width = stop - start
        part = Part(self.tensor, ((0, rows), (start, stop)), ((0, rows), (0, width)))
        return Laid((rows, width), (part,))


@dataclass(frozen=True, slots=True)
class QKVGroups:
    """Megatron's fused order: per KV group its query heads, its key head, its value head."""

    query: str
    key: str
    value: str
    group: GroupName = "tp"

    def lay(self, frame: Frame) -> Laid:
        first, last = _block(frame.num_kv_heads, frame.groups[self.group])
        rows_per_group = {
            t: frame.shapes[t][0] // frame.num_kv_heads for t in (self.query, self.key, self.value)
        }
        cuts = [
            Cut(tensor, index * rows, (index + 1) * rows)
            for index in range(first, last)
            for tensor, rows in rows_per_group.items()
        ]
        return _stack(frame, cuts)


@dataclass(frozen=True, slots=True)
class QKVBlocks:
    """SGLang's fused order: a rank's query heads, its key heads, its value heads.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
    """

    query: str
    key: str
    value: str
    group: GroupName = "attention"

    def lay(self, frame: Frame) -> Laid:
        group = frame.groups[self.group]
        kv_group = group
        if frame.num_kv_heads < group.size:
            replicas = group.size // frame.num_kv_heads
            kv_group = Group(frame.num_kv_heads, group.index // replicas)
        cuts = [
            Cut(tensor, *_block(frame.shapes[tensor][0], g))
            for tensor, g in ((self.query, group), (self.key, kv_group), (self.value, kv_group))
        ]
        return _stack(frame, cuts)


@dataclass(frozen=True, slots=True)
class Vocab:
    """Rows of the padded vocabulary are cut over the group; padding rows belong to no tensor."""

    tensor: str
    group: GroupName = "tp"

    def lay(self, frame: Frame) -> Laid:
        real = frame.shapes[self.tensor][0]
        start, stop = _block(frame.padded_vocab, frame.groups[self.group])
        cut = Cut(self.tensor, min(start, real), min(stop, real))
        return _stack(frame, [cut], num_rows=stop - start)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Dim 0 of each tensor is cut over the group; rows of a rank's blocks take turns: the first
    of each tensor, the second of each, and so on."""

    tensors: tuple[str, ...]
    group: GroupName = "tp"

    def lay(self, frame: Frame) -> Laid:
        group, num = frame.groups[self.group], len(self.tensors)
        rows, *rest = frame.shapes[self.tensors[0]]
        start, stop = _block(rows, group)
        tail = full_box(tuple(rest))
        parts = tuple(
            Part(tensor, ((row, row + 1), *tail), ((at, at + 1), *tail))
            for row in range(start, stop)
            for at, tensor in enumerate(self.tensors, (row - start) * num)
        )
        return Laid(((stop - start) * num, *rest), parts)


@dataclass(frozen=True, slots=True)
class Transposed:
    """The matrix with its rows as columns."""

    matrix: Operation

    def lay(self, frame: Frame) -> Laid:
        laid = self.matrix.lay(frame)
        rows, cols = laid.shape
        parts = tuple(
            replace(part, local=part.local[::-1], transposed=not part.transposed)
            for part in laid.parts
        )
        return replace(laid, shape=(cols, rows), parts=parts)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """SGLang's experts: one parameter, whose first dim counts the rank's experts."""

    expert: Operation

    def lay(self, frame: Frame) -> Laid:
        one = self.expert.lay(frame)
        parts = (
            replace(part, local=((slot, slot + 1), *part.local))
            for slot, number in enumerate(frame.experts)
            for part in one.of_expert(number).parts
        )
        return Laid((len(frame.experts), *one.shape), tuple(parts), one.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The same in float8_e4m3fn."""

    weight: Operation

    def lay(self, frame: Frame) -> Laid:
        return replace(self.weight.lay(frame), dtype=FLOAT8)


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of a parameter in block fp8, which lie as the blocks of its weight do.

    ``lay`` raises LayoutError where a block of a tensor is no block of the parameter.
    """

    weight: Operation

    def lay(self, frame: Frame) -> Laid:
        laid = self.weight.lay(frame)
        for part in laid.parts:
            cuts = list(split_blocks(part.region, frame.shapes[part.tensor]))
            cuts += [start for start, _ in part.local[-2:] if start % BLOCK]
            if cuts:
                raise LayoutError(
                    [
                        f"rollout.quantization: {part.tensor}{show_box(part.region)} lies at "
                        f"{show_box(part.local)} of its parameter: {cuts[0]} must be a multiple of "
                        f"{BLOCK}"
                    ]
                )
        parts = (
            replace(
                part,
                tensor=scale_name(part.tensor),
                region=scale_box(part.region),
                local=scale_box(part.local),
            )
            for part in laid.parts
        )
        return Laid(scale_shape(laid.shape), tuple(parts), FLOAT32)
