"""Configuration -> Run: the only place that chooses classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.check import rollout_layout, train_layout
from rlhf.config.load import load_config
from rlhf.config.schema import Config
from rlhf.dist.device import has_gpu
from rlhf.dist.patience import Limits
from rlhf.dist.scratch import Scratch, lent_name
from rlhf.dist.slurm import is_srun_task, read_task
from rlhf.dist.stop import Stopper
from rlhf.dist.world import World, join_world, read_ports
from rlhf.ground import Closer, Ground, Plan
from rlhf.preflight import check, check_nodes
from rlhf.solved import resolved

if TYPE_CHECKING:
    from rlhf.dist.groups import PhaseGroup
    from rlhf.rollout.engine import EngineSpec, RoutedLayers
    from rlhf.rollout.node_host import NodeHost
    from rlhf.rollout.zygote import Zygote
    from rlhf.run import Run
    from rlhf.weights.model_shape import ModelShape

UNASKED_LATE_S = 0.5
"""A host that is asked nothing has only the watcher to name its death; its last words come first.
"""
PHASE_MARGIN_S = 30.0
"""Ranks wait for one another longer than a rollout may take, so that who is late says so first."""


def build_here(config: Config | str) -> Run:
    """:func:`rlhf.build`."""
    world = join_world()
    loaded = load_config(config) if isinstance(config, str) else config
    stopper = Stopper(world.rank, loaded.dist.stop_grace_s)
    stopper.install()
    return build_on(loaded, world, stopper)


def build_on(config: Config, world: World, stopper: Stopper, *, record: bool = True) -> Run:
    """Start the engine, then build what trains while the engine starts. Collective, all ranks.

    An engine over several nodes is started when the ranks have met, as its nodes need an address;
    what it imports is imported meanwhile (on a GPU not: it starts some seconds later).
    ``record=False``: the run folder is read and not written.
    """
    plan = make_plan(config, world)
    closers: list[Closer] = []
    zygote = _prepare_node(stopper, closers)
    if plan.nodes_per_engine == 1:
        host = _launch_host(plan, stopper, closers, zygote)
        ground = _lay_ground(plan, stopper, closers)
    else:
        ground = _lay_ground(plan, stopper, closers)
        address = _agree_on_address(plan, ground.group)
        host = _launch_host(plan, stopper, closers, zygote, address)
    ground.host = host
    from rlhf.parts import build_parts  # torch and megatron are in place
    from rlhf.rollout.host_client import EngineHost

    engine = host if isinstance(host, EngineHost) else None
    return build_parts(ground, engine, record=record)


def make_plan(config: Config, world: World) -> Plan:
    """Check everything and lay out the ranks.

    Raises:
        ValueError: all faults at once.
    """
    config, _ = resolved(config, world.size, world.local_size, "config")
    shape = check(config, world.size, "config")
    rollout = rollout_layout(config.rollout, world.size)
    check_nodes(config, world)
    return Plan(
        config=config,
        world=world,
        shape=shape,
        train=train_layout(config.train, world.size),
        rollout=rollout,
    )


def engine_seed(seed: int, engine: int, num_engines: int) -> int:
    """A seed of its own for every engine, and for every seed of a run; what numpy accepts."""
    return (seed * num_engines + engine) % 2**32


def first_port(world: World, environ: Mapping[str, str] = os.environ) -> int | None:
    """Of the planned ports of the engine that this rank leads; None: it shall look for free ones,
    as several runs may share a node outside a Slurm step of several tasks.
    """
    if not is_srun_task(environ) or read_task(environ).size == 1:
        return None
    node, num_nodes = world.rank // world.local_size, world.size // world.local_size
    ports = read_ports(environ, node, num_nodes, world.local_size)
    return ports.engine(world.local_rank)[0] if ports is not None else None


def _prepare_node(stopper: Stopper, closers: list[Closer]) -> Zygote | None:
    """What the engines of a node share; imports nothing heavy."""
    from rlhf.rollout.zygote import start_zygote

    if not lent_name():  # not started by `rlhf train`
        scratch = Scratch()
        scratch.lend(os.environ)
        closers.append(scratch.close)
        stopper.at_exit(scratch.close)
    zygote = start_zygote()
    if zygote is not None:
        closers.append(zygote.close)
    return zygote


def _launch_host(
    plan: Plan,
    stopper: Stopper,
    closers: list[Closer],
    zygote: Zygote | None,
    address: str = "",
) -> NodeHost | None:
    """The host process of this rank's engine, where this rank starts it; returns while it starts.

    Args:
        address: where the nodes of the engine meet, if it has several.
    """
    from rlhf.rollout.host_client import EngineHost
    from rlhf.rollout.node_host import NodeHost

    if not plan.hosts_engine:
        return None
    spec = _engine_spec(plan, address)
    host: NodeHost
    if plan.leads_engine:
        engine = EngineHost.launch(spec, zygote)
        stopper.cut_short(engine.abort_quietly)
        stopper.look_after(engine.death)
        host = engine
    else:
        host = NodeHost.launch(spec, zygote)
        stopper.look_after(host.death, late_s=UNASKED_LATE_S)
    closers.append(host.close)
    stopper.at_exit(host.kill)
    if spec.num_nodes > 1:
        stopper.part_with(plan.rollout.engine_ranks(plan.engine), host.freeze)
    return host


def _engine_spec(plan: Plan, address: str) -> EngineSpec:
    from rlhf.rollout.engine import EngineSpec

    rollout, model, num_nodes = plan.config.rollout, plan.config.model, plan.nodes_per_engine
    return EngineSpec(
        model_path=str(Path(model.path).resolve()),
        vocab_size=plan.shape.vocab_size,
        max_position=plan.shape.max_position,
        context_tokens=plan.config.data.max_prompt_tokens + plan.longest_answer,
        dtype=model.dtype,
        quantization=rollout.quantization,
        routed=routed_layers(plan.shape),
        routes=rollout.routes,
        device="cuda" if has_gpu() else "cpu",
        tp=rollout.tp,
        dp=rollout.dp,
        ep=rollout.ep,
        pp=rollout.pp,
        num_nodes=num_nodes,
        node=plan.engine_node,
        address=address,
        cores=cores_from(plan.world, plan.rollout.engine_size // num_nodes),
        first_device=plan.world.device_index,
        first_port=first_port(plan.world) if num_nodes == 1 else None,
        fp32_head=model.fp32_head,
        deterministic=rollout.deterministic,
        prefix_cache=rollout.prefix_cache,
        random_seed=engine_seed(plan.config.seed, plan.engine, plan.rollout.num_engines),
        max_running_requests=rollout.max_running_requests,
        kv_tokens=rollout.kv_tokens,
        mem_fraction=rollout.mem_fraction,
        free_host_weights=rollout.free_host_weights,
        start_timeout_s=rollout.start_timeout_s,
    )


def _agree_on_address(plan: Plan, group: PhaseGroup) -> str:
    """Where the nodes of this rank's engine meet. Collective over all ranks."""
    from rlhf.rollout.addresses import engine_address, free_block, look_around, port_blocks

    world, layout = plan.world, plan.rollout
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    first = 0
    if plan.leads_engine:
        blocks = port_blocks(plan.engine, layout.num_engines, port, first_port(world))
        first = free_block(blocks)
    views = group.gather(look_around(host, port, first))
    return engine_address(views, layout.leader(plan.engine), world.local_size)


