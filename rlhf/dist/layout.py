"""Pure rank <-> coordinate arithmetic of the two layouts. No torch, no process group.

Training ranks are ordered ``tp-cp-ep-dp-pp`` (tp fastest), experts ``etp-ep-edp-pp``, as Megatron's
parallel state orders them. Engine i of the rollout layout holds ranks [i * size, (i + 1) * size).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Quantization = Literal["none", "block_fp8"]
"""How an engine keeps its weights."""


class LayoutError(ValueError):
    """A layout that cannot exist; one line per fault in ``faults``."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class TrainCoord:
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Megatron's grid. ``first``/``last``: layers of the first/last pipeline stage (None: even)."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        faults = []
        dense = self.tp * self.pp * self.cp
        if self.world % dense:
            faults.append(
                f"train: world={self.world} must be a multiple of tp*pp*cp={dense}; "
                f"use {dense * (self.world // dense + 1)} ranks or a smaller tp, pp or cp"
            )
        expert = self.expert_tp * self.ep * self.pp
        if (self.ep > 1 or self.etp is not None) and self.world % expert:
            faults.append(
                f"train: world={self.world} must be a multiple of etp*ep*pp={expert} "
                f"(etp={self.expert_tp}{', which defaults to tp' if self.etp is None else ''}); "
                f"use {expert * (self.world // expert + 1)} ranks or a smaller etp, ep or pp"
            )
        if faults:
            raise LayoutError(faults)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world // (self.expert_tp * self.ep * self.pp)

    def coord(self, rank: int) -> TrainCoord:
        """Coordinates of a global rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world}")
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        inside = rank % (self.world // self.pp)
        etp, rest = inside % self.expert_tp, inside // self.expert_tp
        ep, edp = rest % self.ep, rest // self.ep
        return TrainCoord(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank at dense coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def layers(self, num_layers: int, pp: int, vpp: int = 0) -> range:
        """Global numbers of the layers on stage ``pp``, virtual chunk ``vpp``.

        Layers left after ``first``/``last`` are spread evenly over the other stages, an extra one
        to the earlier stages. With virtual chunks each stage's layers are cut in ``vpp`` equal
        parts and chunk v of all stages comes before chunk v + 1.

        Raises:
            LayoutError: a stage or chunk would be empty or uneven.
        """
        counts = self._layers_per_stage(num_layers)
        if self.vpp == 1:
            start = sum(counts[:pp])
            return range(start, start + counts[pp])
        uneven = [n for n in counts if n % self.vpp]
        if uneven:
            raise LayoutError(
                [f"train.vpp={self.vpp} must divide the layers of every stage, which are {counts}"]
            )
        chunk = [n // self.vpp for n in counts]
        start = vpp * sum(chunk) + sum(chunk[:pp])
        return range(start, start + chunk[pp])

    def _layers_per_stage(self, num_layers: int) -> list[int]:
        fixed = {0: self.first} if self.first is not None else {}
        if self.last is not None:
            fixed[self.pp - 1] = self.last
        left = num_layers - sum(n for n in fixed.values() if n is not None)
        middle = [s for s in range(self.pp) if s not in fixed]
        counts = {s: n for s, n in fixed.items() if n is not None}
        for i, stage in enumerate(middle):
            counts[stage] = left // len(middle) + (i < left % len(middle))
        out = [counts[s] for s in range(self.pp)]
        if sum(out) != num_layers or min(out) < 1:
            raise LayoutError(
                [
                    f"train: {num_layers} layers cannot be spread over pp={self.pp} stages with "
                    f"first={self.first}, last={self.last}: that gives {out}; each stage "
                    "needs one layer at least: lower pp, or change first and last"
                ]
            )
        return out


def sequence_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """Packed sequences are padded to a multiple of this.

    Context parallelism cuts each in 2 * cp equal chunks; sequence parallelism then cuts a rank's
    rows over tp.
    """
    rows = tp if sequence_parallel else 1
    return 2 * cp * rows if cp > 1 else rows


@dataclass(frozen=True, slots=True)
class RolloutCoord:
    engine: int
    tp: int
    pp: int


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """SGLang engines. ``dp`` is DP-attention inside an engine (attention tp = tp / dp).

    With dp > 1 the engine also has its vocabulary over the attention group (dp-lm-head), and in
    models with experts whole dense MLPs on every rank (moe_dense_tp_size=1). ``ep`` consecutive
    groups of tp / ep ranks have experts of their own; with a2a=deepep shared experts are whole on
    every rank. With quantization=block_fp8 the matrices of the layers are float8_e4m3fn with a
    float32 scale per block of 128 x 128.

    With ``redundant_experts`` the ep groups share out so many experts more: number ``i`` of them
    all is a copy of the model's expert ``i`` modulo its number of experts, which is where SGLang
    begins. Copies that move with the load (EPLB) are not for weights that are written in place.
    """

    world: int
    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    a2a: Literal["none", "deepep"] = "none"
    quantization: Quantization = "none"
    redundant_experts: int = 0

    def __post_init__(self) -> None:
        faults = []
        if self.world % self.engine_size:
            faults.append(
                f"rollout: world={self.world} must be a multiple of tp*pp={self.engine_size}; use "
                f"{self.engine_size * (self.world // self.engine_size + 1)} ranks or a smaller tp "
                "or pp"
            )
        faults += [
            f"rollout.{name}={value} must divide rollout.tp={self.tp}; set it to a divisor"
            for name, value in (("dp", self.dp), ("ep", self.ep))
            if self.tp % value
        ]
        if faults:
            raise LayoutError(faults)

    @property
    def engine_size(self) -> int:
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp // self.ep

    @property
    def num_engines(self) -> int:
        return self.world // self.engine_size

    def coord(self, rank: int) -> RolloutCoord:
        """Engine, stage and tp rank of a global rank."""
        inside = rank % self.engine_size
        return RolloutCoord(
            engine=rank // self.engine_size, tp=inside % self.tp, pp=inside // self.tp
        )

    def leader(self, engine: int) -> int:
        """The global rank that owns the engine host."""
        return engine * self.engine_size

    def engine_ranks(self, engine: int) -> range:
        return range(engine * self.engine_size, (engine + 1) * self.engine_size)

    def nodes_per_engine(self, ranks_per_node: int) -> int:
        """Nodes that an engine lies on; see :func:`node_faults`."""
        return max(1, self.engine_size // ranks_per_node)

    def hosts_on(self, rank: int, ranks_per_node: int) -> bool:
        """Whether this rank starts its engine's host: the engine's first rank on its node does."""
        inside = rank % self.engine_size
        return inside % ranks_per_node == 0


def node_faults(layout: RolloutLayout, ranks_per_node: int) -> Iterator[str]:
    """Why engines cannot lie on nodes of so many ranks: inside one, or over whole ones.

    Over several nodes a pipeline stage lies the same way. Nodes hold ranks in order.
    """
    size, tp = layout.engine_size, layout.tp
    if size % ranks_per_node and ranks_per_node % size:
        inside = [n for n in range(1, ranks_per_node) if ranks_per_node % n == 0]
        yield (
            f"rollout.tp*rollout.pp={size} and the {ranks_per_node} ranks of a node: one must be a "
            "multiple of the other, so that an engine lies inside a node or over whole ones; use "
            f"{', '.join([*map(str, inside), f'or a multiple of {ranks_per_node}'])}"
        )
    elif size > ranks_per_node and tp % ranks_per_node and ranks_per_node % tp:
        yield (
            f"rollout.tp={tp} and the {ranks_per_node} ranks of a node: one must be a multiple of "
            f"the other where an engine of rollout.tp*rollout.pp={size} lies over several nodes, "
            "so that a stage lies inside a node or over whole ones; change rollout.tp"
        )


def division_faults(key: str, parts: int, sizes: Mapping[str, int]) -> Iterator[str]:
    """What is spread over ``parts`` ranks must divide evenly; names all that does not."""
    bad = [f"{name} {size}" for name, size in sizes.items() if size % parts]
    if bad:
        allowed = listed(d for d in range(1, min(sizes.values()) + 1) if _divides(d, sizes))
        yield f"{key}: {parts} must divide the model's {', '.join(bad)}; set it to one of {allowed}"


def _divides(parts: int, sizes: Mapping[str, int]) -> bool:
    return all(size % parts == 0 for size in sizes.values())


def listed(numbers: Iterable[int]) -> str:
    """``1, 2, 4``."""
    return ", ".join(map(str, numbers))
