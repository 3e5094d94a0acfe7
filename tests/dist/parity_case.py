"""One training run on one layout, and what is compared between layouts.

Weights come from one HF folder, data from one seed; :func:`run_cases` runs many layouts in one
launch, because importing megatron takes longer than any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.config.schema import ModelSection, OptimizerSection, TrainSection
from rlhf.dist.layout import TrainLayout, sequence_multiple
from rlhf.types import MicroBatch
from rlhf.weights.families import train_pieces
from rlhf.weights.hf_checkpoint import load_pieces
from rlhf.weights.model_shape import load_model_shape

NUM_UPDATES = 3
TEMPERATURE = 0.8
CLIP = 0.05


@dataclass(frozen=True)
class Case:
    """A layout and how the data is cut."""

    name: str
    train: dict[str, Any] = field(default_factory=dict)
    micro: int = 4  # per dp rank
    dtype: str = "float32"
    unpacked: bool = False  # one sequence per micro-batch
    pad: int = 0  # further padding behind each micro-batch, in multiples of the alignment
    against: str = "one rank"  # name of the case on one rank that it must equal


@dataclass(frozen=True)
class Outcome:
    """Of one rank. ``grads``: parameter -> flat ranges (start, values) of the first update."""

    losses: list[float]
    entropies: list[float]
    grad_norms: list[float]
    logprobs: np.ndarray  # [num_sequences, longest], zero where not trained or not on this rank
    grads: dict[str, list[tuple[int, np.ndarray]]]
    loads: list[np.ndarray]  # per update, [layers, experts]; empty without experts
    biases: dict[int, np.ndarray]  # layer -> expert biases after the last update


def sequences(vocab: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Twelve random sequences of up to 40 tokens, some of one prompt; the tail of each is trained.

    The third equals the second, and the fourth is a beginning of it.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(3, vocab, (count,), generator=generator)

    out = []
    for samples in (5, 3, 1, 1, 1, 1):
        prompt = draw(int(torch.randint(1, 21, (), generator=generator)))
        for _ in range(samples):
            answer = draw(int(torch.randint(3, 20, (), generator=generator)))
            tokens = torch.cat([prompt, answer])
            out.append({"tokens": tokens, "mask": torch.arange(len(tokens)) >= len(prompt)})
    out[2] = dict(out[1])
    out[3] = {key: value[:-2] for key, value in out[1].items()}
    for row in out:
        row["advantages"] = torch.randn(len(row["tokens"]), generator=generator)
    return out


def micro_batches(
    rows: Sequence[dict[str, torch.Tensor]], count: int, multiple: int, pad: int = 0
) -> list[MicroBatch]:
    """``rows`` in order over ``count`` micro-batches, each row padded to ``multiple``; no rows:
    padding only."""
    bounds = [i * len(rows) // count for i in range(count + 1)]
    return [_pack(rows[a:b], multiple, pad) for a, b in itertools.pairwise(bounds)]


def _pack(rows: Sequence[dict[str, torch.Tensor]], multiple: int, pad: int) -> MicroBatch:
    real = [len(r["tokens"]) for r in rows]
    lengths = [n + -n % multiple for n in real] + ([pad * multiple] if pad else [])
    lengths = lengths or [multiple]
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    joined = {
        "tokens": torch.zeros(sum(lengths), dtype=torch.long),
        "mask": torch.zeros(sum(lengths), dtype=torch.bool),
        "advantages": torch.zeros(sum(lengths)),
    }
    for row, start, length in zip(rows, borders.tolist(), real, strict=False):
        for key, values in joined.items():
            values[start : start + length] = row[key]
    return MicroBatch(
        tokens=joined["tokens"],
        positions=torch.cat([torch.arange(n) for n in lengths]),
        mask=joined["mask"],
        cu_seqlens=borders,
        columns={"advantages": joined["advantages"]},
    )


def run_cases(rank: int, world: int, folder: str, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Entry of a spawned rank."""
    from rlhf.platform.megatron_cpu import install

    install()
    return {case.name: run_case(rank, world, Path(folder), case) for case in cases}


