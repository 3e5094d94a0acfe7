"""Every usable row is asked once per epoch, in an order that a step number alone decides."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.schema import DataSection, JsonlSource, ReasoningGymSource
from rlhf.data.jsonl import read_jsonl
from rlhf.data.mix import EpochOrder, PromptSource, allotment, build_eval_prompts
from rlhf.data.prompts import drop_overlong, load_prompts
from rlhf.data.sources import load_rows, render
from rlhf.data.tokenizer import load_tokenizer
from rlhf.types import Prompt
from tests.helpers.tiny_models import tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, **changes) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tok"), chat_template=TEMPLATE))


def prompts(num: int, domain: str = "d") -> list[Prompt]:
    return [Prompt(f"{domain}/{i}", domain, str(i), (i,), "") for i in range(num)]


def source(file: Path, *rows: object, **changes) -> JsonlSource:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlSource(type="jsonl", name="rows", path=str(file), **changes)


def sums(**changes) -> ReasoningGymSource:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return ReasoningGymSource(
        **{
            "type": "reasoning_gym",
            "name": "sums",
            "task": "chain_sum",
            "params": params,
            "size": 6000,
            "held_out": 64,
            **changes,
        }
    )


# --- tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adds", "text", "count"),
    [(True, "<bos>hi", 1), (True, "hi", 1), (False, "hi", 0), (False, "<bos>hi", 1)],
)
def test_one_bos_where_the_model_has_one(tmp_path, adds, text, count):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, add_bos_token=adds))
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == count
    assert ids[:1] == [tokenizer.bos_id] or count == 0


def test_bos_of_the_post_processor_counts_where_the_config_is_silent(tmp_path):
    from tokenizers import Tokenizer, processors

    write_tokenizer(tmp_path)
    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(tmp_path).encode("hi")
    assert ids[0] == 1
    assert 2 not in ids


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_plain_text_round_trip(tokenizer, text):
    assert tokenizer.decode([*tokenizer.encode(text), 2]) == text or "<" in text


def test_chat_template_from_every_place_it_may_live(tmp_path):
    messages = [{"role": "user", "content": "<b> é"}]
    expected = "<bos><user><b> é\n<assistant>"
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool", "template": "x"}]
    for i, place in enumerate(["config", "list", "jinja", "json"]):
        folder = tmp_path / str(i)
        write_tokenizer(folder)
        if place in ("config", "list"):
            write_tokenizer(folder, chat_template=TEMPLATE if place == "config" else named)
        elif place == "jinja":
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        else:
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.chat(messages) == expected, place
        assert tokenizer.encode(expected).count(1) == 1


def test_what_a_tokenizer_cannot_do_is_said(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"sampling.stop: 'ab' must be a single token .* is 2"):
        tokenizer.stop_token("ab")
    assert tokenizer.decode([tokenizer.stop_token("\n")]) == "\n"
    bare = load_tokenizer(write_tokenizer(tmp_path / "bare"))
    with pytest.raises(ValueError, match="has no chat template"):
        bare.chat([{"role": "user", "content": "hi"}])
    strict = write_tokenizer(
        tmp_path / "strict", chat_template="{{ raise_exception('no system') }}"
    )
    with pytest.raises(ValueError, match="no system"):
        load_tokenizer(strict).chat([])
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must hold tokenizer.json, has only tokenizer.model"):
        load_tokenizer(tmp_path / "slow")
    (tmp_path / "slow" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path / "slow")


# --- sources -------------------------------------------------------------------------------------


def test_only_line_feeds_end_a_line(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = ["a\u2028b", "c\u0085d", "e\u2029f", "\r"]
    text = "".join(json.dumps({"p": row}, ensure_ascii=False) + "\r\n" for row in rows)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\n  \n")
    assert [row["p"] for _, row in read_jsonl(file)] == rows
    assert [line for line, _ in read_jsonl(file)] == [1, 2, 3, 4]


def test_every_broken_line_is_named_by_file_and_number(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"p": 1}\n{"p": \n\n[1]\n{"p": "\xff"}\n')
    with pytest.raises(ValueError) as caught:
        read_jsonl(file)
    lines = str(caught.value).split("\n")
    assert [line.split(": ")[0] for line in lines] == [f"{file}:{n}" for n in (2, 4, 5)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"promt": "x", "answer": "1"},
            "a.jsonl:1: must have the key 'prompt'; did you mean promt?",
        ),
        ({"prompt": "x"}, "must have the key 'answer'"),
        ({"prompt": "x", "answer": None}, "answer must be a text or a number, is None"),
        ({"prompt": [], "answer": "1"}, "must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "must be a text or a list of messages"),
    ],
)
def test_faulty_rows_are_refused_by_place(tmp_path, row, words):
    with pytest.raises(ValueError) as caught:
        load_rows(source(tmp_path / "a.jsonl", row))
    assert words in str(caught.value)


def test_empty_and_overlong_prompts_are_dropped_and_named(tmp_path, tokenizer, caplog):
    rows = [
        {"prompt": p, "answer": i} for i, p in enumerate(["", "  ", "2+2?", "x" * 33, "y" * 32])
    ]
    with caplog.at_level(logging.WARNING):
        loaded = load_prompts(source(tmp_path / "a.jsonl", *rows), tokenizer, 32)
    assert [(p.uid, p.text, p.answer) for p in loaded] == [
        ("rows/2", "2+2?", "2"),
        ("rows/4", "y" * 32, "4"),
    ]
    assert f"empty: {tmp_path}/a.jsonl:1, {tmp_path}/a.jsonl:2" in caplog.text
    assert f"longer than 32 tokens: {tmp_path}/a.jsonl:4" in caplog.text
    with pytest.raises(ValueError, match=r"rows: no prompt is left: .* shortest has 4 tokens"):
        load_prompts(source(tmp_path / "a.jsonl", *rows), tokenizer, 3)
    with pytest.raises(ValueError, match="no prompt is left"):
        load_prompts(source(tmp_path / "a.jsonl", *rows[:2]), tokenizer, 3)


@given(st.lists(st.integers(0, 50)), st.integers(1, 50))
def test_what_fits_is_kept(lengths, limit):
    fits = [i for i, n in enumerate(lengths) if n <= limit]
    if fits:
        assert drop_overlong(lengths, limit) == fits
    elif lengths:
        with pytest.raises(ValueError, match="no prompt is left"):
            drop_overlong(lengths, limit)


def test_messages_go_through_the_chat_template_and_plain_text_does_not(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": messages, "answer": 1, "level": 3}, {"prompt": "hi", "answer": 2.5}]
    chat, plain = load_prompts(source(tmp_path / "a.jsonl", *rows), tokenizer, 99)
    assert chat.text == "<bos><user>hi\n<assistant>"
    assert chat.metadata == {"level": 3}
    assert (plain.text, plain.answer) == ("hi", "2.5")
    assert chat.token_ids == tuple(tokenizer.encode(chat.text))


def test_held_out_items_are_distinct_and_never_trained_on(tokenizer):
    template = "2 + 3 = 5\n1 - 4 = -3\n{expression} ="
    train = load_prompts(sums(template=template), tokenizer, 99)
    held_out = load_prompts(sums(template=template, split="held_out"), tokenizer, 99)
    assert (len(train), len(held_out)) == (136, 64)
    assert len({p.text for p in train + held_out}) == 200
    assert len({p.uid for p in train + held_out}) == 200
    for prompt in train + held_out:
        expression = prompt.text.split("\n")[-1].removesuffix(" =")
        assert eval(expression) == int(prompt.answer)
    assert held_out == load_prompts(sums(template=template, split="held_out"), tokenizer, 99)
    assert held_out != load_prompts(
        sums(template=template, split="held_out", seed=1), tokenizer, 99
    )


def test_eval_prompts_join_all_eval_sources(tokenizer):
    section = DataSection(
        train=(sums(),),
        eval=(sums(split="held_out"), sums(name="more", held_out=3, split="held_out")),
    )
    loaded = build_eval_prompts(section, tokenizer)
    assert [p.domain for p in loaded] == ["sums"] * 64 + ["more"] * 3
    assert loaded[0].text.startswith("<bos><user>")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"task": "chain_sums"},
            "unknown reasoning-gym task 'chain_sums'; did you mean chain_sum?",
        ),
        ({"params": {"terms": 2}}, "chain_sum refuses params {'terms': 2}"),
        ({"params": {"min_terms": 3, "max_terms": 2}}, "chain_sum refuses params"),
        ({"held_out": 200}, "held_out=200 must be below .* which is 200 among size=6000"),
        ({"template": "{expresion} ="}, "{expresion} is unknown; did you mean expression?"),
        ({"template": "{expression.x}"}, "{expression.x} is unknown"),
        ({"template": "{expression"}, "template of sums: "),
    ],
)
def test_faulty_tasks_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        load_rows(sums(**changes))


def test_templates_keep_doubled_braces():
    assert render("{{a}} {a}!", {"a": 1}, "here") == "{a} 1!"


# --- order ---------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_each_row_once_per_epoch_and_a_step_depends_on_its_number_alone(num, n, shuffle, seed):
    stream = PromptSource([prompts(num)], [1.0], seed=seed, shuffle=shuffle)
    taken = [p.uid for step in range(3 * num) for p in stream.take(step, n)]
    for epoch in range(len(taken) // num):
        assert len(set(taken[epoch * num : (epoch + 1) * num])) == num
    resumed = PromptSource([prompts(num)], [1.0], seed=seed, shuffle=shuffle)
    assert [p.uid for p in resumed.take(num, n)] == taken[num * n : (num + 1) * n]
    if not shuffle:
        assert taken == [f"d/{i % num}" for i in range(len(taken))]


def test_epochs_and_seeds_differ_in_order():
    def order(seed, step):
        return [p.uid for p in PromptSource([prompts(50)], [1], seed=seed).take(step, 50)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_drop_last_never_mixes_epochs():
    stream = PromptSource([prompts(10)], [1], seed=0, shuffle=False, drop_last=True)
    assert [[p.text for p in stream.take(step, 3)] for step in (2, 3)] == [
        ["6", "7", "8"],
        ["0", "1", "2"],
    ]
    with pytest.raises(ValueError, match="takes 11 prompts, the source has 10"):
        stream.take(0, 11)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 300))
def test_domains_are_mixed_by_weight_at_every_moment(weights, num):
    counts = allotment(weights, num)
    assert sum(counts) == num
    after = allotment(weights, num + 1)
    assert sum(b - a for a, b in zip(counts, after, strict=True)) == 1
    assert all(b >= a for a, b in zip(counts, after, strict=True))
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - num * weight / sum(weights)) <= 1 + len(weights) / 2


def test_a_mix_takes_each_domains_rows_once_per_epoch():
    stream = PromptSource([prompts(6, "a"), prompts(4, "b")], [3, 1], seed=0)
    taken = [p for step in range(8) for p in stream.take(step, 4)]
    first = [p.uid for p in taken if p.domain == "a"]
    assert len(first) == 24
    for epoch in range(4):
        assert len(set(first[6 * epoch : 6 * epoch + 6])) == 6
    assert sorted(p.uid for p in taken if p.domain == "b") == sorted(
        [f"b/{i}" for i in range(4)] * 2
    )


def test_an_empty_domain_is_refused():
    with pytest.raises(ValueError, match="at least 1 row"):
        EpochOrder(0, "x", shuffle=True)
