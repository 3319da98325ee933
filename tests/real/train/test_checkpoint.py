"""Checkpoints: a run that was killed whole goes on as if nothing had been, or nearly so."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_groups import Case, Told, run_cases
from command_line import gossamer
from fork_server import Program
from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS
from gossamer.real.train import checkpoint_files as checkpoint
from gossamer.real.train.batches import LeasedBatches
from gossamer.real.train.checkpoint import Every, SynchronousTimer
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.resume import resume
from gossamer.real.train.train import check
from gossamer.real.transports.local import LocalStore
from gossamer.tasks.split import Order
from launching import wait_until
from tiers import wide

MOMENTUM = {"epochs": 0.6, "evaluations": 1, "optimiser": "sgd:momentum=0.9"}
COSINE = {**MOMENTUM, "schedule": "cosine"}
SYNCHRONOUS = [
    Case("all_reduce", choices=COSINE),
    Case("d_psgd", choices=COSINE),
    Case("local_sgd:period=7", choices=COSINE),
    Case("sync_server", choices=COSINE),
    Case("push_sum", workers=3, choices=MOMENTUM),
    Case("diloco:period=5+topk:share=0.1,bits=2", choices=COSINE),  # residuals are kept
    Case("all_reduce:stages=2", choices=COSINE),
]
MORE_SYNCHRONOUS = [
    Case("all_reduce:stale=1", choices=COSINE),
    Case("d_psgd:adapt=before", workers=3, choices=MOMENTUM),
    Case("local_sgd:period=4,switch=0.5,state=averaged", choices=COSINE),
    *(Case(f"{name}:period=4", choices=COSINE) for name in ("diloco", "bmuf", "slowmo")),
    Case("sync_server:servers=2", choices=COSINE),
    Case("all_reduce+topk:share=0.1", choices=COSINE),
    Case("all_reduce+powersgd", choices=COSINE),
    Case("sync_server+onebit", choices=COSINE),
    Case("d_psgd@0.5@all_reduce+dgc", choices=COSINE),
    Case("ssp:bound=0", choices=MOMENTUM),
    Case("bounded_delay:bound=0", choices=MOMENTUM),
    Case("d_psgd:stages=2,pipeline=gpipe", workers=4, choices=COSINE),
    Case("all_reduce", choices={**MOMENTUM, "optimiser": "adam", "split": "sharded"}),
]
ASYNCHRONOUS = ["ad_psgd", "pull_gossip", "downpour", "ssp", "easgd", "eamsgd"]


def check_resumed(case: Case, told: Told) -> None:
    # Where a server's host is first to go, the other worker may see that and give up.
    assert any(end < 0 for end in told.killed), (case, told)
    assert told.step > 0
    assert told.ends == [0] * case.workers, (case, told.written)


def check_same_bits(cases: list[Case]) -> None:
    for case, told in zip(cases, run_cases(cases), strict=True):
        check_resumed(case, told)
        for key in ("parameters_digest", "samples", "steps_by_worker", "loss"):
            assert told.resumed[key] == told.whole[key], (case.method, key)
        assert len(told.kept) == 2, told.kept


def test_a_synchronous_run_killed_whole_and_resumed_ends_with_the_same_bits() -> None:
    """Parameters, momentum, memory, weights, servers, batches and schedule go on at one step."""
    check_same_bits(SYNCHRONOUS)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_SYNCHRONOUS, ids=lambda case: case.method)
def test_the_other_synchronous_forms_end_with_the_same_bits(case: Case) -> None:
    """What is on the way between two steps is sent again; servers catch up before the cut."""
    check_same_bits([case])


def test_an_asynchronous_run_killed_whole_and_resumed_learns_all_its_samples() -> None:
    """Every sample of the budget is processed once, though workers cut at different moments."""
    cases = [
        Case(
            method,
            # Late enough for the slower worker to have made its part of a checkpoint.
            dies_at=150,
            every="20steps",
            is_compared=False,
            choices={"epochs": 6.0, "evaluations": 1, "learning_rate": 0.05},
        )
        for method in ASYNCHRONOUS
    ]
    for case, told in zip(cases, run_cases(cases), strict=True):
        check_resumed(case, told)
        assert told.resumed["samples"] == 16 * -(-6 * 1437 // 16), case.method
        assert told.resumed["accuracy"] > 0.85, (case.method, told.resumed["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_registry_can_be_resumed(name: str) -> None:
    """A method goes on from its replica, its memory and the number of a step; nobody waits for
    what the killed run had sent."""
    short = {"epochs": 0.5, "evaluations": 1}
    case = Case(name, dies_at=12, every="5steps", choices=short, is_compared=False)
    (told,) = run_cases([case])
    check_resumed(case, told)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd", "sync_server"])
def test_a_finished_run_can_be_made_longer(method: str) -> None:
    """The checkpoint at the end is where more epochs begin."""
    short = {"epochs": 0.5, "evaluations": 1}
    case = Case(method, dies_at=None, choices=short, grown={"epochs": 1.0}, is_compared=False)
    (told,) = run_cases([case])
    assert told.killed == told.ends == [0, 0], told.written
    assert told.resumed["samples"] >= 1437


# ---------------------------------------------------------------------- the files


def written(folder: Path, step: int, ranks: range = range(2)) -> Path:
    place = folder / str(step)
    for rank in ranks:
        checkpoint.write(place, rank, {"value": torch.arange(4.0) + rank}, {"servers": []})
    return place


def test_a_checkpoint_is_valid_only_when_all_living_workers_and_all_servers_are_in(
    tmp_path: Path,
) -> None:
    """Whoever writes last makes it valid; before that nobody goes on from it."""
    place = written(tmp_path, 5, range(1))
    assert not checkpoint.complete(place, {0, 1}, [], 2)
    assert not checkpoint.complete(place, {0}, [2], 2), "the server of the dead worker is missing"
    assert checkpoint.newest(tmp_path, lambda sentence: None) is None
    assert checkpoint.complete(place, {0}, [], 2), "worker 1 has died"
    found = checkpoint.read(place)
    assert (found.step, found.size, list(found.facts)) == (5, 2, [0])
    assert torch.equal(found.tensors_of(1)["value"], torch.arange(4.0)), "it starts as worker 0 is"


def test_the_two_newest_valid_checkpoints_are_kept(tmp_path: Path) -> None:
    """Unfinished ones count for nothing; newer ones may still be on their way, older ones not."""
    written(tmp_path, 1, range(1))
    checkpoint.prune(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    for step in (3, 20, 100):
        assert checkpoint.complete(written(tmp_path, step), {0, 1}, [], 2)
    for step in (10, 50, 200):
        written(tmp_path, step, range(1))
    checkpoint.prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"20", "100", "200"}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["1.safetensors", "0.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut_short, flip, Path.unlink])
def test_a_damaged_checkpoint_is_skipped_with_a_notice(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """The one before it is taken instead."""
    for step in (3, 20):
        checkpoint.complete(written(tmp_path, step), {0, 1}, [], 2)
    damage(tmp_path / "20" / name)
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 3
    assert len(said) == 1
    assert "20" in said[0]


# ---------------------------------------------------------------------- when, and what is left


@pytest.mark.parametrize("text", ["", "30", "s", "0s", "1.5steps", "-3s", "3 minutes", "nan s"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="30s"):
        Every.parse(text)


def test_workers_in_step_agree_on_the_steps_of_timed_checkpoints() -> None:
    """Their clocks differ; whoever comes first decides for all."""
    store = LocalStore()
    timers = [SynchronousTimer(Every(seconds, False), store, 0) for seconds in (1e-9, 1e9)]
    chosen = [[step for step in range(1, 50) if timer.due(step) is not None] for timer in timers]
    assert chosen[0] == chosen[1] == list(range(1, 50))


def test_batches_between_the_cuts_of_two_workers_are_processed_after_a_resume() -> None:
    """One lease was taken after its worker's cut and before the other's: nobody has it."""

    def leases(store: LocalStore, rank: int) -> LeasedBatches:
        return LeasedBatches(40, 1, 40, store, Order(40, 0, 1), rank, 2)

    def make_a_step(pace: LeasedBatches) -> int | None:
        if not pace.open_step(0):
            return None
        return int(pace.next_batch()[0])

    before = LocalStore()
    early, late = leases(before, 0), leases(before, 1)
    done = [make_a_step(early) for _ in range(3)]
    states = [early.state()]
    for _ in range(5):
        make_a_step(early)
    done += [make_a_step(late) for _ in range(6)]
    states.append(json.loads(json.dumps(late.state())))
    after = LocalStore()
    resumed = [leases(after, rank) for rank in range(2)]
    for pace, state in zip(resumed, states, strict=True):
        pace.resume(state, states)
    while (batches := [make_a_step(pace) for pace in resumed]) != [None, None]:
        done += [batch for batch in batches if batch is not None]
    assert sorted(done) == list(range(40))


def test_checkpoints_without_a_place_or_of_a_recorded_run_are_refused(tmp_path: Path) -> None:
    settings = make_settings("digits-mlp", "d_psgd", Cluster(workers=2))
    with pytest.raises(ConfigurationError, match="run folder"):
        check(TrainRequest(settings, checkpoint_every="30s"))
    with pytest.raises(ConfigurationError, match="recorded"):
        check(TrainRequest(settings, tmp_path, is_recorded=True, checkpoint_every="30s"))


# ---------------------------------------------------------------------- the command


def train_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gossamer", "train", *arguments]


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = Program(
        train_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def kill_everything_at_a_checkpoint(process: subprocess.Popen[str], runs: Path) -> Path:
    """The launcher and its workers, by their ids, as soon as a checkpoint is whole."""
    whole = "*/checkpoint/*/manifest.json"
    wait_until(lambda: process.poll() is not None or any(runs.glob(whole)))
    assert process.poll() is None, "it ended before it wrote a checkpoint"
    workers = children_of(process.pid)
    for pid in (*workers, process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    (folder,) = runs.iterdir()
    return folder


@wide
def test_the_command_goes_on_after_kill_9_of_launcher_and_workers(tmp_path: Path) -> None:
    """Same bits as never killed, which are the simulator's, and one history."""
    common = ("--method", "local_sgd", "--epochs", "2", "--evaluations", "1", "-n", "2")
    process = subprocess.Popen(
        train_command(*common, "--checkpoint-every", "20steps", "--slow", "0=4", "--runs",
                 str(tmp_path)),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with process:
        try:
            folder = kill_everything_at_a_checkpoint(process, tmp_path)
        finally:
            process.kill()
    resumed = run_to_end("--resume", str(folder), "--json")
    assert resumed.returncode == 0, resumed.stderr
    digest = json.loads(resumed.stdout.splitlines()[-1])["parameters_digest"]
    whole = simulate("digits-mlp", "local_sgd", Cluster(workers=2), engine="loop", epochs=2)
    assert digest == whole.summary["parameters_digest"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epochs"] for row in rows] == sorted(row["epochs"] for row in rows)


def request_of(
    folder: Path, method: str = "d_psgd", workers: int = 2, **choices: Any
) -> TrainRequest:
    return TrainRequest(
        make_settings("digits-mlp", method, Cluster(workers=workers), **choices), folder
    )


def run_folder(folder: Path) -> TrainRequest:
    """The folder of a killed run with one checkpoint, as far as the launcher reads it."""
    job = request_of(folder)
    (folder / "job.json").write_text(job.to_json())
    for rank in range(2):
        # Asynchronous workers are cut at different moments.
        facts = {"servers": [], "epoch": 0.5 + rank, "replicas": {"worker": {"weight": 0.75}}}
        checkpoint.write(folder / "checkpoint" / "7", rank, {"value": torch.zeros(1)}, facts)
    checkpoint.complete(folder / "checkpoint" / "7", {0, 1}, [], 2)
    return job


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [({"learning_rate": 0.7}, "--lr was"), ({"method": "all_reduce"}, "--method was"),
     ({"epochs": 0.01}, "may only grow")],
)  # fmt: skip
def test_a_run_that_would_be_another_one_is_not_resumed(
    tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    """Only epochs and samples may grow."""
    run_folder(tmp_path)
    with pytest.raises(ConfigurationError, match=sentence):
        resume(request_of(tmp_path, **changed))
    assert resume(request_of(tmp_path, epochs=10**3)).checkpoint.step == 7


def test_a_run_that_is_not_resumed_stays_as_it_was(tmp_path: Path) -> None:
    """Also one that was killed, which has no summary: its settings are those it began with."""
    run_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"command_line": "gossamer train"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = gossamer("train", "--resume", str(tmp_path), "--lr", "0.7")
    assert said.status == 2
    assert "--lr was" in said.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_resuming_reports_lost_weight_and_cuts_off_what_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, diaries and half checkpoints behind the cut are made again; rows count from the cut of
    worker 0, which makes them."""
    job = run_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"epochs": 0.5}\n{"epochs": 0.6}\n{"epo')
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "0.jsonl").write_text("{}")
    written(tmp_path / "checkpoint", 9, range(1))
    found = resume(job)
    assert found.history == [{"epochs": 0.5}]
    assert "0.5 were on the way" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["7"]
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_run_without_a_checkpoint_is_refused_with_one_sentence(tmp_path: Path) -> None:
    for prepared in ("", "job.json", "checkpoint"):
        if prepared == "job.json":
            (tmp_path / prepared).write_text(run_folder(tmp_path).to_json())
            (tmp_path / "checkpoint" / "7" / "manifest.json").unlink()
        elif prepared:
            shutil.rmtree(tmp_path / prepared)
        ran = gossamer("train", "--resume", str(tmp_path))
        assert ran.status == 2, ran
        assert len(ran.err.strip().splitlines()) == 1, ran
