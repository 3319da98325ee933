"""One process of a replica of several: a session in which every address holds one stage."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gossamer.errors import PeerLost
from gossamer.methods import MethodSpec
from gossamer.methods.method import Role
from gossamer.observe.run_observer import RunObserver
from gossamer.real.addresses import Addresses
from gossamer.real.pipelines.replica_processes import ReplicaProcesses, StageWorker
from gossamer.real.session import Session
from gossamer.real.transports.transport import Transport
from gossamer.real.worker import RealWorker
from gossamer.replica import Layout, Replica, cut
from gossamer.worker import Worker


@dataclass(frozen=True)
class StageAddresses(Addresses):
    """The stages of replicas in turn, then the servers of the stages in turn. The slices are ranges
    of a stage's own parameters."""

    totals: tuple[int, ...] = ()
    """How many parameters each stage holds."""

    def lengths(self, whole: int) -> list[int]:
        workers = [self.totals[process % len(self.totals)] for process in range(self.size)]
        return workers + [part.stop - part.start for part in self.slices]

    def serves(self, server: int, rank: int) -> bool:
        return (server - rank - self.size) % len(self.totals) == 0


class StageSession(Session):
    """The methods of all stages run side by side, each in a world of its own."""

    grouping: ReplicaProcesses

    def __init__(
        self, transport: Transport, spec: MethodSpec, observer: RunObserver,
        layouts: Sequence[Layout], *, seed: int, steps: int,
        options: Mapping[str, Any] | None = None, has_leavers: bool = False,
    ) -> None:  # fmt: skip
        """`layouts` are those of the parameters of each stage."""
        self._layouts = tuple(layouts)
        self._own_seed = seed
        own = self._layouts[transport.rank % len(self._layouts)]
        super().__init__(
            transport, spec, observer, own, seed=seed, steps=steps, options=options,
            has_leavers=has_leavers,
        )  # fmt: skip
        self.router.dies_with = self.grouping.fellows
        self.router.on_lost = self._lost(self.router.on_lost)

    def _found_grouping(self) -> ReplicaProcesses:
        return ReplicaProcesses.of(self.rank, self.size, len(self._layouts))

    def _found_addresses(self, layout: Layout) -> Addresses:
        stages, servers = len(self._layouts), self.spec.servers
        totals = tuple(one.total for one in self._layouts)
        if not self.method.has_server:
            return StageAddresses(self.size, (), layout, totals=totals)
        ranges = [cut(one.sizes, servers // stages) for one in self._layouts]
        slices = tuple(ranges[number % stages][number // stages] for number in range(servers))
        return StageAddresses(self.size, slices, layout, totals=totals)

    @property
    def first(self) -> int:
        return self.grouping.stage

    @property
    def processes(self) -> int:
        return len(self._layouts)

    def _lost(self, tell: Callable[[int], None]) -> Callable[[int], None]:
        def lost(process: int) -> None:
            tell(process)
            if process in self.grouping.group:
                # Whatever this process waits for may never come, because to the others it is dead.
                self._stop.failure = self._stop.failure or self.grouping.lost(self.router.live)

        return lost

    @property
    def is_orphaned(self) -> bool:
        """Whether this process's replica has ended with another process of it."""
        return self.rank not in self.router.live

    def last_words(self, lost: PeerLost) -> PeerLost:
        return (
            self.grouping.lost(self.router.live) if self.is_orphaned else super().last_words(lost)
        )

    def _view(self, worker: RealWorker, stage: int) -> StageWorker:
        slices = self.addresses.slices[stage :: len(self._layouts)]
        layout = self._layouts[stage]
        return StageWorker(worker, self.grouping, stage, self._own_seed, layout, slices)

    def _coupled(
        self, worker: RealWorker, replica: Replica, role: Role, options: Mapping[str, Any],
        on_orphaned: Callable[[PeerLost], None] | None,
    ) -> Coroutine[Any, Any, None]:  # fmt: skip
        return role(self._view(worker, self.grouping.stage), replica, **options)

    def _seen_by_server(self, worker: RealWorker) -> Worker:
        return cast(Worker, self._view(worker, (worker.rank - self.size) % len(self._layouts)))
