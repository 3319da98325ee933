"""`gossamer report`, and the page that every command keeps in its folder."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest
import typer
from run_folders import SLOPES, rising, settings_of, write_comparison, write_run

from command_line import gossamer
from gossamer.commands import simulate
from gossamer.commands.report import report
from gossamer.commands.studies import reproduce
from gossamer.commands.work import simulations
from gossamer.errors import ConfigurationError, PeerLost

command = typer.Typer()
command.command()(report)
QUICK = ("--task", "quadratic", "--epochs", "0.2", "--engine", "loop")


def run_report(*arguments: object) -> None:
    command([str(one) for one in arguments], standalone_mode=False)


def embedded(page: Path) -> dict:
    """The data inside a page."""
    text = page.read_text(encoding="utf-8")
    start = text.index(">", text.index('type="application/json"')) + 1
    return json.loads(text[start : text.index("</script>", start)])


def only_folder(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


# ---------------------------------------------------------------------- the command


def test_the_page_of_one_run_lies_in_its_folder(tmp_path, capsys):
    """Also when it is made again, over the one that is there."""
    folder = write_comparison(tmp_path / "run", SLOPES)
    (folder / "report.html").write_text("an old page")
    run_report(folder)
    data = embedded(folder / "report.html")
    assert [method["label"] for method in data["methods"]] == ["ad_psgd", "downpour"]
    said = capsys.readouterr().out
    assert f"report: {folder / 'report.html'}" in said.replace("\n", "")
    assert "Only ad_psgd reaches 88 %" in said


def test_the_page_of_several_runs_lies_where_the_user_is(tmp_path, monkeypatch):
    """None of the folders is more its home than the others."""
    folders = [
        write_run(tmp_path / method, settings_of(method), rising(0.2))
        for method in ("ad_psgd", "d_psgd")
    ]
    monkeypatch.chdir(tmp_path)
    run_report(*folders)
    assert len(embedded(tmp_path / "report.html")["methods"]) == 2
    assert not (folders[0] / "report.html").exists()


def test_the_page_goes_where_it_is_sent_with_the_target_that_is_given(tmp_path):
    """--out and --target."""
    folder = write_comparison(tmp_path / "run", SLOPES)
    run_report(folder, "--out", tmp_path / "page.html", "--target", "0.5")
    assert embedded(tmp_path / "page.html")["target"] == 0.5
    assert not (folder / "report.html").exists()


def test_what_is_missing_is_said_aloud(tmp_path, capsys):
    """On the console too, so that nobody takes half a run for a whole one."""
    folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
    (folder / "summary.json").write_text('{"half')
    run_report(folder)
    assert "summary.json is damaged" in capsys.readouterr().err
    assert embedded(folder / "report.html")["missing"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nowhere",), "does not exist"),
        (("file",), "is a file"),
        (("run", "--target", "nan"), "--target must be"),
        (("run", "--out", "run"), "is a folder"),
        (("run", "--out", "page.png"), "must end in .html"),
        (("run", "--out", "nowhere/page.html"), "the folder nowhere does not exist"),
        (("empty",), "holds no run"),
        (("run", "other"), "different tasks"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, arguments, reason):
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", settings_of(), rising(0.2))
    write_run(tmp_path / "other", {**settings_of(), "task": "quadratic"}, rising(0.2))
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=reason):
        run_report(*arguments)
    assert not list(tmp_path.rglob("*.html"))


# ---------------------------------------------------------------------- every command's page


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures have tests of their own, and take a second each."""
    monkeypatch.setattr("gossamer.commands.kept_run.has_matplotlib", lambda: False)
    monkeypatch.setattr(reproduce, "can_draw", lambda: False)


