"""The data of one method on the page, from its runs at the learning rate chosen for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from gossamer.config.price import SPENDINGS
from gossamer.report.page.cluster import read_cluster
from gossamer.report.page.data import (
    FIGURES,
    SCORES,
    ArrivalData,
    Card,
    Curve,
    Curves,
    ExpenseData,
    Figures,
    LineageData,
    MethodData,
    Shares,
    StripData,
    TableData,
    TopologyData,
    WorkerTime,
)
from gossamer.report.page.topology import drawn_topology
from gossamer.runs.json_files import count, members, number, numbers, objects, text
from gossamer.runs.kept_runs import Run
from gossamer.runs.ranking import RankedMethod
from gossamer.runs.result import Row
from gossamer.runs.statistics import mean_of, measure, seed_curves

_MOST_POINTS = 300
_MOST_SEGMENTS = 3000
_KINDS = frozenset({"computing", "waiting", "communicating", "paused", "other"})
_LONGEST = 10
_OUTPUTS = {"mean": "mean of workers"}


def method_data(
    label: str, runs: Sequence[Run], place: RankedMethod | None, *, look: int, is_growing: bool
) -> MethodData:
    """`runs` has one run for each seed, and at least one."""
    first = runs[0]
    output = text(ending(first).get("output"))
    shares = shares_of(runs)
    return MethodData(
        label=label,
        learning_rate=first.rate or None,
        seeds=len(runs),
        output=_OUTPUTS.get(output, output),
        status=_status(runs, is_growing=is_growing),
        curves={"time": _curves(runs, "virtual_seconds"), "epochs": _curves(runs, "epochs")},
        arrival=None if place is None else arrival_data(place),
        look=look,
        shares=shares,
        goodput=goodput_of(runs),
        workers=worker_times(first),
        strip=next((strip for strip in map(_strip, runs) if strip is not None), None),
        lineage=next((found for found in map(_lineage, runs) if found is not None), None),
        staleness=_staleness(runs),
        cards=next((cards for cards in map(_cards, runs) if cards), []),
        topology=_topology(first),
        figures=_figures(runs, shares),
    )


def ending(run: Run) -> Row:
    """The summary of a run, completed by its last evaluation where the summary has no value."""
    last = run.history[-1] if run.history else {}
    return {**last, **{key: value for key, value in run.summary.items() if value is not None}}


def end_mean(runs: Sequence[Run], key: str) -> float | None:
    """The mean over the seeds of a figure at the end; None unless every run has it."""
    return mean_of([number(ending(run).get(key)) for run in runs])


def _status(runs: Sequence[Run], *, is_growing: bool) -> str:
    states = ["running" if is_growing and run.status == "unfinished" else run.status
              for run in runs]  # fmt: skip
    worse = [state for state in states if state != "finished"]
    if not worse:
        return "finished"
    # Some of several seeds may have finished, so the others are counted.
    return worse[0] if len(worse) == len(runs) else f"{worse[0]} ({len(worse)} of {len(runs)})"


def _curves(runs: Sequence[Run], along: str) -> Curves:
    names = {"metric": _own_metric(runs)}
    return {score: _curve(runs, names.get(score, score), along) for score in SCORES}


def _own_metric(runs: Sequence[Run]) -> str:
    """What these runs are judged by, where it is a metric of the task's own."""
    key = measure([run.history for run in runs])
    return "" if key in ("accuracy", "loss") else key


def _curve(runs: Sequence[Run], key: str, along: str) -> Curve | None:
    places, seeds = seed_curves([run.history for run in runs], key, along)
    if not len(places):
        return None
    if len(places) > _MOST_POINTS:
        last = len(places) - 1
        kept = [round(at * last / (_MOST_POINTS - 1)) for at in range(_MOST_POINTS)]
        places, seeds = places[kept], seeds[:, kept]
    has_band = len(seeds) > 1
    return Curve(
        x=places.tolist(),
        mean=seeds.mean(0).tolist(),
        low=seeds.min(0).tolist() if has_band else None,
        high=seeds.max(0).tolist() if has_band else None,
    )


def arrival_data(place: RankedMethod) -> ArrivalData:
    mean, low, high = place.bounds
    return ArrivalData(
        mean=mean,
        low=low,
        high=high,
        reached=place.arrival.reached,
        seeds=len(place.arrival.seconds),
        runs=list(place.arrival.seconds),
        times=place.times,
        is_close=place.is_close,
    )


