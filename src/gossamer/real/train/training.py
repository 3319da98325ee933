"""The second door on real workers: one worker of `gossamer train` from its request to its end.

Model, batches, keys and arithmetic are the simulator's, so a method whose result does not depend
on timing ends with the same bits in both worlds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import PeerLost, ProtocolError
from gossamer.groups import role_of
from gossamer.methods import for_role
from gossamer.observe.observer import SECOND
from gossamer.observe.run_observer import RunObserver
from gossamer.observe.strip import Strip
from gossamer.optim.optimisers import make_optimiser
from gossamer.optim.schedules import make_schedule
from gossamer.pending import Pending
from gossamer.real.driver import Driver, Free, Turns
from gossamer.real.faults.fault_plan import own_fault_plan
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.grouping import grouping_of
from gossamer.real.launch.console import say
from gossamer.real.launch.signals import explain_on_signal
from gossamer.real.output_model import Contribution
from gossamer.real.replicas import WindowReplica
from gossamer.real.router import Addresses, Router
from gossamer.real.train.batches import make_batches
from gossamer.real.train.checkpoint import (
    CheckpointWriter,
    WorkerCounts,
    WorkerParts,
    WorkerState,
)
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.transports.transport import StopToken, Transport, Window
from gossamer.real.worker import RealWorker, tell_operations, tell_waits
from gossamer.replica import Replica, cut
from gossamer.tasks.evaluator import Evaluator, Held
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of
from gossamer.worker import Gradient

_REPORT_S = 0.2
_FIRST_MOMENTS = 250


class Training:
    """One worker, with the servers that live in its process."""

    def __init__(
        self, request: TrainRequest, transport: Transport, log: WorkerLog | None = None,
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        settings = self._settings = request.settings
        assert settings.batch
        assert settings.epochs
        assert settings.learning_rate
        assert settings.optimiser
        self.rank, self.size = transport.rank, transport.size
        self._strip = Strip(self.size, most_segments=_FIRST_MOMENTS)
        self._observer = RunObserver(self.size, [self.rank], others=[self._strip])
        self._metrics = self._observer.metrics
        self._log = log
        self._transport = transport
        self._spec = settings.method
        self._method = self._spec.method
        self._grouping = grouping_of(self._spec.groups, transport)
        self._model = FlatModel(settings.task, torch.device("cpu"), seed=settings.seed)
        self._buffers = self._model.initial_buffers.clone()
        self._schedule = make_schedule(settings.schedule, epochs=settings.epochs, workers=self.size)
        self._rate = settings.learning_rate
        self._evaluate_every = settings.epochs / settings.evaluations
        self._kept = WorkerState.read(request.checkpoint, self.rank) if request.checkpoint else None
        self._options = (
            self._spec.resolve(self._grouping.ends, settings.steps_per_worker)
            if self._kept is None
            else self._kept.options
        )
        self._is_synchronous = self._method.is_synchronous(self._options)
        self._optimiser = self._spec.optimiser(
            make_optimiser(settings.optimiser),
            self._grouping.ends,
            is_synchronous=self._is_synchronous,
        )
        self._evaluator = Evaluator(
            self._model, self._method.output, settings.buffers,
            is_trained_itself=self._method.is_trained_itself(self._grouping.ends, self._options),
        )  # fmt: skip
        self._stop = StopToken()
        self.driver = Driver(self._stop)
        tell_waits(self.driver, self._observer, self.rank)
        self.driver.turns = turns or Free()
        sizes = self._model.layout.sizes
        slices = cut(sizes, self._spec.servers) if self._method.has_server else ()
        self._addresses = Addresses(self.size, slices)
        self._router = Router(transport, self._addresses, self.driver)
        self._gradients = 0
        self._slowness = Slowness(own_fault_plan().slow_factor(self.rank), self.driver.check)
        self._reported = self._next_evaluation = 0.0
        self._checkpoints = CheckpointWriter(
            request, self._router, self._method.server is not None, self._options, self._parts
        )
        self.servers: dict[int, WindowReplica] = {}
        self.has_ended = False

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """To the end of the run, and until nobody needs an answer from here."""
        self.open()
        self.driver.turns.enter("start")
        self.start()
        self.driver.turns.leave()
        explain_on_signal(self.rank, self.driver.waiting.explain)
        try:
            self.driver.drive(self._main, "main", self._end)
            self._ended = time.monotonic()
            self._router.ended.wait()
            self._router.settle()
            self._conclude()
            self._router.announce_drained()
            self._router.drained.wait()
        except BaseException:
            # Closed, the transport would look like that of a worker that left in good order, and
            # whoever waits for an answer from here would wait for ever: they must see a death.
            self._stop.set()
            raise
        self._stop.set()
        self._transport.close()

    def _end(self) -> None:
        self._worker.finish()
        self._replica.end_steps()
        self._router.announce_end()

    def open(self) -> None:
        """Connect to the others, each with a window of its own."""
        initial = self._model.initial
        parts = {self.size + at: part for at, part in enumerate(self._addresses.slices)}
        lengths = {end: part.stop - part.start for end, part in parts.items()}
        windows = {
            end: Window(
                lengths.get(end, initial.numel()), initial.dtype, self._addresses.process_of(end)
            )
            for end in range(self._addresses.ends)
        }
        own = {
            end: initial if end < self.size else initial[parts[end]]
            for end in self._addresses.hosted_by(self.rank)
        }
        if self._kept is not None:
            own = {end: self._kept.value_of(end, self.size) for end in own}
        self._router.open(windows, own)
        shared = self._method.shares_replica
        self._replica = WindowReplica(
            self._transport.window(self.rank),
            self._optimiser,
            self._learning_rate,
            clip=self._settings.clip,
            guard=self._transport.guard(self.rank) if shared else None,
            on_descend=self._on_descend(self.rank),
        )
        self._router.offer("output", self.own_output)

    def start(self) -> None:
        """Make the coroutines; servers run until they wait, the worker's own has not begun."""
        self._pace = make_batches(
            self._settings, self._transport.store, self._grouping,
            live=lambda: self._router.live, live_at=lambda step: self._worker.live_at(step),
            is_synchronous=self._is_synchronous,
            on_repeat=lambda samples: self._observer.observed(
                self.rank, "repeated", samples, time.monotonic_ns()
            ),
        )  # fmt: skip
        self._worker = RealWorker(
            self._router, self.rank, seed=self._settings.seed, observer=self._observer,
            gradient=self._gradient, grouping=self._grouping,
            pace=self._checkpoints.between_steps(self._pace),
        )  # fmt: skip
        if self._kept is not None:
            self._go_on(self._kept)
        self._start_servers()
        own = for_role(self._method.worker, self._options)
        self._main = role_of(
            self._worker, cast(Replica, self._replica), self._method.worker, own, self._grouping,
            begin=self.driver.begin, on_orphaned=self._orphaned,
        )  # fmt: skip
        self._awaited: Pending[Any] | None = None
        self._began = time.monotonic() - (self._kept.counts.seconds if self._kept else 0.0)
        self._strip.begin(time.monotonic_ns())
        tell_operations(self._worker, self._observer)

    def _on_descend(self, end: int) -> Callable[[int], None]:
        """What tells how stale a gradient was that this end applies."""
        return lambda missed: self._observer.stale(end, missed, time.monotonic_ns())

    def _orphaned(self, lost: PeerLost) -> None:
        """This worker has nothing more to do, but goes on answering."""
        if self.rank == min(self._router.live & frozenset(self._grouping.group)):
            say(str(lost))

    def take_turn(self) -> None:
        """In a replay: go on from where the recorded worker waited to where it waited next."""
        awaited = self._awaited
        if awaited is not None and awaited.settle is not None and not awaited.done:
            awaited.settle()
        if awaited is not None and not awaited.done:
            raise ProtocolError(
                f"the replay has diverged: worker {self.rank} goes on in the record while here it "
                f"still waits for {awaited.label!r}; were the record or the project changed?"
            )
        try:
            while True:
                pending = self._main.send(None)
                if not pending.done:
                    self._awaited = pending
                    return
        except StopIteration:
            self.has_ended = True
            self._end()

    def _learning_rate(self) -> float:
        return self._rate * self._schedule.factor(self._pace.epoch)

    def _start_servers(self) -> None:
        for end in self._addresses.hosted_by(self.rank):
            if end < self.size:
                continue
            replica = WindowReplica(
                self._transport.window(end), self._optimiser, self._learning_rate,
                clip=self._settings.clip, guard=self._transport.guard(end),
                on_descend=self._on_descend(end),
            )  # fmt: skip
            self.servers[end] = replica
            if self._kept is not None:
                self._kept.load(replica, end)
            self._router.offer(
                f"output {end}",
                lambda held=replica: Contribution(
                    held.snapshot() if held.output is None else held.output, 1.0, torch.empty(0)
                ),
            )
            if self._method.server is not None:
                worker = RealWorker(
                    self._router, end, seed=self._settings.seed, pace=self._pace,
                    observer=self._observer, grouping=self._grouping,
                )  # fmt: skip
                own = for_role(self._method.server, self._options)
                self.driver.start(self._method.server(worker, replica, **own), f"server {end}")

    # ------------------------------------------------------------------ checkpoints

    def _go_on(self, kept: WorkerState) -> None:
        """From a checkpoint."""
        kept.load(self._replica)
        kept.restore(self._worker, self._pace, self._metrics, self._router)
        self._buffers = kept.buffers
        self._gradients = kept.counts.gradients
        self._next_evaluation = kept.counts.next_evaluation

    def _parts(self) -> WorkerParts:
        return WorkerParts(
            self._worker, self._replica, self.servers, self._pace, self._metrics, self._buffers,
            WorkerCounts(
                self._gradients, self._router.bytes_sent,
                time.monotonic() - self._began, self._next_evaluation,
            ),
        )  # fmt: skip

    # ------------------------------------------------------------------ gradients

    def _gradient(self, at: Tensor | Replica, batch: Tensor | None) -> Gradient:
        """Reads its point and its batch now; computed in the thread that awaits it."""
        self.driver.check()
        self._replica.begin_step()
        if not self._method.servers_hold_model:
            self._replica.read = (self._replica.version,)
        point = at if isinstance(at, Tensor) else at.snapshot()
        if self._grouping.follows:
            self._pace.open_step(self._gradients)  # its leader has opened it for both
        chosen = torch.from_numpy(self._pace.next_batch()) if batch is None else batch
        key = key_of(self._settings.seed, self.rank, self._gradients)
        self._gradients += 1
        gradient = Gradient("gradient")
        gradient.settle = lambda: self._compute(gradient, point, chosen, key)
        return gradient

    def _compute(self, gradient: Gradient, point: Tensor, batch: Tensor, key: int) -> None:
        began = time.monotonic_ns()
        value, loss, self._buffers = self._model.gradient(point, self._buffers, batch, key)
        self._slowness.lengthen((time.monotonic_ns() - began) / SECOND)
        ended = time.monotonic_ns()
        self._observer.computed(self.rank, (began, ended), ended - began, len(batch), loss)
        self._report()
        gradient.resolve(value)

    def _report(self) -> None:
        """A line now and then for whoever watches."""
        now = time.monotonic()
        if self._log is None or now - self._reported < _REPORT_S:
            return
        self._reported = now
        self._log.write("progress", self._progress())
        if self._speaks_for_all and self._pace.epoch >= self._next_evaluation:
            # One who evaluates since the others' death goes on from here.
            while self._next_evaluation <= self._pace.epoch:
                self._next_evaluation += self._evaluate_every
            self._evaluate("row")

    def _progress(self) -> dict[str, Any]:
        own = self._metrics.workers[self.rank]
        return {
            "seconds": time.monotonic() - self._began,
            "epochs": self._pace.epoch,
            **self._metrics.row(),
            "exchanges": own.exchanges,
            "waiting_seconds": own.waited_ns / SECOND,
        }

    # ------------------------------------------------------------------ what came out

    def own_output(self) -> Contribution:
        return Contribution(*self._replica.for_others(), self._buffers.clone())

    @property
    def _speaks_for_all(self) -> bool:
        return self.rank == min(self._grouping.speaking(self._router.live), default=None)

    def output_of(self, trainings: Sequence[Training]) -> Tensor:
        """The output model of a whole run whose workers are all here."""
        found = [training.own_output() for training in trainings]
        replicas = {end: held for training in trainings for end, held in training.servers.items()}
        servers = [
            replicas[end].snapshot() if (output := replicas[end].output) is None else output
            for end in sorted(replicas)
        ]
        held = Held(
            torch.stack([one.value for one in found]), [one.weight for one in found],
            torch.stack([one.buffers for one in found]), servers,
        )  # fmt: skip
        return self._evaluator.output_parameters(held)

    def _held(self) -> Held:
        """What everyone holds now; who is lost on the way is left out."""
        found: list[Contribution] = []
        for process in sorted(self._grouping.speaking(self._router.live)):
            try:
                found.append(self._ask(process, "output"))
            except PeerLost:
                continue
        servers = [
            self._ask(self._addresses.process_of(end), f"output {end}").value
            for end in range(self.size, self._addresses.ends)
        ]
        return Held(
            torch.stack([one.value for one in found]), [one.weight for one in found],
            torch.stack([one.buffers for one in found]), servers,
        )  # fmt: skip

    def _ask(self, process: int, service: str) -> Contribution:
        answer = self._router.call(process, service)
        self.driver.wait(answer, "evaluation")
        return answer.result()

    def _evaluate(self, kind: str) -> None:
        assert self._log is not None
        held = self._held()
        self._log.write(kind, {
            "seconds": time.monotonic() - self._began,
            "epochs": self._pace.epoch,
            "output": self._method.output,
            **self._evaluator.score(held).row(self._settings.task),
        })  # fmt: skip
        if kind == "result":
            output = self._evaluator.output_parameters(held)
            self._log.keep_output(output, self._evaluator.state_dict(held, output))

    def _conclude(self) -> None:
        assert self._log is not None
        if not self._grouping.speaking(self._router.live):
            raise self._grouping.lost(self._router.live)
        self._log.write("books", {
            **self._metrics.state(),
            "first_moments": self._strip.moments(self.rank),
            "seconds": self._ended - self._began,
            "bytes": self._router.bytes_sent,
            "weight": self._replica.weight,
            "living": len(self._router.live),
            "torn_updates": self._transport.torn_updates,
            "checkpoints": self._checkpoints.count,
            "checkpoint_seconds": self._checkpoints.seconds,
        })  # fmt: skip
        if self._speaks_for_all:
            self._evaluate("result")
