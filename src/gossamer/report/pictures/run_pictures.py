"""Pictures of comparisons, of single runs and of reproduced tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.report.looks import COLOURS, places
from gossamer.report.page.data import ExpenseData, WorkerTime
from gossamer.report.pictures import figure as figures
from gossamer.report.pictures.panels import (
    VIRTUAL,
    Series,
    draw_arrivals,
    draw_curves,
    draw_front,
    draw_shares,
    draw_target,
    draw_workers,
    has_point,
    limit_scores,
    name_target,
)
from gossamer.runs.ranking import RankedMethod
from gossamer.runs.statistics import measure, show_number, show_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = Mapping[tuple[str, str], float]
_SIDES = (("published", figures.PUBLISHED), ("ours", COLOURS[0]))
_NARROW_COLUMNS = 4
"""With more columns than these, three panels in a row leave no room for their numbers."""
_EM = 0.63
"""The average width of a letter over its size."""


def comparison_picture(
    path: Path,
    runs: Sequence[Series],
    *,
    title: str,
    target: float,
    ranking: Sequence[RankedMethod],
    time: str = VIRTUAL,
    expenses: Sequence[ExpenseData] = (),
) -> None:
    """Several methods on one task and one cluster: scores, times to the target, use of time; and
    where the cluster has prices, time against money."""
    by_label = {one.label: one for one in runs}
    priced = [one for one in expenses if one["method"] in by_label and has_point(one)]
    figure = figures.new_figure(12.0, 11.5 if priced else 8.0)
    looks = {label: figures.look(place) for label, place in places(by_label).items()}
    # A few bars need less room than many, which leaves more for the curves.
    lower = min(1.0, 0.35 + 0.08 * len(runs))
    ratios = (1.3, lower, 1.0) if priced else (1.3, lower)
    panels = figure.subplots(len(ratios), 2, sharey="row", height_ratios=ratios)
    over_time, over_epochs, arrivals, shares = panels[:2].flat
    key = _draw_scores(over_time, over_epochs, runs, looks, target, time)
    ranked = [place for place in ranking if place.label in by_label]
    figures.style(arrivals, "left", f"{time.capitalize()} to reach {show_score(target, key)}")
    draw_arrivals(arrivals, ranked, by_label, looks, time)
    draw_shares(shares, [by_label[one.label] for one in ranked])
    if priced:
        # One panel in the place of the two of the last row.
        for panel in panels[2]:
            panel.remove()
        draw_front(figure.add_subplot(panels[2, 0].get_gridspec()[2, :]), priced, looks, time)
    figures.write_titles(figure, title, _subtitle(runs, has_dots=True))
    figures.lay_out(figure, legend_rows=_write_methods(figure, runs, looks))
    figures.save(figure, path)


def run_picture(
    path: Path,
    run: Series,
    workers: Sequence[WorkerTime],
    *,
    title: str,
    target: float | None = None,
    time: str = VIRTUAL,
) -> None:
    """One method: its scores, and below them each worker's use of time in the first run."""
    figure = figures.new_figure(12.0, 8.0 if workers else 5.2)
    looks = {label: figures.look(place) for label, place in places([run.label]).items()}
    panels = figure.subplot_mosaic(
        [["time", "epochs"], ["workers", "workers"]] if workers else [["time", "epochs"]],
        height_ratios=(1.3, 1.0) if workers else (1.0,),
    )
    panels["epochs"].sharey(panels["time"])
    panels["epochs"].tick_params(labelleft=False)
    _draw_scores(panels["time"], panels["epochs"], [run], looks, target, time)
    if workers:
        whose = "" if len(run.histories) == 1 else ", in the first run"
        draw_workers(panels["workers"], workers, f"Where each worker's time went{whose}", time)
    figures.write_titles(figure, title, _subtitle([run], has_dots=False))
    figures.lay_out(figure)
    figures.save(figure, path)


