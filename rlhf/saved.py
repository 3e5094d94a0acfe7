"""What lies in a run's folder of checkpoints, and whether a run can go on from it.

Read before any rank is started: standard library and config.json only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlhf.config.changes import changed_keys
from rlhf.config.faults import ConfigError
from rlhf.config.schema import Config
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.value_model import load_value_model

COMPLETE = "run.json"
MAY_CHANGE = ("max_position", "eos_token_ids", "num_mtp_layers")
"""Facts of a model that change neither its tensors nor what it computes from them."""


def select_resume(steps_complete: Sequence[int]) -> int | None:
    """The newest complete checkpoint, by number; no pointer file can be wrong about it."""
    return max(steps_complete, default=None)


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in ``run_dir/checkpoints``, ascending."""
    return sorted(
        int(d.name.removeprefix("step_"))
        for d in folder.glob("step_*")
        if (d / COMPLETE).is_file() and d.name.removeprefix("step_").isdigit()
    )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is in ``run_dir/checkpoints``."""
    return folder / f"step_{step:08d}"


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself."""
    record: dict[str, Any] = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
    return record


def trained_models(config: Config, actor: ModelShape) -> dict[str, dict[str, Any]]:
    """Role -> facts of its model, as a checkpoint records them.

    Raises:
        ValueError: the critic's folder is not usable.
    """
    shapes = {"actor": actor}
    if config.critic is not None and config.critic.path is not None:
        shapes["critic"] = load_value_model(config.critic.path, needs_head=False).shape
    elif config.critic is not None:
        shapes["critic"] = replace(actor, tied_embeddings=False)
    return {
        role: {k: v for k, v in asdict(shape).items() if k not in MAY_CHANGE}
        for role, shape in shapes.items()
    }


def check_same_models(config: Config, actor: ModelShape, source: str) -> None:
    """That the checkpoint from which the run will go on is one of its models.

    A role that the checkpoint lacks, or has beside them, is left to the loading.

    Raises:
        ConfigError: a model has other sizes, or computes otherwise.
    """
    folder = Path(config.run_dir) / "checkpoints"
    step = select_resume(complete_steps(folder))
    if step is None or config.checkpoint.resume == "never":
        return
    place = checkpoint_path(folder, step)
    saved = read_record(place).get("models", {})
    current = trained_models(config, actor)
    faults = []
    for role in sorted(saved.keys() & current.keys()):
        key = (
            "critic.path"
            if role == "critic" and config.critic and config.critic.path
            else "model.path"
        )
        changed = changed_keys(saved[role], current[role])
        if changed:
            faults.append(
                f"{source}:{key}: the {role} must be the one that was saved in {place}, from "
                f"which the run goes on, but it differs (saved -> now): {'; '.join(changed)}; "
                "give that model, or another run_dir"
            )
    if faults:
        raise ConfigError(faults)
