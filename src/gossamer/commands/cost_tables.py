"""The other tables of `gossamer cost`: work and depth of layers, agreement with the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gossamer.commands.console import Reporter, out, show_bytes
from gossamer.plan.cost.agreement import TOLERANCE, WORKERS, Agreement, agreement_table
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import show_value
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.work_depth import NOT_COUNTED, LayerCost, greedy_bounds, model_work_depth

_ELEMENTS = (1, 64, 4096)


def show_layers(costs: Sequence[LayerCost]) -> None:
    """One row a layer, the whole model below."""
    table = Table(
        title="Work (multiplications) and depth of one step, forward and backward",
        title_justify="left", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for column in ("layer", "kind"):
        table.add_column(column)
    for column in ("work", "depth", "work/depth", "parameters", "activations"):
        table.add_column(column, justify="right")
    for one in costs:
        table.add_row(
            one.name, one.kind, f"{one.work:.3g}", f"{one.depth:g}", f"{one.parallelism:.3g}",
            show_bytes(one.parameter_bytes), show_bytes(one.activation_bytes),
        )  # fmt: skip
    whole = model_work_depth(costs)
    table.add_row(
        "all", "", f"{whole.work:.3g}", f"{whole.depth:g}", f"{whole.parallelism:.3g}",
        show_bytes(sum(one.parameter_bytes for one in costs)),
        show_bytes(sum(one.activation_bytes for one in costs)),
    )  # fmt: skip
    out.print(table)
    if missing := [one.name for one in costs if one.kind == NOT_COUNTED]:
        out.print(
            f"not counted, so that the model computes more than this: {', '.join(missing)}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    for elements in _ELEMENTS:
        least, most = greedy_bounds(whole.work, whole.depth, elements)
        out.print(
            f"on {elements} processing elements any greedy schedule takes {least:.3g} to "
            f"{most:.3g} operations in a row",
            markup=False,
        )
    for one in costs:
        if one.alternatives:
            ways = ", ".join(f"{name} {cost.work:.3g}" for name, cost in one.alternatives.items())
            out.print(f"{one.name} forward, by algorithm: {ways}", markup=False, soft_wrap=True)


def check_agreement(methods: Sequence[str] | None) -> list[dict[str, Any]]:
    """Predicted and simulated steps of every method, size and bandwidth, as they come."""
    names = tuple(FORMS) if methods is None else tuple(methods)
    table = Table(
        title="Milliseconds per step: predicted | simulated, and their difference",
        title_justify="left", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for column in ("method", "bandwidth", *(f"p = {count}" for count in WORKERS)):
        table.add_column(column, no_wrap=True)
    rows: list[dict[str, Any]] = []
    close: list[Agreement] = []
    cells: list[str] = []
    with Reporter(len(names) * 2 * len(WORKERS), "agreement") as reporter:
        for one in agreement_table(names):
            if isinstance(one, NoClosedForm):
                cells.append("-")
                reporter.finished(str(one))
            else:
                close.append(one)
                rows.append(one.as_dict())
                cells.append(_pair(one))
                reporter.finished(f"{one.prediction.method}, {one.prediction.workers} workers")
            if len(cells) == len(WORKERS):
                place = "" if isinstance(one, NoClosedForm) else _bandwidth(one)
                label = "" if isinstance(one, NoClosedForm) else one.prediction.method
                table.add_row(label, place, *cells)
                cells = []
    out.print(table)
    if close:
        worst = max(close, key=lambda one: abs(one.error))
        within = sum(one.is_close for one in close)
        out.print(
            f"{within} of {len(close)} within {100 * TOLERANCE:g} %; the largest difference is "
            f"{100 * worst.error:+.2f} % ({worst.prediction.method}, "
            f"{worst.prediction.workers} workers, {_bandwidth(worst)})",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    return rows


def _bandwidth(one: Agreement) -> str:
    return show_value("bandwidth", one.bandwidth)


def _pair(one: Agreement) -> str:
    predicted, simulated = 1e3 * one.prediction.step_seconds, 1e3 * one.simulated_s
    return f"{predicted:.4g} | {simulated:.4g}\n{100 * one.error:+.2f} %"
