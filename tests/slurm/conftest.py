"""A private Slurm of four nodes on this machine, up for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PROGRAMS, Cluster

NUM_NODES = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [
        p for p in PROGRAMS if shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not found" if missing else "needs root, to make nodes"
        pytest.skip(f"a private Slurm: {why}; `make test-slurm` as root installs Debian's and runs")
    with tempfile.TemporaryDirectory(prefix="sl") as folder:  # short: sockets lie in it
        found = Cluster(Path(folder), port=30000 + os.getpid() % 300 * 8)
        found.control("up", str(NUM_NODES))
        try:
            yield found
        finally:
            found.control("down")
