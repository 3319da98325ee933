"""Checkpoints of a user's loop. Every worker writes a file of its own:

    FOLDER/NUMBER/RANK-of-SIZE.pt    models, optimisers, the coupling, random states, the loop's own

A checkpoint counts when the files of all its workers are there. Files are replaced as a whole, so
a worker that dies while it writes leaves the older checkpoint as it was.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.files import replace_bytes
from gossamer.real.join.several_optimizers import parts_of

if TYPE_CHECKING:
    from gossamer.real.join.joined_worker import JoinedWorker

_FILE = re.compile(r"([0-9]+)-of-([0-9]+)\.pt")
State = dict[str, Any]


@dataclass(frozen=True)
class LoopCheckpoints:
    """The checkpoints of one folder."""

    folder: Path

    def file(self, number: int, rank: int, size: int) -> Path:
        return self.folder / str(number) / f"{rank}-of-{size}.pt"

    def complete(self) -> dict[int, int]:
        """The numbers of the checkpoints that count, in order, each with its number of workers."""
        found: dict[int, int] = {}
        places = [one for one in self.folder.glob("*") if one.name.isdecimal()]
        for place in sorted(places, key=lambda one: int(one.name)):
            there = {match[0] for one in place.iterdir() if (match := _FILE.fullmatch(one.name))}
            for size in sorted({int(name.split("-of-")[1][:-3]) for name in there}):
                if all(f"{rank}-of-{size}.pt" in there for rank in range(size)):
                    found[int(place.name)] = size
        return found

    def write(self, number: int, rank: int, size: int, state: State, keep: int) -> None:
        """Write one worker's file, and delete its files of all but the newest `keep`."""
        path, content = self.file(number, rank, size), io.BytesIO()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, content)
        replace_bytes(path, content.getvalue())
        for old in list(self.complete())[:-keep]:
            self._delete(old, rank, size)

    def _delete(self, number: int, rank: int, size: int) -> None:
        path = self.file(number, rank, size)
        path.unlink(missing_ok=True)
        try:
            path.parent.rmdir()
        except OSError:
            pass  # the files of others are there

    def read(self, number: int, rank: int, size: int) -> State:
        path = self.file(number, rank, size)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigurationError(
                f"the checkpoint {path} cannot be read ({str(error).splitlines()[0]}); delete its "
                "folder, and the one before it counts"
            ) from error

    def discard_later(self, number: int, rank: int) -> None:
        """Delete a worker's files of checkpoints that never became complete: a file that is left
        from them must not complete one that is made later."""
        for place in self.folder.glob("*"):
            if place.name.isdecimal() and int(place.name) > number:
                for file in place.glob(f"{rank}-of-*.pt"):
                    self._delete(int(place.name), rank, int(file.stem.partition("-of-")[2]))


def save_loop(worker: JoinedWorker, folder: Path, number: int, keep: int, others: State) -> None:
    """Write the file of this worker."""
    state = {
        "model": worker.model.state_dict(),
        "optimizers": [part.state_dict() for part in parts_of(worker.own_optimizer)],
        "worker": worker.state_dict(),
        "random": _random_states(),
        "others": {name: other.state_dict() for name, other in others.items()},
    }
    LoopCheckpoints(folder).write(number, worker.rank, worker.size, state, keep)


def restore_loop(worker: JoinedWorker, folder: Path, others: State) -> int:
    """Load the newest checkpoint that counts; 0 if there is none."""
    kept = LoopCheckpoints(folder)
    number, size = next(reversed(kept.complete().items()), (0, worker.size))
    kept.discard_later(number, worker.rank)
    if number == 0:
        return 0
    state = kept.read(number, worker.rank % size, size)
    if missing := sorted(set(others) ^ set(state["others"])):
        raise ConfigurationError(
            f"worker.restore() got {', '.join(sorted(others)) or 'nothing'} beside the model, and "
            f"the checkpoint in {folder} has {', '.join(sorted(state['others'])) or 'nothing'}; "
            f"give save and restore the same, {', '.join(missing)} too or not at all"
        )
    if size == worker.size:
        worker.load_state_dict(state["worker"])
        _set_random_states(state["random"])
    elif worker.method is not None and worker.method.method.output == "ensemble":
        raise ConfigurationError(
            f"the checkpoint in {folder} is of {size} models that are never averaged, and "
            f"{worker.size} workers cannot go on with them; start {size} workers"
        )
    elif worker.coupling is not None and worker.coupling.session.processes > 1:
        raise ConfigurationError(
            f"the checkpoint in {folder} is of {size} processes, of which each holds a part of a "
            f"model, and {worker.size} cannot go on with them; start {size} processes"
        )
    else:
        state["model"] = _mean_of_models([kept.read(number, r, size)["model"] for r in range(size)])
        worker.load_progress(state["worker"])
    worker.model.load_state_dict(state["model"])
    for part, own in zip(parts_of(worker.own_optimizer), state["optimizers"], strict=True):
        part.load_state_dict(own)
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    return number


def _mean_of_models(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What workers of another number begin with; what is no weight is that of the first."""
    mean = dict(models[0])
    for name, first in models[0].items():
        if first.is_floating_point():
            total = torch.stack([model[name].double() for model in models]).mean(0)
            mean[name] = total.to(first.dtype)
    return mean


def _random_states() -> State:
    version, numbers, spare = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": json.dumps([version, numbers, spare]),
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), *rest]),
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    version, numbers, spare = json.loads(states["python"])
    random.setstate((version, tuple(numbers), spare))
    kind, keys, *rest = json.loads(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
