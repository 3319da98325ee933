"""The observers of a run as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gossamer.observe.callbacks import Callback, Callbacks
from gossamer.observe.metrics import Metrics
from gossamer.observe.observer import Observer, Observers


class RunObserver(Observers):
    """Metrics always, callbacks where there are some, and whatever else was asked for."""

    def __init__(
        self, size: int, ranks: Iterable[int] | None = None, *, others: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        """Of `size` workers, of whom a process of a real run hosts and counts one."""
        self.metrics = Metrics(size, ranks)
        self.callbacks = Callbacks(callbacks)
        super().__init__(self.metrics, *others, *([self.callbacks] if callbacks else []))
