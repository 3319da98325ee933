"""The launchers of several hosts: how they meet, and how they tell each other of deaths.

Node 0 keeps the store at the rendezvous address. Every launcher enters its name there and waits for
the others. From then on each launcher adds to a counter of its own every second, so that node 0
also notices a host that vanishes with its launcher.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import ConfigurationError, Error, Late
from gossamer.real.launch.console import say
from gossamer.real.transports.checked_values import number_from, numbers_from
from gossamer.real.transports.death_notices import tell_dead
from gossamer.real.transports.secret import new_secret, secret_of_hosts
from gossamer.real.transports.store import NoGreeting, OwnStore, Stranger, TcpStore, serve
from gossamer.real.transports.store_server import Keeper

BEAT_S = 1.0
SILENCE_S = 15.0
RETRY_S = 0.1
_TRY_S = 1.0


@dataclass(frozen=True)
class Hosts:
    """How many hosts take part, and which one this is."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    patience_s: float = 60.0
    """How long to wait for the others at the start."""
    secret_file: Path | None = None
    """The file with the secret of all hosts; otherwise the secret is in the environment."""

    @staticmethod
    def parse(
        count: int, rank: int, rendezvous: str | None, patience_s: float,
        secret_file: Path | None = None,
    ) -> Hosts:  # fmt: skip
        """Read the options of a command line."""
        if count < 1:
            raise ConfigurationError(f"--nnodes must be at least 1, got {count}")
        if not 0 <= rank < count:
            raise ConfigurationError(
                f"--node-rank must lie between 0 and {count - 1} for --nnodes {count}, got {rank}"
            )
        if not 0 < patience_s < float("inf"):
            raise ConfigurationError(f"--patience must be above 0 seconds, got {patience_s:g}")
        if rendezvous is None:
            if count == 1:
                return Hosts()
            raise ConfigurationError(
                f"--nnodes {count} needs --rendezvous HOST:PORT, an address of node 0 that all "
                "hosts reach"
            )
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(
                f"--rendezvous must be HOST:PORT such as 10.0.0.1:29400, got {rendezvous!r}"
            )
        return Hosts(count, rank, host.strip("[]"), int(port), patience_s, secret_file)


