"""One process of an island over which a model is sharded."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.observe.run_observer import RunObserver
from gossamer.real.output_model import Contribution
from gossamer.real.pipelines.stage_session import StageSession
from gossamer.real.session import heard
from gossamer.real.transports.transport import Transport
from gossamer.replica import Layout


class IslandSession(StageSession):
    """A session of a user's loop in an island: its world are the same shards of all islands."""

    @staticmethod
    def of(
        transport: Transport, spec: MethodSpec, observer: RunObserver, layout: Layout,
        processes: int, *, seed: int, steps: int,
    ) -> IslandSession:  # fmt: skip
        """`processes` is how many an island has."""
        store, rank = transport.store, transport.rank
        store.agree(f"shards/{rank}", json.dumps([layout.names, layout.sizes]))
        first, layouts = rank - rank % processes, list[Layout]()
        for other in range(first, first + processes):
            told = heard(store, f"shards/{other}", f"worker {other}", "what it holds")
            names, sizes = json.loads(told)
            shapes = tuple(torch.Size([size]) for size in sizes)
            layouts.append(Layout(tuple(names), shapes, tuple(sizes)))
        layouts[rank - first] = layout
        return IslandSession(
            transport, spec, observer, layouts, seed=seed, steps=steps, has_leavers=True
        )

    def contributions(
        self, ranks: Iterable[int], step: int = 0
    ) -> tuple[list[Contribution], list[Contribution]]:
        same = set(self.grouping.same_stage(self.grouping.stage))
        return super().contributions([rank for rank in ranks if rank in same], step)


def check_coupling(spec: MethodSpec) -> None:
    """Refuse what cannot be between islands."""
    reason = None
    if spec.shape.machines > 1 or spec.groups or spec.balance:
        reason = "the islands are the replicas; leave out stages=, tensor=, groups= and balance="
    elif spec.method.has_server:
        reason = "islands have no servers; choose a method of workers alone, such as diloco"
    if reason is not None:
        raise ConfigurationError(f"{spec} cannot couple islands: {reason}")
