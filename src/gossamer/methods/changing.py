"""A method that changes during a run: gossip while steps are large, all-reduce when they are small.

Each phase is the text of another method, which runs over a handle whose steps end at the change. In
between all workers meet once: models and optimiser states become their means, and everybody goes on
from the same number of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gossamer.compression.compressed_worker import compressed
from gossamer.errors import ConfigurationError, PeerLost
from gossamer.methods.method import WAITS_FOR, Method, Options, Promises, for_role
from gossamer.pending import Pending
from gossamer.replica import Replica, forget
from gossamer.worker import Message, Tag, Worker

if TYPE_CHECKING:
    from gossamer.methods.spec import MethodSpec

DROP = "drop"
"""Instead of a share of the run: when the learning rate has fallen to half of what it was."""
_KEPT = "phase"


class PhaseWorker:
    """The `Worker` of one phase. Its steps end at the change; everything else is the worker's own,
    under tags that no other phase uses."""

    def __init__(
        self, inner: Worker, x: Replica, steps: _Steps, phase: int, at: str, *, together: bool
    ) -> None:
        """`at` says when it ends, and is empty in the last phase; `together` that all workers make
        the same steps, so that each knows for itself when it is time."""
        self._inner = inner
        self._x = x
        self._steps = steps
        self._phase = phase
        self._at = at
        self._together = together
        self._largest = 0.0
        self._is_over = False
        self._averages: list[Pending[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def over(self) -> bool:
        return self._is_over or self._inner.over

    def steps(self) -> Iterator[int]:
        for t in self._steps:
            if self._at and self._is_time(t):
                self._steps.put_back(t)
                self._is_over = True
                return
            yield t

    def _is_time(self, t: int) -> bool:
        word: Tag = ("change", self._phase)
        if not self._together and self._inner.collect(word):
            return True
        rate = self._x.learning_rate
        self._largest = max(self._largest, rate)
        if self._at == DROP:
            is_time = rate <= self._largest / 2
        else:
            is_time = t >= float(self._at) * self._inner.expected_steps
        if is_time and not self._together:
            for peer in self._inner.peers:
                self._inner.send(peer, None, tag=word)
        return is_time

    def _own(self, tag: Tag) -> Tag:
        if isinstance(tag, str):
            return f"{tag} {self._phase}"
        return (f"{tag[0]} {self._phase}", tag[1])

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        return self._inner.send(to, payload, tag=self._own(tag))

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        return self._inner.request(to, payload, tag=self._own(tag))

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        return self._inner.receive(self._own(tag), source=source)

    def collect(self, tag: Tag) -> list[Message]:
        return self._inner.collect(self._own(tag))

    def average(self, peer: int) -> Pending[None]:
        if self._is_over:
            return Pending("average", peer)  # the loop beside the main one waits for ever
        pending, ended = self._inner.average(peer), Pending[None]("average", peer)
        pending.when_done(lambda: ended.resolve(None))
        self._averages = [*(one for one in self._averages if not one.done), ended]
        return pending

    async def settle(self) -> None:
        """Wait until what this worker has begun to change elsewhere is done."""
        for average in self._averages:
            await average


class _Steps:
    """The numbers of one worker's steps, of all phases, from the same number on after a change."""

    def __init__(self, w: Worker) -> None:
        self._inner = w.steps()
        self._ahead: list[int] = []
        self.shift = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return self.shift + (self._ahead.pop() if self._ahead else next(self._inner))

    def put_back(self, t: int) -> None:
        self._ahead.append(t - self.shift)

    def shift_to(self, t: int) -> None:
        """Let the step that was put back have this number."""
        self.shift = t - self._ahead[-1]

    @property
    def has_more(self) -> bool:
        return bool(self._ahead)

    @property
    def following(self) -> int:
        return self.shift + self._ahead[-1]


async def _meet(w: Worker, x: Replica, steps: _Steps) -> None:
    """All models and optimiser states become their means, and the steps get a common number."""
    own = torch.tensor([steps.following, x.weight], dtype=torch.float64)
    told = list((await w.all_gather(own)).values())
    steps.shift_to(int(max(float(one[0]) for one in told)))
    weight = sum(float(one[1]) for one in told) / len(told)
    mean = await w.all_reduce(x.snapshot())
    x.assign_(mean if weight == 1.0 else mean / weight)  # push-sum's models are its numerators
    if weight != 1.0:
        x.weight = 1.0
    state: Tensor = x.optimiser_state()
    if state.numel():
        x.load_optimiser_state_(await w.all_reduce(state))


