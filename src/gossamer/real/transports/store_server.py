"""The server of the store: a thread that keeps small values for clients that prove the secret.

The server sends a random number to every caller, and the caller answers with a proof of the secret.
The server reads nothing but the bytes of a proof before that. A caller that does not prove the
secret in time is a stranger; the server counts it, and it has changed nothing. All sizes are
bounded, and nothing is unpickled.

    request   kind, lengths of key and value, a number; then the key and the value
    answer    outcome, length of the value, a number; then the value
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import threading
import time

from gossamer.real.transports.secret import NONCE, PROOF, is_proof, proof

GREETING = b"gossamer store 1\n"
REQUEST = struct.Struct("<BHIq")
ANSWER = struct.Struct("<BIq")
SET, GET, ADD, COMPARE, DELETE, COUNT = range(6)
DONE, ABSENT, FULL = range(3)
KEY_BYTES = 1 << 10
VALUE_BYTES = 16 << 20
TOTAL_BYTES = 256 << 20
"""The most bytes of all keys and values together; torch's store has no such bound."""
_PROVING_S = 10.0
_MOST_UNPROVED = 64
_CHUNK = 1 << 16
_LOOK_S = 1.0


class _Caller:
    """One connection."""

    def __init__(self, connection: socket.socket, nonce: bytes) -> None:
        self.connection = connection
        self.nonce = nonce
        self.is_proved = False
        self.since = time.monotonic()
        self.coming = bytearray()
        self.going = bytearray()
        self.is_slow = False
        """Whether the caller has not taken its answers yet. Until then nothing is read from it."""


