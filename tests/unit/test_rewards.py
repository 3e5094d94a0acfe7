"""Right answers score 1, others 0, and a rule that cannot be used is refused before the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from rlhf.config.schema import DataSection, JsonlSource
from rlhf.data.sources import load_rows
from rlhf.rewards.build import Rewards, build_rewards, make_reward
from rlhf.rewards.match import numbers
from rlhf.types import Prompt, Score, Status, Trajectory
from tests.unit.test_data import sums

TRAJECTORY = Trajectory(
    "d/0", 0, np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32),
    np.zeros(1, np.int32), Status.STOPPED,
)  # fmt: skip


def prompt(answer: str = "5", **metadata: object) -> Prompt:
    return Prompt("d/0", "d", "2 + 3 =", (1,), answer, metadata)


def rewards(rule: str, timeout_s: float = 60) -> Rewards:
    return Rewards({"d": make_reward(rule)}, timeout_s)


def value(rule: str, text: str, answer: str = "5") -> float:
    return make_reward(rule).score(prompt(answer), text, TRAJECTORY).value


@pytest.mark.parametrize(
    ("text", "exact", "first", "last"),
    [
        (" 5", 1, 1, 1),
        ("5\n", 1, 1, 1),
        ("-5", 0, 0, 0),
        ("5 - 2", 0, 1, 0),
        ("2 + 3 = 5", 0, 0, 1),
        ("5.0", 0, 1, 1),
        ("five", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_text_rules(text, exact, first, last):
    assert value("exact_match", text) == exact
    assert value("first_number", text) == first
    assert value("last_number", text) == last


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-1,204", [-1204]),
        ("1,250 and 12,50", [1250, 12, 50]),
        ("5-2", [5, 2]),
        ("(-3)", [-3]),
        ("\u22127.", [-7]),
        ("x2 = .5", [Fraction(1, 2)]),
        ("0.1 + 0.2", [Fraction(1, 10), Fraction(1, 5)]),
        ("1 2 3", [1, 2, 3]),
    ],
)
def test_numbers_are_read_with_sign_and_thousands(text, found):
    assert numbers(text) == found


def test_answers_that_a_rule_cannot_judge_are_refused_before_the_run():
    with pytest.raises(ValueError, match=r"reward first_number, prompt d/0: .* is '5 or 6'"):
        rewards("first_number").check([prompt("5 or 6")])
    with pytest.raises(ValueError, match="must not be empty"):
        rewards("exact_match").check([prompt(" ")])
    with pytest.raises(ValueError, match=r"domain 'd' has no reward; did you mean dd?"):
        Rewards({"dd": make_reward("exact_match")}, 60).check([prompt()])


def rg_prompt(**changes) -> Prompt:
    row = load_rows(sums(**changes))[0]
    return Prompt("d/0", "d", "", (1,), row.answer, row.metadata)


def test_reasoning_gym_scores_by_the_tasks_own_rule():
    reward = make_reward("reasoning_gym")
    item = rg_prompt()
    reward.check(item)
    assert reward.score(item, f" {item.answer}\n", TRAJECTORY) == Score(
        1.0, {"correct": 1.0, "scorer_error": 0.0}
    )
    assert reward.score(item, "zzz", TRAJECTORY).value < 0.1
    with pytest.raises(ValueError, match="needs prompts of a reasoning_gym source"):
        reward.check(prompt())


def test_a_scorer_that_raises_scores_zero_and_is_counted():
    item = rg_prompt(task="prime_factorization", params={}, size=5, held_out=0)
    score = make_reward("reasoning_gym").score(item, "zzz", TRAJECTORY)
    assert score == Score(0.0, {"correct": 0.0, "scorer_error": 1.0})


def test_a_scorer_that_pays_for_garbage_is_refused():
    item = rg_prompt(task="game_of_life_halting", params={}, size=3, held_out=0)
    with pytest.raises(ValueError, match=r"game_of_life_halting gives 1.0 to 'zzz'"):
        make_reward("reasoning_gym").check(item)


def test_user_functions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy\n"
        "from rlhf.types import Score\n"
        "def length(prompt, text, trajectory): return len(text)\n"
        "def parts(prompt, text, trajectory): return Score(0.5, {'a': 1.0})\n"
        "def nothing(prompt, text, trajectory): return None\n"
        "def infinite(prompt, text, trajectory): return float('inf')\n"
        "def broken(prompt, text, trajectory): return 1 / 0\n"
        "def nan(prompt, text, trajectory): return float('nan')\n"
        "def huge(prompt, text, trajectory): return 10**9999\n"
        "def words(prompt, text, trajectory): return 'good'\n"
        "def leave(prompt, text, trajectory): raise SystemExit(0)\n"
        "def part(prompt, text, trajectory): return Score(1, {'a': 'x'})\n"
        "def single(prompt, text, trajectory): return Score(numpy.float32(0.5), {})\n"
        "def short(prompt, text): return 1\n"
    )

    def score(name: str) -> Score:
        mine = rewards(f"{file}:{name}")
        mine.check([prompt()])
        return mine.score(prompt(), "abc", TRAJECTORY)

    assert score("length") == Score(3.0, {"correct": 1.0})
    assert score("parts") == Score(0.5, {"a": 1.0})
    assert score("single") == Score(0.5, {})
    for name, words in {
        "nothing": "nothing, prompt d/0: must return a number or a Score, gave None",
        "infinite": "infinite, prompt d/0: value must be a finite number, is inf",
        "nan": "nan, prompt d/0: value must be a finite number, is nan",
        "huge": "huge, prompt d/0: value must be a finite number, is about 2",
        "words": "words, prompt d/0: must return a number or a Score, gave 'good'",
        "leave": "leave raised on prompt d/0: SystemExit: 0",
        "part": "part, prompt d/0: a must be a finite number, is 'x'",
        "broken": "raised on prompt d/0: ZeroDivisionError",
        "short": "must be called as function",
        "lenght": "did you mean length?",
    }.items():
        with pytest.raises(ValueError, match=words.replace("?", r"\?")):
            score(name)
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(ValueError, match=r"leaves.py raised SystemExit: 3"):
        make_reward(f"{tmp_path}/leaves.py:length")
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"bad.py raised ZeroDivisionError"):
        make_reward(f"{tmp_path}/bad.py:length")
    with pytest.raises(ValueError, match=r"no such file: none.py"):
        make_reward("none.py:length")


def test_unknown_rules_and_two_rules_for_one_domain_are_refused():
    with pytest.raises(ValueError, match="unknown reward 'exact_mach'; did you mean exact_match"):
        make_reward("exact_mach")

    def rows(**changes) -> JsonlSource:
        return JsonlSource(type="jsonl", name="d", path="x", **changes)

    with pytest.raises(ValueError, match="one reward, has exact_match and first_number"):
        build_rewards(DataSection(train=(rows(),), eval=(rows(reward="first_number"),)))
    made = build_rewards(DataSection(train=(rows(),), eval=(rows(),)))
    assert made.score(prompt(), "5", TRAJECTORY).value == 1


def test_the_function_of_the_readme(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = re.search(r"^    def score\(.*\n(?:^     .*\n)+", text, re.M)
    assert code
    (tmp_path / "my_reward.py").write_text(textwrap.dedent(code.group()))
    mine = rewards(f"{tmp_path}/my_reward.py:score")
    assert [mine.score(prompt("5"), t, TRAJECTORY).value for t in (" 5", "6")] == [1, 0]


HANGS = """
import threading
from rlhf.rewards.build import Rewards, make_reward
from tests.unit.test_rewards import TRAJECTORY, prompt

def forever(prompt, text, trajectory):
    threading.Event().wait()

if __name__ == "__main__":
    Rewards({"d": make_reward(f"{__file__}:forever")}, 0.1).score(prompt(), "abc", TRAJECTORY)
"""


def test_a_function_that_hangs_is_named_and_keeps_no_process(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "hangs.py")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert (
        "hangs.py:forever, prompt d/0: no score within data.reward_timeout_s=0.1 s" in done.stderr
    )