def changing(specs: Sequence[MethodSpec], points: Sequence[str]) -> Method:
    """The row of a method that runs these one after the other."""
    _check(specs, points)
    rows = [spec.method for spec in specs]
    roles = [
        compressed(spec.method.worker, spec.compressor, spec.method.exchange) for spec in specs
    ]

    def in_rounds(options: Options) -> list[bool]:
        return [row.is_synchronous(own) for row, own in _phases(rows, options)]

    async def change(w: Worker, x: Replica, *, phases: Any = None) -> None:
        steps = _Steps(w)
        kept = x.memory.get(_KEPT, torch.zeros(2, dtype=torch.int64)).tolist()
        first, steps.shift = int(kept[0]), int(kept[1])
        together = in_rounds({"phases": phases})
        for number in range(first, len(specs)):
            at = points[number] if number < len(points) else ""
            handle = PhaseWorker(w, x, steps, number, at, together=all(together[: number + 1]))
            own = for_role(specs[number].method.worker, phases[number])
            await roles[number](cast(Worker, handle), x, **own)
            if not steps.has_more:
                return
            try:
                await handle.settle()
            except PeerLost:
                pass
            await _meet(w, x, steps)
            forget(x.memory)
            x.memory[_KEPT] = torch.tensor([number + 1, steps.shift])

    return Method(
        _title(specs, points),
        rows[-1].family,
        "; ".join(dict.fromkeys(row.paper for row in rows)),
        "mean",
        change,
        _promises(rows, points),
        shares_replica=any(row.shares_replica for row in rows),
        is_synchronous=lambda options: all(in_rounds(options)),
        suits=lambda workers, length: {"phases": [spec.resolve(workers, length) for spec in specs]},
        about=f"{specs[0].name} first; {', then '.join(spec.name for spec in specs[1:])} later.",
    )


def _phases(rows: Sequence[Method], options: Options) -> Iterator[tuple[Method, Options]]:
    return zip(rows, options["phases"], strict=True)


def _title(specs: Sequence[MethodSpec], points: Sequence[str]) -> str:
    parts = [str(specs[0])]
    for at, spec in zip(points, specs[1:], strict=True):
        parts += [at, str(spec)]
    return "@".join(parts)


def _promises(rows: Sequence[Method], points: Sequence[str]) -> Promises:
    """What all phases promise; traffic is their mean by length, memory that of the largest."""
    ends = [0.0, *(0.5 if at == DROP else float(at) for at in points), 1.0]
    shares = [end - start for start, end in pairwise(ends)]

    def models(workers: int, options: Options) -> float:
        sent = [row.promises.models_per_step(workers, own) for row, own in _phases(rows, options)]
        return sum(share * one for share, one in zip(shares, sent, strict=True))

    def memory(workers: int, options: Options) -> float:
        held = [row.promises.memory(workers, own) for row, own in _phases(rows, options)]
        return 2.0 + max(held)

    waits = [row.promises.waits_for for row in rows]
    return Promises(
        all(row.promises.keeps_mean for row in rows),
        next((one for one in waits if WAITS_FOR[one]), waits[0]),
        rows[0].promises.staleness,
        all(row.promises.survives_death for row in rows),
        "first one, then the other",
        models,
        is_plain_alone=all(row.promises.is_plain_alone for row in rows),
        memory=memory,
    )


def _check(specs: Sequence[MethodSpec], points: Sequence[str]) -> None:
    ends = [float(at) for at in points if at != DROP]
    if any(not 0.0 < end < 1.0 for end in ends) or sorted(set(ends)) != ends:
        raise ConfigurationError(
            f"a method changes at shares of the run between 0 and 1, in order, got "
            f"{', '.join(points)}; write first@0.5@second"
        )
    for spec in specs:
        if spec.method.has_server or spec.method.output != "mean":
            raise ConfigurationError(
                f"{spec.name} cannot be part of a method that changes: its model is held "
                "elsewhere than at the workers; choose methods without a server"
            )
        if spec.groups or spec.balance:
            raise ConfigurationError(
                f"{spec.name}: groups= and balance= hold for a whole run, so no phase of a method "
                "that changes can have them; leave them out"
            )
    for before, after in pairwise(specs):
        is_free = not WAITS_FOR[before.method.promises.waits_for]
        if is_free and after.method.promises.waits_for in ("neighbours", "in-neighbours"):
            raise ConfigurationError(
                f"{after.name} cannot follow {before.name}: after steps that nobody has counted "
                "together, neighbours do not end together; let all_reduce or local_sgd follow"
            )
