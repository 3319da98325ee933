"""`gossamer compare`: what it ranks, by which rule, and what it says when it cannot tell."""

from __future__ import annotations

import math

import pytest

from command_line import Said, gossamer
from tiers import wide

PROMISED = {
    "digest", "virtual_seconds", "wall_seconds", "steps", "epochs", "loss", "accuracy",
    "consensus_distance", "mean_staleness", "bytes_per_step", "waiting_fraction",
}  # fmt: skip


def compared(*arguments: str) -> Said:
    said = gossamer("compare", *arguments, "--runs", "none", "--json")
    assert said.status == 0, said.err
    return said


def test_compare_ranks_the_methods_and_shows_its_grid() -> None:
    """Each method once, the fastest first, at the rate of the grid that reached the target first,
    on a seed that does not count; at the edge of the grid one more rate was tried."""
    said = compared(
        "--methods", "all_reduce ad_psgd", "--lr", "0.03,0.3", "--epochs", "2", "--seeds", "2"
    )
    result = said.json
    assert {row["method"] for row in result["ranking"]} == {"all_reduce", "ad_psgd"}
    assert result["ranking"][0]["method"] == "ad_psgd"
    assert {tuple(rates) for rates in result["grid"].values()} == {("0.03", "0.3", "3")}
    for row in result["ranking"]:
        tried = {
            rate: one["seconds_to_target"] or math.inf
            for rate, one in result["grid"][row["method"]].items()
        }
        assert f"{row['learning_rate']:g}" == min(tried, key=lambda rate: tried[rate])
        assert len(row["seconds_of_seeds"]) == result["seeds"] == 2
        assert set(row) >= PROMISED - {"digest", "steps", "epochs"}
        assert 0 < row["low"] < row["seconds_to_target"] < row["high"]
    assert result["verdict"] in said.err
    assert result["rule"] in said.err
    assert result["ended"] == "finished"


@wide
def test_compare_says_when_seeds_leave_it_open() -> None:
    """With several seeds times have intervals."""
    result = compared(
        "--methods", "all_reduce ensemble", "--lr", "0.1", "--epochs", "2", "--seeds", "2",
        "--target", "60", "--evaluations", "30",
    ).json  # fmt: skip
    assert (result["seeds"], result["target"]) == (2, 0.6)
    first = result["ranking"][0]
    assert 0 < first["low"] < first["seconds_to_target"] < first["high"]


@wide
def test_one_seed_names_no_winner_and_auto_adds_seeds_until_one_is_clear() -> None:
    """With one seed there is only what each took; three are enough where the lead is large."""
    common = ("--methods", "all_reduce ad_psgd", "--lr", "0.3", "--epochs", "3", "--target", "0.8")
    one = compared(*common, "--seeds", "1").json
    assert "with one seed, so no winner is named" in one["verdict"]
    auto = compared(*common, "--seeds", "auto").json
    assert auto["verdict"].startswith("ad_psgd reaches 80 % first")
    assert auto["seeds"] in (3, 6, 12)
    assert auto["level"] == pytest.approx(0.05 / 3)


def test_compare_judges_by_loss_where_there_is_no_accuracy() -> None:
    """The quadratic: lower is better, and the target lies above the lowest loss."""
    result = compared(
        "--task", "quadratic", "--methods", "all_reduce ad_psgd", "--epochs", "1", "--seeds", "1",
        "--lr", "0.03,0.1",
    ).json  # fmt: skip
    lowest = min(tried["loss"] for rates in result["grid"].values() for tried in rates.values())
    assert result["target"] > lowest
    assert "a loss of" in result["verdict"]
    assert all(row["accuracy"] is None for row in result["ranking"])


@wide
def test_compare_survives_divergence() -> None:
    """A rate that diverges loses to one that does not, and is named; where all diverge, the verdict
    says that, and an untrained model has reached nothing."""
    some = compared("--methods", "all_reduce ad_psgd", "--lr", "0.1,1e30", "--epochs", "0.5")
    assert {row["learning_rate"] for row in some.json["ranking"]} == {0.1}
    assert some.json["grid"]["ad_psgd"]["1e+30"] == {"seconds_to_target": None, "accuracy": None}
    assert "diverged" in some.err
    assert "ad_psgd at 1e+30" in some.err
    for task in ("digits-mlp", "quadratic"):
        every = compared(
            "--task", task, "--methods", "all_reduce ad_psgd", "--lr", "1e30", "--epochs", "0.5"
        )
        assert every.json["verdict"].endswith("every one of them diverged.")
        assert all(row["seconds_to_target"] is None for row in every.json["ranking"])


def test_compare_goes_on_when_the_cluster_stops_one_method() -> None:
    """A partition that outlasts the deadline ends all-reduce and not the others."""
    said = compared(
        "--methods", "all_reduce ad_psgd", "--lr", "0.1", "--epochs", "1",
        "--partition", "0-3|4-7@0.05s",
    )  # fmt: skip
    assert [row["method"] for row in said.json["ranking"]] == ["ad_psgd"]
    assert "unreachable" in said.json["failures"]["all_reduce at 0.1"]
    alone = gossamer(
        "compare", "--methods", "all_reduce", "--lr", "0.1", "--epochs", "1", "--runs", "none",
        "--partition", "0-3|4-7@0.05s",
    )  # fmt: skip
    assert alone.status == 1
    assert alone.err.splitlines()[-1].startswith("the run ended: worker")
