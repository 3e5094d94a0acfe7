"""Memory of a role beside its weights: gradients, which are lost when they are away."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.mcore.model import TrainModel
from rlhf.memory.table import Region, Regions


class Gradients:
    """The gradient buffers of a model; zero when they are back."""

    def __init__(self, region: Region, model: TrainModel) -> None:
        self.regions: Regions = frozenset({region})
        self._region = region
        self._model = model

    def release(self, regions: Regions, *, changed: bool) -> None:
        self._model.release_gradients()

    def settle(self) -> None:
        """They were given up at once."""

    def blocks(self) -> str:
        return ""

    def restore(self, regions: Regions) -> None:
        self._model.take_gradients()

    def resident_bytes(self) -> Mapping[Region, int]:
        return {self._region: self._model.gradient_bytes}
