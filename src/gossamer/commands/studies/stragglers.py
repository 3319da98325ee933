"""`gossamer lab stragglers`: what waiting costs, and what not waiting costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    can_draw,
    out,
    plain_table,
    print_json,
    say_line,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.work.jobs import number_of_jobs, run_jobs
from gossamer.commands.work.simulations import EngineCache, OnRow, SimulationJob
from gossamer.quantities import counted
from gossamer.report.pictures.stragglers_picture import Runner, Stage, stragglers_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import Interval, show_number
from gossamer.studies.lab.stragglers import (
    OPTIMISER,
    RATES,
    STEPS,
    Claim,
    StragglerEntry,
    StragglerPace,
    StragglerRun,
    StragglerScene,
    Study,
    claims,
    pace,
    scenes,
)
from gossamer.tasks import make_task

Found = dict[str, dict[str, StragglerEntry]]


@given.with_groups
def stragglers(
    workers: Annotated[int, given.shown("How many workers.")] = 16,
    seed: given.SeedOption = 0,
    seeds: given.SeedsOption = 3,
    epochs: given.EpochsOption = None,
    steps: Annotated[
        int, given.shown("Steps per worker of the runs that take times only.")
    ] = STEPS,
    lr: given.GridOption = None,
    task: given.TaskOption = "digits-mlp",
    data: given.DataOption = None,
    jobs: given.JobsOption = None,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Parameter servers from waiting for all to waiting for none.

    With stragglers that strike at random, and with one worker that is slow for ever: throughput,
    waiting, and accuracy per sample at each method's best rate of one grid.
    """
    given.check_seeds(seeds)
    loaded = make_task(task, data=data)
    rates = given.rates_from(lr) or RATES
    study = Study(loaded, scenes(workers), range(seed, seed + seeds), rates, epochs, steps)
    processes, planned = number_of_jobs(jobs), study.jobs()
    with kept_run(keeping.runs, "lab-stragglers", _config(study, planned)) as folder:
        found = _run(planned, folder, processes)
        summary = _summary(study, found)
        _show(study, found)
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_summary({"ended": "finished", **summary})
            if can_draw():
                _draw(folder.path / "stragglers.png", study, found)


@dataclass(frozen=True)
class StragglerJob:
    """One run of the study: it takes times, or it trains at a learning rate."""

    one: StragglerRun

    @property
    def label(self) -> str:
        one = self.one
        return f"{one.scene.name} stragglers, {one.label}, seed {one.settings.seed}"

    @property
    def folder(self) -> None:
        """A run is a line in the folder of the study."""

    def run(
        self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]
    ) -> StragglerPace | Result:
        if self.one.rate is None:
            return pace(self.one.settings)
        return SimulationJob(self.label, self.one.settings).run(engines, on_row, is_over)


def _run(runs: list[StragglerRun], folder: RunFolder | None, processes: int) -> Found:
    """Run the study. Each run is one line of metrics, so that an interruption loses those alone
    that are running."""
    found: Found = {}

    def settle(job: StragglerJob, answer: StragglerPace | Result) -> None:
        one = job.one
        entries = found.setdefault(one.scene.name, {})
        entry = entries.setdefault(one.label, StragglerEntry(one.label))
        row: Row = {"scene": one.scene.name, "method": one.label, "seed": one.settings.seed}
        if isinstance(answer, StragglerPace):
            entry.paces.append(answer)
            row |= vars(answer)
            reporter.finished(f"{job.label}: {answer.throughput:,.0f} gradients/s")
        else:
            entry.histories.setdefault(one.rate or 0.0, []).append(answer.history)
            row |= {"learning_rate": one.rate, "history": answer.history}
            score = answer.summary[entry.key]
            reporter.finished(f"{job.label}, rate {one.rate:g}: {entry.key} {score:.4f}")
        if folder is not None:
            folder.add_row(row)

    try:
        jobs = [StragglerJob(one) for one in runs]
        with Reporter(len(jobs), "stragglers") as reporter:
            for job, answer in zip(jobs, run_jobs(jobs, processes=processes), strict=True):
                settle(job, answer)
    finally:
        if folder is not None:
            folder.close()
    return found


def _config(study: Study, jobs: list[StragglerRun]) -> dict[str, Any]:
    first = next(job.settings for job in jobs if job.rate is not None)
    return {
        "task": study.task.name,
        "seeds": list(study.seeds),
        "learning_rates": list(study.rates),
        "epochs": first.epochs,
        "batch": first.batch,
        "optimiser": OPTIMISER,
        "steps": study.steps,
        "scenes": [
            {"name": s.name, "methods": list(s.methods), "cluster": s.cluster.as_dict()}
            for s in study.scenes
        ],
    }


