"""Going on with a run of `gossamer train` from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.real.launch.console import say
from gossamer.real.launch.environment import LAUNCHERS
from gossamer.real.train import checkpoint_files as checkpoint
from gossamer.real.train.checkpoint_files import Checkpoint
from gossamer.real.train.job import Job
from gossamer.real.train.other_launcher import outer_job
from gossamer.runs.result import Row

_MAY_DIFFER = {"samples", "epochs", "folder", "is_recorded", "checkpoint_every", "resume"}
_OPTIONS = {"learning_rate": "lr"}
"""Options whose names are not those of the settings."""


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on."""

    job: Job
    checkpoint: Checkpoint
    history: list[Row]
    """Rows up to the checkpoint; what came after is made again."""


def kept_job(folder: Path) -> Job:
    """The settings of a run, from its folder."""
    try:
        return Job.from_json((folder / "job.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder} is not the folder of a run of `gossamer train`; give one that has a job.json"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{folder}/job.json cannot be read: {error}") from None


def kept_choices(folder: Path) -> dict[str, Any]:
    """The run's settings by the names of the command line's options."""
    job, found = kept_job(folder), newest(folder)
    names = (
        "method", "task", "data", "seed", "epochs", "batch", "optimiser", "schedule", "clip",
        "split", "threads", "buffers", "evaluations", "checkpoint_every",
    )  # fmt: skip
    kept: dict[str, Any] = {name: getattr(job, name) for name in names}
    if job.data is not None:
        kept["data"] = Path(job.data)
    # How many workers there are is a launcher's to say, if another one has started them.
    return kept | {"lr": job.learning_rate, "workers": None if outer_job() else found.size}


def newest(folder: Path, *, is_silent: bool = True) -> Checkpoint:
    found = checkpoint.newest(folder / "checkpoint", (lambda sentence: None) if is_silent else say)
    if found is None:
        raise ConfigurationError(
            f"{folder} has no whole checkpoint to go on from; they are written by gossamer train "
            "--checkpoint-every 60s"
        )
    return found


def resumption(folder: Path, job: Job, workers: int) -> Resumption:
    """Check that it is the same run, and clear away what it will write again."""
    found = newest(folder, is_silent=False)
    if found.size != workers:
        here = outer_job()
        got = f"got -n {workers}; leave it out"
        if here is not None:
            got = f"but {LAUNCHERS[here.kind]} has started {workers}; start {found.size}"
        raise ConfigurationError(f"the run in {folder} has {found.size} workers, {got}")
    _check_same(folder, kept_job(folder), job)
    _tell(found)
    checkpoint.forget_newer(folder / "checkpoint", found)
    for stale in (folder / "workers").glob("*"):
        stale.unlink()
    return Resumption(
        dataclasses.replace(job, resume=str(found.path.resolve())), found, _history(folder, found)
    )


def _check_same(folder: Path, before: Job, now: Job) -> None:
    for field in dataclasses.fields(Job):
        was, here = getattr(before, field.name), getattr(now, field.name)
        if field.name not in _MAY_DIFFER and was != here:
            option = _OPTIONS.get(field.name, field.name)
            raise ConfigurationError(
                f"--{option} was {was!r} in {folder}, got {here!r}; a resumed run keeps its "
                "settings, and only --epochs or --samples may grow"
            )
    if now.samples < before.samples:
        raise ConfigurationError(
            f"the run in {folder} was to have {before.samples} samples, got {now.samples}; "
            "--epochs or --samples of a resumed run may only grow"
        )


def _tell(found: Checkpoint) -> None:
    say(f"going on from checkpoint {found.step} of {found.path.parent.parent}")
    missing = [str(rank) for rank in range(found.size) if rank not in found.facts]
    if missing:
        say(
            f"worker {', '.join(missing)} had died by then and starts from the state of worker "
            f"{min(found.facts)}"
        )
    weight = sum(one["replicas"]["worker"]["weight"] for one in found.facts.values())
    lost = len(found.facts) - weight
    if abs(lost) > 1e-6 * found.size:
        say(
            f"of {len(found.facts)} push-sum weights {lost:.3g} were on the way when the "
            "checkpoint was written; what they carried is lost"
        )


def _history(folder: Path, found: Checkpoint) -> list[Row]:
    """The rows up to the checkpoint; those behind it are cut off, to be made again."""
    # As its lowest worker counts them: that one evaluates, and goes on evaluating from there.
    epoch = found.facts[min(found.facts)]["epoch"]
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    # A line without an end is one over which the run was killed.
    whole = [
        line for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n") and json.loads(line)["epochs"] <= epoch
    ]  # fmt: skip
    part = path.with_name(".metrics.jsonl")
    part.write_text("".join(whole), encoding="utf-8")
    part.replace(path)
    return [json.loads(line) for line in whole]
