"""The parts of a run, each built from what stands below it."""

from __future__ import annotations

import fcntl
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from rlhf.algorithms.algorithm import Algorithm, build_algorithm
from rlhf.checkpoint import Checkpoints, Policy
from rlhf.config.load import dump_config
from rlhf.config.schema import Config
from rlhf.data.mix import build_eval_prompts, build_prompt_source
from rlhf.data.tokenizer import Tokenizer, load_tokenizer
from rlhf.dist.gate import used_memory_gib
from rlhf.dist.layout import sequence_multiple
from rlhf.dist.replicas import Replicas
from rlhf.evaluate import Evaluator
from rlhf.ground import Ground, Plan
from rlhf.mcore import parallel
from rlhf.memory.table import Region
from rlhf.memory.ways import Way
from rlhf.memory_parts import Memory
from rlhf.packing import Budget, sequence_cost
from rlhf.promise import keep_promise
from rlhf.recorder import Recorder
from rlhf.reshard.execute import Mover
from rlhf.reshard.export import Exporter
from rlhf.reshard.round_trip import round_trip
from rlhf.reshard.rounds import Area
from rlhf.reshard.schedule import RankPlan, rank_plan
from rlhf.reshard.shard_sums import ShardRecord
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import DistTransport
from rlhf.rewards.build import Rewards, build_rewards
from rlhf.role_parts import build_actor, build_critic, build_reference, build_reward_model
from rlhf.roles.actor import Actor
from rlhf.roles.critic import Critic, NullCritic
from rlhf.rollout.batcher import Batcher
from rlhf.rollout.collect import Collector, Sampling
from rlhf.rollout.resharder import Resharder
from rlhf.rollout.residency import EngineMemory
from rlhf.rollout.restorer import Restorer
from rlhf.rollout.score_probe import ScoreProbe, probe_batch, probe_tokens
from rlhf.run import Run
from rlhf.saved import trained_models
from rlhf.state import TrainState
from rlhf.types import Phase, Prompt
from rlhf.weights.families import reshard_spread, restore_spread, rollout_padding_params
from rlhf.weights.spread import Spread

if TYPE_CHECKING:
    from rlhf.rollout.host_client import EngineHost


def build_parts(ground: Ground, engine: EngineHost | None, *, record: bool) -> Run:
    """All parts, loaded and resumed; the engine is ready when this returns. Collective.

    ``record=False``: the run folder is read and not written.
    """
    plan, config = ground.plan, ground.plan.config
    tokenizer = load_tokenizer(config.model.path)
    prompts = build_prompt_source(config.data, tokenizer, config.seed)
    held_out = build_eval_prompts(config.data, tokenizer)
    rewards = build_rewards(config.data)
    rewards.check([*prompts.prompts, *held_out])
    algorithm = build_algorithm(config, Replicas(plan.train, ground.group).total)
    recorder = Recorder.create(ground, record=record)
    process_gib = used_memory_gib()
    parallel.initialize(plan.train, config.dist.timeout_s, config.seed)
    memory = Memory.of(ground)
    recorder.watch_memory(memory.time_slice.ledger)
    actor = build_actor(ground, memory, algorithm, recorder)
    critic = build_critic(ground, memory, recorder)
    checkpoints = _checkpoints(ground, actor, critic, recorder)
    if record and config.checkpoint.resume == "never":
        checkpoints.refuse_others()
    if record and plan.world.is_first:
        ground.closers.append(lock_run_dir(Path(config.run_dir)).close)
        save_resolved(config)
        layouts = plan.train, plan.rollout
        kept = keep_promise(config, plan.shape, layouts, plan.world.local_size, process_gib)
        kept.write(Path(config.run_dir))
    probe = _probe(ground, engine, actor, recorder)
    collector = _collector(ground, engine, tokenizer, rewards, probe)
    batcher = build_batcher(ground, algorithm)
    run = Run(
        config=config,
        first_step=checkpoints.resume(config.checkpoint.resume),
        sampling=_sampling(plan, tokenizer, greedy=False),
        prompts=prompts,
        collector=collector,
        reward_model=build_reward_model(ground, memory, batcher),
        batcher=batcher,
        actor=actor,
        reference=build_reference(ground, memory, algorithm),
        critic=critic,
        algorithm=algorithm,
        resharder=_resharder(ground, engine, memory, actor, collector, probe, recorder),
        evaluator=_evaluator(ground, collector, held_out, tokenizer, recorder),
        checkpoints=checkpoints,
        recorder=recorder,
        exporter=_exporter(ground, actor),
        ground=ground,
    )
    recorder.start(run.first_step)
    return run


