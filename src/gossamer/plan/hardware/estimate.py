"""A step on a device that one does not have, as the [compute] of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.config.cluster import Cluster, Compute
from gossamer.config.price import Price
from gossamer.plan.batch_line import BatchLine, batch_line, other_sizes
from gossamer.plan.hardware.chrome_trace import TracedStep
from gossamer.plan.hardware.device import Device
from gossamer.plan.hardware.operators import StepWork, step_work
from gossamer.plan.hardware.roofline import StepTime, step_seconds
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

    @property
    def compute(self) -> Compute:
        """What varies from step to step, no data sheet says: that is left at the default."""
        at_batch = self.time.gradient_s - self.line.per_sample * self.work.batch
        return Compute(
            seconds=max(0.0, at_batch),
            per_sample=self.line.per_sample,
            unoverlapped_seconds=self.time.update_s,
            forward_share=min(0.99, self.time.forward_s / self.time.gradient_s),
            memory=self.device.memory,
        )

    def sentences(self) -> list[str]:
        """What was estimated, how, and how far it may be off."""
        compute, batch = self.compute, self.work.batch
        how = "on fake tensors" if self.work.is_fake else "by computing it once"
        return [
            f"estimated for {self.device.title} in {self.precision}: a gradient of {batch} samples "
            f"{show_seconds(self.time.gradient_s)} ({show_seconds(compute.seconds)} and "
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
    compute, wires = cluster.compute, cluster.network
    lines = comment(f"Written by gossamer cost for {workload}. No machine was measured for it.")
    lines += [
        f'title = "{cluster.title}"', f"workers = {cluster.workers}",
        *_unless_default("workers_per_machine", cluster.workers_per_machine, 1),
        *_unless_default("machines_per_rack", cluster.machines_per_rack, 0), "", "[compute]",
    ]  # fmt: skip
    for sentence in made_from.sentences():
        lines += comment(f"{sentence[0].upper()}{sentence[1:]}.")
    lines += [
        f"seconds = {compute.seconds:.4g}",
        *_unless_default("per_sample", compute.per_sample, 0.0),
        f"unoverlapped_seconds = {compute.unoverlapped_seconds:.4g}",
        f"forward_share = {compute.forward_share:.3f}",
        *_unless_default("memory", compute.memory, 0.0),
        *comment("Assumed: how much steps vary."),
        f"jitter = {compute.jitter:g}", "", "[network]",
        *comment("As given, not measured: what a method gets is often less (gossamer probe)."),
        f"bandwidth = {wires.bandwidth:.6g}", f"latency = {wires.latency:.4g}",
        f'collective = "{wires.collective}"',
        *_unless_default("memory_bandwidth", wires.memory_bandwidth, 0.0),
        *_unless_default("server_bandwidth", wires.server_bandwidth, 0.0),
        *_unless_default("rack_latency", wires.rack_latency, 0.0),
        *_unless_default("oversubscription", wires.oversubscription, 1.0),
    ]  # fmt: skip
    lines += _price(cluster.price)
    if cluster.faults:
        kept = ", ".join(f'"{fault}"' for fault in cluster.faults)
        lines.insert(lines.index("[compute]") - 1, f"faults = [{kept}]")
    return "\n".join(lines) + "\n"


def _price(price: Price) -> list[str]:
    """The table [price], as given."""
    if not price.spendings:
        return []
    told = price.as_dict()
    if price.own_hours:
        hours = ", ".join(f"{name} = {hour!r}" for name, hour in told["worker_hour"].items())
        told["worker_hour"] = f"{{ {hours} }}"
    return ["", "[price]", *(f"{name} = {value}" for name, value in told.items())]


def _unless_default(key: str, value: float, default: float) -> list[str]:
    return [] if value == default else [f"{key} = {value:.6g}"]
