"""Errors that are a consequence: a connection was lost, and who is at its other end knows why."""

from __future__ import annotations

import re

_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting", re.IGNORECASE
)


class LostPeer(RuntimeError):  # noqa: N818  (a kind of error, not one by itself)
    """Raised by who knows that the cause is elsewhere."""


def tells_of_lost_peer(text: str) -> bool:
    """Whether an error's text is that of a lost connection."""
    return _LOST_PEER.search(text) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as it does when another rank is gone or stuck."""
    if isinstance(error, LostPeer):
        return True
    ours = type(error).__module__.split(".")[0]
    known = type(error) is RuntimeError or (isinstance(error, RuntimeError) and ours == "torch")
    return known and tells_of_lost_peer(str(error))
