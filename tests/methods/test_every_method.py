"""The table of methods is the test plan: every promise of every row is checked here.

What a method does with one worker, the promise `is_plain_alone`, is in `test_one_worker.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gossamer import simulate
from gossamer.config.faults import Fault
from gossamer.methods import METHODS
from gossamer.sim.kernel import SECOND
from support import (
    Ones,
    bowl,
    build,
    centre,
    cluster_of,
    digits,
    pieces,
    racing,
    rows,
    scatter,
    spread,
    total,
    watch_end,
)
from tiers import first_of_each, only

MODEL_BYTES = 1_000_000
SLOW = 20

STOPPED_BY_ONE = {
    "everyone": True,
    "neighbours": True,
    "in-neighbours": True,
    "slowest beyond the bound": True,
    "the first p - backups": False,
    "partner": False,
    "centre": False,
    "server": False,
    "peer's card": False,
    "nobody": False,
}
"""For each thing that a method may wait for: does one slow worker set everybody's pace?"""

VARIANTS = {
    "all_reduce": ("all_reduce:overlap=false", "all_reduce:stale=1"),
    "d_psgd": ("d_psgd:topology=complete,adapt=before", "d_psgd:topology=star,overlap=false"),
    "ad_psgd": ("ad_psgd:topology=complete", "ad_psgd:topology=ring"),
    "push_sum": ("push_sum:topology=exponential", "push_sum:overlap=2"),
    "easgd": ("easgd:period=2", "easgd:synchronous=true"),
    "backup_workers": ("backup_workers:backups=0", "backup_workers:backups=3"),
    "ssp": ("ssp:bound=0,divide=true", "ssp:bound=1"),
    "bounded_delay": ("bounded_delay:bound=0",),
    "softsync": ("softsync:n=4",),
    "staleness_aware": ("staleness_aware:n=2,cap=3",),
    "dc_asgd": ("dc_asgd:adaptive=true",),
    "hogwild": ("hogwild:pieces=1",),
    "downpour": ("downpour:n_push=4,n_fetch=2", "downpour:warm_start=0.2,introduce=0.3"),
    "local_sgd": ("local_sgd:period=2,state=averaged",),
}
"""Options under which other things travel, or at other times."""

every_method = pytest.mark.parametrize("name", METHODS)
OF_FAMILIES = [*first_of_each(METHODS, lambda name: METHODS[name].family), "ad_psgd"]


@pytest.mark.parametrize("name", only(OF_FAMILIES, METHODS))
def test_trains_the_digits_on_eight_equal_workers(name: str) -> None:
    """At its defaults, every method's output model gets 93 % of the test digits right."""
    result = simulate(digits(), name, "equal-8", seed=3, evaluations=1)
    assert result.accuracy >= 0.93


@every_method
def test_a_seed_fixes_the_whole_run(name: str) -> None:
    """The same seed gives the same events and the same bits, another seed other events."""

    def digests(seed: int) -> tuple[str, str]:
        result = build(bowl(), name, racing(5), steps=8, seed=seed, engine="loop").run()
        return result.digest, result.parameters_digest

    assert digests(1) == digests(1)
    assert digests(1)[0] != digests(2)[0]


@every_method
def test_what_a_method_applies_is_clipped(name: str) -> None:
    """With next to no length allowed, gradients leave the models where they began, though without
    that bound they move them."""

    def moved(clip: float | None) -> float:
        simulation = build(
            pieces(4), name, cluster_of(3), steps=4, own_engine=Ones(), engine="none",
            learning_rate=0.1, optimiser="sgd", clip=clip,
        )  # fmt: skip
        holders = centre if simulation.world.servers else rows
        before = holders(simulation).clone()
        simulation.run()
        return float((holders(simulation) - before).abs().max())

    assert moved(1e-7) < 1e-5 < 1e-3 < moved(None)


@every_method
def test_exchanges_keep_the_mean_exactly_when_promised(name: str) -> None:
    """With zero gradients the sum of replicas (with the centre) stays, under every race; where the
    row does not promise it, the sum is seen to change."""
    for spec in (name, *VARIANTS.get(name, ())):
        for seed in range(3):
            simulation = build(bowl(), spec, racing(8), steps=12, seed=seed, engine="none")
            scatter(simulation, seed)
            before = total(simulation)
            simulation.run()
            change = float(((total(simulation) - before) / before).abs().max())
            is_kept = METHODS[name].promises.keeps_mean
            assert change < 1e-5 if is_kept else change > 1e-3, (spec, seed)


@pytest.mark.parametrize("name", ["pull_gossip", "push_gossip"])
def test_two_gossiping_workers_in_step_keep_the_mean(name: str) -> None:
    """At p = 2, when both pull or push at once, what one gains the other loses."""
    cluster = cluster_of(2, distribution="constant")
    simulation = build(bowl(), name, cluster, steps=4, engine="none")
    scatter(simulation)
    before, apart = total(simulation), spread(rows(simulation))
    simulation.run()
    assert (total(simulation) - before).abs().max() < 1e-5
    assert spread(rows(simulation)) < 0.6 * apart


@every_method
def test_puts_the_promised_number_of_models_on_the_network(name: str) -> None:
    """Bytes per step are the row's formula times the size of a model, within 5 %; where it is a
    bound, no more than that, and not less than half of it: every gradient is still sent."""
    for spec in (name, *VARIANTS.get(name, ())):
        simulation = build(
            bowl(64), spec, cluster_of(8), steps=100, engine="none", model_bytes=MODEL_BYTES
        )
        result = simulation.run()
        options = simulation.settings.method.resolve(8, 100)
        expected = METHODS[name].promises.models_per_step(8, options) * MODEL_BYTES
        if METHODS[name].promises.is_traffic_a_bound:
            assert 0.5 * expected <= result.bytes_per_step <= 1.05 * expected, spec
        else:
            assert result.bytes_per_step == pytest.approx(expected, rel=0.05, abs=1), spec


