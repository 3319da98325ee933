"""The page and the command have the same forms: one text, in two languages, gives equal numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planner_model import MISSING, has_engine, run_javascript

from gossamer.config.cluster import Cluster, Compute, Wires, load_cluster
from gossamer.config.price import Price
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.crossing import crossings
from gossamer.plan.cost.forms import FORMS
from gossamer.plan.cost.step_time import predict
from gossamer.plan.cost.workload import Workload, workload_of, workload_of_bytes
from gossamer.plan.hardware.room import Room
from gossamer.plan.page.javascript import javascript
from gossamer.plan.page.planner import PlannerQuestion, forms_script, planner_data
from gossamer.runs.folder import to_json
from gossamer.tasks import Task, make_task
from gossamer.tasks.flat_model import ModelSize
from tiers import wide

pytestmark = pytest.mark.skipif(not has_engine(), reason=MISSING)
TASK = make_task("digits-mlp")
COUNTS = (1, 2, 3, 8, 24)
METHODS = [
    *FORMS, "all_reduce:overlap=false", "all_reduce:stale=1", "local_sgd:groups=4",
    "push_sum:overlap=2", "push_sum:topology=matchings", "sync_server:servers=3",
    "sync_server:servers=2,placement=workers", "easgd:synchronous=true", "backup_workers:backups=3",
    "downpour:n_push=2,n_fetch=4", "downpour:n_push=4,n_fetch=2", "d_psgd:topology=torus",
]  # fmt: skip
Values = dict[str, float]


def cluster_of(**changes: Any) -> Cluster:
    compute = Compute(seconds=0.004, per_sample=0.0005, distribution="normal", jitter=0.1)
    plain = Cluster("asked", workers=16, compute=compute, network=Wires(latency=5e-5))
    return dataclasses.replace(plain, **changes)


def page_of(
    cluster: Cluster, workload: Workload, methods: list[str], task: Task | None = None
) -> dict[str, Any]:
    asked = PlannerQuestion(methods, cluster, workload, COUNTS, task)
    return json.loads(to_json(planner_data(asked)))


def at_values(cluster: Cluster, values: Values) -> Cluster:
    compute = dataclasses.replace(
        cluster.compute, seconds=values["fixed"], per_sample=values["per_sample"]
    )
    wires = dataclasses.replace(
        cluster.network, bandwidth=values["bandwidth"], latency=values["latency"]
    )
    where = dataclasses.replace(cluster, compute=compute, network=wires)
    return where.changed(workers=int(values["workers"]))


def in_python(
    method: str, cluster: Cluster, workload: Workload, values: Values, periods: list[str]
) -> Any:
    """The step as the command predicts it, or None where it refuses."""
    spec = parse_method(method)
    if values["period"]:
        same = dict.fromkeys(periods, int(values["period"]))
        spec = dataclasses.replace(spec, options={**spec.options, **same})
    size = values["parameters"] * values["bits"] / 8
    what = dataclasses.replace(workload.scaled(size), batch=int(values["batch"]))
    try:
        found = predict(spec, at_values(cluster, values), what)
    except ConfigurationError:
        return None
    return [found.step_seconds, found.samples_per_second, *dataclasses.astuple(found.parts)]


def in_javascript(page: dict[str, Any], grid: list[Values], folder: Path) -> list[list[Any]]:
    ask = f"""
