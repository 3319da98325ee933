"""What launchers write about deaths reaches the workers, whatever their connections say."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from gossamer.errors import ConfigurationError
from gossamer.real.transports.death_notices import DeathWatch, tell_dead
from gossamer.real.transports.secret import own_secret
from gossamer.real.transports.store import TcpStore, serve


def test_each_death_is_noticed_once() -> None:
    """Also one that was written down before anybody looked; and nobody else is named."""
    engine, told = serve(own_secret())
    died = SimpleQueue[tuple[int, int]]()
    tell_dead(told, 3, "killed by SIGKILL")
    notices = DeathWatch(
        lambda: TcpStore.connect("127.0.0.1", engine.port), (1, 2, 3), lambda *it: died.put(it)
    )
    notices.start()
    try:
        assert died.get(timeout=100) == (3, 0)
        tell_dead(told, 3, "its host is gone")
        tell_dead(told, 1, "ended with exit code 1")
        assert died.get(timeout=100) == (1, 0)
        tell_dead(told, 3, "killed by SIGKILL", 2)  # it had come back
        assert died.get(timeout=100) == (3, 2)
    finally:
        notices.stop()
    assert died.empty()


def test_a_store_that_dies_ends_the_looking() -> None:
    """Its host is gone, and with it everything that could be read."""

    def refuse() -> TcpStore:
        raise RuntimeError("nobody answers there")

    died = SimpleQueue[tuple[int, int]]()
    notices = DeathWatch(refuse, (1,), lambda *it: died.put(it))
    notices.start()
    notices.stop()
    assert died.empty()


def test_a_worker_without_the_secret_of_its_run_is_told_how_to_start() -> None:
    """In words that need no knowledge of stores and proofs."""
    with pytest.raises(ConfigurationError, match="started without the secret of its run"):
        own_secret({})
