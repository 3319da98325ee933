"""The output model of coupled loops: what each worker gives to it and gets, and of which moment.

Workers of a synchronous method meet in every round, but each ends its step a little later or sooner
than the others. So who asks for the output says how many steps it has made, and a worker that has
made fewer answers when it has made as many: it needs nothing for them that the asker has not given
already. Who has looked at the output itself keeps what it had then, for those who come to that step
later. Workers of an asynchronous method answer with what they hold, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gossamer.errors import PeerLost
from gossamer.groups import Grouping
from gossamer.methods import Method
from gossamer.pending import Pending
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.leavers import Leavers
from gossamer.real.join.recalibration import NO_AVERAGES, Averages, Recalibration, combined_averages
from gossamer.real.join.replica import LoopReplica
from gossamer.real.output_model import Contribution, Untrained, combined
from gossamer.real.router import Router


class Handout:
    """One worker's part in it."""

    def __init__(
        self,
        model: nn.Module,
        binding: ModuleBinding,
        replica: LoopReplica,
        router: Router,
        method: Method,
        grouping: Grouping,
        leavers: Leavers,
        recalibration: Recalibration,
        *,
        most_behind: int | None,
    ) -> None:
        """`most_behind`: by how many steps another worker can be behind this one; None where steps
        of different workers have nothing to do with each other."""
        self._model = model
        self._binding = binding
        self._replica = replica
        self._router = router
        self._driver = router.driver
        self._method = method
        self._grouping = grouping
        self._leavers = leavers
        self.recalibration = recalibration
        self._most_behind = most_behind
        self.weighted: tuple[Tensor, float] | None = None
        """Push-sum's numerator and weight as of the last gradient, which belong together."""
        self._own: Untrained | None = None
        """This worker's own, while its model visits the output."""
        self._lock = threading.Lock()
        self._made = 0
        """Steps of this worker."""
        self._has_ended = False
        self._waiting: list[tuple[int, Pending[Contribution]]] = []
        """Those who have made more steps, and how many."""
        self._kept: dict[int, Contribution] = {}
        """What this worker had after the steps at which it looked itself."""
        router.offer("output", self._asked)
        if not recalibration.is_needed:
            router.offer("statistics", lambda: NO_AVERAGES)

    @property
    def is_visiting(self) -> bool:
        """Whether the model is the output and not what this worker trains."""
        return self._own is not None

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
        """May be called in the receiving thread at any moment, in the middle of a step too."""
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
        own = Untrained.of(self._model) if self._own is None else self._own
        value, weight = self.weighted or (self._replica.snapshot(), 1.0)
        return Contribution(value, weight, own.statistics, own.counters)

    # ------------------------------------------------------------------ what this worker gets

    def _output(self, step: int = 0) -> Contribution:
        """The method's output after so many steps, or as of now; asks every living worker."""
        if self._method.output == "ensemble":
            return self._contribution()
        speaking = sorted(self._grouping.speaking(self._leavers.standing))
        found = self._answers([(process, "output", step) for process in speaking])
        if not found:
            raise self._grouping.lost(self._router.live)
        # Behind the workers: what they have done by that step the servers have then been told.
        addresses = self._router.addresses
        asked = [
            (addresses.process_of(end), f"output {end}", 0)
            for end in range(addresses.size, addresses.ends)
        ]
        servers = self._answers(asked, are_all_needed=True)
        return combined(self._method.output, found, servers)

    def _answers(
        self, asked: list[tuple[int, str, int]], *, are_all_needed: bool = False
    ) -> list[Any]:
        """Of those who live to give them."""
        under_way = [self._router.call(*one) for one in asked]
        found: list[Any] = []
        for answer in under_way:
            try:
                self._driver.wait(answer, "output")
                found.append(answer.result())
            except PeerLost:
                if are_all_needed:
                    raise
        return found

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the model is the output."""
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
        """All have ended: the output, and its statistics on everybody's batches where they are not
        those that the workers have gathered."""
        output = self._output()
        if not self.recalibration.is_needed:
            return output, None
        with self._visit(output):
            own = self.recalibration.averages(warns=self._warns)
        self._router.offer("statistics", lambda: own)
        living = sorted(self._router.live)
        found = combined_averages(self._answers([(process, "statistics", 0) for process in living]))
        return output, found if found.count else None

    def put(self, output: Contribution, averages: Averages | None) -> None:
        """The loop is over: the module owns its memory again and is the output."""
        self._binding.detach(output.value)
        Untrained(output.buffers, output.counters).load(self._model)
        if averages is not None:
            self.recalibration.load(averages)

    @property
    def _warns(self) -> bool:
        """Once is enough for all workers, and a model that nobody has trained yet is what it is."""
        return self._made > 0 and self._router.rank == min(
            self._router.live, default=self._router.rank
        )

    @contextmanager
    def _visit(self, output: Contribution) -> Generator[None]:
        before, here = self._own, Untrained.of(self._model)
        self._own = here if before is None else before
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
            self._own = before
            self.recalibration.is_paused = before is not None
            self._binding.restore(point, is_private=was_private)
