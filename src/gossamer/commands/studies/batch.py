"""A batch of trainings that can be stopped and continued: the options, the plan, the end.

A batch trains until it is done, until `--minutes` are over, or until Ctrl-C. Its folder then holds
what was trained, and `--resume` continues the batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from gossamer.commands.console import print_json, say_line, warn
from gossamer.commands.kept_run import kept_run
from gossamer.commands.options import DataOption, JsonOption, RunsOption, ThreadsOption, option
from gossamer.commands.work.jobs import handling_interrupts
from gossamer.commands.work.simulations import ended_by
from gossamer.errors import ConfigurationError
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row


@dataclass(frozen=True)
class MachineOptions:
    """On what a batch trains, and where its data are."""

    device: str | None = option(None, "To train on: cpu (the default) or cuda.")
    threads: ThreadsOption = 1
    data: DataOption = None
    precision: str | None = option(
        None, "Of gradients: fp32, tf32 or bf16; by default tf32 on GPUs that have it, else fp32."
    )


@dataclass(frozen=True)
class BatchOptions:
    """How a batch is continued and limited, and where it is kept."""

    resume: Path | None = option(None, "Go on with a run that was stopped.")
    minutes: float | None = option(
        None, "Stop after this many minutes; --resume continues the run."
    )
    runs: RunsOption = Path("runs")
    as_json: JsonOption = False

    def check(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigurationError(f"minutes must be above 0, got {self.minutes:g}")


@dataclass(frozen=True)
class BatchPlan:
    """What decides the results of a batch, and the machine that it runs on."""

    choices: Row
    """The choices as config.json keeps them; `table` names the published table, if there is one."""
    data: Path | None
    device: str
    threads: int
    precision: str | None = None
    """None: the device's own."""

    def as_dict(self) -> Row:
        machine = {
            "device": self.device, "threads": self.threads, "precision": self.precision,
        }  # fmt: skip
        return {**self.choices, "data": self.data and str(self.data.resolve()), **machine}


def new_plan(choices: Row, machine: MachineOptions) -> BatchPlan:
    return BatchPlan(
        choices, machine.data, machine.device or "cpu", machine.threads, machine.precision
    )


def continued_plan(
    path: Path, machine: MachineOptions, asked: Mapping[str, object], keys: Sequence[str], what: str
) -> BatchPlan:
    """Read the plan of a folder. The machine may change; what would change results is refused."""
    changed = [option for option, value in asked.items() if value is not None]
    if changed:
        raise ConfigurationError(
            f"--resume goes on with the {what} of its folder; leave out {', '.join(changed)}"
        )
    with reading(path):
        config: Row = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kept = config["data"]
        return BatchPlan(
            {key: config[key] for key in keys}, machine.data or (Path(kept) if kept else None),
            machine.device or config["device"], machine.threads,
            machine.precision or config["precision"],
        )  # fmt: skip


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Read the files of a batch in this context: files that do not fit become one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} cannot be resumed, because it is not the folder of such a run; give the one "
            "that the stopped run named"
        ) from None


class Batch(Protocol):
    """Trainings that belong together."""

    ended: str
    """finished, stopped (by the time limit), interrupted, or why it failed."""

    @property
    def notices(self) -> Sequence[str]: ...

    def config(self) -> Row:
        """What decides the trainings; `--resume` reads it."""
        ...

    def summary(self) -> Row: ...

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        """Train what is missing until the deadline; return how the batch ended."""
        ...

    def show(self, folder: RunFolder | None) -> None:
        """Print and draw the results."""
        ...


def run_batch(batch: Batch, options: BatchOptions, name: str, command: str) -> None:
    """Run a batch, show its results, and say how to continue it where something is missing."""
    minutes = float("inf") if options.minutes is None else options.minutes
    deadline = time.monotonic() + 60.0 * minutes
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


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Give a question whether Ctrl-C was pressed.

    The first Ctrl-C only asks to stop, so that no step is cut in half; the second one ends.
    """
    asked = False

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        warn("stopping after this step")

    with handling_interrupts(ask):
        yield lambda: asked
