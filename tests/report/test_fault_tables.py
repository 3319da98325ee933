"""What faults have cost, on the page: the timeline of each recovery, samples, and the goodput."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import gossamer
from gossamer.report.page.build import report_data


def test_the_page_tells_how_each_fault_was_recovered_from(tmp_path: Path) -> None:
    """A worker that came back, a server whose standby took over, and where the time went."""
    gossamer(
        "simulate", "--method", "downpour:standby=sync", "--cluster", "equal-8", "--epochs", "2",
        "--kill", "3@0.05s", "--return", "3@0.12s", "--kill-server", "0@0.08s", "--engine", "none",
        "--runs", str(tmp_path),
    )  # fmt: skip
    (folder,) = tmp_path.iterdir()
    data = report_data([folder])
    (method,) = data["methods"]
    goodput = method["goodput"]
    assert goodput is not None
    assert goodput["absent"] > 0
    assert sum(goodput.values()) == pytest.approx(1.0)
    timeline, samples = data["tables"]
    worker, server = timeline["rows"]
    assert worker[:2] == ["worker 3", 0.05]
    assert 0.07 < worker[-1] < 0.12  # it was dead for 0.07 s
    assert server[0] == "server 0"
    assert server[-1] == pytest.approx(0.05, abs=0.005)  # the time of detection
    assert samples["columns"] == ["epoch", "read", "trained", "lost", "given again"]
    assert all(row[1] == row[2] + row[4] for row in samples["rows"])
