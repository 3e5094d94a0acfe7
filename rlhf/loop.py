"""The loop: prompts to reshard, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.run import Run


def train(run: Run) -> None:
    """SPMD: every rank runs every line; no rank is special."""
    run.resharder.run(version=run.first_step, step=run.first_step)
    run.evaluator.maybe_run(run.first_step)
    for step in range(run.first_step, run.config.num_steps):
        prompts = run.prompts.take(step, run.config.batch.prompts_per_step)
        rollout = run.collector.collect(
            prompts, step, run.sampling, run.config.batch.samples_per_prompt
        )
        rollout = run.reward_model.score(rollout, step)
        batch = run.batcher.pack(rollout, step)
        batch = batch.with_columns(
            old_logprobs=run.actor.logprobs(batch, step),
            ref_logprobs=run.reference.logprobs(batch, step),
            **run.critic.values(batch, step),
        )
        batch = run.algorithm.assign_advantages(batch)
        for minibatch in batch.minibatches():
            run.critic.update(minibatch, step)
            run.actor.update(minibatch, step)
        run.resharder.run(version=step + 1, step=step)
        run.recorder.log(step, rollout, batch)
        run.checkpoints.maybe_save(step + 1)
        run.evaluator.maybe_run(step + 1)
    run.finish()


def evaluate(run: Run) -> None:
    """Held-out accuracy of the newest checkpoint, or of the model; `rlhf eval`."""
    if not run.config.data.eval:
        raise ValueError("rlhf eval needs data.eval: add a source of held-out prompts")
    run.resharder.run(version=run.first_step, step=run.first_step)
    result = run.evaluator.run(run.first_step)
    if run.ground.plan.world.is_first:
        print(
            f"accuracy {result.value:.2f} after {result.step} steps "
            f"(held-out, greedy, {result.num_items} items)"
        )