def expense_data(rows: Sequence[Row]) -> list[ExpenseData]:
    """What the methods of a ranking spend; empty where its rows tell nothing about that."""
    told = [w for w in SPENDINGS if rows and all(f"{w}_to_target" in row for row in rows)]
    return [
        ExpenseData(
            method=text(row.get("method")),
            seconds=number(row.get("seconds_to_target")),
            to_target={what: number(row.get(f"{what}_to_target")) for what in told},
            in_all={what: number(row.get(what)) for what in told},
            on_front=row.get("on_front") is True,
        )
        for row in rows
        if told
    ]


# ---------------------------------------------------------------------- where the time went


def worker_times(run: Run) -> list[WorkerTime]:
    """How each worker spent its time; empty if the run did not record it."""
    if run.books:
        return [
            _time(
                number(book.get("computing_seconds")) or 0.0,
                _causes(book.get("waiting_seconds")),
                number(book.get("seconds")) or 0.0,
            )
            for _, book in sorted(run.books.items())
        ]
    end = ending(run)
    computing, total = numbers(end.get("computing_seconds")), number(end.get("virtual_seconds"))
    if not computing or total is None:
        return []
    by_cause = [_causes(one) for one in objects(end.get("waiting_by_worker"))]
    if len(by_cause) != len(computing):
        waited = numbers(end.get("waiting_seconds")) or [0.0] * len(computing)
        causes = list(_causes(end.get("waiting_by_cause")))
        cause = causes[0] if len(causes) == 1 else "anything"
        by_cause = [{cause: seconds} if seconds else {} for seconds in waited]
    ends = numbers(end.get("ended_seconds"))
    ends = ends if len(ends) == len(computing) else [total] * len(computing)
    return [
        _time(seconds, waiting, own)
        for seconds, waiting, own in zip(computing, by_cause, ends, strict=True)
    ]


def shares_of(runs: Sequence[Run]) -> Shares | None:
    """Computing, waiting and the rest, mean over workers and seeds; None if it was not recorded.

    Each worker's seconds count up to its own end. Tables, bars and pictures all use these shares.
    """
    parts = [
        (one["computing"], math.fsum(one["waiting"].values()), one["other"], one["total"])
        for run in runs
        for one in worker_times(run)
        if one["total"] > 0
    ]
    if not parts:
        return None
    computing, waiting, other = (
        math.fsum(one[at] / one[3] for one in parts) / len(parts) for at in range(3)
    )
    return Shares(computing=computing, waiting=waiting, other=other)


def goodput_of(runs: Sequence[Run]) -> dict[str, float] | None:
    """Where the time of all workers went, mean over the seeds; None where nobody was hindered, or
    where it was not recorded."""
    found = [members(run.summary.get("time_shares")) for run in runs]
    kinds = list(found[0])
    means = {kind: mean_of([number(own.get(kind)) for own in found]) for kind in kinds}
    known = {kind: mean for kind, mean in means.items() if mean is not None}
    return known if known and len(known) == len(kinds) else None


def _time(computing: float, waiting: dict[str, float], total: float) -> WorkerTime:
    spent = computing + math.fsum(waiting.values())
    return WorkerTime(
        computing=computing, waiting=waiting, other=max(0.0, total - spent), total=total
    )


def _causes(value: object) -> dict[str, float]:
    found = {str(cause): number(seconds) for cause, seconds in members(value).items()}
    return {cause: seconds for cause, seconds in found.items() if seconds}


def _strip(run: Run) -> StripData | None:
    if run.strip is None:
        return None
    start, end = number(run.strip.get("from")), number(run.strip.get("to"))
    raw: Any = run.strip.get("segments")
    if start is None or end is None or not isinstance(raw, list):
        return None
    read = [_segment(one) for one in list[object](raw)]
    segments = sorted((one for one in read if one is not None), key=lambda one: one[1])
    if not segments:
        return None
    if len(segments) > _MOST_SEGMENTS:
        # The strip ends earlier for all workers, as a gap would look like idleness.
        end = float(segments[_MOST_SEGMENTS][1])
        segments = segments[:_MOST_SEGMENTS]
        for one in segments:
            one[2] = min(one[2], end)
    servers = count(run.strip.get("servers")) or 0
    workers = count(run.strip.get("workers")) or 0
    return {"from": start, "to": end, "segments": segments, "workers": workers, "servers": servers}


def _segment(value: object) -> list[Any] | None:
    if not isinstance(value, list) or len(parts := list[object](value)) < 4:
        return None
    worker, start, end, kind = count(parts[0]), number(parts[1]), number(parts[2]), parts[3]
    if worker is None or start is None or end is None or end < start or kind not in _KINDS:
        return None
    detail = text(parts[4]) if len(parts) > 4 else ""
    return [worker, start, end, kind, detail]


