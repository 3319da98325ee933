"""One process of a run on real workers: the session that `join` and `train` both build.

A session hosts one worker and perhaps some of the method's servers. Its life, from top to bottom:

    Session     who takes part: the groups, the method's options, the addresses, the router
       │
     open       publish the windows of this process and connect to the others;
       │        then the door makes the replica of its worker
     start      begin the servers, which run until they wait; make the worker's coroutine
       │
       │        the door drives the coroutine, from `worker.step()` or to its end
       │
     finish     ended      all workers have announced that they make no more steps
       │        settled    the servers have applied all updates of these steps
       │                   then the door collects the output model
       │        drained    no worker needs an answer any more
     close      disconnect in good order

    abandon     at any of these moments, where the worker has failed

Everything that differs between the two doors is handed in as a value or a callable.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.compression.compressed_worker import compressed
from gossamer.errors import ConfigurationError, Error, Late, PeerLost
from gossamer.groups import Grouping, Groups, even_groups, role_of
from gossamer.methods import MethodSpec, for_role
from gossamer.methods.method import Role
from gossamer.observe.metrics import summary
from gossamer.observe.run_observer import RunObserver
from gossamer.optim.optimisers import Optimiser
from gossamer.pending import Pending
from gossamer.real.addresses import Addresses
from gossamer.real.driver import Driver
from gossamer.real.faults.fault_plan import own_fault_plan
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.launch.console import say
from gossamer.real.launch.environment import Environment, discover
from gossamer.real.launch.explanation import explain_no_more, explain_on_signal
from gossamer.real.lost_peer import last_words
from gossamer.real.output_model import Contribution
from gossamer.real.replicas import Place, PublishedReplica
from gossamer.real.router import Router
from gossamer.real.transports.transport import Stopped, StopToken, Store, Transport, Window
from gossamer.real.worker import MakeGradient, Pace, RealWorker, Reduce
from gossamer.replica import Layout, Replica, cut
from gossamer.standby import Client, Primary, Standby, bound_of
from gossamer.worker import Worker

_CPU = torch.device("cpu")
_LOOK_S = 0.01
_PATIENCE_S = 300.0
"""For hosts that start late, and for worker 0, which may have large checkpoints to check."""


class Session:
    """One worker of a run, the servers in its process, and their connection to the others."""

    def __init__(
        self, transport: Transport, spec: MethodSpec, observer: RunObserver, layout: Layout,
        *, seed: int, steps: int, options: Mapping[str, Any] | None = None,
        has_leavers: bool = False,
    ) -> None:  # fmt: skip
        """`layout` is that of the model's parameters, at whose borders servers divide it.
        `steps` is about how many steps each worker will make; the method's options are derived from
        it, unless a resumed run gives its `options`. `has_leavers` says that a worker may leave
        before the others, who then go on without it."""
        self.rank, self.size = transport.rank, transport.size
        self.transport = transport
        self.spec, self.method = spec, spec.method
        self.observer, self.metrics = observer, observer.metrics
        self.grouping = self._found_grouping()
        self.group = self.grouping.group if self.grouping.groups else ()
        """This worker and those it computes with, step by step; empty without groups."""
        resolved = spec.resolve(self.grouping.ends, steps) if options is None else options
        self.options: Mapping[str, Any] = resolved
        self.is_synchronous = self.method.is_synchronous(resolved)
        self.is_trained_itself = self.method.is_trained_itself(self.grouping.ends, resolved)
        """Whether the output is the very model that each worker trains."""
        self._seed, self._has_leavers = seed, has_leavers
        self._stop = StopToken()
        self.driver = Driver(self._stop)
        self.driver.on_wait = partial(observer.waited, self.rank)
        self.addresses = self._found_addresses(layout)
        self.router = Router(transport, self.addresses, self.driver)
        self.router.on_lost = lambda process: observer.lost(process, time.monotonic_ns())
        self.router.on_joined = lambda rank: observer.joined(rank, time.monotonic_ns())
        observer.callbacks.on_failure = self.driver.fail
        factor = own_fault_plan().slow_factor(self.rank)
        self.slowness = Slowness(factor, self.driver.check) if factor != 1.0 else None
        self.servers: dict[int, PublishedReplica] = {}
        self.main: Coroutine[Any, Any, None] | None = None
        """The worker's coroutine, once it is made."""

    def _found_grouping(self) -> Grouping:
        return _grouping(self.spec.groups, self.transport)

    def _found_addresses(self, layout: Layout) -> Addresses:
        slices = cut(layout.sizes, self.spec.servers) if self.method.has_server else ()
        has_standbys = bool(self.spec.standby)
        if has_standbys and self.size == 1:
            raise ConfigurationError(
                f"{self.spec}: a standby lives in another worker's process, and there is one "
                "worker; leave out standby="
            )
        return Addresses(self.size, slices, layout, has_standbys)

    @property
    def store(self) -> Store:
        return self.transport.store

    @property
    def first(self) -> int:
        """The process with whose model this one begins."""
        return 0

    @property
    def present(self) -> int:
        """How many workers there are; of an elastic run, how many take part now."""
        is_elastic = bool(self.transport.absent or self.transport.life)
        return len(self.router.members.training) if is_elastic else self.size

    @property
    def is_newcomer(self) -> bool:
        """Whether this process comes to a run that others have begun."""
        return self.transport.life > 0

    @property
    def beginners(self) -> Sequence[int]:
        """The processes that begin together."""
        return sorted(frozenset(range(self.size)) - self.transport.absent)

    @property
    def processes(self) -> int:
        """How many processes a replica has."""
        return 1

    @property
    def is_lowest(self) -> bool:
        """Whether no living worker has a lower rank; that one does what is done once."""
        return self.rank == min(self.router.live, default=self.rank)

    def optimiser(self, chosen: Optimiser) -> Optimiser:
        """A chosen optimiser with what this method leaves of its momentum."""
        return self.spec.optimiser(chosen, self.grouping.ends, is_synchronous=self.is_synchronous)

    def momentum(self, own: float) -> float:
        """What this method leaves of an optimiser's momentum."""
        return self.spec.momentum(own, self.grouping.ends, is_synchronous=self.is_synchronous)

    # ------------------------------------------------------------------ begin

    def open(
        self, value: Tensor, saved: Mapping[int, Tensor] | None = None, *,
        device: torch.device = _CPU, home: torch.device = _CPU,
    ) -> None:  # fmt: skip
        """Publish the model that this process begins with, and connect to the others. The values of
        a checkpoint are `saved`, by address. Windows lie on `device`; this process computes at
        `home`."""
        addresses = self.addresses
        windows = {
            end: Window(length, value.dtype, addresses.process_of(end), device, home)
            for end, length in enumerate(addresses.lengths(value.numel()))
        }
        own = {
            end: value if end < self.size else value[addresses.slice_of(end)]
            for end in addresses.hosted_by(self.rank)
        }
        self.router.device = device
        self.router.open(windows, own | dict(saved or {}))

    def place(self, end: int) -> Place:
        """Where the replica of an address of this process lies. Others may change a server's, and a
        worker's if its method says so."""
        is_shared = end >= self.size or self.method.shares_replica
        guard = self.transport.guard(end) if is_shared else None

        def on_stale(missed: int, at_ns: int) -> None:
            primary = self.addresses.primary_of(end)
            # A standby repeats what its primary has told.
            if primary is None or self.addresses.acting(primary, self.router.live) == end:
                self.observer.stale(end, missed, at_ns)

        return Place(self.transport.window(end), guard, on_stale)

    def make_worker(
        self, end: int, pace: Pace, gradient: MakeGradient | None = None,
        reduce: Reduce | None = None,
    ) -> RealWorker:  # fmt: skip
        is_server = end >= self.size
        return RealWorker(
            self.router, end, seed=self._seed, pace=pace, observer=self.observer,
            gradient=gradient, grouping=self.grouping,
            # An asynchronous worker goes on exchanging with those that left: they still answer.
            forgets_leavers=self._has_leavers and (is_server or self.is_synchronous),
            reduce=reduce,
        )  # fmt: skip

    def start(
        self, worker: RealWorker, replica: PublishedReplica, pace: Pace,
        server_replica: Callable[[int], PublishedReplica],
        on_orphaned: Callable[[PeerLost], None] | None = None,
    ) -> None:  # fmt: skip
        """Begin the servers of this process, and make the coroutine of its worker, which has not
        begun when this returns. A member of a group whose leader dies calls `on_orphaned`; without
        it, the loss is raised."""
        for end in self.addresses.hosted_by(self.rank)[1:]:
            self._start_server(end, server_replica(end), pace)
        role, options = self._role(self.method.worker), for_role(self.method.worker, self.options)
        self.main = self._coupled(worker, cast(Replica, replica), role, options, on_orphaned)

    def _coupled(
        self, worker: RealWorker, replica: Replica, role: Role, options: Mapping[str, Any],
        on_orphaned: Callable[[PeerLost], None] | None,
    ) -> Coroutine[Any, Any, None]:  # fmt: skip
        """What the worker of this process runs."""
        handle = cast(Worker, worker)
        if self.addresses.has_standbys:
            handle = cast(Worker, Client(handle, self.method.server is not None))
        return role_of(
            handle, replica, role, options, self.grouping, begin=self.driver.begin,
            on_orphaned=on_orphaned,
        )  # fmt: skip

    def _seen_by_server(self, worker: RealWorker) -> Worker:
        """The worker that the role of a server gets."""
        handle, end, bound = cast(Worker, worker), worker.rank, bound_of(self.spec.standby)
        if bound is None:
            return handle
        primary = self.addresses.primary_of(end)
        if primary is not None:
            return cast(Worker, Standby(handle, primary, partial(self._took_over, primary)))
        logged = Primary(handle, end + len(self.addresses.slices), bound)
        self.router.also_quiet.append(logged.quiet)
        return cast(Worker, logged)

    def _took_over(self, primary: int) -> None:
        number, process = primary - self.size, self.addresses.process_of(primary)
        say(
            f"the standby in the process of worker {self.rank} goes on as server {number}, which "
            f"died with worker {process}"
        )

    def _role(self, role: Role) -> Role:
        """What an end runs, with its exchanges compressed where the user wants that."""
        return compressed(role, self.spec.compressor, self.method.exchange)

    def _start_server(self, end: int, replica: PublishedReplica, pace: Pace) -> None:
        self.servers[end] = replica
        self.router.offer(f"output {end}", lambda: Contribution.of_server(replica))
        role = self.method.server
        if role is not None:
            worker = self._seen_by_server(self.make_worker(end, pace))
            options = for_role(role, self.options)
            task = self._role(role)(worker, cast(Replica, replica), **options)
            self.driver.start(task, f"server {end}")

    def explain_itself(self) -> None:
        """On SIGUSR1 this process says what it waits for, until it closes."""
        explain_on_signal(self.rank, self.driver.waiting.explain)

    # ------------------------------------------------------------------ the output model

    def contributions(
        self, ranks: Iterable[int], step: int = 0
    ) -> tuple[list[Contribution], list[Contribution]]:
        """What these workers, as far as they live to say it, and all servers hold: now, or the
        workers after so many steps."""
        workers = self.answers([(rank, "output", step) for rank in sorted(ranks)])
        if not workers:
            raise self.grouping.lost(self.router.live)
        # The servers are asked after the workers, so that they know of all steps up to that one.
        addresses = self.addresses
        servers = [
            (addresses.process_of(end), f"output {end}", 0)
            for end in (addresses.acting(one, self.router.live) for one in addresses.servers)
        ]
        return workers, self.answers(servers, are_all_needed=True)

    def answers(
        self, asked: Sequence[tuple[int, str, int]], *, are_all_needed: bool = False
    ) -> list[Any]:
        """The answers to calls, each a process, a service and a number; without those of processes
        that die first."""
        under_way: list[Pending[Any]] = [self.router.call(*one) for one in asked]
        found: list[Any] = []
        for answer in under_way:
            try:
                self.driver.wait(answer, "output")
                found.append(answer.result())
            except PeerLost:
                if are_all_needed:
                    raise
        return found

    # ------------------------------------------------------------------ end

    def finish(self, conclude: Callable[[], None]) -> None:
        """After the worker's own end was announced: wait for the others, and answer them meanwhile.
        `conclude` is called when all updates have been applied and everybody still answers."""
        with self.driver.waiting.shown("the others: it has made its last step"):
            self.router.ended.wait()
        self.router.settle()
        conclude()
        self.router.announce_drained()
        self.router.drained.wait()

    def close(self) -> None:
        explain_no_more()
        self._stop.set()
        self.transport.close()

    def abandon(self, *, tells_others: bool) -> None:
        """The worker has failed, and the others must see a death: a closed transport would look
        like that of a worker that left in good order. Where the process lives on, they are told;
        otherwise they see its end."""
        explain_no_more()
        if tells_others:
            # Whatever prevents this, they still hear of it when the process ends.
            with contextlib.suppress(Error, OSError, RuntimeError, Stopped):
                self.router.announce_death()
        self._stop.set()
        if self.main is not None:
            self.main.close()

    def last_words(self, lost: PeerLost) -> PeerLost:
        """The error that a loop raises after this loss."""
        return last_words(lost, self.addresses, self._stop)

    def summary(self) -> dict[str, Any]:
        """What this worker and the servers in its process have done."""
        return {
            **summary(self.metrics, self.router.bytes_sent),
            "living": len(self.router.live),
            "torn_updates": self.transport.torn_updates,
        }


