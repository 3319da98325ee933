"""`gossamer cost`: the time of a step over the number of workers, by closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    add_columns,
    can_draw,
    out,
    plain_table,
    print_json,
    say,
    say_line,
    show_bytes,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.probe import check_place, write
from gossamer.config.cluster import Cluster, load_cluster
from gossamer.errors import ConfigurationError
from gossamer.plan.cost.agreement import TOLERANCE, WORKERS, Agreement, agreement_table
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import Crossing, crossings, fastest, show_value
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.simulated_step import answer_over
from gossamer.plan.cost.step_time import Prediction
from gossamer.plan.cost.work_depth import (
    NOT_COUNTED,
    LayerCost,
    WorkDepth,
    greedy_bounds,
    layer_costs,
    model_work_depth,
)
from gossamer.plan.cost.workload import Workload, workload_of, workload_of_bytes
from gossamer.plan.hardware.device import DEVICES
from gossamer.plan.hardware.room import Room
from gossamer.plan.hardware.sheet import Sheet, SheetChoices, sheet
from gossamer.quantities import bytes_per_second, counted, seconds, size_in_bytes
from gossamer.report.page.cluster import shown_step
from gossamer.report.pictures.cost_picture import CostLine, FastestMark, cost_picture
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.tasks import Task, make_task

_METHODS = "all_reduce sync_server downpour easgd local_sgd d_psgd push_sum ad_psgd"
_WORKERS = "2,4,8,16,32,64,128,256"
_MOST_SENTENCES = 8
_ELEMENTS = (1, 64, 4096)
_MOST_WORKERS = 4096


@dataclass(frozen=True)
class SheetOptions:
    """The options about machines that one does not have."""

    hardware: str | None = given.option(
        None, f"Estimate the steps on {', '.join(DEVICES)}, or a device FILE.toml.", "--hardware"
    )
    precision: str = given.option("fp32", "Of that estimate: fp32, tf32 or bf16.", "--precision")
    trace: Path | None = given.option(
        None, "Instead of an estimate: a Chrome trace of one real step.", "--trace"
    )
    memory: int | None = given.option(
        None, "Of one worker, such as 24GB; what does not fit is left out.", "--memory",
        metavar="SIZE", parser=lambda text: size_in_bytes(text, "--memory"),
    )  # fmt: skip
    file: Path | None = given.option(
        None, "Where the description of that cluster goes.", "--out", metavar="FILE.toml"
    )
    force: bool = given.option(False, "Replace that file if it exists.", "--force")

    def sheet(
        self, task: Task | None, cluster: Cluster, what: Workload, counts: Sequence[int]
    ) -> Sheet:
        """For the number of workers that was asked for, if there is one."""
        if self.file is not None:
            check_place(self.file, force=self.force)
            if self.hardware is None and self.trace is None:
                raise ConfigurationError(
                    "--out writes what --hardware or --trace has found; give one of them"
                )
        chosen = SheetChoices(
            self.hardware, self.trace, self.precision, memory=float(self.memory or 0)
        )
        if len(counts) == 1:
            cluster = cluster.changed(workers=counts[0])
        return sheet(task, cluster, what.batch, chosen)

    def show(self, page: Sheet, workload: str) -> None:
        for sentence in page.sentences():
            say_line(sentence)
        if self.file is not None:
            write(self.file, page.text(workload), force=self.force)
            say_line(f"written to {self.file}; try `gossamer advise --cluster {self.file}`")


Found = dict[str, dict[int, Prediction | NoClosedForm]]


@given.with_groups
def cost(
    task: Annotated[
        str, given.shown("Whose layers and size; `none`: --model-bytes alone.")
    ] = "digits-mlp",
    model_bytes: given.ModelBytesOption = None,
    cluster: given.ClusterOption = "ethernet-10g-16",
    methods: given.MethodsOption = _METHODS,
    method: given.OneMethodOption = None,
    workers: Annotated[
        str, given.shown("Numbers of workers, such as 2,4,8 or 2,4,...,256.")
    ] = _WORKERS,
    bandwidth: Annotated[str | None, given.shown("Of every card, such as 10Gbit.")] = None,
    latency: Annotated[str | None, given.shown("Of every message, such as 50us.")] = None,
    compute: Annotated[str | None, given.shown("Of one gradient, such as 120ms.")] = None,
    sheet_of: SheetOptions = SheetOptions(),
    batch: given.BatchOption = None,
    layers: Annotated[
        bool, given.shown("Also work and depth of the task's layers.", "--layers")
    ] = False,
    check: Annotated[
        bool, given.shown("Instead: the closed forms beside the simulator.", "--check")
    ] = False,
    picture: Annotated[
        Path | None, given.shown("Where the picture goes; else the run folder.")
    ] = None,
    data: given.DataOption = None,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Predict the time of a step by closed forms.

    Each worker keeps its batch. How well a method learns per sample is not in it. What has no
    closed form (slow workers, shared network cards) is simulated in time only.
    """
    names = given.methods_from(methods, method, _METHODS)
    if check:
        rows = check_agreement(None if names == _METHODS.split() else names)
        if keeping.as_json:
            print_json({"agreement": rows})
        return
    _check_picture(picture)
    loaded = None if task == "none" else make_task(task, data=data)
    what = _workload(loaded, model_bytes, batch)
    counts = _counts(workers)
    page = sheet_of.sheet(loaded, _cluster(cluster, bandwidth, latency, compute), what, counts)
    where = page.cluster
    found = _answers(names, where, what, loaded, counts, page.room)
    sheet_of.show(page, f"{task}, batch {what.batch}")
    answers = [one for row in found.values() for one in row.values()]
    if all(isinstance(one, NoClosedForm) for one in answers):
        raise ConfigurationError(str(answers[0]))
    costs = _layers(loaded, what.batch) if layers else []
    config = {
        "task": task, "methods": names, "workers": counts, "batch": what.batch,
        "model_bytes": what.model_bytes, "cluster": where.as_dict(),
    }  # fmt: skip
    with kept_run(keeping.runs, "cost", config, has_page=False) as folder:
        summary, overtaken = _summary(found, counts, where, what, costs)
        _show(found, summary["fastest"], where, what)
        _show_crossings(overtaken, summary["leads"], summary["fastest"], counts)
        if costs:
            show_layers(costs)
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_summary(summary)
        place = picture or (folder.path / "cost.png" if folder is not None else None)
        if place is not None and can_draw():
            _draw(place, found, summary["leads"], where, what)
            say_line(f"picture: {place}")


