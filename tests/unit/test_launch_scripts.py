"""Every launch script is sound shell, says what it reads, and shows what it would start."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.runs import ROOT, clean_environment

BATCH = sorted(p for p in (ROOT / "launch").glob("*.sh") if "#SBATCH" in p.read_text())
STARTED = [*BATCH, ROOT / "launch" / "local.sh"]
SHELL = [
    *(ROOT / "launch").glob("*.sh"),
    *(ROOT / "slurm").glob("*.sh"),
    ROOT / "tests" / "slurm" / "slurm-local",
]
ASKED = ("nodes", "gpus-per-node", "requeue", "open-mode=append", "signal=B:USR1@", "time", "mem=0")


def name(path):
    return path.name


def dry(script, *settings, **variables):
    """(status, output) of a script that only shows what it would do, in an empty environment."""
    keep = {k: v for k, v in clean_environment().items() if k in ("PATH", "HOME", "TMPDIR")}
    done = subprocess.run(
        ["bash", str(script), *settings],
        env={**keep, "DRY_RUN": "1", **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("script", SHELL, ids=name)
def test_it_parses(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def test_what_sbatch_and_srun_start_may_be_executed():
    for script in [*STARTED, ROOT / "slurm" / "task.sh", ROOT / "tests" / "slurm" / "slurm-local"]:
        assert os.access(script, os.X_OK), script


@pytest.mark.parametrize("script", BATCH, ids=name)
def test_a_batch_script_asks_slurm_for_all_that_a_long_run_needs(script):
    options = re.findall(r"^#SBATCH --(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    for asked in ASKED:
        assert any(option.startswith(asked) for option in options), asked


@pytest.mark.parametrize("script", STARTED, ids=name)
def test_its_header_tells_every_variable_that_it_reads(script):
    """Those with a default in the script, or in what it shares with the others."""
    text = script.read_text(encoding="utf-8")
    shared = (ROOT / "slurm" / "job.sh").read_text(encoding="utf-8") if script in BATCH else ""
    read = set(re.findall(r"\b([A-Z_]+)=\$\{\1:-", text + shared))
    assert {"CONFIG", "PYTHON"} <= read
    told = {word for line in text.splitlines() if "#" in line for word in re.findall(r"\w+", line)}
    assert read <= told


@pytest.mark.parametrize("script", STARTED, ids=name)
def test_no_script_ends_processes_by_name(script):
    for path in (script, *(ROOT / "slurm").glob("*.sh"), ROOT / "launch" / "env.sh"):
        assert not re.search(r"\b(pkill|killall)\b", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", BATCH, ids=name)
def test_dry_mode_shows_one_task_per_node_that_sees_all_gpus(script):
    status, out = dry(script, "num_steps=3")
    assert status == 0, out
    train = next(line for line in out.splitlines() if line.startswith("train: "))
    nodes, gpus = (int(re.search(rf"--{n}=(\d+)", train)[1]) for n in ("nodes", "gpus-per-node"))
    assert "--ntasks-per-node=1" in train
    assert "--kill-on-bad-exit=1" in train
    assert "--gpus-per-task" not in train
    assert train.endswith(f"task.sh train dist.ranks={nodes * gpus} num_steps=3")
    config = re.search(r"^CONFIG=(.*)$", out, re.MULTILINE)[1]
    assert (ROOT / config).is_file()


@pytest.mark.parametrize("script", BATCH, ids=name)
def test_a_switch_starts_one_task_per_rank(script):
    status, out = dry(script, STARTER="rank", GPUS_PER_NODE="4", SLURM_NNODES="2")
    assert status == 0, out
    assert "--ntasks-per-node=4" in out
    assert "/rank%5t.log" in out
    assert "dist.ranks=8" in out


@pytest.mark.parametrize(
    ("kind", "words"),
    [("pyxis", "--container-image=/i --container-mounts=/a:/b"), ("apptainer", "exec --nv --bind")],
)
def test_one_variable_chooses_the_container(kind, words):
    status, out = dry(BATCH[0], CONTAINER=kind, IMAGE="/i", MOUNTS="/a:/b")
    assert status == 0, out
    assert words in out
    assert "PYTHON=python3" in out


WRONG = {
    "CONTAINER": ("docker", "CONTAINER=docker must be none, pyxis or apptainer"),
    "STARTER": ("ray", "STARTER=ray must be node or rank"),
    "CONFIG": ("no.yaml", "CONFIG=no.yaml: no such file"),
    "PROJECT": ("/nowhere", "PROJECT=/nowhere has no slurm/job.sh"),
    "RANKS_PER_NODE": ("x", "RANKS_PER_NODE=x must be a number"),
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_variable_is_named(variable):
    value, message = WRONG[variable]
    status, out = dry(BATCH[0], **{variable: value})
    assert status == 1
    assert message in out


def test_outside_slurm_a_batch_script_says_how_to_submit_it():
    status, out = dry(BATCH[0], DRY_RUN="0")
    assert status == 1
    assert "submit with sbatch" in out


def test_the_local_script_shows_torchrun():
    status, out = dry(ROOT / "launch" / "local.sh", "num_steps=3", RANKS="3")
    assert status == 0, out
    assert re.search(r"torch\.distributed\.run --nproc-per-node=3 .*rlhf\.train \S+demo\.yaml", out)
    assert Path(ROOT / "configs" / "demo.yaml").is_file()
