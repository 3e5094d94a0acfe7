"""How an engine samples, stops, aborts and repeats; one engine for the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.rollout.engine import Completion, SampleRequest
from rlhf.rollout.zygote import Zygote
from rlhf.types import Status
from tests.e2e.engine_case import (
    LIMIT_S,
    PROMPTS,
    EngineCase,
    engine_case,
    greedy,
    load_reference,
    reference_state,
    sampled,
)
from tests.helpers.tiny_models import make_tiny

PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def case(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    folder = make_tiny(tmp_path_factory.mktemp("model") / "hf", "llama")
    with engine_case(folder, zygote) as engine:
        engine.write(reference_state(load_reference(folder)), version=0)
        yield engine


def tokens(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(a.token_ids) for a in answers]


def test_distinct_seeds_give_distinct_samples(case: EngineCase) -> None:
    answers = case.generate([sampled(PROMPT, key, seed=key) for key in range(8)])
    assert len(set(tokens(answers))) == 8


def test_same_requests_repeat_bit_for_bit(case: EngineCase) -> None:
    requests = [
        sampled(PROMPTS[key % len(PROMPTS)], key, seed=key, temperature=0.7 + 0.1 * key)
        for key in range(8)
    ]
    assert case.generate(requests) == case.generate(requests)


def test_shared_prompts_are_computed_once_and_change_nothing(
    case: EngineCase, zygote: Zygote
) -> None:
    """Several answers per prompt: repeated bit for bit, and as an engine without the cache."""
    long = tuple(range(3, 43))
    prompts = (long, (*long[:-1], 7), PROMPT)
    requests = [sampled(prompts[key % 3], key, seed=key, max_new_tokens=12) for key in range(12)]
    answers = case.generate(requests)
    case.generate([greedy(long, 0)])  # leaves another cache behind
    assert case.generate(requests) == answers
    with engine_case(case.folder, zygote, prefix_cache=False) as plain:
        plain.write(reference_state(load_reference(case.folder)), version=0)
        expected = plain.generate(requests)
    assert tokens(answers) == tokens(expected)
    for got, want in zip(answers, expected, strict=True):
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)


def test_seed_decides_the_sample_whatever_else_is_asked(case: EngineCase) -> None:
    """The same prompt and seed give the same tokens alone and in company."""
    alone = case.generate([sampled(PROMPT, 0, seed=11)])
    company = case.generate([sampled(PROMPT, key, seed=9 + key) for key in range(6)])
    assert company[2].token_ids == alone[0].token_ids


def test_same_seed_for_one_prompt_is_refused_and_would_be_one_sample(case: EngineCase) -> None:
    """Two calls show what one call refuses: samples without seeds of their own are one sample."""
    first, second = (case.generate([sampled(PROMPT, key, seed=5)]) for key in (0, 1))
    assert tokens(first) == tokens(second)
    with pytest.raises(ValueError, match="same prompt and same seed 5 as request 0"):
        case.generate([sampled(PROMPT, 0, seed=5), sampled(PROMPT, 1, seed=5)])


def test_answers_come_in_request_order_and_are_told_as_they_finish(case: EngineCase) -> None:
    requests = [sampled(PROMPT, key, seed=key, max_new_tokens=4 * (4 - key)) for key in range(4)]
    seen: list[Completion] = []
    answers = case.engine.generate(requests, seen.append, LIMIT_S)
    assert [a.key for a in answers] == [0, 1, 2, 3]
    assert [a.key for a in seen] == [3, 2, 1, 0]
    assert [len(a.token_ids) for a in answers] == [16, 12, 8, 4]
    assert {a.status for a in answers} == {Status.LENGTH}


def test_stop_token_ends_the_answer_and_is_part_of_it(case: EngineCase) -> None:
    free = case.generate([greedy(PROMPT, 0)])[0]
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    request = dataclasses.replace(greedy(PROMPT, 0), stop_token_ids=(stop,), ignore_eos=False)
    stopped = case.generate([request])[0]
    assert stopped.status is Status.STOPPED
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]


def test_more_requests_than_run_at_once_are_all_answered(case: EngineCase) -> None:
    num_requests = 2 * case.spec.max_running_requests + 3
    requests = [sampled(PROMPT, key, seed=key, max_new_tokens=4) for key in range(num_requests)]
    first = case.generate(requests)
    assert [a.key for a in first] == list(range(num_requests))
    assert case.generate(requests) == first


def test_longest_prompt_and_answer_fill_the_context(case: EngineCase) -> None:
    """Nothing of the context is taken away in silence."""
    context = case.spec.context_tokens
    for prompt_tokens in (1, context - 1):
        prompt = tuple(3 + i % 200 for i in range(prompt_tokens))
        answer = case.generate([greedy(prompt, 0, context - prompt_tokens)])[0]
        assert len(answer.token_ids) == context - prompt_tokens


def test_abort_returns_what_is_there(case: EngineCase) -> None:
    """The first finished answer aborts the rest, those that still wait included."""
    num_requests = case.spec.max_running_requests + 4
    requests = [
        sampled(PROMPT, key, seed=key, max_new_tokens=2 if key == 0 else 200)
        for key in range(num_requests)
    ]
    answers = case.engine.generate(requests, lambda _: case.engine.abort(), LIMIT_S)
    assert [a.key for a in answers] == list(range(num_requests))
    assert answers[0].status is Status.LENGTH
    assert {a.status for a in answers[1:]} == {Status.ABORTED}
    running = [a for a in answers[1:] if a.token_ids]
    assert running
    assert all(len(a.token_ids) == len(a.logprobs) < 200 for a in running)
    whole = case.generate([dataclasses.replace(requests[1], max_new_tokens=16)])[0]
    assert whole.token_ids[: len(running[0].token_ids)] == running[0].token_ids[:16]


def test_error_in_the_callback_ends_the_call_and_spares_the_engine(case: EngineCase) -> None:
    class Unscorable(Exception):  # noqa: N818
        pass

    def refuse(_: Completion) -> None:
        raise Unscorable

    requests = [
        sampled(PROMPT, key, seed=key, max_new_tokens=2 if key == 0 else 200) for key in range(4)
    ]
    with pytest.raises(Unscorable):
        case.engine.generate(requests, refuse, LIMIT_S)
    assert len(case.generate([greedy(PROMPT, 0)])[0].token_ids) == 16


def test_time_limit_says_how_many_came(case: EngineCase) -> None:
    requests = [sampled(PROMPT, key, seed=key, max_new_tokens=200) for key in range(16)]
    with pytest.raises(TimeoutError, match=r"0 of 16 answers within 0\.01 s"):
        case.engine.generate(requests, lambda _: None, 0.01)
    assert len(case.generate([greedy(PROMPT, 0)])[0].token_ids) == 16


def test_requests_that_would_end_the_engine_are_not_sent(case: EngineCase) -> None:
    """A bad request in a share refuses the whole share; the engine goes on."""
    bad = {
        "the prompt is empty": greedy((), 1),
        "exceed the engine's context of 256": greedy(PROMPT, 1, 252),
        "stop token id 512 is outside": dataclasses.replace(
            greedy(PROMPT, 1), stop_token_ids=(512,), ignore_eos=False
        ),
        "ignore_eos lets nothing stop": dataclasses.replace(greedy(PROMPT, 1), stop_token_ids=(5,)),
        "prompt token id 900 is outside": greedy((900,), 1),
        "used twice": greedy(PROMPT, 0),
    }
    for match, request in bad.items():
        with pytest.raises(ValueError, match=match):
            case.generate([greedy(PROMPT, 0), request])
    assert "min_p" not in {f.name for f in dataclasses.fields(SampleRequest)}
    assert len(case.generate([greedy(PROMPT, 0)])[0].token_ids) == 16


def test_bfloat16_engine_has_a_float32_head(zygote: Zygote, tmp_path: Path) -> None:
    """Differences of first-token log-probabilities are differences of logits.

    Of bfloat16 logits above 2**-6 they would be multiples of 2**-14.
    """
    folder = make_tiny(tmp_path / "hf", "qwen3")
    state = {n: t.bfloat16() for n, t in reference_state(load_reference(folder)).items()}
    with engine_case(folder, zygote, dtype="bfloat16", fp32_head=True) as engine:
        engine.write(state, version=0)
        requests = [sampled(PROMPT, key, seed=key, max_new_tokens=1) for key in range(16)]
        answers = engine.generate(requests)
        assert engine.generate(requests) == answers
    logprobs = {a.token_ids[0]: a.logprobs[0] for a in answers}
    first, *others = logprobs.values()
    steps = [(first - other) * 2**14 for other in others]
    assert max(abs(step - round(step)) for step in steps) > 0.1
