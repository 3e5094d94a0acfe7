"""A rank of a world that does not exist: process groups with sizes and ranks, and no peers.

Megatron and SGLang read their place in a layout from their process groups. Building a model asks no
peer for anything, so one process can stand for any rank of any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fake_groups(rank: int, world: int) -> Iterator[None]:
    """Make torch's default group a fake one; groups that are made inside are fake too.

    Programs ask for gloo by name beside the default backend. The default group stays behind.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    real = dist.new_group

    def fake_group(*args: Any, **settings: Any) -> Any:
        return real(*args[:1], **{**settings, "backend": "fake"})

    dist.new_group = fake_group
    try:
        yield
    finally:
        dist.new_group = real
