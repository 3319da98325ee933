"""One worker of `gossamer train`, from its request to its end.

Model, batches, keys and arithmetic are the simulator's, so a method whose result does not depend
on timing ends with the same bits in both worlds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost, ProtocolError
from gossamer.groups import Grouping
from gossamer.observe.observer import SECOND
from gossamer.observe.run_observer import RunObserver
from gossamer.observe.strip import Strip
from gossamer.optim.optimisers import make_optimiser
from gossamer.pending import Pending
from gossamer.real.driver import Free, Turns
from gossamer.real.launch.console import say
from gossamer.real.output_model import Contribution
from gossamer.real.replicas import WindowReplica
from gossamer.real.session import Session
from gossamer.real.train.batches import BalancedBatches, Batches, make_batches
from gossamer.real.train.checkpoint import CheckpointWriter, WorkerCounts, WorkerState, save
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.transports.transport import Transport
from gossamer.real.worker import tell_operations
from gossamer.replica import Layout, Replica, score_of
from gossamer.tasks.evaluator import Evaluator, Held, OutputAverage
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of
from gossamer.worker import Gradient, Lesson

_REPORT_S = 0.2
_FIRST_MOMENTS = 250


class Training:
    """One worker of `gossamer train`, and the servers that live in its process."""

    def __init__(
        self, request: TrainRequest, transport: Transport, log: WorkerLog | None = None,
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        settings = self._settings = request.settings
        assert settings.batch
        assert settings.epochs
        assert settings.learning_rate
        assert settings.optimiser
        self.rank, size = transport.rank, transport.size
        self._strip = Strip(size, most_segments=_FIRST_MOMENTS)
        self._observer = RunObserver(size, [self.rank], others=[self._strip])
        self._metrics = self._observer.metrics
        self._log = log
        self._model = FlatModel(
            settings.task, torch.device("cpu"), seed=settings.seed,
            microbatches=settings.microbatches,
        )  # fmt: skip
        self._buffers = self._model.initial_buffers.clone()
        self._schedule = settings.made_schedule
        self._rate = settings.learning_rate
        self._evaluate_every = settings.epochs / settings.evaluations
        self._kept = WorkerState.read(request.checkpoint, self.rank) if request.checkpoint else None
        options = None if self._kept is None else self._kept.options
        session = self.session = self._make_session(transport, options)
        session.driver.turns = turns or Free()
        self._optimiser = session.optimiser(make_optimiser(settings.optimiser))
        self._evaluator = Evaluator(
            self._model, session.method.output, settings.buffers,
            is_trained_itself=session.is_trained_itself and settings.swa is None,
        )  # fmt: skip
        self._gradients = 0
        self._reported = self._next_evaluation = 0.0
        self._checkpoints = CheckpointWriter(request, session, self._save)
        self._awaited: Pending[Any] | None = None
        self.has_ended = False

    def _make_session(self, transport: Transport, options: Mapping[str, Any] | None) -> Session:
        settings = self._settings
        return Session(
            transport, settings.method, self._observer, self._model.layout, seed=settings.seed,
            steps=settings.steps_per_worker, options=options,
        )  # fmt: skip

    @property
    def _layout(self) -> Layout:
        """The parameters that this process trains."""
        return self._model.layout

    def _initial(self) -> Tensor:
        """Their values at the beginning."""
        return self._model.initial

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Run to the end, and until nobody needs an answer from here."""
        driver = self.session.driver
        self.open()
        driver.turns.enter("start")
        self.start()
        driver.turns.leave()
        self.session.explain_itself()
        try:
            driver.drive(self.main, "main", self.end)
            self._ended = time.monotonic()
            self.session.finish(self._conclude)
        except BaseException:
            self.session.abandon(tells_others=False)
            raise
        self.session.close()

    @property
    def main(self) -> Coroutine[Any, Any, None]:
        assert self.session.main is not None, "the session has not started"
        return self.session.main

    def end(self) -> None:
        """The worker's coroutine has ended."""
        self.worker.finish()
        self.replica.end_steps()
        self.session.router.announce_end()

    def open(self) -> None:
        """Connect to the others, with the initial model or that of a checkpoint."""
        session, saved = self.session, dict[int, Tensor]()
        if self._kept is not None:
            hosted = session.addresses.hosted_by(self.rank)
            saved = {end: self._kept.value_of(end, session.size) for end in hosted}
        session.open(self._initial(), saved)
        self.replica = self._replica(self.rank)
        swa, epochs = self._settings.swa, self._settings.epochs
        if swa is not None and epochs is not None:
            self._evaluator.average = OutputAverage(self.replica.memory, swa * epochs)
        session.router.offer("output", self.own_output)

    def _replica(self, end: int) -> WindowReplica:
        part, layout = slice(0, self._layout.total), self._layout
        if end >= self.session.size:
            part = self.session.addresses.slice_of(end)
        optimiser = self._optimiser.suited(layout.within(part).shapes)
        replica = WindowReplica(
            self.session.place(end), optimiser, self._learning_rate, self._settings.clip,
            self.session.spec.clips_first, has_schedule=self._settings.schedule != "constant",
        )  # fmt: skip
        if self._kept is not None:
            self._kept.load(replica, None if end == self.rank else end)
        return replica

    def start(self) -> None:
        """Make the coroutines. Servers run until they wait; the worker's own has not begun."""
        session = self.session
        self._pace = self._make_pace()
        self._balanced = self._pace if isinstance(self._pace, BalancedBatches) else None
        pace = self._checkpoints.between_steps(self._pace)
        self.worker = session.make_worker(self.rank, pace, self._gradient)
        if self._kept is not None:
            self._go_on(self._kept)
        session.start(self.worker, self.replica, self._pace, self._replica, self._orphaned)
        self._began = time.monotonic() - (self._kept.counts.seconds if self._kept else 0.0)
        self._strip.begin(time.monotonic_ns())
        tell_operations(self.worker, self._observer)

    def _make_pace(self) -> Batches:
        router = self.session.router
        return self._batches_of(self.session.grouping, lambda: router.live, router.live_at)

    def _batches_of(
        self, place: Grouping, live: Callable[[], frozenset[int]],
        live_at: Callable[[int], frozenset[int]],
    ) -> Batches:  # fmt: skip
        """The batches of one end among those that take batches."""
        return make_batches(
            self._settings, self.session.store, place, live=live, live_at=live_at,
            is_synchronous=self.session.is_synchronous,
            on_repeat=lambda samples: self._observer.observed(
                self.rank, "repeated", samples, time.monotonic_ns()
            ),
            noise=self._metrics.known_noise,
        )  # fmt: skip

    def _orphaned(self, lost: PeerLost) -> None:
        """This worker has nothing more to do, but goes on answering."""
        session = self.session
        if self.rank == min(session.router.live & frozenset(session.group)):
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
                pending = self.main.send(None)
                if not pending.done:
                    self._awaited = pending
                    return
        except StopIteration:
            self.has_ended = True
            self.end()

    def _learning_rate(self, pace: float) -> float:
        return self._rate * self._schedule.factor(self._pace.epoch * pace)

    # ------------------------------------------------------------------ checkpoints

    def _go_on(self, kept: WorkerState) -> None:
        """Go on from a checkpoint."""
        kept.restore(self.session, self.worker, self._pace)
        self._buffers = kept.buffers
        self._gradients = kept.counts.gradients
        self._next_evaluation = kept.counts.next_evaluation

    def _save(self, folder: Path) -> None:
        counts = WorkerCounts(
            self._gradients, self.session.router.bytes_sent, time.monotonic() - self._began,
            self._next_evaluation,
        )  # fmt: skip
        save(folder, self.session, self.worker, self.replica, self._pace, self._buffers, counts)

    # ------------------------------------------------------------------ gradients

    def _gradient(
        self, at: Tensor | Replica, batch: Tensor | None, lesson: Lesson | None
    ) -> Gradient:
        """Read the point and the batch now; the thread that awaits the gradient computes it."""
        self.session.driver.check()
        self.replica.begin_step()
        if not self.session.method.servers_hold_model:
            self.replica.read = (self.replica.version,)
        point = at if isinstance(at, Tensor) else at.snapshot()
        if self.session.grouping.follows:
            self._pace.open_step(self._gradients)  # its leader has opened it for both
        chosen = torch.from_numpy(self._pace.next_batch()) if batch is None else batch
        key = key_of(self._settings.seed, self.rank, self._gradients)
        self._gradients += 1
        gradient = Gradient()
        weight = 1.0 if self._balanced is None or batch is not None else self._balanced.weight
        gradient.settle = lambda: self._compute(gradient, point, chosen, key, weight, lesson)
        return gradient

    def _compute(
        self, gradient: Gradient, point: Tensor, batch: Tensor, key: int, weight: float,
        lesson: Lesson | None,
    ) -> None:  # fmt: skip
        began = time.monotonic_ns()
        value, loss, self._buffers = self._model.gradient(point, self._buffers, batch, key, lesson)
        if self.session.slowness is not None:
            self.session.slowness.lengthen((time.monotonic_ns() - began) / SECOND)
        ended = time.monotonic_ns()
        if self._balanced is not None:
            self._balanced.computed(len(batch), (ended - began) / SECOND)
        self._observer.computed(self.rank, (began, ended), ended - began, len(batch), loss)
        self._metrics.noise.add(value.unsqueeze(0), len(batch))
        self._report()
        gradient.loss = loss
        gradient.resolve(value if weight == 1.0 else value * weight)

    def _report(self) -> None:
        """Write a line of progress now and then, and evaluate when it is time."""
        now = time.monotonic()
        if self._log is None or now - self._reported < _REPORT_S:
            return
        self._reported = now
        self._log.write("progress", self._progress())
        if self._speaks_for_all and self._pace.epoch >= self._next_evaluation:
            # A worker that evaluates only since the death of another one skips what is past.
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
        score = score_of(self.replica.memory)
        return Contribution(*self.replica.for_others(), self._buffers.clone(), score=score)

    @property
    def _speaking(self) -> frozenset[int]:
        """The living workers whose models count."""
        return self.session.grouping.speaking(self.session.router.live)

    @property
    def _speaks_for_all(self) -> bool:
        return self.rank == min(self._speaking, default=None)

    def output_of(self, trainings: Sequence[Training]) -> Tensor:
        """The output model of a whole run whose workers are all here."""
        found = [training.own_output() for training in trainings]
        replicas = {
            end: held for one in trainings for end, held in one.session.servers.items()
        }  # fmt: skip
        addresses = self.session.addresses
        servers = [Contribution.of_server(replicas[end]) for end in addresses.servers]
        return self._evaluator.output_parameters(_held(found, servers))

    def _held(self) -> Held:
        """What the living workers and the servers hold."""
        return _held(*self.session.contributions(self._speaking))

    def _evaluate(self, kind: str) -> None:
        assert self._log is not None
        held = self._held()
        self._evaluator.reached(held, self._pace.epoch)
        self._log.write(kind, {
            "seconds": time.monotonic() - self._began,
            "epochs": self._pace.epoch,
            "samples": round(self._pace.epoch * len(self._settings.task.train)),
            "output": self._evaluator.output,
            **self._evaluator.score(held).row(self._settings.task),
        })  # fmt: skip
        if kind == "result":
            output = self._evaluator.output_parameters(held)
            self._log.keep_output(output, self._evaluator.state_dict(held, output))

    def _own_facts(self) -> dict[str, Any]:
        """What else this process says of itself at the end."""
        return {}

    def _conclude(self) -> None:
        assert self._log is not None
        session = self.session
        if not self._speaking:
            raise session.grouping.lost(session.router.live)
        self._log.write("books", {
            **self._metrics.state(),
            "first_moments": self._strip.moments(self.rank),
            "seconds": self._ended - self._began,
            "bytes": session.router.bytes_sent,
            "weight": self.replica.weight,
            "living": len(session.router.live),
            "torn_updates": session.transport.torn_updates,
            "checkpoints": self._checkpoints.count,
            "checkpoint_seconds": self._checkpoints.seconds,
            **self._own_facts(),
        })  # fmt: skip
        if self._speaks_for_all:
            self._evaluate("result")


def _held(workers: Sequence[Contribution], servers: Sequence[Contribution]) -> Held:
    return Held(
        torch.stack([one.value for one in workers]), [one.weight for one in workers],
        torch.stack([one.buffers for one in workers]), [one.value for one in servers],
        [one.score for one in workers],
    )  # fmt: skip
