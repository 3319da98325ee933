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
from gossamer.real.launch.attachment import Attachment
from gossamer.real.launch.elastic import Elastic, why_not_elastic
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
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
ElasticOption = Annotated[
    str | None,
    given.shown(
        "Workers may come, and the dead come back: how few and how many there may be.",
        metavar="LEAST:MOST",
    ),
]
AttachOption = Annotated[
    str | None,
    given.shown("Add workers to the elastic run whose --rendezvous this is.", metavar="HOST:PORT"),
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
    elastic: ElasticOption = None,
    attach: AttachOption = None,
    place: given.HostOptions = given.HostOptions(),
) -> int:
    """Run a script of yours on several real workers.

    \b
    gossamer run -n 4 --method ad_psgd train.py --epochs 3
    gossamer run -n 4 --method easgd:period=10 --slow 0=4 -m package.train
    gossamer run -n 8 --nnodes 4 --node-rank 1 --rendezvous head:29400 train.py
    gossamer run -n 4 --elastic 2:8 --rendezvous head:29400 train.py

    Options of `gossamer run` stand before the script; all that follows it belongs to the script.
    Times of faults count from the start of the workers, those of links from when all have met.

    The exit code is 0 if every worker ended with 0 (those killed by --kill aside), else that of the
    first that failed. A worker that dies does not end the others: they are told, and go on; unless
    --tolerate-deaths is given the exit code is 1 then. 130 after Ctrl-C, 3 after the deadline.

    SIGUSR1 to this process prints a table of who waits for what.
    """
    plan = faults.plan()
    if workers < 1:
        raise ConfigurationError(f"-n must be at least 1, got {workers}")
    places = None if elastic is None else Elastic.parse(elastic)
    size = workers * place.nnodes if places is None else places.most
    chosen = None if method is None else _checked(method, size, is_elastic=places is not None)
    attachment = None
    if attach is not None:
        _check_attached(attach, method, elastic, place)
        attachment = Attachment.to(attach, workers, place.patience, place.secret_file)
    launch = Launch(
        command_of(script, arguments or (), is_module=is_module), workers, hosts=place.hosts(),
        transport=transport, method=chosen, seed=seed,
        faults=plan, output=output, tolerates_deaths=tolerate_deaths, deadline_s=deadline,
        elastic=places, attach=attachment,
    )  # fmt: skip
    if output != "folder":
        return Launcher(launch).run()
    if not keeps_folder(runs):
        raise ConfigurationError("--output folder needs a folder; leave out --runs none")
    folder = RunFolder.create(runs, f"run-{slug(Path(script).stem)}").path
    status = Launcher(dataclasses.replace(launch, folder=folder)).run()
    warn(f"kept in {folder}")
    return status


def _checked(method: str, size: int, *, is_elastic: bool) -> str:
    """The method as the workers are told it; refuse what cannot be with so many of them."""
    chosen = parse_method(method)
    if isinstance(chosen.groups, int) and chosen.groups:
        even_groups(size, chosen.groups)
    options = chosen.resolve(size, _MANY_STEPS)
    if is_elastic and (why := why_not_elastic(chosen, options)) is not None:
        raise ConfigurationError(why)
    return absolute(str(chosen))


def _check_attached(
    attach: str, method: str | None, elastic: str | None, place: given.HostOptions
) -> None:
    """Refuse what only the command that began the run can say."""
    said = {
        "--method": method, "--elastic": elastic, "--rendezvous": place.rendezvous,
        "--nnodes": None if place.nnodes == 1 else place.nnodes,
    }  # fmt: skip
    for option, value in said.items():
        if value is not None:
            raise ConfigurationError(
                f"--attach {attach} takes {option} from the run that it adds workers to, got "
                f"{value}; leave {option} out"
            )


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
