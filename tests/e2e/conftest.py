"""One zygote for all engines of the session: the machine imports SGLang once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rlhf.rollout.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    started = Zygote.start(f"rlhf-tests-{os.getpid()}")
    yield started
    started.close()