def _check_picture(picture: Path | None) -> None:
    if picture is not None and not has_matplotlib():
        raise ConfigurationError(
            "--picture needs matplotlib, which is not installed; run `pip install matplotlib`"
        )


def _answers(
    names: Sequence[str], where: Cluster, what: Workload, task: Task | None, counts: Sequence[int],
    room: Room | None,
) -> Found:  # fmt: skip
    # Where only a size is given, any task serves, because no gradient is computed.
    timed = make_task("digits-mlp") if task is None else task
    found: Found = {}
    with Reporter(len(names), "cost", is_quiet=True) as reporter:
        for name in names:
            found[name] = answer_over(
                name, where, what, timed, counts,
                lambda what: reporter.at(f"simulating the time of {what}", 0.0),
                (lambda spec, where: "") if room is None else room.refusal,
            )  # fmt: skip
            reporter.finished(name)
    return found


def _counts(text: str) -> list[int]:
    """Read numbers separated by commas; '...' continues the two before it up to the one after."""
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


def _cluster(name: str, bandwidth: str | None, latency: str | None, compute: str | None) -> Cluster:
    cluster = load_cluster(name)
    wires, work = cluster.network, cluster.compute
    if bandwidth is not None:
        wires = dataclasses.replace(wires, bandwidth=bytes_per_second(bandwidth, "--bandwidth"))
    if latency is not None:
        wires = dataclasses.replace(wires, latency=seconds(latency, "--latency"))
    if compute is not None:
        taken = seconds(compute, "--compute")
        work = dataclasses.replace(work, seconds=taken, per_sample=0.0)
    return dataclasses.replace(cluster, network=wires, compute=work)


def _workload(task: Task | None, model_bytes: int | None, batch: int | None) -> Workload:
    if batch is not None and batch < 1:
        raise ConfigurationError(f"batch must be at least 1, got {batch}")
    if task is not None:
        return workload_of(task, model_bytes=model_bytes, batch=batch)
    if model_bytes is None:
        raise ConfigurationError("--task none leaves the size open; give it with --model-bytes")
    return workload_of_bytes(model_bytes, batch=batch or 32)