def _lineage(run: Run) -> LineageData | None:
    """The lives of a population's members, each with the first ancestor that it descends from."""
    entries = objects(run.summary.get("lineage"))
    if not entries:
        return None
    last = max(float(number(one.get("seconds")) or 0.0) for one in entries)
    end = max(last, float(number(ending(run).get("virtual_seconds")) or 0.0))
    roots: dict[tuple[Any, Any], int] = {}
    current: dict[int, list[Any]] = {}
    data = LineageData(lives=[], copies=[], workers=0)
    for one in entries:
        worker, parent = count(one.get("worker")), count(one.get("parent"))
        at = number(one.get("seconds"))
        if worker is None or at is None:
            return None
        root = worker if parent is None else roots.get((parent, one.get("parent_life")), parent)
        roots[worker, one.get("life")] = root
        if worker in current:
            current[worker][2] = at
        if parent is not None:
            data["copies"].append([at, parent, worker, root])
        factors = members(one.get("factors"))
        words = ", ".join(f"{name.replace('_', ' ')} x {number(factors[name]) or 0.0:.3g}"
                          for name in factors)  # fmt: skip
        current[worker] = [worker, at, end, root, words]
        data["lives"].append(current[worker])
    data["workers"] = 1 + max(current)
    return data


# ---------------------------------------------------------------------- what was exchanged


def _staleness(runs: Sequence[Run]) -> dict[str, int]:
    """How many gradients of all seeds had each staleness."""
    tally: dict[int, int] = {}
    for run in runs:
        kept = [members(run.summary.get("staleness_histogram"))]
        kept += [members(book.get("staleness")) for book in run.books.values()]
        for histogram in kept:
            for updates, gradients in histogram.items():
                found = count(gradients)
                if str(updates).isdecimal() and len(str(updates)) < _LONGEST and found:
                    tally[int(updates)] = tally.get(int(updates), 0) + found
    return {str(updates): tally[updates] for updates in sorted(tally)}


def _cards(run: Run) -> list[Card]:
    steps = count(ending(run).get("steps"))
    if not steps:
        return []

    def share(row: Row, key: Literal["sent", "received", "bytes"]) -> float | None:
        carried = number(row.get(key))
        return None if carried is None else carried / steps

    if run.books:
        return [
            Card(name=f"worker {rank}", sent=share(book, "bytes"), received=None)
            for rank, book in sorted(run.books.items())
        ]
    return [
        Card(
            name=text(card.get("name")), sent=share(card, "sent"), received=share(card, "received")
        )
        for card in objects(run.summary.get("cards"))
    ]


def _topology(run: Run) -> TopologyData | None:
    cluster = read_cluster(run.config)
    collective = "ring" if cluster is None else cluster.network.collective
    per_machine = 1 if cluster is None else cluster.workers_per_machine
    options = members(run.config.get("method_options"))
    return drawn_topology(run.label, run.workers, options, collective, per_machine)


def _figures(runs: Sequence[Run], shares: Shares | None) -> Figures:
    names = {"seconds": "virtual_seconds", "metric": _own_metric(runs)}
    figures = {name: end_mean(runs, names.get(name, name)) for name in FIGURES}
    if shares is not None:
        figures["waiting_fraction"] = shares["waiting"]
    return figures


# ---------------------------------------------------------------------- faults

_MOMENTS = ("died", "noticed", "started", "has the model", "takes part", "first gradient")
_COUNTS = ("read", "trained", "lost", "given_again")


def fault_tables(label: str, run: Run) -> list[TableData]:
    """What faults have cost: the timeline of each recovery, and what became of the samples. Only of
    runs in which something has died or come."""
    recoveries = objects(run.summary.get("recoveries"))
    if not recoveries:
        return []
    timeline = TableData(
        title=f"{label}: the timeline of each fault, in seconds of the run",
        columns=["what", *_MOMENTS, "away"],
        rows=[
            [text(row.get("what")), *(number(row.get(moment)) for moment in _MOMENTS), away]
            for row in recoveries
            for away in [_away([number(row.get(moment)) for moment in _MOMENTS])]
        ],
    )
    epochs = objects(run.summary.get("samples_by_epoch"))
    book = TableData(
        title=f"{label}: what became of the samples",
        columns=["epoch", *(name.replace("_", " ") for name in _COUNTS)],
        rows=[[number(row.get("epoch")), *(number(row.get(n)) for n in _COUNTS)] for row in epochs],
    )
    return [timeline, *([book] if epochs else [])]


def _away(moments: list[float | None]) -> float | None:
    """From the first moment to the last; None for who did not come back."""
    known = [moment for moment in moments if moment is not None]
    has_come = moments[-1] is not None or moments[-2] is not None
    return known[-1] - known[0] if has_come else None
