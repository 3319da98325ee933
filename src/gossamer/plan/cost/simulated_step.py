"""The step of a method without a closed form, from a simulation in time only.

Messages that share a card, racks, slow workers and random partners have no closed form. A simulated
run without gradients takes them into account.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from gossamer.config.cluster import Cluster
from gossamer.config.faults import FOREVER, Fault
from gossamer.config.settings import make_settings, split_groups
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.observe.callbacks import Callback
from gossamer.plan.cost.case import NoClosedForm, StepParts
from gossamer.plan.cost.step_time import LONG_RUN, Prediction, predict
from gossamer.plan.cost.workload import Workload
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Task
from gossamer.topology import make_topology

_LEAST_STEPS = 4
_GRADIENTS = 192
"""Gradients of all workers together, so that chance averages out with few workers."""
_MOST_GRADIENTS = 10_000
"""The most gradients of all workers together, so that a prediction takes seconds."""


class _Times(Callback):
    """Records when each gradient of a run was ready."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        self.seconds.append(seconds)


def round_steps(options: dict[str, object], ends: int) -> int:
    """The number of steps after which a method's exchanges repeat."""
    rounds = [options.get(key, 1) for key in ("period", "n_push", "n_fetch")]
    bound = options.get("bound", 0)
    rounds.append(bound + 1 if isinstance(bound, int) else 1)
    if "topology" in options and ends > 1:
        rounds.append(make_topology(str(options["topology"]), ends).period)
    return math.lcm(*(one for one in rounds if isinstance(one, int)))


def simulated_step(
    spec: MethodSpec, cluster: Cluster, task: Task, *, model_bytes: float, steps: int, more: int
) -> StepParts:
    """The seconds per gradient and worker over `steps` steps, after as many steps of warm-up.

    The run continues for `more` steps, because at its end workers no longer wait for each other.
    """
    times = _Times()
    settings = make_settings(
        task, spec, cluster, engine="none", batch=1, model_bytes=round(model_bytes),
        epochs=(2 * steps + more) * cluster.workers / len(task.train),
    )  # fmt: skip
    summary = Simulation(settings, callbacks=[times]).run().summary
    first, last = (times.seconds[count * cluster.workers - 1] for count in (steps, 2 * steps))
    step_s = (last - first) / steps
    waiting_s = step_s * float(summary["waiting_fraction"])
    return StepParts(step_s - waiting_s, waiting_s)


def answer_over(
    method: str | MethodSpec,
    cluster: Cluster,
    workload: Workload,
    task: Task,
    workers: Sequence[int],
    on_simulation: Callable[[str], None] = lambda what: None,
    unfit: Callable[[MethodSpec, Cluster], str] = lambda spec, where: "",
) -> dict[int, Prediction | NoClosedForm]:
    """The step for several numbers of workers, by its closed form or else by simulation.

    Where neither is possible, the answer is the error that says why; so it is where `unfit` says
    why the method cannot run there, such as for want of memory.
    """
    spec = parse_method(method)
    found: dict[int, Prediction | NoClosedForm] = {}
    for count in workers:
        try:
            where = cluster.changed(workers=count)
            if why := unfit(spec, where):
                found[count] = NoClosedForm(f"{spec}: {why}")
                continue
            try:
                found[count] = predict(spec, where, workload)
            except NoClosedForm as reason:
                on_simulation(f"{spec}, {count} workers")
                found[count] = _simulated(spec, where, workload, task, reason)
        except NoClosedForm as answer:
            found[count] = answer
        except ConfigurationError as error:
            # No such run exists, for example with as many backups as workers.
            found[count] = NoClosedForm(str(error))
    return found


def _simulated(
    spec: MethodSpec, cluster: Cluster, workload: Workload, task: Task, reason: NoClosedForm
) -> Prediction:
    for fault in cluster.faults:
        if not _is_lasting(fault):
            raise NoClosedForm(
                f"a step has no time of its own where the cluster changes during the run, as by "
                f"'{fault}'; leave the fault out, or use gossamer simulate"
            ) from None
    if spec.balance:
        raise NoClosedForm(
            f"{spec} takes some rounds to find its shares, and its step follows them; use gossamer "
            "simulate --engine none"
        ) from None
    if spec.shape.machines > 1:
        raise NoClosedForm(
            f"a replica of {spec} is spread over several machines, and its step follows its "
            "schedule; use gossamer simulate --engine none"
        ) from None
    ends = len(split_groups(spec.groups, cluster)) or cluster.workers
    # The options are those of a long run, although few steps are simulated.
    options = spec.resolve(ends, LONG_RUN)
    own = round_steps(options, ends)
    # A worker that waits for a slow neighbour delays its own neighbours, so that the delay reaches
    # all workers after half a ring; at the end, the workers that were ahead finish early.
    lead = cluster.workers // 2 if cluster.faults and "topology" in options else 1
    steps, more = (
        own * math.ceil(least / own)
        for least in (max(_LEAST_STEPS, _GRADIENTS // cluster.workers, lead), lead)
    )
    if (2 * steps + more) * cluster.workers > _MOST_GRADIENTS:
        raise NoClosedForm(
            f"{cluster.workers} workers would take more than {_MOST_GRADIENTS} simulated "
            "gradients, too many for a first look; ask for fewer workers, or use gossamer simulate "
            "--engine none"
        ) from None
    # Its gradients are of one sample each, as none is computed.
    parts = simulated_step(
        dataclasses.replace(spec, options=options), cluster.at_batch(workload.batch), task,
        model_bytes=workload.model_bytes, steps=steps, more=more,
    )  # fmt: skip
    return Prediction(
        str(spec), cluster.workers, parts, workload.batch, workload.samples, options,
        simulated_because=str(reason),
    )  # fmt: skip


def _is_lasting(fault: Fault) -> bool:
    always = fault.at == 0 and fault.lasts == FOREVER
    return fault.is_trait or (always and fault.kind in ("drop", "delay"))