def _sampling(plan: Plan, tokenizer: Tokenizer, *, greedy: bool) -> Sampling:
    s, evaluation = plan.config.rollout.sampling, plan.config.eval
    stop = [tokenizer.stop_token(text) for text in s.stop]
    return Sampling(
        temperature=0.0 if greedy else s.temperature,
        top_p=1.0 if greedy else s.top_p,
        top_k=-1 if greedy else s.top_k,
        max_new_tokens=(evaluation.max_new_tokens or s.max_new_tokens)
        if greedy
        else s.max_new_tokens,
        stop_token_ids=tuple(sorted({*stop, *plan.shape.eos_token_ids})),
    )


def _collector(
    ground: Ground,
    engine: EngineHost | None,
    tokenizer: Tokenizer,
    rewards: Rewards,
    probe: ScoreProbe,
) -> Collector:
    config, moe = ground.plan.config, ground.plan.shape.moe
    return Collector(
        engine=engine,
        layout=ground.plan.rollout,
        group=ground.group,
        gate=ground.gate,
        scorer=rewards,
        decoder=tokenizer,
        seed=config.seed,
        timeout_s=config.rollout.timeout_s,
        num_experts=moe.num_experts if moe is not None and config.rollout.routes else None,
        probe=probe,
    )


def _probe(
    ground: Ground, engine: EngineHost | None, actor: Actor, recorder: Recorder
) -> ScoreProbe:
    plan, config = ground.plan, ground.plan.config
    context = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    num_tokens = min(config.reshard.probe_tokens, context - 1)
    token_ids = probe_tokens(config.seed, num_tokens, plan.shape.vocab_size)
    budget = _budget(plan)
    batch = probe_batch(token_ids, budget.align, budget.multiple, ground.device)
    return ScoreProbe(
        token_ids=token_ids,
        score=lambda: actor.score(batch),
        engine=engine,
        config=config.reshard,
        on_gap=recorder.add_probe,
    )


def _budget(plan: Plan, tokens: int | None = None) -> Budget:
    train = plan.config.train
    return Budget(
        tokens=tokens or train.tokens_per_microbatch,
        align=sequence_multiple(train.tp, train.cp, train.sequence_parallel),
        multiple=train.pp if train.vpp > 1 else 1,
    )


def build_batcher(ground: Ground, algorithm: Algorithm, tokens: int | None = None) -> Batcher:
    """``tokens``: budget of a micro-batch; None: that of the configuration."""
    plan = ground.plan
    return Batcher(
        rule=algorithm,
        layout=plan.train,
        group=ground.group,
        gate=ground.gate,
        budget=_budget(plan, tokens),
        cost=sequence_cost(plan.shape),
        num_updates=plan.config.batch.updates_per_step,
        device=ground.device,
    )


def _resharder(
    ground: Ground,
    engine: EngineHost | None,
    memory: Memory,
    actor: Actor,
    collector: Collector,
    probe: ScoreProbe,
    recorder: Recorder,
) -> Resharder:
    config, mover, back = ground.plan.config, *_movers(ground, memory, actor)
    record = ShardRecord(actor.params)
    resharder = Resharder(
        mover=mover,
        back=back,
        record=record if back is not None else None,
        engine=engine,
        layout=ground.plan.rollout,
        group=ground.group,
        gate=ground.gate,
        probe=probe,
        on_version=collector.set_version,
        on_stats=recorder.add_reshard,
        config=config.reshard,
    )
    if ground.host is not None:
        ground.host.wait_ready()
    resharder.open()
    memory.time_slice.add(EngineMemory(engine, ground.group))
    restore = None
    if back is not None:
        restore = Restorer(
            mover=back,
            record=record,
            engine=engine,
            layout=ground.plan.rollout,
            group=ground.group,
            timeout_s=config.reshard.timeout_s,
        ).run
    memory.add_actor(ground, actor.model, actor.optimizer, restore)
    return resharder


