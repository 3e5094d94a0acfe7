"""The rollout tables against SGLang itself: its classes load coded tensors, element by element."""

from __future__ import annotations

import pytest
import torch

from rlhf.dist.layout import RolloutLayout
from rlhf.weights.families import full_shapes, rollout_param_shapes, rollout_pieces
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.sglang_probe import Probe, probe_many
from tests.helpers.shards import coded_tensors, cut
from tests.helpers.tiny_models import make_tiny

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
}
MODELS = {
    "llama": {"family": "llama", "num_key_value_heads": 4},
    "llama tied": {"family": "llama", "num_key_value_heads": 8, "tied": True},
    "qwen2": {"family": "qwen2", "num_key_value_heads": 4, "tied": False},
    "qwen2 tied": {"family": "qwen2", "num_key_value_heads": 1, "tied": True},
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2},
    "qwen3 tied": {"family": "qwen3", "num_key_value_heads": 4, "tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "num_key_value_heads": 2},
    "deepseek_v3": {"family": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 2},
    "moonlight": {"family": "moonlight", "num_key_value_heads": 8},
    "glm4_moe": {"family": "glm4_moe", "num_key_value_heads": 4},
    "glm4_moe air": {"family": "glm4_moe", "num_key_value_heads": 4, "use_qk_norm": False},
}
LAYOUTS = [  # (model, layout, ranks to look at)
    ("llama", {"tp": 2}, [0, 1]),
    ("llama", {"pp": 3}, [0, 1, 2]),
    ("llama tied", {"tp": 8}, [5]),
    ("qwen2", {"tp": 2, "pp": 2}, [3]),
    ("qwen2 tied", {"tp": 4}, [0, 3]),
    ("qwen2 tied", {"pp": 2}, [1]),
    ("qwen3", {"tp": 8}, [4]),
    ("qwen3", {"tp": 4, "dp": 2}, [3]),
    ("qwen3 tied", {"tp": 1}, [0]),
    ("qwen3 tied", {"tp": 2, "pp": 2}, [0, 3]),
    ("qwen3_moe", {"tp": 1}, [0]),
    ("qwen3_moe", {"tp": 4, "ep": 2}, [1, 2]),
    ("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}, [1]),
    ("qwen3_moe", {"tp": 2, "pp": 2}, [0, 3]),
    ("deepseek_v3", {"tp": 1}, [0]),
    ("deepseek_v3", {"tp": 4}, [2]),
    ("deepseek_v3", {"tp": 2, "ep": 2}, [1]),
    ("deepseek_v3", {"tp": 4, "dp": 2, "ep": 2}, [3]),
    ("deepseek_v3", {"tp": 4, "dp": 2, "ep": 4, "a2a": "deepep"}, [1]),
    ("deepseek_v3", {"tp": 2, "pp": 2}, [0, 3]),
    ("moonlight", {"tp": 2}, [1]),
    ("moonlight", {"tp": 2, "dp": 2, "ep": 2}, [0]),
    ("glm4_moe", {"tp": 8}, [6]),
    ("glm4_moe", {"tp": 2, "ep": 2}, [1]),
    # its whole shared experts under DeepEP follow from DeepEP alone, which is not here
    ("glm4_moe", {"tp": 4, "dp": 2, "ep": 4}, [2]),
    ("glm4_moe", {"tp": 2, "pp": 2}, [0, 3]),
    ("glm4_moe air", {"tp": 4, "ep": 2}, [3]),
]
PROBED = {
    f"{name} {'-'.join(f'{k}{v}' for k, v in layout.items())} rank {rank}": (
        name,
        RolloutLayout(layout.get("tp", 1) * layout.get("pp", 1), **layout),
        rank,
    )
    for name, layout, ranks in LAYOUTS
    for rank in ranks
}
TIED_LLAMA = "tied llama, last stage"
IN_BFLOAT16 = ("qwen3_moe", "deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny(root / name.replace(" ", "-"), **{**SIZES, **settings})
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def lives(folders):
    """What SGLang loaded: the probes of the table, and two more."""
    probes = {
        **{key: Probe(str(folders[name]), *at) for key, (name, *at) in PROBED.items()},
        TIED_LLAMA: Probe(str(folders["llama tied"]), RolloutLayout(2, pp=2), 1),
        **{
            f"{name} in bfloat16": Probe(str(folders[name]), RolloutLayout(1), 0, "bfloat16")
            for name in IN_BFLOAT16
        },
    }
    return dict(zip(probes, probe_many(list(probes.values())), strict=True))


@pytest.mark.parametrize("key", PROBED)
def test_tables_equal_what_sglang_loads(folders, lives, key):
    (name, layout, rank), live = PROBED[key], lives[key]
    shape = load_model_shape(folders[name])
    shapes = rollout_param_shapes(shape, layout, rank)
    assert {n: p.values.shape for n, p in live.items()} == shapes
    full = coded_tensors(full_shapes(shape), torch.float32)
    wanted = cut(full, rollout_pieces(shape, layout, rank), shapes)
    for param, loaded in live.items():
        got, real = torch.from_numpy(loaded.values), wanted[param] >= 0
        assert torch.equal(got[real], wanted[param][real]), param
        # What the tables leave out is the padding, which SGLang does not fill from anywhere.
        assert set(got[~real].unique().tolist()) <= {-1.0, 0.0}, param


def test_a_tied_llama_has_no_head_on_a_later_stage(lives):
    """Why the table refuses it: the last stage has nothing to make logits with."""
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(lives[TIED_LLAMA])


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_what_stays_float32_in_the_engine_is_float32_in_the_table(folders, lives, name):
    shape = load_model_shape(folders[name])
    dtypes = {p.param: p.dtype or "bfloat16" for p in rollout_pieces(shape, RolloutLayout(1), 0)}
    assert {name: p.dtype for name, p in lives[f"{name} in bfloat16"].items()} == dtypes
