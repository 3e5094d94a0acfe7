"""Messages arrive whole and in order, however the bytes are cut."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.rollout.channel import LENGTH, Answered, Channel, Done, Failed, Generate, frame, unframe
from rlhf.rollout.engine import Completion, SampleRequest
from rlhf.types import Status

MESSAGES = [
    Answered(1, Completion(5, [1, 2, 3], [-0.5, -1.0, -0.25], Status.STOPPED, 7)),
    Failed(2, "RuntimeError: " + "x" * 3000),
    Done(3, 0.5),
]


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 4000), max_size=12))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    data = b"".join(frame(m) for m in MESSAGES)
    borders = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    mine, theirs = socket.socketpair()
    channel = Channel(mine, 5.0)
    received = []
    for begin, end in itertools.pairwise(borders):
        theirs.sendall(data[begin:end])
        received += channel.receive(5.0)
    assert received == MESSAGES
    assert not channel.at_end
    theirs.close()
    assert channel.receive(5.0) == []
    assert channel.at_end
    channel.close()


def test_what_was_said_before_the_end_is_heard() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine, 5.0)
    theirs.sendall(frame(Done(1, 0.0)))
    theirs.close()
    assert channel.receive(5.0) == [Done(1, 0.0)]
    assert channel.receive(5.0) == []
    assert channel.at_end
    channel.close()


def test_requests_of_several_threads_do_not_mix() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine, 5.0)
    request = SampleRequest(key=0, token_ids=tuple(range(200_000)), seed=0, max_new_tokens=1)
    senders = [
        threading.Thread(target=channel.send, args=(Generate(i, (request,)),)) for i in range(8)
    ]
    for sender in senders:
        sender.start()
    calls = []
    with theirs.makefile("rb") as stream:
        for _ in senders:
            (length,) = LENGTH.unpack(stream.read(LENGTH.size))
            calls.append(unframe(stream.read(length)).call)
    for sender in senders:
        sender.join()
    assert sorted(calls) == list(range(8))
    theirs.close()
    channel.close()


def test_a_peer_that_takes_nothing_is_not_waited_for() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine, 0.05)
    request = SampleRequest(key=0, token_ids=tuple(range(200_000)), seed=0, max_new_tokens=1)
    with pytest.raises(TimeoutError):
        channel.send(Generate(0, (request,)))
    theirs.close()
    channel.close()