const model = new CostModel({json.dumps(page)});
const grid = {json.dumps(grid)};
const answer = (one) => one.refused ? null : [one.step, one.speed, ...Object.values(one.parts)];
model.known.methods.map((method) => grid.map((values) => answer(model.step(method, values))))"""
    return run_javascript(forms_script() + ask, folder)


OTHERS: dict[str, list[float]] = {
    "workers": [24, 1, 2, 3, 8], "bandwidth": [1.25e6, 1.25e8, 1.25e11], "latency": [2e-3, 0.0],
    "parameters": [3e6, 2e3, 4e9], "bits": [1, 16], "batch": [4096, 1], "period": [7, 1],
    "fixed": [0.0, 3.0], "per_sample": [0.02, 0.0],
}  # fmt: skip


def grid_around(start: Values, *, is_fine: bool) -> Iterator[Values]:
    """All values at their start, and each at another one; or at all others, and all together."""
    yield start
    for name, values in OTHERS.items():
        for value in values if is_fine else values[:1]:
            yield {**start, name: value}
    corners = list(itertools.product(*(values[:2] for values in OTHERS.values())))
    for values in random.Random(7).sample(corners, 60 if is_fine else 0):
        found = {**start, **dict(zip(OTHERS, values, strict=True))}
        if found["fixed"] + found["per_sample"] > 0:
            yield found


def check_agreement(
    cluster: Cluster, workload: Workload, methods: list[str], folder: Path, *, is_fine: bool = False
) -> int:
    page = page_of(cluster, workload, methods)
    grid = list(grid_around(page["start"], is_fine=is_fine))
    answered = 0
    rows = zip(methods, page["methods"], in_javascript(page, grid, folder), strict=True)
    for method, told, row in rows:
        for values, found in zip(grid, row, strict=True):
            expected = in_python(method, cluster, workload, values, told["periods"])
            assert (found is None) == (expected is None), (method, values)
            if expected is None:
                continue
            answered += 1
            pairs = zip(found, expected, strict=True)
            assert all(
                one is not None
                and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9 * expected[0])
                for one, other in pairs
            ), (method, values, found, expected)
    return answered


def test_page_and_command_give_equal_steps(tmp_path: Path) -> None:
    """Every form at every slider's start and elsewhere, with compute times that vary."""
    forms = {form: method for method, form in FORMS.items()}
    answered = check_agreement(cluster_of(), workload_of(TASK), list(forms.values()), tmp_path)
    assert answered == (1 + len(OTHERS)) * len(forms)


@wide
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("place", ["plain", "racks", "server", "bytes", "tree"])
def test_they_agree_on_every_corner_of_the_grid(
    place: str, is_constant: bool, tmp_path: Path
) -> None:
    """Options, groups, machines, racks, slow servers, collectives, models of bytes alone."""
    compute = dataclasses.replace(cluster_of().compute, jitter=0.0 if is_constant else 0.2)
    cluster = {
        "plain": cluster_of(compute=compute),
        "racks": cluster_of(
            compute=compute, workers_per_machine=4, machines_per_rack=2,
            network=Wires(oversubscription=3.0, rack_latency=1e-4, memory_bandwidth=1e10),
        ),
        "server": cluster_of(compute=compute, network=Wires(server_bandwidth=5e8)),
        "bytes": cluster_of(compute=compute),
        "tree": cluster_of(compute=compute, network=Wires(collective="halving_doubling")),
    }[place]  # fmt: skip
    workload = workload_of_bytes(3e7) if place == "bytes" else workload_of(TASK, model_bytes=8e7)
    assert check_agreement(cluster, workload, METHODS, tmp_path, is_fine=True) > 1000


def test_page_and_command_cross_at_the_same_places(tmp_path: Path) -> None:
    """The same search over the same grid, in both languages."""
    cluster, workload = cluster_of(), workload_of(TASK, model_bytes=4e7)
    methods = ["all_reduce", "d_psgd", "push_sum"]
    page = page_of(cluster, workload, methods)
    grid = [cluster.network.bandwidth * 10.0**step for step in range(-2, 3)]
    ask = f"""
const model = new CostModel({json.dumps(page)});
const [methods, grid] = {json.dumps([methods, grid])};
model.crossings("bandwidth", methods, grid, model.known.start)"""
    found = run_javascript(forms_script() + ask, tmp_path)
    expected = [one.as_dict() for one in crossings("bandwidth", methods, grid, cluster, workload)]
    assert len(expected) >= 2
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one.pop("value"), other.pop("value"), rel_tol=1e-9)
        assert one == other


