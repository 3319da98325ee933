"""The search: successive halving over the menu, a final with fresh seeds, then changed clusters.

`run` is handed in and makes the runs; tests hand in curves that they made up. Every time includes
what it costs to have the model that was scored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError, PeerLost, Stalled
from gossamer.plan.advise.budget import SearchPlan
from gossamer.plan.advise.candidates import Candidate, kind_of
from gossamer.plan.advise.collecting import collecting_seconds, model_bytes
from gossamer.plan.advise.halving import Halving, LearningCurve, Rung, curve, order
from gossamer.plan.advise.sensitivity import ChangedCluster, SceneOutcome
from gossamer.runs.arrival import Arrival, arrival, charged, has_lasted, seconds_to, smoothed
from gossamer.runs.statistics import best_rate, beyond
from gossamer.sim.simulation import Result, Row

Stop = Callable[[Row], bool]
Run = Callable[[Settings, Stop, str | None], Result]
"""Runs settings until they end or `stop` says so, and keeps the run if it is given a name."""
_SLOWEST_OF_A_SCENE = 4.0
"""On a changed cluster a contender is given up at this multiple of the best one's time."""
_CLEARLY = 0.75
"""A rate beyond the grid must arrive within this multiple of the other rate's time: one seed
decides between them, and with large rates the times of two seeds often differ by so much."""
_LATEST = 1.5
"""It is given up at this multiple: 15 % more epochs, which decide an earlier arrival, are over."""


class OutOfTime(Exception):
    """The real time has passed the budget: the machine is slower than the nominal one."""


@dataclass(frozen=True)
class SearchStep:
    """Where the search is, for a progress line."""

    stage: str
    left: int
    """The runs of this stage that are still to do, this one among them."""
    what: str
    best: str


@dataclass(frozen=True)
class Standing:
    """A candidate with the runs that count for it."""

    candidate: Candidate
    kind: str
    results: list[Result]
    collecting: float
    """The seconds that it takes to have the model that was scored."""
    arrival: Arrival
    nearest: float
    """The best score, mean over the seeds."""
    is_final: bool


