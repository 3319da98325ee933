"""The commands as Python functions: the same answers, in a form for programs and notebooks."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from command_line import gossamer as command
from gossamer.errors import ConfigurationError
from support import digits

METHODS = ["all_reduce", "ad_psgd"]


@cache
def compared() -> gossamer.Comparison:
    return gossamer.compare(
        "digits-mlp", METHODS, learning_rates=[0.1], seeds=2, epochs=1, jobs=1, progress=False
    )


def test_compare_gives_what_the_command_prints() -> None:
    said = command(
        "compare", "--methods", " ".join(METHODS), "--lr", "0.1", "--seeds", "2", "--epochs", "1",
        "--runs", "none", "--json",
    )  # fmt: skip
    rows: list[dict[str, Any]] = compared().table()
    assert [row["method"] for row in rows] == [row["method"] for row in said.json["ranking"]]
    drop = {"wall_seconds"}
    for own, printed in zip(rows, said.json["ranking"], strict=True):
        assert {k: own[k] for k in own if k not in drop} == {
            k: printed[k] for k in printed if k not in drop
        }
    assert compared().verdict == said.json["verdict"]
    assert compared().target == said.json["target"]
    assert {name: len(runs) for name, runs in compared().results.items()} == dict.fromkeys(
        [row["method"] for row in rows], 2
    )


def test_a_comparison_prints_as_a_table_and_shows_a_picture_in_a_notebook() -> None:
    lines = repr(compared()).splitlines()
    assert lines[0].split()[:3] == ["method", "lr", "accuracy"]
    assert {line.split()[0] for line in lines[2:4]} == set(METHODS)
    assert lines[-1] == compared().verdict
    page = getattr(compared(), "_repr_html_")()  # noqa: B009
    assert page.count("<tr>") == 3
    assert "data:image/png;base64," in page


def test_a_comparison_is_saved_and_reported_like_a_command(tmp_path: Path) -> None:
    """The folder is one that `gossamer report` reads."""
    kept = compared().save(tmp_path / "kept")
    assert len(list(kept.glob("*-seed*/metrics.jsonl"))) == 4
    assert command("report", str(kept)).status == 0
    assert "<html" in compared().report(tmp_path / "page.html").read_text()
    with pytest.raises(ConfigurationError, match="exists; give the name of a new folder"):
        compared().save(kept)
    with pytest.raises(ConfigurationError, match=r"must end in \.html"):
        compared().report(tmp_path / "page.txt")


def test_a_task_of_functions_that_cannot_travel_runs_here_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = dataclasses.replace(digits(), make_model=lambda: digits().make_model())
    found = gossamer.compare(
        task, "ad_psgd", gossamer.Cluster(workers=2), learning_rates=[0.1], seeds=1, epochs=0.5,
        jobs=2, progress=False,
    )  # fmt: skip
    assert [row["method"] for row in found.table()] == ["ad_psgd"]
    said = capsys.readouterr().err
    assert said.startswith("one job at a time: ")
    assert said.count("\n") == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"methods": []}, "names no method"),
    ({"methods": "ad_psgd ad_psgd"}, "names a method twice"),
    ({"methods": "nobody"}, "unknown method"),
    ({"task": "nothing"}, "unknown task"),
    ({"cluster": "nowhere"}, "nowhere"),
    ({"seeds": 0}, "must be at least 1"),
    ({"seeds": "some"}, "a whole number or auto"),
    ({"jobs": 0}, "jobs must be at least 1"),
    ({"target": 200.0}, "target must be"),
    ({"engine": "none"}, "compare needs gradients"),
    ({"colour": "red"}, "unknown setting 'colour'"),
]


def test_a_task_that_does_not_fit_its_data_is_refused_before_a_run() -> None:
    """Not only one that comes from a file."""
    inputs, targets = torch.zeros(20, 8), torch.zeros(20, dtype=torch.int64)
    task = gossamer.Task.of(lambda: nn.Linear(7, 2), nn.CrossEntropyLoss(), (inputs, targets))
    with pytest.raises(ConfigurationError, match=r"test_python\.py, line \d+\): .*2x8 and 7x2"):
        gossamer.simulate(task, "ad_psgd", gossamer.Cluster(workers=2))


@pytest.mark.parametrize(("asked", "sentence"), BAD)
def test_bad_input_is_one_sentence(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        gossamer.compare(**asked)
    assert "\n" not in str(caught.value)
