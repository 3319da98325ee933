"""The table of methods is the test plan: every promise of every row is checked here.

What a method does with one worker, the promise `is_plain_alone`, is in `test_one_worker.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gossamer.config.faults import Fault
from gossamer.contract import laws
from gossamer.methods import METHODS, parse_method
from support import bowl, build, cluster_of, rows, scatter, spread, total
from tiers import first_of_each, only

VARIANTS = {
    "all_reduce": ("all_reduce:overlap=false", "all_reduce:stale=1"),
    "d_psgd": ("d_psgd:topology=complete,adapt=before", "d_psgd:topology=star,overlap=false"),
    "ad_psgd": ("ad_psgd:topology=complete", "ad_psgd:topology=ring"),
    "gradient_tracking": ("gradient_tracking:topology=exponential",),
    "d2": ("d2:topology=star",),
    "relay_sgd": ("relay_sgd:topology=chain",),
    "choco_sgd": ("choco_sgd:gamma=0.2+topk:share=0.25", "choco_sgd:topology=star+int4"),
    "one_bit_adam": ("one_bit_adam:warmup=0.5+int8",),
    "push_sum": ("push_sum:topology=exponential", "push_sum:overlap=2"),
    "easgd": ("easgd:period=2", "easgd:synchronous=true"),
    "backup_workers": ("backup_workers:backups=0", "backup_workers:backups=3"),
    "ssp": ("ssp:bound=0,divide=true", "ssp:bound=1", "ssp:bound=2,overlap=true"),
    "bounded_delay": ("bounded_delay:bound=0", "bounded_delay:overlap=true"),
    "softsync": ("softsync:n=4", "softsync:overlap=true"),
    "staleness_aware": ("staleness_aware:n=2,cap=3",),
    "dc_asgd": ("dc_asgd:adaptive=true,overlap=true",),
    "hogwild": ("hogwild:pieces=1",),
    "downpour": (
        "downpour:n_push=4,n_fetch=2",
        "downpour:warm_start=0.2,introduce=0.3",
        "downpour:n_push=2,n_fetch=2,overlap=true",
    ),
    "codistill": ("codistill:teachers=2",),
    "local_sgd": ("local_sgd:period=2,state=averaged",),
}
"""Options under which other things travel, or at other times."""

every_method = pytest.mark.parametrize("name", METHODS)
SPECS = [spec for name in METHODS for spec in (name, *VARIANTS.get(name, ()))]
every_variant = pytest.mark.parametrize("spec", only(METHODS, SPECS))
OF_FAMILIES = [*first_of_each(METHODS, lambda name: METHODS[name].family), "ad_psgd"]


@pytest.mark.parametrize("name", only(OF_FAMILIES, METHODS))
def test_trains_the_digits_on_eight_equal_workers(name: str) -> None:
    """At its defaults, every method's output model gets 93 % of the test digits right."""
    laws.trains(parse_method(name))


@every_method
def test_a_seed_fixes_the_whole_run(name: str) -> None:
    """The same seed gives the same events and the same bits, another seed other events."""
    laws.is_fixed_by_its_seed(parse_method(name))


@every_method
def test_what_a_method_applies_is_clipped(name: str) -> None:
    """With next to no length allowed, gradients leave the models where they began, though without
    that bound they move them."""
    if METHODS[name].normalises:
        pytest.skip("its steps do not grow with its gradients")
    laws.is_clipped(parse_method(name))


@every_variant
def test_exchanges_keep_the_mean_exactly_when_promised(spec: str) -> None:
    """With zero gradients the sum of replicas (with the centre) stays, under every race; where the
    row does not promise it, the sum is seen to change."""
    laws.keeps_mean(parse_method(spec))


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


@every_variant
def test_puts_the_promised_number_of_models_on_the_network(spec: str) -> None:
    """Bytes per step are the row's formula times the size of a model, within 5 %; where it is a
    bound, no more than that, and not less than half of it: every gradient is still sent."""
    laws.puts_models_on_the_network(parse_method(spec))


@every_method
def test_one_slow_worker_delays_only_those_who_wait_for_it(name: str) -> None:
    """With one worker 20 times slower, who waits for everyone or for neighbours takes 20 times as
    long; who waits for a partner, a server or nobody takes at most 25 % longer."""
    laws.is_delayed_by_whom_it_waits_for(parse_method(name))


@every_method
@pytest.mark.parametrize("victim", [0, 5])
def test_survives_the_death_of_a_worker(name: str, victim: int) -> None:
    """Where the row says so: the run ends, the others do the victim's share, nobody hangs."""
    if not METHODS[name].promises.survives_death:
        pytest.skip("not promised")
    laws.survives_death(parse_method(name), victim)


@every_variant
@pytest.mark.parametrize("workers", only((1, 4), range(1, 6)))
def test_a_run_trains_exactly_its_samples(spec: str, workers: int) -> None:
    """As many gradients as the samples need, whoever is slow: none begins after the last of them
    was there, and what changes afterwards (an update on its way) the end of the run waits for."""
    if workers < 4 and ("backups=3" in spec or "n=" in spec):
        pytest.skip("too few for these options")
    laws.trains_exactly_its_samples(parse_method(spec), workers)


@every_method
def test_the_staleness_of_every_gradient_is_measured(name: str) -> None:
    """Each that is applied counts once. It misses none of its worker's own updates where workers
    descend by themselves; where all change the same parameters, p - 1 of them on average."""
    laws.counts_staleness(parse_method(name))
    simulation = build(bowl(), name, cluster_of(8), steps=80, engine="none")
    result = simulation.run()
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
    looks_at_peers = name in ("codistill", "pbt")
    meets_peers = method.family in ("decentralised", "gossip") or name == "noloco" or looks_at_peers
    assert (result.mean_age is not None) == meets_peers
    assert (result.max_clock_gap is not None) == ("bound" in options)
    assert (result.max_queue is not None) == ("bound" in options or "cap" in options)
    # What is gathered (always, or after a warm-up) is no all-reduce, and so no exchange.
    if name in ("ensemble", "sparse_loco"):
        assert result.exchanges_per_step is None
    else:
        period = options.get("period", 1 / options.get("warmup", 1))
        least = 1 / (1 + options.get("bound", 0)) if name == "ssp" else 1 / period
        least = method.promises.models_per_step(8, options) if looks_at_peers else least
        assert least - 0.1 <= result.exchanges_per_step <= 2 * least + 0.1


WITH_SERVERS = [
    spec
    for name, method in METHODS.items()
    if method.has_server
    for spec in (name, *VARIANTS.get(name, ()))
]


@pytest.mark.parametrize("spec", WITH_SERVERS)
@examples(max_examples=6)
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
