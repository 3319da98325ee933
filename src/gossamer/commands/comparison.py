"""A comparison of methods: what came out of its runs, on the console, in the folder, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gossamer.commands.console import (
    can_draw,
    out,
    print_json,
    say,
    show_bytes,
    show_share,
    show_stale,
    show_table,
)
from gossamer.commands.live import LivePage
from gossamer.commands.report import keep_report
from gossamer.commands.tournament import Tournament
from gossamer.config.settings import Settings
from gossamer.quantities import counted
from gossamer.report.pictures.main_picture import series_of
from gossamer.report.pictures.run_pictures import comparison_picture
from gossamer.runs.arrival import RULE
from gossamer.runs.contest import Contest, Entry
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import run_of
from gossamer.runs.result import Result


class Comparison:
    """Runs the tournament, then says what came out."""

    def __init__(
        self, settings: Sequence[Settings], looks: Sequence[int], target: float | None
    ) -> None:
        self._settings = settings
        self._tournament = Tournament(settings, looks, target)
        self.entries: dict[str, Entry[Result]] = {}

    @property
    def interrupted(self) -> bool:
        return self._tournament.interrupted

    def run(self, folder: RunFolder | None, page: LivePage | None = None) -> None:
        """All methods, rates and seeds; Ctrl-C keeps what is finished."""
        self._tournament.run(folder, page)
        self.entries = self._tournament.entries
        if not self.entries:
            failures = self._tournament.failures.values()
            raise KeyboardInterrupt if self.interrupted else next(iter(failures))

    # ------------------------------------------------------------------ what came out

    @cached_property
    def contest(self) -> Contest[Result]:
        """Of what has run, once it has."""
        held = self._tournament
        return Contest(self.entries, held.target, level=held.level, cut_short=held.cut_short)

    def report(self, folder: RunFolder | None, as_json: bool) -> None:
        """On the console, in the folder, and as JSON where that is wanted."""
        self.show()
        if as_json:
            print_json(self.as_dict())
        if folder is not None:
            folder.write_summary(self.as_dict())
            best = self.contest.rows()[0]
            winner = self.entries[best["method"]].results[best["learning_rate"]][0]
            folder.write_model(winner.state)  # of its first seed
            self.draw(folder.path / "comparison.png")
            out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
            keep_report(folder)

    def show(self) -> None:
        first = self._settings[0]
        for name, error in self._tournament.failures.items():
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
        say(self._legend())
        if len(self.contest.rates) > 1:
            say(
                "Time to the target at each learning rate tried, on a seed that does not count "
                f"above; * is shown there, in parentheses the final {self.contest.key} where the "
                "target was not held."
            )
            show_table(self._grid())
        for edge in self.contest.edges():
            say(f"notice: {edge}")
        say(self.contest.verdict(), style="bold")

    def _notices(self) -> dict[str, list[str]]:
        """What a reader must be told, and of which methods: of all their runs, or at which rate."""
        found: dict[str, list[str]] = {}
        for label, entry in self.entries.items():
            rates: dict[str, list[float]] = {}
            runs = {rate: [*entry.tried.get(rate, ()), *entry.results.get(rate, ())]
                    for rate in (*entry.tried, *entry.results)}  # fmt: skip
            for rate, results in runs.items():
                for notice in dict.fromkeys(n for one in results for n in one.notices):
                    rates.setdefault(notice, []).append(rate)
            for notice, own in rates.items():
                whose = [label] if len(own) == len(runs) > 1 else [f"{label} at {r:g}" for r in own]
                found.setdefault(notice, []).extend(whose)
        return found

    def _ranking(self) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        score, target = self.contest.key, self.contest.target
        goal = show_share(target) if score == "accuracy" else f"{target:.4g}"
        for column in ("method", "lr", score, f"to {goal}", "times", "in all", "waiting",
                       "stale", "sent/step", "apart"):  # fmt: skip
            table.add_column(
                column, justify="left" if column == "method" else "right", no_wrap=True
            )
        for row in self.contest.rows():
            reached = row["seconds_to_target"]
            table.add_row(
                row["method"], f"{row['learning_rate']:g}",
                show_share(row["accuracy"]) if score == "accuracy" else f"{row['loss']:.4g}",
                _between(row) if reached is not None else _count(row),
                self._times(row), f"{row['virtual_seconds']:.2f} s",
                show_share(row["waiting_fraction"]), show_stale(row),
                show_bytes(row["bytes_per_step"]),
                f"{row['consensus_distance']:.3f}",
            )  # fmt: skip
        return table

    def _times(self, row: dict[str, Any]) -> str:
        """Of the first one's time, and whether the two can be told apart."""
        times, ranking = row["times_the_first"], self.contest.ranking
        is_open = ranking.can_tell and row["may_be_first"] and ranking.winner is None
        return ("" if times is None else f"{times:.1f}") + (" ~" if is_open else "")

    def _legend(self) -> str:
        marks = " ~ marks those too close to call." if self.contest.ranking.can_tell else ""
        return f"times: of what the first one takes.{marks} {RULE}"

    def _grid(self) -> Table:
        contest = self.contest
        table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=True)
        for rate in contest.rates:
            table.add_column(f"{rate:g}", justify="right", no_wrap=True)
        for label, entry in self.entries.items():
            cells: list[str] = []
            for rate in contest.rates:
                if rate not in entry.grid:
                    cells.append("- ")
                    continue
                shown = contest.show_tried(label, rate)
                is_shown = rate == contest.chosen[label]
                cells.append(f"[bold]{shown}*[/bold]" if is_shown else f"{shown} ")
            table.add_row(label, *cells)
        return table

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self._settings[0].task.name,
            "cluster": self._settings[0].cluster.name,
            "workers": self._settings[0].cluster.workers,
            "seeds": self._tournament.seeds,
            "level": self._tournament.level,
            "cut_short": self._tournament.cut_short,
            "target": self.contest.target,
            "verdict": self.contest.verdict(),
            "ended": "interrupted" if self.interrupted else "finished",
            "failures": {name: str(error) for name, error in self._tournament.failures.items()},
            "ranking": self.contest.rows(),
            "grid": self.contest.grid(),
            "edges": self.contest.edges(),
            "rule": RULE,
        }

    def draw(self, path: Path) -> None:
        """The picture, where matplotlib is installed."""
        if not can_draw():
            return
        first = self._settings[0]
        runs = [
            series_of(place.label, [run_of(one) for one in self._shown(place.label)])
            for place in self.contest.ranking.places
        ]
        title = f"{first.task.title} on {first.cluster.title or first.cluster.name}"
        comparison_picture(
            path, runs, title=title, target=self.contest.target, ranking=self.contest.ranking
        )

    def _shown(self, label: str) -> list[Result]:
        """The runs of a method at its best rate."""
        return self.entries[label].results[self.contest.chosen[label]]


def _between(row: dict[str, Any]) -> str:
    mean, low, high = row["seconds_to_target"], row["low"], row["high"]
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"


def _count(row: dict[str, Any]) -> str:
    """Of a method that does not always arrive."""
    seconds = row["seconds_of_seeds"]
    reached = sum(second is not None for second in seconds)
    return f"{reached} of {counted(len(seconds), 'seed')}" if reached else "never"
