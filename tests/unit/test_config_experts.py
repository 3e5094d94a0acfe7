"""Keys for experts that have no effect, or layouts that Megatron trains wrongly, are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config.check import check_config
from rlhf.config.faults import ConfigError
from rlhf.config.load import load_text
from rlhf.config.schema import Config
from rlhf.weights.model_shape import MLAShape
from tests.helpers.shapes import make_experts
from tests.unit.test_config_check import SMALL, check, shape

QWEN = make_experts()
SIZES = {"family": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4, "tied_embeddings": False}
COEF = "train.moe.aux_loss_coef=0.01"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.moe.dispatcher=flex"], "train.moe.dispatcher: flex has no effect: llama has no"),
        (["train.moe.freeze_router=true"], "train.moe.freeze_router: True has no effect"),
    ],
)
def test_keys_for_experts_are_refused_for_a_dense_model(overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([COEF], "train.moe.aux_loss_coef: 0.01 has no effect while train.moe.aux_loss is none"),
        (["train.moe.aux_loss=sequence"], "train.moe.aux_loss_coef: must be given"),
        (["train.moe.bias_decay=0.1"], "train.moe.bias_decay: 0.1 has no effect: qwen3_moe has no"),
        (
            ["train.moe.dispatcher=allgather", "train.pp=2"],
            "train.moe.dispatcher: must be alltoall while train.pp is 2",
        ),
        (
            ["train.tp=2", "train.sequence_parallel=true", "train.etp=1"],
            "train.etp: must be train.tp=2 while train.ep is 1, is 1",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(*overrides, moe=QWEN, **SIZES)


LATENT = MLAShape(None, 16, 8, 8, 8)


@pytest.mark.parametrize(
    ("parts", "words"),
    [({"moe": QWEN}, "a model with experts"), ({"mla": LATENT}, "a model with latent attention")],
)
def test_a_cut_over_tp_needs_sequence_parallelism(parts, words):
    """Without it Megatron's gradients are wrong and nothing says so."""
    with pytest.raises(ConfigError, match=f"train.sequence_parallel: must be true for {words}"):
        check("train.tp=2", **parts, **SIZES)


def test_the_example_of_the_docs_holds():
    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    config = load_text(Config, SMALL + example, "experts.md", [])
    biased = replace(QWEN, expert_bias=True)
    check_config(config, shape(moe=biased, **SIZES), 8, "experts.md")
