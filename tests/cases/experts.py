"""Operations on the routing of tokens to experts."""

from __future__ import annotations

import torch

from rlhf.mcore.router import choose_experts, expert_weights
from tests.cases.case import Case, Op, floats
from tests.helpers.shapes import make_experts


def biased_topk(case: Case) -> Case:
    scores, bias = floats(case["scores"])[None], floats(case["bias"])
    moe = make_experts(
        num_experts=len(bias),
        num_experts_per_token=case["k"],
        scoring="sigmoid",
        expert_bias=True,
    )

    def chosen(bias: torch.Tensor) -> torch.Tensor:
        return choose_experts(scores, bias, moe).sort(-1).values

    experts = chosen(bias)
    return {
        "experts": experts[0].tolist(),
        "weights_normalised": expert_weights(scores, experts, moe)[0].tolist(),
        "experts_if_bias_in_bf16": chosen(bias.bfloat16().float())[0].tolist(),
    }


OPS: dict[str, Op] = {"biased_topk": biased_topk}