def routed_layers(shape: ModelShape) -> RoutedLayers | None:
    """What an engine must know of the model's experts."""
    from rlhf.rollout.engine import RoutedLayers

    if shape.moe is None:
        return None
    return RoutedLayers(shape.moe.first_dense, shape.num_layers, shape.moe.num_experts_per_token)


def waiting_limits(config: Config) -> Limits:
    """How long a rank may be silent, and how long others wait for it."""
    longest = max(config.rollout.timeout_s, config.rollout.start_timeout_s, config.dist.timeout_s)
    return Limits(
        silence_s=config.dist.silence_s,
        edge_s=config.dist.timeout_s,
        rollout_s=longest + PHASE_MARGIN_S,
    )


def cores_from(world: World, num_ranks: int) -> tuple[int, ...]:
    """CPU cores of ``num_ranks`` ranks from this one on: the machine's, shared evenly."""
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(1, len(cores) // world.local_size)
    first = world.local_rank * per_rank
    return tuple(cores[(first + i) % len(cores)] for i in range(per_rank * num_ranks))


def _lay_ground(plan: Plan, stopper: Stopper, closers: list[Closer]) -> Ground:
    """Stand-ins, groups, watcher, gate. Collective over all ranks."""
    import torch
    import torch.distributed as dist

    from rlhf.dist.gate import PhaseGate
    from rlhf.dist.groups import PhaseGroup, device_of, init_groups
    from rlhf.platform import megatron_cpu

    megatron_cpu.install()
    config, world = plan.config, plan.world
    device = device_of(world)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    else:
        torch.cuda.set_device(device)
    init_groups(world, device, config.dist.timeout_s)
    closers.append(dist.destroy_process_group)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limits = waiting_limits(config)
    stopper.watch(lambda: dist.TCPStore(host, port, is_master=False), world.size, limits)
    group = PhaseGroup.create(world, limits.rollout_s + PHASE_MARGIN_S, stopper.meeting)
    return Ground(plan, stopper, device, group, PhaseGate(group, stopper), closers)
