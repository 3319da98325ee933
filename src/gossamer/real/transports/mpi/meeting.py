"""The store of an MPI job. Process 0 keeps it, and MPI tells the others its address."""

from __future__ import annotations

import secrets
import socket

import numpy as np

from gossamer.real.transports.mpi.engine import MPI
from gossamer.real.transports.secret import NONCE
from gossamer.real.transports.store import TcpStore, serve
from gossamer.real.transports.store_server import Keeper

_LOOPBACK = "127.0.0.1"
_NAME = 256


def meet(communicator: MPI.Intracomm, *, one_host: bool) -> tuple[Keeper | None, TcpStore]:
    """All processes call this. Process 0 keeps the store until the job ends; MPI tells the others
    its address and its secret."""
    names = np.zeros((communicator.size, _NAME), np.uint8)
    communicator.Allgather(_padded(MPI.Get_processor_name()), names)
    where = np.zeros(_NAME, np.uint8)
    secret = np.frombuffer(bytearray(secrets.token_bytes(NONCE)), np.uint8)
    communicator.Bcast(secret)
    if communicator.rank == 0:
        host = _LOOPBACK if one_host else _own_address([_text(name) for name in names])
        keeper, store = serve(secret.tobytes(), host)
        where[:] = _padded(f"{host}:{keeper.port}")
        communicator.Bcast(where)
        return keeper, store
    communicator.Bcast(where)
    host, _, port = _text(where).rpartition(":")
    return None, TcpStore.connect(host, int(port), secret.tobytes())


def address_towards(name: str) -> str | None:
    """Return the address under which a host of that name sees this one, or None if the name is
    unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # this sends nothing and only looks up the route
            return probe.getsockname()[0]
    except OSError:
        return None


def _own_address(names: list[str]) -> str:
    for name in names:
        towards = address_towards(name) if name != names[0] else None
        if towards is not None:
            return towards
    return socket.gethostbyname(names[0])


def _padded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_NAME].ljust(_NAME, b"\0"), np.uint8)


def _text(padded: np.ndarray) -> str:
    return padded.tobytes().rstrip(b"\0").decode()
