"""RL post-training in one SPMD program: Megatron-core, SGLang, exact resharding between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schema import Config
    from rlhf.run import Run


def build(config: Config | str) -> Run:
    """The parts of a run on this rank, ready for a loop; see ``docs/your-own-loop.md``.

    Call it on every rank of a torchrun or srun job; use the result as a context manager.
    Collective over all ranks.

    Args:
        config: a :class:`~rlhf.config.schema.Config`, or the path of a YAML file.

    Raises:
        ValueError: the configuration cannot work; all faults at once.
        RuntimeError: not started by torchrun or srun.
    """
    from rlhf.builder import build_here

    return build_here(config)
