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


def make_tiny(
    folder: Path | str, family: str, *, seed: int = 0, tied: bool | None = None, **overrides: Any
) -> Path:
    """Write a random model of ``family`` (llama, qwen2, qwen3) in float32; returns the folder.

    Defaults: hidden 64, ffn 128, 4 layers, 4 heads, 2 KV heads of 16, vocabulary 512, qwen2 tied.
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
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
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
        "tie_word_embeddings": family == "qwen2" if tied is None else tied,
    }
    if family == "qwen3":
        settings["head_dim"] = 16
    config = classes[family](**{**settings, **overrides})
    config.initializer_range = 0.08
    return config


def _write(folder: Path | str, auto_class: Any, config: Any, seed: int) -> Path:
    import torch

    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.normal_(1.0, 0.1)
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