def _movers(ground: Ground, memory: Memory, actor: Actor) -> tuple[Mover, Mover | None]:
    """The movement to the engines and, if the actor's weights come back from there, the one back;
    both through one window and one pair of areas."""
    shape, config, world = ground.plan.shape, ground.plan.config, ground.plan.world
    train, rollout = ground.plan.train, ground.plan.rollout
    dtype = getattr(torch, config.model.dtype)

    def planned(spread: Spread, local_area: Area) -> RankPlan:
        return rank_plan(
            spread,
            Topology.of(world.size, world.local_size),
            world.rank,
            itemsize=dtype.itemsize,
            area_bytes=config.reshard.window_mib * 2**20 // 2,
            max_peers=config.reshard.max_peers,
            local_area=local_area,
        )

    there = planned(reshard_spread(shape, train, rollout), "incoming")
    back = None
    if memory.ways.get(Region.ACTOR) is Way.ENGINE:
        back = planned(restore_spread(shape, train, rollout), "outgoing")
    trip = round_trip(
        there,
        back,
        actor.params,
        DistTransport(device=ground.device),
        dtype=dtype,
        limit_s=config.reshard.timeout_s,
        padding_params=rollout_padding_params(shape, rollout, world.rank),
    )
    ground.closers.append(trip.reshard.window.close)
    memory.watch(Region.WINDOWS, lambda: trip.staging_bytes)
    return trip.reshard, trip.restore


def _evaluator(
    ground: Ground,
    collector: Collector,
    prompts: list[Prompt],
    tokenizer: Tokenizer,
    recorder: Recorder,
) -> Evaluator:
    config = ground.plan.config
    return Evaluator(
        collector=collector,
        prompts=prompts,
        sampling=_sampling(ground.plan, tokenizer, greedy=True),
        every=config.eval.every,
        num_steps=config.num_steps,
        on_result=recorder.add_accuracy,
    )


def _checkpoints(
    ground: Ground, actor: Actor, critic: Critic | NullCritic, recorder: Recorder
) -> Checkpoints:
    config, at = ground.plan.config, ground.plan.train.coord(ground.plan.world.rank)
    return Checkpoints(
        folder=Path(config.run_dir) / "checkpoints",
        state=TrainState(
            actor,
            critic if isinstance(critic, Critic) else None,
            writes=at.dp == at.cp == 0,
        ),
        policy=Policy(
            every=config.checkpoint.every, keep=config.checkpoint.keep, num_steps=config.num_steps
        ),
        group=ground.group,
        gate=ground.gate,
        config=config.model_dump(mode="json"),
        models=trained_models(config, ground.plan.shape),
        on_saved=lambda steps_done: recorder.log_phase(steps_done, Phase.SAVE),
    )


def _exporter(ground: Ground, actor: Actor) -> Exporter:
    plan, config = ground.plan, ground.plan.config
    return Exporter(
        shape=plan.shape,
        layout=plan.train,
        rank=plan.world.rank,
        params=actor.params,
        dtype=getattr(torch, config.model.dtype),
        transport=DistTransport(device=ground.device),
        gather=ground.group.gather,
    )


def lock_run_dir(folder: Path) -> TextIO:
    """Hold the run folder until the returned file is closed or this process ends.

    Raises:
        ValueError: another run holds it; the two would overwrite one another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ValueError(
            f"run_dir={folder} is in use by {holder or 'another run'}; wait for it, end it, or "
            "give another run_dir"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    return lock


def save_resolved(config: Config) -> Path:
    """Write the resolved configuration into the run folder; returns the folder."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder
