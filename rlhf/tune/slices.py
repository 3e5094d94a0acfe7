"""Short real runs, through the launcher of ``rlhf train``, in a folder of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.schema import Config
from rlhf.tune.records import Round, SliceJob, read_rounds

LOOP = "rlhf.tune.measure:loop"
SETTINGS = (
    *("num_steps=1000000", "checkpoint.export_hf=false", "checkpoint.resume=never"),
    *("checkpoint.every=0", "data.eval=[]", "eval.every=0", "track.console=false"),
    *("track.swanlab=off", "track.wandb=off", "track.tensorboard=false"),
    *("optimizer.lr=1e-30", "optimizer.min_lr=0"),
)
"""A slice writes little, and its weights stay what they are."""
CRITIC_SETTINGS = (
    *("critic.optimizer.lr=1e-30", "critic.optimizer.min_lr=0", "critic.warmup_steps=0"),
)
LAST_LINES = 5


class SliceError(RuntimeError):
    """A slice did not end well; its text says how, and what it said last."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Where slices of one configuration run."""

    config_path: str
    overrides: tuple[str, ...]
    config: Config
    folder: Path

    def run(
        self, name: str, job: SliceJob, changes: Sequence[str] = ()
    ) -> tuple[list[Round], float]:
        """Rounds without the first, and seconds of everything.

        Raises:
            SliceError: the run failed.
        """
        folder = self.folder / name
        job.write(folder)
        ours = [f"run_dir={folder}", *SETTINGS, *changes]
        if self.config.critic is not None:
            ours += CRITIC_SETTINGS
        words = [self.config_path, *without_keys(self.overrides, ours), *ours]
        command = [sys.executable, "-m", "rlhf.cli", "train", *words, "--loop", LOOP]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:])
            raise SliceError(
                f"a slice of {self.config_path} with {' '.join(changes) or 'its own settings'} "
                f"ended with status {done.returncode}:\n{said}"
            )
        return read_rounds(folder), time.monotonic() - began


def without_keys(overrides: Sequence[str], others: Sequence[str]) -> list[str]:
    """Those of keys, and inside of sections, that the others do not set."""
    taken = [other.partition("=")[0] for other in others]
    return [
        word for word in overrides if not any(_inside(word.partition("=")[0], key) for key in taken)
    ]


def _inside(key: str, section: str) -> bool:
    return key == section or key.startswith(section + ".")
