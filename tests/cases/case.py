"""What the operations of all rooms have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Case = dict[str, Any]
Op = Callable[[Case], Case]


def floats(values: list[Any]) -> torch.Tensor:
    """Numbers, with "NaN" for what is not one."""
    return torch.tensor([math.nan if v == "NaN" else float(v) for v in values])
