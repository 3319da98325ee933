"""The batches of a replica of several processes, of which the first takes them for all.

All processes of a replica make the same steps with the same batches. A pipeline that is never
emptied begins the batches of later steps early, so these are taken ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.payload import payload
from gossamer.real.pipelines.stage_links import StageLinks
from gossamer.real.train.batches import Batches, Indices, State


@payload
@dataclass(frozen=True, slots=True)
class StageBatch:
    """One step of a replica; without samples the run is over."""

    samples: Tensor
    epoch: float


class StageBatches:
    """Opens the same steps in all processes of a replica."""

    def __init__(self, batches: Batches, ahead: int) -> None:
        """`batches` are those of the replica; `ahead` is how many later ones are taken early."""
        self.epoch = 0.0
        self.expected_steps = batches.expected_steps
        self.batches = batches
        self.links: StageLinks | None = None
        """Set before the first step."""
        self._ahead = ahead
        self._taken = deque[StageBatch]()
        self._is_over = False
        self.coming: dict[int, Tensor] = {}
        """The samples of the step under way, and of those after it as far as they are known."""
        self._opened = 0
        self._has_drawn = True

    def open_step(self, step: int) -> bool:
        while not self._is_over and len(self._taken) <= self._ahead:
            found = self._next(self._opened)
            self._is_over = not len(found.samples)
            if not self._is_over:
                self._taken.append(found)
                self._opened += 1
        self._has_drawn = False
        if self._taken:
            self.epoch = self._taken[0].epoch
        return bool(self._taken)

    def _next(self, step: int) -> StageBatch:
        links = self.links
        assert links is not None
        if links.stage:
            return links.wait(links.receive(0, ("batch", step)))
        found = StageBatch(torch.empty(0, dtype=torch.int64), 0.0)
        if self.batches.open_step(step):
            found = StageBatch(torch.from_numpy(self.batches.next_batch()), self.batches.epoch)
        for stage in range(1, links.stages):
            links.send(stage, found, ("batch", step))
        return found

    def next_batch(self) -> Indices:
        if self._has_drawn:
            raise ConfigurationError(
                "this method takes several gradients in one step, or outside of its steps, and a "
                "replica of several processes takes one in each; leave out stages="
            )
        self._has_drawn = True
        first = self._opened - len(self._taken)
        self.coming = {first + number: batch.samples for number, batch in enumerate(self._taken)}
        return self._taken.popleft().samples.numpy()

    # Between two steps of a pipeline that is emptied nothing has been taken ahead.

    def state(self) -> State:
        return {**self.batches.state(), "opened": self._opened}

    def resume(self, own: State, everyone: Sequence[State]) -> None:
        self.batches.resume(own, everyone)
        self._opened = own["opened"]
