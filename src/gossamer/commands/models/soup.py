"""`gossamer soup`: the mean of the weights of several trained models."""

from __future__ import annotations

from typing import Annotated

import typer

from gossamer.commands import options as given
from gossamer.commands.console import out, print_json, say, show_share, titled_table
from gossamer.commands.kept_run import kept_run
from gossamer.consolidate import soup as soups
from gossamer.quantities import counted

SourcesArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run folders, or files of weights with --task."),
]
TaskOfRunsOption = Annotated[
    str | None, given.shown("What the models were trained on; default: what the runs say.")
]


@given.with_groups
def soup(
    runs_of: SourcesArgument,
    kind: Annotated[str, given.shown("greedy: models that help; uniform: all of them.")] = "greedy",
    task: TaskOfRunsOption = None,
    data: given.DataOption = None,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Average the weights of several trained models.

    \b
    gossamer simulate --method ensemble:shared=0.5 --task digits-mlp
    gossamer soup runs/20261119-...

    A soup costs what one model costs. It needs models with a common ancestor: `gossamer lab path`
    shows when averaging is allowed. The greedy soup chooses on every second test sample; all
    figures are of the others.
    """
    made = soups.soup(runs_of, kind, task=task, data=data)
    config = {**made.as_dict(), "runs": runs_of}
    with kept_run(keeping.runs, f"soup-{kind}", config, has_page=False) as folder:
        own, is_share = made.task.score, made.task.has_accuracy
        rows = [
            (one.name, f"{one.models}", f"{one.loss:.4f}",
             show_share(one.score) if is_share else f"{one.score:.4g}")
            for one in made.table
        ]  # fmt: skip
        title = f"{made.task.title}: {counted(made.samples, 'test sample')}"
        out.print(titled_table(title, "model", "of", "loss", str(own), rows=rows))
        say(f"in the {kind} soup: {', '.join(made.chosen)}")
        summary = {"ended": "finished", **made.as_dict()}
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_model(made.state)
            folder.write_summary(summary)
