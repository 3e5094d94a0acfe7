"""megatron's TransformerConfig from the facts of a model and the sections of a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore.spec import Kernels, choose_kernels
from rlhf.weights.model_shape import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(
    shape: ModelShape, layout: TrainLayout, model: ModelSection, train: TrainSection
) -> TransformerConfig:
    """A new config object: megatron keeps per-model hooks on it, so models never share one."""
    dtype = DTYPES[model.dtype]
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=train.sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from a checkpoint. Initialisation stays on with a function that does nothing:
        # switched off, megatron also leaves out the marks by which the gradient norm knows which
        # parameters are cut over TP, and the norm is silently wrong.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # The loss arrives with its global denominators: no division by micro-batches or dp.
        calculate_per_token_loss=True,
        **_pipeline(shape.num_layers, layout),
        **_experts(shape, layout, train.moe.dispatcher),
        **_RECOMPUTE[train.recompute],
        **fusions(choose_kernels(dtype)),
    )
    check_pipeline(config, torch.cuda.is_available())
    return config


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _experts(shape: ModelShape, layout: TrainLayout, dispatcher: str) -> dict[str, Any]:
    """Sizes and dispatch; routing and its losses are our router's (``mcore.router``)."""
    moe = shape.moe
    # megatron checks it against variable lengths, dense models or not
    if moe is None:
        return {"moe_token_dispatcher_type": dispatcher}
    if dispatcher == "flex" and not torch.cuda.is_available():
        raise ValueError("train.moe.dispatcher: flex is DeepEP, which needs GPUs; use alltoall")
    shared = moe.num_shared_experts * moe.ffn_size
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_router_topk": moe.num_experts_per_token,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_layer_freq": [int(shape.has_experts(n)) for n in range(shape.num_layers)],
        "moe_grouped_gemm": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_dtype": "fp32",
        # the fused form counts on num_experts_per_token experts of every row; padding has none
        "moe_permute_fusion": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def _pipeline(num_layers: int, layout: TrainLayout) -> dict[str, Any]:
    """Stages, chunks and how neighbours talk."""
    if layout.pp == 1:
        return {}
    interleaved = layout.vpp > 1
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "pipeline_model_parallel_layout": _stages(num_layers, layout),
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": not interleaved or torch.cuda.is_available(),
        "variable_seq_lengths": True,
    }


def _stages(num_layers: int, layout: TrainLayout) -> list[list[str]]:
    """What each stage holds, chunk after chunk: the same cut as ``layout.layers``."""
    stages = [
        ["decoder"] * len(layout.layers(num_layers, pp, vpp))
        for vpp in range(layout.vpp)
        for pp in range(layout.pp)
    ]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def fusions(kernels: Kernels) -> dict[str, Any]:
    """Fused kernels of megatron and transformer-engine, where they exist."""
    engine = kernels.engine
    return {
        # one of the two: megatron's fused function, or the activation module of the layer spec
        "bias_activation_fusion": engine,
        "use_te_activation_func": not engine,
        "bias_dropout_fusion": kernels.gpu,
        "masked_softmax_fusion": False,
        "persist_layer_norm": kernels.gpu,
        # our own attention rotates queries and keys itself
        "apply_rope_fusion": kernels.engine_attention,
        # megatron's linear layers insist on apex's extension; on a CPU we stand in for it
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,
    }


def check_pipeline(config: TransformerConfig, gpu: bool) -> None:
    """Settings that megatron accepts and that give silently wrong numbers.

    Raises:
        AssertionError: an interleaved schedule without overlapped point-to-point transfers: with
            two stages both neighbours are one rank and its two messages are mixed up. Or, on gloo,
            outputs freed while an overlapped send still reads them.
    """
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    assert not interleaved or (config.overlap_p2p_comm and not config.batch_p2p_comm), (
        "virtual pipeline stages need overlap_p2p_comm=True and batch_p2p_comm=False, got "
        f"{config.overlap_p2p_comm} and {config.batch_p2p_comm}"
    )
    assert gpu or not (config.overlap_p2p_comm and config.deallocate_pipeline_outputs), (
        "overlap_p2p_comm=True on gloo needs deallocate_pipeline_outputs=False"
    )
