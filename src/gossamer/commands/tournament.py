"""The runs of a comparison: first those that choose each method's rate, then those that count.

The rate is chosen by what is ranked, the time to the target, on a seed of its own: the seed that
chose a rate would flatter it. Where the best rate is the outermost of the grid, the grid grows by
one rate on that side, once. All methods run with one counting seed before any runs with the next:
whatever ends the comparison leaves the same seeds of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossamer.commands.console import command_line
from gossamer.commands.kept_run import EngineCache, execute, slug
from gossamer.commands.simulate import progress_line
from gossamer.commands.view.dashboard import Dashboard
from gossamer.config.settings import Settings
from gossamer.errors import Error, PeerLost, Stalled
from gossamer.quantities import counted
from gossamer.runs.contest import Contest, Entry
from gossamer.runs.folder import RunFolder
from gossamer.runs.ranking import LEVEL
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import beyond

_Entries = dict[str, Entry[Result]]


class Tournament:
    """Runs what is asked for and keeps what came out, also when it is cut short."""

    def __init__(
        self, settings: Sequence[Settings], looks: Sequence[int], target: float | None,
        engines: EngineCache | None = None,
    ) -> None:  # fmt: skip
        """`looks` are the numbers of seeds after which it is asked whether a winner is clear."""
        self._settings = settings
        self._looks = looks
        self._target = target
        self._base = settings[0].seed
        self._has_grid = len({one.learning_rate for one in settings}) > 1
        self._entries: _Entries = {}
        self._planned: list[Settings] = []
        self._ranked: list[str] = []
        self._out: set[str] = set()
        """Methods that failed with a seed that counts."""
        self._look = looks[0]
        self._engines = engines or EngineCache()
        self._folder: RunFolder | None = None
        self.failures: dict[str, Error] = {}
        self.interrupted = False

    @property
    def level(self) -> float:
        """Of each look: all of them together are wrong as seldom as one alone."""
        return LEVEL / len(self._looks)

    def run(self, folder: RunFolder | None) -> None:
        """Everything; Ctrl-C keeps what is finished."""
        self._folder = folder
        labels = dict.fromkeys(str(settings.method) for settings in self._settings)
        try:
            with Dashboard(dict.fromkeys(labels, 0)) as dashboard:
                if self._has_grid:
                    self._plan(self._settings, dashboard)
                ranked = self._choose(dashboard) if self._has_grid else list(self._settings)
                self._rank(ranked, dashboard)
        except KeyboardInterrupt:
            self.interrupted = True

    # ------------------------------------------------------------------ the two stages

    def _choose(self, dashboard: Dashboard) -> list[Settings]:
        """Every rate of every method on the choosing seed; gives each method at its best one."""
        for settings in self._settings:
            self._one(settings, dashboard, is_trial=True)
        tried = self._trials()
        if not tried:
            return []
        if self._target is None:
            self._target = Contest(tried).target
        first = {str(one.method): one for one in reversed(self._settings)}
        for label, best in Contest(tried, self._target).chosen.items():
            further = beyond(best, list(self._entries[label].tried))
            if further is not None:
                wider = dataclasses.replace(first[label], learning_rate=further)
                self._plan([wider], dashboard)
                self._one(wider, dashboard, is_trial=True)
        chosen = Contest(self._trials(), self._target).chosen
        return [dataclasses.replace(first[label], learning_rate=r) for label, r in chosen.items()]

    def _rank(self, ranked: Sequence[Settings], dashboard: Dashboard) -> None:
        self._ranked, done = [str(settings.method) for settings in ranked], 0
        for look in self._looks:
            self._look = look
            first = self._base + self._has_grid
            numbers = range(first + done, first + look)
            rounds = [[dataclasses.replace(s, seed=n) for s in ranked] for n in numbers]
            self._plan([settings for one in rounds for settings in one], dashboard)
            for settings in (settings for one in rounds for settings in one):
                if str(settings.method) not in self._out:
                    self._one(settings, dashboard, is_trial=False)
            done = look
            entries = self.entries
            if not entries or Contest(entries, self._target, level=self.level).ranking.winner:
                return

    def _one(self, settings: Settings, dashboard: Dashboard, *, is_trial: bool) -> None:
        label, rate = str(settings.method), settings.learning_rate or 0.0
        name = f"{label} at {rate:g}"
        place = None
        if self._folder is not None:
            place = self._folder.child(f"{slug(label)}-lr{rate:g}-seed{settings.seed}")

        def watch(row: Row) -> None:
            dashboard.at(row, row["epochs"] / settings.epochs if settings.epochs else 0.0)

        dashboard.begin(label, rate)
        try:
            result = execute(settings, folder=place, on_row=watch, engines=self._engines)
        except (PeerLost, Stalled) as error:
            # What the cluster did to one method is a result about it; the others go on.
            self.failures[name] = error
            if not is_trial:
                self._out.add(label)
            dashboard.finished(f"{name} failed: {error}", has_failed=True)
            return
        entry = self._entries.setdefault(label, Entry(label))
        (entry.tried if is_trial else entry.results).setdefault(rate, []).append(result)
        dashboard.finished(progress_line(name, result.summary))

    def _plan(self, settings: Sequence[Settings], dashboard: Dashboard) -> None:
        self._planned += settings
        for one in settings:
            dashboard.expect(str(one.method))
        self._write_config()

    def _write_config(self) -> None:
        if self._folder is not None:
            self._folder.write_config(
                {
                    "runs": [settings.as_dict() for settings in self._planned],
                    "choosing_seed": self._base if self._has_grid else None,
                    "seeds": self._look,
                    "target": self._target,
                    "level": self.level,
                    "command_line": command_line(),
                }
            )
            self._folder.defer_failures()

    # ------------------------------------------------------------------ what there is

    @property
    def target(self) -> float | None:
        """Given, or found on the choosing seed."""
        return self._target

    @property
    def seeds(self) -> int:
        """With so many counting seeds every method has run that has not failed."""
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
        """By the choosing seed alone."""
        return {
            label: Entry(label, entry.tried or entry.results)
            for label, entry in self._entries.items()
        }

    @property
    def cut_short(self) -> str:
        """Why no winner may be named; empty where nothing was left out."""
        if not self.interrupted:
            return ""
        labels = {str(settings.method) for settings in self._settings}
        return (
            f"Interrupted when {len(self.entries)} of {len(labels)} methods had run"
            if not self.seeds
            else f"Interrupted after {self.seeds} of {counted(self._look, 'seed')}"
        )
