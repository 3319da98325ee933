"""How workers are ended, and what their ends mean for the exit code of the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from gossamer.real.launch.process import Ended, Process

OVER_DEADLINE = 3
_STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_TICK_S = 0.02
_LEFTOVERS_S = 1.0


class Shutdown:
    """SIGINT, so that scripts can tidy up; SIGTERM after a while; SIGKILL at last."""

    def __init__(self, processes: Sequence[Process], grace_s: float) -> None:
        self._processes = processes
        self._grace_s = grace_s
        self._taken = 0
        self._next_at = 0.0
        self.status: int | None = None
        """With which exit code the run ends; None as long as it goes on."""

    def begin(self, status: int) -> None:
        if self.status is None:
            self.status = status

    def hurry(self) -> None:
        """The next step is due at once."""
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
                # A paused one obeys when it is woken.
                process.signal(signal.SIGCONT)

    def finish(self) -> None:
        """End whoever is still there, and return when nobody is."""
        self.begin(1)
        while any(process.poll() is None for process in self._processes):
            self.advance()
            time.sleep(_TICK_S)
        self.kill_leftovers()

    def kill_leftovers(self) -> None:
        """What ended workers had started and left; a moment later it is gone."""
        until = time.monotonic() + _LEFTOVERS_S
        while time.monotonic() < until:
            left = [process for process in self._processes if process.has_left_others]
            for process in left:
                process.signal(signal.SIGKILL)
            if not left:
                return
            time.sleep(_TICK_S)


def failures(ended: Sequence[Ended], *, tolerates_deaths: bool) -> list[Ended]:
    """The ends that make a run a failure, in order of time.

    A death on purpose is none; a death by a signal from outside is one unless it is tolerated; an
    exit code other than 0 always is.
    """
    return [
        end
        for end in ended
        if end.status != 0 and not end.is_planned and not (tolerates_deaths and end.status < 0)
    ]


def exit_code(ended: Sequence[Ended], *, tolerates_deaths: bool) -> int:
    """That of the first worker that failed; 1 where a signal killed it, or nobody finished."""
    failed = failures(ended, tolerates_deaths=tolerates_deaths)
    if failed:
        return max(failed[0].status, 1)
    return 0 if any(end.status == 0 for end in ended) else 1
