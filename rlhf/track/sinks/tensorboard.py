"""TensorBoard event files through tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from rlhf.track.sinks.sink import SampleRow


class TensorBoardSink:
    """Scalars by name, samples as a table of text. A resumed run hides the steps it repeats."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._writer = SummaryWriter(
            logdir=str(folder),
            purge_step=first_step or None,
            filename_suffix=f".from-step-{first_step}",
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        self.step(steps_done, metrics)

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text("samples", f"**{title}**\n\n{markdown_table(rows)}")

    def close(self) -> None:
        self._writer.close()


def markdown_table(rows: Sequence[SampleRow]) -> str:
    """Prompt, answer, expected, value; one line each, special characters escaped."""

    def cell(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "\\n")

    lines = ["| prompt | answer | expected | value |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {cell(r.prompt)} | {cell(r.answer)} | {cell(r.expected)} | {r.value:g} |" for r in rows
    ]
    return "\n".join(lines)
