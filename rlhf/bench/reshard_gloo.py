"""``make bench-reshard-gloo``: moving weights by plan against gathering the whole model.

Four processes joined by gloo hold a Qwen3-MoE as training does (tp 2, pp 2, ep 2) and fill the four
shards of one engine (tp 4, ep 4). Both ways write the same tensors, in turn in the same run:

- the plan, through the mover that a run uses, with its staging areas;
- a full gather (``full_gather``), with buckets of the size at which it was fastest.

Bytes are those that ranks receive from others. Both results are compared, bit by bit, with the
engine's slices of the full tensors. In a full gather each rank lacks 3/4 of the model. By the plan
each lacks its quarter, less what it holds of that: half of it on two ranks, nothing on the others.
So the full gather has 4 x 3/4 = 3 models to move and the plan 4 x 1/4 x 3/4 = 3/4 of one: 4 times
as many bytes for these layouts, whoever plans.

A way takes as long as its slowest rank, from a barrier on; the best of several counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from rlhf.bench.full_gather import FlatShard, FullGather
from rlhf.bench.result import Gate, finish
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.bounds import lower_bound_bytes
from rlhf.reshard.execute import Mover
from rlhf.reshard.pack import slices_of
from rlhf.reshard.plan import plan
from rlhf.reshard.schedule import RankPlan, rank_plan
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import DistTransport
from rlhf.weights.families import (
    full_shapes,
    reshard_spread,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.model_shape import ModelShape, parse_model_shape
from rlhf.weights.piece import Piece
from rlhf.weights.spread import Spread

WORLD = 4
TRAIN = TrainLayout(WORLD, tp=2, pp=2, ep=2, etp=1)
ROLLOUT = RolloutLayout(WORLD, tp=4, ep=4)
DTYPE = torch.bfloat16
LIMIT_S = 60.0
WHOLE_BYTES = 1 << 40
"""An area in which nothing needs to be cut."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run; sizes are elements."""

    hidden: int
    layers: int
    experts: int
    area_bytes: int
    bucket_bytes: int
    repetitions: int

    @property
    def shape(self) -> ModelShape:
        """A Qwen3-MoE; expert FFNs are a quarter as wide as the model, as those of 30B-A3B."""
        return parse_model_shape(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "vocab_size": 8 * self.hidden,
                "hidden_size": self.hidden,
                "intermediate_size": 3 * self.hidden,
                "moe_intermediate_size": self.hidden // 4,
                "num_experts": self.experts,
                "num_experts_per_tok": 8,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.hidden // 64,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
            }
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--area-mib", type=float, default=16.0, help="staging area of the plan")
    parser.add_argument("--bucket-mib", type=float, default=8.0, help="full gather, of a shard")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    settings = Settings(
        hidden=args.hidden,
        layers=args.layers,
        experts=args.experts,
        area_bytes=int(args.area_mib * 2**20),
        bucket_bytes=int(args.bucket_mib * 2**20),
        repetitions=args.repetitions,
    )
    figures = measure(settings)
    return finish("reshard-gloo", figures, gates_of(figures))


def gates_of(figures: Mapping[str, float]) -> list[Gate]:
    return [
        Gate("plan bytes / lower bound", figures["plan_bytes"] / figures["bound_bytes"], "<=", 1.0),
        Gate("full gather bytes / plan bytes", figures["bytes_ratio"], ">=", 3.9),
        Gate("elements that differ", figures["wrong"], "<=", 0),
        Gate("full gather seconds / plan seconds", figures["wall_ratio"], ">=", 2.0),
    ]


