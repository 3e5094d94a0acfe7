"""What a checkpoint of a run holds: models, optimizers, random states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.mcore.checkpoint import load_state, save_state
from rlhf.roles.actor import Actor
from rlhf.roles.critic import Critic

STATE_BYTES_PER_ELEMENT = 12
"""Float32 master and Adam's two moments."""
CRITIC = "critic"
"""Folder of the critic's part; the actor's lies in the checkpoint's own."""


class TrainState:
    """The trained state of this rank. Saving and loading are collective over all ranks."""

    def __init__(self, actor: Actor, critic: Critic | None, *, writes: bool) -> None:
        """``writes``: False on ranks whose weights another data or context parallel rank writes."""
        self._actor = actor
        self._critic = critic
        self._writes = writes

    def num_bytes(self) -> int:
        """Bytes that this rank will write, at most."""
        if not self._writes:
            return 0
        params = (p for _, role in self._parts(Path()) for p in role.model.params.values())
        return sum(p.numel() * (p.element_size() + STATE_BYTES_PER_ELEMENT) for p in params)

    def save(self, folder: Path) -> None:
        """Write into an existing, empty folder.

        Raises:
            RuntimeError: a rank could not write; on every rank.
        """
        for place, role in self._parts(folder):
            place.mkdir(exist_ok=True)
            save_state(place, role.model, role.optimizer)

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote, under any layout. A critic that is not asked for stays
        unread.

        Raises:
            ValueError: the run that saved had no critic.
        """
        for place, role in self._parts(folder):
            if not place.is_dir():
                raise ValueError(
                    f"{folder} has no critic, whose part would be {place}: it was saved by a run "
                    "without one; give another run_dir"
                )
            load_state(place, role.model, role.optimizer)

    def _parts(self, folder: Path) -> Iterator[tuple[Path, Actor | Critic]]:
        yield folder, self._actor
        if self._critic is not None:
            yield folder / CRITIC, self._critic
