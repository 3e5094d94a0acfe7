"""Which checkpoint is resumed and which are deleted."""

import json

import pytest

from rlhf.checkpoint import select_delete, size_text
from rlhf.saved import complete_steps, select_resume


def _make(folder, step, complete=True):
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "part.distcp").write_bytes(b"x")
    if complete:
        (path / "run.json").write_text(json.dumps({"steps_done": step}))


def test_newest_complete_one_is_resumed_in_numeric_order(tmp_path):
    for step in (9, 10, 30):
        _make(tmp_path, step)
    _make(tmp_path, 40, complete=False)
    (tmp_path / ".writing-00000050").mkdir()
    assert complete_steps(tmp_path) == [9, 10, 30]
    assert select_resume(complete_steps(tmp_path)) == 30


def test_no_checkpoint_is_none(tmp_path):
    _make(tmp_path, 5, complete=False)
    assert select_resume(complete_steps(tmp_path)) is None
    assert select_resume(complete_steps(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    ("steps", "keep", "gone"), [([10, 20, 30], 2, [10]), ([10], 2, []), ([30, 9, 10], 1, [9, 10])]
)
def test_old_ones_go_when_the_new_one_is_there(steps, keep, gone):
    assert select_delete(steps, keep) == gone


def test_sizes_are_readable():
    assert size_text(3.2 * 2**30) == "3.20 GiB"
    assert size_text(1500) == "0.00 MiB"
    assert size_text(2**29) == "512.00 MiB"
