"""`gossamer.compare`: several methods train the same model on one imperfect cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from gossamer.commands.console import (
    add_columns,
    plain_table,
    show_bytes,
    show_share,
    show_stale,
)
from gossamer.commands.view.dashboard import Dashboard
from gossamer.commands.work.answer import KeptAnswer, scratch_folder, shows_progress
from gossamer.commands.work.jobs import pool_for
from gossamer.commands.work.tournament import SilentView, Tournament
from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.settings import loaded_task, make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.quantities import counted
from gossamer.runs.arrival import evaluations as frequency
from gossamer.runs.arrival import target_of
from gossamer.runs.contest import Contest
from gossamer.runs.expense import HEADINGS, SHOWN
from gossamer.runs.ranking import LOOKS
from gossamer.runs.result import Result
from gossamer.tasks import Task

DEFAULT_METHODS = "all_reduce downpour easgd d_psgd ad_psgd push_sum local_sgd diloco"
Methods = str | Sequence[str | MethodSpec]


class Comparison(KeptAnswer):
    """The ranking of several methods, with all runs that it is made of."""

    def __init__(self, tournament: Tournament, folder: Path) -> None:
        super().__init__(folder)
        self._tournament = tournament

    @property
    def title(self) -> str:
        first = self._tournament.first
        return f"Comparison on {first.cluster.title or first.cluster.name}: {first.task.title}"

    @property
    def verdict(self) -> str:
        """Which method reaches the target first, in one sentence with the uncertainty."""
        return self._tournament.contest.verdict()

    @property
    def target(self) -> float:
        return self.as_dict()["target"]

    @property
    def results(self) -> dict[str, list[Result]]:
        """The runs that count of each method, one for each seed, the fastest method first."""
        entries = self._tournament.entries
        return {
            row["method"]: entries[row["method"]].results[row["learning_rate"]]
            for row in self.table()
        }

    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each method, the fastest first."""
        return self._tournament.contest.rows()

    def as_dict(self) -> dict[str, Any]:
        return self._tournament.as_dict()

    def _shown(self) -> tuple[Table, list[str]]:
        contest = self._tournament.contest
        said = [self.verdict, contest.economy()]
        return ranking_table(contest), [sentence for sentence in said if sentence]


def compare(
    task: str | Task = "digits-mlp",
    methods: Methods = DEFAULT_METHODS,
    cluster: str | Path | Cluster = "one-slow-of-8",
    *,
    seeds: int | str = 3,
    learning_rates: Sequence[float] = (),
    target: float | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
    data: Path | str | None = None,
    **choices: Any,
) -> Comparison:
    """Compare several ways of training on one cluster, in virtual time and with true gradients.

    Every method gets the same small grid of learning rates on a seed of its own, and is ranked with
    `seeds` further seeds ("auto": 3, 6 or 12) at the rate that reached the target first. `jobs`
    runs go on at a time, each in a process; by default all cores up to two, else one fewer.
    `choices` are those of `simulate`: seed, epochs, batch, optimiser and so on. Ctrl-C gives what
    is finished by then, and the verdict says so.
    """
    tournament = make_tournament(
        task, methods, cluster, seeds=seeds, learning_rates=learning_rates, target=target,
        data=data, **choices,
    )  # fmt: skip
    pool = pool_for(tournament.first.task, jobs)
    with scratch_folder() as folder:
        with ExitStack() as stack:
            view = SilentView()
            if shows_progress(progress):
                view = stack.enter_context(Dashboard(dict.fromkeys(tournament.labels, 0)))
            tournament.run(folder, view, pool)
        folder.write_summary(tournament.as_dict())
        folder.write_model(tournament.winner().state)
        folder.check()
    return Comparison(tournament, folder.path)


