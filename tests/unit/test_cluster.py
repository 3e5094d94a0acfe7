"""A node is unfit for a reason that is named; fit nodes pass."""

import socket
from dataclasses import replace

import pytest

from rlhf.cluster.facts import Gpu, NodeFacts, digest, model_digest, parse_gpus, taken, try_run_dir
from rlhf.cluster.judge import Fault, Meeting, Need, judge

NEED = Need(ranks_per_node=2, host_bytes=10**9, disk_bytes=10**9)
GPU = Gpu("H100", 80 * 2**30, 0)
HOSTS = ("n1", "n2", "n3")
NODES = [
    NodeFacts(
        host=host,
        has_driver=True,
        gpus=(GPU, GPU),
        available_bytes=2 * 10**9,
        shm_free_bytes=10**9,
        versions={"torch": "2.13.0", "driver": "570"},
        model="abc",
        run_dir_free_bytes=2 * 10**9,
    )
    for host in HOSTS
]
MET = Meeting(clocks=dict.fromkeys(HOSTS, 1000.0), unreachable=dict.fromkeys(HOSTS, ()))


def of_n2(**changed):
    """The faults when the second node differs so."""
    return judge([NODES[0], replace(NODES[1], **changed), NODES[2]], MET, NEED)


def test_fit_nodes_have_no_faults():
    assert judge(NODES, MET, NEED) == []


UNFIT = {
    "gpu count": ({"gpus": (GPU,)}, "GPUs: 1 seen, 2 ranks need one each"),
    "gpu health": (
        {"gpus": (GPU, replace(GPU, uncorrected=3))},
        "GPU 1 (H100): 3 uncorrected memory errors",
    ),
    "gpu hangs": ({"gpu_fault": "nvidia-smi did not answer"}, "GPUs: nvidia-smi did not answer"),
    "host memory": (
        {"available_bytes": 5 * 10**8},
        "host memory: 0.5 GB available, this layout needs 1.0 GB on a node",
    ),
    "shared memory": ({"shm_free_bytes": 10**6}, "/dev/shm: 0.00 GB free, must be 0.13 GB"),
    "version": ({"versions": {"torch": "2.12.0", "driver": "570"}}, "torch 2.12.0, other nodes"),
    "driver": ({"versions": {"torch": "2.13.0"}}, "driver none, other nodes have 570"),
    "model folder": ({"config_fault": "/m: no such\nfolder"}, "/m: no such | folder"),
    "model files": ({"model": "xyz"}, "model folder: files differ"),
    "run folder": ({"run_dir_fault": "Read-only"}, "run_dir cannot be written: Read-only"),
    "full disk": (
        {"run_dir_free_bytes": 10**8},
        "run_dir: 0.100 GB free, a checkpoint needs 1.000 GB",
    ),
    "ports": ({"ports_taken": (7, 9)}, "ports 7, 9, which this job will use, are taken"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_unfit_node_is_named_with_the_reason(what):
    changed, words = UNFIT[what]
    (fault,) = of_n2(**changed)
    assert fault.host == "n2"
    assert words in fault.cause
    assert str(fault).startswith("preflight: n2: ")
    assert "\n" not in str(fault)


def test_what_only_a_meeting_shows():
    clock = Meeting(clocks={**MET.clocks, "n3": 940.0}, unreachable=MET.unreachable)
    assert judge(NODES, clock, NEED) == [
        Fault("n3", "clock: 60 s behind the others (limit 5 s)"),
    ]
    lost = Meeting(clocks=MET.clocks, unreachable={**MET.unreachable, "n1": ("n3",)})
    assert judge(NODES, lost, NEED) == [Fault("n1", "cannot reach n3")]
    (fault,) = judge(NODES[:2], replace(MET, absent=["n3"]), NEED)
    assert fault.host == "n3"


def test_what_every_node_refuses_is_the_requests_fault():
    nodes = [replace(node, config_fault="train.tp: 3") for node in NODES]
    assert judge(nodes, MET, NEED) == [Fault("", "train.tp: 3")]


def test_a_node_that_sees_no_model_casts_no_doubt_on_another():
    blind = replace(NODES[0], config_fault="no such folder", model="")
    assert [fault.host for fault in judge([blind, NODES[1]], MET, NEED)] == ["n1"]


def test_nodes_without_a_driver_need_no_gpus():
    nodes = [replace(node, has_driver=False, gpus=()) for node in NODES]
    assert judge(nodes, MET, NEED) == []


def test_gpus_are_read_as_nvidia_smi_prints_them():
    text = "NVIDIA H200, 143771, 570.1, 0\nNVIDIA H200, 143771, 570.1, 2\n"
    gpus, driver = parse_gpus(text)
    assert [g.uncorrected for g in gpus] == [0, 2]
    assert (gpus[0].memory_bytes, driver) == (143771 * 2**20, "570.1")
    assert parse_gpus("RTX 4090, 24564, 570.1, [N/A]\n")[0][0].uncorrected == 0


def test_a_digest_changes_with_a_name_or_a_size(tmp_path):
    assert digest([("a", b"1"), ("b", b"2")]) == digest([("b", b"2"), ("a", b"1")])
    assert digest([("a", b"1")]) != digest([("a", b"2")]) != digest([("b", b"2")])
    assert model_digest(str(tmp_path / "none")) == ""
    (tmp_path / "f").write_bytes(b"12")
    before = model_digest(str(tmp_path))
    (tmp_path / "f").write_bytes(b"123")
    assert model_digest(str(tmp_path)) != before


def test_a_folder_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "f").touch()
    fault, free = try_run_dir(str(tmp_path / "f" / "run"))
    assert "Not a directory" in fault
    assert free == 0
    fault, free = try_run_dir(str(tmp_path / "run"))
    assert fault == ""
    assert free > 0
    assert list((tmp_path / "run").iterdir()) == []


def test_a_taken_port_is_seen_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert taken([port]) == (port,)
    assert taken([port]) == ()
