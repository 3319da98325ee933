"""The picture of models divided over machines: what each holds, and who tells whom what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gossamer.report.looks import COLOURS
from gossamer.report.pictures import figure as figures

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

_FILLS = {
    "convolution": COLOURS[0], "linear": COLOURS[1], "attention": COLOURS[2],
    "embedding": COLOURS[3],
}  # fmt: skip
_TALKS: dict[str, tuple[str, Any]] = {
    "gradients": ("#222222", "-"), "sums": ("#D55E00", "-"), "activations": ("#222222", ":"),
    "parameters": ("#666666", "--"),
}  # fmt: skip
_COLUMNS = 3
_WIDE = 0.78
"""Of a machine's column."""


TalkKind = Literal["gradients", "activations", "sums", "parameters"]
MOST_SHOWN = 8
"""Machines that a picture shows."""


@dataclass(frozen=True)
class Holding:
    """Consecutive blocks on one machine, or a share of each of them."""

    machine: int
    start: int
    end: int
    share: int = 0
    shares: int = 1


@dataclass(frozen=True)
class Talk:
    """What some machines tell each other about some blocks, or behind the block `end`."""

    kind: TalkKind
    machines: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Placement:
    """The machines that are shown, of which the last `servers` are servers."""

    machines: int
    left_out: int
    """Machines that are like these and are not shown."""
    copy: int
    """Machines of one copy."""
    holdings: tuple[Holding, ...]
    talks: tuple[Talk, ...]
    servers: int = 0


@dataclass(frozen=True)
class DrawnBlock:
    """A block of the model in the picture."""

    kind: str
    work_share: float
    parameter_share: float


@dataclass(frozen=True)
class PlacementPanel:
    """One way to divide the model, with the time of its step."""

    heading: str
    step_s: float
    placement: Placement


def placement_picture(
    path: Path, panels: Sequence[PlacementPanel], blocks: Sequence[DrawnBlock], *, title: str,
    subtitle: str,
) -> None:  # fmt: skip
    """A panel for each way: machines side by side, the model from its input at the bottom to its
    output at the top. A block is as tall as the root of its work and its parameters together."""
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = figures.new_figure(4.4 * columns, 1.0 + 2.9 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    tall, kinds = _heights(blocks), [block.kind for block in blocks]
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, tall, kinds)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    legend = figures.write_legend(figure, _handles(panels, kinds))
    figures.write_titles(figure, title, subtitle)
    figures.lay_out(figure, legend_rows=legend)
    figures.save(figure, path)


def _heights(blocks: Sequence[DrawnBlock]) -> list[float]:
    """Where each block begins, from 0 to 1, and the end."""
    sizes = [(one.work_share + one.parameter_share + 0.02) ** 0.5 for one in blocks]
    return [one / sum(sizes) for one in (0.0, *accumulate(sizes))]


def _fill(kind: str) -> str:
    return _FILLS.get(kind, _FILLS["linear"] if kind == "part" else figures.OTHER)


def _draw_panel(
    axes: Axes, panel: PlacementPanel, tall: Sequence[float], kinds: Sequence[str]
) -> None:
    placed = panel.placement
    workers = placed.machines - placed.servers
    for machine in range(placed.machines):
        is_server = machine >= workers
        axes.add_patch(_box(machine, 0.0, _WIDE, 1.0, "none", figures.FAINT, 0.8))
        label = f"S{machine - workers}" if is_server else str(machine)
        axes.text(machine, -0.05, label, ha="center", va="top", fontsize=7, color=figures.FAINT)
    for one in placed.holdings:
        _draw_holding(axes, one, tall, kinds)
    for number, talk in enumerate(placed.talks):
        _draw_talk(axes, talk, tall, number)
    for first in range(placed.copy, workers, placed.copy):
        if placed.copy > 1:
            axes.plot(
                [first - 0.5] * 2, [-0.1, 1.0], color=figures.FAINT, linewidth=0.8,
                linestyle=(0, (1, 2)),
            )  # fmt: skip
    axes.set_xlim(-0.6, placed.machines - 0.4)
    axes.set_ylim(-0.24, 1.06)
    axes.axis("off")
    size = min(9.0, 380 / max(1, len(panel.heading)))
    axes.set_title(panel.heading, fontsize=size, color=figures.INK, loc="left")
    more = f"; {placed.left_out} more workers like these" if placed.left_out else ""
    servers = "; S: servers" if placed.servers else ""
    axes.text(
        -0.5, -0.17, f"{1e3 * panel.step_s:.4g} ms a step{more}{servers}", fontsize=7.5,
        color=figures.FAINT, va="top",
    )  # fmt: skip


def _draw_holding(axes: Axes, one: Holding, tall: Sequence[float], kinds: Sequence[str]) -> None:
    """A share of a layer is as narrow as it is small, and stands where the others leave room."""
    wide = _WIDE / one.shares
    left = one.machine - _WIDE / 2 + one.share * wide
    for at in range(one.start, one.end):
        height = tall[at + 1] - tall[at]
        axes.add_patch(
            _box(left + wide / 2, tall[at], wide, height, _fill(kinds[at]), "white", 0.4)
        )


def _box(
    middle: float, bottom: float, wide: float, height: float, fill: str, edge: str, line: float
) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (middle - wide / 2, bottom), wide, height, facecolor=fill, edgecolor=edge, linewidth=line
    )


def _draw_talk(axes: Axes, talk: Talk, tall: Sequence[float], number: int) -> None:
    colour, line = _TALKS[talk.kind]
    middle = (tall[talk.start] + tall[talk.end]) / 2
    if talk.kind == "parameters" and talk.end - talk.start < len(tall) - 1:
        middle = tall[talk.start] + 0.06 + 0.02 * (number % 3)
    axes.plot(
        talk.machines, [middle] * len(talk.machines), color=colour, linestyle=line, linewidth=1.5,
        marker="o", markersize=3.2, zorder=5,
    )  # fmt: skip


def _handles(panels: Sequence[PlacementPanel], kinds: Sequence[str]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {"part": "layers"}
    shown = [kind for kind in dict.fromkeys(kinds) if kind in (*_FILLS, "part")]
    found: list[Artist] = [Patch(color=_fill(kind), label=names.get(kind, kind)) for kind in shown]
    if any(_fill(kind) == figures.OTHER for kind in kinds):
        found.append(Patch(color=figures.OTHER, label="other layers"))
    talks = {talk.kind for panel in panels for talk in panel.placement.talks}
    words = {"sums": "sums inside layers"}
    found += [
        Line2D([], [], color=colour, linestyle=line, marker="o", markersize=3.2,
               label=words.get(kind, kind))
        for kind, (colour, line) in _TALKS.items() if kind in talks
    ]  # fmt: skip
    return found
