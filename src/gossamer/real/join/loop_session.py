"""A user's loop coupled to those of the others: the method's coroutine, driven from `step()`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, Error, PeerLost
from gossamer.groups import role_of
from gossamer.methods import MethodSpec, for_role
from gossamer.observe.metrics import summary
from gossamer.observe.run_observer import RunObserver
from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.faults.fault_plan import own_fault_plan
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.grouping import grouping_of
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.changes import Changes
from gossamer.real.join.checks import LoopWatch, check_alike
from gossamer.real.join.gradient import LoopGradients, LoopWorker, can_send_buckets
from gossamer.real.join.handout import Handout
from gossamer.real.join.leavers import Leavers
from gossamer.real.join.recalibration import BATCHES, Recalibration
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.server import OwnOptimiserReplica, server_replica, worker_replica
from gossamer.real.join.server_state import ServerState, packed_state
from gossamer.real.join.step_guard import StepGuard
from gossamer.real.launch.explanation import explain_no_more, explain_on_signal
from gossamer.real.lost_peer import last_words
from gossamer.real.output_model import Contribution, pack_bytes, unpack_bytes_, untrained
from gossamer.real.router import Addresses, Router
from gossamer.real.transports.transport import Stopped, StopToken, Store, Transport, Window
from gossamer.real.worker import RealWorker, tell_waits
from gossamer.replica import Replica, cut
from gossamer.worker import Gradient


class LoopPace:
    """The user's loop decides when it is over."""

    def __init__(self, expected_steps: int) -> None:
        self.expected_steps = expected_steps

    def open_step(self, step: int) -> bool:
        return True


