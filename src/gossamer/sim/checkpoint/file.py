"""A checkpoint of a simulated run as one file, `checkpoint.safetensors`."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.files import replace_bytes
from gossamer.runs.result import Row
from gossamer.runs.versions import made_with
from gossamer.sim.checkpoint.state import TensorState

CHECKPOINT = "checkpoint.safetensors"
_FORMAT = 2


@dataclass(frozen=True)
class RunCheckpoint:
    """A run between two events."""

    settings: Row
    """Plain values, from which the settings can be made again."""
    events: int
    digest: str
    """The digest of the events so far."""
    rows: list[Row]
    seconds: float
    """The wall time that the run has taken."""
    observed: Row
    """What methods have told, which may come from values of tensors."""
    state: TensorState

    def write(self, path: Path) -> None:
        """Replace the file as a whole, so that there is a checkpoint at every moment."""
        storages = {str(number): one for number, one in enumerate(self.state.storages)}
        facts = {
            "format": _FORMAT, "settings": self.settings, "events": self.events,
            "digest": self.digest, "rows": self.rows, "seconds": self.seconds,
            "observed": self.observed, "places": self.state.places, "sum": _sum_of(storages),
            "made_with": made_with(),
        }  # fmt: skip
        data = safetensors.torch.save(storages, {"run": json.dumps(facts, default=str)})
        replace_bytes(path, data)

    @staticmethod
    def read(path: Path) -> RunCheckpoint:
        try:
            with safetensors.safe_open(str(path), "pt") as file:
                facts = json.loads(file.metadata()["run"])
                names = sorted(file.keys(), key=int)
                storages = {name: file.get_tensor(name) for name in names}
            if facts["format"] != _FORMAT or facts["sum"] != _sum_of(storages):
                raise ValueError("its sum does not agree")
            return RunCheckpoint(
                facts["settings"], facts["events"], facts["digest"], facts["rows"],
                facts["seconds"], facts["observed"],
                TensorState([*storages.values()], facts["places"]),
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigurationError(
                f"{path} does not exist, so there is nothing to resume; a run keeps it with "
                "--minutes or --checkpoint-every"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigurationError(
                f"{path} is no checkpoint of a simulated run, or is damaged ({reason}); begin the "
                "run anew"
            ) from None

    def settings_for(self, asked: Settings, path: Path) -> Settings:
        """The settings of the run, with the width that its device had; others are refused."""
        width: int | None = self.settings.get("width")
        if asked.width is None:
            asked = dataclasses.replace(asked, width=width)
        plain = json.loads(json.dumps(asked.to_json(), default=str))
        for name in sorted({*plain, *self.settings}):
            if plain.get(name) != self.settings.get(name):
                raise ConfigurationError(
                    f"the run in {path} has {name}={self.settings.get(name)}, got "
                    f"{plain.get(name)}; resume it with the settings that it has"
                )
        return asked


def _sum_of(storages: Mapping[str, torch.Tensor]) -> str:
    total = 0
    for one in storages.values():
        total = zlib.crc32(one.numpy().data, total)
    return f"{len(storages)} pieces, crc32 {total:08x}"
