"""One run folder, one run."""

import pytest

from rlhf.parts import lock_run_dir


def test_a_folder_in_use_is_refused_and_names_its_holder(tmp_path):
    lock = lock_run_dir(tmp_path / "run")
    with pytest.raises(ValueError, match=r"in use by process \d+ on "):
        lock_run_dir(tmp_path / "run")
    lock.close()
    lock_run_dir(tmp_path / "run").close()
