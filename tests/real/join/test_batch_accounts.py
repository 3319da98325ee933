"""Every batch of an elastic run is accounted for, whoever dies when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from gossamer.real.join.elastic.batch_accounts import LEASE, BatchAccounts
from gossamer.real.transports.local import LocalStore

BATCHES = 22
SIZE = 3


class Swarm:
    """Workers that take batches in turn, in the order that a test chooses."""

    def __init__(self) -> None:
        self.store, self.live = LocalStore(), set[int]()
        self.trained: Counter[int] = Counter()
        self.accounts: dict[int, BatchAccounts] = {}
        self._takes: dict[int, Iterator[int]] = {}
        self._in_hand: dict[int, int] = {}

    def come(self, rank: int) -> None:
        self.live.add(rank)
        accounts = BatchAccounts(self.store, rank, SIZE, lambda: frozenset(self.live))
        self.accounts[rank] = accounts
        self._takes[rank] = accounts.leased("pass", BATCHES)

    def die(self, rank: int) -> None:
        """Whatever it has in hand is not trained."""
        self.live.discard(rank)
        self._in_hand.pop(rank, None)

    def step(self, rank: int) -> bool:
        """Train the batch in hand, and take the next. Returns whether there was one."""
        if (batch := self._in_hand.pop(rank, None)) is not None:
            self.trained[batch] += 1
        found = next(self._takes[rank], None)
        if found is not None:
            self._in_hand[rank] = found
        return found is not None


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "die", "come"]), st.integers(0, SIZE - 1)),
    max_size=60,
)


@given(events=EVENTS)
def test_no_batch_is_lost_while_somebody_lives_and_the_accounts_add_up(
    events: list[tuple[str, int]],
) -> None:
    """Worker 0 lives throughout and makes the last steps: all batches are trained, and only those
    that were given again perhaps twice."""
    swarm = Swarm()
    for rank in range(SIZE):
        swarm.come(rank)
    for what, rank in events:
        if what == "step" and rank in swarm.live:
            swarm.step(rank)
        elif what == "die" and rank:
            swarm.die(rank)
        elif what == "come" and rank not in swarm.live:
            swarm.come(rank)
    for rank in (1, 2):
        swarm.die(rank)
    while swarm.step(0):
        pass
    (account,) = swarm.accounts[0].summary()
    assert set(swarm.trained) == set(range(BATCHES))
    assert (account["read"], account["trained"], account["lost"]) == (BATCHES, BATCHES, 0)
    deaths = 2 + sum(what == "die" for what, _ in events)
    assert account["given_again"] <= LEASE * deaths
    assert sum(swarm.trained.values()) - BATCHES <= account["given_again"]


def test_without_a_death_nothing_is_given_again() -> None:
    swarm = Swarm()
    for rank in range(SIZE):
        swarm.come(rank)
    for rank in range(SIZE):
        swarm.step(rank)
    for rank in range(SIZE):
        while swarm.step(rank):
            pass
    assert set(swarm.trained.values()) == {1}
    assert swarm.accounts[1].summary() == [
        {"read": BATCHES, "trained": BATCHES, "given_again": 0, "lost": 0}
    ]


def test_what_dies_with_the_last_of_a_pass_is_lost_and_said_to_be() -> None:
    """The others have gone on to the next pass."""
    swarm = Swarm()
    swarm.come(0)
    swarm.come(1)
    swarm.step(1)
    while swarm.step(0):
        pass
    swarm.die(1)
    (account,) = swarm.accounts[0].summary()
    assert account == {"read": BATCHES, "trained": BATCHES - LEASE, "given_again": 0, "lost": LEASE}
