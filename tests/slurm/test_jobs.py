"""Jobs of the real launch script on a real Slurm: the same run as on one node."""

import numpy as np
import pytest

from tests.e2e.test_runs import numbers
from tests.helpers.runs import rlhf, tiny_config


def assert_same_numbers(run, expected):
    """Every metric of every step, to 1e-5; the same number of threads is not given."""
    for got, want in zip(numbers(run), numbers(expected), strict=True):
        assert got.keys() == want.keys()
        for name in sorted(got):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("starter", ["node", "rank"])
def test_two_nodes_train_as_one_does(cluster, one_node, tmp_path, starter):
    """Rollout, training and reshard over two nodes, an engine on each."""
    config = tiny_config(tmp_path, num_steps=3)
    job = cluster.submit(config, 2, STARTER=starter)
    job.ends_well()
    assert_same_numbers(tmp_path / "run", one_node)
    logs = sorted((tmp_path / "logs").glob("*/attempt-0/rank*.log"))
    assert [p.name for p in logs] == ["rank00000.log", "rank00001.log"]
    for rank, log in enumerate(logs):
        assert f"rank {rank}, phase reshard, step 2" in log.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 4])
def test_experts_over_nodes_train_as_on_one(cluster, tmp_path, nodes):
    """DeepSeek-V3's shape: pipeline and experts of training cross nodes, as the reshard does."""
    layout = {"pp": 2, "ep": nodes // 2}
    one = tiny_config(
        tmp_path / "one", "deepseek_v3", num_steps=3, dist={"ranks": nodes}, train=layout
    )
    status, _, err = rlhf("train", str(one))
    assert status == 0, err
    config = tiny_config(tmp_path / "many", "deepseek_v3", num_steps=3, train=layout)
    cluster.submit(config, nodes).ends_well()
    assert_same_numbers(tmp_path / "many" / "run", tmp_path / "one" / "run")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """The run folder of the same configuration on one node of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    status, _, err = rlhf("train", str(tiny_config(folder, num_steps=3)))
    assert status == 0, err
    return folder / "run"
