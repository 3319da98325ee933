"""All-reduce in shared memory: every member posts its value, and the members add up what is posted.

The members need no vote about who contributes; `contributions` says why. For a small value, and for
two members, each adds up the whole value for itself (`rules.mean_into`). For a larger value each
member adds up its own chunk and publishes it for all. If a member is not working at its chunk,
because it is dead or busy elsewhere, the others add up that chunk themselves. So no member ever
waits for one that has posted and turned to something else. `gpu` is about values on a GPU that the
processes share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.pending import Pending
from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.shm.contributions import (
    ON_GPU,
    Board,
    Contributions,
    OwnContribution,
    ReduceKind,
)
from gossamer.real.transports.shm.memory import CELLS, Control, FreeList, aligned
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.transport import StopToken
from gossamer.rules import mean_into

if TYPE_CHECKING:
    from gossamer.real.transports.shm.gpu import GpuArenas

_CUTS = 1024
_KINDS = 256
_FEW, _SMALL_BYTES = 40, 1 << 20
"""Up to so many small contributions may be posted before the process looks which are over."""
_BUSY_S = 0.02


class SharedMemoryAllReduce:
    """The all-reduces of one process."""

    def __init__(
        self, rank: int, boards: dict[int, Board], memory: FreeList, control: Control,
        stop: StopToken, arenas: GpuArenas | None = None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._boards = boards
        self._own = boards[rank]
        self._memory = memory
        self._control = control
        self._bell = control.reductions[rank]
        self._stop = stop
        self._arenas = arenas
        self._contributions = Contributions(boards, control, self._bell, stop)
        self._lock = threading.Lock()
        self._cells = set(range(CELLS))
        self._posted: list[OwnContribution] = []
        self._sequence: dict[tuple[int, ...], int] = {}
        self._kinds: dict[Any, ReduceKind] = {}
        self._cuts: dict[tuple[int, int, ReduceKind], Sequence[Tensor]] = {}

    def start(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        kind = self._kind_of(tensors, members)
        if not kind.others or not kind.count:
            return Pending.resolved("all_reduce", None)
        pending: Pending[None] = Pending("all_reduce")
        with self._lock:
            number = self._sequence.get(kind.members, 0)
            own = OwnContribution(kind, number, tensors)
            self._allocate(own)
            self._sequence[kind.members] = number + 1
            self._post(own)
        self._ring(kind)
        pending.settle = partial(self._finish, own, pending)
        pending.on_cancel = partial(_abandon, own, pending)
        return pending

    def _kind_of(self, tensors: Sequence[Tensor], members: Sequence[int]) -> ReduceKind:
        first = tensors[0] if tensors else None
        where = None if first is None else (first.dtype, first.device)
        shapes = tuple([tensor.shape for tensor in tensors])
        key = (members if isinstance(members, range) else tuple(members), where, shapes)
        kind = self._kinds.get(key)
        if kind is None:
            group = tuple(sorted(set(members)))
            if self._rank not in group:
                raise ProtocolError(f"process {self._rank} is no member of {group}")
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
                self._cuts.clear()
            arenas = self._arenas
            is_on_gpu = arenas is not None and first is not None and first.device == arenas.device
            kind = self._kinds[key] = ReduceKind(group, self._rank, tensors, is_on_gpu=is_on_gpu)
        return kind

    def leave(self) -> None:
        """This process contributes to no further sum, and finishes those that it has begun."""
        if self._arenas is not None:
            with self._lock:
                self._arenas.finish_writing()
                self._note_what_was_read()
        self._control.leave_sums(self._rank)

    # ------------------------------------------------------------------ posting

    def _post(self, own: OwnContribution) -> None:
        board, cell, kind = self._own, own.cell, own.kind
        _write_scaled(self._pieces(kind, self._rank, own.place), own.tensors, kind)
        if kind.is_on_gpu and self._arenas is not None:
            self._arenas.finish_writing()
            self._note_what_was_read()
        board.places[cell] = own.place
        board.lengths[cell] = kind.nbytes
        board.working[cell] = board.published[cell] = 0
        fence()  # a process that sees the key also sees the rest of the cell
        board.keys[cell] = own.key
        own.found[self._rank] = cell
        self._posted.append(own)

    def _allocate(self, own: OwnContribution) -> None:
        """Find a cell, and memory for the value and for this process's chunk of the mean."""
        kind = own.kind
        # Small contributions take turns in memory and do not use the same place at once again: it
        # is in the caches of the others, from where it would have to be fetched back.
        is_scarce = kind.is_on_gpu or kind.nbytes > _SMALL_BYTES or len(self._posted) >= _FEW
        while True:
            seen = self._bell.value
            if is_scarce:
                self._note_what_was_read()
                self._reclaim()
            place = self._take(kind) if self._cells else None
            if place is not None:
                own.place, own.cell = place, self._take_cell(own.number)
                return
            is_scarce = True
            if not any(self._is_finished(posted) for posted in self._posted):
                raise ProtocolError(
                    f"no room for {kind.nbytes} bytes beside {len(self._posted)}"
                    " all-reduces that were started and not awaited; await some of them first"
                )
            self._stop.check()
            self._bell.wait(seen, 1e-3)

    def _take_cell(self, number: int) -> int:
        """Take the cell in which the other members look first, if it is free."""
        cell = number % CELLS
        if cell in self._cells:
            self._cells.remove(cell)
            return cell
        return self._cells.pop()

    def _take(self, kind: ReduceKind) -> int | None:
        if kind.is_on_gpu and self._arenas is not None:
            place = self._arenas.take(kind.needed_bytes, kind.members)
            if place is not None:
                return place
        return self._memory.take(kind.needed_bytes)

    def _reclaim(self) -> None:
        """Free the cells and the memory of contributions that no process will read any more."""
        kept: list[OwnContribution] = []
        for own in self._posted:
            if own.is_abandoned and self._is_left_alone(own):
                self._mark_finished(own)
            if not self._is_finished(own) or not self._is_over(own):
                kept.append(own)
                continue
            self._own.keys[own.cell] = 0
            if own.place & ON_GPU and self._arenas is not None:
                self._arenas.give_back(own.place)
            else:
                self._memory.give_back(own.place)
            self._cells.add(own.cell)
        self._posted = kept

    def _is_left_alone(self, own: OwnContribution) -> bool:
        """Whether all members of a cancelled all-reduce have posted, and no thread here uses it."""
        if not own.finishing.acquire(blocking=False):
            return False
        try:
            return self._contributions.are_complete(own)
        finally:
            own.finishing.release()

    def renew(self, process: int, board: Board) -> None:
        """A process has come back with other memory."""
        with self._lock:
            self._boards[process] = board
            self._cuts.clear()

    def _note_what_was_read(self) -> None:
        if self._arenas is not None:
            self._arenas.note_what_was_read(self._mark_finished)

    def _mark_finished(self, own: OwnContribution) -> None:
        self._own.finished[own.cell] = own.key

    def _is_finished(self, own: OwnContribution) -> bool:
        return self._own.finished[own.cell] == own.key

    def _is_over(self, own: OwnContribution) -> bool:
        """Whether no process will read this contribution any more."""
        for member, cell in own.found.items():
            board = self._boards[member]
            has_moved_on = board.keys[cell] != own.key or board.finished[cell] == own.key
            # A member that has only left the sums may still read those that it had begun.
            if not has_moved_on and not self._control.is_gone(member):
                return False
        return True

    # ------------------------------------------------------------------ finishing

    def _finish(self, own: OwnContribution, pending: Pending[None]) -> None:
        """Wait for the others and write the mean, in the thread that awaits the all-reduce."""
        with own.finishing:
            tensors = own.tensors
            if pending.done:
                return
            self._contributions.wait(own)
            if pending.done:
                return  # cancelled meanwhile
            self._check_lengths(own)
            self._write_mean(own, tensors)
            if own.kind.is_on_gpu and self._arenas is not None:
                self._arenas.mark_reading(own)
            else:
                self._mark_finished(own)
            own.tensors = ()
            pending.resolve(None)
            # The operation refers to itself through these, which would keep the tensors alive.
            pending.settle = pending.on_cancel = None

    def _check_lengths(self, own: OwnContribution) -> None:
        nbytes = own.kind.nbytes
        for member, cell in own.found.items():
            length = self._boards[member].lengths[cell]
            if length != nbytes:
                raise ProtocolError(
                    f"process {member} put {length} bytes into an all-reduce and"
                    f" process {self._rank} put in {nbytes}"
                )

    def _write_mean(self, own: OwnContribution, tensors: Sequence[Tensor]) -> None:
        kind = own.kind
        sources = sorted((m, self._boards[m].places[cell]) for m, cell in own.found.items())
        if kind.is_on_gpu and self._arenas is not None:
            values = [self._value(kind, *source) for source in sources]
            self._arenas.write_mean(kind, values, tensors)
            return
        is_here = tensors[0].device.type == "cpu"
        targets = tensors if is_here else [torch.empty_like(one, device="cpu") for one in tensors]
        if kind.is_by_each:
            divisor = kind.divisor(len(sources))
            pieces = [self._pieces(kind, *source) for source in sources]
            for target, *values in zip(targets, *pieces, strict=True):
                mean_into(target, values, divisor)
        else:
            self._write_by_chunks(own, [self._value(kind, *source) for source in sources], targets)
        if not is_here:
            for tensor, target in zip(tensors, targets, strict=True):
                tensor.copy_(target)

    def _write_by_chunks(
        self, own: OwnContribution, values: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        """Add up this process's own chunk for all, and copy the chunks of the others."""
        key, kind, board = own.key, own.kind, self._own
        divisor = kind.divisor(len(values))
        flat = [target.view(-1) if target.is_contiguous() else None for target in targets]
        places = [t.new_empty(t.numel()) if f is None else f
                  for t, f in zip(targets, flat, strict=True)]  # fmt: skip
        board.working[own.cell] = key
        mine, _ = kind.chunks[self._rank]
        mean_into(self._chunk(own, self._rank), [value[mine] for value in values], divisor)
        fence()
        board.published[own.cell] = key
        self._ring(kind)
        missing = dict(kind.chunks)
        backoff = Backoff(self._stop, _BUSY_S)
        while missing:
            seen = self._bell.value
            for member, (chunk, segments) in list(missing.items()):
                cell = own.found.get(member)
                there = self._boards[member]
                if cell is not None and there.published[cell] == key:
                    made = self._chunk(own, member)
                    for number, part, of_all in segments:
                        start = of_all.start - chunk.start
                        places[number][part].copy_(made[start : start + part.stop - part.start])
                elif (
                    cell is None
                    or there.working[cell] != key
                    or self._control.is_out_of_sums(member)
                ):
                    for number, part, of_all in segments:
                        mean_into(places[number][part], [v[of_all] for v in values], divisor)
                else:
                    continue
                del missing[member]
            if missing and not backoff.yields():
                self._bell.wait(seen, self._stop.patience)
        for target, view, place in zip(targets, flat, places, strict=True):
            if view is None:
                target.copy_(place.view(target.shape))

    def _chunk(self, own: OwnContribution, member: int) -> Tensor:
        """Return the memory of a member's chunk, which follows its contribution."""
        board, (chunk, _) = self._boards[member], own.kind.chunks[member]
        place = board.places[own.found[member]] + aligned(own.kind.nbytes)
        return board.memory.tensor(place, chunk.stop - chunk.start, own.kind.dtype)

    # ------------------------------------------------------------------ memory

    def _value(self, kind: ReduceKind, member: int, place: int) -> Tensor:
        """Return the contribution of a member as one vector."""
        if place & ON_GPU and self._arenas is not None:
            value = self._arenas.tensor(member, place, kind.count, kind.dtype)
            return value if kind.is_on_gpu else value.cpu()
        return self._boards[member].memory.tensor(place, kind.count, kind.dtype)

    def _pieces(self, kind: ReduceKind, member: int, place: int) -> Sequence[Tensor]:
        """Return the contribution of a member, cut into tensors. The same few vectors are cut in
        every step, and to cut one takes as long as to add it up, so the cuts are kept."""
        key = (member, place, kind)
        known = self._cuts.get(key)
        if known is None:
            cut = self._value(kind, member, place).split(kind.sizes)
            known = [piece.view(shape) for piece, shape in zip(cut, kind.shapes, strict=True)]
            if place & ON_GPU and not kind.is_on_gpu:
                return known  # a copy of the present value
            if len(self._cuts) >= _CUTS:
                self._cuts.clear()
            self._cuts[key] = known
        return known

    def _ring(self, kind: ReduceKind) -> None:
        for member in kind.others:
            self._control.reductions[member].ring()


def _abandon(own: OwnContribution, pending: Pending[None]) -> None:
    """This process does not want the mean any more, but others still read the contribution."""
    own.is_abandoned = True
    own.tensors = ()
    pending.settle = None  # the operation refers to itself through this


def _write_scaled(places: Sequence[Tensor], tensors: Sequence[Tensor], kind: ReduceKind) -> None:
    if places[0].is_cuda or places[0].device != tensors[0].device:
        # One kernel for all tensors, because to start one takes longer than its work.
        together = cast(Any, torch)
        together._foreach_copy_(places, tensors)
        if kind.scale != 1.0:
            together._foreach_mul_(places, kind.scale)
    elif kind.scale == 1.0:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
    else:
        for place, tensor in zip(places, tensors, strict=True):
            torch.mul(tensor, kind.factor, out=place)
