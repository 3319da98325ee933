"""Who descends from whom in a population whose members copy each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.observe.observer import SECOND

COPIED, LIFE = "copied from", "in its life"
_FACTOR = "factor of "
Entry = dict[str, Any]


class Lineage:
    """The lives of all members. A life begins where the member copies another one, of which it
    notes the life too, and has factors of the hyper-parameters; the first life has no parent."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def hears(self, worker: int, what: str, value: float, step: int, at_ns: int) -> bool:
        """Whether what a method has told is about descent."""
        if what == COPIED:
            lives = max((e["life"] + 1 for e in self.entries if e["worker"] == worker), default=0)
            parent = None if value == worker else round(value)
            self.entries.append({
                "worker": worker, "life": lives, "parent": parent, "parent_life": None,
                "step": step, "seconds": at_ns / SECOND, "factors": {},
            })  # fmt: skip
            return True
        if what != LIFE and not what.startswith(_FACTOR):
            return False
        own = next(entry for entry in reversed(self.entries) if entry["worker"] == worker)
        if what != LIFE:
            own["factors"][what.removeprefix(_FACTOR)] = value
        elif own["parent"] is not None:
            own["parent_life"] = round(value)
        else:
            own["life"] = round(value)  # not the first, where a checkpoint was gone on from
        return True

    def state(self) -> list[Entry]:
        """The entries of the one worker of a process, in seconds since its own beginning: the
        clocks of several hosts have nothing in common."""
        began = self.entries[0]["seconds"] if self.entries else 0.0
        return [{**entry, "seconds": entry["seconds"] - began} for entry in self.entries]

    def load(self, entries: Sequence[Entry]) -> None:
        """Add those of another process."""
        self.entries = sorted([*self.entries, *entries], key=lambda entry: entry["seconds"])


def ancestry(entries: Sequence[Mapping[str, Any]], worker: int) -> list[Mapping[str, Any]]:
    """The lives that lead to what a worker has in the end, the oldest first."""
    lives = {(entry["worker"], entry["life"]): entry for entry in entries}
    number = max((life for who, life in lives if who == worker), default=None)
    found: list[Mapping[str, Any]] = []
    entry = lives.get((worker, number))
    while entry is not None and entry not in found:
        found.append(entry)
        entry = lives.get((entry["parent"], entry["parent_life"]))
    return found[::-1]
