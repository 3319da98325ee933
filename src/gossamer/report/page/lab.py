"""The laboratory's folders and reproduced tables, as parts of a page: tables and a sentence."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from gossamer.quantities import counted
from gossamer.report.looks import places
from gossamer.report.page.data import (
    Curves,
    CurveViews,
    Figures,
    HeatMap,
    HeatPanel,
    MethodData,
    PictureData,
    TableData,
)
from gossamer.runs.json_files import count, members, number, objects, read_file, text
from gossamer.runs.kept_runs import Folder
from gossamer.runs.result import Row
from gossamer.runs.statistics import show_number, show_score

Cell = str | float | None

_TITLES = {
    "delay": "What a delay costs",
    "staleness": "How stale gradients are",
    "stragglers": "Waiting or stale: parameter servers with stragglers",
    "table": "A published table, ours beside theirs",
}
_LARGEST_PICTURE = 1_500_000
_VERBS = {"holds": "hold", "does not hold": "do not hold", "open": "stay open"}
_PNG = b"\x89PNG"


@dataclass
class LabParts:
    """What such a folder adds to a page."""

    title: str
    verdict: str = ""
    methods: list[MethodData] = field(default_factory=list[MethodData])
    tables: list[TableData] = field(default_factory=list[TableData])
    heat_maps: list[HeatMap] = field(default_factory=list[HeatMap])
    pictures: list[PictureData] = field(default_factory=list[PictureData])


def lab_parts(folder: Folder) -> LabParts:
    """From what the folder's summary says so far."""
    parts = LabParts(_TITLES[folder.kind])
    match folder.kind:
        case "delay":
            _delay(parts, folder.summary)
        case "staleness":
            _staleness(parts, folder.summary)
        case "stragglers":
            _stragglers(parts, folder.summary)
        case _:
            _published(parts, folder)
    if not parts.verdict:
        parts.verdict = "There is no result yet."
    if not parts.heat_maps:
        _embed(parts, folder)
    return parts


def _embed(parts: LabParts, folder: Folder) -> None:
    for path in folder.pictures:
        raw = read_file(path, path.name, folder.missing)
        if raw is None:
            continue
        if not raw.startswith(_PNG) or len(raw) > _LARGEST_PICTURE:
            why = "too large for a page" if raw.startswith(_PNG) else "damaged"
            folder.missing.append(f"{path.name} was left out: it is {why}.")
            continue
        shown = base64.b64encode(raw).decode("ascii")
        parts.pictures.append(PictureData(title=parts.title, alt=parts.verdict, png=shown))


# ---------------------------------------------------------------------- late gradients


def _delay(parts: LabParts, summary: Row) -> None:
    key = text(summary.get("measure")) or "accuracy"
    best = objects(summary.get("best"))
    parts.tables.append(
        TableData(
            title=f"Best {key} at each delay",
            columns=[
                "optimiser",
                "delay",
                key,
                "learning rate",
                "batch",
                "largest good rate",
                "predicted edge",
            ],
            rows=[
                [
                    text(one.get("optimiser")),
                    number(one.get("delay")),
                    number(one.get(key)),
                    _rate(one.get("learning_rate")),
                    number(one.get("batch")),
                    _rate(one.get("largest_rate")),
                    _rate(one.get("predicted_edge")),
                ]
                for one in best
            ],
        )
    )
    points = objects(summary.get("points"))
    # The interval of one seed is that seed.
    has_interval = _length(summary.get("seeds")) != 1
    around = ["low", "high"] * has_interval
    parts.tables.append(
        TableData(
            title=f"Every place of the grid: {key} at the end",
            columns=["optimiser", "delay", "batch", "learning rate", key, *around, "state"],
            rows=[_place(one, key, has_interval=has_interval) for one in points],
        )
    )
    parts.heat_maps = _heat_maps(points, best, key)
    parts.verdict = _delay_verdict(best, key)


def _length(raw: object) -> int:
    return len(list[object](raw)) if isinstance(raw, list) else 0