def spent(page: dict[str, Any], folder: Path) -> list[Any]:
    ask = f"""
const model = new CostModel({json.dumps(page)});
const start = model.known.start;
const both = (one) => [model.memory(one, start), model.epoch(start, model.step(one, start))];
model.known.methods.map(both)"""
    return run_javascript(forms_script() + ask, folder)


def test_page_and_command_need_the_same_memory_and_money(tmp_path: Path) -> None:
    """At the start of the sliders: bytes of a worker, and dollars and joules of an epoch."""
    price = Price(worker_hour=2.0, watts=300.0, idle_watts=100.0)
    compute = dataclasses.replace(cluster_of().compute, memory=1e6)
    cluster, workload = cluster_of(price=price, compute=compute), workload_of_bytes(4e5)
    names = ["all_reduce", "easgd"]
    room = Room(cluster, ModelSize(400_000, slots=1), 0.0)
    page = page_of(cluster, workload, names)
    for name, (memory, epoch) in zip(names, spent(page, tmp_path), strict=True):
        found = predict(name, cluster, workload)
        computing = found.parts.compute_s / found.step_seconds * found.epoch_seconds
        assert memory == {"bytes": room.need(name).total, "has": 1e6}
        bill = price.bill(found.epoch_seconds, [computing] * 16, 0.0)
        assert epoch["seconds"] == pytest.approx(found.epoch_seconds)
        assert {key: epoch[key] for key in bill} == pytest.approx(bill)


@wide
def test_page_and_command_measure_the_same_activations(tmp_path: Path) -> None:
    """On fake tensors, at the task's own batch."""
    workload = workload_of(TASK)
    room = Room.of(TASK, cluster_of(), workload.batch)
    page = page_of(cluster_of(), workload, ["push_sum"], TASK)
    ((memory, _),) = spent(page, tmp_path)
    assert memory["bytes"] == room.need("push_sum").total


# ---------------------------------------------------------------------- the translation itself


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two numbers."""

    one: float
    other: float = 2.0

    @property
    def total(self) -> float:
        return self.one + self.other

    def times(self, case: float) -> float:
        return case * self.total


def worded(values: list[int], empty: list[int], *, default: int = 3) -> list[object]:
    """What differs between the languages."""
    found: list[object] = [-7 // 2, -7 % 3, round(2.5), round(3.5), round(-0.5)]
    found.append(values[-1])
    found.append(sorted(values)[-2:-1] or [0])
    found.append("empty" if not empty else "full")
    found.append(empty or values)
    found.append(values and default)
    found.append(max(values, default=0) + max((one for one in empty), default=9))
    for at, value in enumerate(reversed(values)):
        if value == 5:
            continue
        found.append(at * value)
        if at > 1:
            break
    found.append(sum(2 * one for one in values if 1 < one <= 8))
    found.append([0.5] * 3)
    found.append(Pair(other=5.0, one=1.0).times(4.0) + Pair(1.0).total)
    found.append((9).bit_length())
    found.append(f"{default} is {2.26:.1f}")
    return found


def test_translated_text_means_what_it_meant(tmp_path: Path) -> None:
    """Division and rounding of negative numbers, indices from the end, empty lists, names."""
    runtime = forms_script().partition("function ")[0]
    text = runtime + javascript([worded]) + "\nworded([3, 11, 5, 8, 2], [])"
    expected = [
        list(one) if isinstance(one, tuple) else one for one in worded([3, 11, 5, 8, 2], [])
    ]
    assert run_javascript(text, tmp_path) == expected


def with_a_dictionary(value: int) -> dict[str, int]:
    return {"value": value}


def test_what_cannot_be_translated_is_refused_with_its_place() -> None:
    """One sentence: the function, the line, what was met."""
    with pytest.raises(ConfigurationError, match=r"with_a_dictionary, line 2 .*knows no Dict"):
        javascript([with_a_dictionary])


def test_a_cluster_without_closed_forms_has_no_page() -> None:
    """A slow worker, or links between sites."""
    for name in ("one-slow-of-8", "halos-geo-16"):
        with pytest.raises(NoClosedForm):
            page_of(load_cluster(name), workload_of(TASK), ["all_reduce"])
