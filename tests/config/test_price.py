"""The prices of a cluster: how people give them, and what a bill is made of."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.cluster import Cluster, cluster_from
from gossamer.config.price import Price
from gossamer.errors import ConfigurationError

amounts = st.floats(0.0, 1e3)
prices = st.builds(
    Price,
    worker_hour=amounts,
    own_hours=st.dictionaries(st.integers(0, 3), amounts).map(lambda own: (*sorted(own.items()),)),
    egress_per_gb=amounts, watts=amounts, idle_watts=amounts,
)  # fmt: skip


def priced(text: str, workers: int = 2) -> Cluster:
    return cluster_from({"workers": workers, **tomllib.loads(f"[price]\n{text}")})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker_hour = -1", "[price] worker_hour must be finite and at least 0, got -1"),
        ("egress_per_gb = -0.1", "[price] egress_per_gb must be finite and at least 0, got -0.1"),
        ("watts = inf", "[price] watts must be finite and at least 0, got inf"),
        ("idle_watts = nan", "[price] idle_watts must be finite and at least 0, got nan"),
        ("worker_hour = { 2 = 1, others = 1 }", "names worker 2, but the 2 workers are numbered"),
        ("worker_hour = { 0 = -1, others = 1 }", "worker_hour of worker 0 must be finite and at"),
        ("worker_hour = { 0 = 1 }", "no price for worker 1; name it, or give others ="),
        ("worker_hour = { anna = 1 }", "name workers by their numbers, or others, got 'anna'"),
        ("worker_hour = true", "[price] worker_hour must be a number, got True"),
        ("watts = '300W'", "[price] watts must be a number, got '300W'"),
        ("wats = 3", "unknown key of [price] 'wats'; did you mean 'watts'?"),
    ],
)
def test_prices_that_make_no_sense_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    """What is wrong, where, and what was got."""
    with pytest.raises(ConfigurationError) as refused:
        priced(text)
    assert sentence in str(refused.value)


@given(prices)
def test_a_described_cluster_reads_back(price: Price) -> None:
    """Through JSON, as run folders keep it; without prices the description does not name them."""
    cluster = Cluster(workers=4, price=price)
    described = json.loads(json.dumps(cluster.as_dict()))
    assert cluster_from(described) == cluster
    assert ("price" in described) == (price != Price())


def test_a_table_names_every_worker_or_has_a_price_for_the_others() -> None:
    """Dollars for a second of all workers; new workers cost what the dearest named one costs."""
    assert priced("worker_hour = { 0 = 3, 1 = 5 }").price.per_second(2) == 8 / 3600
    assert priced("worker_hour = { 0 = 3, others = 1 }", 5).price.per_second(5) == 7 / 3600
    wider = priced("worker_hour = { 0 = 3, 1 = 5 }").changed(workers=4)
    assert wider.price.per_second(4) == 18 / 3600
    assert wider.changed(workers=1).price.per_second(1) == 3 / 3600


@given(prices, st.lists(st.floats(0.0, 50.0), min_size=4, max_size=4), st.floats(0.0, 1e12))
def test_a_bill_is_the_sum_over_workers_and_bytes(
    price: Price, computing: list[float], egress: float
) -> None:
    """Each worker is paid for the whole time, and has watts for computing and for the rest."""
    own = dict(price.own_hours)
    hours = [own.get(rank, price.worker_hour) for rank in range(4)]
    dollars = sum(50.0 / 3600 * hour for hour in hours) + egress * 1e-9 * price.egress_per_gb
    joules = sum(busy * price.watts + (50.0 - busy) * price.idle_watts for busy in computing)
    bill = price.bill(50.0, computing, egress)
    assert bill == {
        what: pytest.approx(spent, rel=1e-9, abs=1e-12)
        for what, spent in (("dollars", dollars), ("joules", joules)) if what in price.spendings
    }  # fmt: skip
    doubled = dataclasses.replace(price, watts=2 * price.watts, idle_watts=2 * price.idle_watts)
    assert doubled.bill(50.0, computing, egress).get("joules", 0.0) == pytest.approx(2 * joules)
