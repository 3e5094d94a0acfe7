"""The checks of a GPU run on a CPU too, so that no line of them waits for a GPU to be tried."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from rlhf.bench import gpu_check
from rlhf.bench.gpu.check import SMALL, CheckFailed
from rlhf.bench.gpu.engine import require_freed
from rlhf.bench.gpu.group import send_to_itself
from rlhf.bench.gpu.tensors import require_released
from rlhf.bench.gpu.window import ProcessEngine, require_no_leak
from rlhf.bench.rectangles import column_slices
from rlhf.dist.device import has_gpu
from rlhf.reshard.transport import LocalHub

CPU = torch.device("cpu")
SELF = [sys.executable, "-m", "rlhf.bench.gpu_check"]


@pytest.mark.parametrize("name", ["group", "window", "storages", "copies", "logprobs"])
def test_a_check_holds_on_a_cpu_and_gives_figures_that_json_takes(name):
    assert json.loads(json.dumps(gpu_check.run_here(name, "cpu")))


def test_all_limits_of_the_first_tier_fit_the_whole():
    assert sum(c.limit_s for c in gpu_check.CHECKS if c.tier == 1) <= gpu_check.TOTAL_S


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_imports_no_torch():
    program = (
        "import sys; from rlhf.bench import gpu_check; status = gpu_check.main();"
        "print([m for m in ('torch', 'sglang', 'transformer_engine') if m in sys.modules], status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[] 2"
    assert len(done.stderr.strip().splitlines()) == 1 and "no CUDA device" in done.stderr
    assert subprocess.run(SELF, capture_output=True).returncode == 2


def test_every_check_is_a_function_of_its_module_and_none_imports_sglang_with_it():
    program = (
        "import sys, importlib; from rlhf.bench.gpu_check import CHECKS;"
        "of = lambda c: importlib.import_module('rlhf.bench.gpu.' + c.module);"
        "print(all(callable(getattr(of(c), c.function)) for c in CHECKS), 'sglang' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True False"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('3 > 2')", "exit status 1: .*ValueError: 3 > 2"),
        ("print('no figures')", "no JSON"),
        ("", "no JSON"),
        ("import os; os.abort()", "exit status -6"),
        ("import sys; sys.stderr.write('half'); sys.stderr.flush(); input()", "not done.*half"),
    ],
)
def test_a_check_that_fails_is_reported_with_its_words(program, words):
    """The last one waits for input that never comes."""
    reader = [sys.executable, "-c", program]
    if "input" in program:
        reader = ["sh", "-c", f'sleep 1000 | "{sys.executable}" -c "{program}"']
    outcome = gpu_check.run_apart("x", reader, 3.0)
    assert not outcome.ok
    assert outcome.error and re.search(words, outcome.error, re.DOTALL), outcome.error


def test_no_time_left_is_a_failure_and_the_others_were_run():
    ok = gpu_check.run_apart("a", [sys.executable, "-c", "print('noise'); print('{}')"], 30.0)
    late = gpu_check.run_apart("b", ["false"], 0.0)
    assert (ok.ok, late.ok) == (True, False)
    made = gpu_check.record([ok, late], "cpu", 1)
    assert made["holds"] is False and [c["name"] for c in made["checks"]] == ["a", "b"]
    first, second = gpu_check.table([ok, late]).splitlines()
    assert first.split()[1] == "ok" and "no time was left" in second


def test_bytes_to_itself_are_compared():
    assert send_to_itself(LocalHub(1).transport(0), 1000) == 1000


def test_an_engine_that_did_not_take_an_update_is_found():
    """NaN in its parameters at first: nothing of the sources."""
    what = column_slices(SMALL.groups, SMALL.width, CPU)
    engine = ProcessEngine(what, CPU)
    engine.fetch(what)
    assert what.num_wrong() == what.num_bytes // 2
    engine.close()


def test_memory_that_does_not_come_back_is_found():
    """In GiB that are free; None: a CPU."""
    moments = ("before", "held", "released", "restored")
    require_released(dict(zip(moments, (20.0, 16.0, 20.0, 16.0), strict=True)), 4.0)
    require_released(dict.fromkeys(moments), 4.0)
    for free in ((20.0, 16.0, 16.0, 16.0), (20.0, 16.0, 20.0, 12.0), (20.0, 20.0, 20.0, 16.0)):
        with pytest.raises(CheckFailed, match=r"expected 4\.000"):
            require_released(dict(zip(moments, free, strict=True)), 4.0)
    require_no_leak(20.0, 19.99)
    require_no_leak(None, None)
    with pytest.raises(CheckFailed, match=r"2\.000 GiB"):
        require_no_leak(20.0, 18.0)
    require_freed(20.0, 10.0, 19.0)
    require_freed(None, None, None)
    with pytest.raises(CheckFailed, match=r"freed 0\.10"):
        require_freed(20.0, 10.0, 11.0)
