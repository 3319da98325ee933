"""Jobs that another launcher has started: one run folder, checkpoints of all, and resuming."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import gossamer
from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.real.train import other_launcher as outer
from gossamer.real.train.other_launcher import JobPeers, Refused
from gossamer.real.train.request import TrainRequest
from gossamer.real.transports.local import LocalStore
from launching import free_port, wait_until
from outer_groups import Case, run_cases, run_script
from real_mpi import (
    end_session,
    finish,
    last_json,
    needs_mpirun,
    session_of,
    start,
    under_mpirun,
    under_torchrun,
)
from tiers import wide


def digest_without_interruption(method: str, workers: int, epochs: float = 1.0) -> str:
    cluster = Cluster(workers=workers)
    ran = simulate("digits-mlp", method, cluster, engine="loop", epochs=epochs, evaluations=1)
    return ran.summary["parameters_digest"]


# ---------------------------------------------------------------------- killed whole, and resumed


def test_a_job_of_another_launcher_killed_whole_and_resumed_ends_with_the_same_bits() -> None:
    """As if nothing had been, with the versions of servers and with push-sum weights."""
    cases = [Case("sync_server:servers=2"), Case("push_sum:topology=star", workers=3)]
    served, weighted = run_cases(cases)
    for case, told in zip(cases, (served, weighted), strict=True):
        assert told.ends == [0] * case.workers, told.out
        digest = digest_without_interruption(case.method, case.workers)
        assert told.summary["parameters_digest"] == digest, case.method
        assert told.out[1:] == [""] * (case.workers - 1), "worker 0 speaks for all"
        assert told.left == []
    rounds = served.summary["steps"] // 2
    for rank, server in (("0", "2"), ("1", "3")):
        assert 0 < served.cut[rank][server]["version"] < served.final[rank][server]["version"]
        assert served.final[rank][server]["version"] == rounds
    weights = [weighted.cut[str(rank)]["worker"]["weight"] for rank in range(3)]
    assert sum(weights) == pytest.approx(3.0)
    assert weights[0] > 1.2 > 0.9 > weights[1], "the star's centre has more than its share"


@wide
def test_an_asynchronous_job_goes_on_and_so_does_another_number_of_workers() -> None:
    """Every sample of the budget is processed once; worker 0 says that the number is another."""
    cases = [Case("ad_psgd", epochs=4.0), Case("local_sgd", resumes_with=3)]
    resumed, grown = run_cases(cases)
    assert resumed.ends == [0, 0], resumed.out
    assert resumed.summary["samples"] == 16 * -(-4 * 1437 // 16)
    assert resumed.summary["accuracy"] > 0.85
    assert grown.ends == [0, 0, 0], grown.out
    assert "had 2 workers and goes on with 3, from their mean" in grown.out[0]


# ---------------------------------------------------------------------- a loop of one's own

PAGE = Path(__file__).resolve().parents[3] / "docs" / "your-loop.md"
EXACT = ["sync_server", "slowmo:period=7", "all_reduce", "push_sum:topology=star"]


@pytest.fixture
def resumable(tmp_path: Path) -> Path:
    """The script of the documentation as it stands there."""
    (text,) = re.findall(r"```python\n(# train.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(text)
    return script


def read_line(line: str) -> tuple[int, float, str]:
    """The epoch that it went on from, its accuracy, and the norm of its parameters."""
    found = re.search(r"^from epoch (\d): accuracy (\S+), norm (\S+)\n\Z", line, re.MULTILINE)
    assert found is not None, line
    return int(found[1]), float(found[2]), found[3]


def check_loops(script: Path, methods: list[str]) -> None:
    for method, told in zip(methods, run_script(script, methods), strict=True):
        whole, resumed, by_more = told
        begin, accuracy, norm = read_line(resumed)
        assert 2 <= begin < 6, method
        assert accuracy > 0.85, method
        if method in EXACT:
            assert norm == read_line(whole)[2], method
        begin, accuracy, _ = read_line(by_more)
        assert begin == 5, method
        assert accuracy > 0.85, method


def test_the_loop_of_the_documentation_goes_on_after_kill_9_of_all_workers(
    resumable: Path,
) -> None:
    """With the same bits, batches and servers included; with more workers it goes on, too."""
    check_loops(resumable, EXACT[:1])


@pytest.mark.slow
def test_the_loop_of_the_documentation_goes_on_with_other_methods(resumable: Path) -> None:
    """With the same bits where nothing depends on timing, and to its accuracy elsewhere."""
    check_loops(resumable, [*EXACT[1:], "ad_psgd", "downpour"])


# ---------------------------------------------------------------------- how they agree


def job_in(folder: Path, checkpoint_every: str | None) -> TrainRequest:
    folder.mkdir(exist_ok=True)
    settings = make_settings("digits-mlp", "d_psgd", Cluster(workers=2))
    return TrainRequest(settings, folder, checkpoint_every=checkpoint_every)


class OtherHost(LocalStore):
    """The same store, told of on a host on which the path of the folder leads elsewhere."""

    def __init__(self, store: LocalStore, here: Path, there: Path) -> None:
        self._store = store
        self._names = (str(here), str(there))
        self.agree, self.add = store.agree, store.add

    def get(self, key: str) -> str | None:
        told = self._store.get(key)
        return None if told is None else told.replace(*self._names)


def arrange(
    prepare: Callable[[], TrainRequest],
    own: Path,
    second: Callable[[LocalStore], LocalStore] = lambda s: s,
) -> list[Any]:
    """What two workers agree on: a job each, or the error of each."""
    store = LocalStore()
    agreed: list[Any] = [None, None]

    def take_part(rank: int) -> None:
        peers = JobPeers(second(store) if rank else store, rank, 2)
        try:
            agreed[rank] = peers.receive_job(own) if rank else peers.send_job(prepare)
        except (ConfigurationError, OSError) as error:
            agreed[rank] = error

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return agreed


def test_workers_share_the_folder_of_worker_0_only_where_checkpoints_need_it(
    tmp_path: Path,
) -> None:
    """Without checkpoints a host need not see the others' files."""
    run, own = tmp_path / "run", tmp_path / "own"
    zero, one = arrange(lambda: job_in(run, None), own)
    assert (zero.folder, one.folder) == (run, own)
    zero, one = arrange(lambda: job_in(run, "30s"), own)
    assert zero.to_json() == one.to_json() == job_in(run, "30s").to_json()
    assert list(run.iterdir()) == [], "no mark is left"


