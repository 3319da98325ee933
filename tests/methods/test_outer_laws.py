"""Laws of outer loops: those of the shipped contract for every method of the family, and what the
schedules, merges and outer optimisers compute, beside their closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault
from gossamer.contract.laws import LAWS, check
from gossamer.contract.outer_laws import OUTER_LAWS
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.methods.outer import due
from gossamer.real.join.joined_worker import coupled
from gossamer.real.transports.local import LocalTransport
from gossamer.rules import DelayedNesterov, OuterOptimiser, pair_growth, radial_mean
from support import Ones, build, cluster_of, pieces, rows, scatter, spread
from tiers import only

FAMILY = [name for name, row in METHODS.items() if row.family == "local updates"]
VARIANTS = (
    "diloco:period=4,fragments=3,delay=1,mix=0.5", "diloco:period=4,fragments=2,delay=3",
    "diloco:period=4+topk:share=0.2,bits=2", "local_sgd:period=2,state=averaged",
    "decoupled_diloco:fragments=2,period=4,quorum=2,merge=mean",
)  # fmt: skip
FAST = {"diloco", "noloco", "async_diloco", VARIANTS[0]}
CASES = [(spec, law) for spec in (*FAMILY, *VARIANTS) for law in OUTER_LAWS]


@pytest.mark.parametrize(("spec", "law"), only([c for c in CASES if c[0] in FAST], CASES))
def test_the_laws_of_the_family_hold_where_their_hypotheses_do(spec: str, law: str) -> None:
    """A method that says it waits for everyone is held to all of them."""
    finding = check(parse_method(spec), law)
    assert finding.is_kept is not False, finding.found
    if METHODS[spec.partition(":")[0]].promises.waits_for == "everyone":
        has_fragments = "fragments" in METHODS[spec.partition(":")[0]].defaults()
        assert finding.is_kept or not has_fragments


def test_a_method_of_another_family_is_not_held_to_them() -> None:
    for law in OUTER_LAWS:
        assert law in LAWS
        assert check(parse_method("all_reduce"), law).is_kept is None


# ---------------------------------------------------------------------- who meets when


@given(st.integers(1, 200), st.integers(1, 24), st.integers(0, 30))
@examples(max_examples=60)
def test_every_fragment_meets_once_a_period(period: int, fragments: int, turn: int) -> None:
    """In every stretch of so many steps, and at least floor(H / F) steps after the one before: with
    a smaller delay no two are on their way at once."""
    assume(fragments <= period)
    meetings = [(t, f) for t in range(turn, turn + 2 * period) for f in due(t, period, fragments)]
    for first in range(turn, turn + period):
        met = [f for t, f in meetings if first <= t < first + period]
        assert sorted(met) == list(range(fragments))
    starts = [t for t, _ in meetings]
    gaps = [after - before for before, after in pairwise(starts)]
    assert min(gaps, default=period) >= period // fragments


def waited_s(delay: int, link_s: float) -> float:
    """How long a worker waits in 16 meetings, on a link on which a fragment takes so long."""
    size = 400_000
    cluster = Cluster(
        workers=2, compute=Compute(seconds=0.1, distribution="constant"),
        # A ring of two sends half a fragment twice.
        network=Wires(bandwidth=size / 2 / link_s, latency=0.0),
    )  # fmt: skip
    method = f"diloco:period=8,fragments=2,delay={delay},mix=0.5"
    run = build(pieces(8, 8), method, cluster, steps=64, engine="none", model_bytes=size)
    result = run.run()
    return result.waiting_fraction * result.virtual_seconds


def test_a_delay_hides_a_link_that_is_as_slow_as_that() -> None:
    """A fragment that takes 1.9 steps costs nothing with a delay of 2, but for the last meeting,
    behind which nothing is hidden; with a delay of 1 all cost the rest, without one all of it."""
    assert waited_s(2, 0.19) == pytest.approx(0.19, rel=0.01)
    assert waited_s(1, 0.19) == pytest.approx(15 * 0.09 + 0.19, rel=0.01)
    assert waited_s(0, 0.19) == pytest.approx(16 * 0.19, rel=0.01)


def test_fragments_and_delays_change_no_bytes_but_their_peak() -> None:
    """As many models a step travel, in smaller pieces."""

    def sent(options: str) -> float:
        run = build(pieces(64, 64, 64, 64), f"diloco:period=8{options}", cluster_of(4),
                    steps=64, engine="none", model_bytes=1_000_000)  # fmt: skip
        return run.run().bytes_per_step

    whole = sent("")
    for options in (",fragments=4", ",fragments=4,delay=2", ",fragments=2,delay=7,mix=0.5"):
        assert sent(options) == pytest.approx(whole, rel=1e-3)


# ---------------------------------------------------------------------- delayed Nesterov


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_a_steady_displacement_gains_what_delayed_nesterov_promises(workers: int) -> None:
    """The step of a round tends to 1 + m / (1 - m) times the mean displacement: D / N of each, and
    the momentum once; with the sum in place of D the direct term would count twice."""
    outer = DelayedNesterov({}, rate=1.0, momentum=0.9)
    way = torch.ones(3, dtype=torch.float64)
    for _ in range(400 * workers):
        outer.step(way, workers)
    round_ = torch.stack([outer.step(way, workers) for _ in range(workers)]).sum(0)
    torch.testing.assert_close(round_, 10 * way, rtol=1e-6, atol=0.0)


def test_delayed_nesterov_with_one_worker_is_torchs_nesterov() -> None:
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimiser = torch.optim.SGD([parameter], lr=0.4, momentum=0.8, nesterov=True)
    outer, x = DelayedNesterov({}, 0.4, 0.8), torch.zeros(5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        way = torch.randn(5, dtype=torch.float64, generator=generator)
        parameter.grad = way.clone()
        optimiser.step()
        x -= outer.step(way, 1)
    torch.testing.assert_close(parameter.detach(), x)


@given(st.integers(1, 8), st.floats(0, 1), st.integers(0, 99))
@examples(max_examples=30)
def test_the_direct_terms_of_a_round_are_the_mean_displacement(
    workers: int, part: float, seed: int
) -> None:
    """Without momentum a round moves by the mean of its displacements, whatever `early` is."""
    generator = torch.Generator().manual_seed(seed)
    ways = torch.randn(workers, 4, dtype=torch.float64, generator=generator)
    outer = DelayedNesterov({}, 0.5, 0.0, early=part / workers)
    moved = torch.stack([outer.step(way, workers) for way in ways]).sum(0)
    torch.testing.assert_close(moved, 0.5 * ways.mean(0))


@pytest.mark.parametrize("rho", [0.0, 0.25, 0.562])
def test_the_mean_gain_of_nesterov_is_its_closed_form(rho: float) -> None:
    """For displacements whose correlation falls by rho a round: 1 + m / (1 - m rho) times a
    displacement, along it, on average."""
    momentum, count = 0.9, 2000
    generator = torch.Generator().manual_seed(1)
    way = torch.randn(count, dtype=torch.float64, generator=generator)
    outer = OuterOptimiser(1.0, momentum, nesterov=True)
    along: list[Tensor] = []
    for turn in range(200):
        step = -outer.step(torch.zeros_like(way), -way)
        if turn >= 50:
            along.append((step @ way) / (way @ way))
        fresh = torch.randn(count, dtype=torch.float64, generator=generator)
        way = rho * way + (1 - rho**2) ** 0.5 * fresh
    expected = 1 + momentum / (1 - momentum * rho)
    assert abs(float(torch.stack(along).mean())) == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------------- merges


def test_a_radial_mean_keeps_lengths_and_falls_back() -> None:
    """Of one it is that one; of many without a common direction it is as long as they are, where a
    plain mean is shorter by the root of their number; of opposite ones it is the mean."""
    generator = torch.Generator().manual_seed(0)
    ways = list(torch.randn(16, 40_000, generator=generator).unbind())
    sizes = [30_000, 10_000]
    torch.testing.assert_close(radial_mean(ways[:1], [3.0], sizes), ways[0])
    merged = radial_mean(ways, [1.0] * 16, sizes)
    assert float(merged.norm() / ways[0].norm()) == pytest.approx(1.0, abs=0.01)
    mean = torch.stack(ways).mean(0)
    assert float(mean.norm() / ways[0].norm()) == pytest.approx(0.25, abs=0.01)
    assert not radial_mean([ways[0], -ways[0]], [1.0, 1.0], sizes).any()
    assert not radial_mean([0 * ways[0]] * 2, [1.0, 2.0], sizes).any()


@pytest.mark.parametrize(
    "options", ["", ",quorum=4", ",delay=8", ",quorum=2,patience=0.001", ",merge=mean"]
)
def test_learners_of_decoupled_diloco_never_wait(options: str) -> None:
    """Whatever the quorum, the grace and the slowness of one of them."""
    slow = [Fault("slow", worker=3, amount=10.0)]
    cluster = cluster_of(4, distribution="constant", latency=1e-5, faults=slow)
    method = f"decoupled_diloco:period=4,fragments=2{options}"
    result = build(pieces(3, 2, 1), method, cluster, steps=60, engine="none").run()
    assert result.waiting_fraction < 0.01


# ---------------------------------------------------------------------- NoLoCo


@given(st.integers(2, 7), st.sampled_from([(0.5, 0.7), (0.0, 1.0), (0.3, 0.4)]), st.integers(0, 99))
@examples(max_examples=8)
def test_the_mean_of_nolocos_replicas_follows_the_heavy_ball(
    workers: int, choice: tuple[float, float], seed: int
) -> None:
    """mean phi <- mean phi + mean v, with v <- a v + b (mean x - mean phi): whoever met whom."""
    momentum, rate = choice
    period, steps, inner_rate = 2, 12, 0.01
    method = f"noloco:period={period},outer_rate={rate},outer_momentum={momentum}"
    run = build(pieces(3, 2, 1), method, cluster_of(workers, jitter=0.4), steps=steps, seed=seed,
                own_engine=Ones(), engine="none", optimiser="sgd", learning_rate=inner_rate,
                evaluations=1)  # fmt: skip
    scatter(run, seed)
    start = rows(run).clone()
    run.run()
    mean, velocity = start.mean(0), torch.zeros_like(start[0])
    for _ in range(steps // period):
        velocity = momentum * velocity - rate * period * inner_rate  # every gradient is one
        mean = mean + velocity
    torch.testing.assert_close(rows(run).mean(0), mean, rtol=1e-5, atol=1e-5)
    if workers > 2:
        assert spread(rows(run)) < spread(start)


def test_rates_at_which_pairs_drift_apart_are_refused() -> None:
    """DiLoCo's 0.9 with 0.7 is; the published 0.5 with 0.7 is not. And what is refused diverges,
    what is not contracts."""
    for bad in ("outer_momentum=0.9,outer_rate=0.7", "outer_momentum=0.5,outer_rate=2"):
        with pytest.raises(ConfigurationError, match="drift apart"):
            parse_method(f"noloco:{bad}").resolve(16, 1000)
    parse_method("noloco:outer_momentum=0.5,outer_rate=0.7").resolve(16, 1000)
    for (momentum, rate), grows in {
        (0.9, 0.7): True, (0.5, 2.0): True, (0.5, 0.7): False, (0.9, 0.2): False, (0.0, 1.0): False,
    }.items():  # fmt: skip
        assert (pair_growth(momentum, rate, 16) >= 1) == grows


# ---------------------------------------------------------------------- a user's own loop


def test_micro_batches_are_no_steps() -> None:
    """DiLoCo's period counts steps of the optimiser: gradients that a loop accumulates over two
    batches are one step, and end where one batch of both does."""

    def ended(split: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = parse_method("diloco:period=3,outer_rate=0.7,outer_momentum=0.9")
        with coupled(LocalTransport(), model, optimizer, method) as worker:
            for step in range(9):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                parts = inputs.chunk(split)
                for part in parts[:-1]:
                    with worker.accumulate():
                        (model(part).square().mean() / split).backward()
                        worker.step()
                (model(parts[-1]).square().mean() / split).backward()
                worker.step()
        return torch.cat([own.detach().flatten() for own in model.parameters()])

    torch.testing.assert_close(ended(2), ended(1))
