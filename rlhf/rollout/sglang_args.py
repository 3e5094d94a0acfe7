"""How SGLang is told to cut a model, so that it lies as ``rlhf.weights.families`` has it."""

from __future__ import annotations

from typing import Any

BLOCK_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
"""What a ``config.json`` says of a checkpoint in block fp8."""


def cut_args(
    *, tp: int, dp: int, ep: int, pp: int, has_experts: bool, redundant_experts: int = 0
) -> dict[str, Any]:
    """Keyword arguments of SGLang's ``ServerArgs``; nothing is left to its defaults.

    Args:
        has_experts: whether the model has routed experts.
    """
    args: dict[str, Any] = {
        "tp_size": tp,
        "ep_size": ep,
        "pp_size": pp,
        "disable_shared_experts_fusion": True,
    }
    if redundant_experts:
        args["ep_num_redundant_experts"] = redundant_experts
    if dp > 1:
        args |= {"dp_size": dp, "enable_dp_attention": True, "enable_dp_lm_head": True}
        if has_experts:  # a model without would leave out the sum over tp, too
            args["moe_dense_tp_size"] = 1
    return args
