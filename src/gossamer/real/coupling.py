"""A user's loop coupled to those of the others: the method's coroutine, driven from `step()`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.methods import MethodSpec, for_role
from gossamer.pending import Pending
from gossamer.real.binding import Binding
from gossamer.real.books import Books
from gossamer.real.buckets import Buckets, can_send_parts
from gossamer.real.checking import Watch, check_alike
from gossamer.real.cores import OwnCore
from gossamer.real.descent import lay_out_state
from gossamer.real.driver import Driver
from gossamer.real.group_roles import role_in_group
from gossamer.real.grouping import Grouping
from gossamer.real.hub import Hub, Plan
from gossamer.real.last_words import last_words
from gossamer.real.loop_replica import LoopReplica
from gossamer.real.loop_state import resume_loop, state_of_loop
from gossamer.real.outputs import (
    Output,
    combined,
    flat_statistics,
    load_statistics,
    pack_bytes,
    unpack_bytes_,
    untrained,
)
from gossamer.real.pace import LoopPace
from gossamer.real.server_optimizer import OwnOptimiserReplica, server_replica
from gossamer.real.signals import explain_no_more, explain_on_signal
from gossamer.real.slowness import Slowness, own_slow_factor
from gossamer.real.telling import Telling, TellingHub
from gossamer.real.transport import StopToken, Store, Transport, Window
from gossamer.real.worker import RealWorker
from gossamer.replica import Replica, cut
from gossamer.worker import Gradient


class Coupling:
    """Everything behind a `JoinedWorker` that is not alone."""

    def __init__(
        self, transport: Transport, spec: MethodSpec, model: nn.Module, binding: Binding,
        optimizer: torch.optim.Optimizer, seed: int, steps: int, telling: Telling | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size = transport.rank, transport.size
        self.transport = transport
        self.spec = spec
        self.method = spec.method
        self._grouping = Grouping.of(spec.groups, transport)
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
        self.plan = Plan(self.size, slices)
        self._telling = telling
        if telling is None:
            self.hub = Hub(transport, self.plan, self._driver)
        else:
            telling.on_failure = self._driver.fail
            self.hub = TellingHub(transport, self.plan, self._driver, telling)
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
        self._weighted: tuple[Tensor, float] | None = None
        """Push-sum's numerator and weight as of the last gradient, which belong together."""
        self._statistics: Tensor | None = None
        """This worker's own, while its model visits the output."""

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
        windows = {
            end: Window(
                length, self._binding.dtype, self.plan.process_of(end), self._device,
                self._binding.home,
            )
            for end, length in enumerate(self.plan.lengths(initial.numel()))
        }  # fmt: skip
        own = {
            end: initial if end < self.size else initial[self.plan.slices[end - self.size]]
            for end in self.plan.hosted_by(self.rank)
        }
        if loaded is not None:
            own |= {end: loaded["servers"][str(end)]["value"] for end in own if end >= self.size}
        self.hub.offer("untrained", lambda: pack_bytes(untrained(self._model)))
        self.hub.open(windows, own)
        are_in_parts = self._share_beginning()
        if self._telling is not None:
            self._telling.begin()
        window = self.transport.window(self.rank)
        is_shared = self.method.shares_replica
        is_alone = self.transport.averages_at_once and not self.group
        is_alone = is_alone and self.method.is_left_alone(self.rank, self.size, self.options)
        self._binding.attach(window, is_private=is_shared and not is_alone)
        lay_out_state(self._optimizer)
        self._watch = Watch(self._model, self._binding)
        guard = self.transport.guard(self.rank) if is_shared else None
        stale = self._stale_of(self.rank)
        self.replica = LoopReplica(self._binding, window, self._optimizer, guard, stale)
        self.buckets = Buckets(
            self._binding, self.transport, self._driver, self._advance, is_agreed=are_in_parts
        )
        if are_in_parts:
            self.replica.before_descent = self.buckets.conclude
        self.hub.offer("output", self._own_output)
        for end in self.plan.hosted_by(self.rank):
            if end >= self.size:
                self._begin_server(end)
        explain_on_signal(self.rank, self._driver.waiting.explain)
        self.worker = RealWorker(
            self.hub, self.rank, seed=self._seed, pace=self._pace, books=self.books,
            gradient=self._gradient, telling=self._telling, grouping=self._grouping,
        )  # fmt: skip
        if loaded is not None:
            resume_loop(loaded, self.worker, self.replica)
        role = for_role(self.method.worker, self.options)
        self._main = role_in_group(
            self.worker, cast(Replica, self.replica), self.method.worker, role, self._grouping,
            self._driver,
        )  # fmt: skip
        self._core = OwnCore(self.transport, is_synchronous=self.is_synchronous)
        self._stepped_at = time.monotonic()
        self._advance()

    def _share_beginning(self) -> bool:
        """Everyone starts from the model of worker 0, unless from a checkpoint of its own. Whether
        all of them can send gradients in parts."""
        own = self.transport.window(self.rank)
        if self.rank != 0 and self._loaded is None:
            pending = self.transport.read(0)
            self._driver.wait(pending, "beginning")
            own.copy_(pending.result())
            unpack_bytes_(untrained(self._model), self._ask(0, "untrained"))
            for end in self.plan.hosted_by(self.rank)[1:]:
                self.transport.window(end).copy_(own[self.plan.slices[end - self.size]])
        # Nobody may change anything before everyone has read it.
        self._binding.let_gpu_finish()
        cannot = torch.tensor([float(not can_send_parts(self._binding, self.transport))])
        agreed = self.transport.all_reduce(cannot, range(self.size))
        self._driver.wait(agreed, "beginning")
        return not float(agreed.result())

    def _stale_of(self, end: int) -> Callable[[int], None]:
        """What to do with the staleness of a gradient that this end applies."""
        telling = self._telling
        if telling is None:
            return self.books.stale

        def stale(updates: int) -> None:
            self.books.stale(updates)
            telling.stale(end, updates)

        return stale

    def _begin_server(self, end: int) -> None:
        window = self.transport.window(end)
        replica = server_replica(
            self.spec, self.replica, self._binding, self._optimizer,
            self.plan.slices[end - self.size], window, self.transport.guard(end),
            self._stale_of(end), ends=self._grouping.ends, is_synchronous=self.is_synchronous,
        )  # fmt: skip
        if self._loaded is not None:
            replica.load_state_dict(self._loaded["servers"][str(end)])
        self._servers[end] = replica
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
                telling=self._telling, grouping=self._grouping,
            )  # fmt: skip
            role = for_role(self.method.server, self.options)
            self._driver.start(self.method.server(server, replica, **role), f"server {end}")

    def finish(self) -> None:
        """The loop is over: wait for the others, answering; then hold the output model."""
        try:
            self._binding.let_gpu_finish()
            self._core.let_go()
            self.buckets.close()
            self._main.close()
            self.worker.finish()
            self.hub.announce_end()
            self.hub.ended.wait()
            self.hub.settle()
            output = self.output()
            self.hub.announce_read()
            self.hub.read.wait()
        except BaseException:
            self.abandon()
            raise
        self._binding.detach(output.value)
        load_statistics(self._model, output.buffers)
        lay_out_state(self._optimizer)
        explain_no_more()
        self._stop.set()
        self.transport.close()

    def abandon(self) -> None:
        """The loop failed: the module keeps what this worker has, and the others see a death when
        this process ends. A closed transport would look like a worker that left in good order."""
        self._core.let_go()
        self.buckets.close()
        self._binding.detach(self.transport.window(self.rank) / self.replica.weight)
        explain_no_more()
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
        if self._statistics is not None:
            raise ConfigurationError(
                "worker.step() was called inside worker.consensus(), where the model is the output"
                " and not what this worker trains; leave the `with` first"
            )
        self._watch.look()
        if self._slowness is not None:
            self._slowness.lengthen(time.monotonic() - self._stepped_at)
        self.books.steps += 1
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        self._optimizer._opt_called = True
        self.buckets.complete(is_changed=skips_infinite)
        wanted.resolve(self._travelling() if self.plan.slices else self._binding.new_gradient())
        self._advance()
        self._binding.let_go()
        if self._slowness is not None:
            self._stepped_at = time.monotonic()

    def _travelling(self) -> Tensor:
        """The gradient as a vector of its own: a server in this very process would hold on to what
        the next step overwrites. An infinite one would spoil what servers keep, so it goes as
        zero."""
        self._binding.new_gradient()
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
        if self.replica.uses_weight:
            self._weighted = (self.replica.snapshot(), self.replica.weight)
        self._wanted = self.buckets.gradient()
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

    # ------------------------------------------------------------------ the output model

    def _own_output(self) -> Output:
        # May run in the receiving thread at any moment, in the middle of a step too.
        self._binding.let_gpu_finish()
        statistics = self._statistics
        if statistics is None:
            statistics = flat_statistics(self._model)
        weighted = self._weighted
        if weighted is not None:
            return Output(*weighted, statistics)
        return Output(self.replica.snapshot(), 1.0, statistics)

    def output(self) -> Output:
        """The method's output as of now; asks every living worker."""
        if self.method.output == "ensemble":
            return self._own_output()
        found: list[Output] = []
        for process in sorted(self._grouping.speaking(self.hub.live)):
            try:
                found.append(self._ask(process, "output"))
            except PeerLost:
                continue
        if not found:
            raise self._grouping.lost(self.hub.live)
        servers = [
            self._ask(self.plan.process_of(end), f"output {end}")
            for end in range(self.size, self.plan.ends)
        ]
        return combined(self.method.output, found, servers)

    def _ask(self, process: int, service: str) -> Any:
        answer = self.hub.call(process, service)
        self._driver.wait(answer, "output")
        return answer.result()

    @contextlib.contextmanager
    def output_in_place(self) -> Generator[None]:
        output = self.output()
        before, here = self._statistics, flat_statistics(self._model)
        self._statistics = here if before is None else before
        point = [parameter.detach().clone() for parameter in self._binding.parameters]
        was_private = self._binding.is_private
        self._binding.make_private()
        self._binding.load(output.value)
        load_statistics(self._model, output.buffers)
        try:
            yield
        finally:
            load_statistics(self._model, here)
            self._statistics = before
            self._binding.restore(point, is_private=was_private)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return state_of_loop(self.worker, self.replica, self._servers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
