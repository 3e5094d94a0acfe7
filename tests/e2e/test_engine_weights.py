"""When an engine's weights may be used, and what an update, a sleep and a failure do to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.rollout.engine import EngineDied
from rlhf.rollout.zygote import Zygote
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

REQUESTS = [greedy(p, key) for key, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is large enough that a sleep that frees gives up pages."""
    return make_tiny(tmp_path_factory.mktemp("model") / "hf", "qwen3", vocab_size=4096)


@pytest.fixture(scope="module")
def state(folder: Path) -> dict[str, Tensor]:
    return reference_state(load_reference(folder))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2 freeing"])
def case(request: pytest.FixtureRequest, zygote: Zygote, folder: Path) -> Iterator[EngineCase]:
    tp = request.param
    with engine_case(folder, zygote, tp=tp, free_host_weights=tp == 2) as engine:
        yield engine


def poll_until_it_raises(case: EngineCase) -> None:
    """What a movement does while it waits for the receiver."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        case.engine.poll()


def test_generate_is_refused_until_an_update_has_completed(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    with pytest.raises(RuntimeError, match="no update has completed yet"):
        case.generate(REQUESTS)
    case.open(state)
    with pytest.raises(RuntimeError, match="no update has completed yet"):
        case.generate(REQUESTS)
    case.begin()
    with pytest.raises(RuntimeError, match="an update is open"):
        case.generate(REQUESTS)
    case.run_movers()
    with pytest.raises(RuntimeError, match="an update is open"):
        case.generate(REQUESTS)
    case.engine.end_update(3)
    assert {a.version for a in case.generate(REQUESTS)} == {3}


def test_sleep_forgets_everything_and_an_update_brings_everything_back(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    """Equality afterwards shows that every element was written: sleep leaves NaN or zero."""
    case.write(state, 4)
    before = case.generate(REQUESTS)
    case.engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        case.generate(REQUESTS)
    case.engine.wake()
    with pytest.raises(RuntimeError, match="since the engine slept"):
        case.generate(REQUESTS)
    case.write(state, 4)
    assert case.generate(REQUESTS) == before


def test_a_read_of_weights_that_are_not_valid_is_refused(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    case.write(state, 4)
    case.engine.sleep()
    case.engine.wake()
    message = {"op": "read", "sequence": 1, "limit_s": LIMIT_S}
    case.engine.begin_read([message] * case.spec.num_ranks, LIMIT_S)
    with pytest.raises(RuntimeError, match=r"read refused: .*since the engine slept"):
        poll_until_it_raises(case)
    case.write(state, 4)


def test_abandoned_update_leaves_the_weights_invalid(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    case.write(state, 5)
    before = case.generate(REQUESTS)
    del case.params["model.norm.weight"]
    case.begin()
    with pytest.raises(RuntimeError, match=r"parameter model\.norm\.weight is gone"):
        case.run_movers()
    case.engine.abandon_update()
    with pytest.raises(RuntimeError, match="abandoned"):
        case.generate(REQUESTS)
    case.write(state, 5)
    assert case.generate(REQUESTS) == before


def test_what_is_not_what_was_sent_does_not_serve(
    case: EngineCase, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of each round changes in the window before the receiver sees it."""
    case.write(state, 5)
    before = case.generate(REQUESTS)
    window = case.windows[-1]
    post = window.post

    def spoil(num_rounds: int) -> None:
        window.area(num_rounds - 1)[0] ^= 1
        post(num_rounds)

    with monkeypatch.context() as patch:
        patch.setattr(window, "post", spoil)
        case.begin()
        with pytest.raises(RuntimeError, match=r"round 0: the engine does not hold .*-> rank"):
            case.run_movers()
    case.engine.abandon_update()
    with pytest.raises(RuntimeError, match="abandoned"):
        case.generate(REQUESTS)
    case.write(state, 5)
    assert case.generate(REQUESTS) == before


