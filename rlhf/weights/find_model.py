"""A model by what a person calls it: a folder, a ``config.json``, or a name that we know.

Known models are ``configs/models/NAME.json``: beside the package in a checkout, inside it when it
is installed (``setup.py`` puts them there).
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rlhf.weights.model_shape import ModelShape, load_model_shape, read_model_config

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "model_configs", _PACKAGE.parent / "configs" / "models")


def find_model(model: str) -> ModelShape:
    """The shape of a model; weights need not be there.

    Args:
        model: a Hugging Face folder, a ``config.json``, or a known name.

    Raises:
        ValueError: nothing of that name, or not a model that we train.
    """
    config = find_config(model)
    return load_model_shape(model) if Path(model).is_dir() else read_model_config(config)


def find_config(model: str) -> Path:
    """Its ``config.json``, or the file that says the same of a known model.

    Raises:
        ValueError: nothing of that name.
    """
    if not model:  # would be the current folder
        raise ValueError("a model's name must not be empty: give a folder or a known name")
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        return path
    known = known_models()
    if model in known:
        return known[model]
    close = difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"model {model!r} is no folder, no config.json and no known name; {hint}"
        f"known names are {', '.join(known) or '(none: this installation has no model_configs)'}"
    )


def known_models() -> dict[str, Path]:
    """Name -> file, by name."""
    files = [file for place in _PLACES for file in sorted(place.glob("*.json"))]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}
