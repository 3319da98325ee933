"""`gossamer compare`: several methods train the same model on one imperfect cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    add_columns,
    can_draw,
    plain_table,
    print_json,
    say,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.view.dashboard import Dashboard
from gossamer.commands.work.comparison import (
    DEFAULT_METHODS,
    looks_of,
    make_tournament,
    ranking_table,
)
from gossamer.commands.work.jobs import JobPool, number_of_jobs
from gossamer.commands.work.script_runs import ScriptRuns
from gossamer.commands.work.simulations import slug
from gossamer.commands.work.tournament import Tournament
from gossamer.errors import ConfigurationError, Unfinished
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE
from gossamer.runs.contest import Contest
from gossamer.runs.expense import FRONT
from gossamer.runs.result import Result
from gossamer.sim.checkpoint.file import CHECKPOINT
from gossamer.sim.script.script_settings import Script
from gossamer.tasks import make_task

EvaluationsOption = Annotated[
    int | None,
    given.shown("How often each run is measured; default: 5 an epoch, from 20 to 100 in all."),
]
ResumeOption = Annotated[
    Path | None,
    given.shown(
        "Go on with the comparison of this folder: with the options of the first time, finished "
        "runs are kept and an unfinished one goes on.",
        metavar="RUN",
    ),
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
    script: given.ScriptArgument = None,
    arguments: given.ArgumentsArgument = None,
    methods: given.MethodsOption = DEFAULT_METHODS,
    method: given.OneMethodOption = None,
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
    compute: given.ComputeOption = "cluster",
    keeping: given.KeepOptions = given.KeepOptions(),
    pieces: given.PieceOptions = given.PieceOptions(),
    resume: ResumeOption = None,
) -> None:
    """Compare several ways of training on one cluster.

    In virtual time, with true gradients. Every method gets the same small grid of learning rates on
    a seed of its own, and is ranked with further seeds at the rate that reached the target first.
    A target is reached when the score, averaged over the epochs within 15 % of a moment, is first
    there, and the run ends there too.

    A SCRIPT that couples its loop by `gossamer.join` is compared at its own learning rate, by what
    it reports (`worker.report(loss=..., accuracy=...)`):

    \b
    gossamer compare train.py --methods "all_reduce ad_psgd" -- --epochs 3
    """
    chosen = given.methods_from(methods, method, DEFAULT_METHODS)
    pieces.check(keeping.runs, script)
    if resume is not None and not resume.is_dir():
        raise ConfigurationError(f"--resume {resume}: there is no such run folder")
    if script is not None:
        given.check_script_options(script, task, length, lr, running, evaluations)
        if target is not None and not target > 0:
            raise ConfigurationError(f"--target must be above 0, got {target:g}")
        looks = looks_of(seeds)
        own_script = Script(script, tuple(arguments or ()))
        with ScriptRuns(own_script, needs_reports=True) as runs:
            own = runs.settings(
                chosen, where.described(), seed=seed, compute=compute,
                threads=running.threads, model_bytes=running.model_bytes,
            )  # fmt: skip
            # The processes of a script use the cores already.
            _compare(Tournament(own, looks, target), keeping, JobPool(engines=runs))
        return
    given.check_no_script(compute)
    loaded = make_task(task, data=running.data)
    tournament = make_tournament(
        loaded, chosen, where.described(), seeds=seeds, learning_rates=given.rates_from(lr),
        target=target, evaluations=evaluations, seed=seed, epochs=length.epochs_of(loaded),
        batch=length.batch, **running.settings(),
    )  # fmt: skip
    _compare(tournament, keeping, JobPool(number_of_jobs(jobs)), pieces, resume)


def _compare(
    tournament: Tournament, keeping: given.KeepOptions, pool: JobPool,
    pieces: given.PieceOptions = given.PieceOptions(), resumed: Path | None = None,
) -> None:  # fmt: skip
    name = f"compare-{slug(tournament.first.task.name)}"
    is_in_pieces = pieces.are_asked or resumed is not None
    with kept_run(
        keeping.runs, name, live=keeping.live, resumed=resumed, picture="comparison.png"
    ) as folder:
        with Dashboard(dict.fromkeys(tournament.labels, 0)) as dashboard:
            try:
                tournament.run(
                    folder, dashboard, pool, pieces.pieces() if is_in_pieces else None
                )  # fmt: skip
            except Unfinished as error:
                if folder is None:
                    raise
                raise Unfinished(folder.path / CHECKPOINT, error.samples) from None
        _show(tournament)
        if keeping.as_json:
            print_json(tournament.as_dict())
        if folder is not None:
            folder.write_summary(tournament.as_dict())
            folder.write_model(tournament.winner().state)
            can_draw()  # prints a hint where matplotlib is missing
    if tournament.interrupted:
        raise KeyboardInterrupt


def _show(tournament: Tournament) -> None:
    first, contest = tournament.first, tournament.contest
    for name, error in tournament.failures.items():
        say(f"notice: {name} failed: {error}")
    for notice, whose in tournament.notices().items():
        say(f"notice: {notice} ({', '.join(whose)})")
    length = f"{counted(first.epochs, 'epoch')}, " if first.epochs else ""
    length += f"batch {first.batch}, " if first.batch else ""
    say(
        f"{first.task.title} on {first.cluster.title or first.cluster.name}; "
        f"{counted(first.cluster.workers, 'worker')}, {length}{first.optimiser}; "
        "true gradients, virtual time"
    )
    show_table(ranking_table(contest))
    marks = " ~ marks those too close to call." if contest.ranking.can_tell else ""
    say(f"times: of what the first one takes.{marks} {RULE}")
    if contest.expenses:
        say(f"cost and energy: until the target is reached. {FRONT}")
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
    if contest.economy():
        say(contest.economy())


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
