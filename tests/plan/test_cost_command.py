"""`gossamer cost` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner, Result

from gossamer.commands.cost import cost, show_layers
from gossamer.errors import ConfigurationError
from gossamer.plan.cost.work_depth import layer_costs
from tiers import every

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(cost)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def told(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table_marks_the_fastest_and_says_where_methods_cross(tmp_path: Path) -> None:
    """A model of 100 MB on 10 Gbit/s; table, sentences, picture and folder."""
    result = run(
        "--model-bytes", "100000000", "--methods", "all_reduce sync_server local_sgd",
        "--workers", "2,4,...,32", "--runs", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "local_sgd" in result.output
    assert "*" in result.output
    assert "samples/s" in result.output
    assert "overtakes" in result.output or "no method overtakes" in result.output
    (folder,) = tmp_path.iterdir()
    assert (folder / "cost.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "summary.json").read_text())
    assert [p["workers"] for p in summary["predictions"][:5]] == [2, 4, 8, 16, 32]
    assert (folder / "config.json").exists()


def test_json_holds_every_prediction_with_its_parts() -> None:
    """One row per method and number of workers."""
    said = told("--runs", "none", "--methods", "all_reduce downpour", "--workers", "2,8")
    rows = said["predictions"]
    assert isinstance(rows, list)
    assert {(row["method"], row["workers"]) for row in rows} == {
        (method, count) for method in ("all_reduce", "downpour") for count in (2, 8)
    }
    for row in rows:
        assert row["step_seconds"] > 0
        assert row["parts"]["compute_s"] > 0


def test_options_of_the_network_change_the_prediction() -> None:
    """Bandwidth, latency, computing and batch instead of the cluster's and the task's."""

    def seconds(*more: str) -> tuple[float, float]:
        said = told(
            "--runs", "none", "--methods", "all_reduce", "--workers", "8",
            "--model-bytes", "1000000", *more,
        )  # fmt: skip
        (row,) = said["predictions"]  # type: ignore[misc]
        return row["step_seconds"], row["samples_per_second"]

    plain, speed = seconds()
    assert seconds("--bandwidth", "1Gbit")[0] > plain
    assert seconds("--latency", "1ms")[0] > plain
    assert seconds("--compute", "1s")[0] > 1.0
    assert seconds("--batch", "64", "--compute", "10ms")[1] == pytest.approx(speed * 64 / 16)
    assert speed < seconds("--batch", "64")[1] < speed * 64 / 16  # the preset's time follows it


def test_layers_are_listed_with_work_depth_and_bytes() -> None:
    """Those of the task's model; the whole below."""
    result = run("--layers", "--runs", "none", "--methods", "ensemble", "--workers", "2")
    assert result.exit_code == 0, result.output
    assert "work/depth" in result.output
    assert "greedy" in result.output


