"""Going on with a run of `gossamer train` from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.files import replace_text
from gossamer.real.launch.console import say
from gossamer.real.train import checkpoint_files
from gossamer.real.train.checkpoint_files import Checkpoint
from gossamer.real.train.other_launcher import launcher_job
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.resized_checkpoint import resized
from gossamer.runs.result import Row

_KEPT = (
    "method", "task", "data", "seed", "batch", "learning_rate", "optimiser", "schedule", "clip",
    "split", "threads", "buffers", "evaluations",
)  # fmt: skip
"""The settings that a resumed run keeps."""
_OPTIONS = {"learning_rate": "lr"}
"""Options whose names are not those of the settings."""


@dataclass(frozen=True)
class Resume:
    """From where a run goes on."""

    request: TrainRequest
    checkpoint: Checkpoint
    history: list[Row]
    """The rows up to the checkpoint; later ones will be made again."""


def saved_request(folder: Path) -> TrainRequest:
    """The request of a run, from its folder."""
    values = _saved(folder)
    try:
        return TrainRequest.from_json(json.dumps(values))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{folder}/job.json cannot be read: {error!r}") from None


def _saved(folder: Path) -> dict[str, Any]:
    """The plain values in `job.json`. A request reads the data, which may have moved since."""
    try:
        values: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        return values | {"settings": dict(values["settings"])}
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder} is not the folder of a run of `gossamer train`; give one that has a job.json"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{folder}/job.json cannot be read: {error!r}") from None


def saved_options(folder: Path) -> dict[str, Any]:
    """The run's settings by the names of the command line's options."""
    values, found = _saved(folder), newest(folder)
    settings = values["settings"]
    kept = {_OPTIONS.get(name, name): settings.get(name) for name in (*_KEPT, "epochs")}
    if kept["data"] is not None:
        kept["data"] = Path(kept["data"])
    # Another launcher decides itself how many workers it starts.
    workers = None if launcher_job() else found.size
    return kept | {"workers": workers, "checkpoint_every": values.get("checkpoint_every")}


def newest(folder: Path, *, is_silent: bool = True) -> Checkpoint:
    found = checkpoint_files.newest(folder / "checkpoint", None if is_silent else say)
    if found is None:
        raise ConfigurationError(
            f"{folder} has no whole checkpoint to go on from; they are written by gossamer train "
            "--checkpoint-every 60s"
        )
    return found


def resume(request: TrainRequest) -> Resume:
    """Check that this is the same run, and delete what it will write again."""
    folder, workers = request.place, request.settings.cluster.workers
    found = newest(folder, is_silent=False)
    _check_same(folder, _saved(folder)["settings"], request)
    _tell(found)
    checkpoint_files.forget_newer(folder / "checkpoint", found)
    history = _history(folder, found)
    if found.size != workers:
        say(f"the run had {found.size} workers and goes on with {workers}, from their mean")
        found = resized(found, request)
    for stale in (folder / "workers").glob("*"):
        stale.unlink()
    going_on = dataclasses.replace(request, checkpoint=found.path.resolve())
    return Resume(going_on, found, history)


def _check_same(folder: Path, before: Mapping[str, Any], request: TrainRequest) -> None:
    now = request.settings.to_json()
    for name in _KEPT:
        if before.get(name) != now[name]:
            raise ConfigurationError(
                f"--{_OPTIONS.get(name, name)} was {before.get(name)!r} in {folder}, got "
                f"{now[name]!r}; a resumed run keeps its settings, and only --epochs or --samples "
                "may grow"
            )
    samples = dataclasses.replace(request.settings, epochs=before["epochs"]).samples
    if request.settings.samples < samples:
        raise ConfigurationError(
            f"the run in {folder} was to have {samples} samples, got {request.settings.samples}; "
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
    # The lowest worker evaluates, so its count of epochs decides.
    epoch = found.facts[min(found.facts)]["epoch"]
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    # The run was killed while it wrote a line that has no end.
    whole = [
        line for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n") and json.loads(line)["epochs"] <= epoch
    ]  # fmt: skip
    replace_text(path, "".join(whole))
    return [json.loads(line) for line in whole]
