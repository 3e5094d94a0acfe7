"""Checksums: equal for equal bytes however they lie, another for every change that may happen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard import checksum
from rlhf.reshard.checksum import Checksum

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def _random(shape, dtype, seed=0):
    """Any bytes, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(list(shape))


def _sum(values):
    return int(Checksum("cpu").of(values))


def _bytes(values):
    return values.view(torch.uint8).view(-1)


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_a_rectangle_of_a_larger_tensor_has_the_sum_of_its_copy(data, shape, dtype):
    before = [data.draw(st.integers(0, 3)) for _ in shape]
    larger = _random(
        [b + n + data.draw(st.integers(0, 3)) for b, n in zip(before, shape, strict=True)], dtype
    )
    part = larger[tuple(slice(b, b + n) for b, n in zip(before, shape, strict=True))]
    assert _sum(part) == _sum(part.contiguous().clone())


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_any_changed_byte_changes_the_sum(data, shape, dtype):
    values = _random(shape, dtype)
    before = _sum(values)
    at = data.draw(st.integers(0, values.nbytes - 1))
    _bytes(values)[at] ^= data.draw(st.integers(1, 255))
    assert _sum(values) != before


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_any_two_swapped_elements_change_the_sum(data, shape, dtype):
    values = _random(shape, dtype)
    flat = values.view(-1)
    i, j = (data.draw(st.integers(0, flat.numel() - 1)) for _ in range(2))
    swapped = flat.clone()
    swapped[i], swapped[j] = flat[j].clone(), flat[i].clone()
    differ = not torch.equal(_bytes(swapped), _bytes(flat))
    assert (_sum(swapped.view(values.shape)) != _sum(values)) == differ


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_differ_in_their_sign_alone_are_told_apart_at_every_place(dtype):
    """Only the highest bit of a word differs then, which a product keeps least of."""
    values = torch.ones(16, 8).to(dtype)
    sums = set()
    for i in range(values.numel()):
        one = values.clone().view(-1)
        one[i] = -1.0
        sums.add(_sum(one.view(16, 8)))
    assert len(sums) == values.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_columns_in_another_order_have_another_sum(dtype):
    values = _random((64, 48), dtype)
    down, across = torch.arange(64), torch.arange(48)
    orders = [(down, across), (down.flip(0), across), (down.roll(1), across),
              (down, across.flip(0)), (down, across.roll(2))]  # fmt: skip
    data = values.view(torch.uint8).view(64, 48, -1)
    ways = [data[rows][:, columns].contiguous().view(dtype)[..., 0] for rows, columns in orders]
    assert len({_sum(way.contiguous()) for way in ways}) == len(ways)


def test_the_sum_does_not_depend_on_how_much_is_taken_at_a_time(monkeypatch):
    values = _random((300, 6, 128), torch.bfloat16)
    wanted = _sum(values)
    for words in (1, 1000, 10**9):
        monkeypatch.setitem(checksum.STRIP_WORDS, "cpu", words)
        assert _sum(values) == wanted
        assert _sum(values.transpose(0, 1).contiguous().transpose(0, 1)) == wanted


@pytest.mark.parametrize("num_columns", [12, 6, 5])
def test_the_sum_is_the_one_of_its_definition(num_columns):
    """Over plain integers, with the module's weights; words have 8, 4 and 2 bytes."""
    values = _random((5, num_columns), torch.bfloat16)
    kind = {12: torch.int64, 6: torch.int32, 5: torch.int16}[num_columns]
    words = [
        [w + (w >> 32 if kind == torch.int64 else 0) for w in row]
        for row in values.view(kind).tolist()
    ]
    columns, rows = (checksum._weights(n, s).tolist() for n, s in ((len(words[0]), 1), (5, 2)))
    total = sum(
        word * column * row
        for of_row, row in zip(words, rows, strict=True)
        for word, column in zip(of_row, columns, strict=True)
    )
    assert _sum(values) % 2**64 == total % 2**64
    assert all(w % 2 for w in columns + rows)


def test_one_object_sums_small_after_large_and_nothing():
    one = Checksum("cpu")
    for shape in ((70, 900), (3,), (2, 2000), (0, 4), (4, 1)):
        values = _random(shape, torch.bfloat16)
        assert int(one.of(values)) == _sum(values)
