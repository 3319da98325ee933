"""What shared memory needs from the operating system: bells to sleep on, and robust locks.

Python can only load and store aligned words of shared memory; both are atomic on every machine that
torch runs on. Nothing here needs atomic additions.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from mmap import mmap
from typing import Any

from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.transport import StopToken

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _FUTEX_CALLS.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 1 << 30
_POLL_S = 2e-4
_PROCESSES = 1024
_BUSY_S = 2e-4
"""For so long a thread tries a taken lock again before it sleeps: most locks are held for less time
than an idle processor needs to wake."""

# Calls that never block keep the interpreter lock: to get it back may take a switch interval.
_brief = ctypes.PyDLL(None)
_waiting = ctypes.CDLL(None)

LOCK_BYTES = 64
"""The bytes of a `pthread_mutex_t` on a cache line of its own, whose last word is spare."""
SPARE_WORD = LOCK_BYTES - 8


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _time(seconds: float) -> _Time:
    whole = int(seconds)
    return _Time(whole, int((seconds - whole) * 1e9))


def can_sleep() -> bool:
    """Whether bells can wake sleeping threads on this system, or do not need to."""
    if _FUTEX is None:
        return True
    word = ctypes.c_uint32(0)
    return _brief.syscall(_FUTEX, ctypes.byref(word), _WAKE, 1, None, None, 0) >= 0


_barrier = threading.Lock()


def fence() -> None:
    """Make all earlier stores visible before all later loads.

    Taking a free lock does that, because its atomic instructions order memory accesses.
    """
    with _barrier:
        pass


class Bell:
    """A word of shared memory on which the threads of one process sleep until any process rings.

    Every ring stores a new value. So a thread never misses a ring that comes between its look at
    the memory and its sleep, whoever else rings at the same time. The next word counts the sleeping
    threads, because a system call that wakes nobody costs as much as one that wakes somebody.
    """

    def __init__(self, memory: mmap, offset: int, who: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._sleepers = ctypes.c_uint32.from_buffer(memory, offset + 4)
        self._counting = threading.Lock()
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._values = count(who % _PROCESSES + _PROCESSES, _PROCESSES)

    @property
    def value(self) -> int:
        return self._word.value

    def ring(self) -> None:
        self._word.value = next(self._values) & 0xFFFFFFFF
        if _FUTEX is not None:
            fence()
            if self._sleepers.value:
                _brief.syscall(_FUTEX, self._address, _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until the value is no longer `seen`, but no longer than this."""
        if _FUTEX is not None:
            limit = ctypes.byref(_time(seconds))
            word = ctypes.c_uint32(seen)
            self._count(1)
            try:
                _waiting.syscall(_FUTEX, self._address, _WAIT, word, limit, None, 0)
            finally:
                self._count(-1)
            return
        end = time.monotonic() + seconds
        while self._word.value == seen and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _count(self, change: int) -> None:
        with self._counting:
            self._sleepers.value += change


class RobustLock:
    """A lock for threads and processes, which the system releases when its holder is killed.

    It is a robust mutex and not a record lock: a free one takes 0.4 us instead of 1.9, and it does
    not release the interpreter lock, which cost 0.7 ms beside a busy thread.
    """

    def __init__(self, memory: mmap, offset: int, stop: StopToken) -> None:
        self._place = ctypes.c_char.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._place))
        self._stop = stop
        self.try_acquire: Callable[[], int] = partial(_brief.pthread_mutex_trylock, self._address)
        """Returns 0 if it has taken the lock; pass any other result to `acquire_after`."""
        self.release: Callable[[], object] = partial(_brief.pthread_mutex_unlock, self._address)

    def initialise(self) -> None:
        """The owner of the memory calls this once, before another process uses the lock."""
        attributes = ctypes.create_string_buffer(16)
        _check(_brief.pthread_mutexattr_init(attributes))
        _check(_brief.pthread_mutexattr_setpshared(attributes, 1))
        _check(_brief.pthread_mutexattr_setrobust(attributes, 1))
        _check(_brief.pthread_mutex_init(self._address, attributes))

    def acquire(self) -> bool:
        """Take the lock; return whether its last holder died while it held it."""
        result = self.try_acquire()
        return result != 0 and self.acquire_after(result)

    def acquire_after(self, result: int) -> bool:
        """Take the lock after one try in vain, whose result is given; see `acquire`."""
        backoff = Backoff(self._stop, _BUSY_S)
        while result == errno.EBUSY and backoff.yields():
            result = self.try_acquire()
        while result in (errno.EBUSY, errno.ETIMEDOUT):
            self._stop.check()
            limit = ctypes.byref(_time(time.time() + self._stop.patience))
            result = _waiting.pthread_mutex_timedlock(self._address, limit)
        if result == errno.EOWNERDEAD:
            _check(_brief.pthread_mutex_consistent(self._address))
            return True
        _check(result)
        return False


def _check(result: Any) -> None:
    if result != 0:
        raise OSError(result, "a lock in shared memory failed")
