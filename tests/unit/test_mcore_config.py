"""megatron's configuration: what would give silently wrong numbers is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore.config import check_pipeline, fusions, transformer_config
from rlhf.mcore.rope import frequencies, scale_llama3, softmax_scale
from rlhf.mcore.spec import kernels_for
from rlhf.weights.model_shape import Llama3Rope, MLAShape, YarnRope, parse_model_shape

RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}


def _shape():
    return parse_model_shape(RAW)


def _config(layout=None, dtype="float32", **train):
    layout = layout or TrainLayout(1)
    model = ModelSection(path="unused", dtype=dtype)
    return transformer_config(_shape(), layout, model, TrainSection(**train))


def _pipeline(**flags):
    base = {"virtual_pipeline_model_parallel_size": None, "overlap_p2p_comm": False}
    return SimpleNamespace(
        **{**base, "batch_p2p_comm": True, "deallocate_pipeline_outputs": True, **flags}
    )


def test_interleaving_without_overlap_is_refused():
    """With two stages both neighbours are one rank: its messages would be mixed up."""
    with pytest.raises(AssertionError, match="overlap_p2p_comm=True"):
        check_pipeline(_pipeline(virtual_pipeline_model_parallel_size=2), gpu=True)


def test_freeing_outputs_while_gloo_sends_them_is_refused():
    flags = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    check_pipeline(_pipeline(**flags), gpu=True)
    with pytest.raises(AssertionError, match="deallocate_pipeline_outputs=False"):
        check_pipeline(_pipeline(**flags), gpu=False)


@pytest.mark.parametrize("vpp", [1, 2])
def test_every_pipeline_that_we_build_passes_the_check(vpp):
    config = _config(TrainLayout(2, pp=2, vpp=vpp))
    check_pipeline(config, gpu=False)
    assert config.variable_seq_lengths


def test_stages_hold_the_layers_of_the_layout():
    layout = TrainLayout(2, pp=2, vpp=1, first=3)
    stages = _config(layout).pipeline_model_parallel_layout
    for pp in range(2):
        assert stages.get_layer_id_list(vp_stage=None, pp_rank=pp) == list(layout.layers(8, pp))


def test_models_never_share_a_config():
    assert _config() is not _config()


def test_sizes_and_dtype_come_from_the_model():
    config = _config(dtype="bfloat16", recompute="full")
    assert (config.kv_channels, config.num_query_groups, config.qk_layernorm) == (32, 2, True)
    assert (config.params_dtype, config.bf16) == (torch.bfloat16, True)
    assert config.recompute_granularity == "full"
    assert config.calculate_per_token_loss


def test_sequence_parallelism_needs_tp():
    assert not _config(sequence_parallel=True).sequence_parallel
    assert _config(TrainLayout(2, tp=2), sequence_parallel=True).sequence_parallel


def test_llama3_frequencies_equal_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = Llama3Rope(8.0, 1.0, 4.0, 8192)
    hf = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    torch.testing.assert_close(scale_llama3(plain, scaling), expected, rtol=1e-6, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has it")
def test_the_dispatcher_of_gpus_is_refused_on_a_cpu():
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    shape = parse_model_shape({**RAW, **moe, "moe_intermediate_size": 32})
    train = TrainSection(moe={"dispatcher": "flex"})
    with pytest.raises(ValueError, match=r"train\.moe\.dispatcher: flex is DeepEP"):
        transformer_config(shape, TrainLayout(1), ModelSection(path="unused"), train)


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 1.0), (0.7, 0.9), (1.0, 0.0)])
def test_yarn_frequencies_and_factors_equal_transformers(mscale, all_dim):
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    hf = DeepseekV3Config(num_hidden_layers=1, rope_parameters={"rope_type": "yarn", **rope})
    mla = MLAShape(None, 512, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim)
    scaling = YarnRope(**{key: value for key, value in rope.items() if key != "rope_theta"})
    shape = replace(_shape(), rotary_dim=64, rope_theta=1e4, rope_scaling=scaling, mla=mla)
    got, factor = frequencies(shape)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
    with torch.device("meta"):
        attention = DeepseekV3Attention(hf, 0)
    assert softmax_scale(shape, 192) == pytest.approx(attention.scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("gpu", "installed", "engine"),
    [(False, False, False), (False, True, False), (True, True, True), (True, False, False)],
)
def test_fused_kernels_exist_where_they_are_asked_for(gpu, installed, engine, dtype):
    """megatron's own rule: a fused activation and an activation module exclude each other."""
    kernels = kernels_for(gpu, installed, dtype)
    chosen = fusions(kernels)
    assert kernels.engine == engine
    assert chosen["bias_activation_fusion"] == engine
    assert chosen["use_te_activation_func"] == (not engine)
    assert chosen["bias_dropout_fusion"] == gpu
    assert chosen["apply_rope_fusion"] == kernels.engine_attention
    config = _config()
    for name in ("bias_activation_fusion", "use_te_activation_func", "bias_dropout_fusion"):
        setattr(config, name, chosen[name])
    config.__post_init__()  # raises on a combination that megatron refuses


def test_float32_is_attended_by_torch_even_beside_transformer_engine():
    """Its packed attention is for 16 bits only."""
    assert kernels_for(True, True, torch.bfloat16).engine_attention
    beside = kernels_for(True, True, torch.float32)
    assert (beside.engine, beside.engine_attention) == (True, False)
    assert not kernels_for(False, True, torch.bfloat16).engine_attention
