"""`gossamer advise`: which method reaches a target first on this cluster, why, and what if."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    err,
    plain_table,
    print_json,
    say_line,
    show_share,
    show_table,
    warn,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.work.jobs import JobPool, JobWatch, number_of_jobs
from gossamer.commands.work.simulations import EngineCache, OnRow, OutOfMinutes, execute, slug
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, Error, PeerLost, Stalled
from gossamer.plan.advise.budget import SearchPlan, make_plan, nominal_seconds
from gossamer.plan.advise.candidates import Candidate, candidates, menu_with
from gossamer.plan.advise.collecting import collecting_seconds, model_bytes
from gossamer.plan.advise.findings import SearchFindings
from gossamer.plan.advise.search import Search, SearchStep
from gossamer.plan.advise.search_run import Run, SearchFailure, SearchRun
from gossamer.plan.advise.sensitivity import RULE as RULE_OF_CHANGES
from gossamer.plan.advise.sensitivity import scenes
from gossamer.quantities import counted, seconds
from gossamer.runs.arrival import RULE, evaluations, target_of
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import show_number
from gossamer.tasks import make_task

BudgetOption = Annotated[
    str, typer.Option("--budget", help="How long the search may take: 90s, 5m, 1h.")
]
GoalOption = Annotated[
    float,
    typer.Option("--target", help="Accuracy (0.95, or 95 for 95 %) or loss to reach and hold."),
]
FinalSeedsOption = Annotated[
    int | None,
    typer.Option("--seeds", help="Seeds of the final; default: what the budget pays for, up to 5."),
]
_KINDS = 6


@given.with_groups
def advise(
    target: GoalOption,
    task: given.TaskOption = "digits-mlp",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="Also try this one, such as one of your own: my.py:name; may be repeated.",
        ),
    ] = None,
    budget: BudgetOption = "5m",
    where: given.ClusterOptions = given.ClusterOptions(cluster="one-slow-of-8"),
    seed: given.SeedOption = 0,
    seeds: FinalSeedsOption = None,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.GridOption = None,
    jobs: given.JobsOption = None,
    running: Annotated[
        given.RunOptions, given.Without(("engine", "compiled"))
    ] = given.RunOptions(),
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Say which method reaches a target first, and why.

    Searches methods and settings in virtual time; the same seed gives the same answer.
    """
    given.check_seeds(1 if seeds is None else seeds)
    processes = number_of_jobs(jobs)
    allowed = _allowed(budget)
    loaded = make_task(task, data=running.data)
    epochs = length.epochs_of(loaded) or loaded.epochs
    base = make_settings(
        loaded, "all_reduce", where.described(), seed=seed, epochs=epochs, batch=length.batch,
        evaluations=evaluations(epochs), **running.settings(),
    )  # fmt: skip
    target = target_of(target, score=loaded.score) or 0.0
    rates = given.rates_from(lr) or loaded.learning_rates
    found, left_out = candidates(base, rates, **menu_with(method or ()))
    changed = scenes(base.cluster)
    plan = make_plan(
        allowed, nominal_seconds(base), epochs=epochs, candidates=len(found),
        rates=len(rates), kinds=_KINDS, scenes=len(changed), seeds=seeds,
    )  # fmt: skip
    left_out |= {one.method: f"{budget} do not pay for it" for one in found[plan.candidates :]}
    config = _config(base, plan, target, budget, found)
    with kept_run(keeping.runs, f"advise-{slug(loaded.name)}", config) as folder:
        runs = plan.most_runs(len(changed))
        with Reporter(runs, "advising") as reporter, JobPool(processes) as pool:
            runner = _runner(folder, pool, time.monotonic() + allowed)
            search = Search(base, found, plan, target, runner, _watcher(reporter))
            search.run(changed)
        if folder is not None:
            for name in search.superfluous:
                shutil.rmtree(folder.path / slug(name), ignore_errors=True)
        findings = _findings(search, left_out, budget)
        _show(findings)
        if keeping.as_json:
            print_json(findings.as_dict())
        if folder is not None:
            folder.write_summary(findings.as_dict())
    if search.ended == "interrupted":
        raise KeyboardInterrupt


def _allowed(budget: str) -> float:
    found = seconds(budget, "--budget")
    if found <= 0:
        raise ConfigurationError("--budget must be above 0, such as 90s, 5m or 1h")
    return found


