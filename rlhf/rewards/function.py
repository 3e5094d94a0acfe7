"""A user's function as a reward: ``file.py:function``.

def reward(prompt, text, trajectory) -> float | bool | rlhf.types.Score

It is called outside the main thread, so it can have no limit by ``signal.alarm``: its limit is
``data.reward_timeout_s``.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.config.faults import did_you_mean
from rlhf.types import Prompt, Score, Trajectory

CALL = "function(prompt, text, trajectory)"


class FunctionReward:
    """Loads the file once; what the function raises stops the run with its name."""

    def __init__(self, spec: str) -> None:
        """
        Raises:
            ValueError: no such file or function, a file that raises, another signature.
        """
        self.name = spec
        file, _, function = spec.rpartition(":")
        self._function = _load(Path(file), function, spec)

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        try:
            result = self._function(prompt, text, trajectory)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"reward {self.name} raised on prompt {prompt.uid}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(result, Score):
            return result
        if not isinstance(result, int | float):
            raise ValueError(
                f"reward {self.name}, prompt {prompt.uid}: must return a number or a Score, gave "
                f"{result!r:.80}"
            )
        return Score(result, {"correct": float(result >= 1)})


def _load(file: Path, function: str, spec: str) -> Callable[..., Any]:
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"reward {spec!r} must be file.py:function; no such file: {file}")
    module_spec = importlib.util.spec_from_file_location(f"rlhf_reward_{file.stem}", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"reward {spec!r}: {file} raised {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"reward {spec!r}: {file} has no function {function!r}; {did_you_mean(function, own)}"
        )
    try:
        inspect.signature(found).bind(None, "", None)
    except TypeError as error:
        raise ValueError(f"reward {spec!r} must be called as {CALL}: {error}") from None
    return found
