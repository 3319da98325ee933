"""`gossamer compare`: the same model, several methods, one imperfect cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    can_draw,
    plain_table,
    print_json,
    say,
    show_bytes,
    show_share,
    show_stale,
    show_table,
)
from gossamer.commands.kept_run import EngineCache, kept_run, slug
from gossamer.commands.script_run import ScriptRuns, check_script_options
from gossamer.commands.tournament import Tournament
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE
from gossamer.runs.arrival import evaluations as frequency
from gossamer.runs.contest import Contest, Entry
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result
from gossamer.sim.script.script_settings import Script
from gossamer.tasks import Task, make_task

DEFAULT_METHODS = "all_reduce downpour easgd d_psgd ad_psgd push_sum local_sgd diloco"
EvaluationsOption = Annotated[
    int | None,
    typer.Option(
        "--evaluations",
        help="How often each run is measured; default: 5 an epoch, from 20 to 100 in all.",
    ),
]
LooksOption = Annotated[
    str,
    typer.Option(
        "--seeds",
        help="How many seeds are ranked, besides the one that chooses the learning rates; auto: "
        "3, 6 or 12, until a winner is clear.",
    ),
]


@given.with_groups
def compare(
    script: given.ScriptArgument = None,
    arguments: given.ArgumentsArgument = None,
    methods: given.MethodsOption = DEFAULT_METHODS,
    task: given.TaskOption = "digits-mlp",
    where: given.ClusterOptions = given.ClusterOptions(cluster="one-slow-of-8"),
    seed: given.SeedOption = 0,
    seeds: LooksOption = "3",
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.GridOption = None,
    target: given.TargetOption = None,
    evaluations: EvaluationsOption = None,
    running: given.RunOptions = given.RunOptions(),
    compute: given.ComputeOption = "cluster",
    keeping: given.KeepOptions = given.KeepOptions(),
) -> None:
    """Compare several ways of training on one cluster.

    In virtual time, with true gradients. Every method gets the same small grid of learning rates on
    a seed of its own, and is ranked with further seeds at the rate that reached the target first.
    A target is reached when the score, averaged over the epochs within 15 % of a moment, is first
    there, and the run ends there too.

    A SCRIPT that couples its loop by `gossamer.join` is compared at its own learning rate, by what
    it reports (`worker.report(loss=..., accuracy=...)`):

    \b
    gossamer compare train.py --methods "all_reduce ad_psgd" --workers 8 -- --epochs 3
    """
    looks = given.looks_from(seeds)
    if script is not None:
        check_script_options(script, task, length, lr, running, evaluations)
        if target is not None and not target > 0:
            raise ConfigurationError(f"--target must be above 0, got {target:g}")
        chosen = Script(script, tuple(arguments or ()))
        with ScriptRuns(chosen, shows_output=False, needs_reports=True) as runs:
            own = runs.settings(
                _split_methods(methods), where.described(), seed=seed, compute=compute,
                threads=running.threads, model_bytes=running.model_bytes,
            )  # fmt: skip
            _compare(Comparison(own, looks, target, runs), own[0].task.name, keeping)
        return
    if compute != "cluster":
        raise ConfigurationError("--compute is for scripts; a task's compute time is the cluster's")
    if running.engine == "none":
        raise ConfigurationError("compare needs gradients; use --engine vector or loop")
    loaded = make_task(task, data=running.data)
    epochs = length.epochs_of(loaded)
    asked = frequency(epochs or loaded.epochs) if evaluations is None else evaluations
    base = {"seed": seed, "epochs": epochs, "batch": length.batch, "evaluations": asked}
    settings = _grid(
        loaded, methods, where.described(), given.rates_from(lr), base | running.settings()
    )
    goal = given.target_from(target, has_accuracy=loaded.correct is not None)
    _compare(Comparison(settings, looks, goal), loaded.name, keeping)


def _compare(comparison: Comparison, task: str, keeping: given.KeepOptions) -> None:
    name = f"compare-{slug(task)}"
    with kept_run(keeping.runs, name, live=keeping.live, picture="comparison.png") as folder:
        comparison.run(folder)
        comparison.report(folder, keeping.as_json)
    if comparison.interrupted:
        raise KeyboardInterrupt


def _grid(
    task: Task, methods: str, machines: Cluster, rates: Sequence[float], base: dict[str, Any]
) -> list[Settings]:
    """Every method at every rate, all of them checked."""
    return [
        make_settings(task, method, machines, learning_rate=rate, **base)
        for method in _split_methods(methods)
        for rate in rates or task.learning_rates
    ]


def _split_methods(text: str) -> list[str]:
    names = text.split()
    if not names:
        raise ConfigurationError("--methods names no method; see `gossamer methods`")
    if len(names) == 1 and "," in text and ":" not in text:
        names = text.split(",")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--methods names a method twice: {text!r}")
    return names


class Comparison:
    """Runs the tournament, then says what came out."""

    def __init__(
        self, settings: Sequence[Settings], looks: Sequence[int], target: float | None,
        engines: EngineCache | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._tournament = Tournament(settings, looks, target, engines)
        self.entries: dict[str, Entry[Result]] = {}

    @property
    def interrupted(self) -> bool:
        return self._tournament.interrupted

    def run(self, folder: RunFolder | None) -> None:
        """All methods, rates and seeds; Ctrl-C keeps what is finished."""
        self._tournament.run(folder)
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
            can_draw()  # which says so where it cannot

    def show(self) -> None:
        first = self._settings[0]
        for name, error in self._tournament.failures.items():
            say(f"notice: {name} failed: {error}")
        for notice, whose in self._notices().items():
            say(f"notice: {notice} ({', '.join(whose)})")
        length = f"{counted(first.epochs, 'epoch')}, " if first.epochs else ""
        length += f"batch {first.batch}, " if first.batch else ""
        say(
            f"{first.task.title} on {first.cluster.title or first.cluster.name}; "
            f"{counted(first.cluster.workers, 'worker')}, {length}"
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
        table = plain_table()
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
        table = plain_table(gap=2)
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


def _between(row: dict[str, Any]) -> str:
    mean, low, high = row["seconds_to_target"], row["low"], row["high"]
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"


def _count(row: dict[str, Any]) -> str:
    """Of a method that does not always arrive."""
    seconds = row["seconds_of_seeds"]
    reached = sum(second is not None for second in seconds)
    return f"{reached} of {counted(len(seconds), 'seed')}" if reached else "never"
