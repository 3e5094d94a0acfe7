"""SGLang's own model class for any rank of any layout, in a process that stands for that rank.

Once per process: SGLang's parallel state and settings are global.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlhf.dist.layout import RolloutLayout
from rlhf.platform.fake_world import fake_groups
from rlhf.rollout.receiver import DERIVED
from rlhf.rollout.sglang_args import BLOCK_FP8, cut_args
from rlhf.weights.model_shape import load_model_shape

if TYPE_CHECKING:
    from torch import Tensor, nn

WHOLE_SHARED_EXPERTS = "ascend_fuseep"
"""A backend of all-to-all that lays out parameters as DeepEP does and needs no package for it."""


def build_model(
    folder: str,
    layout: RolloutLayout,
    rank: int,
    dtype: str,
    device: str,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The model of ``rank`` with the arguments that our engines give, nothing loaded.

    Args:
        folder: with a ``config.json``; no weights and no tokenizer are read.
        device: ``meta`` or ``cpu``.
        overrides: what goes before keys of ``config.json``, as for the class of a draft model.
    """
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    args = _server_args(folder, layout, dtype, overrides)
    _enter_world(args, layout, rank)
    config = ModelConfig.from_server_args(args)
    init_layer_runtime(model_config=config)
    if layout.redundant_experts:
        _place_experts(config)
    load = LoadConfig()
    with set_default_torch_dtype(getattr(torch, dtype)), torch.device(device):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint feeds; tied ones once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if not name.endswith(DERIVED)}


def _server_args(
    folder: str, layout: RolloutLayout, dtype: str, overrides: Mapping[str, Any]
) -> Any:
    from sglang.srt.server_args import ServerArgs

    cut = cut_args(
        tp=layout.tp,
        dp=layout.dp,
        ep=layout.ep,
        pp=layout.pp,
        has_experts=load_model_shape(folder).moe is not None,
        redundant_experts=layout.redundant_experts,
    )
    quantization = BLOCK_FP8 if layout.quantization != "none" else {}
    return ServerArgs(
        model_path=folder,
        device="cpu",
        dtype=dtype,
        **cut,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.2,
        log_level="error",
        json_model_override_args=json.dumps({**quantization, **overrides}),
        **({"moe_a2a_backend": WHOLE_SHARED_EXPERTS} if layout.a2a == "deepep" else {}),
    )


def _place_experts(config: Any) -> None:
    """Which expert is a copy of which, as an engine has it before it loads."""
    from sglang.srt.eplb.expert_location import (
        compute_initial_expert_location_metadata,
        set_global_expert_location_metadata,
    )
    from sglang.srt.runtime_context import get_parallel

    places = compute_initial_expert_location_metadata(config, get_parallel().moe_ep_rank)
    set_global_expert_location_metadata(places)


def _enter_world(args: Any, layout: RolloutLayout, rank: int) -> None:
    """SGLang's groups over torch's fake backend: sizes and ranks without peers."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    at = layout.coord(rank)
    inside = spawn_world_rank(args, tp_rank=at.tp, pp_rank=at.pp)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=inside, dp_rank=None, gpu_id=0))
    world = layout.engine_size
    with fake_groups(inside, world):
        parallel_state.init_distributed_environment(
            backend="fake", world_size=world, rank=inside, local_rank=0
        )
        parallel_state.initialize_model_parallel(backend="fake")
    initialize_dp_attention(args)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
