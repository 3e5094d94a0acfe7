"""Each check of ``make gpu-check``, on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rlhf.bench import gpu_check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("entry", gpu_check.CHECKS, ids=lambda entry: entry.name)
def test_a_check_holds_on_a_gpu(entry):
    if entry.tier == 2 and importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    (outcome,) = gpu_check.run_all([entry], "cuda", entry.limit_s)
    assert outcome.ok, outcome.error
