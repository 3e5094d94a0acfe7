"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from rlhf.track.sinks.sink import SampleRow


class WandbSink:
    """One wandb run, with our step as the axis: evaluations may come before their step's line."""

    def __init__(
        self,
        folder: Path,
        project: str,
        mode: Literal["online", "offline"],
        config: Mapping[str, Any],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=folder.parent.name,
            mode=mode,
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        self.step(steps_done, metrics)

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        data = [[title, r.prompt, r.answer, r.expected, r.value] for r in rows]
        columns = ["title", "prompt", "answer", "expected", "value"]
        self._run.log({"samples": wandb.Table(columns=columns, data=data)})

    def close(self) -> None:
        self._run.finish()
