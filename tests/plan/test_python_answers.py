"""`gossamer.advise`, `cost` and `probe` in a program, and progress in a notebook."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from findings_made import found as findings_of

import gossamer
from command_line import gossamer as command
from gossamer.commands.work import advice
from gossamer.commands.work.answer import Answer
from gossamer.commands.work.simulations import command_line
from gossamer.errors import ConfigurationError
from gossamer.observe import progress
from gossamer.observe.progress import Reporter
from gossamer.plan.advise import candidates
from gossamer.tasks import make_task
from support import digits
from tiers import wide

MENU = ("all_reduce", "ad_psgd")
QUICK: dict[str, Any] = {
    "target": 0.7, "budget": "10m", "seeds": 1, "learning_rates": [0.1], "epochs": 1,
    "jobs": 1, "progress": False, "engine": "loop",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short_menu() -> Iterator[None]:
    """Two methods on one cluster are enough to see a search."""
    whole = candidates.candidates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "candidates", lambda *given, **more: whole(*given, MENU, **more))
        patch.setattr(advice, "scenes", lambda cluster: [])
        yield


@cache
def advised() -> gossamer.Advice:
    cluster = gossamer.load_cluster("equal-8").changed(workers=4)
    return gossamer.advise(dataclasses.replace(make_task("digits-logistic")), cluster, **QUICK)


@cache
def costs() -> gossamer.StepCosts:
    return gossamer.cost(methods=["all_reduce", "sync_server:backups=3"], workers=[2, 4, 8])


@cache
def measured() -> gossamer.Measurement:
    return gossamer.Measurement(findings_of("aabb", factors=[1, 1, 3, 1]), "here")


ANSWERS: dict[str, Callable[[], Answer]] = {"advise": advised, "cost": costs, "probe": measured}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_prints_as_a_table_and_is_a_page(name: str, tmp_path: Path) -> None:
    """As text, as a notebook shows it, as a file, and as rows with the same columns."""
    answer = ANSWERS[name]()
    lines = repr(answer).splitlines()
    rows = answer.table()
    assert len({tuple(row) for row in rows}) == 1
    assert len(lines) > len(rows) / len(getattr(answer, "fastest", [0]))
    shown: str = getattr(answer, "_repr_html_")()  # noqa: B009
    assert lines[-1] in re.sub("&#x27;", "'", shown)
    assert ("data:image/png;base64," in shown) == (name != "probe")
    page = answer.report(tmp_path / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"""(src|href)=["']http""", page)
    with pytest.raises(ConfigurationError, match=r"must end in \.html"):
        answer.report(tmp_path / "page.pdf")


