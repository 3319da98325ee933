"""The observers of a run as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gossamer.observe.callbacks import Callback, Callbacks
from gossamer.observe.metrics import Metrics
from gossamer.observe.observer import Observer, Observers


class RunObserver(Observers):
    """The metrics, the user's callbacks if there are any, and the other observers."""

    def __init__(
        self, size: int, ranks: Iterable[int] | None = None, *, others: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        """The run has `size` workers. A process of a real run counts the one that it hosts."""
        self.metrics = Metrics(size, ranks)
        self.callbacks = Callbacks(callbacks)
        super().__init__(self.metrics, *others, *([self.callbacks] if callbacks else []))
