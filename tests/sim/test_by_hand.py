"""Whole methods on odd clusters against times worked out with pencil and paper.

Nothing here is computed by anything that the simulator uses: each case says in its own arithmetic
how long a step must take. A model of a megabyte; cards of 100 MB/s; a gradient of 10 ms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault, parse_faults
from gossamer.config.network import Background, Sites
from gossamer.config.price import Price
from gossamer.runs.result import Result
from support import bowl, build
from tiers import only

MB = 1e6
GRADIENT = 0.010
CARD = 100 * MB
COMPUTE = Compute(GRADIENT, distribution="constant", jitter=0.0)
WIRES = Wires(bandwidth=CARD, latency=0.001)
FLOWS = dataclasses.replace(WIRES, collectives="flows")


def two_sites(
    there: float, back: float, *, latency: tuple[float, float] = (0.030, 0.030), **more: Any
) -> Sites:
    """Machines in two halves; `there` is the rate from the first to the second."""
    out, into = latency
    return Sites(
        names=("north", "south"), machines=(1, 1), bandwidth=((0.0, there), (back, 0.0)),
        latency=((0.001, out), (into, 0.001)), **more,
    )  # fmt: skip


BOTH = (("north", "south"),)


@dataclass(frozen=True)
class Case:
    """What a step takes, in seconds, and why."""

    name: str
    method: str
    step: float
    why: str
    wires: Wires = WIRES
    sites: Sites = field(default_factory=Sites)
    racks_of: int = 0
    compute: Compute = COMPUTE
    background: Background = field(default_factory=Background)
    faults: tuple[Fault, ...] = ()
    workers: int = 4
    per_machine: int = 1

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            workers=self.workers, workers_per_machine=self.per_machine,
            machines_per_rack=self.racks_of, compute=self.compute, network=self.wires,
            sites=self.sites, background=self.background, faults=self.faults,
        )  # fmt: skip


CASES = [
    Case(
        "server behind lopsided cards", "sync_server", 0.010 + 2 * 0.001 + 0.100 + 0.050,
        "four push at 10 MB/s each, and its card gives each of them a quarter of 80 MB/s",
        dataclasses.replace(WIRES, up=10 * MB, down=100 * MB, server_bandwidth=80 * MB),
    ),
    Case(
        "server at the other site", "sync_server", 0.010 + 0.010 + 0.100 + 0.020 + 0.025,
        "each pushes at 10 MB/s after 10 ms, and gets the model at 40 MB/s after 20 ms",
        sites=two_sites(10 * MB, 40 * MB, latency=(0.010, 0.020), servers="south"), workers=2,
        per_machine=1, wires=dataclasses.replace(WIRES, server_bandwidth=200 * MB),
    ),
    Case(
        "ring over two sites", "all_reduce", 0.010 + 6 * 0.030 + 1.5 / 10,
        "six steps of the latency between sites, 1.5 models over the slowest hop",
        sites=two_sites(10 * MB, 10 * MB),
    ),
    Case(
        "ring over a lopsided pair of sites", "all_reduce", 0.010 + 6 * 0.040 + 1.5 / 5,
        "the slow direction and the longer latency decide",
        sites=two_sites(50 * MB, 5 * MB, latency=(0.020, 0.040)),
    ),
    Case(
        "halving and doubling through one pipe", "all_reduce",
        0.010 + 2 * (0.030 + 0.5 / 5) + 2 * (0.001 + 0.25 / 100),
        "halves of the model cross two at a time, quarters stay at their site",
        dataclasses.replace(WIRES, collective="halving_doubling"),
        two_sites(10 * MB, 10 * MB, shared=BOTH),
    ),
    Case(
        "tree through one pipe", "all_reduce", 0.010 + 2 * (0.030 + 1 / 5) + 2 * (0.001 + 1 / 100),
        "two models cross beside each other on the way to the root, and again on the way back",
        dataclasses.replace(WIRES, collective="tree"), two_sites(10 * MB, 10 * MB, shared=BOTH),
    ),
    Case(
        "gossip through full uplinks", "d_psgd", 0.001 + 1 / 25,
        "two of four neighbours' models leave a rack through 50 MB/s, 25 each; computing is hidden",
        dataclasses.replace(WIRES, uplink=50 * MB), racks_of=2,
    ),
    Case(
        "racks that are oversubscribed", "d_psgd:overlap=false", 0.010 + 0.001 + 5 / 100,
        "a model inside counts once and one that leaves four times; a card is never idle from the"
        " first byte, after 1 ms, until 5 MB have passed",
        dataclasses.replace(WIRES, oversubscription=4.0, rack_latency=0.002), racks_of=2,
    ),
    Case(
        "a slow worker with a batch", "all_reduce:overlap=false",
        4 * (0.002 + 16 * 0.0005) + 0.003 + 6 * 0.001 + 1.5 / 100,
        "what follows the batch is four times slower, copying is not, and the ring is as ever",
        compute=dataclasses.replace(
            COMPUTE, seconds=0.002, per_sample=0.0005, unoverlapped_seconds=0.003
        ), faults=tuple(parse_faults(slow=["2=4"])),
    ),
    Case(
        "others have half of every card", "all_reduce", 0.010 + 6 * 0.001 + 1.5 / 50,
        "from the beginning to the end", background=Background(trace=((0.0, 0.5),)),
    ),
    Case(
        "others have half of a slow card", "all_reduce", 0.010 + 6 * 0.001 + 1.5 / 5,
        "a tenth of the card is left, and of that half", background=Background(trace=((0.0, 0.5),)),
        faults=tuple(parse_faults(slow_link=["1=10"])),
    ),
    Case(
        "others have half of a pipe", "all_reduce", 0.010 + 6 * 0.030 + 1.5 / 5,
        "the cards are free", sites=two_sites(10 * MB, 10 * MB, shared=BOTH),
        background=Background("sites", trace=((0.0, 0.5),)),
    ),
    Case(
        "two pushes that take computing away", "push_gossip", 0.011,
        "a card is busy for the 5 ms of half a model, of which a fifth is lost to the gradient",
        dataclasses.replace(WIRES, bandwidth=200 * MB, processor_share=0.2), workers=2,
    ),
    Case(
        "reading from the other site", "pull_gossip", 0.010 + 2 * 0.030 + 1 / 10,
        "the request there, and the model back", sites=two_sites(10 * MB, 10 * MB), workers=2,
    ),
    Case(
        "a longer way for all", "all_reduce", 0.010 + 6 * 0.050 + 1.5 / 10,
        "20 ms more in each step of the ring", sites=two_sites(10 * MB, 10 * MB),
        faults=tuple(parse_faults(delay=["20ms"])),
    ),
    Case(
        "averages now and then between racks", "local_sgd:period=2",
        0.010 + (6 * 0.003 + 1.5 / 20) / 2,
        "each rack's hop to the other has its uplink of 20 MB/s to itself",
        dataclasses.replace(WIRES, uplink=20 * MB, rack_latency=0.002), racks_of=2,
    ),
    Case(
        "two workers on each machine", "all_reduce",
        0.010 + 2 * 0.5 / 1000 + 2 * 0.030 + 1 / 10,
        "first among the two in memory, then a ring of two machines between the sites",
        dataclasses.replace(WIRES, memory_bandwidth=1000 * MB), two_sites(10 * MB, 10 * MB),
        per_machine=2,
    ),
]  # fmt: skip
ALWAYS = ("server behind lopsided cards", "halving and doubling through one pipe",
          "gossip through full uplinks", "others have half of a slow card")  # fmt: skip


def ran(method: str, cluster: Cluster, steps: int, **choices: Any) -> Result:
    return build(
        bowl(), method, cluster, steps=steps, batch=16, engine="none", model_bytes=1_000_000,
        **choices,
    ).run()  # fmt: skip


@pytest.mark.parametrize(
    "case", only([one for one in CASES if one.name in ALWAYS], CASES), ids=lambda case: case.name
)
def test_a_step_takes_what_is_worked_out(case: Case) -> None:
    """The tenth to the fourteenth step, to a part in a thousand for the headers of messages."""
    first, last = (ran(case.method, case.cluster, steps).virtual_seconds for steps in (10, 14))
    assert (last - first) / 4 == pytest.approx(case.step, rel=2e-3), case.why


def test_a_death_beside_sites_and_a_slow_worker() -> None:
    """Worker 1 needs 20 ms a gradient. Worker 3 dies at 5 ms, which the others learn at 55 ms; from
    then on the ring has three members: four steps of 30 ms, and 4/3 of a model at 10 MB/s."""
    cluster = Cluster(
        workers=4, compute=COMPUTE, network=WIRES, sites=two_sites(10 * MB, 10 * MB),
        faults=tuple(parse_faults(slow=["1=2"], kill=["3@5ms"])),
    )  # fmt: skip
    ring = 4 * 0.030 + 4 / 30
    result = ran("all_reduce", cluster, 3)
    rounds = 4  # 3 rounds of four workers are 192 samples, of which three compute 48 in a round
    assert result.virtual_seconds == pytest.approx(
        0.055 + ring + (rounds - 1) * (0.020 + ring), rel=1e-3
    )


def test_a_partition_holds_a_collective_and_not_the_flows_under_way() -> None:
    """The first ring, from 10 ms on for 330 ms, has begun; the second one waits from 350 ms until
    the partition of 500 ms, which began at 100 ms, is over."""
    cluster = Cluster(
        workers=4, compute=COMPUTE, network=WIRES, sites=two_sites(10 * MB, 10 * MB),
        faults=tuple(parse_faults(partition=["0,1|2,3@100ms+500ms"])),
    )  # fmt: skip
    result = ran("all_reduce", cluster, 2)
    assert result.virtual_seconds == pytest.approx(0.600 + 0.330, rel=1e-3)


def test_what_a_run_costs_is_worked_out() -> None:
    """Two workers, one at each site: each round sends a model in each direction between them, and
    takes 10 ms of computing, 2 steps of 30 ms and 100 ms of bytes. Ten rounds."""
    price = Price(7.2, ((0, 3.6),), egress_per_gb=0.5, watts=200, idle_watts=50)
    cluster = Cluster(
        workers=2, compute=COMPUTE, network=WIRES, sites=two_sites(10 * MB, 10 * MB), price=price
    )
    summary = ran("all_reduce", cluster, 10).summary
    seconds = 10 * 0.170
    assert summary["virtual_seconds"] == pytest.approx(seconds, rel=1e-3)
    assert summary["egress_bytes"] == pytest.approx(10 * 2 * MB, rel=1e-3)
    assert summary["dollars"] == pytest.approx(seconds * 10.8 / 3600 + 0.020 * 0.5, rel=1e-3)
    computing = 10 * 0.010
    joules = 2 * (computing * 200 + (seconds - computing) * 50)
    assert summary["joules"] == pytest.approx(joules, rel=1e-3)
