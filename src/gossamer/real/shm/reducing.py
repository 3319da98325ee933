"""All-reduce in shared memory: everybody posts its value, then everybody reads.

Nothing needs to be voted on. A dead process posts nothing any more, so once each member has either
posted or is seen to be gone, the set of contributors is the same for whoever looks, whenever. A
small value, or that of a pair, is added up by every member for itself. Of a larger one each member
adds up its own chunk for all, if there are processors for all of them; otherwise, where work done
twice is work that somebody else waits for, whoever posts last adds it all up. What its maker is not
at, dead or merely busy elsewhere, is made by whoever needs it, so nobody ever waits for a member
that has already posted. Values on a GPU that the processes share are in `arenas`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.pending import Pending
from gossamer.real.shm.arenas import IN_ARENA, Arenas
from gossamer.real.shm.board import Board, Room
from gossamer.real.shm.layout import CELLS, aligned
from gossamer.real.shm.operation import Operation, key_of
from gossamer.real.shm.results import Results
from gossamer.real.shm.segments import Control
from gossamer.real.shm.system import fence
from gossamer.real.transport import Scattered, StopToken

_BLOCK = 1 << 18
_LOOKS, _LOOKS_UNCROWDED = 8, 60
_CUTS = 256


class Reducing:
    """The all-reduces of one process."""

    def __init__(
        self, rank: int, boards: Mapping[int, Board], room: Room, control: Control, stop: StopToken,
        arenas: Arenas | None = None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._boards = boards
        self._own = boards[rank]
        self._room = room
        self._control = control
        self._bell = control.reductions[rank]
        self._stop = stop
        self._arenas = arenas
        self._gpu = None if arenas is None else arenas.device
        self._results = Results()
        self._lock = threading.Lock()
        self._cells = deque(range(CELLS))
        self._posted: list[Operation] = []
        self._sequence: dict[tuple[int, ...], int] = {}
        self._cuts: dict[tuple[int, int], tuple[Tensor, Sequence[Tensor]]] = {}

    def start(self, value: Tensor | Scattered, members: Sequence[int]) -> Pending[Tensor]:
        if not isinstance(value, Scattered):
            value = value.detach()
        group = tuple(sorted(set(members)))
        if self._rank not in group:
            raise ProtocolError(f"process {self._rank} is no member of {group}")
        pending: Pending[Tensor] = Pending("all_reduce")
        if len(group) == 1:
            pending.resolve(_whole(value))
            return pending
        with self._lock:
            number = self._sequence.get(group, 0)
            operation = Operation(key_of(group, number), value, group, self._gpu)
            self._make_room(operation)
            self._sequence[group] = number + 1
            own, cell = self._own, operation.cell
            target = self._value(operation, self._rank, operation.offset)
            if isinstance(value, Scattered):
                value.write_into(self._cut(value, target), operation.scale)
            elif operation.scale == 1.0:
                target.copy_(value.reshape(-1))
            else:
                torch.mul(value.reshape(-1).to(target.device), operation.scale, out=target)
            if operation.is_on_gpu and self._arenas is not None:
                self._arenas.finish_writing()
                self._arenas.note_what_was_read(self._finish)
            own.offsets[cell] = operation.offset
            own.lengths[cell] = operation.nbytes
            fence()  # whoever sees the key sees all the rest
            own.keys[cell] = operation.key
            self._posted.append(operation)
        if not operation.is_by_one:
            self._ring(group)
        elif not self._missing(operation, group):
            self._make(operation)
        pending.settle = lambda: self._settle(operation, pending)
        pending.on_cancel = operation.abandon
        return pending

    def _make_room(self, operation: Operation) -> None:
        """A cell, and bytes for the value and for this process's chunk of the result."""
        needed = aligned(operation.nbytes)
        if operation.is_by_one:
            needed += operation.nbytes
        elif not operation.is_by_each:
            needed += operation.nbytes // len(operation.members) + operation.dtype.itemsize
        while True:
            seen = self._bell.value
            self._reclaim()
            offset = self._take(operation, needed) if self._cells else None
            if offset is not None:
                operation.offset, operation.cell = offset, self._cells.popleft()
                return
            if not any(self._is_finished(posted) for posted in self._posted):
                raise ProtocolError(
                    f"no room for {operation.nbytes} bytes beside {len(self._posted)} all-reduces"
                    " that were started and not awaited; await some of them first"
                )
            self._stop.check()
            self._bell.wait(seen, 1e-3)

    def _take(self, operation: Operation, needed: int) -> int | None:
        place = None
        if operation.is_on_gpu and self._arenas is not None:
            place = self._arenas.take(needed, operation.members)
        return self._room.take(needed) if place is None else place

    def _reclaim(self) -> None:
        if self._arenas is not None:
            self._arenas.note_what_was_read(self._finish)
        kept: list[Operation] = []
        for operation in self._posted:
            if operation.is_abandoned and not self._missing(operation, operation.members):
                self._finish(operation)
            if self._is_finished(operation) and self._is_over(operation):
                self._own.keys[operation.cell] = 0
                if operation.offset & IN_ARENA and self._arenas is not None:
                    self._arenas.give_back(operation.offset)
                else:
                    self._room.give_back(operation.offset)
                self._cells.appendleft(operation.cell)
            else:
                kept.append(operation)
        self._posted = kept

    def _finish(self, operation: Operation) -> None:
        self._own.finished[operation.cell] = operation.key

    def _is_finished(self, operation: Operation) -> bool:
        return self._own.finished[operation.cell] == operation.key

    def _is_over(self, operation: Operation) -> bool:
        """Whether nobody will read this process's contribution any more."""
        key = operation.key
        for member, cell in operation.found.items():
            board = self._boards[member]
            has_moved_on = board.keys[cell] != key or board.finished[cell] == key
            if not has_moved_on and not self._control.is_gone(member):
                return False
        return True

    def _settle(self, operation: Operation, pending: Pending[Tensor]) -> None:
        with operation.settling:
            if pending.done:
                return
            if operation.is_by_one:
                values, divisor = [self._made_by_one(operation)], 1.0
            else:
                self._wait_for_posts(operation)
                values = self._values(operation)
                divisor = operation.divisor(values)
            if operation.is_on_gpu and self._arenas is not None:
                pending.resolve(self._arenas.mean(operation, values))
                pending.settle = pending.on_cancel = None
                return
            result = self._put_in_place(operation, values, divisor)
            if result is None:
                result = self._results.empty(operation.count, operation.dtype)
                if operation.is_by_each or operation.is_by_one:
                    _mean(values, result, divisor)
                else:
                    self._reduce_in_chunks(operation, values, result)
                result = result.view(operation.shape)
            self._finish(operation)
            pending.resolve(result)
            # It refers to itself through this; the result is to go when its last user lets go.
            pending.settle = pending.on_cancel = None

    def _missing(self, operation: Operation, members: Sequence[int]) -> list[int]:
        """Which of the members may still post; the cells of those who have are noted."""
        missing: list[int] = []
        for member in members:
            # Looked at first: what a process had posted when it went is there to be found.
            is_gone = self._control.is_gone(member)
            cell = self._boards[member].find(operation.key, operation.cell)
            if cell is not None:
                operation.found[member] = cell
            elif not is_gone:
                missing.append(member)
        return missing

    def _wait_for_posts(self, operation: Operation) -> None:
        missing: Sequence[int] = operation.members
        looks = _LOOKS if operation.is_crowded else _LOOKS_UNCROWDED
        while True:
            seen = self._bell.value
            missing = self._missing(operation, missing)
            if not missing:
                return
            looks -= 1
            if looks < 0:
                self._stop.check()
                self._bell.wait(seen, self._stop.patience)

    def _values(self, operation: Operation) -> list[Tensor]:
        """The contributions, in order of rank."""
        values: list[Tensor] = []
        for member, cell in sorted(operation.found.items()):
            board = self._boards[member]
            if board.lengths[cell] != operation.nbytes:
                raise ProtocolError(
                    f"process {member} put {board.lengths[cell]} bytes into an all-reduce and"
                    f" process {self._rank} put in {operation.nbytes}"
                )
            values.append(self._value(operation, member, board.offsets[cell]))
        return values

    def _value(self, operation: Operation, member: int, place: int) -> Tensor:
        count, dtype = operation.count, operation.dtype
        if place & IN_ARENA and self._arenas is not None:
            value = self._arenas.tensor(member, place, count, dtype)
            return value if operation.is_on_gpu else value.cpu()
        return self._boards[member].memory.tensor(place, count, dtype)

    def _make(self, operation: Operation) -> None:
        """All of the result, for everybody."""
        cell = operation.cell
        self._own.working[cell] = operation.key
        values = self._values(operation)
        made = self._chunk(operation, self._rank, operation.count)
        _mean(values, made, operation.divisor(values))
        fence()
        self._own.published[cell] = operation.key
        self._ring(operation.members)

    def _made_by_one(self, operation: Operation) -> Tensor:
        """What one of the members has added up; nobody is rung for before it is there."""
        key, missing = operation.key, operation.members
        while True:
            seen = self._bell.value
            missing = self._missing(operation, missing)
            for member, cell in operation.found.items():
                if not missing and self._boards[member].published[cell] == key:
                    return self._chunk(operation, member, operation.count)
            is_in_the_making = any(
                self._boards[member].working[cell] == key and not self._control.is_gone(member)
                for member, cell in operation.found.items()
            )
            if not missing and not is_in_the_making:
                self._make(operation)
                continue
            self._stop.check()
            self._bell.wait(seen, self._stop.patience)

    def _put_in_place(
        self, operation: Operation, values: Sequence[Tensor], divisor: float
    ) -> Scattered | None:
        """Where the value lay in pieces the mean is put there: those are in the cache, and nobody
        has to point at another place."""
        scattered = operation.scattered
        if scattered is None or not (operation.is_by_each or operation.is_by_one):
            return None
        places = scattered.places(operation.edition)
        if places is None:
            return None
        pieces = [self._cut(scattered, value) for value in values]
        for place, *parts in zip(places, *pieces, strict=True):
            _mean(parts, place, divisor)
        return scattered

    def _cut(self, scattered: Scattered, flat: Tensor) -> Sequence[Tensor]:
        """The same few vectors are cut in every step; cutting one takes as long as adding it up."""
        key = (id(scattered), flat.data_ptr())
        known = self._cuts.get(key)
        if known is None or known[0] is not flat:
            if len(self._cuts) >= _CUTS:
                self._cuts.clear()
            known = self._cuts[key] = (flat, scattered.cut(flat))
        return known[1]

    def _reduce_in_chunks(
        self, operation: Operation, values: Sequence[Tensor], result: Tensor
    ) -> None:
        key, members, bounds = operation.key, operation.members, operation.bounds
        chunks = dict(zip(members, pairwise(bounds), strict=True))
        self._own.working[operation.cell] = key
        start, end = chunks.pop(self._rank)
        divisor = operation.divisor(values)
        _mean_of_range(values, result, start, end, divisor)
        self._chunk(operation, self._rank, end - start).copy_(result[start:end])
        fence()
        self._own.published[operation.cell] = key
        self._ring(members)
        while chunks:
            seen = self._bell.value
            for member, (start, end) in list(chunks.items()):
                cell = operation.found.get(member)
                board = self._boards[member]
                if cell is not None and board.published[cell] == key:
                    result[start:end].copy_(self._chunk(operation, member, end - start))
                elif cell is None or board.working[cell] != key or self._control.is_gone(member):
                    _mean_of_range(values, result, start, end, divisor)
                else:
                    continue
                del chunks[member]
            if chunks:
                self._stop.check()
                self._bell.wait(seen, self._stop.patience)

    def _chunk(self, operation: Operation, member: int, count: int) -> Tensor:
        """Where a member publishes its part of the result: behind what it put in."""
        board = self._boards[member]
        offset = board.offsets[operation.found[member]] + aligned(operation.nbytes)
        return board.memory.tensor(offset, count, operation.dtype)

    def _ring(self, members: Sequence[int]) -> None:
        for member in members:
            if member != self._rank:
                self._control.reductions[member].ring()


def _whole(value: Tensor | Scattered) -> Tensor:
    if not isinstance(value, Scattered):
        return value.clone()
    whole = torch.empty(value.count, dtype=value.kind, device=value.home)
    value.write_into(value.cut(whole), 1.0)
    return whole


def _mean_of_range(
    values: Sequence[Tensor], result: Tensor, start: int, end: int, divisor: float
) -> None:
    _mean([value[start:end] for value in values], result[start:end], divisor)


def _mean(values: Sequence[Tensor], result: Tensor, divisor: float) -> None:
    """`rules.mean_in_order`, block by block: the sum is still in the cache to divide."""
    if result.numel() > _BLOCK:
        flat = [value.view(-1) for value in values]
        for at in range(0, result.numel(), _BLOCK):
            block = slice(at, at + _BLOCK)
            _mean([value[block] for value in flat], result.view(-1)[block], divisor)
        return
    if len(values) == 1:
        result.copy_(values[0])
    else:
        torch.add(values[0], values[1], out=result)
    for value in values[2:]:
        result.add_(value)
    if divisor != 1.0:
        result.div_(divisor)