def measure(settings: Settings) -> dict[str, float]:
    """Both ways on four processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, settings), nprocs=WORLD)
        ranks = [json.loads(_result(folder, rank).read_text("utf-8")) for rank in range(WORLD)]
    made = plan(_spread(settings), Topology.of(WORLD, WORLD), DTYPE.itemsize, settings.area_bytes)
    plan_bytes = sum(r["plan_bytes"] for r in ranks)
    full_bytes = sum(r["full_bytes"] for r in ranks)
    plan_s, full_s = (
        min(map(max, zip(*(r[name] for r in ranks), strict=True))) for name in ("plan_s", "full_s")
    )
    shapes = full_shapes(settings.shape).values()
    return {
        "model_bytes": sum(torch.Size(s).numel() for s in shapes) * DTYPE.itemsize,
        "bound_bytes": lower_bound_bytes(made),
        "plan_bytes": plan_bytes,
        "full_gather_bytes": full_bytes,
        "bytes_ratio": full_bytes / plan_bytes,
        "rounds": ranks[0]["rounds"],
        "wrong": sum(r["wrong"] for r in ranks),
        "repetitions": settings.repetitions,
        "plan_s": plan_s,
        "full_gather_s": full_s,
        "wall_ratio": full_s / plan_s,
    }


def _spread(settings: Settings) -> Spread:
    return reshard_spread(settings.shape, TRAIN, ROLLOUT)


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.json"


def _rank(rank: int, folder: str, settings: Settings) -> None:
    """One process."""
    torch.set_num_threads(1)
    # newer versions have another name for all_gather_into_tensor, older ones only this one
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    me = _Rank(rank, settings)
    ways = {"plan": me.move, "full": me.gather}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    wrong = 0
    for repetition in range(settings.repetitions + 1):  # the first one warms up
        for name, way in ways.items():
            for tensor in me.targets.values():
                tensor.zero_()
            dist.barrier()
            begun = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begun)
            if repetition == settings.repetitions:
                wrong += me.num_wrong()
    result = {
        "plan_bytes": me.moved_bytes,
        "full_bytes": me.full_gather.received_bytes,
        "rounds": len(me.mover.plan.rounds),
        "wrong": wrong,
        **{f"{name}_s": taken[1:] for name, taken in seconds.items()},
    }
    _result(folder, rank).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    """A rank's training shard, its engine shard to be filled, and both ways to fill it."""

    def __init__(self, rank: int, settings: Settings) -> None:
        shape = settings.shape
        held = [train_param_shapes(shape, TRAIN, r) for r in range(WORLD)]
        needed = rollout_param_shapes(shape, ROLLOUT, rank)
        shard = FlatShard(held[rank], DTYPE)
        self.targets = {name: torch.zeros(tuple(s), dtype=DTYPE) for name, s in needed.items()}
        self._wanted = {name: torch.zeros_like(t) for name, t in self.targets.items()}
        _fill(shard.params, train_pieces(shape, TRAIN, rank), shape)
        _fill(self._wanted, rollout_pieces(shape, ROLLOUT, rank), shape)
        self.moved_bytes = 0
        self.mover = Mover(
            _plan(settings, rank, settings.area_bytes),
            shard.params,
            DistTransport(),
            self.targets,
            dtype=DTYPE,
            limit_s=LIMIT_S,
        )
        arriving = [r.arriving for r in _plan(settings, rank, WHOLE_BYTES).rounds]
        self.full_gather = FullGather(
            TRAIN,
            held,
            shard.flat,
            [placed.transfer for parts in arriving for placed in parts],
            self.targets,
            settings.bucket_bytes,
        )

    def move(self) -> None:
        """By the plan."""
        self.moved_bytes = self.mover.run(_no_poll).received_bytes

    def gather(self) -> None:
        """By a full gather."""
        self.full_gather.run()

    def num_wrong(self) -> int:
        """Elements of the targets with another bit pattern than the full tensors' slices."""
        return sum(
            int((got.view(torch.int16) != self._wanted[name].view(torch.int16)).sum())
            for name, got in self.targets.items()
        )


def _plan(settings: Settings, rank: int, area_bytes: int) -> RankPlan:
    topology = Topology.of(WORLD, WORLD)
    return rank_plan(
        _spread(settings), topology, rank, itemsize=DTYPE.itemsize, area_bytes=area_bytes
    )


def _fill(params: Mapping[str, Tensor], pieces: Sequence[Piece], shape: ModelShape) -> None:
    """Random full tensors, the same on every rank, cut by ``pieces``; one at a time."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    sizes = full_shapes(shape)
    for name, parts in by_tensor.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(tuple(sizes[name]), generator=generator, dtype=DTYPE)
        for piece in parts:
            view = params[piece.param][slices_of(piece.local)]
            view.copy_(full[slices_of(piece.region)].reshape(view.shape))


def _no_poll() -> None:
    """Nothing to look after while waiting."""


if __name__ == "__main__":
    sys.exit(main())
