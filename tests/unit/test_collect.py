"""Requests of a step: a seed of their own each, whatever the prompts are."""

from rlhf.data.mix import PromptSource
from rlhf.rollout.collect import count_occurrences, request_seed
from rlhf.types import Prompt


def prompts(num):
    return [Prompt(f"p{i}", "d", str(i), (i + 3,), str(i)) for i in range(num)]


def test_a_prompt_that_ends_one_epoch_and_begins_the_next_gets_other_seeds():
    """Steps of 16 out of 136: an epoch ends inside step 8, and a row may come twice in it."""
    met = False
    for seed in range(20):
        source = PromptSource([prompts(136)], [1.0], seed=seed)
        for step in range(30):
            uids = [p.uid for p in source.take(step, 16)]
            occurrences = count_occurrences(uids)
            met = met or max(occurrences) > 0
            seeds = {
                request_seed(seed, step, uid, occurrence, sample)
                for uid, occurrence in zip(uids, occurrences, strict=True)
                for sample in range(8)
            }
            assert len(seeds) == 16 * 8
    assert met, "the case that this test is about must occur"


def test_seeds_depend_on_every_argument():
    base = (1, 2, "p", 0, 3)
    others = [
        (9, 2, "p", 0, 3),
        (1, 9, "p", 0, 3),
        (1, 2, "q", 0, 3),
        (1, 2, "p", 1, 3),
        (1, 2, "p", 0, 9),
    ]
    assert len({request_seed(*a) for a in (base, *others)}) == 6
    assert request_seed(*base) == request_seed(*base)
