"""The decoder that is trained or kept as reference: megatron's GPTModel with our head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore.config import transformer_config
from rlhf.mcore.context import join_outputs
from rlhf.mcore.moe import routers
from rlhf.mcore.rope import frequencies
from rlhf.mcore.spec import decoder_spec
from rlhf.mcore.stage_waits import StageWaits
from rlhf.mcore.stream import Stream
from rlhf.mcore.value_head import ValueHead
from rlhf.mcore.vocabulary import LogprobHead, TokenEmbedding
from rlhf.weights.families import padded_vocab
from rlhf.weights.model_shape import ModelShape

Head = Literal["logprobs", "values"]
"""What the last stage makes of its hidden states."""


class Decoder(GPTModel):
    """One pipeline chunk: embedding (first stage), layers, norm and head (last stage)."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        layout: TrainLayout,
        train: TrainSection,
        *,
        fp32_head: bool,
        chunk: int | None,
        head: Head,
    ) -> None:
        """``chunk``: number of the virtual chunk, None without virtual stages."""
        super().__init__(
            config,
            decoder_spec(config, shape, train.moe, chunk),
            vocab_size=padded_vocab(shape, layout.tp),
            max_sequence_length=shape.max_position,
            pre_process=parallel_state.is_pipeline_first_stage(False, chunk),
            post_process=parallel_state.is_pipeline_last_stage(False, chunk),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "logprobs",
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rotary_percent=shape.rotary_dim / shape.head_dim,
            vp_stage=chunk,
        )
        if self.pre_process:
            self.embedding.word_embeddings = TokenEmbedding(self.embedding.word_embeddings)
        if self.post_process:
            self.output_layer = (
                ValueHead(config)
                if head == "values"
                else LogprobHead(
                    self.output_layer, shape.vocab_size, train.logprob_chunk_tokens, fp32_head
                )
            )
        inv_freq, self._rope_factor = frequencies(shape)
        self.rotary_pos_emb.inv_freq = inv_freq.to(torch.cuda.current_device())
        self._has_experts = shape.moe is not None
        self._latent = shape.mla is not None

    def forward(  # type: ignore[override]
        self, stream: Stream, temperature: float
    ) -> Tensor | tuple[Tensor, ...]:
        """Hidden states [S or S / tp, 1, h], on the last stage what the head makes of them:
        (logprobs [n], entropy [n]) or (values [n],).

        Stages after the first take the hidden states that megatron's schedule received. No
        attention mask exists.
        """
        packed, rope = stream.packed, None
        if self._latent or packed.groups:
            packed = replace(packed, rotation=self._rotation(packed.positions))
        else:
            assert self._rope_factor == 1, "YaRN needs latent attention or our own"
            rope = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=self.embedding(stream.tokens, None) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=rope,
            packed_seq_params=packed,
            # the one argument per row that megatron brings to the layers of experts
            padding_mask=self._own_rows(stream.members) if self._has_experts else None,
        )
        if not self.post_process:
            return hidden
        shared = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.embedding.word_embeddings.weight if shared else None
        outputs = self.output_layer(hidden, stream, temperature, weight)
        if stream.made_here is None:
            return outputs
        return join_outputs(outputs, stream.made_here, self.pg_collection.cp)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [S, 1, d / 2] in the dtype of the queries."""
        angles = (positions.float()[:, None] * self.rotary_pos_emb.inv_freq)[:, None]
        dtype, factor = self.config.params_dtype, self._rope_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _own_rows(self, members: Tensor) -> Tensor:
        """Columns [sequences, S / tp] of this rank's shard of the sequence."""
        if not self.config.sequence_parallel:
            return members
        group = self.pg_collection.tp
        return members.chunk(group.size(), 1)[group.rank()]


