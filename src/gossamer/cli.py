"""The command line. Bad input is one sentence and exit code 2."""

from __future__ import annotations

import errno
import sys
from typing import NoReturn, cast

import typer

from gossamer.commands.advise import advise
from gossamer.commands.compare import compare
from gossamer.commands.console import err
from gossamer.commands.cost import cost
from gossamer.commands.doctor import doctor
from gossamer.commands.ended import ended_by_signals
from gossamer.commands.export import export
from gossamer.commands.lab import lab
from gossamer.commands.listing import clusters, methods, tasks
from gossamer.commands.probe import probe
from gossamer.commands.replay import replay_run
from gossamer.commands.report import report
from gossamer.commands.reproduce import reproduce
from gossamer.commands.run import run
from gossamer.commands.simulate import simulate
from gossamer.commands.train import train
from gossamer.errors import ConfigurationError, Error

app = typer.Typer(
    name="gossamer",
    help="Train on many loosely coupled workers, and know beforehand which way of coupling wins.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # As markup, the [@START+LENGTH] of an option's help would be swallowed as a style.
    rich_markup_mode=None,
)
for command in (
    compare, simulate, train, advise, probe, cost, report, export, reproduce,
    methods, tasks, clusters, doctor,
):  # fmt: skip
    app.command()(command)
app.command("replay")(replay_run)
# What follows the script belongs to the script, also where it looks like an option of ours.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.add_typer(lab, name="lab")


_INTERRUPTED = 130
# Typer brings a click of its own or uses the installed one; either way this is its usage error.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run a command; every foreseen failure is one sentence."""
    try:
        # Outside of standalone mode typer prints no frames around errors and hands them over.
        with ended_by_signals():
            status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _UsageError as error:
        _end(2, _sentence(cast(typer.BadParameter, error)))
    except ConfigurationError as error:
        _end(2, f"error: {error}")
    except Error as error:
        _end(1, f"the run ended: {error}")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        advice = "; make room, or choose other --runs" if error.errno == errno.ENOSPC else ""
        _end(2, f"error: {place}{error.strerror or error}{advice}")
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        _end(_INTERRUPTED, "interrupted; what was recorded so far is kept")
    sys.exit(status or 0)


def _sentence(error: typer.BadParameter) -> str:
    """What is wrong with the command line, as one sentence."""
    text = error.format_message().rstrip(".").replace(". Did", "; did")
    command = error.ctx.command_path if error.ctx else "gossamer"
    help_hint = "" if text.endswith("?") else f"; see `{command} --help`"
    return f"error: {text[0].lower()}{text[1:]}{help_hint}"


def _end(status: int, sentence: str) -> NoReturn:
    err.print(sentence, markup=False, soft_wrap=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
