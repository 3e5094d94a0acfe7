"""The phase group moves bytes and facts between ranks without loss; ranks stop together."""

import os
import signal

import torch.distributed as dist

from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.patience import Limits
from rlhf.dist.stop import Stopper, StopRequested
from rlhf.dist.world import World
from rlhf.types import Phase
from tests.helpers.spawn import run_ranks


def _exchange(rank, world):
    group = PhaseGroup.create(World(rank, world, rank, world), 30)
    send = [bytes([rank]) * (rank * 10 + to) for to in range(world)]
    got = group.exchange(send, [source * 10 + rank for source in range(world)])
    empty = group.exchange([b""] * world, [0] * world)
    return got, empty, group.gather(f"r{rank}"), group.max([rank, -rank])


def test_bytes_and_facts_arrive_whole():
    for rank, (got, empty, names, largest) in enumerate(run_ranks(_exchange, 3)):
        assert got == [bytes([source]) * (source * 10 + rank) for source in range(3)]
        assert empty == [b""] * 3
        assert names == ["r0", "r1", "r2"]
        assert largest == [2, 0]


def _stop(rank, world, signalled):
    stopper = Stopper(rank, grace_s=60)
    stopper.install()
    gate = PhaseGate(PhaseGroup.create(World(rank, world, rank, world), 30), stopper)
    seen = []
    try:
        for step in range(5):
            for phase in (Phase.ROLLOUT, Phase.UPDATE, Phase.SAVE):
                with gate.phase(phase, step):
                    seen.append((step, str(phase)))
                    if rank == signalled and (step, phase) == (2, Phase.ROLLOUT):
                        os.kill(os.getpid(), signal.SIGTERM)
    except StopRequested as why:
        return seen, str(why)
    return seen, None


def test_a_signal_on_one_rank_stops_all_at_the_same_edge():
    results = run_ranks(_stop, 2, 1)
    assert results[0] == results[1]
    seen, why = results[0]
    assert why == "SIGTERM at the edge of phase rollout, step 3"
    assert seen[-1] == (2, "save"), "update and save of the step are finished first"


def _fail(rank, world):
    stopper = Stopper(rank, grace_s=60)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limits = Limits(silence_s=60, edge_s=60, rollout_s=60)
    stopper.watch(lambda: dist.TCPStore(host, port, is_master=False), world, limits)
    stopper.reach(Phase.UPDATE, 7)
    first = stopper.fail(ValueError(f"no {rank}\nmore")) if rank == 1 else None
    dist.barrier()
    second = stopper.fail(KeyError("later")) if rank == 0 else None
    stopper.close()
    return first, second


def test_the_first_failure_is_the_one_that_counts():
    (_, second), (first, _) = run_ranks(_fail, 2)
    assert str(first) == "stopped: rank 1, phase update, step 7: ValueError: no 1 | more"
    assert second == first
