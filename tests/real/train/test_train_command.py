"""`gossamer train` as a user meets it: refused, ended early, and under other launchers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import gossamer
from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.errors import Late
from launching import wait_until
from real_mpi import (
    end_session,
    finish,
    needs_mpirun,
    session_of,
    start,
    under_mpirun,
    under_torchrun,
)
from tiers import only, wide

command = importlib.import_module("gossamer.commands.train")

REFUSED = {
    "--method ad_psdg": "unknown method 'ad_psdg'; did you mean 'ad_psgd'?",
    "--task digits-mpl": "unknown task 'digits-mpl'; did you mean 'digits-mlp'?",
    "--transport tcp": "unknown transport 'tcp'; did you mean 'torch'?",
    "--transport mpi": "run `mpirun -n 2 gossamer train ...`",
    "-n 0": "-n must be at least 1, got 0",
    "-n -3": "-n must be at least 1, got -3",
    "--slow 2=4": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--slow 0=0.5": "a real worker cannot compute faster than it does",
    "-n 3 --kill 3@1s": "a fault names worker 3, but the 3 workers are 0 to 2",
    "--pause 5@1s+1s": "a fault names worker 5, but the 2 workers are 0 to 1",
    "--deadline 0": "--deadline must be above 0 seconds, got 0",
    "--method all_reduce:groups=3 -n 4": "groups must divide the number of workers, got groups=3",
    "--method all_reduce:groups=2 --record": "outside of the recorded order; leave out groups=",
    "--method d_psgd:groups=2 --checkpoint-every 9s": "no steps of their own to cut at",
    "-n 2 --method sync_server:backups=2": "backups must be fewer than the workers",
    "--record --transport torch": "the order of events is kept on shared memory only",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_one_sentence_and_leaves_no_folder(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before anything is written or started."""
    monkeypatch.chdir(tmp_path)
    said = gossamer("train", *arguments.split())
    assert said.status == 2
    assert REFUSED[arguments] in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_around_a_worker_decides_how_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contradicting -n and faults that only our launcher can bring about are refused."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said = gossamer("train", "-n", "4")
    assert said.status == 2
    assert "torchrun has started 2 workers, got -n 4; leave it out" in said.err
    for fault in ("--kill 1@1s", "--pause 1@1s+1s", "--deadline 9"):
        said = gossamer("train", *fault.split())
        assert said.status == 2
        assert "need workers that gossamer train starts itself" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [Late("worker 1 did not say what it knows"), MemoryError()])
def test_a_run_that_fails_is_not_kept_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its summary, and so its report, says what has ended it."""

    def fail(*arguments: object, **choices: object) -> None:
        raise error

    monkeypatch.setattr(command, "launch", fail)
    with contextlib.suppress(MemoryError):
        said = gossamer("train", "--runs", str(tmp_path))
        assert (said.status, said.err.strip().splitlines()[-1]) == (1, f"the run ended: {error}")
    (folder,) = tmp_path.iterdir()
    assert read(folder / "summary.json")["ended"] == (str(error) or "MemoryError")


# ---------------------------------------------------------------------- interrupted


class Running:
    """A long training in a process of its own."""

    def __init__(self, runs: Path, *arguments: str) -> None:
        self.runs = runs
        command = [sys.executable, "-m", "gossamer", "train", "--epochs", "100000"]
        self.process = subprocess.Popen(
            [*command, "--runs", str(runs), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )  # fmt: skip

    def wait_for_a_row(self) -> None:
        wait_until(lambda: bool(list(self.runs.glob("*/metrics.jsonl"))))

    def workers(self) -> list[int]:
        """Its children, which have sessions of their own."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def finish(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=300)
        return self.process.returncode, err

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        # Workers do not outlive their launcher.
        self.process.kill()
        self.process.communicate()

    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("transport", "asked"),
    only(
        [("shm", signal.SIGINT)],
        [("shm", signal.SIGINT), ("torch", signal.SIGINT), ("shm", signal.SIGTERM)],
    ),
)
def test_an_interrupted_run_stays_readable_and_leaves_nobody(
    tmp_path: Path, transport: str, asked: signal.Signals
) -> None:
    """Ctrl-C: exit code 130, the folder with what was measured so far, no process left. SIGTERM,
    which schedulers send, does the same."""
    with Running(tmp_path, "-n", "2", "--transport", transport) as running:
        running.wait_for_a_row()
        workers = running.workers()
        running.process.send_signal(asked)
        status, err = running.finish()
    assert status == 128 + asked
    if asked == signal.SIGINT:
        assert err.strip().splitlines()[-1] == "interrupted"
    assert len(workers) >= 2
    assert all(is_gone(pid) for pid in workers)
    folder = running.folder()
    summary = read(folder / "summary.json")
    assert summary["ended"] == "interrupted"
    assert summary["samples"] > 0
    assert read(folder / "config.json")["command"] == "train"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 0
    assert not list(folder.glob(".explain-*"))


