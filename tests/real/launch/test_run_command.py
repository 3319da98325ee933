"""`gossamer run` and `gossamer doctor` as a user meets them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from command_line import Said, gossamer
from gossamer.commands import doctor
from gossamer.real.transports.shm import system
from launching import pids, script


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command must not leave a folder in the repository."""
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "pass")


def ran(*arguments: str) -> Said:
    """`gossamer run` with a transport that needs nothing of the worker."""
    said = gossamer("run", "--transport", "torch", *arguments)
    assert pids(Path.cwd()) == []
    return said


REFUSED = {
    "nope.py": "the script 'nope.py' does not exist",
    ".": "'.' is neither a Python script nor a program that can be started",
    "no-such-program": "'no-such-program' is neither a Python script nor a program",
    "-m nosuch.module": "there is no module 'nosuch.module' here",
    "-n 0 worker.py": "-n must be at least 1, got 0",
    "-n -3 worker.py": "-n must be at least 1, got -3",
    "-n two worker.py": "invalid value for '-n'",
    "": "missing argument 'SCRIPT'",
    "--method ad_psdg worker.py": "unknown method 'ad_psdg'; did you mean 'ad_psgd'?",
    "-n 2 --method sync_server:backups=2 worker.py": "backups must be fewer than the workers",
    "-n 4 --method ad_psgd:groups=3 worker.py": "groups must divide the number of workers, got",
    "-n 3 --method ad_psgd:topology=bipartite_ring worker.py": "bipartite_ring",
    "--transport tcp worker.py": "unknown transport 'tcp'; did you mean 'torch'?",
    "--transport mpi worker.py": "run `mpirun -n 2 python SCRIPT` instead of `gossamer run`",
    "--output fodler worker.py": "unknown output 'fodler'; did you mean 'folder'?",
    "--nnodes 0 worker.py": "--nnodes must be at least 1, got 0",
    "--nnodes 2 worker.py": "--nnodes 2 needs --rendezvous HOST:PORT",
    "--nnodes 2 --rendezvous here worker.py": "--rendezvous must be HOST:PORT such as",
    "--nnodes 2 --rendezvous here:0 worker.py": "--rendezvous must be HOST:PORT such as",
    "--node-rank 1 worker.py": "--node-rank must lie between 0 and 0",
    "--rendezvous 192.0.2.1:4000 worker.py": "node 0 cannot listen on 192.0.2.1:4000",
    "--patience 0 worker.py": "--patience must be above 0 seconds",
    "--nnodes 2 --rendezvous h:1 --transport shm worker.py": "joins workers of one host, got 2",
    "--slow 0=0.5 worker.py": "a real worker cannot compute faster than it does",
    "--slow 0=4@1s+2s worker.py": "a real worker is slow from the start to the end",
    "--slow 2=4 worker.py": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--kill 2@1s worker.py": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--kill 0 worker.py": "--kill cannot read '0'; write it as 3@2.5s",
    "--pause 0@1s worker.py": "--pause cannot read '0@1s'",
    "--deadline 0 worker.py": "--deadline must be above 0 seconds, got 0",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_one_sentence_and_starts_nothing(arguments: str, tmp_path: Path) -> None:
    said = gossamer("run", *arguments.split())
    assert said.status == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert REFUSED[arguments] in said.err
    assert [file.name for file in tmp_path.iterdir()] == ["worker.py"]


def test_what_follows_the_script_belongs_to_the_script(tmp_path: Path) -> None:
    """Also what looks like an option of ours; the method travels as it was parsed."""
    script(tmp_path, "print(os.environ['GOSSAMER_METHOD'], sys.argv[1:])")
    said = ran("-n", "1", "--method", "easgd:period=10", "worker.py", "-n", "3", "--", "--method")
    assert said.status == 0, said.err
    assert said.out == "[0] easgd:period=10 ['-n', '3', '--', '--method']\n"


def test_a_module_and_a_program_run_as_well() -> None:
    program = ran("-n", "1", "echo", "-n", "hello")
    assert (program.status, program.out) == (0, "[0] hello\n")
    module = ran("-n", "1", "-m", "json.tool", "--help")
    assert module.status == 0
    assert "[0] usage: python -m json.tool" in module.out


def test_a_folder_keeps_what_the_workers_print(tmp_path: Path) -> None:
    """And the workers know of it."""
    script(tmp_path, "print(os.environ['GOSSAMER_RUN'])")
    said = ran("--output", "folder", "worker.py")
    assert (said.status, said.out) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-run-worker")
    assert f"kept in runs/{folder.name}" in said.err
    assert (folder / "worker-1.out").read_text() == f"{folder.resolve()}\n"


def test_the_exit_code_reaches_the_shell(tmp_path: Path) -> None:
    script(tmp_path, "sys.exit(7 * rank)")
    said = ran("worker.py")
    assert said.status == 7
    # Where nothing was said, nothing is announced.
    assert said.err.rstrip().endswith("without a word")


def test_the_help_explains_the_exit_codes_and_fits_a_terminal() -> None:
    for command in ("run", "doctor"):
        said = gossamer(command, "--help")
        assert said.status == 0
        assert max(map(len, said.out.splitlines())) <= 80
    text = re.sub(r"\s+", " ", gossamer("run", "--help").out)
    assert re.search(r"gossamer run \[OPTIONS\] \{?SCRIPT\}? \[ARGUMENTS\]\.\.\.", text)
    assert "3 after the deadline" in text
    assert "gossamer run -n 4 --method ad_psgd train.py --epochs 3" in text


# ---------------------------------------------------------------------- doctor


def test_doctor_says_of_every_part_whether_it_works() -> None:
    """On the console and as JSON."""
    said = gossamer("doctor", "--json")
    assert said.status == 0, said.err
    findings = {finding["part"]: finding for finding in said.json["findings"]}
    assert set(findings) == {
        "this process", "shm", "torch", "NCCL", "MPS", "mpi", "mpirun", "torchrun",
        "srun", "cache",
    }  # fmt: skip
    assert findings["torch"]["works"]
    assert all(finding["why"] for finding in findings.values())
    assert all(finding["advice"] for finding in findings.values() if not finding["works"])
    assert all(part in said.err for part in findings)


def test_doctor_knows_whether_workers_take_turns_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finding = doctor._mps()
    assert not finding.works
    assert "take turns" in finding.why
    assert "nvidia-cuda-mps-control -d" in finding.advice
    (tmp_path / "control").touch()
    assert doctor._mps().works
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in doctor._mps().why


@pytest.mark.parametrize(("load", "works"), [(15.0, None), (0.1, False)])
def test_doctor_does_not_call_a_busy_machine_broken(
    load: float, works: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is late where more wants to run than there are cores is slow, perhaps not broken."""
    late = doctor._Said(1, "\nnot finished after 30 s", is_late=True)
    monkeypatch.setattr(doctor, "_ran", lambda command: late)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    finding = doctor._try("shm", ["true"])
    assert finding.works is works
    assert finding.why.startswith("not finished after 30 s")
    assert ("quiet" in finding.advice) == (works is None)


def test_doctor_survives_whatever_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken variables, a program that fails, a look that raises."""

    def broken() -> doctor.Finding:
        raise RuntimeError("no [such] library")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(
        doctor,
        "_PARTS",
        {"this process": doctor._launched, "broken": broken},
    )
    said = gossamer("doctor", "--json")
    assert said.status == 0
    launched, failed = said.json["findings"]
    assert "RANK is set but WORLD_SIZE" in launched["why"]
    assert failed["why"] == "looking at it failed: RuntimeError: no [such] library"
    assert "no [such] library" in said.err


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
def test_doctor_asks_for_the_futex_as_the_transport_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses it is reported; a machine whose number is not known needs none."""
    monkeypatch.setattr(system, "_FUTEX", 1_000_000)
    assert doctor._shm().why == "the system refuses futex"
    monkeypatch.setattr(system, "_FUTEX", None)
    assert doctor._shm().works


def test_doctor_reports_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the error that it ended with, and the command to see the rest."""
    works = doctor.Finding("torch", True, "it is there")
    failing = [sys.executable, "-S", "-c", "print('noise'); raise ValueError('no card')"]
    monkeypatch.setattr(doctor, "_PARTS", {"torch": lambda: works})
    monkeypatch.setattr(
        doctor, "_trials", lambda: {"torch": ("torch", failing), "shm": ("shm", failing)}
    )
    findings = gossamer("doctor", "--try", "--json").json["findings"]
    assert [finding["part"] for finding in findings] == ["torch", "try torch"]
    assert findings[1]["works"] is False
    assert findings[1]["why"] == "ValueError: no card"
    assert json.dumps(failing[-1])[1:-1] in json.dumps(findings[1]["advice"])
