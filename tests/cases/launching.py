"""Operations on what a launcher says, and on ports."""

from rlhf.dist.ports import plan_ports
from rlhf.dist.slurm import expand_nodelist, expand_tasks
from rlhf.dist.world import read_world
from tests.cases.case import Case, Op


def slurm_nodelist(case: Case) -> Case:
    hosts = expand_nodelist(case["nodelist"])
    return {"hosts": hosts, "first": hosts[0]}


def slurm_tasks_per_node(case: Case) -> Case:
    tasks = expand_tasks(case["value"])
    return {"tasks": tasks, "total": sum(tasks)}


def slurm_rank_env(case: Case) -> Case:
    world = read_world(case["env"])
    return {
        "rank": world.rank,
        "world_size": world.size,
        "local_rank": world.local_rank,
        "device_index": world.device_index,
    }


def port_plan(case: Case) -> Case:
    engines, dp_size = case["engines_on_node"], case.get("dp_size_per_engine", 1)
    plan = plan_ports(4711, 0, 1, engines, case["ports_per_engine"], dp_size)
    ports = [p for e in range(engines) for d in range(dp_size) for p in plan.engine(e, d)]
    others = [plan.store, plan.preflight]
    distinct = len({*ports, *others}) == len(ports) + len(others)
    return {"distinct_ports": len(set(ports)), "overlap": not distinct}


OPS: dict[str, Op] = {
    "slurm_nodelist": slurm_nodelist,
    "slurm_tasks_per_node": slurm_tasks_per_node,
    "slurm_rank_env": slurm_rank_env,
    "port_plan": port_plan,
}
