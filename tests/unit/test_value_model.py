"""What a critic or a reward model may be loaded from."""

from __future__ import annotations

import json

import pytest

from rlhf.dist.layout import TrainLayout
from rlhf.weights.value_model import load_value_model
from tests.helpers.tiny_models import make_tiny, make_tiny_classifier


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_classifier_gives_body_and_head_a_language_model_the_body(family, tmp_path):
    classifier = make_tiny_classifier(tmp_path / "classifier", family)
    causal = make_tiny(tmp_path / "causal", family)
    layout = TrainLayout(2, pp=2)
    for folder, has_head in ((classifier, True), (causal, False)):
        model = load_value_model(folder, needs_head=has_head)
        assert model.has_head == has_head
        held = [{p.tensor for p in model.pieces(layout, rank)} for rank in range(2)]
        assert held[0] | held[1] == set(model.tensors())
        assert ("score.weight" in held[1]) == has_head
        assert "score.weight" not in held[0]
        assert not any("lm_head.weight" in tensors for tensors in held)


def test_folders_that_cannot_value_are_refused_by_name(tmp_path):
    causal = make_tiny(tmp_path / "causal", "llama")
    with pytest.raises(ValueError, match=r"must be a sequence classifier.*LlamaForCausalLM"):
        load_value_model(causal, needs_head=True)
    config = json.loads((causal / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (causal / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"score\.weight is missing.*num_labels=1"):
        load_value_model(causal, needs_head=False)
    three = make_tiny_classifier(tmp_path / "three", "llama", num_labels=3)
    with pytest.raises(ValueError, match=r"score\.weight has shape \(3, 64\).*num_labels=1"):
        load_value_model(three, needs_head=True)
    with pytest.raises(ValueError, match=r"a folder without config\.json"):
        load_value_model(tmp_path / "nowhere", needs_head=True)
