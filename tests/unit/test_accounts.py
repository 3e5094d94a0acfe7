"""The file of accounts holds each step once; the table sums to the wall."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlhf.config.schema import TrackSection
from rlhf.dist.clock import Account, Cause
from rlhf.recorder import all_accounts
from rlhf.track.accounts import ACCOUNTS, Accounts, account_table, added, read_accounts
from rlhf.track.report import as_dict, show
from rlhf.track.tracker import Tracker

TWO = [
    Account(4.0, {Cause.DECODE: 3.0, Cause.OTHER: 1.0}),
    Account(4.0, {Cause.TAIL_IDLE: 3.5, Cause.OTHER: 0.5}),
]


def tracker(folder, first_step=0):
    out = Tracker(folder, TrackSection(console=False), 9, is_writer=True)
    out.start(first_step)
    return out


def test_shares_are_of_all_ranks_together_and_sum_to_one():
    accounts = all_accounts(TWO)
    assert accounts.shares() == {
        "share/decode": 3 / 8,
        "share/tail_idle": 3.5 / 8,
        "share/other": 1.5 / 8,
    }


def test_a_resumed_run_has_each_step_once_and_what_followed_the_last(tmp_path):
    accounts = all_accounts(TWO)
    whole = tracker(tmp_path)
    for step in range(4):
        whole.account(step, accounts)
    whole.account(4, accounts, is_last=True)
    whole.close()
    assert [line.num_steps for line in read_accounts(tmp_path / ACCOUNTS)] == [1, 1, 1, 1, 0]
    resumed = tracker(tmp_path, first_step=2)
    resumed.account(2, accounts)
    resumed.close()
    lines = read_accounts(tmp_path / ACCOUNTS)
    assert len(lines) == 3
    assert added(lines) == Accounts(
        (12.0, 12.0),
        {"decode": (9.0, 0.0), "tail_idle": (0.0, 10.5), "other": (3.0, 1.5)},
        num_steps=3,
    )


def test_only_lines_of_the_last_number_of_ranks_are_added():
    lines = [Accounts((2.0,), {"save": (2.0,)}), Accounts((1.0, 1.0), {"eval": (1.0, 1.0)})]
    assert added(lines) == lines[1]


def test_the_table_names_the_worst_rank_of_each_cause():
    out = io.StringIO()
    Console(file=out, width=100).print(account_table(all_accounts(TWO)))
    rows = {
        cells[1]: cells[2:-1]
        for line in out.getvalue().splitlines()
        if len(cells := [c.strip() for c in line.replace("┃", "│").split("│")]) > 2
    }
    assert rows["tail_idle"] == ["1.750", "43.8%", "1", "3.500", "87.5%"]
    assert rows["decode"] == ["1.500", "37.5%", "0", "3.000", "75.0%"]
    assert rows["all"][:2] == ["4.000", "100.0%"]


def test_a_folder_that_no_run_has_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"accounting\.jsonl: no such file; give the folder"):
        read_accounts(tmp_path / ACCOUNTS)


def test_a_line_that_no_run_has_written_is_refused_by_its_number(tmp_path):
    path = tmp_path / ACCOUNTS
    good = '{"step": 0, "wall_s": [1.0], "other": [1.0]}\n'
    for bad, expected in (
        ('{"step": 1, "wa', r"accounting\.jsonl:2: is no JSON: .*delete the line"),
        ("[1, 2]", r"accounting\.jsonl:2: must be an object with step or steps_done, is \[1, 2\]"),
        ('{"step": 1}', r"accounting\.jsonl:2: has no wall_s"),
    ):
        path.write_text(f"{good}{bad}\n{good}")
        with pytest.raises(ValueError, match=expected):
            read_accounts(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"accounting\.jsonl: cannot be read"):
        read_accounts(path)


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path):
    (tmp_path / ACCOUNTS).write_text('{"steps_done": 0, "wall_s": [1.0], "eval": [1.0]}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read"):
        show(tmp_path, Console(quiet=True))
    (tmp_path / "metrics.jsonl").write_text('{"steps_done": 0, "seconds/eval": 1.0}\n')
    show(tmp_path, Console(file=(out := io.StringIO()), width=100))
    assert "eval" in out.getvalue()
    assert as_dict(tmp_path)["phases_s"] == {"eval": 1.0}
