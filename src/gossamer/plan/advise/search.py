"""The search: successive halving over the menu, a final with fresh seeds, then changed clusters.

`run` is handed in and makes the runs of a stage, one after another or several at a time; tests hand
in curves that they made up. A run may end as soon as it can no longer change the answer, and when
that is follows from the runs before it. A run beside those goes on for longer, and what it told
after the moment at which it would have ended does not count: the answer is the same either way.
Every time includes what it costs to have the model that was scored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.plan.advise.budget import SearchPlan
from gossamer.plan.advise.candidates import Candidate, kind_of
from gossamer.plan.advise.collecting import collecting_seconds, model_bytes
from gossamer.plan.advise.halving import Halving, HalvingStage, LearningCurve, curve, order
from gossamer.plan.advise.search_run import Run, SearchFailure, SearchRun, StopRule
from gossamer.plan.advise.sensitivity import ChangedCluster, SceneOutcome
from gossamer.runs.arrival import (
    Arrival,
    History,
    arrival,
    charged,
    is_lower_better,
    seconds_to,
    smoothed,
)
from gossamer.runs.statistics import best_rate, beyond
from gossamer.sim.simulation import Result, Row

_Key = TypeVar("_Key")
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
    histories: Sequence[History]
    """The evaluations of these runs, each at the time at which one has the model."""
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
        self.key = base.task.score
        self.candidates = list(candidates[: plan.candidates])
        self.halving: Halving[Candidate] = Halving(self.candidates, self._sign * target, self.kind)
        self.widened: list[Candidate] = []
        """What was tried at a rate beyond the grid, because the best rate was the outermost."""
        self.finalists: list[Candidate] = []
        self.finals: dict[Candidate, list[Result]] = {}
        self.outcomes: list[SceneOutcome] = []
        self.failures: dict[str, str] = {}
        self.searched: dict[Candidate, Result] = {}
        self.superfluous: list[str] = []
        """The names of runs that began beside the run that took their candidate out."""
        self.ended = "finished"
        self._run, self._watch = run, watch
        self._model_bytes = model_bytes(base)
        self._per_second = base.cluster.price.while_idle(base.cluster.workers)
        self._kinds: dict[Candidate, str] = {}
        self._stage = ""
        self._left = 0
        self._best: tuple[Candidate, LearningCurve] | None = None

    @property
    def _sign(self) -> float:
        """Times this, a larger score is the better one."""
        return -1.0 if is_lower_better(self.key) else 1.0

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

    def _measure(self, stage: HalvingStage[Candidate]) -> Iterator[LearningCurve]:
        title = f"search {len(self.halving.stages)}/{len(self.plan.rungs)}"
        self._begin(title, len(stage.entrants))

        def asked(candidate: Candidate) -> SearchRun:
            settings, limit = candidate.settings(self.base), self.halving.limit(stage)
            samples = math.ceil(stage.rung.share * settings.samples)
            return self._asked(settings, str(candidate), samples=samples, limit=limit)

        for candidate, rows, result in self._each(stage.entrants, asked):
            if result is not None:
                self.searched[candidate] = result
            yield self._curve(candidate, stage, rows, has_failed=result is None)

    def _curve(
        self, candidate: Candidate, stage: HalvingStage[Candidate], rows: list[Row], *,
        has_failed: bool,
    ) -> LearningCurve:  # fmt: skip
        _, times, scores = smoothed(rows, self.key)
        points = [(float(at), self._sign * float(s)) for at, s in zip(times, scores, strict=True)]
        # After all its samples, a failure or a divergence, a run has nothing more to show.
        limit = self.halving.limit(stage)
        is_cut = bool(rows) and float(rows[-1]["virtual_seconds"]) > limit
        has_diverged = bool(rows) and not math.isfinite(self._score(rows[-1]))
        is_over = has_failed or has_diverged or (stage.rung.share >= 1.0 and not is_cut)
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
            if (rate := beyond(candidate.learning_rate, self.rates(candidate.label))) is not None
        }
        self._begin("rates beyond the grid", 2 * len(further))
        better = self._better(further)
        return [better.get(one, one) for one in chosen]

    def _better(self, further: Mapping[Candidate, float]) -> dict[Candidate, Candidate]:
        """Each candidate at its own rate, or at this one if that is clearly better in a whole run.

        All run with a seed that neither the search nor the final uses. Where the own rate does not
        arrive, the rule of `compare` decides.
        """
        base = dataclasses.replace(self.base, seed=self.base.seed + self.plan.seeds + 1)
        times: dict[Candidate, float] = {}
        tried: dict[Candidate, dict[float, list[list[Row]]]] = {one: {} for one in further}
        pairs = [
            (one, dataclasses.replace(one, learning_rate=rate))
            for one, wider in further.items()
            for rate in (one.learning_rate, wider)
        ]

        def asked(pair: tuple[Candidate, Candidate]) -> SearchRun:
            limit = _LATEST * times.get(pair[0], math.inf)
            return self._asked(pair[1].settings(base), str(pair[1]), limit=limit)

        better: dict[Candidate, Candidate] = {}
        for (candidate, one), rows, result in self._each(pairs, asked):
            own = tried[candidate]
            own[one.learning_rate] = [[] if result is None else rows]
            reached = seconds_to(own[one.learning_rate][0], self.target, self.key)
            time = math.inf if reached is None else reached
            if len(own) == 1:
                times[candidate] = time
                continue
            self.widened.append(one)
            if math.isfinite(times[candidate]):
                is_better = time < _CLEARLY * times[candidate]
            else:
                is_better = best_rate(own, self.target, self.key) == one.learning_rate
            better[candidate] = one if is_better else candidate
        return better

    def rates(self, method: str) -> list[float]:
        """The rates that this method was to be tried at."""
        tried = (*self.candidates, *self.widened)
        return sorted({one.learning_rate for one in tried if one.label == method})

    def _final(self) -> None:
        """Run all finalists with one fresh seed after the other.

        The seed of the search chose them, so it would flatter them. A method that fails with one
        seed leaves the final.
        """
        self._begin("final", len(self.finalists) * self.plan.seeds)
        self.finals = {candidate: [] for candidate in self.finalists}
        pairs = [
            (candidate, self.base.seed + number)
            for number in range(1, self.plan.seeds + 1)
            for candidate in self.finalists
        ]

        def asked(pair: tuple[Candidate, int]) -> SearchRun | None:
            candidate, seed = pair
            if candidate not in self.finals:
                return None
            settings = candidate.settings(dataclasses.replace(self.base, seed=seed))
            return self._asked(settings, str(candidate), name=f"{candidate.method}-seed{seed}")

        for (candidate, seed), _, result in self._each(pairs, asked):
            if candidate not in self.finals:
                self.superfluous.append(f"{candidate.method}-seed{seed}")
            elif result is None:
                del self.finals[candidate]
            else:
                self.finals[candidate].append(result)

    def _change(self, scenes: Sequence[ChangedCluster]) -> None:
        """Run the contenders again on every changed cluster."""
        contenders = self.contenders()
        if len(contenders) < 2:
            return
        self._begin("changed clusters", len(contenders) * len(scenes) * self.plan.scene_seeds)
        numbers = range(1, self.plan.scene_seeds + 1)
        failures: dict[int, dict[str, str]] = {at: {} for at in range(len(scenes))}
        places = [
            (at, number, one, settings)
            for at, scene in enumerate(scenes)
            for number in numbers
            for one in contenders
            if (settings := self._settings_on(scene, number, one, failures[at])) is not None
        ]
        best: dict[tuple[int, int], float] = {}
        times: dict[int, dict[str, list[float | None]]] = {at: {} for at in failures}

        def asked(place: tuple[int, int, Candidate, Settings]) -> SearchRun:
            at, number, one, settings = place
            limit = _SLOWEST_OF_A_SCENE * best.get((at, number), math.inf)
            return self._asked(settings, f"{one.label}, {scenes[at].title}", limit=limit)

        def close(before: int) -> None:
            """Tell the outcomes of the scenes that are complete."""
            for at in range(len(self.outcomes), before):
                arrivals = {name: Arrival(name, tuple(all_)) for name, all_ in times[at].items()}
                self.outcomes.append(SceneOutcome(scenes[at], arrivals, failures[at]))

        for (at, number, one, _), rows, _ in self._each(places, asked):
            close(at)
            reached = seconds_to(rows, self.target, self.key)
            times[at].setdefault(one.label, []).append(reached)
            earlier = best.get((at, number), math.inf)
            best[at, number] = min(earlier, math.inf if reached is None else reached)
        close(len(scenes))

    def _settings_on(
        self, scene: ChangedCluster, number: int, one: Candidate, failures: dict[str, str]
    ) -> Settings | None:
        """The settings of a contender on a changed cluster; None where it cannot run there."""
        seed = self.base.seed + number
        try:
            return one.settings(dataclasses.replace(self.base, cluster=scene.cluster, seed=seed))
        except ConfigurationError as error:
            failures[one.label] = f"{one.label} cannot run: {error}"
            self._left -= 1
            return None

    def run_alone(self) -> tuple[Candidate, float | None] | None:
        """One worker by itself at the best rate of the grid; None where it was not run."""
        if self.ended != "finished" or not self.ranking() or self.base.cluster.workers == 1:
            return None
        rates = sorted({one.learning_rate for one in self.candidates})
        cluster = self.base.cluster.fastest_alone()
        base = dataclasses.replace(self.base, cluster=cluster, seed=self.base.seed + 1)
        self._begin("one worker alone", len(rates))
        best, earliest = Candidate("all_reduce", rates[0]), math.inf

        def asked(one: Candidate) -> SearchRun:
            return self._asked(one.settings(base), f"one worker at {one.learning_rate:g}")

        try:
            for one, rows, _ in self._each([Candidate(best.method, r) for r in rates], asked):
                reached = seconds_to(rows, self.target, self.key)
                if reached is not None and reached < earliest:
                    best, earliest = one, reached
        except (KeyboardInterrupt, OutOfTime):
            return None  # the answer itself is complete
        return best, None if math.isinf(earliest) else earliest

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

    # ------------------------------------------------------------------ runs

    def _asked(
        self, settings: Settings, what: str, *, samples: int | None = None,
        limit: float = math.inf, name: str | None = None,
    ) -> SearchRun:  # fmt: skip
        """Ask for a run that ends as soon as it has told what it can."""
        extra = collecting_seconds(settings, self._model_bytes)
        rule = StopRule(self.target, self.key, samples or settings.samples, limit, extra)
        return SearchRun(settings, rule, what, name)

    def _each(
        self, keys: Sequence[_Key], asked: Callable[[_Key], SearchRun | None]
    ) -> Iterator[tuple[_Key, list[Row], Result | None]]:
        """Make a run for each key and yield them in order; None in place of a failed one.

        `asked` is called when a run can start, and again, to know what counts, when all runs before
        it are known. The times of the evaluations include the price of having the model that was
        scored.
        """
        begun: list[tuple[_Key, SearchRun]] = []
        is_complete = False

        def runs() -> Iterator[SearchRun]:
            nonlocal is_complete
            for key in keys:
                one = asked(key)
                if one is not None:
                    self._watch(SearchStep(self._stage, self._left, one.what, self.leader()))
                    begun.append((key, one))
                    yield one
                self._left -= 1
            is_complete = True

        done = 0
        for answer in self._run(runs()):
            key, one = begun[done]
            done += 1
            exact = asked(key)
            rule, result = (exact or one).rule, None
            if isinstance(answer, SearchFailure):
                rows = rule.told(answer.rows)
                if exact is not None:
                    self.failures[f"{one.what}, seed {one.settings.seed}"] = str(answer.error)
            else:
                result, rows = answer, rule.told(answer.history)
                del result.history[len(rows) :]
            yield key, charged(rows, rule.extra), result
        if done < len(begun) or not is_complete:
            raise OutOfTime

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
        histories = [charged(result.history, extra, self._per_second) for result in results]
        nearest = [self._sign * self._best_of(history) for history in histories]
        return Standing(
            candidate=candidate,
            kind=self.kind(candidate),
            results=results,
            collecting=extra,
            arrival=arrival(candidate.label, histories, self.target, self.key),
            histories=histories,
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