@wide
def test_signal_and_deadline_show_who_waits_for_what(tmp_path: Path) -> None:
    """On SIGUSR1 the run goes on; at the deadline it ends with 3 and says so in its summary."""
    with Running(tmp_path, "-n", "2", "--method", "d_psgd", "--deadline", "15") as running:
        running.wait_for_a_row()
        running.process.send_signal(signal.SIGUSR1)
        status, err = running.finish()
    assert status == 3
    assert err.count("Who waits for what") == 2
    assert "not finished within the deadline of 15 s" in err
    assert read(running.folder() / "summary.json")["ended"] == "deadline"


@wide
def test_the_death_of_a_server_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    """At once, with the folder readable."""
    with Running(tmp_path, "-n", "2", "--method", "downpour") as running:
        running.wait_for_a_row()
        os.kill(worker_zero(running), signal.SIGKILL)
        status, err = running.finish()
    assert status == 1
    assert err.strip().splitlines()[-1] == (
        "the run ended: server 0 is lost with the process of worker 0, which kept it; no method "
        "goes on without its server"
    )
    assert "Traceback" not in err
    summary = read(running.folder() / "summary.json")
    assert summary["ended"] == "failed"
    assert summary["failure"].startswith("server 0 is lost")


@wide
@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd"])
def test_a_worker_that_leaves_by_an_error_is_not_waited_for(tmp_path: Path, method: str) -> None:
    """Whatever it is, here a Ctrl-C for it alone: to the others it has died."""
    long = ("-n", "2", "--method", method, "--epochs", "40", "--deadline", "50")
    with Running(tmp_path, *long, "--transport", "shm") as running:
        running.wait_for_a_row()
        os.kill(worker(running, 1), signal.SIGINT)
        status, err = running.finish()
    assert "worker 1 ended with exit code 130" in err
    assert "the others go on" in err
    assert "deadline" not in err
    assert status == 130, err
    summary = read(running.folder() / "summary.json")
    assert summary["epochs"] == pytest.approx(40, abs=0.1)
    assert summary["accuracy"] > 0.9


def worker_zero(running: Running) -> int:
    return worker(running, 0)


def worker(running: Running, rank: int) -> int:
    own = f"GOSSAMER_RANK={rank}".encode()
    for pid in running.workers():
        if own in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"worker {rank} is not there")


# ---------------------------------------------------------------------- other launchers


def check_as_one_job(command: list[str], runs: Path) -> None:
    """Worker 0 speaks for all, and what it says is complete and what the simulator says."""
    running = start([*command, "--runs", str(runs)])
    status, out, err = finish(running)
    assert status == 0, err
    assert err.count("real workers") == 1
    assert err.count("kept in") == 1
    summary = json.loads(out)
    expected = simulate("digits-mlp", "d_psgd", Cluster(workers=2), engine="loop", epochs=1)
    assert summary["parameters_digest"] == expected.summary["parameters_digest"]
    assert summary["ended"] == "finished"
    assert summary["living"] == summary["workers"] == 2
    assert set(summary["steps_by_worker"]) == {"0", "1"}
    assert summary["steps"] == sum(summary["steps_by_worker"].values())
    (folder,) = runs.iterdir()
    assert read(folder / "summary.json")["samples"] == summary["samples"] >= 1437
    assert (folder / "metrics.jsonl").read_text().count("\n") >= 2
    assert session_of(running.pid) == []


TRAIN = ["-m", "gossamer", "train", "--method", "d_psgd", "--epochs", "1", "--json"]


def test_under_torchrun_each_process_is_a_worker(tmp_path: Path) -> None:
    """Only worker 0 prints and keeps a folder."""
    check_as_one_job(under_torchrun(2, *TRAIN), tmp_path)


@wide
@needs_mpirun
def test_under_mpirun_each_process_is_a_worker(tmp_path: Path) -> None:
    """The same over MPI."""
    check_as_one_job(under_mpirun(2, *TRAIN), tmp_path)


SCRIPT = """
import gossamer, json, sys
result = gossamer.train("digits-mlp", "push_gossip", epochs=1)
found = [result.summary["workers"], sorted(result.steps_by_worker), result.accuracy is not None]
# In one write: the two processes share their output.
sys.stdout.write(json.dumps([*found, result.parameters is not None]) + "\\n")
"""


@wide
def test_a_program_under_torchrun_gets_a_summary_in_every_process(tmp_path: Path) -> None:
    """`gossamer.train` is the same door; worker 0 has the parameters."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    running = start(under_torchrun(2, str(script)))
    try:
        status, out, err = finish(running)
    finally:
        end_session(running.pid)
    assert status == 0, err
    said = sorted(json.loads(line) for line in out.splitlines())
    assert said == [[2, ["0", "1"], True, False], [2, ["0", "1"], True, True]]
