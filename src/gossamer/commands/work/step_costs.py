"""`gossamer.cost`: the time of a step over the number of workers, by closed forms."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gossamer.commands.console import add_columns, plain_table, show_bytes
from gossamer.commands.work.answer import Answer, new_folder, shows_progress
from gossamer.commands.work.comparison import Methods, method_names
from gossamer.commands.work.measurement import check_place, write
from gossamer.commands.work.parallel_costs import ParallelCosts, parallel_cost
from gossamer.commands.work.simulations import command_line
from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.settings import loaded_task
from gossamer.errors import ConfigurationError
from gossamer.files import replace_text
from gossamer.observe.progress import Reporter
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import Crossing, crossings, fastest
from gossamer.plan.cost.simulated_step import answer_over
from gossamer.plan.cost.step_time import Prediction, predict
from gossamer.plan.cost.work_depth import LayerCost, layer_costs
from gossamer.plan.cost.workload import Workload, asked_workload
from gossamer.plan.hardware.sheet import Sheet, SheetChoices, sheet
from gossamer.plan.page.planner import COUNTS, PlannerQuestion, planner_html
from gossamer.quantities import bytes_per_second, counted, seconds, size_in_bytes
from gossamer.report.page.cluster import shown_step
from gossamer.report.pictures.cost_picture import CostLine, FastestMark, cost_picture
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.runs.expense import show_dollars
from gossamer.runs.folder import RunFolder
from gossamer.runs.verdict import enumerated
from gossamer.tasks import Task, make_task

COST_METHODS = "all_reduce sync_server downpour easgd local_sgd d_psgd push_sum ad_psgd"
COST_WORKERS = "2,4,8,16,32,64,128,256"
_MOST_SENTENCES = 8
_MOST_WORKERS = 4096

_Amount = str | float | None
Found = dict[str, dict[int, Prediction | NoClosedForm]]


@dataclass(frozen=True)
class _Question:
    """What was asked, with every value filled in."""

    task: str
    counts: list[int]
    sheet: Sheet
    workload: Workload
    loaded: Task | None
    precision: str
    where: str
    """The cluster as it was named."""

    @property
    def cluster(self) -> Cluster:
        return self.sheet.cluster


class StepCosts(Answer):
    """The time of a step for several methods and numbers of workers, and where they cross."""

    def __init__(
        self, asked: _Question, found: Found, layers: list[LayerCost], timed: bool
    ) -> None:
        self._asked = asked
        self._found = found
        self.layers = layers
        """Work and depth of each layer, if they were asked for."""
        self.layer_times = asked.sheet.layer_rows() if timed else []
        """What each layer takes by the data sheet or by the trace, if there is one."""
        self._summary, self._overtaken = _summary(found, asked, layers)
        self._summary["layer_times"] = self.layer_times

    @property
    def sheet(self) -> Sheet:
        """The cluster, what its steps were estimated from, and what fits into a worker."""
        return self._asked.sheet

    @property
    def title(self) -> str:
        where = self._asked.cluster
        return f"What a step costs: {where.title or where.name}"

    @property
    def fastest(self) -> dict[int, list[str]]:
        """For each number of workers the methods that process the most samples per second."""
        return {int(count): names for count, names in self._summary["fastest"].items()}

    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each method and number of workers; None where there is no answer."""
        return [
            _row(name, count, one, name in self.fastest[count])
            | _epoch_dollars(self._asked.cluster, count, one)
            for name, row in self._found.items()
            for count, one in row.items()
        ]

    def config(self) -> dict[str, Any]:
        """What the folder keeps of the question."""
        asked = self._asked
        return {
            "task": asked.task, "methods": list(self._found), "workers": asked.counts,
            "batch": asked.workload.batch, "model_bytes": asked.workload.model_bytes,
            "cluster": asked.cluster.as_dict(),
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return self._summary

    def save(self, path: str | Path) -> Path:
        """Keep figures and picture in a new folder, as the command does; return its path."""
        place = new_folder(path)
        place.mkdir(parents=True)
        folder = RunFolder(place)
        folder.write_config({**self.config(), "command_line": command_line()})
        folder.write_summary(self._summary)
        if has_matplotlib():
            self.picture(place / "cost.png")
        return place

    def save_cluster(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the cluster that was estimated, a .toml file that every command takes."""
        place = Path(path)
        check_place(place, force=force)
        text = self.sheet.text(f"{self._asked.task}, batch {self._asked.workload.batch}")
        write(place, text, force=force)
        return place

    def save_page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write a page that answers the same question at once, with sliders; return its path."""
        asked, place = self._asked, Path(path)
        check_page_place(place, force=force)
        page = PlannerQuestion(
            list(self._found), asked.cluster, asked.workload, [*COUNTS, *asked.counts],
            asked.loaded, asked.precision,
            shlex.join(["gossamer", "cost", "--task", asked.task, "--cluster", asked.where]),
        )  # fmt: skip
        replace_text(place, planner_html(page))
        return place

    def picture(self, place: Path) -> None:
        """Draw the time of a step and the samples per second against the number of workers."""
        _picture(place, self._found, self._summary["leads"], self._asked)

    def _draw(self, place: Path) -> bool:
        self.picture(place)
        return True

    def _shown(self) -> tuple[Table, list[str]]:
        told = self.told_crossings("as_dict()['crossings'] has them")
        return self.step_table(), [*told, *self.explanations(), *self.sheet.sentences()]

    def step_table(self) -> Table:
        """Milliseconds per step, a row for each method and a column for each number of workers."""
        found, best = self._found, self._summary["fastest"]
        table = plain_table(_heading(self._asked), gap=2)
        add_columns(table, "workers", *best, no_wrap=True)
        for name, row in found.items():
            cells = [_cell(row[int(count)], name in names) for count, names in best.items()]
            table.add_row(name, *cells)
        rows = [{at: one.samples_per_second for at, one in row.items()
                 if isinstance(one, Prediction)} for row in found.values()]  # fmt: skip
        most = [max(row.get(int(count), 0.0) for row in rows) for count in best]
        table.add_row("samples/s, fastest", *(f"{speed:,.0f}" for speed in most))
        if (alone := self._speed_alone()) is not None:
            table.add_row("times one worker", *(f"{speed / alone:.3g}" for speed in most))
        return table

    def _speed_alone(self) -> float | None:
        """The samples per second of the fastest worker by itself: is the cluster worth it?"""
        try:
            where = self._asked.cluster.fastest_alone()
            return predict("all_reduce", where, self._asked.workload).samples_per_second
        except NoClosedForm:
            return None

    def price_table(self) -> Table | None:
        """Dollars per epoch, for the worker-hours alone; None where the cluster has no prices."""
        counts, where = self._asked.counts, self._asked.cluster
        rows = {
            name: [_epoch_dollars(where, at, row[at]).get("epoch_dollars") for at in counts]
            for name, row in self._found.items()
        }
        if not any(cell is not None for cells in rows.values() for cell in cells):
            return None
        table = plain_table("Dollars per epoch for the worker-hours, without egress", gap=2)
        add_columns(table, "workers", *map(str, counts), no_wrap=True)
        for name, cells in rows.items():
            table.add_row(name, *map(show_dollars, cells))
        return table

    def explanations(self) -> list[str]:
        """What was simulated, what was refused and why, and the notes of the predictions."""
        found, said = self._found, list[str]()
        simulated = [
            name for name, row in found.items()
            if any(isinstance(one, Prediction) and one.simulated_because for one in row.values())
        ]  # fmt: skip
        if simulated:
            said.append(
                "~: no closed form here, so the time of a step was simulated: "
                f"{', '.join(simulated)}"
            )
        lines: dict[str, list[str]] = {}
        for name, row in found.items():
            refusals = [f"-: {one}" for one in row.values() if isinstance(one, NoClosedForm)]
            notes = [n for one in row.values() if isinstance(one, Prediction) for n in one.notes]
            for line in [*refusals[:1], *(f"note: {note}" for note in notes[-1:])]:
                lines.setdefault(line, []).append(name)
        for line, names in lines.items():
            whose = "" if any(name in line for name in names) else f" ({', '.join(names)})"
            said.append(f"{line}{whose}")
        return said

    def told_crossings(self, where_more: str) -> list[str]:
        """Which methods are fastest with few and with many workers, and who overtakes whom."""
        counts = self._asked.counts
        leads, overtaken = self._summary["leads"], self._overtaken
        few, many = (self._leaders(count) for count in (counts[0], counts[-1]))
        also = f"; with {counts[-1]}: {many}" if len(counts) > 1 else ""
        said = [f"fastest with {counted(counts[0], 'worker')}: {few}{also}"]
        leading = [one for one in overtaken if one.as_dict() in leads]
        rest = [one for one in overtaken if one not in leading]
        shown = [*leading, *rest][:_MOST_SENTENCES]
        said += [f"{one}{', and leads' if one in leading else ''}" for one in shown]
        if len(overtaken) > len(shown):
            said.append(f"{len(overtaken) - len(shown)} more crossings: {where_more}")
        if not overtaken and len(counts) > 1:
            said.append("no method overtakes another between these numbers of workers")
        return said

    def _leaders(self, count: int) -> str:
        """The fastest with so many workers, in words."""
        if not (names := self.fastest[count]):
            return "nobody"
        some = any(isinstance(row[count], NoClosedForm) for row in self._found.values())
        return enumerated(names) + (" of those that have an answer there" if some else "")


def cost(
    task: str | Task | None = "digits-mlp",
    methods: Methods = COST_METHODS,
    cluster: str | Path | Cluster = "ethernet-10g-16",
    *,
    workers: str | Sequence[int] = COST_WORKERS,
    model_bytes: str | float | None = None,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    compute: str | float | None = None,
    batch: int | None = None,
    layers: bool = False,
    hardware: str | None = None,
    trace: Path | str | None = None,
    precision: str = "fp32",
    memory: str | float | None = None,
    progress: bool | None = None,
    data: Path | str | None = None,
    parallel: bool = False,
    network: str | None = None,
) -> StepCosts | ParallelCosts:
    """Predict the time of a step over the number of workers, by closed forms.

    Without a task `model_bytes` says all. `bandwidth`, `latency` and `compute` stand for those of
    the cluster: numbers of bytes per second and seconds, or texts such as "10Gbit", "50us" and
    "120ms". `layers` adds work and depth of the task's layers. What has no closed form (slow
    workers, shared network cards) is simulated in time only.

    For machines that one does not have, `hardware` names a device (or the file of one) on which the
    task's steps are estimated at a `precision`, and `trace` a Chrome trace of one real step. What
    does not fit into the `memory` of a worker ("24GB") is left out.

    With `parallel` the best way is looked for to divide the model, or a published `network`.
    """
    names = method_names(methods)
    if compute is not None and (hardware is not None or trace is not None):
        raise ConfigurationError(
            "--compute says how long a gradient takes, as do --hardware and --trace; give one"
        )
    loaded = None if task is None or task == "none" or network else loaded_task(task, data)
    where = _changed(load_cluster(cluster), bandwidth, latency, compute)
    room = 0.0 if memory is None else float(size_in_bytes(memory, "--memory"))
    chosen = SheetChoices(hardware, None if trace is None else Path(trace), precision, memory=room)
    if network is not None and not parallel:
        raise ConfigurationError("--network is a model for --parallel; give both")
    if parallel:
        own = [] if workers == COST_WORKERS else _counts(workers)
        took = 0.0 if compute is None else seconds(compute, "--compute")
        return parallel_cost(
            loaded, network, where, own, batch=batch, chosen=chosen, compute_s=took
        )
    what = asked_workload(loaded, model_bytes, batch)
    named = "none" if loaded is None else loaded.spec or loaded.name
    counts = _counts(workers)
    if len(counts) == 1:
        where = where.changed(workers=counts[0])
    given = cluster.name if isinstance(cluster, Cluster) else str(cluster)
    made = sheet(loaded, where, what, chosen)
    asked = _Question(named, counts, made, what, loaded, precision, given)
    shown = Reporter(len(names), "cost", is_quiet=True) if shows_progress(progress) else None
    with shown or nullcontext() as reporter:
        found = _answers(names, asked, loaded, reporter)
    answers = [one for row in found.values() for one in row.values()]
    if all(isinstance(one, NoClosedForm) for one in answers):
        raise ConfigurationError(str(answers[0]))
    needs_model = layers and (loaded or not made.made_from)
    return StepCosts(asked, found, _layers(loaded, what.batch) if needs_model else [], layers)


def check_page_place(place: Path, *, force: bool) -> None:
    """Refuse a place to which no page can be written."""
    check_place(place, force=force, option="--page", ending=".html", what="page")


def _answers(
    names: Sequence[str], asked: _Question, task: Task | None, reporter: Reporter | None
) -> Found:
    # Where only a size is given, any task serves, because no gradient is computed.
    timed = make_task("digits-mlp") if task is None else task

    def simulating(what: str) -> None:
        if reporter is not None:
            reporter.at(f"simulating the time of {what}", 0.0)

    room = asked.sheet.room
    found: Found = {}
    for name in names:
        found[name] = answer_over(
            name, asked.cluster, asked.workload, timed, asked.counts, simulating,
            (lambda spec, where: "") if room is None else room.refusal,
        )  # fmt: skip
        if reporter is not None:
            reporter.finished(name)
    return found


def _row(name: str, count: int, one: Prediction | NoClosedForm, is_fastest: bool) -> dict[str, Any]:
    known = one if isinstance(one, Prediction) else None
    return {
        "method": name,
        "workers": count,
        "step_seconds": None if known is None else known.step_seconds,
        "epoch_seconds": None if known is None else known.epoch_seconds,
        "samples_per_second": None if known is None else known.samples_per_second,
        "is_fastest": is_fastest,
        "simulated": known is not None and bool(known.simulated_because),
        "refused": None if known is not None else str(one),
    }


def _epoch_dollars(
    cluster: Cluster, count: int, one: Prediction | NoClosedForm
) -> dict[str, float]:
    """What the workers cost for an epoch; empty where they have no price. Which bytes leave a site
    or a machine has no closed form, so egress is not in it."""
    hours = cluster.price.for_workers(count).per_second(count)
    if not hours or isinstance(one, NoClosedForm):
        return {}
    return {"epoch_dollars": hours * one.epoch_seconds}


def _counts(given: str | Sequence[int]) -> list[int]:
    """Read numbers separated by commas; '...' continues the two before it up to the one after."""
    text = given if isinstance(given, str) else ",".join(map(str, given))
    counts: list[int] = []
    goes_on = False
    for word in (part.strip() for part in text.split(",")):
        if word == "..." and len(counts) >= 2:
            goes_on = True
            continue
        if not word.isdigit() or not 1 <= int(word) <= _MOST_WORKERS:
            raise ConfigurationError(
                f"--workers must be numbers from 1 to {_MOST_WORKERS} such as 2,4,8 or "
                f"2,4,...,256, got {word!r}"
            )
        while goes_on and counts[-2] < counts[-1] < int(word):
            low, high = counts[-2:]
            following = high * high // low if high % low == 0 else 2 * high - low
            counts.append(min(following, int(word)))
        goes_on = False
        counts.append(int(word))
    return sorted(set(counts))


def _changed(cluster: Cluster, bandwidth: _Amount, latency: _Amount, compute: _Amount) -> Cluster:
    wires, work = cluster.network, cluster.compute
    if bandwidth is not None:
        rate = bytes_per_second(bandwidth, "--bandwidth")
        wires = dataclasses.replace(wires, bandwidth=rate, up=0.0, down=0.0)
    if latency is not None:
        wires = dataclasses.replace(wires, latency=seconds(latency, "--latency"))
    if compute is not None:
        taken = seconds(compute, "--compute")
        work = dataclasses.replace(work, seconds=taken, per_sample=0.0)
    return dataclasses.replace(cluster, network=wires, compute=work)


def _layers(task: Task | None, batch: int) -> list[LayerCost]:
    if task is None:
        raise ConfigurationError("--layers needs the layers of a task; give one with --task")
    return layer_costs(task.make_model(), task.train.first(batch))


def _summary(
    found: Found, asked: _Question, costs: Sequence[LayerCost]
) -> tuple[dict[str, Any], list[Crossing]]:
    """Return what --json prints, and the crossings over the number of workers."""
    names, counts, where, what = list(found), asked.counts, asked.cluster, asked.workload
    predictions = [one for row in found.values() for one in row.values()]
    known = {
        (name, count): one.samples_per_second
        for name, row in found.items()
        for count, one in row.items()
        if isinstance(one, Prediction) and one.simulated_because
    }
    overtaken = crossings("workers", names, counts, where, what, known)
    wide = [10.0 ** (step / 2) for step in range(-4, 5)]
    other = [
        crossing
        for axis, middle in (
            ("bandwidth", where.network.bandwidth), ("model_bytes", what.model_bytes),
            ("batch", what.batch),
        )
        for crossing in crossings(axis, names, [middle * factor for factor in wide], where, what)
    ]  # fmt: skip
    best = fastest("workers", names, counts, where, what, known)
    leads = [
        one.as_dict() for one in overtaken
        if one.faster in fastest("workers", names, [one.value], where, what, known)[one.value]
    ]  # fmt: skip
    refused = {
        name: str(refusals[0]) for name, row in found.items()
        if (refusals := [one for one in row.values() if isinstance(one, NoClosedForm)])
    }  # fmt: skip
    summary = {
        "ended": "finished",
        "cluster": where.name, "model_bytes": what.model_bytes, "batch": what.batch,
        "predictions": [
            p.as_dict() | _epoch_dollars(where, p.workers, p)
            for p in predictions if isinstance(p, Prediction)
        ],
        "refused": refused,
        "fastest": {str(round(count)): methods for count, methods in best.items()},
        "crossings": [one.as_dict() for one in (*overtaken, *other)],
        "leads": leads,
        "layers": [dataclasses.asdict(layer) for layer in costs],
    }  # fmt: skip
    return summary, overtaken


def _heading(asked: _Question) -> str:
    where, wires = asked.cluster, asked.cluster.network
    return (
        f"Milliseconds per step: {show_bytes(asked.workload.model_bytes)} model, computing "
        f"{shown_step(where.compute, asked.workload.batch)}, {8e-9 * wires.egress:g} Gbit/s, "
        f"{1e6 * wires.latency:g} us, {wires.collective} (* fastest)"
    )


def _cell(one: Prediction | NoClosedForm, is_fastest: bool) -> str:
    if isinstance(one, NoClosedForm):
        return "-"
    mark = "*" if is_fastest else ""
    return f"{'~' if one.simulated_because else ''}{1e3 * one.step_seconds:.4g}{mark}"


def _picture(place: Path, found: Found, leads: Sequence[dict[str, Any]], asked: _Question) -> None:
    where, what = asked.cluster, asked.workload
    known = {
        name: {count: one for count, one in row.items() if isinstance(one, Prediction)}
        for name, row in found.items()
    }
    lines: list[CostLine] = []
    for name, row in known.items():
        times = {count: one.step_seconds for count, one in row.items()}
        rates = {count: one.samples_per_second for count, one in row.items()}
        lines.append(CostLine(name, times, rates))
    marks = {one["value"]: FastestMark(one["value"], one["faster"]) for one in leads}
    wires = where.network
    cost_picture(
        place, lines, list(marks.values()),
        title=f"What a step costs: {where.title or where.name}",
        subtitle=(
            f"closed forms: {show_bytes(what.model_bytes)} model, computing "
            f"{1e3 * where.compute.mean_seconds(what.batch):.4g} ms, "
            f"{8e-9 * wires.egress:g} Gbit/s, latency {1e6 * wires.latency:g} µs, "
            f"{what.batch} samples per worker and step"
        ),
    )  # fmt: skip
