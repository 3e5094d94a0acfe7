"""What every bench prints: one JSON object with its gates, and the exit status they decide."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Gate:
    """``value`` must be on the right side of ``limit``."""

    name: str
    value: float
    relation: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit


def finish(name: str, figures: Mapping[str, object], gates: Sequence[Gate]) -> int:
    """Print the result as JSON; 0 if all gates hold, else 1 and a line per broken one."""
    record = {
        "bench": name,
        **figures,
        "gates": [
            {"name": g.name, "value": g.value, "gate": f"{g.relation} {g.limit}", "holds": g.holds}
            for g in gates
        ],
    }
    print(json.dumps(record, indent=1))
    for gate in gates:
        if not gate.holds:
            text = f"{name}: {gate.name} = {gate.value:.4g}, must be {gate.relation} {gate.limit}"
            print(text, file=sys.stderr)
    return 0 if all(g.holds for g in gates) else 1
