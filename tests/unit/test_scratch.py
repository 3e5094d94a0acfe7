"""A run's temporary files go with it, or with the next run when it was killed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from rlhf.dist.scratch import Scratch


def test_what_is_lent_is_taken_back_and_removed(tmp_path):
    environ = {"TMPDIR": "before"}
    with Scratch(tmp_path) as scratch:
        scratch.lend(environ)
        assert environ["TMPDIR"] == str(scratch.folder)
        (scratch.folder / "file").touch()
    assert environ["TMPDIR"] == "before"
    assert list(tmp_path.iterdir()) == []


def test_a_dead_run_is_cleaned_up_after_and_a_living_one_is_not(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from rlhf.dist.scratch import Scratch;"
        "s = Scratch(Path(sys.argv[1])); (s.folder / 'file').touch(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    (left,) = tmp_path.iterdir()
    with Scratch(tmp_path) as living:
        assert not left.exists()
        Scratch(tmp_path).close()
        assert os.listdir(tmp_path) == [living.folder.name]


def test_runs_that_start_at_once_leave_one_another_alone(tmp_path):
    """Each sweeps away what dead ones left while the others make their folders."""

    def live(number):
        with Scratch(tmp_path) as scratch:
            (scratch.folder / "file").touch()
            return (scratch.folder / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(live, range(400)))
    assert list(tmp_path.iterdir()) == []
