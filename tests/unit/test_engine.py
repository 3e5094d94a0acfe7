"""Records of the rollout engine: what is refused before it is sent, and with which words."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.rollout.engine import RESERVED_TOKENS, EngineSpec, SampleRequest, check_requests
from rlhf.rollout.host import spec_from_json
from rlhf.rollout.host_process import spec_to_json

SPEC = EngineSpec(model_path="m", vocab_size=100, max_position=64, context_tokens=32)
GOOD = SampleRequest(key=0, token_ids=(1, 2, 3), seed=0, max_new_tokens=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "the prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 30}, r"prompt of 3 tokens \+ max_new_tokens=30 exceed .* 32 tokens"),
        ({"token_ids": (100,)}, "prompt token id 100 is outside the vocabulary of 100"),
        ({"token_ids": (-1,)}, "prompt token id -1 is outside"),
        ({"stop_token_ids": (7, 100)}, "stop token id 100 is outside"),
        ({"stop_token_ids": (7,), "ignore_eos": True}, "ignore_eos"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0 must be in"),
        ({"top_p": 1.1}, "top_p=1.1 must be in"),
        ({"top_k": 0}, "top_k=0 must be -1"),
        ({"top_k": -2}, "top_k=-2 must be -1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
    ],
)
def test_a_bad_request_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    bad = dataclasses.replace(GOOD, key=9, **change)
    with pytest.raises(ValueError, match=f"request 9: {message}"):
        check_requests([GOOD, bad], SPEC)


requests = st.builds(
    SampleRequest,
    key=st.integers(),
    token_ids=st.lists(st.integers(0, 99), min_size=1, max_size=16).map(tuple),
    seed=st.integers(0, 2**63 - 1),
    max_new_tokens=st.integers(1, 16),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.one_of(st.just(-1), st.integers(1, 1000)),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@settings(deadline=None)
@given(request=requests)
def test_everything_inside_the_limits_is_taken(request: SampleRequest) -> None:
    check_requests([request], SPEC)


def test_keys_are_unique() -> None:
    with pytest.raises(ValueError, match="used twice"):
        check_requests([GOOD, dataclasses.replace(GOOD, seed=1)], SPEC)


def test_identical_samples_are_refused_only_where_they_would_be_identical() -> None:
    twin = dataclasses.replace(GOOD, key=1)
    with pytest.raises(ValueError, match="request 1: same prompt and same seed 0 as request 0"):
        check_requests([GOOD, twin], SPEC)
    check_requests([GOOD, twin], dataclasses.replace(SPEC, deterministic=False))
    check_requests([GOOD, dataclasses.replace(twin, seed=1)], SPEC)
    check_requests([dataclasses.replace(r, temperature=0.0) for r in (GOOD, twin)], SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 2, "cores": (0,)}, r"cores \(0,\).*multiple of rollout.tp\*rollout.pp=2"),
        ({"tp": 2, "cores": (0, 1, 2)}, r"multiple of rollout.tp\*rollout.pp=2"),
        ({"tp": 2, "pp": 2, "cores": (0, 1)}, r"multiple of rollout.tp\*rollout.pp=4"),
        ({"cores": ()}, r"multiple of rollout.tp\*rollout.pp=1"),
        ({"tp": 2, "dp": 3, "cores": (0, 1)}, "rollout.dp=3 must divide rollout.tp=2"),
        ({"tp": 2, "ep": 4, "cores": (0, 1)}, "rollout.ep=4 must divide rollout.tp=2"),
        ({"cores": (-1,)}, "multiple"),
        ({"context_tokens": 64}, "64 tokens and 8 that .* exceed max_position_embeddings=64"),
        ({"kv_tokens": 39}, r"rollout.kv_tokens=39 must hold one full context: 32 \+ 8"),
    ],
)
def test_a_spec_that_cannot_start_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **change)


def test_scheduler_processes_are_named_by_tp_rank_and_stage() -> None:
    spec = dataclasses.replace(SPEC, tp=2, pp=2, cores=(0, 1, 2, 3))
    assert spec.scheduler_names == (
        "scheduler tp0",
        "scheduler tp1",
        "scheduler tp0 pp1",
        "scheduler tp1 pp1",
    )


def test_each_tp_rank_has_cores_of_its_own() -> None:
    spec = dataclasses.replace(SPEC, tp=2, cores=(4, 5, 6, 7))
    assert spec.core_groups == ((4, 5), (6, 7))


def test_a_spec_survives_its_way_to_the_host() -> None:
    spec = dataclasses.replace(SPEC, tp=2, cores=(4, 5), kv_tokens=32 + RESERVED_TOKENS)
    assert spec_from_json(spec_to_json(spec)) == spec
    assert json.loads(spec_to_json(spec))["cores"] == [4, 5]


def test_block_fp8_is_for_gpu_engines() -> None:
    with pytest.raises(ValueError, match=r"rollout\.quantization=block_fp8 needs a GPU"):
        dataclasses.replace(SPEC, quantization="block_fp8")
    dataclasses.replace(SPEC, quantization="block_fp8", device="cuda")
