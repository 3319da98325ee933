"""`gossamer cost --parallel`: the best way to divide a model over a cluster, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gossamer.commands.console import add_columns, plain_table
from gossamer.commands.work.answer import Answer, new_folder
from gossamer.commands.work.simulations import command_line
from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError
from gossamer.plan.hardware.sheet import SheetChoices
from gossamer.plan.parallel.hybrids import Hybrid, hybrids
from gossamer.plan.parallel.pace import DevicePassTimes
from gossamer.plan.parallel.placement import placement_of
from gossamer.plan.parallel.plan import DivisionCost
from gossamer.plan.parallel.question import (
    ParallelQuestion,
    question_of_network,
    question_of_task,
)
from gossamer.plan.parallel.search import Found, over_microbatches, search
from gossamer.plan.parallel.ways import LayerWay, ways
from gossamer.quantities import counted, show_bytes, show_percent
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.placement_picture import (
    DrawnBlock,
    PlacementPanel,
    placement_picture,
)
from gossamer.runs.folder import RunFolder
from gossamer.tasks import Task

_MOST_LAYERS = 4
_PANELS = 9


class ParallelCosts(Answer):
    """Divisions of a model over a cluster: the best, its reasons, and published hybrids."""

    def __init__(self, asked: ParallelQuestion) -> None:
        self.asked = asked
        self.found: Found = search(asked.case)
        self.hybrids: list[Hybrid] = hybrids(asked.case)
        self.over_microbatches: list[DivisionCost] = over_microbatches(
            asked.case, self.found.best.division
        )
        """The best split with other numbers of micro-batches: memory against time."""

    @property
    def best(self) -> DivisionCost:
        return self.found.best

    @property
    def title(self) -> str:
        network, where = self.asked.network, self.asked.case.cluster
        return f"{network.title} divided over {where.title or where.name}"

    def table(self) -> list[dict[str, Any]]:
        """One dictionary for the fastest division of each kind."""
        best = self.best
        return [
            {"kind": name, **_row(cost), "is_best": cost is best}
            for name, cost in self.found.kinds().items()
        ]

    def as_dict(self) -> dict[str, Any]:
        network, case = self.asked.network, self.asked.case
        return {
            "ended": "finished", "model": network.name, "parameters": network.parameters,
            "macs_per_sample": network.macs, "cluster": case.cluster.name,
            "workers": case.cluster.workers, "samples_per_step": case.batch,
            "compute": case.pace.title, "priced": self.found.priced,
            "too_large": len(self.found.too_large), "best": _row(self.best),
            "reasons": self.found.reasons(), "kinds": self.table(),
            "over_microbatches": [_row(cost) for cost in self.over_microbatches],
            "hybrids": [
                {
                    "name": one.name, "paper": one.paper, "how": one.how,
                    "step_seconds": one.step_s, "sent_bytes": one.sent_bytes,
                    "memory_bytes": one.memory_bytes,
                }
                for one in self.hybrids
            ],
            "layers": self.layers(len(network.layers)),
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        """What the folder keeps of the question."""
        case = self.asked.case
        return {
            "model": self.asked.network.name, "batch": self.asked.batch,
            "cluster": case.cluster.as_dict(), "compute": case.pace.title,
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Keep figures and picture in a new folder, as the command does; return its path."""
        place = new_folder(path)
        place.mkdir(parents=True)
        folder = RunFolder(place)
        folder.write_config({**self.config(), "command_line": command_line()})
        folder.write_summary(self.as_dict())
        if has_matplotlib():
            self.picture(place / "parallel.png")
        return place

    def picture(self, place: Path) -> None:
        """Draw what each machine holds and who tells whom what, in the best division and in the
        published hybrids."""
        case, best = self.asked.case, self.best.division
        bounds = case.bounds(best.stages * best.chunks)
        panels = [
            PlacementPanel(f"the best: {best}", self.best.step_s, placement_of(best, bounds)),
            *(
                PlacementPanel(cited(one), one.step_s, one.placement)
                for one in self.hybrids
                if one.paper or best.machines > 1
            ),
        ]
        network = self.asked.network
        blocks = [
            DrawnBlock(
                max(block.layers, key=lambda layer: (layer.macs, layer.parameters)).kind,
                block.macs / (network.macs or 1), block.parameters / (network.parameters or 1),
            )
            for block in network.blocks
        ]  # fmt: skip
        placement_picture(place, panels[:_PANELS], blocks, title=self.title,
                          subtitle=self._subtitle())  # fmt: skip

    def _subtitle(self) -> str:
        case = self.asked.case
        return (
            f"{counted(case.cluster.workers, 'worker')}, {case.batch} samples a step, computing "
            f"{case.pace.title}; closed forms"
        )

    def _draw(self, place: Path) -> bool:
        self.picture(place)
        return True

    def _shown(self) -> tuple[Table, list[str]]:
        return self.kinds_table(), self.sentences()

    # ------------------------------------------------------------------ tables and sentences

    def sentences(self) -> list[str]:
        """The answer in short, why, and how to play it."""
        case, best = self.asked.case, self.best
        network = self.asked.network
        said = [
            f"best: {best.division}, {best.samples_per_second:,.4g} samples/s; "
            f"{counted(self.found.priced, 'division')} priced, of which "
            f"{len(self.found.too_large)} do not fit",
            *(f"not {reason}" for reason in self.found.reasons()),
            *_played(list(self.found.kinds().values())),
            *case.pace.notes,
            f"{network.title}: {network.parameters:,} parameters, {network.macs:.4g} "
            f"multiplications a sample; {self._subtitle()}",
        ]  # fmt: skip
        if network.source:
            said.append(
                f"published: {network.published_parameters:,.10g} and {network.published_macs:.4g} "
                f"({network.source})"
            )
        elif best.division.machines > 1 and not best.division.sharding:
            batch = case.batch // best.division.data
            said.append(
                f"play it: gossamer simulate --task {network.title} --cluster {case.cluster.name} "
                f"--batch {batch} --method {best.division.spec()}"
            )
        return said

    def kinds_table(self) -> Table:
        """The fastest division of each kind, in milliseconds."""
        heading = f"{self.title}: milliseconds of a step of {self.asked.case.batch} samples"
        return division_table(
            heading, self.found.kinds(), self.asked.case.cluster.compute.memory, self.best
        )

    def layers(self, most: int = _MOST_LAYERS) -> list[dict[str, Any]]:
        """Ways to divide single layers over all workers: those with the most parameters, and those
        with the most work."""
        case = self.asked.case
        layers = self.asked.network.layers
        chosen = {
            one.name: one
            for key in ("parameters", "macs")
            for one in sorted(layers, key=lambda one: -getattr(one, key))[:most]
        }
        link = case.links.slowest
        rows: list[dict[str, Any]] = []
        for layer in chosen.values():
            if isinstance(case.pace, DevicePassTimes):
                whole_s = sum(case.pace.layer_s(layer, case.batch))
            else:
                at = next(n for n, b in enumerate(case.blocks) if layer in b.layers)
                whole_s = sum(case.pace.passes(case.batch, 1)[at])
            for way in ways(layer, case.cluster.workers, case.batch):
                work_s, told_s = way.seconds(whole_s, link, case.number_bytes)
                rows.append({
                    "layer": layer.name, "kind": layer.kind, "way": way.name,
                    "compute_seconds": work_s, "message_seconds": told_s,
                    "messages": way.messages, "sent_bytes": way.sent * case.number_bytes,
                    "memory_bytes": _way_bytes(way, case.state_bytes, case.number_bytes),
                })  # fmt: skip
        return rows


