"""`gossamer lab bandwidth`: time to a target against bandwidth, for the best of each kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, out, plain_table, say, say_line
from gossamer.commands.studies.batch import (
    BatchOptions,
    BatchPlan,
    MachineOptions,
    continued_plan,
    new_plan,
    reading,
    run_batch,
)
from gossamer.commands.work.jobs import JobWatch, number_of_jobs, run_jobs
from gossamer.commands.work.simulations import EngineCache, OnRow, SimulationJob
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.arrival import History, target_of
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.studies.lab.bandwidth import (
    BANDWIDTHS,
    METHODS,
    BandwidthCurve,
    BandwidthRun,
    BandwidthStudy,
    best_of_kinds,
    findings,
    show_bandwidth,
)
from gossamer.studies.lab.pictures import bandwidth_picture

_TASK = "shakespeare-gpt:layers=12,width=264,heads=4"
"""Ten million parameters."""
_KEYS = (
    "task", "cluster", "methods", "learning_rates", "target", "epochs", "batch", "optimiser",
    "schedule", "evaluations", "seed",
)  # fmt: skip
_RATES = (0.001, 0.003)
"""Usual ones of AdamW, where nobody gives any."""
_KEPT = ("epochs", "virtual_seconds")
CURVES = "bandwidth.json"
_COMMAND = "gossamer lab bandwidth"


@given.with_groups
def bandwidth(
    task: Annotated[
        str | None, given.shown(f"What to train; default: {_TASK}, 10 million parameters.")
    ] = None,
    cluster: Annotated[
        str | None, given.shown("Workers, their speed and latency; default: equal-8.")
    ] = None,
    methods: Annotated[
        str | None, given.shown("Separated by spaces, all_reduce first; default: one of each kind.")
    ] = None,
    lr: Annotated[
        str | None, given.shown("The grid for every method; default: 0.001,0.003.")
    ] = None,
    target: given.TargetOption = None,
    epochs: given.EpochsOption = None,
    batch: given.BatchOption = None,
    optimiser: Annotated[
        str | None, given.shown("Default: adamw.", "--optimiser", "--optimizer")
    ] = None,
    schedule: Annotated[str | None, given.shown("Default: constant.")] = None,
    evaluations: Annotated[int | None, given.shown("Of each training; default: 20.")] = None,
    seed: Annotated[int | None, given.shown("Default: 0.")] = None,
    redraw: Annotated[
        Path | None,
        given.shown(f"Draw the curves of this {CURVES} again, and train nothing.", metavar="FILE"),
    ] = None,
    jobs: given.JobsOption = None,
    machine: MachineOptions = MachineOptions(),
    options: BatchOptions = BatchOptions(),
) -> None:
    """Time to a target against bandwidth, 1 Mbit/s to 100 Gbit/s.

    Synchronous methods are trained once; what their samples take at each bandwidth comes from runs
    without gradients. Asynchronous ones are trained at five bandwidths.
    """
    asked = {
        "--task": task, "--cluster": cluster, "--methods": methods, "--lr": lr, "--target": target,
        "--epochs": epochs, "--batch": batch, "--optimiser": optimiser, "--schedule": schedule,
        "--evaluations": evaluations, "--seed": seed,
    }  # fmt: skip
    if redraw is not None:
        _redraw(redraw, {**asked, "--resume": options.resume, "--minutes": options.minutes})
        return
    if options.resume is not None:
        del asked["--target"]  # histories do not depend on it
        plan = continued_plan(options.resume, machine, asked, _KEYS, "trainings")
        if target is not None:
            plan = dataclasses.replace(plan, choices={**plan.choices, "target": target})
    else:
        choices: Row = {
            "task": task or _TASK, "cluster": cluster or "equal-8",
            "methods": methods.split() if methods else list(METHODS),
            "learning_rates": list(given.rates_from(lr) or _RATES), "target": target,
            "epochs": epochs, "batch": batch, "optimiser": optimiser or "adamw",
            "schedule": schedule or "constant", "seed": seed or 0,
            "evaluations": 20 if evaluations is None else evaluations,
        }  # fmt: skip
        plan = new_plan(choices, machine)
    run_batch(
        BandwidthBatch(plan, options, number_of_jobs(jobs)), options, "lab-bandwidth", _COMMAND
    )


def _study(plan: BatchPlan) -> BandwidthStudy:
    choices = plan.choices
    base = make_settings(
        choices["task"], choices["methods"][0], choices["cluster"], data=plan.data,
        device=plan.device, threads=plan.threads, precision=plan.precision, seed=choices["seed"],
        epochs=choices["epochs"], batch=choices["batch"], optimiser=choices["optimiser"],
        schedule=choices["schedule"], evaluations=choices["evaluations"],
    )  # fmt: skip
    return BandwidthStudy(
        base, tuple(choices["methods"]), tuple(choices["learning_rates"]),
        target_of(choices["target"], score=str(base.task.score)),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _loaded(text: str, data: str | None, machine: tuple[Any, ...]) -> BandwidthStudy:
    """The study of a plan; the trainings of a process share it."""
    device, threads, precision = machine
    return _study(
        BatchPlan(json.loads(text), Path(data) if data else None, device, threads, precision)
    )


@dataclass(frozen=True)
class BandwidthJob:
    """One training, as plain data: a process loads the task by itself."""

    one: BandwidthRun
    plan: BatchPlan

    @property
    def label(self) -> str:
        return self.one.label

    @property
    def folder(self) -> None:
        """A training is kept in the folder of its study."""

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> list[Row]:
        plan = self.plan
        study = _loaded(
            json.dumps(plan.choices), plan.data and str(plan.data),
            (plan.device, plan.threads, plan.precision),
        )  # fmt: skip
        job = SimulationJob(self.label, study.settings(self.one))
        history: History = job.run(engines, on_row, is_over).history
        return [{key: row[key] for key in (*_KEPT, str(study.key))} for row in history]


@dataclass
class BandwidthBatch:
    """The trainings of the study; the folder is brought up to date after each of them."""

    plan: BatchPlan
    options: BatchOptions
    jobs: int
    histories: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    ended: str = "running"
    notices: tuple[str, ...] = ()
    found: Row = field(default_factory=dict[str, Any])
    """The curves, once they are known."""
    study: BandwidthStudy = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained before anything is written."""
        self.options.check()
        self.study = _study(self.plan)
        self.work = self.study.runs()
        for one in self.work:
            self.study.settings(one)
        resume = self.options.resume
        if resume is not None and (resume / "progress.json").exists():
            with reading(resume):
                kept = json.loads((resume / "progress.json").read_text(encoding="utf-8"))
                self.histories = kept["histories"]

    def config(self) -> Row:
        return self.plan.as_dict()

    def summary(self) -> Row:
        finished = sum(one.label in self.histories for one in self.work)
        told = {"ended": self.ended, "finished": finished, "trainings": len(self.work)}
        return told | self.found

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        def done(job: BandwidthJob, history: list[Row]) -> None:
            self.histories[job.label] = history
            if folder is not None:
                folder.write_progress({"histories": self.histories})
            score = history[-1][str(self.study.key)]
            reporter.finished(f"{job.label}: {self.study.key} {score or float('nan'):.4g}")

        missing = [one for one in self.work if one.label not in self.histories]
        jobs = [BandwidthJob(one, self.plan) for one in missing]
        with Reporter(len(missing), "trainings") as reporter:
            try:
                for _ in run_jobs(
                    jobs, JobWatch(on_done=done, deadline=deadline), processes=self.jobs
                ):
                    pass
            except KeyboardInterrupt:
                return "interrupted"
        return "finished" if len(self.histories) == len(self.work) else "stopped"

    def show(self, folder: RunFolder | None) -> None:
        """The methods all of whose trainings are done, once the first one is among them."""
        study, target = self.study, self.study.target_of(self.histories)
        missing = {one.method for one in self.work if one.label not in self.histories}
        done = [method for method in study.methods if method not in missing]
        if missing:
            say_line(
                f"{counted(len(self.histories), 'training')} of {len(self.work)} are done; not yet "
                f"trained to the end: {', '.join(one for one in study.methods if one in missing)}"
            )
        if study.methods[0] in missing:
            return
        with Reporter(len(done), "times") as reporter:
            curves: list[BandwidthCurve] = []
            for method in done:
                curves.append(study.curve(method, self.histories, target))
                reporter.finished(method)
        self.found = found = described(study, target, curves)
        show_curves(found)
        if folder is not None:
            path = folder.path / CURVES
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            if can_draw() and any(one is not None for c in curves for one in c.seconds):
                draw_curves(folder.path / "bandwidth.png", found)
                say(f"picture: {folder.path / 'bandwidth.png'}")


