"""Which rectangle of which tensor a program copies into which rectangle of which parameter.

Runs a loader on tensors without data (the meta device) and reads each copy off the views that it is
given: a view of a contiguous tensor says by its offset and strides which rectangle it is. Tensors
that are made of tracked ones on the way (concatenated, cast, cloned) are followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.weights.piece import Box, Piece, box_size, full_box, intersect

CONSTANTS = ("aten::fill_", "aten::zero_")
"""Writes of a constant: a loader clears padding with them."""
CLONES = ("aten::_to_copy", "aten::clone")


@dataclass(frozen=True, slots=True)
class StrayWrite:
    """A write into a parameter that is no copy of a rectangle of one of the tensors."""

    param: str
    local: Box
    what: str


@dataclass(frozen=True, slots=True)
class _Part:
    """``tensor[region]`` lies at ``at`` of a tracked tensor."""

    tensor: str
    region: Box
    at: Box
    axes: tuple[int | None, ...]  # dim of ``region`` for each dim of ``at``; None: size 1


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A contiguous tensor: a parameter (``parts`` None), or one that holds parts of sources."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[_Part, ...] | None
    keep: Tensor
    """Held, so that no other storage gets its address."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """What a view covers; ``axes[i]``: dim of the tensor along which dim i runs (None: size 1)."""

    box: Box
    axes: tuple[int | None, ...]


class CopyTrace(TorchDispatchMode):
    """While entered, notes every write into ``params``; sees its own thread only."""

    def __init__(self, params: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        """
        Raises:
            ValueError: a parameter is not contiguous.
        """
        super().__init__()
        self.pieces: list[Piece] = []
        self.stray: list[StrayWrite] = []
        self._tracked: dict[int, _Tracked] = {}
        for name, tensor in params.items():
            if not tensor.is_contiguous():
                raise ValueError(f"parameter {name} has strides {tensor.stride()}: not contiguous")
            self._track(tensor, name, None)
        for name, tensor in sources.items():
            box = full_box(tuple(tensor.shape))
            self._track(tensor, name, (_Part(name, box, box, tuple(range(tensor.dim()))),))

    def finish(self, params: Mapping[str, Tensor]) -> None:
        """Compare ``params`` with those of the beginning: a loader may also replace storage."""
        before = {t.name: t for t in self._tracked.values() if t.parts is None}
        for name, tensor in params.items():
            box = full_box(tuple(tensor.shape))
            if name not in before:
                self.stray.append(StrayWrite(name, box, "made while loading"))
            elif self._find(tensor) is not before[name]:
                self.stray.append(StrayWrite(name, box, "given other storage while loading"))

    def _track(self, tensor: Tensor, name: str, parts: tuple[_Part, ...] | None) -> None:
        self._tracked[_storage(tensor)] = _Tracked(
            name, tuple(tensor.shape), tensor.stride(), parts, tensor
        )

    def _find(self, tensor: Any) -> _Tracked | None:
        return self._tracked.get(_storage(tensor)) if isinstance(tensor, Tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False))
            given |= kwargs or {}
            for argument in schema.arguments:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = given.get(argument.name)
                for target in value if isinstance(value, list | tuple) else [value]:
                    self._note_write(schema.name, target, args)
        elif schema.name == "aten::cat":
            self._note_cat(out, *args, **(kwargs or {}))
        elif schema.name in CLONES:
            source = self._sources_of(args[0])
            if source is not None and out.is_contiguous():
                self._track(out, schema.name, source)
        return out

    def _note_write(self, operator: str, target: Any, args: tuple) -> None:
        tracked = self._find(target)
        if tracked is None or tracked.parts is not None or target.numel() == 0:
            return
        there = _rectangle(target, tracked)
        if there is None:
            whole = full_box(tracked.shape)
            self.stray.append(StrayWrite(tracked.name, whole, f"{operator} into no rectangle"))
        elif operator == "aten::copy_":
            self._note_copy(tracked, target, there, args[1])
        elif operator not in CONSTANTS or self._is_written(tracked.name, there.box):
            self.stray.append(StrayWrite(tracked.name, there.box, operator))

    def _note_copy(
        self, tracked: _Tracked, target: Tensor, there: _Rectangle, source: Tensor
    ) -> None:
        """Straight copies only: every dim of the target runs along one of the source, in order."""
        parts = self._sources_of(source) if source.shape == target.shape else None
        if parts is None or sum(box_size(p.at) for p in parts) != source.numel():
            what = f"a copy of {tuple(source.shape)} from elsewhere"
            self.stray.append(StrayWrite(tracked.name, there.box, what))
            return
        for part in parts:
            local = list(there.box)
            for (start, stop), axis in zip(part.at, there.axes, strict=True):
                if axis is not None:
                    first = there.box[axis][0]
                    local[axis] = (first + start, first + stop)
            pairs = zip(there.axes, part.axes, strict=True)
            along = [(a, b) for a, b in pairs if a is not None and b is not None]
            if along != sorted(along) or [b for _, b in along] != sorted(b for _, b in along):
                what = f"a transposed copy of {part.tensor}"
                self.stray.append(StrayWrite(tracked.name, tuple(local), what))
            else:
                self.pieces.append(Piece(part.tensor, part.region, tracked.name, tuple(local)))

    def _is_written(self, param: str, box: Box) -> bool:
        return any(p.param == param and intersect(p.local, box) for p in self.pieces)

    def _note_cat(self, out: Tensor, tensors: list[Tensor], dim: int = 0) -> None:
        parts, start = [], 0
        dim %= out.dim()
        for tensor in tensors:
            for part in self._sources_of(tensor) or ():
                at = list(part.at)
                at[dim] = (start + at[dim][0], start + at[dim][1])
                parts.append(_Part(part.tensor, part.region, tuple(at), part.axes))
            start += tensor.shape[dim]
        if parts:
            self._track(out, "aten::cat", tuple(parts))

    def _sources_of(self, view: Tensor) -> tuple[_Part, ...] | None:
        """The parts of sources that a view shows, in its own coordinates."""
        tracked = self._find(view)
        if tracked is None or tracked.parts is None or view.numel() == 0:
            return None
        shown = _rectangle(view, tracked)
        if shown is None:
            return None
        out = []
        for part in tracked.parts:
            common = intersect(part.at, shown.box)
            if common is None:
                continue
            region = list(part.region)
            for (start, stop), (at, _), axis in zip(common, part.at, part.axes, strict=True):
                if axis is None:
                    continue
                first = part.region[axis][0] - at
                region[axis] = (first + start, first + stop)
            at_view = tuple(
                (0, 1) if axis is None else _shifted(common[axis], -shown.box[axis][0])
                for axis in shown.axes
            )
            axes = tuple(None if axis is None else part.axes[axis] for axis in shown.axes)
            out.append(_Part(part.tensor, tuple(region), at_view, axes))
        return tuple(out)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _shifted(span: tuple[int, int], by: int) -> tuple[int, int]:
    return span[0] + by, span[1] + by


def _rectangle(view: Tensor, tracked: _Tracked) -> _Rectangle | None:
    """The rectangle of ``tracked`` that ``view`` covers; None where it is none."""
    offset = view.storage_offset()
    start = []
    for size, stride in zip(tracked.shape, tracked.strides, strict=True):
        start.append(offset // stride if size > 1 else 0)
        offset -= start[-1] * stride
    stop = [first + 1 for first in start]
    axes: list[int | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            axes.append(None)
            continue
        axis = next(
            (i for i, s in enumerate(tracked.strides) if s == stride and tracked.shape[i] > 1),
            None,
        )
        if axis is None or axis in axes or start[axis] + size > tracked.shape[axis]:
            return None
        stop[axis] = start[axis] + size
        axes.append(axis)
    return _Rectangle(tuple(zip(start, stop, strict=True)), tuple(axes))
