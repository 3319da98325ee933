"""The time of a step for a method, a cluster and a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.network import FLOWS
from gossamer.config.settings import split_groups
from gossamer.methods import MethodSpec, parse_method
from gossamer.plan.cost.alpha_beta import Machines
from gossamer.plan.cost.case import (
    Arrangement,
    Meetings,
    NoClosedForm,
    StepParts,
    case_of,
    notes_of,
)
from gossamer.plan.cost.forms import COLLECTIVE_ONLY, FORMS
from gossamer.plan.cost.workload import Workload
from gossamer.topology import make_topology

LONG_RUN = 1_000_000
"""Steps per worker from which options that depend on the length of a run are derived."""


@dataclass(frozen=True)
class Prediction:
    """The predicted step of one method on one cluster."""

    method: str
    workers: int
    parts: StepParts
    batch: int
    epoch_samples: int
    options: dict[str, Any]
    notes: tuple[str, ...] = ()
    simulated_because: str = ""
    """Why there is no closed form, if the step was simulated in time only."""

    @property
    def step_seconds(self) -> float:
        """The mean seconds per gradient of one worker."""
        return self.parts.total_s

    @property
    def samples_per_second(self) -> float:
        """The samples of all workers together; each worker has the same batch."""
        return self.workers * self.batch / self.step_seconds

    @property
    def epoch_seconds(self) -> float:
        return self.epoch_samples / self.samples_per_second

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "method": self.method,
            "workers": self.workers,
            "step_seconds": self.step_seconds,
            "epoch_seconds": self.epoch_seconds,
            "samples_per_second": self.samples_per_second,
            "parts": dataclasses.asdict(self.parts),
            "options": self.options,
            "notes": list(self.notes),
            "simulated_because": self.simulated_because or None,
        }


def predict(
    method: str | MethodSpec, cluster: Cluster, workload: Workload, *, steps: int = LONG_RUN
) -> Prediction:
    """The step time in closed form; `NoClosedForm`, with the reason, where there is none."""
    spec = parse_method(method)
    if spec.compressor is not None:
        raise NoClosedForm(
            f"{spec} has no closed form, as encoding takes its time and others' bytes are gathered;"
            " simulate it"
        )
    if spec.name not in FORMS:
        raise NoClosedForm(
            f"{spec.name} has no closed form here; simulate it, or choose one of {', '.join(FORMS)}"
        )
    if spec.shape.machines > 1:
        raise NoClosedForm(f"a replica of {spec} is spread over several machines; simulate it")
    check_equal(cluster)
    compute = cluster.compute.at(workload.batch)
    case = case_of(arranged(spec, cluster, workload, steps), compute, cluster.network, workload)
    parts = FORMS[spec.name](case)
    return Prediction(
        str(spec), cluster.workers, parts, workload.batch, workload.samples,
        dict(case.options), tuple(notes_of(spec.name, parts, case)),
    )  # fmt: skip


def check_equal(cluster: Cluster) -> None:
    """Refuse a cluster for which no method has a closed form."""
    if cluster.faults:
        raise NoClosedForm(
            f"the closed forms are for equal workers, but cluster {cluster.name} has the fault "
            f"'{cluster.faults[0]}'; use an equal cluster, or simulate it"
        )
    if cluster.has_flows or cluster.phases.are_there:
        raise NoClosedForm(
            f"the closed forms are for equal cards that nothing else uses, but cluster "
            f"{cluster.name} has {_beyond_forms(cluster)}; simulate it"
        )


def _beyond_forms(cluster: Cluster) -> str:
    """What a cluster has that no closed form knows, in the words of its description."""
    wires = cluster.network
    found = {
        "[sites]": cluster.sites.names,
        "[background]": cluster.background.is_there,
        "[phases]": cluster.phases.are_there,
        "up or down": wires.up or wires.down,
        "uplink": wires.uplink,
        "processor_share": wires.processor_share,
        "collectives as flows": wires.collectives == FLOWS,
    }
    return " and ".join(what for what, there in found.items() if there)


def arranged(
    method: str | MethodSpec, cluster: Cluster, workload: Workload, steps: int = LONG_RUN
) -> Arrangement:
    """Who takes part where; `NoClosedForm` where the forms do not cover it."""
    spec = parse_method(method)
    groups = split_groups(spec.groups, cluster)
    ends = len(groups) or cluster.workers
    members = cluster.workers // ends
    shares = workload.shares(spec.servers) if spec.method.has_server else ()
    machines = _machines(cluster, range(cluster.workers)[::members])
    inside = _machines(cluster, groups[0]) if groups else None
    if spec.name not in COLLECTIVE_ONLY:
        _check_cards(spec, cluster, ends, len(shares))
    options = spec.resolve(ends, steps)
    return Arrangement(
        ends=ends, members=members, machines=machines,
        leaves_rack=cluster.rack_of(machines.count - 1) > 0, inside=inside,
        inside_leaves_rack=inside is not None and cluster.rack_of(inside.count - 1) > 0,
        shares=shares, servers_on_workers=spec.placement == "workers",
        meetings=_meetings(options["topology"], ends) if "topology" in options else None,
        options=options,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _meetings(topology: str, ends: int) -> Meetings:
    graph = make_topology(topology, ends)
    degrees = tuple(
        max(
            max(len(graph.out_neighbours(rank, step)), len(graph.in_neighbours(rank, step)))
            for rank in graph.members
        )
        for step in range(graph.period)
    )
    if graph.sides is None:
        return Meetings(graph.name, degrees)
    active, passive = graph.sides
    links = sum(len(graph.neighbours(rank)) for rank in active)
    return Meetings(graph.name, degrees, len(active), len(passive), links)


def _machines(cluster: Cluster, ranks: Sequence[int]) -> Machines:
    """The machines of these workers."""
    count = len({cluster.machine_of(rank) for rank in ranks})
    return Machines(count, -(-len(ranks) // count), cluster.network.memory_bandwidth)


def _check_cards(spec: MethodSpec, cluster: Cluster, ends: int, servers: int) -> None:
    """Messages have closed forms only if every end has a card of its own in the same rack."""
    if ends > cluster.machine_of(cluster.workers - 1) + 1:
        raise NoClosedForm(
            f"{spec.name} with {cluster.workers_per_machine} workers on a machine has no closed "
            "form, as their messages share a card; give it groups=host, or simulate it"
        )
    own = servers if spec.placement == "own" else 0
    if cluster.rack_of(cluster.machine_of(cluster.workers - 1) + own) > 0:
        raise NoClosedForm(
            f"{spec.name} over several racks has no closed form, as some of its messages leave "
            f"their rack and some do not; take at most {cluster.machines_per_rack} machines, its "
            "servers included, or simulate it"
        )
