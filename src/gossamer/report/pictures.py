"""Pictures of comparisons and of reproduced tables.

Colours are Okabe and Ito's, and each method also has a marker and a line style of its own, so that
nothing depends on colour alone. Only figure objects are used: drawing never touches a user's plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.errors import ConfigurationError
from gossamer.report.statistics import (
    Arrival,
    arrival,
    curve,
    final,
    is_lower_better,
    measure,
    ranked,
    seed_curves,
    show_number,
    show_score,
    time_shares,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Cells = Mapping[tuple[str, str], float]
Look = dict[str, Any]
"""How a method's line is drawn, as matplotlib's keywords."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", (0, (6, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_INK, _FAINT, _GRID = "#222222", "#666666", "#e6e6e6"
# Grey and Okabe and Ito's yellow: the methods' colours would read as the methods themselves.
_SHARES = (
    ("computing", "#4d4d4d", "white"),
    ("waiting", "#F0E442", _INK),
    ("other", "#d9d9d9", _INK),
)
_DPI = 150
# Beyond this ratio of run times a linear axis squeezes the fast methods into its first pixels.
_LOG_TIME_RATIO = 12.0


@dataclass(frozen=True)
class Series:
    """The runs of one method in a comparison, at the learning rate chosen for it."""

    label: str
    histories: Sequence[Sequence[dict[str, Any]]]
    """One history a seed."""
    workers: int
    summary: dict[str, Any]
    """That of any one of the runs; its `learning_rate` is shown."""


def comparison_picture(path: Path, runs: Sequence[Series], *, title: str, target: float) -> None:
    """Several methods on one task and one cluster: scores, times to the target, use of time."""
    if not runs or not all(one.histories and all(one.histories) for one in runs):
        raise ConfigurationError(
            "a comparison picture needs at least one evaluated run of each method, got none; "
            "run the comparison with an engine that trains"
        )
    by_label = {one.label: one for one in runs}
    if len(by_label) < len(runs):
        raise ConfigurationError(
            f"the methods of a picture need different labels, got {[one.label for one in runs]}; "
            "name what differs between them"
        )
    key = measure([history for one in runs for history in one.histories])
    figure = _figure(12.0, 8.0)
    looks = {one.label: _look(index) for index, one in enumerate(runs)}
    panels = figure.subplots(2, 2, sharey="row", height_ratios=(1.3, 1.0))
    over_time, over_epochs, arrivals, shares = panels.flat
    for axes, along in ((over_time, "virtual_seconds"), (over_epochs, "epochs")):
        _draw_curves(axes, runs, looks, key, along)
        axes.axhline(target, color=_FAINT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    _limit_scores(over_time, runs, key, target)
    _mark_target(over_epochs, target, key)
    ranking = ranked([arrival(one.label, one.histories, target, key) for one in runs])
    _style(arrivals, "left", f"Virtual seconds to reach {show_score(target, key)}")
    _draw_arrivals(arrivals, ranking, by_label, looks)
    _draw_shares(shares, [by_label[one.label] for one in ranking])
    rows = _legend(figure, runs, looks)
    _frame(figure, title, _subtitle(runs), below=0.26 * rows)
    _save(figure, path)


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
    """A reproduced table: one panel a row, one pair of bars a column, published beside ours."""
    values = [*published.values(), *ours.values()]
    if not rows or not columns or not values or min(values) <= 0.0:
        raise ConfigurationError(
            "a table picture needs rows, columns and cells above zero, as its axis is logarithmic; "
            f"got {len(rows)} rows, {len(columns)} columns, least cell {min(values, default=None)}"
        )
    across = min(len(rows), 3)
    down = math.ceil(len(rows) / across)
    figure = _figure(4.0 * max(2, across), 1.4 + 3.2 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for panel, row in zip(panels.flat, rows, strict=False):
        _draw_table_row(panel, row, columns, published, ours)
    for panel in panels.flat[len(rows) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel(f"{unit} (log scale)", color=_FAINT, fontsize=9)
    first: Axes = panels[0, 0]
    first.set_yscale("log")
    first.set_ylim(min(values) / 2.0, max(values) * 2.0)
    _plain_log_ticks(first.yaxis)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, **_legend_place(figure), ncols=2)
    _frame(figure, title, _agreement(published, ours), below=0.26)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed; run pip install 'gossamer[plot]'"
        ) from None
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def _save(figure: Figure, path: Path) -> None:
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"a picture cannot be written as {path.name!r}; end its name in .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white")


def _look(index: int) -> Look:
    # Lengths without a common divisor: looks repeat after 385 methods, not after seven.
    return {
        "color": _COLOURS[index % len(_COLOURS)], "linestyle": _STYLES[index % len(_STYLES)],
        "marker": _MARKERS[index % len(_MARKERS)], "linewidth": 1.7, "markersize": 6.0,
        "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def _frame(figure: Figure, title: str, subtitle: str, *, below: float) -> None:
    """Title and subtitle at the top left; the panels keep clear of them and of the legend."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    fitting = 115.0 * width / max(1, len(title))
    for drop, text, size, weight, colour in (
        (0.16, title, min(15.0, fitting), "bold", _INK),
        (0.49, subtitle, 9.5, "normal", _FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        figure.text(*place, text, va="top", fontsize=size, fontweight=weight, color=colour)
    area = (0.003, 0.006, 0.992, 1 - (0.84 + below) / height)
    figure.set_layout_engine("constrained", rect=area, w_pad=0.1, h_pad=0.1, hspace=0.03)


def _legend_place(figure: Figure) -> dict[str, Any]:
    corner = (0.02 / float(figure.get_figwidth()), 1 - 0.66 / float(figure.get_figheight()))
    return {
        "loc": "upper left", "bbox_to_anchor": corner, "frameon": False,
        "fontsize": 10, "labelcolor": _INK, "columnspacing": 2.2, "handlelength": 3.4,
    }  # fmt: skip


def _legend(figure: Figure, runs: Sequence[Series], looks: Mapping[str, Look]) -> int:
    """One legend for all panels; gives the number of its rows."""
    from matplotlib.lines import Line2D

    titles = [one.label for one in runs]
    if _common_rate(runs) is None:
        titles = [f"{one.label} (rate {one.summary['learning_rate']:g})" for one in runs]
    handles = [Line2D([], [], label=a, **b) for a, b in zip(titles, looks.values(), strict=True)]
    fitting = max(1, 165 // (max(map(len, titles)) + 9))
    rows = math.ceil(len(runs) / fitting)
    columns = math.ceil(len(runs) / rows)
    figure.legend(handles=handles, **_legend_place(figure), ncols=columns)
    return rows


def _common_rate(runs: Sequence[Series]) -> float | None:
    rates: set[float] = {one.summary["learning_rate"] for one in runs}
    return rates.pop() if len(rates) == 1 else None


def _subtitle(runs: Sequence[Series]) -> str:
    workers = sorted({one.workers for one in runs})
    seeds = sorted({len(one.histories) for one in runs})
    parts = [f"{_range(workers)} worker{'' if workers == [1] else 's'}"]
    rate = _common_rate(runs)
    if rate is not None:
        parts.append(f"learning rate {rate:g}")
    shown = "lines: means, bands: range over seeds, whiskers: 95 % intervals of the mean"
    alone = "one seed each, so chance differences are not shown"
    parts.append(alone if seeds == [1] else f"{_range(seeds)} seeds ({shown})")
    return ", ".join(parts)


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _style(axes: Axes, spine_kept: str, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=11, color=_INK, pad=7)
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == spine_kept)
        spine.set_color("#b0b0b0")
    axes.tick_params(which="both", length=0, pad=5, labelsize=9, labelcolor=_INK)


def _draw_curves(
    axes: Axes, runs: Sequence[Series], looks: Mapping[str, Look], key: str, along: str
) -> None:
    score = "Test loss (log scale, lower is better)" if is_lower_better(key) else "Test accuracy"
    _style(axes, "bottom", f"{score} over {'epochs' if along == 'epochs' else 'virtual time'}")
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    faint = min(0.13, 0.8 / len(runs))
    for index, one in enumerate(runs):
        places, seeds = seed_curves(one.histories, key, along)
        if not len(places):
            continue
        # Markers of different methods start apart, so that equal curves stay tellable.
        stride = max(1, len(places) // 6)
        marked = [*range(index * stride // len(runs), len(places) - 1, stride), len(places) - 1]
        look = looks[one.label]
        axes.plot(places, seeds.mean(0), markevery=marked, zorder=3, **look)
        if len(seeds) > 1:
            low, high = seeds.min(0), seeds.max(0)
            axes.fill_between(places, low, high, color=look["color"], alpha=faint, linewidth=0)
    axes.set_xlabel(along.replace("_", " "), color=_FAINT, fontsize=9)
    ends = [final(history, along) for one in runs for history in one.histories]
    if along == "virtual_seconds" and min(ends) > 0 and max(ends) > _LOG_TIME_RATIO * min(ends):
        axes.set_xscale("log")
        axes.set_xlabel("virtual seconds (log scale)", color=_FAINT, fontsize=9)
        _plain_log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, max(ends) * 1.02)


def _limit_scores(axes: Axes, runs: Sequence[Series], key: str, target: float) -> None:
    """Show where the methods differ: the start, the same for all of them, is left out."""
    curves = [curve(history, key, "epochs") for one in runs for history in one.histories]
    curves = [found for found in curves if len(found[0])]
    if not curves:
        return
    best = np.array(
        [values.min() if is_lower_better(key) else values.max() for _, values in curves]
    )
    if is_lower_better(key):
        axes.set_yscale("log")
        # A run that diverged may leave at the top; it must not flatten all the others.
        first = [float(values[0]) for _, values in curves]
        shown = [value for value in (*best, *first, target) if value > 0.0]
        if shown:
            margin = (max(shown) / min(shown)) ** 0.07
            axes.set_ylim(min(shown) / margin, max(shown) * margin)
        _plain_log_ticks(axes.yaxis)
        return
    early = [float(np.interp(xs[-1] * 0.3, xs, values)) for xs, values in curves]
    lowest = min(*early, *(float(values[-1]) - 0.03 for _, values in curves), target - 0.03)
    bottom = 0.0 if lowest < 0.15 else math.floor(lowest * 20) / 20
    highest = max(float(best.max()), target)
    axes.set_ylim(bottom, min(1.0 + 0.02 * (1 - bottom), highest + 0.08 * (highest - bottom)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")


def _mark_target(axes: Axes, target: float, key: str) -> None:
    shown = f"{target:.4g}" if is_lower_better(key) else show_score(target, key)
    axes.annotate(
        f"target\n{shown}", (1.0, target), xycoords=("axes fraction", "data"), xytext=(5, 0),
        textcoords="offset points", va="center", fontsize=8.5, color=_FAINT, annotation_clip=False,
    )  # fmt: skip


def _plain_log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 in place of powers of ten: most of our ranges span few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_arrivals(
    axes: Axes, ranking: Sequence[Arrival], runs: Mapping[str, Series], looks: Mapping[str, Look]
) -> None:
    thickness, size = _bar_sizes(len(ranking))
    spans = [one.interval for one in ranking]
    fastest = next((span.mean for span in spans if span is not None), 0.0)
    right = 0.0
    for place, (one, span) in enumerate(zip(ranking, spans, strict=True)):
        colour = looks[one.label]["color"]
        if span is None:
            reach = max(final(history, "virtual_seconds") for history in runs[one.label].histories)
            axes.barh(place, reach, thickness, facecolor="white", edgecolor=colour, hatch="////")
            some = f"{one.reached} of {len(one.seconds)} seeds reach it"
            text = some if one.reached else f"not reached in {show_number(reach)} s"
        else:
            reach = max(span.high, span.mean)
            axes.barh(place, span.mean, thickness, color=colour)
            if span.high > span.low:
                whisker = [[span.mean - max(0.0, span.low)], [span.high - span.mean]]
                axes.errorbar(span.mean, place, xerr=whisker, color=_INK, capsize=3, linewidth=1.2)
            times = f"   {span.mean / fastest:.1f}×" if span.mean > fastest > 0 else ""
            text = f"{show_number(span.mean)} s{times}"
        axes.annotate(
            text, (reach, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=size, color=_INK,
        )  # fmt: skip
        right = max(right, reach)
    # A method's options go on a line of their own where the name would squeeze the panels.
    names = [one.label.replace(":", ":\n", len(one.label) > 18) for one in ranking]
    axes.set_yticks(range(len(ranking)), names, fontsize=size)
    axes.set_ylim(max(len(ranking), 4) - 0.4, -0.6)
    # Room for the longest text to the right of the longest bar.
    axes.set_xlim(0, (right or 1.0) * 1.48)
    axes.set_xlabel("virtual seconds, fastest first", color=_FAINT, fontsize=9)


def _bar_sizes(count: int) -> tuple[float, float]:
    """Thickness of a bar and size of its text: many methods stand closer."""
    return (0.62, 9.0) if count <= 9 else (0.78, max(5.0, 90.0 / count))


def _draw_shares(axes: Axes, runs: Sequence[Series]) -> None:
    _style(axes, "left", "Where the workers' time went")
    thickness, size = _bar_sizes(len(runs))
    left = np.zeros(len(runs))
    shares = np.array([time_shares(one.histories) for one in runs])
    for (name, colour, ink), widths in zip(_SHARES, shares.T, strict=True):
        axes.barh(
            range(len(runs)), widths, thickness, left=left, color=colour,
            edgecolor="white", linewidth=0.8, label=name,
        )  # fmt: skip
        for place, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 0.08:
                axes.text(
                    start + width / 2, place, f"{100 * width:.0f} %",
                    ha="center", va="center", fontsize=size, color=ink,
                )  # fmt: skip
        left = left + widths
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("share of the run, mean over workers", color=_FAINT, fontsize=9)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=3, frameon=False, fontsize=9,
        handlelength=1.0, handleheight=1.0, handletextpad=0.5, columnspacing=0.9, labelcolor=_INK,
    )  # fmt: skip


def _draw_table_row(
    axes: Axes, row: str, columns: Sequence[str], published: Cells, ours: Cells
) -> None:
    _style(axes, "bottom", row)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8)
    for shift, cells, name, colour in (
        (-0.2, published, "published", "#b8b8b8"),
        (0.2, ours, "ours", _COLOURS[0]),
    ):
        places = [at for at, column in enumerate(columns) if (row, column) in cells]
        heights = [cells[row, columns[at]] for at in places]
        bars = axes.bar([at + shift for at in places], heights, 0.38, color=colour, label=name)
        axes.bar_label(bars, [show_number(height) for height in heights], padding=2, fontsize=8)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlim(-0.6, len(columns) - 0.4)


def _agreement(published: Cells, ours: Cells) -> str:
    ratios = [ours[cell] / published[cell] for cell in published if cell in ours]
    if not ratios:
        return "no cell is both published and ours"
    return (
        f"ours over published: {min(ratios):.2f} to {max(ratios):.2f} "
        f"in the {len(ratios)} cells that both have"
    )
