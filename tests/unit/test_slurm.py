"""Slurm's variables: short forms are expanded, contradictions refused with both numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.node import ONE_NODE, num_nodes, this_node
from rlhf.dist.slurm import LauncherError, device_index, expand_nodelist, expand_tasks, read_task
from rlhf.dist.world import join_world, read_world

NAMES = st.from_regex(r"[a-z][a-z-]{0,6}", fullmatch=True)


@st.composite
def groups(draw):
    """(text in brackets, the numbers that it stands for)."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, more = draw(st.integers(0, 120)), draw(st.integers(0, 12))
        width = draw(st.integers(1, 4))
        texts.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
        width = len(f"{first:0{width}}")
        numbers += [f"{n:0{width}}" for n in range(first, first + more + 1)]
    return f"[{','.join(texts)}]", numbers


@given(st.lists(st.tuples(NAMES, groups(), NAMES, st.none() | groups()), min_size=1, max_size=3))
def test_a_list_of_hosts_is_the_product_of_its_groups_in_order(items):
    text, hosts = [], []
    for head, (group, numbers), middle, second in items:
        tail, more = second or ("", [""])
        text.append(f"{head}{group}{middle}{tail}")
        hosts += [f"{head}{n}{middle}{m}" for n in numbers for m in more]
    assert expand_nodelist(",".join(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[1", "n1]", "n[1-]", "n[3-1]", "n[[1]]", "n[]", "n[1-999999999]", "a b"]
)
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        expand_nodelist(text)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=5))
def test_tasks_per_node_are_run_length_coded(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert expand_tasks(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@pytest.mark.parametrize("text", ["", "x", "4(x0)", "0", "4x2", "4(x2", "4,,4", "-1"])
def test_what_is_no_list_of_tasks_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        expand_tasks(text)


def environment(**variables):
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_a_task_finds_its_node_from_its_number_alone(tasks, data):
    rank = data.draw(st.integers(0, sum(tasks) - 1))
    listed = ",".join(map(str, tasks))
    bare = read_task(environment(PROCID=rank, TASKS_PER_NODE=listed))
    assert bare.size == sum(tasks)
    assert bare.rank == sum(tasks[: bare.node]) + bare.local_rank
    assert bare.local_rank < bare.local_size == tasks[bare.node]
    full = environment(
        PROCID=rank,
        LOCALID=bare.local_rank,
        NODEID=bare.node,
        NTASKS=sum(tasks),
        NNODES=len(tasks),
        TASKS_PER_NODE=listed,
    )
    assert read_task(full) == bare


GOOD = environment(PROCID=5, NTASKS=8, NNODES=2, TASKS_PER_NODE="4(x2)", LOCALID=1, NODEID=1)
CONTRADICTIONS = {
    "number of tasks": ({"NTASKS": 6}, "makes 8 tasks.*SLURM_NTASKS says 6"),
    "number of nodes": ({"NNODES": 3}, "of 2 nodes.*SLURM_NNODES says 3"),
    "rank": ({"PROCID": 8}, "SLURM_PROCID=8 must be below.*8 tasks"),
    "node": ({"NODEID": 0}, "task 5 runs on node 0.*belongs on node 1.*--distribution=block"),
    "place on the node": ({"LOCALID": 2}, "number 2 on its node.*number 1"),
    "no number": ({"PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_variables_that_contradict_one_another_are_refused_with_both_numbers(fault):
    changed, message = CONTRADICTIONS[fault]
    assert read_task(GOOD).rank == 5
    with pytest.raises(LauncherError, match=message):
        read_task({**GOOD, **environment(**changed)})


@pytest.mark.parametrize("missing", ["NTASKS", "NNODES", "LOCALID", "NODEID"])
def test_variables_whose_option_was_not_given_may_be_absent(missing):
    left = {k: v for k, v in GOOD.items() if k != f"SLURM_{missing}"}
    assert read_task(left) == read_task(GOOD)


def test_tasks_per_node_and_nodes_are_enough_and_the_number_alone_is_not():
    each = environment(PROCID=5, NTASKS_PER_NODE=4, NNODES=2)
    assert read_task(each) == read_task(GOOD)
    with pytest.raises(LauncherError, match="start with srun"):
        read_task(environment(PROCID=5, NTASKS=8, NNODES=2))


def test_the_steps_own_variables_count_before_the_jobs():
    step = {**GOOD, **environment(STEP_NUM_TASKS=2, STEP_TASKS_PER_NODE="1(x2)", PROCID=1)}
    step |= environment(LOCALID=0, STEP_NUM_NODES=2, NODEID=1)
    assert (read_task(step).rank, read_task(step).size) == (1, 2)


def test_a_bound_task_has_device_0_and_too_few_devices_are_refused():
    assert device_index(3, None) == device_index(3, "") == device_index(3, "NoDevFiles") == 3
    assert device_index(3, "4,5,6,7") == 3
    assert device_index(3, "6") == 0
    with pytest.raises(LauncherError, match=r"local rank 3 needs device 3.*has 2"):
        device_index(3, "0,1")


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "1",
}


def test_torchrun_in_a_task_of_srun_counts_before_slurm():
    agent = environment(PROCID=1, STEP_ID=0, TASKS_PER_NODE="1(x2)", LOCALID=0, NODEID=1)
    world = read_world({**TORCHRUN, **agent, "GROUP_WORLD_SIZE": "2"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    with pytest.raises(LauncherError, match="srun started 2 torchrun agents, each knows of 1"):
        read_world({**TORCHRUN, **agent, "GROUP_WORLD_SIZE": "1"})
    with pytest.raises(LauncherError, match=r"LOCAL_WORLD_SIZE=8.*WORLD_SIZE=4"):
        read_world({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"})
    with pytest.raises(LauncherError, match="MASTER_PORT not set"):
        read_world({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})


STEP = {
    **GOOD,
    **environment(STEP_ID=0, JOB_ID=77, JOB_NODELIST="node[07-08]"),
}


def test_ranks_of_srun_meet_on_the_first_node_at_a_planned_port():
    """All tasks of a job find the same place, and torch finds torchrun's variables."""
    places = set()
    for rank in range(8):
        own = {**STEP, **environment(PROCID=rank, LOCALID=rank % 4, NODEID=rank // 4)}
        world = join_world(own)
        assert (own["RANK"], own["LOCAL_WORLD_SIZE"]) == (str(world.rank), "4")
        places.add((own["MASTER_ADDR"], own["MASTER_PORT"]))
    ((host, _),) = places
    assert host == "node07"
    with pytest.raises(LauncherError, match="names 2 nodes, SLURM_NNODES says 1"):
        join_world({**STEP, **environment(NNODES=1, TASKS_PER_NODE=8, NODEID=0, LOCALID=5)})
    with pytest.raises(LauncherError, match="batch script of a job of 8 tasks"):
        read_world({k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"})


def test_a_launcher_on_each_node_starts_its_share():
    agent = {**STEP, **environment(PROCID=1, NTASKS=2, TASKS_PER_NODE="1(x2)", LOCALID=0)}
    node = this_node(8, agent)
    assert (node.index, node.count, node.host) == (1, 2, "node07")
    assert this_node(8, {**agent, **environment(PROCID=0, NODEID=0)}).port == node.port
    with pytest.raises(ValueError, match=r"dist.ranks=7 is no multiple of the 2 nodes"):
        this_node(7, agent)
    with pytest.raises(LauncherError, match="srun started 4 tasks on a node"):
        num_nodes(STEP)
    assert this_node(8, {}) == this_node(8, environment(PROCID=0, NTASKS=2)) == ONE_NODE
