"""Adam with its state sharded over data parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer

from rlhf.config.schema import OptimizerSection
from rlhf.mcore.model import TrainModel
from rlhf.mcore.schedule import learning_rate
from rlhf.platform.megatron_cpu.adam import provide_fused_adam


@dataclass(frozen=True, slots=True)
class StepStats:
    grad_norm: float  # before clipping, over all parameters
    ok: bool  # False: the norm was not finite and the update was left out
    lr: float


class Optimizer:
    """megatron's DistributedOptimizer with our schedule and clipping."""

    def __init__(
        self, model: TrainModel, inner: Any, cfg: OptimizerSection, total_updates: int
    ) -> None:
        self.inner = inner
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
            self.inner.step_with_ready_grads()
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
        for part in self.inner.chained_optimizers:
            part._copy_main_params_to_model_params()
        for chunk in self._model.chunks:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(model: TrainModel, cfg: OptimizerSection, total_updates: int) -> Optimizer:
    """The optimizer of a trainable model whose weights are loaded. Collective over all ranks.

    ``total_updates``: updates of the whole run, over which the learning rate decays.
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
    inner = get_megatron_optimizer(settings, model.chunks)
    for sharded in inner.chained_optimizers:
        # moments exist from the start, so that a checkpoint before the first update can be written
        sharded.init_state_fn(sharded.optimizer, settings)
    return Optimizer(model, inner, cfg, total_updates)
