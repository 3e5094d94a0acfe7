"""The rollout tables against SGLang itself: its classes load coded tensors, element by element."""

from __future__ import annotations

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
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3 tied": {"family": "qwen3", "num_key_value_heads": 4, "head_dim": 16, "tied": True},
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
]


def test_tables_equal_what_sglang_loads(tmp_path):
    folders = {
        name: make_tiny(tmp_path / name.replace(" ", "-"), **{**SIZES, **settings})
        for name, settings in MODELS.items()
    }
    cases, probes = [], []
    for name, settings, ranks in LAYOUTS:
        layout = RolloutLayout(settings.get("tp", 1) * settings.get("pp", 1), **settings)
        for rank in ranks:
            at = layout.coord(rank)
            cases.append((name, layout, rank))
            probes.append(
                Probe(str(folders[name]), layout.tp, layout.pp, at.tp, at.pp, dp=layout.dp)
            )
    probes.append(Probe(str(folders["llama tied"]), 1, 2, 0, 1))
    *lives, refused = probe_many(probes)
    # Why the table refuses tied Llama over stages: the last one has nothing to make logits with.
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(refused)
    for (name, layout, rank), live in zip(cases, lives, strict=True):
        shape = load_model_shape(folders[name])
        shapes = rollout_param_shapes(shape, layout, rank)
        assert {n: a.shape for n, a in live.items()} == shapes, (name, layout, rank)
        full = coded_tensors(full_shapes(shape), torch.float32)
        wanted = cut(full, rollout_pieces(shape, layout, rank), shapes)
        for param, array in live.items():
            got, real = torch.from_numpy(array), wanted[param] >= 0
            assert torch.equal(got[real], wanted[param][real]), (name, layout, rank, param)
            # What the tables leave out is the padding, which SGLang does not fill from anywhere.
            assert set(got[~real].unique().tolist()) <= {-1.0, 0.0}, (name, layout, rank, param)
