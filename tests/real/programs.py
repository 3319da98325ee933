"""Programs that run whole groups of processes for a test, and tell what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


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
