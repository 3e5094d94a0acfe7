"""What Megatron's gradient buffers and its distributed optimizer hold, padding included. Pure.

A trainable chunk of a model has one buffer for the parameters whose gradients are summed over all
data and context parallel ranks, and one for experts that are spread over ranks. Each is cut in
buckets, each bucket in equal shards, one for every rank of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED_PARAM = 64
"""A parameter begins at a multiple of so many elements in its bucket."""
ALIGNED_BUCKET = 128
"""A bucket is a multiple of so many elements, and of the ranks that share it."""
SMALLEST_BUCKET = 40_000_000
BUCKET_PER_REPLICA = 1_000_000


@dataclass(frozen=True, slots=True)
class TrainParam:
    """A parameter of a chunk of the model, in the order in which the module has them."""

    num_elements: int
    is_expert: bool
    """Its gradient is summed over the expert data parallel ranks only."""
    alone: bool = False
    """In a bucket of its own: an embedding that a second stage holds too."""
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Bucket:
    """``spans`` are the parameters' elements in it; the rest of ``length`` is padding."""

    length: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Parameters and gradients of one group of replicas, each of ``num_elements``."""

    buckets: tuple[Bucket, ...]
    num_replicas: int

    @property
    def num_elements(self) -> int:
        """Padding included."""
        return sum(bucket.length for bucket in self.buckets)

    def owned(self) -> list[int]:
        """By replica: elements whose optimizer state it has, of its shards, without padding."""
        out = [0] * self.num_replicas
        for bucket in self.buckets:
            size = bucket.length // self.num_replicas
            for start, stop in bucket.spans:
                for replica in range(start // size, (stop - 1) // size + 1):
                    out[replica] += min(stop, (replica + 1) * size) - max(start, replica * size)
        return out


def lay_out(params: Sequence[TrainParam], num_replicas: int, bucket_size: int | None) -> Buffer:
    """Megatron's buffer of these parameters.

    Buckets are filled from the last parameter on. One is full when it holds ``bucket_size``
    elements (None: never); then, and at the end, its length is rounded up.
    """
    multiple = math.lcm(num_replicas, ALIGNED_BUCKET)
    buckets: list[Bucket] = []
    spans: list[tuple[int, int]] = []
    for param in reversed(params):
        start = _round_up(spans[-1][1], ALIGNED_PARAM) if spans else 0
        if param.alone and spans:
            buckets.append(Bucket(_round_up(start, multiple), tuple(spans)))
            spans, start = [], 0
        spans.append((start, start + param.num_elements))
        full = bucket_size is not None and spans[-1][1] >= bucket_size
        if full or param.alone:
            buckets.append(Bucket(_round_up(spans[-1][1], multiple), tuple(spans)))
            spans = []
    if spans:
        buckets.append(Bucket(_round_up(spans[-1][1], multiple), tuple(spans)))
    return Buffer(tuple(buckets), num_replicas)


def bucket_size(dp: int) -> int:
    """Elements after which Megatron closes a bucket whose reduction overlaps the backward pass."""
    return max(SMALLEST_BUCKET, BUCKET_PER_REPLICA * dp)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
