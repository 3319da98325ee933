"""The second door on real workers: one worker of `gossamer train`, from its job to its last word.

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
from gossamer.groups import Grouping, role_of
from gossamer.methods import for_role, parse_method
from gossamer.optim.optimisers import make_optimiser
from gossamer.optim.schedules import make_schedule
from gossamer.pending import Pending
from gossamer.real.batches import LEASE, Batches, LeasedBatches, RoundBatches
from gossamer.real.books import Books
from gossamer.real.driver import Driver
from gossamer.real.event_order import Free, Turns
from gossamer.real.faults.slow_worker import Slowness, own_slow_factor
from gossamer.real.grouping import grouping_of
from gossamer.real.launch.console import say
from gossamer.real.launch.signals import explain_on_signal
from gossamer.real.moments import Moments
from gossamer.real.output_model import Output
from gossamer.real.replicas import WindowReplica
from gossamer.real.router import Addresses, Router
from gossamer.real.train.checkpoint import Checkpointing
from gossamer.real.train.job import Diary, Job
from gossamer.real.train.worker_state import Counts, Kept, Parts
from gossamer.real.transports.transport import StopToken, Store, Transport, Window
from gossamer.real.watched_worker import WatchedWorker
from gossamer.real.worker import RealWorker
from gossamer.replica import Replica, cut
from gossamer.tasks import Task
from gossamer.tasks.evaluator import Evaluator, Held
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of
from gossamer.tasks.split import Order, OwnSampler, make_sampler
from gossamer.worker import Gradient

_REPORT_S = 0.2


class Training:
    """One worker, with the servers that live in its process."""

    def __init__(
        self, job: Job, task: Task, transport: Transport, diary: Diary | None = None,
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self.job = job
        self.rank, self.size = transport.rank, transport.size
        self.books = Books()
        self._diary = diary
        self._transport = transport
        self._spec = parse_method(job.method)
        self._method = self._spec.method
        self._grouping = grouping_of(self._spec.groups, transport)
        self._model = FlatModel(task, torch.device("cpu"), seed=job.seed)
        self._buffers = self._model.initial_buffers.clone()
        self._schedule = make_schedule(job.schedule, epochs=job.epochs, workers=self.size)
        steps = max(1, -(-job.samples // (job.batch * self.size)))
        self._kept = Kept.of(job.resume, self.rank) if job.resume else None
        self._options = (
            self._spec.resolve(self._grouping.ends, steps)
            if self._kept is None
            else self._kept.options
        )
        self._is_synchronous = self._method.is_synchronous(self._options)
        self._optimiser = self._spec.optimiser(
            make_optimiser(job.optimiser), self._grouping.ends, is_synchronous=self._is_synchronous
        )
        self._evaluator = Evaluator(
            self._model, self._method.output, job.buffers,
            is_trained_itself=self._method.is_trained_itself(self._grouping.ends, self._options),
        )  # fmt: skip
        self._stop = StopToken()
        self.driver = Driver(self._stop)
        self._moments = Moments(self.size, self.books)
        self.driver.on_wait = self._moments.waited
        self.driver.turns = turns or Free()
        sizes = self._model.layout.sizes
        slices = cut(sizes, self._spec.servers) if self._method.has_server else ()
        self._plan = Addresses(self.size, slices)
        self._hub = Router(transport, self._plan, self.driver)
        self._gradients = 0
        self._losses: list[float] = []
        self._slowness = Slowness(own_slow_factor(self.rank), self.driver.check)
        self._reported = self._next_evaluation = 0.0
        self._checkpointing = Checkpointing(
            job, self._hub, self._method.server is not None, self._options, self._parts
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
            self._hub.ended.wait()
            self._hub.settle()
            self._conclude()
            self._hub.announce_drained()
            self._hub.drained.wait()
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
        self._hub.announce_end()

    def open(self) -> None:
        """Connect to the others, each with a window of its own."""
        initial = self._model.initial
        parts = {self.size + at: part for at, part in enumerate(self._plan.slices)}
        lengths = {end: part.stop - part.start for end, part in parts.items()}
        windows = {
            end: Window(
                lengths.get(end, initial.numel()), initial.dtype, self._plan.process_of(end)
            )
            for end in range(self._plan.ends)
        }
        own = {
            end: initial if end < self.size else initial[parts[end]]
            for end in self._plan.hosted_by(self.rank)
        }
        if self._kept is not None:
            own = {end: self._kept.value_of(end, self.size) for end in own}
        self._hub.open(windows, own)
        shared = self._method.shares_replica
        self._replica = WindowReplica(
            self._transport.window(self.rank),
            self._optimiser,
            self._learning_rate,
            clip=self.job.clip,
            guard=self._transport.guard(self.rank) if shared else None,
            on_descend=self.books.stale,
        )
        self._hub.offer("output", self.own_output)

    def start(self) -> None:
        """Make the coroutines; servers run until they wait, the worker's own has not begun."""
        self._pace = make_pace(
            self.job, self._model.task.train.targets, self._transport.store, self._grouping,
            live=lambda: self._hub.live, live_at=lambda step: self._worker.live_at(step),
            is_synchronous=self._is_synchronous,
            on_repeat=lambda samples: self.books.observe("repeated", samples),
        )  # fmt: skip
        self._worker = WatchedWorker(
            self._hub, self.rank, self._moments, seed=self.job.seed, books=self.books,
            gradient=self._gradient, grouping=self._grouping,
            pace=self._checkpointing.between_steps(self._pace),
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
        self._moments.begin(time.monotonic())

    def _orphaned(self, lost: PeerLost) -> None:
        """This worker has nothing more to do, but goes on answering."""
        if self.rank == min(self._hub.live & frozenset(self._grouping.group)):
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
        return self.job.learning_rate * self._schedule.factor(self._pace.epoch)

    def _start_servers(self) -> None:
        for end in self._plan.hosted_by(self.rank):
            if end < self.size:
                continue
            replica = WindowReplica(
                self._transport.window(end), self._optimiser, self._learning_rate,
                clip=self.job.clip, guard=self._transport.guard(end), on_descend=self.books.stale,
            )  # fmt: skip
            self.servers[end] = replica
            if self._kept is not None:
                self._kept.load(replica, end)
            self._hub.offer(
                f"output {end}",
                lambda held=replica: Output(
                    held.snapshot() if held.output is None else held.output, 1.0, torch.empty(0)
                ),
            )
            if self._method.server is not None:
                worker = RealWorker(
                    self._hub, end, seed=self.job.seed, pace=self._pace, books=self.books,
                    grouping=self._grouping,
                )  # fmt: skip
                own = for_role(self._method.server, self._options)
                self.driver.start(self._method.server(worker, replica, **own), f"server {end}")

    # ------------------------------------------------------------------ checkpoints

    def _go_on(self, kept: Kept) -> None:
        """From a checkpoint."""
        kept.load(self._replica)
        kept.restore(self._worker, self._pace, self.books)
        self._buffers = kept.buffers
        self._gradients = kept.counts.gradients
        self._next_evaluation = kept.counts.next_evaluation

    def _parts(self) -> Parts:
        return Parts(
            self._worker, self._replica, self.servers, self._pace, self.books, self._buffers,
            Counts(
                self._gradients, self._hub.bytes_sent + self.books.bytes,
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
        key = key_of(self.job.seed, self.rank, self._gradients)
        self._gradients += 1
        gradient = Gradient("gradient")
        gradient.settle = lambda: self._compute(gradient, point, chosen, key)
        return gradient

    def _compute(self, gradient: Gradient, point: Tensor, batch: Tensor, key: int) -> None:
        began = time.monotonic()
        value, loss, self._buffers = self._model.gradient(point, self._buffers, batch, key)
        self._slowness.lengthen(time.monotonic() - began)
        ended = time.monotonic()
        self.books.computing += ended - began
        self._moments.computed(began, ended)
        self.books.steps += 1
        self.books.samples += len(batch)
        self._losses.append(float(loss))
        self._report()
        gradient.resolve(value)

    def _report(self) -> None:
        """A line now and then for whoever watches."""
        now = time.monotonic()
        if self._diary is None or now - self._reported < _REPORT_S:
            return
        self._reported = now
        self._diary.write("progress", self._progress())
        if self._speaks_for_all and self._pace.epoch >= self._next_evaluation:
            # One who evaluates since the others' death goes on from here.
            while self._next_evaluation <= self._pace.epoch:
                self._next_evaluation += self.job.epochs / self.job.evaluations
            self._evaluate("row")

    def _progress(self) -> dict[str, Any]:
        losses, self._losses = self._losses, []
        return {
            "seconds": time.monotonic() - self._began,
            "epochs": self._pace.epoch,
            "training_loss": sum(losses) / len(losses) if losses else None,
            "steps": self.books.steps,
            "samples": self.books.samples,
            "exchanges": self.books.exchanges,
            "waiting_seconds": sum(self.books.waiting.values()),
            "mean_staleness": self.books.mean_staleness,
            "waits_for": self.books.longest_wait,
        }

    # ------------------------------------------------------------------ what came out

    def own_output(self) -> Output:
        return Output(*self._replica.for_others(), self._buffers.clone())

    @property
    def _speaks_for_all(self) -> bool:
        return self.rank == min(self._grouping.speaking(self._hub.live), default=None)

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
        found: list[Output] = []
        for process in sorted(self._grouping.speaking(self._hub.live)):
            try:
                found.append(self._ask(process, "output"))
            except PeerLost:
                continue
        servers = [
            self._ask(self._plan.process_of(end), f"output {end}").value
            for end in range(self.size, self._plan.ends)
        ]
        return Held(
            torch.stack([one.value for one in found]), [one.weight for one in found],
            torch.stack([one.buffers for one in found]), servers,
        )  # fmt: skip

    def _ask(self, process: int, service: str) -> Output:
        answer = self._hub.call(process, service)
        self.driver.wait(answer, "evaluation")
        return answer.result()

    def _evaluate(self, kind: str) -> None:
        assert self._diary is not None
        held = self._held()
        scores = self._evaluator.score(held)
        self._diary.write(kind, {
            "seconds": time.monotonic() - self._began,
            "epochs": self._pace.epoch,
            "output": self._method.output,
            "loss": scores.loss,
            "accuracy": scores.accuracy,
            "worker_accuracy": scores.worker_accuracy,
            "consensus_distance": scores.consensus_distance,
        })  # fmt: skip
        if kind == "result":
            output = self._evaluator.output_parameters(held)
            self._diary.keep_output(output, self._evaluator.state_dict(held, output))

    def _conclude(self) -> None:
        assert self._diary is not None
        if not self._grouping.speaking(self._hub.live):
            raise self._grouping.lost(self._hub.live)
        self._diary.write("books", {
            **self.books.as_dict(),
            "first_moments": self._moments.segments,
            "seconds": self._ended - self._began,
            "bytes": self._hub.bytes_sent + self.books.bytes,
            "weight": self._replica.weight,
            "living": len(self._hub.live),
            "torn_updates": self._transport.torn_updates,
            "checkpoints": self._checkpointing.count,
            "checkpoint_seconds": self._checkpointing.seconds,
        })  # fmt: skip
        if self._speaks_for_all:
            self._evaluate("result")


def make_pace(
    job: Job, targets: Tensor, store: Store, grouping: Grouping, *,
    live: Callable[[], frozenset[int]], live_at: Callable[[int], frozenset[int]],
    is_synchronous: bool, on_repeat: Callable[[int], None],
) -> Batches:  # fmt: skip
    """Of one worker; with groups, what a group without its leader has taken is not done."""
    rank, size, data_size = grouping.rank, grouping.size, len(targets)
    sampler = make_sampler(targets, size, job.batch, job.split, job.seed, is_synchronous)
    if is_synchronous:
        return RoundBatches(
            job.samples, job.batch, data_size, lambda step: grouping.working(live_at(step)),
            sampler, rank, size,
        )  # fmt: skip
    order = sampler if isinstance(sampler, OwnSampler) else Order(data_size, job.seed, job.batch)
    return LeasedBatches(
        job.samples, job.batch, data_size, store, order, rank, size,
        lambda: grouping.working(live()), on_repeat,
        # The members of a group take theirs at each step: when it ends, none has any left.
        lease=1 if grouping.groups else LEASE,
    )  # fmt: skip
