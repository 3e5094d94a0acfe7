"""Tiny random Hugging Face folders, written on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 512


def tiny_tokenizer() -> Any:
    """Byte-level, 259 tokens: <pad> 0, <bos> 1, <eos> 2, then one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


EXPERTS = {  # of 8 a token sees 2
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    # a token's experts are twice its groups: Megatron scores a group by topk / groups of its
    # experts, transformers always by two
    "n_group": 4,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    # SGLang reads these; transformers' class no longer has them
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts": 8},
    "deepseek_v3": DEEPSEEK,
    "moonlight": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "glm4_moe": {
        **EXPERTS,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}


def make_tiny(
    folder: Path | str, family: str, *, seed: int = 0, tied: bool | None = None, **overrides: Any
) -> Path:
    """Write a random model in float32; returns the folder.

    Defaults: hidden 64, ffn 128, 4 layers, 4 heads, 2 KV heads of 16, vocabulary 512, qwen2 tied.
    With experts: 8 of 32, a token sees 2; all but qwen3_moe have shared ones and a dense first
    layer.

    Args:
        family: llama, qwen2, qwen3, qwen3_moe, deepseek_v3 (with YaRN), glm4_moe, or moonlight
            (deepseek_v3 without a latent query and YaRN).
    """
    from transformers import AutoModelForCausalLM

    return _write(folder, AutoModelForCausalLM, _config(family, tied, overrides), seed)


def make_tiny_classifier(
    folder: Path | str, family: str, *, seed: int = 0, num_labels: int = 1, **overrides: Any
) -> Path:
    """The same as a sequence classifier: a reward model, or what a critic starts from."""
    from transformers import AutoModelForSequenceClassification

    config = _config(family, None, overrides)
    config.num_labels = num_labels
    return _write(folder, AutoModelForSequenceClassification, config, seed)


def _config(family: str, tied: bool | None, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **FAMILIES[family],
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **overrides,
    }
    kind = "deepseek_v3" if family == "moonlight" else family
    config = AutoConfig.for_model(kind, **settings)
    config.initializer_range = 0.08
    return config


def _write(folder: Path | str, auto_class: Any, config: Any, seed: int) -> Path:
    import torch

    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                parameter.data.normal_(1.0, 0.1)
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
