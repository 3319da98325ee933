"""`gossamer methods`, `tasks`, `clusters` and `map`: lists of what a user can choose and see."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gossamer.commands.console import out, print_json, say, say_line, show_table, titled_table
from gossamer.commands.options import JsonOption
from gossamer.config.cluster import clusters as presets
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, Method, find_method
from gossamer.methods.spec import GROUP as METHOD_GROUP
from gossamer.observe.progress import warn
from gossamer.own_code import entry_points
from gossamer.specs import print_spec
from gossamer.studies.map import map_page, map_rows, rows_about
from gossamer.tasks import GROUP as TASK_GROUP
from gossamer.tasks import TASKS

# Workers and steps of a short and of a long run: a default that depends on the run differs in one.
_RUNS = ((2, 10), (16, 10_000))


def described(method: Method) -> dict[str, Any]:
    """Describe a method by plain values, as one row of the table."""
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
    """Name the options whose value, where they are left out, depends on the run."""
    defaults = method.defaults()
    suited = [method.values(*run, {}) for run in _RUNS]
    return ", ".join(
        name for name in defaults if any(values[name] != defaults[name] for values in suited)
    )


WordArgument = Annotated[
    str | None, typer.Argument(metavar="[WORD]", help="Only rows with this word; left out: all.")
]


def show_map(
    word: WordArgument = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page that docs/map.md is.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Every system of the papers, with the command that shows it.

    What is left out says why.
    """
    rows = list(map_rows()) if word is None else rows_about(word)
    if not rows:
        raise ConfigurationError(
            f"nothing in the map has the word {word!r}; `gossamer map` shows all of it"
        )
    if markdown:
        print(map_page(rows), end="")
        return
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            out.print()
            say(section, style="bold")
        say(f"  {row.what}")
        for command in row.commands:
            say(f"      {command}", style="dim")
        if row.why_not:
            say(f"      left out: {row.why_not}", style="dim")
    if as_json:
        print_json({"map": [vars(row) for row in rows]})


NameArgument = Annotated[
    str | None, typer.Argument(metavar="[METHOD]", help="Only this one; left out: all of them.")
]


def methods(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the methods with their promises and options."""
    found = [*METHODS.values(), *_brought()] if name is None else [find_method(name)]
    rows = [described(method) for method in found]
    columns = (
        "method", "output", "keeps the mean", "waits for", "staleness", "survives a death",
        "models sent per step",
    )  # fmt: skip
    cells = [
        (
            row["name"], row["output"], _yes(row["keeps_mean"]), row["waits_for"],
            row["staleness"], _yes(row["survives_death"]), row["traffic"],
        )
        for row in rows
    ]  # fmt: skip
    show_table(titled_table("Methods", *columns, rows=cells))
    out.print("\nOptions and their defaults:")
    for method, row in zip(found, rows, strict=True):
        say_line(f"  {print_spec(row['name'], row['options'])}")
        if suited := _chosen_for_the_run(method):
            say(f"      left out, chosen to suit the run: {suited}")
        say(f"      {row['summary']}", style="dim")
    out.print()
    say(
        "Name:paper takes the paper's own values; groups=K (or groups=host) makes any method "
        f"two-level. balance=speed, for {_balancing()}, gives each worker a batch in proportion to "
        "its measured speed. Where there is a server: server_optimiser=adagrad chooses what it "
        "descends with; servers=4 cuts the parameters over several; placement=workers puts "
        "those on the workers' machines; lower_momentum=true allows for the momentum that "
        "asynchrony adds; keep_momentum=true keeps SGD's where it is left out because nobody waits "
        "for anybody."
    )
    if as_json:
        print_json({"methods": rows})


def _brought() -> list[Method]:
    """The methods of installed packages; one that cannot be imported does not hide the others."""
    found: list[Method] = []
    for name in entry_points(METHOD_GROUP):
        try:
            found.append(find_method(name))
        except ConfigurationError as error:
            warn(f"left out: {error}")
    return found


def _balancing() -> str:
    """Which methods can share a round by speed."""
    return " and ".join(name for name, method in METHODS.items() if method.balances)


def tasks(as_json: JsonOption = False) -> None:
    """List what can be trained."""
    cells = [
        (name, entry.description, entry.origin or "comes with the package")
        for name, entry in TASKS.items()
    ]
    brought = entry_points(TASK_GROUP)
    cells += [(name, point.value, "an installed package") for name, point in brought.items()]
    out.print(titled_table("Tasks", "task", "what it is", "data", rows=cells))
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
    out.print(titled_table("Clusters", "cluster", "what it is", rows=presets().items()))
    if as_json:
        print_json({"clusters": [{"name": n, "title": t} for n, t in presets().items()]})


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"
