"""A model in training on the grid of a case, for tests that stop and go on."""

from __future__ import annotations

from rlhf.config.schema import OptimizerSection
from tests.dist.parity_case import (
    CLIP,
    TEMPERATURE,
    Case,
    Loss,
    alignment,
    build,
    layout_of,
    micro_batches,
    sequences,
)

SETTINGS = OptimizerSection(lr=1e-3, clip_grad=CLIP, weight_decay=0.01, decay="linear")


class Training:
    """Model, optimizer and data; the grid is initialised here and is the caller's to shut down."""

    def __init__(
        self,
        rank: int,
        world: int,
        folder: str,
        case: Case,
        host_buffer_bytes: int | None = None,
    ) -> None:
        from rlhf.mcore import parallel
        from rlhf.mcore.optimizer import build_optimizer

        layout = layout_of(case, world)
        parallel.initialize(layout, timeout_s=60, seed=1)
        shape, _, self.model = build(rank, world, folder, case)
        self.optimizer = build_optimizer(self.model, SETTINGS, 10, host_buffer_bytes)
        rows = sequences(shape.vocab_size)
        mine = rows[layout.coord(rank).dp :: layout.dp]
        self.micro = micro_batches(mine, case.micro, alignment(case))
        self.loss = Loss(sum(int(r["mask"].sum()) for r in rows))

    def train(self, updates: int) -> list[tuple[float, float, float]]:
        """(loss, gradient norm, learning rate) of each update."""
        from rlhf.mcore.forward import train

        stats = [
            train(self.model, self.optimizer, self.micro, self.loss, TEMPERATURE)
            for _ in range(updates)
        ]
        return [(s.sums["loss"], s.grad_norm, s.lr) for s in stats]
