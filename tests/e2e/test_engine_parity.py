"""What the engine computes is what transformers computes with the same weights, float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.rollout.zygote import Zygote
from rlhf.types import Status
from tests.e2e.engine_case import (
    PROMPTS,
    EngineCase,
    engine_case,
    greedy,
    load_reference,
    reference_logprobs,
    reference_state,
    sampled,
)
from tests.helpers.tiny_models import make_tiny

TOLERANCE = 1e-5
CASES = {
    "llama": ("llama", 1, {}),
    "qwen2-tied": ("qwen2", 1, {}),
    "qwen3": ("qwen3", 1, {}),
    "llama-tp2-padded": ("llama", 2, {"vocab_size": 500}),
    "qwen2-tied-tp2": ("qwen2", 2, {}),
    "qwen3-tp2": ("qwen3", 2, {}),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineCase, Any]]:
    family, tp, overrides = CASES[request.param]
    folder = make_tiny(tmp_path_factory.mktemp("model") / "hf", family, **overrides)
    reference = load_reference(folder)
    with engine_case(folder, zygote, tp=tp) as engine:
        engine.write(reference_state(reference), version=7)
        yield engine, reference


def assert_greedy_as_transformers(engine: EngineCase, reference: Any) -> None:
    answers = engine.generate([greedy(p, key) for key, p in enumerate(PROMPTS)])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference_logprobs(reference, prompt, answer.token_ids)
        assert answer.token_ids == expected.argmax(-1).tolist()
        chosen = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() <= TOLERANCE
        assert answer.status is Status.LENGTH
        assert answer.version == 7


def test_greedy_tokens_and_logprobs_equal_transformers(case: tuple[EngineCase, Any]) -> None:
    assert_greedy_as_transformers(*case)


def test_logprobs_of_a_prompt_equal_transformers(case: tuple[EngineCase, Any]) -> None:
    """Also those of a prompt that lies in the cache."""
    engine, reference = case
    prompt = PROMPTS[-1]
    engine.generate([greedy(prompt, 0)])
    (answer,) = engine.generate([replace(greedy(prompt, 0, 1), prompt_logprobs=True)])
    expected = reference_logprobs(reference, prompt[:1], list(prompt[1:]))
    chosen = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert answer.prompt_logprobs is not None
    assert (chosen - torch.tensor(answer.prompt_logprobs)).abs().max() <= TOLERANCE
    (plain,) = engine.generate([greedy(prompt, 0, 1)])
    assert plain.prompt_logprobs is None


def test_latent_attention_equals_transformers_where_nothing_needs_to_repeat(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Only then SGLang would attend a fresh prompt in a form that its cache does not hold."""
    folder = make_tiny(tmp_path / "hf", "deepseek_v3")
    reference = load_reference(folder)
    with engine_case(folder, zygote, deterministic=False) as engine:
        engine.write(reference_state(reference), version=7)
        assert_greedy_as_transformers(engine, reference)


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.5}, {"top_k": 5}], ids=["plain", "top_p", "top_k"]
)
def test_logprobs_are_of_the_full_distribution_at_the_temperature(
    case: tuple[EngineCase, Any], filters: dict[str, Any]
) -> None:
    """log_softmax(logits / T) over the whole vocabulary, whatever filters the sampling."""
    engine, reference = case
    requests = [
        sampled(PROMPTS[i % len(PROMPTS)], i, seed=100 + i, temperature=t, **filters)
        for i, t in enumerate((0.5, 1.0, 1.7, 0.5, 1.0, 1.7))
    ]
    for request, answer in zip(requests, engine.generate(requests), strict=True):
        expected = reference_logprobs(
            reference, request.token_ids, answer.token_ids, request.temperature
        )
        chosen = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() <= TOLERANCE
        if "top_k" in filters:
            rank = (expected > chosen[:, None]).sum(-1)
            assert rank.max() < filters["top_k"]


def test_update_brings_the_new_weights(
    case: tuple[EngineCase, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A second update, with other weights, moves the engine to them, and back."""
    engine, reference = case
    state = reference_state(reference)
    before = engine.generate([greedy(p, key) for key, p in enumerate(PROMPTS)])
    generator = torch.Generator().manual_seed(3)
    other = {
        name: value * (1 + 0.3 * torch.randn(value.shape, generator=generator))
        for name, value in state.items()
    }
    engine.write(other, version=8)
    moved = engine.generate([greedy(p, key) for key, p in enumerate(PROMPTS)])
    assert [a.token_ids for a in moved] != [a.token_ids for a in before]
    assert {a.version for a in moved} == {8}
    engine.write(state, version=7)
    after = engine.generate([greedy(p, key) for key, p in enumerate(PROMPTS)])
    assert after == before
