"""The state machine of who takes part in a run, against a model of it, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gossamer.errors import PeerLost
from gossamer.membership import Membership, MemberState
from gossamer.pending import Pending

RANKS = st.integers(0, 3)
LIVES = st.sampled_from([None, 0, 1])


class Members(RuleBasedStateMachine):
    """Any sequence of facts, beside the state of each member."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Membership(4)
        self.states = dict.fromkeys(range(4), MemberState.TRAINING)
        self.lives = dict.fromkeys(range(4), 0)
        self.cut: dict[int, set[int]] = {}
        self.sets = self.seen()
        self.rounds: dict[int, frozenset[int]] = {}
        self.operations: list[tuple[Pending[Any], int, int]] = []

    def seen(self) -> tuple[frozenset[int], ...]:
        members = self.members
        return members.live, members.training, members.dead

    def tell(self, state: MemberState, rank: int, is_told: bool, life: int | None = None) -> None:
        is_news = self.states[rank] < state and life in (None, self.lives[rank])
        assert is_told == is_news
        if is_news:
            self.states[rank] = state

    @rule(rank=RANKS, steps=st.integers(0, 9), life=LIVES)
    def leaves_its_loop(self, rank: int, steps: int, life: int | None) -> None:
        is_told = self.members.left_loop(rank, steps, life)
        self.tell(MemberState.ANSWERING, rank, is_told, life)
        assert not is_told or self.members.left[rank] == steps

    @rule(rank=RANKS, life=LIVES)
    def closes(self, rank: int, life: int | None) -> None:
        self.tell(
            MemberState.CLOSED, rank, self.members.came_to(rank, MemberState.CLOSED, life), life
        )

    @rule(rank=RANKS, life=LIVES)
    def dies(self, rank: int, life: int | None) -> None:
        self.tell(MemberState.DEAD, rank, self.members.died(rank, life), life)
        self.members.fail_lost()

    @rule(rank=RANKS)
    def comes_back(self, rank: int) -> None:
        is_told = self.members.joined(rank)
        assert is_told == (self.states[rank] is not MemberState.TRAINING)
        self.lives[rank] += is_told
        self.states[rank] = MemberState.TRAINING
        assert rank not in self.members.left

    @precondition(lambda self: len(self.states) < 8)
    @rule()
    def somebody_new_joins(self) -> None:
        rank = len(self.states)
        assert self.members.joined(rank)
        assert not self.members.joined(rank)
        self.states[rank], self.lives[rank] = MemberState.TRAINING, 0

    @rule(rank=RANKS, peers=st.sets(RANKS))
    def is_cut_off(self, rank: int, peers: set[int]) -> None:
        self.members.cut_off(rank, peers)
        self.cut[rank] = peers
        self.members.fail_lost()

    @rule(number=st.integers(0, 20))
    def asks_about_a_round(self, number: int) -> None:
        known = self.members.members_of_round(number)
        found = self.members.fix_round(number, self.members.training)
        assert known is None or found is known
        assert self.rounds.setdefault(number, found) == found
        assert known is not None or found == self.members.training

    @rule(rank=RANKS, peer=RANKS)
    def waits_for(self, rank: int, peer: int) -> None:
        operation: Pending[None] = Pending("send", peer)
        self.members.watch(operation, rank)
        self.operations.append((operation, rank, peer))

    @invariant()
    def sets_follow_from_the_states(self) -> None:
        of = {state: {r for r, own in self.states.items() if own is state} for state in MemberState}
        live, training, dead = self.seen()
        assert training == of[MemberState.TRAINING]
        assert dead == of[MemberState.DEAD]
        assert live == self.states.keys() - dead
        for viewer in self.states:
            assert self.members.live_for(viewer) == live - self.cut.get(viewer, set())
            assert self.members.live_for(viewer) is self.members.live_for(viewer)
            assert self.members.state_of(viewer) is self.states[viewer]
            assert self.members.life_of(viewer) == self.lives[viewer]

    @invariant()
    def unchanged_sets_are_the_same_objects(self) -> None:
        for before, now in zip(self.sets, self.seen(), strict=True):
            assert (before == now) == (before is now)
        self.sets = self.seen()

    @invariant()
    def nobody_waits_for_somebody_lost(self) -> None:
        """And whoever failed had been told so by a death or a partition."""
        still: list[tuple[Pending[Any], int, int]] = []
        for operation, rank, peer in self.operations:
            is_lost = peer in self.members.dead or peer in self.cut.get(rank, ())
            assert operation.done == is_lost
            if operation.done:
                with pytest.raises(PeerLost):
                    operation.result()
            else:
                still.append((operation, rank, peer))
        self.operations = still


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=60, stateful_step_count=40)


