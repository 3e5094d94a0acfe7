"""The models of a job, and small random ones of the same kind in folders of their own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config
from rlhf.data.byte_tokenizer import BOS, EOS, PAD, write_byte_tokenizer
from rlhf.planner.shrink_layout import Layouts
from rlhf.planner.shrink_model import Layers, shrink_model
from rlhf.weights.config_keys import read_object
from rlhf.weights.find_model import find_config, find_model
from rlhf.weights.hf_checkpoint import is_weight_file
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.random_model import write_random_model
from rlhf.weights.value_model import CAUSAL, CLASSIFIER, value_model_shape

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
POSITIONS = 4096
"""A smaller model has at least so many: with a token per byte, prompts are longer."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a configuration names: a folder, a ``config.json`` or a known name."""

    name: str
    raw: Mapping[str, Any]
    shape: ModelShape

    @property
    def folder(self) -> Path | None:
        """With weights."""
        path = Path(self.name)
        there = path.is_dir() and any(is_weight_file(p.name) for p in path.iterdir())
        return path if there else None

    @property
    def has_head(self) -> bool:
        """A sequence classifier."""
        return any(name.endswith(CLASSIFIER) for name in self.raw["architectures"])

    @property
    def has_tokenizer(self) -> bool:
        return (Path(self.name) / TOKENIZER_FILES[0]).is_file()


def actor_model(config: Config) -> Model:
    """
    Raises:
        ValueError: nothing of that name, or not a model that we train.
    """
    name = config.model.path
    return Model(name, read_object(find_config(name)), find_model(name))


def value_model(name: str) -> Model:
    """Of a critic or a reward model; errors as of :func:`actor_model`."""
    return Model(name, read_object(find_config(name)), value_model_shape(name))


class Folders:
    """Writes below one folder."""

    def __init__(self, folder: Path, layers: Layers, full: Layouts, smaller: Layouts) -> None:
        self.folder = folder
        self._layers = layers
        self._layouts = full, smaller

    def write_tokenizer(self, model: Model, stop: tuple[str, ...]) -> tuple[Path, int | None]:
        """The model's own, or one of bytes: its folder, and rows that the vocabulary then has."""
        target = self.folder / "tokenizer"
        target.mkdir(parents=True)
        if not model.has_tokenizer:
            write_byte_tokenizer(target, stop)
            return target, None
        for name in TOKENIZER_FILES:
            if (file := Path(model.name) / name).is_file():
                shutil.copyfile(file, target / name)
        return target, model.shape.vocab_size

    def write(
        self, role: str, model: Model, tokenizer: Path, rows: int | None, dtype: str
    ) -> ModelShape:
        """A random model of the same kind, its tokenizer beside it; returns its shape.

        Args:
            role: names the folder.
            rows: of the vocabulary, as :meth:`write_tokenizer` has it.
        """
        raw = {**model.raw, "architectures": [self._causal(n) for n in model.raw["architectures"]]}
        small = shrink_model(raw, model.shape, self._layers, *self._layouts, vocab_size=rows)
        small["max_position_embeddings"] = max(POSITIONS, model.shape.max_position)
        if rows is None:
            small |= {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
        target = self.folder / role
        seed = sum(map(ord, role))  # roles differ
        write_random_model(target, small, dtype, seed=seed, head=model.has_head)
        for file in tokenizer.iterdir():
            shutil.copyfile(file, target / file.name)
        return value_model_shape(str(target)) if model.has_head else find_model(str(target))

    @staticmethod
    def _causal(name: str) -> str:
        return name.replace(CLASSIFIER, CAUSAL)
