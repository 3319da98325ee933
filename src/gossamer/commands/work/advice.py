"""`gossamer.advise`: which method reaches a target first on this cluster, why, and what if."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gossamer.commands.console import plain_table
from gossamer.commands.work.answer import KeptAnswer, scratch_folder, shows_progress
from gossamer.commands.work.comparison import spent_cell
from gossamer.commands.work.jobs import JobPool, JobWatch, pool_for
from gossamer.commands.work.simulations import (
    EngineCache,
    OnRow,
    OutOfMinutes,
    command_line,
    execute,
    slug,
)
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, loaded_task, make_settings
from gossamer.errors import ConfigurationError, Error, PeerLost, Stalled
from gossamer.methods import MethodSpec
from gossamer.observe.progress import Reporter, is_watched, show_share, warn
from gossamer.plan.advise.budget import SearchPlan, make_plan, nominal_seconds
from gossamer.plan.advise.candidates import candidates, menu_with
from gossamer.plan.advise.changes import asked_values, changes_to_try
from gossamer.plan.advise.collecting import collecting_seconds, model_bytes
from gossamer.plan.advise.findings import ALONE, SearchFindings
from gossamer.plan.advise.search import Search, SearchStep
from gossamer.plan.advise.search_run import Run, SearchFailure, SearchRun
from gossamer.plan.advise.sensitivity import scenes
from gossamer.quantities import counted, seconds
from gossamer.runs.arrival import evaluations, target_of
from gossamer.runs.expense import HEADINGS
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import show_number
from gossamer.specs import check_range
from gossamer.tasks import Task

_KINDS = 6
Watch = Callable[[SearchStep], None]


class Advice(KeptAnswer):
    """The ranking of methods and settings, why the first is first, and what would change it."""

    def __init__(self, findings: SearchFindings, folder: Path) -> None:
        super().__init__(folder)
        self.findings = findings

    @property
    def title(self) -> str:
        return self.as_dict()["title"]

    @property
    def method(self) -> str:
        """The first of the ranking, with its options."""
        return self.findings.ranking[0].candidate.method

    @property
    def learning_rate(self) -> float:
        """The rate of the first of the ranking."""
        return self.findings.ranking[0].candidate.learning_rate

    @property
    def verdict(self) -> str:
        """Which method reaches the target first, in one sentence with the uncertainty."""
        return self.findings.verdict()

    @property
    def reason(self) -> str:
        """Why the runner-up loses."""
        return self.findings.reason()

    @property
    def changes(self) -> list[str]:
        """What would change the answer."""
        return self.findings.changes()

    @property
    def ended(self) -> str:
        """How the search ended: finished, interrupted, or out of time."""
        return self.findings.search.ended

    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each method of the ranking, the fastest first."""
        return self.as_dict()["ranking"]

    def as_dict(self) -> dict[str, Any]:
        return self.findings.as_dict()

    def _shown(self) -> tuple[Table, list[str]]:
        said = self.findings
        told = (said.verdict(), said.economy(), said.reason(), said.baseline(), said.ended(),
                said.proposal(),
                said.edge(), said.next_step())  # fmt: skip
        return advice_table(said), [sentence for sentence in told if sentence]


def advise(
    task: str | Task = "digits-mlp",
    cluster: str | Path | Cluster = "one-slow-of-8",
    *,
    target: float,
    methods: Sequence[str | MethodSpec] = (),
    only: bool = False,
    search: Sequence[str] = (),
    budget: str | float = "5m",
    seeds: int | None = None,
    learning_rates: Sequence[float] = (),
    jobs: int | None = None,
    progress: bool | None = None,
    data: Path | str | None = None,
    **choices: Any,
) -> Advice:
    """Say which method reaches a target first on a cluster, and why; searched in virtual time.

    `target` is the accuracy (0.95, or 95 for 95 %) or loss to reach and hold, `budget` how long the
    search may take (seconds, or "90s", "5m", "1h"), `methods` are tried besides those of the menu
    (with `only=True` alone), and `seeds` are those of the final. `search` names further settings to
    try: "batch", "momentum", "weight_decay" and "groups", or "batch=8/32" with these values.
    `jobs` and `choices` are as for `compare`. The same seed gives the same answer. Ctrl-C gives the
    best so far, and `ended` says so.
    """
    planned = plan_search(
        task, cluster, target=target, methods=methods, only=only, search=search, budget=budget,
        seeds=seeds, learning_rates=learning_rates, data=data, **choices,
    )  # fmt: skip
    pool = pool_for(planned.base.task, jobs)
    with scratch_folder() as folder:
        folder.write_config({**planned.config(), "command_line": command_line()})
        with ExitStack() as stack:
            watch: Watch = _ignore
            if shows_progress(progress):
                watch = watched(stack.enter_context(planned.reporter()))
            findings = planned.run(folder, pool, watch)
        folder.write_summary(findings.as_dict())
        folder.check()
    return Advice(findings, folder.path)


