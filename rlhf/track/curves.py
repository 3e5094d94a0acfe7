"""``curves.png``: what a run did, in four panels, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.track.journal import STEP, STEPS_DONE, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#a0aec0"
PHASES = 7
"""Phases with a colour of their own; the rest is drawn as one."""


def draw_curves(history: History, path: Path, title: str) -> None:
    """Write the picture (PNG, or SVG by the name's end)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    (learning, policy), (gap, seconds) = figure.subplots(2, 2)
    _draw_learning(learning, history)
    _draw_lines(
        policy,
        history,
        "Policy",
        [("rollout/entropy", "entropy (nats)", BLUE), ("policy/kl_ref", "KL to reference", GREEN)],
    )
    _draw_lines(
        gap,
        history,
        "|rollout - trainer log-probability|",
        [("gap/mean_abs", "mean", BLUE), ("gap/p99", "99th percentile", ORANGE)],
    )
    if any(y > 0 for line in gap.get_lines() for y in line.get_ydata()):
        gap.set_yscale("log")
    _draw_seconds(seconds, history)
    for axes in (learning, policy, gap, seconds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        # an answer of step s is of the weights after s steps, as is an evaluation at s
        axes.set_xlabel("step" if axes is seconds else "steps done")
        if axes is not seconds and axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _draw_learning(axes: Axes, history: History) -> None:
    axes.set_title("Reward and held-out accuracy", fontsize=10, loc="left")
    steps, reward = history.column("reward/mean")
    axes.plot(steps, reward, color=GREY, linewidth=1, label="reward, each step")
    axes.plot(steps, smoothed(reward), color=BLUE, linewidth=2, label="reward, smoothed")
    evals = [(r[STEPS_DONE], r["eval/accuracy"]) for r in history.between if "eval/accuracy" in r]
    if evals:
        axes.plot(
            [x for x, _ in evals],
            [y for _, y in evals],
            color=ORANGE,
            marker="o",
            markersize=5,
            linewidth=1.5,
            label="held-out accuracy, greedy",
        )


def _draw_lines(
    axes: Axes, history: History, title: str, lines: Sequence[tuple[str, str, str]]
) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    for name, label, color in lines:
        steps, values = history.column(name)
        if values:
            axes.plot(steps, values, color=color, linewidth=1.5, label=label)


def _draw_seconds(axes: Axes, history: History) -> None:
    axes.set_title("Seconds per phase", fontsize=10, loc="left")
    totals = phase_totals(history)
    shown = sorted(totals, key=lambda name: -totals[name])
    colors = ["#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#d69e2e", "#319795"]
    rows = seconds_by_step(history)
    bottom = [0.0] * len(rows)
    groups = [[name] for name in shown[:PHASES]]
    if shown[PHASES:]:
        groups.append(shown[PHASES:])
        colors = [*colors[:PHASES], GREY]
    for names, color in zip(groups, colors, strict=False):
        heights = [sum(row.get(n, 0.0) for n in names) for row in rows.values()]
        label = names[0] if len(names) == 1 else "other"
        axes.bar(list(rows), heights, bottom=bottom, width=0.9, color=color, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    if groups:  # beside the bars, in the order in which they are stacked
        axes.legend(
            frameon=False, fontsize=8, reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )


def seconds_by_step(history: History) -> dict[float, dict[str, float]]:
    """Step -> phase -> seconds; a step's own total is left out.

    What follows a step is counted with it, what precedes the first one with the first.
    """
    rows: dict[float, dict[str, float]] = {r[STEP]: {} for r in history.steps}
    for record in [*history.steps, *history.between]:
        step = record.get(STEP, record.get(STEPS_DONE, 0) - 1)
        row = rows.setdefault(max(step, min(rows, default=step)), {})
        for name, value in record.items():
            if name.startswith("seconds/") and name != "seconds/step" and value is not None:
                phase = name.removeprefix("seconds/")
                row[phase] = row.get(phase, 0.0) + value
    return rows


def phase_totals(history: History) -> dict[str, float]:
    """Phase -> seconds over the whole run."""
    totals: dict[str, float] = {}
    for row in seconds_by_step(history).values():
        for phase, seconds in row.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    return totals


def smoothed(values: Sequence[float], half_width: int = 2) -> list[float]:
    """Centred moving mean; narrower at the ends."""
    out = []
    for i in range(len(values)):
        width = min(half_width, i, len(values) - 1 - i)
        window = values[i - width : i + width + 1]
        out.append(sum(window) / len(window))
    return out
