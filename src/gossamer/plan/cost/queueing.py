"""Cards that several workers use at times of their own: closed networks of shared cards.

A card divides its capacity equally between the transfers that cross it: a processor-sharing
station. Workers compute for a while, then visit a card: a closed network with a product-form
solution, in which only the mean of each time matters (Baskett, Chandy, Muntz & Palacios 1975).
Mean value analysis (Reiser & Lavenberg 1980) evaluates it exactly: who arrives at a station sees
what would be there on average if it were not in the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROUNDS = 200
"""Of a fixed point, which halves its distance in each."""


def response_s(customers: int, think_s: float, services_s: Sequence[float]) -> float:
    """Seconds at the stations of one round, each visited once, by each of so many customers."""
    queues = [0.0] * len(services_s)
    response = 0.0
    for count in range(1, customers + 1):
        times = [service * (1 + queue) for service, queue in zip(services_s, queues, strict=True)]
        response = sum(times)
        cycle = think_s + response
        queues = [count / cycle * time if cycle else 0.0 for time in times]
    return response


def read_from_another_s(members: int, think_s: float, service_s: float) -> float:
    """Seconds of a transfer from the card of another member, drawn anew each time.

    Every member is a customer of all cards but its own. Among n of them the cards of those n are
    used by n - 1 and the other cards by n, and by symmetry no more needs to be told apart.
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
    """Seconds of one round of computing and reading from another member, drawn anew each time.

    Messages of one connection keep their order: a request to a member that is reading from this
    one waits behind what that one is being sent. A pair is in that state for a share `a` of the
    time in either direction, never in both, so of the time that this member does not read from the
    other it is a / (1 - a). Who was held up in this way begins when the other has read, and is
    met again by an asker that computes for less than a transfer takes.
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
    """Of a transfer's time: the others on its card are there or not, independently."""
    others = sharing - 1
    if members < 3:
        return 0.0
    return others * (1 - others / (members - 2)) / sharing**2


def binomial(others: int, mean: float) -> list[float]:
    """The chances that 0, 1, ... of the others are met, each with the same chance on its own."""
    share = min(1.0, max(0.0, mean / others)) if others else 0.0
    return [
        math.comb(others, count) * share**count * (1 - share) ** (others - count)
        for count in range(others + 1)
    ]


def answered_by_one_of_s(
    askers: int, choices: float, users: float, think_s: float, service_s: float
) -> float:
    """Seconds in and out of the card of one of `choices` passive peers, drawn anew each time.

    Each passive card is used by `users` askers. Where everybody may ask everybody this is exact;
    on sparser graphs the askers that share a card are taken to be independent of the others.
    """
    if users <= 1:
        return 2 * service_s
    if users >= askers:
        share = [service_s / choices] * round(2 * choices)
        return response_s(askers, think_s, share)
    lone = response = 2 * service_s
    for _ in range(_ROUNDS):
        # Of the others that use this card, each is found there for its share of its round.
        seen = (users - 1) * (response / 2 / choices) / (think_s + response)
        following = lone * (1 + seen)
        if abs(following - response) <= 1e-12 * response:
            break
        response = (response + following) / 2
    return response
