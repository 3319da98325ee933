"""The thread that hands arriving frames to the listener and tells it of deaths."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from gossamer.real.transports.shm.rings import RingReader
from gossamer.real.transports.shm.segments import DEAD, Control
from gossamer.real.transports.transport import Listener, Parts, Stopped, StopToken

_LOOK_S = 0.5
"""All that this thread waits for rings its bell, but for the end of its launcher."""
_AT_ONCE = 64
"""So many frames of one process before the next one's turn."""


class Receiving:
    """Sleeps on this process's bell; calls the listener with no lock held."""

    def __init__(
        self, rank: int, rings: Mapping[int, RingReader], control: Control, listener: Listener,
        stop: StopToken, drop: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.lost: frozenset[int] = frozenset()
        self._rank = rank
        self._rings = rings
        self._control = control
        self._bell = control.frames[rank]
        self._listener = listener
        self._stop = stop
        self._drop = drop
        self._to_self: deque[memoryview] = deque()
        self._is_closing = False
        self._launcher = os.getppid()
        self._thread = threading.Thread(target=self._run, name="gossamer-receiving", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_to_self(self, parts: Parts) -> None:
        self._to_self.append(memoryview(bytearray(b"".join(parts))))
        self._bell.ring()

    def close(self) -> None:
        self._is_closing = True
        self._bell.ring()
        # A listener that closes its own transport cannot be waited for.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                seen = self._bell.value
                if self._deliver():
                    continue
                self._bell.wait(seen, _LOOK_S)
                if os.getppid() != self._launcher:
                    # Nobody is left to tell of deaths or to end this process.
                    self._stop.set()
        except Stopped:
            pass  # the listener was told to stop: that is how this thread ends
        except BaseException:
            # Without this thread everybody would wait for ever.
            self._stop.set()
            raise

    def _deliver(self) -> bool:
        """Hand over what has come; whether there was anything."""
        came = False
        for source, ring in self._rings.items():
            if source in self.lost:
                continue
            # The dead first looked at, then read: all that they ever wrote is there by then.
            is_dead = self._control.state(source) == DEAD
            for frame in islice(ring.frames(), None if is_dead else _AT_ONCE):
                came = True
                self._listener.frame(source, frame)
            if is_dead:
                self.lost |= {source}
                self._drop(source)
                self._listener.lost(source)
        for _ in range(len(self._to_self)):
            came = True
            self._listener.frame(self._rank, self._to_self.popleft())
        return came
