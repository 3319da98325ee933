"""Values that the loops of all workers share: `worker.gather`, `mean`, `any` and `broadcast`.

With a synchronous method all workers make these calls in the same order, so a number identifies
each, and each waits until it has what all others said in theirs. With an asynchronous method nobody
waits: a call sends its value to the others and uses what they last sent.

How the values travel differs: `exchanged_values` has real workers, `virtual/virtual_session`
those of a simulation.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.payload import payload

T = TypeVar("T")
WORDS = ("gather", "mean", "any", "broadcast")


@payload
@dataclass(frozen=True)
class SharedValue:
    """What one worker says in one call."""

    rank: int
    word: str
    name: str
    value: Any


class SharedValues(ABC):
    """One worker's part in the values that the loops share."""

    def __init__(self, rank: int, size: int, *, is_synchronous: bool) -> None:
        self._rank, self._size = rank, size
        self._is_synchronous = is_synchronous
        self._number = 0
        """The number of this worker's last call, with a synchronous method."""
        self._last: dict[tuple[str, str], dict[int, list[Any]]] = {}
        """What each worker last sent; all that it sent since the last look, for `any`."""
        self._places: dict[tuple[str, str], str] = {}

    def call(self, word: str, name: str, value: Any, source: int, place: str) -> Any:
        """Make a call of one of the words. `place` is where the loop calls it."""
        if not 0 <= source < self._size:
            raise ConfigurationError(
                f"the source of worker.broadcast() must be a rank below {self._size}, got "
                f"{source}; worker.size says how many workers there are"
            )
        own = SharedValue(self._rank, word, name, _portable(word, value))
        if self._is_synchronous:
            self._number += 1
            found = self._matched(own, place)
            # Without the source, all must still get one value.
            speaker = source if source in found else min(found)
        else:
            self._check_place(own, place)
            found = self._latest(own, is_heard=word != "broadcast" or self._rank == source)
            speaker = source if source in found else self._rank
        result = found[speaker][-1] if word == "broadcast" else _combined(word, found)
        return _on_device_of(value, result)

    # ------------------------------------------------------------------ synchronous methods

    @abstractmethod
    def _matched(self, own: SharedValue, place: str) -> Mapping[int, list[Any]]:
        """What all workers say in the call of this number, by rank."""

    def _check_words(self, own: SharedValue, others: Iterable[SharedValue]) -> None:
        for other in others:
            if other.word != own.word:
                raise ConfigurationError(
                    f"worker {own.rank} called worker.{own.word}() where worker {other.rank} called"
                    f" worker.{other.word}(), as call {self._number} of these; let all workers make"
                    " the same calls in the same order"
                )

    # ------------------------------------------------------------------ asynchronous methods

    @abstractmethod
    def _exchange(
        self, own: SharedValue, *, is_heard: bool
    ) -> tuple[Sequence[SharedValue], Sequence[int]]:
        """Send the value, if others are to hear it; what they have sent since the last call, and
        who is alive."""

    def _check_place(self, own: SharedValue, place: str) -> None:
        key = (own.word, own.name)
        if self._places.setdefault(key, place) != place:
            raise ConfigurationError(
                f"worker.{own.word}() is called at {self._places[key]} and at {place}, and the "
                "workers of an asynchronous method could not tell the two apart; give each a name, "
                f"as in worker.{own.word}(value, name='loss')"
            )

    def _latest(self, own: SharedValue, *, is_heard: bool) -> Mapping[int, list[Any]]:
        said, live = self._exchange(own, is_heard=is_heard)
        for one in said:
            values = self._last.setdefault((one.word, one.name), {}).setdefault(one.rank, [])
            if one.word != "any":
                values.clear()
            values.append(one.value)
        last = self._last.setdefault((own.word, own.name), {})
        last[own.rank] = [own.value]
        heard = {rank: last[rank] for rank in sorted(live) if rank in last}
        for rank in heard:
            last[rank] = last[rank][-1:]
        return heard


def _portable(word: str, value: Any) -> Any:
    """A copy of the value that can travel."""
    if word == "any":
        return bool(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if word == "mean":
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"worker.{word}() takes a tensor, a number or a string, got a {type(value).__name__}"
    )


def _combined(word: str, found: Mapping[int, list[Any]]) -> Any:
    """What all said last, or the mean of it, or whether anybody said so."""
    if word == "any":
        return any(any(values) for values in found.values())
    values = [values[-1] for values in found.values()]
    if word == "gather":
        return values
    if not any(isinstance(value, Tensor) for value in values):
        return sum(values) / len(values)
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else None for value in values}
    if len(shapes) > 1:
        raise ConfigurationError(
            f"worker.mean() got values of several shapes ({shapes}); give it the same kind of value"
            " on all workers"
        )
    stacked = torch.stack(values)
    is_float = stacked.is_floating_point()
    return (stacked if is_float else stacked.to(torch.get_default_dtype())).mean(0)


def _on_device_of(value: Any, result: Any) -> Any:
    if isinstance(result, list):
        return [_on_device_of(value, one) for one in cast("list[Any]", result)]
    is_on_device = isinstance(value, Tensor) and isinstance(result, Tensor)
    return result.to(value.device) if is_on_device else result


class SharedWords:
    """What a loop may ask of all workers together."""

    @property
    def rank(self) -> int:
        """The number of this worker."""
        raise NotImplementedError

    def manual_seed(self, seed: int) -> None:
        """Seed torch's, numpy's and Python's common generators differently on each worker. After
        the same `torch.manual_seed` all workers would drop the same units and augment alike. Worker
        0 gets the given seed itself."""
        own = random.Random(f"{seed}/{self.rank}").getrandbits(62) if self.rank else seed
        torch.manual_seed(own)
        np.random.seed(own % (1 << 32))
        random.seed(own)

    def broadcast(self, value: T, source: int = 0, *, name: str = "") -> T:
        """The value of worker `source`: a tensor, a number or a string. With a synchronous method
        all workers call it, and if the source has left, the lowest rank there is speaks instead.
        With an asynchronous one it waits for nobody and returns what was last heard of the source,
        or else the own value."""
        return self._shared("broadcast", name, value, source)

    def gather(self, value: T, *, name: str = "") -> list[T]:
        """What every worker says, in order of rank: tensors, numbers or strings. Who waits for
        whom, and who is left out, is as with `mean`."""
        return self._shared("gather", name, value, 0)

    def mean(self, value: T, *, name: str = "") -> T:
        """The mean of a number or a tensor over the workers. With a synchronous method all workers
        call it, and who has left is left out. With an asynchronous one it waits for nobody, and of
        each other living worker counts what it last gave; calls at several places of a loop need
        names then."""
        return self._shared("mean", name, value, 0)

    def any(self, flag: object, *, name: str = "") -> bool:
        """Whether the flag is true on any worker, so that all can stop together. With a synchronous
        method all workers call it and get the same answer. With an asynchronous one it waits for
        nobody, and each worker hears of a flag in its next call."""
        return bool(self._shared("any", name, flag, 0))

    def _shared(self, word: str, name: str, value: Any, source: int) -> Any:
        raise NotImplementedError