class HostMeeting:
    """This launcher's connection to those of the other hosts."""

    def __init__(self, hosts: Hosts, workers: int, is_elastic: bool = False) -> None:
        """`workers` is the number of workers on each host. To an elastic run others may attach, if
        they know its secret."""
        self._hosts = hosts
        self._workers = workers
        self._last_beat = 0.0
        self._heard: dict[int, tuple[int, float]] = {}
        self._gone: dict[int, str] = {}
        is_shared = hosts.count > 1 or (is_elastic and bool(hosts.port))
        self.secret = secret_of_hosts(hosts.secret_file) if is_shared else new_secret()
        self._keeper: Keeper | None = None
        if hosts.rank == 0:
            self._keeper, self.store = _open(hosts, self.secret)
        else:
            self.store = reach(hosts, self.secret)
        self._attached = AttachedHosts(self.store)
        port = hosts.port if self._keeper is None else self._keeper.port
        self.address = f"{hosts.host}:{port}"

    def close(self) -> str | None:
        """Close the store if it is here; return a sentence about the strangers that it refused."""
        if self._keeper is None:
            return None
        self._keeper.close()
        return self._keeper.refusals

    def wait_for_all(self) -> None:
        """Enter the name of this launcher, and wait for all others; an error names the missing."""
        hosts = self._hosts
        shape = f"-n {self._workers} --nnodes {hosts.count}"
        first = self.store.agree("launchers/shape", shape)
        if first != shape:
            raise ConfigurationError(
                f"all nodes must have the same shape, got {shape!r} here and {first!r} elsewhere"
            )
        name = f"{socket.gethostname()}, process {os.getpid()}"
        # Containers may have the same name and process number each.
        own = f"{name};{secrets.token_hex(8)}"
        there = self.store.agree(f"launchers/{hosts.rank}", own)
        if there != own:
            raise ConfigurationError(
                f"--node-rank {hosts.rank} is taken by {there.partition(';')[0]}; give every node "
                "its own"
            )
        try:
            self._wait(shape)
        except BaseException:
            # A launcher that comes later must not start with one that has given up.
            with suppress(RuntimeError):
                self.end_everywhere(1, f"node {hosts.rank} waits no longer")
            raise

    def _wait(self, shape: str) -> None:
        hosts = self._hosts

        def missing() -> list[int]:
            try:
                if (said := self.store.get("launchers/end")) is not None:
                    raise Error(f"the hosts did not come together: {said.partition(' ')[2]}")
                return [n for n in range(hosts.count) if self.store.get(f"launchers/{n}") is None]
            except RuntimeError:
                raise self._lost_store() from None

        if not within(hosts.patience_s, lambda: not missing()):
            host = f"[{hosts.host}]" if ":" in hosts.host else hosts.host
            address = f"{host}:{self.address.rpartition(':')[2]}"
            raise Late(
                f"{_nodes(missing())} of {hosts.count} did not come to {address} within "
                f"{hosts.patience_s:g} s; start `gossamer run {shape} --node-rank "
                f"{missing()[0]} --rendezvous {address} ...` there"
            )

    def tell_dead(self, rank: int, how: str, life: int = 0) -> None:
        tell_dead(self.store, rank, how, life)

    def next_life(self, rank: int) -> int:
        """The number of the life that begins now for a rank of an elastic run."""
        return self.store.add(f"life/{rank}", 1)

    def tell_job(
        self, size: int, taken: Sequence[int], present: Sequence[int], told: Mapping[str, str]
    ) -> None:  # fmt: skip
        """Say how many places this run has, which are taken, and what its workers are told."""
        for rank in taken:
            self.store.agree(f"place/{rank}/0", "taken")
        self.store.agree("job", json.dumps({"size": size, "present": list(present), "told": told}))

    def has_others(self) -> bool:
        """Whether workers of other hosts have attached and not left."""
        return bool(self._attached.ranks)

    def end_everywhere(self, status: int, why: str) -> None:
        """The launchers of the other hosts end their workers as well."""
        self.store.agree("launchers/end", f"{status} {why}")

    def beat(self) -> tuple[int, str] | None:
        """Give a sign of life once a second; return an end that another host asks for."""
        if time.monotonic() - self._last_beat < BEAT_S:
            return None
        self._last_beat = time.monotonic()
        if self._hosts.count == 1:
            self._attached.look()
            return None
        try:
            self.store.add(f"launchers/beat/{self._hosts.rank}", 1)
            if self._hosts.rank == 0:
                self._listen()
            said = self.store.get("launchers/end")
        except RuntimeError:
            raise self._lost_store() from None
        if said is None:
            return None
        status, _, why = said.partition(" ")
        return number_from("launchers/end", status), why

    def _lost_store(self) -> Error:
        return Error(f"node 0 is gone, and with it the store at {self.address}")

    def leave(self, status: int, is_interrupted: Callable[[], bool]) -> list[str]:
        """This host is done. Node 0 keeps the store as long as another host needs it.

        Node 0 gets sentences about what went wrong on other hosts.
        """
        try:
            self.store.agree(f"launchers/left/{self._hosts.rank}", str(status))
        except RuntimeError:
            return []
        if self._hosts.rank > 0:
            return []
        self._attached.look()
        while self._attached.ranks and not is_interrupted():
            self._attached.look()
            time.sleep(RETRY_S)
        while len(self._gone) < self._hosts.count - 1 and not is_interrupted():
            self.beat()
            self._listen()
            time.sleep(RETRY_S)
        return [f"node {node} {how}" for node, how in sorted(self._gone.items()) if how]

    def _listen(self) -> None:
        """Note which hosts have left, and which give no sign of life."""
        now = time.monotonic()
        for node in range(1, self._hosts.count):
            if node in self._gone:
                continue
            left = self.store.get(f"launchers/left/{node}")
            if left is not None:
                self._gone[node] = "" if left == "0" else f"ended with exit code {left}"
                continue
            beats = self.store.add(f"launchers/beat/{node}", 0)
            counted, since = self._heard.get(node, (-1, now))
            if beats != counted:
                self._heard[node] = (beats, now)
            elif now - since > SILENCE_S:
                self._gone[node] = f"gave no sign of life for {SILENCE_S:g} s"
                for rank in range(node * self._workers, (node + 1) * self._workers):
                    self.tell_dead(rank, "its host is gone")


