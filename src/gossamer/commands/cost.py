"""`gossamer cost`: the time of a step over the number of workers, by closed forms."""

from __future__ import annotations

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
from gossamer.commands.view.parallel_view import ParallelOptions, show_parallel
from gossamer.commands.work.measurement import check_place
from gossamer.commands.work.parallel_costs import ParallelCosts
from gossamer.commands.work.step_costs import (
    COST_METHODS,
    COST_WORKERS,
    StepCosts,
    check_page_place,
)
from gossamer.commands.work.step_costs import cost as predict_cost
from gossamer.config.cluster import load_cluster
from gossamer.errors import ConfigurationError
from gossamer.plan.cost.agreement import TOLERANCE, WORKERS, Agreement, agreement_table
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import show_value
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.work_depth import (
    NOT_COUNTED,
    LayerCost,
    WorkDepth,
    greedy_bounds,
    model_work_depth,
)
from gossamer.plan.hardware.device import DEVICES
from gossamer.plan.page.planner import check_forms
from gossamer.quantities import show_percent, show_seconds, size_in_bytes
from gossamer.report.pictures.figure import has_matplotlib

_ELEMENTS = (1, 64, 4096)


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
    force: bool = given.option(False, "Replace that file, and that of --page.", "--force")

    def asked(self) -> dict[str, Any]:
        """What `gossamer.cost` is told of these."""
        if self.file is not None:
            check_place(self.file, force=self.force)
            if self.hardware is None and self.trace is None:
                raise ConfigurationError(
                    "--out writes what --hardware or --trace has found; give one of them"
                )
        return {
            "hardware": self.hardware, "trace": self.trace, "precision": self.precision,
            "memory": self.memory,
        }  # fmt: skip

    def show(self, costs: StepCosts) -> None:
        for sentence in costs.sheet.sentences():
            say_line(sentence)
        if self.file is not None:
            costs.save_cluster(self.file, force=self.force)
            say_line(f"written to {self.file}; try `gossamer advise --cluster {self.file}`")


@given.with_groups
def cost(
    task: Annotated[
        str, given.shown("Whose layers and size; `none`: --model-bytes alone.")
    ] = "digits-mlp",
    model_bytes: given.ModelBytesOption = None,
    cluster: given.ClusterOption = "ethernet-10g-16",
    methods: given.MethodsOption = COST_METHODS,
    method: given.OneMethodOption = None,
    workers: Annotated[
        str, given.shown("Numbers of workers, such as 2,4,8 or 2,4,...,256.")
    ] = COST_WORKERS,
    bandwidth: Annotated[str | None, given.shown("Of every card, such as 10Gbit.")] = None,
    latency: Annotated[str | None, given.shown("Of every message, such as 50us.")] = None,
    compute: Annotated[str | None, given.shown("Of one gradient, such as 120ms.")] = None,
    sheet_of: SheetOptions = SheetOptions(),
    batch: given.BatchOption = None,
    layers: Annotated[
        bool, given.shown("Also the layers of the task: work, depth, estimated times.", "--layers")
    ] = False,
    division: ParallelOptions = ParallelOptions(),
    check: Annotated[
        bool, given.shown("Instead: the closed forms beside the simulator.", "--check")
    ] = False,
    picture: Annotated[
        Path | None, given.shown("Where the picture goes; else the run folder.")
    ] = None,
    page: Annotated[
        Path | None,
        given.shown("Write a page with sliders that answers at once.", metavar="FILE.html"),
    ] = None,
    data: given.DataOption = None,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Predict the time of a step by closed forms.

    Each worker keeps its batch. How well a method learns per sample is not in it. What has no
    closed form (slow workers, shared network cards) is simulated in time only. With --parallel the
    samples of a step stay those of all workers, and the model is divided over them.
    """
    names = given.methods_from(methods, method, COST_METHODS)
    if check:
        rows = check_agreement(None if names == COST_METHODS.split() else names)
        if keeping.as_json:
            print_json({"agreement": rows})
        return
    division.refuse(
        page=page, model_bytes=model_bytes, out=sheet_of.file,
        methods=None if names == COST_METHODS.split() else methods,
    )  # fmt: skip
    check_places(picture, page, names, cluster, force=sheet_of.force)
    costs = predict_cost(
        task, names, cluster, workers=workers, model_bytes=model_bytes, bandwidth=bandwidth,
        latency=latency, compute=compute, batch=batch, layers=layers, progress=True, data=data,
        parallel=division.parallel, network=division.network, **sheet_of.asked(),
    )  # fmt: skip
    if isinstance(costs, ParallelCosts):
        show_parallel(costs, keeping, picture, layers=layers)
        return
    show_costs(costs, keeping, picture, page, sheet_of)


def show_costs(
    costs: StepCosts, keeping: given.KeepOptions, picture: Path | None, page: Path | None,
    sheet_of: SheetOptions,
) -> None:  # fmt: skip
    """Print and keep the steps of the methods, and where they cross."""
    with kept_run(keeping.runs, "cost", costs.config(), has_page=False) as folder:
        sheet_of.show(costs)
        show_table(costs.step_table())
        if (prices := costs.price_table()) is not None:
            show_table(prices)
        for line in (*costs.explanations(), *costs.told_crossings("--json")):
            say_line(line)
        if costs.layer_times:
            show_layer_times(costs.layer_times)
        if costs.layers:
            show_layers(costs.layers)
        if keeping.as_json:
            print_json(costs.as_dict())
        if folder is not None:
            folder.write_summary(costs.as_dict())
        if page is not None:
            costs.save_page(page, force=sheet_of.force)
            say_line(f"page: {page}")
        place = picture or (folder.path / "cost.png" if folder is not None else None)
        if place is not None and can_draw():
            costs.picture(place)
            say_line(f"picture: {place}")


def check_places(
    picture: Path | None, page: Path | None, methods: Sequence[str], cluster: str, *, force: bool
) -> None:
    """Refuse what cannot be drawn or written before anything is answered."""
    if picture is not None and not has_matplotlib():
        raise ConfigurationError(
            "--picture needs matplotlib, which is not installed; run `pip install matplotlib`"
        )
    if page is None:
        return
    check_page_place(page, force=force)
    try:
        check_forms(methods, load_cluster(cluster))
    except NoClosedForm as error:
        raise ConfigurationError(f"--page answers by closed forms alone; {error}") from None


# ---------------------------------------------------------------------- layers, and the check


def show_layer_times(rows: Sequence[dict[str, Any]]) -> None:
    """Print what each layer takes by a data sheet or a trace; a trace counts no operations."""
    whole = sum(row["seconds"] for row in rows)
    table = plain_table(f"Where the time of a step goes, {show_seconds(whole)} in all", gap=2)
    add_columns(table, "layer", "operations", "bytes", "forward", "backward", "both", "share")
    for row in rows:
        counted = "operations" in row
        table.add_row(
            row["layer"],
            f"{row['operations']:.3g}" if counted else "-",
            show_bytes(row["bytes"]) if counted else "-",
            *(show_seconds(row[key]) if counted else "-" for key in ("forward_s", "backward_s")),
            show_seconds(row["seconds"]), show_percent(round(row["seconds"] / whole, 3)),
        )  # fmt: skip
    out.print(table)


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
