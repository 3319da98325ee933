"""When a worker of `gossamer train` writes its checkpoints: always between two steps.

Synchronous methods cut at one step for everybody, so a resumed run goes on as if nothing had been.
The others cut at a step of each worker's own; what is on the way then is in nobody's part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from gossamer.errors import ConfigurationError
from gossamer.quantities import seconds
from gossamer.real.batches import Batches, LeasedBatches, RoundBatches
from gossamer.real.launch.console import say
from gossamer.real.router import Router
from gossamer.real.train import checkpoint_files as checkpoint
from gossamer.real.train.job import Job
from gossamer.real.train.worker_state import Parts, save
from gossamer.real.transports.checked_values import number_from, numbers_from
from gossamer.real.transports.transport import Store

_ASKS = 20
"""Times per interval that synchronous workers agree on whether it is time."""
_FARTHEST = 1000


@dataclass(frozen=True)
class Every:
    """An interval: of seconds, or of steps."""

    amount: float
    is_steps: bool

    @staticmethod
    def parse(text: str) -> Every:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|steps)", text.strip())
        if found is None or float(found[1]) <= 0 or (found[2] == "steps" and "." in found[1]):
            raise ConfigurationError(
                "--checkpoint-every must be a time such as 30s or 5m, or steps such as 100steps, "
                f"got {text!r}"
            )
        if found[2] == "steps":
            return Every(float(found[1]), True)
        return Every(seconds(text, "--checkpoint-every"), False)


class Timer(Protocol):
    """Says under which number a checkpoint is to be written now, if at all."""

    def due(self, step: int) -> int | None: ...

    def at_end(self, step: int) -> int: ...


class InStep:
    """For synchronous methods: everyone comes to the same answer at the same step."""

    def __init__(self, every: Every, store: Store, begin: int) -> None:
        self._every = every
        self._store = store
        self._ask_at = begin + 1
        self._asked = (begin, time.monotonic())
        self._next = time.monotonic() + every.amount

    def due(self, step: int) -> int | None:
        if self._every.is_steps:
            return step if step > 0 and step % int(self._every.amount) == 0 else None
        if step != self._ask_at:
            return None
        # Who comes first decides by its clock, and also when all will ask again.
        now = time.monotonic()
        before, then = self._asked
        per_step = max(1e-6, (now - then) / (step - before))
        ahead = max(1, min(_FARTHEST, int(self._every.amount / _ASKS / per_step)))
        proposal = f"{int(now >= self._next)} {ahead}"
        key = f"checkpoint/{step}"
        agreed = self._store.agree(key, proposal)
        decided, *_, ahead = numbers_from(key, agreed, " ")
        self._asked, self._ask_at = (step, now), step + ahead
        if not decided:
            return None
        self._next = now + self._every.amount
        return step

    def at_end(self, step: int) -> int:
        return step


class OutOfStep:
    """For asynchronous methods: by the batches that all have taken, or by each worker's clock.

    One at a time: the next begins when all living workers have made the last, and who is due makes
    the one that another has begun. So each of them becomes whole, however unequal workers are.
    """

    def __init__(
        self, every: Every, store: Store, pace: LeasedBatches, living: Callable[[], int], size: int,
        begin: int,
    ) -> None:  # fmt: skip
        self._every = every
        self._store = store
        self._pace = pace
        self._living = living
        self._size = size
        self._last = begin
        self._next = time.monotonic() + every.amount
        self._made = 0

    def due(self, step: int) -> int | None:
        if not self._is_time() or not self._have_all_made_the_last():
            return None
        key = f"checkpoint/{self._made}"
        self._last = number_from(key, self._store.agree(key, str(self._name())))
        self._next = time.monotonic() + self._every.amount
        self._store.add(f"checkpoint/{self._made}/made", 1)
        self._made += 1
        return self._last

    def at_end(self, step: int) -> int:
        """Behind all others: none of them has a higher number than the run has steps."""
        return self._steps(self._pace.batches) + 1

    def _is_time(self) -> bool:
        if not self._every.is_steps:
            return time.monotonic() >= self._next
        return self._rounded(self._pace.reached // self._size) > self._last

    def _have_all_made_the_last(self) -> bool:
        if self._made == 0:
            return True
        return self._store.add(f"checkpoint/{self._made - 1}/made", 0) >= self._living()

    def _name(self) -> int:
        """The steps that each worker has made on average."""
        if self._every.is_steps:
            return self._rounded(self._pace.reached // self._size)
        return self._steps(self._pace.position)

    def _steps(self, batches: int) -> int:
        return -(-batches // self._size)

    def _rounded(self, steps: int) -> int:
        return steps - steps % int(self._every.amount)


class Checkpointed:
    """A pace with a pause between two steps in which a checkpoint may be written."""

    def __init__(
        self,
        pace: Batches,
        timer: Timer,
        save: Callable[[int], None],
        begin: int,
    ) -> None:
        self._pace = pace
        self._timer = timer
        self._save = save
        self._last = begin

    @property
    def expected_steps(self) -> int:
        return self._pace.expected_steps

    def open_step(self, step: int) -> bool:
        self._consider(self._timer.due(step))
        if self._pace.open_step(step):
            return True
        # The last one is for runs that are made longer later on.
        self._consider(self._timer.at_end(step))
        return False

    def _consider(self, name: int | None) -> None:
        if name is not None and name > self._last:
            self._last = name
            self._save(name)


class Checkpointing:
    """Writes one worker's checkpoints."""

    def __init__(
        self, job: Job, hub: Router, has_server: bool, options: Mapping[str, Any],
        parts: Callable[[], Parts],
    ) -> None:  # fmt: skip
        self._job = job
        self._hub = hub
        self._has_server = has_server
        self._options = options
        self._parts = parts
        self._is_in_step = False
        self.count = 0
        self.seconds = 0.0
        """That the worker stood still for them."""

    def between_steps(self, pace: Batches) -> Batches | Checkpointed:
        """The pace with checkpoints where they are wanted."""
        if self._job.checkpoint_every is None:
            return pace
        every, store = Every.parse(self._job.checkpoint_every), self._hub.transport.store
        begin = 0 if self._job.resume is None else int(Path(self._job.resume).name)
        if isinstance(pace, RoundBatches):
            self._is_in_step = True
            timer = InStep(every, store, begin)
        else:
            hub = self._hub
            timer = OutOfStep(every, store, pace, lambda: len(hub.live), hub.plan.size, begin)
        return Checkpointed(pace, timer, self._save, begin)

    def _save(self, name: int) -> None:
        began = time.monotonic()
        if self._is_in_step and self._has_server:
            self._let_servers_catch_up()
        folder = Path(self._job.folder) / "checkpoint" / str(name)
        plan = self._hub.plan
        try:
            save(folder, self._parts(), self._options)
            servers = range(plan.size, plan.ends)
            if checkpoint.complete(folder, self._hub.live, servers, plan.size):
                checkpoint.prune(folder.parent)
        except OSError as error:
            # A full disk must not end a run that could go on without it.
            say(f"worker {self._hub.rank} could not write checkpoint {name}: {error}")
        self.count += 1
        self.seconds += time.monotonic() - began

    def _let_servers_catch_up(self) -> None:
        """A gradient on its way to a server would be in nobody's part."""
        hub = self._hub
        for process in sorted(hub.live - {hub.rank}):
            # Answered behind everything that was sent there before, or never: it has died.
            answer = hub.call(process, "flush")
            hub.driver.wait(answer, "checkpoint")
        everyone = hub.transport.all_reduce([torch.zeros(1)], range(hub.plan.size))
        hub.driver.wait(everyone, "checkpoint")
