"""The processes of the workers as their launcher sees them: how they start, and how they end.

`Process` is one worker, `Shutdown` ends all of them, and `exit_code` says what their ends mean for
the run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OVER_DEADLINE = 3
_DIE_WITH_LAUNCHER = str(Path(__file__).with_name("die_with_launcher.py"))
_STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_TICK_S = 0.02
_LEFTOVERS_S = 1.0


@dataclass(frozen=True)
class Ended:
    """How a worker's process ended."""

    rank: int
    status: int
    """The exit code, or minus the number of the signal that killed the process."""
    after_s: float
    """Seconds since the launcher began, from where the times of faults count too."""
    is_planned: bool = False
    """Whether `--kill` asked for this death."""

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


@dataclass(frozen=True)
class Terminal:
    """Which of a worker's streams are terminals, and how large these are.

    Workers write into pipes and read nothing. But scripts ask for the size of the terminal, by
    `os.get_terminal_size()` or `stty size`, and fail where there is none.
    """

    is_input: bool
    is_output: bool
    lines: int
    columns: int

    @staticmethod
    def own() -> Terminal | None:
        """The terminal of this process, if it has one."""
        is_input, is_output = os.isatty(0), os.isatty(1)
        size = shutil.get_terminal_size()
        if not is_input and not is_output:
            return None
        return Terminal(is_input, is_output, size.lines, size.columns)

    def open(self) -> tuple[int, int]:
        """Return the launcher's side and the worker's side of a new terminal. Output passes through
        unchanged, and a reader finds the end of the file at once, as in /dev/null."""
        outer, inner = os.openpty()
        modes = termios.tcgetattr(inner)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        modes[6][termios.VMIN] = modes[6][termios.VTIME] = 0
        termios.tcsetattr(inner, termios.TCSANOW, modes)
        termios.tcsetwinsize(inner, (self.lines, self.columns))
        return outer, inner


class Process:
    """A worker's command in a process group of its own, so that the terminal's Ctrl-C does not
    reach it.

    All workers belong to one session. Linux divides processors among sessions (autogroups), and a
    worker that waits can yield (`sched_yield`) only to a worker of its own session.
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
            [sys.executable, "-I", "-S", _DIE_WITH_LAUNCHER, str(os.getpid()), *command],
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
        """Return how the worker ended, if it has."""
        if self.ended is None and (status := self._popen.poll()) is not None:
            after = time.monotonic() - self._began
            self.ended = Ended(self.rank, status, after, self.is_planned and status < 0)
        return self.ended

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to everything that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tell(self, number: int) -> bool:
        """Send a signal to the worker alone, unless it would die of it; return whether it did."""
        if self.poll() is not None or not self._catches(number):
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    @property
    def has_left_others(self) -> bool:
        """Whether a process that an ended worker had started still runs."""
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


class Shutdown:
    """Ends all workers: SIGINT lets scripts clean up, later come SIGTERM and SIGKILL."""

    def __init__(self, processes: Sequence[Process], grace_s: float) -> None:
        self._processes = processes
        self._grace_s = grace_s
        self._taken = 0
        self._next_at = 0.0
        self.status: int | None = None
        """The exit code with which the run ends; None while it goes on."""

    def begin(self, status: int) -> None:
        if self.status is None:
            self.status = status

    def hurry(self) -> None:
        """Take the next step at once."""
        self._next_at = 0.0

    def advance(self) -> None:
        """Take the next step if it is due."""
        if self.status is None or time.monotonic() < self._next_at:
            return
        number = _STEPS[min(self._taken, len(_STEPS) - 1)]
        self._taken += 1
        self._next_at = time.monotonic() + self._grace_s
        for process in self._processes:
            if process.poll() is None:
                process.signal(number)
                # A paused process obeys only once it continues.
                process.signal(signal.SIGCONT)

    def finish(self) -> None:
        """End all workers that still run, and return when none does."""
        self.begin(1)
        while any(process.poll() is None for process in self._processes):
            self.advance()
            time.sleep(_TICK_S)
        self.kill_leftovers()

    def kill_leftovers(self) -> None:
        """Kill what ended workers had started, and wait a moment until it is gone."""
        until = time.monotonic() + _LEFTOVERS_S
        while time.monotonic() < until:
            left = [process for process in self._processes if process.has_left_others]
            for process in left:
                process.signal(signal.SIGKILL)
            if not left:
                return
            time.sleep(_TICK_S)


def failures(ended: Sequence[Ended], *, tolerates_deaths: bool) -> list[Ended]:
    """Return the ends that make a run a failure, in order of time.

    A planned death is no failure. A death by a signal from outside is a failure unless deaths are
    tolerated. An exit code other than 0 always is.
    """
    return [
        end
        for end in ended
        if end.status != 0 and not end.is_planned and not (tolerates_deaths and end.status < 0)
    ]


def exit_code(ended: Sequence[Ended], *, tolerates_deaths: bool) -> int:
    """Return the exit code of the first worker that failed, or 1 if a signal killed it or if no
    worker finished."""
    failed = failures(ended, tolerates_deaths=tolerates_deaths)
    if failed:
        return max(failed[0].status, 1)
    return 0 if any(end.status == 0 for end in ended) else 1
