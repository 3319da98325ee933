"""A batch of trainings that can be stopped and continued: the options, the limits, the end.

A batch trains until it is done, until `--minutes` are over, or until Ctrl-C. Its folder then holds
what was trained, and `--resume` goes on with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from gossamer.commands.console import print_json, say_line, warn
from gossamer.commands.kept_run import kept_run
from gossamer.commands.options import JsonOption, RunsOption, option
from gossamer.commands.work.jobs import handling_interrupts
from gossamer.commands.work.simulations import ended_by
from gossamer.errors import ConfigurationError
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class BatchOptions:
    """How a batch is continued and limited, and where it is kept."""

    resume: Path | None = option(None, "--resume", help="Go on with a run that was stopped.")
    minutes: float | None = option(
        None, "--minutes", help="Stop after this many minutes; --resume continues the run."
    )
    runs: RunsOption = Path("runs")
    as_json: JsonOption = False

    def check(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigurationError(f"minutes must be above 0, got {self.minutes:g}")


class Batch(Protocol):
    """Trainings that belong together."""

    ended: str
    """finished, stopped (by the time limit), interrupted, or why it failed."""

    @property
    def notices(self) -> Sequence[str]: ...

    def config(self) -> Row:
        """What decides the trainings, from which they can be continued."""
        ...

    def summary(self) -> Row: ...

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        """Train what is missing until the deadline; returns how it ended."""
        ...

    def show(self, folder: RunFolder | None) -> None:
        """Print what has come out, and draw it."""
        ...


def run_batch(batch: Batch, options: BatchOptions, name: str, command: str) -> None:
    """Run a batch, show what came out, and say how to go on where something is missing."""
    deadline = (
        float("inf") if options.minutes is None else time.monotonic() + 60.0 * options.minutes
    )
    with kept_run(options.runs, name, batch.config(), resumed=options.resume) as folder:
        try:
            batch.ended = batch.train(folder, deadline)
        except BaseException as error:
            batch.ended = ended_by(error)
            raise
        finally:
            if folder is not None:
                folder.write_summary(batch.summary())
        batch.show(folder)
        if options.as_json:
            print_json(batch.summary())
        for notice in batch.notices:
            say_line(f"notice: {notice}")
        if batch.ended != "finished":
            how = (
                "nothing was kept, as --runs none asks for"
                if folder is None
                else f"go on with `{command} --resume {folder.path}`"
            )
            say_line(f"{batch.ended} before the end; {how}")
    if batch.ended == "interrupted":
        raise KeyboardInterrupt


def continued(
    path: Path,
    asked: Mapping[str, object],
    read: Callable[[dict[str, Any]], Plan],
    *,
    what: str,
    whose: str,
) -> Plan:
    """The plan that a folder was made with; what would change its results is refused."""
    changed = [option for option, value in asked.items() if value is not None]
    if changed:
        raise ConfigurationError(
            f"--resume goes on with the {what} of its folder; leave out {', '.join(changed)}"
        )
    try:
        return read(json.loads((path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} cannot be resumed, because it is not the folder of {whose}; give the one that "
            "the stopped run named"
        ) from None


def check_table(path: Path | None, found: str | None, wanted: str | None) -> None:
    """Refuse to continue a run as another table than its own."""
    if found != wanted:
        raise ConfigurationError(
            f"{path} holds {found or 'another run'}, not {wanted}; name its own table"
        )


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C only asks to stop, so that no step is cut in half; the second one ends."""
    asked = False

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        warn("stopping after this step")

    with handling_interrupts(ask):
        yield lambda: asked
