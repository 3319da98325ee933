"""What faults have cost: what became of every sample, and how long each recovery took."""

from __future__ import annotations

from collections import Counter

from gossamer.observe.observer import SECOND, Row

_MOST = 200


class SampleBook:
    """The samples of every epoch. Each is counted for the epoch in which it was read, so that of
    each epoch exactly what was read is trained or given again."""

    def __init__(self) -> None:
        self.read: Counter[int] = Counter()
        self.trained: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        """Read by a worker that died before it had the gradient; they are given again, too."""
        self.given_again: Counter[int] = Counter()
        """Put back into the order, for whoever reads next."""

    def rows(self) -> list[Row]:
        return [
            {
                "epoch": epoch,
                "read": read,
                "trained": self.trained[epoch],
                "lost": self.lost[epoch],
                "given_again": self.given_again[epoch],
            }
            for epoch, read in sorted(self.read.items())
        ]


class Recoveries:
    """For each worker or server that was away, when it went and how it came back."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        """In order of their beginnings; the moments are seconds, absent where there was none."""
        self._open: dict[int, Row] = {}
        self.left_out = 0

    def begin(self, end: int, what: str, moment: str, now_ns: int) -> None:
        """Somebody has died, or comes for the first time."""
        row: Row = {"what": what, moment: now_ns / SECOND}
        self._open[end] = row
        if len(self.rows) < _MOST:
            self.rows.append(row)
        else:
            self.left_out += 1

    def reached(self, end: int, moment: str, now_ns: int) -> None:
        """One more moment of the recovery of an end that was away, if it is one."""
        row = self._open.get(end)
        if row is not None:
            row.setdefault(moment, now_ns / SECOND)

    def is_open(self, end: int) -> bool:
        return end in self._open

    def ended(self, end: int, moment: str, now_ns: int) -> None:
        self.reached(end, moment, now_ns)
        self._open.pop(end, None)
