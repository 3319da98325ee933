"""Schedules of pipelines: legal, and as long as the closed forms say when they are played."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import _schedule_visualizer as torch_tables

from gossamer.errors import ConfigurationError
from gossamer.pipeline.schedule import (
    SYNCHRONOUS,
    Action,
    Pass,
    PipelineSchedule,
    make_schedule_of,
)
from gossamer.sim.pipelines.makespan import makespan

ROWS = [
    # schedule, machines, micro-batches: makespan, work of a machine, most activations by machine
    ("gpipe", 4, 8, 33, 24, [8] * 4),
    ("gpipe", 8, 16, 69, 48, [16] * 8),
    ("1f1b", 4, 8, 33, 24, [4, 3, 2, 1]),
    ("1f1b", 8, 16, 69, 48, [8, 7, 6, 5, 4, 3, 2, 1]),
    ("interleaved", 4, 8, 57, 48, [11, 9, 7, 5]),
    ("interleaved", 8, 16, 117, 96, [23, 21, 19, 17, 15, 13, 11, 9]),
    ("looped_bfs", 4, 8, 57, 48, [16] * 4),
    ("zero_bubble", 4, 8, 51, 48, [8] * 4),
    ("zbv", 4, 16, 99, 96, [8] * 4),
    ("zbv", 8, 16, 103, 96, [16] * 8),
    ("dualpipev", 4, 8, 54, 48, [9] * 4),
]


@pytest.mark.parametrize(("name", "machines", "many", "units", "work", "held"), ROWS)
def test_a_play_with_equal_stages_has_the_known_integers(
    name: str, machines: int, many: int, units: int, work: int, held: list[int]
) -> None:
    """Makespan, work and peak activations, with free links and passes of one unit."""
    found = makespan(make_schedule_of(name, machines, many))
    assert (found.units, found.busy, found.most_held) == (units, [work] * machines, held)


@pytest.mark.parametrize("forward", [[1, 5, 2], [4, 1, 1], [1, 2, 7]])
def test_unequal_stages_follow_the_slowest(forward: list[int]) -> None:
    """GPipe takes the sum of the stages and m - 1 times the slowest, forward and backward. 1F1B
    takes no longer, and no less than the slowest machine with what comes before and after it."""
    many, slowest = 6, max(forward)
    before = sum(forward[: forward.index(slowest)])
    gpipe = makespan(make_schedule_of("gpipe", 3, many), forward).units
    one_by_one = makespan(make_schedule_of("1f1b", 3, many), forward).units
    assert gpipe == 3 * (sum(forward) + (many - 1) * slowest)
    assert 3 * (before + many * slowest) <= one_by_one <= gpipe


def test_a_link_is_crossed_there_and_back() -> None:
    """One micro-batch on three machines: three passes each way, and two links each way."""
    assert makespan(make_schedule_of("1f1b", 3, 1), link=10).units == 9 + 4 * 10


SIZES = [(2, 4), (4, 8), (3, 3), (1, 5), (8, 16), (5, 10)]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("machines", "many"), SIZES)
def test_every_schedule_is_legal(name: str, machines: int, many: int) -> None:
    """Every pass of every chunk and micro-batch once, in an order in which each comes after those
    that it needs."""
    if name == "dualpipev":
        many = max(many, 2 * machines)  # it fills the pipeline from both ends
    schedule = make_schedule_of(name, machines, many)
    done: set[Action] = set()
    for action in schedule.in_an_order():
        assert done.issuperset(schedule.needs(action))
        done.add(action)
    assert len(done) == sum(map(len, schedule.machines))


@pytest.mark.parametrize(("name", "known"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
@pytest.mark.parametrize(("machines", "many"), SIZES)
def test_the_schedules_written_here_are_those_of_torch(
    name: str, known: str, machines: int, many: int
) -> None:
    """Pass by pass; but for the last machine of 1F1B, whose forward passes torch's table numbers
    from 1."""
    theirs = [
        [(one.computation_type.value, one.microbatch_index) for one in actions
         if one is not None and one.microbatch_index is not None]
        for actions in torch_tables.get_schedule_ops(known, machines, many)
    ]  # fmt: skip
    if name == "1f1b":
        theirs[-1] = [(kind, at - (kind == "F")) for kind, at in theirs[-1]]
    ours = make_schedule_of(name, machines, many).machines
    assert [[(one.kind.value, one.microbatch) for one in own] for own in ours] == theirs


def test_a_table_that_waits_in_a_circle_is_refused() -> None:
    """The first machine waits for the second micro-batch to come back before it sends it on."""
    forward, backward = (
        [[Action(kind, chunk, number) for number in range(2)] for chunk in range(2)]
        for kind in (Pass.FORWARD, Pass.BACKWARD)
    )
    circle = (
        (forward[0][0], backward[0][0], forward[0][1], backward[0][1]),
        (forward[1][0], forward[1][1], backward[1][0], backward[1][1]),
    )
    with pytest.raises(ConfigurationError, match="wait for each other"):
        PipelineSchedule("own", 2, circle, (0, 1)).check()
    with pytest.raises(ConfigurationError, match="has the passes F"):
        PipelineSchedule("own", 1, ((forward[0][0],),), (0,)).check()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("gpip", 4, 8, 0), "did you mean 'gpipe'"),
        (("zbv", 4, 8, 3), "holds 2 chunks"),
        (("gpipe", 4, 8, 2), "holds 1 chunks"),
        (("1f1b", 0, 8, 0), "at least 1"),
    ],
)
def test_what_no_schedule_is_made_of_is_said(given: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_schedule_of(*given)
