"""``rlhf train CONFIG --show-flow``: the step as a table, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema import Config


@dataclass(frozen=True, slots=True)
class Stage:
    phase: str
    who: str
    reads: str
    writes: str


def stages(config: Config) -> list[Stage]:
    """The stages of one step, in order, with what each reads and writes."""
    kl, critic = config.algorithm.kl.place, config.critic is not None
    out = [
        Stage("rollout", "engines", "prompts, engine weights", "trajectories, rollout_logprobs"),
        Stage("rollout", "rewards", "trajectories", "scores"),
        *_reward_model(config),
        Stage("pack", "all ranks", "scores, lengths", "tokens, mask, credits, loss_weights"),
        Stage("score", "actor", "tokens", "old_logprobs"),
    ]
    if kl != "off":
        out.append(Stage("score", "reference", "tokens", "ref_logprobs"))
    values = "values" + (", end_values" if config.algorithm.gae.bootstrap_truncated else "")
    if critic:
        out.append(Stage("score", "critic", "tokens", values))
    reads = "credits" + (", old_logprobs, ref_logprobs" if kl == "reward" else "")
    reads += f", {values}" if critic else ""
    writes = "advantages" + (", returns" if critic else "")
    out.append(Stage("score", config.algorithm.name, reads, writes))
    reads = "tokens, old_logprobs, advantages, loss_weights"
    if kl == "loss":
        reads += ", ref_logprobs"
    times = config.batch.updates_per_step
    if critic:
        learns = "tokens, values, returns, loss_weights"
        out.append(Stage("update", f"critic x {times}", learns, "critic weights, optimizer state"))
    out.append(Stage("update", f"actor x {times}", reads, "actor weights, optimizer state"))
    out.append(Stage("reshard", "actor -> engines", "actor weights", "engine weights, version"))
    saved = f"actor{' and critic' if critic else ''} weights, optimizer state"
    out.append(Stage("save", "all ranks", saved, "checkpoint (if due)"))
    out.append(Stage("eval", "engines", "held-out prompts", "accuracy (if due)"))
    return out


def _reward_model(config: Config) -> list[Stage]:
    """Its own packing and pass, before the batch for training exists."""
    if config.reward_model is None:
        return []
    return [Stage("score", "reward_model", "trajectories", "scores")]


def flow_text(config: Config) -> str:
    """A table for the terminal."""
    rows = [("phase", "who", "reads", "writes")]
    rows += [(s.phase, s.who, s.reads, s.writes) for s in stages(config)]
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "-" * (sum(widths) + 6))
    roles = "actor" + (", reference" if config.algorithm.kl.place != "off" else "")
    roles += ", critic" if config.critic is not None else ""
    roles += ", reward model" if config.reward_model is not None else ""
    steps, batch = config.num_steps, config.batch
    head = (
        f"{config.algorithm.name}, {steps} steps of {batch.prompts_per_step} prompts x "
        f"{batch.samples_per_prompt} samples; roles on every rank: {roles}"
    )
    return "\n".join([head, "", *lines])
