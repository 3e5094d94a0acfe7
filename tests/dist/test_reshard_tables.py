"""The rollout tables against SGLang itself, rank by rank of many layouts of every family.

SGLang's ``load_weights`` is traced without numbers; a few layouts are loaded with numbers too, and
these lie where the trace says.
"""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from rlhf.dist.layout import LayoutError, RolloutLayout
from rlhf.dist.layout_text import rollout_text
from rlhf.rollout.forks import Probe, ProbeError, in_forks
from rlhf.rollout.probe import differences, table, write_config
from rlhf.weights.families import check_rollout, full_shapes
from rlhf.weights.find_model import known_models
from rlhf.weights.model_shape import load_model_shape, parse_model_shape
from tests.helpers.sglang_probe import Coded, Killed, look
from tests.helpers.shapes import MODELS
from tests.helpers.shards import coded_tensors, cut

SIZES = {  # 16 divides what is cut over tp, and nothing is the same by chance
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 80, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 16,
    "num_key_value_heads": 16,
    # SGLang asks for these
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_MODELS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"num_key_value_heads": 16, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 16}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "moonlight": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1}),
    "glm4_moe": ("glm4_moe", {**EXPERTS, "n_routed_experts": 16}),
    "glm4_moe air": ("glm4_moe", {**EXPERTS, "n_routed_experts": 16, "use_qk_norm": False}),
}
RAW = {
    name: {**SIZES, **MODELS[family], **settings} for name, (family, settings) in _MODELS.items()
}
VARIANTS = ("llama tied", "qwen2 tied", "qwen3 tied", "glm4_moe air")
"""Seen in every third layout."""
DEEPSEEK_RAW = RAW["deepseek_v3"]
DENSE_GRID = [
    *({"tp": tp, "pp": pp} for tp, pp in product((1, 2, 4, 8, 16), (1, 2, 3)) if tp < 4 or pp < 3),
    {"tp": 4, "dp": 2},
    {"tp": 8, "dp": 8},
    {"tp": 16, "dp": 2},
    {"tp": 4, "dp": 2, "pp": 2},
]
EXPERT_GRID = [
    {"tp": 1},
    {"tp": 1, "pp": 3},
    {"tp": 16},
    {"tp": 8, "ep": 2},
    {"tp": 16, "ep": 4},
    {"tp": 16, "ep": 16},
    {"tp": 8, "dp": 8},
    {"tp": 4, "dp": 2, "ep": 2},
    {"tp": 16, "dp": 4, "ep": 8},
    {"tp": 8, "dp": 8, "ep": 8},
    {"tp": 4, "ep": 4, "a2a": "deepep"},
    {"tp": 16, "dp": 4, "ep": 16, "a2a": "deepep"},
    {"tp": 4, "ep": 2, "pp": 2},
    {"tp": 8, "ep": 8, "redundant_experts": 8},
    {"tp": 4, "ep": 2, "redundant_experts": 16},
    {"tp": 4, "dp": 2, "ep": 4, "redundant_experts": 48},
    {"tp": 4, "ep": 4, "a2a": "deepep", "redundant_experts": 12},
    {"tp": 4, "dp": 4, "ep": 4, "pp": 3, "a2a": "deepep"},
]


def _layouts(name):
    """What the model admits of its grid."""
    shape = parse_model_shape(RAW[name])
    for grid in EXPERT_GRID if shape.moe else DENSE_GRID:
        try:
            layout = RolloutLayout(grid["tp"] * grid.get("pp", 1), **grid)
            check_rollout(shape, layout)
        except LayoutError:
            continue
        yield "-".join(f"{k}{v}" for k, v in grid.items() if v != 1) or "one rank", layout


