"""Whatever stops one rank stops all, soon, with one line that names it: under our launcher, and
under one that only starts processes (as srun does), where rank 0 holds the store.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.dist.stop_rank import GRACE_S
from tests.helpers.runs import ROOT, clean_environment, finish, wait_for
from tests.helpers.spawn import free_port

LIMIT_S = 90
LINE = re.compile(r"^stopped: rank (\d+), phase (\S+), step (-?\d+): (.*)$", re.MULTILINE)
LAUNCH = f"""
import sys
from rlhf.launch import Job, launch
sys.exit(launch(Job("tests.dist.stop_rank", sys.argv[2:], {GRACE_S}), int(sys.argv[1])))
"""


def popen(arguments, environment):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_launcher(case, folder, num_ranks=2):
    """Ranks under our launcher."""
    return popen(["-c", LAUNCH, str(num_ranks), case, str(folder)], clean_environment())


def run_bare(case, folder, num_ranks=2):
    """(status, stderr) by rank; a rank that is stopped is ended when the others have."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = [
        popen(
            ["-m", "tests.dist.stop_rank", case, str(folder)],
            {**clean_environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    name, _, victim = case.partition("-")
    order = sorted(range(num_ranks), key=lambda r: r == int(victim or 1))
    results = {}
    for rank in order:
        if name == "freezes" and rank == int(victim or 1):
            ranks[rank].kill()
        code, _, err = finish(ranks[rank], LIMIT_S)
        results[rank] = (code, err)
    return [results[r] for r in range(num_ranks)]


SILENT = r"no sign of life for \d+ s \(dist\.silence_s=8\)"
FAILURES = {
    "hangs": r"did not come within 8 s \(dist\.timeout_s\) to where others wait, "
    r"at the edge of phase pack, step 1",
    "freezes-0": SILENT,
    "freezes-1": SILENT,
    "dies": "was killed by SIGKILL",
    "leaves": "exited with status 3",
}


@pytest.mark.parametrize(
    "case", ["hangs", pytest.param("freezes-0", marks=pytest.mark.slow), *list(FAILURES)[2:]]
)
def test_one_line_names_the_rank_at_fault(case, tmp_path):
    code, _, err = finish(start_launcher(case, tmp_path), LIMIT_S)
    ((rank, phase, step, cause),) = LINE.findall(err)
    assert (rank, phase, step) == ("0" if case == "freezes-0" else "1", "update", "1")
    assert re.match(FAILURES[case], cause), cause
    assert err.strip().splitlines() == [f"stopped: rank {rank}, phase update, step 1: {cause}"]
    assert code == (3 if case == "leaves" else 1)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        pytest.param(
            *("freezes-1", r"rank 1, phase update, step 1: " + SILENT), marks=pytest.mark.slow
        ),
        ("freezes-0", r"rank 1, phase pack, step 1: rank 0, which holds the ranks' store, has not"),
        ("dies-1", r"rank 1, phase update, step 1: no sign of life; rank 0 lost its connection"),
        ("dies-0", r"rank 1, phase pack, step 1: rank 0, which holds the ranks' store, is gone"),
    ],
)
def test_without_our_launcher_the_ranks_name_it_themselves(case, line, tmp_path):
    victim = int(case[-1])
    results = run_bare(case, tmp_path)
    code, err = results[1 - victim]
    assert code == 1
    assert len(LINE.findall(err)) == 1, err
    assert re.search(rf"^stopped: {line}", err, re.MULTILINE), err
    assert results[victim] == (-signal.SIGKILL, "")


def test_a_signal_to_a_rank_inside_a_collective_reaches_all(tmp_path):
    """All ranks but one wait in gloo; the one goes on only when it knows of the signal."""
    process = start_launcher("waits", tmp_path, num_ranks=3)
    reached = tmp_path / "reached"
    wait_for(lambda: reached.exists() and reached.read_text(), LIMIT_S, "the phase")
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children, encoding="ascii") as f:
        ranks = {int(pid) for pid in f.read().split()}
    os.kill((ranks - {int(reached.read_text())}).pop(), signal.SIGUSR1)
    code, _, err = finish(process, LIMIT_S)
    assert (code, err) == (75, "")
    whys = {(tmp_path / f"why{r}").read_text() for r in range(3)}
    assert whys == {"SIGUSR1 at the edge of phase pack, step 1"}


def test_a_run_that_does_not_stop_in_order_says_what_is_lost(tmp_path):
    process = start_launcher("works", tmp_path)
    wait_for(lambda: (tmp_path / "reached").exists(), LIMIT_S, "the phase")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, LIMIT_S)
    assert code == 1
    ((_, _, _, cause),) = LINE.findall(err)
    assert "SIGTERM, and the phase did not end within 4 s" in cause
    assert "since the last complete checkpoint is lost" in cause


def test_a_rank_that_has_ended_well_is_not_called_silent(tmp_path):
    assert finish(start_launcher("outlasts", tmp_path), LIMIT_S)[::2] == (0, "")
    assert run_bare("outlasts", tmp_path) == [(0, ""), (0, "")]


def test_a_world_of_one_needs_nobody(tmp_path):
    assert run_bare("none", tmp_path, num_ranks=1) == [(0, "")]