class AttachedHosts:
    """The launchers that have added workers to an elastic run, as the one that began it sees them.

    Each writes `attached/NUMBER` with its ranks, beats as the launchers of several hosts do, and
    writes `attached/NUMBER/left` in the end.
    """

    def __init__(self, store: TcpStore) -> None:
        self._store = store
        self._next = 0
        self._here: dict[int, list[int]] = {}
        """By number: the ranks of those that have not left."""
        self._heard: dict[int, tuple[int, float]] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for ranks in self._here.values() for rank in ranks)

    def look(self) -> None:
        """Note who has come and left, and whose host has vanished."""
        try:
            while (line := self._store.get(key := f"attached/{self._next}")) is not None:
                self._here[self._next] = numbers_from(key, line.partition(";")[0], ",")
                self._next += 1
                say(f"workers {line.partition(';')[0]} have been attached")
            for number in list(self._here):
                self._look_at(number)
        except RuntimeError:
            self._here.clear()

    def _look_at(self, number: int) -> None:
        if self._store.get(f"attached/{number}/left") is not None:
            say(f"workers {','.join(map(str, self._here.pop(number)))} are attached no more")
            return
        beats, now = self._store.add(f"attached/{number}/beat", 0), time.monotonic()
        counted, since = self._heard.get(number, (-1, now))
        if beats != counted:
            self._heard[number] = (beats, now)
        elif now - since > SILENCE_S:
            for rank in self._here.pop(number):
                life = self._store.add(f"life/{rank}", 0)
                tell_dead(self._store, rank, "its host is gone", life)
                self._store.add(f"place/{rank}/freed", 1)
            say(f"an attached host gave no sign of life for {SILENCE_S:g} s")


def _open(hosts: Hosts, secret: str) -> tuple[Keeper, TcpStore]:
    try:
        return serve(secret.encode(), hosts.host, hosts.port)
    except OSError as error:
        raise ConfigurationError(
            f"node 0 cannot listen on {hosts.host}:{hosts.port} ({error.strerror or error}); give "
            "--rendezvous an address of this host and a free port"
        ) from None


def reach(hosts: Hosts, secret: str) -> TcpStore:
    found: list[TcpStore] = []
    silent: list[NoGreeting] = []

    def answers() -> bool:
        patience_s = min(_TRY_S, hosts.patience_s)
        try:
            found.append(TcpStore(OwnStore(hosts.host, hosts.port, secret.encode(), patience_s)))
        except NoGreeting as error:
            silent.append(error)
        except RuntimeError:
            silent.clear()
        return bool(found)

    try:
        is_there = within(hosts.patience_s, answers)
    except Stranger as error:
        raise ConfigurationError(
            f"{error}; give --rendezvous the address that node 0 was given, and all hosts the same "
            "secret, by --secret-file or GOSSAMER_SECRET"
        ) from None
    if is_there:
        return found[0]
    if silent:
        raise ConfigurationError(
            f"something listens at {hosts.host}:{hosts.port} that is not node 0 of such a run; "
            "give --rendezvous the address that node 0 was given"
        )
    raise Late(
        f"node 0 did not open {hosts.host}:{hosts.port} within {hosts.patience_s:g} s; start "
        "it there with --node-rank 0, and see that the address can be reached from here"
    )


def within(patience_s: float, is_done: Callable[[], bool]) -> bool:
    until = time.monotonic() + patience_s
    while not is_done():
        if time.monotonic() > until:
            return False
        time.sleep(RETRY_S)
    return True


def _nodes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    return f"nodes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
