"""What a link carries, by plain sockets: `reality_link.py serve PORT` and `measure HOST PORT`.

`measure` prints JSON: bytes per second of one long transfer, and half the time of a round trip.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

LENGTH = 24 << 20
ROUND_TRIPS = 200
_CHUNK = 1 << 20


def _receive(connection: socket.socket, length: int) -> None:
    while length > 0:
        length -= len(connection.recv(min(length, _CHUNK)))


def serve(port: int) -> None:
    with socket.create_server(("", port)) as listening:
        connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            _receive(connection, 1)
            connection.sendall(b".")
        for _ in range(2):
            _receive(connection, LENGTH)
            connection.sendall(b".")


def measure(host: str, port: int) -> dict[str, float]:
    with _reach(host, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = [_timed(connection, b".") for _ in range(ROUND_TRIPS)]
        content = bytes(LENGTH)
        _timed(connection, content)  # the window of a new connection grows first
        seconds = _timed(connection, content)
    return {"bandwidth": LENGTH / seconds, "latency": statistics.median(trips) / 2}


def _timed(connection: socket.socket, content: bytes) -> float:
    began = time.monotonic()
    connection.sendall(content)
    _receive(connection, 1)
    return time.monotonic() - began


def _reach(host: str, port: int) -> socket.socket:
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port), timeout=60)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
