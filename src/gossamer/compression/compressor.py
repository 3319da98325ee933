"""What a compressor is, the stream that it works on, and error feedback around it.

A `Compressor` is a frozen set of options and pure functions of tensors. All that it remembers is
in a `Stream`, which belongs to one sequence of vectors between the same ends: its layout, its state
and its random numbers. A `Coder` is both together, with error feedback where that is on.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Generator, MutableMapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.replica import Layout
from gossamer.specs import check_range, print_dataclass


@dataclass(frozen=True, slots=True)
class MeanRound:
    """All give a tensor and get the mean of all: it can be summed on the way."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class GatherRound:
    """All give a tensor and get everybody's, in order of rank."""

    value: Tensor


Rounds = Generator[MeanRound | GatherRound, list[Tensor], tuple[Tensor, Tensor]]
"""What is exchanged, round by round. A round is answered by the mean alone, or by all values. The
result is the mean over all workers, and this worker's own part of it."""


@dataclass
class Stream:
    """One sequence of vectors of the same layout between the same ends."""

    layout: Layout
    name: str = ""
    """Which of its end's streams it is."""
    common: str = ""
    """The same at all ends; random numbers that they share are drawn from it."""
    seed: int = 0
    """The seed of the random numbers that are this end's own."""
    steps: int = 0
    """About how many vectors there will be; 0 if nobody knows."""
    state: MutableMapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What is remembered from vector to vector. Checkpoints keep it."""

    @property
    def count(self) -> int:
        """How many vectors have been sent."""
        found = self.state.get("count")
        return 0 if found is None else int(found)

    def sent(self) -> None:
        if "count" not in self.state:
            self.state["count"] = torch.zeros((), dtype=torch.int64)
        self.state["count"] += 1

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of this end's own. They depend on the number of the vector only, so a
        resumed run draws the same ones."""
        key = zlib.crc32(f"{self.name}/{self.seed}/{self.count}".encode())
        generator = torch.Generator("cpu" if like.is_meta else like.device).manual_seed(key)
        device = "cpu" if like.is_meta else like.device
        drawn = torch.rand(like.shape, generator=generator, device=device)
        return drawn.to(like.device)


@dataclass(frozen=True)
class Compressor:
    """The options that all have. A family adds its own, which are keyword-only fields, too."""

    name: ClassVar[str]
    rounds_models: ClassVar[bool] = False
    """Whether it takes so little from a number that whole models may be averaged in pairs."""
    own_momentum: ClassVar[str] = ""
    """The option that is its momentum, where it has one and SGD's is left out."""

    feedback: bool = field(default=False, kw_only=True)
    """Whether what was not sent is added to the next vector."""
    decay: float = field(default=1.0, kw_only=True)
    """The residual is multiplied by this before. Below 1 it forgets, as momentum does."""
    down: bool = field(default=True, kw_only=True)
    """Whether what comes back from a server is compressed as well."""

    def __post_init__(self) -> None:
        check_range(f"{self.name}: decay", self.decay, 0.0)
        if self.decay > 1.0:
            check_range(f"{self.name}: decay", self.decay, 0.0, 1.0 + 1e-9)
        self.check()

    def __str__(self) -> str:
        return print_dataclass(self.name, self)

    def check(self) -> None:
        """Refuse options that are out of range."""

    def answering(self) -> Compressor:
        """What a server answers with. The difference to what its client knows already holds all
        that was not sent before, so it needs no other feedback."""
        return dataclasses.replace(self, feedback=False)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        """The very bytes that travel, as `uint8`."""
        raise NotImplementedError

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        raise NotImplementedError

    def rounds(self, vector: Tensor, stream: Stream) -> Rounds:
        """Unless a family can sum on the way, everybody gets everybody's bytes."""
        own = self.encode(vector, stream)
        everybody = yield GatherRound(own)
        parts = [self.decode(data, stream) for data in everybody]
        return mean_of(parts), self.decode(own, stream)

    def size(self, layout: Layout) -> int:
        """The bytes of the encoding, or of what is summed on the way."""
        raise NotImplementedError

    def contraction(self, layout: Layout) -> float:
        """The largest d so that E|C(u) - u|^2 <= (1 - d) |u|^2 for every u; 0 if there is none."""
        return 0.0

    @property
    def overshoots(self) -> bool:
        """Whether its error may be longer than the vector. A copy that is told C(x - copy) again
        and again then runs away from x instead of coming nearer."""
        return False


def mean_of(parts: list[Tensor]) -> Tensor:
    """The mean, added first to last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))


class Coder:
    """A compressor on one stream. With error feedback, what one vector loses the next one gets:

    u <- g + decay e;  send C(u);  e <- u - C(u)
    """

    def __init__(self, compressor: Compressor, stream: Stream) -> None:
        self.compressor = compressor
        self.stream = stream

    @property
    def residual(self) -> Tensor | None:
        """What has not been sent yet."""
        return self.stream.state.get("residual")

    def at_rate(self, rate: float) -> None:
        """The vectors are gradients, which will be descended along at this rate from now on.

        Feedback is right for steps, rate times gradient. So when the rate changes, a residual in
        units of gradients is changed by the inverse factor.
        """
        known = self.stream.state.get("rate")
        if known is None:
            known = self.stream.state["rate"] = torch.tensor(rate, dtype=torch.float64)
        before = float(known)
        if before == rate or rate == 0.0:
            return
        if self.residual is not None:
            self.residual.mul_(before / rate)
        known.fill_(rate)

    def encode(self, vector: Tensor) -> Tensor:
        whole = self._with_residual(vector)
        data = self.compressor.encode(whole, self.stream)
        if self.compressor.feedback:
            self._keep(whole, self.decode(data))
        self.stream.sent()
        return data

    def decode(self, data: Tensor) -> Tensor:
        return self.compressor.decode(data, self.stream)

    def rounds(self, vector: Tensor) -> Rounds:
        """Does the same as `Compressor.rounds`. If a round fails, the residual is as it was."""
        whole = self._with_residual(vector)
        mean, own = yield from self.compressor.rounds(whole, self.stream)
        if self.compressor.feedback:
            self._keep(whole, own)
        self.stream.sent()
        return mean, own

    def _with_residual(self, vector: Tensor) -> Tensor:
        if not self.compressor.feedback or self.residual is None:
            return vector
        return torch.add(vector, self.residual, alpha=self.compressor.decay)

    def _keep(self, whole: Tensor, own: Tensor) -> None:
        self.stream.state["residual"] = whole - own
