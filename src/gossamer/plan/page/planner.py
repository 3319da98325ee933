"""What the page of `gossamer cost --page` is told, and the page itself.

A slider moves numbers only: speeds, sizes and periods. Who takes part where (groups, machines,
topologies, servers) depends on the method and on the number of workers, so it is worked out here
for every number of workers that the page has. Compute times vary in proportion to their mean, so
the expected slowest of n workers is a table in units of that mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import FunctionType
from typing import Any, cast

from gossamer.config.cluster import Cluster, Compute
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.plan.cost.alpha_beta import Machines
from gossamer.plan.cost.case import Arrangement, NoClosedForm, case_of, notes_of
from gossamer.plan.cost.crossing import TIE, order_changes
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.pace import deviation, expected_largest_normal, order_means
from gossamer.plan.cost.step_time import LONG_RUN, arranged, check_equal
from gossamer.plan.cost.workload import Workload, pieces_of
from gossamer.plan.hardware.operators import step_work
from gossamer.plan.hardware.room import copies_of
from gossamer.plan.page.javascript import javascript
from gossamer.quantities import show_bytes
from gossamer.report.looks import places
from gossamer.report.page.html_file import asset, html_text, one_script
from gossamer.tasks import Task

Rows = Mapping[int, Mapping[str, Any]]

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of workers of a page, besides those that were asked for."""
_PERIODS = ("period", "inner", "n_push", "n_fetch")
"""The options that say how many steps a worker works alone."""
_WIRES = (
    "rack_latency", "oversubscription", "server_bandwidth", "collective",
)  # fmt: skip
_STYLES = ("page.css", "parts.css", "cluster.css", "cost.css", "print.css")
_LOOKS = (
    "elements.js", "numbers.js", "state.js", "looks.js", "tables.js", "figures.js", "axes.js",
    "frame.js", "contents.js", "sliders.js", "cost_page.js",
)  # fmt: skip


@dataclass(frozen=True)
class PlannerQuestion:
    """Where the sliders start, and what they do not move."""

    methods: Sequence[str]
    cluster: Cluster
    workload: Workload
    counts: Sequence[int]
    task: Task | None
    precision: str = "fp32"
    base: str = "gossamer cost"
    """The command that asks the same, without what the sliders say."""


def check_forms(methods: Sequence[str], cluster: Cluster) -> None:
    """Refuse what no closed form knows."""
    check_equal(cluster)
    for method in methods:
        if (name := parse_method(method).name) not in FORMS:
            raise NoClosedForm(f"{name} has none; choose from {', '.join(FORMS)}")


def planner_html(asked: PlannerQuestion) -> str:
    """The page as text."""
    data = planner_data(asked)
    script = one_script([forms_script(), *map(asset, _LOOKS)])
    styles = [asset(name) for name in _STYLES]
    return html_text(data["title"], data["title"], asked.base, data, script, styles)


@cache
def forms_script() -> str:
    """The closed forms in JavaScript, and the model that asks them: all that knows no page."""
    roots = [*FORMS.values(), case_of, notes_of, order_changes, pieces_of, Machines]
    forms = javascript(
        cast(Sequence[FunctionType], roots),
        provided=("Crossing", "deviation", "expected_largest_normal", "order_means"),
        ignored=("_check", "_check_sizes"),
    )
    named = {name: cast(FunctionType, form).__name__ for name, form in FORMS.items()}
    rows = ", ".join(f"{name}: {form}" for name, form in named.items())
    table = f"const FORMS = {{ {rows} }};"
    return "\n".join([asset("python.js"), forms, table, asset("cost_model.js")])


def planner_data(asked: PlannerQuestion) -> dict[str, Any]:
    """All that the page knows, as plain values for JSON."""
    check_forms(asked.methods, asked.cluster)
    cluster, workload = asked.cluster, asked.workload
    element = _bytes_of_a_number(asked.task)
    counts = sorted({*asked.counts, cluster.workers})
    specs = [parse_method(method) for method in asked.methods]
    rows = {
        str(spec): {count: _place(spec, cluster, workload, count) for count in counts}
        for spec in specs
    }
    looks = places(rows)
    return {
        "title": "What a step costs",
        "subtitle": _subtitle(asked),
        "version": _version(),
        "base": asked.base,
        "start": {
            "parameters": workload.model_bytes / element, "bits": 8 * element,
            "workers": cluster.workers, "bandwidth": cluster.network.bandwidth,
            "latency": cluster.network.latency, "fixed": cluster.compute.seconds,
            "per_sample": cluster.compute.per_sample, "batch": workload.batch, "period": 0,
        },
        "counts": counts,
        "tie": TIE,
        "methods": [
            {
                "label": str(spec), "name": spec.name, "look": looks[str(spec)],
                "periods": _periods(spec), "places": rows[str(spec)],
            }
            for spec in specs
        ],
        "wires": {name: getattr(cluster.network, name) for name in _WIRES},
        "compute": _compute(cluster.compute.at(workload.batch), counts, rows.values()),
        "workload": {
            "model_bytes": workload.model_bytes, "scalar_bytes": workload.scalar_bytes,
            "tensors": workload.tensors, "costs": workload.costs, "samples": workload.samples,
            "optimiser_slots": workload.optimiser_slots,
        },
        "room": _room(asked, element),
        "price": _price(cluster, counts),
        "notices": _notices(cluster),
    }  # fmt: skip


