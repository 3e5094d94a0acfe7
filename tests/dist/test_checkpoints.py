"""A checkpoint is complete or absent on every rank, whatever fails while it is written."""

import errno
import logging
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoint import Checkpoints, Policy
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.stop import Stopper
from rlhf.dist.world import World
from rlhf.saved import complete_steps
from tests.helpers.spawn import run_ranks


@dataclass
class Number:
    """The smallest state: one file with a number per rank; writing fails on ``full_rank``."""

    rank: int
    value: int = 0
    full_rank: int = -1

    def num_bytes(self) -> int:
        return 1000

    def save(self, folder: Path) -> None:
        (folder / f"{self.rank}.part").write_text(str(self.value), encoding="utf-8")
        if self.rank == self.full_rank:
            raise OSError(errno.ENOSPC, "No space left on device")

    def load(self, folder: Path) -> None:
        self.value = int((folder / f"{self.rank}.part").read_text(encoding="utf-8"))


def make(rank, world, folder, state, free=None, config=None, saved=None):
    group = PhaseGroup.create(World(rank, world, rank, world), 30)
    return Checkpoints(
        folder=Path(folder),
        state=state,
        policy=Policy(every=1, keep=2, num_steps=100),
        group=group,
        gate=PhaseGate(group, Stopper(rank, 60)),
        config=config or {"seed": 1, "num_steps": 9},
        models={},
        on_saved=saved.append if saved is not None else lambda steps_done: None,
        free_bytes=free,
    )


def save_and_resume(rank, world, folder):
    state, saved = Number(rank), []
    checkpoints = make(rank, world, folder, state, saved=saved)
    assert checkpoints.resume("auto") == 0
    for step in (1, 2, 9, 10):
        state.value = step * 10 + rank
        checkpoints.maybe_save(step)
        checkpoints.save()  # saved already: nothing happens
    again = Number(rank)
    done = make(rank, world, folder, again).resume("auto")
    return complete_steps(Path(folder)), done, again.value, saved


def test_old_ones_go_and_the_newest_comes_back(tmp_path):
    for rank, result in enumerate(run_ranks(save_and_resume, 2, str(tmp_path))):
        assert result == ([9, 10], 10, 100 + rank, [1, 2, 9, 10])


def fail_on_one_rank(rank, world, folder):
    state = Number(rank)
    checkpoints = make(rank, world, folder, state)
    checkpoints.maybe_save(1)
    state.full_rank = 1
    try:
        checkpoints.maybe_save(2)
    except RuntimeError as error:
        return (
            str(error),
            complete_steps(Path(folder)),
            sorted(p.name for p in Path(folder).iterdir()),
        )
    return None


def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_lost(tmp_path):
    for text, steps, names in run_ranks(fail_on_one_rank, 2, str(tmp_path)):
        assert "step 2" in text
        assert "rank 1" in text
        assert "No space left" in text
        assert "last complete checkpoint: step 1" in text
        assert steps == [1]
        assert names == ["step_00000001"]


def no_room(rank, world, folder):
    checkpoints = make(rank, world, folder, Number(rank), free=lambda path: 1500)
    try:
        checkpoints.maybe_save(1)
    except RuntimeError as error:
        return str(error)
    return None


def test_missing_space_is_seen_before_anything_is_written(tmp_path):
    first, second = run_ranks(no_room, 2, str(tmp_path))
    assert first == second
    assert "0.00 MiB are free" in first
    assert "checkpoint.keep=2" in first
    assert list(tmp_path.iterdir()) == []


def after_a_kill(rank, world, folder):
    checkpoints = make(rank, world, folder, Number(rank, 7))
    checkpoints.maybe_save(3)
    return sorted(p.name for p in Path(folder).iterdir())


def test_leftovers_of_a_killed_save_are_replaced(tmp_path):
    (tmp_path / ".writing-00000003").mkdir()
    (tmp_path / ".writing-00000003" / "0.part").write_text("half")
    assert run_ranks(after_a_kill, 2, str(tmp_path)) == [["step_00000003"]] * 2


def resume_changed(rank, world, folder):
    make(rank, world, folder, Number(rank)).maybe_save(3)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rlhf.checkpoint").addHandler(handler)
    for config in ({"seed": 1, "num_steps": 9}, {"seed": 2, "num_steps": 9}):
        make(rank, world, folder, Number(rank), config=config).resume("auto")
    return said


def test_settings_that_differ_from_the_saved_ones_are_remarked_once(tmp_path):
    first, second = run_ranks(resume_changed, 2, str(tmp_path))
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("going on after step 3 of ")
    assert first[0].endswith("than it was saved with: seed: 1 -> 2")


def must(rank, world, folder):
    try:
        make(rank, world, folder, Number(rank)).resume("must")
    except ValueError as error:
        return str(error)
    return None


def test_a_required_checkpoint_that_is_missing_is_an_error(tmp_path):
    (tmp_path / "step_00000005").mkdir()
    assert all("no complete checkpoint" in text for text in run_ranks(must, 2, str(tmp_path)))
