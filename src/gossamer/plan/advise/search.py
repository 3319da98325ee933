"""The search: halving over the menu, a final with fresh seeds, then changed clusters.

Nothing here runs a simulation itself; `run` is handed in, so that tests can hand in curves.

Every time includes what it costs to have the model that was scored. The score of most methods is
that of the mean of all workers, whose models differ. On paper the mean is there at every moment; on
a cluster it takes one more average. Without that price the best advice on a slow network would be
never to communicate at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError, PeerLost, Stalled
from gossamer.plan.advise.budget import SearchPlan
from gossamer.plan.advise.candidates import Candidate, kind_of
from gossamer.plan.advise.halving import Halving, LearningCurve, Rung, curve, order
from gossamer.plan.advise.sensitivity import ChangedCluster, SceneOutcome
from gossamer.replica import trainable
from gossamer.runs.arrival import (
    Arrival,
    arrival,
    has_lasted,
    is_lower_better,
    seconds_to,
    smoothed,
)
from gossamer.runs.statistics import beyond
from gossamer.sim.simulation import Result, Row
from gossamer.tasks.flat_model import drawing_from

Stop = Callable[[Row], bool]
Run = Callable[[Settings, Stop, str | None], Result]
"""Runs settings until they end or `stop` says so; under a name where the run is to be kept."""
_SLOWEST_OF_A_SCENE = 4.0
"""On a changed cluster a contender is given up at so many times the best one's time."""


class OutOfTime(Exception):
    """The clock on the wall passed the budget: the machine is slower than the nominal one."""


@dataclass(frozen=True)
class SearchStep:
    """Where the search is, for those who watch."""

    stage: str
    left: int
    """Runs of this stage that are still to do, this one among them."""
    what: str
    best: str


@dataclass(frozen=True)
class Standing:
    """A candidate with the runs that count for it."""

    candidate: Candidate
    kind: str
    results: list[Result]
    histories: list[list[Row]]
    """Their evaluations, with the price of having the model that was scored."""
    collecting: float
    """That price in seconds."""
    arrival: Arrival
    nearest: float
    """The best score, mean over the seeds."""
    is_final: bool


