"""A schedule on a clock: every machine does its next action as soon as it has what that needs.

    waiting --(all that it needs has ended here or arrived)--> running --> ended --> result sent

A machine does its actions in the order of the schedule, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gossamer.pipeline.schedule import Action, Pass, PipelineSchedule


class PlayClock(Protocol):
    """Virtual time in integer nanoseconds."""

    @property
    def now(self) -> int: ...

    def at(self, delay_ns: int, callback: Callable[..., None], *arguments: object) -> object: ...


class Stagehand(Protocol):
    """What a play asks of the world around it."""

    def work_ns(self, machine: int, action: Action) -> int:
        """How long a machine takes for an action, which it begins now."""
        ...

    def send(self, action: Action, source: int, target: int, arrived: Callable[[], None]) -> None:
        """Carry the result of an action to the machine that needs it."""
        ...

    def ended(self, machine: int, action: Action, began_ns: int) -> None: ...


class Play:
    """The machines of one pipeline, what each has still to do, and what has arrived there."""

    def __init__(self, clock: PlayClock, schedule: PipelineSchedule, hand: Stagehand) -> None:
        """The schedule says who needs what; `feed` says what there is to do."""
        machines = len(schedule.machines)
        self.is_cancelled = False
        self._clock = clock
        self._schedule = schedule
        self._hand = hand
        self._queues = [deque[Action]() for _ in range(machines)]
        self._is_busy = [False] * machines
        self._there: list[set[Action]] = [set() for _ in range(machines)]
        """For each machine, the actions whose results it has."""

    def feed(self, actions: Sequence[Iterable[Action]]) -> None:
        """Give every machine more to do."""
        for machine, own in enumerate(actions):
            self._queues[machine].extend(own)
        for machine in range(len(self._queues)):
            self._next(machine)

    @property
    def is_empty(self) -> bool:
        """Whether all that was fed has been done."""
        return not any(self._queues) and not any(self._is_busy)

    def cancel(self) -> None:
        """Nothing begins any more; what has begun ends without a trace."""
        self.is_cancelled = True

    def _next(self, machine: int) -> None:
        queue = self._queues[machine]
        if self._is_busy[machine] or not queue or self.is_cancelled:
            return
        action = queue[0]
        if not self._has(machine, action) or (
            action.is_with_next and not self._has(machine, queue[1])
        ):
            return
        queue.popleft()
        self._is_busy[machine] = True
        work_ns = self._hand.work_ns(machine, action)
        self._clock.at(work_ns, self._end, machine, action, self._clock.now)

    def _has(self, machine: int, action: Action) -> bool:
        return self._there[machine].issuperset(self._schedule.needs(action))

    def _end(self, machine: int, action: Action, began_ns: int) -> None:
        if self.is_cancelled:
            return
        self._is_busy[machine] = False
        self._there[machine].add(action)
        if action.kind in (Pass.BACKWARD, Pass.BY_WEIGHTS):
            self._forget(machine, action)
        self._hand.ended(machine, action, began_ns)
        target = self._target(action)
        if target == machine:
            self._arrive(machine, action)
        elif target is not None:
            self._hand.send(action, machine, target, lambda: self._arrive(target, action))
        self._next(machine)

    def _target(self, action: Action) -> int | None:
        """The machine of the chunk that needs the result."""
        chunk = action.chunk + (1 if action.kind is Pass.FORWARD else -1)
        is_there = action.kind is not Pass.BY_WEIGHTS and 0 <= chunk < self._schedule.chunks
        return self._schedule.machine_of[chunk] if is_there else None

    def _arrive(self, machine: int, action: Action) -> None:
        self._there[machine].add(action)
        self._next(machine)

    def _forget(self, machine: int, action: Action) -> None:
        """Nothing here needs the passes of this micro-batch any more, and a pipeline that never
        ends must not remember all of them."""
        chunk, number = action.chunk, action.microbatch
        there = self._there[machine]
        there -= {Action(kind, chunk + 1, number) for kind in (Pass.BACKWARD, Pass.BY_INPUT)}
        there.discard(Action(Pass.FORWARD, chunk, number))
        if chunk and self._schedule.machine_of[chunk - 1] != machine:
            there.discard(Action(Pass.FORWARD, chunk - 1, number))
