"""What breaks in a simulated cluster, and when it heals; what slows a group of its workers."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING

from gossamer.config.cluster import Cluster
from gossamer.config.faults import FOREVER, Fault
from gossamer.config.network import Phases
from gossamer.errors import RunFailed
from gossamer.sim.kernel import SECOND

if TYPE_CHECKING:
    from gossamer.sim.world import World


class SharedSlowness:
    """How much slower than usual the workers of one group compute, as a function of time.

    Nothing stands on the clock for it: whoever begins a gradient asks.
    """

    def __init__(self, phases: Phases, rng: random.Random, jitter_rng: random.Random) -> None:
        self._phases = phases
        self._rng = rng
        self._jitter_rng = jitter_rng
        self._has_phases = phases.every > 0 and phases.lasts > 0
        cycle_s = phases.lasts + phases.every
        self._is_slow = self._has_phases and rng.random() < phases.lasts / cycle_s
        self._until_s = self._phase_s() if self._has_phases else math.inf
        self._jitter, self._period = 1.0, -1

    def _phase_s(self) -> float:
        return self._rng.expovariate(
            1 / (self._phases.lasts if self._is_slow else self._phases.every)
        )

    def at(self, now_s: float) -> float:
        """The factor on compute times that begin now."""
        while self._until_s <= now_s:
            self._is_slow = not self._is_slow
            self._until_s += self._phase_s()
        if self._phases.jitter:
            period = int(now_s // self._phases.jitter_lasts)
            # A factor is drawn for every period, so that who asks and when changes nothing.
            variance = math.log1p(self._phases.jitter**2)
            while self._period < period:
                self._period += 1
                self._jitter = self._jitter_rng.lognormvariate(-variance / 2, variance**0.5)
        return self._jitter * (self._phases.factor if self._is_slow else 1.0)


def group_of(cluster: Cluster, rank: int) -> int:
    """Which group of workers a worker is slow with."""
    machine = cluster.machine_of(rank)
    match cluster.phases.shared_by:
        case "worker":
            return rank
        case "machine":
            return machine
        case "rack":
            return cluster.rack_of(machine)
        case "site":
            return cluster.site_of(machine)
        case _:
            return 0


class SimulatedFailures:
    """Lets workers, or machines with all of theirs, die at random and come back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._failures = world.cluster.failures
        self._processed = -1
        self._in_vain = 0
        """How many have failed since a gradient was delivered."""
        if not self._failures.are_there:
            return
        units: dict[int, list[int]] = {}
        for rank in range(world.size):
            is_machine = self._failures.per == "machine"
            units.setdefault(world.cluster.machine_of(rank) if is_machine else rank, []).append(
                rank
            )
        for number, ranks in units.items():
            self._live(ranks, world.stream("failures", number))

    def _live(self, ranks: list[int], rng: random.Random) -> None:
        """A life begins, and will end."""
        lasts = rng.expovariate(1 / self._failures.mtbf)
        self._world.kernel.at(round(lasts * SECOND), self._fail, ranks, rng)

    def _fail(self, ranks: list[int], rng: random.Random) -> None:
        world, repair = self._world, round(self._failures.repair * SECOND)
        if world.budget.is_spent:
            return
        self._in_vain = self._in_vain + 1 if world.budget.processed == self._processed else 0
        self._processed = world.budget.processed
        if self._in_vain > 100 + 10 * world.size:
            raise RunFailed(
                f"{self._in_vain} deaths in a row without one complete gradient: workers die every "
                f"{self._failures.mtbf:g} s, and nobody gets on; give [failures] a longer mtbf"
            )
        for rank in ranks:
            world.observer.happened(rank, "dies", world.kernel.now)
            world.kill(rank)
            if repair:
                world.kernel.at(repair, world.newcomers.come, rank)
        if repair:
            world.kernel.at(repair, self._live, ranks, rng)


