"""The memory that the processes of one machine share, and the few words all of them look at.

The launcher makes it without a name and hands it down as open files: nothing is left behind by any
death, its own included. Of the control words each has one writer at a time: a process its own
state, the launcher the states of the dead. Under other launchers process 0 makes it
(`shared_sums`), and whoever learns of a death writes that one's state: all write the same.
"""

from __future__ import annotations

import os
from mmap import mmap

from gossamer.real.transports.shm.layout import LINE, PAGE, aligned
from gossamer.real.transports.shm.system import Bell, fence

FRESH, OPEN, CLOSED, DEAD = range(4)
_NAME = "gossamer"
_WORDS_PER_PROCESS = 4 * LINE // 8
_LAUNCHER = 1023


class Control:
    """Per process: its state, whether it has left the sums, and three bells: frames came, room
    came, a reduction went on."""

    def __init__(self, file: int, size: int, who: int) -> None:
        self._memory = mmap(file, control_bytes(size))
        self._states = memoryview(self._memory).cast("Q")
        self.size = size

        def bells(line: int) -> list[Bell]:
            return [
                Bell(self._memory, 4 * LINE * process + line * LINE, who) for process in range(size)
            ]

        self.frames, self.room, self.reductions = bells(1), bells(2), bells(3)

    def state(self, process: int) -> int:
        return self._states[process * _WORDS_PER_PROCESS]

    def set_state(self, process: int, state: int) -> None:
        """And wake everybody who might wait for that process."""
        self._states[process * _WORDS_PER_PROCESS] = state
        for bells in (self.frames, self.room, self.reductions):
            for bell in bells:
                bell.ring()

    def is_gone(self, process: int) -> bool:
        """Dead or closed: whatever it has done until now is all that it will ever have done."""
        return self._states[process * _WORDS_PER_PROCESS] >= CLOSED

    def leave_sums(self, process: int) -> None:
        """It has posted the last of what it puts into sums, and reads none any more."""
        fence()  # whoever sees the word sees all posts
        self._states[process * _WORDS_PER_PROCESS + 1] = 1
        for bell in self.reductions:
            bell.ring()

    def is_out_of_sums(self, process: int) -> bool:
        """Gone, or without part in any further sum."""
        return bool(self._states[process * _WORDS_PER_PROCESS + 1]) or self.is_gone(process)


def control_bytes(size: int) -> int:
    return aligned(4 * LINE * size, PAGE)


class Segments:
    """The launcher's end: the files to pass on, and the word of who has died."""

    def __init__(self, fds: tuple[int, ...]) -> None:
        self.fds = fds
        """The control memory, then one file per process, in order of rank."""
        self._control = Control(fds[0], len(fds) - 1, _LAUNCHER)

    def mark_dead(self, rank: int) -> None:
        """A process has ended; unless it had closed its transport, everybody hears of a death."""
        control = self._control
        if control.state(rank) < CLOSED:
            control.set_state(rank, DEAD)

    def close(self) -> None:
        """Let go of the files; processes that still use the memory keep it."""
        for file in self.fds:
            os.close(file)
        self.fds = ()


def create_segments(size: int) -> Segments:
    """Memory for `size` processes, still empty; each sizes its own when it opens its transport."""
    fds = [os.memfd_create(_NAME) for _ in range(size + 1)]
    os.ftruncate(fds[0], control_bytes(size))
    return Segments(tuple(fds))


def is_segment(file: int, process: int | str = "self") -> bool:
    """Whether this number still stands for such memory, and not for a file of the program's own."""
    try:
        return os.readlink(f"/proc/{process}/fd/{file}").startswith(f"/memfd:{_NAME} ")
    except OSError:
        return False
