"""The command line. Bad input ends a command with one sentence and exit code 2."""

from __future__ import annotations

import difflib
import errno
import re
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand

from gossamer.commands.advise import advise
from gossamer.commands.check_method import check_method
from gossamer.commands.compare import compare
from gossamer.commands.console import out, say, warn
from gossamer.commands.cost import cost
from gossamer.commands.doctor import doctor
from gossamer.commands.export import export
from gossamer.commands.listing import clusters, methods, show_map, tasks
from gossamer.commands.models.distill import distill
from gossamer.commands.models.soup import soup
from gossamer.commands.probe import probe
from gossamer.commands.replay import replay_run
from gossamer.commands.report import report
from gossamer.commands.run import run
from gossamer.commands.simulate import simulate
from gossamer.commands.studies.lab import lab
from gossamer.commands.studies.reproduce import reproduce
from gossamer.commands.train import train
from gossamer.commands.work.jobs import POOL_PROCESS, JobPool
from gossamer.errors import ConfigurationError, Error, ScriptFailed, Unfinished
from gossamer.runs.versions import version_line
from gossamer.script.fork_server import Begun, ForkServer

GROUPS: dict[str, tuple[str, ...]] = {
    "Cluster and faults": (
        "--cluster", "--workers", "--slow", "--slow-link", "--kill", "--return", "--arrive",
        "--kill-server", "--pause", "--drop", "--delay", "--partition", "--bandwidth", "--latency",
        "--compute", "--model-bytes", "--transport", "--nnodes", "--node-rank", "--rendezvous",
        "--patience", "--secret-file",
    ),
    "Training": (
        "--seed", "--seeds", "--epochs", "--samples", "--batch", "--lr", "--optimiser",
        "--schedule", "--clip", "--split", "--engine", "--device", "--threads", "--jobs",
        "--compile", "--buffers", "--swa", "--data",
    ),
    "Output": (
        "--evaluations", "--record", "--checkpoint-every", "--resume", "--picture", "--output",
        "--out", "--force", "--runs", "--live", "--json", "--help",
    ),
}  # fmt: skip
"""The options of each group of a help text. Options that are not named here come first."""
_LEAST_OPTIONS = 12
"""The help of a command with fewer options shows them as one list."""


class GroupedCommand(TyperCommand):
    """A command with many options, which its help shows in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: dict[str, list[tuple[str, str]]] = {"Options": [], **{name: [] for name in GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                options[_group_of(parameter.opts)].append(record)
        if sum(map(len, options.values())) < _LEAST_OPTIONS:
            options = {"Options": [one for group in options.values() for one in group]}
        for title, records in {"Arguments": arguments, **options}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _group_of(names: list[str]) -> str:
    return next((title for title, flags in GROUPS.items() if set(flags) & set(names)), "Options")


app = typer.Typer(
    name="gossamer",
    help="Train on many loosely coupled workers, and know beforehand which way of coupling wins.",
    add_completion=True,
    pretty_exceptions_enable=False,
    # Rich would take the [@START+LENGTH] of a help text for a style and drop it.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        say(version_line())
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
    compare, simulate, train, advise, probe, cost, report, export, reproduce, soup, distill,
    methods, tasks, clusters, doctor,
):  # fmt: skip
    app.command(cls=GroupedCommand)(command)
app.command("map", cls=GroupedCommand)(show_map)
app.command("replay", cls=GroupedCommand)(replay_run)
app.command("check-method", cls=GroupedCommand)(check_method)
# Everything after the script belongs to the script, also where it looks like our option.
app.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})(run)
app.add_typer(lab, name="lab")


_INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Typer brings its own click or uses the installed one; this is the usage error of either.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(begun: Begun | None = None) -> None:
    """Run a command. Every foreseen failure is printed as one sentence.

    `begun` is a process that forks for jobs, which was started while this one imported.
    """
    if begun is not None:
        JobPool.server = ForkServer(POOL_PROCESS, begun)
    # Results go to standard output, until --json sends them to standard error.
    out.stderr = False
    try:
        # Outside of standalone mode typer raises errors instead of printing them.
        with ended_by_signals():
            status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _UsageError as error:
        _end(2, _sentence(cast(typer.BadParameter, error)))
    except ConfigurationError as error:
        _end(2, f"error: {_with_flags(str(error))}")
    except ScriptFailed as error:
        _end(error.status, f"error: {error}")
    except Unfinished as error:
        folder = error.checkpoint.parent
        same = " with the same options" if sys.argv[1:2] == ["compare"] else ""
        _end(3, f"unfinished: `gossamer {sys.argv[1]} --resume {folder}`{same} goes on with it")
    except Error as error:
        _end(1, f"the run ended: {error}")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        # These two commands read run folders and have no option --runs.
        has_runs = sys.argv[1:2] not in (["report"], ["export"])
        room = "; make room, or choose other --runs" if has_runs else "; make room"
        advice = room if error.errno == errno.ENOSPC else ""
        _end(2, f"error: {place}{error.strerror or error}{advice}")
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        _end(_INTERRUPTED, "interrupted")
    sys.exit(status or 0)


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Let signals end the program as an error would.

    The launcher of workers has its own handlers. A signal that is ignored, as under nohup, stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end_by)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end_by(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the program at once
    raise SystemExit(128 + number)


def _sentence(error: typer.BadParameter) -> str:
    """Say in one sentence what is wrong with the command line."""
    text = error.format_message().rstrip(".").replace(". Did", "; did")
    text = _near_options_only(_in_plain_words(text))
    command = error.ctx.command_path if error.ctx else "gossamer"
    help_hint = "" if text.endswith("?") else f"; see `{command} --help`"
    return f"error: {text[0].lower()}{text[1:]}{help_hint}"


_NO_NUMBER = re.compile(r"Invalid value for '(?:-\w / )?(--[\w-]+)'.*\b(integer|number|float)\b.*")


def _in_plain_words(text: str) -> str:
    """Say of a value that is no number what was expected and what was got."""
    found = _NO_NUMBER.fullmatch(text)
    if not found:
        return text
    expected = "a whole number" if found[2] == "integer" else "a number"
    return f"{found[1]} must be {expected}, got {_value_of(found[1])!r}"


def _near_options_only(text: str) -> str:
    """Keep only the proposal that is close to what the user typed."""
    found = re.fullmatch(r"(?s)(.*: (--\S+)) \(Possible options: (.*)\)", text)
    if not found:
        return text
    near = difflib.get_close_matches(found[2], found[3].split(", "), cutoff=0.8)
    return f"{found[1]}; did you mean {near[0]}?" if near else found[1]


_FLAGS = {"learning_rate": "--lr"}


def _with_flags(text: str) -> str:
    """Replace the name of a setting by that of its option, if the command line gives the option."""
    name, _, rest = text.partition(" must ")
    flag = _FLAGS.get(name, f"--{name.replace(' ', '-').replace('_', '-')}")
    return f"{flag} must {rest}" if rest and _value_of(flag) is not None else text


def _value_of(flag: str) -> str | None:
    """The value of an option on the command line; None where the option is not given."""
    for at, word in enumerate(sys.argv):
        if word == flag:
            return "".join(sys.argv[at + 1 : at + 2])
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _end(status: int, sentence: str) -> NoReturn:
    warn(sentence)
    sys.exit(status)


if __name__ == "__main__":
    main()
