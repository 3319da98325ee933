"""Workers that have left their loops while others go on: by early stopping, by fewer batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gossamer.observe.metrics import Metrics
from gossamer.real.router import Router


class Leavers:
    """What one worker of a synchronous method makes of those who left before it.

    No collective waits for them (`Router.announce_leaving`). With a method that waits for nobody
    they go on answering and count as before.
    """

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        options: Mapping[str, Any],
        group: tuple[int, ...],
        *,
        is_synchronous: bool,
    ) -> None:
        """`group`: those who step together whatever the method."""
        self._router = router
        self._group = group
        self._metrics = metrics
        self._is_synchronous = is_synchronous
        self._period = int(options.get("period", 1))
        self._noticed: set[int] = set()
        self._said: set[int] = set()
        """Of whom this worker itself has told the user."""

    def notice(self) -> None:
        """In every step: say once of each who left with fewer steps that the others go on."""
        members = self._router.members
        for rank, steps in members.left.items():
            if self._is_missed(rank) and steps < self._metrics.steps and rank not in self._noticed:
                self._noticed.add(rank)
                here = members.training if self._is_synchronous else self._group
                if self._router.rank == min(members.training.intersection(here), default=None):
                    self._say(rank, steps)

    def conclude(self) -> None:
        """All have left: who should have said it may have heard of it behind its own last step."""
        made = {**self._router.members.left, self._router.rank: self._metrics.steps}
        known = {rank: steps for rank, steps in made.items() if rank in self._router.live}
        here = known.keys() if self._is_synchronous else known.keys() & set(self._group)
        most = max((known[rank] for rank in here), default=0)
        if self._router.rank == min((rank for rank in here if known[rank] == most), default=None):
            for rank, steps in known.items():
                if self._is_missed(rank) and steps < most and rank not in self._said:
                    self._say(rank, steps)

    def _is_missed(self, rank: int) -> bool:
        return self._is_synchronous or rank in self._group

    def _say(self, rank: int, steps: int) -> None:
        self._said.add(rank)
        print(
            f"gossamer: worker {rank} has left its loop after {steps} steps; the "
            "others go on without it, and it gets their model in the end",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    @property
    def standing(self) -> frozenset[int]:
        """Those of the living whose models count: of a synchronous method all but those who lack a
        whole period of steps, so that the others have met without them."""
        router = self._router
        if not router.members.left or not self._is_synchronous:
            return router.live
        steps = [made for rank, made in router.members.left.items() if rank in router.live]
        most = max([*steps, self._metrics.steps])
        return frozenset(
            rank
            for rank in router.live
            if most - router.members.left.get(rank, most) < self._period
        )
