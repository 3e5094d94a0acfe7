"""The terminal: a progress bar with reward and time left, or a plain line per step in a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from rlhf.track.sinks.sink import SampleRow

RECENT_STEPS = 10
SHOWN = (
    ("reward", "reward/mean", ".2f"),
    ("entropy", "rollout/entropy", ".2f"),
    ("grad", "optim/grad_norm", ".2g"),
    ("gap", "gap/mean_abs", ".1e"),
)


class ConsoleSink:
    """Shows the run on ``console`` (default: standard output)."""

    def __init__(self, num_steps: int, first_step: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._accuracy = ""
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._progress.start()
            # the process may be ended without a chance to show the cursor again
            self._console.show_cursor(True)
            self._task = self._progress.add_task("", total=num_steps, completed=first_step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if "seconds/step" in metrics:
            self._seconds.append(metrics["seconds/step"])
        shown = [f"{label} {metrics[key]:{form}}" for label, key, form in SHOWN if key in metrics]
        if self._progress is None:
            self._console.print(
                f"step {step + 1}/{self._num_steps}  {'  '.join(shown)}  {_phases(metrics)}  "
                f"{self._left(step)}",
                highlight=False,
                soft_wrap=True,
            )
            return
        text = f"{shown[0] if shown else ''}{self._accuracy}  {self._left(step)}"
        self._progress.update(self._task, completed=step + 1, description=text.strip())

    def between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        if "eval/accuracy" not in metrics:
            return
        accuracy = metrics["eval/accuracy"]
        self._accuracy = f"  held-out {accuracy:.2f}"
        self._console.print(
            f"held-out accuracy after {steps_done} steps: {accuracy:.3f}", highlight=False
        )

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        """Not shown; the run folder has them."""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _left(self, step: int) -> str:
        if not self._seconds:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f"{clock(mean * (self._num_steps - step - 1))} left"


def clock(seconds: float) -> str:
    """``59 s``, ``1:05 min``, ``2:03 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def _phases(metrics: Mapping[str, float]) -> str:
    """``11.2 s (update_actor 6.0, rollout 3.1, ...)``: the phases of a step by time."""
    phases = [
        (seconds, name.removeprefix("seconds/"))
        for name, seconds in metrics.items()
        if name.startswith("seconds/") and name != "seconds/step"
    ]
    largest = ", ".join(f"{name} {s:.1f}" for s, name in sorted(phases, reverse=True)[:4])
    total = metrics.get("seconds/step", sum(s for s, _ in phases))
    return f"{total:.1f} s ({largest})" if phases else f"{total:.1f} s"
