"""A reward without meaning, for want of data: random models earn unlike amounts of it."""

from __future__ import annotations

import zlib

from rlhf.types import Prompt, Trajectory


def score(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A number in [0, 1) that only the answer's tokens decide."""
    tokens = ",".join(map(str, trajectory.tokens))
    return zlib.crc32(tokens.encode()) / 2**32
