"""The result of a run, in virtual time or on real workers, and its model as a file."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.files import replacement
from gossamer.quantities import counted

Row = dict[str, Any]
"""One evaluation or one summary: names and plain values."""
MODEL = "model.safetensors"


@dataclass(repr=False)
class Result:
    """The result of a run, in virtual time or on real workers.

    `summary` is what `--json` prints and the run folder keeps; its entries are also attributes.
    """

    settings: Settings
    summary: Row
    history: list[Row]
    parameters: Tensor | None
    """The trainable parameters of the output model as a flat vector; None if all workers died."""
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    state: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    status: int = 0
    """The exit code of the launcher of real workers."""
    failure: str | None = None
    """The error of the first worker that gave up."""
    strip: Row | None = None
    """Which real workers computed and which waited in the first moments."""

    def state_dict(self) -> dict[str, Tensor]:
        """The output model as it was evaluated, with the statistics of BatchNorm, for
        `load_state_dict` of the task's model; empty if all workers died. For an ensemble it holds
        all members, for a `ModuleList` of such models."""
        return dict(self.state)

    def __repr__(self) -> str:
        """One line, without tensors and rows."""
        summary = self.summary
        keys = dict.fromkeys((*_SHOWN, str(summary.get("score"))))
        shown = [f"{key} {summary[key]:.4g}" for key in keys if summary.get(key) is not None]
        workers = counted(summary["workers"], "worker") if "workers" in summary else "no worker"
        what = f"{summary.get('method')} on {summary.get('task')}, {workers}"
        return f"<{type(self).__name__}: {', '.join([what, *shown])}>"

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle, which takes no functions: tasks and methods hold some, so the settings
        travel as plain values and are made again when they are asked for."""
        state = dict(self.__dict__)
        settings: Settings | None = state.pop("settings", None)
        if settings is not None:
            # A task that was made in Python has no name by which it could be made again.
            state[_VALUES] = settings.to_json() if settings.task.spec else None
        # Each of several views of one vector would bring the whole of it.
        return state | {"state": {name: own.clone() for name, own in self.state.items()}}

    def __copy__(self) -> Result:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        """Copies share the settings, which nobody changes."""
        made = copy.copy(self)
        for name in made.__dict__.keys() - {"settings"}:
            made.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "settings" and _VALUES in self.__dict__:
            values = self.__dict__[_VALUES]
            if values is None:
                raise ConfigurationError(
                    "this result was pickled, and its task, which was made in Python, did not "
                    "travel with it; keep the settings beside the result"
                )
            self.settings = Settings.from_json(values)
            return self.settings
        summary: Row = self.__dict__.get("summary", {})
        if name not in summary:
            known = ", ".join(sorted(summary))
            raise AttributeError(f"a result has no {name!r}; its summary has {known}")
        return summary[name]

    def __dir__(self) -> list[str]:
        """The entries of the summary are attributes, so they are listed too."""
        return sorted({*super().__dir__(), *self.summary})


_VALUES = "_settings_values"
_SHOWN = ("epochs", "loss", "accuracy", "virtual_seconds", "wall_seconds")


def write_model(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model; tied parameters are written once for each of their names."""
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    with replacement(path) as part:
        # `save_file` of safetensors reports a full disk by an error that is no OSError.
        part.write_bytes(safetensors.torch.save(own))


def read_model(path: Path) -> dict[str, Tensor]:
    """Read a model; empty if the file does not exist."""
    return safetensors.torch.load_file(path) if path.exists() else {}


def digest_of(parameters: Tensor) -> str:
    """A fingerprint of the bits of the parameters."""
    raw = parameters.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
