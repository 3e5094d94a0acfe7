"""Weight loaders that misbehave inside the scheduler; named in a spec's ``receiver``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def raise_error(model: Any, named_tensors: Iterable[Any]) -> None:
    raise ValueError("no such tensor")


def leave_nan(model: Any, named_tensors: Iterable[Any]) -> None:
    """An update that forgot one parameter."""
    model.model.norm.weight.data.fill_(float("nan"))


def write_nothing(model: Any, named_tensors: Iterable[Any]) -> None:
    """Sleeps as the real receiver does; an update leaves every weight as it is."""
    from rlhf.rollout import receiver

    for text, tensor in named_tensors:
        if json.loads(text)["op"] == "sleep":
            receiver.load(model, [(text, tensor)])


def wait_for_file(model: Any, named_tensors: Iterable[Any]) -> None:
    """Stay inside the call until the file that the message names exists."""
    for text, _ in named_tensors:
        message = json.loads(text)
        if message["op"] != "sleep":
            while not Path(message["file"]).exists():
                time.sleep(0.01)
