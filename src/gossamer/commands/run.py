"""`gossamer run`: a user's own script on several real workers."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands import options as given
from gossamer.commands.console import warn
from gossamer.commands.kept_run import keeps_folder
from gossamer.commands.work.simulations import slug
from gossamer.errors import ConfigurationError
from gossamer.groups import even_groups
from gossamer.methods import parse_method
from gossamer.own_code import absolute
from gossamer.real.launch.hosts import Hosts
from gossamer.real.launch.launcher import Launch, Launcher
from gossamer.runs.folder import RunFolder

# A method is checked as in a run so long that no period or schedule exceeds it.
_MANY_STEPS = 1_000_000
CountOption = Annotated[
    int, given.shown("Workers on this host, a process each.", "-n", "--workers")
]
TransportOption = Annotated[str | None, given.shown("shm or torch; by default what suits.")]
OutputOption = Annotated[
    str, given.shown("labelled; rank0 shows worker 0 only; folder: a file for each.")
]
TolerateOption = Annotated[
    bool,
    given.shown(
        "A worker killed by a signal is no failure if the others finish.", "--tolerate-deaths"
    ),
]


@given.with_groups
def run(
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="A Python script, or any program; with -m a module."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="All that follows belongs to the script."),
    ] = None,
    workers: CountOption = 2,
    method: Annotated[
        str | None, given.shown("NAME or NAME:KEY=VALUE,...; `gossamer methods`.")
    ] = None,
    is_module: Annotated[
        bool, given.shown("SCRIPT is a module, as in `python -m`.", "-m", "--module")
    ] = False,
    transport: TransportOption = None,
    seed: given.SeedOption = 0,
    faults: given.RealFaultOptions = given.RealFaultOptions(),
    output: OutputOption = "labelled",
    runs: Annotated[Path, given.shown("Where the folder of --output folder goes.")] = Path("runs"),
    tolerate_deaths: TolerateOption = False,
    deadline: given.DeadlineOption = None,
    place: given.HostOptions = given.HostOptions(),
) -> int:
    """Run a script of yours on several real workers.

    \b
    gossamer run -n 4 --method ad_psgd train.py --epochs 3
    gossamer run -n 4 --method easgd:period=10 --slow 0=4 -m package.train
    gossamer run -n 8 --nnodes 4 --node-rank 1 --rendezvous head:29400 train.py

    Options of `gossamer run` stand before the script; all that follows it belongs to the script.
    Times of --kill and --pause count from the start of the workers, those of links from the moment
    when all of them have met.

    The exit code is 0 if every worker ended with 0 (those killed by --kill aside), else that of the
    first that failed. A worker that dies does not end the others: they are told, and go on; unless
    --tolerate-deaths is given the exit code is 1 then. 130 after Ctrl-C, 3 after the deadline.

    SIGUSR1 to this process prints a table of who waits for what.
    """
    plan = faults.plan()
    hosts = Hosts.parse(
        place.nnodes, place.node_rank, place.rendezvous, place.patience, place.secret_file
    )
    if workers < 1:
        raise ConfigurationError(f"-n must be at least 1, got {workers}")
    chosen = None if method is None else parse_method(method)
    if chosen is not None:
        if isinstance(chosen.groups, int) and chosen.groups:
            even_groups(workers * place.nnodes, chosen.groups)
        chosen.resolve(workers * place.nnodes, _MANY_STEPS)
    launch = Launch(
        command_of(script, arguments or (), is_module=is_module), workers, hosts=hosts,
        transport=transport, method=None if chosen is None else absolute(str(chosen)), seed=seed,
        faults=plan, output=output,
        tolerates_deaths=tolerate_deaths, deadline_s=deadline,
    )  # fmt: skip
    if output != "folder":
        return Launcher(launch).run()
    if not keeps_folder(runs):
        raise ConfigurationError("--output folder needs a folder; leave out --runs none")
    folder = RunFolder.create(runs, f"run-{slug(Path(script).stem)}").path
    status = Launcher(dataclasses.replace(launch, folder=folder)).run()
    warn(f"kept in {folder}")
    return status


def command_of(script: str, arguments: Sequence[str], *, is_module: bool) -> list[str]:
    """The command to execute: this interpreter with a script or module, or another program."""
    if is_module:
        top = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise ConfigurationError(
                f"there is no module {script!r} here; see that it is installed"
            )
        return [sys.executable, "-m", script, *arguments]
    path = Path(script)
    if path.suffix == ".py" or (path / "__main__.py").is_file():
        if not path.exists():
            raise ConfigurationError(f"the script {script!r} does not exist; give its path")
        return [sys.executable, script, *arguments]
    if shutil.which(script) is None:
        raise ConfigurationError(
            f"{script!r} is neither a Python script nor a program that can be started; give the "
            "path of a script, or a module after -m"
        )
    return [script, *arguments]
