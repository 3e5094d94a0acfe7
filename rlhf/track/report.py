"""What a user sees when a run is over: a table, and one line that says whether it learned."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf.track.accounts import ACCOUNTS, account_table, added, read_accounts
from rlhf.track.curves import draw_curves, phase_totals
from rlhf.track.journal import History, read_journal
from rlhf.track.sinks.console import clock


def finish(run_dir: Path, out: Console) -> None:
    """Draw ``curves.png`` and print the tables; the last line printed is :func:`accuracy_line`."""
    history = read_journal(run_dir / "metrics.jsonl")
    if history.steps:
        draw_curves(history, run_dir / "curves.png", run_dir.name)
    if history.steps:
        out.print(phase_table(history))
        out.print(result_table(history))
    line = accuracy_line(history)
    if line is not None:
        out.print(line, highlight=False, soft_wrap=True)


def show(run_dir: Path, out: Console) -> None:
    """Print what is known of a run, while it goes on or later.

    Raises:
        ValueError: the folder is not that of a run that has done a step.
    """
    whole = added(read_accounts(run_dir / ACCOUNTS))
    history = read_journal(run_dir / "metrics.jsonl")
    out.print(phase_table(history))
    out.print(account_table(whole))
    out.print(result_table(history))
    line = accuracy_line(history)
    if line is not None:
        out.print(line, highlight=False, soft_wrap=True)


def as_dict(run_dir: Path) -> dict[str, object]:
    """The accounts of a run as a record: seconds of each rank by cause, in all.

    Raises:
        ValueError: as :func:`show`.
    """
    whole = added(read_accounts(run_dir / ACCOUNTS))
    return {
        "steps": whole.num_steps,
        "wall_s": list(whole.wall_s),
        "causes_s": {cause: list(seconds) for cause, seconds in whole.causes.items()},
        "shares": whole.shares(),
        "phases_s": phase_totals(read_journal(run_dir / "metrics.jsonl")),
    }


def phase_table(history: History) -> Table:
    """Seconds per phase: per step, in all, share."""
    table = Table(title="time", title_justify="left", title_style="bold")
    for name in ("phase", "s / step", "in all", "share", "tokens/s"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    totals = phase_totals(history)
    whole = sum(totals.values()) or 1.0
    for phase, seconds in sorted(totals.items(), key=lambda pair: -pair[1]):
        _, rates = history.column(f"tokens_per_s/{phase}")
        table.add_row(
            phase,
            f"{seconds / max(1, len(history.steps)):.2f}",
            clock(seconds),
            f"{seconds / whole:.0%}",
            f"{sum(rates) / len(rates):.0f}" if rates else "",
        )
    return table


def result_table(history: History) -> Table:
    """First and last value of what a run is about."""
    table = Table(title="result", title_justify="left", title_style="bold")
    for name in ("", "first", "last"):
        table.add_column(name, justify="right" if name else "left")
    accuracies = [r["eval/accuracy"] for r in history.between if "eval/accuracy" in r]
    if accuracies:
        table.add_row("held-out accuracy", f"{accuracies[0]:.3f}", f"{accuracies[-1]:.3f}")
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("entropy", "rollout/entropy", ".3f"),
        ("answer tokens", "rollout/answer_tokens", ".1f"),
        ("rollout-trainer gap", "gap/mean_abs", ".1e"),
    ):
        _, values = history.column(name)
        if values:
            table.add_row(label, f"{values[0]:{form}}", f"{values[-1]:{form}}")
    return table


def accuracy_line(history: History) -> str | None:
    """``accuracy 0.50 -> 0.77 (held-out, greedy, 64 items)``; None without evaluations."""
    evals = [r for r in history.between if "eval/accuracy" in r]
    if not evals:
        return None
    first, last = evals[0]["eval/accuracy"], evals[-1]["eval/accuracy"]
    items = f", {last_items:.0f} items" if (last_items := evals[-1].get("eval/items")) else ""
    return f"accuracy {first:.2f} -> {last:.2f} (held-out, greedy{items})"