# ---------------------------------------------------------------------- the stored curves


def described(study: BandwidthStudy, target: float, curves: list[BandwidthCurve]) -> Row:
    """All that the table and the picture need, as the file keeps it."""
    base = study.base
    workers = base.cluster.workers
    parameters = sum(own.numel() for own in base.task.make_model().parameters())
    return {
        "task": base.task.title, "parameters": parameters, "workers": workers,
        "cluster": base.cluster.as_dict(), "epochs": base.epochs, "batch": base.batch,
        "optimiser": base.optimiser, "seed": base.seed, "key": str(study.key), "target": target,
        "learning_rates": list(study.rates), "bandwidths": list(BANDWIDTHS),
        "curves": [curve.as_dict() for curve in curves], "findings": findings(curves),
    }  # fmt: skip


def curves_of(found: Row) -> list[BandwidthCurve]:
    return [
        BandwidthCurve(
            one["method"], one["kind"], tuple(one["rates"]), tuple(one["seconds"])
        )
        for one in found["curves"]
    ]  # fmt: skip


def _words(found: Row) -> str:
    size = found["parameters"]
    many = f"{size / 1e6:.3g} million" if size >= 1e6 else f"{size / 1e3:.3g} thousand"
    return (
        f"{found['task']}, {many} parameters, {counted(found['workers'], 'worker')}; to "
        f"{found['key']} {found['target']:.4g}"
    )


