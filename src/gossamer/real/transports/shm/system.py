"""What shared memory needs of the operating system: bells to sleep on, locks that outlive holders.

Plain loads and stores of aligned words are all that Python can do to shared memory; they are whole
on every machine that torch runs on. Everything here gets along without atomic additions.
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
"""For so long a lock that is taken is tried again before its taker sleeps: most are held for less
time than a processor that has fallen idle needs to wake."""

# What never blocks keeps the interpreter lock: giving it away may cost a switch interval.
_brief = ctypes.PyDLL(None)
_waiting = ctypes.CDLL(None)

LOCK_BYTES = 64
"""Room for a `pthread_mutex_t` on a cache line of its own, which has a word to spare at its end."""
SPARE_WORD = LOCK_BYTES - 8


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _time(seconds: float) -> _Time:
    whole = int(seconds)
    return _Time(whole, int((seconds - whole) * 1e9))


def can_sleep() -> bool:
    """Whether the system lets bells wake sleepers, or they get along without it."""
    if _FUTEX is None:
        return True
    word = ctypes.c_uint32(0)
    return _brief.syscall(_FUTEX, ctypes.byref(word), _WAKE, 1, None, None, 0) >= 0


_barrier = threading.Lock()


def fence() -> None:
    """What was stored before is seen before what is loaded afterwards.

    An uncontended lock does that: its atomic instructions order memory around them.
    """
    with _barrier:
        pass


class Bell:
    """A word to sleep on until anybody rings it; only one process, its owner, sleeps there.

    Every ring stores a value that was not there before, so a ring between looking at the memory
    and falling asleep is never missed, whoever else rings at the same time. Beside it stands how
    many threads sleep, as waking nobody costs a call of the system all the same.
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
        """Sleep until the value is no longer `seen`, at most so long."""
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
    """Excludes threads and processes; the system frees it when its holder is killed.

    A robust mutex rather than a record lock: 0.4 against 1.9 us uncontended, and it does not give
    the interpreter lock away, which beside a busy thread cost 0.7 ms.
    """

    def __init__(self, memory: mmap, offset: int, stop: StopToken) -> None:
        self._place = ctypes.c_char.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._place))
        self._stop = stop
        self.try_acquire: Callable[[], int] = partial(_brief.pthread_mutex_trylock, self._address)
        """0 if nobody had it, which is all there is to it; else `acquire_after` what it gives."""
        self.release: Callable[[], object] = partial(_brief.pthread_mutex_unlock, self._address)

    def initialise(self) -> None:
        """To be done once, by the owner of the memory, before anybody else knows of it."""
        attributes = ctypes.create_string_buffer(16)
        _check(_brief.pthread_mutexattr_init(attributes))
        _check(_brief.pthread_mutexattr_setpshared(attributes, 1))
        _check(_brief.pthread_mutexattr_setrobust(attributes, 1))
        _check(_brief.pthread_mutex_init(self._address, attributes))

    def acquire(self) -> bool:
        """Whether the holder before died while it held the lock. Raises `Stopped` if told to."""
        result = self.try_acquire()
        return result != 0 and self.acquire_after(result)

    def acquire_after(self, result: int) -> bool:
        """Go on where one try has not sufficed."""
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
