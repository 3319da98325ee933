"""From a budget to a plan: how many candidates, rungs, finalists and seeds.

The plan follows from counted work and nominal speeds, and no clock is read: the same task, cluster,
budget and seed give the same plan, and so the same answer, on every machine.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.plan.advise.halving import Rung
from gossamer.sim.buckets import layer_costs
from gossamer.tasks.flat_model import drawing_from

_FACTOR = 3
"""Each rung is three times as long as the one before and has a third of its candidates."""
_FEWEST_EPOCHS = 1.5
"""A shorter curve does not show where it leads."""
_LEADERS = 4
_MOST_SEEDS = 5
_FEWEST_SEEDS = 2
_SCENE_SEEDS = 2
_SEARCH_SHARE, _CHANGES_SHARE = 0.4, 0.2
"""Of the budget. A longer search would leave the final too few seeds for a clear verdict."""

# Nominal seconds, longer than those of a present-day core, so that a plan ends within its budget.
_STEP_S = 0.7e-3
_EVALUATION_S = 4e-3
_MULTIPLICATIONS_PER_S = {"cpu": 4e9, "cuda": 1e12}
_PASSES_OF_A_GRADIENT = 3
_MODELS_EVALUATED = 2


@dataclass(frozen=True)
class SearchPlan:
    """What the budget pays for."""

    candidates: int
    rungs: tuple[Rung, ...]
    kinds: int
    """The number of ways to couple workers; the best candidate of each stays in."""
    leaders: int
    """How many methods go to the final, besides the best of every other kind."""
    seeds: int
    contenders: int
    """How many finalists run again on changed clusters: at least two, or none."""
    scene_seeds: int
    nominal_s: float
    widenings: int = 0
    """How many runs compare finalists at the edge of the grid with the next rate beyond it."""

    def most_runs(self, scenes: int) -> int:
        """The largest number of runs that the search may take, with this many changed clusters."""
        later = sum(rung.keep + self.kinds - 1 for rung in self.rungs[:-1])
        final = (self.leaders + self.kinds - 1) * self.seeds
        changed = self.contenders * scenes * self.scene_seeds
        return self.candidates + later + self.widenings + final + changed


def nominal_seconds(settings: Settings) -> float:
    """The nominal time of a whole run of these settings, by counted work."""
    task = settings.task
    with drawing_from(0, torch.device("cpu")):
        costs = layer_costs(task.make_model(), task.train.first(1))
    speed = _MULTIPLICATIONS_PER_S["cuda" if settings.device.startswith("cuda") else "cpu"]
    batch = settings.batch or 1
    work = sum(costs.values()) / speed
    gradient = _STEP_S + _PASSES_OF_A_GRADIENT * batch * work
    evaluation = _EVALUATION_S + _MODELS_EVALUATED * len(task.test) * work
    return settings.samples / batch * gradient + settings.evaluations * evaluation


def make_plan(
    budget_s: float,
    run_s: float,
    *,
    epochs: float,
    candidates: int,
    rates: int,
    kinds: int,
    scenes: int,
    seeds: int | None = None,
) -> SearchPlan:
    """The most careful search that the budget pays for.

    A smaller budget first makes the rungs shorter, then drops whole rows of the menu with all their
    rates. Seeds and changed clusters take what the search leaves.
    """
    runs = budget_s / run_s
    fewest = _FEWEST_SEEDS if seeds is None else seeds
    # The rate of every finalist may be at the edge of the grid: then two runs, one at that rate and
    # one at the next beyond, say which is better.
    wider = 2 if rates > 1 else 0
    longest = max(1, 1 + int(math.log(max(1.0, epochs / _FEWEST_EPOCHS), _FACTOR)))
    # The most careful search comes first.
    counts = range(candidates, min(candidates, 2 * rates) - 1, -rates)
    searches = [(count, depth) for count in counts for depth in range(1, longest + 1)]
    needs = {
        one: _cost(*one, kinds) + _finalists(one[0] // rates, kinds) * (fewest + wider)
        for one in searches
    }
    # More rungs of few candidates can cost more than one, because the best of each kind stays in: a
    # search that is less careful than another and no cheaper is never chosen.
    before = itertools.accumulate([math.inf, *(needs[one] for one in searches)], min)
    searches = [one for one, least in zip(searches, before, strict=False) if needs[one] < least]
    # A budget that a refusal has named must do, whatever is lost by rounding.
    affordable = runs * (1 - _CHANGES_SHARE) + 1e-9
    if seeds is None and min(needs.values()) > affordable:
        needed = min(needs.values()) * run_s / (1 - _CHANGES_SHARE)
        raise ConfigurationError(
            f"a budget of {_show(budget_s)} pays for {runs:.1f} whole runs of this task, too few "
            f"to advise; give --budget {_show(needed)} or more, or fewer --epochs"
        )
    # The final is paid for before a longer search, so that a larger budget never buys less.
    paid = [one for one in searches if needs[one] <= affordable]
    fitting = [one for one in paid if _cost(*one, kinds) <= _SEARCH_SHARE * runs] or paid[-1:]
    count, depth = (fitting or [min(searches, key=lambda one: needs[one])])[0]
    search = _cost(count, depth, kinds)
    finalists = _finalists(count // rates, kinds)
    chosen = seeds or max(fewest, min(_MOST_SEEDS, int((affordable - search) / finalists) - wider))
    total = search + finalists * (chosen + wider)
    paid_for = int((runs - total) / (scenes * _SCENE_SEEDS)) if scenes else 0
    contenders = min(finalists, kinds, paid_for)
    contenders = contenders if contenders > 1 else 0
    total += contenders * scenes * _SCENE_SEEDS
    return SearchPlan(
        candidates=count,
        rungs=_rungs(count, depth),
        kinds=kinds,
        leaders=min(_LEADERS, count),
        seeds=chosen,
        contenders=contenders,
        scene_seeds=_SCENE_SEEDS,
        nominal_s=total * run_s,
        widenings=finalists * wider,
    )


def _rungs(count: int, depth: int) -> tuple[Rung, ...]:
    made: list[Rung] = []
    for at in range(depth):
        count = max(1, -(-count // _FACTOR))
        made.append(Rung(_FACTOR ** (at + 1 - depth), count))
    return tuple(made)


def _cost(count: int, depth: int, kinds: int) -> float:
    """What the search costs, in whole runs."""
    total = 0.0
    for rung in _rungs(count, depth):
        total += count * rung.share
        count = min(count, rung.keep + kinds - 1)
    return total


def _finalists(rows: int, kinds: int) -> int:
    """The leaders and the best of every other kind, at most; each method is in the final once."""
    return min(max(1, rows), _LEADERS + max(0, kinds - 1))


def _show(seconds: float) -> str:
    return f"{math.ceil(seconds)}s" if seconds < 120 else f"{math.ceil(seconds / 60)}m"
