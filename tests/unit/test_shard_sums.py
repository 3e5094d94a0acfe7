"""Checksums of a shard find whatever a way back got wrong."""

from __future__ import annotations

import pytest
import torch

from rlhf.reshard.shard_sums import SHOWN, restore_faults, shard_sums


def _params(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = {"weight": (7, 33), "bias": (5,), "experts": (3, 4, 6)}
    return {name: torch.randn(shape, generator=gen).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_that_came_back_whole_has_no_faults(dtype):
    params = _params(dtype)
    back = {name: param.clone() for name, param in params.items()}
    assert restore_faults(shard_sums(params), back) == ()


@pytest.mark.parametrize("name", ["weight", "bias", "experts"])
@pytest.mark.parametrize("change", ["bit", "swap", "zero"])
def test_the_parameter_that_differs_is_named(name, change):
    params = _params(torch.bfloat16)
    before = shard_sums(params)
    flat = params[name].view(-1)
    if change == "bit":
        flat.view(torch.int16)[1] ^= 1
    elif change == "swap":
        flat[[0, 1]] = flat[[1, 0]].clone()
    else:
        flat.zero_()
    (fault,) = restore_faults(before, params)
    assert fault.startswith(f"{name} is not")


def test_a_parameter_that_is_gone_is_a_fault_and_many_are_counted():
    params = {f"p{i}": torch.full((4,), float(i)) for i in range(SHOWN + 2)}
    faults = restore_faults(shard_sums(params), {"p0": params["p0"]})
    assert len(faults) == SHOWN + 1
    assert faults[-1] == "and 1 more of these"


def test_an_empty_stage_has_no_sums():
    assert shard_sums({}) == {}
