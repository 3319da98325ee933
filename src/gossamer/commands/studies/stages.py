"""`gossamer lab stages`: how large a rate the ages of a pipeline's stages allow."""

from __future__ import annotations

from typing import Annotated

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    add_columns,
    can_draw,
    plain_table,
    print_json,
    say_line,
    show_table,
)
from gossamer.commands.kept_run import kept_run
from gossamer.quantities import counted
from gossamer.studies.lab.stage_picture import stage_edges_picture
from gossamer.studies.lab.stage_study import (
    PIPELINES,
    StageFindings,
    StageStudy,
    run_stage_study,
)
from gossamer.tasks import make_task


@given.with_groups
def stages(
    stages: Annotated[int, given.shown("Into how many stages the model is cut.")] = 4,
    pipelines: Annotated[
        str, given.shown("Pipelines separated by commas: gpipe, 2bw, pipedream, vertical_sync.")
    ] = ",".join(PIPELINES),
    optimiser: Annotated[
        str, given.shown("sgd, or sgd:momentum=M.", "--optimiser", "--optimizer")
    ] = "sgd",
    batch: Annotated[int, given.shown("Samples per step.")] = 256,
    steps: Annotated[int, given.shown("Steps of each run.")] = 200,
    warmup: Annotated[int, given.shown("Steps without delay, with which all runs begin.")] = 300,
    task: given.TaskOption = "digits-mlp:layers=3,width=32",
    data: given.DataOption = None,
    seed: given.SeedOption = 0,
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Where the stages of a pipeline that is never emptied fail.

    The layers of such a pipeline have ages, and each age has an edge of stability. The edges of
    every stage alone and of all together are predicted from the curvature of the loss, and drawn
    beside the losses of runs around them.
    """
    names = tuple(name.strip() for name in pipelines.split(",") if name.strip())
    study = StageStudy(
        make_task(task, data=data), stages, names, optimiser, batch, steps, seed, warmup
    )
    asked = {"task": task, "stages": stages, "pipelines": list(names), "optimiser": optimiser,
             "batch": batch, "steps": steps, "warmup": warmup, "seed": seed}  # fmt: skip
    with kept_run(keeping.runs, "lab-stages", asked, has_page=False) as folder:
        with Reporter(1, "stages") as reporter:
            found = run_stage_study(study, lambda done, all: reporter.at("stages", done / all))
            reporter.finished(f"{counted(sum(len(line.runs) for line in found.lines), 'run')}")
        _show(found)
        if keeping.as_json:
            print_json(found.as_dict())
        if folder is not None:
            folder.write_summary({"ended": "finished", **found.as_dict()})
            if can_draw():
                stage_edges_picture(folder.path / "stages.png", found)


def _show(found: StageFindings) -> None:
    study = found.study
    say_line(
        f"{study.task.title} in {counted(study.stages, 'stage')}, {study.optimiser}; all runs "
        f"begin at a loss of {found.still.loss:.3g}, where the largest curvature is "
        f"{found.curvature.largest:.3g}"
    )
    table = plain_table("Learning rates up to which training is stable")
    add_columns(table, "trained", "late by", "predicted", "no run rises", "all end lower")
    for line in found.lines:
        late = line.delays if line.stage is None else line.delays[line.stage : line.stage + 1]
        measured = [line.is_calm_to(found.still), line.trains_to(found.still)]
        table.add_row(
            line.label, " ".join(map(str, late)), f"{line.edge:.3g}",
            *("none" if rate is None else f"{rate:.3g}" for rate in measured),
        )  # fmt: skip
    show_table(table)
