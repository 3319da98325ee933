"""Who takes part in a run: one state machine for the simulator, the router and torch's log.

It has no clock, no thread and no connection. Code that learns a fact (an event of the simulator, a
frame of another process, a line of a log) reports it here and asks here what follows from it.

The states of one member. It moves only to the right, until it joins again:

                 left_loop                 closed
    ┌──────────┐            ┌───────────┐           ┌────────┐
    │ TRAINING │───────────▶│ ANSWERING │──────────▶│ CLOSED │
    └──────────┘            └───────────┘           └────────┘
       ▲    │                     │                      │
       │    └─────────────────────┼──────────────────────┘
       │                          │ died
       │  joined                  ▼
       │                      ┌──────┐
       └──────────────────────│ DEAD │
                              └──────┘

A member may skip states. `joined` leads back to TRAINING from every other state and begins a new
life of that member: reports about an earlier life change nothing.

A member may also be cut off from others for a while; those treat it as dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from gossamer.errors import PeerLost
from gossamer.pending import Pending

UNREACHABLE = "unreachable for longer than the deadline"
_FEW = 16


class MemberState(IntEnum):
    """Later states have larger numbers."""

    TRAINING = 0
    ANSWERING = 1
    """It has left its loop and makes no more steps, but still answers."""
    CLOSED = 2
    """It has left in good order and no longer answers."""
    DEAD = 3


class Membership:
    """What one observer knows about all members. Its sets stay the same objects until they change,
    because methods compare them by identity."""

    def __init__(self, size: int) -> None:
        self.live = frozenset(range(size))
        """All members that are not known to be dead."""
        self.training = self.live
        """The living members that have not left their loops."""
        self.dead: frozenset[int] = frozenset()
        self.left: Mapping[int, int] = {}
        """The members that have left their loops in their present lives, and after how many steps.
        """
        self.version = 0
        """The number of changes so far. Observers that received the same facts in the same order
        have the same members at the same version."""
        self._states = dict.fromkeys(self.live, MemberState.TRAINING)
        self._lives: dict[int, int] = {}
        self._lost_servers: set[int] = set()
        self._cut_off: dict[int, frozenset[int]] = {}
        self._seen: dict[int, frozenset[int]] = {}
        self._rounds = [(0, self.live)]
        """Pairs of a round and the members that take part from then on; only changes are kept."""
        self._last_round = -1
        self._watched: dict[int, dict[Pending[Any], int]] = {}
        self._most_watched: dict[int, int] = {}

    # ------------------------------------------------------------------ facts

    def state_of(self, rank: int) -> MemberState:
        return self._states[rank]

    def life_of(self, rank: int) -> int:
        """How often the member has joined again."""
        return self._lives.get(rank, 0)

    def joined(self, rank: int, life: int | None = None) -> bool:
        """A new member takes part, or one that had left or died comes back. `life` says which of
        its lives begins, if not the next one."""
        if life is None:
            if self._states.get(rank) is MemberState.TRAINING:
                return False
            life = self.life_of(rank) + 1 if rank in self._states else 0
        elif life <= self.life_of(rank):
            return False
        if life:
            self._lives[rank] = life
        self.left = {other: steps for other, steps in self.left.items() if other != rank}
        return self._move(rank, MemberState.TRAINING)

    def left_loop(self, rank: int, steps: int = 0, life: int | None = None) -> bool:
        """The member makes no more steps, but still answers. As all reports, this returns whether
        it was new; `life` says which life of the member it is about, if not the present one."""
        if not self._is_news(rank, MemberState.ANSWERING, life):
            return False
        self.left = {**self.left, rank: steps}
        return self._move(rank, MemberState.ANSWERING)

    def died(self, rank: int, life: int | None = None) -> bool:
        return self.came_to(rank, MemberState.DEAD, life)

    def server_died(self, server: int) -> None:
        """Nobody gets an answer from this server any more. It is no member."""
        self._lost_servers.add(server)

    def came_to(self, rank: int, state: MemberState, life: int | None = None) -> bool:
        """The member is in this state now, unless it is known to be in a later one."""
        return self._is_news(rank, state, life) and self._move(rank, state)

    def _is_news(self, rank: int, state: MemberState, life: int | None) -> bool:
        return self._states[rank] < state and life in (None, self.life_of(rank))

    def _move(self, rank: int, state: MemberState) -> bool:
        self._states[rank] = state
        self.version += 1
        self.live = _changed(self.live, rank, is_in=state is not MemberState.DEAD)
        self.training = _changed(self.training, rank, is_in=state is MemberState.TRAINING)
        self.dead = _changed(self.dead, rank, is_in=state is MemberState.DEAD)
        self._seen.clear()
        return True

    def cut_off(self, viewer: int, peers: Iterable[int]) -> None:
        """This member has waited for exactly these others for longer than the deadline. Each of
        them counts as lost to it until the next call."""
        self._cut_off[viewer] = frozenset(peers)
        if not self._cut_off[viewer]:
            del self._cut_off[viewer]
        self._seen.pop(viewer, None)

    @property
    def is_parted(self) -> bool:
        """Whether some member is cut off from another."""
        return bool(self._cut_off)

    def cut_off_from(self, viewer: int) -> frozenset[int]:
        return self._cut_off.get(viewer, frozenset())

    # ------------------------------------------------------------------ what follows

    def live_for(self, viewer: int) -> frozenset[int]:
        """The living members that this member can reach."""
        if viewer not in self._cut_off:
            return self.live
        if viewer not in self._seen:
            self._seen[viewer] = self.live - self._cut_off[viewer]
        return self._seen[viewer]

    @property
    def last_round(self) -> int:
        """The last round whose members are fixed; -1 if none is."""
        return self._last_round

    def members_of_round(self, number: int) -> frozenset[int] | None:
        """The members of a synchronous round; None if nobody has fixed them yet."""
        if number > self._last_round:
            return None
        return next(members for since, members in reversed(self._rounds) if since <= number)

    def fix_round(self, number: int, members: frozenset[int]) -> frozenset[int]:
        """The members from this round on. The first one that asks about a round fixes them, so that
        all members agree although each learns of a death at another time."""
        known = self.members_of_round(number)
        if known is not None:
            return known
        self._last_round = number
        if members != self._rounds[-1][1]:
            self._rounds.append((number, members))
        return self._rounds[-1][1]

    def why_lost(self, peer: int, viewer: int | None = None) -> str | None:
        """Why an operation of the viewer that needs the peer must fail; None if it need not."""
        if peer in self.dead or peer in self._lost_servers:
            return "it died"
        if viewer in self._cut_off and peer in self._cut_off[viewer]:
            return UNREACHABLE
        return None

    def watch(self, operation: Pending[Any], viewer: int) -> None:
        """Fail this operation if the peer that it names is lost to the viewer, now or later: see
        `fail_lost`."""
        peer = operation.peer
        if peer is None:
            return
        if (reason := self.why_lost(peer, viewer)) is not None:
            operation.fail(PeerLost(peer, reason))
            return
        watched = self._watched.setdefault(peer, {})
        if len(watched) > self._most_watched.get(peer, _FEW):
            # What has ended is forgotten, together with its result, before as many have come again.
            watched = {one: of for one, of in watched.items() if not one.done}
            self._watched[peer] = watched
            self._most_watched[peer] = max(_FEW, 2 * len(watched))
        watched[operation] = viewer

    def fail_lost(self) -> None:
        """Fail the watched operations whose peer is lost, peer by peer, oldest first."""
        for peer, watched in sorted(self._watched.items()):
            for operation, viewer in list(watched.items()):
                if (reason := self.why_lost(peer, viewer)) is not None:
                    del watched[operation]
                    operation.fail(PeerLost(peer, reason))


def _changed(ranks: frozenset[int], rank: int, *, is_in: bool) -> frozenset[int]:
    """The ranks with or without this rank; the same object if that changes nothing."""
    if (rank in ranks) == is_in:
        return ranks
    return ranks | {rank} if is_in else ranks - {rank}