def test_a_folder_that_a_host_does_not_see_is_refused_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sentence that names the worker and its host."""
    monkeypatch.setattr(outer, "_FILES_S", 0.05)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    zero, one = arrange(
        lambda: job_in(run, "30s"), tmp_path, lambda store: OtherHost(store, run, elsewhere)
    )
    assert isinstance(one, Refused)
    assert str(zero) == str(one)
    assert str(one).startswith("worker 1 on ")
    assert "does not see" in str(one)
    assert list(run.iterdir()) == []


def test_what_worker_0_refuses_reaches_the_others(tmp_path: Path) -> None:
    """Nobody waits for a run that will not be."""

    def prepare() -> TrainRequest:
        raise ConfigurationError("the checkpoint is of another world")

    zero, one = arrange(prepare, tmp_path)
    assert isinstance(one, Refused)
    assert not isinstance(zero, Refused), "worker 0 says it"
    assert str(zero) == str(one) == "the checkpoint is of another world"


def test_what_gossamer_run_was_asked_for_is_not_contradicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are the job's: their number, their method and their faults are its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "GOSSAMER_RANK": "1", "GOSSAMER_SIZE": "2", "GOSSAMER_LOCAL_RANK": "1",
        "GOSSAMER_LOCAL_SIZE": "2", "GOSSAMER_STORE": "127.0.0.1:1", "GOSSAMER_METHOD": "easgd",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for arguments, sentence in {
        "-n 4": "gossamer run has started 2 workers, got -n 4; leave it out",
        "--method d_psgd": "the workers were started for easgd, got --method d_psgd",
        "--kill 1@1s": "gossamer run has started these; give them to it",
    }.items():
        said = gossamer("train", *arguments.split())
        assert said.status == 2
        assert sentence in said.err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the launchers themselves


def begin(command: list[str], runs: Path) -> tuple[subprocess.Popen[str], Path]:
    """Until it has a whole checkpoint; the run folder."""
    running = start([*command, "--runs", str(runs)])
    try:
        wait_until(lambda: any(runs.glob("*/checkpoint/*/manifest.json")))
    except BaseException:
        end_session(running.pid)
        running.communicate()
        raise
    (folder,) = runs.iterdir()
    return running, folder


def cli(*arguments: str) -> list[str]:
    return ["-m", "gossamer", "train", *arguments]


def variable(pid: int, name: str) -> str | None:
    try:
        listed = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return None
    return next((v.partition("=")[2] for v in listed if v.startswith(f"{name}=")), None)


def resumed_summary(command: list[str]) -> dict[str, Any]:
    status, out, err = finish(start(command))
    assert status == 0, err
    return last_json(out)


@pytest.mark.slow
def test_under_torchrun_a_run_goes_on_after_kill_9_of_everything(tmp_path: Path) -> None:
    """torchrun and its workers; the resumed run ends with the bits of an uninterrupted one."""
    first = cli("--method", "d_psgd", "--epochs", "3", "--checkpoint-every", "20steps")
    slow = ["--slow", "0=10", "--slow", "1=10"]
    running, folder = begin(under_torchrun(2, *first, *slow), tmp_path)
    end_session(running.pid)
    assert finish(running)[0] == -signal.SIGKILL
    summary = resumed_summary(under_torchrun(2, *cli("--resume", str(folder), "--json")))
    assert summary["parameters_digest"] == digest_without_interruption("d_psgd", 2, 3.0)


@pytest.mark.slow
@needs_mpirun
def test_mpi_aborts_when_a_rank_is_killed_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """What MPI cannot survive, the run does: it reaches its accuracy in a second job."""
    first = cli("--method", "ad_psgd", "--epochs", "8", "--checkpoint-every", "20steps")
    slow = [f"--slow={rank}=10" for rank in range(4)]
    running, folder = begin(under_mpirun(4, *first, *slow), tmp_path)
    victim = next(
        pid for pid in session_of(running.pid) if variable(pid, "OMPI_COMM_WORLD_RANK") == "2"
    )
    os.kill(victim, signal.SIGKILL)
    assert finish(running)[0] != 0
    assert not (folder / "summary.json").exists(), "it was to be killed in the middle"
    summary = resumed_summary(under_mpirun(4, *cli("--resume", str(folder), "--json")))
    assert summary["samples"] == 16 * -(-8 * 1437 // 16)
    assert summary["accuracy"] > 0.9
    assert json.loads((folder / "summary.json").read_text())["ended"] == "finished"


@pytest.mark.slow
def test_launchers_of_two_hosts_keep_one_run_and_resume_it(tmp_path: Path) -> None:
    """`gossamer run --nnodes 2` with `gossamer train` as the script; all are killed."""
    first = cli("--method", "local_sgd", "--epochs", "3", "--checkpoint-every", "20steps")
    slow = ["--slow", "0=10", "--slow", "1=10"]
    second, node0 = on_two_hosts(*first, *slow, "--runs", str(tmp_path))
    try:
        wait_until(lambda: any(tmp_path.glob("*/checkpoint/*/manifest.json")))
    finally:
        for running in (second, node0):
            # Workers, which have sessions of their own, do not outlive their launcher.
            running.kill()
            running.communicate()
    (folder,) = tmp_path.iterdir()
    second, node0 = on_two_hosts(*cli("--resume", str(folder), "--json"))
    ends = [finish(running) for running in (node0, second)]
    assert [status for status, _, _ in ends] == [0, 0], ends
    summary = json.loads(ends[0][1].strip().splitlines()[-1].removeprefix("[0] "))
    assert summary["parameters_digest"] == digest_without_interruption("local_sgd", 2, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "under", [under_torchrun, pytest.param(under_mpirun, marks=needs_mpirun)]
)  # fmt: skip
def test_the_loop_of_the_documentation_is_started_again_by_its_launcher(
    resumable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under: Callable[..., Any]
) -> None:
    """The second start goes on from the epoch of which all parts are there."""
    monkeypatch.chdir(tmp_path)
    command = under(2, str(resumable))
    whole = finish(start(command))
    assert whole[0] == 0, whole
    for file in (tmp_path / "checkpoints").glob("6/0-of-2.pt"):
        file.unlink()
    again = finish(start(command))
    assert again[0] == 0, again
    assert read_line(whole[1])[0] == 0
    assert read_line(again[1])[0] == 5
    assert read_line(again[1])[1:] == read_line(whole[1])[1:]


def on_two_hosts(*script: str) -> list[subprocess.Popen[str]]:
    meeting = ["-n", "1", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    launcher = [*under_torchrun(1)[:1], "-m", "gossamer", "run", *meeting]
    return [start([*launcher, "--node-rank", rank, *script]) for rank in ("1", "0")]
