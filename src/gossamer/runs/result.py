"""What a run gives back, in virtual time or on real workers, and its model as a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from gossamer.config.settings import Settings
from gossamer.quantities import counted

Row = dict[str, Any]
"""One evaluation, or one summary: names and plain values."""
MODEL = "model.safetensors"


class Outcome:
    """What results have in common: a summary whose entries are attributes, and a model."""

    summary: Row
    state: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        """The output model as it was evaluated, the statistics of BatchNorm included, for
        `load_state_dict` of a model that the task makes; empty if nobody lived to give it. Of an
        ensemble it has every member's, for a `ModuleList` of such models."""
        return dict(self.state)

    def __repr__(self) -> str:
        """In one line: the tensors and the rows are a look away."""
        summary = self.summary
        shown = [f"{key} {summary[key]:.4g}" for key in _SHOWN if summary.get(key) is not None]
        workers = counted(summary["workers"], "worker") if "workers" in summary else "no worker"
        what = f"{summary.get('method')} on {summary.get('task')}, {workers}"
        return f"<{type(self).__name__}: {', '.join([what, *shown])}>"

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["summary"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(repr=False)
class Result(Outcome):
    """What a run gives back. `summary` is what `--json` prints and the run folder keeps."""

    settings: Settings
    summary: Row
    history: list[Row]
    parameters: Tensor
    """The output model's trainable parameters as a flat vector."""
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    state: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


_SHOWN = ("epochs", "loss", "accuracy", "virtual_seconds", "wall_seconds")


def write_model(path: Path, state: Mapping[str, Tensor]) -> None:
    """There when it is whole; tied parameters are written once for each of their names."""
    part = path.with_name(f".{path.name}")
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    try:
        # Written by us: `save_file` tells of a full disk by an error that is no OSError.
        part.write_bytes(safetensors.torch.save(own))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_model(path: Path) -> dict[str, Tensor]:
    """The inverse; nothing where there is no such file."""
    return safetensors.torch.load_file(path) if path.exists() else {}


def digest_of(parameters: Tensor) -> str:
    """A fingerprint of the resulting bits."""
    raw = parameters.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
