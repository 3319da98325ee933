"""An operation with a time limit on real workers, where time goes by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.errors import Late
from gossamer.pending import Gathered, Pending
from gossamer.real.driver import Driver
from gossamer.worker import Gradient

T = TypeVar("T")


def ended_within(seconds: float, pending: Pending[T], driver: Driver, task: str) -> Pending[T]:
    """Its result, or `Late`; one that needs its awaiter goes on in a thread of its own."""
    bounded: Pending[T] = Pending(pending.label, pending.peer)
    late = Late(f"{pending.label} did not end within {seconds:g} s")
    if isinstance(pending, Gradient) and pending.settle is not None:
        bounded.settle = _computed_by(time.monotonic() + seconds, pending, bounded, late)
        return bounded

    def too_late() -> None:
        # A receive that stayed posted would take the next message and lose it.
        pending.cancel()
        if pending.cancelled:  # else it has ended at this very moment
            bounded.fail(late)

    timer = threading.Timer(seconds, too_late)
    timer.daemon = True
    timer.start()
    pending.when_done(timer.cancel)
    pending.when_done(lambda: _pass_on(pending, bounded))
    for part in pending.parts if isinstance(pending, Gathered) else (pending,):
        if part.settle is not None and not part.done:
            driver.settle_elsewhere(part, task)
    return bounded


def _computed_by(
    until: float, gradient: Gradient, bounded: Pending[Any], late: Late
) -> Callable[[], None]:  # fmt: skip
    """Nothing interrupts a gradient, and two at once would be in each other's way: its awaiter
    computes it and looks at the clock afterwards."""
    compute = gradient.settle

    def settle() -> None:
        if compute is not None and not gradient.done:
            compute()
        if time.monotonic() > until:
            bounded.fail(late)
        else:
            _pass_on(gradient, bounded)

    return settle


def _pass_on(pending: Pending[Any], bounded: Pending[Any]) -> None:
    try:
        bounded.resolve(pending.result())
    except Exception as error:
        bounded.fail(error)


def settle_by(result: Pending[Any], pending: Pending[Any], function: Callable[[Any], Any]) -> None:
    """What has ended ends the other: by a function of its result, or by its error."""
    try:
        result.resolve(function(pending.result()))
    except Exception as error:
        result.fail(error)
