"""The store of small shared facts, kept by the launcher (or the engine), reached over TCP.

It lives outside of the workers where the engine allows it, so that any worker may die, rank 0 too.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_TIMEOUT = timedelta(seconds=60)


class TcpStore:
    """`Store` over torch's TCPStore, whose wire format carries bytes and numbers only."""

    def __init__(self, engine: TCPStore) -> None:
        self._engine = engine

    @staticmethod
    def connect(host: str, port: int) -> TcpStore:
        return TcpStore(TCPStore(host, port, is_master=False, timeout=_TIMEOUT))

    def agree(self, key: str, value: str) -> str:
        # An absent key counts as empty, so a value carries a mark that makes it non-empty.
        return self._engine.compare_set(key, "", f"={value}").decode()[1:]

    def add(self, key: str, amount: int) -> int:
        return self._engine.add(key, amount)

    def get(self, key: str) -> str | None:
        if not self._engine.check([key]):
            return None
        return self._engine.get(key).decode()[1:]


def serve(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """A store in this process, bound to the given address only: left alone it would take all."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    chosen = listening.getsockname()[1]
    # The descriptor belongs to the store from here on.
    return TCPStore(
        host, chosen, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
