"""What is asked of the links of real workers: read from a command line, told to the workers."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import gossamer
from gossamer.commands.options import RealFaultOptions
from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.config.faults import Fault, parse_faults
from gossamer.errors import ConfigurationError
from gossamer.real.faults.fault_plan import RETRANSMISSION_S, FaultPlan, own_fault_plan
from gossamer.real.faults.shaped_links import TimerThread
from gossamer.real.transports.transport import StopToken

FAULTS = st.builds(
    Fault,
    kind=st.just("slow-link"),
    at=st.floats(0, 10),
    lasts=st.floats(0.1, 10) | st.just(math.inf),
    worker=st.integers(0, 3),
    amount=st.floats(0.5, 100),
) | st.builds(
    Fault, kind=st.just("delay"), at=st.floats(0, 10), lasts=st.floats(0.1, 10),
    amount=st.floats(0, 1),
)  # fmt: skip
PLANS = st.builds(
    FaultPlan,
    faults=st.lists(FAULTS, max_size=4).map(tuple),
    bandwidth=st.floats(1e3, 1e10) | st.just(math.inf),
    latency=st.floats(0, 1),
)


@given(plan=PLANS)
def test_workers_read_what_the_launcher_was_asked_for(plan: FaultPlan) -> None:
    """Every number comes out of the environment as it went in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_FAULTS", plan.to_json())
        assert own_fault_plan() == plan


def test_a_slow_worker_alone_shapes_no_links() -> None:
    plan = FaultPlan(parse_faults(slow=["0=4"], kill=["1@2s"]))
    assert not plan.shapes_links
    assert [plan.slow_factor(rank) for rank in range(2)] == [4.0, 1.0]


@given(plan=PLANS, members=st.integers(1, 4), size=st.integers(0, 10**9))
def test_a_sum_takes_as_long_as_in_the_simulator(plan: FaultPlan, members: int, size: int) -> None:
    """Both worlds have one formula for a ring, with the slowest card among the members."""
    ranks = range(members)
    slowest = min(plan.rate(rank, 1.0) for rank in ranks)
    predicted = all_reduce_seconds("ring", members, size, plan.latency_at(1.0), 1 / slowest)
    assert plan.all_reduce_seconds(ranks, size, 1.0) == pytest.approx(predicted)


def test_a_fault_of_a_link_is_on_from_its_start_to_its_end() -> None:
    plan = FaultPlan(parse_faults(slow_link=["0=10@1s+2s"], delay=["0.5s@2s+1s"]), 100.0, 0.1)
    assert [plan.rate(0, t) for t in (0.9, 1.0, 2.9, 3.0)] == [100.0, 10.0, 10.0, 100.0]
    assert plan.rate(1, 2.0) == 100.0
    assert [plan.latency_at(t) for t in (1.9, 2.0, 3.0)] == [0.1, 0.6, 0.1]


def test_a_partition_separates_its_sides_until_it_heals() -> None:
    """One that begins before another has healed keeps them apart longer."""
    plan = FaultPlan(parse_faults(partition=["0|1,2@1s+2s", "0|1@2.5s+2s"]))
    assert plan.shapes_links
    assert [plan.heals_at((0, 1), t) for t in (0.5, 1.0, 2.9, 4.4, 4.5)] == [
        0.5,
        4.5,
        4.5,
        4.5,
        4.5,
    ]
    assert [plan.heals_at((0, 2), t) for t in (1.0, 3.5)] == [3.0, 3.5]
    assert plan.heals_at((1, 2), 1.5) == 1.5
    assert plan.heals_at((0, 3), 1.5) == 1.5  # on no side
    assert plan.all_reduce_seconds((1, 2), 0, 2.0) == 0.0
    assert plan.all_reduce_seconds((0, 1, 2), 0, 2.0) == 2.5


def test_dropped_messages_are_sent_again() -> None:
    """Each loss costs the time of a retransmission; with half of all lost, one on average."""
    plan, draw = FaultPlan(parse_faults(drop=["0.5@1s+1s"])), random.Random(1)
    late = [plan.retransmissions(1.5, draw) for _ in range(2000)]
    assert sum(late) / len(late) == pytest.approx(RETRANSMISSION_S, rel=0.1)
    assert plan.retransmissions(2.5, draw) == 0.0


def test_the_flags_are_those_of_the_simulator() -> None:
    """Read as there, and written down as there."""
    plan = RealFaultOptions(
        slow=["1=4"], slow_link=["0=10", "1=2@1s+2s"], delay=["20ms@1s+2s"], bandwidth="100Mbit",
        latency="1ms",
    ).plan()  # fmt: skip
    assert (plan.bandwidth, plan.latency) == (12.5e6, 1e-3)
    assert [str(fault) for fault in plan.faults] == [
        "slow 1=4",
        "slow-link 0=10",
        "slow-link 1=2@1s+2s",
        "delay 0.02s@1s+2s",
    ]


REFUSED = {
    "--slow-link 0=10": "no limit that --slow-link 0=10 could divide; say what the others carry",
    "--bandwidth 1Gbit --slow-link 2=2": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--bandwidth 0": "--bandwidth must be a bandwidth such as 10Gbit",
    "--latency soon": "--latency must be a time such as 50us",
    "--delay -1s": "--delay cannot read '-1s'",
    "--drop 1.5": "--drop cannot read '1.5'",
    "--partition 0|1": "a partition of real workers must heal, got --partition 0|1; say how long",
    "--partition 0|5@1s+1s": "a fault names worker 5, but the 2 workers are 0 to 1",
    "--record --latency 1ms": "what slow links keep back is not in the record",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_real_links_do_not_know_is_one_sentence(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by `train`, and by `run` where it has the option, before anything is started."""
    monkeypatch.chdir(tmp_path)
    commands = [["train", *arguments.split()]]
    if "--record" not in arguments:
        commands.append(["run", *arguments.split(), "echo"])
    for command in commands:
        said = gossamer(*command)
        assert said.status == 2
        assert REFUSED[arguments] in said.err
        assert len(said.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_limit_without_slow_cards_needs_no_more() -> None:
    """A delay alone shapes the links, and no bandwidth is needed for it."""
    plan = RealFaultOptions(delay=["1s"]).plan()
    plan.check(2)
    assert plan.shapes_links
    assert plan.rate(0, 0.0) == math.inf
    with pytest.raises(ConfigurationError, match="--bandwidth"):
        RealFaultOptions(slow_link=["0=2"]).plan().check(2)


def test_a_timer_thread_keeps_the_order_of_time() -> None:
    """Whatever the order of asking; at equal times that decides; nothing comes early."""
    timer, done, over = TimerThread(StopToken()), list[tuple[str, float]](), threading.Event()
    now = time.monotonic()
    due = {"c": 0.03, "a": 0.01, "b": 0.01, "d": 0.05}
    for name, after in due.items():
        timer.at(now + after, lambda name=name: done.append((name, time.monotonic() - now)))
    timer.at(now + 0.06, over.set)
    timer.start()
    assert over.wait(100)
    timer.close()
    timer.join(100)
    assert [name for name, _ in done] == ["a", "b", "c", "d"]
    assert all(at >= due[name] for name, at in done)


def test_a_timer_thread_ends_with_its_run() -> None:
    """Also in the middle of a long wait."""
    stop = StopToken()
    timer = TimerThread(stop)
    timer.at(time.monotonic() + 1000.0, lambda: None)
    timer.start()
    stop.set()
    timer.join(100)
    assert not timer.is_alive()
