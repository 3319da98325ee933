"""What links carry, by plain sockets and nothing else.

    reality_link.py serve PORT, on another host measure HOST PORT
        bytes per second of one long transfer, and half the time of a round trip
    reality_link.py exchange RANK PORT BYTES PAUSE HOST HOST ..., on all of them
        seconds in which every host sends so many bytes to every other, twice, after a pause: what
        an all-reduce of a vector in as many parts as there are hosts moves

Both print JSON.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

LENGTH = 24 << 20
ROUND_TRIPS = 200
EXCHANGES = 15
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


def exchange(
    rank: int, port: int, length: int, pause: float, hosts: Sequence[str]
) -> dict[str, float]:
    others = _all_connected(rank, port, hosts)
    times: list[float] = []
    for _ in range(EXCHANGES):
        time.sleep(pause)
        _to_all(others, 1)  # all are there
        began = time.monotonic()
        _to_all(others, length)
        _to_all(others, length)
        times.append(time.monotonic() - began)
    return {"seconds": statistics.median(times)}


def _all_connected(rank: int, port: int, hosts: Sequence[str]) -> list[socket.socket]:
    """A connection with each other host; in no order that anybody needs."""
    with socket.create_server(("", port)) as listening:
        found = [_reach(host, port) for host in hosts[:rank]]
        found += [listening.accept()[0] for _ in hosts[rank + 1 :]]
    for connection in found:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _to_all(others: Sequence[socket.socket], length: int) -> None:
    """Both ways at once, with all of them at once."""
    content = bytes(length)
    threads = [threading.Thread(target=_receive, args=(one, length)) for one in others]
    threads += [threading.Thread(target=one.sendall, args=(content,)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
    what, *given = sys.argv[1:]
    if what == "serve":
        serve(int(given[0]))
    elif what == "measure":
        print(json.dumps(measure(given[0], int(given[1]))))
    else:
        own_rank, own_port, share, seconds, *names = given
        found = exchange(int(own_rank), int(own_port), int(share), float(seconds), names)
        print(json.dumps(found))
