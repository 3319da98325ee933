"""Runs in several processes: the same results as in one, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import gossamer
from fork_server import Program
from gossamer.commands.work.jobs import JobPool, JobWatch, default_jobs, run_jobs
from gossamer.commands.work.simulations import SimulationJob
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import PeerLost, RunFailed, ServerLost
from gossamer.plan.advise import candidates
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result
from gossamer.script.fork_server import ForkServer
from scripts import children, process_of
from support import digits
from tiers import wide

COMPARE = ("compare", "--methods", "all_reduce ad_psgd", "--epochs", "1", "--lr", "0.03,0.3",
           "--seeds", "2", "--evaluations", "8", "--json")  # fmt: skip
pytestmark = pytest.mark.usefixtures("pool_server")
CHANGING = {"wall_seconds", "made_with", "command_line", "runs"}


def without(value: Any, names: set[str]) -> Any:
    """The value without what may differ between two equal runs."""
    if isinstance(value, dict):
        items: Any = value.items()
        return {key: without(one, names) for key, one in items if key not in names}
    if isinstance(value, list):
        rows: Any = value
        return [without(one, names) for one in rows]
    return value


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a run folder but pages and pictures, which are made of the others."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix in (".json", ".jsonl"):
            found[name] = [
                without(json.loads(text), CHANGING)
                for text in (
                    path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
                )
            ]
        elif path.suffix == ".safetensors":
            found[name] = path.read_bytes()
    return found


def settings_of(method: str = "ad_psgd", seed: int = 0, epochs: float = 1.0) -> Settings:
    return make_settings("digits-mlp", method, "equal-8", seed=seed, epochs=epochs)


def jobs_of(*seeds: int, epochs: float = 1.0) -> list[SimulationJob]:
    return [SimulationJob(f"seed {seed}", settings_of(seed=seed, epochs=epochs)) for seed in seeds]


def test_compare_with_two_jobs_prints_and_keeps_what_one_job_does(tmp_path: Path) -> None:
    """The same table, the same JSON, the same files in the same folders."""
    said = [gossamer(*COMPARE, "--jobs", n, "--runs", str(tmp_path / n)) for n in ("1", "2")]
    one, two = said
    assert one.status == two.status == 0, two.err
    assert without(two.json, CHANGING) == without(one.json, CHANGING)
    tables = [text.err[text.err.index("Multilayer") : text.err.index("kept in")] for text in said]
    assert tables[0] == tables[1]
    (first,), (second,) = ((tmp_path / n).iterdir() for n in ("1", "2"))
    assert len(list(first.glob("*-seed*"))) == 2 * 3 + 2 * 2
    assert contents(second) == contents(first)


@wide
def test_compare_drops_what_ran_beside_a_failure(tmp_path: Path) -> None:
    """A method that fails with a counting seed has no later seeds, also where they had begun."""
    line = ("compare", "--methods", "all_reduce ad_psgd", "--lr", "0.1", "--epochs", "1",
            "--partition", "0-3|4-7@0.05s", "--seeds", "4", "--json")  # fmt: skip
    for n in ("1", "3"):
        assert gossamer(*line, "--jobs", n, "--runs", str(tmp_path / n)).status == 0
    (first,), (second,) = ((tmp_path / n).iterdir() for n in ("1", "3"))
    assert contents(second) == contents(first)


@wide
def test_advise_with_two_jobs_gives_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.commands.work import advice as command

    menu, whole = ("all_reduce", "ad_psgd"), candidates.candidates
    monkeypatch.setattr(command, "candidates", partial(whole, menu=menu))
    line = ("advise", "--task", "digits-logistic", "--workers", "4", "--cluster", "equal-8",
            "--epochs", "2", "--target", "0.7", "--budget", "10m", "--seeds", "2",
            "--json")  # fmt: skip
    said = [gossamer(*line, "--jobs", n, "--runs", str(tmp_path / n)) for n in ("1", "2")]
    assert [one.status for one in said] == [0, 0], said[1].err
    assert said[0].json == said[1].json
    (first,), (second,) = ((tmp_path / n).iterdir() for n in ("1", "2"))
    assert contents(second) == contents(first)


@wide
def test_lab_stragglers_with_two_jobs_gives_the_same_lines(tmp_path: Path) -> None:
    line = ("lab", "stragglers", "--workers", "4", "--seeds", "1", "--steps", "40", "--epochs",
            "0.2", "--lr", "0.1", "--json")  # fmt: skip
    said = [gossamer(*line, "--jobs", n, "--runs", str(tmp_path / n)) for n in ("1", "2")]
    assert said[0].json == said[1].json
    (first,), (second,) = ((tmp_path / n).iterdir() for n in ("1", "2"))
    assert contents(second) == contents(first)


def test_lab_delay_with_two_jobs_stops_and_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    """Groups in two processes, stopped by the time limit and continued, give those of one job."""
    line = ("lab", "delay", "--optimiser", "sgd", "--lr", "0.01,0.1", "--batch", "32,64",
            "--delay", "0,2", "--epochs", "0.5", "--json")  # fmt: skip
    one = gossamer(*line, "--jobs", "1", "--runs", "none")
    cut = gossamer(*line, "--jobs", "2", "--runs", str(tmp_path), "--minutes", "0.001")
    assert cut.json["ended"] == "stopped"
    (folder,) = tmp_path.iterdir()
    two = gossamer("lab", "delay", "--resume", str(folder), "--jobs", "2", "--json")
    assert without(two.json, CHANGING) == without(one.json, CHANGING)
    assert len(two.json["points"]) == 8
    assert not list(folder.glob("group-*"))


@wide
def test_ctrl_c_stops_the_groups_of_a_grid_between_two_steps(tmp_path: Path) -> None:
    """Each process leaves a checkpoint; the command says how to go on, and one job can."""
    words = [sys.executable, "-m", "gossamer_command", "lab", "delay", "--optimiser", "sgd",
             "--lr", "0.01", "--batch", "32,64", "--delay", "0,2", "--epochs", "200", "--jobs", "2",
             "--runs", str(tmp_path)]  # fmt: skip
    process = Program(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 100
    while time.monotonic() < until and not list(tmp_path.glob("*/summary.json")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = tmp_path.iterdir()
    assert f"gossamer lab delay --resume {folder}" in out
    assert len(list(folder.glob("group-*.npz"))) == 2
    again = gossamer("lab", "delay", "--resume", str(folder), "--minutes", "1e-9", "--json")
    assert len(again.json["points"]) == 4


def test_a_result_comes_whole_from_a_process_and_has_the_task_of_its_job() -> None:
    """Settings and task are the caller's own: nothing is loaded a second time."""
    jobs = jobs_of(1, 2)
    rows: list[str] = []
    watch = JobWatch[Any](on_row=lambda job, row: rows.append(job.label))
    here: list[Result] = list(run_jobs(jobs))
    there: list[Result] = list(run_jobs(jobs, watch, processes=2))
    assert len(rows) == sum(len(one.history) for one in there)
    for job, one, other in zip(jobs, here, there, strict=True):
        assert other.settings.task is job.settings.task
        assert other.settings == one.settings
        assert other.parameters_digest == one.parameters_digest
        assert without(other.history, CHANGING) == without(one.history, CHANGING)
        assert all(other.state[name].equal(one.state[name]) for name in one.state)


