"""Converting there and back loses nothing; what cannot be converted is named."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.helpers.runs import ROOT, clean_environment
from tests.helpers.tiny_models import make_tiny


def convert(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", "convert", *map(str, arguments)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_hf_to_megatron_and_back_is_bit_equal(family, tmp_path):
    source = make_tiny(tmp_path / "hf", family)
    status, text = convert(source, tmp_path / "checkpoint")
    assert status == 0, text
    status, text = convert(tmp_path / "checkpoint", tmp_path / "back")
    assert status == 0, text
    there = load_file(source / "model.safetensors")
    back = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= load_file(file)
    assert there.keys() == back.keys()
    assert all(there[name].equal(back[name]) for name in there)
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_of_a_run_the_newest_checkpoint_is_taken(tmp_path):
    source, run = make_tiny(tmp_path / "hf", "llama"), tmp_path / "run" / "checkpoints"
    (run / "step_00000009").mkdir(parents=True)
    (run / "step_00000009" / "run.json").write_text("older: not looked at")
    status, text = convert(source, run / "step_00000010")
    assert status == 0, text
    status, text = convert(tmp_path / "run", tmp_path / "back")
    assert status == 0, text
    assert "Hugging Face folder of" in text
    assert "run/checkpoints/step_00000010" in text
    assert (tmp_path / "back" / "config.json").is_file()


def test_wrong_requests_are_named(tmp_path):
    status, text = convert(tmp_path / "missing", tmp_path / "out")
    assert status == 2
    assert "config.json" in text
    torn = make_tiny(tmp_path / "torn", "llama")
    (torn / "model.safetensors").write_bytes(b"no weights")
    for _ in range(2):  # the second attempt is not disturbed by the first
        status, text = convert(torn, tmp_path / "out")
        assert status != 0
        assert "torn" in text
        assert not list(tmp_path.glob("out*"))
    (tmp_path / "there").mkdir()
    status, text = convert(tmp_path, tmp_path / "there")
    assert status == 2
    assert "exists" in text
    status, text = convert("--gguf", "no_such_package", tmp_path / "out")
    assert status == 2
    assert "no_such_package" in text
