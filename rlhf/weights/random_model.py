"""A model folder with random weights, in the names and shapes of its family's table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.weights.families import full_pieces
from rlhf.weights.hf_checkpoint import SINGLE_NAME, write_tensors
from rlhf.weights.model_shape import parse_model_shape
from rlhf.weights.value_model import CAUSAL, CLASSIFIER, SCORE, VOCABULARY_HEAD

SPREAD = 0.08
"""Standard deviation of weights, as wide as makes narrow random models answer unlike."""


def write_random_model(
    folder: Path, raw: Mapping[str, Any], dtype: str, *, seed: int, head: bool = False
) -> None:
    """``config.json`` and ``model.safetensors``.

    Args:
        raw: the object of ``config.json``, of a language model.
        dtype: ``float32`` or ``bfloat16``, of all tensors that have none of their own.
        head: a sequence classifier with one label instead.

    Raises:
        ValueError: not a model that we train.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    raw = {**raw, "dtype": dtype}
    shape = parse_model_shape(raw)
    pieces = full_pieces(replace(shape, tied_embeddings=False) if head else shape)
    sizes = {p.tensor: ([n for _, n in p.region], p.dtype or dtype) for p in pieces}
    if head:
        raw["architectures"] = [a.replace(CAUSAL, CLASSIFIER) for a in raw["architectures"]]
        raw["num_labels"] = 1
        del sizes[VOCABULARY_HEAD]
        sizes[SCORE] = ([1, shape.hidden_size], dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (size, kind) in sizes.items():
        values = torch.randn(size, generator=generator) * SPREAD
        norm = "norm" in name and name.endswith("weight")
        tensors[name] = (values + 1 if norm else values).to(getattr(torch, kind))
    write_tensors(folder / SINGLE_NAME, tensors)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