def cited(one: Hybrid) -> str:
    return f"{one.name} ({one.paper})" if one.paper else one.name


def memory_cell(needs: float, has: float) -> str:
    return show_bytes(needs) + (" too many" if has and needs > has else "")


def _way_bytes(way: LayerWay, state_bytes: float, number_bytes: int) -> float:
    return way.parameters * state_bytes + way.activations * number_bytes


def _row(cost: DivisionCost) -> dict[str, Any]:
    division = cost.division
    return {
        **dataclasses.asdict(division), "method": division.spec(), "step_seconds": cost.step_s,
        "samples_per_second": cost.samples_per_second, "work_seconds": cost.work_s,
        "sum_seconds": cost.sums_s, "bubble_seconds": cost.bubble_s,
        "exchange_seconds": cost.exchange_s, "update_seconds": cost.update_s,
        "memory_bytes": cost.memory.total, "memory": dataclasses.asdict(cost.memory),
        "pipeline_seconds": cost.pipeline_s, "closed_form_seconds": cost.closed_s,
    }  # fmt: skip


def division_table(
    heading: str, rows: dict[str, DivisionCost], has: float, best: DivisionCost | None = None,
    first: str = "",
) -> Table:  # fmt: skip
    table = plain_table(heading, gap=2)
    add_columns(
        table, first, "step", "computing", "sums", "bubbles", "exchange", "memory", no_wrap=True
    )
    table.add_column("division")
    for name, cost in rows.items():
        mark = "*" if cost is best else ""
        parts = (cost.work_s + cost.update_s, cost.sums_s, cost.bubble_s, cost.exchange_s)
        table.add_row(
            name, f"{1e3 * cost.step_s:.4g}{mark}",
            *(f"{1e3 * part:.3g}" if part else "-" for part in parts),
            memory_cell(cost.memory.total, has), str(cost.division),
        )  # fmt: skip
    return table


def parallel_cost(
    task: Task | None, network: str | None, cluster: Cluster, workers: Sequence[int], *,
    batch: int | None, chosen: SheetChoices, compute_s: float = 0.0,
) -> ParallelCosts:  # fmt: skip
    """Search the divisions of a task's model, or of a network's table, over a cluster."""
    if len(workers) > 1:
        raise ConfigurationError(
            "--parallel divides a model over one number of workers, got "
            f"{', '.join(map(str, workers))}"
        )
    if workers:
        cluster = cluster.changed(workers=workers[0])
    if network is not None:
        asked = question_of_network(network, cluster, batch, chosen, compute_s)
    elif task is None:
        raise ConfigurationError(
            "--parallel needs layers; give a task with --task, or a published model with --network"
        )
    else:
        asked = question_of_task(task, cluster, batch, chosen)
    return ParallelCosts(asked)


def _played(costs: Sequence[DivisionCost]) -> list[str]:
    """How far the closed forms of played schedules were off."""
    apart = [
        cost.closed_s / cost.pipeline_s - 1
        for cost in costs
        if cost.closed_s is not None and cost.pipeline_s
    ]
    if not apart:
        return []
    worst = max(apart, key=abs)
    return [
        "the schedules shown were played beside their closed forms, which are within "
        f"{show_percent(abs(worst))} of that"
    ]
