"""`gossamer advise` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import gossamer
from gossamer.commands.work import advice
from gossamer.commands.work.simulations import slug
from gossamer.plan.advise import candidates
from gossamer.runs.arrival import seconds_to
from tiers import wide

QUICK = ("--task", "digits-logistic", "--workers", "4", "--cluster", "equal-8", "--epochs", "2",
         "--lr", "0.1,0.3", "--seeds", "2", "--target", "0.7", "--budget", "10m")  # fmt: skip

DATA = re.compile('id="data">(.*?)</script>', re.DOTALL)


@pytest.fixture(autouse=True)
def short_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three methods and two changes are enough to see the command work."""
    menu = ("all_reduce", "ad_psgd", "local_sgd:period=2")
    whole = candidates.candidates
    monkeypatch.setattr(advice, "candidates", lambda *given, **more: whole(*given, menu, **more))
    changes = advice.scenes
    monkeypatch.setattr(advice, "scenes", lambda cluster: changes(cluster)[1:3])


def test_advice_is_a_ranking_a_reason_and_a_command(tmp_path: Path) -> None:
    """As the documentation promises it, on the console, as JSON, in the folder and on the page."""
    said = gossamer("advise", *QUICK, "--runs", str(tmp_path), "--json")
    assert said.status == 0, said.err
    ranking = said.json["ranking"]
    assert {row["method"] for row in ranking} == {"all_reduce", "ad_psgd", "local_sgd:period=2"}
    times = [row["seconds_to_target"] for row in ranking]
    assert times == sorted(times)
    assert all(row["low"] <= row["seconds_to_target"] <= row["high"] for row in ranking)
    assert said.json["command"].startswith(f"gossamer train --method {ranking[0]['method']} --lr")
    assert "What would change the answer:" in said.err
    assert said.json["reason"] in said.err
    alone = said.json["alone"]
    assert alone["seconds_to_target"] > times[0]
    assert alone["said"] in said.err
    assert re.search(rf"- +one worker alone +{alone['learning_rate']:g} ", said.err)
    (folder,) = tmp_path.iterdir()
    kept = json.loads((folder / "summary.json").read_text())
    assert kept["ranking"] == ranking
    assert len(list(folder.glob("*-seed*/metrics.jsonl"))) == 3 * 2
    page = page_of(folder / "report.html")
    assert page["tables"][0]["rows"][-1][0] == "one worker alone"
    advice = page["advice"]
    assert advice["command"] == said.json["command"]
    assert advice["reasons"][0] == said.json["reason"]
    assert len(advice["changes"]) == len(said.json["changes"]) > 0
    scenes = advice["scenes"]
    assert [row[0] for row in scenes["rows"]] == [one["change"] for one in said.json["sensitivity"]]
    assert all(len(row) == len(scenes["columns"]) for row in scenes["rows"])
    # It stands in one place, and not among what is only good to know.
    assert not any(said.json["reason"] in one or "gossamer train" in one for one in page["notices"])
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def page_of(path: Path) -> Any:
    return json.loads(DATA.findall(path.read_text())[0])


def test_a_page_made_again_has_the_figures_that_were_printed(tmp_path: Path) -> None:
    """On a slow network collecting the mean takes long; every time on the page includes it, both
    on the page that the command wrote and on the one that `gossamer report` makes of its folder."""
    slow = ("--model-bytes", "100000000")
    said = gossamer("advise", *QUICK, *slow, "--runs", str(tmp_path), "--json")
    (folder,) = tmp_path.iterdir()
    first = page_of(folder / "report.html")
    again = gossamer("report", str(folder), "--out", str(tmp_path / "again.html"))
    assert again.status == 0, again.err
    assert page_of(tmp_path / "again.html") == first
    assert first["verdict"] == said.json["verdict"]
    printed = {row["method"]: row for row in said.json["ranking"]}
    assert [method["label"] for method in first["methods"]] == list(printed)
    for method in first["methods"]:
        row = printed[method["label"]]
        assert method["arrival"]["mean"] == row["seconds_to_target"]
        assert method["arrival"]["runs"] == row["seconds_of_seeds"]
    mean = printed["local_sgd:period=2"]
    assert mean["collecting_seconds"] > 0.1 * mean["seconds_to_target"]


