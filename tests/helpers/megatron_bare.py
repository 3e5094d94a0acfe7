"""What megatron does on a CPU without our cures: ``python -m tests.helpers.megatron_bare``.

Prints one JSON line: name of the need -> how megatron fails, or "" if it does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def _config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, **changes)


def cuda_calls() -> None:
    """Megatron asks for the current device wherever it makes a tensor."""
    import torch

    torch.cuda.current_device()


def cuda_literals() -> None:
    import torch

    torch.zeros(1, device="cuda")


def fused_adam() -> None:
    """torch's Adam has the step in each parameter's state, where megatron does not look."""
    import torch

    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["step"]


def split_sizes() -> None:
    """What the dispatcher of experts gives to all-to-all."""
    import torch
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    sizes = maybe_move_tensor_to_cpu(torch.ones(2, dtype=torch.int64), as_numpy=True)
    if torch.is_tensor(sizes):
        raise TypeError("split sizes stay a tensor")


def float32_router() -> None:
    import torch
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    router_gating_linear(torch.ones(1, 8), torch.ones(2, 8), None, torch.float32)


def latent_attention() -> None:
    """Without transformer-engine a mock stands for its class."""
    from megatron.core.transformer import multi_latent_attention as module

    if module.HAVE_TE:
        isinstance(None, module.TELinear)


def latent_heads() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention(config=_config(), k_channels=4)


def packed_sequences() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward(None, None, None, None, None, packed_seq_params=object())


def norm_of_a_sequence_shard() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    shard = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    WrappedTorchNorm(_config(normalization="RMSNorm", **shard), 8)


def auxiliary_loss_outside_the_schedule() -> None:
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    x = torch.ones(1, requires_grad=True)
    MoEAuxLossAutoScaler.apply(x, x.sum()).backward()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # as the schedule does


BARE: tuple[Callable[[], None], ...] = (
    cuda_calls,
    cuda_literals,
    fused_adam,
    split_sizes,
    float32_router,
    latent_attention,
    latent_heads,
    packed_sequences,
    norm_of_a_sequence_shard,
)
WITH_STAND_INS: tuple[Callable[[], None], ...] = (auxiliary_loss_outside_the_schedule,)


def failure(need: Callable[[], None]) -> str:
    try:
        need()
    except BaseException as error:  # noqa: BLE001  (whatever megatron does is the answer)
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    from rlhf.platform.megatron_cpu import install

    out = {need.__name__: failure(need) for need in BARE}
    install()
    out |= {need.__name__: failure(need) for need in WITH_STAND_INS}
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