class Search:
    """Everything that was measured, also when it was cut short."""

    def __init__(
        self,
        base: Settings,
        candidates: Sequence[Candidate],
        plan: SearchPlan,
        target: float,
        run: Run,
        watch: Callable[[SearchStep], None],
    ) -> None:
        self.base = base
        self.plan = plan
        self.target = target
        self.key = base.task.score
        self.candidates = list(candidates[: plan.candidates])
        self.halving: Halving[Candidate] = Halving(self.candidates, self._sign * target, self.kind)
        self.widened: list[Candidate] = []
        """Tried at a rate beyond the grid, because the best one was the outermost."""
        self.finalists: list[Candidate] = []
        self.finals: dict[Candidate, list[Result]] = {}
        self.outcomes: list[SceneOutcome] = []
        self.failures: dict[str, str] = {}
        self.searched: dict[Candidate, Result] = {}
        self.ended = "finished"
        self._run, self._watch = run, watch
        self._model_bytes = model_bytes(base)
        self._kinds: dict[Candidate, str] = {}
        self._stage = ""
        self._left = 0
        self._best: tuple[Candidate, LearningCurve] | None = None

    @property
    def _sign(self) -> float:
        return -1.0 if is_lower_better(self.key) else 1.0

    def run(self, scenes: Sequence[ChangedCluster]) -> None:
        """To the end, or as far as Ctrl-C or the clock allow; `ended` says which."""
        try:
            self._begin(f"search 1/{len(self.plan.rungs)}", len(self.candidates))
            survivors = self.halving.run(self.plan.rungs, self._measure)
            self.finalists = self._widen(self._choose(survivors))
            self._final()
            self._change(scenes)
        except KeyboardInterrupt:
            self.ended = "interrupted"
        except OutOfTime:
            self.ended = "out of time"

    # ------------------------------------------------------------------ the three stages

    def _begin(self, stage: str, runs: int) -> None:
        self._stage, self._left = stage, runs

    def _measure(self, candidate: Candidate, rung: Rung, limit: float) -> LearningCurve:
        stage = self.halving.stages[-1]
        if not stage.curves:
            self._begin(
                f"search {len(self.halving.stages)}/{len(self.plan.rungs)}", len(stage.entrants)
            )
        settings = candidate.settings(self.base)
        samples = math.ceil(rung.share * settings.samples)
        rows, result = self._one(settings, samples, limit, str(candidate))
        if result is not None:
            self.searched[candidate] = result
        _, times, scores = smoothed(rows, self.key)
        points = [
            (float(at), self._sign * float(score)) for at, score in zip(times, scores, strict=True)
        ]
        # After all its samples, a failure or a divergence, a run has nothing more to show.
        is_cut = bool(rows) and float(rows[-1]["virtual_seconds"]) > limit
        has_diverged = bool(rows) and not math.isfinite(self._score(rows[-1]))
        is_over = result is None or has_diverged or (rung.share >= 1.0 and not is_cut)
        found = curve(points, is_over=is_over)
        goal = self._sign * self.target
        # An order of all after every run would cost more than the runs; the two ahead are enough.
        if self._best is None or order({0: self._best[1], 1: found}, goal)[0] == 1:
            self._best = candidate, found
        return found

    def _choose(self, survivors: Sequence[Candidate]) -> list[Candidate]:
        """The best candidate of each leading method, and of every other kind."""
        best: dict[str, Candidate] = {}
        for candidate in (*survivors, *self.halving.standing()):
            best.setdefault(candidate.name, candidate)
        ordered = list(best.values())
        chosen = ordered[: self.plan.leaders]
        kinds = {self.kind(candidate) for candidate in chosen}
        for candidate in ordered[self.plan.leaders :]:
            if self.kind(candidate) not in kinds:
                kinds.add(self.kind(candidate))
                chosen.append(candidate)
        return chosen

    def _widen(self, chosen: Sequence[Candidate]) -> list[Candidate]:
        """Who is best at the outermost rate runs once at the next one beyond, as the search did."""
        wider = {candidate: beyond(candidate.learning_rate, self.rates(candidate.method))
                 for candidate in chosen[: self.plan.widenings]}  # fmt: skip
        self._begin("rates beyond the grid", sum(rate is not None for rate in wider.values()))
        finalists: list[Candidate] = []
        for candidate in chosen:
            rate = wider.get(candidate)
            if rate is not None:
                further = dataclasses.replace(candidate, learning_rate=rate)
                self.widened.append(further)
                candidate = self.halving.challenge(candidate, further, self._measure)
            finalists.append(candidate)
        return finalists

    def rates(self, method: str) -> list[float]:
        """Those that this method was to be tried at."""
        tried = (*self.candidates, *self.widened)
        return sorted({one.learning_rate for one in tried if one.method == method})

    def _final(self) -> None:
        """All finalists with one fresh seed after the other.

        The seed of the search chose them, so it would flatter them. A run that fails on one seed
        leaves its method out.
        """
        self._begin("final", len(self.finalists) * self.plan.seeds)
        self.finals = {candidate: [] for candidate in self.finalists}
        for number in range(1, self.plan.seeds + 1):
            base = dataclasses.replace(self.base, seed=self.base.seed + number)
            for candidate in list(self.finals):
                settings = candidate.settings(base)
                name = f"{candidate.method}-seed{settings.seed}"
                _, result = self._one(settings, settings.samples, math.inf, str(candidate), name)
                if result is None:
                    del self.finals[candidate]
                else:
                    self.finals[candidate].append(result)

    def _change(self, scenes: Sequence[ChangedCluster]) -> None:
        """The contenders again on every changed cluster."""
        contenders = self.contenders()
        if len(contenders) < 2:
            return
        self._begin("changed clusters", len(contenders) * len(scenes) * self.plan.scene_seeds)
        for scene in scenes:
            self.outcomes.append(self._on(scene, contenders))

    def contenders(self) -> list[Standing]:
        """The winner, the best of every other kind and whoever is next, in order of the ranking."""
        ranking = self.ranking()
        first = {one.kind: one for one in reversed(ranking)}
        rest = [one for one in ranking if first[one.kind] is not one]
        picked = [*(one for one in ranking if first[one.kind] is one), *rest]
        # The runner-up is what a reader asks about first.
        picked = list(dict.fromkeys(one.candidate for one in (*ranking[:2], *picked)))
        chosen = set(picked[: self.plan.contenders])
        return [one for one in ranking if one.candidate in chosen]

    def _on(self, scene: ChangedCluster, contenders: Sequence[Standing]) -> SceneOutcome:
        times: dict[str, list[float | None]] = {}
        failures: dict[str, str] = {}
        for number in range(1, self.plan.scene_seeds + 1):
            base = dataclasses.replace(
                self.base, cluster=scene.cluster, seed=self.base.seed + number
            )
            best = math.inf
            for one in contenders:
                label = one.candidate.method
                try:
                    settings = one.candidate.settings(base)
                except ConfigurationError as error:
                    failures[label] = f"{label} cannot run: {error}"
                    self._left -= 1
                    continue
                limit = _SLOWEST_OF_A_SCENE * best
                rows, _ = self._one(settings, settings.samples, limit, f"{label}, {scene.title}")
                reached = seconds_to(rows, self.target, self.key)
                times.setdefault(label, []).append(reached)
                best = min(best, math.inf if reached is None else reached)
        arrivals = {label: Arrival(label, tuple(found)) for label, found in times.items()}
        return SceneOutcome(scene, arrivals, failures)

    def _one(
        self, settings: Settings, samples: int, limit: float, what: str, name: str | None = None
    ) -> tuple[list[Row], Result | None]:
        """One run, ended as soon as it has told what it can; None in place of a failed one.

        Its evaluations come with the price of having the model that was scored.
        """
        extra = collecting_seconds(settings, self._model_bytes)
        self._watch(SearchStep(self._stage, self._left, what, self.leader()))
        rows: list[Row] = []
        is_over = False

        def stop(row: Row) -> bool:
            nonlocal is_over
            # What is on its way when a run is told to end still lands; the race is over by then.
            if not is_over:
                rows.append(row)
                is_over = (
                    has_lasted(rows, self.target, self.key)
                    or not math.isfinite(self._score(row))
                    or row["samples"] >= samples
                    or row["virtual_seconds"] + extra > limit
                )
            return is_over

        try:
            result = self._run(settings, stop, name)
            del result.history[len(rows) :]
        except (PeerLost, Stalled) as error:
            self.failures[f"{what}, seed {settings.seed}"] = str(error)
            result = None
        self._left -= 1
        return charged(rows, extra), result

    def _score(self, row: Row) -> float:
        value = row.get(self.key)
        return math.nan if value is None else self._sign * float(value)

    # ------------------------------------------------------------------ what came out

    def kind(self, candidate: Candidate) -> str:
        if candidate not in self._kinds:
            self._kinds[candidate] = kind_of(candidate, candidate.settings(self.base))
        return self._kinds[candidate]

    def leader(self) -> str:
        """The best so far, in words; empty at the beginning."""
        if self._complete_seeds():
            return str(self.ranking()[0].candidate)
        return "" if self._best is None else str(self._best[0])

    def _complete_seeds(self) -> int:
        return min((len(results) for results in self.finals.values()), default=0)

    def ranking(self) -> list[Standing]:
        """The finalists by their time to the target, over the seeds that all of them have.

        Before the first seed of the final is complete: what the search knows, one run each.
        """
        seeds = self._complete_seeds()
        if seeds:
            found = [self._stand(c, done[:seeds], True) for c, done in self.finals.items()]
            return sorted(found, key=self._order)
        best: dict[str, Candidate] = {}
        still_in = self.halving.stages[-1].entrants if self.halving.stages else []
        for candidate in self.halving.standing():
            if candidate in self.searched and candidate in still_in:
                best.setdefault(candidate.name, candidate)
        found = [self._stand(c, [self.searched[c]], False) for c in best.values()]
        # Who has not arrived yet stays in the order of the search.
        return sorted(found, key=lambda one: one.arrival.seconds[0] or math.inf)

    def _stand(self, candidate: Candidate, results: list[Result], is_final: bool) -> Standing:
        extra = collecting_seconds(candidate.settings(self.base), self._model_bytes)
        histories = [charged(result.history, extra) for result in results]
        nearest = [self._sign * _best(history, self.key) for history in histories]
        return Standing(
            candidate=candidate,
            kind=self.kind(candidate),
            results=results,
            histories=histories,
            collecting=extra,
            arrival=arrival(candidate.method, histories, self.target, self.key),
            nearest=sum(nearest) / len(nearest),
            is_final=is_final,
        )

    def _order(self, one: Standing) -> tuple[float, float, float]:
        """Time; then those that arrive with more seeds; then those that come nearer."""
        mean = math.inf if one.arrival.mean is None else one.arrival.mean
        return mean, -one.arrival.reached, -self._sign * one.nearest

    def left_behind(self) -> list[tuple[Candidate, int, float]]:
        """The best of each method that is not in the ranking: rung, and best score there."""
        ranked = {one.candidate.name for one in self.ranking()}
        found: list[tuple[Candidate, int, float]] = []
        for candidate in self.halving.standing():
            if candidate.name in ranked:
                continue
            ranked.add(candidate.name)
            rung = max(
                at for at, stage in enumerate(self.halving.stages, 1) if candidate in stage.curves
            )
            best = self.halving.stages[rung - 1].curves[candidate].best
            found.append((candidate, rung, self._sign * best))
        return found


