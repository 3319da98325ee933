"""Where the processes of a torch run meet: the store of the launcher or of torchrun, and Gloo.

The group is made by hand and not through `init_process_group`, so that a program's own use of
torch.distributed is left alone.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from gossamer.real.transports.secret import NONCE, PROOF, is_proof, own_secret, proof
from gossamer.real.transports.slurm import slurm_address, slurm_name
from gossamer.real.transports.store import OwnStore, TcpStore
from gossamer.real.transports.transport import StopToken

FOR_EVER = timedelta(days=3650)
"""An expired wait would close a pair for good, so none may expire."""
_TIMEOUT = timedelta(seconds=300)
_PROOF_TAG = (1 << 31) - 2


@dataclass(frozen=True)
class Meeting:
    """Who this process is, and where the others are to be met."""

    rank: int
    size: int
    host: str
    port: int
    prefix: str = "gossamer"
    hosts_store: bool = False
    """No launcher keeps a store, so process 0 does."""
    has_notices: bool = False
    """Our own launcher keeps the store, and writes there who has died."""
    neighbours: int = 1
    """The processes on this host, with this one, as far as the launcher says."""
    secret: bytes | None = field(default=None, repr=False)
    """What our own launcher's store, and every worker, asks for; other launchers know none."""

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
            )  # fmt: skip
        rank, size, port = (_number(found, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        # torchrun starts workers again after a failure, with the same store.
        prefix = f"gossamer/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        kept = found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = found.get("MASTER_ADDR", "127.0.0.1")
        if slurm_address(found) == f"{host}:{port}":
            # The ports of two steps may coincide, and other tasks than 0 would not notice.
            prefix = f"{prefix}/{slurm_name(found)}"
        return Meeting(
            rank, size, host, port, prefix, hosts_store=not kept and rank == 0,
            neighbours=_number(found, "LOCAL_WORLD_SIZE", "1"),
        )  # fmt: skip

    def connect(self) -> Store:
        """A connection of its own: one that waits would keep other threads from using it."""
        if not self.hosts_store:
            return self.connect_again()
        try:
            # With several tenants: the program's own init_process_group may keep one here, too.
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
        """Another connection, as a client."""
        if self.secret is not None:
            return OwnStore(self.host, self.port, self.secret, _TIMEOUT.total_seconds())
        return TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT)

    def enter(self, engine: Store) -> TcpStore:
        """What this run keeps in the store; refused where another run's worker was before."""
        store = self.store(engine)
        own = _name(os.getpid())
        if store.agree(f"came/{self.rank}", own) != own:
            raise ConfigurationError(
                f"another process has come to {self.host}:{self.port} as worker {self.rank} "
                "before; start each worker once, and give each run a MASTER_PORT of its own"
            )
        return store

    def store(self, engine: Store) -> TcpStore:
        return TcpStore(engine, f"{self.prefix}/")


def _make_group(
    meeting: Meeting, engine: Store, name: str, members: tuple[int, ...], device: Any
) -> ProcessGroupGloo:
    """A Gloo group of these processes; all of them make it, and wait here for each other."""
    engine_class: Any = ProcessGroupGloo
    options = engine_class._Options()
    options._devices = [device]
    options._timeout = FOR_EVER
    options._threads = 1
    store = PrefixStore(f"{meeting.prefix}/{name}", engine)
    return ProcessGroupGloo(store, members.index(meeting.rank), len(members), options)


@dataclass(frozen=True)
class Lanes:
    """Two connections for each pair, one for what goes each way.

    Gloo lets a sender wait until it is told that the receiver is ready. On a connection that is
    full of what goes the other way, that word would arrive behind all of it, and large messages
    that cross would follow each other instead of passing.
    """

    upwards: ProcessGroupGloo
    """For what goes to processes of higher rank."""
    downwards: ProcessGroupGloo
    store: Store
    """The groups hold on to it, but not to what is Python's in it."""

    def towards(self, rank: int, peer: int) -> ProcessGroupGloo:
        return self.upwards if rank < peer else self.downwards


def make_lanes(meeting: Meeting, engine: Store, name: str, members: tuple[int, ...]) -> Lanes:
    """All members make them, and wait here for each other."""
    device = _device(meeting.host, meeting.port)  # one thread of Gloo's for both
    up, down = (
        _make_group(meeting, engine, f"{name}/{way}", members, device) for way in ("up", "down")
    )
    if meeting.secret is not None:
        for way, group in (("up", up), ("down", down)):
            _prove(group, meeting.secret, f"{name}/{way}", members, meeting.rank)
    return Lanes(up, down, engine)


class Unproved(RuntimeError):
    """Somebody else than the worker has come to one of its places."""


def _prove(group: Any, secret: bytes, name: str, members: tuple[int, ...], rank: int) -> None:
    """Everybody, on every connection, that it knows the secret: Gloo asks whoever connects to it
    for nothing but a number that can be guessed."""
    own = members.index(rank)
    others = [place for place in range(len(members)) if place != own]
    mine = {place: secrets.token_bytes(NONCE) for place in others}
    theirs = _swap(group, mine, NONCE)

    def who(place: int, towards: int) -> str:
        return f"{name} {members[place]} {members[towards]}"

    proofs = {at: proof(secret, who(own, at), theirs[at], mine[at]) for at in others}
    for place, got in _swap(group, proofs, PROOF).items():
        if not is_proof(got, secret, who(place, own), mine[place], theirs[place]):
            raise Unproved(
                f"who has come in the place of worker {members[place]} does not know the secret of "
                "this run; start it again, where strangers cannot reach the workers' ports"
            )


def _swap(group: Any, mine: Mapping[int, bytes], length: int) -> dict[int, bytes]:
    """As many bytes with each of them."""
    rooms = {place: torch.empty(length, dtype=torch.uint8) for place in mine}
    sent = {at: torch.frombuffer(bytearray(data), dtype=torch.uint8) for at, data in mine.items()}
    works = [group.recv([room], place, _PROOF_TAG) for place, room in rooms.items()]
    works += [group.send([data], place, _PROOF_TAG) for place, data in sent.items()]
    for work in works:
        work.wait()
    return {place: bytes(room.tolist()) for place, room in rooms.items()}


def meet(meeting: Meeting, engine: Store, check: Callable[[], None]) -> Lanes:
    """The connections of all processes, once all have come.

    `check` is called while others are waited for, and raises what makes that useless.
    """
    facts = meeting.store(engine)
    limit = time.monotonic() + _TIMEOUT.total_seconds()
    arrived = facts.add("arrived", 1)
    while arrived < meeting.size:
        check()
        if time.monotonic() > limit:
            raise Late(
                f"{arrived} of {meeting.size} workers came within {_TIMEOUT.total_seconds():.0f} s;"
                " see why the others did not start"
            )
        time.sleep(0.005)
        arrived = facts.add("arrived", 0)
    made: list[Lanes | BaseException] = []
    everybody = tuple(range(meeting.size))
    store = meeting.connect_again()

    def make() -> None:
        try:
            made.append(make_lanes(meeting, store, "links", everybody))
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
    """Wake who waits there. In torch's own nobody holds what the interpreter needs to end."""
    if isinstance(store, OwnStore):
        store.close()


@cache
def _name(process: int) -> str:
    """Of this process alone: not even a fork of it has the same one."""
    return uuid4().hex


def _device(host: str, port: int) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return ProcessGroupGloo.create_device(hostname=_own_address(host, port), lazy_init=False)


def _own_address(host: str, port: int) -> str:
    """The address from which this host reaches the store: others will reach it there, too."""
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