def test_a_comparison_keeps_its_page_and_its_command(tmp_path, no_pictures):
    """The command as a shell reads it back, quoted where it must be."""
    typed = ("compare", "--methods", "ad_psgd all_reduce", *QUICK, "--lr", "0.1,0.2",
             "--runs", str(tmp_path))  # fmt: skip
    said = gossamer(*typed)
    assert said.status == 0, said.err
    folder = only_folder(tmp_path)
    assert f"report: {folder / 'report.html'}" in said.out
    data = embedded(folder / "report.html")
    assert shlex.split(data["command"]) == ["gossamer", *typed]
    assert data["verdict"] == json.loads((folder / "summary.json").read_text())["verdict"]
    assert (data["score"], data["missing"]) == ("loss", [])
    assert all(method["curves"]["time"]["loss"] for method in data["methods"])


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_simulation_keeps_its_page(tmp_path, seeds):
    """One run, or one for each seed."""
    said = gossamer("simulate", *QUICK, "--seeds", str(seeds), "--runs", str(tmp_path))
    assert said.status == 0, said.err
    (method,) = embedded(only_folder(tmp_path) / "report.html")["methods"]
    assert (method["label"], method["seeds"], method["status"]) == ("ad_psgd", seeds, "finished")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost(3)])
def test_a_run_that_ends_early_keeps_the_page_of_what_it_did(tmp_path, monkeypatch, error):
    """After Ctrl-C and after a failure: the curves so far, and how it ended."""
    seen = []

    def stop(what, row):
        seen.append(row)
        if len(seen) == 3:
            raise error
        return what

    monkeypatch.setattr(simulate, "progress_line", stop)
    said = gossamer("simulate", *QUICK, "--runs", str(tmp_path))
    assert said.status == (130 if isinstance(error, KeyboardInterrupt) else 1), said.err
    data = embedded(only_folder(tmp_path) / "report.html")
    (method,) = data["methods"]
    interrupted = isinstance(error, KeyboardInterrupt)
    assert method["status"] == ("interrupted" if interrupted else "failed")
    assert method["curves"]["time"]["loss"]["x"]
    assert interrupted or any("worker 3 is lost" in notice for notice in data["notices"])


def test_a_comparison_that_is_interrupted_keeps_the_page_of_what_is_done(
    tmp_path, monkeypatch, no_pictures
):
    """One method is finished, the other one was under way: nobody has won."""
    whole = simulations.execute

    def execute(settings, **options):
        if settings.method.name == "all_reduce":
            raise KeyboardInterrupt
        return whole(settings, **options)

    monkeypatch.setattr(simulations, "execute", execute)
    said = gossamer(
        "compare", "--methods", "ad_psgd all_reduce", *QUICK, "--lr", "0.1", "--runs", str(tmp_path)
    )
    assert said.status == 130
    data = embedded(only_folder(tmp_path) / "report.html")
    assert [method["label"] for method in data["methods"]] == ["ad_psgd"]
    assert any("all_reduce at 0.1" in line for line in data["missing"])
    assert "Interrupted when 1 of 2 methods had run" in said.out
    assert "first" not in data["verdict"]


def test_a_reproduced_table_keeps_its_page(tmp_path, monkeypatch, no_pictures):
    """With its cells as a table that sorts."""
    monkeypatch.setattr("gossamer.studies.reproductions.ad_psgd.EPOCH", 2_500)
    said = gossamer("reproduce", "ad-psgd-slow-worker", "--runs", str(tmp_path))
    assert said.status == 0, said.err
    data = embedded(only_folder(tmp_path) / "report.html")
    cells = json.loads((only_folder(tmp_path) / "summary.json").read_text())["cells"]
    assert len(data["tables"][0]["rows"]) == len(cells)
    assert data["command"].startswith("gossamer reproduce ad-psgd-slow-worker")


@pytest.mark.parametrize(
    ("reason", "status", "sentence"),
    [
        (OSError(errno.ENOSPC, "the disk is full"), 2, "error: the disk is full; make room"),
        (ValueError("a figure is odd"), 1, "no report: a figure is odd"),
    ],
)
def test_a_page_that_cannot_be_made_is_told_after_the_result(
    reason, status, sentence, tmp_path, monkeypatch
):
    """All figures are shown and kept by then; the exit code does not call the folder whole."""

    def refuse(*_):
        raise reason

    monkeypatch.setattr("gossamer.commands.kept_run.write_page", refuse)
    said = gossamer("simulate", *QUICK, "--runs", str(tmp_path))
    assert said.status == status
    assert "digest" in said.out
    assert said.err.splitlines()[-1].startswith(sentence)
    assert (only_folder(tmp_path) / "summary.json").exists()
