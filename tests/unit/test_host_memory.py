"""Optimizer states on the host: how they are cut, and whether there is room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.world import World
from rlhf.memory.chunks import ALIGNED_CUT, buffer_elements, cut
from rlhf.memory.host import available_bytes, check_host_room, host_zeros

SIZES = st.lists(st.integers(0, 700), max_size=12)


@given(SIZES, st.integers(ALIGNED_CUT, 500), st.sampled_from([8, 12]))
def test_chunks_cover_each_element_once_in_order_and_fit_their_buffers(sizes, most, element):
    buffers = buffer_elements(sum(sizes), most * element, element)
    chunks = cut(sizes, buffers)
    spans = [span for chunk in chunks for span in chunk.spans]
    covered = [(span.shard, n) for span in spans for n in range(span.start, span.stop)]
    assert covered == [(shard, n) for shard, size in enumerate(sizes) for n in range(size)]
    assert all(span.start % ALIGNED_CUT == 0 for span in spans)
    begin = 0
    for number, chunk in enumerate(chunks):
        assert (chunk.begin, chunk.buffer) == (begin, number % 2)
        assert chunk.length <= buffers[chunk.buffer]
        offset = 0
        for span in chunk.spans:
            assert span.offset == offset
            offset += span.length
        assert offset == chunk.length
        begin += chunk.length


@pytest.mark.parametrize(
    ("elements", "buffers"), [(0, (0, 0)), (60, (60, 0)), (100, (64, 36)), (1000, (64, 64))]
)
def test_buffers_are_no_larger_than_the_state(elements, buffers):
    assert buffer_elements(elements, 12 * 100, 12) == buffers


def test_a_buffer_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="700 bytes must hold 64 elements of 12"):
        buffer_elements(1000, 700, 12)


def _check(faults_of_others=(), available=100 * 2**20):
    world = World(rank=3, size=6, local_rank=1, local_size=2)
    sizes = [2**40, 2**40, 40 * 2**20, 50 * 2**20, 2**40, 2**40]
    check_host_room("actor", sizes, world, lambda own: [*faults_of_others, own], available)


def test_a_node_needs_room_for_its_own_ranks_only():
    _check()
    words = r"needs 0\.09 GiB .* 2 ranks of node 1.* 0\.04 GiB left"
    with pytest.raises(RuntimeError, match=words):
        _check(available=40 * 2**20)


def test_a_node_without_room_stops_the_ranks_of_all():
    with pytest.raises(RuntimeError, match="of another node"):
        _check(["of another node"])


def test_what_this_machine_can_give_is_read_in_bytes(tmp_path):
    assert 2**20 < available_bytes() < 2**50
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:    3 kB\n")
    assert available_bytes(meminfo) == 3072
    meminfo.write_text("MemTotal:  9 kB\n")
    with pytest.raises(RuntimeError, match="MemAvailable"):
        available_bytes(meminfo)


def test_host_memory_of_a_cpu_is_plain():
    found = host_zeros(3, 5, torch.device("cpu"))
    assert found.shape == (3, 5)
    assert not found.any()
    assert not found.is_pinned()
