"""apex's extension that adds a weight gradient to its float32 buffer inside the matrix product."""

from __future__ import annotations

from typing import Any

import torch


class FusedWeightGradient:
    """What megatron calls of ``fused_weight_gradient_mlp_cuda``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """main_grad [o, i] += grad_output [t, o].T @ inputs [t, i]"""
        if inputs.dtype == torch.float32:
            main_grad.addmm_(grad_output.t(), inputs)
        else:
            main_grad.add_(grad_output.t() @ inputs)


def provide_fused_weight_gradient() -> None:
    """Stand in for the extension, so that ``gradient_accumulation_fusion`` works on a CPU."""
    from megatron.core.tensor_parallel import layers

    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = FusedWeightGradient
    module._grad_accum_fusion_available = True
