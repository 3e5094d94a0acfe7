"""The CUDA random generator, answered by the default CPU generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def replace_cuda_generator() -> None:
    """``torch.cuda`` seeds and states, and megatron's state tracker, act on the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.random.default_generator.manual_seed(int(value))

    for module in (torch.cuda, torch.cuda.random):
        target: Any = module
        target.get_rng_state, target.set_rng_state = get_state, set_state
        target.manual_seed = target.manual_seed_all = seed
    tensor_random: Any = megatron_random
    tensor_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    tensor_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
        torch.set_rng_state(state)
    )
    tensor_random.CudaRNGStatesTracker = _tracker_class(megatron_random)


def _tracker_class(megatron_random: Any) -> type:
    default_name = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
    outside = "default-rng"

    class CpuRNGStatesTracker(megatron_random.CudaRNGStatesTracker):  # type: ignore[misc]
        """Same states, same fork; without the check that the CPU generator did not move."""

        @contextlib.contextmanager
        def fork(self, name: str = default_name) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(f"random state {name!r} was not added to the tracker")
            outer = torch.get_rng_state()
            outer_name = self._current_state_name
            if outer_name != outside:
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                if outer_name != outside:
                    outer = self.states_[outer_name]
                torch.set_rng_state(outer)
                self._current_state_name = outer_name

    return CpuRNGStatesTracker
