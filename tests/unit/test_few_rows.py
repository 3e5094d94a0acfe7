"""What a rehearsal asks: the shortest rows of a source, or a stand-in; a token per byte."""

from __future__ import annotations

import json

import pytest

from rlhf.config.schema import DataSection
from rlhf.data.byte_tokenizer import BOS, NUM_BYTES, write_byte_tokenizer
from rlhf.data.mix import build_eval_prompts, build_prompt_source
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rehearsal.few_rows import HELD_OUT, TRAINED, take_few
from rlhf.rewards.build import build_rewards


@pytest.fixture
def tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path, ["<|im_end|>", "\n"])
    return load_tokenizer(tmp_path)


def _source(path, **changes):
    base = {"type": "jsonl", "name": "sums", "path": str(path), "reward": "last_number"}
    return {**base, **changes}


def _write(path, prompts):
    rows = (json.dumps({"prompt": prompt, "answer": "7"}) + "\n" for prompt in prompts)
    path.write_text("".join(rows), encoding="utf-8")


def test_bytes_are_tokens_and_so_is_every_stop_text(tokenizer, tmp_path):
    text = "a + b = ß\n€"
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.stop_token("<|im_end|>") == NUM_BYTES + 3
    assert 3 <= tokenizer.stop_token("\n") < NUM_BYTES + 3
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<bos>user: hi\nassistant: "
    assert tokenizer.encode("<bos>x") == tokenizer.encode("x"), "one BOS, whoever writes it"


def test_the_shortest_rows_are_kept_in_their_order(tokenizer, tmp_path):
    lengths = [(7 * n) % 31 + 1 for n in range(40)]
    _write(tmp_path / "mine.jsonl", ["x" * n for n in lengths])
    data = DataSection(train=[_source(tmp_path / "mine.jsonl")])
    few = take_few(data, tokenizer, tmp_path, own_tokens=False)
    kept = [len(p.text) for p in build_prompt_source(few.data, tokenizer, 0).prompts]
    limit = sorted(lengths)[TRAINED - 1]
    assert sorted(kept) == sorted(lengths)[:TRAINED]
    assert kept == [n for n in lengths if n <= limit][: len(kept)]
    assert few.data.max_prompt_tokens == limit + 1, "BOS"
    assert few.notes == ()
    assert few.data.train[0].reward == "last_number"


def test_prompts_too_long_for_the_own_tokenizer_are_a_fault_of_the_own_file(tokenizer, tmp_path):
    file = tmp_path / "mine.jsonl"
    _write(file, ["x" * 50])
    data = DataSection(train=[_source(file)], max_prompt_tokens=20)
    with pytest.raises(ValueError, match="no prompt is left: all 1 are longer than"):
        take_few(data, tokenizer, tmp_path, own_tokens=True)
    assert take_few(data, tokenizer, tmp_path, own_tokens=False).data.max_prompt_tokens == 51
    file.write_text("{not json\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{file}:1: not JSON"):
        take_few(data, tokenizer, tmp_path, own_tokens=True)


def test_a_stand_in_takes_the_place_of_a_whole_domain(tokenizer, tmp_path):
    """A domain has one reward, so its evaluation is of stand-ins too."""
    _write(tmp_path / "eval.jsonl", ["1 + 1 ="])
    data = DataSection(
        train=[_source(tmp_path / "absent.jsonl", weight=3.0)],
        eval=[_source(tmp_path / "eval.jsonl")],
    )
    few = take_few(data, tokenizer, tmp_path, own_tokens=True)
    assert [source.weight for source in few.data.train] == [3.0]
    assert len(few.notes) == 2
    assert "data.train.0: " in few.notes[0]
    assert "absent.jsonl is not here: 16 sums and a reward without meaning" in few.notes[0]
    prompts = build_prompt_source(few.data, tokenizer, 0).prompts
    held_out = build_eval_prompts(few.data, tokenizer)
    assert (len(prompts), len(held_out)) == (TRAINED, HELD_OUT)
    build_rewards(few.data).check([*prompts, *held_out])
    assert few.data.max_prompt_tokens == max(len(p.token_ids) for p in prompts)
