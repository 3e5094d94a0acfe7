"""Models that end in a value: the body of a language model, and ``score.weight`` as its head.

A Hugging Face folder of ``XForSequenceClassification`` with one label is such a model; a folder of
``XForCausalLM`` gives a body only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.dist.layout import TrainLayout
from rlhf.weights.config_keys import read_object, strings
from rlhf.weights.families import full_shapes, train_param_shapes, train_pieces
from rlhf.weights.find_model import find_config, find_model
from rlhf.weights.hf_checkpoint import check_index
from rlhf.weights.model_shape import ModelShape, load_model_shape, parse_model_shape
from rlhf.weights.piece import Piece, full_box

SCORE = "score.weight"
VOCABULARY_HEAD = "lm_head.weight"
HEAD_PARAM = "output_layer.weight"
CLASSIFIER, CAUSAL = "ForSequenceClassification", "ForCausalLM"


@dataclass(frozen=True, slots=True)
class ValueModel:
    """A folder to load from."""

    folder: str
    shape: ModelShape  # of the body; never tied: there is no vocabulary to tie to
    has_head: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape of what is loaded."""
        out = full_shapes(self.shape)
        del out[VOCABULARY_HEAD]
        return out | ({SCORE: (1, self.shape.hidden_size)} if self.has_head else {})

    def pieces(self, layout: TrainLayout, rank: int) -> list[Piece]:
        """What ``rank`` holds in Megatron; a head that the folder lacks has no piece."""
        body = train_pieces(self.shape, layout, rank)
        pieces = [p for p in body if p.tensor != VOCABULARY_HEAD]
        if self.has_head:
            box = full_box((1, self.shape.hidden_size))
            names = train_param_shapes(self.shape, layout, rank)
            pieces += [Piece(SCORE, box, n, box) for n in names if n.endswith(HEAD_PARAM)]
        return pieces


def value_model_shape(model: str) -> ModelShape:
    """The body of a language model or of a classifier; weights need not be there.

    Args:
        model: as in :func:`rlhf.weights.find_model.find_model`.

    Raises:
        ValueError: nothing of that name, or not a model that we run.
    """
    path = find_config(model)
    raw = read_object(path) if path.is_file() else {}
    names = _architectures(path, raw)
    has_head = any(name.endswith(CLASSIFIER) for name in names)
    shape = _body_shape(path, raw, names) if has_head else find_model(model)
    return replace(shape, tied_embeddings=False)


def load_value_model(folder: str | Path, *, needs_head: bool) -> ValueModel:
    """Look at ``folder``: its config.json and the headers of its weight files.

    Raises:
        ValueError: the model is not one that we run, a tensor is missing, or, with ``needs_head``,
            the folder is no sequence classifier with one label.
    """
    path = Path(folder) / "config.json"
    raw = read_object(path) if path.is_file() else {}
    names = _architectures(path, raw)
    has_head = any(name.endswith(CLASSIFIER) for name in names)
    if needs_head and not has_head:
        raise ValueError(
            f"{folder}: must be a sequence classifier with a head {SCORE}, e.g. "
            f"Llama{CLASSIFIER}, is {names or 'a folder without config.json'}"
        )
    shape = _body_shape(path, raw, names) if has_head else load_model_shape(folder)
    model = ValueModel(str(folder), replace(shape, tied_embeddings=False), has_head)
    _check_one_label(model)
    check_index(folder, model.tensors())
    return model


def _architectures(path: Path, raw: Mapping[str, Any]) -> list[str]:
    try:
        return strings(raw, "architectures")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _body_shape(path: Path, raw: Mapping[str, Any], names: list[str]) -> ModelShape:
    causal = [name.replace(CLASSIFIER, CAUSAL) for name in names]
    try:
        return parse_model_shape({**raw, "architectures": causal})
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_one_label(model: ValueModel) -> None:
    if not model.has_head:
        return
    try:
        check_index(model.folder, {SCORE: (1, model.shape.hidden_size)})
    except ValueError as error:
        raise ValueError(f"{error}; it must be a {CLASSIFIER} with num_labels=1") from None
