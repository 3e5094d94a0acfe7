"""Write the trained weights as a Hugging Face folder: train shards moved into the files' shards.

A file is a shard like any other: its pieces are whole tensors. Each file has one writer, and each
writer holds one file at a time; that is all of the model that comes together anywhere.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.dist.layout import TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.polling import Poll
from rlhf.reshard.schedule import rank_plan
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import Transport
from rlhf.weights.families import full_pieces, train_pieces
from rlhf.weights.hf_checkpoint import check_index, is_weight_file, write_index, write_tensors
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import Piece, box_size
from rlhf.weights.spread import spread_of_shards

MAX_FILE_BYTES = 4 << 30
WORTH_A_WRITER_BYTES = 256 << 20
"""Below this a file is not cut further to give more ranks something to write."""
AREA_BYTES = 32 << 20

Gather = Callable[[object], list[object]]
"""One small object from each rank to every rank, in rank order; collective."""


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A safetensors file and the rank that writes it."""

    name: str
    tensors: tuple[str, ...]
    writer: int


class Exporter:
    """Exports one model; every rank has one and calls :meth:`write` together with the others."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        layout: TrainLayout,
        rank: int,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        transport: Transport,
        gather: Gather,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """
        Args:
            params: this rank's parameters by the names of ``train_pieces``.
            dtype: of the files, but for tensors that have their own; parameters of another dtype
                are cast.
            gather: over all ranks of ``layout``.
        """
        self._rank = rank
        self._params = params
        self._dtype = dtype
        self._transport = transport
        self._gather = gather
        self._full = {piece.tensor: piece for piece in full_pieces(shape)}
        self._sizes = {
            name: box_size(piece.region) * self._dtype_of(piece).itemsize
            for name, piece in self._full.items()
        }
        self._shards = [train_pieces(shape, layout, r) for r in range(layout.world)]
        self.files = assign_files(self._sizes, self._shards, max_file_bytes)

    def write(self, folder: str | Path, source: str | Path, poll: Poll) -> None:
        """Make ``folder``: weights from the ranks, everything else copied from ``source``.

        The folder appears whole or not at all; one of the same name is replaced. Collective over
        all ranks (point-to-point messages and ``gather``). All ranks must see the file system.

        Raises:
            RuntimeError: a rank could not write; names it and the cause, on every rank.
        """
        folder = Path(folder)
        work = folder.with_name(f".{folder.name}.partial")
        self._together(folder, lambda: _make_empty(work) if self._rank == 0 else None)
        world = len(self._shards)
        try:
            for first in range(0, len(self.files), world):
                batch = self.files[first : first + world]
                tensors = self._collect(batch, poll)
                self._together(folder, lambda b=batch, t=tensors: self._write_own(work, b, t))  # type: ignore[misc]
            self._together(folder, lambda: self._finish(folder, work, Path(source)))
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(work, ignore_errors=True)
            raise

    def _collect(self, batch: Sequence[ExportFile], poll: Poll) -> dict[str, Tensor]:
        """The full tensors of the file of the batch that this rank writes; often none."""
        destination: list[list[Piece]] = [[] for _ in self._shards]
        for file in batch:
            destination[file.writer] = [self._full[name] for name in file.tensors]
        tensors = {
            piece.param: torch.empty(
                [size for _, size in piece.region], dtype=self._dtype_of(piece)
            )
            for piece in destination[self._rank]
        }
        world = len(self._shards)
        mine = rank_plan(
            spread_of_shards(self._shards, destination),
            Topology.of(world, 1),
            self._rank,
            itemsize=self._dtype.itemsize,
            area_bytes=AREA_BYTES,
        )
        Mover(mine, self._params, self._transport, tensors, dtype=self._dtype).run(poll)
        return tensors

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        return self._dtype if piece.dtype is None else getattr(torch, piece.dtype)

    def _write_own(
        self, work: Path, batch: Sequence[ExportFile], tensors: Mapping[str, Tensor]
    ) -> None:
        for file in batch:
            if file.writer == self._rank:
                write_tensors(work / file.name, tensors)
                _sync(work / file.name)

    def _finish(self, folder: Path, work: Path, source: Path) -> None:
        """Rank 0: everything that is not weights, then the folder's own name."""
        if self._rank != 0:
            return
        by_tensor = {name: file.name for file in self.files for name in file.tensors}
        write_index(work, by_tensor, sum(self._sizes.values()))
        for path in sorted(source.iterdir()):
            if path.is_file() and not is_weight_file(path.name):
                shutil.copyfile(path, work / path.name)
        check_index(
            work, {name: [n for _, n in piece.region] for name, piece in self._full.items()}
        )
        _adapt_config(work / "config.json", str(self._dtype).removeprefix("torch."))
        for path in work.iterdir():
            _sync(path)
        _sync(work)
        _replace(folder, work)

    def _together(self, folder: Path, job: Callable[[], None]) -> None:
        """Run ``job``; raise on every rank if it failed on any."""
        error = None
        try:
            job()
        except (OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        errors = [f"rank {r}: {e}" for r, e in enumerate(self._gather(error)) if e is not None]
        if errors:
            raise RuntimeError(f"the export to {folder} failed and left nothing: {errors[0]}")


def assign_files(
    sizes: Mapping[str, int],
    shards: Sequence[Sequence[Piece]],
    max_file_bytes: int,
) -> list[ExportFile]:
    """Cut the model into files of about equal size, each written by a rank that holds much of it.

    A rank writes no second file before every rank has one. A file exceeds ``max_file_bytes`` by
    less than one tensor.

    Args:
        sizes: tensor -> bytes, in the order of the files.
    """
    total, world = sum(sizes.values()), len(shards)
    num_files = max(
        math.ceil(total / max_file_bytes), min(world, math.ceil(total / WORTH_A_WRITER_BYTES))
    )
    groups: list[list[str]] = [[] for _ in range(num_files)]
    before = 0
    for name, size in sizes.items():
        groups[(before + size // 2) * num_files // total].append(name)
        before += size
    groups = [group for group in groups if group]
    held = _held_elements(groups, shards)
    files: list[ExportFile] = []
    for number, group in enumerate(groups):
        if number % world == 0:
            free = set(range(world))
        writer = max(free, key=lambda rank, n=number: (held[n][rank], -rank))  # type: ignore[misc]
        free.remove(writer)
        name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        files.append(ExportFile(name, tuple(group), writer))
    return files


def _held_elements(
    groups: Sequence[Sequence[str]], shards: Sequence[Sequence[Piece]]
) -> list[list[int]]:
    """Elements of each group on each rank."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    held = [[0] * len(shards) for _ in groups]
    for rank, shard in enumerate(shards):
        for piece in shard:
            held[group_of[piece.tensor]][rank] += box_size(piece.region)
    return held


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _adapt_config(config: Path, dtype: str) -> None:
    """Say ``dtype`` under the keys that the config has, old (torch_dtype) or new (dtype).

    Layers for multi-token prediction are not exported, so there are none.
    """
    raw = json.loads(config.read_text(encoding="utf-8"))
    if raw.get("num_nextn_predict_layers"):
        raw["num_nextn_predict_layers"] = 0
    for key in [k for k in ("dtype", "torch_dtype") if k in raw] or ["dtype"]:
        raw[key] = dtype
    config.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(folder: Path, work: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
