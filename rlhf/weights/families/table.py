"""The families that we know, by the name in :class:`ModelShape`."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.weights.families.family import Family
from rlhf.weights.families.llama import LLAMA
from rlhf.weights.families.qwen2 import QWEN2
from rlhf.weights.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
