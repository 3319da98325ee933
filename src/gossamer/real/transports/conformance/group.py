"""Groups of processes that run the laws of a transport. They are forks of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# These imports enter the laws into the table.
from gossamer.real.transports.conformance import death_laws, laws
from gossamer.real.transports.conformance.tools import SCENARIOS, Scenario, run_laws
from gossamer.real.transports.death_notices import tell_dead
from gossamer.real.transports.secret import VARIABLE, new_secret, own_secret
from gossamer.real.transports.shm import create_segments
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.store_server import Keeper
from gossamer.real.transports.transport import Transport

__all__ = ["SCENARIOS", "LawResult", "Scenario", "check_laws", "death_laws", "laws"]
__all__ += ["run_group", "store_apart", "watch"]

_LIMIT_S = 60.0


class _HasPort(Protocol):
    @property
    def port(self) -> int: ...


@dataclass(frozen=True)
class LawResult:
    """Whether a transport kept one law; if not, what the processes of its group wrote."""

    law: Scenario
    is_kept: bool
    written: str = ""


def check_laws(
    connect: Callable[[], Transport], names: Sequence[str], size: int = 3
) -> Generator[LawResult]:
    """One result for each law, as soon as it is known.

    Laws in which no process dies or stops share a group of `size` processes. After a broken law a
    new group goes on with the rest.
    """
    waiting = [name for name in names if not SCENARIOS[name].apart]
    while waiting:
        ends, written = run_group(connect, size, waiting)
        kept = 0
        while kept < len(waiting) and all(f"passed {waiting[kept]}\n" in text for text in written):
            yield LawResult(SCENARIOS[waiting[kept]], True)
            kept += 1
        if kept == len(waiting) and any(ends):
            # All laws were kept, but a process did not end well: the last law counts as broken.
            kept -= 1
        if kept < len(waiting):
            yield LawResult(SCENARIOS[waiting[kept]], False, "\n".join(written))
            kept += 1
        waiting = waiting[kept:]
    for law in (SCENARIOS[name] for name in names if SCENARIOS[name].apart):
        ends, written = run_group(connect, law.size, [law.name])
        is_kept = all(
            end == -signal.SIGKILL if rank in law.victims
            else end == 0 and f"passed {law.name}\n" in text
            for rank, (end, text) in enumerate(zip(ends, written, strict=True))
        )  # fmt: skip
        yield LawResult(law, is_kept, "" if is_kept else "\n".join(written))


def run_group(
    connect: Callable[[], Transport], size: int, names: Sequence[str], limit_s: float = _LIMIT_S
) -> tuple[list[int], list[str]]:
    """Run laws in a group; return how each process ended, and what it wrote. The processes get what
    our launcher gives to workers: a store, a secret, shared memory, and reports of deaths."""
    os.environ.setdefault(VARIABLE, new_secret())
    segments = create_segments(size)
    with tempfile.TemporaryDirectory() as place, store_apart() as port:
        logs = [Path(place) / f"{rank}.txt" for rank in range(size)]
        pids: dict[int, int] = {}
        for rank in range(size):
            variables = {
                "GOSSAMER_RANK": str(rank), "GOSSAMER_SIZE": str(size),
                "GOSSAMER_LOCAL_RANK": str(rank), "GOSSAMER_LOCAL_SIZE": str(size),
                "GOSSAMER_STORE": f"127.0.0.1:{port}",
                "GOSSAMER_SHM_FDS": ",".join(map(str, segments.fds)),
            }  # fmt: skip
            if (pid := os.fork()) == 0:
                _become_member(connect, variables, names, logs[rank])
            pids[pid] = rank
        store = TcpStore.connect("127.0.0.1", port)

        def told(rank: int, status: int) -> None:
            segments.mark_dead(rank)
            if status != 0:
                tell_dead(store, rank, f"ended with {status}")

        ends = watch(pids, limit_s, told=told)
        written = [log.read_text(encoding="utf-8") for log in logs]
    segments.close()
    return ends, written


def _become_member(
    connect: Callable[[], Transport], variables: Mapping[str, str], names: Sequence[str], log: Path
) -> None:
    """Run the laws in this process and end it."""
    code = 1
    try:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(variables)
        run_laws(connect(), names)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def watch(
    pids: dict[int, int],
    limit_s: float,
    *,
    told: Callable[[int, int], None] = lambda rank, status: None,
    is_due: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Return how forked workers ended, by rank. At the limit, or if `is_due`, kill the rest.

    This reports each end to `told` at once, as a launcher would. It waits only for these processes,
    because the program may have others.
    """
    ends: dict[int, int] = {}
    until = time.monotonic() + limit_s
    while len(ends) < len(pids):
        is_over = time.monotonic() > until or is_due()
        for pid, rank in pids.items():
            if rank in ends:
                continue
            if is_over:
                os.kill(pid, signal.SIGKILL)
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                ends[rank] = os.waitstatus_to_exitcode(status)
                told(rank, ends[rank])
        time.sleep(1e-3)
    return [ends[rank] for rank in sorted(ends)]


@contextlib.contextmanager
def store_apart(
    make: Callable[[], _HasPort] = lambda: Keeper(own_secret()),
) -> Generator[int]:
    """Yield the port of a store in a process of its own: the store has a thread, and a fork of a
    process with threads may find locks taken for ever."""
    reading, writing = os.pipe()
    program = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        store = make()
        os.write(writing, store.port.to_bytes(4, "little"))
        while True:
            signal.pause()
    try:
        yield int.from_bytes(os.read(reading, 4), "little")
    finally:
        # Forks of this process may come here too.
        if os.getpid() == program:
            os.close(reading)
            os.close(writing)
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
