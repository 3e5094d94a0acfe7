"""A calibration file is read as written, or refused with every fault named."""

from __future__ import annotations

import json

import pytest

from rlhf.config.faults import ConfigError
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.speeds import CPU, H100, Speeds, changed_speeds, read_speeds, write_speeds


@pytest.mark.parametrize("speeds", [CPU, H100, CPU.model_copy(update={"layer_s": 1.25e-7})])
def test_what_is_written_reads_back_equal(tmp_path, speeds):
    path = tmp_path / "calibration.yaml"
    write_speeds(speeds, path, "measured on a machine\nof two cores")
    assert read_speeds(path) == speeds
    assert path.read_text().startswith("# measured on a machine\n# of two cores\n")
    path.write_text(json.dumps(speeds.model_dump()))
    assert read_speeds(path) == speeds


def test_keys_left_out_are_those_of_an_h100(tmp_path):
    path = tmp_path / "calibration.yaml"
    path.write_text("device: H20\npeak_tflops: 148\nhbm_gbs: 4000\n")
    assert read_speeds(path) == Speeds(device="H20", peak_tflops=148.0, hbm_gbs=4000.0)


def test_faults_of_a_file_are_named_all_at_once(tmp_path):
    path = tmp_path / "calibration.yaml"
    path.write_text("nic_gb: 45\ndecode_bandwidth: 1.5\npcie_gbs: 0\nlayer_s: -1\n")
    with pytest.raises(ConfigError) as caught:
        read_speeds(path)
    text = str(caught.value)
    assert "nic_gb: unknown key; did you mean nic_gbs?" in text
    for key in ("decode_bandwidth", "pcie_gbs", "layer_s"):
        assert f"{path}:{key}: must be" in text
    with pytest.raises(ConfigError, match="cannot be read"):
        read_speeds(tmp_path / "nowhere.yaml")


def test_options_replace_single_values():
    assert changed_speeds(H100, {"nic_gbs": None, "hbm_gbs": 4000.0}).hbm_gbs == 4000
    assert changed_speeds(H100, {"hbm_gbs": None}) == H100
    with pytest.raises(
        ConfigError, match=r"nic_gbs: must be greater than or equal to 0.000001, is 0"
    ):
        changed_speeds(H100, {"nic_gbs": 0.0})


@pytest.mark.parametrize("text", ["peak_tflops: 1e-320", "update_s: 1.7e+308", "nic_gbs: 5e-324"])
def test_constants_of_no_machine_are_refused(tmp_path, text):
    """They would make seconds that are no numbers."""
    path = tmp_path / "speeds.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=text.partition(":")[0]):
        read_speeds(path)


def test_every_constant_says_where_it_comes_from():
    for name, field in Speeds.model_fields.items():
        assert field.description, name


def test_a_load_counts_what_training_sees():
    load = Load(4, 2, 100, 50, 80, 4096, 64)
    assert load.answers == 8 and load.tokens == 8 * 150
    with pytest.raises(ValueError, match="at most the longest answer of 80, is 90"):
        Load(4, 2, 100, 90, 80, 4096, 64)
    with pytest.raises(ValueError, match="prompts: must be above 0, is 0"):
        Load(0, 2, 100, 50, 80, 4096, 64)


def test_what_bounds_a_phase_is_its_largest_part():
    took = PhaseTime({"compute": 2.0, "communication": 3.0})
    assert took.seconds == 5 and took.bound == "communication"
