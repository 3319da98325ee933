"""The runs of a comparison: first those that choose each method's rate, then those that count.

The rate is chosen by what is ranked, the time to the target, on a seed of its own, because the seed
that chose a rate would flatter it. Where the best rate is the outermost of the grid, the grid grows
by one rate on that side, once. All methods run with one counting seed before any runs with the
next: an interrupted comparison has the same seeds of all methods.

No stage waits for the one before it: whenever a process is free, the first run in this order begins
whose rate is known already. What has run counts in the order, whichever run ended first.
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
from gossamer.runs.ranking import LEVEL, Ranking
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
        self._wider: dict[str, Settings | None] = {}
        """The further rate of each method whose grid is known to need one, or not."""
        self._chosen: dict[str, Settings | None] = {}
        """Each method at its rate, as soon as that is known; None where no run got through."""
        self._jobs: dict[str, SimulationJob] = {}
        self._answers: dict[str, Result | Error] = {}
        self._settled: set[str] = set()
        self._out: set[str] = set()
        """Methods that failed with a seed that counts."""
        self._look = looks[0]
        self._folder: RunFolder | None = None
        self._piece_of: Callable[[Path], RunPiece] | None = None
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
            _check_same(folder.path, self._settings)
        try:
            with pool or JobPool() as self._pool:
                self._run(self._first(view), view)
                for look in self._looks[1:]:
                    entries = self.entries
                    if not entries or self._ranking(entries).winner:
                        break
                    done, self._look = self._look, look
                    self._run(iter(self._expected(self._rounds(done), view)), view)
        except KeyboardInterrupt:
            self.interrupted = True
            if not self._is_decided:
                self._drop_early()
        if not self.entries:
            raise KeyboardInterrupt if self.interrupted else next(iter(self.failures.values()))

    # ------------------------------------------------------------------ which run begins next

    def _first(self, view: TournamentView) -> Iterator[Settings | None]:
        """Every rate of every method on the choosing seed, then each method at its best; None where
        a run must end before it is known what follows."""
        if self._has_grid:
            yield from self._expected(self._settings, view)
        else:
            self._chosen = {str(one.method): one for one in self._settings}
            self._expected(self._rounds(), view)
        begun: set[str] = set()
        while True:
            self._decide(view)
            known = [*self._further(), *self._rounds()]
            following = next((one for one in known if _key(one) not in begun), None)
            if following is not None:
                begun.add(_key(following))
            elif self._is_decided:
                return
            yield following

    def _decide(self, view: TournamentView) -> None:
        """Widen the grid and choose the rate of each method as soon as its own answers allow it."""
        first = {str(one.method): one for one in reversed(self._settings)}
        for label in self.labels:
            own = [one for one in self._settings if str(one.method) == label]
            if label in self._chosen or not self._are_known(own):
                continue
            if self._target is None:
                if not self._are_known(self._settings):
                    return  # the target is that of all methods
                tried = {name: found for name in first if (found := self._tried(name)).tried}
                self._target = Contest(_as_results(tried)).target if tried else None
            entry = self._tried(label)
            if not entry.tried:
                self._chosen[label] = None
                continue
            if label not in self._wider:
                further, wider = beyond(self._best(entry), list(entry.tried)), None
                if further is not None:
                    wider = dataclasses.replace(first[label], learning_rate=further)
                self._wider[label] = wider
                self._expected(self._further(label), view)
            if self._are_known(self._further(label)):
                best = self._best(self._tried(label))
                self._chosen[label] = dataclasses.replace(first[label], learning_rate=best)
                self._expected(self._rounds(label=label), view)

    def _best(self, entry: Entry[Result]) -> float:
        return Contest(_as_results({entry.label: entry}), self._target).chosen[entry.label]

    def _tried(self, label: str) -> Entry[Result]:
        """The runs of the choosing seed of a method that have got through."""
        entry = Entry[Result](label)
        for one in [*self._settings, *self._further(label)]:
            answer = self._answers.get(_key(one))
            if str(one.method) == label and isinstance(answer, Result):
                entry.tried[one.learning_rate or 0.0] = [answer]
        return entry

    def _further(self, label: str | None = None) -> list[Settings]:
        """The runs that widen the grid, as far as they are known."""
        labels = self.labels if label is None else [label]
        return [wider for one in labels if (wider := self._wider.get(one)) is not None]

    def _rounds(self, done: int = 0, label: str | None = None) -> list[Settings]:
        """The runs that count up to the present look, as far as they are known."""
        first = self.first.seed + self._has_grid
        labels = self.labels if label is None else [label]
        ranked = [one for name in labels if (one := self._chosen.get(name)) is not None]
        numbers = range(first + done, first + self._look)
        return [dataclasses.replace(one, seed=number) for number in numbers for one in ranked]

    def _are_known(self, settings: Sequence[Settings]) -> bool:
        return all(_key(one) in self._answers for one in settings)

    @property
    def _is_decided(self) -> bool:
        return len(self._chosen) == len(self.labels)

    def _expected(self, settings: Sequence[Settings], view: TournamentView) -> Sequence[Settings]:
        """Tell that these runs will come."""
        for one in settings:
            view.expect(str(one.method))
        self._write_config()
        return settings

    # ------------------------------------------------------------------ running, and what counts

    def _run(self, settings: Iterator[Settings | None], view: TournamentView) -> None:
        """Run one look. A method that failed with a counting seed has no further runs."""

        def jobs() -> Iterator[SimulationJob | None]:
            for one in settings:
                if one is None:
                    yield None
                    continue
                label, rate = str(one.method), one.learning_rate or 0.0
                if not self._has_failed(label):
                    place = piece = None
                    if self._folder is not None:
                        name = f"{slug(label)}-lr{rate:g}-seed{one.seed}"
                        is_new = self._piece_of is None
                        place = (self._folder.child if is_new else self._folder.child_again)(name)
                        piece = None if self._piece_of is None else self._piece_of(place.path)
                    view.begin(label, rate)
                    # What the cluster did to one method is a result about it; the others go on.
                    self._jobs[_key(one)] = job = SimulationJob(
                        f"{label} at {rate:g}", one, place, tolerated=(PeerLost, Stalled),
                        piece=piece,
                    )  # fmt: skip
                    yield job

        def at(job: SimulationJob, row: Row) -> None:
            epochs = job.settings.epochs
            view.at(str(job.settings.method), row, row["epochs"] / epochs if epochs else 0.0)

        def done(job: SimulationJob, answer: Result | Error) -> None:
            self._answers[_key(job.settings)] = answer
            outcome = answer if isinstance(answer, Error) else answer.summary
            view.finished(str(job.settings.method), job.label, outcome)

        try:
            for _ in self._pool.run(jobs(), JobWatch(at, done)):
                pass
        finally:
            self._settle_all()

    def _is_trial(self, settings: Settings) -> bool:
        return self._has_grid and settings.seed == self.first.seed

    def _has_failed(self, label: str) -> bool:
        """Whether a run that counts has failed."""
        return any(
            isinstance(answer, Error)
            and str((job := self._jobs[key]).settings.method) == label
            and not self._is_trial(job.settings)
            for key, answer in self._answers.items()
        )

    def _settle_all(self) -> None:
        """Let the new answers count, in the order of the runs."""
        gaps: set[str] = set()
        for one in self._planned():
            key, label = _key(one), str(one.method)
            if key in self._settled:
                continue
            if key not in self._answers:
                # An interruption may come when a later seed has ended and an earlier one has not.
                if not self._is_trial(one):
                    gaps.add(label)
            elif label not in gaps:
                self._settled.add(key)
                self._settle(self._jobs[key], self._answers[key])

    def _drop_early(self) -> None:
        """Before all rates are known no run counts, also where some have begun."""
        for job in self._jobs.values():
            if job.folder is not None and not self._is_trial(job.settings):
                shutil.rmtree(job.folder.path, ignore_errors=True)

    def _settle(self, job: SimulationJob, answer: Result | Error) -> None:
        """Let an answer count."""
        label, rate = str(job.settings.method), job.settings.learning_rate or 0.0
        if label in self._out:
            # This run began beside the one that failed; one run at a time would not have begun it.
            if job.folder is not None:
                shutil.rmtree(job.folder.path, ignore_errors=True)
            return
        is_trial = self._is_trial(job.settings)
        if isinstance(answer, Error):
            self.failures[job.label] = answer
            if not is_trial:
                self._out.add(label)
            return
        entry = self._entries.setdefault(label, Entry(label))
        (entry.tried if is_trial else entry.results).setdefault(rate, []).append(answer)

    def _planned(self) -> list[Settings]:
        """All runs that are known to be wanted, in the order in which they count."""
        trials = self._settings if self._has_grid else []
        return [*trials, *self._further(), *(self._rounds() if self._is_decided else [])]

    def _write_config(self) -> None:
        if self._folder is not None:
            self._folder.write_config(
                {
                    "runs": [settings.as_dict() for settings in self._planned()],
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
        if not self._is_decided:
            return 0
        left = [label for label, one in self._chosen.items() if one and label not in self._out]
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

    def _ranking(self, entries: _Entries) -> Ranking:
        return Contest(entries, self._target, level=self.level).ranking

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
            **({"economy": said} if (said := self.contest.economy()) else {}),
            "ended": "interrupted" if self.interrupted else "finished",
            "failures": {name: str(error) for name, error in self.failures.items()},
            "ranking": self.contest.rows(),
            "grid": self.contest.grid(),
            "edges": self.contest.edges(),
            "rule": RULE,
        }


def _as_results(entries: _Entries) -> _Entries:
    """The trials in the place of the runs that count."""
    return {label: Entry(label, entry.tried) for label, entry in entries.items()}


def _check_same(folder: Path, settings: Sequence[Settings]) -> None:
    """Refuse to go on with a comparison that began with other runs than these."""
    before = planned_in(folder)
    asked = json.loads(to_json([one.as_dict() for one in settings]))
    if any(mine != theirs for mine, theirs in zip(asked, before, strict=False)):
        raise ConfigurationError(
            "--resume goes on with a comparison, but the options ask for other runs than those "
            "in its folder; give the options of the first time"
        )


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


def _key(settings: Settings) -> str:
    return f"{settings.method} at {settings.learning_rate}, seed {settings.seed}"
