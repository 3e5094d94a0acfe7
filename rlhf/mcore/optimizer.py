"""Adam with its state sharded over data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer

from rlhf.config.schema import OptimizerSection
from rlhf.mcore.host_optimizer import HostState
from rlhf.mcore.model import TrainModel
from rlhf.mcore.schedule import learning_rate
from rlhf.platform.megatron_cpu.adam import provide_fused_adam


@dataclass(frozen=True, slots=True)
class StepStats:
    grad_norm: float  # before clipping, over all parameters
    ok: bool  # False: the norm was not finite and the update was left out
    lr: float


class State(Protocol):
    """Where the masters and moments of this rank's shards are."""

    @property
    def on_host(self) -> bool: ...

    def update(self) -> None:
        """Adam from gradients that are ready; the weights follow and are gathered, unless that
        overlaps the next forward pass. Collective over data parallel ranks."""
        ...

    def write_shards(self) -> None:
        """This rank's shards of the weights, from their masters."""
        ...

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, megatron's optimizers have masters and moments to save and load."""
        ...


class DeviceState:
    """Where megatron made it."""

    on_host = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def update(self) -> None:
        self._inner.step_with_ready_grads()

    def write_shards(self) -> None:
        for part in self._inner.chained_optimizers:
            part._copy_main_params_to_model_params()

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield


class Optimizer:
    """megatron's DistributedOptimizer with our schedule and clipping."""

    def __init__(
        self,
        model: TrainModel,
        inner: Any,
        state: State,
        cfg: OptimizerSection,
        total_updates: int,
    ) -> None:
        self.inner = inner
        self.state = state
        self.num_updates = 0
        self._model = model
        self._cfg = cfg
        self._total_updates = total_updates

    def zero_grad(self) -> None:
        """Also takes back the memory of gradients that were released."""
        self._model.take_gradients()
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self) -> StepStats:
        """One update from the gradients in the buffers. Collective over all ranks.

        With overlap the new parameters are complete on every rank only after
        :meth:`wait_params` or the next forward pass.
        """
        lr = learning_rate(self._cfg, self.num_updates, self._total_updates)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.num_updates += 1
        self.inner.prepare_grads()
        grad_norm = self._clip(self._cfg.clip_grad or math.inf)
        ok = math.isfinite(grad_norm)
        if ok:
            self.state.update()
        return StepStats(grad_norm=grad_norm, ok=ok, lr=lr)

    def _clip(self, limit: float) -> float:
        """The norm of all gradients together; experts cut over ranks have their own optimizer.

        It is where stages meet after their last backward computation.
        """
        with self._model.stage_waits.waiting():
            grad_norm = float(self.inner.get_grad_norm())
        for part in self.inner.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grads.clip_grad_by_total_norm_fp32(parameters, limit, grad_norm)
        return grad_norm

    def wait_params(self) -> None:
        """Make the parameters complete on every rank. Collective over data parallel ranks."""
        for chunk in self._model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @property
    def state_bytes(self) -> int:
        """Memory of masters and moments on the device of the weights."""
        device = self._model.device
        own = {p.untyped_storage().data_ptr() for p in self._model.params.values()}
        found = {}
        for part in self.inner.chained_optimizers:
            inner = part.optimizer
            masters = [p for group in inner.param_groups for p in group["params"]]
            moments = [v for state in inner.state.values() for v in state.values()]
            for tensor in (*masters, *moments):
                if torch.is_tensor(tensor) and tensor.device == device:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(size for place, size in found.items() if place not in own)

    @property
    def has_masters(self) -> bool:
        """The weights can be made again from here: float32 masters of them exist.

        A float32 model has none: its weights are what Adam updates.
        """
        return self._model.config.params_dtype != torch.float32

    def write_params(self) -> None:
        """The weights again, from their float32 masters; what they held before does not matter.

        Bit-equal to the weights after the last update or load. Expert biases and frozen weights
        (``train.moe.freeze_router``) are in no optimizer and stay as they are. Gradients are not
        touched, and may be released.

        Collective over the data and context parallel ranks that share shards: each writes its own,
        then they gather.

        Raises:
            RuntimeError: the model is float32 and has no masters.
        """
        if not self.has_masters:
            raise RuntimeError(
                "weights can be written from masters only if they are not the masters themselves: "
                "the model is float32; keep its weights, or set model.dtype to bfloat16"
            )
        for chunk in self._model.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:  # still writes what is to be replaced
                    group.start_param_sync(force_sync=True)
        self.state.write_shards()
        for chunk in self._model.chunks:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    model: TrainModel,
    cfg: OptimizerSection,
    total_updates: int,
    host_buffer_bytes: int | None = None,
) -> Optimizer:
    """The optimizer of a trainable model whose weights are loaded. Collective over all ranks.

    With a state on the host the gradients are released: its masters are made on the device first,
    one shard of what gradients take there.

    Args:
        total_updates: updates of the whole run, over which the learning rate decays.
        host_buffer_bytes: masters and moments are on the host, and at most so many bytes are taken
            on the device for each of two buffers at an update. None: all are on the device.
    """
    assert all(hasattr(chunk, "ddp_config") for chunk in model.chunks), "the model is frozen"
    provide_fused_adam()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        adam_beta1=cfg.beta1,
        adam_beta2=cfg.beta2,
        adam_eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        clip_grad=cfg.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=model.chunks[0].ddp_config.overlap_param_gather,
    )
    if host_buffer_bytes is not None:
        model.release_gradients()
    inner = get_megatron_optimizer(settings, model.chunks)
    state: State = DeviceState(inner)
    if host_buffer_bytes is not None:
        parts = inner.chained_optimizers
        state = HostState(parts, model.chunks, model.device, host_buffer_bytes)
    else:
        for sharded in inner.chained_optimizers:
            # moments exist from the start, so that a checkpoint before the first update can be
            # written
            sharded.init_state_fn(sharded.optimizer, settings)
    return Optimizer(model, inner, state, cfg, total_updates)
