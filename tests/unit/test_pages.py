"""Released pages leave the process; the tensor keeps its address."""

import os
from pathlib import Path

import pytest
import torch

from rlhf.platform.pages import release_pages

MIB = 2**20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_memory_leaves_the_process_and_comes_back_when_touched():
    tensor = torch.ones(64 * MIB // 4)
    address, full = tensor.data_ptr(), resident_bytes()
    release_pages(tensor)
    assert full - resident_bytes() > 60 * MIB
    assert tensor.data_ptr() == address
    tensor.fill_(2.0)
    assert full - resident_bytes() < 4 * MIB
    assert tensor.eq(2).all()


def test_neighbours_on_a_shared_page_are_left_alone():
    whole = torch.ones(3 * 4096)
    release_pages(whole[100:-100])
    assert whole[:100].eq(1).all()
    assert whole[-100:].eq(1).all()


@pytest.mark.parametrize(
    "tensor", [torch.ones(64, 64).T[:, 1:], torch.ones(8).share_memory_()], ids=["view", "shared"]
)
def test_what_cannot_be_released_is_refused(tensor):
    with pytest.raises(ValueError, match="contiguous tensors in private host memory"):
        release_pages(tensor)