def tell(members: Membership, fact: str, rank: int) -> bool:
    if fact == "closed":
        return members.came_to(rank, MemberState.CLOSED)
    return bool(getattr(members, fact)(rank))


FACTS = st.lists(st.tuples(st.sampled_from(["died", "left_loop", "closed", "joined"]), RANKS))


@given(FACTS)
def test_who_is_told_the_same_facts_in_the_same_order_knows_the_same(
    facts: list[tuple[str, int]],
) -> None:
    """At every version: that is what a version stands for. What is no news makes no version."""
    one, other = Membership(4), Membership(4)
    versions: dict[int, tuple[frozenset[int], frozenset[int]]] = {0: (one.live, one.training)}
    for fact, rank in facts:
        before = one.version
        is_news = tell(one, fact, rank)
        assert one.version == before + is_news
        versions[one.version] = (one.live, one.training)
    for fact, rank in facts:
        tell(other, fact, rank)
        assert versions[other.version] == (other.live, other.training)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["ask", "died", "joined"]), RANKS), max_size=40
    )
)
def test_survivors_agree_on_each_round_although_they_hear_of_deaths_at_other_times(
    events: list[tuple[int, str, int]],
) -> None:
    """Two observers ask about one round after another; what the first one proposes is fixed in a
    place that both read, as real workers do it with their store."""
    observers = Membership(4), Membership(4)
    store: dict[int, frozenset[int]] = {}
    found: list[dict[int, frozenset[int]]] = [{}, {}]
    for who, event, rank in events:
        members = observers[who]
        if event != "ask":
            tell(members, event, rank)
            continue
        number = len(found[who])
        assert members.members_of_round(number) is None
        agreed = store.setdefault(number, members.training)
        found[who][number] = members.fix_round(number, agreed)
    for number in found[0].keys() & found[1].keys():
        assert found[0][number] == found[1][number]


def test_an_old_word_of_a_death_does_not_end_a_new_life() -> None:
    """A worker dies, comes back, and only then somebody hears of its first death."""
    members = Membership(3)
    assert members.died(1, life=0)
    assert members.joined(1)
    assert not members.died(1, life=0)
    assert members.live == {0, 1, 2}
    assert members.died(1, life=1)
    assert members.dead == {1}


def test_a_member_that_comes_back_takes_part_from_the_next_round_on() -> None:
    """Those that are fixed stay as they are."""
    members = Membership(3)
    members.died(2)
    assert members.fix_round(0, members.training) == {0, 1}
    members.joined(2)
    assert members.members_of_round(0) == {0, 1}
    assert members.fix_round(1, members.training) == {0, 1, 2}
    assert members.fix_round(0, members.training) == {0, 1}


def test_the_life_that_begins_may_be_named() -> None:
    """A life that ended before anybody heard of it leaves a gap, and old news change nothing."""
    members = Membership(3)
    members.died(1)
    assert members.joined(1, life=2)
    assert not members.joined(1, life=1)
    assert not members.died(1, life=1)
    assert (members.life_of(1), members.live) == (2, {0, 1, 2})
