"""Block fp8 against a loop over the blocks. Against SGLang: tests/dist/test_block_fp8_tables.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.weights.block_fp8 import STRIP_ELEMENTS, pack, quantize, refuse_not_finite
from rlhf.weights.block_scales import (
    BLOCK,
    is_scale,
    scale_box,
    scale_name,
    scale_piece,
    scale_shape,
    weight_box,
)
from rlhf.weights.piece import Piece, full_box
from tests.helpers.shards import slices

FP8 = torch.float8_e4m3fn
SIZES = [(128, 128), (256, 384), (1, 1), (129, 127), (576, 320), (100, 300), (320, 64)]
EXTREMES = {
    "usual": 1.0,
    "large": 1e38,
    "small": 1e-6,  # below what a scale may be
    "least": 1e-44,  # denormal
}


def _weights(rows, cols, dtype, magnitude=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator) * 0.3 * magnitude).to(dtype)


def _by_loop(weight):
    """One block after the other."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=FP8)
    scales = torch.empty(scale_shape(weight.shape))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            block = weight[at].float()
            scale = max(block.abs().max(), torch.tensor(1e-4)) / 448.0
            scales[i, j] = scale
            values[at] = (block / scale).to(FP8)
    return values, scales


def _equal(got, wanted):
    """Bit for bit."""
    values, scales = got
    assert torch.equal(values.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), wanted[1].view(torch.int32))


@pytest.mark.parametrize("magnitude", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_blocks_are_quantised_each_for_itself(size, dtype, magnitude):
    weight = _weights(*size, dtype, magnitude)
    _equal(quantize(weight), _by_loop(weight))


def test_a_block_of_zeros_is_zero_and_has_a_finite_scale():
    weight = _weights(256, 256, torch.bfloat16)
    weight[:128, 128:] = 0
    values, scales = quantize(weight)
    assert torch.equal(values[:128, 128:].float(), torch.zeros(128, 128))
    assert float(scales[0, 1]) == pytest.approx(1e-4 / 448)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e30])
def test_an_element_comes_back_to_half_a_step(magnitude):
    """e4m3 has three bits behind the point: 1/16 of the element, or 2**-10 of the scale."""
    weight = _weights(300, 200, torch.float32, magnitude)
    values, scales = quantize(weight)
    each = scales.repeat_interleave(BLOCK, 0)[:300].repeat_interleave(BLOCK, 1)[:, :200]
    error = (values.float() * each - weight).abs()
    assert bool((error <= torch.maximum(weight.abs() / 16, each * 2**-10) * (1 + 1e-6)).all())
    largest = torch.stack([v.abs().max() for v in values.float().split(BLOCK)])
    assert torch.equal(largest, torch.full_like(largest, 448))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [(0, 0), (299, 199)])
def test_what_is_not_finite_is_refused(value, at):
    weight = _weights(300, 200, torch.bfloat16)
    weight[at] = value
    with pytest.raises(ValueError, match=r"NaN or infinite elements are in a weight .*300, 200"):
        quantize(weight)
    for kind, out in (("weight", torch.empty(300, 200, dtype=FP8)), ("scale", torch.empty(3, 2))):
        fine = pack(_weights(128, 128, torch.bfloat16), "scale", torch.empty(1, 1))
        with pytest.raises(ValueError, match=r"are in the bad one$"):
            refuse_not_finite({"fine": fine, "the bad one": pack(weight, kind, out)})


def test_rectangles_of_a_stack_are_packed_as_the_whole_is():
    """Strided, cut between blocks, strip after strip: the bytes are those of the whole matrix."""
    rows, cols = 576, 10_000
    assert rows * cols > STRIP_ELEMENTS
    wide = torch.stack([_weights(rows, cols + 300, torch.bfloat16, seed=i) for i in range(2)])
    stack = wide[:, :, :cols]
    assert not stack.is_contiguous()
    whole = [_by_loop(matrix) for matrix in stack]
    for number, *matrix in (
        (0, (0, rows), (0, cols)),
        (1, (0, rows), (0, cols)),
        (1, (128, 384), (9856, cols)),
    ):
        part = stack[number : number + 1][(slice(None), *slices(matrix))]
        values = torch.empty(part.shape, dtype=FP8)
        scales = torch.empty(scale_shape(part.shape))
        assert not pack(part, "weight", values)
        assert not pack(part, "scale", scales)
        wanted = whole[number]
        _equal(
            (values[0], scales[0]),
            (wanted[0][slices(matrix)], wanted[1][slices(scale_box(tuple(matrix)))]),
        )


@pytest.mark.parametrize(
    "kind,out",
    [
        ("weight", torch.empty(256, 128)),
        ("weight", torch.empty(128, 256, dtype=FP8)),
        ("weight", torch.empty(256, 256, dtype=FP8)[:, :128]),
        ("scale", torch.empty(2, 1, dtype=torch.bfloat16)),
        ("scale", torch.empty(1, 1)),
    ],
)
def test_a_destination_of_another_form_is_refused(kind, out):
    with pytest.raises(ValueError, match=f"the {kind} of a rectangle \\[256, 128\\] needs"):
        pack(torch.ones(256, 128), kind, out)


def _cuts(size):
    """Half-open ranges between blocks, the end included."""
    edges = [*range(0, size, BLOCK), size]
    return st.tuples(st.sampled_from(edges), st.sampled_from(edges)).filter(lambda c: c[0] < c[1])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_scales_of_any_part_of_a_shard_come_from_the_weights_under_them(data):
    """What a shard holds, cut as a destination needs it, gives the scales of the whole tensor."""
    shape = (data.draw(st.sampled_from([128, 320, 576])), data.draw(st.sampled_from([130, 384])))
    whole = _weights(*shape, torch.float32)
    region = tuple(data.draw(_cuts(size)) for size in shape)
    at = data.draw(st.integers(0, 200))  # stacked under something else
    rows, cols = (stop - start for start, stop in region)
    local = ((1, 2), (at, at + rows), (0, cols))
    param = torch.full((2, at + rows + 9, cols + 9), float("nan"))
    param[slices(local)] = whole[slices(region)]
    weight = Piece("a.weight", region, "w", local)
    held = scale_piece(weight, shape)
    assert (held.tensor, held.param, held.dtype) == ("a.weight_scale_inv", "w", "float32")
    need = tuple(
        data.draw(st.tuples(st.integers(a, b), st.integers(a, b)).filter(lambda c: c[0] < c[1]))
        for a, b in held.region
    )
    part = param[slices(weight_box(need, held.region, held.local))]
    got = torch.empty(scale_shape(part.shape))
    assert not pack(part, "scale", got)
    assert torch.equal(got[0], quantize(whole)[1][slices(need)])


def test_a_cut_through_a_block_is_refused_by_name():
    weight = Piece("a.weight", ((0, 192), (0, 128)), "w", ((0, 192), (0, 128)))
    with pytest.raises(ValueError, match=r"a\.weight: .*0:192.* of \[256, 128\] in w.*cut at 192"):
        scale_piece(weight, (256, 128))
    assert scale_piece(weight, (192, 128)).region == ((0, 2), (0, 1))


def test_names_of_scales():
    assert scale_name("x.experts.w13_weight") == "x.experts.w13_weight_scale_inv"
    assert is_scale(scale_name("x.weight"))
    assert not is_scale("x.weight")
    assert scale_shape((8, 2112, 7168)) == (8, 17, 56)
    assert scale_box(full_box((2112, 7168))) == ((0, 17), (0, 56))
