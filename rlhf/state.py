"""What a checkpoint of a run holds: model, optimizer, random states."""

from __future__ import annotations

from pathlib import Path

from rlhf.mcore.checkpoint import load_state, save_state
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer

STATE_BYTES_PER_ELEMENT = 12
"""Float32 master and Adam's two moments."""


class TrainState:
    """The trained state of this rank. Saving and loading are collective over all ranks."""

    def __init__(self, model: TrainModel, optimizer: Optimizer, *, writes: bool) -> None:
        """``writes``: False on ranks whose weights another data parallel rank writes."""
        self._model = model
        self._optimizer = optimizer
        self._writes = writes

    def num_bytes(self) -> int:
        """Bytes that this rank will write, at most."""
        params = self._model.params.values() if self._writes else ()
        return sum(p.numel() * (p.element_size() + STATE_BYTES_PER_ELEMENT) for p in params)

    def save(self, folder: Path) -> None:
        """Write into an existing, empty folder.

        Raises:
            RuntimeError: a rank could not write; on every rank.
        """
        save_state(folder, self._model, self._optimizer)

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote, under any layout."""
        load_state(folder, self._model, self._optimizer)
