"""The words of a page: verdict, title and subtitle."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.own_code import is_own
from gossamer.quantities import counted
from gossamer.report.page.cluster import read_cluster
from gossamer.report.page.gathered_runs import GatheredRuns
from gossamer.report.page.lab import LabParts
from gossamer.report.page.method import end_mean
from gossamer.runs.contest import Contest
from gossamer.runs.json_files import number, text
from gossamer.runs.kept_runs import Folder, Run
from gossamer.runs.ranking import Interval
from gossamer.runs.statistics import final, interval, show_number, show_score
from gossamer.tasks import TASKS


def page_verdict(
    gathered: GatheredRuns, contest: Contest[Run], labs: Sequence[LabParts], *, target: float | None
) -> str:
    said = [lab.verdict for lab in labs]
    if len(contest.entries) == 1:
        said.append(_of_one(contest, target))
    elif contest.entries:
        begun = ""
        runs = [r for e in contest.entries.values() for own in e.results.values() for r in own]
        if len({run.is_real for run in runs}) == 2:
            begun = "Some of these times are virtual and some are real, so compare them with care: "
        said.append(begun + contest.verdict())
    elif gathered.timed:
        entries = gathered.timed.items()
        said += [_of_timed(label, next(iter(entry.results.values()))) for label, entry in entries]
    return " ".join(said) or "There is nothing to compare: no run was found."


def _of_one(contest: Contest[Run], target: float | None) -> str:
    """The score of one method at the end, with its uncertainty."""
    (label,) = contest.entries
    runs = contest.shown[label]
    span = interval([final(run.history, contest.key) for run in runs])
    seconds = end_mean(runs, "virtual_seconds")
    states = sorted({run.status for run in runs} - {"finished"})
    if span.mean != span.mean:
        parts = [f"{label} ends without a finite {contest.key}"]
    else:
        parts = [f"{label} comes to {_score(span.mean, contest.key)}"]
        if len(runs) > 1:
            between = _between(span, contest.key)
            parts[0] += f" ({between}, 95 % interval of {len(runs)} seeds)"
    if seconds is not None:
        kind = "s" if runs[0].is_real else "virtual s"
        parts[0] += f" after {show_number(seconds)} {kind}"
    if len(runs) == 1:
        parts[0] += " in its only run"
    if states:
        parts.append(f"it is {' and '.join(states)}")
    if target is not None and span.mean == span.mean:
        reached = contest.verdict()
        return f"{'; '.join(parts)}. {reached}"
    return "; ".join(parts) + "."


def _between(span: Interval, key: str) -> str:
    if key != "accuracy":
        return f"{max(0.0, span.low):.4g} to {span.high:.4g}"
    # With few seeds the interval exceeds the range of an accuracy.
    low, high = max(0.0, span.low), min(1.0, span.high)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _score(value: float, key: str) -> str:
    return f"{100 * value:.1f} % accuracy" if key == "accuracy" else show_score(value, key)


def _of_timed(label: str, runs: Sequence[Run]) -> str:
    seconds, steps = end_mean(runs, "virtual_seconds"), end_mean(runs, "steps")
    if seconds is None or steps is None:
        return f"{label} was never evaluated, so that nothing can be said of it."
    return (
        f"{label} takes {show_number(seconds)} s for {show_number(steps)} steps; only times were "
        "taken, nothing was trained."
    )


def page_title(
    folders: Sequence[Folder], gathered: GatheredRuns, first: Run | None, labs: Sequence[LabParts]
) -> str:
    if first is None:
        return labs[0].title if labs else f"{folders[0].path.resolve().name}: no run"
    task = _task_title(first.task)
    cluster = read_cluster(first.config)
    if first.is_real:
        where = f" on {counted(first.workers, 'real worker')}" if first.workers else ""
    else:
        where = "" if cluster is None else f" on {cluster.title or cluster.name}"
    labels = list(gathered.all)
    whose = f"{labels[0]}: " if len(labels) == 1 else ""
    return f"{whose}{task}{where}"


def _task_title(name: str) -> str:
    if is_own(name):
        return name
    entry = TASKS.get(name.partition(":")[0])
    said = name if entry is None else entry.description.partition(";")[0]
    return f"{said[:1].upper()}{said[1:]}" or "An unknown task"


def page_subtitle(gathered: GatheredRuns, first: Run | None) -> str:
    if first is None:
        return ""
    config = first.config
    seeds = {len(runs) for entry in gathered.all.values() for runs in entry.results.values()}
    epochs, batch = number(config.get("epochs")), number(config.get("batch"))
    parts = [
        counted(first.workers, "worker") if first.workers else "",
        "" if epochs is None else counted(epochs, "epoch"),
        "" if batch is None else f"batch {batch:g}",
        text(config.get("optimiser")),
        "one seed" if seeds == {1} else f"{min(seeds)} to {max(seeds)} seeds" if seeds else "",
        "real processes" if first.is_real else "true gradients, virtual time",
    ]
    if len(seeds) == 1 and seeds != {1}:
        parts[4] = f"{seeds.pop()} seeds"
    return ", ".join(part for part in parts if part)
