"""``rlhf explain``: what a reshard costs before anything runs; no GPU and no weights needed."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.reshard.rounds import MAX_PEERS
from rlhf.reshard.topology import Topology
from rlhf.weights.families import (
    engine_block_faults,
    full_pieces,
    reshard_spread,
    restore_spread,
    rollout_faults,
    train_block_faults,
    train_faults,
    train_pieces,
)
from rlhf.weights.find_model import find_model, known_models
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import ITEMSIZES, Piece, box_size

if TYPE_CHECKING:
    from rlhf.reshard.explain import Explanation, LinkSpeeds, Moves

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
WINDOW_MIB = 512
MOST_RANKS = 2**14
"""Tables have a row for each."""
MODEL_OPTIONS = ("ranks", "train", "rollout")


@dataclass(frozen=True, slots=True)
class Request:
    """A model between two layouts."""

    name: str
    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    ranks_per_node: int
    window_bytes: int
    max_peers: int
    itemsize: int  # bytes per element of the model's dtype

    @property
    def topology(self) -> Topology:
        """Which ranks are on one node."""
        return Topology.of(self.train.world, self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How bytes travel, as far as a configuration says it."""

    window_mib: int
    max_peers: int
    itemsize: int


def add_arguments(parser: ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument("config", nargs="?", help="YAML file; or give --model")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    parser.add_argument("--model", help="HF folder, config.json, or a name of configs/models/")
    parser.add_argument("--ranks", type=int, help="of training and of all engines")
    parser.add_argument("--train", metavar="tp=8,pp=4,...", help="training layout")
    parser.add_argument("--rollout", metavar="tp=8,dp=8,...", help="engines' layout")
    parser.add_argument("--mtp", action="store_true", help="with multi-token prediction layers")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--window-mib", type=int, help=f"staging window ({WINDOW_MIB})")
    parser.add_argument("--nic-gbs", type=float, default=45.0, help="GB/s per rank, each way (45)")
    parser.add_argument("--nvlink-gbs", type=float, default=400.0, help="in a node (400)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", metavar="FILE.png", type=Path)


def run(args: Namespace) -> str:
    """What the command prints; writes ``--picture``.

    Raises:
        ValueError: the arguments contradict each other, or name what cannot be.
    """
    from rlhf.reshard.explain import LinkSpeeds
    from rlhf.reshard.explain_picture import check_picture, draw_moves
    from rlhf.reshard.explain_text import explanation_text, rollout_words, train_words

    speeds = LinkSpeeds(args.nic_gbs, args.nvlink_gbs)
    if args.picture is not None:
        check_picture(args.picture)
    request = read_request(args)
    train, rollout = request.train, request.rollout
    explanation, moves = explained(request, speeds, mtp=args.mtp)
    if args.picture is not None:
        title = f"{request.name}: {train_words(train)} -> {rollout_words(rollout)}"
        draw_moves(moves, request.topology.nodes, args.picture, title)
    if args.json:
        return json.dumps(explanation.as_dict(), indent=2)
    return explanation_text(explanation, request.name, train, rollout)


def explained(
    request: Request, speeds: LinkSpeeds, *, mtp: bool = False, back: bool = False
) -> tuple[Explanation, Moves]:
    """The real plan of a reshard, added up; with ``back`` of the way from engines to trainers."""
    from rlhf.reshard.explain import Weights, explain
    from rlhf.reshard.explain_plan import plan_moves

    shape, train, rollout = request.shape, request.train, request.rollout
    began = time.perf_counter()
    spread = (
        restore_spread(shape, train, rollout)
        if back
        else reshard_spread(shape, train, rollout, mtp=mtp)
    )
    spread_s = time.perf_counter() - began
    moves = plan_moves(
        spread,
        request.topology,
        itemsize=request.itemsize,
        area_bytes=request.window_bytes // 2,  # half for what arrives, half for what is sent
        max_peers=request.max_peers,
    )
    moves = replace(moves, plan_build_s=spread_s + moves.plan_build_s)
    weights = Weights(
        model_bytes(shape, request.itemsize, mtp=mtp),
        train_bytes_mean(shape, train, request.itemsize, mtp=mtp),
    )
    return explain(moves, request.topology.nodes, weights, speeds), moves


def read_request(args: Namespace, command: str = "explain") -> Request:
    """From a configuration, or from ``--model`` and the layouts.

    Args:
        command: what the user called.

    Raises:
        ValueError: as :func:`run`.
    """
    unit = "gpus" if command == "plan" else "ranks"
    for name, value in (
        (f"--{unit}", args.ranks),
        (f"--{unit}-per-node", args.ranks_per_node),
        ("--window-mib", args.window_mib),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}")
    if args.ranks is not None and args.ranks > MOST_RANKS:
        raise ValueError(f"--{unit}: must be at most {MOST_RANKS}, is {args.ranks}")
    given = [f"--{name}" for name in ("model", "train", "rollout") if getattr(args, name)]
    if args.config is not None and given:
        raise ValueError(
            f"{args.config} says model and layouts; leave out {', '.join(given)}, "
            "or give --model without a configuration"
        )
    return _from_config(args) if args.config is not None else _from_options(args, command, unit)


def _from_options(args: Namespace, command: str, unit: str) -> Request:
    if args.model is None:
        raise ValueError(
            f"rlhf {command} CONFIG, or rlhf {command} --model NAME --{unit} N --train ... "
            f"--rollout ...; known names are {', '.join(known_models())}"
        )
    missing = [
        f"--{unit if name == 'ranks' else name}"
        for name in MODEL_OPTIONS
        if getattr(args, name) is None
    ]
    if missing:
        raise ValueError(
            f"--model {args.model} needs {', '.join(missing)} too, as in "
            f"--{unit} 128 --train tp=8,pp=4 --rollout tp=8"
        )
    shape = find_model(args.model)
    train, rollout = parse_train(args.train, args.ranks), parse_rollout(args.rollout, args.ranks)
    exchange = _Exchange(WINDOW_MIB, MAX_PEERS, 2)
    return _checked(args, _name(args.model), shape, (train, rollout), exchange)


def _from_config(args: Namespace) -> Request:
    from rlhf.config.check import rollout_layout, train_layout
    from rlhf.config.faults import ConfigError
    from rlhf.config.load import load_config
    from rlhf.launch import default_ranks

    config = load_config(args.config, args.overrides)
    ranks = args.ranks or config.dist.ranks or default_ranks()
    autos = [key for key in ("train", "rollout") if getattr(config, key).auto]
    if autos:
        raise ConfigError(
            [
                f"{args.config}:{key}: auto: has no layout yet; `rlhf plan {args.config} --solve` "
                "finds one"
                for key in autos
            ]
        )
    try:
        shape = find_model(config.model.path)
    except ValueError as error:
        raise ConfigError([f"{args.config}:model.path: {error}"]) from None
    exchange = _Exchange(
        config.reshard.window_mib, config.reshard.max_peers, DTYPE_BYTES[config.model.dtype]
    )
    try:
        layouts = train_layout(config.train, ranks), rollout_layout(config.rollout, ranks)
        return _checked(args, _name(config.model.path), shape, layouts, exchange)
    except LayoutError as error:
        raise ConfigError([f"{args.config}:{fault}" for fault in error.faults]) from None


def _name(model: str) -> str:
    """Short: a folder's own name."""
    path = Path(model).resolve()
    return path.parent.name if path.name == "config.json" else path.name


def _checked(
    args: Namespace,
    name: str,
    shape: ModelShape,
    layouts: tuple[TrainLayout, RolloutLayout],
    exchange: _Exchange,
) -> Request:
    train, rollout = layouts
    if train.vpp > 1 and train.pp == 1:
        raise LayoutError(
            [f"train.vpp: {train.vpp} chunks need train.pp > 1, which is 1; set vpp to 1"]
        )
    faults = [*train_faults(shape, train), *rollout_faults(shape, rollout)]
    if not faults:  # else the cuts are those of no layout
        faults += [*engine_block_faults(shape, rollout), *train_block_faults(shape, train, rollout)]
    if faults:
        raise LayoutError(faults)
    for stage in range(train.pp):
        for chunk in range(train.vpp):
            train.layers(shape.num_layers, stage, chunk)
    window_bytes = (args.window_mib or exchange.window_mib) << 20
    return Request(
        name,
        shape,
        train,
        rollout,
        args.ranks_per_node,
        window_bytes,
        exchange.max_peers,
        exchange.itemsize,
    )


def model_bytes(shape: ModelShape, itemsize: int, *, mtp: bool = False) -> int:
    """Of all tensors of the checkpoint."""
    return _bytes_of(full_pieces(shape, mtp=mtp), itemsize)


def train_bytes_mean(
    shape: ModelShape, layout: TrainLayout, itemsize: int, *, mtp: bool = False
) -> float:
    """Of a training shard. Its size depends on the tp rank (vocabulary padding) and the stage."""
    ranks = [layout.rank(tp=tp, pp=pp) for tp in range(layout.tp) for pp in range(layout.pp)]
    shards = [train_pieces(shape, layout, rank, mtp=mtp) for rank in ranks]
    return sum(_bytes_of(pieces, itemsize) for pieces in shards) / len(ranks)


def _bytes_of(pieces: Iterable[Piece], itemsize: int) -> int:
    return sum(
        box_size(piece.region) * (itemsize if piece.dtype is None else ITEMSIZES[piece.dtype])
        for piece in pieces
    )
