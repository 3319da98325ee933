"""`--minutes` and `--resume`: a command that was cut ends with what it would have ended with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.commands.work.simulations import EngineCache, SimulationJob, finished_run
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError, Unfinished
from gossamer.runs.folder import RunFolder
from gossamer.sim.checkpoint.file import CHECKPOINT
from gossamer.sim.checkpoint.pieces import RunPiece
from support import cluster_of, digits


def run(folder: RunFolder, **piece: Any) -> Any:
    settings = make_settings(digits(), "easgd", cluster_of(3), epochs=0.4, batch=16, evaluations=6)
    path = folder.path / CHECKPOINT
    job = SimulationJob("one", settings, folder, piece=RunPiece(path, **piece))
    return job.run(EngineCache(), lambda row: None, lambda: False)


def test_a_folder_made_in_pieces_is_that_of_one_run(tmp_path: Path) -> None:
    """Rows that came after the checkpoint come again once, and a finished run is not made again."""
    whole, cut = RunFolder.create(tmp_path, "whole"), RunFolder.create(tmp_path, "cut")
    result = run(whole)
    with pytest.raises(Unfinished):
        run(cut, events=result.events // 2)
    summary = json.loads((cut.path / "summary.json").read_text())
    assert summary["ended"] == "unfinished"
    with (cut.path / "metrics.jsonl").open("a") as file:
        file.write('{"row": "of a process that was killed later"}\n')
    again = run(RunFolder(cut.path), resumes=True)
    assert again.digest == result.digest
    assert (cut.path / "metrics.jsonl").read_text() == (whole.path / "metrics.jsonl").read_text()
    assert not (cut.path / CHECKPOINT).exists()
    kept = finished_run(again.settings, cut)
    assert kept is not None
    assert kept.parameters_digest == result.parameters_digest
    assert set(kept.state) == set(result.state)


def test_an_unfinished_run_is_no_finished_one(tmp_path: Path) -> None:
    """Neither is a folder without files."""
    folder = RunFolder.create(tmp_path, "run")
    settings = make_settings(digits(), "easgd", cluster_of(3))
    assert finished_run(settings, folder) is None
    with pytest.raises(Unfinished):
        run(folder, events=30)
    assert finished_run(settings, folder) is None


def test_a_piece_needs_a_positive_time(tmp_path: Path) -> None:
    """Otherwise it would end before it began."""
    with pytest.raises(ConfigurationError, match="seconds must be above 0"):
        RunPiece(tmp_path / "run", seconds=0)
