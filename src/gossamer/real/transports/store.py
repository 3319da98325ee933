"""The clients of the store of small shared values, which is reached over TCP.

The launcher keeps the store where it can, so that any worker may die, also rank 0. Our own store
(`store_server`) demands the secret of the run from every client; the store of torchrun demands
nothing.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import ConfigurationError
from gossamer.real.transports import store_server as keeper
from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.secret import NONCE, PROOF, is_proof, own_secret, proof
from gossamer.real.transports.store_server import ANSWER, GREETING, REQUEST, Keeper

PATIENCE_S = 60.0
_TIMEOUT = timedelta(seconds=300)
_TRIES = 3
_SHORTEST_S, _LONGEST_S = 0.001, 0.02
_IDLE_S, _UNANSWERED_MS = 15, 60_000


class StoreGone(RuntimeError):
    """The process that kept the store has ended. Torch's stores raise a RuntimeError too."""


class NoGreeting(StoreGone):
    """A program listens at the address of the store and says nothing."""


class Stranger(ConfigurationError):
    """The program at the address of the store does not know the secret of this process."""


class OwnStore(Store):
    """A connection to a `Keeper`, with the methods of torch's stores, so that Gloo and NCCL can use
    it."""

    def __init__(self, host: str, port: int, secret: bytes, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._place = (host, port)
        self._secret = secret
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._gone: StoreGone | None = None
        self._connection: socket.socket | None = None
        self._connection = _connected(host, port, secret, patience_s)
        self._is_broken_off = False

    def __del__(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """End all waits here, because no thread may be inside of Gloo when the process ends."""
        self._gone = StoreGone("this process has left the store")
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def clone(self) -> OwnStore:
        return OwnStore(*self._place, self._secret, self._patience_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(keeper.SET, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value, and wait for it if necessary, as torch's stores do."""
        self.wait([key])
        found = self.look(key)
        if found is None:
            raise StoreGone(f"{key} has been deleted from the store")
        return found

    def look(self, key: str) -> bytes | None:
        """Return the present value, if there is one."""
        state, value, _ = self._ask(keeper.GET, key)
        return None if state == keeper.ABSENT else value

    def add(self, key: str, value: int) -> int:
        return self._ask(keeper.ADD, key, number=value)[2]

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        first = _bytes(expected_value)
        return self._ask(keeper.COMPARE, key, first + _bytes(desired_value), len(first))[1]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.look(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = _TIMEOUT if timeout is None else timeout
        until, pause = time.monotonic() + limit.total_seconds(), _SHORTEST_S
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"{', '.join(keys)} did not come within {limit}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def delete_key(self, key: str) -> bool:
        return self._ask(keeper.DELETE, key)[0] == keeper.DONE

    def num_keys(self) -> int:
        return self._ask(keeper.COUNT, "")[2]

    def _ask(
        self, kind: int, key: str, value: bytes = b"", number: int = 0
    ) -> tuple[int, bytes, int]:
        name = key.encode()
        if len(name) > keeper.KEY_BYTES or len(value) > keeper.VALUE_BYTES:
            raise RuntimeError(
                f"a key of {len(name)} and a value of {len(value)} bytes do not fit the store, "
                f"which takes {keeper.KEY_BYTES} and {keeper.VALUE_BYTES}"
            )
        with self._lock:
            state, told, counted = self._exchange(
                REQUEST.pack(kind, len(name), len(value), number) + name + value
            )
        if state == keeper.FULL:
            raise RuntimeError(f"the store is full: it keeps {keeper.TOTAL_BYTES} bytes")
        return state, told, counted

    def _exchange(self, request: bytes) -> tuple[int, bytes, int]:
        if self._gone is not None:
            raise self._gone
        if self._is_broken_off and self._connection is not None:
            # Something such as Ctrl-C came between a request and its answer. This connection would
            # now give that answer to the next request.
            self._connection.close()
            self._connection = _connected(*self._place, self._secret, self._patience_s)
        connection = self._connection
        assert connection is not None
        self._is_broken_off = True
        try:
            connection.sendall(request)
            state, length, number = ANSWER.unpack(_read(connection, ANSWER.size))
            told = _read(connection, length)
        except OSError as error:
            self._gone = StoreGone(f"the store at {_name(*self._place)} is gone: {error}")
            raise self._gone from None
        self._is_broken_off = False
        return state, told, number


class TcpStore:
    """The `Store` of a transport, on one of torch's stores or on ours. Both carry only bytes and
    numbers."""

    def __init__(self, engine: Store, prefix: str = "") -> None:
        """All keys begin with `prefix`, so that they belong to one run."""
        self._engine = engine
        self._prefix = prefix

    @staticmethod
    def connect(host: str, port: int, secret: bytes | None = None) -> TcpStore:
        """Connect to our own store, by default with the secret of the environment."""
        return TcpStore(OwnStore(host, port, own_secret() if secret is None else secret))

    def agree(self, key: str, value: str) -> str:
        # An absent key counts as empty, so a value carries a mark that makes it non-empty.
        return _text(key, self._engine.compare_set(self._prefix + key, "", f"={value}"))

    def add(self, key: str, amount: int) -> int:
        return self._engine.add(self._prefix + key, amount)

    def get(self, key: str) -> str | None:
        name = self._prefix + key
        if isinstance(self._engine, OwnStore):
            found = self._engine.look(name)
        else:
            found = self._engine.get(name) if self._engine.check([name]) else None
        return None if found is None else _text(key, found)


def serve(secret: bytes, host: str = "127.0.0.1", port: int = 0) -> tuple[Keeper, TcpStore]:
    """Keep a store in this process, at the given address only; return it and a connection to it."""
    kept = Keeper(secret, host, port)
    return kept, TcpStore.connect(host, kept.port, secret)


def _connected(host: str, port: int, secret: bytes, patience_s: float) -> socket.socket:
    """Return a connection on which both sides have proved that they know the secret."""
    until = time.monotonic() + patience_s
    left = _TRIES
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, until - time.monotonic()))
        except OSError as error:
            if isinstance(error, TimeoutError) or time.monotonic() > until:
                raise StoreGone(f"no store answers at {_name(host, port)}: {error}") from None
            time.sleep(_LONGEST_S)
            continue
        try:
            _prove(connection, host, port, secret)
        except TimeoutError:
            connection.close()
            raise NoGreeting(f"what listens at {_name(host, port)} says nothing") from None
        except OSError:
            connection.close()
            left -= 1  # the store may have closed it because it had too many callers
            if not left or time.monotonic() > until:
                raise Stranger(
                    f"the store at {_name(host, port)} does not accept the secret of this process; "
                    "it belongs to another run, or to hosts that have another secret"
                ) from None
            continue
        except BaseException:
            connection.close()
            raise
        return connection


def _prove(connection: socket.socket, host: str, port: int, secret: bytes) -> None:
    """Prove the secret, and check the proof of the store. Raise OSError if the store closes the
    connection."""
    greeting = _read(connection, len(GREETING))
    if greeting != GREETING:
        raise Stranger(f"something listens at {_name(host, port)} that is no store of Gossamer")
    theirs, mine = _read(connection, NONCE), secrets.token_bytes(NONCE)
    connection.sendall(mine + proof(secret, "client", theirs, mine))
    if not is_proof(_read(connection, PROOF), secret, "store", mine, theirs):
        raise Stranger(f"the store at {_name(host, port)} does not know the secret of this process")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A host that vanishes does not close the connection.
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_USER_TIMEOUT", _UNANSWERED_MS)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _read(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length) if length else b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("it has ended")
        data += more
    return data


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(key: str, value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise broken_value(key, repr(value), "text") from None
    if not text.startswith("="):
        raise broken_value(key, text, "a value of this run")
    return text[1:]


def _name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
