"""Engines of several processes, whatever their layout, answer as one process does.

Each engine starts from dummy weights, sleeps (NaN everywhere) and gets all weights in place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rlhf.dist.layout import TrainLayout
from rlhf.rollout.engine import Completion, EngineDied
from rlhf.rollout.lifeline import open_pidfd, wait_gone
from rlhf.rollout.zygote import Zygote
from rlhf.types import Status
from tests.e2e.engine_case import (
    LIMIT_S,
    PROMPTS,
    EngineCase,
    engine_case,
    greedy,
    load_reference,
    reference_logprobs,
    reference_routes,
    reference_state,
    sampled,
    seeded_choice,
)
from tests.e2e.restore_case import LiveRestore
from tests.helpers.round_trips import differing, snapshot
from tests.helpers.tiny_models import FAMILIES, make_tiny

TOLERANCE = 1e-5
GONE_S = 10.0


@dataclass(frozen=True)
class Layout:
    """A model and how an engine spreads it."""

    family: str
    layout: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    slow: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.family, *(f"{k}{v}" for k, v in self.layout.items())])


# Sizes that are no multiple of 32 * tp: SGLang would pad them.
ODD = {"vocab_size": 500, "intermediate_size": 88}
DEEPSEEK_DP = Layout("deepseek_v3", {"tp": 2, "dp": 2}, ODD)
QWEN3_PP = Layout("qwen3", {"pp": 2}, {"num_hidden_layers": 3})
LAYOUTS = (
    DEEPSEEK_DP,
    QWEN3_PP,
    Layout("qwen3_moe", {"tp": 2, "ep": 2}, ODD),
    Layout("glm4_moe", {}, ODD),
    Layout("moonlight", {}),
    Layout("llama", {"tp": 2}, ODD),
    Layout("qwen2", {}),
    Layout("llama", {"tp": 2, "pp": 2}, slow=True),
    Layout("qwen2", {"pp": 2}, slow=True),
    Layout("qwen3", {"tp": 2, "dp": 2}, slow=True),
    Layout("qwen3", {"tp": 4, "dp": 2}, slow=True),
    *(
        Layout(family, layout, slow=True)
        for family in ("qwen3_moe", "deepseek_v3", "moonlight", "glm4_moe")
        for layout in (
            {"tp": 2},
            {"tp": 4, "ep": 2},
            {"tp": 2, "dp": 2, "ep": 2},
            {"tp": 4, "dp": 2, "ep": 4},
            {"pp": 2},
            {"tp": 2, "pp": 2, "ep": 2},
        )
    ),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
        for case in LAYOUTS
    ],
)
def case(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineCase, Any]]:
    folder = make_tiny(
        tmp_path_factory.mktemp("model") / "hf", request.param.family, **request.param.model
    )
    reference = load_reference(folder)
    layout = request.param.layout
    routes = hasattr(reference.config, "num_experts_per_tok") and "pp" not in layout
    with engine_case(folder, zygote, routes=routes, **layout) as engine:
        engine.open(reference_state(reference))
        engine.engine.sleep()
        engine.engine.wake()
        engine.write(reference_state(reference), version=7)
        yield engine, reference


def assert_routes_as_transformers(
    reference: Any, prompt: tuple[int, ...], answer: Completion
) -> None:
    routes = reference_routes(reference, prompt, answer.token_ids)
    assert answer.routes is not None
    assert answer.routes.shape == tuple(routes.shape)
    assert (torch.from_numpy(answer.routes).sort().values == routes.sort().values).all()


def assert_as_transformers(engine: EngineCase, reference: Any) -> None:
    answers = engine.generate([greedy(p, key) for key, p in enumerate(PROMPTS)])
    gaps = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference_logprobs(reference, prompt, answer.token_ids)
        assert answer.token_ids == expected.argmax(-1).tolist()
        chosen = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        gaps.append((chosen - torch.tensor(answer.logprobs)).abs())
        if engine.spec.routes:
            assert_routes_as_transformers(reference, prompt, answer)
    assert torch.cat(gaps).mean() <= TOLERANCE


def test_parameters_are_the_export_bit_by_bit_and_stay_in_place(
    case: tuple[EngineCase, Any],
) -> None:
    """On every rank, after each of two reshards; captured graphs would read the same memory."""
    engine, reference = case
    state = reference_state(reference)
    before = engine.addresses()
    for sign, version in ((-1, 8), (1, 7)):
        signed = {name: sign * tensor for name, tensor in state.items()}
        engine.write(signed, version)
        shards = zip(engine.read(), engine.exported(signed), before, strict=True)
        for rank, (got, wanted, named) in enumerate(shards):
            assert got.keys() == named.keys()
            for name, tensor in got.items():
                same = torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8))
                assert same, f"rank {rank}, {name}"
        assert engine.addresses() == before


def test_every_family_and_every_kind_of_layout_is_among_the_quick_ones() -> None:
    quick = [case for case in LAYOUTS if not case.slow]
    assert {case.family for case in quick} == set(FAMILIES)
    kinds = [("tp",), ("tp", "ep"), ("tp", "dp"), ("pp",)]
    assert {tuple(case.layout) for case in quick} >= set(kinds)


def test_answers_equal_transformers_before_and_after_other_weights(
    case: tuple[EngineCase, Any],
) -> None:
    engine, reference = case
    assert_as_transformers(engine, reference)
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in reference.state_dict().values():  # expert biases are buffers
            tensor *= 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    engine.write(reference_state(reference), version=8)
    assert_as_transformers(engine, reference)
    reference.load_state_dict(before)
    engine.write(reference_state(reference), version=7)
    assert_as_transformers(engine, reference)


def test_training_shards_come_back_from_a_live_engine(case: tuple[EngineCase, Any]) -> None:
    """Bit by bit; the engine's parameters stay where they are, and it answers as before."""
    engine, reference = case
    state, world = reference_state(reference), engine.layout.world
    train = {1: TrainLayout(1), 2: TrainLayout(2, tp=2), 4: TrainLayout(4, tp=2, pp=2)}[world]
    requests = [greedy(prompt, key) for key, prompt in enumerate(PROMPTS)]
    live = LiveRestore(engine, train, state)
    live.write(version=9)
    before, tables = engine.generate(requests), live.tables()
    shards = [snapshot(params) for params in live.ranks.params]

    def refuse() -> None:
        with pytest.raises(RuntimeError, match="a read is open"):
            engine.generate(requests)

    for memory in live.ranks.release():
        memory.take_back()
    live.read(while_open=refuse)
    for params, shard in zip(live.ranks.params, shards, strict=True):
        assert differing(params, shard) == []
    assert live.tables() == tables
    after = engine.generate(requests)
    assert [a.token_ids for a in after] == [a.token_ids for a in before]
    gaps = torch.tensor([a.logprobs for a in after]) - torch.tensor([a.logprobs for a in before])
    assert gaps.abs().max() <= TOLERANCE
    assert {answer.version for answer in after} == {9}
    engine.open(state)
    engine.write(state, version=7)


