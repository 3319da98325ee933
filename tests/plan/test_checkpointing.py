"""How often to write checkpoints: the closed form against play, and against Young and Daly."""

from __future__ import annotations

import dataclasses

import pytest

from gossamer.config.cluster import Cluster
from gossamer.config.faults import Failures
from gossamer.errors import ConfigurationError
from gossamer.plan.checkpointing import Checkpointing, share_bar

CASES = [(3600.0, 30.0, 60.0), (450.0, 30.0, 120.0), (100.0, 20.0, 30.0), (26.3, 1.0, 19.0)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("times", [0.3, 1.0, 3.0])
def test_the_closed_form_is_within_3_points_of_play(
    case: tuple[float, float, float], times: float
) -> None:
    """Every share, at the best interval and far from it."""
    told = Checkpointing(*case)
    every = times * told.best
    shares, played = told.shares(every), told.played(every)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(shares[kind] == pytest.approx(played[kind], abs=0.03) for kind in shares)
    assert shares["useful"] == pytest.approx(told.goodput(every))


@pytest.mark.parametrize("case", CASES)
def test_the_best_interval_is_dalys_and_near_youngs_where_deaths_are_rare(
    case: tuple[float, float, float],
) -> None:
    told = Checkpointing(*case)
    assert told.best == pytest.approx(told.daly, rel=0.01)
    rare = dataclasses.replace(told, mtbf=1e4 * told.checkpoint)
    assert rare.best == pytest.approx(rare.young, rel=0.01)
    assert told.goodput(told.best) >= max(told.goodput(0.9 * told.best), told.goodput(told.young))


def test_any_machine_stops_the_run() -> None:
    """With rates per machine as many die as there are machines."""
    failures = Failures(mtbf=800.0, checkpoint=5.0, restart=10.0)
    cluster = Cluster(workers=8, workers_per_machine=4, failures=failures)
    told = Checkpointing.of(cluster)
    assert told == Checkpointing(100.0, 5.0, 10.0)
    by_machine = dataclasses.replace(failures, per="machine")
    told = Checkpointing.of(dataclasses.replace(cluster, failures=by_machine))
    assert told == Checkpointing(400.0, 5.0, 10.0)
    assert Checkpointing.of(Cluster(failures=Failures(mtbf=800.0))) is None


def test_shares_are_a_bar() -> None:
    shares = {"useful": 0.5, "checkpoints": 0.25, "lost work": 0.25, "restarts": 0.0}
    assert share_bar(shares, 8).startswith("[uuuuccll] useful 50.0 %, checkpoints 25.0 %")


def test_a_checkpoint_without_deaths_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="checkpoint needs mtbf"):
        Cluster(failures=Failures(checkpoint=5.0))