# ---------------------------------------------------------------------- groups


def _grouping(groups: int | str, transport: Transport) -> Grouping:
    """So many groups of consecutive ranks, or one group per host; 0 means none."""
    rank, size = transport.rank, transport.size
    if groups == "host":
        return Grouping(rank, size, groups_by_host(transport.store, rank, size))
    return Grouping(rank, size, even_groups(size, int(groups)) if groups else ())


def groups_by_host(store: Store, rank: int, size: int) -> Groups:
    """Every worker writes down where it is, and reads where the others are."""
    store.agree(f"host/{rank}", host_of(discover()))
    members: dict[str, list[int]] = {}
    for other in range(size):
        host = heard(store, f"host/{other}", f"worker {other}", "which host it is on")
        members.setdefault(host, []).append(other)
    return tuple(tuple(group) for group in members.values())


def heard(store: Store, key: str, whose: str, what: str) -> str:
    """Wait until a worker has written something into the store."""
    until = time.monotonic() + _PATIENCE_S
    while (found := store.get(key)) is None:
        if time.monotonic() > until:
            raise Late(
                f"{whose} did not say within {_PATIENCE_S:.0f} s {what}; see why it did not start"
            )
        time.sleep(_LOOK_S)
    return found


def host_of(here: Environment) -> str:
    """A name that the workers of one host have in common with nobody else. Where ranks run through
    one host after the other, it is the first rank there; MPI and srun may deal ranks out in turn.
    """
    if here.kind in ("gossamer", "torchrun"):
        return str(here.rank - here.local_rank)
    return socket.gethostname()
