"""The copy task: ``427>`` -> ``427``, a small Llama that has half learned it, and a judge of it.

A random model never sees a reward, one that has learned leaves nothing to do: 25 supervised steps
leave the actor at one answer in twelve or so. The judge is a sequence classifier that knows the
chance of an exact answer after each digit; a critic starts from it, as it would from a reward
model. To compare two digits takes longer to learn than 250 steps of values.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

DIGITS = 3
NUM_HELD_OUT = 64
BATCH = 64
ACTOR_STEPS, JUDGE_STEPS = 25, 2000
CHANCE = 0.5
"""Of the next digit to be right, about the warm actor's."""
VOCABULARY = ("<pad>", "<bos>", "<eos>", *"0123456789", "+", "=", ">")


def build(folder: Path, seed: int = 0) -> Path:
    """Actor, tokenizer and data into ``folder``, the judge into ``folder/judge``; by the seed."""
    texts = write_data(folder, seed)
    actor = _warm_actor(texts, seed)
    judge = _warm_judge(actor, texts, seed)
    for model, place in ((actor, folder), (judge, folder / "judge")):
        model.save_pretrained(place)
        _tokenizer().save_pretrained(place)
    return folder


def write_data(folder: Path, seed: int = 0) -> list[str]:
    """The two files; returns the texts to train on."""
    texts = [f"{number:0{DIGITS}d}" for number in range(10**DIGITS)]
    random.Random(seed).shuffle(texts)
    held_out, train = texts[:NUM_HELD_OUT], texts[NUM_HELD_OUT:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("eval", held_out), ("train", train)):
        lines = (json.dumps({"prompt": f"{text}>", "answer": text}) + "\n" for text in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return train


def _tokenizer() -> Any:
    """A token per character; 16 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def _warm_actor(texts: list[str], seed: int) -> Any:
    """Random, then ACTOR_STEPS of supervised learning on BATCH strings each."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    for _ in range(ACTOR_STEPS):
        drawn = [rng.choice(texts) for _ in range(BATCH)]
        tokens = torch.tensor([[*_ids(f"{text}>{text}"), 2] for text in drawn])
        logits = model(input_ids=tokens).logits[:, DIGITS:-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, DIGITS + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _warm_judge(actor: Any, texts: list[str], seed: int) -> Any:
    """The actor's body, then JUDGE_STEPS of the chance of an exact answer after each token.

    That is 0 after a wrong digit, else CHANCE to the number of digits that are to come.
    """
    import torch
    from transformers import LlamaForSequenceClassification

    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = copy.deepcopy(actor.config)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(actor.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95))
    to_come = CHANCE ** torch.arange(DIGITS, -1, -1)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, JUDGE_STEPS)
    for _ in range(JUDGE_STEPS):
        drawn = [rng.choice(texts) for _ in range(BATCH)]
        # a wrong digit is often one of the text's own, as the actor's are
        given = [
            "".join(rng.choice((c, c, rng.choice(text), rng.choice("0123456789"))) for c in text)
            for text in drawn
        ]
        tokens = torch.tensor(
            [_ids(f"{text}>{answer}") for text, answer in zip(drawn, given, strict=True)]
        )
        right = (tokens[:, DIGITS + 1 :] == tokens[:, :DIGITS]).float().cumprod(1)
        right = torch.nn.functional.pad(right, (1, 0), value=1.0)  # nothing is wrong yet
        scores = model.score(model.model(tokens).last_hidden_state)[:, DIGITS:, 0]
        loss = (scores - right * to_come).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
    return model


def _ids(text: str) -> list[int]:
    return [VOCABULARY.index(c) for c in text]
