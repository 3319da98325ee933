"""All-reduce in shared memory: everybody posts its value, then everybody reads.

Nothing needs to be voted on. A dead process posts nothing any more, so once each member has either
posted or is seen to be gone, the set of contributors is the same for whoever looks, whenever. A
small value, or that of a pair, is added up by every member for itself. Of a larger one each member
adds up its own chunk for all, if there are processors for all of them; otherwise, where work done
twice is work that somebody else waits for, it is added up once for all of them (`making`). What its
maker is not at, dead or merely busy elsewhere, is made by whoever needs it, so nobody ever waits
for a member that has posted and turned to something else. `arenas` is about values on a GPU that
the processes share.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.pending import Pending
from gossamer.real.transports.shm.arenas import IN_ARENA, OFFSET, Arenas
from gossamer.real.transports.shm.backoff import Vigil
from gossamer.real.transports.shm.board import Board, Room
from gossamer.real.transports.shm.chunks import Chunks
from gossamer.real.transports.shm.contributions import Posts
from gossamer.real.transports.shm.layout import CELLS
from gossamer.real.transports.shm.making import Making
from gossamer.real.transports.shm.means import add_other_half, mean, whole
from gossamer.real.transports.shm.operation import Kind, Operation
from gossamer.real.transports.shm.results import Results
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.transport import Scattered, StopToken

_CUTS = 1024
_KINDS = 256
_FEW, _SMALL_BYTES = 8, 1 << 20
"""Operations up to which nobody asks which of them are over, if their values are small."""


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
        self._posts = Posts(boards, control, self._bell, stop)
        self._making = Making(rank, boards, control)
        self._chunks = Chunks(rank, boards, control, stop)
        self._results = Results()
        self._lock = threading.Lock()
        self._cells = set(range(CELLS))
        self._posted: list[Operation] = []
        self._sequence: dict[tuple[int, ...], int] = {}
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._cuts: dict[tuple[int, int, Kind], tuple[Scattered, Sequence[Tensor]]] = {}

    def start(self, value: Tensor | Scattered, members: Sequence[int]) -> Pending[Tensor]:
        kind = self._kind_of(value, members)
        pending: Pending[Tensor] = Pending("all_reduce")
        if not kind.others:
            pending.resolve(whole(value))
            return pending
        with self._lock:
            number = self._sequence.get(kind.members, 0)
            operation = Operation(kind, number, value)
            self._make_room(operation)
            self._sequence[kind.members] = number + 1
            self._post(operation, value)
        if not kind.is_by_one:
            self._ring(kind)
        elif self._posts.are_complete(operation, is_thorough=False):
            self._make(operation, is_last=True)
        pending.settle = partial(self._settle, operation, pending)
        pending.on_cancel = operation.abandon
        return pending

    def _kind_of(self, value: Tensor | Scattered, members: Sequence[int]) -> Kind:
        if isinstance(value, Scattered):
            count, dtype, home = value.count, value.kind, value.home
        else:
            count, dtype, home = value.numel(), value.dtype, value.device
        key = (members if isinstance(members, range) else tuple(members), count, dtype, home)
        kind = self._kinds.get(key)
        if kind is None:
            group = tuple(sorted(set(members)))
            if self._rank not in group:
                raise ProtocolError(f"process {self._rank} is no member of {group}")
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            is_on_gpu = self._arenas is not None and home == self._arenas.device
            kind = self._kinds[key] = Kind(group, self._rank, count, dtype, is_on_gpu=is_on_gpu)
        return kind

    def _post(self, operation: Operation, value: Tensor | Scattered) -> None:
        own, cell, kind = self._own, operation.cell, operation.kind
        if isinstance(value, Scattered):
            pieces = self._pieces(kind, value, self._rank, operation.offset)
            value.write_into(pieces, kind.scale)
        else:
            target = self._value(kind, self._rank, operation.offset)
            if kind.scale == 1.0:
                target.copy_(value.detach().reshape(-1))
            else:
                torch.mul(value.detach().reshape(-1).to(target.device), kind.scale, out=target)
        if kind.is_on_gpu and self._arenas is not None:
            self._arenas.finish_writing()
            self._note_what_was_read()
        own.offsets[cell] = operation.offset
        own.lengths[cell] = kind.nbytes
        own.working[cell] = own.published[cell] = 0
        fence()  # whoever sees the key sees all the rest
        own.keys[cell] = operation.key
        operation.found[self._rank] = cell
        self._posted.append(operation)

    def _make_room(self, operation: Operation) -> None:
        """A cell, and bytes for the value and for this process's chunk of the result."""
        kind = operation.kind
        is_scarce = kind.is_on_gpu or kind.nbytes > _SMALL_BYTES
        if not is_scarce and len(self._posted) < _FEW and self._settle_down(operation):
            return
        while True:
            seen = self._bell.value
            self._reclaim()
            if self._cells and self._settle_down(operation):
                return
            self._note_what_was_read()
            if not any(self._is_finished(posted) for posted in self._posted):
                raise ProtocolError(
                    f"no room for {operation.kind.nbytes} bytes beside {len(self._posted)}"
                    " all-reduces that were started and not awaited; await some of them first"
                )
            self._stop.check()
            self._bell.wait(seen, 1e-3)

    def _settle_down(self, operation: Operation) -> bool:
        """Whether there were bytes for it; a cell there must be."""
        offset = self._take(operation.kind)
        if offset is None:
            return False
        operation.offset = offset
        operation.cell = self._take_cell(operation.number)
        return True

    def _take_cell(self, number: int) -> int:
        """The same as the other members take, if it is free: they look there first."""
        cell = number % CELLS
        if cell in self._cells:
            self._cells.remove(cell)
            return cell
        return self._cells.pop()

    def _take(self, kind: Kind) -> int | None:
        arenas = self._arenas
        if kind.is_on_gpu and arenas is not None:
            place = arenas.take(kind.needed_bytes, kind.members)
            if place is None:
                self._note_what_was_read()
                self._reclaim()
                place = arenas.take(kind.needed_bytes, kind.members)
            if place is not None:
                return place
        return self._room.take(kind.needed_bytes)

    def _reclaim(self) -> None:
        kept: list[Operation] = []
        for operation in self._posted:
            if operation.is_abandoned and self._is_left_alone(operation):
                self._finish(operation)
            if self._is_finished(operation) and self._is_over(operation):
                self._own.keys[operation.cell] = 0
                if operation.offset & IN_ARENA and self._arenas is not None:
                    self._arenas.give_back(operation.offset)
                else:
                    self._room.give_back(operation.offset & OFFSET)
                self._cells.add(operation.cell)
            else:
                kept.append(operation)
        self._posted = kept

    def _is_left_alone(self, operation: Operation) -> bool:
        """One that was cancelled: whether all have posted, and no thread here is still at it."""
        if not operation.settling.acquire(blocking=False):
            return False
        try:
            return self._posts.are_complete(operation, is_thorough=True)
        finally:
            operation.settling.release()

    def _note_what_was_read(self) -> None:
        if self._arenas is not None:
            self._arenas.note_what_was_read(self._finish)

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
            if not has_moved_on and not self._control.is_out_of_sums(member):
                return False
        return True

    def _settle(self, operation: Operation, pending: Pending[Tensor]) -> None:
        with operation.settling:
            if pending.done:
                return
            if threading.get_ident() != operation.thread:
                operation.scattered = None  # its places belong to a loop that goes on meanwhile
            if operation.kind.is_by_one:
                self._wait_for_all_parts(operation)
            else:
                self._posts.wait(operation)
            if pending.done:
                return  # cancelled meanwhile: what came of it is for nobody
            self._check_lengths(operation)
            result = self._lend(operation) if operation.kind.is_by_one else None
            if result is None:
                result = self._put_in_place(operation)
                if result is None:
                    result = self._mean(operation)
                if operation.kind.is_on_gpu and self._arenas is not None:
                    self._arenas.mark_reading(operation)
                else:
                    self._finish(operation)
            pending.resolve(result)
            # It refers to itself through this; the result is to go when its last user lets go.
            pending.settle = pending.on_cancel = None

    def _mean(self, operation: Operation) -> Tensor:
        """As a vector of its own."""
        kind, values = operation.kind, self._values(operation)
        if kind.is_on_gpu and self._arenas is not None:
            return self._arenas.mean(operation, values)
        result = self._results.empty(kind.count, kind.dtype)
        if kind.is_by_one:
            result.copy_(values[0])
        elif kind.is_by_each:
            mean(values, result, kind.divisor(values))
        else:
            self._chunks.reduce(operation, values, result)
        return result.view(operation.shape)

    def _sources(self, operation: Operation) -> list[tuple[int, int]]:
        """Whose memory holds what is to be added up, and where in it; in order of rank. What was
        made for all of them is one value."""
        offsets = [(m, self._boards[m].offsets[cell]) for m, cell in operation.found.items()]
        if operation.kind.is_by_one:
            first, offset = min(offsets)
            return [(first, self._making.result_at(operation, offset))]
        return sorted(offsets)

    def _values(self, operation: Operation) -> list[Tensor]:
        kind = operation.kind
        return [self._value(kind, *source) for source in self._sources(operation)]

    def _check_lengths(self, operation: Operation) -> None:
        nbytes = operation.kind.nbytes
        for member, cell in operation.found.items():
            length = self._boards[member].lengths[cell]
            if length != nbytes:
                raise ProtocolError(
                    f"process {member} put {length} bytes into an all-reduce and"
                    f" process {self._rank} put in {nbytes}"
                )

    def _value(self, kind: Kind, member: int, place: int) -> Tensor:
        if place & IN_ARENA and self._arenas is not None:
            value = self._arenas.tensor(member, place, kind.count, kind.dtype)
            return value if kind.is_on_gpu else value.cpu()
        return self._boards[member].memory.tensor(place & OFFSET, kind.count, kind.dtype)

    def _make(self, operation: Operation, *, is_last: bool) -> bool:
        """What is left of the result, for everybody; whether there was any."""
        self._check_lengths(operation)
        has_made = self._making.make(operation, is_last=is_last)
        if has_made:
            self._ring(operation.kind)
        return has_made

    def _wait_for_all_parts(self, operation: Operation) -> None:
        """Until the members have added up all; nobody is rung for before it is there."""
        self._posts.wait(operation)
        vigil = Vigil(self._bell, self._stop)
        is_first = True
        while not operation.is_abandoned:
            seen = self._bell.value
            if self._making.is_over(operation):
                return
            # Later again, as a maker may die at it.
            if (is_first or vigil.is_thorough) and self._make(operation, is_last=False):
                continue
            is_first = False
            vigil.pause(seen)

    def _lend(self, operation: Operation) -> Scattered | None:
        """What was made for all is read where it lies, if that is all that anybody wants of it:
        a copy of it would be another pass over as many bytes as there are."""
        scattered, kind = operation.scattered, operation.kind
        if scattered is None:
            return None
        (source,) = self._sources(operation)
        pieces = self._pieces(kind, scattered, *source)
        give_back = partial(self._finish, operation)
        return scattered if scattered.lend(operation.edition, pieces, give_back) else None

    def _put_in_place(self, operation: Operation) -> Scattered | None:
        """Where the value lay in pieces the mean is put there: those are in the cache, and nobody
        has to point at another place."""
        scattered, kind = operation.scattered, operation.kind
        if scattered is None or not kind.is_by_each:
            return None
        is_of_two = kind.is_of_pair and len(operation.found) == 2
        if kind.is_on_gpu and not is_of_two:
            return None
        places = scattered.places(operation.edition)
        if places is None:
            return None
        if is_of_two:
            other = kind.others[0]
            offset = self._boards[other].offsets[operation.found[other]]
            add_other_half(places, self._pieces(kind, scattered, other, offset))
            return scattered
        sources = self._sources(operation)
        pieces = [self._pieces(kind, scattered, *source) for source in sources]
        divisor = kind.divisor(sources)
        for place, *parts in zip(places, *pieces, strict=True):
            mean(parts, place, divisor)
        return scattered

    def _pieces(
        self, kind: Kind, scattered: Scattered, member: int, place: int
    ) -> Sequence[Tensor]:  # fmt: skip
        """A member's memory, cut like the value. The same few vectors are cut in every step, and
        cutting one takes as long as adding it up."""
        if place & IN_ARENA and not kind.is_on_gpu:
            return scattered.cut(self._value(kind, member, place))
        key = (member, place, kind)
        known = self._cuts.get(key)
        if known is None or known[0] is not scattered:
            if len(self._cuts) >= _CUTS:
                self._cuts.clear()
            pieces = scattered.cut(self._value(kind, member, place))
            known = self._cuts[key] = (scattered, pieces)
        return known[1]

    def _ring(self, kind: Kind) -> None:
        for member in kind.others:
            self._control.reductions[member].ring()
