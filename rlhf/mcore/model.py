"""The decoder that is trained or kept as reference: megatron's GPTModel with our head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore.config import transformer_config
from rlhf.mcore.logprobs import HeadSettings, linear_logprobs
from rlhf.mcore.spec import decoder_spec
from rlhf.weights.families import padded_vocab
from rlhf.weights.model_shape import Llama3Rope, ModelShape


@dataclass(frozen=True, slots=True)
class Targets:
    """Which hidden states are scored against which tokens."""

    rows: Tensor  # [n] int64, packed index of the hidden state: one before the token
    tokens: Tensor  # [n] int64
    temperature: float


class LogprobHead(torch.nn.Module):
    """The output layer: hidden states of the last stage to log-probabilities and entropy.

    Takes over the weight of megatron's output layer, so its name stays ``output_layer.weight``;
    tied to the embedding of the same stage it has no weight of its own.
    """

    def __init__(
        self, linear: ColumnParallelLinear, vocab_size: int, model: ModelSection, chunk_rows: int
    ) -> None:
        super().__init__()
        self.register_parameter("weight", linear.weight)
        self.tp_group = linear.tp_group
        self.sequence_parallel = linear.sequence_parallel
        rows = linear.output_size_per_partition
        first = self.tp_group.rank() * rows
        self._settings = partial(
            HeadSettings,
            first_column=first,
            num_columns=max(0, min(rows, vocab_size - first)),
            chunk_rows=chunk_rows,
            fp32=model.fp32_head,
            group=self.tp_group if self.tp_group.size() > 1 else None,
        )

    def forward(
        self, hidden: Tensor, targets: Targets, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """hidden [T or T / tp, 1, h] to (logprobs [n], entropy [n]), float32.

        Collectives over TP: those of :func:`linear_logprobs`, and under sequence parallelism a
        gather of the hidden states.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        rows = hidden.squeeze(1).index_select(0, targets.rows)
        settings = self._settings(temperature=targets.temperature)
        return linear_logprobs(
            rows, self.weight if weight is None else weight, targets.tokens, settings
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Cut over TP along the vocabulary, as megatron's output layer."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )


class Decoder(GPTModel):
    """One pipeline chunk: embedding (first stage), layers, norm and head (last stage)."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, packed: PackedSeqParams, targets: Targets
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [1, T] to hidden states [T or T / tp, 1, h], or on the last stage the head's pair.

        The input of later stages is what megatron's schedule received. Positions restart with each
        sequence of ``packed``; no attention mask exists.
        """
        hidden, rope, *_ = self._preprocess(tokens, None, packed_seq_params=packed)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=rope,
            packed_seq_params=packed,
        )
        if not self.post_process:
            return hidden
        shared = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.embedding.word_embeddings.weight if shared else None
        return self.output_layer(hidden, targets, weight)


@dataclass(frozen=True)
class TrainModel:
    """A model on this rank: its pipeline chunks, wrapped for gradients if trainable."""

    config: TransformerConfig
    layout: TrainLayout
    chunks: list[torch.nn.Module]
    decoders: list[Decoder]
    params: Mapping[str, Tensor]
    """This rank's parameters by name; with several virtual chunks the chunk's number in front."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device


def build_model(
    shape: ModelShape,
    layout: TrainLayout,
    model: ModelSection,
    train: TrainSection,
    *,
    trainable: bool,
) -> TrainModel:
    """This rank's part of the model; weights are undefined until they are loaded.

    A trainable model gets gradient buffers; a frozen one neither buffers nor gradients. Load the
    weights before ``build_optimizer``: the float32 masters of a bfloat16 model are copied there.
    Collective over all ranks (groups of the grid must exist).
    """
    config = transformer_config(shape, layout, model, train)
    decoders = [
        _build_chunk(config, shape, layout, model, train, chunk if layout.vpp > 1 else None)
        for chunk in range(layout.vpp)
    ]
    chunks: list[torch.nn.Module] = list(decoders)
    if trainable:
        chunks = _wrap(config, decoders, train)
    else:
        for decoder in decoders:
            decoder.requires_grad_(False)
    params = {
        f"chunk{i}.{name}" if layout.vpp > 1 else name: parameter
        for i, decoder in enumerate(decoders)
        for name, parameter in decoder.named_parameters()
    }
    return TrainModel(config=config, layout=layout, chunks=chunks, decoders=decoders, params=params)


def _build_chunk(
    config: TransformerConfig,
    shape: ModelShape,
    layout: TrainLayout,
    model: ModelSection,
    train: TrainSection,
    chunk: int | None,
) -> Decoder:
    decoder = Decoder(
        config,
        decoder_spec(config, chunk),
        vocab_size=padded_vocab(shape, layout.tp),
        max_sequence_length=shape.max_position,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vp_stage=chunk,
    )
    if decoder.post_process:
        decoder.output_layer = LogprobHead(
            decoder.output_layer, shape.vocab_size, model, train.logprob_chunk_tokens
        )
    if shape.rope_scaling is not None:
        rope = decoder.rotary_pos_emb
        rope.inv_freq = scale_rope(rope.inv_freq, shape.rope_scaling)
    return decoder


def _wrap(
    config: TransformerConfig, decoders: list[Decoder], train: TrainSection
) -> list[torch.nn.Module]:
    """Gradient buffers and hooks, and what the schedule calls on them."""
    overlap = train.overlap and parallel_state.get_data_parallel_world_size() > 1
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
        _count_padding(chunk.buffers)
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


def scale_rope(inv_freq: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3's frequencies: long waves slowed by ``factor``, short ones kept, between a blend.

    Source: the Llama 3.1 reference code (apply_scaling); same as transformers' rope type llama3.
    """
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inv_freq / scaling.factor + share * inv_freq