def test_a_page_for_another_target_counts_what_collecting_the_model_costs(tmp_path: Path) -> None:
    """Its times are found anew, from evaluations that are later by that price."""
    gossamer("advise", *QUICK, "--model-bytes", "100000000", "--runs", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    prices = json.loads((folder / "config.json").read_text())["collecting_seconds"]
    assert prices["all_reduce"] == 0.0 < prices["ad_psgd"]
    gossamer("report", str(folder), "--target", "0.6", "--out", str(tmp_path / "again.html"))
    for method in page_of(tmp_path / "again.html")["methods"]:
        label = method["label"]
        histories = [
            [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in sorted(folder.glob(f"{slug(label)}-seed*"))
        ]
        times = [seconds_to(history, 0.6) for history in histories]
        expected = [time + prices[label] for time in times if time is not None]
        assert method["arrival"]["runs"] == pytest.approx(expected)
        assert method["curves"]["time"]["accuracy"]["x"][0] == prices[label]


@wide
def test_the_same_seed_prints_the_same_ranking() -> None:
    first, second = (gossamer("advise", *QUICK, "--runs", "none", "--json") for _ in range(2))
    assert first.json == second.json


@wide
def test_overrides_reach_the_cluster() -> None:
    said = gossamer("advise", *QUICK, "--slow", "0=10", "--runs", "none", "--json")
    assert said.json["workers"] == 4
    assert said.json["ranking"][0]["method"] == "ad_psgd"
    assert any(one["change"] == "every worker equally fast" for one in said.json["sensitivity"])


def test_an_interruption_gives_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130, a ranking, and the folder kept."""
    whole, done = advice.execute, []

    def interrupted(*arguments, **named):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(1)
        return whole(*arguments, **named)

    monkeypatch.setattr(advice, "execute", interrupted)
    said = gossamer("advise", *QUICK, "--runs", str(tmp_path), "--json")
    assert said.status == 130
    assert said.json["ended"] == "interrupted"
    assert said.json["ranking"][0]["method"]
    assert "best so far" in said.err
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["ended"] == "interrupted"
    assert "No method reaches" not in said.json["reason"]  # nobody has run to the end yet
    again = gossamer("report", str(folder), "--out", str(tmp_path / "again.html"))
    assert (again.status, again.err) == (0, "")  # nothing of an unfinished search is missing
    page = page_of(tmp_path / "again.html")
    assert page == page_of(folder / "report.html")
    assert page["methods"] == []
    assert page["cluster"]["workers"] == 4
    assert {one["name"] for one in page["settings"]} >= {"task", "epochs", "target"}
    assert page["verdict"] == said.json["verdict"]
    assert page["tables"][0]["rows"][0][0] == said.json["ranking"][0]["method"]


def test_a_slow_machine_gives_the_best_so_far_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only way in which real time may show."""
    reads = iter(range(10**6))
    monkeypatch.setattr(advice.time, "monotonic", lambda: 10.0 * next(reads))
    said = gossamer("advise", *QUICK, "--runs", "none", "--json")
    assert said.status == 0, said.err
    assert said.json["ended"] == "out of time"
    assert "The budget ran out on this machine" in said.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--target", "101"), "--target must be an accuracy above 0 and at most 1"),
        (("--target", "-1"), "--target must be an accuracy above 0 and at most 1"),
        (("--target", "nan"), "--target must be"),
        (("--budget", "soon"), "--budget must be a time"),
        (("--budget", "0s"), "--budget must be above 0"),
        (("--budget", "1ms"), "too few to advise"),
        (("--lr", "fast"), "--lr must be numbers"),
        (("--cluster", "equal-9"), "did you mean 'equal-8'"),
    ],
)
def test_bad_input_is_one_sentence(options: tuple[str, ...], sentence: str) -> None:
    quick = [*QUICK]
    del quick[quick.index("--seeds") : quick.index("--seeds") + 2]
    said = gossamer("advise", *quick, *options, "--runs", "none")
    assert said.status == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1


def test_a_target_is_asked_for() -> None:
    said = gossamer("advise", "--runs", "none")
    assert said.status == 2
    assert "--target" in said.err
