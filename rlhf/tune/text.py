"""What ``rlhf tune`` prints."""

from __future__ import annotations

from pathlib import Path

from rlhf.tune.calibrate import Calibration
from rlhf.tune.tuner import Tried, Tuning


def tuning_text(found: Tuning, calibration: Calibration, out: Path, file: Path) -> str:
    """Tables of settings and of phases, and what was written."""
    lines: list[str] = []
    for tried in found.tried:
        lines += [*_setting_lines(tried), ""]
    lines += [f"{s.key}: {s.current:g}; nothing to try: {s.why_none}" for s in found.untried]
    lines += [f"{key}: no time was left to try it; raise --minutes" for key in found.out_of_time]
    lines += [f"{r.setting}={r.value:g} refused: {r.why}" for r in found.refused]
    lines += ["", *_phase_lines(calibration), "", *_verdict(found)]
    lines += [f"written: {out} (configuration), {file} (rlhf plan --calibration)"]
    return "\n".join(lines)


def _setting_lines(tried: Tried) -> list[str]:
    head = f"{tried.setting.key:<34}{'time':>8}{'+-':>8}{'rounds':>8}"
    rows = []
    for c in tried.table:
        mark = " kept" if c.value == tried.kept.value else ""
        is_current = " (now)" if c.value == tried.setting.current else ""
        name = f"  {c.value:g}{is_current}"
        rows.append(f"{name:<34}{c.ratio:>8.3f}{c.error:>8.3f}{c.num_rounds:>8}{mark}")
    return [head, "-" * len(head), *rows]


def _phase_lines(calibration: Calibration) -> list[str]:
    fitted = calibration.fitted
    head = f"{'seconds by the new constants':<34}{'predicted':>10}{'measured':>10}{'error':>8}"
    rows = [
        f"{name:<34}{fitted.predicted[name]:>10.3f}{seconds:>10.3f}{fitted.errors[name]:>+8.0%}"
        for name, seconds in fitted.measured.items()
    ]
    return [head, "-" * len(head), *rows]


def _verdict(found: Tuning) -> list[str]:
    if not found.overrides:
        return [
            f"nothing to gain: {found.step_s:.2f} s per step, and no tried value is clearly faster"
        ]
    gain = 1 - found.tuned_step_s / found.step_s
    return [
        f"{found.step_s:.2f} -> {found.tuned_step_s:.2f} s per step, {gain:.0%} less, with "
        f"{' '.join(found.overrides)}"
    ]
