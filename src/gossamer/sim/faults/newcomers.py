"""Workers that come during a run: for the first time, or back after a death.

                 arrive, return              its state is there             admitted
    ┌────────┐                  ┌──────────┐                    ┌───────┐             ┌──────────┐
    │ ABSENT │─────────────────▶│ FETCHING │───────────────────▶│ READY │────────────▶│ TRAINING │
    └────────┘                  └──────────┘                    └───────┘             └──────────┘
         ▲                          │  ▲ │                          │                      │
         │                          │  └─┘ its giver has died       │                      │
         └──────────────────────────┴───────────────────────────────┴──────────────────────┘
                                              it has died

A newcomer fetches the model and the optimiser's state from one living worker, its giver, whose own
steps go on. Where workers step on their own it takes part as soon as they are there. Where they
step in rounds, the first worker that opens a round admits all who are ready, so that everybody
agrees since when they count.

Where all replicas are equal after a round, a newcomer must hold exactly what the others hold. It
listens to their exchanges while its copy is on the way, and so begins where the one that admits it
is. The bytes of what it only listens to are not charged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.compression.compressed_worker import without_residuals
from gossamer.mailbox import Mailbox
from gossamer.replica import forget

if TYPE_CHECKING:
    from gossamer.sim.world import World

_REQUEST_BYTES = 32


@dataclass(frozen=True)
class GivenState:
    """What one worker gives to another: copies of its model and of its optimiser's state."""

    model: Tensor
    optimiser: Tensor
    optimiser_steps: int
    weight: float
    buffers: Tensor