def _findings(search: Search, left_out: dict[str, str], budget: str) -> SearchFindings:
    """What was found, also by a search that was cut short; refused where nothing was measured."""
    findings = SearchFindings(search, left_out)
    if findings.ranking:
        return findings
    if search.ended == "interrupted":
        raise KeyboardInterrupt
    if search.ended == "out of time":
        raise ConfigurationError(
            f"the budget of {budget} was over before the first run ended; give a longer --budget"
        )
    what, error = next(iter(search.failures.items()))
    raise Error(f"no candidate got through: {what}: {error}")


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


def _watcher(reporter: Reporter) -> Callable[[SearchStep], None]:
    """Tells where the search is: a changing line on a terminal, elsewhere a line for each stage."""
    stages: list[str] = []

    def at(step: SearchStep) -> None:
        best = f"; best so far {step.best}" if step.best else ""
        if err.is_terminal:
            if stages:
                reporter.finished("")
            reporter.at(f"{step.stage}, {step.left} left: {step.what}{best}", 0.0)
        elif step.stage not in stages:
            text = f"{step.stage}: {counted(step.left, 'run')}{best}"
            warn(text)
        stages.append(step.stage)

    return at


def _config(
    base: Settings, plan: SearchPlan, target: float, budget: str, found: Sequence[Candidate]
) -> dict[str, Any]:
    shared = {key: value for key, value in base.as_dict().items() if not key.startswith("method")}
    shared.pop("learning_rate")
    size = model_bytes(base)
    prices = {one.method: collecting_seconds(one.settings(base), size) for one in found}
    return {
        "command": "advise",
        **shared,
        "learning_rates": sorted({one.learning_rate for one in found}),
        "target": target,
        "budget": budget,
        "plan": dataclasses.asdict(plan),
        "collecting_seconds": prices,
    }


def _show(findings: SearchFindings) -> None:
    search = findings.search
    base, plan = search.base, search.plan
    rungs = ", ".join(f"{(base.epochs or 0) * rung.share:.3g}" for rung in plan.rungs)
    say_line(
        f"{base.task.title} on {base.cluster.title or base.cluster.name}; "
        f"{counted(base.cluster.workers, 'worker')}, "
        f"at most {counted(base.epochs or 0.0, 'epoch')}, batch {base.batch}, "
        f"{base.optimiser}; true gradients, virtual time"
    )
    say_line(
        f"plan: {counted(len(search.candidates), 'candidate')} in rungs of {rungs} epochs, "
        f"then {counted(plan.seeds, 'fresh seed')} for each finalist"
    )
    for what, error in search.failures.items():
        say_line(f"notice: {what} failed: {error}")
    if findings.ended():
        say_line(f"notice: {findings.ended()}")
    show_table(_ranking(findings))
    say_line(RULE)
    say_line(findings.verdict(), style="bold")
    say_line(findings.reason())
    for hint in filter(None, (findings.proposal(), findings.widened(), findings.edge())):
        say_line(hint)
    changes = findings.changes()
    if changes:
        say_line("What would change the answer:")
        for change in changes:
            say_line(f"- {change}")
        say_line(RULE_OF_CHANGES)
    behind = [f"{c.method} (rung {rung}, best {show_number(best)})"
              for c, rung, best in search.left_behind()]  # fmt: skip
    if behind:
        say_line(f"left behind in the search: {', '.join(behind)}")
    for reason, methods in findings.left_out_for().items():
        say_line(f"left out: {', '.join(methods)}: {reason}")
    if findings.next_step():
        say_line(findings.next_step())


def _ranking(findings: SearchFindings) -> Table:
    table = plain_table()
    key = findings.search.key
    for column in ("", "method", "lr", f"to {findings.goal}", "interval", "seeds", "best",
                   "couples by"):  # fmt: skip
        is_text = column in ("method", "couples by")
        is_whole = column != "couples by"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_whole)
    for place, one in enumerate(findings.ranking, 1):
        span = findings.place(one).span
        never = "never" if one.is_final else "not yet"
        low, high = (0.0, 0.0) if span is None else (span.low, span.high)
        table.add_row(
            str(place), one.candidate.method, f"{one.candidate.learning_rate:g}",
            never if span is None else f"{show_number(span.mean)} s",
            f"{show_number(low)}-{show_number(high)}" if low < high else "-",
            f"{one.arrival.reached}/{len(one.results)}",
            show_share(one.nearest) if key == "accuracy" else f"{one.nearest:.4g}",
            one.kind,
        )  # fmt: skip
    return table
