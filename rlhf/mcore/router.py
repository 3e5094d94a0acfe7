"""Which experts a row sees and with what weight, and the losses that even their loads out.

Rows of a folded stream stand for several sequences, or for none. Statistics and losses count a row
once for each sequence through it, so that they don't depend on how sequences are packed; a row of
no sequence is padding and goes to no expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf.config.schema import ExpertsSection
from rlhf.weights.model_shape import MoEShape


def expert_scores(logits: Tensor, moe: MoEShape) -> Tensor:
    """[rows, experts] float32."""
    return logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)


def choose_experts(scores: Tensor, bias: Tensor | None, moe: MoEShape) -> Tensor:
    """Numbers [rows, k] of the experts of each row, by scores [rows, experts] plus bias.

    With groups, experts of the ``topk_groups`` best groups only; a group is as good as the sum of
    its two best experts (arXiv:2412.19437, section 2.1.2). That is what transformers and SGLang do;
    megatron sums another number where k is not twice ``topk_groups``.
    """
    rank = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_groups > 1:
        groups = rank.unflatten(1, (moe.num_groups, -1))
        group_rank = groups.topk(2, -1).values.sum(-1)
        best = group_rank.topk(moe.topk_groups, -1).indices
        seen = torch.zeros_like(group_rank, dtype=torch.bool).scatter(1, best, True)
        rank = groups.masked_fill(~seen[..., None], -math.inf).flatten(1)
    return rank.topk(moe.num_experts_per_token, -1).indices


def expert_weights(scores: Tensor, experts: Tensor, moe: MoEShape) -> Tensor:
    """[rows, k]: by how much the outputs of the chosen experts are multiplied."""
    weights = scores.gather(1, experts)
    if moe.normalize_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling_factor


class ExpertRouter(torch.nn.Module):
    """Router of one layer, in float32 whatever the model's dtype.

    ``expert_bias`` [experts] is a float32 buffer; nothing may cast it, a bias in bfloat16 has steps
    larger than the update rate.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        moe: MoEShape,
        settings: ExpertsSection,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(
                moe.num_experts, config.hidden_size, dtype=config.params_dtype, device=device
            )
        )
        # On a sequence shard each TP rank sees other tokens: its gradient is summed over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.expert_bias: Tensor | None
        bias = torch.zeros(moe.num_experts, device=device) if moe.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.moe = moe
        self._settings = settings
        self._sequence_group = pg_collection.tp_cp
        self._batch_group = pg_collection.tp_dp_cp
        self.layer_number = 0
        zeros = torch.zeros(moe.num_experts, device=device)
        self.loads = zeros  # [experts] float32, tokens of this rank in this update
        self._seen = zeros  # the same over all ranks, for the global loss only
        self._num_tokens = self._num_sequences = 1.0

    def set_layer_number(self, number: int) -> None:
        """Megatron's number, from 1 on over the whole model."""
        self.layer_number = number

    def begin_update(self, num_tokens: float, num_sequences: float) -> None:
        """Forget loads; what follows are the micro-batches of an update of so many tokens."""
        self.loads = torch.zeros_like(self.loads)
        self._seen = torch.zeros_like(self._seen)
        self._num_tokens, self._num_sequences = num_tokens, num_sequences

    def forward(self, hidden: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [rows, 1, h] and members [sequences, rows] bool to each row's experts.

        Returns:
            weights [rows, experts] float32, zero where not chosen, and chosen [rows, experts] bool,
            False in rows of no sequence. Losses of the router ride on the weights' gradient.

        Collective where an auxiliary loss is on, over the ranks whose tokens it counts.
        """
        logits = F.linear(hidden.flatten(0, 1).float(), self.weight.float())
        scores = expert_scores(logits, self.moe)
        experts = choose_experts(scores, self.expert_bias, self.moe)
        weights = expert_weights(scores, experts, self.moe)
        copies = members.sum(0)
        chosen = _table(experts, scores) & (copies > 0)[:, None]
        weights = torch.zeros_like(scores).scatter(1, experts, weights) * chosen
        if self.training and torch.is_grad_enabled():  # once per micro-batch, recomputed or not
            with torch.no_grad():
                self.loads = self.loads + copies.float() @ chosen.float()
            for loss in self._losses(logits, scores, members):
                weights = AddLoss.apply(weights, loss)
        return weights, chosen

    def _losses(self, logits: Tensor, scores: Tensor, members: Tensor) -> list[Tensor]:
        """This rank's part of each loss; the parts of an update add up to it."""
        out = []
        if self._settings.z_loss_coef:
            squares = logits.logsumexp(-1).square()
            mean = (members.sum(0) * squares).sum() / self._num_tokens
            out.append(self._settings.z_loss_coef * mean)
        if self._settings.aux_loss != "none":
            shares = scores / scores.sum(-1, keepdim=True)
            best = _table(scores.topk(self.moe.num_experts_per_token, -1).indices, scores).float()
            balance = (
                self._sequence_balance
                if self._settings.aux_loss == "sequence"
                else self._global_balance
            )
            assert self._settings.aux_loss_coef is not None
            scale = self._settings.aux_loss_coef * self.moe.num_experts
            out.append(scale / self.moe.num_experts_per_token * balance(shares, best, members))
        return out

    def _sequence_balance(self, shares: Tensor, best: Tensor, members: Tensor) -> Tensor:
        """Mean over sequences of the sum over experts of their load times their mean share."""
        rows = members.float()
        counts = torch.cat([rows @ best, rows.sum(1, keepdim=True)], 1)
        torch.distributed.all_reduce(counts, group=self._sequence_group)
        loads, lengths = counts[:, :-1], counts[:, -1:]
        return (loads * (rows @ shares) / lengths.square()).sum() / self._num_sequences

    def _global_balance(self, shares: Tensor, best: Tensor, members: Tensor) -> Tensor:
        """The same over all tokens, with the loads of the micro-batches so far on all ranks."""
        copies = members.sum(0).float()
        counts = copies @ best
        torch.distributed.all_reduce(counts, group=self._batch_group)
        self._seen = self._seen + counts
        loads = self._seen / self._seen.sum().clamp(min=1) * self.moe.num_experts_per_token
        return (loads * (copies @ shares)).sum() / self._num_tokens


def _table(experts: Tensor, like: Tensor) -> Tensor:
    """Numbers [rows, k] as [rows, experts] bool."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, experts, True)


class AddLoss(torch.autograd.Function):
    """Passes a tensor through and gives a loss on the side the gradient 1.

    Megatron's keeps the loss's scale in a class variable, which a pass outside its schedule leaves
    in a state that the next pass inside does not take.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones([])
