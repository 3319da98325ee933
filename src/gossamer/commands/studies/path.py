"""`gossamer lab path`: the loss on lines between models, which shows whether to average them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from gossamer.commands import options as given
from gossamer.commands.console import (
    add_columns,
    can_draw,
    plain_table,
    print_json,
    say,
    show_share,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.models.soup import TaskOfRunsOption
from gossamer.config.settings import loaded_task
from gossamer.consolidate.path import (
    POINTS,
    ModelPath,
    paths_between_strangers,
    paths_between_workers,
    paths_of_runs,
)
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.report.pictures import figure as figures
from gossamer.tasks import Task

_USUAL = "ensemble ensemble:shared=0.5 local_sgd"
_TASK = "digits-mlp"
_STRANGERS = "other initial weights"

Paths = Mapping[str, Sequence[ModelPath]]


@given.with_groups
def path(
    runs_of: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or files of weights with --task."),
    ] = None,
    methods: Annotated[
        str, given.shown("Without runs: train by each of these, and join their workers' models.")
    ] = _USUAL,
    task: TaskOfRunsOption = None,
    cluster: given.ClusterOption = "equal-8",
    workers: Annotated[int, given.shown("Workers, and so models, of each method.")] = 4,
    points: Annotated[int, given.shown("Points of each line; an odd number.")] = POINTS,
    seed: given.SeedOption = 0,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.RateOption = None,
    data: given.DataOption = None,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """The loss between models: when averaging is allowed.

    \b
    gossamer lab path
    gossamer lab path --methods "easgd local_sgd:period=64"
    gossamer lab path runs/20261119-...

    Between models that share a past the loss stays low, and their mean is as good as they are.
    Between models of other initial weights it rises, and their mean is good for nothing: keep them
    as an ensemble, or distil them. With runs, the lines are between their models, or between the
    members of an ensemble.
    """
    asked = {"task": task, "points": points, "seed": seed}
    with kept_run(keeping.runs, "lab-path", {**asked, "runs": runs_of}, has_page=False) as folder:
        if runs_of:
            found: Paths = {"runs": paths_of_runs(runs_of, points=points, task=task, data=data)}
            trained = None if task is None else loaded_task(task, data)
        else:
            trained = loaded_task(task or _TASK, data)
            if not methods.split():
                raise ConfigurationError("--methods names no method; name one, or give runs")
            settings: dict[str, Any] = {
                "workers": workers, "points": points, "seed": seed, "batch": length.batch,
                "epochs": length.epochs_of(trained), "learning_rate": lr,
            }  # fmt: skip
            found = {_STRANGERS: paths_between_strangers(trained, cluster, **settings)}
            for method in methods.split():
                found[method] = paths_between_workers(trained, method, cluster, **settings)
        _show(found, trained)
        summary = {
            "ended": "finished", **asked,
            "paths": {name: [one.as_dict() for one in own] for name, own in found.items()},
        }  # fmt: skip
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_summary(summary)
            if can_draw():
                _draw(folder.path / "path.png", found, trained)


def _means(paths: Sequence[ModelPath]) -> tuple[list[float], list[float]]:
    """Loss and score at every point, over all lines."""
    losses = [fmean(column) for column in zip(*(one.losses for one in paths), strict=True)]
    scores = [fmean(column) for column in zip(*(one.scores for one in paths), strict=True)]
    return losses, scores


def _show(found: Paths, task: Task | None) -> None:
    is_share = task is None or task.has_accuracy
    name = "accuracy" if task is None else str(task.score)

    def shown(score: float) -> str:
        return show_share(score) if is_share else f"{score:.4g}"

    table = plain_table("Along the lines between workers' models, means over the lines", gap=2)
    columns = ("apart", "loss at the ends", "barrier", f"{name} at the ends", "in the middle")
    add_columns(table, "method", *columns, no_wrap=True)
    for method, paths in found.items():
        losses, scores = _means(paths)
        table.add_row(
            method, show_share(fmean(one.distance for one in paths)),
            f"{(losses[0] + losses[-1]) / 2:.4f}",
            f"{fmean(max(0.0, one.barrier) for one in paths):.4f}",
            shown((scores[0] + scores[-1]) / 2), shown(scores[len(scores) // 2]),
        )  # fmt: skip
    show_table(table)
    for method, paths in found.items():
        allowed = sum(one.may_be_averaged for one in paths)
        word = "yes" if allowed == len(paths) else "no" if not allowed else "in part"
        say(
            f"{method}: may they be averaged? {word} "
            f"({allowed} of {counted(len(paths), 'line')} have a middle no worse than their ends)"
        )


def _draw(place: Path, found: Paths, task: Task | None) -> None:
    """One curve for each method: the mean loss over its lines, and a band from least to most."""
    figure = figures.new_figure(8.0, 4.6)
    axes = figure.add_subplot()
    figures.style(axes, "bottom", "Test loss (log scale)", grid="both")
    handles = []
    for index, (method, paths) in enumerate(found.items()):
        losses, _ = _means(paths)
        places = [number / (len(losses) - 1) for number in range(len(losses))]
        columns = list(zip(*(one.losses for one in paths), strict=True))
        look = figures.look(index)
        axes.fill_between(
            places, list(map(min, columns)), list(map(max, columns)), color=look["color"],
            alpha=0.12, linewidth=0,
        )  # fmt: skip
        handles += axes.plot(places, losses, label=method, **look)
    axes.set_yscale("log")
    figures.name_axis(axes.xaxis, "from one model (0) to the next (1); 0.5 is their mean")
    title = "May these models be averaged?"
    lines = len(next(iter(found.values())))
    about = "" if task is None else f"{task.title}; "
    figures.write_titles(
        figure, title, f"{about}mean and range over {counted(lines, 'line')} between models"
    )
    figures.lay_out(figure, legend_rows=figures.write_legend(figure, handles))
    figures.save(figure, place)
