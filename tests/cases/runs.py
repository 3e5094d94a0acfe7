"""Operations on batches, checkpoints and stopping."""

import tempfile
from pathlib import Path

from rlhf.checkpoint import select_delete
from rlhf.dist.stop import consensus
from rlhf.packing import Budget, SequenceCost, schedule_microbatches
from rlhf.saved import COMPLETE, complete_steps, select_resume
from tests.cases.case import Case, Op


def pack_schedule(case: Case) -> Case:
    budget = Budget(
        tokens=case["cap"], align=case.get("align", 1), multiple=case["multiple_per_rank"]
    )
    schedule = schedule_microbatches(case["lengths"], case["dp"], budget, SequenceCost(1.0, 0.0))
    return {"schedule": schedule}


def ckpt_resume_select(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        for entry in case["dirs"]:
            step = Path(folder) / f"step_{entry['step']}"
            step.mkdir()
            if entry["complete"]:
                (step / COMPLETE).write_text("{}")
        return {"resume": select_resume(complete_steps(Path(folder)))}


def ckpt_retention(case: Case) -> Case:
    complete, keep = case["complete"], case["keep"]
    return {
        "delete_before_pending_is_durable": select_delete(complete, keep),
        "delete_after": select_delete([*complete, case["pending"]], keep),
    }


def stop_consensus(case: Case) -> Case:
    agreed = consensus(case["flags_by_rank"])
    return {"stop_on_every_rank": bool(agreed)}


OPS: dict[str, Op] = {
    "pack_schedule": pack_schedule,
    "ckpt_resume_select": ckpt_resume_select,
    "ckpt_retention": ckpt_retention,
    "stop_consensus": stop_consensus,
}
