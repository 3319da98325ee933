"""The panels of a picture of runs: scores, times to the target, and the use of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossamer.quantities import counted
from gossamer.report.page.data import ExpenseData, Shares, WorkerTime
from gossamer.report.pictures import figure as figures
from gossamer.runs.arrival import History, Vector, is_lower_better
from gossamer.runs.ranking import RankedMethod
from gossamer.runs.statistics import curve, final, seed_curves, show_number, show_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VIRTUAL = "virtual seconds"
"""The unit of time unless a clock has measured it."""
_SHARES = (
    ("computing", figures.COMPUTING, "white"),
    ("waiting", figures.WAITING, figures.INK),
    ("other", figures.OTHER, figures.INK),
)
# Beyond this ratio of run times a linear axis leaves the fast methods no room.
_LOG_TIME_RATIO = 12.0
_LETTER, _LINE = 5.6, 11.0
"""The width and the height of a letter beside a marker, in points."""
_MOST_NUMBERED = 40
"""Each of so many workers has its number below its bar; of more workers only some have."""


@dataclass(frozen=True)
class Series:
    """The runs of one method in a comparison, at the learning rate chosen for it."""

    label: str
    histories: Sequence[History]
    """One history for each seed."""
    workers: int
    rate: float
    """The learning rate; 0 if it is not known."""
    shares: Shares | None
    """How the workers spent their time; None if it was not recorded."""


# ---------------------------------------------------------------------- scores


def draw_curves(
    axes: Axes,
    runs: Sequence[Series],
    looks: Mapping[str, figures.Look],
    key: str,
    along: str,
    time: str = VIRTUAL,
) -> None:
    """The scores of all methods over epochs or time."""
    scale = "log scale, lower is better" if key == "loss" else "lower is better"
    score = f"Test {key} ({scale})" if is_lower_better(key) else f"Test {key}"
    passing = "virtual time" if time == VIRTUAL else "time"
    over = "epochs" if along == "epochs" else passing
    figures.style(axes, "bottom", f"{score} over {over}", grid="both")
    faint = min(0.13, 0.8 / len(runs))
    for index, one in enumerate(runs):
        marks = (index, len(runs), 6)
        draw_curve(axes, one.histories, key, along, looks[one.label], marks=marks, alpha=faint)
    words = "epochs" if along == "epochs" else time
    ends = [final(history, along) for one in runs for history in one.histories]
    if along != "epochs" and min(ends) > 0 and max(ends) > _LOG_TIME_RATIO * min(ends):
        axes.set_xscale("log")
        figures.plain_log_ticks(axes.xaxis)
        words += " (log scale)"
    elif max(ends) > 0:
        axes.set_xlim(0, max(ends) * 1.02)
    figures.name_axis(axes.xaxis, words)


def draw_curve(
    axes: Axes,
    histories: Sequence[History],
    key: str,
    along: str,
    look: figures.Look,
    *,
    marks: tuple[int, int, int],
    alpha: float,
    label: str | None = None,
) -> tuple[Vector, Vector]:
    """Draw the mean over seeds, and a band from the least to the largest; returns the line.

    `marks` are the index of the line, the number of lines, and the number of markers on a line.
    """
    places, seeds = seed_curves(histories, key, along)
    if not len(places):
        return places, places
    index, lines, count = marks
    marked = figures.marked_points(len(places), index, lines, marks=count)
    mean = seeds.mean(0)
    axes.plot(places, mean, markevery=marked, zorder=3, label=label, **look)
    if len(seeds) > 1:
        low, high = seeds.min(0), seeds.max(0)
        axes.fill_between(places, low, high, color=look["color"], alpha=alpha, linewidth=0)
    return places, mean


def limit_scores(axes: Axes, runs: Sequence[Series], key: str, target: float | None) -> None:
    """Limit the axis to the range in which methods differ; they all start at the same score."""
    curves = [curve(history, key, "epochs") for one in runs for history in one.histories]
    curves = [found for found in curves if len(found[0])]
    goal = [] if target is None else [target]
    if not curves:
        return
    best = np.array(
        [values.min() if is_lower_better(key) else values.max() for _, values in curves]
    )
    if key not in ("accuracy", "loss"):
        return
    if is_lower_better(key):
        axes.set_yscale("log")
        # The curve of a diverged run may leave the panel; it must not flatten the others.
        first = [float(values[0]) for _, values in curves]
        shown = [value for value in (*best, *first, *goal) if value > 0.0]
        if shown:
            margin = max((max(shown) / min(shown)) ** 0.07, 1.01)
            axes.set_ylim(min(shown) / margin, max(shown) * margin)
        figures.plain_log_ticks(axes.yaxis)
        return
    early = [float(np.interp(xs[-1] * 0.3, xs, values)) for xs, values in curves]
    late = [float(values[-1]) - 0.03 for _, values in curves]
    lowest = min(*early, *late, *(value - 0.03 for value in goal))
    bottom = 0.0 if lowest < 0.15 else math.floor(lowest * 20) / 20
    highest = max(float(best.max()), *goal, bottom + 0.05)
    axes.set_ylim(bottom, min(1.0 + 0.02 * (1 - bottom), highest + 0.08 * (highest - bottom)))
    figures.percent_ticks(axes.yaxis)


def draw_target(axes: Axes, target: float) -> None:
    axes.axhline(target, **figures.DOTTED)


def name_target(axes: Axes, target: float, key: str) -> None:
    """Write the target beside the end of its line."""
    shown = f"{target:.4g}" if is_lower_better(key) else show_score(target, key)
    axes.annotate(
        f"target\n{shown}", (1.0, target), xycoords=("axes fraction", "data"), xytext=(5, 0),
        textcoords="offset points", va="center", fontsize=8.5, color=figures.FAINT,
        annotation_clip=False,
    )  # fmt: skip


# ---------------------------------------------------------------------- times


def draw_arrivals(
    axes: Axes,
    ranking: Sequence[RankedMethod],
    runs: Mapping[str, Series],
    looks: Mapping[str, figures.Look],
    time: str = VIRTUAL,
) -> None:
    """A bar for each method, the fastest first; hatched if the method misses the target."""
    thickness, size = _bar_sizes(len(ranking))
    right = 0.0
    for place, one in enumerate(ranking):
        span, reached = one.span, one.arrival.reached
        known = [seconds for seconds in one.arrival.seconds if seconds is not None]
        colour = looks[one.label]["color"]
        if span is None:
            reach = max(final(history, "virtual_seconds") for history in runs[one.label].histories)
            axes.barh(place, reach, thickness, facecolor="white", edgecolor=colour, hatch="////")
            some = f"{reached} of {counted(len(one.arrival.seconds), 'seed')} reach it"
            text = some if reached else f"not reached in {show_number(reach)} s"
        else:
            reach = max(known)
            axes.barh(place, span.mean, thickness, color=colour)
            times = f"   {one.times:.1f}×" if one.times and place else ""
            text = f"{show_number(span.mean)} s{times}"
        figures.draw_seeds(axes, known, place)
        figures.write_beside(axes, text, reach, place, gap=6, size=size)
        right = max(right, reach)
    # The options of a method with a long name go on a line of their own.
    names = [one.label.replace(":", ":\n", len(one.label) > 18) for one in ranking]
    axes.set_yticks(range(len(ranking)), names, fontsize=size)
    axes.set_ylim(max(len(ranking), 2) - 0.4, -0.6)
    # Room for the longest text to the right of the longest bar.
    axes.set_xlim(0, (right or 1.0) * 1.48)
    figures.name_axis(axes.xaxis, f"{time}, fastest first")


def draw_shares(axes: Axes, runs: Sequence[Series]) -> None:
    """Computing, waiting and the rest for each method, mean over workers and seeds."""
    figures.style(axes, "left", "Where the workers' time went")
    thickness, size = _bar_sizes(len(runs))
    left = np.zeros(len(runs))
    shares = np.array([[0.0] * 3 if one.shares is None else [*one.shares.values()] for one in runs])
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
    figures.percent_ticks(axes.xaxis)
    figures.name_axis(axes.xaxis, "share of the run, mean over workers")
    _name_shares(axes)


def draw_workers(axes: Axes, workers: Sequence[WorkerTime], heading: str, time: str) -> None:
    """Computing, waiting and the rest for each worker of one run, in seconds."""
    figures.style(axes, "bottom", heading, grid="y")
    places = range(len(workers))
    below = np.zeros(len(workers))
    spent = [
        (one["computing"], math.fsum(one["waiting"].values()), one["other"]) for one in workers
    ]
    for (name, colour, _), heights in zip(_SHARES, np.array(spent).T, strict=True):
        axes.bar(
            places, heights, 0.8, bottom=below, color=colour,
            edgecolor="white", linewidth=0.8 if len(workers) <= 64 else 0.0, label=name,
        )  # fmt: skip
        below = below + heights
    every = math.ceil(len(workers) / _MOST_NUMBERED)
    axes.set_xticks(places[::every], [str(place) for place in places[::every]])
    axes.set_ylim(0, (float(below.max()) or 1.0) * 1.03)
    # The bars of a few workers stay narrow.
    missing = max(0.0, 8.0 - len(workers)) / 2
    axes.set_xlim(-0.6 - missing, len(workers) - 0.4 + missing)
    figures.name_axis(axes.xaxis, "worker")
    figures.name_axis(axes.yaxis, time)
    _name_shares(axes)


def _bar_sizes(count: int) -> tuple[float, float]:
    """The thickness of a bar and the size of its text; both shrink with many methods."""
    return (0.62, 9.0) if count <= 9 else (0.78, max(5.0, 90.0 / count))


def _name_shares(axes: Axes) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=3, frameon=False, fontsize=9,
        handlelength=1.0, handleheight=1.0, handletextpad=0.5, columnspacing=0.9,
        labelcolor=figures.INK,
    )  # fmt: skip


# ---------------------------------------------------------------------- time and money


def has_point(one: ExpenseData) -> bool:
    """Whether it is known how long a method takes to the target and what it costs until then."""
    return one["seconds"] is not None and one["to_target"].get("dollars") is not None


def draw_front(
    axes: Axes, expenses: Sequence[ExpenseData], looks: Mapping[str, figures.Look], time: str
) -> None:
    """Time to the target against its cost, a marker for each method, and the line of those that no
    other beats in both."""
    figures.style(
        axes, "bottom", "Cost against time to the target (line: beaten by none in both)",
        grid="both",
    )  # fmt: skip
    points = {
        one["method"]: (one["seconds"] or 0.0, one["to_target"]["dollars"] or 0.0)
        for one in expenses
    }
    front = sorted(points[one["method"]] for one in expenses if one["on_front"])
    if front:
        seconds, dollars = zip(*front, strict=True)
        # Between two methods of the front nothing is known, so the line is a staircase.
        line: figures.Look = {**figures.DOTTED, "linewidth": 1.6}
        axes.step(seconds, dollars, where="post", **line)
    for label, (second, dollar) in points.items():
        mark: figures.Look = {**looks[label], "linestyle": "none", "markersize": 9.0}
        axes.plot(second, dollar, **mark)
    words = (f"{time} to the target", "dollars until then")
    for axis, name, along in zip((axes.xaxis, axes.yaxis), words, (0, 1), strict=True):
        values = [point[along] for point in points.values()]
        if min(values) > 0 and max(values) > _LOG_TIME_RATIO * min(values):
            (axes.set_yscale if along else axes.set_xscale)("log")
            figures.plain_log_ticks(axis)
            name += " (log scale)"
        else:
            limit = axes.set_ylim if along else axes.set_xlim
            limit(0, 1.12 * max(values) or 1.0)
        figures.name_axis(axis, name)
    _name_points(axes, points)


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the names beside their markers, inwards; one that would cover another, or a marker,
    goes higher."""
    point_per_dot = 72.0 / axes.figure.dpi
    right = axes.bbox.x0 + 0.6 * axes.bbox.width
    dots = axes.transData.transform(list(points.values())) * point_per_dot
    taken = [(at - 6.0, at + 6.0, up - 4.5) for at, up in dots]
    for label, point in sorted(points.items(), key=lambda one: one[1][1]):
        at, up = axes.transData.transform(point)
        is_left = at > right
        width = _LETTER * len(label)
        begin = at * point_per_dot + (-8.0 - width if is_left else 8.0)
        height = up * point_per_dot + 5.0
        while any(
            abs(height - other) < _LINE and begin < last and first < begin + width
            for first, last, other in taken
        ):
            height += 1.0
        taken.append((begin, begin + width, height))
        axes.annotate(
            label, point, xytext=(-8.0 if is_left else 8.0, height - up * point_per_dot),
            textcoords="offset points", ha="right" if is_left else "left", fontsize=9,
            color=figures.INK,
        )  # fmt: skip