class SimulatedFaults:
    """Begins and ends the faults of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.slow = [1.0] * world.cluster.workers
        """The factor on the compute time of each worker."""
        cluster, phases = world.cluster, world.cluster.phases
        groups = [group_of(cluster, rank) for rank in range(cluster.workers)]
        shared = {
            group: SharedSlowness(
                phases, world.stream("phases", group), world.stream("shared jitter", group)
            )
            for group in (dict.fromkeys(groups) if phases.are_there else ())
        }
        self._shared = [shared[group] for group in groups] if shared else []
        self._paused_until: defaultdict[int, int] = defaultdict(int)
        world.kernel.resume_at = self._paused_until.__getitem__
        SimulatedFailures(world)
        for fault in world.cluster.faults:
            if fault.is_trait:
                # It must begin before the first step of anybody.
                self._begin(fault)
            else:
                world.kernel.at(round(fault.at * SECOND), self._begin, fault)

    def slowness(self, rank: int) -> float:
        """The factor on the compute time of a gradient that a worker begins now."""
        if not self._shared:
            return self.slow[rank]
        return self.slow[rank] * self._shared[rank].at(self._world.kernel.now / SECOND)

    def _replica_of(self, worker: int) -> int:
        """The worker whose replica stops when this worker of the cluster does."""
        lanes = self._world.lanes
        return worker if lanes is None else lanes.replica_of(worker)

    def _begin(self, fault: Fault) -> None:
        world, post = self._world, self._world.post
        whose = 0 if fault.kind == "kill-server" else max(fault.worker, 0)
        world.observer.happened(whose, str(fault), world.kernel.now)
        match fault.kind:
            case "kill-server":
                world.mortal.kill(fault.worker)
            case "kill":
                world.kill(self._replica_of(fault.worker))
            case "return" | "arrive":
                world.newcomers.come(fault.worker)
            case "pause":
                self._pause(self._replica_of(fault.worker), round(fault.lasts * SECOND))
            case "slow":
                self.slow[fault.worker] *= fault.amount
            case "slow-link":
                post.slow_card(fault.worker, fault.amount)
            case "drop":
                post.drops.append(fault.amount)
            case "delay":
                post.extra_delay_s += fault.amount
            case _:
                post.partitions.append(fault.sides)
                deadline = round(world.cluster.deadline * SECOND)
                world.kernel.at(deadline, self._give_up_across, fault)
        if fault.lasts != FOREVER:
            world.kernel.at(round(fault.lasts * SECOND), self._end, fault)

    def _end(self, fault: Fault) -> None:
        post = self._world.post
        match fault.kind:
            case "slow":
                self.slow[fault.worker] /= fault.amount
            case "slow-link":
                post.slow_card(fault.worker, 1 / fault.amount)
            case "drop":
                post.drops.remove(fault.amount)
            case "delay":
                post.extra_delay_s -= fault.amount
            case "partition":
                post.heal(fault.sides)
                self._reach_again()
                self._world.collectives.reconsider()
            case _:
                pass  # A pause ends by itself, and nobody comes back from death.

    def _pause(self, rank: int, duration_ns: int) -> None:
        now = self._world.kernel.now
        before = max(now, self._paused_until[rank])
        until = max(before, now + duration_ns)
        self._paused_until[rank] = until
        for gradient in self._world.batcher.under_way.get(rank, ()):
            # What the worker was computing stands still for as long.
            gradient.paused_ns += until - before

    def _give_up_across(self, fault: Fault) -> None:
        """The partition has outlasted the deadline: to each side the others count as lost."""
        world = self._world
        if fault.sides not in world.post.partitions:
            return
        for rank in world.alive:
            across = (r for r in range(world.size) if world.post.are_separated(rank, r))
            world.members.cut_off(rank, across)
        world.members.fail_lost()
        world.collectives.reconsider()

    def _reach_again(self) -> None:
        """A worker that can be reached again counts as alive again."""
        world = self._world
        for rank in range(world.size):
            lost = world.members.cut_off_from(rank)
            world.members.cut_off(rank, (r for r in lost if world.post.are_separated(rank, r)))