class Search:
    """Everything that was measured, also when the search was cut short."""

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
        self.key = "loss" if base.task.correct is None else "accuracy"
        self.candidates = list(candidates[: plan.candidates])
        self.halving: Halving[Candidate] = Halving(self.candidates, self._sign * target, self.kind)
        self.widened: list[Candidate] = []
        """What was tried at a rate beyond the grid, because the best rate was the outermost."""
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
        """Times this, a larger score is the better one."""
        return -1.0 if self.key == "loss" else 1.0

    def run(self, scenes: Sequence[ChangedCluster]) -> None:
        """Search to the end, or as far as Ctrl-C or the clock allow; `ended` says which."""
        try:
            self.halving.run(self.plan.rungs, self._measure)
            self.finalists = self._widen(self._choose())
            self._final()
            self._change(scenes)
        except KeyboardInterrupt:
            self.ended = "interrupted"
        except OutOfTime:
            self.ended = "out of time"

    # ------------------------------------------------------------------ the stages

    def _begin(self, stage: str, runs: int) -> None:
        self._stage, self._left = stage, runs

    def _measure(self, candidate: Candidate, rung: Rung, limit: float) -> LearningCurve:
        stage = self.halving.stages[-1]
        if not stage.curves:
            title = f"search {len(self.halving.stages)}/{len(self.plan.rungs)}"
            self._begin(title, len(stage.entrants))
        settings = candidate.settings(self.base)
        samples = math.ceil(rung.share * settings.samples)
        rows, result = self._one(settings, samples, limit, str(candidate))
        if result is not None:
            self.searched[candidate] = result
        _, times, scores = smoothed(rows, self.key)
        points = [(float(at), self._sign * float(s)) for at, s in zip(times, scores, strict=True)]
        # After all its samples, a failure or a divergence, a run has nothing more to show.
        is_cut = bool(rows) and float(rows[-1]["virtual_seconds"]) > limit
        has_diverged = bool(rows) and not math.isfinite(self._score(rows[-1]))
        is_over = result is None or has_diverged or (rung.share >= 1.0 and not is_cut)
        found = curve(points, is_over=is_over)
        # To order all candidates after every run would take longer than the runs.
        if self._best is None or order({0: self._best[1], 1: found}, self.halving.goal)[0] == 1:
            self._best = candidate, found
        return found

    def _choose(self) -> list[Candidate]:
        """The best candidate of each leading method, and of every other kind.

        A candidate that the last rung kept as the best of its kind alone leads nobody.
        """
        best: dict[str, Candidate] = {}
        for candidate in self.halving.standing():
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
        """Replace a finalist whose rate is at the edge of the grid where the next rate is better.

        The runs of the search do not decide that: they end when enough others have arrived, and
        early in a run the larger rate is often ahead although it arrives later.
        """
        further = {
            candidate: rate
            for candidate in chosen
            if (rate := beyond(candidate.learning_rate, self.rates(candidate.method))) is not None
        }
        self._begin("rates beyond the grid", 2 * len(further))
        return [self._better(one, further[one]) if one in further else one for one in chosen]

    def _better(self, candidate: Candidate, rate: float) -> Candidate:
        """The candidate at its own rate, or at this one if that is clearly better in a whole run.

        Both run with a seed that neither the search nor the final uses. Where the own rate does not
        arrive, the rule of `compare` decides.
        """
        base = dataclasses.replace(self.base, seed=self.base.seed + self.plan.seeds + 1)
        further = dataclasses.replace(candidate, learning_rate=rate)
        tried: dict[float, list[list[Row]]] = {}
        times: list[float] = []
        for one in (candidate, further):
            settings = one.settings(base)
            limit = _LATEST * times[0] if times else math.inf
            rows, result = self._one(settings, settings.samples, limit, str(one))
            tried[one.learning_rate] = [[] if result is None else rows]
            reached = seconds_to(tried[one.learning_rate][0], self.target, self.key)
            times.append(math.inf if reached is None else reached)
        self.widened.append(further)
        if math.isfinite(times[0]):
            is_better = times[1] < _CLEARLY * times[0]
        else:
            is_better = best_rate(tried, self.target, self.key) == rate
        return further if is_better else candidate

    def rates(self, method: str) -> list[float]:
        """The rates that this method was to be tried at."""
        tried = (*self.candidates, *self.widened)
        return sorted({one.learning_rate for one in tried if one.method == method})

    def _final(self) -> None:
        """Run all finalists with one fresh seed after the other.

        The seed of the search chose them, so it would flatter them. A method that fails with one
        seed leaves the final.
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
        """Run the contenders again on every changed cluster."""
        contenders = self.contenders()
        if len(contenders) < 2:
            return
        self._begin("changed clusters", len(contenders) * len(scenes) * self.plan.scene_seeds)
        for scene in scenes:
            self.outcomes.append(self._on(scene, contenders))

    def contenders(self) -> list[Candidate]:
        """The first two, the best of every other kind, then the next; in order of the ranking."""
        ranking = self.ranking()
        best = {one.kind: one.candidate for one in reversed(ranking)}
        ordered = [one.candidate for one in ranking]
        # The runner-up is what a reader asks about first.
        wanted = dict.fromkeys(
            [*ordered[:2], *(c for c in ordered if c in best.values()), *ordered]
        )
        chosen = list(wanted)[: self.plan.contenders]
        return [candidate for candidate in ordered if candidate in chosen]

    def _on(self, scene: ChangedCluster, contenders: Sequence[Candidate]) -> SceneOutcome:
        times: dict[str, list[float | None]] = {}
        failures: dict[str, str] = {}
        for number in range(1, self.plan.scene_seeds + 1):
            seed = self.base.seed + number
            base = dataclasses.replace(self.base, cluster=scene.cluster, seed=seed)
            best = math.inf
            for one in contenders:
                label = one.method
                try:
                    settings = one.settings(base)
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

        The times of the evaluations include the price of having the model that was scored.
        """
        extra = collecting_seconds(settings, self._model_bytes)
        self._watch(SearchStep(self._stage, self._left, what, self.leader()))
        rows: list[Row] = []
        is_over = False

        def stop(row: Row) -> bool:
            nonlocal is_over
            # A run that is told to end still finishes what it has begun; that does not count.
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
        """With the sign by which more is better; not-a-number where there is none."""
        value = row.get(self.key)
        return math.nan if value is None else self._sign * float(value)

    # ------------------------------------------------------------------ what was found

    def kind(self, candidate: Candidate) -> str:
        """How this candidate couples its workers."""
        if candidate not in self._kinds:
            self._kinds[candidate] = kind_of(candidate, candidate.settings(self.base))
        return self._kinds[candidate]

    def leader(self) -> str:
        """The best candidate so far, in words; empty at the beginning."""
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
        # Candidates that have not arrived yet stay in the order of the search.
        return sorted(found, key=lambda one: one.arrival.seconds[0] or math.inf)

    def _stand(self, candidate: Candidate, results: list[Result], is_final: bool) -> Standing:
        extra = collecting_seconds(candidate.settings(self.base), self._model_bytes)
        histories = [charged(result.history, extra) for result in results]
        nearest = [self._sign * self._best_of(history) for history in histories]
        return Standing(
            candidate=candidate,
            kind=self.kind(candidate),
            results=results,
            collecting=extra,
            arrival=arrival(candidate.method, histories, self.target, self.key),
            nearest=sum(nearest) / len(nearest),
            is_final=is_final,
        )

    def _best_of(self, history: Sequence[Row]) -> float:
        scores = map(self._score, history)
        return max((score for score in scores if math.isfinite(score)), default=-math.inf)

    def _order(self, one: Standing) -> tuple[float, float, float]:
        """The shorter time; then more seeds that arrive; then the better score."""
        mean = math.inf if one.arrival.mean is None else one.arrival.mean
        return mean, -one.arrival.reached, -self._sign * one.nearest

    def left_behind(self) -> list[tuple[Candidate, int, float]]:
        """The best of each method that is not ranked, its last rung and its best score there."""
        ranked = {one.candidate.name for one in self.ranking()}
        found: list[tuple[Candidate, int, float]] = []
        for candidate in self.halving.standing():
            if candidate.name in ranked:
                continue
            ranked.add(candidate.name)
            stages = list(enumerate(self.halving.stages, 1))
            rung, curves = [(at, s.curves) for at, s in stages if candidate in s.curves][-1]
            found.append((candidate, rung, self._sign * curves[candidate].best))
        return found
