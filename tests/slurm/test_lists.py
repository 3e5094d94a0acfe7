"""Our reading of Slurm's lists is Slurm's own."""

import pytest

from rlhf.dist.slurm import expand_nodelist

LISTS = [
    "node[001-003,7]",
    "r[1-2]n[08-10]",
    "g[098-101],login,k1-t[9-11]",
    "on-demand-a3-[1-3]",
    "n[0-0],m[00-02,5,007]",
]


@pytest.mark.parametrize("text", LISTS)
def test_hosts_are_those_of_scontrol(cluster, text):
    assert expand_nodelist(text) == cluster.hosts(text)