class LoopSession:
    """Everything behind a `JoinedWorker` that is not alone."""

    def __init__(
        self, transport: Transport, spec: MethodSpec, model: nn.Module, binding: ModuleBinding,
        optimizer: torch.optim.Optimizer, seed: int, steps: int, observer: RunObserver,
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
        self._observer = observer
        self.metrics = observer.metrics
        self._model = model
        self._binding = binding
        self._optimizer = cast(Any, optimizer)
        self._seed = seed
        self._stop = StopToken()
        self._driver = Driver(self._stop)
        tell_waits(self._driver, self._observer, self.rank)
        slices = cut(binding.layout.sizes, spec.servers) if self.method.has_server else ()
        self.addresses = Addresses(self.size, slices)
        self.router = Router(transport, self.addresses, self._driver)
        self.router.on_lost = lambda process: self._observer.lost(process, time.monotonic_ns())
        observer.callbacks.on_failure = self._driver.fail
        self._guard = StepGuard(optimizer, binding.named())
        self._leavers = Leavers(
            self.router, self.metrics, self.options, self.group, is_synchronous=self.is_synchronous
        )
        # Processes that share a GPU can reach into each other's memory there.
        is_on_gpu = binding.is_alike and binding.device.type == "cuda" and transport.name == "shm"
        self._device = binding.device if is_on_gpu else torch.device("cpu")
        self.router.device = self._device
        self._pace = LoopPace(steps)
        factor = own_fault_plan().slow_factor(self.rank)
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
        return self.rank == min(self.router.live, default=self.rank)

    # ------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        check_alike(self._model, self._binding, self.store)
        loaded = self._loaded
        initial = self._binding.initial() if loaded is None else loaded["value"]
        windows = windows_of(self.addresses, self._binding, self._device)
        own = {
            end: initial if end < self.size else initial[self.addresses.slices[end - self.size]]
            for end in self.addresses.hosted_by(self.rank)
        }
        if loaded is not None:
            own |= {end: loaded["servers"][str(end)]["value"] for end in own if end >= self.size}
        self.router.offer("untrained", lambda: pack_bytes(untrained(self._model)))
        self.router.open(windows, own)
        has_buckets = share_beginning(
            self.router, self._model, self._binding, is_resumed=loaded is not None
        )
        self._observer.callbacks.begin(time.monotonic_ns())
        window = self.transport.window(self.rank)
        is_shared = self.method.shares_replica
        self._binding.attach(window, is_private=is_shared)
        lay_out_state(self._optimizer)
        self._watch = LoopWatch(self._model, self._binding)
        guard = self.transport.guard(self.rank) if is_shared else None
        stale = self._on_descend(self.rank)
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
        for end in self.addresses.hosted_by(self.rank):
            if end >= self.size:
                self._begin_server(end)
        self._server_state = ServerState(
            self._optimizer, self._binding, self.spec, self.router, self.last_words
        )
        explain_on_signal(self.rank, self._driver.waiting.explain)
        self.worker = LoopWorker(
            self.router, self.rank, seed=self._seed, pace=self._pace, observer=self._observer,
            gradient=self._gradient, grouping=self._grouping,
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
            self._model, self._binding, self.replica, self.router, self.method, self._grouping,
            self._leavers, batches, most_behind=most_behind if self.is_synchronous else None,
        )  # fmt: skip

    def _on_descend(self, end: int) -> Callable[[int], None]:
        """What tells how stale a gradient was that this end applies."""
        return lambda missed: self._observer.stale(end, missed, time.monotonic_ns())

    def _begin_server(self, end: int) -> None:
        window = self.transport.window(end)
        replica = server_replica(
            self.spec, self.replica, self._binding, self._optimizer,
            self.addresses.slices[end - self.size], window, self.transport.guard(end),
            self._on_descend(end), ends=self._grouping.ends,
            is_synchronous=self.is_synchronous,
        )  # fmt: skip
        if self._loaded is not None:
            replica.load_state_dict(self._loaded["servers"][str(end)])
        self._servers[end] = replica
        if isinstance(replica, LoopReplica):
            self.router.offer(f"optimiser {end}", lambda: packed_state(replica))
        self.router.offer(
            f"output {end}",
            lambda: Contribution(
                replica.snapshot() if replica.output is None else replica.output,
                1.0,
                torch.empty(0),
            ),
        )
        if self.method.server is not None:
            server = RealWorker(
                self.router, end, seed=self._seed, pace=self._pace, observer=self._observer,
                grouping=self._grouping, forgets_leavers=True,
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
            self.router.announce_leaving(self.metrics.steps)
            with self._driver.waiting.shown("the others: it has left its loop"):
                self.router.ended.wait()
            self._leavers.conclude()
            self.router.settle()
            output = self.handout.final()
            self._server_state.fetch()
            self.router.announce_drained()
            self.router.drained.wait()
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
            self.router.announce_death()
        self._stop.set()
        self._main.close()

    def last_words(self, lost: PeerLost) -> PeerLost:
        return last_words(lost, self.addresses, self._stop)

    def summary(self) -> dict[str, Any]:
        """Of this worker, and of the servers in its process."""
        return {
            **summary(self.metrics, self.router.bytes_sent),
            "living": len(self.router.live),
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
        self._leavers.notice()
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        self._optimizer._opt_called = True
        self.gradients.complete(is_changed=skips_infinite)
        gradient = self.gradients.completed()
        wanted.resolve(self._travelling() if self.addresses.slices else gradient)
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


def state_of_loop(
    worker: RealWorker, replica: LoopReplica,
    servers: Mapping[int, LoopReplica | OwnOptimiserReplica],
) -> dict[str, Any]:  # fmt: skip
    return {
        "step": worker.step,
        "weight": replica.weight,
        "version": replica.version,
        "memory": {name: tensor.clone() for name, tensor in replica.memory.items()},
        "value": replica.snapshot(),
        "random": json.dumps(worker.rng.getstate()),
        "servers": {str(end): server.state_dict() for end, server in servers.items()},
    }


def resume_loop(state: dict[str, Any], worker: RealWorker, replica: LoopReplica) -> None:
    """All but the values and the servers, which are there before anybody can reach them."""
    worker.step = int(state["step"])
    replica.version = int(state["version"])
    replica.memory = {name: tensor.clone() for name, tensor in state["memory"].items()}
    if state["weight"] != 1.0:
        replica.weight = float(state["weight"])
    version, numbers, spare = json.loads(state["random"])
    worker.rng.setstate((version, tuple(numbers), spare))


def windows_of(
    addresses: Addresses, binding: ModuleBinding, device: torch.device
) -> dict[int, Window]:
    """What every end publishes."""
    lengths = addresses.lengths(binding.layout.total)
    return {
        end: Window(length, binding.dtype, addresses.process_of(end), device, binding.home)
        for end, length in enumerate(lengths)
    }


def share_beginning(
    router: Router, model: nn.Module, binding: ModuleBinding, *, is_resumed: bool
) -> bool:
    """Everyone starts from the model of worker 0, unless from a checkpoint of its own. Whether all
    of them can reduce gradients in buckets."""
    rank, transport, addresses, driver = (
        router.rank,
        router.transport,
        router.addresses,
        router.driver,
    )
    own = transport.window(rank)
    if rank != 0 and not is_resumed:
        pending = transport.read(0)
        driver.wait(pending, "beginning")
        own.copy_(pending.result())
        unpack_bytes_(untrained(model), router.ask(0, "untrained", "beginning"))
        for end in addresses.hosted_by(rank)[1:]:
            transport.window(end).copy_(own[addresses.slices[end - addresses.size]])
    # Nobody may change anything before everyone has read it.
    binding.let_gpu_finish()
    cannot = torch.tensor([float(not can_send_buckets(binding, transport))])
    agreed = transport.all_reduce([cannot], range(addresses.size))
    driver.wait(agreed, "beginning")
    agreed.result()
    return not float(cannot)
