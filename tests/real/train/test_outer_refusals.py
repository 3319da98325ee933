"""What keeps one worker of another launcher's job from going on reaches the others, or the user."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from test_outer_jobs import arrange, job_in

from command_line import gossamer
from gossamer.errors import PeerLost
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.train import other_launcher as outer
from gossamer.real.train import worker_main as part
from gossamer.real.train.other_launcher import JobPeers, Refused
from gossamer.real.train.request import TrainRequest
from gossamer.real.transports.local import LocalStore, LocalTransport
from gossamer.runs.folder import RunFolder


def test_a_disk_that_fails_worker_0_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    """Where the job is written, and where the folder is marked."""

    def prepare() -> TrainRequest:
        raise OSError(errno.ENOSPC, "No space left on device")

    def lose() -> TrainRequest:
        job = job_in(tmp_path / "run", "30s")
        (tmp_path / "run").rmdir()
        return job

    for preparing in (prepare, lose):
        zero, one = arrange(preparing, tmp_path)
        assert isinstance(zero, OSError)
        assert isinstance(one, Refused)
        assert str(zero) == str(one)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--live 0 --runs none", "--live shows what the run folder holds"),
        ("--live 99999", "--live must be a port"),
        ("--runs full", "No space left on device"),
    ],
)
def test_what_worker_0_refuses_before_the_run_is_told_to_all(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait to be told while it looks for a port and makes its folder."""

    def fail(folder: RunFolder, config: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = LocalStore()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outer, "_FAREWELL_S", 0.0)
    monkeypatch.setattr(outer, "meet", lambda name: (JobPeers(store, 0, 2), LocalTransport()))
    monkeypatch.setattr(RunFolder, "write_config", fail)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said = gossamer("train", *arguments.split())
    assert said.status == 2
    assert sentence in said.err
    assert sentence in str(store.get("peers/job"))


def test_another_worker_than_0_says_itself_why_it_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker 0 may be the one that died, and the folder of the others is temporary."""

    class Failing:
        def __init__(self, *parts: object) -> None:
            pass

        def run(self) -> None:
            raise PeerLost(0, "its process ended")

    store = LocalStore()
    JobPeers(store, 0, 2).send_job(lambda: job_in(tmp_path, None))
    monkeypatch.setattr(part, "Training", Failing)
    monkeypatch.setattr(
        outer, "meet", lambda name, faults: (JobPeers(store, 1, 2), LocalTransport())
    )
    assert outer.run_as_follower(None, FaultPlan(), None) == 1
    assert capsys.readouterr().err == f"gossamer: {PeerLost(0, 'its process ended')}\n"
