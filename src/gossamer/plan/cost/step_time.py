"""The time of a step for a method, a cluster and a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.network import FLOWS
from gossamer.config.settings import split_groups
from gossamer.methods import MethodSpec, parse_method
from gossamer.plan.cost.alpha_beta import AlphaBeta, Machines
from gossamer.plan.cost.case import Case, NoClosedForm, StepParts
from gossamer.plan.cost.forms import COLLECTIVE_ONLY, FORMS
from gossamer.plan.cost.pace import ComputeTime
from gossamer.plan.cost.workload import Piece, Workload

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
    case = _case(spec, cluster, workload, steps)
    parts = FORMS[spec.name](case)
    return Prediction(
        str(spec), cluster.workers, parts, workload.batch, workload.samples,
        dict(case.options), tuple(_notes(spec, parts, case)),
    )  # fmt: skip


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


def _case(spec: MethodSpec, cluster: Cluster, workload: Workload, steps: int) -> Case:
    compute, wires = cluster.compute.at(workload.batch), cluster.network
    groups = split_groups(spec.groups, cluster)
    ends = len(groups) or cluster.workers
    members = cluster.workers // ends
    shards = workload.shards(spec.servers) if spec.method.has_server else ()
    machines = _machines(cluster, range(cluster.workers)[::members])
    link = _link(cluster, machines.count)
    if spec.name not in COLLECTIVE_ONLY:
        _check_cards(spec, cluster, ends, len(shards))
    pace, pieces = ComputeTime(compute), workload.pieces
    if groups:
        inside = _machines(cluster, groups[0])
        near = _link(cluster, inside.count)
        spread_s = inside.broadcast_s(near, workload.model_bytes)
        averaged_s = inside.all_reduce_s(near, wires.collective, workload.model_bytes)
        pace = ComputeTime(compute, members, spread_s + averaged_s)
        pieces = (Piece(workload.model_bytes, 1.0),)
    return Case(
        ends=ends, pace=pace, link=link, machines=machines, wires=wires, workload=workload,
        pieces=pieces, shards=shards, servers_on_workers=spec.placement == "workers",
        options=spec.resolve(ends, steps),
    )  # fmt: skip


def _machines(cluster: Cluster, ranks: Sequence[int]) -> Machines:
    """The machines of these workers."""
    count = len({cluster.machine_of(rank) for rank in ranks})
    return Machines(count, -(-len(ranks) // count), cluster.network.memory_bandwidth)


def _link(cluster: Cluster, machines: int) -> AlphaBeta:
    """The link between this many machines; the slower one between racks."""
    wires = cluster.network
    per_byte, latency_s = 1 / wires.bandwidth, wires.latency
    if cluster.rack_of(machines - 1) > 0:
        latency_s += wires.rack_latency
        per_byte *= wires.oversubscription
    return AlphaBeta(latency_s, per_byte)


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


def _notes(spec: MethodSpec, parts: StepParts, case: Case) -> list[str]:
    notes: list[str] = []
    if parts.backlog > 1:
        notes.append(
            f"{spec.name} sends {parts.backlog:.1f} times what the cards carry: messages pile up, "
            "and models arrive ever later"
        )
    if parts.ignores_jitter and not case.pace.is_constant:
        notes.append(
            f"{spec.name}: compute times that vary make steps longer than this by waits that have "
            "no closed form"
        )
    return notes
