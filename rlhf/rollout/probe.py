"""Where SGLang's own class puts each tensor, traced without weights; compared with our tables.

The class is built on the meta device and its ``load_weights`` runs over tensors without data, named
and shaped as the tables name and shape a checkpoint. Each copy is a rectangle; together they are
the engine's true layout, to the last expert of a model of any size.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.dist.layout import RolloutLayout
from rlhf.rollout.forks import Outcome, Probe, in_forks
from rlhf.weights.families import full_pieces, rollout_param_shapes, rollout_pieces
from rlhf.weights.model_shape import ModelShape, load_model_shape, parse_model_shape
from rlhf.weights.piece import FLOAT8, Box, Piece, box_size, full_box, intersect

if TYPE_CHECKING:
    from rlhf.rollout.copy_trace import StrayWrite

Params = Mapping[str, tuple[tuple[int, ...], str]]
"""Parameter -> shape and dtype."""
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Probed:
    """What SGLang has on one rank, and how it is filled."""

    pieces: tuple[Piece, ...]
    params: Params
    stray: tuple[StrayWrite, ...] = ()
    """Writes that are no copies of rectangles."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One rectangle of one parameter about which the table and SGLang do not agree."""

    param: str
    local: Box
    table: str
    sglang: str

    def __str__(self) -> str:
        return f"{self.param}{_text(self.local)}: table {self.table}; SGLang {self.sglang}"


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    """Make ``folder`` one that can be probed, out of the object of any ``config.json``.

    The model type is that of the family, so that transformers needs no code from the model's
    folder to read it (Kimi-K2 brings some).

    Raises:
        ValueError, KeyError: as :func:`rlhf.weights.model_shape.parse_model_shape`.
    """
    family = parse_model_shape(raw).family
    kept = {key: value for key, value in raw.items() if key != "auto_map"}
    text = json.dumps({**kept, "model_type": family}, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")


def probe_many(probes: Sequence[Probe]) -> Iterator[Outcome[Probed]]:
    """Trace each; see :func:`rlhf.rollout.forks.in_forks`."""
    return in_forks(trace, probes)


def trace(probe: Probe) -> Probed:
    """To be called in a process that stands for the probe's rank and has SGLang imported."""
    import torch

    from rlhf.rollout.copy_trace import CopyTrace
    from rlhf.rollout.sglang_model import build_model, live_tensors

    model = build_model(probe.folder, probe.layout, probe.rank, probe.dtype, "meta")
    shape = load_model_shape(probe.folder)
    sources = {
        piece.tensor: torch.empty(
            [stop for _, stop in piece.region],
            device="meta",
            dtype=getattr(torch, piece.dtype or probe.dtype),
        )
        for piece in [*full_pieces(shape), *_quantized(shape, probe.layout)]
    }
    params = live_tensors(model)
    copies = CopyTrace(params, sources)
    with copies:
        model.load_weights(iter(sources.items()))
    after = live_tensors(model)
    copies.finish(after)
    return Probed(
        tuple(copies.pieces),
        {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in after.items()},
        tuple(copies.stray),
    )


def _quantized(shape: ModelShape, layout: RolloutLayout) -> list[Piece]:
    """Whole tensors of a checkpoint in fp8, where they are not those of a plain one."""
    if layout.quantization == "none":
        return []
    one = RolloutLayout(1, quantization=layout.quantization)
    full = {piece.tensor for piece in full_pieces(shape)}
    pieces = rollout_pieces(shape, one, 0)
    return [p for p in pieces if p.dtype == FLOAT8 or p.tensor not in full]


def table(shape: ModelShape, probe: Probe) -> Probed:
    """What our tables say of the same rank. Pure."""
    pieces = rollout_pieces(shape, probe.layout, probe.rank)
    own = {piece.param: piece.dtype for piece in pieces if piece.dtype}
    shapes = rollout_param_shapes(shape, probe.layout, probe.rank)
    return Probed(
        tuple(replace(piece, dtype=None) for piece in pieces),
        {name: (dims, own.get(name, probe.dtype)) for name, dims in shapes.items()},
    )


def differences(table: Probed, probed: Probed) -> list[Difference]:
    """All that differs, by parameter; empty when the table is what SGLang does. Pure."""
    out = [
        Difference(name, full_box(here[0]), _param_text(ours), _param_text(theirs))
        for name, ours, theirs in _both(table.params, probed.params)
        if ours != theirs
        for here in [ours or theirs]
        if here is not None
    ]
    ours, theirs = set(table.pieces), set(probed.pieces)
    table_at, probed_at = _by_param(ours), _by_param(theirs)
    for param, local in sorted({(p.param, p.local) for p in ours ^ theirs}):
        said = _content(table_at[param], local)
        out.append(Difference(param, local, said, _content(probed_at[param], local)))
    out += [
        Difference(s.param, s.local, _content(table_at[s.param], s.local), s.what)
        for s in probed.stray
    ]
    return sorted(out, key=lambda d: (d.param, d.local))


def _both(
    ours: Params, theirs: Params
) -> Iterator[tuple[str, tuple[tuple[int, ...], str] | None, tuple[tuple[int, ...], str] | None]]:
    for name in sorted(ours.keys() | theirs.keys()):
        yield name, ours.get(name), theirs.get(name)


def _by_param(pieces: Iterable[Piece]) -> defaultdict[str, list[Piece]]:
    out = defaultdict(list)
    for piece in pieces:
        out[piece.param].append(piece)
    return out


def _content(pieces: Sequence[Piece], local: Box) -> str:
    """What lies in a rectangle: all of it one piece, parts of pieces, or nothing."""
    found = sorted(p for p in pieces if len(p.local) == len(local) and intersect(p.local, local))
    texts = [
        f"{p.tensor}{_text(p.region)}" + ("" if p.local == local else f" at {_text(p.local)}")
        for p in found
    ]
    covered = sum(box_size(intersect(p.local, local) or ((0, 0),)) for p in found)
    if 0 < covered < box_size(local):
        texts.append("nothing in the rest")
    return " and ".join(texts) or NOTHING


def _param_text(param: tuple[tuple[int, ...], str] | None) -> str:
    return "has no such parameter" if param is None else f"{list(param[0])} {param[1]}"


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
