"""`gossamer distill`: one student learns what several trained models predict."""

from __future__ import annotations

from typing import Annotated

from gossamer.commands import options as given
from gossamer.commands.console import out, print_json, say, show_share, titled_table
from gossamer.commands.kept_run import kept_run
from gossamer.commands.models.soup import SourcesArgument, TaskOfRunsOption
from gossamer.consolidate import student as students
from gossamer.quantities import counted


@given.with_groups
def distill(
    runs_of: SourcesArgument,
    temperature: Annotated[
        float, given.shown("Of both softmaxes: above 1 shows what else a sample resembles.")
    ] = 4.0,
    soft: Annotated[
        float, given.shown("Share of the loss that is the teachers', the rest the labels'.")
    ] = 0.9,
    student: Annotated[
        str | None,
        given.shown("The task whose model the student is; default: the teachers' own."),
    ] = None,
    alone: Annotated[
        bool, given.shown("Train the student's kind by labels only, too.", "--alone")
    ] = False,
    method: given.MethodOption = "all_reduce",
    cluster: Annotated[
        str | None, given.shown("Who trains the student, a preset or a file; default: one worker.")
    ] = None,
    task: TaskOfRunsOption = None,
    seed: given.SeedOption = 0,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.RateOption = None,
    running: given.RunOptions = given.RunOptions(),
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Train one model on what several trained models predict.

    \b
    gossamer simulate --method ensemble --task digits-mlp
    gossamer distill runs/20261119-... --student digits-mlp:width=16 --alone

    RUN is an ensemble, whose members are the teachers, or several runs of any methods.
    """
    asked = {"temperature": temperature, "soft": soft, "student": student, "teachers": runs_of}
    found = students.distill(
        runs_of, temperature=temperature, soft=soft, student=student, method=method,
        cluster=cluster, alone=alone, task=task, data=running.data, seed=seed,
        epochs=length.epochs, batch=length.batch, learning_rate=lr, **running.settings(),
    )  # fmt: skip
    own = student or found.task.spec or found.task.name
    config = {**found.result.settings.as_dict(), **asked, "task": own}
    with kept_run(keeping.runs, "distill", config, has_page=False) as folder:
        rows = [
            (name, f"{loss:.4f}", show_share(accuracy))
            for name, (loss, accuracy) in found.scores.items()
        ]
        title = f"{found.task.title}: {counted(found.teachers, 'teacher')}"
        out.print(titled_table(title, "model", "loss", "accuracy", rows=rows))
        for notice in found.result.summary["notices"]:
            say(f"notice: {notice}")
        summary = {**found.result.summary, "ended": "finished", "distilled": found.as_dict()}
        if keeping.as_json:
            print_json(summary)
        if folder is not None:
            folder.write_model(found.result.state)
            for row in found.result.history:
                folder.add_row(row)
            folder.close()
            folder.write_summary(summary)
