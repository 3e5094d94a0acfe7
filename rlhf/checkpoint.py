"""Checkpoints of a run: complete or absent, never half; which to resume, which to delete.

run_dir/checkpoints/step_00000020/    model, optimizer, RNG (Megatron's distributed format)
                                 .../run.json   steps done, configuration, models; written last
run_dir/checkpoints/.writing-00000030/   a save in progress, or what a killed one left
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf.config.changes import changed_keys
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.saved import COMPLETE, checkpoint_path, complete_steps, read_record, select_resume
from rlhf.types import Phase

logger = logging.getLogger(__name__)

SPACE_MARGIN = 1.05


def select_delete(steps_complete: Sequence[int], keep: int) -> list[int]:
    """Steps to delete, oldest first, once a new checkpoint is among ``steps_complete``."""
    return sorted(steps_complete)[: max(0, len(steps_complete) - keep)]


def size_text(num_bytes: float) -> str:
    """``3.20 GiB``, below one GiB ``0.01 MiB``."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"


class State(Protocol):
    """What a checkpoint holds: model, optimizer and RNG of this rank."""

    def num_bytes(self) -> int:
        """Bytes that this rank will write."""
        ...

    def save(self, folder: Path) -> None:
        """Collective over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Collective over all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    every: int
    keep: int
    num_steps: int


class Checkpoints:
    """Saves and loads on all ranks together."""

    def __init__(
        self,
        *,
        folder: Path,
        state: State,
        policy: Policy,
        group: PhaseGroup,
        gate: PhaseGate,
        config: dict[str, Any],
        models: dict[str, Any],
        on_saved: Callable[[int], None],
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        """
        Args:
            config: of this run; what differs from that of a checkpoint is said.
            models: facts of the trained models, see :func:`rlhf.saved.trained_models`.
            on_saved: called with the steps done after each save, on every rank.
        """
        self.folder = folder
        self._state = state
        self._policy = policy
        self._group = group
        self._gate = gate
        self._config = config
        self._models = models
        self._on_saved = on_saved
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)
        self.steps_done = 0
        self.last_saved: int | None = None

    def resume(self, mode: str) -> int:
        """Load the newest complete checkpoint; returns the number of steps done, 0 if none.

        Args:
            mode: ``auto``, ``never`` (start from the model), ``must`` (there has to be one).

        Collective over all ranks; rank 0's view of the folder decides.
        """
        found = select_resume(complete_steps(self.folder)) if mode != "never" else None
        step = self._group.gather(found)[0]
        if step is None:
            if mode == "must":
                raise ValueError(
                    f"checkpoint.resume=must, but {self.folder} holds no complete checkpoint"
                )
            return 0
        if self._group.world.is_first:
            self._remark_changes(step)
        self._state.load(self.path(step))
        self.steps_done = self.last_saved = step
        return step

    def _remark_changes(self, step: int) -> None:
        """Say which settings differ from those that the checkpoint was saved under."""
        record = read_record(self.path(step))
        changed = changed_keys(record.get("config", self._config), self._config)
        if changed:
            logger.warning(
                "going on after step %d of %s with other settings than it was saved with: %s",
                step,
                self.folder,
                "; ".join(changed),
            )

    def refuse_others(self) -> None:
        """For a run that must not go on from a checkpoint: its folder may hold none.

        Raises:
            ValueError: it does; they would be mixed up with the new ones. Collective, all ranks.
        """
        found = self._group.gather(complete_steps(self.folder))[0]
        if found:
            raise ValueError(
                f"checkpoint.resume=never, but {self.folder} holds checkpoints of steps "
                f"{', '.join(map(str, found))}; give another run_dir or move them away"
            )

    def path(self, step: int) -> Path:
        return checkpoint_path(self.folder, step)

    def maybe_save(self, steps_done: int) -> None:
        """Save if due after ``steps_done`` steps. Collective over all ranks."""
        self.steps_done = steps_done
        last = steps_done == self._policy.num_steps
        due = self._policy.every and steps_done % self._policy.every == 0
        if last or due:
            self.save()

    def save(self) -> None:
        """Save the state after ``steps_done`` steps unless it is saved. Collective, all ranks.

        The new one is written aside and renamed when all ranks have written; only then are old
        ones deleted. On any error what was written is removed and the previous one stays.

        Raises:
            RuntimeError: no space, or a rank could not write; raised on every rank.
        """
        if self.last_saved == self.steps_done:
            return
        with self._gate.phase(Phase.SAVE, self.steps_done):
            writing = self.folder / f".writing-{self.steps_done:08d}"
            self._prepare(writing)
            error = None
            try:
                self._state.save(writing)
            except (OSError, RuntimeError, ValueError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            self._agree(error, writing)
            if self._group.world.is_first:
                self._finish(writing)
            self._group.gather(None)
            self.last_saved = self.steps_done
        self._on_saved(self.steps_done)

    def _prepare(self, writing: Path) -> None:
        """Room for all ranks' bytes; leftovers of killed saves gone. Collective."""
        need = sum(self._group.gather(self._state.num_bytes()))
        error = None
        if self._group.world.is_first:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in self.folder.glob(".writing-*"):
                    shutil.rmtree(old)
                free = self._free_bytes(self.folder)
                if free < need * SPACE_MARGIN:
                    error = (
                        f"a checkpoint needs {size_text(need * SPACE_MARGIN)} in {self.folder}, "
                        f"{size_text(free)} are free; free some, or lower "
                        f"checkpoint.keep={self._policy.keep}"
                    )
                else:
                    writing.mkdir()
            except OSError as caught:
                error = f"{type(caught).__name__}: {caught}"
        self._agree(error, writing)

    def _agree(self, error: str | None, writing: Path) -> None:
        """Raise on every rank if any rank has an error. Collective."""
        errors = {r: e for r, e in enumerate(self._group.gather(error)) if e}
        if not errors:
            return
        if self._group.world.is_first:
            shutil.rmtree(writing, ignore_errors=True)
        self._group.gather(None)  # nobody goes on while it is there
        rank, text = next(iter(errors.items()))
        kept = f"step {self.last_saved}" if self.last_saved is not None else "none"
        raise RuntimeError(
            f"checkpoint of step {self.steps_done} failed on rank {rank}: {text}; "
            f"last complete checkpoint: {kept}"
        )

    def _finish(self, writing: Path) -> None:
        record = {
            "steps_done": self.steps_done,
            "config": self._config,
            "models": self._models,
        }
        with (writing / COMPLETE).open("w", encoding="utf-8") as f:
            json.dump(record, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        final = self.path(self.steps_done)
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        for step in select_delete(complete_steps(self.folder), self._policy.keep):
            shutil.rmtree(self.path(step))
