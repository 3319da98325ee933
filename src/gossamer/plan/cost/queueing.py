"""Closed queueing networks of network cards that several workers use at random times.

A card divides its capacity equally between the transfers that cross it: a processor-sharing
station. Workers alternate between computing and a card: a closed network with a product-form
solution, in which only mean times matter (Baskett, Chandy, Muntz & Palacios 1975). Mean value
analysis (Reiser & Lavenberg 1980) evaluates it exactly: an arriving customer sees the mean queue
of the network without itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROUNDS = 200
"""Iterations of a fixed point, each of which halves the error."""


def response_s(customers: int, think_s: float, services_s: Sequence[float]) -> float:
    """The seconds that a customer spends at all stations in a round with one visit to each."""
    queues = [0.0] * len(services_s)
    response = 0.0
    for count in range(1, customers + 1):
        times = [service * (1 + queue) for service, queue in zip(services_s, queues, strict=True)]
        response = sum(times)
        cycle = think_s + response
        queues = [count / cycle * time if cycle else 0.0 for time in times]
    return response


def read_from_another_s(members: int, think_s: float, service_s: float) -> float:
    """The seconds of a transfer from the card of another member, chosen at random each time.

    Every member is a customer of all cards but its own. With n members in the network, the cards of
    these n have n - 1 users and all other cards have n; by symmetry no other cases exist.
    """
    if members < 2:
        return 0.0
    inside = outside = response = 0.0
    for count in range(1, members + 1):
        at_inside, at_outside = service_s * (1 + inside), service_s * (1 + outside)
        others = members - 1
        response = ((count - 1) * at_inside + (members - count) * at_outside) / others
        rate = 1 / (think_s + response) / others
        inside, outside = (count - 1) * rate * at_inside, count * rate * at_outside
    return response


def pulled_round_s(members: int, think_s: float, service_s: float) -> float:
    """The seconds of one round of computing and of reading from a random other member.

    Messages of one connection keep their order, so a request to a member that is reading from this
    one waits behind the data sent to that member. A pair is in that state for a share `a` of the
    time in either direction, and never in both, so the share is a / (1 - a) of the time in which
    this member does not read from the other. A delayed member begins when the other has read, and
    meets it again if that one computes for less than a transfer takes.
    """
    if members < 2:
        return think_s
    others, blocked_s, response = members - 1, 0.0, service_s
    for _ in range(_ROUNDS):
        response = read_from_another_s(members, think_s + blocked_s, service_s)
        share = response / (think_s + blocked_s + response) / others
        met = share / (1 - share)
        residual_s = response * (1 + _squared_variation(members, response / service_s)) / 2
        stays = max(0.0, 1 - think_s / response)
        again_s = met * stays * (response - think_s)
        following_s = (again_s + (others - stays) * met * residual_s) / others
        if abs(following_s - blocked_s) <= 1e-9 * response:
            break
        blocked_s = (blocked_s + following_s) / 2
    return think_s + blocked_s + response


def _squared_variation(members: int, sharing: float) -> float:
    """The squared coefficient of variation of a transfer's time, with independent other users."""
    others = sharing - 1
    if members < 3:
        return 0.0
    return others * (1 - others / (members - 2)) / sharing**2


def binomial(others: int, mean: float) -> list[float]:
    """The probabilities that 0, 1, ... of the others are met, independently of each other."""
    share = min(1.0, max(0.0, mean / others)) if others else 0.0
    return [
        math.comb(others, count) * share**count * (1 - share) ** (others - count)
        for count in range(others + 1)
    ]


def answered_by_one_of_s(
    askers: int, choices: float, users: float, think_s: float, service_s: float
) -> float:
    """The seconds in and out of the card of a random one of `choices` passive peers.

    Each passive card has `users` askers. The result is exact if every asker may ask every passive
    peer; on sparser graphs the askers of a card are taken to be independent of the others.
    """
    if users <= 1:
        return 2 * service_s
    if users >= askers:
        share = [service_s / choices] * round(2 * choices)
        return response_s(askers, think_s, share)
    lone = response = 2 * service_s
    for _ in range(_ROUNDS):
        # Each of the other users is at this card for a share of its round.
        seen = (users - 1) * (response / 2 / choices) / (think_s + response)
        following = lone * (1 + seen)
        if abs(following - response) <= 1e-12 * response:
            break
        response = (response + following) / 2
    return response
