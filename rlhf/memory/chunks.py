"""An optimizer state on the host, cut in chunks that pass through two buffers on a device. Pure.

The state is one row of elements: the shards of all parameters, one behind the other. A chunk is a
range of it, and may begin and end inside a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_BUFFERS = 2
ALIGNED_CUT = 64
"""A shard is cut at multiples of so many elements. Adam is elementwise, but a kernel's last few
elements, fewer than a vector register has, may be rounded differently from those before them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a shard, which lie at ``offset`` in the chunk."""

    shard: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [begin, begin + length) of the state; ``spans`` cover it in order."""

    begin: int
    length: int
    buffer: int
    spans: tuple[Span, ...]


def buffer_elements(num_elements: int, buffer_bytes: int, element_bytes: int) -> tuple[int, int]:
    """Elements of the two buffers for a state of ``num_elements`` on this rank.

    Args:
        buffer_bytes: at most so many for each.
        element_bytes: of an element with its moments and, if it has one, its master.

    Raises:
        ValueError: a buffer would not hold 64 elements.
    """
    most = buffer_bytes // element_bytes // ALIGNED_CUT * ALIGNED_CUT
    if most == 0:
        raise ValueError(
            f"a buffer of {buffer_bytes} bytes must hold {ALIGNED_CUT} elements of {element_bytes} "
            "bytes; raise memory.stream_mib"
        )
    first = min(num_elements, most)
    return first, min(num_elements - first, most)


def cut(sizes: Sequence[int], buffers: tuple[int, int]) -> list[Chunk]:
    """Chunks for the two buffers in turn, each as full as the cuts allow; maybe an empty one.

    Args:
        sizes: elements of each shard.
        buffers: of :func:`buffer_elements` of their sum.
    """
    chunks: list[Chunk] = []
    shard = start = begin = 0
    while shard < len(sizes):
        buffer = len(chunks) % NUM_BUFFERS
        spans: list[Span] = []
        offset = 0
        while shard < len(sizes):
            left, room = sizes[shard] - start, buffers[buffer] - offset
            taken = left if left <= room else room // ALIGNED_CUT * ALIGNED_CUT
            if taken:
                spans.append(Span(shard, start, start + taken, offset))
            offset += taken
            start += taken
            if start < sizes[shard]:
                break
            shard, start = shard + 1, 0
        chunks.append(Chunk(begin, offset, buffer, tuple(spans)))
        begin += offset
    return chunks
