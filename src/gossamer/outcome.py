"""What a run gives back, in virtual time or on real workers, and its model as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from gossamer.quantities import counted

MODEL = "model.safetensors"


class Outcome:
    """What results have in common: a summary whose entries are attributes, and a model."""

    summary: dict[str, Any]
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
