"""Laws of the two layouts: ranks and coordinates are one to one, layers are all there once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout

DEGREE = st.sampled_from([1, 2, 3, 4])


@given(tp=DEGREE, cp=DEGREE, dp=DEGREE, pp=DEGREE)
def test_rank_and_coordinates_are_inverse(tp, cp, dp, pp):
    layout = TrainLayout(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)
    for rank in range(layout.world):
        c = layout.coord(rank)
        assert layout.rank(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == rank


@given(
    layers=st.integers(1, 64),
    pp=DEGREE,
    vpp=st.sampled_from([1, 2]),
    first=st.none() | st.integers(1, 8),
    last=st.none() | st.integers(1, 8),
)
def test_every_layer_is_on_one_stage_in_order(layers, pp, vpp, first, last):
    layout = TrainLayout(pp, pp=pp, vpp=vpp, first=first, last=last)
    try:
        parts = [layout.layers(layers, p, v) for v in range(vpp) for p in range(pp)]
    except LayoutError:
        return
    assert [i for part in parts for i in part] == list(range(layers))


def test_megatron_order_of_ranks():
    """tp fastest, then cp, dp, pp."""
    layout = TrainLayout(16, tp=2, cp=2, pp=2)
    assert [layout.coord(r).tp for r in range(4)] == [0, 1, 0, 1]
    assert [layout.coord(r).cp for r in range(4)] == [0, 0, 1, 1]
    assert [layout.coord(r).dp for r in (0, 4)] == [0, 1]
    assert [layout.coord(r).pp for r in (0, 8)] == [0, 1]


def test_impossible_layouts_name_both_numbers():
    with pytest.raises(LayoutError, match=r"world=6 .*tp\*pp\*cp=4"):
        TrainLayout(6, tp=2, pp=2)
    with pytest.raises(LayoutError, match=r"etp\*ep\*pp=32 .*defaults to tp"):
        TrainLayout(16, tp=8, ep=4)
    with pytest.raises(LayoutError, match=r"world=3 .*tp\*pp=2"):
        RolloutLayout(3, tp=2)
    with pytest.raises(LayoutError, match=r"3 layers .*pp=4"):
        TrainLayout(4, pp=4).layers(3, 0)


def test_engines_hold_consecutive_ranks():
    layout = RolloutLayout(8, tp=2, pp=2)
    assert [list(layout.engine_ranks(e)) for e in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (layout.coord(7).engine, layout.coord(7).pp, layout.coord(7).tp) == (1, 1, 1)
    assert layout.leader(1) == 4
