"""All-reduces on a GPU for which its streams wait, and no process does.

Posting a value only once the GPU has written it means waiting for the stream in every step, and
processes that share a GPU take turns on it: such a wait can take half as long as the step. Here a
process posts what it has only asked for. Behind that it has its stream set a word, its signal, to
the operation's number; the streams of the others wait for the word before they add up.

Room. Each process has two places, used in turn. Its stream may write into one again when all
have read what lay there, which nobody needs to say. A post is in order (`ORDERED`) if all that its
process had begun before was asked of the stream that is waited for. Whoever has settled an
operation to which everybody's posts were in order is behind everybody's reading of all earlier
ones. Where that is not so, or has never been, a value goes the other way, by `arenas`; each post
says how it went.

Deaths. Streams that wait for a process that was killed are let go once it is written down how far
it had come (`words`). The kernel that adds up leaves out what was never written, and everybody's
does, as no stream was let through before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.real.transports.shm.arenas import Arenas
from gossamer.real.transports.shm.board import Board
from gossamer.real.transports.shm.one_pass import Mean
from gossamer.real.transports.shm.operation import Kind, Operation
from gossamer.real.transports.shm.signals import Signals
from gossamer.real.transports.shm.words import Words
from gossamer.real.transports.transport import Scattered

AHEAD = 1 << 61
"""In a place on the board: the value is there once the signal says so."""
ORDERED = 1 << 60
"""There: all reading that the process had begun before comes before this value."""
_MOST = 1 << 31
"""Elements that the kernel cannot count any more."""
_SMALL = 1 << 20
_SIZES, _TABLES = 4, 64


@dataclass
class _Slot:
    place: int
    used_in: int = -1
    """The number of the last operation whose value lay there."""


class Ahead:
    """Those of one process; it goes ahead in one group, the first that it could do so in."""

    def __init__(
        self, rank: int, boards: Mapping[int, Board], arenas: Arenas, words: Words,
        signals: Signals,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._boards = boards
        self._arenas = arenas
        self._words = words
        self._signals = signals
        self._left = torch.zeros(len(boards), dtype=torch.int64, device=arenas.device)
        """By process: the number from which on what it posted is left out; 0 for the living. A copy
        on the GPU."""
        self._members: tuple[int, ...] = ()
        self._stream: int | None = None
        """The one that reads and writes here; another's order with it is not known."""
        self._mean: Mean | None = None
        self._is_hopeless = self._is_open = False
        self._slots: dict[int, list[_Slot]] = {}
        """By how many elements a value has."""
        self._raised = 0
        self._read_before = -1
        """What lay in a place in an operation before this one has been read, or will have been when
        the stream comes to write there."""
        self._results: dict[int, tuple[Scattered, Tensor, Sequence[Tensor]]] = {}
        self._tables: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def place(self, operation: Operation) -> int | None:
        """Where its value can be put ahead, or None; whether it is in order is noted either way.
        All earlier ones must be settled."""
        kind = operation.kind
        if self._is_hopeless or (kind.members != self._members and not self._begin(kind)):
            return None
        if self._signals.present() != self._stream:
            return None
        operation.order = ORDERED
        self._is_open = self._is_open or self._are_open()
        if not self._is_open or kind.dtype != torch.float32 or self._read_before < 0:
            return None
        for slot in self._slots.get(kind.count) or self._take(kind):
            if slot.used_in < self._read_before:
                return slot.place
        return None

    def _are_open(self) -> bool:
        """Whether all can read all arenas, on one GPU. It stays so."""
        arenas, members = self._arenas, self._members
        return arenas.is_open_to(members) and arenas.are_together(members)

    def _begin(self, kind: Kind) -> bool:
        """Choose this group, unless there is one."""
        if self._members or kind.dtype != torch.float32:
            return False
        self._mean = self._signals.mean()
        self._keep_to_one_stream()
        if self._mean is None or self._is_hopeless:
            self._is_hopeless = True
            return False
        self._members = kind.members
        return True

    def _keep_to_one_stream(self) -> None:
        stream = self._signals.present()
        if self._stream is None:
            self._stream = stream
        self._is_hopeless = self._is_hopeless or stream != self._stream

    def _take(self, kind: Kind) -> list[_Slot]:
        """Both or none: with one it would be as slow as the other way. They are kept for good, so
        not for every size that may come."""
        if len(self._slots) >= _SIZES or not 0 < kind.count < _MOST:
            return []
        places = [self._arenas.take(kind.nbytes, kind.members) for _ in range(2)]
        taken = [place for place in places if place is not None]
        if len(taken) == 2:
            slots = [_Slot(place | AHEAD | ORDERED) for place in taken]
            self._slots[kind.count] = slots
            return slots
        for place in taken:
            self._arenas.give_back(place)
        return []

    def raise_signal(self, operation: Operation) -> None:
        """All that writes its value was asked of the GPU."""
        for slot in self._slots[operation.kind.count]:
            if slot.place == operation.offset:
                slot.used_in = operation.number
        self._raised = operation.number + 1
        self._words.set(self._rank, self._raised)

    def settle(self, operation: Operation) -> Tensor | Scattered | None:
        """The mean, if everybody went ahead; else None, and the values of those who did are there
        to be read, or they are no longer found."""
        found, boards = operation.found, self._boards
        places = tuple((member, boards[member].offsets[found[member]]) for member in sorted(found))
        said = AHEAD | ORDERED
        for _, place in places:
            said &= place
        if operation.kind.is_on_gpu:
            self._keep_to_one_stream()
        if said & ORDERED and operation.kind.members == self._members:
            self._read_before = operation.number
        if said & AHEAD and not self._is_hopeless:
            return self._settle_ahead(operation, places)
        for member, place in places:
            if place & AHEAD and not self._words.has_come(member, operation.number + 1):
                del found[member]
        return None

    def _settle_ahead(
        self, operation: Operation, places: tuple[tuple[int, int], ...]
    ) -> Tensor | Scattered:  # fmt: skip
        assert self._mean is not None
        kind, number = operation.kind, operation.number + 1
        for member, _ in places:
            if member != self._rank:
                self._words.wait(member, number)
        table, left = self._table(kind, places), self._left_at(kind)
        scattered = operation.scattered
        lent = None if scattered is None else self._lendable(kind, scattered)
        if lent is None or scattered is None:
            result = torch.empty(kind.count, dtype=kind.dtype, device=self._arenas.device)
            self._mean(table, left, number, result)
            return result.view(operation.shape)
        flat, pieces = lent
        self._mean(table, left, number, flat)
        return scattered if scattered.lend(operation.edition, pieces, _nothing) else flat.clone()

    def _left_at(self, kind: Kind) -> int:
        """The address of what the kernel leaves out, as of when the stream comes to it. A large
        kernel would fetch it from main memory ten thousand times."""
        if kind.count <= _SMALL:
            return self._signals.address(self._words.left)
        self._signals.copy(self._words.left, self._left)
        return self._left.data_ptr()

    def _lendable(self, kind: Kind, scattered: Scattered) -> tuple[Tensor, Sequence[Tensor]] | None:
        """One vector for all means of that gradient: the stream has descended along the last one
        when it comes to write the next."""
        known = self._results.get(kind.count)
        if known is None:
            flat = torch.empty(kind.count, dtype=kind.dtype, device=self._arenas.device)
            known = self._results[kind.count] = (scattered, flat, scattered.cut(flat))
        return known[1:] if known[0] is scattered else None

    def _table(self, kind: Kind, places: tuple[tuple[int, int], ...]) -> Tensor:
        """Where the values are and whose, for the kernel; the same few in turn."""
        table = self._tables.get(places)
        if table is None:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            values = [(self._arenas.tensor(m, at, kind.count, kind.dtype), m) for m, at in places]
            rows = [[value.data_ptr(), member] for value, member in values]
            table = self._tables[places] = torch.tensor(rows, device=self._arenas.device)
        return table

    def finish(self) -> None:
        """What this process has posted is there: nobody will wait for it when it has gone."""
        self._words.finish(self._rank, self._raised)


def _nothing() -> None:
    """What is lent here is never in anybody's way."""
