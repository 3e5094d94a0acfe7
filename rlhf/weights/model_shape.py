"""Facts about a model, read from the ``config.json`` of its HF folder. Pure Python.

Configs are read as JSON, old and new forms of the rope settings alike, so that no version of
transformers decides what a run sees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FamilyName = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"]
MOE_FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe")

ARCHITECTURES: Mapping[str, FamilyName] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
}
"""Kimi-K2 and Moonlight are of DeepSeek-V3's class."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's scaled rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN's scaled rotary frequencies (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): sizes of its projections.

    Its rotary embedding turns neighbouring elements together (``rope_interleave`` in transformers),
    that of other families elements half a head apart.
    """

    q_lora_rank: int | None
    """None: queries come from the hidden state by one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Routed experts of every layer from ``first_dense`` on."""

    num_experts: int
    num_experts_per_token: int
    ffn_size: int
    """Of one expert."""
    num_shared_experts: int
    """Seen by every token; one gated MLP of ``num_shared_experts * ffn_size``."""
    first_dense: int
    """Layers before the first one with experts."""
    scoring: Literal["softmax", "sigmoid"]
    normalize_topk: bool
    """The weights of a token's experts sum to one before ``scaling_factor``."""
    scaling_factor: float
    num_groups: int
    """Experts are in so many groups, of which a token sees ``topk_groups``; 1 and 1: no groups."""
    topk_groups: int
    expert_bias: bool
    """A bias added to the scores for the choice only (arXiv:2408.15664)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model. Sizes are elements."""

    family: FamilyName
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | YarnRope | None
    eos_token_ids: tuple[int, ...]
    rotary_dim: int
    """The first so many elements of each query and key head are rotated; with MLA its rope part."""
    mla: MLAShape | None = None
    """With it, ``head_dim`` is that of a query, and there are as many KV heads as heads."""
    moe: MoEShape | None = None
    num_mtp_layers: int = 0
    """Layers for multi-token prediction in the checkpoint, behind the others; left out of training,
    engines and exports, though the tables have them for who asks with ``mtp=True``."""

    def has_experts(self, layer: int) -> bool:
        """Whether layer number ``layer`` has routed experts in place of a dense MLP."""
        return self.moe is not None and layer >= self.moe.first_dense