def _layers(task: Task | None, batch: int) -> list[LayerCost]:
    if task is None:
        raise ConfigurationError("--layers needs the layers of a task; give one with --task")
    return layer_costs(task.make_model(), task.train.first(batch))


def _summary(
    found: Found, counts: Sequence[int], where: Cluster, what: Workload, costs: Sequence[LayerCost]
) -> tuple[dict[str, Any], list[Crossing]]:
    """Return what --json prints, and the crossings over the number of workers."""
    names = list(found)
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
        "predictions": [p.as_dict() for p in predictions if isinstance(p, Prediction)],
        "refused": refused,
        "fastest": {str(round(count)): methods for count, methods in best.items()},
        "crossings": [one.as_dict() for one in (*overtaken, *other)],
        "leads": leads,
        "layers": [dataclasses.asdict(layer) for layer in costs],
    }  # fmt: skip
    return summary, overtaken


def _show(found: Found, fastest: dict[str, list[str]], where: Cluster, what: Workload) -> None:
    wires = where.network
    title = (
        f"Milliseconds per step: {show_bytes(what.model_bytes)} model, computing "
        f"{shown_step(where.compute, what.batch)}, {8e-9 * wires.bandwidth:g} Gbit/s, "
        f"{1e6 * wires.latency:g} us, {wires.collective} (* fastest)"
    )
    table = plain_table(title, gap=2)
    add_columns(table, "workers", *fastest, no_wrap=True)
    for name, row in found.items():
        cells = [_cell(row[int(count)], name in best) for count, best in fastest.items()]
        table.add_row(name, *cells)
    best = [
        max((one.samples_per_second for row in found.values()
             if isinstance(one := row[int(count)], Prediction)), default=0.0)
        for count in fastest
    ]  # fmt: skip
    table.add_row("samples/s, fastest", *(f"{speed:,.0f}" for speed in best))
    show_table(table)
    _explain(found)


def _explain(found: Found) -> None:
    """Say what was simulated, what was refused and why, and the notes of the predictions."""
    simulated = [
        name for name, row in found.items()
        if any(isinstance(one, Prediction) and one.simulated_because for one in row.values())
    ]  # fmt: skip
    if simulated:
        say_line(
            f"~: no closed form here, so the time of a step was simulated: {', '.join(simulated)}"
        )
    lines: dict[str, list[str]] = {}
    for name, row in found.items():
        refusals = [f"-: {one}" for one in row.values() if isinstance(one, NoClosedForm)]
        notes = [note for one in row.values() if isinstance(one, Prediction) for note in one.notes]
        for line in [*refusals[:1], *(f"note: {note}" for note in notes[-1:])]:
            lines.setdefault(line, []).append(name)
    for line, names in lines.items():
        whose = "" if any(name in line for name in names) else f" ({', '.join(names)})"
        say_line(f"{line}{whose}")


def _cell(one: Prediction | NoClosedForm, is_fastest: bool) -> str:
    if isinstance(one, NoClosedForm):
        return "-"
    mark = "*" if is_fastest else ""
    return f"{'~' if one.simulated_because else ''}{1e3 * one.step_seconds:.4g}{mark}"


def _show_crossings(
    overtaken: Sequence[Crossing],
    leads: Sequence[dict[str, Any]],
    best: dict[str, list[str]],
    counts: Sequence[int],
) -> None:
    first, last = (" and ".join(best[str(count)]) or "nobody" for count in (counts[0], counts[-1]))
    say_line(f"fastest with {counted(counts[0], 'worker')}: {first}; with {counts[-1]}: {last}")
    leading = [one for one in overtaken if one.as_dict() in leads]
    rest = [one for one in overtaken if one not in leading]
    shown = [*leading, *rest][:_MOST_SENTENCES]
    for one in shown:
        ends = ", and leads" if one in leading else ""
        say_line(f"{one}{ends}")
    if len(overtaken) > len(shown):
        say(f"{len(overtaken) - len(shown)} more crossings: --json")
    if not overtaken:
        say("no method overtakes another between these numbers of workers")


