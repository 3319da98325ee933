"""The main picture beside a page: what it shows, and when there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from run_folders import (
    SLOPES,
    WORKERS,
    rising,
    row,
    settings_of,
    summary_of,
    write,
    write_comparison,
    write_run,
)

from command_line import gossamer
from gossamer.commands.report import report
from gossamer.errors import ConfigurationError
from gossamer.report.pictures.main_picture import main_picture
from gossamer.runs.kept_runs import read_folder

image = pytest.importorskip("matplotlib.image")
command = typer.Typer()
command.command()(report)
QUICK = ("--task", "quadratic", "--epochs", "0.2", "--engine", "loop")


def words_of(path: Path, *folders: Path, **choices) -> str:
    """Of the picture as SVG, in which every text stands as a comment."""
    assert main_picture(path / "words.svg", [read_folder(one) for one in folders], **choices)
    return (path / "words.svg").read_text()


def ink(path: Path) -> float:
    """The share of pixels that are not white."""
    return float((image.imread(path)[..., :3] < 0.98).any(-1).mean())


def write_real_run(folder: Path, method: str, workers: int = 2) -> Path:
    """As `gossamer train` leaves it: seconds of a clock, and the books of each worker."""
    config = {**settings_of(method), "command": "train"}
    history = []
    for one in rising(0.2):
        seconds = one.pop("virtual_seconds")
        for key in ("computing_seconds", "waiting_seconds"):
            one.pop(key)
        history.append({**one, "seconds": seconds})
    write_run(folder, config, history, summary={"ended": "finished", "seconds": 4.0})
    (folder / "workers").mkdir()
    for rank in range(workers):
        book = {"kind": "books", "computing_seconds": 1.0 + rank, "seconds": 4.0,
                "waiting_seconds": {"peer": 2.0 - rank}}  # fmt: skip
        (folder / "workers" / f"{rank}.jsonl").write_text(json.dumps(book) + "\n")
    return folder


class TestOneMethod:
    def test_scores_stand_over_the_time_of_each_worker(self, tmp_path):
        """Both views of the training, and where the time went; no ranking of one."""
        run = write_run(tmp_path / "run", settings_of("ad_psgd"), rising(0.2))
        words = words_of(tmp_path, run)
        for text in ("Test accuracy over virtual time", "Test accuracy over epochs",
                     "Where each worker's time went", "virtual seconds", "waiting"):  # fmt: skip
            assert f"<!-- {text} -->" in words
        assert "to reach" not in words
        assert "<!-- target" not in words
        assert "ad_psgd: " in words

    def test_a_given_target_is_drawn(self, tmp_path):
        """Of one method too, where somebody asks for it."""
        run = write_run(tmp_path / "run", settings_of("ad_psgd"), rising(0.2))
        assert "<!-- target -->" in words_of(tmp_path, run, target=0.5)

    def test_seeds_have_a_band_and_the_first_one_tells_of_the_workers(self, tmp_path):
        """The workers of different runs have nothing in common."""
        folders = [
            write_run(tmp_path / f"run{seed}", settings_of("ad_psgd", seed=seed), rising(slope))
            for seed, slope in ((0, 0.2), (1, 0.22))
        ]
        words = words_of(tmp_path, *folders)
        assert "2 seeds (lines: means, bands: range over seeds)" in words
        assert "<!-- Where each worker's time went, in the first run -->" in words

    def test_real_seconds_are_no_virtual_ones(self, tmp_path):
        """The books of real workers tell where their time went."""
        words = words_of(tmp_path, write_real_run(tmp_path / "run", "ad_psgd"))
        assert "<!-- Test accuracy over time -->" in words
        assert "<!-- seconds -->" in words
        assert "<!-- Where each worker's time went -->" in words
        assert "virtual" not in words

    def test_a_run_that_tells_nothing_of_its_workers_still_has_scores(self, tmp_path):
        """A killed run of a user's own may have little more than its scores."""
        history = [{"virtual_seconds": at, "epochs": at, "accuracy": 0.2 * at} for at in range(4)]
        run = write_run(tmp_path / "run", settings_of("ad_psgd"), history, summary={})
        words = words_of(tmp_path, run)
        assert "<!-- Test accuracy over epochs -->" in words
        assert "worker's time" not in words


class TestSeveralMethods:
    def test_the_fastest_to_the_target_is_ranked_first(self, tmp_path):
        """As on the page: each method at its best rate, with its share of waiting."""
        words = words_of(tmp_path, write_comparison(tmp_path / "run", SLOPES))
        for text in ("Virtual seconds to reach 88 %", "ad_psgd (rate 0.3)", "downpour (rate 0.1)",
                     "Where the workers' time went", "25 %"):  # fmt: skip
            assert f"<!-- {text} -->" in words
        assert "not reached in" in words

    def test_real_runs_share_a_picture(self, tmp_path):
        """Their seconds are a clock's, their shares those of their books."""
        folders = [
            write_real_run(tmp_path / method, method) for method in ("ad_psgd", "all_reduce")
        ]
        words = words_of(tmp_path, *folders)
        assert "<!-- Seconds to reach 72 % -->" in words
        # Of 4 seconds the workers compute 1 and 2, and wait 2 and 1.
        assert words.count("<!-- 38 % -->") == 4

    def test_shares_that_nobody_wrote_down_are_left_out(self, tmp_path):
        """The others have theirs."""
        told = rising(0.2)
        told[-1]["computing_seconds"] = [0.37 * told[-1]["virtual_seconds"]] * WORKERS
        bare = [{"virtual_seconds": at, "epochs": at, "accuracy": 0.2 * at} for at in range(5)]
        folders = [
            write_run(tmp_path / "a", settings_of("ad_psgd"), told),
            write_run(tmp_path / "b", settings_of("d_psgd"), bare, summary={"ended": "finished"}),
        ]
        assert words_of(tmp_path, *folders).count("<!-- 37 % -->") == 1