class Keeper:
    """A store at one address of this host; `port` 0 means a free one."""

    def __init__(self, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(address)
            self._listening.listen(1024)
            self._listening.setblocking(False)
        except OSError:
            self._listening.close()
            raise
        self.host = host
        self.port = int(self._listening.getsockname()[1])
        self.secret = secret
        self.strangers = 0
        """How many connections were refused because they did not prove the secret."""
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._unproved: dict[_Caller, None] = {}
        """Callers that have not proved the secret yet, the oldest first."""
        self._calls = selectors.DefaultSelector()
        self._waker, wakened = socket.socketpair()
        self._calls.register(wakened, selectors.EVENT_READ, wakened)
        self._calls.register(self._listening, selectors.EVENT_READ, self._listening)
        self._thread = threading.Thread(
            target=self._keep, args=(wakened,), name="gossamer keeps", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the store; connected clients find it gone. A second call does nothing."""
        if self._thread.is_alive():
            self._waker.send(b"\0")
            self._thread.join()
        self._waker.close()

    @property
    def refusals(self) -> str | None:
        """A sentence about the strangers that were refused, if there were any."""
        if not self.strangers:
            return None
        if self.strangers == 1:
            return "1 connection of a stranger was refused"
        return f"{self.strangers} connections of strangers were refused"

    # ------------------------------------------------------------------ connections

    def _keep(self, wakened: socket.socket) -> None:
        try:
            self._listen(wakened)
        finally:
            # Whatever ends this thread, callers must not wait for answers any longer.
            self._end(wakened)

    def _listen(self, wakened: socket.socket) -> None:
        while True:
            for key, mask in self._calls.select(_LOOK_S):
                if key.data is wakened:
                    return
                if key.data is self._listening:
                    self._accept()
                elif key.data.connection.fileno() >= 0:  # else refused a moment ago
                    self._serve(key.data, mask)
            until = time.monotonic() - _PROVING_S
            for caller in [caller for caller in self._unproved if caller.since < until]:
                self._refuse(caller)

    def _end(self, wakened: socket.socket) -> None:
        self.strangers += len(self._unproved)
        for key in list(self._calls.get_map().values()):
            self._calls.unregister(key.fileobj)
            if isinstance(key.data, _Caller):
                key.data.connection.close()
        self._calls.close()
        self._listening.close()
        wakened.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            # This process has no free file descriptor, or the caller has gone.
            if self._unproved:
                self._refuse(next(iter(self._unproved)))
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(connection, secrets.token_bytes(NONCE))
        self._unproved[caller] = None
        self._calls.register(connection, selectors.EVENT_READ, caller)
        self._answer(caller, GREETING + caller.nonce)
        if len(self._unproved) > _MOST_UNPROVED:
            self._refuse(next(iter(self._unproved)))

    def _refuse(self, caller: _Caller) -> None:
        self.strangers += 1
        self._forget(caller)

    def _forget(self, caller: _Caller) -> None:
        self._unproved.pop(caller, None)
        self._calls.unregister(caller.connection)
        caller.connection.close()

    def _serve(self, caller: _Caller, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            if not self._flush(caller):
                return
        elif not self._read(caller):
            return
        if not caller.is_proved and not self._proves(caller):
            return
        while not caller.is_slow and self._take_request(caller):
            pass

    def _read(self, caller: _Caller) -> bool:
        """Read from a caller; return whether something came. From a caller that has proved nothing,
        read no more than the bytes of a proof."""
        most = _CHUNK if caller.is_proved else NONCE + PROOF - len(caller.coming)
        try:
            data = caller.connection.recv(most)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            caller.coming += data
            return True
        if caller.is_proved or not caller.coming:
            self._forget(caller)  # a client that has left, or a caller that has sent nothing
        else:
            self._refuse(caller)
        return False

    def _proves(self, caller: _Caller) -> bool:
        if len(caller.coming) < NONCE + PROOF:
            return False
        theirs, got = bytes(caller.coming[:NONCE]), bytes(caller.coming[NONCE:])
        if not is_proof(got, self.secret, "client", caller.nonce, theirs):
            self._refuse(caller)
            return False
        caller.coming.clear()
        caller.is_proved = True
        del self._unproved[caller]
        self._answer(caller, proof(self.secret, "store", theirs, caller.nonce))
        return True

    def _answer(self, caller: _Caller, data: bytes) -> bool:
        """Send an answer; return whether the caller is still connected."""
        caller.going += data
        return self._flush(caller)

    def _flush(self, caller: _Caller) -> bool:
        try:
            del caller.going[: caller.connection.send(caller.going)]
        except BlockingIOError:
            pass
        except OSError:
            self._forget(caller)
            return False
        if caller.is_slow != bool(caller.going):
            caller.is_slow = not caller.is_slow
            wanted = selectors.EVENT_WRITE if caller.is_slow else selectors.EVENT_READ
            self._calls.modify(caller.connection, wanted, caller)
        return True

    # ------------------------------------------------------------------ facts

    def _take_request(self, caller: _Caller) -> bool:
        """Handle one request; return whether a whole one was there and its caller still is."""
        coming = caller.coming
        if len(coming) < REQUEST.size:
            return False
        kind, width, length, number = REQUEST.unpack_from(coming)
        at = REQUEST.size + width
        try:
            if kind > COUNT or width > KEY_BYTES or length > VALUE_BYTES:
                raise ValueError
            if len(coming) < at + length:
                return False
            key, value = bytes(coming[REQUEST.size : at]), bytes(coming[at : at + length])
            del coming[: at + length]
            state, told, counted = self._do(kind, key, value, number)
            answer = ANSWER.pack(state, len(told), counted) + told
        except (ValueError, struct.error):
            self._forget(caller)  # after such a request the stream cannot be understood
            return False
        return self._answer(caller, answer)

    def _do(self, kind: int, key: bytes, value: bytes, number: int) -> tuple[int, bytes, int]:
        there = self._values.get(key)
        if kind == GET:
            return (ABSENT, b"", 0) if there is None else (DONE, there, 0)
        if kind == SET:
            return self._put(key, value), b"", 0
        if kind == ADD:
            total = int(there or b"0") + number
            return self._put(key, str(total).encode()), b"", total
        if kind == COMPARE:
            expected, desired = value[:number], value[number:]
            if there is None and expected:
                return DONE, expected, 0  # as torch's store answers
            if (there or b"") != expected:
                return DONE, there or b"", 0
            return self._put(key, desired), desired, 0
        if kind == DELETE:
            self._bytes -= 0 if there is None else len(key) + len(there)
            return (ABSENT if self._values.pop(key, None) is None else DONE), b"", 0
        return DONE, b"", len(self._values)

    def _put(self, key: bytes, value: bytes) -> int:
        there = self._values.get(key)
        more = len(key) + len(value) if there is None else len(value) - len(there)
        if self._bytes + more > TOTAL_BYTES:
            return FULL
        self._bytes += more
        self._values[key] = value
        return DONE
