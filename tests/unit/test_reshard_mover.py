"""Movers in one process: every element arrives, once, with its value, in its dtype."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub, TransportError
from rlhf.weights.families import (
    full_shapes,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.spread import spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts
from tests.helpers.shards import coded_tensors, cut, dtypes_of


def _sides(shape, train, rollout):
    """(pieces, parameter shapes) by rank, of the trainer and of the engines."""
    made = []
    for layout, pieces, params in (
        (train, train_pieces, train_param_shapes),
        (rollout, rollout_pieces, rollout_param_shapes),
    ):
        ranks = range(layout.world)
        made.append([(pieces(shape, layout, r), params(shape, layout, r)) for r in ranks])
    return made


def _spread(source, destination):
    return spread_of_shards([pieces for pieces, _ in source], [pieces for pieces, _ in destination])


def _movers(source, destination, params, targets, dtype, area_bytes=4096, limit_s=10.0):
    world = len(source)
    plans = rank_plans(
        _spread(source, destination),
        Topology.of(world, 2),
        itemsize=dtype.itemsize,
        area_bytes=area_bytes,
    )
    hub = LocalHub(world)
    return [
        Mover(p, params[r], hub.transport(r), targets[r], dtype=dtype, limit_s=limit_s)
        for r, p in enumerate(plans)
    ]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_element_arrives_with_its_value(data):
    shape = data.draw(shapes())
    world = data.draw(st.sampled_from([1, 2, 4]))
    sides = _sides(
        shape,
        data.draw(train_layouts(shape, world)),
        data.draw(rollout_layouts(shape, world)),
    )
    source, destination = data.draw(st.permutations(sides))
    area_bytes = data.draw(st.sampled_from([256, 4096, 1 << 20]))
    full = coded_tensors(full_shapes(shape), torch.float32)
    params = [cut(full, pieces, local) for pieces, local in source]
    wanted = [cut(full, pieces, local) for pieces, local in destination]
    targets = [{n: torch.full_like(t, -1) for n, t in w.items()} for w in wanted]
    movers = _movers(source, destination, params, targets, torch.float32, area_bytes)
    stats = in_threads([partial(m.run, no_poll) for m in movers])
    for got, expected in zip(targets, wanted, strict=True):
        assert all(torch.equal(got[n], expected[n]) for n in expected)
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats)
    for mover in movers:
        assert mover.staging_bytes <= 4 * area_bytes


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe"])
def test_bytes_travel_in_the_destination_dtype(family):
    shape = make_shape(family)
    source, destination = _sides(shape, TrainLayout(2, pp=2), RolloutLayout(2, tp=2))
    full = coded_tensors(full_shapes(shape), torch.float32)
    params = [cut(full, *side) for side in source]
    wanted = [cut(full, *side) for side in destination]
    dtypes = [dtypes_of(pieces, torch.bfloat16) for pieces, _ in destination]
    targets = [
        {n: torch.zeros_like(t, dtype=d[n]) for n, t in w.items()}
        for w, d in zip(wanted, dtypes, strict=True)
    ]
    movers = _movers(source, destination, params, targets, torch.bfloat16)
    stats = in_threads([partial(m.run, no_poll) for m in movers])
    elements = [(t >= 0).sum() * d[n].itemsize for w, d in zip(wanted, dtypes, strict=True)
                for n, t in w.items()]  # fmt: skip
    assert sum(s.received_bytes + s.local_bytes for s in stats) == sum(elements)
    for got, expected in zip(targets, wanted, strict=True):
        for name, tensor in expected.items():
            real = tensor >= 0
            assert torch.equal(got[name][real], tensor.to(got[name].dtype)[real]), name


def test_a_second_run_reads_the_parameters_afresh():
    """Parameters may be replaced (offloaded and restored) between two runs."""
    shape = make_shape()
    source, destination = _sides(shape, TrainLayout(2, pp=2), RolloutLayout(2))
    full = coded_tensors(full_shapes(shape), torch.float32)
    params = [cut(full, *side) for side in source]
    targets = [{n: torch.zeros(s) for n, s in local.items()} for _, local in destination]
    movers = _movers(source, destination, params, targets, torch.float32)
    in_threads([partial(m.run, no_poll) for m in movers])
    for mine in params:
        for name in mine:
            mine[name] = mine[name] * 2
    in_threads([partial(m.run, no_poll) for m in movers])
    doubled = {n: t * 2 for n, t in full.items()}
    wanted = cut(doubled, *destination[1])
    head = targets[1]["lm_head.weight"][: shape.vocab_size]
    assert torch.equal(head, wanted["lm_head.weight"][: shape.vocab_size])


def _two_ranks():
    shape = make_shape()
    source, destination = _sides(shape, TrainLayout(2, pp=2), RolloutLayout(2))
    full = coded_tensors(full_shapes(shape), torch.float32)
    params = [cut(full, *side) for side in source]
    targets = [{n: torch.zeros(s) for n, s in local.items()} for _, local in destination]
    return source, destination, params, targets


def test_a_missing_parameter_is_named_before_anything_moves():
    source, destination, params, targets = _two_ranks()
    del params[1]["decoder.layers.0.mlp.linear_fc2.weight"]
    with pytest.raises(RuntimeError, match=r"linear_fc2.*model\.layers\.2\.mlp\.down_proj"):
        _movers(source, destination, params, targets, torch.float32)


def test_a_missing_destination_is_named():
    source, destination, params, targets = _two_ranks()
    del targets[0]["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"no tensor model\.norm\.weight"):
        _movers(source, destination, params, targets, torch.float32)


def test_a_parameter_of_another_shape_is_named():
    source, destination, params, targets = _two_ranks()
    params[0]["decoder.layers.1.mlp.linear_fc1.weight"] = torch.zeros(4, 20)
    with pytest.raises(RuntimeError, match=r"linear_fc1.*\(4, 20\)"):
        _movers(source, destination, params, targets, torch.float32)


def test_a_dtype_of_another_size_is_refused():
    source, destination, params, targets = _two_ranks()
    plans = rank_plans(_spread(source, destination), Topology.of(2, 2), itemsize=4, area_bytes=4096)
    with pytest.raises(RuntimeError, match="4 bytes per element"):
        Mover(
            plans[0],
            params[0],
            LocalHub(2).transport(0),
            targets[0],
            dtype=torch.bfloat16,
        )


def test_a_silent_peer_is_named_with_round_and_transfer():
    source, destination, params, targets = _two_ranks()
    movers = _movers(source, destination, params, targets, torch.float32, limit_s=0.1)
    with pytest.raises(RuntimeError) as caught:
        movers[0].run(no_poll)
    text = str(caught.value)
    assert re.search(r"rank 0, round \d of", text) and "receiving from rank 1" in text
    assert "rank 1 decoder.layers." in text and "-> rank 0 model." in text


def test_what_poll_raises_ends_the_movement():
    source, destination, params, targets = _two_ranks()
    movers = _movers(source, destination, params, targets, torch.float32)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        movers[0].run(stop)


def test_messages_of_another_size_are_refused():
    hub = LocalHub(2)
    hub.transport(0).start([(torch.zeros(8, dtype=torch.uint8), 1)], [])
    other = hub.transport(1)
    other.start([], [(torch.zeros(9, dtype=torch.uint8), 0)])
    with pytest.raises(TransportError, match="8 bytes came, 9 were due"):
        other.wait(1.0, no_poll)
