"""Four hosts for the tests of this folder: network namespaces, made once and removed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import namespaces

MBIT = 100


@pytest.fixture(scope="session")
def all_hosts() -> Iterator[namespaces.Hosts]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    with namespaces.hosts(4, MBIT) as made:
        yield made


@pytest.fixture
def hosts(all_hosts: namespaces.Hosts) -> Iterator[namespaces.Hosts]:
    """The same hosts, with nothing left running on them after each test."""
    try:
        yield all_hosts
    finally:
        all_hosts.stop()
        all_hosts.started.clear()
