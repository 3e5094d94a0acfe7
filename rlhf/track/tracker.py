"""Where a run's numbers go: the journal first, then every sink that the configuration names."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.track.accounts import ACCOUNTS, Accounts
from rlhf.track.journal import Journal
from rlhf.track.sinks.sink import Background, SampleRow, Sink

if TYPE_CHECKING:
    from rlhf.config.schema import TrackSection

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Longest wait for all sinks together at the end."""


class Tracker:
    """Writes on the rank that writes, does nothing on the others.

    ``log``, ``log_between`` and ``samples`` never wait for a sink and never raise because of one.
    The journal is the exception: a full disk raises.
    """

    def __init__(
        self,
        run_dir: Path,
        section: TrackSection,
        num_steps: int,
        *,
        is_writer: bool,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``config``: the resolved configuration, shown by SwanLab and wandb."""
        self._run_dir = run_dir
        self._section = section
        self._num_steps = num_steps
        self._is_writer = is_writer
        self._config = dict(config or {})
        self._journal: Journal | None = None
        self._accounts: Journal | None = None
        self._sinks: list[Background] = []

    def start(self, first_step: int) -> None:
        """Open everything; what an interrupted run wrote from ``first_step`` on is dropped."""
        if not self._is_writer:
            return
        self._journal = Journal(self._run_dir / "metrics.jsonl", first_step)
        self._accounts = Journal(self._run_dir / ACCOUNTS, first_step)
        self._sinks = [
            Background(name, make) for name, make in self._wanted_sinks(first_step).items()
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a training step."""
        if self._journal is None:
            return
        self._journal.write_step(step, metrics)
        self._post(lambda sink: sink.step(step, metrics))
        gap = metrics.get("gap/mean_abs", 0.0)
        if gap > self._section.gap_alarm:
            logger.warning(
                "step %d: rollout and trainer log-probabilities differ by %.3g on average, more "
                "than track.gap_alarm=%g; the engine may hold other weights",
                step,
                gap,
                self._section.gap_alarm,
            )

    def log_between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        """The line of an evaluation, or of a checkpoint, after ``steps_done`` steps."""
        if self._journal is None:
            return
        self._journal.write_between(steps_done, metrics)
        self._post(lambda sink: sink.between(steps_done, metrics))

    def account(self, step: int, accounts: Accounts, *, is_last: bool = False) -> None:
        """Seconds of all ranks by cause since the last such line; after the last step
        ``is_last``, and ``step`` is the number of steps that are done."""
        if self._accounts is None:
            return
        write = self._accounts.write_between if is_last else self._accounts.write_step
        write(step, accounts.as_columns())

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        """Answers to look at, in ``samples/<title>.jsonl``."""
        if self._journal is None or not rows:
            return
        path = self._run_dir / "samples" / f"{title}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [
            json.dumps(
                {
                    "prompt": r.prompt,
                    "answer": r.answer,
                    "expected": r.expected,
                    "value": r.value,
                },
                ensure_ascii=False,
            )
            for r in rows
        ]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self._post(lambda sink: sink.samples(title, rows))

    def text(self, name: str, text: str) -> None:
        """A file of its own in the run folder."""
        if self._journal is not None:
            (self._run_dir / name).write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Finish all sinks within CLOSE_TIMEOUT_S; may be called twice."""
        for journal in (self._journal, self._accounts):
            if journal is not None:
                journal.close()
        self._journal = self._accounts = None
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for sink in self._sinks:
            sink.close(deadline)
        self._sinks = []

    def _post(self, job: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            sink.post(job)

    def _wanted_sinks(self, first_step: int) -> dict[str, Callable[[], Sink]]:
        """Name -> constructor; libraries are imported in the sink's own thread."""
        section, config = self._section, self._config
        out: dict[str, Callable[[], Sink]] = {}
        if section.console:
            out["console"] = partial(_console, self._num_steps, first_step)
        if section.tensorboard:
            out["TensorBoard"] = partial(_tensorboard, self._run_dir / "tensorboard", first_step)
        if section.swanlab != "off":
            out["SwanLab"] = partial(
                _swanlab, self._run_dir / "swanlab", section.project, section.swanlab, config
            )
        if section.wandb != "off":
            out["wandb"] = partial(
                _wandb, self._run_dir / "wandb", section.project, section.wandb, config
            )
        return out


def _console(num_steps: int, first_step: int) -> Sink:
    from rlhf.track.sinks.console import ConsoleSink

    return ConsoleSink(num_steps, first_step)


def _tensorboard(folder: Path, first_step: int) -> Sink:
    from rlhf.track.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(folder, first_step)


def _swanlab(folder: Path, project: str, mode: Any, config: Mapping[str, Any]) -> Sink:
    from rlhf.track.sinks.swanlab import SwanLabSink

    return SwanLabSink(folder, project, mode, config)


def _wandb(folder: Path, project: str, mode: Any, config: Mapping[str, Any]) -> Sink:
    from rlhf.track.sinks.wandb import WandbSink

    return WandbSink(folder, project, mode, config)
