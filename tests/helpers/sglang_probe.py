"""What SGLang's own ``load_weights`` makes of coded numbers: the proof of what the probe traces."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.rollout.forks import Probe, in_forks
from rlhf.rollout.probe import Probed, trace


@dataclass(frozen=True)
class Coded(Probe):
    """Load coded tensors on the CPU in place of tracing."""

    dtype: str = "float32"
    draft: str = ""
    """Class of the model's draft model, to look at in the place of the model."""


@dataclass(frozen=True)
class Killed(Probe):
    """The process is killed in place of an answer."""


@dataclass(frozen=True)
class Live:
    """A parameter of an engine, to be pickled."""

    values: Any  # float32 array
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Live:
        """A copy."""
        return cls(tensor.detach().float().numpy(), str(tensor.dtype).removeprefix("torch."))


def look(probe: Probe) -> Probed | dict[str, Live]:
    """All kinds, so that one import of SGLang serves them."""
    if isinstance(probe, Killed):
        os.kill(os.getpid(), signal.SIGKILL)
    return live_parameters(probe) if isinstance(probe, Coded) else trace(probe)


def load_many(probes: Sequence[Coded]) -> list[dict[str, Live]]:
    """Live parameters by name, per probe."""
    return [outcome.get() for outcome in in_forks(live_parameters, probes)]


def live_parameters(probe: Coded) -> dict[str, Live]:
    """Live parameters by name; elements that nothing wrote are -1."""
    import torch

    from rlhf.rollout.sglang_model import build_model
    from rlhf.weights.families import full_shapes
    from rlhf.weights.model_shape import load_model_shape
    from tests.helpers.shards import coded_tensors, fp8_checkpoint, random_checkpoint

    overrides = {"architectures": [probe.draft]} if probe.draft else {}
    at = (probe.layout, probe.rank)
    model = build_model(probe.folder, *at, probe.dtype, "cpu", overrides)
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    shape = load_model_shape(probe.folder)
    full = coded_tensors(full_shapes(shape), torch.float32)
    if probe.layout.quantization == "block_fp8":
        full = fp8_checkpoint(shape)
    if probe.draft:
        full = random_checkpoint(shape, mtp=True)
    model.load_weights(iter(full.items()))
    return _live(model)


def loaded_parameters(probe: Probe) -> dict[str, Live]:
    """Live parameters by name, of the weights in the probe's folder; what nothing wrote is NaN."""
    from pathlib import Path

    from safetensors.torch import load_file

    from rlhf.rollout.sglang_model import build_model

    model = build_model(probe.folder, probe.layout, probe.rank, probe.dtype, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(iter(load_file(Path(probe.folder, "model.safetensors")).items()))
    return _live(model)


def _live(model: Any) -> dict[str, Live]:
    return {name: Live.of(parameter) for name, parameter in model.named_parameters()}
