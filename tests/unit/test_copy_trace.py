"""The trace of copies against the copies themselves, and what it must not take for a copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rollout.copy_trace import CopyTrace, StrayWrite
from rlhf.rollout.probe import Probed, differences
from rlhf.weights.piece import Piece
from tests.helpers.shards import coded_tensors, cut

SOURCES = {"a": (6, 4), "b": (5, 7), "c": (1, 9), "d": (8, 4)}
PARAMS = {"p": (7, 8), "q": (3, 6, 9), "r": (14, 4)}


def _values(shapes, device):
    return {name: torch.full(shape, -1.0, device=device) for name, shape in shapes.items()}


@st.composite
def spans(draw, size, length):
    start = draw(st.integers(0, size - length))
    return slice(start, start + length)


@st.composite
def copies(draw):
    """A rectangle of a source, how it gets there, and where to."""
    source = draw(st.sampled_from(sorted(SOURCES)))
    param = draw(st.sampled_from(sorted(PARAMS)))
    rows, cols = SOURCES[source]
    height = draw(st.integers(1, min(rows, PARAMS[param][-2])))
    width = draw(st.integers(1, min(cols, PARAMS[param][-1])))
    region = (draw(spans(rows, height)), draw(spans(cols, width)))
    local = (draw(spans(PARAMS[param][-2], height)), draw(spans(PARAMS[param][-1], width)))
    if param == "q":
        local = (draw(st.integers(0, 2)), *local)
    return source, region, draw(st.sampled_from(["view", "cast", "clone", "stack"])), param, local


def _run(program, sources, params):
    for source, region, way, param, local in program:
        part = sources[source][region]
        if way == "cast":
            part = part.to(torch.float64)
        elif way == "clone":
            part = part.clone()
        elif way == "stack":  # below another tensor's rows, and cut off them again
            above = sources["d"][:, : part.shape[1]]
            if above.shape[1] == part.shape[1]:
                part = torch.cat([above, part])[8 - (len(params[param][local]) > 1) :]
                part = part[-params[param][local].shape[0] :]
        params[param].data[local].copy_(part)


@given(st.lists(copies(), max_size=6))
def test_pieces_say_what_the_copies_did(program):
    """Numbers through the same program, and through its pieces one after the other."""
    sources, real = coded_tensors(SOURCES, torch.float32), _values(PARAMS, "cpu")
    _run(program, sources, real)
    ghosts, params = _values(SOURCES, "meta"), _values(PARAMS, "meta")
    trace = CopyTrace(params, ghosts)
    with trace:
        _run(program, ghosts, params)
    trace.finish(params)
    assert not trace.stray
    replayed = cut(sources, trace.pieces, PARAMS)
    for name, value in real.items():
        assert torch.equal(replayed[name], value), name


def _piece_of_stack():
    a, b, p = (torch.empty(n, 4, device="meta") for n in (2, 3, 5))
    trace = CopyTrace({"p": p}, {"a": a, "b": b})
    with trace:
        p.copy_(torch.cat([a, b]))
    return trace.pieces


def test_stacked_tensors_are_pieces_of_their_own():
    assert _piece_of_stack() == [
        Piece("a", ((0, 2), (0, 4)), "p", ((0, 2), (0, 4))),
        Piece("b", ((0, 3), (0, 4)), "p", ((2, 5), (0, 4))),
    ]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p, a: p.copy_(a.t()), "transposed copy of a"),
        (lambda p, a: p.copy_(a[:1]), "from elsewhere"),
        (lambda p, a: p.copy_(torch.ones_like(p)), "from elsewhere"),
        (lambda p, a: p.copy_(a + 1), "from elsewhere"),
        (lambda p, a: p.copy_(a.view(-1)[:4]), "from elsewhere"),
        (lambda p, a: p.copy_(torch.cat([a[:2], torch.ones(2, 4, device="meta")])), "elsewhere"),
        (lambda p, a: p.t().copy_(a), "transposed copy of a"),
        (lambda p, a: p.add_(a), "aten::add_"),
        (lambda p, a: torch.add(p, a, out=p), "aten::add"),
        (lambda p, a: torch._foreach_mul_([p], 2.0), "aten::_foreach_mul_"),
        (lambda p, a: p.as_strided((2, 2), (5, 1)).copy_(a[:2, :2]), "into no rectangle"),
        (lambda p, a: (p.copy_(a), p[1].zero_()), "aten::zero_"),
        (lambda p, a: setattr(p, "data", a), "given other storage"),
    ],
)
def test_what_is_no_copy_of_a_rectangle_is_told(act, words):
    a = torch.empty(4, 4, device="meta")
    p = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    trace = CopyTrace({"p": p}, {"a": a})
    with trace:
        act(p, a)
    trace.finish({"p": p})
    assert [s.param for s in trace.stray] == ["p"]
    assert words in trace.stray[0].what


def test_a_constant_in_what_nothing_else_fills_is_padding():
    p, a = torch.empty(4, 4, device="meta"), torch.empty(3, 4, device="meta")
    trace = CopyTrace({"p": p}, {"a": a})
    with trace:
        p[:3].copy_(a)
        p[3:].fill_(0)
        p[4:].copy_(a[:0])
    assert not trace.stray
    assert len(trace.pieces) == 1


def test_a_parameter_made_while_loading_is_told():
    trace = CopyTrace({}, {})
    trace.finish({"late": torch.empty(2, device="meta")})
    assert trace.stray[0].what == "made while loading"


TABLE = Probed(
    (
        Piece("q", ((0, 4), (0, 8)), "qkv", ((0, 4), (0, 8))),
        Piece("k", ((0, 2), (0, 8)), "qkv", ((4, 6), (0, 8))),
    ),
    {"qkv": ((6, 8), "bfloat16")},
)


def test_equal_is_no_difference_in_any_order():
    assert not differences(TABLE, TABLE)
    assert not differences(TABLE, Probed(TABLE.pieces[::-1], TABLE.params))


def _text(pieces=TABLE.pieces, params=TABLE.params):
    return [str(d) for d in differences(TABLE, Probed(tuple(pieces), params))]


def test_each_difference_says_where_and_both_sides():
    q, k = TABLE.pieces
    assert _text([q]) == ["qkv[4:6, 0:8]: table k[0:2, 0:8]; SGLang nothing"]
    moved = Piece("k", ((2, 4), (0, 8)), "qkv", k.local)
    assert _text([q, moved]) == ["qkv[4:6, 0:8]: table k[0:2, 0:8]; SGLang k[2:4, 0:8]"]
    more = Piece("v", ((0, 1), (0, 8)), "qkv", ((6, 7), (0, 8)))
    assert _text([q, k, more]) == ["qkv[6:7, 0:8]: table nothing; SGLang v[0:1, 0:8]"]
    half = Piece("k", ((0, 1), (0, 8)), "qkv", ((4, 5), (0, 8)))
    assert _text([q, half]) == [
        "qkv[4:5, 0:8]: table k[0:2, 0:8] at [4:6, 0:8]; SGLang k[0:1, 0:8]",
        "qkv[4:6, 0:8]: table k[0:2, 0:8]; SGLang k[0:1, 0:8] at [4:5, 0:8] "
        "and nothing in the rest",
    ]


def test_names_shapes_and_dtypes_are_compared():
    assert _text(params={"qkv": ((6, 8), "float32")}) == [
        "qkv[0:6, 0:8]: table [6, 8] bfloat16; SGLang [6, 8] float32"
    ]
    assert _text(params={"qkv": ((8, 8), "bfloat16")}) == [
        "qkv[0:6, 0:8]: table [6, 8] bfloat16; SGLang [8, 8] bfloat16"
    ]
    assert _text(params={**TABLE.params, "bias": ((2,), "bfloat16")}) == [
        "bias[0:2]: table has no such parameter; SGLang [2] bfloat16"
    ]
    assert _text(params={}) == [
        "qkv[0:6, 0:8]: table [6, 8] bfloat16; SGLang has no such parameter"
    ]


def test_what_is_no_copy_is_a_difference():
    stray = StrayWrite("qkv", ((4, 5), (0, 8)), "aten::mul_")
    found = differences(TABLE, Probed(TABLE.pieces, TABLE.params, (stray,)))
    assert [str(d) for d in found] == [
        "qkv[4:5, 0:8]: table k[0:2, 0:8] at [4:6, 0:8]; SGLang aten::mul_"
    ]