def _best(history: Sequence[Row], key: str) -> float:
    """The best score of a run, with the sign that makes more of it better."""
    sign = -1.0 if is_lower_better(key) else 1.0
    values = [sign * float(row[key]) for row in history if row.get(key) is not None]
    return max((value for value in values if math.isfinite(value)), default=-math.inf)


# ---------------------------------------------------------------------- having the model


def model_bytes(settings: Settings) -> int:
    """What the network is charged for one model."""
    if settings.model_bytes is not None:
        return settings.model_bytes
    with drawing_from(0, torch.device("cpu")):
        named = trainable(settings.task.make_model())
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named)


def collecting_seconds(settings: Settings, size_bytes: int) -> float:
    """One average over all machines; nothing where a server or every worker has the output."""
    method, cluster = settings.method.method, settings.cluster
    if method.output != "mean" or method.family == "synchronous":
        return 0.0
    wires = cluster.network
    machines = cluster.machine_of(cluster.workers - 1) + 1
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow-link")])
    latency, per_byte = wires.latency, slowest / wires.bandwidth
    if cluster.rack_of(machines - 1) > 0:
        latency += wires.rack_latency
        per_byte *= wires.oversubscription
    return all_reduce_seconds(wires.collective, machines, size_bytes, latency, per_byte)


def charged(history: Sequence[Row], extra_s: float) -> list[Row]:
    """The same evaluations, at the moments when their model could have been had."""
    return [{**row, "virtual_seconds": row["virtual_seconds"] + extra_s} for row in history]
