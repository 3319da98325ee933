"""The main picture of run folders: what the first sections of their page show, as one file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.report.build import first_configured, goal_of
from gossamer.report.contest import Contest
from gossamer.report.gathering import gather
from gossamer.report.method_data import worker_times
from gossamer.report.page_words import page_title
from gossamer.report.panels import VIRTUAL, Series
from gossamer.report.pictures import comparison_picture, run_picture
from gossamer.report.runs import Folder, Run
from gossamer.report.statistics import Arrival, curve

OWN_PICTURE = "comparison.png"
"""That of a comparison that came to its end, drawn by the command itself."""


@dataclass(frozen=True)
class Advice:
    """What a search knows beyond its run folders."""

    title: str
    arrivals: Mapping[str, Arrival]
    """By method, with the time that having the model takes."""


def main_picture(
    path: Path,
    folders: Sequence[Folder],
    *,
    target: float | None = None,
    advice: Advice | None = None,
) -> bool:
    """Draw it, and say whether there was anything to draw: a run that was evaluated."""
    gathered = gather(folders)
    goal = goal_of(folders, gathered, target)
    contest = Contest(gathered.whole | gathered.partial, goal)
    ranking = {
        label: contest.entries[label].results[contest.chosen[label]]
        for label in (row["method"] for row in contest.rows())
    }
    if not any(_is_scored(run, contest.key) for runs in ranking.values() for run in runs):
        return False
    methods = [_series(label, runs) for label, runs in ranking.items()]
    every = [run for folder in folders for run in folder.runs]
    title = advice.title if advice else page_title(folders, gathered, first_configured(every), [])
    time = "seconds" if any(run.is_real for run in every) else VIRTUAL
    if goal is None or len(methods) == 1:
        workers = worker_times(ranking[methods[0].label][0])
        run_picture(path, methods[0], workers, title=title, target=goal, time=time)
    else:
        known = advice.arrivals if advice else None
        comparison_picture(path, methods, title=title, target=goal, time=time, known=known)
    return True


def has_own_picture(folders: Sequence[Folder]) -> bool:
    """Whether these are one folder in which the command has left its main picture."""
    return len(folders) == 1 and any(one.name == OWN_PICTURE for one in folders[0].pictures)


def _is_scored(run: Run, key: str) -> bool:
    return len(curve(run.history, key, "epochs")[0]) > 0


def _series(label: str, runs: Sequence[Run]) -> Series:
    """The runs of one method, one a seed, at the rate that the page shows it at."""
    return Series(
        label,
        [run.history for run in runs],
        runs[0].workers,
        {"learning_rate": runs[0].rate},
        _shares(runs),
    )


def _shares(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Computing, waiting and neither, mean over workers and seeds; all zero if nobody knows."""
    parts = [
        (one["computing"], math.fsum(one["waiting"].values()), one["other"], one["total"])
        for run in runs
        for one in worker_times(run)
        if one["total"] > 0
    ]
    if not parts:
        return 0.0, 0.0, 0.0
    computing, waiting, other = (
        math.fsum(one[at] / one[3] for one in parts) / len(parts) for at in range(3)
    )
    return computing, waiting, other