def _summary(study: Study, found: Found) -> dict[str, Any]:
    return {
        "task": study.task.name,
        "workers": study.scenes[0].cluster.workers,
        "seeds": len(study.seeds),
        "steps": study.steps,
        "scenes": {
            scene: [entry.as_dict() for entry in entries.values()]
            for scene, entries in found.items()
        },
        "claims": [claim.as_dict() for claim in claims(found)],
    }


# ---------------------------------------------------------------------- on the console


def _show(study: Study, found: Found) -> None:
    epochs = study.task.epochs if study.epochs is None else study.epochs
    say_line(
        f"{study.task.title}; {counted(study.scenes[0].cluster.workers, 'worker')}, "
        f"{_seeds(study)}, {OPTIMISER} on every server and no moving average; times from "
        f"{counted(study.steps, 'step')} per worker, scores over {counted(epochs, 'epoch')} at the "
        "best rate of "
        f"{', '.join(f'{rate:g}' for rate in study.rates)}"
    )
    for scene in study.scenes:
        entries = found[scene.name]
        show_table(_table(scene, entries))
        edges = [entry.label for entry in entries.values() if scene.trains and entry.is_at_edge]
        if edges:
            say_line(
                f"notice: the best rate is at the edge of the grid for {', '.join(edges)}; widen "
                "it with --lr"
            )
    out.print(_verdicts(claims(found)))


def _table(scene: StragglerScene, entries: Mapping[str, StragglerEntry]) -> Table:
    table = plain_table(scene.title)
    key = next(iter(entries.values())).key
    show = _spread_share if key == "accuracy" else _spread_loss
    columns: dict[str, Callable[[StragglerEntry], str]] = {
        "used/s": lambda entry: _spread(entry.over_seeds("throughput"))
    }
    if scene.slowest_pace is not None:
        columns["2nd half/s"] = lambda entry: _spread(entry.over_seeds("late_throughput"))
    columns |= {
        "waiting": lambda entry: _spread_share(entry.over_seeds("waiting")),
        "stale": lambda entry: (
            f"{entry.over_seeds('mean_staleness').mean:.1f}"
            if entry.knows("mean_staleness")
            else ""
        ),
        "most": lambda entry: (
            f"{max(one.max_staleness or 0 for one in entry.paces):.0f}"
            if entry.knows("max_staleness")
            else ""
        ),
        "dropped": lambda entry: f"{100 * entry.over_seeds('dropped').mean:.1f} %",
    }
    if scene.trains:
        columns["rate"] = lambda entry: f"{entry.best_rate:g}"
        columns[f"mean {key}"] = lambda entry: show(entry.average(entry.best_rate))
        columns["at the end"] = lambda entry: show(entry.final(entry.best_rate))
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries.values():
        table.add_row(entry.label, *(cell(entry) for cell in columns.values()))
    return table


def _seeds(study: Study) -> str:
    count = len(study.seeds)
    return "one seed" if count == 1 else f"{count} seeds (±: 95 % interval of the mean)"


def _verdicts(found: list[Claim]) -> Table:
    table = plain_table("What is said of them, and what we measured")
    for column in ("stragglers", "said", "verdict", "measured, seed by seed"):
        table.add_column(column, no_wrap=True)
    for claim in found:
        table.add_row(claim.scene, claim.statement, claim.verdict, _measured(claim))
    return table


def _measured(claim: Claim) -> str:
    ends = dict.fromkeys(map(show_number, (claim.measured.low, claim.measured.high)))
    return f"{' to '.join(ends)} {claim.unit}"


def _spread(span: Interval) -> str:
    half = span.high - span.mean
    return f"{span.mean:,.0f}" + (f" ± {half:,.0f}" if half else "")


def _spread_share(span: Interval) -> str:
    half = 100 * (span.high - span.mean)
    return f"{100 * span.mean:.1f}" + (f" ± {half:.1f} %" if half else " %")


def _spread_loss(span: Interval) -> str:
    half = span.high - span.mean
    return f"{span.mean:.4g}" + (f" ± {half:.2g}" if half else "")


def _draw(path: Path, study: Study, found: Found) -> None:
    stages = [
        Stage(
            scene.title,
            [_runner(entry) for entry in found[scene.name].values()],
            scene.slowest_pace,
        )
        for scene in study.scenes
        if scene.trains
    ]
    workers = study.scenes[0].cluster.workers
    stragglers_picture(
        path,
        stages,
        title="Waiting or stale: parameter servers with stragglers",
        subtitle=f"{study.task.title}; {counted(workers, 'worker')}, {OPTIMISER} on every server; "
        f"{counted(len(study.seeds), 'seed')} (bars: means and 95 % intervals, lines: means, "
        "bands: range)",
    )


def _runner(entry: StragglerEntry) -> Runner:
    rate = entry.best_rate
    return Runner(
        entry.label,
        entry.over_seeds("throughput"),
        entry.over_seeds("late_throughput"),
        entry.over_seeds("waiting"),
        rate,
        entry.histories[rate],
    )
