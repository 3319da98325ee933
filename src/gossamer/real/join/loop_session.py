"""A user's loop coupled to those of the others: the method's coroutine, driven from `step()`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.methods import MethodSpec
from gossamer.observe.observer import SECOND
from gossamer.observe.run_observer import RunObserver
from gossamer.pending import Pending
from gossamer.real.join.balance import LoopShares
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.checks import check_alike, parameters_of
from gossamer.real.join.elastic.batch_accounts import BatchAccounts
from gossamer.real.join.elastic.newcomer import (
    GivenBeginning,
    check_elastic,
    fetch_beginning,
    give_beginnings,
    tell_the_end,
)
from gossamer.real.join.exchanged_values import ExchangedValues
from gossamer.real.join.gradient import LoopGradients, can_send_buckets
from gossamer.real.join.learning.lessons import Lessons
from gossamer.real.join.loop_watch import LoopWatch
from gossamer.real.join.output import LoopOutput
from gossamer.real.join.recalibration import BATCHES
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.servers import ServerState, packed_state, server_replica, worker_replica
from gossamer.real.join.several_optimizers import parts_of
from gossamer.real.output_model import pack_bytes, unpack_bytes_, untrained
from gossamer.real.pipelines.island_session import IslandSession
from gossamer.real.replicas import PublishedReplica
from gossamer.real.session import Session
from gossamer.real.transports.beginning import Beginning
from gossamer.real.transports.transport import Transport
from gossamer.real.worker import LoopPace
from gossamer.replica import Replica, trainable
from gossamer.worker import Gradient, Lesson


class LoopSession:
    """Everything behind a `JoinedWorker` that is not alone."""

    def __init__(
        self, transport: Transport, spec: MethodSpec, model: nn.Module,
        optimizer: torch.optim.Optimizer, observer: RunObserver, *, seed: int, steps: int,
        statistics_batches: int = BATCHES, processes: int = 1,
    ) -> None:  # fmt: skip
        """`processes` is how many the model is sharded over."""
        self._model = model
        self._optimizer = cast(Any, optimizer)
        self._parts = cast("list[Any]", parts_of(optimizer))
        binding = self._binding = ModuleBinding(trainable(model))
        self.session: Session
        if processes > 1:
            self.session = IslandSession.of(
                transport, spec, observer, binding.layout, processes, seed=seed, steps=steps
            )
        else:
            self.session = Session(
                transport, spec, observer, binding.layout, seed=seed, steps=steps,
                has_leavers=True,
            )  # fmt: skip
        self.shared = ExchangedValues(self.session)
        members = self.session.router.members
        self.shares = LoopShares(lambda: members.training) if spec.balance else None
        """The sizes of the loop's batches, where they follow the speeds of the workers."""
        self.accounts: BatchAccounts | None = None
        """What becomes of each batch of an elastic run."""
        self.passes: list[dict[str, Any]] = []
        """The same in the end, for each pass over a loader."""
        if Beginning.from_environment().is_elastic:
            rank, size, store = transport.rank, transport.size, transport.store
            self.accounts = BatchAccounts(store, rank, size, lambda: members.live)
        self._is_watched = spec.method.servers_hold_model
        """Whether the loop may not change its parameters between two steps."""
        self._has_servers = bool(self.session.addresses.slices)
        self._pace = LoopPace(steps)
        self._newcomer: GivenBeginning | None = None
        """What another worker has given to this one, which came during the run."""
        self._wanted: Gradient | None = None
        """The gradient that the method has asked for, and that the loop computes next."""
        self.lessons = Lessons(model, binding.layout, spec.name)
        self._awaited: Pending[Any] | None = None
        """The gradient that the method awaits: the loop's own, or the mean of its group's."""
        self.loaded: dict[str, Any] | None = None
        """The state to go on from, as `state_dict` had returned it."""
        self._statistics_batches = statistics_batches
        self.stages: Sequence[nn.Module] = ()
        """Where a replica is several processes, what each of them trains of the whole model."""
        self.before_end: Callable[[], None] = lambda: None
        """Called when all have made their last step, and everybody still answers."""

    # ------------------------------------------------------------------ begin

    def begin(self) -> None:
        """Couple the loop, and run its method to where it wants the first gradient."""
        if Beginning.from_environment().is_elastic:
            check_elastic(self.session)
        check_alike(self._model, self._binding, self.session.store, self.session.first)
        self._open()
        has_buckets = self._share_beginning()
        self.session.observer.callbacks.begin(time.monotonic_ns())
        self._bind(has_buckets=has_buckets)
        self._start()
        self._look_at_clock()
        try:
            self.session.router.take_part()
            self._advance()
        except BaseException:
            # No `with` has been entered that would end these.
            self.output.recalibration.close()
            self._server_state.end()
            raise
        self._watch.begin()

    def _open(self) -> None:
        """Connect to the others, with this worker's model or with that of its checkpoint."""
        session, binding, loaded = self.session, self._binding, self.loaded
        saved: dict[int, Tensor] = {}
        if loaded is not None:
            here = session.addresses.hosted_by(session.rank)
            kept = {int(end): state["value"] for end, state in loaded["servers"].items()}
            saved = {end: value for end, value in kept.items() if end in here}
        # Processes that share a GPU can reach into each other's memory there.
        is_on_gpu = binding.is_alike and binding.device.type == "cuda"
        is_on_gpu = is_on_gpu and session.transport.name == "shm"
        is_on_gpu = is_on_gpu and not Beginning.from_environment().is_elastic
        session.router.offer("untrained", lambda: pack_bytes(untrained(self._model)))
        for number, stage in enumerate(self.stages):
            session.router.offer(f"stage {number}", partial(_pack_stage, stage))
        session.open(
            binding.initial() if loaded is None else loaded["value"], saved,
            device=binding.device if is_on_gpu else torch.device("cpu"), home=binding.home,
        )  # fmt: skip

    def _share_beginning(self) -> bool:
        """Everyone starts from the model of worker 0, unless from a checkpoint of its own. Returns
        whether all workers can reduce gradients in buckets."""
        session = self.session
        rank, transport, driver = session.rank, session.transport, session.driver
        own = transport.window(rank)
        first = session.first
        if session.is_newcomer:
            self._newcomer = fetch_beginning(session)
            own.copy_(self._newcomer.model)
            unpack_bytes_(untrained(self._model), self._newcomer.untrained)
            return False
        if self.stages and self.loaded is None:
            # Of the stage that is trained here worker 0 has a model, too.
            parts = _parts_of(self._model)
            unpack_bytes_(parts, session.router.ask(0, f"stage {first}", "beginning"))
            own.copy_(self._binding.initial())
        elif rank != first and self.loaded is None:
            pending = transport.read(first)
            driver.wait(pending, "beginning")
            own.copy_(pending.result())
            unpack_bytes_(
                untrained(self._model), session.router.ask(first, "untrained", "beginning")
            )
            for end in session.addresses.hosted_by(rank)[1:]:
                transport.window(end).copy_(own[session.addresses.slice_of(end)])
        # Nobody may change anything before everyone has read it.
        self._binding.let_gpu_finish()
        # What is encoded is looked at, so it must be the whole gradient as the loop leaves it. The
        # weight of a balanced batch is known when backward begins, but put on when the loop has
        # made its changes.
        is_plain = session.spec.compressor is None and self.shares is None
        is_able = is_plain and can_send_buckets(self._binding, transport)
        is_able = is_able and not Beginning.from_environment().is_elastic
        cannot = torch.tensor([float(not is_able)])
        agreed = transport.all_reduce([cannot], session.beginners)
        driver.wait(agreed, "beginning")
        agreed.result()
        return not float(cannot)

    def _bind(self, *, has_buckets: bool) -> None:
        """From here on the module trains in the window, and its gradients are the method's."""
        session, binding = self.session, self._binding
        window = session.transport.window(session.rank)
        binding.attach(window, is_private=session.method.shares_replica)
        lay_out_state(self._optimizer)
        self.replica = worker_replica(session, binding, self._optimizer)
        self._watch = LoopWatch(
            self._model, binding, self._optimizer, self.replica, session.method
        )  # fmt: skip
        self.gradients = LoopGradients(
            binding, session.transport, session.driver, self._advance, has_buckets=has_buckets
        )
        if has_buckets:
            self.replica.before_descent = self.gradients.conclude
        self.output = LoopOutput(
            session, self._model, binding, self.replica, self._statistics_batches
        )

    def _start(self) -> None:
        session = self.session
        self.worker = session.make_worker(
            session.rank, self._pace, self._gradient, self.gradients.reduce
        )
        if self.loaded is not None:
            self._resume(self.loaded)
        if self._newcomer is not None:
            self._newcomer.load(self.worker, self._optimizer, self._binding)
        give_beginnings(session, self._model, self.replica, self.worker)
        session.start(self.worker, self.replica, self._pace, self._server)
        session.explain_itself()
        self._server_state = ServerState(session, self._binding, self._optimizer)
        assert session.main is not None
        self._main = session.main

    def _server(self, end: int) -> PublishedReplica:
        session = self.session
        replica = server_replica(session, end, self.replica, self._binding, self._optimizer)
        if self.loaded is not None:
            replica.load_state_dict(self.loaded["servers"][str(end)])
        if isinstance(replica, LoopReplica):
            session.router.offer(f"optimiser {end}", lambda: packed_state(replica))
        return replica

    # ------------------------------------------------------------------ end

    def finish(self) -> None:
        """The loop is over: wait for the others, answering; then hold the output model."""
        session, output = self.session, self.output
        found: list[Any] = []

        def conclude() -> None:
            output.leavers.conclude()
            if self.accounts is not None:
                self.passes = self.accounts.summary()
                tell_the_end(session)
            found.extend(output.final())
            self._server_state.fetch()
            self.before_end()

        try:
            self._binding.let_gpu_finish()
            self._watch.end()
            self.gradients.close()
            if self._wanted is not None:
                session.driver.end(self._main)
            self.worker.finish()
            output.end()
            self.shared.end()
            session.router.announce_leaving(session.metrics.steps)
            session.finish(conclude)
        except BaseException:
            self.abandon()
            raise
        self._server_state.end()
        output.put(*found)
        lay_out_state(self._optimizer)
        session.close()

    @contextmanager
    def last_words(self) -> Generator[None]:
        """A loss that ends the loop is told in one sentence."""
        try:
            yield
        except PeerLost as lost:
            raise self.session.last_words(lost) from None

    def abandon(self) -> None:
        """The loop failed: the module keeps what this worker has, and to the others it is dead."""
        self._watch.end()
        self._server_state.end()
        self.gradients.close()
        self.output.recalibration.close()
        self._binding.detach(self._binding.window / self.replica.weight)
        self.session.abandon(tells_others=True)

    def summary(self) -> dict[str, Any]:
        """What this worker did, and what became of the batches where workers come and go."""
        return self.session.summary() | ({"passes": self.passes} if self.passes else {})

    # ------------------------------------------------------------------ the loop

    def step(self, *, skips_infinite: bool = False) -> None:
        """The user's gradient is there: the method goes on to where it wants the next one."""
        wanted, session, watch = self._wanted, self.session, self._watch
        assert wanted is not None, "the method is over"
        if self.output.is_visiting:
            raise ConfigurationError(
                "worker.step() was called inside worker.consensus(), where the model is the output"
                " and not what this worker trains; leave the `with` first"
            )
        watch.look()
        if changed := watch.changed():
            watch.publish(changed)
        if session.slowness is not None:
            session.slowness.lengthen(time.monotonic() - self._stepped_at)
        if self.shares is not None:
            own = session.metrics.workers[session.rank]
            waited = (own.waited_ns - self._waited_ns) / SECOND
            took = time.monotonic() - self._stepped_at - waited
            self.shares.weigh(self._binding.parameters, took)
        if session.router.members.left:
            self.output.leavers.notice()
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        for part in self._parts:
            part._opt_called = True
        compares = session.method.compares_losses and session.size > 1
        self.lessons.end(wanted, compares_losses=compares)
        gradient = self.gradients.complete(is_changed=skips_infinite)
        wanted.resolve(self._travelling(gradient.vector()) if self._has_servers else gradient)
        watch.is_stepping = True
        try:
            self._advance()
        finally:
            watch.is_stepping = False
        self.output.stepped()
        self._look_at_clock()

    def has_waited(self, seconds: float) -> None:
        """So much of this step was spent waiting for others of this replica, which a worker that is
        made slower does not take longer for."""
        self._stepped_at += seconds

    def _look_at_clock(self) -> None:
        self._waited_ns = self.session.metrics.workers[self.session.rank].waited_ns
        self._stepped_at = time.monotonic()

    def step_alone(self, optimizer: torch.optim.Optimizer, *, skips_infinite: bool) -> None:
        """A step in which only this one of several optimisers has gradients."""
        session = self.session
        is_late = session.options.get("stale") or session.spec.server_optimiser
        if is_late or session.method.name == "eamsgd":
            raise ConfigurationError(
                f"{session.spec} would move the parameters of the other optimisers too, by momentum"
                " of its own or by late gradients; call worker.step() for all of them, or use"
                " another method"
            )
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        others = [(p, p.grad) for p in self._binding.parameters if id(p) not in held]
        for parameter, _ in others:
            parameter.grad = None
        try:
            self.step(skips_infinite=skips_infinite)
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    def _travelling(self, flat: Tensor) -> Tensor:
        """What goes to servers is a vector of its own, because a server in this very process would
        hold on to what the next step overwrites. An infinite gradient would spoil what servers
        keep, so it goes as zero."""
        skips = self.replica.skips_infinite and not bool(torch.isfinite(flat).all())
        self.replica.skips_this = skips
        return torch.zeros_like(flat) if skips else flat

    def _gradient(
        self, at: Tensor | Replica, batch: Tensor | None, lesson: Lesson | None
    ) -> Gradient:
        self.lessons.begin(lesson)
        binding, replica = self._binding, self.replica
        point = at if isinstance(at, Tensor) else None
        if point is not None:
            binding.make_private()
            binding.load(point)
        elif binding.is_private:
            # The guard is not taken: while others make an average, each element is the old or the
            # new one, and no step waits for them.
            binding.load(replica.window)
        if self._is_watched or binding.is_private:
            self._watch.given(point)
        if replica.uses_weight:
            self.output.weighted = (replica.snapshot(), replica.weight)
        if not self._is_watched:
            replica.read = (replica.version,)
        self._wanted = self.gradients.next()
        return self._wanted

    def _advance(self) -> None:
        """Run the method on, to where it awaits a gradient that only the loop can bring."""
        driver, awaited = self.session.driver, self._awaited
        if awaited is not None and not awaited.done:
            driver.wait(awaited)
        try:
            while True:
                pending = self._main.send(None)
                if pending.done:
                    continue
                wanted = self._wanted
                # The mean of a group's gradients needs the loop's own, too.
                if wanted is not None and not wanted.done and isinstance(pending, Gradient):
                    self._awaited = pending
                    driver.check()
                    return
                driver.wait(pending)
        except StopIteration:
            self._wanted = None

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        if self.session.addresses.has_standbys:
            raise ConfigurationError(
                "a server and its standby are not cut at the same message, so no loop could go on "
                "from their checkpoint; leave out standby="
            )
        return {
            **self.replica.state_dict(),
            "step": self.worker.step,
            "weight": self.replica.weight,
            "random": json.dumps(self.worker.rng.getstate()),
            "servers": {str(end): held.state_dict() for end, held in self.session.servers.items()},
        }

    def _resume(self, state: dict[str, Any]) -> None:
        """Restore all but the values and the servers, which are there before anybody can reach
        them."""
        self.replica.load_state_dict(state)
        if state["weight"] != 1.0:
            self.replica.weight = float(state["weight"])
        self.worker.step = int(state["step"])
        version, numbers, spare = json.loads(state["random"])
        self.worker.rng.setstate((version, tuple(numbers), spare))


def _parts_of(stage: nn.Module) -> list[Tensor]:
    return [*(p.detach() for _, p in trainable(stage)), *untrained(stage)]


def _pack_stage(stage: nn.Module) -> Tensor:
    return pack_bytes(_parts_of(stage))