def test_no_cached_prefix_outlives_its_weights(case: EngineCase, state: dict[str, Tensor]) -> None:
    """Prompts that lie in the cache are answered under other weights as if they did not."""
    case.write(state, 1)
    case.generate(REQUESTS)
    case.write({name: tensor * 1.25 for name, tensor in state.items()}, 2)
    for request, answer in zip(REQUESTS, case.generate(REQUESTS), strict=True):
        whole = (*request.token_ids, *answer.token_ids)
        asked = replace(request, token_ids=whole, max_new_tokens=1, prompt_logprobs=True)
        (afresh,) = case.generate([asked])  # which takes nothing from the cache
        assert afresh.prompt_logprobs is not None
        expected = afresh.prompt_logprobs[-len(answer.token_ids) :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_update_and_generation_exclude_each_other(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    case.write(state, 6)

    def try_to_update(_: object) -> None:
        case.engine.begin_update([{"op": "none"}] * case.spec.tp, LIMIT_S)

    requests = [sampled(PROMPTS[0], k, seed=k, max_new_tokens=4 + 100 * k) for k in range(2)]
    with pytest.raises(RuntimeError, match="update refused: a generation is running"):
        case.engine.generate(requests, try_to_update, LIMIT_S)
    with pytest.raises(RuntimeError, match="end_update without begin_update"):
        case.engine.end_update(7)
    assert {a.version for a in case.generate(REQUESTS)} == {6}


def test_live_table_names_every_planned_parameter(
    case: EngineCase, state: dict[str, Tensor]
) -> None:
    from rlhf.dist.layout import RolloutLayout
    from rlhf.weights.families import rollout_param_shapes

    case.write(state, 8)
    case.engine.call_loader([{"op": "table"}] * case.spec.tp)
    layout = RolloutLayout(world=case.spec.tp, tp=case.spec.tp)
    for rank, window in enumerate(case.windows):
        table = {name: tuple(entry["shape"]) for name, entry in window.reply().items()}
        assert table == rollout_param_shapes(case.shape, layout, rank)


def test_failing_loader_ends_the_engine_with_its_error(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote, receiver="tests.e2e.bad_receivers.raise_error") as engine:
        engine.engine.begin_update([{"op": "update"}], LIMIT_S)
        with pytest.raises(EngineDied, match="ValueError: no such tensor"):
            engine.engine.end_update(0)


def test_forgotten_weight_is_an_error_and_no_answer(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote, receiver="tests.e2e.bad_receivers.leave_nan") as engine:
        engine.engine.begin_update([{"op": "update"}], LIMIT_S)
        engine.engine.end_update(0)
        for request in (greedy(PROMPTS[1], 0), sampled(PROMPTS[1], 0, seed=1)):
            with pytest.raises(RuntimeError, match="not finite"):
                engine.generate([request])


def test_sleep_leaves_no_weight_to_generate_with(zygote: Zygote, folder: Path) -> None:
    """Small weights are NaN in sleep, so what was not written again does not look like weights."""
    with engine_case(folder, zygote, receiver="tests.e2e.bad_receivers.write_nothing") as engine:
        for version in range(2):
            engine.engine.begin_update([{"op": "update"}], LIMIT_S)
            engine.engine.end_update(version)
            if version == 0:
                engine.generate(REQUESTS)  # the engine's dummy weights
                engine.engine.sleep()
                engine.engine.wake()
        with pytest.raises(RuntimeError, match="not finite"):
            engine.generate(REQUESTS)


def test_open_update_blocks_nothing_else(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    """While the loader call is open the host answers; refusals come at once."""
    gate = tmp_path / "gate"
    with engine_case(folder, zygote, receiver="tests.e2e.bad_receivers.wait_for_file") as engine:
        engine.engine.begin_update([{"op": "update", "file": str(gate)}], LIMIT_S)
        engine.engine.poll()
        for call in (engine.engine.sleep, lambda: engine.engine.call_loader([{"op": "table"}])):
            with pytest.raises(RuntimeError, match="an update is open"):
                call()
        gate.touch()
        engine.engine.end_update(0)
        with pytest.raises(ValueError, match="exceed"):
            engine.generate([greedy(PROMPTS[0], 0, 300)])


def test_wrong_number_of_messages_is_refused(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote) as engine:
        with pytest.raises(RuntimeError, match="2 loader messages for 1 ranks"):
            engine.engine.call_loader([{"op": "table"}] * 2)
        engine.write(reference_state(load_reference(folder)), 0)
        assert torch.isfinite(torch.tensor(engine.generate(REQUESTS)[0].logprobs)).all()
