"""The command line. Bad input is one sentence and exit code 2."""

from __future__ import annotations

import sys

import typer

from gossamer.commands.compare import compare
from gossamer.commands.console import err
from gossamer.commands.listing import clusters, methods, tasks
from gossamer.commands.reproduce import reproduce
from gossamer.commands.simulate import simulate
from gossamer.errors import ConfigurationError, Error

app = typer.Typer(
    name="gossamer",
    help="Train on many loosely coupled workers, and know beforehand which way of coupling wins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (compare, simulate, methods, tasks, clusters, reproduce):
    app.command()(command)


def main() -> None:
    """Run a command; every foreseen failure is one sentence."""
    try:
        app(standalone_mode=True)
    except ConfigurationError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except Error as error:
        err.print(f"the run ended: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        err.print(f"error: cannot write{place}: {error.strerror}", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; what was recorded so far is kept", markup=False)
        sys.exit(130)


if __name__ == "__main__":
    main()
