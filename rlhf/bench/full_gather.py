"""What a reshard is measured against: every rank gets the whole model, bucket by bucket.

As other systems do it, as fast as it can be done here. A rank's shard is one contiguous buffer, as
Megatron keeps it, so that nothing is packed: ranges of it go straight into the collectives. The
shards of a pipeline stage are all-gathered over its ranks, which cuts the wire to what each rank
lacks; then each stage's bucket is broadcast over the pipeline, all stages at once. A rank copies
its own slices out of the gathered bucket, with views made beforehand, and drops the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.dist.layout import TrainLayout
from rlhf.reshard.pack import slices_of
from rlhf.reshard.schedule import Transfer

Shapes = Mapping[str, Sequence[int]]


class FlatShard:
    """A rank's parameters in one buffer, one after the other."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.flat = torch.zeros(_num_elements(shapes), dtype=dtype)
        self.params = dict(views_of(self.flat, shapes))


def views_of(flat: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Parameters that lie in ``flat`` in the order of ``shapes``."""
    at = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        yield name, flat[at : at + size].view(tuple(shape))
        at += size


def _num_elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def buckets_of(shapes: Shapes, limit: int) -> list[dict[str, Sequence[int]]]:
    """Parameters in order, at most ``limit`` elements together unless one alone has more."""
    out: list[dict[str, Sequence[int]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if out[-1] and used + size > limit:
            out.append({})
            used = 0
        out[-1][name] = shape
        used += size
    return out


class FullGather:
    """Fills ``targets`` on each rank; all ranks make one and call :meth:`run` (collectives)."""

    def __init__(
        self,
        layout: TrainLayout,
        shapes: Sequence[Shapes],
        flat: Tensor,
        transfers: Sequence[Transfer],
        targets: Mapping[str, Tensor],
        bucket_bytes: int,
    ) -> None:
        """Collective: makes groups of the default group's ranks.

        Args:
            shapes: by rank, of its training parameters; equal within a stage.
            flat: this rank's parameters, in that order.
            transfers: what this rank needs of which rank's parameter, its own included.
            bucket_bytes: of one rank's shard; a gathered bucket has as many from each rank.
        """
        rank, per_stage = dist.get_rank(), layout.world // layout.pp
        stages = [range(s * per_stage, (s + 1) * per_stage) for s in range(layout.pp)]
        self._stage, self._stages = rank // per_stage, stages
        self._peers = [stage[rank % per_stage] for stage in stages]
        inside = [dist.new_group(list(stage)) for stage in stages]
        across = [dist.new_group([stage[i] for stage in stages]) for i in range(per_stage)]
        self._inside, self._across = inside[self._stage], across[rank % per_stage]
        limit = bucket_bytes // flat.itemsize
        buckets = [buckets_of(shapes[stage[0]], limit) for stage in stages]
        sizes = [[_num_elements(bucket) for bucket in of_stage] for of_stage in buckets]
        areas = [flat.new_empty(max(of_stage) * per_stage) for of_stage in sizes]
        self._own = flat.split(sizes[self._stage])
        self._gathered = [
            [area[: size * per_stage] for size in of_stage]
            for area, of_stage in zip(areas, sizes, strict=True)
        ]
        sources = {
            (source, name): (i, view)
            for stage, of_stage, gathered in zip(stages, buckets, self._gathered, strict=True)
            for i, bucket in enumerate(of_stage)
            for source, part in zip(stage, gathered[i].chunk(per_stage), strict=True)
            for name, view in views_of(part, bucket)
        }
        self._copies: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(max(map(len, sizes)))]
        for t in transfers:
            number, view = sources[t.source, t.source_param]
            to = targets[t.param][slices_of(t.box)]
            self._copies[number].append((to, view[slices_of(t.source_box)].view(to.shape)))
        whole = sum(s * flat.itemsize for of_stage in sizes for s in of_stage) * per_stage
        self.received_bytes = whole - flat.nbytes
        """Over the wire, in one run on this rank."""

    def run(self) -> None:
        """Gather everything once; each bucket is dropped when the next one comes."""
        for number, copies in enumerate(self._copies):
            if number < len(self._own):
                mine = self._gathered[self._stage][number]
                dist.all_gather_into_tensor(mine, self._own[number], group=self._inside)
            works = [
                dist.broadcast(gathered[number], peer, group=self._across, async_op=True)
                for gathered, peer in zip(self._gathered, self._peers, strict=True)
                if number < len(gathered)
            ]
            for work in works:
                work.wait()
            for to, values in copies:
                to.copy_(values)
