"""Known models: their shapes add up to what their makers publish, and are found anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.weights.families import full_pieces
from rlhf.weights.find_model import find_model, known_models
from tests.helpers.reshard_oracle import shard_bytes

ROOT = Path(__file__).parents[2]
GIGABYTES = {
    "deepseek-v3-671b": 1342.1,
    "glm-4.5-355b": 705.6,
    "kimi-k2-1t": 2052.8,
    "llama-3.1-8b": 16.06,
    "moonlight-16b": 31.9,
    "qwen2.5-7b": 15.23,
    "smollm2-135m": 0.269,
    "qwen3-235b-a22b": 470.2,
    "qwen3-30b-a3b": 61.1,
}
"""bf16 weights, without layers for multi-token prediction."""


def test_every_known_model_is_held_to_its_size():
    assert list(known_models()) == sorted(GIGABYTES)


@pytest.mark.parametrize("name", GIGABYTES)
def test_weights_add_up(name):
    assert shard_bytes(full_pieces(find_model(name)), 2) / 1e9 == pytest.approx(
        GIGABYTES[name], rel=0.01
    )


def test_a_folder_a_file_and_a_name_are_the_same_model(tmp_path):
    file = known_models()["moonlight-16b"]
    (tmp_path / "config.json").write_text(file.read_text())
    shape = find_model("moonlight-16b")
    assert find_model(str(tmp_path)) == shape
    assert find_model(str(tmp_path / "config.json")) == shape


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'deepseek-v3'.*did you mean deepseek-v3-671b.*glm-4.5"):
        find_model("deepseek-v3")
    with pytest.raises(ValueError, match=r"no folder, no config\.json and no known name"):
        find_model("zzz")


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"broken\.json: key 'num_attention_heads' is missing"):
        find_model(str(path))
    with pytest.raises(ValueError, match=r"no config\.json there"):
        find_model(str(tmp_path))


def test_an_installed_package_knows_them_too(tmp_path):
    """Built as pip builds a wheel, and imported from there."""
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    program = "import rlhf.weights.find_model as f; print(f.__file__, *f.known_models())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, *names = done.stdout.split()
    assert found.startswith(str(tmp_path))
    assert names == sorted(GIGABYTES)
