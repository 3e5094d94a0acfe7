"""How a movement waits: it looks beyond its messages now and then."""

from __future__ import annotations

from collections.abc import Callable

Poll = Callable[[], None]
"""Called while waiting; raises to end the wait."""

POLL_EVERY_S = 0.005
"""How often a wait looks at the engine's life and at a stop request."""
