"""Who holds which memory in a run, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from rlhf.ground import Ground
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.memory.ledger import Ledger
from rlhf.memory.table import Region
from rlhf.memory.time_slice import TimeSlice
from rlhf.memory.ways import Way
from rlhf.memory.weights import FromEngine, FromMasters, HostCopy, WayBack, Weights
from rlhf.planner.job import job_of
from rlhf.planner.memory import Job, Machine, ledger
from rlhf.reshard.restore import kept_rows
from rlhf.roles.memory import Gradients

ROOMY_BYTES = 2**50
"""Of a CPU: nothing that fits the machine is too large for a phase."""


@dataclass(frozen=True)
class Memory:
    """The run's time-slice, and how weights that it releases come back."""

    time_slice: TimeSlice
    ways: Mapping[Region, Way]
    """Empty: weights are never released."""

    @classmethod
    def of(cls, ground: Ground) -> Memory:
        """As `rlhf plan` counts it; the gate tells it of every phase from now on."""
        plan = ground.plan
        found = ledger(_job(ground), _machine(ground))
        rank = plan.world.rank
        predicted = {region: sizes[rank] for region, sizes in found.regions.items()}
        out = cls(TimeSlice(found.table, Ledger(found.table, predicted)), found.ways)
        ground.gate.tell(out.time_slice)
        return out

    def add_model(self, region: Region, model: TrainModel, optimizer: Optimizer | None) -> None:
        """Weights that come back from masters or from a copy, or never leave."""
        way = self.ways.get(region, Way.COPY)
        params = model.params
        back: WayBack
        if way is Way.MASTERS:
            assert optimizer is not None
            # what no optimizer has stays: expert biases, routers that are frozen
            params = {name: p for name, p in params.items() if p.requires_grad}
            back = FromMasters(optimizer.write_params)
        else:
            assert way is Way.COPY
            back = HostCopy()
        self._add(Weights(region, params, back))
        rest = {name: p for name, p in model.params.items() if name not in params}
        if rest:
            self.watch(region, lambda: sum(p.nbytes for p in rest.values()))

    def add_actor(
        self,
        ground: Ground,
        model: TrainModel,
        optimizer: Optimizer,
        restore: Callable[[], None] | None,
    ) -> None:
        """The actor's weights. ``restore`` moves them out of the engines if that is their way.

        Raises:
            ValueError: engines have not got all of them exactly.
        """
        if self.ways.get(Region.ACTOR) is not Way.ENGINE:
            self.add_model(Region.ACTOR, model, optimizer)
            return
        assert restore is not None
        plan = ground.plan
        dtype = getattr(torch, plan.config.model.dtype)
        rows = kept_rows(plan.shape, plan.train, plan.rollout, plan.world.rank, model.params, dtype)
        self._add(Weights(Region.ACTOR, model.params, FromEngine(model.params, rows, restore)))

    def add_training(
        self, gradients: Region, states: Region, model: TrainModel, optimizer: Optimizer
    ) -> None:
        """Gradients, and the optimizer's state, which stays where it is."""
        self.time_slice.add(Gradients(gradients, model))
        self.watch(states, lambda: optimizer.state_bytes)

    def watch(self, region: Region, measure: Callable[[], int]) -> None:
        """Memory that is never released is only counted."""
        self.time_slice.ledger.watch(lambda: {region: measure()})

    def _add(self, weights: Weights) -> None:
        self.time_slice.add(weights)
        self.time_slice.ledger.watch_host(lambda: weights.way.host_bytes)


def _job(ground: Ground) -> Job:
    """The run's; on a CPU the engine's cache has room for all requests if no size is given."""
    plan, config = ground.plan, ground.plan.config
    window_bytes = config.reshard.window_mib * 2**20
    job = job_of(config, plan.shape, plan.train, plan.rollout, window_bytes)
    if ground.device.type == "cuda" or config.rollout.kv_tokens is not None:
        return job
    context = config.data.max_prompt_tokens + plan.longest_answer
    tokens = config.rollout.max_running_requests * context
    return replace(job, rollout=config.rollout.model_copy(update={"kv_tokens": tokens}))


def _machine(ground: Ground) -> Machine:
    """Only its device counts here."""
    device, world = ground.device, ground.plan.world
    on_gpu = device.type == "cuda"
    return Machine(
        gpu_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else ROOMY_BYTES,
        host_bytes=ROOMY_BYTES,
        gpus_per_node=world.local_size,
        other_bytes=0,
    )