def build(rank: int, world: int, folder: Path, case: Case, *, trainable: bool = True) -> Any:
    """(shape, layout, model with the folder's weights); the grid must be initialised."""
    from rlhf.mcore.model import build_model

    shape = load_model_shape(folder)
    layout = layout_of(case, world)
    train = TrainSection(logprob_chunk_tokens=32, **case.train)
    model = build_model(
        shape,
        layout,
        ModelSection(path=str(folder), dtype=case.dtype),
        train,
        trainable=trainable,
    )
    load_pieces(folder, train_pieces(shape, layout, rank), model.params)
    return shape, layout, model


LAYOUT_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "first", "last")


def layout_of(case: Case, world: int) -> TrainLayout:
    return TrainLayout(world, **{k: v for k, v in case.train.items() if k in LAYOUT_KEYS})


def alignment(case: Case) -> int:
    """What sequences are padded to; as for sequence parallelism wherever tp is above 1."""
    return sequence_multiple(case.train.get("tp", 1), case.train.get("cp", 1), True)


def run_case(rank: int, world: int, folder: Path, case: Case) -> Outcome:
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import logprobs, train
    from rlhf.mcore.optimizer import build_optimizer

    layout = layout_of(case, world)
    parallel.initialize(layout, timeout_s=60, seed=1)
    try:
        shape, layout, model = build(rank, world, folder, case)
        settings = OptimizerSection(lr=1e-3, clip_grad=CLIP, weight_decay=0.01, warmup_steps=1)
        optimizer = build_optimizer(model, settings, NUM_UPDATES)
        rows = sequences(shape.vocab_size)
        mine = list(range(layout.coord(rank).dp, len(rows), layout.dp))
        count = len(mine) if case.unpacked else case.micro
        micro = micro_batches([rows[i] for i in mine], count, alignment(case), case.pad)
        total = sum(int(r["mask"].sum()) for r in rows)
        scored = logprobs(model, micro, TEMPERATURE)
        losses, entropies, norms, grads, loads = [], [], [], {}, []
        for update in range(NUM_UPDATES):
            stats = train(model, optimizer, micro, Loss(total), TEMPERATURE)
            losses.append(stats.sums["loss"])
            entropies.append(stats.sums["entropy"])
            norms.append(stats.grad_norm)
            if stats.expert_loads is not None:
                loads.append(stats.expert_loads.numpy())
            if update == 0:
                grads = gradients(model, optimizer, stats.grad_norm)
        scored = by_sequence(scored, rows, mine, micro)
        return Outcome(losses, entropies, norms, scored, grads, loads, biases(model))
    finally:
        parallel.shutdown()


def biases(model: Any) -> dict[int, np.ndarray]:
    from rlhf.mcore.moe import routers

    held = [r for r in routers(model.decoders) if r.expert_bias is not None]
    return {router.layer_number - 1: router.expert_bias.numpy() for router in held}


@dataclass(frozen=True)
class Loss:
    """Policy gradient with an entropy term, divided by the trained tokens of all ranks."""

    num_tokens: int

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, columns: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * columns["advantages"]).sum() - 0.1 * entropy.sum()
        loss = loss / self.num_tokens
        return loss, {"loss": loss, "entropy": entropy.sum() / self.num_tokens}


def gradients(
    model: Any, optimizer: Any, grad_norm: float
) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Before clipping; the ranges of each parameter whose sum this rank holds."""
    names = {id(p): name for name, p in model.params.items()}
    scale = max(1.0, (grad_norm + 1e-6) / CLIP)
    out = {}
    for sharded in optimizer.inner.chained_optimizers:
        for params, shards in zip(
            sharded.model_fp32_groups + sharded.model_float16_groups,
            sharded.shard_fp32_groups + sharded.shard_fp32_from_float16_groups,
            strict=True,
        ):
            for param, shard in zip(params, shards, strict=True):
                start = sharded._get_model_param_range_map(param)["param"].start
                out[names[id(param)]] = [(start, (shard.grad.detach() * scale).numpy())]
    return out


def by_sequence(
    flat: torch.Tensor, rows: Any, mine: list[int], micro: list[MicroBatch]
) -> np.ndarray:
    out = np.zeros((len(rows), 40), np.float32)
    where = iter(mine)
    start = 0
    for m in micro:
        borders = m.cu_seqlens.tolist()
        for a, b in itertools.pairwise(borders):
            if m.mask[a:b].any():
                out[next(where), : b - a] = flat[start + a : start + b]
        start += len(m.tokens)
    return out
