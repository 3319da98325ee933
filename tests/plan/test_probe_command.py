"""`gossamer probe` as a user meets it: refused, ended early, alone, and under other launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import gossamer
from fork_server import Program
from gossamer import simulate
from gossamer.commands.work.measurement import check_place, write
from gossamer.compression.coding_times import TIMED
from gossamer.config.cluster import load_cluster
from gossamer.errors import ConfigurationError
from real_mpi import finish, last_json, needs_mpirun, start, under_mpirun, under_torchrun
from tiers import wide

REFUSED = {
    "-n 0": "-n must be at least 1, got 0",
    "--task digits-mpl": "unknown task 'digits-mpl'; did you mean 'digits-mlp'?",
    "--transport tcp": "unknown transport 'tcp'; did you mean 'torch'?",
    "--transport mpi": "run `mpirun -n 2 gossamer probe`",
    "--slow 2=4": "a fault names worker 2, but the 2 workers are 0 to 1",
    "--slow 0=0.5": "a real worker cannot compute faster than it does",
    "--seconds 0": "--seconds must be from 1 to 3600, got 0",
    "--seconds nan": "--seconds must be a time such as 50us, 10ms, 90s, 5m or 1h, got 'nan'",
    "--batch 99999": "a batch of 99999 is larger than the 1437 samples",
    "--out there": "--out must end in .toml",
    "--out old.toml": "old.toml exists; give --force to replace it",
    "--out folder.toml --force": "--out folder.toml is a folder",
    "--out nowhere/cluster.toml": "No such file or directory; choose another place with --out",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_one_sentence_before_anything_is_measured(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, and nothing is written or replaced."""
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text("workers = 3\n")
    Path("folder.toml").mkdir()
    said = gossamer("probe", *arguments.split())
    assert said.status == 2
    assert REFUSED[arguments] in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.toml", "old.toml"]
    assert Path("old.toml").read_text() == "workers = 3\n"


def test_a_place_without_permission_is_named(tmp_path: Path) -> None:
    """By trying it: permissions mean nothing to root, a folder of the system does."""
    with pytest.raises(ConfigurationError, match=r"nothing can be written to /proc: .*--out"):
        check_place(Path("/proc/cluster.toml"), force=False)
    check_place(tmp_path / "cluster.toml", force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_and_replaced_only_when_asked(tmp_path: Path) -> None:
    """Somebody else's file that appeared meanwhile stays."""
    path = tmp_path / "cluster.toml"
    write(path, "workers = 2\n", force=False)
    with pytest.raises(ConfigurationError, match="was made by somebody else meanwhile"):
        write(path, "workers = 3\n", force=False)
    assert path.read_text() == "workers = 2\n"
    write(path, "workers = 4\n", force=True)
    assert path.read_text() == "workers = 4\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_launcher_around_a_worker_decides_how_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has started one."""
    monkeypatch.chdir(tmp_path)
    for size in (1, 2):
        for name, value in {
            "RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        said = gossamer("probe", "-n", "4")
        assert said.status == 2
        assert f"torchrun has started {size} workers, got -n 4; leave it out" in said.err


# ---------------------------------------------------------------------- measured


def test_a_slow_worker_is_found_and_the_simulator_knows_it(tmp_path: Path) -> None:
    """The injection of `gossamer train --slow`, seen from outside."""
    path = tmp_path / "cluster.toml"
    said = gossamer(
        "probe", "-n", "2", "--slow", "0=20", "--seconds", "3", "--out", str(path), "--json"
    )
    assert said.status == 0, said.err
    cluster = load_cluster(path)
    assert [(fault.kind, fault.worker) for fault in cluster.faults] == [("slow", 0)]
    assert 2 < cluster.faults[0].amount < 200
    assert (cluster.workers, cluster.workers_per_machine) == (2, 2)
    assert 0 < cluster.compute.seconds < 1
    assert cluster.network.memory_bandwidth > 1e6
    assert said.json["cluster"]["faults"] == [str(fault) for fault in cluster.faults]
    assert said.json["findings"]["transport"] == "shm"
    assert "steps of digits-mlp" in said.err
    run = simulate("digits-mlp", "ad_psgd", path, epochs=1, engine="none")
    assert run.virtual_seconds > 0
    simulated = gossamer("simulate", "--cluster", str(path), "--epochs", "0.2", "--runs", "none")
    assert simulated.status == 0, simulated.err


def test_one_worker_says_how_to_start_several(tmp_path: Path) -> None:
    """The part of the description that can be measured is written."""
    path = tmp_path / "cluster.toml"
    said = gossamer("probe", "-n", "1", "--seconds", "1", "--out", str(path))
    assert said.status == 0, said.err
    assert "there are no peers to measure links with" in said.err
    assert "gossamer probe -n 4" in said.err
    assert "# Not measured" in path.read_text()
    assert load_cluster(path).workers == 1


@wide
@needs_mpirun
def test_mpirun_starts_its_workers(tmp_path: Path) -> None:
    """Every process is one worker, and the first one writes."""
    path = tmp_path / "cluster.toml"
    arguments = ("-m", "gossamer", "probe", "--seconds", "2", "--out", str(path), "--json")
    status, out, err = finish(start(under_mpirun(2, *arguments)))
    assert status == 0, (out, err)
    assert last_json(out)["findings"]["transport"] == "mpi"
    assert load_cluster(path).workers == 2


@wide
def test_torchrun_starts_its_workers(tmp_path: Path) -> None:
    """The same under torchrun."""
    path = tmp_path / "cluster.toml"
    arguments = ("-m", "gossamer", "probe", "--seconds", "2", "--out", str(path), "--json")
    status, out, err = finish(start(under_torchrun(2, *arguments)))
    assert status == 0, (out, err)
    assert last_json(out)["findings"]["transport"] == "torch"
    assert load_cluster(path).workers == 2


# ---------------------------------------------------------------------- ended early


@contextmanager
def measuring(
    path: Path, *arguments: str, start: type[subprocess.Popen[str]] = subprocess.Popen
) -> Generator[subprocess.Popen[str]]:
    """A long probe in a process of its own, which has begun to measure."""
    command = [sys.executable, "-m", "gossamer", "probe", "--seconds", "60"]
    process = start(
        [*command, "-n", "2", "--out", str(path), *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "steps of" in line:
                break
        yield process
    finally:
        # Workers do not outlive their launcher.
        process.kill()
        process.communicate()


def test_an_interrupted_probe_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, a sentence, no file, not even half of one."""
    with measuring(tmp_path / "cluster.toml", start=Program) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "interrupted; nothing was written"
    assert list(tmp_path.iterdir()) == []


@wide
@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_a_worker_that_dies_ends_the_probe(tmp_path: Path, transport: str) -> None:
    """At once, with a sentence that names it, though a minute of measuring was ahead."""
    with measuring(tmp_path / "cluster.toml", "--transport", transport) as process:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in map(int, listed.split()):
            if b"GOSSAMER_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("the run ended: worker 1 is lost: it died while steps were measured")
    assert list(tmp_path.iterdir()) == []


@wide
def test_what_compressors_take_is_measured_and_charged(tmp_path: Path) -> None:
    """A time to encode and one to decode for every one of them, in a file that simulations read."""
    path = tmp_path / "here.toml"
    said = gossamer("probe", "-n", "1", "--seconds", "1", "--compression", "--out", str(path))
    assert said.status == 0, said.err
    known = load_cluster(path).compression
    assert known.keys() == set(TIMED)
    assert all(encode > 0 and decode > 0 for encode, decode in known.values())
    assert known["topk-global"][0] > known["bf16"][0]
