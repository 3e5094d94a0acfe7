"""Operations on prompts and their order."""

import json
import logging
import tempfile
from pathlib import Path

from rlhf.data.jsonl import read_jsonl
from rlhf.data.mix import EpochOrder, PromptSource
from rlhf.data.prompts import drop_empty, drop_overlong
from rlhf.data.sources import Row
from rlhf.data.tokenizer import load_tokenizer
from rlhf.types import Prompt
from tests.cases.case import Case, Op
from tests.helpers.tiny_models import tiny_tokenizer


def jsonl_read(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(case["text"].encode("utf-8"))
        return {"records": len(read_jsonl(file)), "errors": []}


def bos_count(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        file = Path(folder) / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "add_bos_token": case["tokenizer_adds_bos"]}))
        tokenizer = load_tokenizer(folder)
        text = "<bos>2+2?" if case["rendered_starts_with_bos"] else "2+2?"
        return {"bos_tokens": tokenizer.encode(text).count(tokenizer.bos_id)}


def overlong_prompt(case: Case) -> Case:
    kept = drop_overlong(case["prompt_lengths"], case["max_prompt_length"])
    every = range(len(case["prompt_lengths"]))
    return {"kept": kept, "dropped": [i for i in every if i not in kept]}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def empty_prompt(case: Case) -> Case:
    rows = [Row(f"row {i}", i, text, "") for i, text in enumerate(case["prompts"])]
    handler, logger = _Warnings(), logging.getLogger("rlhf.data.prompts")
    logger.addHandler(handler)
    try:
        kept = {row.number for row in drop_empty(rows)}
    finally:
        logger.removeHandler(handler)
    dropped = [row.number for row in rows if row.number not in kept]
    named = all(f"row {i}" in " ".join(handler.messages) for i in dropped)
    return {"dropped": dropped, "warned": named}


def dataloader_resume(case: Case) -> Case:
    """A short last batch is filled from the next epoch: its part of this epoch is compared."""
    size = case["batch_size"]
    order = EpochOrder(case["dataset_size"], "0", case["shuffle"])
    whole = size if case["drop_last"] else 1
    draws = order.draws(case["batches_consumed"] * size, size, whole)
    epoch = draws[0].epoch
    return {"epoch": epoch, "next_batch": [d.row for d in draws if d.epoch == epoch]}


def sampler_partition(case: Case) -> Case:
    num, ranks = case["dataset_size"], case["dp"]
    prompts = [Prompt(str(i), "d", "", (i,), "") for i in range(num)]
    orders = [
        [p.uid for p in PromptSource([prompts], [1.0], seed=seed).take(0, num)]
        for seed in case["seed_by_rank"]
    ]
    shares = [set(order[rank::ranks]) for rank, order in enumerate(orders)]
    union = set().union(*shares)
    return {
        "union_size": len(union),
        "overlap": sum(map(len, shares)) - len(union),
        "same_permutation_on_all_ranks": all(order == orders[0] for order in orders),
    }


OPS: dict[str, Op] = {
    "jsonl_read": jsonl_read,
    "bos_count": bos_count,
    "overlong_prompt": overlong_prompt,
    "empty_prompt": empty_prompt,
    "dataloader_resume": dataloader_resume,
    "sampler_partition": sampler_partition,
}
