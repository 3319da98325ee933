"""The page of a search: what `gossamer advise` printed, read from the summary in its folder.

The runs in the folder alone do not give those figures: every run ends a little after the row that
ended its race, and only seeds that all finalists have count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from gossamer.report.page.data import AdviceData, PageData, TableData
from gossamer.report.page.method import arrival_data, expense_data
from gossamer.runs.arrival import Arrival
from gossamer.runs.json_files import Row, members, number, numbers, objects, text, texts
from gossamer.runs.kept_runs import Folder
from gossamer.runs.ranking import Interval, RankedMethod
from gossamer.runs.statistics import show_number, show_score

_RANKING = (
    "method", "kind", "learning_rate", "seconds_to_target", "low", "high", "times_the_first",
    "reached", "seeds", "best",
)  # fmt: skip
_LEFT_BEHIND = ("method", "learning_rate", "rung", "best")


def kept_search(folders: Sequence[Folder], target: float | None) -> Row | None:
    """The summary of a search with a ranking; None for other folders and for another target."""
    if len(folders) != 1 or folders[0].kind != "advise":
        return None
    summary = folders[0].summary
    is_its_own = target in (None, number(summary.get("target")))
    return summary if is_its_own and objects(summary.get("ranking")) else None


def kept_places(search: Row) -> list[RankedMethod]:
    """The ranking as it was printed."""
    return [_place(row) for row in objects(search.get("ranking"))]


def _place(row: Row) -> RankedMethod:
    raw = row.get("seconds_of_seeds")
    seconds = [number(one) for one in cast(list[object], raw)] if isinstance(raw, list) else []
    known = numbers([row.get(key) for key in ("seconds_to_target", "low", "high")])
    return RankedMethod(
        arrival=Arrival(text(row.get("method")), tuple(seconds)),
        span=Interval(*known) if known else None,
        times=number(row.get("times_the_first")),
        is_close=row.get("may_be_first") is True,
    )


def show_search(data: PageData, search: Row) -> None:
    """Put what a search found on the page of its runs."""
    places = {place.label: place for place in kept_places(search)}
    order = list(places)
    data["title"] = text(search.get("title")) or data["title"]
    data["score"] = text(search.get("score")) or data["score"]
    data["verdict"] = text(search.get("verdict"))
    data["can_tell"] = all(len(place.arrival.seconds) > 1 for place in places.values())
    for method in data["methods"]:
        place = places.get(method["label"])
        method["arrival"] = None if place is None else arrival_data(place)
    # Methods that failed in the final are not in the ranking; they come last.
    data["methods"].sort(key=lambda one: (*order, one["label"]).index(one["label"]))
    data["advice"] = _advice(search)
    data["expenses"] = expense_data(objects(search.get("ranking")))
    data["economy"] = text(search.get("economy"))
    data["tables"] = [*_tables(search, data["score"]), *data["tables"]]
    data["notices"] = [*texts(search.get("remarks")), *data["notices"]]


def _advice(search: Row) -> AdviceData:
    first, *others = objects(search.get("ranking"))
    rivals = [text(one.get("method")) for one in others if one.get("may_be_first") is True]
    also = f" ({', '.join(rivals)} may be as fast)" if rivals else ""
    changes = texts(search.get("changes"))
    return AdviceData(
        reasons=[said for key in ("reason", "proposal", "edge") if (said := text(search.get(key)))],
        next_step=f"Train with {text(first.get('method'))}, the first of the ranking{also}:",
        command=text(search.get("command")),
        changes=[f"{one[0].upper()}{one[1:]}." for one in changes if one],
        scenes=_scenes(objects(search.get("sensitivity"))),
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


def _tables(search: Row, score: str) -> list[TableData]:
    """The ranking, and the candidates that were left behind."""
    target = number(search.get("target"))
    goal = "the target" if target is None else show_score(target, score)
    ranking, behind = objects(search.get("ranking")), objects(search.get("left_behind"))
    alone = [one for one in [members(search.get("alone"))] if one.get("method")]
    rows = [*ranking, *alone]
    made = [_table(f"Time to {goal}, in virtual seconds", _RANKING, rows)]
    if behind:
        made.append(_table("Left behind in the search", _LEFT_BEHIND, behind))
        made[-1]["columns"][-1] = f"best {score} there"
    return made


def _table(title: str, keys: Sequence[str], rows: Sequence[Row]) -> TableData:
    return TableData(
        title=title,
        columns=[key.replace("_", " ") for key in keys],
        rows=[[_cell(row.get(key)) for key in keys] for row in rows],
    )


def _cell(value: object) -> str | float | None:
    return value if isinstance(value, str) else number(value)
