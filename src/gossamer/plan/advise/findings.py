"""What a search found, in words and numbers, for the console and for the summary."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from gossamer.config.settings import Settings
from gossamer.plan.advise.candidates import Candidate
from gossamer.plan.advise.reasons import parts, why
from gossamer.plan.advise.search import Search, Standing
from gossamer.plan.advise.sensitivity import RULE as RULE_OF_CHANGES
from gossamer.plan.advise.sensitivity import SceneOutcome, sentence, thresholds
from gossamer.plan.checkpointing import Checkpointing, share_bar
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE, is_lower_better
from gossamer.runs.expense import economy, expenses, pareto_front
from gossamer.runs.json_files import number
from gossamer.runs.ranking import RankedMethod, Ranking
from gossamer.runs.statistics import beyond, mean_of, show_number, show_score
from gossamer.runs.verdict import verdict

ALONE = "one worker alone"
"""The row below the ranking: is the cluster worth it at all?"""
_LONGER = 3


class SearchFindings:
    """The answer, its reason and what would change it."""

    def __init__(self, search: Search, left_out: Mapping[str, str]) -> None:
        self.search = search
        self.ranking: list[Standing] = search.ranking()
        self.contest = Ranking([one.arrival for one in self.ranking])
        self.left_out = dict(left_out)
        histories = {one.candidate.label: one.histories for one in self.ranking}
        self.expenses = expenses(self.contest.places, histories, search.target, search.key)
        """What each method spends; empty where the cluster has no prices."""
        self.front = pareto_front(self.expenses)
        self.alone: tuple[Candidate, float | None] | None = None
        """What one worker by itself was run with, and its time to the target, once it was run."""

    @property
    def goal(self) -> str:
        return show_score(self.search.target, self.search.key)

    @property
    def is_reached(self) -> bool:
        return any(one.arrival.mean is not None for one in self.ranking)

    @property
    def has_final(self) -> bool:
        """Whether the finalists have run; before that no method may be called first."""
        return bool(self.ranking) and self.ranking[0].is_final

    def place(self, one: Standing) -> RankedMethod:
        """Its place in the contest, with its interval."""
        return next(p for p in self.contest.places if p.label == one.candidate.label)

    def verdict(self) -> str:
        """One sentence, with the uncertainty."""
        cut_short = ""
        contest = self.contest
        if not self.has_final:
            cut_short = f"{self._why_ended()} when {self._measured()} had been measured"
            # Such a search knows nothing of the methods that had not arrived yet.
            contest = Ranking([one.arrival for one in self.ranking if one.arrival.reached])
        ends = {one.candidate.label: one.nearest for one in self.ranking}
        return verdict(contest, self.search.target, self.search.key, ends, cut_short)

    def _why_ended(self) -> str:
        return {"interrupted": "Interrupted", "out of time": "The budget ran out"}.get(
            self.search.ended, "The final failed"
        )

    def _measured(self) -> str:
        tried = counted(len(self.search.candidates), "candidate")
        return f"{len(self.search.searched)} of {tried}"

    def widened(self) -> str:
        """Which candidates were tried at a rate beyond the grid."""
        tried = ", ".join(map(str, self.search.widened))
        why = "because the best rate was the outermost of the grid"
        return f"Also tried, {why}: {tried}." if tried else ""

    def reason(self) -> str:
        """Why the runner-up loses."""
        if len(self.ranking) < 2:
            return "There is no runner-up."
        first, second = self.ranking[:2]
        target, key = self.search.target, self.search.key
        winner, loser = (
            parts(one.candidate.label, one.results, target, key, one.collecting)
            for one in (first, second)
        )
        if winner is None:
            begun = (
                f"No method reaches {self.goal} with every seed; {first.candidate.label} comes"
                if first.is_final
                else f"So far {first.candidate.label} has come"
            )
            return (
                f"{begun} nearest with {show_score(first.nearest, key)}, then "
                f"{second.candidate.label} with {show_score(second.nearest, key)}."
            )
        if loser is None and not second.is_final:
            return f"{second.candidate.label} had not arrived yet."
        if loser is None:
            return (
                f"{second.candidate.label} reaches {self.goal} with {second.arrival.reached} of "
                f"{counted(len(second.results), 'seed')} only and comes to "
                f"{show_score(second.nearest, key)} in the mean."
            )
        return why(winner, loser)

    def baseline(self) -> str:
        """Whether the cluster is worth it: one worker by itself against the first."""
        if self.alone is None:
            return ""
        candidate, seconds = self.alone
        if seconds is None:
            return f"One worker alone does not reach {self.goal} in as many samples at any rate."
        first, own = (
            self.ranking[0],
            f"One worker alone, the fastest, at {candidate.learning_rate:g}",
        )
        said = f"{own}, reaches {self.goal} in {show_number(seconds)} s"
        mean = first.arrival.mean
        if mean is None:
            return f"{said}, and no method with every seed: the cluster is not worth it."
        if not mean:
            return f"{said}. The first does so before its first step: give a harder --target."
        times = f"{show_number(seconds / mean)} times the time of {first.candidate.label}"
        return f"{said}: {times}" + ("." if seconds > mean else ", so the cluster is not worth it.")

    def proposal(self) -> str:
        """Where no method arrives: a target or a length with which one would."""
        if self.is_reached or not self.has_final:
            return ""
        key, epochs = self.search.key, self.search.base.epochs or 1.0
        best = self.ranking[0].nearest
        if not math.isfinite(best):
            return "Every candidate diverged; give smaller rates with --lr."
        # The target may be held with some seeds: what is proposed must be easier than it.
        rounded = (
            max(math.ceil(best * 100) / 100, math.floor(self.search.target * 100 + 1) / 100)
            if is_lower_better(key)
            else min(int(best * 100) / 100, math.ceil(self.search.target * 100 - 1) / 100)
        )
        return f"Try --target {rounded:g}, or --epochs {_LONGER * epochs:g}."

    def edge(self) -> str:
        """A hint where the winner's rate is the outermost that was tried."""
        if not self.has_final:
            return ""
        first = self.ranking[0].candidate
        chosen, rates = first.learning_rate, self.search.rates(first.label)
        further = beyond(chosen, rates)
        if further is None:
            return ""
        end = "largest" if further > chosen else "smallest"
        grid = sorted([*rates, further])
        return (
            f"{chosen:g} is the {end} rate of the grid, a better one may lie beyond it: "
            f"try --lr {','.join(f'{rate:g}' for rate in grid)}."
        )

    def changes(self) -> list[str]:
        """What each change of the cluster does to the answer."""
        if not self.ranking:
            return []
        winner = self.ranking[0].candidate.label
        outcomes = self.search.outcomes
        said = thresholds(outcomes, self.search.base.cluster.workers, winner)
        return [*said, *(sentence(one, winner, self.goal) for one in outcomes)]

    def goodput(self, one: Standing) -> float | None:
        """The share of the workers' time that was useful, mean over the seeds."""
        found = [number(result.summary.get("goodput")) for result in one.results]
        return mean_of(found) if found else None

    def checkpoints(self) -> list[str]:
        """How often a run that a death stops should write a checkpoint, and what that leaves of its
        time; nothing where the cluster does not say what a checkpoint costs."""
        told = Checkpointing.of(self.search.base.cluster)
        if told is None:
            return []
        return [
            f"A run that a death stops keeps most with --checkpoint-every {told.best:.3g}s "
            f"(Young: {show_number(told.young)} s, Daly: {show_number(told.daly)} s); somebody "
            f"dies every {show_number(told.mtbf)} s:",
            share_bar(told.shares(told.best)),
        ]

    def _checkpointing(self) -> dict[str, Any]:
        told = Checkpointing.of(self.search.base.cluster)
        if told is None:
            return {}
        shares = told.shares(told.best)
        return {
            "checkpoint_every": {
                "seconds": told.best, "young": told.young, "daly": told.daly, "shares": shares,
            }
        }  # fmt: skip

    def economy(self) -> str:
        """Who is the cheapest, in one sentence; empty where the cluster has no prices."""
        return economy(self.expenses)

    def left_out_for(self) -> dict[str, list[str]]:
        """The methods that were left out, by reason."""
        found: dict[str, list[str]] = {}
        for method, reason in self.left_out.items():
            found.setdefault(reason, []).append(method)
        return found

    def remarks(self) -> list[str]:
        """What the page says besides the verdict, the tables and the advice itself."""
        judged = RULE_OF_CHANGES if self.changes() else ""
        told = (self.baseline(), self.ended(), self.widened(), judged, *self.checkpoints())
        said = [one for one in told if one]
        said += [f"{what} failed: {error}" for what, error in self.search.failures.items()]
        said += [
            f"Left out: {', '.join(m)}: {reason}." for reason, m in self.left_out_for().items()
        ]
        return said

    def next_step(self) -> str:
        """What to do with the answer; empty where there is none."""
        if not self.has_final:
            return ""
        whom = "the winner" if self.contest.winner is not None else "the first of them"
        return f"Train with {whom}: {self.train_command()}"

    def train_command(self) -> str:
        """What trains with the first of the ranking, in a shell or in Python; empty before the
        final."""
        if not self.has_final:
            return ""
        first, base = self.ranking[0].candidate, self.search.base
        chosen = {"workers": base.cluster.workers, **_choices(first.settings(base))}
        method = first.method
        if first.changes.groups is not None:
            method = str(first.settings(base).method)
        if not base.task.spec:
            # A task that was made in Python has no name that a command could be given.
            words = {**chosen, "learning_rate": first.learning_rate}
            said = "".join(f", {name}={value!r}" for name, value in words.items())
            return f"gossamer.train(task, {method!r}{said})"
        words = ["--method", method, "--lr", f"{first.learning_rate:g}"]
        words += ["--task", base.task.spec]
        for name, value in chosen.items():
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(["gossamer", "train", *words])

    def ended(self) -> str:
        """How far a search got that was cut short; empty for one that was not."""
        seeds = len(self.ranking[0].results) if self.has_final else 0
        final = (
            f"the final had {seeds} of {counted(self.search.plan.seeds, 'seed')}, "
            f"followed by {counted(len(self.search.outcomes), 'changed cluster')}"
        )
        state = final if self.search.finals else f"the search had measured {self._measured()}"
        return {
            "interrupted": f"Interrupted: this is the best so far; {state}.",
            "out of time": f"The budget ran out on this machine: this is the best so far; {state}; "
            "another machine may get further.",
        }.get(self.search.ended, "")

    # ------------------------------------------------------------------ as data

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints and the folder keeps."""
        base, plan = self.search.base, self.search.plan
        return {
            "title": f"Advice for {base.task.title} on {base.cluster.title or base.cluster.name}",
            "ranking": [self._row(one) for one in self.ranking],
            "task": base.task.name,
            "cluster": base.cluster.name,
            "workers": base.cluster.workers,
            "target": self.search.target,
            "score": self.search.key,
            "seed": base.seed,
            "ended": self.search.ended,
            "verdict": self.verdict() if self.ranking else "",
            "reason": self.reason(),
            **({"economy": self.economy()} if self.expenses else {}),
            **self._checkpointing(),
            "proposal": self.proposal(),
            "alone": self._alone(),
            "widened": [
                {"method": one.method, "learning_rate": one.learning_rate}
                for one in self.search.widened
            ],
            "edge": self.edge(),
            "changes": self.changes(),
            "sensitivity": [self._outcome(one) for one in self.search.outcomes],
            "command": self.train_command(),
            "rule": RULE,
            "left_behind": [
                {"method": c.method, "learning_rate": c.learning_rate, "rung": rung, "best": best}
                for c, rung, best in self.search.left_behind()
            ],
            "left_out": self.left_out,
            "failures": self.search.failures,
            "remarks": self.remarks(),
            "plan": {
                "candidates": plan.candidates,
                "rungs": [{"share": rung.share, "keep": rung.keep} for rung in plan.rungs],
                "seeds": plan.seeds,
                "contenders": plan.contenders,
                "nominal_seconds": plan.nominal_s,
            },
        }

    def _row(self, one: Standing) -> dict[str, Any]:
        place = self.place(one)
        span = place.span
        spent = next((e for e in self.expenses if e.label == one.candidate.label), None)
        return {
            "method": one.candidate.method,
            **(
                {"changes": dict(one.candidate.changes.told())}
                if str(one.candidate.changes)
                else {}
            ),
            "learning_rate": one.candidate.learning_rate,
            "seconds_to_target": None if span is None else span.mean,
            "low": None if span is None else span.low,
            "high": None if span is None else span.high,
            "times_the_first": place.times,
            "may_be_first": place.is_close,
            "seconds_of_seeds": list(one.arrival.seconds),
            "reached": one.arrival.reached,
            "seeds": len(one.results),
            "best": one.nearest,
            "kind": one.kind,
            "goodput": self.goodput(one),
            "collecting_seconds": one.collecting,
            **({} if spent is None else spent.row(self.front)),
        }

    def _alone(self) -> dict[str, Any] | None:
        if self.alone is None:
            return None
        candidate, seconds = self.alone
        return {
            "method": ALONE,
            "kind": "nothing",
            "learning_rate": candidate.learning_rate,
            "seconds_to_target": seconds,
            "reached": int(seconds is not None),
            "seeds": 1,
            "said": self.baseline(),
        }

    def _outcome(self, one: SceneOutcome) -> dict[str, Any]:
        return {
            "change": one.scene.title,
            "what": one.scene.what,
            "leader": one.leader(),
            "seconds_to_target": {method: found.mean for method, found in one.arrivals.items()},
            "failures": dict(one.failures),
        }


def _choices(base: Settings) -> dict[str, Any]:
    """The settings that differ from the task's own."""
    usual = {"epochs": base.task.epochs, "batch": base.task.batch, "optimiser": base.task.optimiser,
             "schedule": "constant", "clip": None, "split": "shuffled"}  # fmt: skip
    own = {name: getattr(base, name) for name in usual}
    return {name: value for name, value in own.items() if value != usual[name]}