@dataclass(frozen=True)
class Odd:
    """A job that does something else than to simulate."""

    label: str
    what: str
    folder: RunFolder | None = None

    def run(self, engines: Any, on_row: Any, is_over: Callable[[], bool]) -> Any:
        if self.what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "raises":
            raise ServerLost(4, 2)
        if self.what == "answers an error":
            return PeerLost(3, "of the test")
        time.sleep(0.0 if self.what == "is quick" else 0.3)
        return self.label


def test_a_process_that_dies_is_one_sentence_after_the_answers_before_it(
    pool_server: ForkServer,
) -> None:
    """Whoever comes first in the order is heard first, and no process is left behind."""
    jobs = [Odd("a", "is slow"), Odd("b", "dies"), Odd("c", "is quick")]
    heard: list[str] = []
    with pytest.raises(RunFailed, match=r"^b: its process ended with exit code -9; --jobs 1 "):
        heard.extend(run_jobs(jobs, processes=2))
    assert heard == ["a"]
    assert children(process_of(pool_server)) == []


def test_errors_travel_as_they_are(pool_server: ForkServer) -> None:
    """An error that is an answer, and one that ends the batch, with its own words and kind."""
    pool = JobPool(2)
    with pool:
        (answer,) = pool.run([Odd("a", "answers an error")])
        assert (type(answer), str(answer)) == (PeerLost, "worker 3 is lost: of the test")
        assert answer.peer == 3
        with pytest.raises(ServerLost, match="server 4 is lost with the process of worker 2"):
            list(pool.run([Odd("b", "raises")]))
        assert len(pool.pids) == 1
    assert children(process_of(pool_server)) == []


