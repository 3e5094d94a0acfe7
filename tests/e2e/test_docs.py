"""The examples of the documentation run as they stand there."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.runs import ROOT, clean_environment, read_metrics, rlhf, tiny_config

DOC = (ROOT / "docs" / "your-own-loop.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path):
    """The two programs of the page and a configuration."""
    blocks = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "my_loop.py").write_text(blocks[0], encoding="utf-8")
    (tmp_path / "my_program.py").write_text(blocks[1], encoding="utf-8")
    return tmp_path, tiny_config(tmp_path, num_steps=2)


def test_a_loop_of_your_own(example):
    folder, config = example
    status, _, err = rlhf("train", str(config), "--loop", f"{folder}/my_loop.py:train")
    assert status == 0, err
    assert sum("reward/mean" in line for line in read_metrics(folder / "run")) == 2
    status, out, err = rlhf("eval", str(config))
    assert status == 0, err
    assert re.search(r"accuracy \d\.\d\d after 2 steps", out), out


def test_a_program_of_your_own(example):
    folder, config = example
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(str(folder / "my_program.py"), str(config)),
        ],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(folder) + os.pathsep + str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sum("reward/mean" in line for line in read_metrics(folder / "run")) == 2


def test_show_flow(example):
    _, config = example
    status, out, _ = rlhf("train", str(config), "--show-flow", limit_s=60)
    assert status == 0
    for word in ("rollout", "old_logprobs", "advantages", "reshard"):
        assert word in out
