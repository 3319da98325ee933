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
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fork_server import Program

if TYPE_CHECKING:
    import pytest

PROGRAMS = Path(__file__).parent
"""Where the programs are that tests start."""
LIMIT_S = 500.0
"""How long a program may take. Only a hang takes that long, also on a machine that is busy."""
GROUP_LIMIT_S = 200.0
"""How long one group of its workers may take."""


def run_program(program: Path | str, *arguments: str, limit_s: float = LIMIT_S) -> str:
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


def answers_of(program: Path | str, *arguments: str, places: pytest.TempPathFactory) -> Any:
    """What a program prints as JSON; it runs once, and processes of pytest-xdist share it."""
    base = places.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    name = sha256("\0".join([str(program), *arguments]).encode()).hexdigest()[:16]
    answer = base / f"{name}.json"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_text(run_program(program, *arguments))
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
