"""Where a division puts the layers of a model, and who tells whom what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gossamer.pipeline.schedule import places_of
from gossamer.plan.parallel.plan import Division
from gossamer.report.pictures.placement_picture import (
    MOST_SHOWN,
    Holding,
    Placement,
    Talk,
    TalkKind,
)


def placement_of(division: Division, bounds: Sequence[int]) -> Placement:
    """Where a division puts the blocks; `bounds` are those of its chunks."""
    copy, tensor = division.machines, division.tensor
    shown = max(1, min(division.data, MOST_SHOWN // copy)) if copy <= MOST_SHOWN else 1
    places = places_of(division.pipeline, division.stages, division.chunks)
    holdings: list[Holding] = []
    talks: list[Talk] = []
    most = min(copy, MOST_SHOWN)
    for number in range(shown):
        first = number * copy
        for (start, end), stage in zip(pairwise(bounds), places, strict=True):
            own = range(stage * tensor, min((stage + 1) * tensor, most))
            if division.sharding:
                holdings.append(Holding(first, start, end, number, shown))
                continue
            holdings += [Holding(first + at, start, end, at % tensor, tensor) for at in own]
            if len(own) > 1:
                talks.append(Talk("sums", (first + own[0], first + own[-1]), start, end))
        for (_, end), (here, there) in zip(pairwise(bounds), pairwise(places), strict=False):
            ends = here * tensor, there * tensor
            if here != there and max(ends) < most:
                talks.append(Talk("activations", (first + ends[0], first + ends[1]), end, end))
    if shown > 1:
        what: TalkKind = "parameters" if division.sharding else "gradients"
        blocks = bounds[-1]
        talks.append(Talk(what, tuple(range(0, shown * copy, copy)), 0, blocks))
    left_out = division.data * copy - shown * most
    return Placement(shown * most, left_out, most, tuple(holdings), tuple(talks))


def with_servers(division: Division, bounds: Sequence[int]) -> Placement:
    """Copies of several stages, and for each stage a server that holds its parameters."""
    plain = placement_of(division, bounds)
    holdings, talks = list(plain.holdings), [t for t in plain.talks if t.kind != "gradients"]
    for stage, (start, end) in enumerate(pairwise(bounds)):
        server = plain.machines + stage
        holdings.append(Holding(server, start, end))
        talkers = range(stage * division.tensor, plain.machines, plain.copy)
        talks.append(Talk("parameters", (*talkers, server), start, end))
    return Placement(
        plain.machines + division.stages, plain.left_out, plain.copy, tuple(holdings),
        tuple(talks), division.stages,
    )  # fmt: skip
