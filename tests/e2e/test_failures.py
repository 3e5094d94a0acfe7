"""What goes wrong ends all ranks together, soon, with one line that names rank, phase and cause."""

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import finish, read_metrics, rlhf, start, tiny_config, wait_for

LIMIT_S = 30
LINE = re.compile(r"^stopped: rank (\d+), phase (\S+), step (-?\d+): (.*)$", re.MULTILINE)

KILLED = "was killed by SIGKILL (the kernel does so when memory runs out: see dmesg)"

LOOPS = '''
import os
from pathlib import Path

import psutil

import rlhf.loop


def planted(run, fault):
    """The usual loop, but rank 1 meets a fault in step 1."""
    take = run.actor.logprobs

    def logprobs(batch, step):
        if step == 1 and run.ground.plan.world.rank == 1:
            fault()
        return take(batch, step)

    run.actor.logprobs = logprobs
    rlhf.loop.train(run)


def raises():
    raise ArithmeticError("planted fault")


def rank_raises(run):
    planted(run, raises)


def rank_dies(run):
    planted(run, lambda: os.kill(os.getpid(), 9))


def in_second_update(run, fault):
    """``fault(mover, post, num_rounds)`` is called for rank 1's posts in its second update."""
    mover, note = run.resharder._mover, Path(run.config.run_dir, "fault")
    post = mover.window.post

    def planted_post(num_rounds):
        if mover.window.sequence == 2:
            note.touch()
            fault(mover, num_rounds)
        post(num_rounds)

    if run.ground.plan.world.rank == 1:
        mover.window.post = planted_post
    rlhf.loop.train(run)


def window_is_spoiled(run):
    def spoil(mover, num_rounds):
        mover.window.area(num_rounds - 1)[0] ^= 1

    in_second_update(run, spoil)


def rank_dies_in_update(run):
    in_second_update(run, lambda mover, num_rounds: os.kill(os.getpid(), 9))


def engine_dies_in_update(run):
    def kill(mover, num_rounds):
        os.kill(run.resharder._engine.wait_ready().pids["scheduler tp0"], 9)

    in_second_update(run, kill)


def after_update(run, fault):
    """``fault(name, params)`` for a parameter of rank 1 after its first update."""
    update, params = run.actor.update, run.actor.params

    def planted_update(minibatch, step):
        update(minibatch, step)
        Path(run.config.run_dir, "fault").touch()
        fault(next(n for n in params if "linear_fc2" in n), params)

    if run.ground.plan.world.rank == 1:
        run.actor.update = planted_update
    rlhf.loop.train(run)


def weight_is_nan(run):
    def spoil(name, params):
        params[name].data[1, 2] = float("nan")

    after_update(run, spoil)


def weight_is_lost(run):
    after_update(run, lambda name, params: params.pop(name))


def engine_dies_while_ranks_train(run):
    """No call to the engine is made after its scheduler has been killed."""
    run.resharder.run(version=0, step=0)
    rollout = run.collector.collect(run.prompts.take(0, 4), 0, run.sampling, 4)
    batch = run.batcher.pack(rollout, 0)
    if run.ground.plan.world.is_first:
        family = psutil.Process().children(recursive=True)
        next(p for p in family if "scheduler" in p.name()).kill()
    while True:
        run.actor.logprobs(batch, 1)
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    (folder / "loops.py").write_text(LOOPS, encoding="utf-8")
    return tiny_config(folder, num_steps=400, data={"eval": []})


@pytest.fixture
def own_tmp(monkeypatch):
    """A TMPDIR for the runs of a test; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def files_of(own_tmp):
    """(scratch folders, files in /dev/shm) of the runs that were started with this TMPDIR."""
    scratch = [p.name for p in own_tmp.glob("rlhf-run-*")]
    numbers = [p.name.partition("-")[2] for p in own_tmp.glob("rlhf-run-*/process-*")]
    names = [p.name for p in Path("/dev/shm").iterdir()]
    return scratch, [
        n for n in names if any(s in n for s in [*scratch, *map("_{}_".format, numbers)])
    ]


def assert_nothing_left(own_tmp, before):
    scratch, shared = before
    assert scratch
    assert shared, "the run had files in /dev/shm"
    assert not [n for n in shared if Path("/dev/shm", n).exists()]
    assert [p.name for p in own_tmp.iterdir() if "torchinductor" not in p.name] == []


def started(config, run_dir, *settings):
    """A running job that has logged a step."""
    process = start("train", str(config), f"run_dir={run_dir}", *settings)
    journal = run_dir / "metrics.jsonl"
    wait_for(
        lambda: process.poll() is not None or (journal.exists() and read_metrics(run_dir)),
        180,
        "the first step",
    )
    assert process.poll() is None, finish(process)
    return process


def with_loop(config, run_dir, name):
    return start(
        "train", str(config), f"run_dir={run_dir}", "--loop", f"{config.parent}/loops.py:{name}"
    )


def left_over(pids):
    """Processes of the job that still run."""
    return [p for p in pids if psutil.pid_exists(p) and _alive(p)]


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(process):
    return {p.pid: p.name() for p in psutil.Process(process.pid).children(recursive=True)}


def ended(process, pids, limit_s):
    """The one line of a run that fails in time and leaves nothing behind."""
    code, _, err = finish(process, limit_s)
    assert code == 1, err
    wait_for(lambda: not left_over(pids), 10, f"end of {pids}")
    lines = LINE.findall(err)
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_engine_process_ends_the_run_with_its_name(config, tmp_path, victim):
    process = started(config, tmp_path)
    pids = family(process)
    target = next(pid for pid, name in pids.items() if victim[:8] in name)
    os.kill(target, signal.SIGKILL)
    rank, _, _, cause = ended(process, pids, limit_s=10)
    assert rank in "01"
    assert "EngineDied" in cause
    assert victim in cause


def test_an_engine_that_dies_while_ranks_train_is_seen(config, tmp_path):
    code, _, err = finish(with_loop(config, tmp_path, "engine_dies_while_ranks_train"), 180)
    assert code == 1, err
    ((rank, phase, step, cause),) = LINE.findall(err)
    assert rank in "01"  # the node's zygote is the parent of both schedulers
    assert (phase, step) == ("score", "1")
    assert "EngineDied" in cause
    assert "scheduler" in cause


def test_a_rank_that_raises_ends_all_with_its_cause(config, tmp_path):
    code, _, err = finish(with_loop(config, tmp_path, "rank_raises"), 180)
    assert code == 1, err
    place = f"{tmp_path}/errors/rank1.txt"
    assert LINE.findall(err) == [
        ("1", "pack", "1", f"ArithmeticError: planted fault (traceback: {place})")
    ]
    assert "planted fault" in (tmp_path / "errors" / "rank1.txt").read_text(encoding="utf-8")


def test_a_rank_that_vanishes_is_named_and_ends_the_others(config, tmp_path):
    code, _, err = finish(with_loop(config, tmp_path, "rank_dies"), 180)
    assert code == 1, err
    assert LINE.findall(err) == [("1", "pack", "1", KILLED)]


RESHARD_FAULTS = {
    "window_is_spoiled": r"rank 1: round 0: the engine does not hold what was sent of model\.\S+: "
    r"rank \d .* -> rank 1 ",
    "weight_is_nan": r"rank 1: round \d+: NaN or infinite elements leave in model\.\S+down_proj\S+ "
    r"rank 1 decoder\S+linear_fc2",
    "weight_is_lost": r"rank 1, round \d+ of \d+: parameter decoder\S+linear_fc2\.weight is gone",
    "rank_dies_in_update": re.escape(KILLED),
    "engine_dies_in_update": r"EngineDied: .*scheduler tp0.*SIGKILL",
}


@pytest.mark.parametrize("fault", RESHARD_FAULTS)
def test_what_goes_wrong_in_a_reshard_stops_all_ranks(config, tmp_path, fault):
    """By the name of parameter, round and rank; nobody is asked after the fault."""
    process = with_loop(config, tmp_path, fault)
    wait_for(lambda: process.poll() is not None or (tmp_path / "fault").exists(), 180, "the fault")
    code, _, err = finish(process, LIMIT_S)
    assert code == 1, err
    ((_, phase, step, cause),) = LINE.findall(err)
    assert (phase, step) == ("reshard", "0"), err
    assert re.search(RESHARD_FAULTS[fault], cause), cause


def test_a_frozen_rank_is_named_and_goes_with_its_engine(config, tmp_path, own_tmp):
    process = started(config, tmp_path, "dist.silence_s=20")
    pids, files = family(process), files_of(own_tmp)
    ranks = [p for p in psutil.Process(process.pid).children() if "rlhf.train" in p.cmdline()]
    frozen = next(p for p in ranks if p.environ()["RANK"] == "1")
    frozen.suspend()
    rank, _, _, cause = ended(process, pids, limit_s=60)
    assert rank == "1"
    assert "no sign of life for" in cause
    assert "dist.silence_s=20" in cause
    assert_nothing_left(own_tmp, files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_nothing(config, tmp_path, own_tmp, number):
    """Ctrl-C reaches all processes of the terminal, USR1 the one it is sent to."""
    process = started(config, tmp_path)
    pids, files = family(process), files_of(own_tmp)
    if number == signal.SIGINT:
        assert_refused_while_it_runs(config, tmp_path)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    code, _, err = finish(process, LIMIT_S)
    assert code == 75, err
    assert signal.Signals(number).name in err
    assert "steps are saved in" in err
    assert not LINE.findall(err)
    assert list((tmp_path / "checkpoints").glob("step_*/run.json"))
    wait_for(lambda: not left_over(pids), 10, f"end of {pids}")
    assert_nothing_left(own_tmp, files)


def assert_refused_while_it_runs(config, run_dir):
    """A second run in the same folder: one line, and the first does not notice."""
    status, _, err = rlhf("train", str(config), f"run_dir={run_dir}", limit_s=120)
    assert status in (1, 2)
    (line,) = err.strip().splitlines()
    assert re.search(rf"run_dir={run_dir} is in use by process \d+ on ", line)


def test_a_run_that_must_not_resume_refuses_a_used_folder(config, tmp_path):
    (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000005" / "run.json").write_text("{}", encoding="utf-8")
    status, _, err = rlhf("train", str(config), f"run_dir={tmp_path}", "checkpoint.resume=never")
    assert status == 1
    assert "holds checkpoints of steps 5" in err
    assert (tmp_path / "checkpoints" / "step_00000005" / "run.json").is_file()


def test_what_the_user_got_wrong_is_refused_before_anything_starts(config):
    status, out, err = rlhf("train", str(config), "train.tp=3", "model.pth=x", limit_s=60)
    assert status == 2
    assert "model.pth" in err
    assert "did you mean" in err
    assert "Traceback" not in out + err
    status, _, err = rlhf(
        "train", str(config), "train.pp=1", "train.tp=4", "dist.ranks=4", limit_s=60
    )
    assert status == 2
    assert re.search(r"train\.tp.*4.*2", err), err
    status, _, err = rlhf("train", str(config), "model.path=/nowhere", limit_s=60)
    assert status == 2
    assert "/nowhere" in err


def wrong(config, *settings):
    """The refusal of a run with these settings: status 2, nothing started, no traceback."""
    status, out, err = rlhf("train", str(config), *settings, limit_s=60)
    assert status == 2, err
    assert "Traceback" not in out + err
    assert "held-out" not in out + err
    return err


def test_faulty_data_is_refused_before_anything_starts(config, tmp_path):
    good = (config.parent / "train.jsonl").read_text(encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(good + '{"prompt": "abc>", "answer"\n', encoding="utf-8")
    assert re.search(r"rows\.jsonl.*65", wrong(config, f"data.train.0.path={rows}"))
    assert "/nowhere.jsonl" in wrong(config, "data.train.0.path=/nowhere.jsonl")
    assert "max_prompt_tokens=2" in wrong(config, "data.max_prompt_tokens=2")
    assert "abc" in wrong(config, "rollout.sampling.stop=[abc]")
    assert "no_rule" in wrong(config, "data.train.0.reward=no_rule")


def test_a_damaged_model_folder_is_refused_before_anything_starts(config, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(config.parent / "model", model)
    (model / "model.safetensors").unlink()
    assert str(model) in wrong(config, f"model.path={model}")
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    raw["architectures"] = ["MambaForCausalLM"]
    (model / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    err = wrong(config, f"model.path={model}")
    assert "MambaForCausalLM" in err
    assert "Qwen3ForCausalLM" in err
