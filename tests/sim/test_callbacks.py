"""What a simulated run tells, and what its page shows of its first moments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer import Callback, simulate
from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import parse_fault
from gossamer.config.settings import make_settings
from gossamer.observe.strip import Strip
from gossamer.sim.simulation import Simulation

SHORT: dict[str, Any] = {"epochs": 1, "evaluations": 2, "seed": 3}


class Heard(Callback):
    """Keeps everything."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.exchanges: list[tuple[int, int, int | None]] = []
        self.staleness: list[int] = []
        self.dropped = 0
        self.members: list[tuple[int, bool]] = []
        self.rows: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        assert loss is not None
        self.steps.append((worker, step))
        self.seconds.append(seconds)

    def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
        self.exchanges.append((worker, peer, age))

    def on_staleness(self, end: int, staleness: int, seconds: float) -> None:
        self.staleness.append(staleness)

    def on_drop(self, end: int, seconds: float) -> None:
        self.dropped += 1

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        self.members.append((worker, is_alive))

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_end(self, summary: dict[str, Any]) -> None:
        self.ends.append(summary)


def heard(method: str, cluster: Cluster | str = "equal-8", **choices: Any):
    listener = Heard()
    result = simulate(
        "digits-logistic", method, cluster, callbacks=[listener], **{**SHORT, **choices}
    )
    return listener, result


def test_what_is_told_adds_up_to_the_summary() -> None:
    """Every step, exchange and staleness once; the rows are the history; one end."""
    listener, result = heard("ad_psgd")
    assert len(listener.steps) == result.steps
    for worker in range(8):
        numbers = [step for who, step in listener.steps if who == worker]
        assert numbers == list(range(1, len(numbers) + 1))
    assert listener.seconds == sorted(listener.seconds)
    assert len(listener.exchanges) / result.steps == pytest.approx(result.exchanges_per_step)
    assert all(worker != peer for worker, peer, _ in listener.exchanges)
    assert listener.rows == result.history
    assert [end["digest"] for end in listener.ends] == [result.digest]


def test_staleness_and_drops_are_told_one_by_one() -> None:
    listener, result = heard("downpour")
    tally = {value: listener.staleness.count(value) for value in set(listener.staleness)}
    assert tally == result.staleness
    listener, result = heard("backup_workers:backups=2")
    assert listener.dropped == result.dropped_gradients > 0


def test_a_death_is_told() -> None:
    cluster = Cluster(workers=4, faults=(parse_fault("kill", "2@20ms"),))
    listener, _ = heard("pull_gossip", cluster)
    assert listener.members == [(2, False)]


def test_listening_changes_nothing() -> None:
    assert heard("ad_psgd")[1].digest == simulate("digits-logistic", "ad_psgd", **SHORT).digest


def test_an_error_in_a_callback_reaches_the_caller() -> None:
    class Broken(Callback):
        def on_evaluation(self, row: dict[str, Any]) -> None:
            raise RuntimeError("no room on the paper")

    with pytest.raises(RuntimeError, match="no room"):
        simulate("digits-logistic", "ad_psgd", callbacks=[Broken()], **SHORT)


# ---------------------------------------------------------------------- the first moments


def strip_of(method: str, cluster: Cluster, until_s: float = 0.3) -> tuple[dict[str, Any], Any]:
    strip = Strip(cluster.workers, round(until_s * 1e9), most_segments=100_000)
    chosen = make_settings("digits-logistic", method, cluster, engine="none", **SHORT)
    simulation = Simulation(chosen, observers=[strip])
    simulation.run()
    return strip.as_dict(0, simulation.world.duration_ns), simulation


