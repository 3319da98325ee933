"""What `gossamer advise` wrote down, as the first part of its page."""

from __future__ import annotations

from gossamer.report.page.data import AdviceData, TableData
from gossamer.runs.json_files import Row, members, number, objects, text, texts
from gossamer.runs.kept_runs import Folder
from gossamer.runs.statistics import show_number


def advice_data(folder: Folder) -> AdviceData | None:
    """From the summary of the search; a search without a ranking recommends nothing."""
    summary = folder.summary
    ranking = objects(summary.get("ranking"))
    if folder.kind != "advise" or not ranking:
        return None
    first = text(ranking[0].get("method"))
    rivals = [text(one.get("method")) for one in ranking[1:] if one.get("may_be_first") is True]
    also = f" ({', '.join(rivals)} may be as fast)" if rivals else ""
    changes = texts(summary.get("changes"))
    return AdviceData(
        reasons=[
            said for key in ("reason", "proposal", "edge") if (said := text(summary.get(key)))
        ],
        next_step=f"Train with {first}, the first of the ranking{also}:",
        command=text(summary.get("command")),
        changes=[f"{one[0].upper()}{one[1:]}." for one in changes if one],
        scenes=_scenes(objects(summary.get("sensitivity"))),
    )


def _scenes(outcomes: list[Row]) -> TableData | None:
    """A row for each changed cluster, a column for each method that was tried there."""
    times = [members(one.get("seconds_to_target")) for one in outcomes]
    methods = list(dict.fromkeys(method for found in times for method in found))
    if not methods:
        return None
    return TableData(
        title="Time to the target if one thing differed",
        columns=["change", *methods, "first"],
        rows=[
            [
                text(one.get("change")),
                *(_time(number(found.get(method))) for method in methods),
                text(one.get("leader")) or "nobody",
            ]
            for one, found in zip(outcomes, times, strict=True)
        ],
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{show_number(seconds)} s"
