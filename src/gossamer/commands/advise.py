"""`gossamer advise`: which method reaches a target first on this cluster, why, and what if."""

from __future__ import annotations

from typing import Annotated

import typer

from gossamer.commands import options as given
from gossamer.commands.console import print_json, say_line, show_table
from gossamer.commands.kept_run import kept_run
from gossamer.commands.work.advice import advice_table, plan_search, watched
from gossamer.commands.work.jobs import pool_for
from gossamer.commands.work.simulations import slug
from gossamer.plan.advise.findings import SearchFindings
from gossamer.plan.advise.sensitivity import RULE as RULE_OF_CHANGES
from gossamer.quantities import counted
from gossamer.runs.arrival import RULE
from gossamer.runs.expense import FRONT
from gossamer.runs.statistics import show_number
from gossamer.tasks import make_task

BudgetOption = Annotated[
    str, typer.Option("--budget", help="How long the search may take: 90s, 5m, 1h.")
]
GoalOption = Annotated[
    float,
    typer.Option("--target", help="Accuracy (0.95, or 95 for 95 %) or loss to reach and hold."),
]
FinalSeedsOption = Annotated[
    int | None,
    typer.Option("--seeds", help="Seeds of the final; default: what the budget pays for, up to 5."),
]


@given.with_groups
def advise(
    target: GoalOption,
    task: given.TaskOption = "digits-mlp",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="Also try this one, such as one of your own: my.py:name; may be repeated.",
        ),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Try no methods but those of --method.")
    ] = False,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="SETTINGS",
            help="Also try other values of batch, momentum, weight_decay and groups, such as "
            "batch,momentum or batch=8/32; may be repeated.",
        ),
    ] = None,
    budget: BudgetOption = "5m",
    where: given.ClusterOptions = given.ClusterOptions(cluster="one-slow-of-8"),
    seed: given.SeedOption = 0,
    seeds: FinalSeedsOption = None,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.GridOption = None,
    jobs: given.JobsOption = None,
    running: Annotated[
        given.RunOptions, given.Without(("engine", "compiled"))
    ] = given.RunOptions(),
    keeping: Annotated[given.KeepOptions, given.Without(("live",))] = given.KeepOptions(),
) -> None:
    """Say which method reaches a target first, and why.

    Searches methods and settings in virtual time; the same seed gives the same answer.
    """
    loaded = make_task(task, data=running.data)
    planned = plan_search(
        loaded, where.described(), target=target, methods=method or (), only=only,
        search=search or (), budget=budget, seeds=seeds,
        learning_rates=given.rates_from(lr), seed=seed, epochs=length.epochs_of(loaded),
        batch=length.batch, **running.settings(),
    )  # fmt: skip
    pool = pool_for(loaded, jobs)
    name = f"advise-{slug(loaded.name)}"
    with kept_run(keeping.runs, name, planned.config()) as folder:
        with planned.reporter() as reporter:
            findings = planned.run(folder, pool, watched(reporter))
        _show(findings)
        if keeping.as_json:
            print_json(findings.as_dict())
        if folder is not None:
            folder.write_summary(findings.as_dict())
    if findings.search.ended == "interrupted":
        raise KeyboardInterrupt


def _show(findings: SearchFindings) -> None:
    search = findings.search
    base, plan = search.base, search.plan
    rungs = ", ".join(f"{(base.epochs or 0) * rung.share:.3g}" for rung in plan.rungs)
    say_line(
        f"{base.task.title} on {base.cluster.title or base.cluster.name}; "
        f"{counted(base.cluster.workers, 'worker')}, "
        f"at most {counted(base.epochs or 0.0, 'epoch')}, batch {base.batch}, "
        f"{base.optimiser}; true gradients, virtual time"
    )
    say_line(
        f"plan: {counted(len(search.candidates), 'candidate')} in rungs of {rungs} epochs, "
        f"then {counted(plan.seeds, 'fresh seed')} for each finalist"
    )
    for what, error in search.failures.items():
        say_line(f"notice: {what} failed: {error}")
    if findings.ended():
        say_line(f"notice: {findings.ended()}")
    show_table(advice_table(findings))
    say_line(RULE)
    if findings.expenses:
        say_line(f"cost and energy: until the target is reached. {FRONT}")
    say_line(findings.verdict(), style="bold")
    if findings.economy():
        say_line(findings.economy())
    say_line(findings.reason())
    if findings.baseline():
        say_line(findings.baseline())
    for hint in filter(None, (findings.proposal(), findings.widened(), findings.edge())):
        say_line(hint)
    for line in findings.checkpoints():
        say_line(line)
    changes = findings.changes()
    if changes:
        say_line("What would change the answer:")
        for change in changes:
            say_line(f"- {change}")
        say_line(RULE_OF_CHANGES)
    behind = [f"{c.method} (rung {rung}, best {show_number(best)})"
              for c, rung, best in search.left_behind()]  # fmt: skip
    if behind:
        say_line(f"left behind in the search: {', '.join(behind)}")
    for reason, methods in findings.left_out_for().items():
        say_line(f"left out: {', '.join(methods)}: {reason}")
    if findings.next_step():
        say_line(findings.next_step())
