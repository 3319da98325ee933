"""A comparison of methods: run the grid, then say what came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    can_draw,
    out,
    print_json,
    show_bytes,
    show_share,
)
from gossamer.commands.execute import Engines, execute
from gossamer.commands.simulate import progress_line
from gossamer.errors import ConfigurationError, Error, PeerLost, Stalled
from gossamer.report.folder import RunFolder
from gossamer.report.pictures import Series, comparison_picture
from gossamer.report.statistics import (
    Interval,
    arrival,
    best_of,
    final,
    interval,
    is_lower_better,
    measure,
    verdict,
)
from gossamer.settings import Settings
from gossamer.sim.simulation import Result, Row


@dataclass
class Entry:
    """One method with the runs of all rates and seeds."""

    label: str
    results: dict[float, list[Result]] = field(default_factory=dict[float, list[Result]])

    def histories(self, rate: float) -> list[list[Row]]:
        return [result.history for result in self.results[rate]]

    def mean(self, rate: float, key: str) -> Interval:
        return interval([float(result.summary[key]) for result in self.results[rate]])


class Comparison:
    """Runs the grid, then says what came out."""

    def __init__(self, settings: Sequence[Settings], seeds: int, target: float | None) -> None:
        self._settings = settings
        self._seeds = seeds
        self._target = target
        if target is not None and not math.isfinite(target):
            raise ConfigurationError(f"target must be a finite number, got {target}")
        self.entries: dict[str, Entry] = {}
        self.failures: dict[str, Error] = {}
        self.interrupted = False

    def run(self, folder: RunFolder | None) -> None:
        """All methods, rates and seeds; Ctrl-C keeps what is finished."""
        engines = Engines()
        total = len(self._settings) * self._seeds
        if folder is not None:
            folder.write_config(
                {"runs": [s.as_dict() for s in self._settings], "seeds": self._seeds}
            )
        try:
            with Reporter(total, "comparing") as reporter:
                for settings in self._settings:
                    for number in range(self._seeds):
                        self._run_one(settings, number, folder, engines, reporter)
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
        reporter: Reporter,
    ) -> None:
        own = dataclasses.replace(settings, seed=settings.seed + number)
        label, rate = str(own.method), own.learning_rate or 0.0
        name = f"{label} at {rate:g}"
        place = None
        if folder is not None:
            place = folder.child(f"{given.slug(label)}-lr{rate:g}-seed{own.seed}")

        def watch(row: Row) -> None:
            reporter.at(progress_line(name, row), row["epochs"] / (own.epochs or 1.0))

        try:
            result = execute(own, folder=place, on_row=watch, engines=engines)
        except (PeerLost, Stalled) as error:
            # What the cluster did to one method is a result about it; the others go on.
            self.failures[name] = error
            reporter.finished(f"{name} failed: {error}")
            return
        entry = self.entries.setdefault(label, Entry(label))
        entry.results.setdefault(rate, []).append(result)
        reporter.finished(progress_line(name, result.summary))

    # ------------------------------------------------------------------ what came out

    @property
    def key(self) -> str:
        histories = [
            h for e in self.entries.values() for rate in e.results for h in e.histories(rate)
        ]
        return measure(histories)

    def target(self) -> float:
        """Given, or near the best that any method ends with: 98 % of accuracy, 110 % of loss."""
        if self._target is not None:
            return self._target
        ends = [
            interval([final(h, self.key) for h in entry.histories(rate)]).mean
            for entry in self.entries.values()
            for rate in entry.results
        ]
        finite = [end for end in ends if end == end]
        if is_lower_better(self.key):
            return 1.1 * min(finite, default=0.0)
        # Where all diverged, what the untrained model scored must not count as reached.
        return int(98 * max(finite)) / 100 if finite else 1.0

    def chosen(self) -> dict[str, float]:
        """The rate of the grid at which each method is shown."""
        target = self.target()
        return {
            label: best_of(
                {rate: entry.histories(rate) for rate in entry.results}, target, self.key
            )
            for label, entry in self.entries.items()
        }

    def _verdict(self) -> str:
        best = {label: self.entries[label].histories(rate) for label, rate in self.chosen().items()}
        return verdict(best, self.target(), self.key)

    def report(self, folder: RunFolder | None, as_json: bool) -> None:
        """On the console, in the folder, and as JSON where that is wanted."""
        self.show()
        if folder is not None:
            folder.write_summary(self.as_dict())
            self.draw(folder.path / "comparison.png")
            out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
        if as_json:
            print_json(self.as_dict())

    def show(self) -> None:
        first = self._settings[0]
        for name, error in self.failures.items():
            out.print(f"notice: {name} failed: {error}", markup=False, soft_wrap=True)
        for notice, whose in self._notices().items():
            out.print(f"notice: {notice} ({', '.join(whose)})", markup=False, soft_wrap=True)
        out.print(
            f"{first.task.title} on {first.cluster.title or first.cluster.name}; "
            f"{first.cluster.workers} workers, {first.epochs:g} epochs, batch {first.batch}, "
            f"{first.optimiser}; true gradients, virtual time",
            markup=False,
            soft_wrap=True,
        )
        out.print(self._ranking())
        out.print(self._grid())
        out.print(self._verdict(), markup=False, style="bold", soft_wrap=True)

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
        score = "accuracy" if self.key == "accuracy" else "loss"
        goal = show_share(self.target()) if score == "accuracy" else f"{self.target():.4g}"
        for column in ("method", "lr", score, f"to {goal}", "in all", "waiting",
                       "stale", "sent/step", "apart"):  # fmt: skip
            table.add_column(
                column, justify="left" if column == "method" else "right", no_wrap=True
            )
        for row in self.rows():
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
        rates = sorted({rate for entry in self.entries.values() for rate in entry.results})
        table = Table(
            title=f"Final {self.key} over the grid of learning rates (* is shown above)",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        table.add_column("method")
        for rate in rates:
            table.add_column(f"{rate:g}", justify="right")
        best = self.chosen()
        for label, entry in self.entries.items():
            cells: list[str] = []
            for rate in rates:
                if rate not in entry.results:
                    cells.append("-")
                    continue
                value = interval([final(h, self.key) for h in entry.histories(rate)]).mean
                shown = show_share(value) if self.key == "accuracy" else f"{value:.4g}"
                cells.append(f"[bold]{shown}*[/bold]" if rate == best[label] else f"{shown} ")
            table.add_row(label, *cells)
        return table

    def rows(self) -> list[dict[str, Any]]:
        """One row per method at its best rate, the fastest to the target first."""
        target, key = self.target(), self.key
        rows: list[dict[str, Any]] = []
        for label, rate in self.chosen().items():
            entry = self.entries[label]
            reached = arrival(label, entry.histories(rate), target, key).interval
            row: dict[str, Any] = {"method": label, "learning_rate": rate}
            row["seconds_to_target"] = None if reached is None else reached.mean
            row["low"] = None if reached is None else reached.low
            row["high"] = None if reached is None else reached.high
            for name in ("loss", "accuracy", "virtual_seconds", "wall_seconds", "waiting_fraction",
                         "mean_staleness", "bytes_per_step", "consensus_distance",
                         "exchanges_per_step"):  # fmt: skip
                known = entry.results[rate][0].summary.get(name) is not None
                row[name] = entry.mean(rate, name).mean if known else None
            rows.append(row)
        never = float("inf")
        return sorted(
            rows,
            key=lambda r: r["seconds_to_target"] if r["seconds_to_target"] is not None else never,
        )

    def as_dict(self) -> dict[str, Any]:
        grid = {
            label: {
                f"{rate:g}": [final(h, self.key) for h in entry.histories(rate)]
                for rate in entry.results
            }
            for label, entry in self.entries.items()
        }
        return {
            "task": self._settings[0].task.name,
            "cluster": self._settings[0].cluster.name,
            "workers": self._settings[0].cluster.workers,
            "seeds": self._seeds,
            "target": self.target(),
            "verdict": self._verdict(),
            "ended": "interrupted" if self.interrupted else "finished",
            "failures": {name: str(error) for name, error in self.failures.items()},
            "ranking": self.rows(),
            "grid": grid,
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
            for row in self.rows()
        ]
        title = f"{first.task.title} on {first.cluster.title or first.cluster.name}"
        comparison_picture(path, runs, title=title, target=self.target())


def _between(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"
