"""One worker's process as its launcher sees it: started, signalled, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gossamer.real.launch.terminal import Terminal

_LEASH = str(Path(__file__).with_name("die_with_launcher.py"))


@dataclass(frozen=True)
class Ended:
    """How a worker's process ended."""

    rank: int
    status: int
    """Its exit code; a signal's number with a minus where one killed it."""
    after_s: float
    """Since the launcher began, as the times of faults count."""
    is_planned: bool = False
    """Killed because `--kill` asked for it."""

    @property
    def how(self) -> str:
        if self.status < 0:
            return f"was killed by {signal_name(-self.status)}"
        return f"ended with exit code {self.status}"

    def __str__(self) -> str:
        return f"worker {self.rank} {self.how} after {self.after_s:.1f} s"


def signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class Process:
    """A worker's command in a process group of its own: the terminal's Ctrl-C does not reach it.

    All are of one session: Linux shares processors out between sessions (autogroups), and a worker
    that waits can give way (`sched_yield`) to another of its own session only.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str],
        fds: Sequence[int], began: float, terminal: Terminal | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.is_planned = False
        self.ended: Ended | None = None
        self._began = began
        outer, inner = (None, None) if terminal is None else terminal.open()
        is_input, is_output = (
            (False, False) if terminal is None else (terminal.is_input, terminal.is_output)
        )
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _LEASH, str(os.getpid()), *command],
            env=dict(environment), stdin=inner if is_input else subprocess.DEVNULL,
            stdout=inner if is_output else subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0, process_group=0, pass_fds=tuple(fds),
        )  # fmt: skip
        self._terminal = None if outer is None else os.fdopen(outer, "rb", buffering=0)
        if inner is not None:
            os.close(inner)
        out = self._terminal if is_output else self._popen.stdout
        assert out is not None
        assert self._popen.stderr is not None
        self.out, self.err = out, self._popen.stderr

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> Ended | None:
        """How it ended, if it has."""
        if self.ended is None and (status := self._popen.poll()) is not None:
            after = time.monotonic() - self._began
            self.ended = Ended(self.rank, status, after, self.is_planned and status < 0)
        return self.ended

    def signal(self, number: int) -> None:
        """To the worker and to everything it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tell(self, number: int) -> bool:
        """To the worker alone, if it would not die of it; whether it was sent."""
        if self.poll() is not None or not self._catches(number):
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    @property
    def has_left_others(self) -> bool:
        """Whether something that an ended worker has started is still there."""
        if self.ended is None:
            return False
        try:
            os.killpg(self.pid, 0)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.out.close()
        self.err.close()
        if self._terminal is not None:
            self._terminal.close()

    def _catches(self, number: int) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return False
        for line in status.splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False
