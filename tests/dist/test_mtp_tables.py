"""The tables of layers for multi-token prediction, against Megatron's own and SGLang's draft model.

Megatron's are built in a process that stands for each rank in turn, as in test_megatron_tables.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.rollout.receiver import DERIVED
from rlhf.weights.families import (
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.megatron_rank import as_rank, in_megatron
from tests.helpers.sglang_probe import Coded, load_many
from tests.helpers.shards import cut, dtypes_of, random_checkpoint
from tests.helpers.tiny_models import make_tiny

MODELS = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "moonlight": {"num_key_value_heads": 4},
    "glm4_moe": {},
}
TRAIN = [
    (TrainLayout(1), 0),
    (TrainLayout(4, tp=2, pp=2, first=2), 0),
    (TrainLayout(4, tp=2, pp=2, first=2), 3),
    (TrainLayout(2, pp=2, vpp=2), 1),
    (TrainLayout(4, tp=2, ep=4, etp=1), 3),
]
ROLLOUT = [
    (RolloutLayout(1), 0),
    (RolloutLayout(2, tp=2), 1),
    (RolloutLayout(2, tp=2, ep=2), 1),
    (RolloutLayout(4, tp=4, dp=2, ep=4), 3),
]
BUILT = {f"{m} {at} rank {rank}": (m, at, rank) for m in MODELS for at, rank in TRAIN}
DRAFTED = {f"{m} {at} rank {rank}": (m, at, rank) for m in MODELS for at, rank in ROLLOUT}
DRAFT_CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLMNextN",
    "moonlight": "DeepseekV3ForCausalLMNextN",
    "glm4_moe": "Glm4MoeForCausalLMNextN",
}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")

Table = dict[str, tuple[tuple[int, ...], torch.dtype]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """With one MTP layer, which transformers leaves out of its files."""
    root = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny(root / family, family, num_nextn_predict_layers=1, **settings))
        for family, settings in MODELS.items()
    }


def _built(job: tuple[str, TrainLayout, int]) -> Table:
    folder, layout, rank = job
    out: Table = {}
    with as_rank(layout, rank):
        for chunk in range(layout.vpp):
            model = _chunk(folder, layout, chunk if layout.vpp > 1 else None)
            named = [*model.named_parameters(), *model.named_buffers()]
            prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
            out |= {
                prefix + name: (tuple(tensor.shape), tensor.dtype)
                for name, tensor in named
                if isinstance(tensor, torch.nn.Parameter) or name.endswith("expert_bias")
            }
    return out


def _chunk(folder: str, layout: TrainLayout, chunk: int | None) -> Any:
    """Megatron's GPTModel of our layers, with MTP layers of them on the last chunk."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from rlhf.mcore.config import transformer_config
    from rlhf.mcore.spec import decoder_spec
    from rlhf.weights.families import padded_vocab

    shape = load_model_shape(folder)
    train = TrainSection(tp=layout.tp, sequence_parallel=layout.tp > 1)
    config = transformer_config(shape, layout, ModelSection(path=folder, dtype="bfloat16"), train)
    config.mtp_num_layers = shape.num_mtp_layers
    spec = decoder_spec(config, shape, train.moe, chunk)
    last = parallel_state.is_pipeline_last_stage(False, chunk)
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab(shape, layout.tp),
        max_sequence_length=shape.max_position,
        pre_process=parallel_state.is_pipeline_first_stage(False, chunk),
        post_process=last,
        mtp_block_spec=_mtp_spec(spec) if last else None,
        position_embedding_type="rope",
        vp_stage=chunk,
    )


def _mtp_spec(decoder: Any) -> Any:
    """One MTP layer around a layer like the decoder's last one."""
    from dataclasses import replace

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from rlhf.mcore.mla import LatentAttention

    class MaskedLatentAttention(LatentAttention):
        """Megatron refuses an MTP layer whose attention does not name its mask."""

        def __init__(self, *args: Any, attn_mask_type: AttnMaskType, **settings: Any) -> None:
            assert attn_mask_type is AttnMaskType.causal
            super().__init__(*args, **settings)

    layer = decoder.layer_specs[-1]
    attention = layer.submodules.self_attention
    if attention.module is LatentAttention:
        attention = replace(
            attention,
            module=MaskedLatentAttention,
            params={**attention.params, "attn_mask_type": AttnMaskType.causal},
        )
        layer = replace(layer, submodules=replace(layer.submodules, self_attention=attention))
    norm = decoder.layer_norm
    one = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=norm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[one]),
    )


@pytest.fixture(scope="module")
def built(folders):
    jobs = [(folders[family], layout, rank) for family, layout, rank in BUILT.values()]
    return dict(zip(BUILT, in_megatron(_built, jobs), strict=True))


@pytest.mark.parametrize("key", BUILT)
def test_tables_equal_megatrons_parameters(folders, built, key):
    family, layout, rank = BUILT[key]
    if isinstance(built[key], Exception):
        raise built[key]
    shape = load_model_shape(folders[family])
    dtypes = dtypes_of(train_pieces(shape, layout, rank, mtp=True), torch.bfloat16)
    shapes = train_param_shapes(shape, layout, rank, mtp=True)
    assert built[key] == {name: (size, dtypes[name]) for name, size in shapes.items()}


@pytest.fixture(scope="module")
def drafts(folders):
    """What SGLang's draft classes load of a checkpoint."""
    probes = [
        Coded(folders[name], layout, rank, "bfloat16", DRAFT_CLASSES[name])
        for name, layout, rank in DRAFTED.values()
    ]
    return dict(zip(DRAFTED, load_many(probes), strict=True))


@pytest.mark.parametrize("key", DRAFTED)
def test_tables_equal_what_sglangs_draft_model_loads(folders, drafts, key):
    family, layout, rank = DRAFTED[key]
    shape = load_model_shape(folders[family])
    live = {
        f"draft.{name}": loaded
        for name, loaded in drafts[key].items()
        if not name.endswith(DERIVED) and name not in SHARED
    }
    pieces = rollout_pieces(shape, layout, rank, mtp=True)
    mine = [piece for piece in pieces if piece.param.startswith("draft.")]
    assert [p for p in pieces if p not in mine] == rollout_pieces(shape, layout, rank)
    shapes = {
        name: size
        for name, size in rollout_param_shapes(shape, layout, rank, mtp=True).items()
        if name.startswith("draft.")
    }
    assert {name: p.values.shape for name, p in live.items()} == shapes
    assert {name: p.dtype for name, p in live.items()} == {
        p.param: p.dtype or "bfloat16" for p in mine
    }
    wanted = cut(random_checkpoint(shape, mtp=True), mine, shapes)
    for name, loaded in live.items():
        assert torch.equal(torch.from_numpy(loaded.values), wanted[name]), name
