"""Training shards rebuilt from engines after their memory was released: bit by bit, in place.

Windows, receivers and movers are the real ones; ranks and receivers are threads of one process.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.memory.released import ReleasedParams
from rlhf.reshard.bounds import lower_bound_bytes
from rlhf.reshard.execute import Mover
from rlhf.reshard.plan import plan
from rlhf.reshard.restore import kept_rows
from rlhf.reshard.transport import LocalHub
from rlhf.reshard.windows import ReceiverError, Window
from rlhf.weights.families import restore_spread, train_param_shapes
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.reshard_oracle import count_costs_of_shards
from tests.helpers.round_trips import RoundTrips, differing, snapshot
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts

TRAIN = TrainLayout(1)
AREA_BYTES = 1 << 14
DENSE = [
    (TrainLayout(4, tp=2, pp=2), RolloutLayout(4, tp=4)),
    (TrainLayout(4, pp=2, vpp=2), RolloutLayout(4, tp=2)),
    (TrainLayout(4, tp=2), RolloutLayout(4, tp=2, pp=2)),
    (TrainLayout(4), RolloutLayout(4, tp=1)),
]
EXPERTS = [
    (TrainLayout(4, tp=2, pp=2), RolloutLayout(4, tp=4)),
    (TrainLayout(4, pp=2, ep=2), RolloutLayout(4, tp=2, ep=2)),
    (TrainLayout(4, tp=2, ep=2, etp=1), RolloutLayout(4, tp=4, dp=2, ep=4)),
    (TrainLayout(4), RolloutLayout(4, tp=1)),
]
MODELS = {
    "llama": ("llama", {}, DENSE),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, DENSE),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}, DENSE),
    "qwen3_moe": ("qwen3_moe", {}, EXPERTS),
    "deepseek_v3": ("deepseek_v3", {}, EXPERTS),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1}, EXPERTS),
    "glm4_moe": ("glm4_moe", {}, EXPERTS),
}
CASES = {
    f"{name} {i} {dtype}": (family, changes, *layouts, getattr(torch, dtype))
    for name, (family, changes, pairs) in MODELS.items()
    for i, layouts in enumerate(pairs)
    for dtype in [("bfloat16", "float32")[i % 2]]
}


@pytest.mark.parametrize("case", CASES)
def test_a_released_shard_comes_back_bit_by_bit(case):
    """Padding rows too; no live parameter of an engine moves or changes."""
    family, changes, train, rollout, dtype = CASES[case]
    shape = make_shape(family, **changes)
    trips = RoundTrips(shape, train, rollout, dtype, area_bytes=AREA_BYTES)
    trips.open()
    trips.reshard()
    before = [snapshot(params) for params in trips.params]
    engines = [snapshot(dict(e.named_parameters())) for e in trips.engines]
    pointers = [[p.data_ptr() for p in e.parameters()] for e in trips.engines]
    released = trips.release()
    assert all(t.untyped_storage().nbytes() == 0 for p in trips.params for t in p.values())
    for memory in released:
        memory.take_back()
    stats = trips.restore()
    for rank in trips.ranks:
        assert differing(trips.params[rank], before[rank]) == [], rank
        live = dict(trips.engines[rank].named_parameters())
        assert differing(live, engines[rank]) == [], rank
        assert [p.data_ptr() for p in live.values()] == pointers[rank]
        trip = trips.trips[rank]
        assert trip.restore.window is trip.reshard.window
        assert trip.staging_bytes <= 4 * AREA_BYTES
    least = count_costs_of_shards(trips.needed, trips.held, trips.topology.nodes, dtype.itemsize)
    assert [s.received_bytes for s in stats] == least.lower_bound_by_rank
    assert sum(s.sent_bytes for s in stats) == least.lower_bound
    made = plan(restore_spread(shape, train, rollout), trips.topology, dtype.itemsize, AREA_BYTES)
    assert least.lower_bound == lower_bound_bytes(made)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_layout_comes_back_from_any_other(data):
    """Nodes of one rank, of two, of all: what others of a node lack too is passed on."""
    shape = data.draw(shapes())
    world = data.draw(st.sampled_from([1, 2, 4]))
    trips = RoundTrips(
        shape,
        data.draw(train_layouts(shape, world)),
        data.draw(rollout_layouts(shape, world)),
        torch.bfloat16,
        area_bytes=data.draw(st.sampled_from([1 << 11, 1 << 14, 1 << 20])),
        ranks_per_node=data.draw(st.sampled_from([1, 2, 4])),
    )
    trips.open()
    trips.reshard()
    before = [snapshot(params) for params in trips.params]
    for memory in trips.release():
        memory.take_back()
    trips.restore()
    for rank in trips.ranks:
        assert differing(trips.params[rank], before[rank]) == [], rank


def _two_ranks(limit_s=10.0):
    """Engine weights that a reshard has just brought."""
    layouts = TrainLayout(2, pp=2), RolloutLayout(2, tp=2)
    trips = RoundTrips(make_shape(), *layouts, torch.bfloat16, limit_s=limit_s)
    trips.open()
    trips.reshard()
    return trips


def test_updates_and_reads_take_turns():
    trips = _two_ranks()
    for _ in range(2):
        for params in trips.params:
            for tensor in params.values():
                tensor.mul_(2)
        before = [snapshot(params) for params in trips.params]
        trips.reshard()
        for memory in trips.release():
            memory.take_back()
        trips.restore()
        assert [differing(*both) for both in zip(trips.params, before, strict=True)] == [[], []]


def _one_rank(limit_s=10.0):
    trips = RoundTrips(
        make_shape("qwen3"), TrainLayout(1), RolloutLayout(1), torch.float32, limit_s=limit_s
    )
    trips.open()
    trips.reshard()
    return trips


def test_an_error_while_reading_names_parameter_and_round_and_the_next_read_works():
    trips = _one_rank()
    before = snapshot(trips.params[0])
    parameter = trips.engines[0].get_parameter("model.layers.2.mlp.gate_up_proj.weight")
    whole = parameter.data
    parameter.data = whole[:5].clone()
    with pytest.raises(RuntimeError, match=r"round \d+, parameter model\.layers\.2\.mlp\.gate_up"):
        trips.restore()
    parameter.data = whole
    for memory in trips.release():
        memory.take_back()
    trips.restore()
    assert differing(trips.params[0], before) == []


def test_a_receiver_that_never_comes_to_read_times_out():
    trips = _one_rank(limit_s=0.1)
    with pytest.raises(RuntimeError, match=r"round 0 of .*waited 0\.1 s.*to read round 0"):
        trips.trips[0].restore.run(no_poll)


def test_a_rank_that_takes_nothing_times_out_in_the_receiver():
    trips = _one_rank()
    message = {**trips.trips[0].restore.update_message(), "limit_s": 0.1}
    window = trips.trips[0].restore.window
    loader = threading.Thread(target=trips.load, args=(0, message), daemon=True)
    loader.start()
    window.begin(10.0, no_poll)
    loader.join(10)
    assert not loader.is_alive()
    with pytest.raises(ReceiverError, match=r"waited 0\.1 s for the rank to post round 2"):
        window.check()


def test_an_abandoned_read_releases_the_receiver():
    trips = _one_rank()
    before = snapshot(trips.params[0])
    restore = trips.trips[0].restore
    message = {**restore.update_message(), "limit_s": 60.0}
    norm = trips.params[0].pop("decoder.final_layernorm.weight")
    with pytest.raises(KeyError):
        in_threads([partial(restore.run, no_poll), partial(trips.load, 0, message)])
    trips.params[0]["decoder.final_layernorm.weight"] = norm
    trips.restore()
    assert differing(trips.params[0], before) == []


def test_an_opening_names_what_cannot_be_read_exactly():
    trips = RoundTrips(make_shape(), TrainLayout(1), RolloutLayout(1), torch.bfloat16)
    message = trips.trips[0].open_message()
    back = {**message["back"], "dtype": "float32"}
    trips.load(0, {**message, "back": back})
    words = r"way back differ: lm_head.weight is torch.bfloat16, from which torch.float32 cannot"
    with pytest.raises(ReceiverError, match=words):
        trips.trips[0].reshard.window.wait_opened(10.0, no_poll)


def test_a_plan_for_the_other_direction_is_refused():
    trips = _one_rank()
    trip, params, wire = trips.trips[0], trips.params[0], LocalHub(1).transport(0)
    window = Window(1 << 20)
    with pytest.raises(RuntimeError, match="local_area='outgoing'"):
        Mover(trip.reshard.plan, window, wire, params, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="local_area='incoming'"):
        live = dict(trips.engines[0].named_parameters())
        Mover(trip.restore.plan, live, wire, window, dtype=torch.float32)


def _params(shape, dtype, layout=TRAIN, rank=0, **own):
    shapes_ = train_param_shapes(shape, layout, rank)
    return {n: torch.empty(s, dtype=own.get(n, dtype)) for n, s in shapes_.items()}


def test_what_the_engine_has_in_fp8_is_refused_by_name():
    shape = make_shape("qwen3", hidden_size=256, intermediate_size=256, head_dim=128)
    rollout = RolloutLayout(1, quantization="block_fp8")
    params = _params(shape, torch.bfloat16)
    with pytest.raises(ValueError, match=r"linear_proj.weight: the engine has it in blocks of fp8"):
        kept_rows(shape, TRAIN, rollout, 0, params, torch.bfloat16)


def test_what_the_engine_rounds_is_refused_by_name():
    shape = make_shape("llama", num_hidden_layers=1)
    words = r"cannot give back 9 .*final_layernorm.weight: it is trained in torch.float32 and the"
    with pytest.raises(ValueError, match=words):
        params = _params(shape, torch.float32)
        kept_rows(shape, TRAIN, RolloutLayout(1), 0, params, torch.bfloat16)


def test_a_float32_router_in_the_engine_is_no_loss():
    """The bias of experts is float32 on both sides; padding of the vocabulary has to be kept."""
    shape, layout = make_shape("glm4_moe"), TrainLayout(2, tp=2, ep=2, etp=1)
    own = {f"decoder.layers.{i}.mlp.router.expert_bias": torch.float32 for i in range(1, 4)}
    kept = []
    for rank in range(2):
        params = _params(shape, torch.bfloat16, layout, rank, **own)
        kept.append(kept_rows(shape, layout, RolloutLayout(2), rank, params, torch.bfloat16))
    padded = {"embedding.word_embeddings.weight": 65, "output_layer.weight": 65}
    assert kept == [{}, padded]


def test_a_rank_of_nothing_but_padding_keeps_all_of_it():
    shape, layout = make_shape("llama", vocab_size=5), TrainLayout(4, tp=4)
    params = _params(shape, torch.float32, layout, 3)
    rows = {"embedding.word_embeddings.weight": 0, "output_layer.weight": 0}
    assert kept_rows(shape, layout, RolloutLayout(4), 3, params, torch.float32) == rows


def test_a_head_that_no_engine_has_is_refused_by_name():
    shape = make_shape("llama", num_hidden_layers=1)
    params = {**_params(shape, torch.float32), "value_head.weight": torch.zeros(1, 20)}
    with pytest.raises(ValueError, match=r"value_head.weight: the engine has nothing of it"):
        kept_rows(shape, TRAIN, RolloutLayout(1), 0, params, torch.float32)


def test_views_of_one_storage_are_right_after_their_memory_was_away():
    """As megatron's buffers have them, with a gap between two parameters."""
    storage = torch.arange(20.0)
    params = {"a": storage[:6].view(2, 3), "b": storage[8:20].view(4, 3)}
    other = storage[8:20]
    memory = ReleasedParams(params, {"b": 3})
    assert storage.untyped_storage().nbytes() == 0
    assert (memory.num_bytes, memory.kept_bytes) == (80, 12)
    memory.take_back()
    assert params["b"].tolist() == [[0, 0, 0]] * 3 + [[17, 18, 19]]
    params["b"][0] = 5
    assert storage.tolist() == [0] * 8 + [5] * 3 + [0] * 6 + [17, 18, 19]
    assert other[:3].tolist() == [5, 5, 5]


def test_memory_that_cannot_be_given_up_is_named_and_nothing_is_released():
    import numpy as np

    params = {"a": torch.ones(2), "b": torch.from_numpy(np.ones(3))}
    with pytest.raises(RuntimeError, match="memory of b cannot be released"):
        ReleasedParams(params, {})
    assert params["a"].tolist() == [1, 1]
