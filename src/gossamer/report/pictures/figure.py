"""The common parts of all pictures: colours, markers, titles, legends, axes and files.

Each method has a marker and a line style of its own, so that nothing depends on colour alone.
Pictures are drawn on figure objects only, and never on the user's current plot.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gossamer.errors import ConfigurationError
from gossamer.files import replacement
from gossamer.report.looks import COLOURS
from gossamer.runs.ranking import Interval

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Look = dict[str, Any]
"""How a method's line is drawn, as matplotlib's keywords."""

INK, FAINT, EDGE = "#222222", "#666666", "#D55E00"
# Greys and Okabe and Ito's yellow, which no method has.
COMPUTING, WAITING, OTHER, PUBLISHED = "#4d4d4d", "#F0E442", "#d9d9d9", "#b8b8b8"
_STYLES = ("-", (0, (6, 1.5)), (0, (3, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_GRID, _SPINE = "#e6e6e6", "#b0b0b0"
DOTTED: Look = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 1}
_DPI = 150
# Inches from the upper edge to the title, the subtitle, the legend, and panels without a legend.
_TITLE, _SUBTITLE, _LEGEND, _PANELS = 0.14, 0.46, 0.66, 0.8
_LEGEND_ROW = 0.27
# An axis over fewer decades gets more ticks in each of them.
_LOG_DIGITS = (
    (0.6, (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)),
    (1.0, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    (3.5, (1.0, 2.0, 5.0)),
    (math.inf, (1.0,)),
)


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed; run `pip install matplotlib`"
        ) from None
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white")


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the file name ends in."""
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"a picture cannot be written as {path.name!r}; end its name in .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=_DPI, facecolor="white")


# ---------------------------------------------------------------------- around the panels


def write_titles(figure: Figure, title: str, subtitle: str) -> None:
    """Title and subtitle at the top left."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    for drop, text, largest, weight, colour in (
        (_TITLE, title, 15.0, "bold", INK),
        (_SUBTITLE, subtitle, 9.5, "normal", FAINT),
    ):
        place = (0.15 / width, 1 - drop / height)
        # A long line gets smaller letters, so that it is not cut off.
        points = min(largest, 115.0 * width / max(1, len(text)))
        figure.text(*place, text, va="top", fontsize=points, fontweight=weight, color=colour)


def write_legend(figure: Figure, handles: Sequence[Artist]) -> int:
    """Write one legend for all panels below the titles; returns the number of its rows."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    longest = max(len(str(handle.get_label())) for handle in handles)
    # A letter is about a twelfth of an inch wide; line and gaps are as wide as eleven letters.
    fitting = max(1, int(12 * width) // (longest + 11))
    rows = math.ceil(len(handles) / fitting)
    figure.legend(
        handles=list(handles), ncols=math.ceil(len(handles) / rows), loc="upper left",
        bbox_to_anchor=(0.02 / width, 1 - _LEGEND / height), frameon=False, fontsize=10,
        labelcolor=INK, columnspacing=2.2, handlelength=3.4,
    )  # fmt: skip
    return rows


def lay_out(figure: Figure, *, legend_rows: int = 0) -> None:
    """Arrange the panels below the titles and the legend."""
    height = float(figure.get_figheight())
    above = _PANELS + _LEGEND_ROW * legend_rows
    area = (0.003, 0.006, 0.992, 1 - above / height)
    figure.set_layout_engine("constrained", rect=area, w_pad=0.1, h_pad=0.1, hspace=0.03)


# ---------------------------------------------------------------------- inside a panel


def look(index: int, colours: Sequence[str] = COLOURS) -> Look:
    """How the method with this index is drawn."""
    # The lengths have no common divisor, so looks repeat after 660 methods, not after twelve.
    return {
        "color": colours[index % len(colours)], "linestyle": _STYLES[index % len(_STYLES)],
        "marker": _MARKERS[index % len(_MARKERS)], "linewidth": 1.7, "markersize": 6.0,
        "markeredgecolor": "white", "markeredgewidth": 0.6,
    }  # fmt: skip


def marked_points(points: int, index: int, lines: int, *, marks: int = 6) -> list[int]:
    """The points with markers; they differ between lines, so that equal lines can be seen."""
    stride = max(1, points // marks)
    return [*range(index * stride // lines, points - 1, stride), points - 1]


def style(
    axes: Axes,
    spine_kept: str,
    heading: str = "",
    *,
    grid: Literal["x", "y", "both"] | None = None,
) -> None:
    """Give a panel its heading, one spine, no tick marks, and a faint grid if one is asked for."""
    axes.set_title(heading, loc="left", fontsize=11, color=INK, pad=7)
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == spine_kept)
        spine.set_color(_SPINE)
    axes.tick_params(which="both", length=0, pad=5, labelsize=9, labelcolor=INK)
    if grid is not None:
        axes.grid(visible=True, axis=grid, color=_GRID, linewidth=0.8)


def name_axis(axis: Axis, words: str) -> None:
    axis.set_label_text(words, color=FAINT, fontsize=9)


def plain_log_ticks(axis: Axis, unit: str = "") -> None:
    """Label a log axis with 1, 2, 5, 10 instead of powers of ten, as our ranges are short."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if 0.0 < low < high else 1.0
    digits = next(digits for most, digits in _LOG_DIGITS if decades < most)
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}" + unit))
    axis.set_minor_formatter(NullFormatter())


def percent_ticks(axis: Axis) -> None:
    """Label an axis of fractions in per cent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")


def write_beside(axes: Axes, text: str, end: float, place: float, *, gap: int, size: float) -> None:
    """Write a text to the right of the end of a horizontal bar."""
    axes.annotate(
        text, (end, place), xytext=(gap, 0), textcoords="offset points", va="center",
        fontsize=size, color=INK,
    )  # fmt: skip


def draw_seeds(axes: Axes, values: Sequence[float], place: float) -> None:
    """Draw a dot for each seed on a horizontal bar; a single seed is the end of the bar."""
    if len(values) > 1:
        # A white edge, so that the dots can be seen on dark bars.
        axes.scatter(
            values, [place] * len(values), s=17, color=INK, edgecolors="white", linewidths=0.8,
            zorder=4,
        )  # fmt: skip


def draw_whisker(axes: Axes, span: Interval, place: float) -> None:
    """Draw the interval across the end of a horizontal bar."""
    if span.high > span.low:
        # With few seeds the interval may reach below zero, which no time and no share does.
        ends = [[span.mean - max(0.0, span.low)], [span.high - span.mean]]
        # A white line below, so that the whisker can be seen on dark bars.
        for colour, width in (("white", 2.4), (INK, 1.2)):
            axes.errorbar(
                span.mean, place, xerr=ends, color=colour, linewidth=width,
                capsize=3, capthick=width, zorder=4,
            )  # fmt: skip