def test_layers_name_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the table, so that its sum is not believed to be all."""
    show_layers(layer_costs(nn.Linear(4, 4), torch.zeros(2, 4)))
    assert "not counted" not in capsys.readouterr().out
    model = nn.Sequential(nn.Linear(4, 4), nn.LocalResponseNorm(2))
    show_layers(layer_costs(model, torch.zeros(2, 3, 4)))
    assert "computes more than this: 1 (LocalResponseNorm)" in capsys.readouterr().out


def test_a_size_alone_is_enough() -> None:
    """`--task none` with --model-bytes; a picture where it is asked for."""
    said = told("--task", "none", "--model-bytes", "1000000", "--runs", "none", "--workers", "4",
                "--methods", "all_reduce easgd")  # fmt: skip
    assert said["model_bytes"] == 1e6


def test_a_picture_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    """Also without a run folder."""
    place = tmp_path / "costs.svg"
    result = run("--runs", "none", "--methods", "ensemble", "--workers", "2,4", "--picture",
                 str(place))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "milliseconds per step" in place.read_text() or place.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "2,x"), "--workers must be numbers"),
        (("--workers", "0"), "--workers must be numbers"),
        (("--methods", "all_reduec"), "did you mean 'all_reduce'"),
        (("--methods", " "), "names no method"),
        (("--task", "none"), "--model-bytes"),
        (("--task", "none", "--model-bytes", "5", "--layers"), "--layers needs"),
        (("--bandwidth", "fast"), "bandwidth such as"),
        (("--batch", "0"), "batch must be"),
        (("--hardware", "h100", "--compute", "3ms"), "--compute says how long a gradient takes"),
        (("--hardware", "h100", "--trace", "step.json"), "both say how long a step takes"),
        (("--hardware", "h1000"), "unknown device 'h1000'; did you mean 'h100'?"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """And nothing is written."""
    result = run("--runs", str(tmp_path), *arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_refusals_are_told_below_the_table() -> None:
    """A dash in the table, the reason below."""
    result = run("--runs", "none", "--methods", "sync_server:backups=3 all_reduce", "--workers",
                 "3,4")  # fmt: skip
    assert " - " in result.output
    assert "\n-: " in result.output


HERE = """
title = "2 workers on this machine"
workers = 2
workers_per_machine = 2
[compute]
seconds = "3ms"
distribution = "lognormal"
jitter = 0.2
[network]
bandwidth = "10Gbit"
latency = "50us"
memory_bandwidth = "5GB"
"""


@pytest.mark.parametrize("cluster", every(2, ["here.toml", "one-slow-of-8"]))
def test_a_probed_machine_and_a_slow_worker_are_answered(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `probe` writes of one machine, and the case that most readers have: no row of dashes."""
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text(HERE)
    result = run("--cluster", cluster, "--workers", "2,4", "--runs", "none", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["refused"] == {}
    assert len(said["predictions"]) == 8 * 2
    simulated = {one["method"] for one in said["predictions"] if one["simulated_because"]}
    assert {"d_psgd", "ad_psgd", "easgd", "downpour", "push_sum", "sync_server"} <= simulated
    assert "~: no closed form here" in result.stderr
    assert set(said["fastest"]) == {"2", "4"}


@pytest.mark.parametrize(("text", "size"), [("100e6", 1e8), ("10MB", 1e7), ("1.5GB", 1.5e9)])
def test_a_size_may_have_a_unit(text: str, size: float) -> None:
    """As bandwidths have; 100e6 is what the command itself proposes."""
    said = told("--task", "none", "--model-bytes", text, "--runs", "none", "--workers", "4",
                "--methods", "all_reduce")  # fmt: skip
    assert said["model_bytes"] == size


@pytest.mark.slow
def test_check_prints_the_agreement() -> None:
    """Predicted, simulated and their difference, for the methods named."""
    said = told("--check", "--methods", "all_reduce push_sum")
    rows = said["agreement"]
    assert isinstance(rows, list)
    assert len(rows) == 2 * 2 * 5
    assert all(abs(row["error"]) < 0.05 for row in rows)


def test_a_page_is_written_beside_the_table_and_not_over_another_file(tmp_path: Path) -> None:
    """One file with its data that may ask nobody; what is there is replaced with --force only."""
    place = tmp_path / "cost.html"
    asked = (
        "--task", "none", "--model-bytes", "4MB", "--workers", "2,4", "--methods",
        "all_reduce local_sgd", "--runs", "none", "--page", str(place),
    )  # fmt: skip
    place.write_text("mine")
    refused = run(*asked)
    assert isinstance(refused.exception, ConfigurationError)
    assert "give --force to replace it" in str(refused.exception)
    assert place.read_text() == "mine"
    result = run(*asked, "--force")
    assert result.exit_code == 0, result.output
    text = place.read_text(encoding="utf-8")
    assert "connect-src 'none'" in text
    assert "function local(case_)" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--page", "cost.htm"], "--page must end in .html"),
        (["--page", "cost.html", "--cluster", "one-slow-of-8"], "closed forms alone; .*slow 0"),
        (["--page", "no/folder/cost.html"], "choose another place with --page"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_anything_is_answered(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and no file."""
    monkeypatch.chdir(tmp_path)
    result = run("--runs", "none", *arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert re.search(sentence, str(result.exception))
    assert list(tmp_path.iterdir()) == []
