"""Programs that run whole groups of processes for a test, and tell what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gossamer.real.store import serve


def run_program(program: Path | str, *arguments: str, limit_s: float = 110.0) -> str:
    """What it prints; it must end well, and nobody whom it started is left."""
    running = subprocess.Popen(
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


@contextlib.contextmanager
def store_apart() -> Iterator[int]:
    """The port of a store in a process of its own, for it has threads, and a fork of a process with
    threads may find their locks taken for ever."""
    reading, writing = os.pipe()
    program = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        store = serve()
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
