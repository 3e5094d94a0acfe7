"""Who holds how much memory in which phase: Region x rank. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.config.schema import (
    MemorySection,
    ModelSection,
    RolloutSection,
    TrainSection,
)
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.memory.chunks import buffer_elements
from rlhf.memory.table import NEEDED, Region, Regions, Span, Table, residency
from rlhf.memory.ways import Choices, Way, choose_way
from rlhf.planner.activations import PassBytes, pass_bytes
from rlhf.planner.engine_memory import derived_bytes, engine_weight_bytes, kv_token_bytes
from rlhf.planner.train_memory import (
    ModelUse,
    state_bytes_per_element,
    train_bytes,
)
from rlhf.weights.model_shape import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Job:
    """What decides the memory of a run."""

    shape: ModelShape
    train_layout: TrainLayout
    rollout_layout: RolloutLayout
    model: ModelSection
    train: TrainSection
    rollout: RolloutSection
    memory: MemorySection
    window_bytes: int  # of one of a rank's two
    longest_tokens: int  # of a prompt with its answer
    num_updates: int = 1  # of a step
    reference: bool = False
    critic: ModelShape | None = None
    reward_model: ModelShape | None = None

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.model.dtype]

    @property
    def roles(self) -> tuple[str, ...]:
        """Beside the actor."""
        there = {
            "reference": self.reference,
            "critic": self.critic is not None,
            "reward_model": self.reward_model is not None,
        }
        return tuple(role for role, is_there in there.items() if is_there)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs; GB are 1e9 bytes."""

    gpu_bytes: int
    host_bytes: int  # of a node
    gpus_per_node: int
    other_bytes: int  # of a GPU: context, communicators, CUDA graphs, the engine's own buffers


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes of a job. Lists are by global rank."""

    regions: Mapping[Region, tuple[int, ...]]
    table: Table
    ways: Mapping[Region, Way]
    """How weights that are released come back."""
    kv_token_bytes: tuple[int, ...]
    kv_tokens: int
    """Of one attention group, on the rank that has least room."""
    host: tuple[int, ...]  # by node

    @property
    def phases(self) -> Mapping[Span, Regions]:
        """What is there in each."""
        return self.table.held

    def phase_bytes(self, span: Span) -> list[int]:
        """Sum of the regions that are resident in a phase."""
        held = [self.regions[region] for region in self.phases[span]]
        return [sum(parts) for parts in zip(*held, strict=True)]


def ledger(job: Job, machine: Machine) -> Ledger:
    """All regions of all ranks; formulas are with the functions that give each.

    The KV cache has ``rollout.kv_tokens`` tokens, or what ``rollout.mem_fraction`` of the device
    leaves beside the engine's weights.

    Raises:
        LayoutError: a layout does not fit its model.
    """
    world = job.train_layout.world
    engine = engine_weight_bytes(job.shape, job.rollout_layout, job.itemsize)
    derived = derived_bytes(job.shape, job.rollout_layout, job.itemsize)
    token = kv_token_bytes(job.shape, job.rollout_layout, job.itemsize)
    tokens = _kv_tokens(job.rollout, machine, _added([engine, derived]), token)
    roles, host = _roles(job)
    passes = _passes(job)
    regions = roles | {
        Region.ENGINE: engine,
        Region.DERIVED: derived,
        Region.KV_CACHE: tuple(tokens * each for each in token),
        Region.WINDOWS: (2 * job.window_bytes,) * world,
        Region.SCORING: passes.scoring,
        Region.TRAINING: passes.training,
        Region.LOGITS: passes.head,
        Region.OTHER: (machine.other_bytes,) * world,
    }
    ways = _ways(job, machine, regions)
    copies = [regions[region] for region, way in ways.items() if way is Way.COPY]
    per_rank = _added([(0,) * world, *host, *copies])
    return Ledger(
        regions=regions,
        table=_table(job, from_engine=ways.get(Region.ACTOR) is Way.ENGINE),
        ways=ways,
        kv_token_bytes=token,
        kv_tokens=tokens,
        host=tuple(
            sum(per_rank[first : first + machine.gpus_per_node])
            for first in range(0, world, machine.gpus_per_node)
        ),
    )


def _table(job: Job, *, from_engine: bool) -> Table:
    return residency(job.memory, job.roles, from_engine=from_engine, num_updates=job.num_updates)


def _ways(
    job: Job, machine: Machine, regions: Mapping[Region, tuple[int, ...]]
) -> dict[Region, Way]:
    """Of all roles, with ``time_slice: all``; the actor's from the engine if that is exact and if
    no phase of another role overflows because the actor's weights stay in it."""
    if job.memory.time_slice != "all":
        return {}
    held = _table(job, from_engine=True).held
    others = [s for s in held if s.role and Region.ACTOR not in NEEDED[s]]
    fullest = max(
        (max(_added([regions[region] for region in held[span]])) for span in others), default=0
    )
    is_float32 = job.model.dtype == "float32"
    out = {
        Region.ACTOR: choose_way(
            Choices(
                trained=True,
                is_float32=is_float32,
                served=job.rollout.quantization == "none",
                can_stay=fullest <= machine.gpu_bytes,
            )
        )
    }
    if job.critic is not None:
        out[Region.CRITIC] = choose_way(Choices(trained=True, is_float32=is_float32))
    for region in (Region.REFERENCE, Region.REWARD_MODEL):
        if region in regions:
            out[region] = choose_way(Choices(trained=False, is_float32=is_float32))
    return out


