"""The main picture of run folders: the first sections of their page as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossamer.report.page.advice import kept_places, kept_search
from gossamer.report.page.build import first_configured, goal_of
from gossamer.report.page.gathered_runs import gather
from gossamer.report.page.method import expense_data, shares_of, worker_times
from gossamer.report.page.text import page_title
from gossamer.report.pictures.panels import VIRTUAL, Series
from gossamer.report.pictures.run_pictures import comparison_picture, run_picture
from gossamer.runs.contest import Contest
from gossamer.runs.json_files import objects, text
from gossamer.runs.kept_runs import Folder, Run
from gossamer.runs.statistics import curve

OWN_PICTURE = "comparison.png"
"""The picture that `gossamer compare` draws when it finishes."""


def main_picture(path: Path, folders: Sequence[Folder], *, target: float | None = None) -> bool:
    """Draw the picture; returns False if no run was evaluated, so that nothing was drawn."""
    gathered = gather(folders)
    goal = goal_of(folders, gathered, target)
    contest = Contest(gathered.whole | gathered.partial, goal)
    search = kept_search(folders, target)
    ranking = contest.ranking.places if search is None else kept_places(search)
    shown = {
        place.label: contest.shown[place.label]
        for place in ranking
        if place.label in contest.entries
    }
    if not any(_is_scored(run, contest.key) for runs in shown.values() for run in runs):
        return False
    methods = [series_of(label, runs) for label, runs in shown.items()]
    every = [run for folder in folders for run in folder.runs]
    title = page_title(folders, gathered, first_configured(folders), [])
    if search is not None:
        title = text(search.get("title")) or title
    time = "seconds" if any(run.is_real for run in every) else VIRTUAL
    if goal is None or len(methods) == 1:
        workers = worker_times(shown[methods[0].label][0])
        run_picture(path, methods[0], workers, title=title, target=goal, time=time)
    else:
        rows = contest.rows() if search is None else objects(search.get("ranking"))
        comparison_picture(
            path, methods, title=title, target=goal, ranking=ranking, time=time,
            expenses=expense_data(rows),
        )  # fmt: skip
    return True


def has_own_picture(folders: Sequence[Folder]) -> bool:
    """Whether this is one folder in which the command has left its main picture."""
    return len(folders) == 1 and any(one.name == OWN_PICTURE for one in folders[0].pictures)


def _is_scored(run: Run, key: str) -> bool:
    return len(curve(run.history, key, "epochs")[0]) > 0


def series_of(label: str, runs: Sequence[Run]) -> Series:
    """The runs of one method, one for each seed, at the rate at which the page shows it."""
    return Series(
        label,
        [run.history for run in runs],
        runs[0].workers,
        runs[0].rate,
        shares_of(runs),
    )
