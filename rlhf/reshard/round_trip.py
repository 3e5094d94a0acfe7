"""Both ways between a training shard and an engine, through one window and one pair of areas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import RankPlan
from rlhf.reshard.targets import incoming_bytes
from rlhf.reshard.transport import Transport
from rlhf.reshard.windows import Window


@dataclass(frozen=True)
class RoundTrip:
    """One rank's two movements; never both at a time."""

    reshard: Mover
    restore: Mover | None
    """None: weights do not come back this way."""

    @property
    def staging_bytes(self) -> int:
        """Memory of both together, beside parameters."""
        back = 0 if self.restore is None else self.restore.staging_bytes
        return max(self.reshard.staging_bytes, back)

    def open_message(self) -> dict[str, Any]:
        """What shows the engine's receiver window and rounds of both, once; JSON."""
        return self.reshard.open_message(self.restore)


def round_trip(
    there: RankPlan,
    back: RankPlan | None,
    params: Mapping[str, Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    limit_s: float = 120.0,
    padding_params: Collection[str] = (),
) -> RoundTrip:
    """The movements of a rank whose window and areas do not exist yet.

    Args:
        there: from ``params`` to the engine.
        back: the other way, planned with ``local_area="outgoing"``; None: there is none.
        dtype: of the model, on both sides.

    Raises:
        RuntimeError: a parameter is missing or too small.
    """
    window = Window(
        max(there.incoming_area_bytes, back.outgoing_area_bytes if back is not None else 0),
        transport.device,
        num_sums=there.num_arriving,
    )
    own = max(there.outgoing_area_bytes, incoming_bytes(back) if back is not None else 0)
    staging = torch.empty(2, own, dtype=torch.uint8, device=transport.device)
    way: dict[str, Any] = {"dtype": dtype, "limit_s": limit_s, "staging": staging}
    return RoundTrip(
        reshard=Mover(there, params, transport, window, padding_params=padding_params, **way),
        restore=None if back is None else Mover(back, window, transport, params, **way),
    )
