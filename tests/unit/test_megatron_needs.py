"""What megatron cannot do on a CPU by itself; one that passes is a cure to remove.

The cures are in ``rlhf/platform/megatron_cpu`` and, where a module of our own stands in for
megatron's, in ``rlhf/mcore``; that they work is what the parity tests show.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no cure")

NEEDS = {
    "cuda_calls": "not compiled with CUDA",  # platform: runtime
    "cuda_literals": "not compiled with CUDA",  # platform: runtime
    "fused_adam": "KeyError: 'step'",  # platform: adam
    "split_sizes": "split sizes stay a tensor",  # platform: dispatch
    "float32_router": "te_general_gemm",  # mcore: router
    "latent_attention": "isinstance() arg 2",  # mcore: mla
    "latent_heads": "k_channels",  # mcore: core_attention
    "packed_sequences": "Packed sequence is not supported",  # mcore: core_attention
    "norm_of_a_sequence_shard": "sequence parallel not supported",  # mcore: spec
    "auxiliary_loss_outside_the_schedule": "broadcast shape",  # mcore: router
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.megatron_bare"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("need", NEEDS)
def test_megatron_fails_without_the_cure(failures: dict[str, str], need: str) -> None:
    assert NEEDS[need] in failures[need]


def test_every_need_has_its_failure(failures: dict[str, str]) -> None:
    assert failures.keys() == NEEDS.keys()
