"""The CPU stand-ins. They change the whole process, so the probes run in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from rlhf.platform.megatron_cpu.adam import FusedAdam

PROBES = """
import json, torch
before = torch.cuda.current_device
import rlhf.platform.megatron_cpu as platform
out = {"inert_on_import": torch.cuda.current_device is before}
out["installed"] = [platform.install(), platform.install()]
factory = torch.empty
platform.install()
out["idempotent"] = torch.empty is factory
with torch.device("meta"):
    out["meta"] = torch.empty(2).is_meta and torch.zeros(3).is_meta
    out["module"] = torch.nn.Linear(2, 2).weight.is_meta
out["literal"] = [
    torch.zeros(2, device="cuda").device.type,
    torch.tensor([1.0], device=torch.device("cuda", 0)).device.type,
    torch.ones(1).to("cuda").device.type,
    torch.ones(1).cuda().device.type,
]
from megatron.core.tensor_parallel import random as megatron_random
megatron_random.model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=0, etp_rank=0)
tracker = megatron_random.get_cuda_rng_tracker()
def draw():
    with tracker.fork():
        return torch.rand(1).item()
torch.manual_seed(1)
outside = torch.rand(1).item()
torch.manual_seed(1)
forked = [draw(), draw()]
out["fork_keeps_outside"] = torch.rand(1).item() == outside
out["fork_moves_on"] = forked[0] != forked[1]
out["type"] = torch.ones(1).type()
built = []
torch.compile(lambda x: x + 1, backend=lambda graph, inputs: built.append(graph) or graph)(
    torch.ones(1)
)
out["compiled"] = len(built)
import sys
sys.modules["psutil"] = None
try:
    import rlhf.mcore.checkpoint
    out["without_psutil"] = ""
except ImportError as error:
    out["without_psutil"] = str(error)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def probes():
    done = subprocess.run(
        [sys.executable, "-c", PROBES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_happens_on_import(probes):
    assert probes["inert_on_import"]


def test_installing_again_changes_nothing(probes):
    assert probes["installed"] == [True, True]
    assert probes["idempotent"]


def test_device_contexts_still_work(probes):
    """torch caches its factory functions; cached after the wrapping, contexts would do nothing."""
    assert probes["meta"]
    assert probes["module"]


def test_cuda_literals_mean_the_cpu(probes):
    assert set(probes["literal"]) == {"cpu"}


def test_forked_random_states_leave_the_outer_one_alone(probes):
    assert probes["fork_keeps_outside"]
    assert probes["fork_moves_on"]


def test_type_names_are_changed_inside_megatrons_optimizers_only(probes):
    assert probes["type"] == "torch.FloatTensor"


def test_nothing_is_compiled(probes):
    assert probes["compiled"] == 0


def test_a_missing_psutil_is_seen_at_once(probes):
    """Megatron's writer would fail where nobody looks, and the save wait for ever."""
    assert "psutil" in probes["without_psutil"]


@pytest.mark.parametrize(
    ("decoupled", "other"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fused_adam_equals_torch(decoupled, other, weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours = [p.clone().requires_grad_() for p in start]
    theirs = [p.clone().requires_grad_() for p in start]
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    left = FusedAdam(ours, adam_w_mode=decoupled, **settings)
    right = other(theirs, **settings)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        left.step()
        right.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_fused_adam_keeps_the_step_in_the_group():
    """DistributedOptimizer reads it there; per parameter it cannot restore a fresh optimizer."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = FusedAdam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[weight]) == {"exp_avg", "exp_avg_sq"}
