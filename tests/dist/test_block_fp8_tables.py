"""Block fp8 against SGLang itself: its conversion of weights."""

from __future__ import annotations

import pytest
import torch

from rlhf.weights.block_fp8 import quantize


@pytest.mark.parametrize("size", [(128, 128), (576, 320), (2112, 200), (1, 1)], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e38, 1e-6, 1e-44, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_conversion_is_sglangs_bit_for_bit(size, magnitude, dtype):
    from sglang.srt.layers.quantization.mxfp8_block_convert import bf16_to_block_fp8_128

    generator = torch.Generator().manual_seed(size[0])
    spread = torch.randn(size, generator=generator).clamp(-3, 3) / 3
    weight = (spread * magnitude).to(dtype)
    values, scales = quantize(weight)
    wanted, wanted_scales = bf16_to_block_fp8_128(weight)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), wanted_scales.view(torch.int32))
