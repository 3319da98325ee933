"""The replicas of a run that are spread over several machines, and the steps of their pipelines."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.pipeline.schedule import Action, Pass
from gossamer.pipeline.shape import ReplicaShape
from gossamer.pipeline.stages import StageCut
from gossamer.sim.kernel import SECOND
from gossamer.sim.pipelines.lanes import LanedDelivery
from gossamer.sim.pipelines.play import Play

if TYPE_CHECKING:
    from collections.abc import Callable

    from gossamer.sim.gradients import SimulatedGradient
    from gossamer.sim.world import World


class Pipeline:
    """The machines of one replica. A pipeline that is emptied plays a schedule for each gradient;
    one that never is goes on with the batches of later steps meanwhile."""

    def __init__(self, world: World, replica: int, shape: ReplicaShape, cut: StageCut) -> None:
        assert isinstance(world.post, LanedDelivery)
        self._world, self._post = world, world.post
        self._shape, self._cut = shape, cut
        self._first = replica * shape.machines
        self._rngs = [world.stream("compute", self._first + n) for n in range(shape.machines)]
        batch = world.budget.batch
        self._schedule = shape.schedule(batch)
        self._samples = batch / self._schedule.microbatches
        self._play: Play | None = None
        self._speed = [1.0] * shape.stages
        self._gradient: SimulatedGradient | None = None
        self._steps = 0
        """The gradients since the pipeline was empty."""
        self._is_there: set[int] = set()
        """The steps of a pipeline that goes on whose last backward pass has ended early."""
        self._past: deque[Tensor] = deque(maxlen=max(shape.lags()) + 1)
        """The parameters of the last steps, newest last."""
        self._drift: Tensor | None = None
        self._held = [0.0] * shape.stages
        self.most_held = [0.0] * shape.stages
        """The most bytes of activations that a stage held at one time."""
        self.busy_ns = 0
        self.span_ns = 0
        """The time of all stages, busy or not."""

    # ------------------------------------------------------------------ where gradients are taken

    @property
    def is_lagging(self) -> bool:
        """Whether gradients are taken at parameters of several steps."""
        return self._past.maxlen != 1

    @property
    def lag(self) -> int:
        """The age, in steps, of the oldest parameters at which the last gradient is taken."""
        return max(0, len(self._past) - 1)

    def point(self, now: Tensor) -> Tensor:
        """The parameters at which the stages take a gradient that begins now. Where the passes
        differ, those of the backward pass and then those of the forward pass."""
        if self._shape.pipeline == "pipemare":
            self._follow(now)
        self._past.append(now)
        point, backward = now.clone(), now.clone()
        for stage, lag in enumerate(self._shape.lags()):
            old = self._past[max(0, len(self._past) - 1 - lag)]
            for part in self._cut.slices(stage):
                point[part] = old[part]
                if self._drift is not None and lag:
                    # The weights of the forward pass, from how the weights have moved of late.
                    backward[part] -= lag * self._drift[part]
        return torch.cat([backward, point]) if self._shape.has_split_points else point

    def _follow(self, now: Tensor) -> None:
        """Keep a moving average of the weights' movements; each stage forgets half in its delay."""
        if self._drift is None:
            self._drift = torch.zeros_like(now)
        if not self._past:
            return
        moved = now - self._past[-1]
        for stage, lag in enumerate(self._shape.lags()):
            for part in self._cut.slices(stage):
                kept = 0.5 ** (1 / max(1, lag))
                self._drift[part] = kept * self._drift[part] + (1 - kept) * moved[part]

    def damped(self, gradient: Tensor) -> Tensor:
        """PipeMare's smaller early steps: at first 1 / delay of the rate, the whole rate after a
        quarter of the run. It scales the gradient, which for SGD is the same."""
        if self._shape.pipeline != "pipemare":
            return gradient
        budget = self._world.budget
        exponent = 1 - min(1.0, 4 * budget.processed / budget.samples)
        scaled = gradient.clone()
        for stage, lag in enumerate(self._shape.lags()):
            for part in self._cut.slices(stage):
                scaled[part] /= (lag + 1) ** exponent
        return scaled

    # ------------------------------------------------------------------ steps

    def begin(self, gradient: SimulatedGradient) -> None:
        """Play the step of this gradient, and say when it is done."""
        self._draw()
        self._gradient = gradient
        self.span_ns -= self._world.kernel.now * self._shape.stages
        if not self._shape.is_asynchronous:
            self._play = Play(self._world.kernel, self._schedule, self)
            self._play.feed(self._schedule.machines)
            return
        if self._play is None:
            self._steps = 0
            self._play = Play(self._world.kernel, self._schedule, self)
        self._feed_ahead(self._play)
        if self._steps in self._is_there:
            self._done()

    def _feed_ahead(self, play: Play) -> None:
        """Let the batches of the next steps in: one for each stage, or the whole next batch."""
        stages, size = self._shape.stages, self._schedule.microbatches
        ahead = stages if size == 1 else 2 * size
        first = 0 if self._steps == 0 else (self._steps - 1) * size + ahead
        play.feed([
            [action for number in range(first, self._steps * size + ahead)
             for action in self._pair(stage, number)]
            for stage in range(stages)
        ])  # fmt: skip

    def _pair(self, stage: int, number: int) -> list[Action]:
        """A forward pass, and the backward pass that 1F1B makes after it."""
        behind = number - (self._shape.stages - 1 - stage)
        pair = [Action(Pass.FORWARD, stage, number)]
        return [*pair, Action(Pass.BACKWARD, stage, behind)] if behind >= 0 else pair

    def _draw(self) -> None:
        """The machines' speeds in this step: those of a stage that share layers wait for the
        slowest of them."""
        compute, faults = self._world.cluster.compute, self._world.faults
        mean = compute.mean_seconds(round(self._samples))
        factors = [
            compute.draw(rng, round(self._samples)) / mean * faults.slowness(self._first + number)
            for number, rng in enumerate(self._rngs)
        ]
        share = self._shape.tensor
        self._speed = [
            max(factors[stage * share : (stage + 1) * share]) for stage in range(self._shape.stages)
        ]

    def cancel(self) -> None:
        """Its replica has died, or the run is over."""
        if self._play is not None:
            self._play.cancel()
        if self._gradient is not None:
            self.span_ns += self._world.kernel.now * self._shape.stages
        self._play = self._gradient = None
        self._is_there.clear()
        self._held = [0.0] * len(self._held)

    def _done(self) -> None:
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            return
        now = self._world.kernel.now
        self.span_ns += now * self._shape.stages
        self._is_there.discard(self._steps)
        self._steps += 1
        gradient.done_after(now - gradient.began_ns)

    # ------------------------------------------------------------------ what a play asks

    def work_ns(self, machine: int, action: Action) -> int:
        """The time of a pass; its activations are held from now on."""
        compute = self._world.cluster.compute
        whole = compute.mean_seconds(round(self._samples)) * self._cut.shares[action.chunk]
        backward = 1 - compute.forward_share
        part = {
            Pass.FORWARD: compute.forward_share, Pass.BACKWARD: backward,
            Pass.BY_INPUT: backward / 2, Pass.BY_WEIGHTS: backward / 2,
        }[action.kind]  # fmt: skip
        if action.kind is Pass.FORWARD:
            self._hold(machine, action, 1)
        seconds = whole * part * self._speed[machine] / self._shape.tensor
        if self._shape.tensor > 1 and action.kind is not Pass.BY_WEIGHTS:
            seconds += self._summed_seconds(machine, action.chunk)
        return round(seconds * SECOND)

    def _summed_seconds(self, stage: int, chunk: int) -> float:
        """The sums of the machines that hold the layers of a chunk together."""
        cluster = self._world.cluster
        wires, first = cluster.network, self._first + stage * self._shape.tensor
        ends = range(first, first + self._shape.tensor)
        if len({cluster.machine_of(end) for end in ends}) == 1:
            speed = wires.memory_bandwidth
            latency, per_byte = 0.0, 1 / speed if speed else 0.0
        else:
            per_byte = 1 / min(self._post.capacity(end) for end in ends)
            latency = wires.latency + self._post.extra_delay_s
        return sum(
            all_reduce_seconds(
                wires.collective, self._shape.tensor, round(size * self._samples), latency, per_byte
            )
            for size in self._cut.reduced(chunk)
        )

    def send(self, action: Action, source: int, target: int, arrived: Callable[[], None]) -> None:
        """Activations forward, gradients by them back."""
        is_forward = action.kind is Pass.FORWARD
        size = self._cut.sends(action.chunk if is_forward else action.chunk - 1) * self._samples
        self._post.carry_inside(
            self._machine(source), self._machine(target), round(size), arrived,
            "activations" if is_forward else "gradients by activations",
        )  # fmt: skip

    def ended(self, machine: int, action: Action, began_ns: int) -> None:
        world, now = self._world, self._world.kernel.now
        self.busy_ns += now - began_ns
        if action.kind in (Pass.BACKWARD, Pass.BY_WEIGHTS):
            self._hold(machine, action, -1)
        names = {Pass.FORWARD: "forward", Pass.BY_WEIGHTS: "by weights", Pass.BY_INPUT: "by input"}
        what = f"{names.get(action.kind, 'backward')} {action.microbatch}"
        for share in range(self._shape.tensor):
            world.observer.passed(self._machine(machine) + share, what, (began_ns, now))
        assert self._play is not None
        if not self._shape.is_asynchronous:
            if self._play.is_empty:
                self._done()
        elif machine == 0 and action.kind is Pass.BACKWARD:
            step, last = divmod(action.microbatch + 1, self._schedule.microbatches)
            if not last and self._gradient is not None and step - 1 == self._steps:
                self._done()
            elif not last:
                self._is_there.add(step - 1)

    def _machine(self, stage: int) -> int:
        return self._first + stage * self._shape.tensor

    def _hold(self, machine: int, action: Action, count: int) -> None:
        size = self._cut.holds(action.chunk) * self._samples / self._shape.tensor
        self._held[machine] += count * size
        self.most_held[machine] = max(self.most_held[machine], self._held[machine])


