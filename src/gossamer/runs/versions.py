"""The versions that made a run, on which its bits depend."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

VERSION = "0.1.0"
SCHEMA = 1
"""The schema of the files in a run folder; grows if a key changes its meaning or is removed."""


def made_with() -> dict[str, Any]:
    """The schema, the versions and the date, which every JSON file of a run folder has."""
    return {
        "schema": SCHEMA,
        "gossamer": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def version_line() -> str:
    return f"gossamer {VERSION} (torch {torch.__version__}, Python {platform.python_version()})"