def load_model_shape(folder: str | Path) -> ModelShape:
    """Read ``folder/config.json``.

    Raises:
        ValueError: the folder, the file or a key in it is missing, it is not JSON, or the model is
            not one that we train.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no config.json there; give a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    return read_model_config(path)


def read_model_config(path: Path) -> ModelShape:
    """Read a ``config.json`` of any name.

    Raises:
        ValueError: as :func:`load_model_shape`; it begins with the path.
    """
    try:
        return parse_model_shape(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:  # TypeError: null or a list in place of a number
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from None


def parse_model_shape(raw: Mapping[str, Any]) -> ModelShape:
    """The facts in a ``config.json`` object.

    Raises:
        ValueError: unsupported architecture, or a feature that training or rollout lacks.
        KeyError: a size is missing.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"must hold a JSON object, holds a {type(raw).__name__}")
    names = list(raw.get("architectures") or [])
    family = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if family is None:
        raise ValueError(
            f"architecture {names or raw.get('model_type')!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_what_is_not_trained(raw, family)
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    mla = _mla(raw) if family == "deepseek_v3" else None
    if mla is None:
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        head_dim = int(raw.get("head_dim") or hidden // heads)
        rotary_dim = int(head_dim * _partial_rotary_factor(raw, family))
    else:
        kv_heads = heads
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        rotary_dim = mla.qk_rope_head_dim
    theta, scaling = _rope(raw, family)
    eos = raw.get("eos_token_id")
    return ModelShape(
        family=family,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_size=int(raw["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(raw["vocab_size"]),
        max_position=int(raw["max_position_embeddings"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family == "glm4_moe" and bool(raw.get("attention_bias"))),
        qk_norm=family in ("qwen3", "qwen3_moe") or bool(raw.get("use_qk_norm", False)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        mla=mla,
        moe=_moe(raw, family),
        num_mtp_layers=int(raw.get("num_nextn_predict_layers") or 0),
    )


def _mla(raw: Mapping[str, Any]) -> MLAShape:
    query_rank = raw.get("q_lora_rank")
    return MLAShape(
        q_lora_rank=None if query_rank is None else int(query_rank),
        kv_lora_rank=int(raw["kv_lora_rank"]),
        qk_nope_head_dim=int(raw["qk_nope_head_dim"]),
        qk_rope_head_dim=int(raw["qk_rope_head_dim"]),
        v_head_dim=int(raw["v_head_dim"]),
    )


def _moe(raw: Mapping[str, Any], family: FamilyName) -> MoEShape | None:
    if family not in MOE_FAMILIES:
        return None
    if family == "qwen3_moe":
        return MoEShape(
            # transformers writes the second name since its version 5
            num_experts=int(raw.get("num_experts") or raw["num_local_experts"]),
            num_experts_per_token=int(raw["num_experts_per_tok"]),
            ffn_size=int(raw["moe_intermediate_size"]),
            num_shared_experts=0,
            first_dense=0,
            scoring="softmax",
            normalize_topk=bool(raw.get("norm_topk_prob", False)),
            scaling_factor=1.0,
            num_groups=1,
            topk_groups=1,
            expert_bias=False,
        )
    return MoEShape(
        num_experts=int(raw["n_routed_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        ffn_size=int(raw["moe_intermediate_size"]),
        num_shared_experts=int(raw.get("n_shared_experts") or 0),
        first_dense=int(raw.get("first_k_dense_replace") or 0),
        scoring="sigmoid",
        normalize_topk=bool(raw.get("norm_topk_prob", True)),
        scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=int(raw.get("n_group") or 1),
        topk_groups=int(raw.get("topk_group") or 1),
        expert_bias=True,
    )


def _partial_rotary_factor(raw: Mapping[str, Any], family: FamilyName) -> float:
    new = raw.get("rope_parameters") or {}
    usual = 0.5 if family == "glm4_moe" else 1.0
    factor = float(new.get("partial_rotary_factor", raw.get("partial_rotary_factor", usual)))
    if factor != 1 and family != "glm4_moe":
        raise ValueError(f"partial_rotary_factor={factor} is not supported for {family}; only 1 is")
    return factor


def _refuse_what_is_not_trained(raw: Mapping[str, Any], family: FamilyName) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported; set it to false")
    if family not in ("qwen2", "glm4_moe") and raw.get("attention_bias"):
        raise ValueError(f"attention_bias=true is not supported for {family}")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is set: give the unquantised (bf16) checkpoint")
    if family in MOE_FAMILIES:
        _refuse_experts_that_are_not_trained(raw, family)


def _refuse_experts_that_are_not_trained(raw: Mapping[str, Any], family: FamilyName) -> None:
    """A key that says what we do may be left out, as newer configs do."""
    only: dict[str, Any] = {"tie_word_embeddings": False}
    if family == "qwen3_moe":
        only |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "deepseek_v3":
        only |= {
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_interleave": True,
        }
    for key, value in only.items():
        if (found := raw.get(key)) is not None and found != value:
            raise ValueError(
                f"{key}={json.dumps(found)} is not supported for {family}; "
                f"only {json.dumps(value)} is"
            )


def _rope(raw: Mapping[str, Any], family: FamilyName) -> tuple[float, Llama3Rope | YarnRope | None]:
    """(theta, scaling) from ``rope_parameters`` (new) or ``rope_theta``/``rope_scaling`` (old)."""
    new = raw.get("rope_parameters") or {}
    old = raw.get("rope_scaling") or {}
    theta = float(new.get("rope_theta", raw.get("rope_theta", 10000.0)))
    settings = {**old, **new}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3" and family not in MOE_FAMILIES:
        return theta, Llama3Rope(
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_max_position_embeddings=int(settings["original_max_position_embeddings"]),
        )
    if kind == "yarn" and family == "deepseek_v3":
        return theta, _yarn(settings)
    scaled = {"deepseek_v3": ", 'yarn'"}.get(family, "" if family in MOE_FAMILIES else ", 'llama3'")
    raise ValueError(
        f"rope type {kind!r} is not supported for {family}; supported are 'default'{scaled}"
    )


def _yarn(settings: Mapping[str, Any]) -> YarnRope:
    """Defaults are those of the DeepSeek-V3 release."""
    for key, value in (("attention_factor", None), ("truncate", True)):
        if settings.get(key, value) != value:
            raise ValueError(f"rope {key}={settings[key]!r} is not supported; leave it out")
    return YarnRope(
        factor=float(settings["factor"]),
        original_max_position_embeddings=int(settings["original_max_position_embeddings"]),
        beta_fast=float(settings.get("beta_fast", 32)),
        beta_slow=float(settings.get("beta_slow", 1)),
        mscale=float(settings.get("mscale", 1)),
        mscale_all_dim=float(settings.get("mscale_all_dim", 0)),
    )
