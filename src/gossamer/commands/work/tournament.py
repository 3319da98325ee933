"""The runs of a comparison: first those that choose each method's rate, then those that count.

The rate is chosen by what is ranked, the time to the target, on a seed of its own, because the seed
that chose a rate would flatter it. Where the best rate is the outermost of the grid, the grid grows
by one rate on that side, once. All methods run with one counting seed before any runs with the
next: an interrupted comparison has the same seeds of all methods.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from gossamer.commands.work.jobs import JobPool, JobWatch
from gossamer.commands.work.simulations import SimulationJob, command_line, slug
from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError, Error, PeerLost, Stalled
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE
from gossamer.runs.contest import Contest, Entry
from gossamer.runs.folder import RunFolder, to_json
from gossamer.runs.ranking import LEVEL
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import beyond
from gossamer.sim.checkpoint.pieces import RunPiece

_Entries = dict[str, Entry[Result]]


class TournamentView(Protocol):
    """Who hears of the runs of a tournament."""

    def expect(self, label: str) -> None: ...

    def begin(self, label: str, rate: float) -> None: ...

    def at(self, label: str, row: Row, share: float) -> None: ...

    def finished(self, label: str, name: str, outcome: Row | Error) -> None: ...


class SilentView:
    """Shows nothing."""

    def expect(self, label: str) -> None: ...

    def begin(self, label: str, rate: float) -> None: ...

    def at(self, label: str, row: Row, share: float) -> None: ...

    def finished(self, label: str, name: str, outcome: Row | Error) -> None: ...


class Tournament:
    """All runs of a comparison and what came out of them, also when it was interrupted."""

    def __init__(
        self, settings: Sequence[Settings], looks: Sequence[int], target: float | None
    ) -> None:
        """After each number of seeds in `looks` the tournament ends if a winner is clear."""
        self.first = settings[0]
        self._settings = settings
        self._looks = looks
        self._target = target
        self._has_grid = len({one.learning_rate for one in settings}) > 1
        self._entries: _Entries = {}
        self._planned: list[Settings] = []
        self._ranked: list[str] = []
        self._out: set[str] = set()
        """Methods that failed with a seed that counts."""
        self._look = looks[0]
        self._folder: RunFolder | None = None
        self._piece_of: Callable[[Path], RunPiece] | None = None
        self._before: list[Row] = []
        """The runs that an earlier piece of the comparison had planned."""
        self._pool = JobPool()
        self.failures: dict[str, Error] = {}
        self.interrupted = False

    @property
    def level(self) -> float:
        """The level of each look: all looks together err as seldom as one alone."""
        return LEVEL / len(self._looks)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(str(settings.method) for settings in self._settings))

    def run(
        self, folder: RunFolder | None, view: TournamentView, pool: JobPool | None = None,
        piece_of: Callable[[Path], RunPiece] | None = None,
    ) -> None:  # fmt: skip
        """Run everything. Ctrl-C keeps what is finished; without any result the error is raised.

        With `piece_of`, which gives the piece of a run that is kept in a folder, runs that are
        finished there are read, and one that is not goes on.
        """
        self._folder, self._piece_of = folder, piece_of
        if folder is not None and piece_of is not None:
            self._before = planned_in(folder.path)
        try:
            with pool or JobPool() as self._pool:
                ranked = self._choose(view) if self._has_grid else list(self._settings)
                self._rank(ranked, view)
        except KeyboardInterrupt:
            self.interrupted = True
        if not self.entries:
            raise KeyboardInterrupt if self.interrupted else next(iter(self.failures.values()))

    # ------------------------------------------------------------------ the two stages

    def _choose(self, view: TournamentView) -> list[Settings]:
        """Run every rate of every method on the choosing seed; return each method at its best."""
        self._run(self._settings, view, is_trial=True)
        tried = self._trials()
        if not tried:
            return []
        if self._target is None:
            self._target = Contest(tried).target
        first = {str(one.method): one for one in reversed(self._settings)}
        wider = [
            dataclasses.replace(first[label], learning_rate=further)
            for label, best in Contest(tried, self._target).chosen.items()
            if (further := beyond(best, list(self._entries[label].tried))) is not None
        ]
        self._run(wider, view, is_trial=True)
        chosen = Contest(self._trials(), self._target).chosen
        return [dataclasses.replace(first[label], learning_rate=r) for label, r in chosen.items()]

    def _rank(self, ranked: Sequence[Settings], view: TournamentView) -> None:
        self._ranked, done = [str(settings.method) for settings in ranked], 0
        for look in self._looks:
            self._look = look
            first = self.first.seed + self._has_grid
            numbers = range(first + done, first + look)
            rounds = [dataclasses.replace(s, seed=n) for n in numbers for s in ranked]
            self._run(rounds, view, is_trial=False)
            done = look
            entries = self.entries
            if not entries or Contest(entries, self._target, level=self.level).ranking.winner:
                return

    def _run(self, settings: Sequence[Settings], view: TournamentView, *, is_trial: bool) -> None:
        """Run one stage. A method that failed with a counting seed has no further runs.

        Answers count in the order of the settings, whichever run ends first.
        """
        self._planned += settings
        for one in settings:
            view.expect(str(one.method))
        self._write_config()
        begun: list[SimulationJob] = []
        ended: dict[str, Result | Error] = {}

        def jobs() -> Iterator[SimulationJob]:
            for one in settings:
                label, rate = str(one.method), one.learning_rate or 0.0
                if label not in self._out:
                    place = piece = None
                    if self._folder is not None:
                        name = f"{slug(label)}-lr{rate:g}-seed{one.seed}"
                        is_new = self._piece_of is None
                        place = (self._folder.child if is_new else self._folder.child_again)(name)
                        piece = None if self._piece_of is None else self._piece_of(place.path)
                    view.begin(label, rate)
                    # What the cluster did to one method is a result about it; the others go on.
                    begun.append(SimulationJob(
                        f"{label} at {rate:g}", one, place, tolerated=(PeerLost, Stalled),
                        piece=piece,
                    ))  # fmt: skip
                    yield begun[-1]

        def at(job: SimulationJob, row: Row) -> None:
            epochs = job.settings.epochs
            view.at(str(job.settings.method), row, row["epochs"] / epochs if epochs else 0.0)

        def done(job: SimulationJob, answer: Result | Error) -> None:
            ended[_key(job)] = answer
            outcome = answer if isinstance(answer, Error) else answer.summary
            view.finished(str(job.settings.method), job.label, outcome)

        settled = 0
        try:
            for answer in self._pool.run(jobs(), JobWatch(at, done)):
                self._settle(begun[settled], answer, is_trial=is_trial)
                settled += 1
        finally:
            # An interruption may come when a later run has ended and an earlier one has not.
            for job in begun[settled:]:
                if _key(job) in ended:
                    self._settle(job, ended[_key(job)], is_trial=is_trial)

    def _settle(self, job: SimulationJob, answer: Result | Error, *, is_trial: bool) -> None:
        """Let an answer count."""
        label, rate = str(job.settings.method), job.settings.learning_rate or 0.0
        if label in self._out:
            # This run began beside the one that failed; one run at a time would not have begun it.
            if job.folder is not None:
                shutil.rmtree(job.folder.path, ignore_errors=True)
            return
        if isinstance(answer, Error):
            self.failures[job.label] = answer
            if not is_trial:
                self._out.add(label)
            return
        entry = self._entries.setdefault(label, Entry(label))
        (entry.tried if is_trial else entry.results).setdefault(rate, []).append(answer)

    def _write_config(self) -> None:
        planned = json.loads(to_json([settings.as_dict() for settings in self._planned]))
        if any(mine != theirs for mine, theirs in zip(planned, self._before, strict=False)):
            raise ConfigurationError(
                "--resume goes on with a comparison, but the options ask for other runs than those "
                "in its folder; give the options of the first time"
            )
        if self._folder is not None:
            self._folder.write_config(
                {
                    "runs": [settings.as_dict() for settings in self._planned],
                    "choosing_seed": self.first.seed if self._has_grid else None,
                    "seeds": self._look,
                    "target": self._target,
                    "level": self.level,
                    "command_line": command_line(),
                }
            )
            self._folder.defer_failures()

    # ------------------------------------------------------------------ what came out

    @property
    def seeds(self) -> int:
        """The number of counting seeds that every method has run with, failed ones aside."""
        left = [label for label in self._ranked if label not in self._out]
        done = {label: sum(map(len, e.results.values())) for label, e in self._entries.items()}
        return min((done.get(label, 0) for label in left), default=0)

    @property
    def entries(self) -> _Entries:
        """The methods at the seeds that all of them have; before the first of those, the trials."""
        seeds = self.seeds
        if not seeds:
            return self._trials()
        return {
            label: Entry(label, {rate: runs[:seeds]}, entry.tried)
            for label, entry in self._entries.items()
            if label not in self._out
            for rate, runs in entry.results.items()
        }

    def _trials(self) -> _Entries:
        """The methods with the runs of the choosing seed alone."""
        return {
            label: Entry(label, entry.tried or entry.results)
            for label, entry in self._entries.items()
        }

    @property
    def cut_short(self) -> str:
        """Why no winner may be named; empty where the comparison came to its end."""
        if not self.interrupted:
            return ""
        return (
            f"Interrupted when {len(self.entries)} of {len(self.labels)} methods had run"
            if not self.seeds
            else f"Interrupted after {self.seeds} of {counted(self._look, 'seed')}"
        )

    @cached_property
    def contest(self) -> Contest[Result]:
        """The ranking of everything that has run; ask for it after `run`."""
        return Contest(self.entries, self._target, level=self.level, cut_short=self.cut_short)

    def winner(self) -> Result:
        """The run of the first method with its first seed."""
        best = self.contest.rows()[0]
        return self.entries[best["method"]].results[best["learning_rate"]][0]

    def notices(self) -> dict[str, list[str]]:
        """Each notice of the runs with the methods that it concerns, or at which rates it does."""
        found: dict[str, list[str]] = {}
        for label, entry in self.entries.items():
            rates: dict[str, list[float]] = {}
            runs: Mapping[float, list[Result]] = {
                rate: [*entry.tried.get(rate, ()), *entry.results.get(rate, ())]
                for rate in (*entry.tried, *entry.results)
            }
            for rate, results in runs.items():
                for notice in dict.fromkeys(n for one in results for n in one.notices):
                    rates.setdefault(notice, []).append(rate)
            for notice, own in rates.items():
                whose = [label] if len(own) == len(runs) > 1 else [f"{label} at {r:g}" for r in own]
                found.setdefault(notice, []).extend(whose)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.first.task.name,
            "cluster": self.first.cluster.name,
            "workers": self.first.cluster.workers,
            "seeds": self.seeds,
            "level": self.level,
            "cut_short": self.cut_short,
            "target": self.contest.target,
            "verdict": self.contest.verdict(),
            "ended": "interrupted" if self.interrupted else "finished",
            "failures": {name: str(error) for name, error in self.failures.items()},
            "ranking": self.contest.rows(),
            "grid": self.contest.grid(),
            "edges": self.contest.edges(),
            "rule": RULE,
        }


def planned_in(folder: Path) -> list[Row]:
    """The runs that the comparison in this folder has planned so far."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["runs"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{folder / 'config.json'} does not say which runs a comparison has; begin it anew"
        ) from None


def _key(job: SimulationJob) -> str:
    return f"{job.label}, seed {job.settings.seed}"
