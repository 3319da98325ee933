"""How the processes of a torch run meet: at the store of their launcher, and then by Gloo.

The Gloo groups are not made by `init_process_group`, so that the program itself may use
torch.distributed.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from torch.distributed import (  # public by its documentation, though not by its annotations
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from gossamer.errors import ConfigurationError, Error, Late
from gossamer.real.transports.beginning import ALL, Beginning
from gossamer.real.transports.secret import NONCE, PROOF, is_proof, own_secret, proof
from gossamer.real.transports.slurm import slurm_address, slurm_name
from gossamer.real.transports.store import OwnStore, TcpStore
from gossamer.real.transports.transport import StopToken

FOR_EVER = timedelta(days=3650)
"""A wait that expires closes its pair for ever, so none may expire."""
_TIMEOUT = timedelta(seconds=300)
_PROOF_TAG = (1 << 31) - 2


@dataclass(frozen=True)
class Meeting:
    """The rank of this process, and the address where it meets the others."""

    rank: int
    size: int
    host: str
    port: int
    prefix: str = "gossamer"
    hosts_store: bool = False
    """Whether this is process 0 and has to keep the store, because no launcher does."""
    has_notices: bool = False
    """Whether our own launcher keeps the store, and writes deaths into it."""
    neighbours: int = 1
    """How many processes are on this host, including this one, as far as the launcher says."""
    secret: bytes | None = field(default=None, repr=False)
    """The secret that our own launcher's store and all workers demand; others have none."""
    beginning: Beginning = ALL
    """Who begins the run together, where others may come later."""

    @staticmethod
    def from_environment(variables: Mapping[str, str] | None = None) -> Meeting:
        found = os.environ if variables is None else variables
        if "GOSSAMER_STORE" in found:
            host, _, port = found["GOSSAMER_STORE"].rpartition(":")
            names = ("GOSSAMER_RANK", "GOSSAMER_SIZE")
            rank, size = (_number(found, name) for name in names)
            return Meeting(
                rank, size, host.strip("[]"), int(port), has_notices=True,
                neighbours=_number(found, "GOSSAMER_LOCAL_SIZE", "1"), secret=own_secret(found),
                beginning=Beginning.from_environment(found),
            )  # fmt: skip
        rank, size, port = (_number(found, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        # After a failure torchrun starts workers again, with the same store.
        prefix = f"gossamer/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        kept = found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = found.get("MASTER_ADDR", "127.0.0.1")
        if slurm_address(found) == f"{host}:{port}":
            # Two steps may get the same port, and only task 0 would notice.
            prefix = f"{prefix}/{slurm_name(found)}"
        return Meeting(
            rank, size, host, port, prefix, hosts_store=not kept and rank == 0,
            neighbours=_number(found, "LOCAL_WORLD_SIZE", "1"),
        )  # fmt: skip

    def connect(self) -> Store:
        """Return a new connection; a request that waits blocks all users of its connection."""
        if not self.hosts_store:
            return self.connect_again()
        try:
            # Multi-tenant, because the program's own init_process_group may keep a store here too.
            return TCPStore(
                self.host, self.port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
                multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            if "EADDRINUSE" in reason:
                reason = "another program listens there"
            raise ConfigurationError(
                f"worker 0 cannot keep the store at {self.host}:{self.port} where the workers are "
                f"to meet: {reason}; set MASTER_PORT to a free port of that host for all workers"
            ) from error

    def connect_again(self) -> Store:
        """Return another connection, as a client."""
        if self.secret is not None:
            return OwnStore(self.host, self.port, self.secret, _TIMEOUT.total_seconds())
        return TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT)

    def enter(self, engine: Store) -> TcpStore:
        """Return the store of this run. Refuse a store that a worker of another run has used."""
        store = self.store(engine)
        own, life = _name(os.getpid()), self.beginning.life
        if store.agree(f"came/{self.rank}{f'/{life}' if life else ''}", own) != own:
            raise ConfigurationError(
                f"another process has come to {self.host}:{self.port} as worker {self.rank} "
                "before; start each worker once, and give each run a MASTER_PORT of its own"
            )
        return store

    def store(self, engine: Store) -> TcpStore:
        return TcpStore(engine, f"{self.prefix}/")


def _make_group(meeting: Meeting, engine: Store, way: str, device: Any) -> ProcessGroupGloo:
    """Return a Gloo group. All processes call this, and wait here for each other."""
    engine_class: Any = ProcessGroupGloo
    options = engine_class._Options()
    options._devices = [device]
    options._timeout = FOR_EVER
    options._threads = 1
    store = PrefixStore(f"{meeting.prefix}/links/{way}", engine)
    group = ProcessGroupGloo(store, meeting.rank, meeting.size, options)
    if meeting.secret is not None:
        _prove(group, meeting.secret, way, meeting)
    return group


@dataclass(frozen=True)
class Lanes:
    """Two connections for each pair of processes, one for each direction.

    In Gloo a sender waits until the receiver says that it is ready. On a single connection that
    word would arrive behind everything that already goes the same way, so large messages in
    opposite directions would travel one after the other and not at once.
    """

    upwards: ProcessGroupGloo
    """The connections for messages to processes of higher rank."""
    downwards: ProcessGroupGloo
    ranks: Sequence[int]
    """The processes that are connected, in the order of their numbers in Gloo."""
    store: Store
    """Kept alive here, because the groups keep only the C++ side of a store alive."""

    def towards(self, rank: int, peer: int) -> ProcessGroupGloo:
        return self.upwards if rank < peer else self.downwards


def make_lanes(meeting: Meeting, engine: Store) -> Lanes:
    """Connect all that begin together. All of them call this, and wait here for each other."""
    absent = meeting.beginning.absent(meeting.rank, meeting.size)
    return _lanes(meeting, engine, [r for r in range(meeting.size) if r not in absent])


def lanes_of_two(meeting: Meeting, engine: Store, lives: Mapping[int, int]) -> Lanes:
    """Connect this process with another, by their ranks and lives; both call this. One of them has
    come during the run."""
    ranks = sorted(lives)
    pair = "-".join(f"{rank}.{lives[rank]}" for rank in ranks)
    return _lanes(replace(meeting, prefix=f"{meeting.prefix}/pair/{pair}"), engine, ranks)


def _lanes(meeting: Meeting, engine: Store, ranks: Sequence[int]) -> Lanes:
    device = _device(meeting.host, meeting.port)  # one Gloo thread serves both groups
    known = replace(meeting, rank=ranks.index(meeting.rank), size=len(ranks))
    up, down = (_make_group(known, engine, way, device) for way in ("up", "down"))
    return Lanes(up, down, tuple(ranks), engine)


class Unproved(RuntimeError):
    """Another program than a worker of this run has connected."""


def _prove(group: Any, secret: bytes, way: str, meeting: Meeting) -> None:
    """Prove the secret to every member on its connection, and check the members' proofs. Gloo
    itself only asks a caller for a number that can be guessed."""
    own = meeting.rank
    others = [peer for peer in range(meeting.size) if peer != own]
    mine = {peer: secrets.token_bytes(NONCE) for peer in others}
    theirs = _swap(group, mine, NONCE)
    proofs = {
        peer: proof(secret, f"{way} {own} {peer}", theirs[peer], mine[peer]) for peer in others
    }
    for peer, got in _swap(group, proofs, PROOF).items():
        if not is_proof(got, secret, f"{way} {peer} {own}", mine[peer], theirs[peer]):
            raise Unproved(
                f"who has come in the place of worker {peer} does not know the secret of this run; "
                "start it again, where strangers cannot reach the workers' ports"
            )


def _swap(group: Any, mine: Mapping[int, bytes], length: int) -> dict[int, bytes]:
    """Exchange so many bytes with each of the others."""
    rooms = {peer: torch.empty(length, dtype=torch.uint8) for peer in mine}
    sent = {at: torch.frombuffer(bytearray(data), dtype=torch.uint8) for at, data in mine.items()}
    works = [group.recv([room], peer, _PROOF_TAG) for peer, room in rooms.items()]
    works += [group.send([data], peer, _PROOF_TAG) for peer, data in sent.items()]
    for work in works:
        work.wait()
    return {peer: bytes(room.tolist()) for peer, room in rooms.items()}


def meet(meeting: Meeting, check: Callable[[], None]) -> Lanes:
    """Connect this process with all others, and return the connections.

    This calls `check` while it waits; `check` raises the error that makes waiting useless.
    """
    made: list[Lanes | BaseException] = []
    store = meeting.connect_again()

    def make() -> None:
        try:
            made.append(make_lanes(meeting, store))
        except BaseException as error:
            made.append(error)

    maker = threading.Thread(target=make, name="gossamer connects", daemon=True)
    maker.start()
    limit = time.monotonic() + _TIMEOUT.total_seconds()
    try:
        while maker.is_alive():
            check()
            if time.monotonic() > limit:
                raise Late(f"the workers were not connected within {_TIMEOUT}")
            maker.join(StopToken.patience)
    except BaseException:
        leave_store(store)
        maker.join(StopToken.patience)
        raise
    if isinstance(made[0], Unproved):
        raise Error(str(made[0]))
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def leave_store(store: Store) -> None:
    """End the waits at a store. Those at torch's own stores do not hinder the interpreter's end."""
    if isinstance(store, OwnStore):
        store.close()


@cache
def _name(process: int) -> str:
    """Return a name of this process, which not even a fork of it shares."""
    return uuid4().hex


def _device(host: str, port: int) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return ProcessGroupGloo.create_device(hostname=_own_address(host, port), lazy_init=False)


def _own_address(host: str, port: int) -> str:
    """Return the address from which this host reaches the store; others reach the host there."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # nothing is sent
        return str(towards.getsockname()[0])


def _number(found: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = found.get(name, default)
    if text is None or not text.isdigit():
        raise ConfigurationError(
            f"the torch transport needs {name} to be a number, got {text!r}; "
            "start the workers with `gossamer run` or torchrun"
        )
    return int(text)
