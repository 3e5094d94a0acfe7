"""The checks with a megatron model on a GPU, on a CPU."""

from __future__ import annotations

import importlib

from rlhf.bench import gpu_check


def test_the_model_in_bfloat16_is_that_in_float32_nearly():
    """In a process of its own: megatron's stand-ins change the whole process."""
    (outcome,) = gpu_check.run_all([c for c in gpu_check.CHECKS if c.name == "model"], "cpu", 240.0)
    assert outcome.ok, outcome.error
    # bfloat16 is seen, and the update is far larger than what is lost
    assert outcome.figures["logprobs_off"] > 1e-4
    assert outcome.figures["update"] > 20 * outcome.figures["logprobs_off_after_update"]


def test_a_state_on_the_host_is_that_on_the_device():
    (entry,) = (c for c in gpu_check.CHECKS if c.name == "host_state")
    (outcome,) = gpu_check.run_all([entry], "cpu", 240.0)
    assert outcome.ok, outcome.error
    # weights, masters and two moments of each parameter
    assert outcome.figures["equal_tensors"] % 4 == 0
    assert outcome.figures["gb_per_s"] > 0


def test_every_check_is_a_function_of_its_module():
    """That of the engine too, whose module imports no SGLang."""
    for entry in gpu_check.CHECKS:
        assert callable(
            getattr(importlib.import_module(f"rlhf.bench.gpu.{entry.module}"), entry.function)
        )
