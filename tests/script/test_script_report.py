"""`worker.report` outside of virtual time: alone, and where a run keeps a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer import Callback


class Heard(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def on_evaluation(self, row: dict[str, object]) -> None:
        self.rows.append(row)


def test_a_report_alone_reaches_callbacks_and_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of one number is a number; the row says who reported after how many steps."""
    monkeypatch.setenv("GOSSAMER_RUN", str(tmp_path))
    model, heard = nn.Linear(2, 1), Heard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer, callbacks=[heard]) as worker:
        model(torch.ones(1, 2)).sum().backward()
        worker.step()
        worker.report(loss=torch.tensor(0.5), accuracy=0.25)
    (row,) = heard.rows
    assert (row["loss"], row["accuracy"], row["steps"], row["worker"]) == (0.5, 0.25, 1, 0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row


@pytest.mark.parametrize(
    ("given", "sentence"), [({}, "given nothing"), ({"loss": "low"}, "takes numbers")]
)
def test_a_report_of_no_numbers_is_refused(given: dict[str, float], sentence: str) -> None:
    """With a sentence that says what it takes."""
    model = nn.Linear(2, 1)
    worker = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with worker, pytest.raises(gossamer.ConfigurationError, match=sentence):
        worker.report(**given)
