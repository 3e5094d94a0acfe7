"""Llama: the dense table as it is.

SGLang's class makes an untied head on every pipeline stage (only the last one uses it), and has no
head on the last stage when embeddings are tied.
"""

from __future__ import annotations

from dataclasses import replace

from rlhf.weights.families.dense import DENSE, HEAD
from rlhf.weights.families.family import Stage

LLAMA = replace(
    DENSE,
    rollout=replace(
        DENSE.rollout,
        outer=tuple(
            replace(outer, stage=Stage.EVERY) if outer.param == HEAD else outer
            for outer in DENSE.rollout.outer
        ),
    ),
    tied_rollout_pp=False,
)
