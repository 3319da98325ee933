"""`gossamer compare`: several methods train the same model on one imperfect cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    add_columns,
    can_draw,
    plain_table,
    print_json,
    say,
    show_bytes,
    show_share,
    show_stale,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.view.dashboard import Dashboard
from gossamer.commands.work.jobs import JobPool, number_of_jobs
from gossamer.commands.work.simulations import slug
from gossamer.commands.work.tournament import Tournament
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE
from gossamer.runs.arrival import evaluations as frequency
from gossamer.runs.contest import Contest
from gossamer.runs.result import Result
from gossamer.tasks import Task, make_task

DEFAULT_METHODS = "all_reduce downpour easgd d_psgd ad_psgd push_sum local_sgd diloco"
EvaluationsOption = Annotated[
    int | None,
    given.shown("How often each run is measured; default: 5 an epoch, from 20 to 100 in all."),
]
LooksOption = Annotated[
    str,
    given.shown(
        "How many seeds are ranked, besides the one that chooses the learning rates; auto: "
        "3, 6 or 12, until a winner is clear."
    ),
]


@given.with_groups
def compare(
    methods: given.MethodsOption = DEFAULT_METHODS,
    task: given.TaskOption = "digits-mlp",
    where: given.ClusterOptions = given.ClusterOptions(cluster="one-slow-of-8"),
    seed: given.SeedOption = 0,
    seeds: LooksOption = "3",
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.GridOption = None,
    target: given.TargetOption = None,
    evaluations: EvaluationsOption = None,
    jobs: given.JobsOption = None,
    running: given.RunOptions = given.RunOptions(),
    keeping: given.KeepOptions = given.KeepOptions(),
) -> None:
    """Compare several ways of training on one cluster.

    In virtual time, with true gradients. Every method gets the same small grid of learning rates on
    a seed of its own, and is ranked with further seeds at the rate that reached the target first.
    A target is reached when the score, averaged over the epochs within 15 % of a moment, is first
    there, and the run ends there too.
    """
    looks = given.looks_from(seeds)
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
    tournament = Tournament(settings, looks, goal)
    pool = JobPool(number_of_jobs(jobs))
    name = f"compare-{slug(loaded.name)}"
    with kept_run(keeping.runs, name, live=keeping.live, picture="comparison.png") as folder:
        with Dashboard(dict.fromkeys(tournament.labels, 0)) as dashboard:
            tournament.run(folder, dashboard, pool)
        _show(tournament)
        if keeping.as_json:
            print_json(tournament.as_dict())
        if folder is not None:
            folder.write_summary(tournament.as_dict())
            folder.write_model(tournament.winner().state)
            can_draw()  # prints a hint where matplotlib is missing
    if tournament.interrupted:
        raise KeyboardInterrupt


def _grid(
    task: Task, methods: str, machines: Cluster, rates: Sequence[float], base: dict[str, Any]
) -> list[Settings]:
    """Make and check the settings of every method at every rate."""
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


def _show(tournament: Tournament) -> None:
    first, contest = tournament.first, tournament.contest
    for name, error in tournament.failures.items():
        say(f"notice: {name} failed: {error}")
    for notice, whose in tournament.notices().items():
        say(f"notice: {notice} ({', '.join(whose)})")
    say(
        f"{first.task.title} on {first.cluster.title or first.cluster.name}; "
        f"{counted(first.cluster.workers, 'worker')}, {counted(first.epochs or 0.0, 'epoch')}, "
        f"batch {first.batch}, {first.optimiser}; true gradients, virtual time"
    )
    show_table(_ranking(contest))
    marks = " ~ marks those too close to call." if contest.ranking.can_tell else ""
    say(f"times: of what the first one takes.{marks} {RULE}")
    if len(contest.rates) > 1:
        say(
            "Time to the target at each learning rate tried, on a seed that does not count "
            f"above; * is shown there, in parentheses the final {contest.key} where the target "
            "was not held."
        )
        show_table(_rates(contest))
    for edge in contest.edges():
        say(f"notice: {edge}")
    say(contest.verdict(), style="bold")


def _ranking(contest: Contest[Result]) -> Table:
    score, target = contest.key, contest.target
    goal = show_share(target) if score == "accuracy" else f"{target:.4g}"
    table = plain_table()
    add_columns(
        table, "method", "lr", score, f"to {goal}", "times", "in all", "waiting", "stale",
        "sent/step", "apart", no_wrap=True,
    )  # fmt: skip
    for row in contest.rows():
        reached, times = row["seconds_to_target"], row["times_the_first"]
        is_open = contest.ranking.can_tell and row["may_be_first"] and not contest.ranking.winner
        table.add_row(
            row["method"], f"{row['learning_rate']:g}",
            show_share(row["accuracy"]) if score == "accuracy" else f"{row['loss']:.4g}",
            _between(row) if reached is not None else _count(row),
            ("" if times is None else f"{times:.1f}") + (" ~" if is_open else ""),
            f"{row['virtual_seconds']:.2f} s",
            show_share(row["waiting_fraction"]), show_stale(row), show_bytes(row["bytes_per_step"]),
            f"{row['consensus_distance']:.3f}",
        )  # fmt: skip
    return table


def _rates(contest: Contest[Result]) -> Table:
    """The table of the grid: the time to the target of each method at each rate."""

    def cell(label: str, rate: float) -> str:
        if rate not in contest.entries[label].grid:
            return "- "
        shown = contest.show_tried(label, rate)
        return f"[bold]{shown}*[/bold]" if rate == contest.chosen[label] else f"{shown} "

    table = plain_table(gap=2)
    add_columns(table, "method", *(f"{rate:g}" for rate in contest.rates), no_wrap=True)
    for label in contest.entries:
        table.add_row(label, *(cell(label, rate) for rate in contest.rates))
    return table


def _between(row: dict[str, Any]) -> str:
    mean, low, high = row["seconds_to_target"], row["low"], row["high"]
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"


def _count(row: dict[str, Any]) -> str:
    """How many seeds of a method that does not always arrive did so."""
    seconds = row["seconds_of_seeds"]
    reached = sum(second is not None for second in seconds)
    return f"{reached} of {counted(len(seconds), 'seed')}" if reached else "never"