class Pipelines:
    """The pipelines of all replicas."""

    def __init__(self, world: World, shape: ReplicaShape, cut: StageCut) -> None:
        self._shape, self._cut = shape, cut
        self._all = [Pipeline(world, replica, shape, cut) for replica in range(world.size)]

    def __getitem__(self, replica: int) -> Pipeline:
        return self._all[replica]

    def facts(self) -> dict[str, Any]:
        """What the summary says of them."""
        shape, cut = self._shape, self._cut
        span = sum(one.span_ns for one in self._all)
        busy = sum(one.busy_ns for one in self._all)
        per_stage = [0.0] * shape.stages
        held = [0] * shape.stages
        for chunk, machine in enumerate(shape.places):
            per_stage[machine] += cut.shares[chunk]
            held[machine] += cut.parameters(chunk)
        most = [max(one.most_held[stage] for one in self._all) for stage in range(shape.stages)]
        lags = shape.lags()
        return {
            "bubble_fraction": 1 - busy / span if span > 0 else None,
            "pipeline": [
                {
                    "work_share": per_stage[stage], "parameters": held[stage],
                    "activation_bytes": round(most[stage]),
                    "weight_versions": shape.versions[stage], "delay": lags[stage],
                }
                for stage in range(shape.stages)
            ],
        }  # fmt: skip