def test_jobs_are_taken_when_they_can_start_and_after_the_answers_before_them() -> None:
    """What a caller decides by answers holds for all jobs that have not begun."""
    taken: list[str] = []

    def jobs() -> Iterator[Odd]:
        for number in range(6):
            taken.append(f"{number}")
            yield Odd(f"{number}", "is slow" if number == 0 else "is quick")

    with JobPool(2) as pool:
        answers = pool.run(jobs())
        assert next(answers) == "0"
        assert list(answers) == ["1", "2", "3", "4", "5"]
    assert taken == ["0", "1", "2", "3", "4", "5"]


def test_a_deadline_ends_what_runs_and_leaves_out_the_rest(pool_server: ForkServer) -> None:
    watch = JobWatch[Any](deadline=time.monotonic() + 0.5)
    assert list(run_jobs(jobs_of(1, 2, 3, epochs=4000.0), watch, processes=2)) == []
    assert children(process_of(pool_server)) == []


@pytest.mark.parametrize(("cores", "jobs"), [(1, 1), (2, 2), (3, 2), (4, 3), (16, 15)])
def test_without_a_wish_all_cores_up_to_two_and_then_one_fewer(
    cores: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_jobs() == jobs


def test_a_task_made_in_python_says_why_it_stays_here() -> None:
    """One by name travels by its name, one of functions that can be imported as it is."""
    import dataclasses

    odd = dataclasses.replace(digits(), make_model=lambda: torch.nn.Linear(64, 10))
    assert "lambda" in JobPool(2).obstacle(odd)
    assert JobPool(2).obstacle(digits()) == ""


def test_ctrl_c_ends_all_processes_and_keeps_what_is_finished(tmp_path: Path) -> None:
    """Every run folder says how its run ended, and the comparison can be reported."""
    words = [sys.executable, "-m", "gossamer_command", *COMPARE, "--epochs", "600", "--jobs", "2",
             "--runs", str(tmp_path)]  # fmt: skip
    process = Program(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 100
    while time.monotonic() < until and len(list(tmp_path.glob("*/*/metrics.jsonl"))) < 2:
        time.sleep(0.05)
    (server,) = children(process.pid)
    forks = children(int(server))
    assert len(forks) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in (server, *forks))
    (folder,) = tmp_path.iterdir()
    runs = [path for path in folder.iterdir() if path.is_dir()]
    assert len(runs) >= 2
    assert all((path / "config.json").exists() for path in runs)
    ends = {json.loads((path / "summary.json").read_text())["ended"] for path in runs}
    assert "interrupted" in ends
    assert gossamer("report", str(folder)).status == 0
