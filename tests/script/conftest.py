"""One process with torch imported for all tests of a process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gossamer.commands.work import script_runs
from gossamer.script.fork_server import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def commands(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """Commands use that process, too, and leave it as it is."""

    class Kept:
        def __getattr__(self, name: str) -> object:
            return getattr(server, name)

        def close(self) -> None:
            pass

    monkeypatch.setattr(script_runs, "ForkServer", Kept)
    return server
