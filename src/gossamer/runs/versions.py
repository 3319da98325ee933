"""What a run was made with: bits depend on it, and a reader in two years will ask."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

VERSION = "0.1.0"
SCHEMA = 1
"""Of the files in a run folder; grows when a key changes its meaning or goes."""


def made_with() -> dict[str, Any]:
    """Versions, the date and the schema, as every JSON file of a run folder has them."""
    return {
        "schema": SCHEMA,
        "gossamer": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def version_line() -> str:
    return f"gossamer {VERSION} (torch {torch.__version__}, Python {platform.python_version()})"