def _kv_tokens(
    rollout: RolloutSection, machine: Machine, loaded: Iterable[int], token: Iterable[int]
) -> int:
    if rollout.kv_tokens is not None:
        return rollout.kv_tokens
    static = int(rollout.mem_fraction * machine.gpu_bytes)
    return min(
        max(0, static - weights) // each for weights, each in zip(loaded, token, strict=True)
    )


def _roles(job: Job) -> tuple[dict[Region, tuple[int, ...]], list[tuple[int, ...]]]:
    """Regions of the roles; and what is in host memory for them.

    On the host are optimizer states with ``memory.optimizer: host``, of which the device then has
    two buffers.
    """
    layout, on_host = job.train_layout, job.memory.optimizer == "host"
    actor = train_bytes(_use(job, job.shape), layout)
    out = {Region.ACTOR: actor.weights, Region.GRADIENTS: actor.gradients}
    states = {Region.OPTIMIZER: actor.optimizer}
    if job.reference:
        frozen = replace(_use(job, job.shape), trainable=False)
        out[Region.REFERENCE] = train_bytes(frozen, layout).weights
    if job.critic is not None:
        critic = train_bytes(replace(_use(job, job.critic), head="values"), layout)
        out[Region.CRITIC] = critic.weights
        out[Region.CRITIC_GRADIENTS] = critic.gradients
        states[Region.CRITIC_OPTIMIZER] = critic.optimizer
    if job.reward_model is not None:
        scorer = replace(_use(job, job.reward_model), head="values", trainable=False)
        out[Region.REWARD_MODEL] = train_bytes(scorer, layout).weights
    host = list(states.values()) if on_host else []
    for region, sizes in states.items():
        out[region] = tuple(_stream_bytes(job, n) for n in sizes) if on_host else sizes
    return out, host


def _stream_bytes(job: Job, state_bytes: int) -> int:
    """On the device while it updates from a state on the host: two buffers."""
    element = state_bytes_per_element(job.itemsize)
    buffer_bytes = job.memory.stream_mib * 2**20
    return element * sum(buffer_elements(state_bytes // element, buffer_bytes, element))


def _use(job: Job, shape: ModelShape) -> ModelUse:
    return ModelUse(
        shape, job.itemsize, overlap=job.train.overlap, freeze_router=job.train.moe.freeze_router
    )


def _passes(job: Job) -> PassBytes:
    """The larger of all models, on each rank; log-probabilities are the actor's."""
    shapes = [s for s in (job.shape, job.critic, job.reward_model) if s is not None]
    found = [
        pass_bytes(shape, job.train_layout, job.model, job.train, job.itemsize) for shape in shapes
    ]
    return PassBytes(
        scoring=tuple(map(max, zip(*(p.scoring for p in found), strict=True))),
        training=tuple(map(max, zip(*(p.training for p in found), strict=True))),
        head=found[0].head,
    )


def _added(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*sizes, strict=True)))
