"""A user's loop coupled to those of the others: the method's coroutine, driven from `step()`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, Error, PeerLost
from gossamer.groups import role_of
from gossamer.methods import MethodSpec, for_role
from gossamer.pending import Pending
from gossamer.real.batches import LoopPace
from gossamer.real.books import Books
from gossamer.real.callback_dispatcher import Telling, TellingRouter, stale_of
from gossamer.real.driver import Driver
from gossamer.real.faults.slow_worker import Slowness, own_slow_factor
from gossamer.real.grouping import grouping_of
from gossamer.real.join.binding import Binding, lay_out_state
from gossamer.real.join.changes import Changes
from gossamer.real.join.checks import Watch, check_alike
from gossamer.real.join.gradient import LoopGradients, LoopWorker
from gossamer.real.join.handout import Handout
from gossamer.real.join.initial_model import share_beginning, windows_of
from gossamer.real.join.leavers import Leavers
from gossamer.real.join.loop_state import resume_loop, state_of_loop
from gossamer.real.join.recalibration import BATCHES, Recalibration
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.server import OwnOptimiserReplica, server_replica, worker_replica
from gossamer.real.join.server_state import ServerState, packed_state
from gossamer.real.join.step_guard import StepGuard
from gossamer.real.launch.signals import explain_no_more, explain_on_signal
from gossamer.real.lost_peer import last_words
from gossamer.real.output_model import Output, pack_bytes, untrained
from gossamer.real.router import Addresses, Router
from gossamer.real.transports.transport import Stopped, StopToken, Store, Transport
from gossamer.real.worker import RealWorker
from gossamer.replica import Replica, cut
from gossamer.worker import Gradient


class Coupling:
    """Everything behind a `JoinedWorker` that is not alone."""

    def __init__(
        self, transport: Transport, spec: MethodSpec, model: nn.Module, binding: Binding,
        optimizer: torch.optim.Optimizer, seed: int, steps: int, telling: Telling | None = None,
        statistics_batches: int = BATCHES,
    ) -> None:  # fmt: skip
        self.rank, self.size = transport.rank, transport.size
        self.transport = transport
        self.spec = spec
        self.method = spec.method
        self._grouping = grouping_of(spec.groups, transport)
        self.group = self._grouping.group if self._grouping.groups else ()
        self.options = spec.resolve(self._grouping.ends, steps)
        self.is_synchronous = self.method.is_synchronous(self.options)
        self.books = Books()
        self._model = model
        self._binding = binding
        self._optimizer = cast(Any, optimizer)
        self._seed = seed
        self._stop = StopToken()
        self._driver = Driver(self._stop)
        self._driver.on_wait = self.books.waited
        slices = cut(binding.layout.sizes, spec.servers) if self.method.has_server else ()
        self.plan = Addresses(self.size, slices)
        self._telling = telling
        if telling is None:
            self.hub = Router(transport, self.plan, self._driver)
        else:
            telling.on_failure = self._driver.fail
            self.hub = TellingRouter(transport, self.plan, self._driver, telling)
        self._guard = StepGuard(optimizer, binding.named())
        self._leavers = Leavers(
            self.hub, self.books, self.options, self.group, is_synchronous=self.is_synchronous
        )
        # Processes that share a GPU can reach into each other's memory there.
        is_on_gpu = binding.is_alike and binding.device.type == "cuda" and transport.name == "shm"
        self._device = binding.device if is_on_gpu else torch.device("cpu")
        self.hub.device = self._device
        self._pace = LoopPace(steps)
        factor = own_slow_factor(self.rank)
        self._slowness = Slowness(factor, self._driver.check) if factor != 1.0 else None
        self._servers: dict[int, LoopReplica | OwnOptimiserReplica] = {}
        self._wanted: Gradient | None = None
        self._awaited: Pending[Any] | None = None
        """The gradient that the method awaits: the loop's own, or the mean of its group's."""
        self._loaded: dict[str, Any] | None = None
        self._statistics_batches = statistics_batches

    @property
    def store(self) -> Store:
        return self.transport.store

    @property
    def is_main(self) -> bool:
        return self.rank == min(self.hub.live, default=self.rank)

    # ------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        check_alike(self._model, self._binding, self.store)
        loaded = self._loaded
        initial = self._binding.initial() if loaded is None else loaded["value"]
        windows = windows_of(self.plan, self._binding, self._device)
        own = {
            end: initial if end < self.size else initial[self.plan.slices[end - self.size]]
            for end in self.plan.hosted_by(self.rank)
        }
        if loaded is not None:
            own |= {end: loaded["servers"][str(end)]["value"] for end in own if end >= self.size}
        self.hub.offer("untrained", lambda: pack_bytes(untrained(self._model)))
        self.hub.open(windows, own)
        has_buckets = share_beginning(
            self.hub, self._model, self._binding, is_resumed=loaded is not None
        )
        if self._telling is not None:
            self._telling.begin()
        window = self.transport.window(self.rank)
        is_shared = self.method.shares_replica
        self._binding.attach(window, is_private=is_shared)
        lay_out_state(self._optimizer)
        self._watch = Watch(self._model, self._binding)
        guard = self.transport.guard(self.rank) if is_shared else None
        stale = stale_of(self.books, self._telling, self.rank)
        self.replica = worker_replica(
            self.spec, self._binding, window, self._optimizer, guard, stale,
            ends=self._grouping.ends, is_synchronous=self.is_synchronous,
        )  # fmt: skip
        self._changes = Changes(self._model, self._binding, self.replica, self.method)
        self.gradients = LoopGradients(
            self._binding, self.transport, self._driver, self._advance, has_buckets=has_buckets
        )
        if has_buckets:
            self.replica.before_descent = self.gradients.conclude
        self.handout = self._make_handout()
        for end in self.plan.hosted_by(self.rank):
            if end >= self.size:
                self._begin_server(end)
        self._server_state = ServerState(
            self._optimizer, self._binding, self.spec, self.hub, self.last_words
        )
        explain_on_signal(self.rank, self._driver.waiting.explain)
        self.worker = LoopWorker(
            self.hub, self.rank, seed=self._seed, pace=self._pace, books=self.books,
            gradient=self._gradient, telling=self._telling, grouping=self._grouping,
            forgets_leavers=self.is_synchronous,
        )  # fmt: skip
        self.worker.gradients = self.gradients
        if loaded is not None:
            resume_loop(loaded, self.worker, self.replica)
        role = for_role(self.method.worker, self.options)
        self._main = role_of(
            self.worker, cast(Replica, self.replica), self.method.worker, role, self._grouping,
            begin=self._driver.begin,
        )  # fmt: skip
        self._stepped_at = time.monotonic()
        try:
            self._advance()
        except BaseException:
            # No `with` has been entered that would end it.
            self.handout.recalibration.close()
            self._server_state.end()
            raise
        self._guard.begin()

    def _make_handout(self) -> Handout:
        own = self.method.output == "ensemble"
        own = own or self.method.is_trained_itself(self._grouping.ends, self.options)
        batches = Recalibration(self._model, self._statistics_batches, is_needed=not own)
        # Within a period, or as far as a step takes to get around among neighbours.
        most_behind = int(self.options.get("period", 1)) + self.size
        return Handout(
            self._model, self._binding, self.replica, self.hub, self.method, self._grouping,
            self._leavers, batches, most_behind=most_behind if self.is_synchronous else None,
        )  # fmt: skip

    def _begin_server(self, end: int) -> None:
        window = self.transport.window(end)
        replica = server_replica(
            self.spec, self.replica, self._binding, self._optimizer,
            self.plan.slices[end - self.size], window, self.transport.guard(end),
            stale_of(self.books, self._telling, end), ends=self._grouping.ends,
            is_synchronous=self.is_synchronous,
        )  # fmt: skip
        if self._loaded is not None:
            replica.load_state_dict(self._loaded["servers"][str(end)])
        self._servers[end] = replica
        if isinstance(replica, LoopReplica):
            self.hub.offer(f"optimiser {end}", lambda: packed_state(replica))
        self.hub.offer(
            f"output {end}",
            lambda: Output(
                replica.snapshot() if replica.output is None else replica.output,
                1.0,
                torch.empty(0),
            ),
        )
        if self.method.server is not None:
            server = RealWorker(
                self.hub, end, seed=self._seed, pace=self._pace, books=self.books,
                telling=self._telling, grouping=self._grouping, forgets_leavers=True,
            )  # fmt: skip
            role = for_role(self.method.server, self.options)
            self._driver.start(self.method.server(server, replica, **role), f"server {end}")

    def finish(self) -> None:
        """The loop is over: wait for the others, answering; then hold the output model."""
        try:
            self._binding.let_gpu_finish()
            self._guard.end()
            self.gradients.close()
            if self._wanted is not None:
                self._driver.end(self._main)
            self.worker.finish()
            self.handout.end()
            self.handout.recalibration.close()
            self.hub.announce_leaving(self.books.steps)
            with self._driver.waiting.shown("the others: it has left its loop"):
                self.hub.ended.wait()
            self._leavers.conclude()
            self.hub.settle()
            output = self.handout.final()
            self._server_state.fetch()
            self.hub.announce_drained()
            self.hub.drained.wait()
        except BaseException:
            self.abandon()
            raise
        self._server_state.end()
        self.handout.put(*output)
        lay_out_state(self._optimizer)
        explain_no_more()
        self._stop.set()
        self.transport.close()

    def abandon(self) -> None:
        """The loop failed: the module keeps what this worker has, and to the others it is dead. A
        closed transport would look like a worker that left in good order."""
        self._guard.end()
        self._server_state.end()
        self.gradients.close()
        self.handout.recalibration.close()
        self._binding.detach(self.transport.window(self.rank) / self.replica.weight)
        explain_no_more()
        # Whatever stands in the way of telling them, they hear of it when this process ends.
        with contextlib.suppress(Error, OSError, RuntimeError, Stopped):
            self.hub.announce_death()
        self._stop.set()
        self._main.close()

    def last_words(self, lost: PeerLost) -> PeerLost:
        return last_words(lost, self.plan, self._stop)

    def summary(self) -> dict[str, Any]:
        """Of this worker, and of the servers in its process."""
        sent = self.hub.bytes_sent + self.books.bytes
        return {
            **self.books.summary(),
            "bytes_per_step": sent / max(1, self.books.steps),
            "living": len(self.hub.live),
            "torn_updates": self.transport.torn_updates,
        }

    # ------------------------------------------------------------------ the loop

    def step(self, *, skips_infinite: bool = False) -> None:
        """The user's gradient is there: the method goes on to where it wants the next one."""
        wanted = self._wanted
        assert wanted is not None, "the method is over"
        if self.handout.is_visiting:
            raise ConfigurationError(
                "worker.step() was called inside worker.consensus(), where the model is the output"
                " and not what this worker trains; leave the `with` first"
            )
        self._watch.look()
        self._changes.carry_over()
        if self._slowness is not None:
            self._slowness.lengthen(time.monotonic() - self._stepped_at)
        self.books.steps += 1
        self._leavers.notice()
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        self._optimizer._opt_called = True
        self.gradients.complete(is_changed=skips_infinite)
        gradient = self.gradients.completed()
        wanted.resolve(self._travelling() if self.plan.slices else gradient)
        with self._guard:
            self._advance()
        self.handout.stepped()
        self._binding.forget_flat_gradient()
        if self._slowness is not None:
            self._stepped_at = time.monotonic()

    def _travelling(self) -> Tensor:
        """The gradient as a vector of its own: a server in this very process would hold on to what
        the next step overwrites. An infinite one would spoil what servers keep, so it goes as
        zero."""
        flat = self._binding.flat_gradient()
        skips = self.replica.skips_infinite and not bool(torch.isfinite(flat).all())
        self.replica.skips_this = skips
        return torch.zeros_like(flat) if skips else flat

    def _gradient(self, at: Tensor | Replica, batch: Tensor | None) -> Gradient:
        if isinstance(at, Tensor):
            self._binding.make_private()
            self._binding.load(at)
        elif self._binding.is_private:
            # Without its guard: of an average that is being made meanwhile each element is there or
            # is not there yet, and no step waits for it.
            self._binding.load(self.replica.window)
        self._changes.given(at if isinstance(at, Tensor) else None)
        if self.replica.uses_weight:
            self.handout.weighted = (self.replica.snapshot(), self.replica.weight)
        if not self.method.servers_hold_model:
            self.replica.read = (self.replica.version,)
        self._wanted = self.gradients.next()
        return self._wanted

    def _advance(self) -> None:
        main: Coroutine[Any, Any, None] = self._main
        awaited = self._awaited
        if awaited is not None and not awaited.done:
            self._driver.wait(awaited)
        try:
            while True:
                pending = main.send(None)
                if pending.done:
                    continue
                if pending is self._wanted or self._is_the_loops(pending):
                    self._awaited = pending
                    self._driver.check()
                    return
                self._driver.wait(pending)
        except StopIteration:
            self._wanted = None

    def _is_the_loops(self, pending: Pending[Any]) -> bool:
        """Whether only the loop can bring it: the mean of a group's gradients needs its own."""
        wanted = self._wanted
        return wanted is not None and not wanted.done and isinstance(pending, Gradient)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return state_of_loop(self.worker, self.replica, self._servers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