def _ignore(step: SearchStep) -> None:
    pass


class PlannedSearch:
    """A search with everything that is decided before its first run."""

    def __init__(
        self, base: Settings, target: float, budget: str, rates: Sequence[float],
        menu: Mapping[str, Sequence[str]], seeds: int | None, search: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.base, self.target, self.budget = base, target, budget
        self._allowed = _allowed(budget)
        changes = changes_to_try(asked_values(search, base), base)
        self.candidates, self.left_out = candidates(base, rates, **menu, changes=changes)
        self._scenes = scenes(base.cluster)
        self.plan: SearchPlan = make_plan(
            self._allowed, nominal_seconds(base), epochs=base.epochs or 0.0,
            candidates=len(self.candidates), rates=len(rates), kinds=_KINDS,
            scenes=len(self._scenes), seeds=seeds,
        )  # fmt: skip
        unpaid = self.candidates[self.plan.candidates :]
        self.left_out |= {one.label: f"{budget} do not pay for it" for one in unpaid}

    def config(self) -> dict[str, Any]:
        """What the folder keeps of it."""
        base = self.base
        shared = {k: value for k, value in base.as_dict().items() if not k.startswith("method")}
        shared.pop("learning_rate")
        size = model_bytes(base)
        found = self.candidates
        return {
            "command": "advise",
            **shared,
            "learning_rates": sorted({one.learning_rate for one in found}),
            "target": self.target,
            "budget": self.budget,
            "plan": dataclasses.asdict(self.plan),
            "collecting_seconds": {
                one.method: collecting_seconds(one.settings(base), size) for one in found
            },
        }

    def reporter(self) -> Reporter:
        """Shows how far the search is."""
        alone = len({one.learning_rate for one in self.candidates})
        return Reporter(self.plan.most_runs(len(self._scenes)) + alone, "advising")

    def run(self, folder: RunFolder | None, pool: JobPool, watch: Watch) -> SearchFindings:
        """Search until it is finished, interrupted or out of time; what was found by then counts.

        Refused where nothing was measured.
        """
        with pool:
            runner = _runner(folder, pool, time.monotonic() + self._allowed)
            search = Search(self.base, self.candidates, self.plan, self.target, runner, watch)
            search.run(self._scenes)
            # What does not fit into every worker does not fit into one.
            alone = None if "all_reduce" in self.left_out else search.run_alone()
        if folder is not None:
            for name in search.superfluous:
                shutil.rmtree(folder.path / slug(name), ignore_errors=True)
        findings = SearchFindings(search, self.left_out)
        findings.alone = alone
        if findings.ranking:
            return findings
        if search.ended == "interrupted":
            raise KeyboardInterrupt
        if search.ended == "out of time":
            raise ConfigurationError(
                f"the budget of {self.budget} was over before the first run ended; give a longer "
                "--budget"
            )
        what, error = next(iter(search.failures.items()))
        raise Error(f"no candidate got through: {what}: {error}")


def plan_search(
    task: str | Task,
    cluster: str | Path | Cluster,
    *,
    target: float,
    methods: Sequence[str | MethodSpec] = (),
    only: bool = False,
    search: Sequence[str] = (),
    budget: str | float = "5m",
    seeds: int | None = None,
    learning_rates: Sequence[float] = (),
    data: Path | str | None = None,
    epochs: float | None = None,
    **choices: Any,
) -> PlannedSearch:
    """Make and check a search; nothing runs yet."""
    if seeds is not None:
        check_range("--seeds", seeds, 1)
    _allowed(budget)
    made = loaded_task(task, data)
    if choices.get("engine") == "none":
        raise ConfigurationError("advise needs gradients; use the engine vector or loop")
    length = made.epochs if epochs is None else epochs
    choices.setdefault("evaluations", evaluations(length))
    base = make_settings(made, "all_reduce", cluster, epochs=length, **choices)
    goal = target_of(target, score=made.score) or 0.0
    shown = budget if isinstance(budget, str) else f"{budget:g}s"
    rates = tuple(dict.fromkeys(learning_rates)) or made.learning_rates
    menu = menu_with([str(one) for one in methods], only=only)
    return PlannedSearch(base, goal, shown, rates, menu, seeds, search)


def _allowed(budget: str | float) -> float:
    found = seconds(budget, "--budget")
    if found <= 0:
        raise ConfigurationError("--budget must be above 0, such as 90s, 5m or 1h")
    return found


@dataclass(frozen=True)
class SearchJob:
    """A run of the search, which ends as soon as it has told what it can."""

    asked: SearchRun
    folder: RunFolder | None

    @property
    def label(self) -> str:
        return f"{self.asked.what}, seed {self.asked.settings.seed}"

    def run(
        self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]
    ) -> Result | SearchFailure:
        rows: list[Row] = []
        stop = self.asked.rule.stop()

        def watch(row: Row) -> None:
            rows.append(row)
            on_row(row)
            if is_over():
                raise OutOfMinutes
            if stop(row) and engines.running is not None:
                # A run whose samples are spent ends in the usual way, with a whole summary.
                engines.running.world.budget.samples = row["samples"]

        settings = self.asked.settings
        try:
            return execute(settings, folder=self.folder, on_row=watch, engines=engines)
        except (PeerLost, Stalled) as error:
            return SearchFailure(error, rows)