class TestNothingToDraw:
    @pytest.mark.parametrize(
        "history", [[], [row(1.0, None, loss=None), row(2.0, None, loss=None)]]
    )
    def test_a_run_without_scores_has_no_picture(self, tmp_path, history):
        """Times alone are on the page."""
        config = settings_of("ad_psgd")
        summary = {"ended": "finished", "virtual_seconds": 2.0}
        run = write_run(tmp_path / "run", config, history, summary=summary)
        assert not main_picture(tmp_path / "a.png", [read_folder(run)])
        assert not (tmp_path / "a.png").exists()

    @pytest.mark.parametrize(
        ("target", "first"), [(None, "d_psgd"), (0.5, "d_psgd"), (0.4, "ad_psgd")]
    )
    def test_the_times_that_a_search_printed_are_drawn(self, tmp_path, monkeypatch, target, first):
        """Its summary is their one source, and the order of the bars follows; the curves are asked
        where the picture has another target than the search."""
        drawn = []
        monkeypatch.setattr(
            "gossamer.report.pictures.run_pictures.draw_arrivals",
            lambda axes, ranking, *rest: drawn.extend(ranking),
        )
        for method, slope in (("ad_psgd", 0.4), ("d_psgd", 0.2)):
            write_run(tmp_path / method, settings_of(method), rising(slope))
        told = [
            {"method": method, "seconds_to_target": time, "low": time, "high": time,
             "seconds_of_seeds": [time]}
            for method, time in (("d_psgd", 5.0), ("ad_psgd", 900.0))
        ]  # fmt: skip
        write(tmp_path / "config.json", {"command": "advise", "target": 0.5})
        write(tmp_path / "summary.json", {"target": 0.5, "ranking": told, "title": "Advice"})
        assert main_picture(tmp_path / "a.png", [read_folder(tmp_path)], target=target)
        assert drawn[0].label == first
        assert (drawn[1].arrival.seconds == (900.0,)) == (first == "d_psgd")

    def test_an_empty_folder_has_no_picture(self, tmp_path):
        """A report of it still renders."""
        assert not main_picture(tmp_path / "a.png", [read_folder(tmp_path)])


class TestCommands:
    def test_a_simulation_keeps_one(self, tmp_path):
        """With something on it."""
        said = gossamer("simulate", *QUICK, "--runs", str(tmp_path))
        assert said.status == 0, said.err
        (folder,) = tmp_path.iterdir()
        assert 0.02 < ink(folder / "report.png") < 0.6

    def test_a_report_draws_beside_its_page(self, tmp_path, capsys):
        """Under the name of the page."""
        folders = [
            write_run(tmp_path / method, settings_of(method), rising(0.2))
            for method in ("ad_psgd", "d_psgd")
        ]
        command([*map(str, folders), "--out", str(tmp_path / "both.html")], standalone_mode=False)
        assert ink(tmp_path / "both.png") > 0.02
        assert f"picture: {tmp_path / 'both.png'}" in capsys.readouterr().out.replace("\n", "")

    def test_a_comparison_with_its_own_picture_gets_no_second_one(self, tmp_path):
        """They would show the same."""
        folder = write_comparison(tmp_path / "run", SLOPES)
        (folder / "comparison.png").write_bytes(b"")
        command([str(folder)], standalone_mode=False)
        assert (folder / "report.html").exists()
        assert not (folder / "report.png").exists()

    def test_a_picture_is_not_overwritten_by_a_page(self, tmp_path):
        """A page under a picture's name is refused, and what has that name stays as it was."""
        run = write_run(tmp_path / "run", settings_of(), rising(0.2))
        (tmp_path / "a.png").write_bytes(b"a picture")
        with pytest.raises(ConfigurationError, match=r"--out must end in \.html.*a\.png$"):
            command([str(run), "--out", str(tmp_path / "a.png")], standalone_mode=False)
        assert (tmp_path / "a.png").read_bytes() == b"a picture"
        assert not (run / "report.html").exists()

    def test_without_matplotlib_the_page_comes_alone(self, tmp_path, monkeypatch):
        """And nobody is told what they did not ask for."""
        monkeypatch.setattr("gossamer.commands.kept_run.has_matplotlib", lambda: False)
        said = gossamer("simulate", *QUICK, "--runs", str(tmp_path))
        assert said.status == 0, said.err
        assert "picture" not in said.out + said.err
        (folder,) = tmp_path.iterdir()
        assert (folder / "report.html").exists()
        assert not (folder / "report.png").exists()

    def test_a_picture_that_fails_does_not_fail_the_command(self, tmp_path, monkeypatch):
        """A half-installed matplotlib, or a full disk: the reason is told."""
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        said = gossamer("simulate", *QUICK, "--runs", str(tmp_path))
        assert said.status == 0
        assert "no picture: pictures need matplotlib" in said.err


def test_the_picture_of_a_damaged_run_shows_what_is_there(tmp_path):
    """Rows cut short and values that are no numbers must not end in an error."""
    config = settings_of("ad_psgd")
    history = rising(0.2)
    history[2]["accuracy"] = None
    history[3]["waiting_seconds"] = "none"
    run = write_run(tmp_path / "run", config, history, summary=summary_of(config, history))
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"virtual_seconds": 9, "epo')
    assert "<!-- Test accuracy over epochs -->" in words_of(tmp_path, run)
