"""What it costs to have the model that was scored."""

from __future__ import annotations

import pytest
import torch

from gossamer.config.settings import make_settings
from gossamer.plan.advise.collecting import collecting_seconds, model_bytes
from gossamer.runs.arrival import charged
from gossamer.tasks.flat_model import FlatModel
from support import cluster_of, digits

CLUSTER = cluster_of(8, latency=1e-3)


@pytest.mark.parametrize("method", ["all_reduce", "downpour", "easgd", "backup_workers"])
def test_who_has_the_scored_model_pays_nothing(method: str) -> None:
    """A server has it, and after an all-reduce everybody has."""
    assert collecting_seconds(make_settings(digits(), method, CLUSTER), 10**6) == 0.0


@pytest.mark.parametrize("method", ["ad_psgd", "push_gossip", "d_psgd", "local_sgd:period=8"])
def test_workers_that_differ_pay_one_average(method: str) -> None:
    """Around a ring of eight: fourteen messages of an eighth each."""
    settings = make_settings(digits(), method, CLUSTER)
    expected = 14 * (1e-3 + 10**6 / 8 / CLUSTER.network.bandwidth)
    assert collecting_seconds(settings, 10**6) == pytest.approx(expected)


def test_the_size_is_what_the_network_carries() -> None:
    settings = make_settings(digits(), "ad_psgd", CLUSTER)
    assert (
        model_bytes(settings) == 4 * FlatModel(digits(), torch.device("cpu"), seed=0).layout.total
    )
    assert model_bytes(make_settings(digits(), "ad_psgd", CLUSTER, model_bytes=77)) == 77


def test_a_charge_moves_every_evaluation_and_nothing_else() -> None:
    rows = [{"virtual_seconds": 1.0, "loss": 2.0}, {"virtual_seconds": 3.0, "loss": 1.0}]
    assert charged(rows, 0.5) == [
        {"virtual_seconds": 1.5, "loss": 2.0}, {"virtual_seconds": 3.5, "loss": 1.0}
    ]  # fmt: skip
    assert rows[0]["virtual_seconds"] == 1.0
