"""SGLang's tokenizer manager for DP-attention, where all groups must act on a message together.

Each attention group reads its messages by itself, but all groups meet in every step to tell one
another their batches, and in a message about weights at a barrier. A message that one group reads
before a step and another after it lets the one wait at the barrier and the other in the step, for
ever. So such a message travels between SGLang's BLOCK and UNBLOCK: groups keep what comes in
between until all have seen the UNBLOCK, and then take it in the same step. SGLang itself does so
with the requests of a batch, if SGLANG_ENABLE_COLOCATED_BATCH_GEN is set.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    BlockReqInput,
    BlockReqType,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from rlhf.rollout.engine import EngineSpec

_WITH_BARRIER = (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)


class GroupsTogether(TokenizerManager):
    """Puts messages that groups must take in one step between BLOCK and UNBLOCK."""

    _blocked = False

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        send = super()._dispatch_to_scheduler
        if isinstance(obj, BlockReqInput):
            self._blocked = obj.req_type == BlockReqType.BLOCK
        if isinstance(obj, _WITH_BARRIER) and not self._blocked:
            send(BlockReqInput(req_type=BlockReqType.BLOCK))
            send(obj)
            send(BlockReqInput(req_type=BlockReqType.UNBLOCK))
        else:
            send(obj)


def needs_groups_together(spec: EngineSpec) -> bool:
    """SGLang's BLOCK does not reach later pipeline stages, whose groups follow the first's."""
    return spec.dp > 1 and spec.pp == 1


def keep_groups_together() -> Any:
    """What ``Engine.init_tokenizer_manager_func`` must be; for schedulers started after this."""
    os.environ["SGLANG_ENABLE_COLOCATED_BATCH_GEN"] = "true"
    return partial(init_tokenizer_manager, TokenizerManagerClass=GroupsTogether)
