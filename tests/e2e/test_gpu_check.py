"""The check of an engine on a GPU, on a CPU."""

from __future__ import annotations

from rlhf.bench import gpu_check


def test_an_engine_is_filled_serves_sleeps_and_serves_again():
    """In a process of its own, as on a GPU: its host is spawned, not forked."""
    (entry,) = (c for c in gpu_check.CHECKS if c.name == "engine")
    (outcome,) = gpu_check.run_all([entry], "cpu", entry.limit_s)
    assert outcome.ok, outcome.error
