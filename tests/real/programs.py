"""Programs that run whole groups of processes for a test, and tell what became of them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore

from fork_server import Program
from gossamer.real.transports.secret import own_secret
from gossamer.real.transports.store_server import Keeper

if TYPE_CHECKING:
    import pytest


def run_program(program: Path | str, *arguments: str, limit_s: float = 110.0) -> str:
    """What it prints; it must end well, and nobody whom it started is left."""
    running = Program(
        [sys.executable, str(program), *arguments],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        # Unbuffered, Python drops what does not fit into the pipe at once.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    try:
        printed, _ = running.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert running.returncode == 0
    return printed


def answers_of(
    program: Path | str, *arguments: str, places: pytest.TempPathFactory, limit_s: float = 110.0
) -> Any:
    """What a program prints as JSON; it runs once, and processes of pytest-xdist share it."""
    base = places.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    name = sha256("\0".join([str(program), *arguments]).encode()).hexdigest()[:16]
    answer = base / f"{name}.json"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_text(run_program(program, *arguments, limit_s=limit_s))
    return json.loads(answer.read_text())


# ---------------------------------------------------------------------- in the programs


def tell_groups(run: Callable[..., object]) -> None:
    """The program itself: the groups that its argument lists, in a folder while they run."""
    torch.set_num_threads(1)
    # Forks that end in the ordinary way need not look through what was there before them.
    gc.freeze()
    place, program = Path(tempfile.mkdtemp()), os.getpid()
    try:
        print(json.dumps([run(*group, place) for group in json.loads(sys.argv[1])]))
    finally:
        # Forks come by here, too.
        if os.getpid() == program:
            shutil.rmtree(place)


def watch(
    pids: dict[int, int],
    limit_s: float,
    *,
    told: Callable[[int], None] = lambda rank: None,
    is_due: Callable[[], bool] = lambda: False,
) -> list[int]:
    """How forked workers end, by rank; what is left at the limit, or when it is due, is killed.

    Each end is told at once, as a launcher would. Only these processes are waited for: the program
    has others.
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
                told(rank)
        time.sleep(1e-3)
    return [ends[rank] for rank in sorted(ends)]


@contextlib.contextmanager
def store_apart(*, is_torchruns: bool = False) -> Iterator[int]:
    """The port of a store in a process of its own, for it has threads, and a fork of a process with
    threads may find their locks taken for ever."""
    reading, writing = os.pipe()
    program = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        if is_torchruns:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        else:
            store = Keeper(own_secret())
        os.write(writing, store.port.to_bytes(4, "little"))
        while True:
            signal.pause()
    try:
        yield int.from_bytes(os.read(reading, 4), "little")
    finally:
        # Forks that end in the ordinary way come by here, too.
        if os.getpid() == program:
            os.close(reading)
            os.close(writing)
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
