"""The data of a page, built from run folders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gossamer.errors import ConfigurationError
from gossamer.report.looks import places
from gossamer.report.page.advice import kept_search, show_search
from gossamer.report.page.cluster import drawn_cluster, drawn_host, read_cluster
from gossamer.report.page.data import (
    ClusterData,
    GridData,
    GridRow,
    MethodData,
    PageData,
    Setting,
    TableData,
)
from gossamer.report.page.gathered_runs import GatheredRuns, check_same_task, gather
from gossamer.report.page.lab import lab_parts
from gossamer.report.page.method import expense_data, fault_tables, method_data
from gossamer.report.page.settings import listed_settings
from gossamer.report.page.text import page_subtitle, page_title, page_verdict
from gossamer.report.page.topology import server_side
from gossamer.runs.arrival import RULE, is_lower_better
from gossamer.runs.contest import Contest
from gossamer.runs.json_files import count, members, number, objects, text, texts
from gossamer.runs.kept_runs import Folder, Run, read_folder
from gossamer.runs.ranking import LEVEL

_LAB = ("delay", "staleness", "stragglers", "table")
_KINDS = {
    "compare": "compare", "simulate": "simulate", "train": "train", "advise": "advise",
    "unknown": "report",
}  # fmt: skip


def report_data(
    paths: Sequence[Path], *, target: float | None = None, is_growing: bool = False
) -> PageData:
    """The data of the page of these folders."""
    if not paths:
        raise ConfigurationError("a report needs at least one run, got none; name a run folder")
    return build_page([read_folder(path) for path in paths], target=target, is_growing=is_growing)


def build_page(
    folders: Sequence[Folder], *, target: float | None = None, is_growing: bool = False
) -> PageData:
    """The data of a page from folders that were read; runs of different tasks are refused."""
    check_same_task(folders)
    gathered = gather(folders)
    if target is None:
        target = _kept_target(folders)
    contest = Contest(
        gathered.whole or gathered.partial,
        target,
        level=_level(folders),
        cut_short=_cut_short(folders, gathered),
    )
    goal = goal_of(folders, gathered, target)
    labs = [lab_parts(folder) for folder in folders if folder.kind in _LAB]
    methods = _methods(
        gathered, goal, contest, places({*gathered.all, *_planned(folders)}), is_growing=is_growing
    )
    methods += [method for lab in labs for method in lab.methods]
    runs = [run for folder in folders for run in folder.runs]
    first = first_configured(folders)
    data = PageData(
        title=page_title(folders, gathered, first, labs),
        subtitle=page_subtitle(gathered, first),
        kind=page_kind(folders),
        verdict=page_verdict(gathered, contest, labs, target=target),
        command=_command(folders),
        version=_version(),
        is_growing=is_growing,
        score=contest.key,
        lower_is_better=is_lower_better(contest.key),
        target=goal,
        rule=RULE,
        can_tell=contest.ranking.can_tell if contest.entries else False,
        time="seconds" if any(run.is_real for run in runs) else "virtual seconds",
        test_samples=_test_samples(runs, contest.key),
        advice=None,
        methods=methods,
        expenses=expense_data(contest.rows() if contest.expenses and goal is not None else ()),
        economy="" if goal is None else contest.economy(),
        grid=_grid(contest),
        cluster=_cluster(gathered, first),
        settings=_settings(folders, gathered),
        heat_maps=[heat_map for lab in labs for heat_map in lab.heat_maps],
        pictures=[picture for lab in labs for picture in lab.pictures],
        tables=[*(table for lab in labs for table in lab.tables), *_fault_tables(gathered)],
        notices=[*gathered.notices, *_notices(folders, gathered), *_edges(contest)],
        # A run under way has not written everything yet, so nothing counts as missing.
        missing=[] if is_growing else _missing(folders, gathered),
    )
    search = kept_search(folders, target)
    if search is not None:
        show_search(data, search)
    return data


def _test_samples(runs: Sequence[Run], key: str) -> int | None:
    """The number of test samples, if all runs agree on it and are judged by accuracy."""
    found = {count(run.config.get("test_samples")) for run in runs}
    return found.pop() if key == "accuracy" and len(found) == 1 else None


def _version() -> str:
    try:
        return metadata.version("gossamer")
    except metadata.PackageNotFoundError:
        return "not installed"


def _kept_target(folders: Sequence[Folder]) -> float | None:
    """The target that a comparison or a search wrote down, whether it was given or chosen."""
    if len(folders) != 1:
        return None
    found = number(folders[0].summary.get("target"))
    return number(folders[0].config.get("target")) if found is None else found


def _level(folders: Sequence[Folder]) -> float:
    """The level of the tests; smaller for a comparison that tested after 3, 6 and 12 seeds."""
    kept = number(folders[0].config.get("level")) if len(folders) == 1 else None
    return LEVEL if kept is None else kept


def _cut_short(folders: Sequence[Folder], gathered: GatheredRuns) -> str:
    """Why no winner may be named; empty if all runs finished."""
    for folder in folders:
        said = text(folder.summary.get("cut_short"))
        if said:
            return said
    if not gathered.whole:
        return "The runs did not end"
    planned = _planned(folders)
    open_ones = len(planned - gathered.whole.keys()) if len(folders) == 1 else 0
    has_ended = all(folder.summary for folder in folders)
    if open_ones and not has_ended:
        return f"{open_ones} of {len(planned)} methods have not come to their end"
    return ""


def _planned(folders: Sequence[Folder]) -> set[str]:
    """The methods that comparisons were asked for."""
    planned = {text(one.get("method")) for f in folders for one in objects(f.config.get("runs"))}
    return planned - {""}


def goal_of(folders: Sequence[Folder], gathered: GatheredRuns, given: float | None) -> float | None:
    """The target; None for one method without a given one, as its own best says nothing."""
    target = _kept_target(folders) if given is None else given
    if target is not None or len(gathered.whole) + len(gathered.partial) < 2:
        return target
    return Contest(gathered.whole or gathered.partial).target


def first_configured(folders: Sequence[Folder]) -> Run | None:
    """The run whose settings the title describes: the first that has settings.

    A search that was interrupted before its final has settings, but no runs.
    """
    runs = [run for folder in folders for run in folder.runs]
    searches = [folder for folder in folders if folder.kind == "advise" and not folder.runs]
    runs = runs or [Run("", one.config, {}, []) for one in searches]
    return next((run for run in runs if run.config), runs[0] if runs else None)


# ---------------------------------------------------------------------- methods


def _methods(
    gathered: GatheredRuns,
    goal: float | None,
    contest: Contest[Run],
    looks: dict[str, int],
    *,
    is_growing: bool,
) -> list[MethodData]:
    """In the order of the ranking, then methods that did not finish, then those without scores."""
    rest = gathered.partial if gathered.whole else {}
    others = Contest(rest, goal)
    made = [
        method_data(
            place.label,
            own.shown[place.label],
            None if goal is None else place,
            look=looks[place.label],
            is_growing=is_growing,
        )
        for own in (contest, others)
        for place in own.ranking.places
    ]
    for label, entry in gathered.timed.items():
        runs = next(iter(entry.results.values()))
        made.append(method_data(label, runs, None, look=looks[label], is_growing=is_growing))
    return made


def _fault_tables(gathered: GatheredRuns) -> list[TableData]:
    """Of the first seed of each method."""
    return [
        table
        for label, entry in gathered.all.items()
        for runs in list(entry.results.values())[:1]
        for table in fault_tables(label, runs[0])
    ]


def _grid(contest: Contest[Run]) -> GridData | None:
    rates = contest.rates
    if all(len(entry.grid) < 2 for entry in contest.entries.values()):
        return None
    rows: list[GridRow] = []
    for label, entry in contest.entries.items():
        found = [contest.tried(label, rate) if rate in entry.grid else None for rate in rates]
        rows.append(
            GridRow(
                method=label,
                seconds=[None if one is None else one[0] for one in found],
                values=[None if one is None else number(one[1]) for one in found],
                chosen=rates.index(contest.chosen[label]),
            )
        )
    return GridData(rates=rates, rows=rows)


def page_kind(folders: Sequence[Folder]) -> str:
    if len(folders) > 1:
        return "report"
    return _KINDS.get(folders[0].kind, "lab")


def _command(folders: Sequence[Folder]) -> str:
    """The command lines of the folders, one a line."""
    return "\n".join(dict.fromkeys(folder.command for folder in folders if folder.command))


# ---------------------------------------------------------------------- the rest of the page


def _cluster(gathered: GatheredRuns, first: Run | None) -> ClusterData | None:
    cluster = None if first is None else read_cluster(first.config)
    if first is None or cluster is None:
        return None
    specs = [
        server_side(runs[0].label) for e in gathered.all.values() for runs in e.results.values()
    ]
    servers = max((spec.servers for spec in specs if spec is not None), default=0)
    if first.is_real:
        return drawn_host(cluster, first.config, servers)
    own_machines = any(spec is not None and spec.placement == "own" for spec in specs)
    batch = first.config.get("batch")
    return drawn_cluster(
        cluster, servers, own_machines=own_machines, batch=batch if isinstance(batch, int) else 0
    )


def _settings(folders: Sequence[Folder], gathered: GatheredRuns) -> list[Setting]:
    """The settings of all runs shown; of a folder without runs its own configuration."""
    runs = [(label, run.config) for label, run in _shown(gathered) if run.config]
    runs += [("", folder.config) for folder in folders if folder.config and not folder.runs]
    return listed_settings(runs)


def _notices(folders: Sequence[Folder], gathered: GatheredRuns) -> list[str]:
    """The notices of the runs, each with the runs that gave it, and those about the page."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for notice in texts(folder.summary.get("notices")) if folder.kind in _LAB else ():
            found.setdefault(notice, [])
        rates: dict[str, set[float | None]] = {}
        told: dict[tuple[str, str], dict[float | None, None]] = {}
        for run in folder.runs:
            rates.setdefault(run.label, set()).add(run.rate)
            for notice in run.notices:
                told.setdefault((notice, run.label), {})[run.rate] = None
        for (notice, label), own in told.items():
            is_of_all = len(own) == len(rates[label]) > 1
            whose = [label] if is_of_all else [f"{label} at {r:g}" if r else label for r in own]
            named = found.setdefault(notice, [])
            named += [one for one in whose if one not in named]
    said = [
        f"{notice} ({', '.join(whose)})" if whose else notice for notice, whose in found.items()
    ]
    worlds = {run.is_real for folder in folders for run in folder.runs}
    if len(worlds) == 2:
        said.append(
            "Some of these runs were simulated and some were real: the former have virtual "
            "seconds, the latter real ones."
        )
    clusters = {text(members(run.config.get("cluster")).get("name")) for _, run in _shown(gathered)}
    if len(clusters - {""}) > 1:
        said.append("The runs are from different clusters; the cluster of the first run is drawn.")
    if gathered.whole and gathered.partial:
        left_out = ", ".join(gathered.partial)
        said.append(f"The verdict leaves out methods that did not finish: {left_out}.")
    return said


def _edges(contest: Contest[Run]) -> list[str]:
    return [f"{edge[0].upper()}{edge[1:]}." for edge in contest.edges()]


def _shown(gathered: GatheredRuns) -> list[tuple[str, Run]]:
    """All runs that stand behind the page, each with the label of its method."""
    return [
        (label, run)
        for label, entry in gathered.all.items()
        for runs in entry.results.values()
        for run in runs
    ]


def _missing(folders: Sequence[Folder], gathered: GatheredRuns) -> list[str]:
    said = [line for folder in folders for line in folder.missing]
    for folder in folders:
        if folder.config and not folder.command:
            name = folder.path.resolve().name
            said.append(f"The command that made {name} was not written down.")
    return list(dict.fromkeys([*said, *gathered.missing]))
