"""Bitwise claims hold at equal thread counts, so every test runs torch on one thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import fork_server

if TYPE_CHECKING:
    from gossamer.script.fork_server import ForkServer

# What a launcher would hand to workers that tests start by themselves.
os.environ["GOSSAMER_SECRET"] = "a secret of the tests alone"
# A test neither writes into the user's cache nor depends on what is there.
os.environ["GOSSAMER_CACHE"] = "off"
# On a busy machine an example takes as long as it takes. `make test` looks at the same examples
# every time, `make test-all` at others each time.
settings.register_profile(
    "others", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("others"), derandomize=True)
settings.load_profile("same")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without --jobs run in this process: others take seconds to start."""
    monkeypatch.setattr("gossamer.commands.work.jobs.default_jobs", lambda: 1)


@pytest.fixture(scope="session")
def _pool_server() -> Iterator[ForkServer]:
    from gossamer.commands.work.jobs import POOL_PROCESS
    from gossamer.script.fork_server import ForkServer

    made = ForkServer(POOL_PROCESS)
    yield made
    made.close()


@pytest.fixture
def pool_server(_pool_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """The processes of all pools are forks of one, as those of a command are."""
    from gossamer.commands.work.jobs import JobPool

    monkeypatch.setattr(JobPool, "server", _pool_server)
    return _pool_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-outputs",
        action="store_true",
        help="write what examples and documentation print now, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        # This process only distributes the tests, and does not wait until torch is imported.
        fork_server.start()
        return
    import torch

    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    fork_server.forks_workers(item.get_closest_marker("fresh_interpreters") is None)


def pytest_unconfigure() -> None:
    fork_server.close()


@pytest.fixture
def refreshes(request: pytest.FixtureRequest) -> bool:
    """Whether expected outputs are to be written anew."""
    return bool(request.config.getoption("--refresh-outputs"))
