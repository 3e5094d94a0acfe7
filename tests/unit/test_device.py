"""One answer to "is there a GPU", and torch must agree with it."""

from __future__ import annotations

import pytest

from rlhf.dist.device import check_torch, has_gpu


@pytest.mark.parametrize(
    ("visible", "gpu"),
    [(None, True), ("0", True), ("0,1", True), ("GPU-8f3a", True), ("", False), ("-1", False)],
)
def test_a_gpu_is_there_unless_the_environment_hides_it(tmp_path, visible, gpu):
    driver = tmp_path / "nvidiactl"
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert not has_gpu(environ, str(driver))
    driver.touch()
    assert has_gpu(environ, str(driver)) == gpu


def test_torch_that_disagrees_is_refused_with_both_facts():
    check_torch(True, True, "2.13.0+cu130")
    check_torch(False, False, "2.13.0+cpu")
    with pytest.raises(RuntimeError, match=r"nvidiactl exists.*2\.13\.0\+cpu.*=False.*CUDA build"):
        check_torch(True, False, "2.13.0+cpu")
    with pytest.raises(RuntimeError, match=r"does not exist or.*=True.*CUDA_VISIBLE_DEVICES=-1"):
        check_torch(False, True, "2.13.0+cu130")
