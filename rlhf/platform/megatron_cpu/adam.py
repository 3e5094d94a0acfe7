"""What megatron's optimizers need without apex, transformer-engine or CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """apex's and transformer-engine's FusedAdam on torch's fused kernel.

    Same arguments and state: ``step`` lives in the parameter group. torch's Adam keeps it per
    parameter, and megatron's DistributedOptimizer can then neither load into a fresh optimizer nor
    read back a fully reshardable checkpoint.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction=False is not supported")
        self._kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        step = torch.tensor(float(group["step"]), device=params[0].device)
        self._kernel(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step] * len(params),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def provide_fused_adam() -> None:
    """Give megatron :class:`FusedAdam` when neither apex nor transformer-engine brings one."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    front: Any = megatron_optimizer
    distributed: Any = distrib_optimizer
    front.Adam = distributed.Adam = FusedAdam
    front.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def accept_cpu_tensor_types() -> None:
    """Optimizer code compares ``tensor.type()`` with ``'torch.cuda.FloatTensor'``.

    ``Tensor.type()`` answers so for CPU tensors, only while one of these functions runs.
    """
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    pretend = _PretendCuda()
    float16: Any = optimizer.Float16OptimizerWithFloat16Params
    float16.__init__ = pretend.during(float16.__init__)
    distributed: Any = distrib_optimizer.DistributedOptimizer
    for name in (
        "_build_model_and_main_param_groups",
        "_get_model_param_range_map",
        "load_state_dict",
        "state_dict",
    ):
        if name in vars(distributed):
            setattr(distributed, name, pretend.during(vars(distributed)[name]))
    clip = pretend.during(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer):  # the second imported the name from the first
        target: Any = module
        target.clip_grad_by_total_norm_fp32 = clip


class _PretendCuda:
    """Patches ``Tensor.type`` once; its answer changes inside wrapped functions only."""

    def __init__(self) -> None:
        self._depth = 0
        original = torch.Tensor.type

        def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            answer = original(tensor, *args, **kwargs)
            plain = isinstance(answer, str) and answer.startswith("torch.")
            if self._depth and plain and not answer.startswith("torch.cuda."):
                return "torch.cuda." + answer.removeprefix("torch.")
            return answer

        tensor_class: Any = torch.Tensor
        tensor_class.type = type_name

    def during(self, function: Any) -> Any:
        """``function`` (plain or classmethod) with the answer changed while it runs."""
        raw = function.__func__ if isinstance(function, classmethod) else function

        @functools.wraps(raw)
        def inner(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return raw(*args, **kwargs)
            finally:
                self._depth -= 1

        return classmethod(inner) if isinstance(function, classmethod) else inner
