"""A comparison of methods: run the grid, then say what came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    can_draw,
    command_line,
    out,
    print_json,
    say,
    show_bytes,
    show_share,
    show_table,
)
from gossamer.commands.dashboard import Dashboard
from gossamer.commands.execute import Engines, execute
from gossamer.commands.live import LivePage
from gossamer.commands.report import keep_report
from gossamer.commands.simulate import progress_line
from gossamer.errors import ConfigurationError, Error, PeerLost, Stalled
from gossamer.quantities import counted
from gossamer.report.contest import Contest, Entry
from gossamer.report.folder import RunFolder
from gossamer.report.pictures import Series, comparison_picture
from gossamer.settings import Settings
from gossamer.sim.simulation import Result, Row


class Comparison:
    """Runs the grid, then says what came out."""

    def __init__(self, settings: Sequence[Settings], seeds: int, target: float | None) -> None:
        self._settings = settings
        self._seeds = seeds
        self._target = target
        if target is not None and not math.isfinite(target):
            raise ConfigurationError(f"target must be a finite number, got {target}")
        self.entries: dict[str, Entry[Result]] = {}
        self.failures: dict[str, Error] = {}
        self.interrupted = False

    def run(self, folder: RunFolder | None, page: LivePage | None = None) -> None:
        """All methods, rates and seeds; Ctrl-C keeps what is finished."""
        engines = Engines()
        counts: dict[str, int] = {}
        for settings in self._settings:
            label = str(settings.method)
            counts[label] = counts.get(label, 0) + self._seeds
        if folder is not None:
            folder.write_config(
                {
                    "runs": [s.as_dict() for s in self._settings],
                    "seeds": self._seeds,
                    "command_line": command_line(),
                }
            )
            if page is not None:
                page.show(folder)
        try:
            with Dashboard(counts) as dashboard:
                for settings in self._settings:
                    for number in range(self._seeds):
                        self._run_one(settings, number, folder, engines, dashboard)
        except KeyboardInterrupt:
            self.interrupted = True
        # A rate with fewer seeds than the others would not be a fair comparison.
        for entry in self.entries.values():
            entry.results = {
                rate: done for rate, done in entry.results.items() if len(done) == self._seeds
            }
        self.entries = {label: e for label, e in self.entries.items() if e.results}
        if not self.entries:
            raise KeyboardInterrupt if self.interrupted else next(iter(self.failures.values()))

    def _run_one(
        self,
        settings: Settings,
        number: int,
        folder: RunFolder | None,
        engines: Engines,
        dashboard: Dashboard,
    ) -> None:
        own = dataclasses.replace(settings, seed=settings.seed + number)
        label, rate = str(own.method), own.learning_rate or 0.0
        name = f"{label} at {rate:g}"
        place = None
        if folder is not None:
            place = folder.child(f"{given.slug(label)}-lr{rate:g}-seed{own.seed}")

        def watch(row: Row) -> None:
            dashboard.at(row, row["epochs"] / (own.epochs or 1.0))

        dashboard.begin(label, rate)
        try:
            result = execute(own, folder=place, on_row=watch, engines=engines)
        except (PeerLost, Stalled) as error:
            # What the cluster did to one method is a result about it; the others go on.
            self.failures[name] = error
            dashboard.finished(f"{name} failed: {error}", has_failed=True)
            return
        entry = self.entries.setdefault(label, Entry(label))
        entry.results.setdefault(rate, []).append(result)
        dashboard.finished(progress_line(name, result.summary))

    # ------------------------------------------------------------------ what came out

    @cached_property
    def contest(self) -> Contest[Result]:
        """Of what has run, once it has."""
        return Contest(self.entries, self._target)

    def report(self, folder: RunFolder | None, as_json: bool) -> None:
        """On the console, in the folder, and as JSON where that is wanted."""
        self.show()
        if folder is not None:
            folder.write_summary(self.as_dict())
            self.draw(folder.path / "comparison.png")
            out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
            keep_report(folder)
        if as_json:
            print_json(self.as_dict())

    def show(self) -> None:
        first = self._settings[0]
        for name, error in self.failures.items():
            say(f"notice: {name} failed: {error}")
        for notice, whose in self._notices().items():
            say(f"notice: {notice} ({', '.join(whose)})")
        say(
            f"{first.task.title} on {first.cluster.title or first.cluster.name}; "
            f"{counted(first.cluster.workers, 'worker')}, {counted(first.epochs or 0.0, 'epoch')}, "
            f"batch {first.batch}, "
            f"{first.optimiser}; true gradients, virtual time"
        )
        show_table(self._ranking())
        show_table(self._grid())
        say(self.contest.verdict(), style="bold")

    def _notices(self) -> dict[str, list[str]]:
        """What a reader must be told, and of which runs."""
        found: dict[str, list[str]] = {}
        for label, entry in self.entries.items():
            for rate, results in entry.results.items():
                for notice in dict.fromkeys(n for one in results for n in one.notices):
                    found.setdefault(notice, []).append(f"{label} at {rate:g}")
        return found

    def _ranking(self) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        score, target = self.contest.key, self.contest.target
        goal = show_share(target) if score == "accuracy" else f"{target:.4g}"
        for column in ("method", "lr", score, f"to {goal}", "in all", "waiting",
                       "stale", "sent/step", "apart"):  # fmt: skip
            table.add_column(
                column, justify="left" if column == "method" else "right", no_wrap=True
            )
        for row in self.contest.rows():
            reached = row["seconds_to_target"]
            table.add_row(
                row["method"], f"{row['learning_rate']:g}",
                show_share(row["accuracy"]) if score == "accuracy" else f"{row['loss']:.4g}",
                "never" if reached is None else _between(reached, row["low"], row["high"]),
                f"{row['virtual_seconds']:.2f} s", show_share(row["waiting_fraction"]),
                f"{row['mean_staleness']:.1f}", show_bytes(row["bytes_per_step"]),
                f"{row['consensus_distance']:.3f}",
            )  # fmt: skip
        return table

    def _grid(self) -> Table:
        contest = self.contest
        table = Table(
            title=f"Final {contest.key} over the grid of learning rates (* is shown above)",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        table.add_column("method", no_wrap=True)
        for rate in contest.rates:
            table.add_column(f"{rate:g}", justify="right", no_wrap=True)
        for label, entry in self.entries.items():
            cells: list[str] = []
            for rate in contest.rates:
                if rate not in entry.results:
                    cells.append("-")
                    continue
                value = contest.score(label, rate)
                shown = show_share(value) if contest.key == "accuracy" else f"{value:.4g}"
                is_shown = rate == contest.chosen[label]
                cells.append(f"[bold]{shown}*[/bold]" if is_shown else f"{shown} ")
            table.add_row(label, *cells)
        return table

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self._settings[0].task.name,
            "cluster": self._settings[0].cluster.name,
            "workers": self._settings[0].cluster.workers,
            "seeds": self._seeds,
            "target": self.contest.target,
            "verdict": self.contest.verdict(),
            "ended": "interrupted" if self.interrupted else "finished",
            "failures": {name: str(error) for name, error in self.failures.items()},
            "ranking": self.contest.rows(),
            "grid": self.contest.grid(),
        }

    def draw(self, path: Path) -> None:
        """The picture, where matplotlib is installed."""
        if not can_draw():
            return
        first = self._settings[0]
        runs = [
            Series(
                row["method"],
                self.entries[row["method"]].histories(row["learning_rate"]),
                first.cluster.workers,
                self.entries[row["method"]].results[row["learning_rate"]][0].summary,
            )
            for row in self.contest.rows()
        ]
        title = f"{first.task.title} on {first.cluster.title or first.cluster.name}"
        comparison_picture(path, runs, title=title, target=self.contest.target)


def _between(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"
