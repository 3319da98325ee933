"""What is asked of the links of real workers: read from a command line, told to the workers."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import gossamer
from gossamer.commands.launching import faults_of
from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.errors import ConfigurationError
from gossamer.real.faults.injection import Injection
from gossamer.real.faults.links import Links, Spell, own_links
from gossamer.real.faults.timer_thread import Agenda
from gossamer.real.transports.transport import StopToken

SPELLS = st.builds(
    Spell,
    amount=st.floats(0.5, 100),
    at=st.floats(0, 10),
    lasts=st.floats(0.1, 10) | st.just(math.inf),
    worker=st.integers(0, 3),
)
LINKS = st.builds(
    Links,
    bandwidth=st.floats(1e3, 1e10),
    latency=st.floats(0, 1),
    slow=st.lists(SPELLS, max_size=3).map(tuple),
    delays=st.lists(SPELLS, max_size=3).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(links=LINKS)
def test_workers_read_what_the_launcher_was_asked_for(links: Links) -> None:
    """Every number comes out of the environment as it went in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_FAULTS", Injection(links=links).to_json())
        assert own_links() == links


def test_without_any_the_workers_are_told_nothing_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Injection({0: 4.0}).to_json()
    assert "links" not in json.loads(told)
    monkeypatch.setenv("GOSSAMER_FAULTS", told)
    assert not own_links().is_shaped


@settings(max_examples=50, deadline=None)
@given(links=LINKS, members=st.integers(1, 4), size=st.integers(0, 10**9))
def test_a_sum_takes_as_long_as_in_the_simulator(links: Links, members: int, size: int) -> None:
    """Both worlds have one formula for a ring, with the slowest card among the members."""
    ranks = range(members)
    slowest = min(links.rate(rank, 1.0) for rank in ranks)
    predicted = all_reduce_seconds("ring", members, size, links.latency_at(1.0), 1 / slowest)
    assert links.all_reduce_seconds(ranks, size, 1.0) == pytest.approx(predicted)


def test_a_spell_is_on_from_its_start_to_its_end() -> None:
    links = Links(100.0, 0.1, (Spell(10.0, 1.0, 2.0, 0),), (Spell(0.5, 2.0, 1.0),))
    assert [links.rate(0, t) for t in (0.9, 1.0, 2.9, 3.0)] == [100.0, 10.0, 10.0, 100.0]
    assert links.rate(1, 2.0) == 100.0
    assert [links.latency_at(t) for t in (1.9, 2.0, 3.0)] == [0.1, 0.6, 0.1]


def test_the_flags_are_those_of_the_simulator() -> None:
    """Read as there, and written down as there."""
    faults = faults_of(
        slow=["1=4"], slow_link=["0=10", "1=2@1s+2s"], delay=["20ms@1s+2s"], bandwidth="100Mbit",
        latency="1ms",
    )  # fmt: skip
    assert faults.injection.links == Links(
        12.5e6, 1e-3, (Spell(10.0, worker=0), Spell(2.0, 1.0, 2.0, 1)), (Spell(0.02, 1.0, 2.0),)
    )
    assert faults.lines == (
        "slow 1=4",
        "slow-link 0=10",
        "slow-link 1=2@1s+2s",
        "delay 0.02s@1s+2s",
    )


REFUSED = {
    "--slow-link 0=10": "no limit that --slow-link 0=10 could divide; say what the others carry",
    "--bandwidth 1Gbit --slow-link 2=2": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--bandwidth 0": "--bandwidth must be a bandwidth such as 10Gbit",
    "--latency soon": "--latency must be a time such as 50us",
    "--delay -1s": "--delay cannot read '-1s'",
    "--drop 0.1": "--drop is simulated only: real transports lose no message",
    "--partition 0|1": "--partition is simulated only: real workers have no deadline",
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
    links = faults_of(delay=["1s"]).injection.links
    links.check(2)
    assert links.is_shaped
    assert links.rate(0, 0.0) == math.inf
    with pytest.raises(ConfigurationError, match="--bandwidth"):
        faults_of(slow_link=["0=2"]).injection.check(2)


def test_an_agenda_keeps_the_order_of_time() -> None:
    """Whatever the order of asking; at equal times that decides; nothing comes early."""
    agenda, done, over = Agenda(StopToken()), list[tuple[str, float]](), threading.Event()
    now = time.monotonic()
    due = {"c": 0.03, "a": 0.01, "b": 0.01, "d": 0.05}
    for name, after in due.items():
        agenda.at(now + after, lambda name=name: done.append((name, time.monotonic() - now)))
    agenda.at(now + 0.06, over.set)
    agenda.start()
    assert over.wait(10.0)
    agenda.close()
    agenda.join(10.0)
    assert [name for name, _ in done] == ["a", "b", "c", "d"]
    assert all(at >= due[name] for name, at in done)


def test_an_agenda_ends_with_its_run() -> None:
    """Also in the middle of a long wait."""
    stop = StopToken()
    agenda = Agenda(stop)
    agenda.at(time.monotonic() + 1000.0, lambda: None)
    agenda.start()
    stop.set()
    agenda.join(10.0)
    assert not agenda.is_alive()
