"""Who does not know the secret of a run changes nothing there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from pathlib import Path

import pytest

from gossamer.errors import ConfigurationError
from gossamer.real.launch.hosts import HostMeeting, Hosts
from gossamer.real.transports import store_server as keeper
from gossamer.real.transports.secret import secret_of_hosts
from gossamer.real.transports.store import OwnStore, Stranger, TcpStore, serve
from gossamer.real.transports.store_server import Keeper
from gossamer.real.transports.torch import rendezvous

SECRET = b"a secret of the tests alone"


def ask(kept: Keeper, said: bytes) -> bytes:
    """Behind the greeting; what comes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", kept.port), timeout=10) as connection:
        got = connection.recv(len(keeper.GREETING) + keeper.NONCE, socket.MSG_WAITALL)
        assert got.startswith(keeper.GREETING)
        try:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1)
        except OSError:
            return b""


@pytest.mark.parametrize(
    "said",
    [b"x", b"\0" * 64, os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", b"z" * 100_000],
    ids=["half a proof", "zeros", "noise", "another protocol", "much"],
)
def test_what_a_stranger_says_is_answered_by_silence_and_counted(said: bytes) -> None:
    """And a member goes on meanwhile."""
    kept, store = serve(SECRET)
    store.agree("fact", "ours")
    assert ask(kept, said) == b""
    assert store.agree("fact", "theirs") == "ours"
    kept.close()
    assert kept.strangers == 1


def test_a_wrong_secret_is_one_sentence() -> None:
    kept, _ = serve(SECRET)
    with pytest.raises(Stranger, match=rf"127.0.0.1:{kept.port} does not accept the secret"):
        TcpStore.connect("127.0.0.1", kept.port, b"another secret")
    kept.close()
    assert kept.strangers > 0


def test_crowds_of_strangers_push_out_each_other_and_no_member() -> None:
    """Who says nothing is let go of when too many do."""
    kept, store = serve(SECRET)
    crowd = [socket.create_connection(("127.0.0.1", kept.port)) for _ in range(200)]
    assert store.add("counter", 2) == 2
    late = TcpStore.connect("127.0.0.1", kept.port, SECRET)
    assert late.add("counter", 1) == 3
    for one in crowd:
        one.close()
    kept.close()
    assert kept.strangers >= 200 - 64


def test_a_member_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and all of them together are bounded; what does not fit changes nothing."""
    monkeypatch.setattr(keeper, "TOTAL_BYTES", 1000)
    kept = Keeper(SECRET)
    store = OwnStore("127.0.0.1", kept.port, SECRET)
    store.set("small", b"a")
    for key, value in (("k", b"x" * 1000), ("k" * 2000, b"x"), ("k", b"x" * (17 << 20))):
        with pytest.raises(RuntimeError, match=r"the store is full|do not fit the store"):
            store.set(key, value)
    assert (store.num_keys(), store.get("small")) == (1, b"a")
    assert store.delete_key("small")
    assert store.compare_set("n", "", "1") == b"1"
    assert store.add("n", 4) == 5
    kept.close()
    with pytest.raises(RuntimeError, match="is gone"):
        store.add("n", 1)


@pytest.mark.parametrize("secrets", [(SECRET, SECRET), (SECRET, b"another secret!")])
def test_workers_prove_the_secret_to_each_other(secrets: tuple[bytes, bytes]) -> None:
    """Before anything else goes over a connection of Gloo's, which itself asks for nothing."""
    kept = Keeper(SECRET)
    found: list[object] = [None, None]

    def come(rank: int) -> None:
        meeting = rendezvous.Meeting(rank, 2, "127.0.0.1", kept.port, secret=SECRET)
        store = meeting.connect()
        mine = dataclasses.replace(meeting, secret=secrets[rank])
        try:
            found[rank] = rendezvous.make_lanes(mine, store)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if secrets[0] == secrets[1]:
        assert all(isinstance(lanes, rendezvous.Lanes) for lanes in found)
    else:
        assert "in the place of worker 1 does not know the secret" in str(found[0])
    kept.close()


def test_strangers_who_speak_while_they_are_refused_do_not_end_the_store() -> None:
    """Of a crowd the oldest are refused, in the very moment in which they say something."""
    keeper = Keeper(SECRET)
    member = OwnStore("127.0.0.1", keeper.port, SECRET)
    for _ in range(12):
        crowd = [socket.create_connection(("127.0.0.1", keeper.port)) for _ in range(64)]
        another = socket.socket()
        another.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            another.connect(("127.0.0.1", keeper.port))
        for stranger in crowd:
            with contextlib.suppress(OSError):
                stranger.send(b"z")
        for stranger in (*crowd, another):
            stranger.close()
        assert member.add("count", 1)
    assert member.add("count", 0) == 12
    keeper.close()


# ---------------------------------------------------------------------- several hosts


def test_the_secret_of_several_hosts_is_a_file_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the variable; nothing is made unasked, and what somebody else may read is refused."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert secret_of_hosts(file) == "0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"others than you may read .*chmod 600"):
        secret_of_hosts(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        secret_of_hosts(tmp_path / "none")
    monkeypatch.delenv("GOSSAMER_SECRET")
    with pytest.raises(ConfigurationError, match="several hosts need a secret"):
        secret_of_hosts(None)


def test_a_host_with_another_secret_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 takes no word of it."""
    first = HostMeeting(Hosts(2, 0, "127.0.0.1", 0, 1.0), 1)
    port = int(first.address.rpartition(":")[2])
    monkeypatch.setenv("GOSSAMER_SECRET", "that of another cluster")
    with pytest.raises(ConfigurationError, match=r"does not accept.*all hosts the same secret"):
        HostMeeting(Hosts(2, 1, "127.0.0.1", port, 1.0), 1)
    assert "of strangers were refused" in (first.close() or "")
