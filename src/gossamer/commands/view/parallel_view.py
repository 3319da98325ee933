"""What `gossamer cost --parallel` takes and prints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    add_columns,
    can_draw,
    plain_table,
    print_json,
    say_line,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.work.parallel_costs import ParallelCosts, cited, division_table, memory_cell
from gossamer.errors import ConfigurationError
from gossamer.plan.parallel.networks import NETWORKS
from gossamer.quantities import counted, show_bytes


@dataclass(frozen=True)
class ParallelOptions:
    """The options about dividing a model."""

    parallel: bool = given.option(
        False, "Instead: the best way to divide the model over the cluster.", "--parallel"
    )
    network: str | None = given.option(
        None, f"Of --parallel: a published model, {', '.join(NETWORKS)}.", "--network"
    )

    def refuse(self, **beside: object) -> None:
        """Refuse options that say nothing of how a model is divided."""
        told = [name.replace("_", "-") for name, value in beside.items() if value is not None]
        if self.parallel and told:
            raise ConfigurationError(
                f"--{told[0]} says nothing of how a model is divided; leave it out, or --parallel"
            )


def show_parallel(
    costs: ParallelCosts, keeping: given.KeepOptions, picture: Path | None, *, layers: bool
) -> None:
    """Print and keep the best way to divide a model, and what it was compared with."""
    with kept_run(keeping.runs, "cost-parallel", costs.config(), has_page=False) as folder:
        show_table(costs.kinds_table())
        for line in costs.sentences():
            say_line(line)
        show_table(microbatch_table(costs))
        show_table(hybrid_table(costs))
        if layers:
            show_table(layer_table(costs))
        if keeping.as_json:
            print_json(costs.as_dict())
        if folder is not None:
            folder.write_summary(costs.as_dict())
        place = picture or (folder.path / "parallel.png" if folder is not None else None)
        if place is not None and can_draw():
            costs.picture(place)
            say_line(f"picture: {place}")


def microbatch_table(costs: ParallelCosts) -> Table:
    """Memory against time for the best split."""
    rows = {str(one.division.microbatches): one for one in costs.over_microbatches}
    heading = f"Micro-batches of {dataclasses.replace(costs.best.division, microbatches=1)}"
    return division_table(
        heading, rows, costs.asked.case.cluster.compute.memory, first="micro-batches"
    )


def hybrid_table(costs: ParallelCosts) -> Table:
    """Published arrangements on the same machines."""
    table = plain_table("Published hybrids on the same machines, the same samples", gap=2)
    add_columns(table, "", "ms", "samples/s", "sent", "memory")
    for one in costs.hybrids:
        table.add_row(
            cited(one), f"{1e3 * one.step_s:.4g}",
            f"{costs.asked.case.batch / one.step_s:,.4g}", show_bytes(one.sent_bytes),
            memory_cell(one.memory_bytes, costs.asked.case.cluster.compute.memory),
        )  # fmt: skip
    return table


def layer_table(costs: ParallelCosts) -> Table:
    """The ways side by side."""
    workers = counted(costs.asked.case.cluster.workers, "worker")
    table = plain_table(f"One layer over {workers}, each way by itself (* fastest)", gap=2)
    add_columns(table, "layer", "way", "ms", "computing", "messages", "sent", "memory")
    rows = costs.layers()
    for name in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == name]
        least = min(map(_way_seconds, own))
        for number, row in enumerate(own):
            mark = "*" if _way_seconds(row) == least else ""
            table.add_row(
                "" if number else f"{name} ({row['kind']})", row["way"],
                f"{1e3 * _way_seconds(row):.4g}{mark}", f"{1e3 * row['compute_seconds']:.4g}",
                f"{row['messages']:g}", show_bytes(row["sent_bytes"]),
                show_bytes(row["memory_bytes"]),
            )  # fmt: skip
    return table


def _way_seconds(row: dict[str, Any]) -> float:
    return row["compute_seconds"] + row["message_seconds"]
