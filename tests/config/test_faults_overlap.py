"""Faults of one kind that go on at the same time."""

from __future__ import annotations

import pytest

from gossamer.config.faults import Fault, parse_fault
from gossamer.errors import PeerLost
from gossamer.sim.kernel import SECOND
from support import bowl, build, cluster_of


def partition(text: str) -> Fault:
    return parse_fault("partition", text)


def test_who_is_held_by_two_partitions_is_free_when_both_have_healed() -> None:
    """0 and 2 are apart from 1 s to 5 s: healing the first partition must not join them."""
    faults = (partition("0,1|2,3@1s+2s"), partition("0|1,2,3@2s+3s"))
    world = build(bowl(), "ensemble", cluster_of(4, faults=faults), steps=1, engine="none").world
    seen: dict[float, tuple[bool, bool]] = {}

    def look(at: float) -> None:
        seen[at] = (world.post.are_separated(0, 2), world.post.are_separated(1, 2))

    for at in (0.5, 1.5, 2.5, 4.0, 5.5):
        world.kernel.at(round(at * SECOND), look, at)
    world.kernel.run()
    assert seen == {
        0.5: (False, False),
        1.5: (True, True),
        2.5: (True, True),
        4.0: (True, False),
        5.5: (False, False),
    }


def test_two_drops_at_once_both_take_their_toll() -> None:
    """Each message passes both; when one ends, the other goes on."""
    faults = (parse_fault("drop", "0.5@0s+1s"), parse_fault("drop", "0.25@0.5s+1s"))
    world = build(bowl(), "ensemble", cluster_of(2, faults=faults), steps=1, engine="none").world
    seen: list[list[float]] = []
    for at in (0.2, 0.7, 1.2, 1.7):
        world.kernel.at(round(at * SECOND), lambda: seen.append(list(world.post.drops)))
    world.kernel.run()
    assert seen == [[0.5], [0.5, 0.25], [0.25], []]


@pytest.mark.parametrize("method", ["diloco", "all_reduce", "easgd:synchronous=true"])
@pytest.mark.parametrize("kills", [(), (parse_fault("kill", "3@0.74s"),)])
def test_who_begins_to_wait_across_a_partition_after_the_deadline_learns_so(
    method: str, kills: tuple[Fault, ...]
) -> None:
    """The other side counts as lost from the deadline on until the partition heals: also for a
    collective that nobody had come to when the deadline passed, and if somebody dies meanwhile."""
    faults = (partition("0,1,3|2@0.0034s"), *kills)
    cluster = cluster_of(4, jitter=0.2, deadline=0.0, faults=faults)
    with pytest.raises(PeerLost, match="unreachable for longer than the deadline"):
        build(bowl(), method, cluster, steps=100, engine="none").run()