def show_curves(found: Row) -> None:
    """A row for each method, a column for each decade, and what follows."""
    table: Table = plain_table("Seconds to the target (best of each column: *)")
    table.add_column("method", no_wrap=True)
    shown = range(0, len(found["bandwidths"]), 3)
    for at in shown:
        table.add_column(show_bandwidth(found["bandwidths"][at]), justify="right")
    curves = curves_of(found)
    for curve in curves:
        cells: list[str] = []
        for at in shown:
            own = curve.seconds[at]
            known = [one.seconds[at] for one in curves if one.seconds[at] is not None]
            star = "*" if own is not None and own == min(one for one in known if one) else ""
            cells.append("." if own is None else f"{own:.4g}{star}")
        table.add_row(curve.method, *cells)
    say_line(_words(found))
    out.print(table)
    for line in found["findings"]:
        say_line(line)


def draw_curves(path: Path, found: Row) -> None:
    curves = curves_of(found)
    kinds = {
        kind: [None if own is None else own[0] for own in best]
        for kind, best in best_of_kinds(curves).items()
    }
    bandwidth_picture(
        path, [8 * at for at in found["bandwidths"]], kinds,
        {curve.method: curve.seconds for curve in curves},
        title="Where all-reduce ends, where local steps begin, where bits are needed",
        subtitle=_words(found),
    )  # fmt: skip


def _redraw(path: Path, asked: Row) -> None:
    """The table and the picture of a stored file, beside it."""
    changed = [option for option, value in asked.items() if value is not None]
    if changed:
        raise ConfigurationError(
            f"--redraw draws what its file holds and trains nothing; leave out {', '.join(changed)}"
        )
    try:
        found: Row = json.loads(path.read_text(encoding="utf-8"))
        show_curves(found)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ConfigurationError(
            f"{path} is not a file of curves; give the {CURVES} of a run of `{_COMMAND}`"
        ) from None
    if can_draw():
        draw_curves(path.with_suffix(".png"), found)
        say(f"picture: {path.with_suffix('.png')}")