def _runner(folder: RunFolder | None, pool: JobPool, deadline: float) -> Run:
    if folder is not None:
        folder.defer_failures()

    def run(asked: Iterable[SearchRun]) -> Iterator[Result | SearchFailure]:
        def jobs() -> Iterator[SearchJob]:
            for one in asked:
                place = None
                if folder is not None and one.name is not None:
                    place = folder.child(slug(one.name))
                yield SearchJob(one, place)

        return pool.run(jobs(), JobWatch(deadline=deadline))

    return run


def watched(reporter: Reporter) -> Watch:
    """Tells where the search is: in one line where somebody watches, else a line for each stage."""
    stages: list[str] = []

    def at(step: SearchStep) -> None:
        best = f"; best so far {step.best}" if step.best else ""
        if is_watched():
            if stages:
                reporter.finished("")
            reporter.at(f"{step.stage}, {step.left} left: {step.what}{best}", 0.0)
        elif step.stage not in stages:
            text = f"{step.stage}: {counted(step.left, 'run')}{best}"
            warn(text)
        stages.append(step.stage)

    return at


def advice_table(findings: SearchFindings) -> Table:
    """The table of the ranking, the fastest first."""
    table = plain_table()
    key = findings.search.key
    spent = {one.label: one.row(findings.front) for one in findings.expenses}
    told = list(findings.expenses[0].in_all) if findings.expenses else []
    spendings = [HEADINGS[what] for what in told]
    for column in ("", "method", "lr", f"to {findings.goal}", "interval", *spendings, "seeds",
                   "best", "goodput", "couples by"):  # fmt: skip
        is_text = column in ("method", "couples by")
        is_whole = column != "couples by"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_whole)
    for place, one in enumerate(findings.ranking, 1):
        span = findings.place(one).span
        never = "never" if one.is_final else "not yet"
        low, high = (0.0, 0.0) if span is None else (span.low, span.high)
        table.add_row(
            str(place), one.candidate.label, f"{one.candidate.learning_rate:g}",
            never if span is None else f"{show_number(span.mean)} s",
            f"{show_number(low)}-{show_number(high)}" if low < high else "-",
            *(spent_cell(spent[one.candidate.label], what) for what in told),
            f"{one.arrival.reached}/{len(one.results)}",
            show_share(one.nearest) if key == "accuracy" else f"{one.nearest:.4g}",
            "-" if (goodput := findings.goodput(one)) is None else show_share(goodput),
            one.kind,
        )  # fmt: skip
    if findings.alone is not None:
        alone, seconds = findings.alone
        blank = [""] * len(told)
        table.add_row(
            "-", ALONE, f"{alone.learning_rate:g}",
            "never" if seconds is None else f"{show_number(seconds)} s", "-", *blank,
            f"{int(seconds is not None)}/1", "", "", "nothing",
        )  # fmt: skip
    return table
