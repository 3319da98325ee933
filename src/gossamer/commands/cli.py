"""The command line. Bad input is one sentence and exit code 2."""

from __future__ import annotations

import difflib
import errno
import re
import sys
from typing import Annotated, NoReturn, cast

import typer

from gossamer.commands.advise import advise
from gossamer.commands.compare import compare
from gossamer.commands.console import err, out
from gossamer.commands.cost import cost
from gossamer.commands.doctor import doctor
from gossamer.commands.ended import ended_by_signals
from gossamer.commands.export import export
from gossamer.commands.grouped_help import GroupedCommand
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
from gossamer.runs.versions import version_line

app = typer.Typer(
    name="gossamer",
    help="Train on many loosely coupled workers, and know beforehand which way of coupling wins.",
    add_completion=True,
    pretty_exceptions_enable=False,
    # As markup, the [@START+LENGTH] of an option's help would be swallowed as a style.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        out.print(version_line(), markup=False)
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_tell_version,
            is_eager=True,
            help="Print the versions of Gossamer, torch and Python.",
        ),
    ] = False,
) -> None:
    pass


for command in (
    compare, simulate, train, advise, probe, cost, report, export, reproduce,
    methods, tasks, clusters, doctor,
):  # fmt: skip
    app.command(cls=GroupedCommand)(command)
app.command("replay", cls=GroupedCommand)(replay_run)
# What follows the script belongs to the script, also where it looks like an option of ours.
app.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})(run)
app.add_typer(lab, name="lab")


_INTERRUPTED = 130
# Typer brings a click of its own or uses the installed one; either way this is its usage error.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run a command; every foreseen failure is one sentence."""
    # Standard output is for results, until a command is told --json.
    out.stderr = False
    try:
        # Outside of standalone mode typer prints no frames around errors and hands them over.
        with ended_by_signals():
            status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _UsageError as error:
        _end(2, _sentence(cast(typer.BadParameter, error)))
    except ConfigurationError as error:
        _end(2, f"error: {_with_flags(str(error))}")
    except Error as error:
        _end(1, f"the run ended: {error}")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        # What reads run folders keeps none of its own.
        has_runs = sys.argv[1:2] not in (["report"], ["export"])
        room = "; make room, or choose other --runs" if has_runs else "; make room"
        advice = room if error.errno == errno.ENOSPC else ""
        _end(2, f"error: {place}{error.strerror or error}{advice}")
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        _end(_INTERRUPTED, "interrupted")
    sys.exit(status or 0)


def _sentence(error: typer.BadParameter) -> str:
    """What is wrong with the command line, as one sentence."""
    text = error.format_message().rstrip(".").replace(". Did", "; did")
    text = _near_options_only(_in_plain_words(text))
    command = error.ctx.command_path if error.ctx else "gossamer"
    help_hint = "" if text.endswith("?") else f"; see `{command} --help`"
    return f"error: {text[0].lower()}{text[1:]}{help_hint}"


_NO_NUMBER = re.compile(r"Invalid value for '(?:-\w / )?(--[\w-]+)'.*\b(integer|number|float)\b.*")


def _in_plain_words(text: str) -> str:
    """A value that is no number: which was expected and which was got, by no library's words."""
    found = _NO_NUMBER.fullmatch(text)
    if not found:
        return text
    expected = "a whole number" if found[2] == "integer" else "a number"
    return f"{found[1]} must be {expected}, got {_value_of(found[1])!r}"


def _near_options_only(text: str) -> str:
    """Without proposals that only share some letters with what was typed."""
    found = re.fullmatch(r"(?s)(.*: (--\S+)) \(Possible options: (.*)\)", text)
    if not found:
        return text
    near = difflib.get_close_matches(found[2], found[3].split(", "), cutoff=0.8)
    return f"{found[1]}; did you mean {near[0]}?" if near else found[1]


_FLAGS = {"learning_rate": "--lr"}


def _with_flags(text: str) -> str:
    """The name of the option in place of the setting's, where it was given on the command line."""
    name, _, rest = text.partition(" must ")
    flag = _FLAGS.get(name, f"--{name.replace(' ', '-').replace('_', '-')}")
    return f"{flag} must {rest}" if rest and _value_of(flag) is not None else text


def _value_of(flag: str) -> str | None:
    """What the command line gives to an option; None where it does not name it."""
    for at, word in enumerate(sys.argv):
        if word == flag:
            return "".join(sys.argv[at + 1 : at + 2])
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _end(status: int, sentence: str) -> NoReturn:
    err.print(sentence, markup=False, soft_wrap=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