def _rate(raw: object) -> float | None:
    """Half a decade is 3.16, not 3.1622776601683795."""
    rate = number(raw)
    return None if rate is None else float(f"{rate:.3g}")


def _place(one: Row, key: str, *, has_interval: bool) -> list[Cell]:
    bounds = one.get("interval")
    low, high = (
        bounds if isinstance(bounds, list) and len(list[object](bounds)) == 2 else (None,) * 2
    )
    failed, learnt = (
        ("chance level or diverged", "above chance") if key == "accuracy"
        else ("no better than untrained", "better than untrained")
    )  # fmt: skip
    state = failed if one.get("failed") is True else learnt
    return [
        text(one.get("optimiser")), number(one.get("delay")), number(one.get("batch")),
        _rate(one.get("learning_rate")), number(one.get(key)),
        *([number(low), number(high)] if has_interval else []),
        state if one.get("finished") is True else f"{state}, unfinished",
    ]  # fmt: skip


def _heat_maps(points: list[Row], best: list[Row], key: str) -> list[HeatMap]:
    """One for each optimiser, with a panel for each delay."""
    edges = {
        (text(one.get("optimiser")), number(one.get("delay"))): number(one.get("predicted_edge"))
        for one in best
    }
    made: list[HeatMap] = []
    for optimiser in dict.fromkeys(text(one.get("optimiser")) for one in points):
        own = [one for one in points if text(one.get("optimiser")) == optimiser]
        rates, batches, delays = (
            sorted({value for one in own if (value := number(one.get(name))) is not None})
            for name in ("learning_rate", "batch", "delay")
        )
        panels = [
            HeatPanel(
                delay=delay,
                edge=edges.get((optimiser, delay)),
                cells=[
                    [rates.index(rate), batches.index(batch), number(one.get(key)),
                     one.get("failed") is True, one.get("finished") is True]
                    for one in own
                    if number(one.get("delay")) == delay
                    and (rate := number(one.get("learning_rate"))) is not None
                    and (batch := number(one.get("batch"))) is not None
                ],
            )
            for delay in delays
        ]  # fmt: skip
        if panels and rates and batches:
            made.append(
                HeatMap(optimiser=optimiser, key=key, rates=rates, batches=batches, panels=panels)
            )
    return made


def _delay_verdict(best: list[Row], key: str) -> str:
    sentences: list[str] = []
    for optimiser in dict.fromkeys(text(one.get("optimiser")) for one in best):
        own = [one for one in best if text(one.get("optimiser")) == optimiser]
        ends = [(number(one.get("delay")), number(one.get(key))) for one in (own[0], own[-1])]
        shown = [
            f"{show_score(score, key)} at delay {delay:g}"
            for delay, score in dict.fromkeys(ends)
            if delay is not None and score is not None
        ]
        sentences.append(f"{optimiser} comes to {' and '.join(shown) or 'nothing'}")
    return f"At its best rate and batch, {'; '.join(sentences)}." if sentences else ""


# ---------------------------------------------------------------------- staleness


def _staleness(parts: LabParts, summary: Row) -> None:
    counted = members(summary.get("monte_carlo"))
    found = {
        "Monte-Carlo": (counted.get("histogram", counted), counted.get("mean")),
        "simulated downpour": (summary.get("staleness_histogram"), summary.get("mean_staleness")),
    }
    said: list[str] = []
    for label, (histogram, mean) in found.items():
        tally = {
            updates: number_of for updates, raw in members(histogram).items()
            if str(updates).isdecimal() and (number_of := count(raw)) is not None
        }  # fmt: skip
        average = number(mean)
        if not tally:
            continue
        parts.methods.append(_histogram(label, tally, average))
        if average is not None:
            said.append(f"{show_number(average)} ({label})")
    workers, expected = count(summary.get("workers")), number(summary.get("expected_mean"))
    if said:
        theory = "" if expected is None else f"; theory expects workers − 1 = {expected:g}"
        parts.verdict = (
            f"A gradient of {workers or 'all'} asynchronous workers is on average so many updates "
            f"old when it is applied: {', '.join(said)}{theory}."
        )


