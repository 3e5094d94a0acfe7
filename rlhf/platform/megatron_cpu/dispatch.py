"""Split sizes of the exchange of tokens between experts."""

from __future__ import annotations

import functools
from typing import Any

import torch


def provide_split_sizes() -> None:
    """Give all-to-all its split sizes as numbers: megatron converts only those on a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    for module in (moe_utils, token_dispatcher):  # the second imported the name from the first
        target: Any = module
        target.maybe_move_tensor_to_cpu = move
