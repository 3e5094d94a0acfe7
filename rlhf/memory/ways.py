"""How a role's weights come back to the device: a choice, pure, shared by plans and runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """Where weights come from."""

    ENGINE = "engine"
    """What the last reshard brought there, by the reverse plan; nothing of it is on the host."""
    MASTERS = "masters"
    """The optimizer's float32 masters, cast and gathered over data parallel ranks."""
    COPY = "host copy"
    """One copy in host memory, pinned beside a GPU."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What is possible for the weights of a role."""

    trained: bool
    is_float32: bool  # its weights are their own masters
    served: bool = False  # engines have them, each element exactly
    can_stay: bool = True
    """There is room for them from the end of a rollout to the next reshard. Only engines that
    serve bring them back, so they must be there until engines have them again."""


def choose_way(choices: Choices) -> Way:
    """The first that is possible: from the engine, from masters, from a copy.

    The first moves bytes between devices only, the second takes no host memory either but a cast
    and a gather, the third takes host memory of the size of the weights.
    """
    if choices.served and choices.can_stay:
        return Way.ENGINE
    if choices.trained and not choices.is_float32:
        return Way.MASTERS
    return Way.COPY