def _histogram(label: str, tally: dict[str, int], mean: float | None) -> MethodData:
    """A method of which nothing but staleness is known."""
    nothing = Curves(
        metric=None, accuracy=None, loss=None, training_loss=None, consensus_distance=None
    )
    return MethodData(
        label=label, learning_rate=None, seeds=1, output="", status="finished",
        curves=CurveViews(time=nothing, epochs=nothing), arrival=None, look=places([label])[label],
        shares=None, workers=[], strip=None, staleness=tally, cards=[], topology=None,
        figures=Figures(
            metric=None, accuracy=None, loss=None, seconds=None, waiting_fraction=None,
            mean_staleness=mean,
            max_staleness=max(float(updates) for updates in tally), mean_global_staleness=None,
            bytes_per_step=None,
            consensus_distance=None, exchanges_per_step=None, steps=None, wall_seconds=None,
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------- stragglers


def _stragglers(parts: LabParts, summary: Row) -> None:
    for scene, entries in members(summary.get("scenes")).items():
        rows = objects(entries)
        key = "accuracy" if any("accuracy" in row for row in rows) else "loss"
        columns = {
            "used gradients per second": "throughput",
            "in the second half": "late_throughput",
            "waiting, share of time": "waiting",
            "mean staleness": "mean_staleness",
            "greatest staleness": "max_staleness",
            "dropped, share": "dropped",
            f"mean {key}": f"mean_{key}",
            f"{key} at the end": key,
        }
        parts.tables.append(
            TableData(
                title=f"Stragglers: {scene}",
                columns=["method", "learning rate", *columns],
                rows=[
                    [text(row.get("method")), number(row.get("learning_rate")),
                     *(number(members(row.get(name)).get("mean")) for name in columns.values())]
                    for row in rows
                ],
            )
        )  # fmt: skip
    claims = objects(summary.get("claims"))
    if not claims:
        return
    parts.tables.append(
        TableData(
            title="What is said of them, and what we measured",
            columns=["stragglers", "said", "verdict", "measured", "low", "high", "unit"],
            rows=[_claim(one) for one in claims],
        )
    )  # fmt: skip
    verdicts = [text(one.get("verdict")) for one in claims]
    tally = [f"{verdicts.count(one)} {_VERBS.get(one, one)}" for one in dict.fromkeys(verdicts)]
    parts.verdict = f"Of {len(claims)} statements about these servers: {', '.join(tally)}."


def _claim(one: Row) -> list[Cell]:
    measured = members(one.get("measured"))
    return [
        text(one.get("scene")), text(one.get("statement")), text(one.get("verdict")),
        *(number(measured.get(end)) for end in ("mean", "low", "high")), text(one.get("unit")),
    ]  # fmt: skip


# ---------------------------------------------------------------------- published tables


def _published(parts: LabParts, folder: Folder) -> None:
    name = text(folder.config.get("table")) or text(folder.summary.get("table"))
    parts.title = f"A published table, ours beside theirs: {name}"
    cells = objects(folder.summary.get("cells"))
    parts.tables.append(
        TableData(
            title=name,
            columns=["row", "column", "published", "ours", "deviation in %", "evidence"],
            rows=[_published_cell(cell) for cell in cells],
        )
    )
    both = [cell for cell in cells if number(cell.get("deviation")) is not None]
    if both:
        ratios = [1 + (number(cell.get("deviation")) or 0.0) for cell in both]
        parts.verdict = (
            f"Ours over published is {min(ratios):.2f} to {max(ratios):.2f} in the {len(both)} "
            "cells that both have."
        )
    elif cells:
        parts.verdict = (
            f"{counted(len(cells), 'cell')} of ours; the paper gives no number for any of them."
        )


def _published_cell(cell: Row) -> list[Cell]:
    deviation = number(cell.get("deviation"))
    return [
        text(cell.get("row")), text(cell.get("column")), number(cell.get("published")),
        number(cell.get("ours")), None if deviation is None else round(100 * deviation, 1),
        text(cell.get("evidence")),
    ]  # fmt: skip