def test_advice_has_what_a_program_needs_to_train(tmp_path: Path) -> None:
    """The first method with its rate, the reason, and runs that `gossamer report` reads."""
    first = advised().table()[0]
    assert (advised().method, advised().learning_rate) == (first["method"], first["learning_rate"])
    assert {row["method"] for row in advised().table()} <= set(MENU)
    assert advised().ended == "finished"
    assert advised().verdict in repr(advised())
    assert advised().reason in repr(advised())
    # No command could name a task that was made in Python.
    assert advised().as_dict()["command"] == (
        f"gossamer.train(task, {first['method']!r}, workers=4, epochs=1, learning_rate=0.1)"
    )
    kept = advised().save(tmp_path / "kept")
    assert command("report", str(kept)).status == 0
    assert json.loads((kept / "config.json").read_text())["command"] == "advise"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["/usr/bin/gossamer", "compare", "--lr", "1 2"], "gossamer compare --lr '1 2'"),
        (["/lib/gossamer/__main__.py", "cost"], "gossamer cost"),
        (["my study.py", "-v"], "python 'my study.py' -v"),
        (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], ""),
        (["-c"], ""),
        ([""], ""),
    ],
)
def test_a_run_keeps_what_made_it(
    typed: list[str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command, or the program that called; a notebook's kernel could not make it again."""
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == kept


@wide
def test_advice_is_what_the_command_gives() -> None:
    said = command(
        "advise", "--task", "digits-logistic", "--cluster", "equal-8", "--workers", "4", "--target",
        "0.7", "--budget", "10m", "--seeds", "1", "--lr", "0.1", "--epochs", "1", "--runs", "none",
        "--json",
    )  # fmt: skip
    assert said.status == 0, said.err
    cluster = gossamer.load_cluster("equal-8").changed(workers=4)
    ours = gossamer.advise("digits-logistic", cluster, **{**QUICK, "engine": "vector"})
    assert said.json == json.loads(json.dumps(ours.as_dict()))


def test_ctrl_c_gives_the_best_advice_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, done = advice.execute, list[int]()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return whole(*arguments, **named)

    monkeypatch.setattr(advice, "execute", interrupted)
    found = gossamer.advise("digits-logistic", "equal-8", **QUICK)
    assert found.ended == "interrupted"
    assert found.method in MENU
    assert "best so far" in repr(found)


def test_costs_are_those_of_the_command_and_are_kept_like_them(tmp_path: Path) -> None:
    said = command(
        "cost", "--methods", "all_reduce sync_server:backups=3", "--workers", "2,4,8", "--runs",
        "none", "--json",
    )  # fmt: skip
    assert json.loads(json.dumps(costs().as_dict())) == said.json
    rows = costs().table()
    assert [(row["method"], row["workers"]) for row in rows] == [
        (method, count) for method in ("all_reduce", "sync_server:backups=3") for count in (2, 4, 8)
    ]
    assert [row["step_seconds"] is None for row in rows] == [
        row["refused"] is not None for row in rows
    ]
    assert all(
        row["is_fastest"] == (row["method"] in costs().fastest[row["workers"]]) for row in rows
    )
    kept = costs().save(tmp_path / "kept")
    assert {one.name for one in kept.iterdir()} == {"config.json", "summary.json", "cost.png"}
    with pytest.raises(ConfigurationError, match="exists; give the name of a new folder"):
        costs().save(kept)


def test_whatever_names_a_task_or_a_cluster_will_do(tmp_path: Path) -> None:
    """A preset, a file, a `Cluster`; a name, a `Task`, or a size alone: the same figures."""
    measured().save(tmp_path / "here.toml")
    where: list[Any] = [tmp_path / "here.toml", str(tmp_path / "here.toml"),
                        gossamer.load_cluster(tmp_path / "here.toml")]  # fmt: skip
    asked = [
        gossamer.cost(task, "local_sgd", cluster, workers="4", compute="10ms", bandwidth=1e9)
        for task, cluster in zip(
            ["digits-mlp", digits(), make_task("digits-mlp")], where, strict=True
        )
    ]
    assert len({one.table()[0]["step_seconds"] for one in asked}) == 1
    alone = gossamer.cost(None, "local_sgd", gossamer.Cluster(workers=4), model_bytes="10MB",
                          workers=[4])  # fmt: skip
    assert alone.as_dict()["model_bytes"] == 10_000_000


def test_a_measurement_is_a_cluster_and_a_file(tmp_path: Path) -> None:
    place = measured().save(tmp_path / "here.toml")
    assert [str(fault) for fault in gossamer.load_cluster(place).faults] == [
        str(fault) for fault in measured().cluster.faults
    ]
    assert [row["worker"] for row in measured().table()] == [0, 1, 2, 3]
    assert measured().as_dict()["cluster"] == measured().cluster.as_dict()
    with pytest.raises(ConfigurationError, match=r"must end in \.toml"):
        measured().save(tmp_path / "here")
    with pytest.raises(ConfigurationError, match="exists"):
        measured().save(place)
    measured().save(place, force=True)


@wide
def test_a_probe_in_a_program_measures_what_the_command_does(tmp_path: Path) -> None:
    found = gossamer.probe("digits-logistic", 2, seconds=1, progress=False)
    assert found.cluster.workers == 2
    assert "links alone" in repr(found)
    run = gossamer.simulate("digits-logistic", "ad_psgd", found.cluster, epochs=1, engine="none")
    assert run.virtual_seconds > 0


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: gossamer.advise("nothing", **QUICK), "unknown task"),
    (lambda: gossamer.advise(**QUICK | {"target": 101}), "--target must be"),
    (lambda: gossamer.advise(**QUICK | {"budget": 0}), "--budget must be above 0"),
    (lambda: gossamer.advise(**QUICK | {"seeds": 0}), "--seeds must be at least 1"),
    (lambda: gossamer.advise(**QUICK | {"engine": "none"}), "advise needs gradients"),
    (lambda: gossamer.advise(**QUICK, colour="red"), "unknown setting 'colour'"),
    (lambda: gossamer.cost(None), "give it with --model-bytes"),
    (lambda: gossamer.cost(workers=[0]), "--workers must be numbers"),
    (lambda: gossamer.cost(methods=[]), "names no method"),
    (lambda: gossamer.cost(cluster="nowhere"), "nowhere"),
    (lambda: gossamer.cost(bandwidth="fast"), "must be a bandwidth"),
    (lambda: gossamer.probe(workers=0), "must be at least 1"),
    (lambda: gossamer.probe(seconds="0.1s"), "--seconds must be from 1 to 3600"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_is_one_sentence(case: int) -> None:
    ask, sentence = BAD[case]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_a_changed_task_has_lost_its_name_and_workers_refuse_it() -> None:
    """They would make the unchanged one by that name, and nobody would notice."""
    task = make_task("digits-mlp")
    changed = dataclasses.replace(task, batch=64)
    assert (task.spec, changed.spec) == ("digits-mlp", "")
    for ask in (
        lambda: gossamer.train(changed, "all_reduce", workers=2),
        lambda: gossamer.probe(changed, 2),
    ):
        with pytest.raises(ConfigurationError, match="it is no global name of a file"):
            ask()
    assert task.importable() is task


CHANGED = dataclasses.replace(make_task("digits-logistic"), batch=48)


def test_a_changed_task_that_is_a_global_name_is_imported_by_it() -> None:
    """A worker that makes it by that name gets the change."""
    named = CHANGED.importable()
    assert named.spec == f"{Path(__file__).absolute()}:CHANGED"
    assert (named.batch, make_task(named.spec).batch) == (48, 48)


# ---------------------------------------------------------------------- progress


def test_simulate_shows_its_progress_and_gives_the_same_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choices: dict[str, Any] = {"epochs": 0.5, "evaluations": 3, "engine": "loop"}
    rows: list[Any] = []
    shown = gossamer.simulate("digits-logistic", "ad_psgd", progress=True, on_row=rows.append,
                              **choices)  # fmt: skip
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("ad_psgd  epoch") == len(shown.history) == len(rows)
    silent = gossamer.simulate("digits-logistic", "ad_psgd", **choices)
    assert capsys.readouterr().err == ""
    assert silent.digest == shown.digest


def test_a_notebook_shows_progress_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an output of the cell that is replaced, without widgets."""
    outputs: list[str] = []

    def tell(shown: Any) -> None:
        outputs.append(shown._repr_mimebundle_((), ())["text/plain"])

    def display(shown: Any, *, display_id: bool) -> Any:
        assert display_id
        tell(shown)
        return SimpleNamespace(update=tell)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(progress.err, "is_jupyter", True)
    clock = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with Reporter(2, "two runs") as reporter:
        reporter.at("the first", 0.5)
        reporter.finished("the first")
        reporter.finished("the second")
    assert "two runs" in outputs[0]
    assert "0/2" in outputs[0]
    assert "the first" in outputs[1]
    assert "2/2" in outputs[-1]


def test_what_is_imported_later_is_there() -> None:
    """Every name that the package offers can be got."""
    for name in gossamer.__all__:
        assert getattr(gossamer, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'advice'"):
        _ = gossamer.advice  # type: ignore[attr-defined]
