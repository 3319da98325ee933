"""Several hosts on one machine: Linux network namespaces behind a bridge, on links of limited rate.

Each host has its own interfaces, addresses, loopback and host name, and finds the others by name,
so a program meets what it would meet on separate machines. The bridge stands in a namespace of its
own: nothing is added to the machine's own network, and deleting the namespaces removes everything.
Needs root, `ip`, `tc` and `unshare`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_BURST = "72kb"
"""A packet of the sender's segmentation must fit, with a header for each part: else the shaper cuts
it up, and one core of the machine does nothing else."""
_QUEUE = "4mb"  # what a crowded link holds back before it drops
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_GRACE_S = 3.0


def why_not() -> str | None:
    """The reason why no hosts can be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found"
    name = f"gossamer-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@dataclass
class Hosts:
    """The hosts while they exist; `names[i]` has the address `addresses[i]`."""

    prefix: str
    names: list[str]
    addresses: list[str]
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def within(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on that host."""
        return [
            "ip", "netns", "exec", f"{self.prefix}-{host}", "unshare", "--uts", "--mount",
            "sh", "-c", _ENTER, self.names[host], str(self.folder / "hosts"), *command,
        ]  # fmt: skip

    def start(
        self, host: int, command: Sequence[str], *, environment: Mapping[str, str] | None = None,
        output: int | IO[Any] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """A process on that host; whatever is left of it ends with the hosts."""
        process = subprocess.Popen(
            self.within(host, command), stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.started.append(process)
        return process

    def rate(self, mbit: float) -> None:
        """Limit every link to so many Mbit/s each way."""
        for host in range(len(self.names)):
            limit = f"rate {mbit:g}mbit burst {_BURST} limit {_QUEUE}".split()
            places = ((f"{self.prefix}-{host}", "eth0"), (f"{self.prefix}-switch", f"port{host}"))
            for namespace, device in places:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
                     *limit)  # fmt: skip

    @contextmanager
    def unplugged(self, host: int) -> Iterator[None]:
        """That host's cable is pulled; no connection is told."""
        port = ("-n", f"{self.prefix}-switch", "link", "set", f"port{host}")
        _ip(*port, "down")
        try:
            yield
        finally:
            _ip(*port, "up")

    @contextmanager
    def divided(self, second: Sequence[int], mbit: float, *, shared: bool) -> Iterator[None]:
        """These hosts stand elsewhere: what crosses has so many Mbit/s each way, all flows together
        or each pair of hosts for itself."""
        switch = ("-n", f"{self.prefix}-switch")
        _ip(*switch, "link", "add", "switch1", "type", "bridge")
        _ip(*switch, "link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1")
        try:
            _ip(*switch, "link", "set", "switch1", "up")
            for end in (0, 1):
                _ip(*switch, "link", "set", f"trunk{end}", "master", f"switch{end}", "up")
                self._limit_trunk(f"trunk{end}", mbit, shared=shared)
            for host in second:
                _ip(*switch, "link", "set", f"port{host}", "master", "switch1")
            yield
        finally:
            for host in second:
                _ip(*switch, "link", "set", f"port{host}", "master", "switch0")
            _ip(*switch, "link", "delete", "trunk0")
            _ip(*switch, "link", "delete", "switch1")

    def _limit_trunk(self, device: str, mbit: float, *, shared: bool) -> None:
        add = ("tc", "-n", f"{self.prefix}-switch")
        if shared:
            limit = f"rate {mbit:g}mbit burst {_BURST} limit {_QUEUE}".split()
            _run(*add, "qdisc", "add", "dev", device, "root", "tbf", *limit)
            return
        _run(*add, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb")
        pairs = [(a, b) for a in self.addresses for b in self.addresses if a != b]
        for number, (source, target) in enumerate(pairs, 1):
            _run(*add, "class", "add", "dev", device, "parent", "1:", "classid", f"1:{number:x}",
                 "htb", "rate", f"{mbit:g}mbit", "burst", _BURST, "cburst", _BURST)  # fmt: skip
            _run(*add, "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "u32",
                 "match", "ip", "src", source, "match", "ip", "dst", target, "flowid",
                 f"1:{number:x}")  # fmt: skip

    def pids(self, host: int) -> list[int]:
        """Everything that runs on that host."""
        listed = _ip("netns", "pids", f"{self.prefix}-{host}")
        return [int(pid) for pid in listed.split()]

    def stop(self) -> None:
        """End what was started, and then whatever else runs on these hosts."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.started:
                if process.poll() is None:
                    process.send_signal(number)
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and any(p.poll() is None for p in self.started):
                time.sleep(0.02)
        while remaining := [pid for host in range(len(self.names)) for pid in self.pids(host)]:
            for pid in remaining:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # ended by itself meanwhile
            time.sleep(0.02)
        for process in self.started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def hosts(count: int, mbit: float) -> Iterator[Hosts]:
    """Make them, and remove them again whatever happens."""
    prefix = f"gossamer-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="gossamer-hosts-"))
    made = Hosts(
        prefix,
        [f"node{host}" for host in range(count)],
        [f"10.97.0.{host + 1}" for host in range(count)],
        folder,
    )
    lines = [f"{address} {name}" for address, name in zip(made.addresses, made.names, strict=True)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    # What ends a program without a word would leave the namespaces behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    namespaces = [f"{prefix}-switch", *(f"{prefix}-{host}" for host in range(count))]
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
        _join(made)
        made.rate(mbit)
        yield made
    finally:
        existing = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        if existing.issuperset(namespaces):
            made.stop()
        for namespace in namespaces:
            if namespace in existing:
                _ip("netns", "delete", namespace)
        shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)


def _join(made: Hosts) -> None:
    """A cable from every host to a port of the bridge."""
    switch = f"{made.prefix}-switch"
    _ip("-n", switch, "link", "add", "switch0", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch0", "up")
    for host, address in enumerate(made.addresses):
        namespace, port = f"{made.prefix}-{host}", f"port{host}"
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
            "netns", namespace)  # fmt: skip
        _ip("-n", switch, "link", "set", port, "master", "switch0", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        # Linux's own default, whatever this machine has chosen for itself.
        _ip("-n", namespace, "route", "replace", "10.97.0.0/24", "dev", "eth0", "src", address,
            "congctl", "cubic")  # fmt: skip


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