def test_seed_and_model_decide_a_sample_whatever_the_layout(case: tuple[EngineCase, Any]) -> None:
    """Samples of one prompt share its cached prefix; in another order they are the same."""
    engine, reference = case
    requests = [sampled(PROMPTS[3 + key % 2], key, seed=key) for key in range(8)]
    answers = engine.generate(requests)
    assert len({tuple(a.token_ids) for a in answers}) == len(answers)
    for request, answer in zip(requests, answers, strict=True):
        expected = reference_logprobs(reference, request.token_ids, answer.token_ids)
        last = len(request.token_ids) - 1
        assert answer.token_ids == seeded_choice(expected, request.seed, last)
        chosen = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() <= TOLERANCE
    again = engine.generate(list(reversed(requests)))[::-1]
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


def test_abort_reaches_every_process(case: tuple[EngineCase, Any]) -> None:
    engine, _ = case
    requests = [
        sampled(PROMPTS[key % 3], key, seed=key, max_new_tokens=2 if key == 0 else 200)
        for key in range(6)
    ]

    def abort(_: Completion) -> None:
        engine.engine.abort()

    answers = engine.engine.generate(requests, abort, LIMIT_S)
    assert {a.status for a in answers[1:]} == {Status.ABORTED}


def test_expert_biases_are_float32_in_a_bfloat16_engine(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A bias moves by 1e-3 in an update: bfloat16 would round it away."""
    folder = make_tiny(tmp_path_factory.mktemp("model") / "hf", "glm4_moe")
    with engine_case(folder, zygote, dtype="bfloat16", routes=True) as engine:
        engine.write(reference_state(load_reference(folder)), version=0)
        engine.engine.call_loader([{"op": "table"}])
        table = engine.windows[0].reply()
        dtypes = {name: row["dtype"] for name, row in table.items()}
        biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
        routers = {name for name in dtypes if name.endswith("mlp.gate.weight")}  # GLM's only
        assert len(biases) == 3
        assert {name for name, dtype in dtypes.items() if dtype == "float32"} == biases | routers
        answer = engine.generate([greedy(PROMPTS[4], 0)])[0]
        assert answer.routes is not None
        assert len(answer.routes) == len(PROMPTS[4]) + len(answer.token_ids) - 1


@pytest.mark.parametrize("layout", [DEEPSEEK_DP, QWEN3_PP], ids=lambda case: case.name)
def test_death_of_any_process_is_an_event_with_a_cause(
    layout: Layout, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The last scheduler; with DP-attention the process that hands out requests."""
    folder = make_tiny(tmp_path_factory.mktemp("model") / "hf", layout.family, **layout.model)
    with engine_case(folder, zygote, **layout.layout) as engine:
        name = "data parallel controller" if "dp" in layout.layout else "scheduler tp0 pp1"
        pidfds = [open_pidfd(pid) for pid in engine.info.pids.values()]
        os.kill(engine.info.pids[name], signal.SIGKILL)
        with pytest.raises(EngineDied, match=rf"{name} \(pid .*SIGKILL"):
            engine.engine.sleep()
        assert wait_gone([fd for fd in pidfds if fd is not None], GONE_S)
        for fd in pidfds:
            assert fd is not None
            os.close(fd)
