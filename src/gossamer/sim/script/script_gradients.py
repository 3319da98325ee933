"""A gradient that a script's process computes, and the talk with that process around it.

    w.gradient(x)   the process goes on from its last step, at this point. The coordinator listens
                    until the loop's model computes: until then the loop may ask for a batch, look
                    at the output model, report, or end. All of that happens at this virtual moment.
    ...             virtual time goes on, and so does the process, beside all others.
    delivery        the coordinator waits for what the process has computed.

A gradient depends on its point and its batches only, and everything else is read at these two
moments. So neither the number of cores nor their speed can change a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from gossamer.errors import ConfigurationError, ProtocolError, RunOver
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.script.channel import Said
from gossamer.sim.gradients import SimulatedGradient
from gossamer.sim.kernel import SECOND
from gossamer.sim.replica_matrix import Point
from gossamer.sim.script.crew import Crew, Member
from gossamer.sim.script.script_replicas import ScriptReplica
from gossamer.sim.worker import SimulatedWorker
from gossamer.worker import Lesson

if TYPE_CHECKING:
    from gossamer.sim.script.script_world import ScriptWorld


class ScriptGradient(SimulatedGradient):
    """One gradient; it may be held up by the wait for an output model or for a shared value."""

    __slots__ = ("_held_since", "_later", "is_held")

    def __init__(self, worker: int) -> None:
        super().__init__(worker, Point(-1, None), np.empty(0, np.int64), 0)
        self.is_held = False
        self._held_since = 0
        self._later: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def hold(self) -> None:
        """Its loop waits for others, and computes afterwards."""
        self.is_held, self._held_since = True, self._world.kernel.now

    def _release(self) -> None:
        kernel, later = self._world.kernel, self._later
        self.is_held, self._later = False, []
        self.paused_ns += kernel.now - self._held_since
        for at_ns, waited_ns, again, arguments in later:
            due_ns = at_ns + self.lost_ns - waited_ns
            kernel.at(max(0, due_ns - kernel.now), again, *arguments, self.lost_ns)

    def go_on(self) -> None:
        """Its loop has been told what it waited for."""
        self._release()
        if cast("ScriptWorld", self._world).source.listen(self) == "end":
            self.over()

    def _is_held_up(self, waited_ns: int, again: Callable[..., None], *arguments: Any) -> bool:
        if self.is_held:
            self._later.append((self._world.kernel.now, waited_ns, again, arguments))
            return True
        if super()._is_held_up(waited_ns, again, *arguments):
            return True
        source = cast("ScriptWorld", self._world).source
        if self.value is not None or not source.is_under_way(self):
            return False
        outcome = source.listen(self)
        while outcome == "begun":
            outcome = source.listen(self)
        if outcome == "held":
            self._later.append((self._world.kernel.now, waited_ns, again, arguments))
        elif outcome == "end":
            self.over()
        return outcome != "step"

    def buckets(self) -> Sequence[Pending[Tensor]]:
        pieces = super().buckets()
        for piece in pieces if self.done else ():
            piece.fail(RunOver())  # its loop has ended already
        return pieces

    def over(self) -> None:
        """Its loop has ended instead of computing it."""
        cast("ScriptWorld", self._world).source.under_way[self.worker].remove(self)
        self.fail(RunOver())


@dataclass
class Assignments:
    """Which batches of the passes over the loaders of a script are whose."""

    _next: dict[str, int] = field(default_factory=dict[str, int])
    _returned: dict[str, deque[int]] = field(default_factory=dict[str, "deque[int]"])
    claims: dict[str, str] = field(default_factory=dict[str, str])
    """Of groups: what the first of them to ask has said."""

    def take(self, name: str) -> int:
        returned = self._returned.get(name)
        if returned:
            return returned.popleft()
        position = self._next.get(name, 0)
        self._next[name] = position + 1
        return position

    def give_back(self, name: str, positions: list[int]) -> None:
        self._returned.setdefault(name, deque()).extendleft(reversed(positions))


@dataclass
class Loop:
    """What the coordinator knows of one worker's loop."""

    made: int = -1
    """Its steps; before its first gradient less than none."""
    name: str = ""
    """Of the pass that it took its last batch of."""
    granted: list[int] = field(default_factory=list[int])
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Batches that it was given on top of those."""
    samples: int = 1
    """In its last step. Its next one is taken to be as large, as a loop says only at the end of a
    step how many samples it has had."""
    learning_rate: float = 0.0
    options: list[dict[str, Any]] | None = None
    has_ended: bool = False
    recalibrates: bool = False


class ScriptGradients:
    """The gradients of all processes (a `GradientSource`)."""

    def __init__(self, world: ScriptWorld, crew: Crew, buffers: Tensor) -> None:
        assert crew.memory is not None
        self.under_way: dict[int, list[SimulatedGradient]] = {}
        self.buffers = buffers
        self.mean_width = 1.0
        self.delivered: dict[int, Tensor] = {}
        """By worker, the gradient that its process still holds."""
        self.counters = {
            member.rank: crew.memory.raw("counters", member.rank).clone() for member in crew.members
        }
        self.assignments = Assignments()
        self.loops = [Loop() for _ in crew.members]
        for loop, member in zip(self.loops, crew.members, strict=True):
            assert member.hello is not None
            loop.learning_rate = member.hello["learning_rate"]
        self._memory = crew.memory
        self._crew = crew
        self._world = world

    def start(self, gradient: SimulatedGradient) -> None:
        self.under_way.setdefault(gradient.worker, []).append(gradient)

    def is_under_way(self, gradient: SimulatedGradient) -> bool:
        return gradient in self.under_way.get(gradient.worker, ())

    def abort(self, rank: int) -> list[SimulatedGradient]:
        loop, aborted = self.loops[rank], self.under_way.pop(rank, [])
        if aborted:  # else they were those of a gradient that was delivered
            self.assignments.give_back(loop.name, loop.granted)
            for name, position in loop.asked:
                self.assignments.give_back(name, [position])
        loop.granted, loop.asked = [], []
        return aborted

    def value_of(self, gradient: SimulatedGradient) -> Tensor:
        assert gradient.value is not None
        if gradient.statistics is not None:
            self.buffers[gradient.worker] = gradient.statistics
        return gradient.value

    # ------------------------------------------------------------------ the talk

    def resume(self, rank: int, seconds: float, *, is_elsewhere: bool) -> None:
        """The process goes on from its last step, to compute for so long. It is given as many
        batches as that step took, so that it need not ask."""
        loop, world = self.loops[rank], self._world
        count = len(loop.granted) + sum(name == loop.name for name, _ in loop.asked)
        loop.granted = [self.assignments.take(loop.name) for _ in range(count)]
        loop.asked = []
        training = [one for one in sorted(world.alive) if not self.loops[one].has_ended]
        self._crew.members[rank].tell("resume", {
            "pace": [loop.samples, seconds], "training": training,
            "is_elsewhere": is_elsewhere, "main": world.main, "batches": loop.granted,
            "pass": loop.name, "weight": world.replicas[rank].weight,
        })  # fmt: skip

    def listen(self, gradient: ScriptGradient) -> str:
        """Answer the process until it computes (begun), has computed (step), has left its loop
        (end) or waits for others (held)."""
        rank = gradient.worker
        member = self._crew.members[rank]
        while True:
            said = self._crew.next(member)
            if said.kind == "step":
                self._stepped(gradient, said)
            if said.kind == "end":
                self._leave(rank, said)
            if said.kind in ("begun", "step", "end"):
                return said.kind
            if said.kind == "consensus" and not self._world.consensus.ask(gradient, said["steps"]):
                gradient.hold()
                return "held"
            if said.kind == "share" and not self._world.calls.ask(gradient, said):
                gradient.hold()
                return "held"
            self._reply(member, said)

    def _reply(self, member: Member, said: Said) -> None:
        if said.kind == "batch":
            loop, name = self.loops[member.rank], said["pass"]
            if name != loop.name:
                self._return_unused(loop, said["used"])
                loop.asked += [(loop.name, position) for position in loop.granted]
                loop.name, loop.granted = name, []
            position = self.assignments.take(name)
            loop.asked.append((name, position))
            member.tell("position", {"position": position})
        elif said.kind == "claim":
            claims = self.assignments.claims
            key, proposal = said["key"], said["proposal"]
            value = claims.get(key) if proposal is None else claims.setdefault(key, proposal)
            member.tell("claimed", {"value": value})
        elif said.kind == "report":
            self._world.on_report(member.rank, said["values"])
        elif said.kind not in ("consensus", "share"):
            raise ProtocolError(f"worker {member.rank} said {said.kind!r} between two steps")

    def _stepped(self, gradient: ScriptGradient, said: Said) -> None:
        rank, loop = gradient.worker, self.loops[gradient.worker]
        gradient.value = self.delivered[rank] = self._memory.gradient[rank].clone()
        statistics = self._memory.raw("statistics", rank).clone()
        gradient.statistics = statistics.view(self.buffers.dtype)
        self.counters[rank] = self._memory.raw("counters", rank).clone()
        loop.samples = said["samples"] or 1
        gradient.batch = np.empty(loop.samples, np.int64)
        self._return_unused(loop, said["used"])
        self._world.script_budget.samples_of_pass = said["of"]
        loop.learning_rate = said["learning_rate"]
        loop.options = said.values.get("options", loop.options)
        if said["changed"]:
            self._crew.members[rank].order("carry", {})

    def _return_unused(self, loop: Loop, used: int) -> None:
        self.assignments.give_back(loop.name, loop.granted[used:])
        loop.granted = loop.granted[:used]

    def _leave(self, rank: int, said: Said) -> None:
        loop = self.loops[rank]
        self._return_unused(loop, said["used"])
        loop.has_ended, loop.recalibrates = True, said["recalibrates"]
        self._crew.members[rank].is_needed = True
        self._world.calls.gone(rank)


class ScriptWorker(SimulatedWorker):
    """What a method may touch, where a script's process computes."""

    _world: ScriptWorld

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> ScriptGradient:
        if lesson is not None:
            raise ConfigurationError(
                "a script in virtual time is given no teachers; simulate its task, or couple the "
                "script's own workers by `gossamer run`"
            )
        if batch is not None:
            raise ConfigurationError(
                "the method chooses the samples of a gradient by itself, and the batches of a "
                "script are the script's; use a method that takes them as they come"
            )
        world, source, rank = self._world, self._world.source, self.rank
        loop = source.loops[rank]
        if loop.has_ended:
            raise RunOver
        is_elsewhere = isinstance(at, Tensor)
        if isinstance(at, Tensor):
            world.memory.point[rank].copy_(at)
        elif not isinstance(at, ScriptReplica):
            raise ProtocolError(f"a gradient is taken at a tensor or a replica, got {type(at)}")
        loop.made += 1
        self._gradients += 1
        world.consensus.came(rank)
        gradient = ScriptGradient(rank)
        updates = world.updates.count if self._seen is None else self._seen
        gradient.read = (world.replicas[rank].version, updates)
        self._seen = None
        drawn = world.cluster.compute.draw(self._compute_rng, loop.samples)
        seconds = drawn * world.faults.slowness(rank)
        source.resume(rank, seconds, is_elsewhere=is_elsewhere)
        gradient.start(world, round(seconds * SECOND))
        if source.listen(gradient) == "end":
            # As in a loop on real workers, where the method is told so when it awaits it: what it
            # does until then, such as sending the point to its group, it does.
            gradient.over()
        if world.kernel.current is not None:
            world.kernel.current.gradient = gradient
        return gradient
