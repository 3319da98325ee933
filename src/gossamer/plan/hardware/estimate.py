"""A step on a device that one does not have, as the [compute] of a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from gossamer.config.cluster import Cluster, Compute
from gossamer.plan.batch_line import BatchLine, batch_line, other_sizes
from gossamer.plan.hardware.chrome_trace import TracedStep
from gossamer.plan.hardware.device import Device
from gossamer.plan.hardware.operators import StepWork, step_work
from gossamer.plan.hardware.roofline import StepTime, layer_seconds, step_seconds
from gossamer.plan.probe.toml_text import comment
from gossamer.quantities import show_bytes, show_percent, show_seconds
from gossamer.tasks import Task


@dataclass(frozen=True)
class Estimate:
    """What a step takes on a device, at one batch and around it."""

    device: Device
    precision: str
    work: StepWork
    time: StepTime
    line: BatchLine

    def compute(self, usual: Compute) -> Compute:
        """What varies from step to step, no data sheet says: that is left as usual."""
        at_batch = self.time.gradient_s - self.line.per_sample * self.work.batch
        return dataclasses.replace(
            usual,
            seconds=max(0.0, at_batch),
            per_sample=self.line.per_sample,
            unoverlapped_seconds=self.time.update_s,
            forward_share=min(0.99, self.time.forward_s / self.time.gradient_s),
            memory=self.device.memory,
        )

    def layer_rows(self) -> list[dict[str, Any]]:
        """Operations, bytes and seconds of each layer, in order."""
        return [
            {"layer": one.name, "operations": one.flops, "bytes": one.moved_bytes,
             "forward_s": one.forward_s, "backward_s": one.backward_s, "seconds": one.total_s}
            for one in layer_seconds(self.work, self.device, self.precision)
        ]  # fmt: skip

    def sentences(self) -> list[str]:
        """What was estimated, how, and how far it may be off."""
        compute, batch = self.compute(Compute()), self.work.batch
        how = "on fake tensors" if self.work.is_fake else "by computing it once"
        nearest = self.device.nearest(self.precision)
        units = "" if nearest == self.precision else f" (at its peak in {nearest}, having no other)"
        return [
            f"estimated for {self.device.title} in {self.precision}{units}: a gradient of {batch} "
            f"samples {show_seconds(self.time.gradient_s)} ({show_seconds(compute.seconds)} and "
            f"{show_seconds(compute.per_sample)} a sample), then "
            f"{show_seconds(self.time.update_s)} for the optimiser",
            f"nine of ten measured steps were within {show_percent(self.device.curves.error)} of "
            "such an estimate (docs/cost.md); `gossamer probe` measures",
            f"counted {how}: {self.work.flops:.3g} operations and {len(self.work.gradient)} "
            f"operators a gradient, {show_bytes(self.work.peak_bytes)} at the peak; starting them "
            f"takes the host {show_percent(self.time.host_share)} of the step",
        ]


def estimate(
    task: Task, device: Device, *, batch: int, precision: str = "fp32",
    optimiser: str | None = None,
) -> Estimate:  # fmt: skip
    """Estimate the steps of a task with this batch; the line comes from two other sizes of it."""

    def at(size: int) -> tuple[StepWork, StepTime]:
        work = step_work(task, size, optimiser=optimiser, precision=precision)
        return work, step_seconds(work, device, precision)

    work, time = at(batch)
    others = {size: at(size)[1].gradient_s for size in other_sizes(batch, 2 * batch)}
    line = batch_line(batch, time.gradient_s, others)
    assert line is not None
    return Estimate(device, precision, work, time, line)


# ---------------------------------------------------------------------- the file


def sheet_text(cluster: Cluster, made_from: Estimate | TracedStep, workload: str) -> str:
    """A cluster as a TOML file, with comments on where its figures come from."""
    told, usual = cluster.as_dict(), Cluster().as_dict()
    lines = comment(f"Written by gossamer cost for {workload}. No machine was measured for it.")
    lines += _keys(
        {key: value for key, value in told.items() if not isinstance(value, Mapping)}, usual,
        shown=("title", "workers"), left_out=("name",),
    )  # fmt: skip
    notes = {
        "compute": [f"{one[0].upper()}{one[1:]}." for one in made_from.sentences()]
        + ["How much steps vary is not known from that: it is as the cluster says, or assumed."],
        "network": [
            "As given, not measured: what a method gets is often less (gossamer probe)."
        ],
    }  # fmt: skip
    for name, table in told.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]"]
            for note in notes.get(name, []):
                lines += comment(note)
            lines += _keys(
                cast(Mapping[str, Any], table), usual.get(name, {}), shown=_SHOWN.get(name, ())
            )
    return "\n".join(lines) + "\n"


_SHOWN = {
    "compute": ("seconds", "unoverlapped_seconds", "forward_share", "jitter"),
    "network": ("bandwidth", "latency", "collective"),
}
"""What stands in the file even where it is as usual."""


def _keys(
    told: Mapping[str, Any], usual: Mapping[str, Any], *, shown: Collection[str] = (),
    left_out: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """The lines of what is not as usual."""
    return [
        f"{key} = {_toml(value)}"
        for key, value in told.items()
        if key not in left_out
        and (key in shown or (value != usual[key] if key in usual else bool(value)))
    ]


def _toml(value: Any) -> str:
    """A value as TOML has it; numbers with six digits."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value).items()
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in entries)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, cast(list[Any], value)))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
