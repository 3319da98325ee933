"""Servers that die: their standbys have applied every update, but for those within the bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import read_fault
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.sim.simulation import Simulation
from support import bowl, build, centre, pieces, scatter, total
from tiers import only

WITH_SERVERS = tuple(name for name, method in METHODS.items() if method.has_server)
WITH_TEXT = tuple(name for name in WITH_SERVERS if METHODS[name].server is not None)
DETECTION_S = 0.005
STEP_S = 0.01


def cluster_with(*faults: str, workers: int = 5) -> Cluster:
    return Cluster(
        workers=workers,
        compute=Compute(seconds=STEP_S, jitter=0.2),
        network=Wires(bandwidth=1e9, latency=2e-4),
        failure_detection=DETECTION_S,
        faults=tuple(map(read_fault, faults)),
    )


def made(method: str, standby: str, *faults: str, steps: int = 40, **choices: Any) -> Simulation:
    spec = parse_method(method)
    text = f"{spec}{',' if ':' in str(spec) else ':'}standby={standby}"
    chosen = {"engine": "loop", "seed": 1, "model_bytes": 100_000, "optimiser": "sgd"} | choices
    task = pieces(2, 2) if spec.servers == 2 else bowl(4)
    return build(task, text, cluster_with(*faults), steps=steps, batch=1, **chosen)


@pytest.mark.parametrize("standby", ["sync", pytest.param("3", marks=pytest.mark.wide)])
@pytest.mark.parametrize("method", only(("dc_asgd", "ssp", "decoupled_diloco"), WITH_TEXT))
def test_a_standby_comes_to_the_bits_of_its_primary(method: str, standby: str) -> None:
    """It runs the same text on the same messages, at the same times and with the same members."""
    options = parse_method(method).resolve(5, 40)
    if standby != "sync" and METHODS[method].is_synchronous(options):
        pytest.skip("its workers are in step, so it has synchronous standbys only")
    simulation = made(f"{method}:servers=2", standby, "kill 3@0.11s", "return 3@0.2s")
    simulation.run()
    world = simulation.world
    primaries, standbys = world.replicas[5:7], world.replicas[7:9]
    for primary, follower in zip(primaries, standbys, strict=True):
        assert primary.store.changed_ns > 0
        assert torch.equal(primary.snapshot(), follower.snapshot())
        assert primary.version == follower.version
        assert primary.memory.keys() == follower.memory.keys()


@pytest.mark.parametrize("method", only(("sync_server", "downpour", "easgd"), WITH_SERVERS))
def test_training_goes_on_after_the_death_of_a_server(method: str) -> None:
    """Exactly the samples are trained, and the run is longer by the time that it takes to notice
    the death and to ask again."""
    usual = made(method, "sync").run().summary
    simulation = made(method, "sync", "kill-server 0@0.2s")
    found = simulation.run().summary
    world = simulation.world
    assert found["server_deaths"] == 1
    assert found["lost_updates"] == 0
    assert found["samples"] == usual["samples"]
    assert world.samples_read == world.budget.processed + world.samples_aborted
    assert found["virtual_seconds"] < usual["virtual_seconds"] + DETECTION_S + 3 * STEP_S
    assert world.mortal.acting == [world.replicas[6]]


@pytest.mark.parametrize("standby", ["sync", "1", "4"])
def test_a_death_loses_at_most_the_stated_bound(standby: str) -> None:
    """Every gradient is applied once: those that the first server had told its standby of, and all
    that were sent again. What is lost is counted."""
    bound = 0 if standby == "sync" else int(standby)
    most = 0
    for at in range(200, 240, 5):
        simulation = made("downpour", standby, f"kill-server 0@0.{at}s", steps=25, engine="none",
                          model_bytes=3_000_000)  # fmt: skip
        found = simulation.run().summary
        (acting,) = simulation.world.mortal.acting
        assert found["lost_updates"] <= bound
        assert acting.version == found["samples"] - found["lost_updates"]
        most = max(most, found["lost_updates"])
    assert bound < 4 or most > 0


def test_a_centre_keeps_the_sum_through_its_death() -> None:
    """Workers add to both memories of a centre, so what they take from themselves is nowhere lost:
    the sum of workers and centre stays, as the row of the method promises."""
    simulation = made("easgd", "sync", "kill-server 0@0.153s", engine="none")
    scatter(simulation)
    before = total(simulation)
    simulation.run()
    assert torch.allclose(total(simulation), before, rtol=1e-5)


def test_the_output_is_the_model_of_the_server_that_acts() -> None:
    simulation = made("downpour", "sync", "kill-server 0@0.1s")
    result = simulation.run()
    dead, standby = simulation.world.replicas[5:7]
    assert torch.equal(result.parameters, standby.snapshot())
    assert torch.equal(centre(simulation), standby.snapshot().double())
    assert not torch.equal(result.parameters, dead.snapshot())


def test_the_log_costs_its_bytes() -> None:
    """The primary sends on what it gets, so its card carries every gradient a second time."""
    sent = {}
    for standby in ("", "sync"):
        text = "downpour" if not standby else "downpour:standby=sync"
        simulation = build(bowl(4), text, cluster_with(), steps=40, batch=1, engine="none",
                           model_bytes=1_000_000)  # fmt: skip
        sent[standby] = simulation.run().summary["cards"][5]["sent"]
    assert sent["sync"] == pytest.approx(2 * sent[""], rel=0.05)


@pytest.mark.parametrize(
    ("method", "faults", "words"),
    [
        ("downpour", ["kill-server 0@1s"], "add standby=sync to the method"),
        ("downpour:standby=sync", ["kill-server 1@1s"], "has 1 server, numbered"),
        ("ad_psgd", ["kill-server 0@1s"], "has no server"),
        ("downpour:standby=sync", ["kill-server 0@1s", "kill-server 0@2s"], "one standby only"),
        ("downpour:standby=often", [], "standby must be sync or the number"),
        ("sync_server:standby=4", [], "write standby=sync"),
        ("ad_psgd:standby=sync", [], "has no server"),
    ],
)
def test_deaths_that_nobody_survives_are_refused(
    method: str, faults: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(bowl(4), method, cluster_with(*faults), steps=4, batch=1, engine="none")
