"""The output model of coupled loops: what each worker gives to it and gets, and of which moment.

Workers of a synchronous method meet in every round, but each ends its step a little later or sooner
than the others. So a worker that asks for the output says how many steps it has made, and a worker
that has made fewer answers when it has made as many: it needs nothing for them that the asker has
not given already. A worker that has looked at the output itself keeps what it had then, for those
who come to that step later. Workers of an asynchronous method answer at once with what they hold.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from gossamer.pending import Pending
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.recalibration import NO_AVERAGES, Averages, Recalibration, combined_averages
from gossamer.real.join.replica import LoopReplica
from gossamer.real.output_model import Contribution, Untrained, combined
from gossamer.real.session import Session
from gossamer.replica import score_of


class LoopOutput:
    """One worker's part in the output model."""

    def __init__(
        self, session: Session, model: nn.Module, binding: ModuleBinding, replica: LoopReplica,
        most_batches: int,
    ) -> None:  # fmt: skip
        """`most_batches` are kept to recompute BatchNorm's statistics on them."""
        self._session = session
        self._model = model
        self._binding = binding
        self._replica = replica
        own = session.method.output == "ensemble" or session.is_trained_itself
        self.recalibration = Recalibration(model, most_batches, is_needed=not own)
        self.leavers = Leavers(session)
        self._most_behind: int | None = None
        """By how many steps another worker can be behind this one; None where the steps of
        different workers have nothing to do with each other."""
        if session.is_synchronous:
            # Within a period, or as far as a step takes to get around among neighbours.
            self._most_behind = int(session.options.get("period", 1)) + session.size
        self.weighted: tuple[Tensor, float] | None = None
        """Push-sum's numerator and weight as of the last gradient, which belong together."""
        self._own: Untrained | None = None
        """This worker's own buffers, while its model visits the output."""
        self.is_visiting = False
        """Whether the model is the output and not what this worker trains."""
        self._model_lock = threading.Lock()
        """Held while the receiving thread copies the model's buffers, and when a visit begins."""
        self._lock = threading.Lock()
        self._made = 0
        """How many steps this worker has made."""
        self._has_ended = False
        self._waiting: list[tuple[int, Pending[Contribution]]] = []
        """The answers to those that have made more steps, and how many."""
        self._kept: dict[int, Contribution] = {}
        """What this worker had after the steps at which it looked itself."""
        session.router.offer("output", self._asked)
        if not self.recalibration.is_needed:
            session.router.offer("statistics", lambda: NO_AVERAGES)

    # ------------------------------------------------------------------ what others get

    def stepped(self) -> None:
        """This worker has made a step."""
        with self._lock:
            self._made += 1
            if self._kept and self._most_behind is not None:
                oldest = self._made - self._most_behind
                self._kept = {step: own for step, own in self._kept.items() if step >= oldest}
        if self._waiting:
            self._answer()

    def end(self) -> None:
        """This worker makes no more steps."""
        self.recalibration.close()
        with self._lock:
            self._has_ended = True
            self._kept = {}
        self._answer()

    def _answer(self) -> None:
        with self._lock:
            made = self._made
            due = [one for step, one in self._waiting if step <= made or self._has_ended]
            self._waiting = [one for one in self._waiting if one[1] not in due]
        if due:
            own = self._contribution()
            for answer in due:
                answer.resolve(own)

    def _asked(self, step: int = 0) -> Contribution | Pending[Contribution]:
        """Answer a call; the receiving thread may make it at any moment, also during a step."""
        with self._lock:
            if step in self._kept:
                return self._kept[step]
            if step > self._made and not self._has_ended:
                answer: Pending[Contribution] = Pending("output")
                self._waiting.append((step, answer))
                return answer
        return self._contribution()

    def _contribution(self) -> Contribution:
        self._binding.let_gpu_finish()
        with self._model_lock:  # a visit that began meanwhile would mix the output's buffers in
            own = Untrained.of(self._model) if self._own is None else self._own
        value, weight = self.weighted or (self._replica.snapshot(), 1.0)
        score = score_of(self._replica.memory)
        return Contribution(value, weight, own.statistics, own.counters, score)

    # ------------------------------------------------------------------ what this worker gets

    def _output(self, step: int = 0) -> Contribution:
        """The method's output after so many steps, or as of now; asks every living worker."""
        session = self._session
        if session.method.output == "ensemble":
            return self._contribution()
        speaking = session.grouping.speaking(self.leavers.standing)
        return combined(session.method.output, *session.contributions(speaking, step))

    def of(self, ranks: Sequence[int]) -> Contribution:
        """The output of workers that hold another part of the model, as of now: with a synchronous
        method after as many steps as this worker has made."""
        step = 0 if self._most_behind is None else self._made
        standing = self.leavers.standing
        asked = [(rank, "output", step) for rank in ranks if rank in standing]
        found = self._session.answers(asked)
        if not found:
            raise self._session.grouping.lost(self._session.router.live)
        if self._session.method.output == "ensemble":
            return found[0]
        return combined(self._session.method.output, found, [])

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside this context the model is the output."""
        step = 0
        if self._most_behind is not None:
            step, own = self._made, self._contribution()
            with self._lock:
                self._kept.setdefault(step, own)
        with self._visit(self._output(step)):
            if self.recalibration.is_needed:
                self.recalibration.recompute(warns=self._warns)
            yield

    def final(self) -> tuple[Contribution, Averages | None]:
        """All have ended: return the output, and its statistics on everybody's batches if they must
        be recomputed."""
        output = self._output()
        if not self.recalibration.is_needed:
            return output, None
        with self._visit(output):
            own = self.recalibration.averages(warns=self._warns)
        session = self._session
        session.router.offer("statistics", lambda: own)
        asked = [(process, "statistics", 0) for process in sorted(session.router.live)]
        found = combined_averages(session.answers(asked))
        return output, found if found.count else None

    def put(self, output: Contribution, averages: Averages | None) -> None:
        """The loop is over: the module owns its memory again and holds the output."""
        self._binding.detach(output.value)
        Untrained(output.buffers, output.counters).load(self._model)
        if averages is not None:
            self.recalibration.load(averages)

    @property
    def _warns(self) -> bool:
        """Whether to warn: one worker does it for all, and not before the first step."""
        return self._made > 0 and self._session.is_lowest

    @contextmanager
    def _visit(self, output: Contribution) -> Generator[None]:
        with self._model_lock:
            before, here = self._own, Untrained.of(self._model)
            self._own, self.is_visiting = here if before is None else before, True
        self.recalibration.is_paused = True
        point = [parameter.detach().clone() for parameter in self._binding.parameters]
        was_private = self._binding.is_private
        self._binding.make_private()
        self._binding.load(output.value)
        Untrained(output.buffers, output.counters).load(self._model)
        try:
            yield
        finally:
            here.load(self._model)
            self._own, self.is_visiting = before, before is not None
            self.recalibration.is_paused = before is not None
            self._binding.restore(point, is_private=was_private)


class Leavers:
    """Workers that have left their loops while others go on: by early stopping, by fewer batches.

    No collective of a synchronous method waits for them (`Router.announce_leaving`). With a method
    that waits for nobody they go on answering and count as before.
    """

    def __init__(self, session: Session) -> None:
        self._rank, self._router, self._metrics = session.rank, session.router, session.metrics
        self._group = session.group
        self._is_synchronous = session.is_synchronous
        self._period = int(session.options.get("period", 1))
        self._noticed: set[int] = set()
        self._said: set[int] = set()
        """Those of whom this worker itself has told the user."""

    def notice(self) -> None:
        """In every step: say once of each that left with fewer steps that the others go on."""
        members = self._router.members
        for rank, steps in members.left.items():
            if self._is_missed(rank) and steps < self._metrics.steps and rank not in self._noticed:
                self._noticed.add(rank)
                here = members.training if self._is_synchronous else self._group
                if self._rank == min(members.training.intersection(here), default=None):
                    self._say(rank, steps)

    def conclude(self) -> None:
        """All have left. Whoever should have said it may have heard of it only after its last
        step."""
        made = {**self._router.members.left, self._rank: self._metrics.steps}
        known = {rank: steps for rank, steps in made.items() if rank in self._router.live}
        here = known.keys() if self._is_synchronous else known.keys() & set(self._group)
        most = max((known[rank] for rank in here), default=0)
        if self._rank == min((rank for rank in here if known[rank] == most), default=None):
            for rank, steps in known.items():
                if self._is_missed(rank) and steps < most and rank not in self._said:
                    self._say(rank, steps)

    def _is_missed(self, rank: int) -> bool:
        return self._is_synchronous or rank in self._group

    def _say(self, rank: int, steps: int) -> None:
        self._said.add(rank)
        print(
            f"gossamer: worker {rank} has left its loop after {steps} steps; the "
            "others go on without it, and it gets their model in the end",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    @property
    def standing(self) -> frozenset[int]:
        """The living workers whose models count. With a synchronous method these are all but those
        that lack a whole period of steps, because the others have met without them."""
        router = self._router
        if not router.members.left or not self._is_synchronous:
            return router.live
        steps = [made for rank, made in router.members.left.items() if rank in router.live]
        most = max([*steps, self._metrics.steps])
        return frozenset(
            rank
            for rank in router.live
            if most - router.members.left.get(rank, most) < self._period
        )
