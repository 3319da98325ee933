"""The folders of the laboratory and of reproduced tables as parts of a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gossamer.quantities import counted
from gossamer.report.looks import places
from gossamer.report.page.data import (
    FIGURES,
    SCORES,
    Curves,
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

_TITLES = {
    "delay": "What a delay costs",
    "staleness": "How stale gradients are",
    "stragglers": "Waiting or stale: parameter servers with stragglers",
    "table": "A published table, ours beside theirs",
}
_LARGEST_PICTURE = 1_500_000
_VERBS = {"holds": "hold", "does not hold": "do not hold", "open": "stay open"}
_PNG = b"\x89PNG"
_TEXTS = frozenset({
    "optimiser", "state", "method", "scene", "statement", "verdict", "unit", "row", "column",
    "evidence",
})  # fmt: skip
_RATES = ("learning_rate", "largest_rate", "predicted_edge")


@dataclass
class LabParts:
    """What such a folder adds to a page."""

    title: str
    verdict: str = ""
    methods: list[MethodData] = field(default_factory=list[MethodData])
    tables: list[TableData] = field(default_factory=list[TableData])
    heat_maps: list[HeatMap] = field(default_factory=list[HeatMap])
    pictures: list[PictureData] = field(default_factory=list[PictureData])

    def add_table(self, title: str, columns: Mapping[str, str], rows: Sequence[Row]) -> None:
        """A table from rows of JSON; `columns` maps each heading to its key in a row."""
        cells = [[_cell(row, key) for key in columns.values()] for row in rows]
        self.tables.append(TableData(title=title, columns=list(columns), rows=cells))


def _cell(row: Row, key: str) -> str | float | None:
    if key in _TEXTS:
        return text(row.get(key))
    known = number(row.get(key))
    # Half a decade is shown as 3.16, not as 3.1622776601683795.
    return float(f"{known:.3g}") if known is not None and key in _RATES else known


def lab_parts(folder: Folder) -> LabParts:
    """The parts of a page that the folder's summary has so far."""
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


# ---------------------------------------------------------------------- delayed gradients


def _delay(parts: LabParts, summary: Row) -> None:
    key = text(summary.get("measure")) or "accuracy"
    best, points = objects(summary.get("best")), objects(summary.get("points"))
    parts.add_table(
        f"Best {key} at each delay",
        {
            "optimiser": "optimiser", "delay": "delay", key: key, "learning rate": "learning_rate",
            "batch": "batch", "largest good rate": "largest_rate",
            "predicted edge": "predicted_edge",
        },
        best,
    )  # fmt: skip
    seeds = summary.get("seeds")
    # The interval of one seed is the seed's own score, so it is left out.
    has_interval = not isinstance(seeds, list) or len(list[object](seeds)) != 1
    columns = {
        "optimiser": "optimiser", "delay": "delay", "batch": "batch",
        "learning rate": "learning_rate", key: key,
        **({"low": "low", "high": "high"} if has_interval else {}), "state": "state",
    }  # fmt: skip
    rows = [{**one, **_interval(one), "state": _state(one, key)} for one in points]
    parts.add_table(f"Every place of the grid: {key} at the end", columns, rows)
    parts.heat_maps = _heat_maps(points, best, key)
    parts.verdict = _delay_verdict(best, key)


def _interval(one: Row) -> Row:
    bounds = one.get("interval")
    ends = list[object](bounds) if isinstance(bounds, list) else []
    return dict(zip(("low", "high"), ends if len(ends) == 2 else (None, None), strict=True))


def _state(one: Row, key: str) -> str:
    failed, learnt = (
        ("chance level or diverged", "above chance") if key == "accuracy"
        else ("no better than untrained", "better than untrained")
    )  # fmt: skip
    state = failed if one.get("failed") is True else learnt
    return state if one.get("finished") is True else f"{state}, unfinished"


def _by_optimiser(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for one in rows:
        found.setdefault(text(one.get("optimiser")), []).append(one)
    return found


def _heat_maps(points: list[Row], best: list[Row], key: str) -> list[HeatMap]:
    """One for each optimiser, with a panel for each delay."""
    edges = {
        (text(one.get("optimiser")), number(one.get("delay"))): number(one.get("predicted_edge"))
        for one in best
    }
    made: list[HeatMap] = []
    for optimiser, own in _by_optimiser(points).items():
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
    for optimiser, own in _by_optimiser(best).items():
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
    """A method of which only the staleness is known."""
    nothing: Curves = dict.fromkeys(SCORES)
    figures: Figures = dict.fromkeys(FIGURES)
    figures |= {"mean_staleness": mean, "max_staleness": max(float(updates) for updates in tally)}
    return MethodData(
        label=label, learning_rate=None, seeds=1, output="", status="finished",
        curves={"time": nothing, "epochs": nothing}, arrival=None, look=places([label])[label],
        shares=None, goodput=None, workers=[], strip=None, lineage=None, staleness=tally, cards=[],
        topology=None,
        figures=figures,
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
        means = [
            {"method": row.get("method"), "rate": row.get("learning_rate")}
            | {name: members(row.get(name)).get("mean") for name in columns.values()}
            for row in rows
        ]
        whose = {"method": "method", "learning rate": "rate"}
        parts.add_table(f"Stragglers: {scene}", whose | columns, means)
    claims = objects(summary.get("claims"))
    if not claims:
        return
    parts.add_table(
        "What is said of them, and what we measured",
        {
            "stragglers": "scene", "said": "statement", "verdict": "verdict", "measured": "mean",
            "low": "low", "high": "high", "unit": "unit",
        },
        [{**one, **members(one.get("measured"))} for one in claims],
    )  # fmt: skip
    verdicts = [text(one.get("verdict")) for one in claims]
    tally = [f"{verdicts.count(one)} {_VERBS.get(one, one)}" for one in dict.fromkeys(verdicts)]
    parts.verdict = f"Of {len(claims)} statements about these servers: {', '.join(tally)}."


# ---------------------------------------------------------------------- published tables


def _published(parts: LabParts, folder: Folder) -> None:
    name = text(folder.config.get("table")) or text(folder.summary.get("table"))
    parts.title = f"A published table, ours beside theirs: {name}"
    cells = objects(folder.summary.get("cells"))
    deviations = [number(cell.get("deviation")) for cell in cells]
    columns = {
        "row": "row", "column": "column", "published": "published", "ours": "ours",
        "deviation in %": "percent", "evidence": "evidence",
    }  # fmt: skip
    percent = [None if one is None else round(100 * one, 1) for one in deviations]
    rows = [{**cell, "percent": own} for cell, own in zip(cells, percent, strict=True)]
    parts.add_table(name, columns, rows)
    ratios = [1 + one for one in deviations if one is not None]
    if ratios:
        parts.verdict = (
            f"Ours over published is {min(ratios):.2f} to {max(ratios):.2f} in the {len(ratios)} "
            "cells that both have."
        )
    elif cells:
        parts.verdict = (
            f"{counted(len(cells), 'cell')} of ours; the paper gives no number for any of them."
        )
