"""A reshard in one picture: who sends to whom, and how full the rounds are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf.reshard.explain import GIGA, Link, Moves, bytes_per_round, links_of, num_rounds, sums

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {Link.NODE: "#2b6cb0", Link.RAIL: "#2f855a", Link.FABRIC: "#dd6b20", Link.SELF: "#a0aec0"}
NAMES = {
    Link.SELF: "same rank",
    Link.NODE: "same node",
    Link.RAIL: "same rail",
    Link.FABRIC: "other nodes",
}
MOST_RANKS = 128
"""Of more ranks than this the matrix is drawn by nodes."""


def check_picture(path: Path) -> None:
    """
    Raises:
        ValueError: the name's end is no kind of picture, or its folder is not there.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise ValueError(f"--picture {path}: must end in one of {', '.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise ValueError(f"--picture {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--picture {path}: is a folder; give the name of a file")


def draw_moves(moves: Moves, nodes: Sequence[int], path: Path, title: str) -> None:
    """Write the picture (PNG, or SVG by the name's end).

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    links = links_of(moves, nodes)
    _draw_matrix(figure, left, moves, links, nodes)
    _draw_rounds(right, moves, links)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"--picture {path}: cannot be written: {error}") from None


def sent_matrix(
    moves: Moves, links: NDArray[np.int64], link: Link, groups: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[groups, groups] bytes over ``link``: row sends, column receives."""
    size = int(groups.max()) + 1
    rows = links == link
    keys = groups[moves.source[rows]] * size + groups[moves.destination[rows]]
    return sums(keys, moves.num_bytes[rows], size * size).reshape(size, size)


def _draw_matrix(
    figure: Figure,
    axes: Axes,
    moves: Moves,
    links: NDArray[np.int64],
    nodes: Sequence[int],
) -> None:
    """A cell's colour is its link class, how strong it is its bytes."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    by_node = moves.world > MOST_RANKS
    groups = np.unique(nodes, return_inverse=True)[1] if by_node else np.arange(moves.world)
    amounts = {link: sent_matrix(moves, links, link, groups) for link in Link}
    most = max(float(amount.max()) for amount in amounts.values())
    picture = np.ones((*next(iter(amounts.values())).shape, 3))
    for link, amount in amounts.items():
        strength = np.where(amount > 0, 0.15 + 0.85 * amount / max(most, 1.0), 0.0)[..., None]
        picture -= strength * (1 - np.array(to_rgb(COLORS[link])))
    axes.imshow(np.clip(picture, 0, 1), interpolation="nearest", origin="upper")
    axes.locator_params(integer=True)
    what = "node" if by_node else "rank"
    axes.set_xlabel(f"receiving {what}")
    axes.set_ylabel(f"sending {what}")
    axes.set_title(
        f"Who sends to whom; the strongest cell is {most / GIGA:.3g} GB", fontsize=10, loc="left"
    )
    totals = sums(links, moves.num_bytes, len(Link)) / GIGA
    figure.legend(
        handles=[Patch(color=COLORS[k], label=f"{NAMES[k]}: {totals[k]:.4g} GB") for k in Link],
        loc="outside lower left",
        ncols=len(Link),
        frameon=False,
        fontsize=9,
    )


def _draw_rounds(axes: Axes, moves: Moves, links: NDArray[np.int64]) -> None:
    """Bytes of all ranks in each round, by link class; a line for the fullest rank."""
    rounds = np.arange(num_rounds(moves))
    bottom = np.zeros(len(rounds))
    for link in Link:
        heights = bytes_per_round(moves, moves.destination, links == link).sum(axis=1) / GIGA
        axes.bar(rounds, heights, 1.0, bottom, color=COLORS[link])
        bottom += heights
    axes.set_xlabel("round")
    axes.set_ylabel("GB, all ranks")
    axes.locator_params(axis="x", integer=True)
    most = bytes_per_round(moves, moves.destination, links != Link.SELF).max(axis=1) / 1e6
    other = axes.twinx()
    other.plot(rounds, most, color="#1a202c", linewidth=1.2)
    other.set_ylim(bottom=0)
    other.set_ylabel("MB, most that one rank receives (line)")
    axes.set_title("Bytes of each round", fontsize=10, loc="left")
    for each in (axes, other):
        each.spines[["top"]].set_visible(False)
