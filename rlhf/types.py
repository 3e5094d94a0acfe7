"""The records that travel through one step, who writes each and who reads it.

    prompts -> rollout -> scores -> batch -> logprobs/values -> advantages -> updates -> reshard

| record / column                    | written by       | read by           | where   |
|------------------------------------|------------------|-------------------|---------|
| Prompt                             | data             | collect, rewards  | all     |
| Trajectory                         | collect          | rewards, batching | leader  |
| Score                              | rewards          | credits, metrics  | all     |
| Score with a reward model's part   | reward_model     | credits, metrics  | all     |
| TrajectoryFacts                    | collect          | batching, metrics | all     |
| tokens, positions, mask            | batching         | roles, algorithm  | replica |
| rollout_logprobs                   | batching         | gap metrics       | replica |
| credits, loss_weights              | batching         | algorithm, losses | replica |
| old_logprobs                       | actor            | algorithm, losses | replica |
| ref_logprobs                       | reference        | algorithm, losses | replica |
| values                             | critic           | algorithm, losses | replica |
| end_values                         | critic           | algorithm         | replica |
| advantages                         | algorithm        | losses            | replica |
| returns                            | algorithm        | losses, metrics   | replica |

all = host memory of every rank; leader = host memory of the rank that owns the engine;
replica = device memory of all ranks (tp, pp, cp) of the DP replica that trains the sequence.
A reward model needs the tokens before there is a batch for training: they travel twice, first
packed for it alone, and its numbers come back to all ranks.

A column entry at index t describes token t of the packed stream: ``old_logprobs[t]`` is
log p(tokens[t] | the tokens of its sequence before t), and ``values[t]`` the value of that state
before t. ``end_values[t]`` is the value of the state after t, where t is the last trained token of
an answer that was cut off. Entries where ``mask`` is False are zero.

Worked example, one sequence: prompt ``P0 P1``, answer ``A0 A1`` (A1 is the stop token)

    tokens           P0    P1    A0    A1
    positions         0     1     2     3
    mask          False False  True  True
    rollout_logprobs  0     0  -0.7  -0.1
    credits           0     0   1.0   1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Phase(StrEnum):
    """What a rank is doing; logged, timed, and named when a run stops."""

    SETUP = "setup"
    ROLLOUT = "rollout"
    PACK = "pack"
    SCORE = "score"
    UPDATE = "update"
    RESHARD = "reshard"
    SAVE = "save"
    EVAL = "eval"


class Status(StrEnum):
    """How a trajectory ended."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, rendered and tokenised once.

    ``uid`` is stable over runs of one data set (source name and row) and unique within it.
    ``token_ids`` is what the engine sees, special tokens included.
    """

    uid: str
    domain: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer with its prompt. Arrays have length L = prompt + answer.

    Token ids are those that the engine sampled: nothing is decoded and encoded again.
    """

    prompt_uid: str
    sample: int
    tokens: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True = sampled by the policy, trained
    rollout_logprobs: np.ndarray  # [L] float32, zero where loss_mask is False
    versions: np.ndarray  # [L] int32, weight version that sampled the token, -1 for prompt tokens
    status: Status
    routes: np.ndarray | None = None  # see rlhf.rollout.routes; None unless rollout.routes is on

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"trajectory {self.prompt_uid}#{self.sample}: arrays differ in length: {lengths}"
            )
        if self.routes is not None and len(self.routes) != len(self.tokens) - 1:
            raise ValueError(
                f"trajectory {self.prompt_uid}#{self.sample}: routes of {len(self.routes)} tokens, "
                f"must be {len(self.tokens) - 1}, one less than there are"
            )