@pytest.mark.parametrize("method", ["all_reduce", "downpour", "ad_psgd", "d_psgd", "local_sgd"])
def test_a_worker_does_one_thing_at_a_time(method: str) -> None:
    """Its segments do not overlap, and together fill what is shown, but for the last of it."""
    cluster = Cluster(workers=4, network=Wires(bandwidth=1e7), faults=(parse_fault("slow", "1=3"),))
    strip, _ = strip_of(method, cluster)
    for worker in range(4):
        own = sorted(s for s in strip["segments"] if s[0] == worker)
        assert own
        for (_, _, end, *_), (_, start, *_) in pairwise(own):
            assert start >= end - 2e-7
        if method not in ("ad_psgd",):
            covered = sum(end - start for _, start, end, *_ in own)
            assert covered > 0.8 * (own[-1][2] - own[0][1])


def test_waiting_for_the_slow_one_is_no_communication() -> None:
    """Of an all-reduce the time until the last has come is waiting, the rest communication."""
    compute = Compute(seconds=0.01, distribution="constant")
    cluster = Cluster(
        workers=2, compute=compute, network=Wires(bandwidth=1e6, latency=0.0),
        faults=(parse_fault("slow", "0=3"),),
    )  # fmt: skip
    strip, _ = strip_of("all_reduce:overlap=false", cluster)
    first = sorted(s for s in strip["segments"] if s[0] == 1)[:3]
    # From the first step on: a worker that is slow is never quick.
    assert [kind for *_, kind, _ in first] == ["computing", "waiting", "communicating"]
    assert first[0][2] == pytest.approx(0.01)
    assert first[1][2] == pytest.approx(0.03)
    slow = sorted(s for s in strip["segments"] if s[0] == 0)[:2]
    assert [kind for *_, kind, _ in slow] == ["computing", "communicating"]


def test_it_is_said_which_server_is_waited_for() -> None:
    strip, simulation = strip_of("downpour", Cluster(workers=3, network=Wires(bandwidth=1e6)))
    details = {detail for *_, kind, detail in strip["segments"] if kind != "computing"}
    assert details == {"reply from server 0"}
    causes = [set(account.waiting_ns) for account in simulation.world.metrics.workers.values()]
    assert causes == [{"reply from server 0"}] * 3


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=6),
    st.integers(0, 50), st.integers(1, 60),
)  # fmt: skip
def test_a_wait_is_cut_into_waiting_and_communicating(
    moves: list[tuple[int, int]], start: int, length: int
) -> None:
    """The parts are those moments at which something was on its way, and the others."""
    moves = [(min(pair), max(pair)) for pair in moves]
    strip = Strip(1, 1_000_000)
    micro = [(1000 * begin, 1000 * end) for begin, end in moves]
    strip.waited(0, "receive", None, (1000 * start, 1000 * (start + length)), micro)
    parts = strip.as_dict(0, 1_000_000)["segments"]
    for moment in range(start, start + length):
        kinds = [
            kind for _, begin, end, kind, _ in parts if begin * 1e6 <= moment + 0.5 < end * 1e6
        ]
        is_moving = any(begin <= moment < end for begin, end in moves)
        assert kinds == ["communicating" if is_moving else "waiting"]


def test_a_full_strip_ends_for_everybody_at_once() -> None:
    strip = Strip(2, 10_000, most_segments=3)
    for number in range(4):
        strip.computed(number % 2, (1000 * number, 1000 * number + 1500), 1500, 8, None)
    shown = strip.as_dict(0, 10_000)
    assert strip.is_full
    assert shown["to"] == pytest.approx(3e-6)
    assert all(end <= shown["to"] for _, _, end, *_ in shown["segments"])


def test_the_cards_carry_what_the_summary_says() -> None:
    """Together they send what all sent; what is sent is received."""
    _, result = heard("downpour:servers=2")
    cards = result.cards
    assert [card["name"] for card in cards][-2:] == ["server 0", "server 1"]
    sent, received = (sum(card[key] for card in cards) for key in ("sent", "received"))
    assert sent == received
    assert sent / result.steps == pytest.approx(result.bytes_per_step)
