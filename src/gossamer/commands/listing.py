"""`gossamer methods`, `tasks` and `clusters`: what there is, with what each promises."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands.console import out, print_json, say, say_line, show_table
from gossamer.commands.options import JsonOption
from gossamer.config.cluster import clusters as presets
from gossamer.methods import METHODS, Method, find_method
from gossamer.methods.spec import GROUP as METHOD_GROUP
from gossamer.own_code import entry_points
from gossamer.specs import print_spec
from gossamer.tasks import GROUP as TASK_GROUP
from gossamer.tasks import TASKS

# Workers and steps of a short run and of a long one: an option that suits its run shows in one.
_RUNS = ((2, 10), (16, 10_000))


def described(method: Method) -> dict[str, Any]:
    """A row of the table of methods as plain values."""
    promises = method.promises
    return {
        "name": method.name,
        "family": method.family,
        "paper": method.paper,
        "output": method.output,
        "keeps_mean": promises.keeps_mean,
        "waits_for": promises.waits_for,
        "staleness": promises.staleness,
        "survives_death": promises.survives_death,
        "traffic": promises.traffic,
        "plain_with_one_worker": promises.is_plain_alone,
        "options": method.defaults(),
        "paper_values": dict(method.paper_values),
        "summary": method.summary,
    }


def _chosen_for_the_run(method: Method) -> str:
    """The options whose default is not what every run takes when they are left out."""
    defaults = method.defaults()
    suited = [method.values(*run, {}) for run in _RUNS]
    return ", ".join(
        name for name in defaults if any(values[name] != defaults[name] for values in suited)
    )


NameArgument = Annotated[
    str | None, typer.Argument(metavar="[METHOD]", help="Only this one; left out: all of them.")
]


def methods(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the methods with their promises and options."""
    brought = entry_points(METHOD_GROUP)
    names = [*METHODS, *brought] if name is None else [name]
    found = [find_method(one) for one in names]
    rows = [described(method) for method in found]
    table = Table(title="Methods", title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("output", "keeps the mean", "waits for", "staleness", "survives a death",
                   "models sent per step"):  # fmt: skip
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["name"], row["output"], _yes(row["keeps_mean"]), row["waits_for"],
            row["staleness"], _yes(row["survives_death"]), row["traffic"],
        )  # fmt: skip
    show_table(table)
    out.print("\nOptions and their defaults:")
    for method, row in zip(found, rows, strict=True):
        say_line(f"  {print_spec(row['name'], row['options'])}")
        if suited := _chosen_for_the_run(method):
            say(f"      left out, chosen to suit the run: {suited}")
        say(f"      {row['summary']}", style="dim")
    out.print()
    say(
        "Name:paper takes the paper's own values; groups=K (or groups=host) makes any method "
        "two-level. Where there is a server: server_optimiser=adagrad chooses what it descends "
        "with; servers=4 cuts the parameters over several; placement=workers puts those on the "
        "workers' machines; lower_momentum=true allows for the momentum that asynchrony adds; "
        "keep_momentum=true keeps SGD's where it is left out because nobody waits for anybody."
    )
    if as_json:
        print_json({"methods": rows})


def tasks(as_json: JsonOption = False) -> None:
    """List what can be trained."""
    table = Table(title="Tasks", title_justify="left")
    table.add_column("task", no_wrap=True)
    for column in ("what it is", "data"):
        table.add_column(column, overflow="fold")
    for name, entry in TASKS.items():
        table.add_row(name, entry.description, entry.origin or "comes with the package")
    brought = entry_points(TASK_GROUP)
    for name, point in brought.items():
        table.add_row(name, point.value, "an installed package")
    out.print(table)
    if as_json:
        rows = [
            {"name": name, "description": entry.description, "needs_data": entry.needs_data}
            for name, entry in TASKS.items()
        ]
        rows += [
            {"name": name, "description": point.value, "needs_data": False}
            for name, point in brought.items()
        ]
        print_json({"tasks": rows})


def clusters(as_json: JsonOption = False) -> None:
    """List the cluster descriptions that come with the package."""
    table = Table(title="Clusters", title_justify="left")
    table.add_column("cluster", no_wrap=True)
    table.add_column("what it is")
    for name, title in presets().items():
        table.add_row(name, title)
    out.print(table)
    if as_json:
        print_json({"clusters": [{"name": n, "title": t} for n, t in presets().items()]})


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"
