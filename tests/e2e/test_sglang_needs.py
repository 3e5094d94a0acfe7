"""What SGLang cannot do on a CPU by itself; one that passes is a stand-in to remove.

The stand-ins are in ``rlhf/platform/sglang_cpu*.py``; that they work is what all engine tests show.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NEEDS = {
    "seeded_sampling": "sgl_kernel",
    "experts_of_other_ranks": "index -1 is out of bounds",
    "latent_attention_without_yarn": "Only deepseek_yarn is supported for CPU",
    "sizes_as_on_a_gpu": "intermediate_size 40 became 64",
    "sleeping_controller": "the event loop spins",
    "data_parallel_attention": "0 active drivers",
    "rows_of_a_sum": "has no attribute 'change_state'",
    "length_of_padding": "NotImplementedError",
    "latent_prefill": "handle_attention_triton",
    "host_buffers": "not compiled with CUDA",
    "image_transforms": "No module named 'torchvision'",
    "deterministic_attention": "is refused in deterministic mode",
    "deterministic_prefix_cache": "shares no prefixes",
    "deterministic_operators": "No supported accelerator",
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.sglang_bare"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("need", NEEDS)
def test_sglang_fails_without_the_stand_in(failures: dict[str, str], need: str) -> None:
    assert NEEDS[need] in failures[need]
