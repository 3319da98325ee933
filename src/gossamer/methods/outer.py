"""What all methods with an outer loop share: who meets when, and what becomes of a meeting.

Each of them is the same sequence. A worker makes local steps; a *part* of its model (all of it, or
a fragment) goes to a *meeting*; what the others brought is *merged*; an *outer optimiser* moves the
model that was agreed on before; the worker *adopts* the result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.methods.method import Options
from gossamer.replica import Fragment, Replica
from gossamer.rules import OuterOptimiser, pair_growth
from gossamer.worker import Worker


def due(step: int, period: int, count: int) -> list[int]:
    """Which of `count` fragments meet after this step: each once in a period, evenly spread."""
    return [turn % count for turn in range(step * count // period, (step + 1) * count // period)]


def own_copy(x: Replica, part: Fragment) -> Tensor:
    """The replica's fragment, which nobody will change."""
    whole = x.snapshot()
    own = part.of(whole)
    return own if own is whole else own.clone()


def adopt_(x: Replica, part: Fragment, value: Tensor, mix: float = 0.0) -> None:
    """The replica's fragment becomes this value, or keeps the share `mix` of its own."""
    whole = x.snapshot()
    own = part.of(whole)
    if mix == 0.0 and value.shape == whole.shape:
        x.assign_(value)
        return
    part.put_(whole, own.lerp(value, 1 - mix) if mix else value)
    x.assign_(whole)


def observe_agreement(w: Worker, own: Tensor, mean: Tensor, start: Tensor) -> None:
    """Tell how alike workers have moved: the mean cosine between this worker's displacement and
    another's, taken as equally long, from the mean of all n: (n d . mean d / |d|^2 - 1) / (n - 1).
    """
    way, others = own - start, len(w.peers)
    square = 0.0 if way.is_meta else float(way @ way)
    if square and others:
        along = float(way @ (mean - start)) / square
        w.observe("cosine", ((others + 1) * along - 1) / others)


class OuterModel:
    """The model as it was after the last meeting of each fragment, and its outer velocity.

    Both are kept in the replica's memory, so a checkpoint has them. On a server the replica itself
    is that model.
    """

    def __init__(self, x: Replica, optimiser: OuterOptimiser) -> None:
        self._memory = x.memory
        self._optimiser = optimiser
        self._memory.setdefault("start", x.snapshot())

    @property
    def start(self) -> Tensor:
        return self._memory["start"]

    def step(self, part: Fragment, mean: Tensor, inner_rate: float | None = None) -> Tensor:
        """One outer step of a fragment towards (or past) the mean of the models."""
        start, velocity = self.start, self._memory.get("velocity")
        own = part.of(start)
        is_whole = own.shape == start.shape
        outer = self._optimiser
        outer.velocity = None if velocity is None else part.of(velocity)
        new = outer.step(own, mean, inner_rate)
        if outer.velocity is not None and is_whole:
            self._memory["velocity"] = outer.velocity
        elif outer.velocity is not None:
            whole = self._memory.setdefault("velocity", start.new_zeros(start.shape))
            part.put_(whole, outer.velocity)
        outer.velocity = None
        if is_whole:
            self._memory["start"] = new
        else:
            part.put_(start, new)
        return new


def _steady_momentum(period: int) -> float:
    """The most Nesterov momentum m that an outer step over so many inner ones stands.

    Inner steps with the usual momentum of 0.9 swing past their goal: after a period they stand up
    to q = 0.9^((period - 1) / 2) of the way beyond it, a displacement of 1 + q. On a quadratic the
    outer step diverges for displacements above (2 + 2 m) / (1 + 2 m); hence m <= (1 - q) / (2 q).
    """
    q = 0.9 ** ((period - 1) / 2)
    return min(1.0, (1 - q) / (2 * q))


def block_momentum(workers: int, values: Options, given: Options) -> dict[str, Any]:
    steady = _steady_momentum(values["period"])
    return {"block_momentum": min(values["block_momentum"], steady)}


def outer_step(workers: int, values: Options, given: Options) -> dict[str, Any]:
    """Between local SGD's (1, 0), for short periods, and the paper's (0.7, 0.9): momentum pays by
    the noise that N workers average away, so its gain 1 / (1 - m) is at most N, as for BMUF."""
    period = values["period"]
    if "period" not in given:  # a result should be back before its fragment meets again
        period = max(period, values.get("delay", 0) + 1)
    most = min(values["outer_momentum"], 1 - 1 / workers)
    momentum = given.get("outer_momentum", min(most, _steady_momentum(period)))
    return {"period": period, "outer_rate": 1 - momentum / 3, "outer_momentum": momentum}


def too_late(workers: int, values: Options) -> str:
    if values["delay"] < values["period"]:
        return ""
    return (
        f"a delay of {values['delay']} steps is not shorter than the period of {values['period']}, "
        "so a fragment would meet again before it is back; choose a smaller delay or a longer "
        "period"
    )


def arriving_step(workers: int, values: Options, given: Options) -> dict[str, Any]:
    """Half of what is stable where each displacement is a round old when it arrives.

    With delayed Nesterov and many workers a displacement of g times the way to go is stable up to a
    rate of about (1.6 - 1.3 m) / g, found by iterating the recursion; inner momentum makes g up to
    1 + q (see `_steady_momentum`).
    """
    period = values["period"]
    most = min(values["outer_momentum"], 1 - 1 / workers)
    momentum = given.get("outer_momentum", min(most, _steady_momentum(period)))
    beyond = 0.9 ** ((period - 1) / 2)
    return {"outer_rate": (0.8 - 0.65 * momentum) / (1 + beyond), "outer_momentum": momentum}


def merged_step(workers: int, values: Options, given: Options) -> dict[str, Any]:
    """DiLoCo's outer step; half of it along a radial mean, which does not shrink what workers
    disagree about (by up to the root of their number) and which may have come late."""
    chosen = outer_step(workers, values, given)
    chosen["outer_rate"] *= 0.5 if values["merge"] == "radial" else 1.0
    return chosen


def pair_step(workers: int, values: Options, given: Options) -> dict[str, Any]:
    """Between the pair's mean (rate 1, momentum 0), for short periods, and the paper's step."""
    most = min(values["outer_momentum"], _steady_momentum(values["period"]))
    momentum = given.get("outer_momentum", most)
    return {"outer_rate": 1 - 0.6 * momentum, "outer_momentum": momentum}


def unstable_pairs(workers: int, values: Options) -> str:
    rate, momentum = values["outer_rate"], values["outer_momentum"]
    growth = pair_growth(momentum, rate, workers)
    if growth < 1:
        return ""
    return (
        f"with outer_rate={rate:g} and outer_momentum={momentum:g} pairs of {workers} workers "
        f"drift apart, by {growth:.2f} a round in the mean square; choose a momentum of 0.5 with a "
        "rate of 0.7, or less of either"
    )


def too_early(workers: int, values: Options) -> str:
    if values["early"] * workers <= 1:
        return ""
    return (
        f"early={values['early']:g} applies more than all of the momentum in a round of {workers} "
        f"arrivals; choose at most {1 / workers:g}"
    )


def too_many(workers: int, values: Options) -> str:
    if values["quorum"] <= workers:
        return ""
    return (
        f"a quorum of {values['quorum']} never meets among {workers} workers; choose at most "
        f"{workers}"
    )
