"""`gossamer lab`: what late gradients cost over whole grids, and how stale gradients are."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    add_columns,
    can_draw,
    out,
    plain_table,
    print_json,
    say,
    say_line,
    show_share,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.studies.bandwidth import bandwidth
from gossamer.commands.studies.batch import BatchOptions, MachineOptions, run_batch
from gossamer.commands.studies.grid_batch import GridBatch, continued_grid, grid_plan
from gossamer.commands.studies.path import path
from gossamer.commands.studies.stages import stages
from gossamer.commands.studies.stragglers import stragglers
from gossamer.commands.work.simulations import slug
from gossamer.config.cluster import Cluster, Compute
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.studies.lab.grid import (
    DEFAULT_DELAYS,
    DEFAULT_RATES,
    Grid,
    default_batches,
    named_optimisers,
)
from gossamer.studies.lab.heat_map import caption_of, results_picture, show_rate
from gossamer.studies.lab.pictures import Caption, staleness_picture
from gossamer.studies.lab.results import GridResults, ResultCell
from gossamer.studies.lab.staleness import Histogram, monte_carlo, simulated
from gossamer.tasks import Task, make_task

lab = typer.Typer(
    help="Experiments on delay, slow workers, links and averages.",
    rich_markup_mode=None,
)


lab.command()(stragglers)
lab.command()(bandwidth)
lab.command()(stages)
lab.command()(path)


@lab.callback(invoke_without_command=True)
def questions(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


# ---------------------------------------------------------------------- staleness


@lab.command()
@given.with_groups
def staleness(
    workers: Annotated[int, given.shown("How many workers.")] = 8,
    distribution: Annotated[
        str, given.shown("Of compute times: constant, normal, lognormal, uniform, exponential.")
    ] = "normal",
    jitter: Annotated[float, given.shown("Standard deviation of compute times over mean.")] = 0.2,
    updates: Annotated[int, given.shown("Gradients to count.")] = 20_000,
    seed: given.SeedOption = 0,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """How stale gradients are at an asynchronous server.

    A Monte-Carlo of the workers' compute times beside a simulated run of downpour.
    """
    compute = Compute(seconds=1.0, distribution=distribution, jitter=jitter)
    # The cluster refuses impossible values before anything is written.
    Cluster(workers=workers, compute=compute)
    if updates < 1:
        raise ConfigurationError(f"updates must be at least 1, got {updates}")
    asked = {"workers": workers, "distribution": distribution, "jitter": jitter}
    asked |= {"updates": updates, "seed": seed}
    with kept_run(keeping.runs, "lab-staleness", asked) as folder:
        found = {
            "Monte-Carlo": monte_carlo(compute, workers, updates, seed),
            "simulated downpour": simulated(compute, workers, updates, seed),
        }
        sampled, played = found.values()
        summary = {
            "ended": "finished", **asked, "expected_mean": workers - 1,
            "distance": sampled.distance(played), "mean_staleness": played.mean,
            "staleness_deviation": played.deviation, "staleness_histogram": played.ordered(),
            "monte_carlo": sampled.as_dict(),
        }  # fmt: skip
        _show_staleness(found, workers)
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_summary(summary)
            if can_draw():
                has_spread = distribution not in ("constant", "exponential")
                spread = f", standard deviation {jitter:g} of the mean" if has_spread else ""
                words = Caption(
                    f"Staleness of {counted(workers, 'asynchronous worker')}",
                    f"compute times: {distribution}{spread}; {counted(updates, 'update')}",
                    "Means with standard deviations. In the long run the mean is workers − 1, "
                    "whatever the distribution.",
                )
                staleness_picture(folder.path / "staleness.png", found, workers, words)


_MOST_ROWS = 40


def _show_staleness(found: dict[str, Histogram], workers: int) -> None:
    sampled, played = found.values()
    table = plain_table(gap=2)
    table.add_column("staleness", justify="right")
    for name in found:
        table.add_column(name, justify="right")
    values = sorted({*sampled.counts, *played.counts})
    # With many workers a row is a range of values, so that the table fits on one page.
    step = -(-len(range(values[0], values[-1] + 1)) // _MOST_ROWS)
    for start in range(values[0], values[-1] + 1, step):
        inside = range(start, start + step)
        label = f"{start}" if step == 1 else f"{start}-{inside[-1]}"
        shares = [sum(h.share(value) for value in inside) for h in found.values()]
        table.add_row(label, *(show_share(share) for share in shares))
    out.print(table)
    for name, histogram in found.items():
        say(
            f"{name}: mean {histogram.mean:.3f} (workers - 1 = {workers - 1}), "
            f"standard deviation {histogram.deviation:.2f}"
        )
    say(
        f"{show_share(sampled.distance(played))} of the gradients would have to change their "
        "staleness to make the histograms equal"
    )


# ---------------------------------------------------------------------- delay


@lab.command()
@given.with_groups
def delay(
    task: Annotated[str | None, given.shown("What to train; default: digits-mlp.")] = None,
    optimiser: Annotated[
        str | None,
        given.shown(
            "sgd (momentum 0.9), adam or any spec, separated by spaces or commas.",
            "--optimiser",
            "--optimizer",
        ),
    ] = None,
    lr: Annotated[str | None, given.shown("Learning rates, such as 1e-4,1e-3,1e-2.")] = None,
    batch: Annotated[str | None, given.shown("Sizes, such as 64,256.")] = None,
    delays: Annotated[
        str | None, given.shown("Steps of delay, such as 0,1,2,4.", "--delay")
    ] = None,
    epochs: Annotated[float | None, given.shown("Passes over the data of each training.")] = None,
    seed: Annotated[int | None, given.shown("Of the first; default: 0.")] = None,
    seeds: Annotated[int | None, given.shown("Repeat with this many seeds; show means.")] = None,
    warmup: Annotated[float | None, given.shown("Epochs of linear warm-up, from a tenth.")] = None,
    halve: Annotated[
        bool, given.shown("Divide rate and batch by delay + 1, the number of workers.", "--halve")
    ] = False,
    jobs: given.JobsOption = None,
    machine: MachineOptions = MachineOptions(),
    options: BatchOptions = BatchOptions(),
) -> None:
    """Accuracy over learning rate, batch size and delay.

    The whole grid is trained at once: step t applies the gradient of step t - delay.
    """
    asked = {
        "--task": task, "--optimiser": optimiser, "--lr": lr, "--batch": batch, "--delay": delays,
        "--epochs": epochs, "--seed": seed, "--seeds": seeds, "--warmup": warmup,
        "--halve": halve or None,
    }  # fmt: skip
    if options.resume is not None:
        plan = continued_grid(options.resume, machine, asked)
    else:
        asked_task = task or "digits-mlp"
        plan = grid_plan(
            asked_task, _grid(make_task(asked_task, data=machine.data), asked), machine
        )
    trainings = GridBatch(plan, options, jobs, GridResults.as_dict, _report)
    name = f"lab-delay-{slug(trainings.task.name)}"
    run_batch(trainings, options, name, "gossamer lab delay")


def _grid(task: Task, asked: dict[str, Any]) -> Grid:
    names = asked["--optimiser"] or "sgd,adam"
    # In a spec with options, commas separate the options.
    split = names.split() if ":" in names else names.replace(",", " ").split()
    seeds = 1 if asked["--seeds"] is None else asked["--seeds"]
    given.check_seeds(seeds)
    first = asked["--seed"] or 0
    return Grid(
        optimisers=named_optimisers(split),
        learning_rates=given.numbers_from("--lr", asked["--lr"], float) or DEFAULT_RATES,
        batches=given.numbers_from("--batch", asked["--batch"], int) or default_batches(task),
        delays=given.numbers_from("--delay", asked["--delay"], int) or DEFAULT_DELAYS,
        epochs=task.epochs if asked["--epochs"] is None else asked["--epochs"],
        seeds=tuple(range(first, first + seeds)),
        warmup=asked["--warmup"] or 0.0,
        halve=asked["--halve"] is not None,
    )


def _report(task: Task, results: GridResults, folder: RunFolder | None) -> None:
    trainings = counted(len(results.grid.points()), "training")
    say_line(f"{task.title}; {trainings}, {_subtitle(results)}")
    for optimiser in results.grid.optimisers:
        out.print(_table(results, optimiser))
    out.print(_best_table(results))
    good = (
        "at least 90 % of the best accuracy at that delay"
        if results.yardstick.key == "accuracy"
        else "better than untrained"
    )
    caption = caption_of(results)
    say_line(f"Good: {good}. {caption}")
    if folder is not None and results.cells and can_draw():
        words = Caption(f"{task.title}: what a delay costs", _subtitle(results), caption)
        results_picture(folder.path / "delay.png", results, words)


def _subtitle(results: GridResults) -> str:
    grid, seeds = results.grid, len(results.grid.seeds)
    parts = [counted(grid.epochs, "epoch"), "one seed" if seeds == 1 else f"mean of {seeds} seeds"]
    if grid.warmup:
        parts.append(f"the first {grid.warmup:g} of them a warm-up")
    if grid.halve:
        parts.append("rate and batch divided by delay + 1")
    score = "accuracy in %" if results.yardstick.key == "accuracy" else "loss"
    return ", ".join([*parts, f"{score} on the test set"])


def _table(results: GridResults, optimiser: str) -> Table:
    grid = results.grid
    table = plain_table(f"{optimiser} (in parentheses: failed)")
    table.add_column("delay", justify="right")
    table.add_column("batch", justify="right")
    for rate in grid.learning_rates:
        table.add_column(show_rate(rate), justify="right")
    for delay in grid.delays:
        for batch in grid.batches:
            places = [(optimiser, delay, batch, rate) for rate in grid.learning_rates]
            cells = [_shown(results, results.cells.get(place)) for place in places]
            table.add_row(f"{delay}", f"{batch}", *cells)
    return table


def _shown(results: GridResults, cell: ResultCell | None) -> str:
    if cell is None:
        return "."
    value = cell.value
    text = f"{100 * value:.1f}" if results.yardstick.key == "accuracy" else f"{value:.3g}"
    text = "-" if value != value else text
    return (f"({text})" if cell.fails else text) + ("" if cell.is_final else "*")


def _best_table(results: GridResults) -> Table:
    table = plain_table(gap=2)
    add_columns(
        table, "optimiser", "delay", "best", "at rate", "batch", "largest good rate",
        "predicted edge",
    )  # fmt: skip
    for best in results.best():
        edge, largest = best.predicted_edge, best.largest_rate
        table.add_row(
            best.optimiser, f"{best.delay}", _shown(results, best.cell),
            show_rate(best.cell.place[3]), f"{best.cell.place[2]}",
            "none" if largest is None else show_rate(largest),
            "-" if edge is None else show_rate(edge),
        )  # fmt: skip
    return table
