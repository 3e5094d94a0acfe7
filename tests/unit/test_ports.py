"""Planned ports: each is one listener's own."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.ports import FIRST_PORT, LAST_PORT, plan_ports


@given(
    job=st.integers(0, 10**9),
    num_nodes=st.integers(1, 16),
    engines=st.integers(0, 8),
    ports_per_engine=st.integers(1, 16),
    dp_size=st.integers(1, 8),
)
def test_no_port_is_given_twice_on_the_nodes_of_a_job(
    job, num_nodes, engines, ports_per_engine, dp_size
):
    """Also where nodes share a network, as long as the range has room for all of them."""
    plans = [
        plan_ports(job, node, num_nodes, engines, ports_per_engine, dp_size)
        for node in range(num_nodes)
    ]
    for plan in plans:
        engine = [p for e in range(engines) for d in range(dp_size) for p in plan.engine(e, d)]
        own = [plan.store, plan.preflight, *engine]
        assert len(set(own)) == len(own)
        assert len(engine) == engines * ports_per_engine * dp_size
        assert set(own) <= set(plan.all_ports())
        assert min(plan.all_ports()) >= FIRST_PORT
        assert max(plan.all_ports()) <= LAST_PORT
    everywhere = list(chain.from_iterable(plan.all_ports() for plan in plans))
    if len(everywhere) <= LAST_PORT - FIRST_PORT + 1:
        assert len(set(everywhere)) == len(everywhere)


def test_neighbouring_jobs_do_not_meet():
    ports = [set(plan_ports(job, n, 2, 8, 16).all_ports()) for job in (41, 42, 43) for n in (0, 1)]
    assert len(set().union(*ports)) == sum(map(len, ports))


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="need 20488 ports; 10000 to 29999 has 20000"):
        plan_ports(1, 0, 1, 64, 16, 20)
    with pytest.raises(ValueError, match="node 2 of 2"):
        plan_ports(1, 2, 2, 1, 1)
    with pytest.raises(ValueError, match=r"engine 1, dp rank 0.*1 engines of 1"):
        plan_ports(1, 0, 1, 1, 4).engine(1)
