"""What a plan promises of a run's steps, by the names that a run measures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.memory.table import Span
from rlhf.planner.load import Load
from rlhf.planner.memory import Job, Machine
from rlhf.planner.speeds import Speeds
from rlhf.planner.step_time import Moved, step_times, trained
from rlhf.planner.train_time import scoring_time, update_time


@dataclass(frozen=True, slots=True)
class Promise:
    """What seconds are predicted from; the load may be another one later."""

    job: Job
    machine: Machine
    kv_tokens: int  # of an attention group
    moved: Moved
    moved_by: Speeds
    """The constants that ``moved`` was found with."""

    def seconds(self, speeds: Speeds, load: Load, trained_share: float = 1.0) -> dict[str, float]:
        """Of a step's phases by name of the metric, ``rollout`` or ``update_actor``.

        Args:
            trained_share: of the answers, what is left when groups without signal are out; passes
                of the trained models are over these.
        """
        moved = _at_speeds(self.moved, self.moved_by, speeds, self._nodes)
        times = step_times(self.job, speeds, load, self.machine, self.kv_tokens, moved)
        whole = {metric_name(span): took.seconds for span, took in times.items()}
        return whole | self.pass_seconds(speeds, load, trained_share)

    def pass_seconds(
        self, speeds: Speeds, load: Load, trained_share: float = 1.0
    ) -> dict[str, float]:
        """Those of :meth:`seconds` that are passes of the models that are trained, or are beside
        them."""
        job = self.job
        part = replace(load, prompts=max(1, round(load.prompts * trained_share)))
        actor = trained(job, self.machine, job.shape, head=True)
        out = {"score_actor": scoring_time(actor, part, speeds)}
        if job.reference:
            out["score_reference"] = out["score_actor"]
        if job.critic is not None:
            critic = trained(job, self.machine, job.critic, head=False)
            out["score_critic"] = scoring_time(critic, part, speeds)
            out["update_critic"] = update_time(critic, part, speeds)
        out["update_actor"] = update_time(actor, part, speeds)
        return {name: took.seconds for name, took in out.items()}

    @property
    def _nodes(self) -> int:
        return -(-self.job.train_layout.world // self.machine.gpus_per_node)


def metric_name(span: Span) -> str:
    """As in ``seconds/<name>``."""
    return "_".join(word for word in (span.phase.lower(), span.role) if word)


def measured_load(load: Load, steps: Mapping[str, float]) -> Load:
    """``load`` with the lengths that a run's metrics tell.

    Args:
        steps: medians over steps.
    """
    answer = steps.get("rollout/answer_tokens", load.answer_tokens)
    return replace(
        load,
        prompt_tokens=steps.get("rollout/prompt_tokens", load.prompt_tokens),
        answer_tokens=answer,
        longest_answer_tokens=max(
            answer, steps.get("rollout/answer_tokens_max", load.longest_answer_tokens)
        ),
    )


def _at_speeds(moved: Moved, known: Speeds, speeds: Speeds, nodes: int) -> Moved:
    """Seconds on a link that is so much faster; the slower link of a job decides."""
    factor = known.nic_gbs / speeds.nic_gbs if nodes > 1 else known.nvlink_gbs / speeds.nvlink_gbs
    return Moved(moved.reshard_s * factor, moved.restore_s * factor)