def table_picture(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    published: Cells,
    ours: Cells,
    *,
    unit: str = "seconds",
) -> None:
    """A reproduced table: a panel for each row, and for each column published beside ours."""
    values = [*published.values(), *ours.values()]
    if not rows or not columns or not values or min(values) <= 0.0:
        raise ConfigurationError(
            "a table picture needs rows, columns and cells above zero, as its axis is logarithmic; "
            f"got {len(rows)} rows, {len(columns)} columns, least cell {min(values, default=None)}"
        )
    fitting = 3 if len(columns) <= _NARROW_COLUMNS else 2
    down = math.ceil(len(rows) / fitting)
    # Four rows become two and two instead of three and one.
    across = math.ceil(len(rows) / down)
    width = 4.0 * max(2, min(len(rows), 3))
    figure = figures.new_figure(width, 1.4 + 3.2 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for panel, row in zip(panels.flat, rows, strict=False):
        room = 0.9 * width / across / len(columns)
        _draw_table_row(panel, row, columns, published, ours, room)
        _name_columns(panel, columns, room)
    for panel in panels.flat[len(rows) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        figures.name_axis(panel.yaxis, f"{unit} (log scale)".strip())
    first: Axes = panels[0, 0]
    first.set_yscale("log")
    first.set_ylim(min(values) / 2.0, max(values) * 2.0)
    figures.plain_log_ticks(first.yaxis)
    figures.write_titles(figure, title, _agreement(published, ours))
    figures.lay_out(figure, legend_rows=_write_sides(figure))
    figures.save(figure, path)


# ---------------------------------------------------------------------- of comparisons and runs


def _draw_scores(
    over_time: Axes,
    over_epochs: Axes,
    runs: Sequence[Series],
    looks: Mapping[str, figures.Look],
    target: float | None,
    time: str,
) -> str:
    """Draw the scores over time and over epochs; returns the score that was drawn."""
    key = measure([history for one in runs for history in one.histories])
    for axes, along in ((over_time, "virtual_seconds"), (over_epochs, "epochs")):
        draw_curves(axes, runs, looks, key, along, time)
        if target is not None:
            draw_target(axes, target)
    limit_scores(over_time, runs, key, target)
    if target is not None:
        name_target(over_epochs, target, key)
    return key


def _write_methods(
    figure: Figure, runs: Sequence[Series], looks: Mapping[str, figures.Look]
) -> int:
    from matplotlib.lines import Line2D

    titles = [one.label for one in runs]
    if len(_rates(runs)) > 1:
        titles = [f"{one.label} (rate {one.rate:g})" for one in runs]
    lines = [
        Line2D([], [], label=title, **looks[one.label])
        for title, one in zip(titles, runs, strict=True)
    ]
    return figures.write_legend(figure, lines)


def _rates(runs: Sequence[Series]) -> set[float]:
    """The learning rates that are known."""
    return {one.rate for one in runs} - {0.0}


def _subtitle(runs: Sequence[Series], *, has_dots: bool) -> str:
    workers = sorted({one.workers for one in runs})
    seeds = sorted({len(one.histories) for one in runs})
    parts = [f"{_range(workers)} worker{'' if workers == [1] else 's'}"]
    rates = _rates(runs)
    if len(rates) == 1:
        parts.append(f"learning rate {rates.pop():g}")
    shown = "lines: means, bands: range over seeds"
    shown += ", dots: seeds" if has_dots else ""
    alone = f"one seed{' each' if len(runs) > 1 else ''}, so chance differences are not shown"
    parts.append(alone if seeds == [1] else f"{_range(seeds)} seeds ({shown})")
    return ", ".join(parts)


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


# ---------------------------------------------------------------------- of tables


def _write_sides(figure: Figure) -> int:
    from matplotlib.patches import Patch

    return figures.write_legend(
        figure, [Patch(color=colour, label=name) for name, colour in _SIDES]
    )


def _draw_table_row(
    axes: Axes, row: str, columns: Sequence[str], published: Cells, ours: Cells, inches: float
) -> None:
    """Draw the bars of a row, with this many inches for each pair and its numbers."""
    figures.style(axes, "bottom", row, grid="y")
    cells_shown = [
        cells[place] for cells in (published, ours) for place in cells if place[0] == row
    ]
    longest = max((len(show_number(value)) for value in cells_shown), default=1)
    points = min(8.0, 0.4 * 72.0 * inches / (_EM * longest))
    for shift, cells, (_, colour) in zip((-0.2, 0.2), (published, ours), _SIDES, strict=True):
        places = [at for at, column in enumerate(columns) if (row, column) in cells]
        heights = [cells[row, columns[at]] for at in places]
        # A bar without a partner stands in the middle.
        has_both = [(row, columns[at]) in published and (row, columns[at]) in ours for at in places]
        middles = [at + shift * both for at, both in zip(places, has_both, strict=True)]
        bars = axes.bar(middles, heights, 0.38, color=colour)
        axes.bar_label(
            bars, [show_number(height) for height in heights], padding=2, fontsize=points
        )
    axes.set_xlim(-0.6, len(columns) - 0.4)


def _name_columns(axes: Axes, columns: Sequence[str], inches: float) -> None:
    """Write long names of columns on several lines and in smaller letters."""
    longest = max(len(word) for column in columns for word in column.split())
    points = min(9.0, 72.0 * inches / (_EM * longest))
    letters = max(longest, int(72.0 * inches / (_EM * points)))
    names = columns
    if max(map(len, columns)) > letters:
        # Names are broken after a comma first.
        parts = [column.replace(", ", ",\n").splitlines() for column in columns]
        names = [
            "\n".join(textwrap.fill(part, letters, break_long_words=False) for part in own)
            for own in parts
        ]
    axes.set_xticks(range(len(columns)), names, fontsize=points)


def _agreement(published: Cells, ours: Cells) -> str:
    ratios = [ours[cell] / published[cell] for cell in published if cell in ours]
    if not ratios:
        return "no cell is both published and ours"
    return (
        f"ours over published: {min(ratios):.2f} to {max(ratios):.2f} "
        f"in the {counted(len(ratios), 'cell')} that both have"
    )
