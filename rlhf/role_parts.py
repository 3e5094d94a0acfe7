"""The roles of a run: models on one grid, each loaded from its folder."""

from __future__ import annotations

from functools import partial

from rlhf.algorithms.algorithm import Algorithm
from rlhf.algorithms.values import critic_loss
from rlhf.config.schema import OptimizerSection
from rlhf.dist.replicas import Replicas
from rlhf.ground import Ground
from rlhf.mcore.model import TrainModel, build_model
from rlhf.mcore.optimizer import Optimizer, build_optimizer
from rlhf.mcore.value_head import draw_head
from rlhf.memory.host import available_bytes, check_host_room
from rlhf.memory.table import Region
from rlhf.memory_parts import Memory
from rlhf.planner.train_memory import Head, ModelUse, train_bytes
from rlhf.recorder import Recorder
from rlhf.roles.actor import Actor
from rlhf.roles.critic import Critic, NullCritic
from rlhf.roles.reference import NullReference, Reference
from rlhf.roles.reward_model import NullRewardModel, RewardModel
from rlhf.rollout.batcher import Batcher
from rlhf.weights.families import train_pieces
from rlhf.weights.hf_checkpoint import load_pieces
from rlhf.weights.value_model import load_value_model


def build_actor(ground: Ground, memory: Memory, algorithm: Algorithm, recorder: Recorder) -> Actor:
    """The policy; it rests while the critic warms up. Its weights are not in ``memory`` yet: how
    they come back may depend on engines. Collective over all ranks."""
    config = ground.plan.config
    rests = config.critic.warmup_steps if config.critic else 0
    model = _language_model(ground, trainable=True)
    total = (config.num_steps - rests) * config.batch.updates_per_step
    actor = Actor(
        model=model,
        optimizer=_optimizer(ground, model, config.optimizer, total),
        loss_fn=algorithm.loss_fn,
        temperature=config.rollout.sampling.temperature,
        first_step=rests,
        gate=ground.gate,
        on_update=recorder.add_update,
    )
    memory.add_training(Region.GRADIENTS, Region.OPTIMIZER, model, actor.optimizer)
    return actor


def build_reference(
    ground: Ground, memory: Memory, algorithm: Algorithm
) -> Reference | NullReference:
    """The actor's first weights, frozen, if the algorithm asks for them. Collective."""
    if not algorithm.needs_reference:
        return NullReference()
    model = _language_model(ground, trainable=False)
    memory.add_model(Region.REFERENCE, model, None)
    memory.time_slice.rest(Region.REFERENCE)
    return Reference(
        model=model,
        temperature=ground.plan.config.rollout.sampling.temperature,
        gate=ground.gate,
    )


def build_critic(ground: Ground, memory: Memory, recorder: Recorder) -> Critic | NullCritic:
    """The critic of an algorithm that has one. Collective over all ranks."""
    config = ground.plan.config
    section = config.critic
    if section is None:
        return NullCritic()
    model = _value_model(
        ground,
        section.path or config.model.path,
        trainable=True,
        needs_head=False,
        head_std=section.head_std,
    )
    total = config.num_steps * config.batch.updates_per_step
    critic = Critic(
        model=model,
        optimizer=_optimizer(ground, model, section.optimizer, total, "values"),
        loss_fn=partial(critic_loss, clip=section.value_clip),
        values_ends=config.algorithm.gae.bootstrap_truncated,
        gate=ground.gate,
        on_update=recorder.add_critic_update,
    )
    memory.add_training(Region.CRITIC_GRADIENTS, Region.CRITIC_OPTIMIZER, model, critic.optimizer)
    memory.add_model(Region.CRITIC, model, critic.optimizer)
    return critic


def build_reward_model(
    ground: Ground, memory: Memory, batcher: Batcher
) -> RewardModel | NullRewardModel:
    """The frozen classifier that a configuration names. Collective over all ranks."""
    section = ground.plan.config.reward_model
    if section is None:
        return NullRewardModel()
    model = _value_model(ground, section.path, trainable=False, needs_head=True)
    memory.add_model(Region.REWARD_MODEL, model, None)
    memory.time_slice.rest(Region.REWARD_MODEL)
    return RewardModel(
        model=model,
        weight=section.weight,
        pack=batcher.pack_all,
        gather=ground.group.gather,
        speaks=Replicas(ground.plan.train, ground.group).speaks,
        gate=ground.gate,
    )


def _optimizer(
    ground: Ground,
    model: TrainModel,
    section: OptimizerSection,
    total_updates: int,
    head: Head = "logprobs",
) -> Optimizer:
    """With its state where the configuration has it. Collective over all ranks.

    Raises:
        RuntimeError: a node has no room for the states of its ranks; on every rank.
    """
    memory = ground.plan.config.memory
    if memory.optimizer == "device":
        return build_optimizer(model, section, total_updates)
    use = ModelUse(
        model.shape,
        model.config.params_dtype.itemsize,
        head,
        overlap=model.train.overlap,
        freeze_router=model.train.moe.freeze_router,
    )
    check_host_room(
        "critic" if head == "values" else "actor",
        train_bytes(use, model.layout).optimizer,
        ground.plan.world,
        ground.group.gather,
        available_bytes(),
    )
    return build_optimizer(model, section, total_updates, memory.stream_mib * 2**20)


def _language_model(ground: Ground, *, trainable: bool) -> TrainModel:
    plan, config = ground.plan, ground.plan.config
    model = build_model(plan.shape, plan.train, config.model, config.train, trainable=trainable)
    ground.gate.on_leave(model.stage_waits.take_s)
    pieces = train_pieces(plan.shape, plan.train, plan.world.rank)
    load_pieces(config.model.path, pieces, model.params)
    return model


def _value_model(
    ground: Ground, folder: str, *, trainable: bool, needs_head: bool, head_std: float = 0.0
) -> TrainModel:
    plan, config = ground.plan, ground.plan.config
    source = load_value_model(folder, needs_head=needs_head)
    model = build_model(
        source.shape, plan.train, config.model, config.train, trainable=trainable, head="values"
    )
    ground.gate.on_leave(model.stage_waits.take_s)
    load_pieces(folder, source.pieces(plan.train, plan.world.rank), model.params)
    if not source.has_head:
        draw_head(model.params, head_std, config.seed)
    return model