@every_method
def test_one_slow_worker_delays_only_those_who_wait_for_it(name: str) -> None:
    """With one worker 20 times slower, who waits for everyone or for neighbours takes 20 times as
    long; who waits for a partner, a server or nobody takes at most 25 % longer."""

    def seconds(*faults: Fault) -> float:
        cluster = cluster_of(8, jitter=0.02, latency=1e-6, faults=faults)
        return build(bowl(), name, cluster, steps=100, engine="none").run().virtual_seconds

    equal = seconds()
    for rank in (3, 4):
        ratio = seconds(Fault("slow", worker=rank, amount=SLOW)) / equal
        if STOPPED_BY_ONE[METHODS[name].promises.waits_for]:
            assert ratio == pytest.approx(SLOW, rel=0.1)
        else:
            assert 1.0 < ratio < 1.25


@every_method
@pytest.mark.parametrize("victim", [0, 5])
def test_survives_the_death_of_a_worker(name: str, victim: int) -> None:
    """Where the row says so: the run ends, the others do the victim's share, nobody hangs."""
    if not METHODS[name].promises.survives_death:
        pytest.skip("not promised")
    cluster = cluster_of(6, faults=[Fault("kill", at=0.15, worker=victim)])
    simulation = build(bowl(), name, cluster, steps=40, engine="none")
    result = simulation.run()
    budget = simulation.world.budget
    own = [account.steps for account in simulation.world.metrics.workers.values()]
    assert result.living == 5
    assert own[victim] < 20
    assert all(made > 40 for rank, made in enumerate(own) if rank != victim)
    assert 0 <= budget.processed - budget.samples < 5 * budget.batch


@every_method
@pytest.mark.parametrize("workers", range(1, 6))
def test_a_run_trains_exactly_its_samples(name: str, workers: int) -> None:
    """As many gradients as the samples need, whoever is slow: none begins after the last of them
    was there, and what changes afterwards (an update on its way) the end of the run waits for."""
    for spec in (name, *VARIANTS.get(name, ())):
        if workers < 4 and ("backups=3" in spec or "n=" in spec):
            continue  # too few for these options
        for seed in range(2):
            slow = Fault("slow", worker=seed % workers, amount=7)
            cluster = cluster_of(workers, distribution="exponential", latency=4e-3, faults=[slow])
            simulation = build(bowl(), spec, cluster, steps=8, seed=seed, engine="none")
            changed, begun, delivered = watch_end(simulation)
            result = simulation.run()
            assert result.steps == 8 * workers, spec
            assert result.samples == simulation.settings.samples, spec
            assert max(begun) <= max(delivered), spec
            assert max(changed) <= round(result.virtual_seconds * SECOND), spec


@every_method
def test_the_staleness_of_every_gradient_is_measured(name: str) -> None:
    """Each that is applied counts once. It misses none of its worker's own updates where workers
    descend by themselves; where all change the same parameters, p - 1 of them on average."""
    simulation = build(bowl(), name, cluster_of(8), steps=80, engine="none")
    result = simulation.run()
    assert sum(result.staleness.values()) == result.steps - result.dropped_gradients
    promised = METHODS[name].promises.staleness
    if promised in ("0", "stale") or name == "ad_psgd":
        assert result.mean_staleness == result.max_staleness == 0
    elif name in ("hogwild", "downpour", "dc_asgd", "bounded_delay"):
        assert result.mean_staleness == pytest.approx(7, rel=0.05)
    else:
        assert result.mean_staleness > 0.5
    if name == "ad_psgd":  # what its paper counts: the updates of all workers
        assert result.mean_global_staleness == pytest.approx(7, rel=0.05)
    else:
        assert result.mean_global_staleness is result.max_global_staleness is None


@every_method
def test_what_a_method_cannot_have_is_absent(name: str) -> None:
    """No zero stands for it: ages of models where workers exchange none, gaps where nobody counts
    clocks, queues where nobody is held back, exchanges where nobody meets anybody."""
    simulation = build(bowl(), name, cluster_of(8), steps=20, engine="none")
    result = simulation.run()
    method = METHODS[name]
    options = simulation.settings.method_options()
    assert (result.mean_age is not None) == (method.family in ("decentralised", "gossip"))
    assert (result.max_clock_gap is not None) == ("bound" in options)
    assert (result.max_queue is not None) == ("bound" in options or "cap" in options)
    if name == "ensemble":
        assert result.exchanges_per_step is None
    else:
        period = options.get("period", 1)
        least = 1 / (1 + options.get("bound", 0)) if name == "ssp" else 1 / period
        assert least - 0.1 <= result.exchanges_per_step <= 2 * least + 0.1


WITH_SERVERS = [
    spec
    for name, method in METHODS.items()
    if method.has_server
    for spec in (name, *VARIANTS.get(name, ()))
]


@pytest.mark.parametrize("spec", WITH_SERVERS)
@examples(max_examples=6, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.integers(0, 3), st.floats(0, 0.15), min_size=1, max_size=3),
    st.integers(0, 999),
)
def test_no_death_stalls_a_server(spec: str, deaths: dict[int, float], seed: int) -> None:
    """Whoever dies and whenever, even all but one: the others process what is left."""
    kills = [Fault("kill", at=at, worker=rank) for rank, at in deaths.items()]
    cluster = cluster_of(4, distribution="exponential", latency=2e-3, faults=kills)
    simulation = build(bowl(), spec, cluster, steps=10, seed=seed, engine="none")
    result = simulation.run()
    assert result.living == 4 - len(deaths)
    assert result.samples >= simulation.settings.samples