def _ranks(number, layout):
    """One in the middle of a middle stage, or the last; both where there are stages."""
    last = layout.engine_size - 1
    middle = min(layout.pp // 2 * layout.tp + layout.tp // 2, last)
    return {middle, last} if layout.pp > 1 else {last} if number % 2 else {middle}


TRACED = {
    f"{name} {words} rank {rank}": (name, layout, rank)
    for name in RAW
    for number, (words, layout) in enumerate(_layouts(name))
    if name not in VARIANTS or number % 3 == 0
    for rank in sorted(_ranks(number, layout))
}
LOADED = {
    f"{name} {'-'.join(f'{k}{v}' for k, v in grid.items())} rank {rank}": (
        name,
        RolloutLayout(grid["tp"] * grid.get("pp", 1), **grid),
        rank,
    )
    for name, grid, rank in [
        ("llama", {"tp": 8}, 5),
        ("qwen2 tied", {"tp": 4, "pp": 2}, 7),
        ("qwen3", {"tp": 8, "dp": 2}, 6),
        ("qwen3_moe", {"tp": 4, "ep": 2}, 2),
        ("deepseek_v3", {"tp": 4, "dp": 2, "ep": 2}, 3),
        ("deepseek_v3", {"tp": 4, "dp": 2, "ep": 4, "a2a": "deepep"}, 1),
        ("moonlight", {"tp": 2}, 1),
        ("glm4_moe", {"tp": 8, "ep": 2}, 6),
    ]
}
WIDE = {  # real widths: (known model, layers), layout, rank
    f"{name} {rollout_text(layout)} rank {rank}": ((name, layers), layout, rank)
    for name, layers, layout, rank in [
        ("deepseek-v3-671b", 5, RolloutLayout(64, tp=64, dp=8, ep=64), 37),
        ("deepseek-v3-671b", 5, RolloutLayout(32, tp=32), 31),
        ("deepseek-v3-671b", 5, RolloutLayout(16, tp=16, ep=16, quantization="block_fp8"), 9),
        ("qwen3-235b-a22b", 2, RolloutLayout(4, tp=4, ep=4, quantization="block_fp8"), 2),
        ("deepseek-v3-671b", 5, RolloutLayout(32, tp=32, dp=32, ep=32, redundant_experts=32), 31),
        ("kimi-k2-1t", 3, RolloutLayout(32, tp=32, dp=4, ep=32, a2a="deepep"), 30),
        ("moonlight-16b", 3, RolloutLayout(8, tp=8, ep=4), 5),
        ("qwen3-235b-a22b", 2, RolloutLayout(16, tp=16, ep=4), 7),
        ("glm-4.5-355b", 5, RolloutLayout(32, tp=32, dp=4, ep=32, a2a="deepep"), 31),
        ("glm-4.5-355b", 5, RolloutLayout(16, tp=8, ep=8, pp=2), 11),
        ("qwen2.5-7b", 2, RolloutLayout(4, tp=4), 3),
        ("llama-3.1-8b", 2, RolloutLayout(8, tp=8), 7),
    ]
}
TIED_LLAMA = "tied llama, last stage"
GLM_COPIES = "GLM with redundant experts"
REFUSED = "a config without what SGLang asks for"
KILLED = "killed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, raw in RAW.items():
        (root / name).mkdir()
        write_config(root / name, raw)
    for key in {key for key, _, _ in WIDE.values()}:
        raw = json.loads(known_models()[key[0]].read_text())
        (root / key[0]).mkdir()
        write_config(root / key[0], {**raw, "num_hidden_layers": key[1]})
    (root / REFUSED).mkdir()
    write_config(root / REFUSED, {k: v for k, v in DEEPSEEK_RAW.items() if k != "moe_layer_freq"})
    return {
        **{name: str(root / name) for name in (*RAW, REFUSED)},
        **{key: str(root / key[0]) for key, _, _ in WIDE.values()},
    }


@pytest.fixture(scope="module")
def outcomes(folders):
    probes = {
        **{key: Probe(folders[name], *at) for key, (name, *at) in TRACED.items()},
        **{("traced", key): Probe(folders[name], *at) for key, (name, *at) in LOADED.items()},
        **{("loaded", key): Coded(folders[name], *at) for key, (name, *at) in LOADED.items()},
        TIED_LLAMA: Probe(folders["llama tied"], RolloutLayout(2, pp=2), 1),
        GLM_COPIES: Probe(
            folders["glm4_moe"], RolloutLayout(2, tp=2, ep=2, redundant_experts=8), 1
        ),
        REFUSED: Probe(folders[REFUSED], RolloutLayout(4, tp=4), 3),
        KILLED: Killed(folders["llama"], RolloutLayout(4, tp=4, pp=1), 2),
        **{key: Probe(folders[name], *at) for key, (name, *at) in WIDE.items()},
    }
    return dict(zip(probes, in_forks(look, list(probes.values())), strict=True))


@pytest.mark.parametrize("key", {**TRACED, **WIDE})
def test_tables_equal_what_sglang_does(outcomes, key):
    outcome = outcomes[key]
    wanted = table(load_model_shape(outcome.probe.folder), outcome.probe)
    assert not differences(wanted, outcome.get())


@pytest.mark.parametrize("key", LOADED)
def test_numbers_lie_where_the_trace_says(folders, outcomes, key):
    live, traced = outcomes["loaded", key].get(), outcomes["traced", key].get()
    full = coded_tensors(full_shapes(load_model_shape(folders[LOADED[key][0]])), torch.float32)
    shapes = {name: shape for name, (shape, _) in traced.params.items()}
    assert {name: p.values.shape for name, p in live.items()} == shapes
    wanted = cut(full, traced.pieces, shapes)
    for param, loaded in live.items():
        got, real = torch.from_numpy(loaded.values), wanted[param] >= 0
        assert torch.equal(got[real], wanted[param][real]), param
        # What no piece covers is the padding, which SGLang does not fill from anywhere.
        assert set(got[~real].unique().tolist()) <= {-1.0, 0.0}, param


def test_every_family_is_traced_in_a_dozen_layouts():
    families = {name: parse_model_shape(raw).family for name, raw in RAW.items()}
    families["moonlight"] = "moonlight"
    layouts = {(families[name], layout) for name, layout, _ in TRACED.values()}
    for family in set(families.values()):
        assert sum(f == family for f, _ in layouts) >= 12, family


def test_a_glm_has_no_room_for_redundant_experts(outcomes):
    """Why the table refuses them: of 16 and 8 on two ranks each should have 12."""
    probed = outcomes[GLM_COPIES].get()
    name = "model.layers.2.mlp.experts.w2_weight"
    assert probed.params[name][0][0] == 8


def test_a_refusal_of_sglang_names_the_rank_and_its_reason(outcomes):
    with pytest.raises(ProbeError, match=r"at tp=4, rank 3: AttributeError: .*moe_layer_freq"):
        outcomes[REFUSED].get()


def test_a_probe_that_dies_says_how_and_the_next_goes_on(outcomes):
    with pytest.raises(ProbeError, match=r"at tp=4, rank 2: the process was killed by SIGKILL"):
        outcomes[KILLED].get()


def test_a_tied_llama_has_no_head_on_a_later_stage(outcomes):
    """Why the table refuses it: the last stage has nothing to make logits with."""
    params = outcomes[TIED_LLAMA].get().params
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(params)
