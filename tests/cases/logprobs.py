"""Operations on log-probabilities, labels and masks."""

import math

import torch

from rlhf.config.check import sampling_faults
from rlhf.config.schema import SamplingSection
from rlhf.mcore.logprobs import HeadSettings, linear_logprobs
from rlhf.mcore.stream import keep_whole
from rlhf.rollout.collect import response_mask, to_trajectory
from rlhf.rollout.engine import Completion
from rlhf.types import MicroBatch, Prompt, Status, Trajectory
from tests.cases.case import Case, Op


def _logprob(logits: list[float], token: int, temperature: float, num_columns: int) -> float:
    """A head of hidden size 1 whose weight is the logits."""
    settings = HeadSettings(
        temperature=temperature, first_column=0, num_columns=num_columns, chunk_rows=1, fp32=True
    )
    weight = torch.tensor(logits)[:, None]
    row, target = torch.tensor([0]), torch.tensor([token])
    out, _ = linear_logprobs(torch.ones(1, 1), weight, row, target, settings)
    return float(out)


def token_logprob(case: Case) -> Case:
    _refuse_truncation(case["top_p"], case["top_k"], refused=False)
    logits = case["logits"]
    return {"logprob": _logprob(logits, case["token"], case["temperature"], len(logits))}


def padded_vocab_logprob(case: Case) -> Case:
    """The ranks of a TP group hold these columns side by side; tests/dist has the real group."""
    return {"logprob": _logprob(case["logits_padded"], case["token"], 1.0, case["real_vocab"])}


def truncated_logprob(case: Case) -> Case:
    """The configuration refuses to sample so; both sides then are the full distribution."""
    _refuse_truncation(case["top_p"], case["top_k"], refused=True)
    logits = [math.log(p) for p in case["probs"]]
    return {"full_vocab_logprob": _logprob(logits, case["token"], 1.0, len(logits))}


def _refuse_truncation(top_p: float, top_k: int, *, refused: bool) -> None:
    """``top_k`` 0 is "all tokens" in the cases, -1 in a configuration."""
    faults = list(sampling_faults(SamplingSection(top_p=top_p, top_k=top_k or -1)))
    assert bool(faults) == refused, (top_p, top_k, faults)


def packed_labels_(case: Case) -> Case:
    """The token that each row's hidden state is asked for, when all that can be are trained."""
    borders = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    tokens = torch.tensor(case["input_ids"])
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[borders[:-1].long()] = False
    stream = keep_whole(MicroBatch(tokens, torch.zeros_like(tokens), mask, borders, {}))
    labels: list[int | None] = [None] * len(tokens)
    rows = stream.needed[stream.source].tolist()
    for row, target in zip(rows, stream.targets.tolist(), strict=True):
        labels[row] = target
    return {"labels": labels}


def response_mask_(case: Case) -> Case:
    mask = response_mask(len(case["ids"]), 0, case["generated_length"])
    return {"mask": [int(m) for m in mask]}


def _trajectory(prompt_ids: list[int], generated: list[int]) -> Trajectory:
    prompt = Prompt("d/0", "d", "", tuple(prompt_ids), "")
    done = Completion(
        key=0,
        token_ids=generated,
        logprobs=[-1.0] * len(generated),
        status=Status.STOPPED,
        version=0,
    )
    return to_trajectory(prompt, 0, done)


def token_fidelity(case: Case) -> Case:
    if "turn1_generated_ids" in case:
        trajectory = _trajectory([1], case["turn1_generated_ids"])
        return {"train_ids": trajectory.tokens[trajectory.loss_mask].tolist()}
    trajectory = _trajectory(case["prompt_ids"], [])
    return {
        "train_ids": trajectory.tokens.tolist(),
        "lengths_match": len(trajectory.rollout_logprobs) == case["logprobs_len"],
    }


OPS: dict[str, Op] = {
    "token_logprob": token_logprob,
    "truncated_logprob": truncated_logprob,
    "padded_vocab_logprob": padded_vocab_logprob,
    "packed_labels": packed_labels_,
    "response_mask": response_mask_,
    "token_fidelity": token_fidelity,
}
