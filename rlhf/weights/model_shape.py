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

from rlhf.weights.config_keys import count, mapping, number, read_object, strings, token_ids

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


NEEDED_KEYS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": (
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_group",
    ),
    "glm4_moe": ("first_k_dense_replace", "n_shared_experts"),
}
"""Keys for which transformers' class has a default of one model's own (DeepSeek-V3: 8 groups, 3
dense layers): what a config.json without them means depends on who reads it."""
LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "vocab_size": 2**24,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "moe_intermediate_size": 2**22,
}
"""Above these a number has digits too many; tables of all layers and experts are made of them."""


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
    raw = read_object(path)
    try:
        return parse_model_shape(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from None


def parse_model_shape(raw: Mapping[str, Any]) -> ModelShape:
    """The facts in a ``config.json`` object.

    Raises:
        ValueError: unsupported architecture, or a feature that training or rollout lacks.
        KeyError: a size is missing.
    """
    names = strings(raw, "architectures")
    family = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if family is None:
        raise ValueError(
            f"architecture {names or raw.get('model_type')!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_what_is_not_trained(raw, family)
    for key, most in LARGEST.items():
        if isinstance(found := raw.get(key), int) and found > most:
            raise ValueError(f"{key}: must be at most {most}, is {found}")
    heads = count(raw, "num_attention_heads")
    hidden = count(raw, "hidden_size")
    layers = count(raw, "num_hidden_layers")
    mla = _mla(raw) if family == "deepseek_v3" else None
    if mla is None:
        kv_heads = count(raw, "num_key_value_heads", heads)
        _must_divide("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        head_dim = count(raw, "head_dim", 0)
        if not head_dim:
            _must_divide("num_attention_heads", heads, "hidden_size", hidden)
            head_dim = hidden // heads
        rotary_dim = int(head_dim * _partial_rotary_factor(raw, family))
    else:
        kv_heads = heads
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        rotary_dim = mla.qk_rope_head_dim
    theta, scaling = _rope(raw, family)
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=count(raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=count(raw, "vocab_size"),
        max_position=count(raw, "max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family == "glm4_moe" and bool(raw.get("attention_bias"))),
        qk_norm=family in ("qwen3", "qwen3_moe") or bool(raw.get("use_qk_norm", False)),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        eos_token_ids=token_ids(raw, "eos_token_id"),
        mla=mla,
        moe=_checked(_moe(raw, family), layers),
        num_mtp_layers=count(raw, "num_nextn_predict_layers", 0),
    )


def _mla(raw: Mapping[str, Any]) -> MLAShape:
    return MLAShape(
        q_lora_rank=count(raw, "q_lora_rank", 0) or None,
        kv_lora_rank=count(raw, "kv_lora_rank"),
        qk_nope_head_dim=count(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=count(raw, "qk_rope_head_dim"),
        v_head_dim=count(raw, "v_head_dim"),
    )


def _moe(raw: Mapping[str, Any], family: FamilyName) -> MoEShape | None:
    if family not in MOE_FAMILIES:
        return None
    if family == "qwen3_moe":
        return MoEShape(
            # transformers writes the second name since its version 5
            num_experts=count(raw, "num_experts", 0) or count(raw, "num_local_experts"),
            num_experts_per_token=count(raw, "num_experts_per_tok"),
            ffn_size=count(raw, "moe_intermediate_size"),
            num_shared_experts=0,
            first_dense=0,
            scoring="softmax",
            normalize_topk=bool(raw.get("norm_topk_prob", False)),
            scaling_factor=1.0,
            num_groups=1,
            topk_groups=1,
            expert_bias=False,
        )
    _must_have(raw, NEEDED_KEYS[family])
    return MoEShape(
        num_experts=count(raw, "n_routed_experts"),
        num_experts_per_token=count(raw, "num_experts_per_tok"),
        ffn_size=count(raw, "moe_intermediate_size"),
        num_shared_experts=count(raw, "n_shared_experts", 0),
        first_dense=count(raw, "first_k_dense_replace", 0),
        scoring="sigmoid",
        normalize_topk=bool(raw.get("norm_topk_prob", True)),
        scaling_factor=number(raw, "routed_scaling_factor", 1.0),
        num_groups=count(raw, "n_group", 1),
        topk_groups=count(raw, "topk_group", 1),
        expert_bias=True,
    )


def _must_have(raw: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raises KeyError: one of them is missing. Null says that there is nothing of it."""
    for key in keys:
        if key not in raw:
            raise KeyError(key)


def _checked(moe: MoEShape | None, layers: int) -> MoEShape | None:
    """Its numbers against each other, by the names that they have in most configs."""
    if moe is None:
        return None
    for name, value, of, most in (
        (
            "num_experts_per_tok",
            moe.num_experts_per_token,
            "the number of experts",
            moe.num_experts,
        ),
        ("topk_group", moe.topk_groups, "n_group", moe.num_groups),
        ("first_k_dense_replace", moe.first_dense, "num_hidden_layers", layers),
    ):
        if value > most:
            raise ValueError(f"{name}: must be at most {of}={most}, is {value}")
    _must_divide("n_group", moe.num_groups, "the number of experts", moe.num_experts)
    return moe


def _must_divide(name: str, value: int, of: str, whole: int) -> None:
    if whole % value:
        raise ValueError(f"{name}: must divide {of}={whole}, is {value}")


def _partial_rotary_factor(raw: Mapping[str, Any], family: FamilyName) -> float:
    usual = 0.5 if family == "glm4_moe" else 1.0
    old = number(raw, "partial_rotary_factor", usual)
    factor = number(mapping(raw, "rope_parameters"), "partial_rotary_factor", old)
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
    new, old = mapping(raw, "rope_parameters"), mapping(raw, "rope_scaling")
    theta = number(new, "rope_theta", number(raw, "rope_theta", 10000.0))
    settings = {**old, **new}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3" and family not in MOE_FAMILIES:
        return theta, Llama3Rope(
            factor=number(settings, "factor"),
            low_freq_factor=number(settings, "low_freq_factor"),
            high_freq_factor=number(settings, "high_freq_factor"),
            original_max_position_embeddings=count(settings, "original_max_position_embeddings"),
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
        factor=number(settings, "factor"),
        original_max_position_embeddings=count(settings, "original_max_position_embeddings"),
        beta_fast=number(settings, "beta_fast", 32),
        beta_slow=number(settings, "beta_slow", 1),
        mscale=number(settings, "mscale", 1),
        mscale_all_dim=number(settings, "mscale_all_dim", 0),
    )
