"""Which form of an operation is the fastest: a table that ships with the package.

`tools/form_table.py` measures the forms on a machine and writes a row for each shape. A run looks
its shapes up and times nothing, so the same seed gives the same bits on the same kind of device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

_NAME = "table.json"


@dataclass(frozen=True)
class FormRow:
    """The fastest form of an operation for one shape, as it was measured."""

    device: str
    """A kind of device, as `device_kind` names it."""
    operation: str
    precision: str
    shape: Mapping[str, float]
    form: str
    microseconds: Mapping[str, float]
    """What every form that was measured took, forward and backward together."""

    def distance(self, precision: str, shape: Mapping[str, float]) -> float:
        """How far a shape is from this one, in doublings; another precision comes last."""
        far = sum(abs(math.log2(shape[key] / size)) for key, size in self.shape.items())
        return far + (0.0 if precision == self.precision else 1000.0)


class FormTable:
    """Rows to look shapes up in."""

    def __init__(self, rows: Sequence[FormRow]) -> None:
        self.rows = tuple(rows)

    def form(
        self, operation: str, device: torch.device, precision: str, shape: Mapping[str, float]
    ) -> str | None:
        """The form of the nearest shape that was measured on this kind of device; without one, of
        the nearest on any device of this type. None: nothing like it was measured."""
        known = [row for row in self.rows if row.operation == operation]
        kind = device_kind(device)
        near = [row for row in known if row.device == kind] or [
            row for row in known if row.device.partition(" ")[0] == device.type
        ]
        if not near:
            return None
        return min(near, key=lambda row: row.distance(precision, shape)).form

    @property
    def fingerprint(self) -> str:
        """Names the choices of this table in a run's config; times do not matter."""
        text = repr([(r.device, r.operation, r.precision, sorted(r.shape.items()), r.form)
                     for r in self.rows])  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def device_kind(device: torch.device) -> str:
    """What decides which form is fast: `cpu`, or the generation of a GPU such as `cuda 9.0`."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"


@cache
def shipped_table() -> FormTable:
    """The table of this package."""
    text = files(__package__ or "").joinpath(_NAME).read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return FormTable([FormRow(**row) for row in rows])