def make_tournament(
    task: str | Task,
    methods: Methods,
    cluster: str | Path | Cluster,
    *,
    seeds: int | str = 3,
    learning_rates: Sequence[float] = (),
    target: float | None = None,
    data: Path | str | None = None,
    evaluations: int | None = None,
    **choices: Any,
) -> Tournament:
    """Make and check all runs of a comparison."""
    looks = looks_of(seeds)
    if choices.get("engine") == "none":
        raise ConfigurationError("compare needs gradients; use --engine vector or loop")
    made = loaded_task(task, data)
    epochs = choices.get("epochs")
    asked = frequency(epochs or made.epochs) if evaluations is None else evaluations
    machines = load_cluster(cluster)
    settings = [
        make_settings(made, method, machines, learning_rate=rate, evaluations=asked, **choices)
        for method in method_names(methods)
        for rate in dict.fromkeys(learning_rates or made.learning_rates)
    ]
    goal = target_of(target, score=made.score)
    return Tournament(settings, looks, goal)


def method_names(methods: Methods) -> list[str]:
    """Read methods from a list, or from a text in which spaces separate them."""
    names = methods.split() if isinstance(methods, str) else [str(one) for one in methods]
    if not names:
        raise ConfigurationError("--methods names no method; see `gossamer methods`")
    if isinstance(methods, str) and len(names) == 1 and "," in methods and ":" not in methods:
        names = methods.split(",")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--methods names a method twice: {' '.join(names)!r}")
    return names


def looks_of(seeds: int | str) -> tuple[int, ...]:
    """The numbers of seeds after which a comparison tests whether a winner is clear."""
    if seeds == "auto":
        return LOOKS
    try:
        count = int(seeds)
    except ValueError:
        raise ConfigurationError(f"--seeds must be a whole number or auto, got {seeds!r}") from None
    if count < 1:
        raise ConfigurationError(f"--seeds must be at least 1, got {count}")
    return (count,)


def ranking_table(contest: Contest[Result]) -> Table:
    """The table of the ranking, the fastest method first."""
    score, target = contest.key, contest.target
    goal = show_share(target) if score == "accuracy" else f"{target:.4g}"
    table = plain_table()
    told = list(contest.expenses[0].in_all) if contest.expenses else []
    spendings = [HEADINGS[what] for what in told]
    add_columns(
        table, "method", "lr", score, f"to {goal}", "times", *spendings, "in all", "waiting",
        "stale", "sent/step", "apart", no_wrap=True,
    )  # fmt: skip
    for row in contest.rows():
        reached, times = row["seconds_to_target"], row["times_the_first"]
        is_open = contest.ranking.can_tell and row["may_be_first"] and not contest.ranking.winner
        table.add_row(
            row["method"], f"{row['learning_rate']:g}",
            _score(row[score], score),
            _between(row) if reached is not None else _count(row),
            ("" if times is None else f"{times:.1f}") + (" ~" if is_open else ""),
            *(spent_cell(row, what) for what in told),
            f"{row['virtual_seconds']:.2f} s",
            show_share(row["waiting_fraction"]), show_stale(row), show_bytes(row["bytes_per_step"]),
            f"{row['consensus_distance']:.3f}",
        )  # fmt: skip
    return table


def spent_cell(row: dict[str, Any], what: str) -> str:
    """What a method spends until it reaches the target; * marks the front of time and money."""
    mark = "*" if what == "dollars" and row["on_front"] else ""
    return SHOWN[what](row[f"{what}_to_target"]) + mark


def _score(value: float | None, score: str) -> str:
    if value is None:
        return "-"
    return show_share(value) if score == "accuracy" else f"{value:.4g}"


def _between(row: dict[str, Any]) -> str:
    mean, low, high = row["seconds_to_target"], row["low"], row["high"]
    return f"{mean:.2f} s" if low == high else f"{mean:.2f} ({low:.2f}-{high:.2f}) s"


def _count(row: dict[str, Any]) -> str:
    """How many seeds of a method that does not always arrive did so."""
    seconds = row["seconds_of_seeds"]
    reached = sum(second is not None for second in seconds)
    return f"{reached} of {counted(len(seconds), 'seed')}" if reached else "never"
