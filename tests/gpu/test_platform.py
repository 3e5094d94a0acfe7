"""The stand-ins of a CPU machine are inert where there is a GPU."""

import pytest
import torch

from rlhf.platform.sglang_cpu import activate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_machine_with_a_gpu_keeps_its_platform() -> None:
    assert activate() is None