class Newcomers:
    """Who is on the way into the run, and with what they begin."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.are_in_rounds = world.cluster.has_newcomers and world.budget.is_synchronous
        """Whether calls of a collective are matched by the round, because some may come later."""
        self._are_equal = self.are_in_rounds and world.method.promises.waits_for == "everyone"
        """Whether all replicas, or all that is agreed on, are the same after a round."""
        self._giver: dict[int, int | None] = {}
        """By newcomer that is fetching, from whom."""
        self._ready: dict[int, GivenState | None] = {}
        self.first_step: dict[int, int] = {}
        """The first step of the present life of each worker that has come during the run."""
        self._last_round: dict[int, int] = {}
        """The last round of an earlier life of each of them."""
        self._ended_step: dict[int, int] = {}
        """The last step that each worker has ended."""
        self._left_out: dict[int, int] = {}
        """How many steps, of those before the first one, each of them has not made."""
        self.begin: Callable[[int], None] = lambda rank: None
        """Starts the main coroutine of a worker that was admitted."""

    def ended_step(self, rank: int, step: int) -> None:
        if self.are_in_rounds:
            self._ended_step[rank] = step

    def rounds_made(self, rank: int, steps: int) -> int:
        """The number of the step behind so many steps of a worker, in the present life."""
        return self._left_out.get(rank, 0) + steps

    def came_after(self, step: int) -> int:
        """How many workers have not made this step because they came later."""
        return sum(first > step for first in self.first_step.values())

    def takes_part(self, rank: int, step: int) -> bool:
        return self.first_step.get(rank, 0) <= step

    def notices(self) -> list[str]:
        """Who was ready, and has not been admitted until the end."""
        if not self._ready:
            return []
        several = "workers" if len(self._ready) > 1 else "worker"
        ranks = ", ".join(map(str, sorted(self._ready)))
        return [
            f"{several} {ranks} came and took no part, because no round began without something of "
            "an earlier one on its way"
        ]

    # ------------------------------------------------------------------ on the way

    def come(self, rank: int) -> None:
        """A worker starts. Nothing happens if it is alive, or if the run is over."""
        world = self._world
        if rank in world.alive or rank in self._giver or rank in self._ready:
            return
        if not world.recoveries.is_open(rank):
            world.recoveries.begin(rank, f"worker {rank}", "started", world.kernel.now)
        world.recoveries.reached(rank, "started", world.kernel.now)
        world.reach_again(rank)
        self._last_round[rank] = world.members.last_round
        world.mailboxes[rank] = Mailbox()
        self._fetch(rank)

    def _fetch(self, rank: int) -> None:
        world = self._world
        reachable = [
            other for other in sorted(world.working) if not world.post.are_separated(rank, other)
        ]
        candidates = reachable or sorted(world.working)
        if not candidates or world.method.servers_hold_model:
            # The servers have the model. Where nobody is left, a newcomer goes on from what it had.
            self._is_ready(rank, None)
            return
        draw = world.stream("giver", rank, world.members.life_of(rank))
        giver = self._giver[rank] = draw.choice(candidates)
        world.post.carry(
            rank, giver, _REQUEST_BYTES, lambda: self._give(rank, giver), "ask for the model"
        )

    def _give(self, rank: int, giver: int) -> None:
        world, state = self._world, self._state_of(giver)
        size = world.post.wire_size(state.model) + world.post.wire_size(state.optimiser)
        world.post.carry(giver, rank, size, lambda: self._is_ready(rank, state), "give the model")

    def _state_of(self, rank: int) -> GivenState:
        world = self._world
        replica = world.replicas[rank]
        return GivenState(
            replica.snapshot(), replica.optimiser_state(), world.workers.steps[rank],
            replica.weight, world.batcher.buffers[rank].clone(),
        )  # fmt: skip

    def _is_ready(self, rank: int, state: GivenState | None) -> None:
        world = self._world
        self._giver.pop(rank, None)
        world.recoveries.reached(rank, "has the model", world.kernel.now)
        if world.budget.is_spent:
            return
        if world.budget.is_synchronous and world.working:
            self._ready[rank] = state
            return
        steps = [world.newcomers.rounds_made(r, world.steps_of(r)) for r in world.working]
        step = world.budget.rounds if world.budget.is_synchronous else min(steps, default=0)
        self._admit(rank, step, state)

    def died(self, rank: int) -> None:
        """A worker is gone: a newcomer, or the giver of some."""
        if self._giver.pop(rank, None) is not None or rank in self._ready:
            self._ready.pop(rank, None)
            self._world.post.bury(rank)
        for newcomer in [one for one, giver in self._giver.items() if giver == rank]:
            self._fetch(newcomer)
        if self._ready and not self._world.working:  # there is nobody who will open a round
            ready, self._ready = self._ready, {}
            for newcomer, state in sorted(ready.items()):
                self._is_ready(newcomer, state)

    # ------------------------------------------------------------------ admitted

    def open_round(self, opener: int, step: int) -> None:
        """The first worker is about to open a round. Newcomers wait for the next one if something
        of it is still on its way, whose result others will apply in this round, or while somebody
        is in a round of their earlier lives and may wait for what these have not sent."""
        world = self._world
        is_sending = any(name.startswith("sent ") for name in world.replicas[opener].memory)
        if not self._ready or (self._are_equal and is_sending):
            return
        slowest = min(self._ended_step.get(rank, -1) for rank in world.working)
        ready = {r: state for r, state in self._ready.items() if self._last_round[r] <= slowest}
        for rank, state in sorted(ready.items()):
            del self._ready[rank]
            if self._are_equal:
                state = self._state_of(opener)
            self._admit(rank, step, state)
            if self._are_equal:
                known = without_residuals(world.replicas[opener].memory)
                world.replicas[rank].memory.update(known)

    def _admit(self, rank: int, step: int, state: GivenState | None) -> None:
        world = self._world
        replica = world.replicas[rank]
        forget(replica.memory)
        if state is not None:
            replica.assign_(state.model)
            replica.load_optimiser_state_(state.optimiser)
            world.workers.steps[rank] = state.optimiser_steps
            replica.weight = state.weight
            world.batcher.buffers[rank] = state.buffers
        self._left_out[rank] = step - world.steps_of(rank)
        self.first_step[rank] = step
        world.admit(rank, step)
        self.begin(rank)
