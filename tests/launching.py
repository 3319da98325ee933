"""Workers for the launcher's tests: small scripts, and the certainty that none is left behind."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from fork_server import Program
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher

WAIT = "import time; time.sleep(600)"
READY = "open(f'{here}/ready-{rank}', 'w').close()\n"


def script(tmp_path: Path, text: str) -> list[str]:
    """A worker's command; `rank` and `here`, a folder, are known to its text."""
    path = tmp_path / "worker.py"
    known = (
        "import os, sys\n"
        "rank = int(os.environ['GOSSAMER_RANK'])\n"
        f"here = {str(tmp_path)!r}\n"
        "open(f'{here}/pid-{rank}', 'w').write(str(os.getpid()))\n"
    )
    path.write_text(known + text + "\n", encoding="utf-8")
    # Without site-packages, which no worker here needs, Python starts twice as fast.
    return [sys.executable, "-S", str(path)]


def launched(tmp_path: Path, text: str, workers: int = 2, **choices: Any) -> tuple[int, Launcher]:
    """Run it to its end, in this process; nobody may be left."""
    choices = {"transport": "torch", "grace_s": 1.0, **choices}
    launcher = Launcher(Launch(script(tmp_path, text), workers, **choices))
    status = launcher.run()
    assert pids(tmp_path) == []
    return status, launcher


def pids(tmp_path: Path) -> list[int]:
    """The workers that are still there; zombies are not."""
    found: list[int] = []
    for file in tmp_path.glob("pid-*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(pid)
    return found


def free_port() -> int:
    """Below those that the system gives to connections, so that none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as listening, contextlib.suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 100
    while not is_true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def command(*arguments: str) -> Generator[subprocess.Popen[str]]:
    """`gossamer run` as a process of its own, gone afterwards whatever happens."""
    process = Program(
        [sys.executable, "-m", "gossamer", "run", "--transport", "torch", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()
