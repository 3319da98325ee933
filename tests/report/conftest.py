"""A comparison's folder that several files look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import SLOPES, write_comparison


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("runs") / "compared", SLOPES)
