"""A movement that verifies: silent when all is well, and what went wrong is named."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub, LocalTransport
from rlhf.reshard.windows import Window
from rlhf.rollout import receiver
from rlhf.weights.families import (
    rollout_padding_params,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.spread import spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shapes import make_shape
from tests.helpers.shards import cut, dtypes_of, dummy_engine, random_checkpoint

NODES = {1: 1, 2: 2, 4: 2}
"""World -> ranks on a node."""


class Wire(LocalTransport):
    """Carries everything; ``fault`` may spoil what has come."""

    def __init__(self, rank, hub):
        super().__init__(rank, hub._boxes)
        self.fault = lambda buffers: None

    def wait(self, limit_s, poll):
        buffers = [buffer for buffer, _ in self._incoming]
        super().wait(limit_s, poll)
        self.fault(buffers)


class Ranks:
    """All ranks of a movement with their windows and engines, in one process."""

    def __init__(self, train, rollout, family="qwen3", area_bytes=4096, **settings):
        dtype = torch.bfloat16
        shape, world = make_shape(family, **settings), train.world
        ranks = range(world)
        source = [train_pieces(shape, train, r) for r in ranks]
        needed = [rollout_pieces(shape, rollout, r) for r in ranks]
        full = random_checkpoint(shape)
        self.params = [
            {n: t.bfloat16() for n, t in cut(full, source[r], local).items()}
            for r in ranks
            for local in [train_param_shapes(shape, train, r)]
        ]
        plans = rank_plans(
            spread_of_shards(source, needed),
            Topology.of(world, NODES[world]),
            itemsize=dtype.itemsize,
            area_bytes=area_bytes,
        )
        hub = LocalHub(world)
        self.wires = [Wire(r, hub) for r in ranks]
        self.windows = [Window(p.incoming_area_bytes, num_sums=p.num_arriving) for p in plans]
        self.movers = [
            Mover(
                plans[r],
                self.params[r],
                self.wires[r],
                self.windows[r],
                dtype=dtype,
                padding_params=rollout_padding_params(shape, rollout, r),
            )
            for r in ranks
        ]
        self.models = [
            dummy_engine(
                rollout_param_shapes(shape, rollout, r), dtype, dtypes_of(needed[r], dtype)
            )
            for r in ranks
        ]
        for rank, mover in enumerate(self.movers):
            self.load(rank, mover.open_message())
            mover.window.wait_opened(10.0, no_poll)

    def load(self, rank, message):
        receiver.load(self.models[rank], [(json.dumps(message), torch.empty(0))])

    def update(self, verify=True):
        """Statistics of all ranks."""
        jobs = [partial(m.run, no_poll, verify=verify) for m in self.movers]
        jobs += [
            partial(self.load, r, m.update_message(verify=verify))
            for r, m in enumerate(self.movers)
        ]
        return in_threads(jobs)[: len(self.movers)]

    def faults(self):
        return [stats.faults for stats in self.update()]


FP8_SIZES = {
    "area_bytes": 1 << 18,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
LAYOUTS = [
    (TrainLayout(1), RolloutLayout(1)),
    (TrainLayout(2, tp=2), RolloutLayout(2)),
    (TrainLayout(4, pp=4), RolloutLayout(4)),
    (TrainLayout(4, tp=2, pp=2), RolloutLayout(4, tp=2)),
]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("train,rollout", LAYOUTS, ids=str)
def test_nothing_is_wrong_when_nothing_went_wrong(train, rollout, family):
    """Values that differ by bits in every place; a second update has other ones."""
    ranks = Ranks(train, rollout, family, num_layers=4)
    for _ in range(2):
        assert ranks.faults() == [()] * train.world
        for params in ranks.params:
            for name in params:
                params[name] = -params[name]


def test_weights_that_become_fp8_on_their_way_are_verified():
    train, rollout = TrainLayout(2, tp=2), RolloutLayout(2, quantization="block_fp8")
    ranks = Ranks(train, rollout, **FP8_SIZES)
    assert ranks.faults() == [(), ()]
    assert any(p.dtype == torch.float8_e4m3fn for p in ranks.models[0].parameters())


def test_without_verification_the_table_is_left_alone():
    ranks = Ranks(*LAYOUTS[0])
    (stats,) = ranks.update(verify=False)
    assert not ranks.windows[0].sums.any()
    assert stats.faults == ()


def _flip(buffer, at):
    buffer.view(torch.uint8)[at] ^= 4


@pytest.mark.parametrize("number,at", [(0, 0), (1, 37), (2, 64)])
def test_a_byte_spoiled_on_the_wire_is_named_with_round_and_ranks(number, at):
    ranks = Ranks(TrainLayout(2, tp=2), RolloutLayout(2))
    calls = iter(range(1000))
    ranks.wires[1].fault = lambda buffers: next(calls) == number and _flip(buffers[0], at)
    fine, (fault,) = ranks.faults()
    assert fine == ()
    placed = next(
        p
        for message in ranks.movers[1].plan.rounds[number].incoming
        for p in message.parts
        if p.offset <= at < p.offset + p.num_bytes
    )
    assert fault == f"round {number}: the engine does not hold what was sent of {placed.transfer}"
    assert f"rank 0 {placed.transfer.source_param}" in fault
    assert f"rank 1 {placed.transfer.param}" in fault


def test_a_byte_spoiled_in_the_window_is_found():
    """Between the rank's copy, of which nothing crosses a wire, and the receiver's."""
    ranks = Ranks(*LAYOUTS[0])
    placed = ranks.movers[0].plan.rounds[1].local[0]

    class Spoiled(Window):
        def post(self, num_rounds):
            if num_rounds == 2:
                _flip(self.area(1), placed.offset + 5)
            super().post(num_rounds)

    ranks.windows[0].__class__ = Spoiled
    ((fault,),) = ranks.faults()
    assert fault == f"round 1: the engine does not hold what was sent of {placed.transfer}"


def test_who_was_passed_a_spoiled_copy_finds_it_too():
    """Sums are those of the rank that packed, so passing on does not make a copy look whole."""
    ranks = Ranks(TrainLayout(4, pp=4), RolloutLayout(4))
    relays = [
        (number, placed)
        for number, round_ in enumerate(ranks.movers[2].plan.rounds)
        for message in round_.outgoing
        for placed in message.parts
        if placed.is_relay
    ]
    number, placed = relays[0]
    calls = iter(range(1000))
    ranks.wires[2].fault = lambda buffers: (
        next(calls) == number - 2 and _flip(ranks.windows[2].area(number), placed.relayed_from)
    )
    faults = ranks.faults()
    assert [len(of_rank) for of_rank in faults] == [0, 0, 1, 1]
    assert f"round {number - 2}: " in faults[2][0]
    assert faults[3][0].endswith(str(placed.transfer))
    assert all(placed.transfer.tensor in of_rank[0] for of_rank in faults[2:])


def test_a_write_to_the_wrong_place_is_found():
    """Rows in another order: all bytes are there."""
    ranks = Ranks(*LAYOUTS[0])
    name = "model.layers.1.mlp.down_proj.weight"
    writes = ranks.models[0]._reshard_receiver._writes
    for of_round in writes:
        for i, (param, box, values) in enumerate(of_round):
            if param == name:
                of_round[i] = (param, box, values.flip(0))
    ((*found,),) = ranks.faults()
    assert found
    assert all(name in fault for fault in found)


def test_what_a_parameter_does_not_keep_is_found():
    """Read back from the live parameter: the window holds all that was sent."""
    ranks = Ranks(*LAYOUTS[0])
    name = "model.layers.1.mlp.down_proj.weight"
    parameter = ranks.models[0].get_parameter(name)
    parameter.data = parameter.data.to(torch.float16)
    ((*found,),) = ranks.faults()
    assert found
    assert all(name in fault for fault in found)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_owner(value, verify):
    ranks = Ranks(TrainLayout(2, tp=2), RolloutLayout(2))
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    ranks.params[1][name][3, 2] = value
    faults = [stats.faults for stats in ranks.update(verify)]
    assert faults[0] == ()
    assert 1 <= len(faults[1]) <= 2, "the rank's own engine and the peer's"
    for fault in faults[1]:
        assert "NaN or infinite" in fault
        assert f"rank 1 {name}" in fault


def test_many_faults_are_counted():
    ranks = Ranks(*LAYOUTS[0])
    for tensor in ranks.params[0].values():
        tensor.fill_(float("nan"))
    ((*named, rest),) = ranks.faults()
    assert len(named) == 4
    assert rest.startswith("and ")
    assert rest.endswith(" more of these")


def test_a_window_without_room_for_checksums_is_refused():
    ranks = Ranks(*LAYOUTS[0])
    ranks.windows[0].sums = ranks.windows[0].sums[:3]
    with pytest.raises(RuntimeError, match=r"takes \d+ checksums, the window has room for 3"):
        ranks.movers[0].update_message(verify=True)
