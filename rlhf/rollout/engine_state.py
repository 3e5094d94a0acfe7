"""What an engine may do next: which memory it has, and whether its weights may be used. Pure.

Released weights are lost: after a resume they are anything until an update has completed. A release
that was only called frees nothing yet: others may take memory once every rank of the engine has
released. The engine's host keeps such a state and refuses by it, and so does each rank that shares
the engine's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

EnginePart = Literal["weights", "kv_cache"]
EngineParts = frozenset[EnginePart]
ALL_PARTS: EngineParts = frozenset({"weights", "kv_cache"})


class Use(StrEnum):
    """What somebody wants to do."""

    GENERATE = "generate"
    READ = "read weights"
    UPDATE = "update weights"
    ALLOCATE = "allocate memory that the engine gives up"


class Need(StrEnum):
    """What has to happen before."""

    WEIGHT_SYNC = "weight sync"
    RESUME = "resume of weights"
    RESUME_CACHE = "resume of the KV cache"
    RELEASE = "wait for release on every engine rank"


@dataclass
class EngineState:
    """One engine. Methods are events; the caller keeps updates from overlapping."""

    invalid: str = "no update has completed yet"
    """Why the weights may not be used; empty: they may."""
    version: int = -1
    asleep: EngineParts = frozenset()
    """Parts whose memory is given up, or about to be."""
    releasing: EngineParts = frozenset()
    """Of those, parts that not every rank has given up yet."""
    reads: bool = False
    """The open update is a read."""

    def release(self, parts: EngineParts) -> EngineParts:
        """A release was called; returns the parts that it concerns."""
        fresh = parts - self.asleep
        self.asleep |= fresh
        self.releasing |= fresh
        if "weights" in fresh:
            self.invalid = "the engine sleeps"
        return fresh

    def released(self, parts: EngineParts) -> None:
        """Every rank of the engine has given up these parts."""
        self.releasing -= parts

    def resume(self, parts: EngineParts) -> EngineParts:
        """Memory is taken back; returns the parts that it concerns."""
        fresh = parts & self.asleep
        self.asleep -= fresh
        if "weights" in fresh:
            self.invalid = "no update has completed since the engine slept"
        return fresh

    def begin(self, *, reads: bool) -> None:
        """An update, or a read, is open."""
        self.invalid = "a read is open" if reads else "an update is open"
        self.reads = reads

    def complete(self, version: int | None) -> None:
        """It has ended well; without a version an update was given up, and a read changed none."""
        if self.reads:
            self.invalid = ""
        elif version is None:
            self.invalid = "the last update was abandoned"
        else:
            self.version, self.invalid = version, ""

    def fail(self, cause: str) -> None:
        """The open update ended with an error."""
        self.invalid = f"the last update failed: {cause}"

    def missing(self, use: Use, *, on_host: bool = False) -> Need | None:
        """What has to happen before ``use``; None: it may be done.

        ``on_host``: weights are in host memory, which stays mapped while they are released.
        """
        if use is Use.ALLOCATE:
            return Need.RELEASE if self.releasing else None
        if use is Use.UPDATE:
            return Need.RESUME if "weights" in self.asleep and not on_host else None
        if self.invalid:
            return Need.WEIGHT_SYNC
        if use is Use.GENERATE and "kv_cache" in self.asleep:
            return Need.RESUME_CACHE
        return None
