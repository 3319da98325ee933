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
from gossamer.files import replacement
from gossamer.quantities import counted

Row = dict[str, Any]
"""One evaluation, or one summary: names and plain values."""
MODEL = "model.safetensors"


@dataclass(repr=False)
class Result:
    """What a run gives back, in virtual time and on real workers.

    `summary` is what `--json` prints and the run folder keeps; its entries are attributes, too.
    """

    settings: Settings
    summary: Row
    history: list[Row]
    parameters: Tensor | None
    """The output model's trainable parameters as a flat vector; None if no worker lived to give
    it."""
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    state: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    status: int = 0
    """The exit code of the launcher of real workers."""
    failure: str | None = None
    """What the first worker that gave up said."""
    strip: Row | None = None
    """Which real worker computed and which waited for whom in the first moments."""

    def state_dict(self) -> dict[str, Tensor]:
        """The output model as it was evaluated, the statistics of BatchNorm included, for
        `load_state_dict` of a model that the task makes; empty if nobody lived to give it. Of an
        ensemble it has every member's, for a `ModuleList` of such models."""
        return dict(self.state)

    def __repr__(self) -> str:
        """In one line: the tensors and the rows are a look away."""
        summary = self.summary
        keys = dict.fromkeys((*_SHOWN, str(summary.get("score"))))
        shown = [f"{key} {summary[key]:.4g}" for key in keys if summary.get(key) is not None]
        workers = counted(summary["workers"], "worker") if "workers" in summary else "no worker"
        what = f"{summary.get('method')} on {summary.get('task')}, {workers}"
        return f"<{type(self).__name__}: {', '.join([what, *shown])}>"

    def __getattr__(self, name: str) -> Any:
        summary: Row = self.__dict__.get("summary", {})
        if name not in summary:
            known = ", ".join(sorted(summary))
            raise AttributeError(f"a result has no {name!r}; its summary has {known}")
        return summary[name]

    def __dir__(self) -> list[str]:
        """The entries of the summary are attributes, so they are offered as such."""
        return sorted({*super().__dir__(), *self.summary})


_SHOWN = ("epochs", "loss", "accuracy", "virtual_seconds", "wall_seconds")


def write_model(path: Path, state: Mapping[str, Tensor]) -> None:
    """Tied parameters are written once for each of their names."""
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    with replacement(path) as part:
        # Written by us: `save_file` tells of a full disk by an error that is no OSError.
        part.write_bytes(safetensors.torch.save(own))


def read_model(path: Path) -> dict[str, Tensor]:
    """The inverse; nothing where there is no such file."""
    return safetensors.torch.load_file(path) if path.exists() else {}


def digest_of(parameters: Tensor) -> str:
    """A fingerprint of the resulting bits."""
    raw = parameters.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