def _subtitle(asked: PlannerQuestion) -> str:
    where = asked.cluster
    size = f"a model of {show_bytes(asked.workload.model_bytes)}"
    whose = size if asked.task is None else asked.task.name
    return (
        f"It starts at {where.title or where.name} with {whose}; move a slider or type a number, "
        "and share the address of the page."
    )


def _notices(cluster: Cluster) -> list[str]:
    if not cluster.compute.pause_probability:
        return []
    return [
        "The random pauses of this cluster are taken to be as many times as long as a gradient as "
        "they are at the start, whatever the sliders say of a gradient's time."
    ]


def _version() -> str:
    try:
        return metadata.version("gossamer")
    except metadata.PackageNotFoundError:
        return "not installed"


def _bytes_of_a_number(task: Task | None) -> int:
    if task is None:
        return 4
    return next(task.make_model().parameters()).element_size()


def _periods(spec: MethodSpec) -> list[str]:
    known = spec.method.values(2, LONG_RUN, spec.options, is_paper=spec.is_paper)
    return [name for name in _PERIODS if name in known]


def _place(spec: MethodSpec, cluster: Cluster, workload: Workload, count: int) -> Mapping[str, Any]:
    """Who takes part where, with so many workers, or why there is no closed form."""
    try:
        where = cluster.changed(workers=count)
        at = arranged(spec, where, workload)
        copies = copies_of(spec, where, workload.optimiser_slots)
    except ConfigurationError as error:
        return {"refused": str(error)}
    return {**_plain(at), "copies": copies}


def _plain(at: Arrangement) -> dict[str, Any]:
    fields = {entry.name: getattr(at, entry.name) for entry in dataclasses.fields(at)}
    inside = None if at.inside is None else dataclasses.astuple(at.inside)
    meetings = None if at.meetings is None else dataclasses.asdict(at.meetings)
    machines = dataclasses.astuple(at.machines)
    return {**fields, "machines": machines, "inside": inside, "meetings": meetings}


def _compute(compute: Compute, counts: Sequence[int], rows: Collection[Rows]) -> dict[str, Any]:
    """Compute times in units of their mean without pauses: the expected times in order, for every
    number of workers that the page has, and the slowest of other numbers that a form asks for."""
    own = {name: getattr(compute, name) for name in ("unoverlapped_seconds", "forward_share")}
    unit = dataclasses.replace(
        compute, seconds=1.0, pause_seconds=compute.pause_seconds / compute.seconds
    )
    there = [place for row in rows for place in row.values() if "refused" not in place]
    ends = {place["ends"] for place in there}
    told: dict[str, Any] = {
        "own": own,
        "deviation": deviation(unit),
        "orders": {},
        "largest": {},
        "normals": {count: expected_largest_normal(count) for count in ends},
    }
    if told["deviation"]:
        met = set[int]()
        for one in there:
            degrees = one["meetings"]["degrees"] if one["meetings"] else ()
            awaited = (1, one["ends"], *(degree + 1 for degree in degrees))
            met |= {one["members"] * count for count in awaited}
        told["orders"] = {count: order_means(unit, count) for count in counts}
        told["largest"] = {count: order_means(unit, count)[-1] for count in met - set(counts)}
    return told


def _room(asked: PlannerQuestion, element: int) -> dict[str, Any] | None:
    """What a worker holds besides models: measured at three batches, on fake tensors."""
    has, task, batch = asked.cluster.compute.memory, asked.task, asked.workload.batch
    try:
        works = {
            size: step_work(task, size, precision=asked.precision)
            for size in sorted({1, batch, 4 * batch}) if task is not None
        }  # fmt: skip
    except ConfigurationError:
        # A model that does not run on fake tensors; where its memory matters, `sheet` has said so.
        works = {}
    if not works and not has:
        return None
    size = works[batch].size if works else None
    return {
        "has": has,
        "parameter_bytes": element,
        "slots": asked.workload.optimiser_slots if size is None else size.slots,
        "fixed_bytes": 0 if size is None else size.fixed_bytes,
        "activations": [[batch, work.activation_bytes] for batch, work in works.items()],
    }


def _price(cluster: Cluster, counts: Sequence[int]) -> dict[str, Any] | None:
    spendings = cluster.price.spendings
    if not spendings:
        return None
    per_second = {count: cluster.price.for_workers(count).per_second(count) for count in counts}
    return {
        "has_dollars": any(per_second.values()), "has_watts": "joules" in spendings,
        "per_second": per_second, "watts": cluster.price.watts,
        "idle_watts": cluster.price.idle_watts,
    }  # fmt: skip
