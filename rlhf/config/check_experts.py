"""What must hold for models with routed experts or latent attention: layouts, ``train.moe``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config.schema import ExpertsSection, TrainSection

if TYPE_CHECKING:
    from rlhf.weights.model_shape import ModelShape


def expert_faults(train: TrainSection, shape: ModelShape) -> Iterator[str]:
    """One line per fault, as in ``config.check``."""
    if train.tp > 1 and not train.sequence_parallel:
        cut = f"must be true for a model with {{}} while train.tp is {train.tp}: Megatron"
        if shape.moe is not None:
            experts = cut.format("experts")
            yield f"train.sequence_parallel: {experts} trains experts on parts of sequences"
        elif shape.mla is not None:
            latent = cut.format("latent attention")
            yield f"train.sequence_parallel: {latent} would not sum the gradients of the latents"
    if shape.moe is None:
        usual = ExpertsSection()
        for key, value in train.moe:
            if value != getattr(usual, key):
                yield (
                    f"train.moe.{key}: {value} has no effect: {shape.family} has no experts; leave "
                    "it out"
                )
        return
    if train.tp > 1 and train.ep == 1 and train.etp not in (None, train.tp):
        yield (
            f"train.etp: must be train.tp={train.tp} while train.ep is 1, is {train.etp}: Megatron "
            "would not sum the experts' gradients; leave it out or raise train.ep"
        )
    if train.moe.dispatcher == "allgather" and train.pp > 1:
        yield (
            f"train.moe.dispatcher: must be alltoall while train.pp is {train.pp}, is allgather: "
            "micro-batches differ in length"
        )
    yield from _loss_faults(train)
    if not shape.moe.expert_bias:
        for key in ("bias_update_rate", "bias_decay"):
            if getattr(train.moe, key):
                yield (
                    f"train.moe.{key}: {getattr(train.moe, key)} has no effect: {shape.family} has "
                    "no expert biases; leave it out"
                )


def _loss_faults(train: TrainSection) -> Iterator[str]:
    moe = train.moe
    if moe.aux_loss == "none" and moe.aux_loss_coef is not None:
        yield (
            f"train.moe.aux_loss_coef: {moe.aux_loss_coef} has no effect while train.moe.aux_loss "
            "is none; leave it out, or set aux_loss to sequence or global"
        )
    if moe.aux_loss != "none" and moe.aux_loss_coef is None:
        yield (
            f"train.moe.aux_loss_coef: must be given while train.moe.aux_loss is {moe.aux_loss}, "
            "e.g. 0.001"
        )