@dataclass(frozen=True)
class TrainModel:
    """A model on this rank: its pipeline chunks, wrapped for gradients if trainable."""

    shape: ModelShape
    train: TrainSection
    config: TransformerConfig
    layout: TrainLayout
    chunks: list[Any]
    """Modules that megatron's schedules take: its wrappers, or the decoders themselves."""
    decoders: list[Decoder]
    params: Mapping[str, Tensor]
    """This rank's parameters and expert biases (float32, without gradient) by name; with several
    virtual chunks the chunk's number in front."""
    stage_waits: StageWaits
    """Of the passes of this model."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    @property
    def gradient_bytes(self) -> int:
        """What the gradient buffers take now."""
        return sum(
            buffer.grad_data.untyped_storage().nbytes()
            for chunk in self.chunks
            if isinstance(chunk, DistributedDataParallel)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )

    def release_gradients(self) -> None:
        """Free the gradient buffers until :meth:`take_gradients`; what they hold is lost."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.offload_grad_buffers()

    def take_gradients(self) -> None:
        """Take the memory of the gradient buffers back if it was released; they are then zero."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.restore_grad_buffers()


def build_model(
    shape: ModelShape,
    layout: TrainLayout,
    model: ModelSection,
    train: TrainSection,
    *,
    trainable: bool,
    head: Head = "logprobs",
) -> TrainModel:
    """This rank's part of the model; weights are undefined until they are loaded.

    A trainable model gets gradient buffers; a frozen one neither buffers nor gradients. Load the
    weights before ``build_optimizer``: the float32 masters of a bfloat16 model are copied there.
    Collective over all ranks (groups of the grid must exist).
    """
    config = transformer_config(shape, layout, model, train)
    decoders = [
        Decoder(config, shape, layout, train, fp32_head=model.fp32_head, chunk=chunk, head=head)
        for chunk in (range(layout.vpp) if layout.vpp > 1 else [None])
    ]
    chunks: list[torch.nn.Module] = list(decoders)
    _mark_cuts(decoders)
    if trainable:
        if train.moe.freeze_router:
            for router in routers(decoders):
                router.weight.requires_grad_(False)
        chunks = _wrap(config, decoders, train)
    else:
        for decoder in decoders:
            decoder.requires_grad_(False)
    config.timers = stage_waits = StageWaits(layout.pp)
    return TrainModel(
        shape=shape,
        train=train,
        config=config,
        layout=layout,
        chunks=chunks,
        decoders=decoders,
        params={
            f"chunk{i}.{name}" if layout.vpp > 1 else name: tensor
            for i, decoder in enumerate(decoders)
            for name, tensor in _held_tensors(decoder)
        },
        stage_waits=stage_waits,
    )


def _held_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has of it: parameters and expert biases."""
    yield from decoder.named_parameters()
    for name, buffer in decoder.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _mark_cuts(decoders: list[Decoder]) -> None:
    """The gradient norm counts a parameter without this mark on one TP rank only.

    Transformer-engine marks by how a layer talks, which experts and replicated layers do not.
    """
    for decoder in decoders:
        for name, parameter in decoder.named_parameters():
            if ".mlp.experts." in name:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            if name.endswith("_down_proj.weight"):
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def _wrap(
    config: TransformerConfig, decoders: list[Decoder], train: TrainSection
) -> list[torch.nn.Module]:
    """Gradient buffers and hooks, and what the schedule calls on them."""
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    overlap = train.overlap and replicas > 1
    settings = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
    }
    chunks = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(**settings),
            decoder,
            disable_bucketing=i > 0,  # later chunks reduce while the first still computes
        )
        for i, decoder in enumerate(decoders)
    ]
    for chunk in chunks:
        _count_padding([*chunk.buffers, *chunk.expert_parallel_buffers])
    if overlap:
        no_syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_syncs[0] if len(chunks) == 1 else no_syncs
    config.finalize_model_grads_func = _finalize
    return list(chunks)


def _count_padding(buffers: list[Any]) -> None:
    """Make the size of a bucket without padding equal to the size with it.

    megatron 0.16.1 saves optimizer state from a copy of the buffer without the padding between
    buckets, at offsets that count the padding: all behind the first padded bucket would be
    written shifted. Tied embeddings have a bucket of their own, so two buckets are common.
    """
    for buffer in buffers:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _finalize(
    chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
) -> None:
    """megatron's reductions, without its division by a token count: the loss has its own."""
    finalize_model_grads(chunks, None, **kwargs)
