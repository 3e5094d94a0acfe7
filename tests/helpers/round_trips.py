"""Training shards and engines of one process, the receivers' loader calls in threads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.memory.released import ReleasedParams
from rlhf.reshard.execute import MoveStats
from rlhf.reshard.restore import kept_rows
from rlhf.reshard.round_trip import round_trip
from rlhf.reshard.schedule import RankPlan, rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub
from rlhf.rollout import receiver
from rlhf.weights import families
from rlhf.weights.model_shape import ModelShape
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shards import cut, dtypes_of, dummy_engine


def both_plans(
    shape: ModelShape,
    train: TrainLayout,
    rollout: RolloutLayout,
    topology: Topology,
    *,
    itemsize: int,
    area_bytes: int,
) -> tuple[list[RankPlan], list[RankPlan]]:
    """There and back, by rank."""
    there = families.reshard_spread(shape, train, rollout)
    back = families.restore_spread(shape, train, rollout)
    sizes: Any = {"itemsize": itemsize, "area_bytes": area_bytes}
    return (
        rank_plans(there, topology, **sizes),
        rank_plans(back, topology, local_area="outgoing", **sizes),
    )


def random_full(shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Full tensors that ``dtype`` holds exactly; float32."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).to(dtype).float()
        for name, size in families.full_shapes(shape).items()
    }


class RoundTrips:
    """All ranks of a model between two layouts; padding rows of the vocabulary are -1."""

    def __init__(
        self,
        shape: ModelShape,
        train: TrainLayout,
        rollout: RolloutLayout,
        dtype: torch.dtype,
        *,
        area_bytes: int = 4096,
        ranks_per_node: int = 2,
        limit_s: float = 10.0,
        full: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``full``: tensors of the checkpoint, random ones if None."""
        self.topology = Topology.of(train.world, ranks_per_node)
        self.ranks = range(train.world)
        hub = LocalHub(train.world)
        plans = both_plans(
            shape, train, rollout, self.topology, itemsize=dtype.itemsize, area_bytes=area_bytes
        )
        full = random_full(shape, dtype) if full is None else full
        self.held = [families.train_pieces(shape, train, r) for r in self.ranks]
        self.needed = [families.rollout_pieces(shape, rollout, r) for r in self.ranks]
        self.params = []
        for rank in self.ranks:
            dtypes = dtypes_of(self.held[rank], dtype)
            local = families.train_param_shapes(shape, train, rank)
            values = cut(full, self.held[rank], local)
            self.params.append({n: t.to(dtypes.get(n, dtype)) for n, t in values.items()})
        self.trips = [
            round_trip(
                plans[0][r],
                plans[1][r],
                self.params[r],
                hub.transport(r),
                dtype=dtype,
                limit_s=limit_s,
                padding_params=families.rollout_padding_params(shape, rollout, r),
            )
            for r in self.ranks
        ]
        self.engines = [
            dummy_engine(
                families.rollout_param_shapes(shape, rollout, r),
                dtype,
                dtypes_of(self.needed[r], dtype),
            )
            for r in self.ranks
        ]
        self.kept = [kept_rows(shape, train, rollout, r, self.params[r], dtype) for r in self.ranks]

    def load(self, rank: int, message: dict[str, Any]) -> None:
        receiver.load(self.engines[rank], [(json.dumps(message), torch.empty(0))])

    def open(self) -> None:
        for rank, trip in enumerate(self.trips):
            self.load(rank, trip.open_message())
            trip.reshard.window.wait_opened(10.0, no_poll)

    def reshard(self) -> list[MoveStats]:
        return self._run([trip.reshard for trip in self.trips])

    def restore(self) -> list[MoveStats]:
        return self._run([trip.restore for trip in self.trips])

    def release(self) -> list[ReleasedParams]:
        return [ReleasedParams(p, k) for p, k in zip(self.params, self.kept, strict=True)]

    def _run(self, movers: Sequence[Any]) -> list[MoveStats]:
        jobs = [partial(mover.run, no_poll) for mover in movers]
        loads = [partial(self.load, r, m.update_message()) for r, m in enumerate(movers)]
        return in_threads([*jobs, *loads])[: len(movers)]


def snapshot(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy that shares nothing."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def differing(params: dict[str, Tensor], before: dict[str, Tensor]) -> list[str]:
    """Names whose bits, dtype or shape are not those of before."""
    return [
        name
        for name, tensor in params.items()
        if tensor.dtype != before[name].dtype
        or tensor.shape != before[name].shape
        or not torch.equal(
            tensor.detach().contiguous().view(torch.uint8), before[name].view(torch.uint8)
        )
    ]