def _draw(
    place: Path, found: Found, leads: Sequence[dict[str, Any]], where: Cluster, what: Workload
) -> None:
    known = {
        name: {count: one for count, one in row.items() if isinstance(one, Prediction)}
        for name, row in found.items()
    }
    lines = [
        CostLine(
            name,
            {count: one.step_seconds for count, one in row.items()},
            {count: one.samples_per_second for count, one in row.items()},
        )
        for name, row in known.items()
    ]
    marks = {one["value"]: FastestMark(one["value"], one["faster"]) for one in leads}
    wires = where.network
    cost_picture(
        place, lines, list(marks.values()),
        title=f"What a step costs: {where.title or where.name}",
        subtitle=(
            f"closed forms: {show_bytes(what.model_bytes)} model, computing "
            f"{1e3 * where.compute.mean_seconds(what.batch):.4g} ms, "
            f"{8e-9 * wires.bandwidth:g} Gbit/s, latency {1e6 * wires.latency:g} µs, "
            f"{what.batch} samples per worker and step"
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------- layers, and the check


def show_layers(costs: Sequence[LayerCost]) -> None:
    """Print one row for each layer, and the whole model below."""
    table = plain_table("Work (multiplications) and depth of one step, forward and backward", gap=2)
    table.add_column("layer")
    add_columns(table, "kind", "work", "depth", "work/depth", "parameters", "activations")

    def add(name: str, kind: str, cost: WorkDepth | LayerCost, layers: Sequence[LayerCost]) -> None:
        table.add_row(
            name, kind, f"{cost.work:.3g}", f"{cost.depth:g}", f"{cost.parallelism:.3g}",
            show_bytes(sum(layer.parameter_bytes for layer in layers)),
            show_bytes(sum(layer.activation_bytes for layer in layers)),
        )  # fmt: skip

    for one in costs:
        add(one.name, one.kind, one, [one])
    whole = model_work_depth(costs)
    add("all", "", whole, costs)
    out.print(table)
    if missing := [one.name for one in costs if one.kind == NOT_COUNTED]:
        say_line(f"not counted, so that the model computes more than this: {', '.join(missing)}")
    for elements in _ELEMENTS:
        least, most = greedy_bounds(whole.work, whole.depth, elements)
        say(
            f"on {elements} processing elements any greedy schedule takes {least:.3g} to "
            f"{most:.3g} operations in a row"
        )
    for one in costs:
        if one.alternatives:
            ways = ", ".join(f"{name} {cost.work:.3g}" for name, cost in one.alternatives.items())
            say_line(f"{one.name} forward, by algorithm: {ways}")


def check_agreement(methods: Sequence[str] | None) -> list[dict[str, Any]]:
    """Print predicted and simulated steps of every method, size and bandwidth; return the rows."""
    names = tuple(FORMS) if methods is None else tuple(methods)
    table = plain_table("Milliseconds per step: predicted | simulated, and their difference", gap=2)
    for column in ("method", "bandwidth", *(f"p = {count}" for count in WORKERS)):
        table.add_column(column, no_wrap=True)
    close: list[Agreement] = []
    cells: list[str] = []
    with Reporter(len(names) * 2 * len(WORKERS), "agreement") as reporter:
        for one in agreement_table(names):
            label = place = ""
            if isinstance(one, NoClosedForm):
                cells.append("-")
                reporter.finished(str(one))
            else:
                close.append(one)
                cells.append(_pair(one))
                label, place = one.prediction.method, _bandwidth(one)
                reporter.finished(f"{label}, {one.prediction.workers} workers")
            if len(cells) == len(WORKERS):
                table.add_row(label, place, *cells)
                cells = []
    out.print(table)
    if close:
        worst = max(close, key=lambda one: abs(one.error))
        within = sum(one.is_close for one in close)
        say_line(
            f"{within} of {len(close)} within {100 * TOLERANCE:g} %; the largest difference is "
            f"{100 * worst.error:+.2f} % ({worst.prediction.method}, "
            f"{worst.prediction.workers} workers, {_bandwidth(worst)})"
        )
    return [one.as_dict() for one in close]


def _bandwidth(one: Agreement) -> str:
    return show_value("bandwidth", one.bandwidth)


def _pair(one: Agreement) -> str:
    predicted, simulated = 1e3 * one.prediction.step_seconds, 1e3 * one.simulated_s
    return f"{predicted:.4g} | {simulated:.4g}\n{100 * one.error:+.2f} %"
