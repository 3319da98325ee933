"""Deaths that only the torch transport can be brought to, each in a group of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gossamer.real.transports.conformance.death_laws import (
    SURVIVORS,
    VICTIM,
    check_mean,
    survivors_reduce,
)
from gossamer.real.transports.conformance.tools import Tools, mean_of, scenario, values_of
from gossamer.real.transports.torch import TorchTransport
from gossamer.real.transports.torch.links import Link
from gossamer.real.transports.torch.reduce import CONTRIBUTION
from gossamer.real.transports.torch.wire import PIECE
from gossamer.rules import mean_in_order

LONG = 9 * PIECE // 4
"""Elements of which each of three owners has three pieces."""
EXIT_CODE = 3


@scenario(victims=[VICTIM])
def scenario_a_death_in_the_middle_of_a_large_sum(
    transport: TorchTransport, rank: int, size: int, tools: Tools
) -> None:
    """Of its pieces one came, so that an owner has begun to send a mean that it cannot make."""
    if rank == VICTIM:
        sends_one_piece(transport)
    elif rank == 0:
        tells_of_the_first_piece(transport, tools)
    pending = mean_of(transport, values_of(rank, LONG), range(size))
    if rank == VICTIM:
        tools.wait_for_arrivals("begun", 1)
        tools.die()
    mean = tools.wait(pending)
    assert torch.equal(mean, mean_in_order([values_of(member, LONG) for member in SURVIVORS]))
    other = 2 - rank
    transport.send(other, [b"not held up"])
    assert tools.recorder.take(other) == b"not held up"
    tools.notices_death(VICTIM)
    survivors_reduce(transport, rank, tools, first=1)


def sends_one_piece(transport: TorchTransport) -> None:
    for peer in transport._links.peers:
        link = transport._links[peer]
        link.post = partial(cut_short, link, link.post)


def cut_short(link: Link, post: Any, kind: int, head: bytes, body: Any = None) -> None:
    if kind != CONTRIBUTION:
        post(kind, head, body)
    elif link.peer == 0:
        link.begin(kind, head, body.numel()).push(body[:PIECE])


def tells_of_the_first_piece(transport: TorchTransport, tools: Tools) -> None:
    """Once the owner has sent it on."""
    sums = transport._reduction
    pass_on = sums._pass_on

    def telling(*arguments: Any) -> None:
        pass_on(*arguments)
        tools.arrive("begun")

    sums._pass_on = telling


@scenario(victims=[VICTIM])
def scenario_a_death_at_any_moment_of_large_sums(
    transport: TorchTransport, rank: int, size: int, tools: Tools
) -> None:
    """Some of their pieces have landed; all survivors get the same bits all the same."""
    for number in range(6):
        pending = mean_of(transport, values_of(rank, LONG, number), range(size))
        if rank == VICTIM and number == 3:
            tools.die()
        mean = tools.wait(pending)
        check_mean(mean, LONG, number)
        tools.everybody_agrees(f"mean {number}", mean)
    tools.notices_death(VICTIM)
    survivors_reduce(transport, rank, tools, first=6)


@scenario(victims=[VICTIM])
def scenario_a_process_that_ends_without_closing_is_dead(
    transport: TorchTransport, rank: int, size: int, tools: Tools
) -> None:
    """Its code failed: the interpreter ends in good order, and yet nobody is to wait for it."""
    pending = mean_of(transport, values_of(rank, 50_000), range(size))
    tools.wait(pending)
    if rank == VICTIM:
        raise SystemExit(EXIT_CODE)
    tools.until(lambda: VICTIM in tools.recorder.lost_at, "the loss of the one that failed")
    assert transport.lost == {VICTIM}
    assert tools.recorder.reports == [VICTIM]
    survivors_reduce(transport, rank, tools, first=1)