@dataclass(frozen=True, slots=True)
class Score:
    """The value of one trajectory and what it is made of."""

    value: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """What every rank must know of a trajectory to decide the batch; a few numbers, no tokens."""

    index: int  # position in the step: prompt index * samples_per_prompt + sample
    group: int  # prompt index in the step
    owner: int  # rank that holds the tokens
    domain: str
    num_tokens: int  # L, prompt and answer
    num_trained_tokens: int  # loss_mask.sum()
    logprob_sum: float  # rollout_logprobs.sum()
    score: Score
    status: Status
    min_version: int
    max_version: int


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer to look at."""

    prompt: str
    answer: str
    expected: str
    value: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One phase's result: facts of all trajectories everywhere, tokens on their owner.

    ``facts`` is sorted by index; index = prompt * samples_per_prompt + sample.
    """

    facts: tuple[TrajectoryFacts, ...]
    trajectories: Mapping[int, Trajectory]
    samples: tuple[Sample, ...]
    expert_loads: np.ndarray | None = None
    """[layers with routed experts, experts] int64: tokens of all trajectories that took each
    expert; equal on all ranks. None unless ``rollout.routes`` is on."""


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Where one trajectory lies in a packed stream: tokens [start, start + length), no padding."""

    index: int
    start: int
    length: int
    truncated: bool = False  # the answer ended by its length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed forward pass: whole sequences back to back, each padded up to the alignment.

    T = padded length. Padding stands behind its sequence, where no real token attends to it; its
    mask is False and its columns are zero. A micro-batch without sequences is padding only.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 with each sequence
    mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [n + 1] int32, borders of the sequences, padding included
    columns: Mapping[str, Tensor]  # name -> [T] float32


COLUMNS = (
    "rollout_logprobs",
    "credits",
    "loss_weights",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "end_values",
    "advantages",
    "returns",
)


@dataclass(frozen=True)
class Batch:
    """All sequences that this DP replica trains in one step, packed; equal on all its ranks.

    Columns are [T] over all micro-batches back to back; each is written once, by
    :meth:`with_columns`, and read by later stages only.

    ``micro_bounds[m]`` is the token range of micro-batch m, ``mini_bounds[k]`` the micro-batch
    range of update k. Every DP rank has the same numbers of both.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    mask: Tensor  # [T] bool
    micro_bounds: tuple[tuple[int, int], ...]
    mini_bounds: tuple[tuple[int, int], ...]
    sequences: tuple[tuple[PackedSequence, ...], ...]  # per micro-batch, starts relative to it
    rollout_logprobs: Tensor | None = None
    credits: Tensor | None = None
    loss_weights: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    end_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def with_columns(self, **columns: Tensor | None) -> Batch:
        """A new batch with these columns; None (an absent role) writes nothing.

        Raises:
            ValueError: the column is unknown, was written before, or has another length.
        """
        new: dict[str, Any] = {}
        for name, value in columns.items():
            if name not in COLUMNS:
                raise ValueError(f"unknown column {name!r}; columns are {', '.join(COLUMNS)}")
            if value is None:
                continue
            if getattr(self, name) is not None:
                raise ValueError(f"column {name!r} was written before; each is written once")
            if value.shape != self.tokens.shape:
                raise ValueError(
                    f"column {name!r} has shape {tuple(value.shape)}, "
                    f"tokens {tuple(self.tokens.shape)}"
                )
            new[name] = value
        return replace(self, **new)

    def minibatches(self) -> Iterator[Batch]:
        """One batch per update, as views."""
        for first, last in self.mini_bounds:
            begin, end = self.micro_bounds[first][0], self.micro_bounds[last - 1][1]
            cut = {
                f.name: value[begin:end]
                for f in fields(self)
                if (value := getattr(self, f.name)) is not None
                and (f.name in COLUMNS or f.name in ("tokens", "positions", "mask"))
            }
            yield replace(
                self,
                micro_bounds=tuple(
                    (a - begin, b - begin) for a, b in self.micro_bounds[first:last]
                ),
                mini_bounds=((0, last - first),),
                sequences=self.sequences[first:last],
                **cut,
            )

    def microbatches(self) -> list[MicroBatch]:
        """The packed forward passes, in order, as views."""
        import torch

        out = []
        for (begin, end), sequences in zip(self.micro_bounds, self.sequences, strict=True):
            borders = [*(s.start for s in sequences[1:]), end - begin]
            out.append(
                MicroBatch(
                    tokens=self.tokens[begin:end],
                    positions=self.positions[begin:end],
                    mask=self.mask[begin:end],
                    cu_seqlens=torch.tensor(
                        [0, *borders], dtype=torch.int32, device=self.tokens.device
                    ),
                    columns={
                        name: value[begin:end]
                        for name in COLUMNS
                        if (value := getattr(self, name)) is not None
                    },
                )
            )
        return out
