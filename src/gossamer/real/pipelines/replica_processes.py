"""Which processes are a replica together, and the world of those that hold the same stage.

processes        0   1   2   3   4   5        with stages=2
replica          0───0   1───1   2───2        activations travel along a row of these
stage            0   1   0   1   0   1        a method couples 0, 2, 4 and, apart from them, 1, 3, 5
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gossamer.errors import PeerLost
from gossamer.groups import Grouping, WorkerAmong, even_groups
from gossamer.replica import Layout
from gossamer.worker import Worker


class ReplicaProcesses(Grouping):
    """The place of a process: in which replica, with which stage. Consecutive ranks are a replica,
    which lives as long as all of them."""

    @staticmethod
    def of(rank: int, size: int, machines: int) -> ReplicaProcesses:
        """`machines` is the number of processes of a replica."""
        return ReplicaProcesses(rank, size, even_groups(size, size // machines))

    @property
    def machines(self) -> int:
        return len(self.group)

    @property
    def stage(self) -> int:
        """The place of this process in its replica."""
        return self.rank - self.group[0]

    def whole(self, live: frozenset[int]) -> frozenset[int]:
        """The numbers of the replicas of which nobody has died."""
        groups = enumerate(self.groups)
        return frozenset(number for number, group in groups if live.issuperset(group))

    def speaking(self, live: frozenset[int]) -> frozenset[int]:
        return frozenset(rank for number in self.whole(live) for rank in self.groups[number])

    def working(self, live: frozenset[int]) -> frozenset[int]:
        return self.speaking(live)

    def fellows(self, rank: int) -> Sequence[int]:
        """The processes of the replica of this one."""
        return self.groups[rank // self.machines]

    def same_stage(self, stage: int) -> list[int]:
        """The processes that hold a stage, replica by replica."""
        return [group[stage] for group in self.groups]

    def lost(self, live: frozenset[int]) -> PeerLost:
        others = "the other replicas go on" if self.speaking(live) else "no other replica is left"
        members = ", ".join(map(str, self.group))
        lost = PeerLost(self.group[0])
        lost.args = (f"the replica of workers {members} has ended with one of them; {others}",)
        return lost


class StageWorker(WorkerAmong):
    """The `Worker` of one stage of one replica, or of a server of that stage. Its world are the
    same stages of all replicas; its model is what they hold."""

    def __init__(
        self, inner: Worker, places: ReplicaProcesses, stage: int, seed: int,
        layout: Layout, slices: Sequence[slice],
    ) -> None:  # fmt: skip
        """`layout` is that of the stage; `slices` are the ranges that its servers hold."""
        beyond = inner.rank - places.size
        replica = inner.rank // places.machines
        rank = replica if beyond < 0 else places.ends + beyond // places.machines
        super().__init__(inner, rank, places.same_stage(stage))
        # All stages of a replica must draw the same, or they would meet other peers.
        self.rng = random.Random(f"{seed}/worker/{rank}")
        self.layout, self.slices = layout, slices
        self._places, self._stage = places, stage

    def _address(self, number: int) -> int:
        if number < self.size:
            return self._members[number]
        return self._places.size + (number - self.size) * self._places.machines + self._stage

    def _number_of(self, address: int) -> int:
        beyond = address - self._places.size
        if beyond < 0:
            return self._number[address]
        return self.size + beyond // self._places.machines

    @property
    def servers(self) -> Sequence[int]:
        return range(self.size, self.size + len(self.slices))

    def _among(self, ranks: frozenset[int]) -> frozenset[int]:
        if ranks is not self._live[0]:
            self._live = (ranks, self._places.whole(ranks))
        return self._live[1]
