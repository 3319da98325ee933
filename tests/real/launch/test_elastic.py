"""Elastic runs: workers come, the dead come back, and others are attached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import gossamer
from fork_server import Program
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.real.join.elastic.newcomer import check_elastic
from gossamer.real.launch.elastic import Elastic, Revivals
from launching import free_port
from tiers import only

LOOP = Path(__file__).parents[2] / "programs" / "elastic_loop.py"
SECRET = "0123456789abcdef" * 2
VICTIMS = [
    (transport, method, victim)
    for transport in ("shm", "torch")
    for method in ("ad_psgd", "pull_gossip", "push_gossip", "easgd", "ssp:bound=4", "downpour")
    for victim in range(3)
    if victim or method.endswith(("psgd", "gossip"))  # the process of worker 0 has the server
]


def elastic(*arguments: str, **variables: str) -> Program:
    return Program(
        [sys.executable, "-m", "gossamer", "run", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GOSSAMER_SECRET": SECRET, **variables},
    )  # fmt: skip


def told(program: Program) -> tuple[list[dict[str, Any]], str]:
    """What each worker says of itself in the end, in order of rank, and what the launcher says."""
    out, errors = program.communicate(timeout=200)
    assert program.returncode == 0, errors
    lines = [line.partition("] ")[2] for line in out.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return sorted(found, key=lambda one: one["rank"]), errors


@pytest.mark.parametrize(
    ("transport", "method", "victim"),
    only([("shm", "ad_psgd", 1), ("torch", "ssp:bound=4", 2)], VICTIMS),
)
def test_a_worker_that_dies_comes_back_with_the_model_of_the_others(
    transport: str, method: str, victim: int
) -> None:
    """The others go on meanwhile, hear of both, and all end with one model."""
    found, errors = told(
        elastic("--transport", transport, "--elastic", "1:3", "-n", "3", str(LOOP), method,
                str(victim))
    )  # fmt: skip
    assert f"worker {victim} was killed by SIGKILL" in errors
    lives = [one["life"] for one in found]
    assert lives == [int(rank == victim) for rank in range(3)], errors
    assert all(one["in_time"] for one in found)
    assert len({one["digest"] for one in found}) == 1
    back, others = found[victim], [one for one in found if one["rank"] != victim]
    assert back["first"] < 0.9 * others[0]["first"]  # not the model that its script makes
    assert all(one["events"] == [[victim, False], [victim, True]] for one in others)


@pytest.mark.parametrize("transport", only(["shm"], ["shm", "torch"]))
def test_who_comes_back_when_the_others_have_ended_ends_too(transport: str) -> None:
    """It waits for nobody, and the run has succeeded."""
    found, errors = told(
        elastic("--transport", transport, "--elastic", "1:3", "-n", "3", str(LOOP), "ad_psgd", "1",
                "ends")
    )  # fmt: skip
    assert [one["rank"] for one in found] == [0, 2]
    assert "was killed by SIGKILL" in errors
    assert "comes back" not in errors or "the others had made their last steps" in errors


def test_workers_of_another_launcher_are_attached_and_leave_again() -> None:
    """They know the address and the secret, and take the method from the run."""
    address = f"127.0.0.1:{free_port()}"
    first = elastic(
        "--elastic", "1:4", "-n", "2", "--rendezvous", address, "--method", "ad_psgd", str(LOOP),
        "ad_psgd", "nobody", "2", "3",
    )  # fmt: skip
    second = elastic("--attach", address, "-n", "2", str(LOOP), "ad_psgd", "nobody", "2", "3")
    with first, second:
        found, errors = told(first)
        attached, _ = told(second)
    assert [one["rank"] for one in attached] == [2, 3]
    assert all(one["in_time"] for one in (*found, *attached))
    assert len({one["digest"] for one in (*found, *attached)}) == 1
    assert "workers 2,3 have been attached" in errors


REFUSED = {
    "--elastic 2": "--elastic must be LEAST:MOST workers such as 2:8, got '2'",
    "--elastic 4:2": "the smaller number first, got '4:2'",
    "--elastic 1:2 -n 3": "--elastic 1:2 has no place for -n 3 workers",
    "--return 1@2s": "--return needs a run to which workers may come; give it --elastic too",
    "--arrive 1@2s": "--arrive needs a run to which workers may come",
    "--elastic 1:3 --return 1@2s": "worker 1 is alive then",
    "--elastic 1:3 --method local_sgd": "its workers step together",
    "--elastic 2:4 --method ad_psgd:groups=2": "its groups are made of the workers of the",
    "--attach nowhere": "--attach must be HOST:PORT",
    "--attach 127.0.0.1:1 --method ad_psgd": "takes --method from the run",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_an_elastic_run_cannot_be_is_one_sentence(arguments: str) -> None:
    said = gossamer("run", *arguments.split(), "echo")
    assert said.status == 2
    assert REFUSED[arguments] in " ".join(said.err.split())


def test_pauses_double_while_lives_stay_short_and_then_a_worker_stays_away() -> None:
    """What fails at once will fail again; a life that lasted is a new beginning."""
    revivals = Revivals(least=1)
    assert [revivals.ended(3, lived_s=1.0) for _ in range(5)] == [True] * 4 + [False]
    assert revivals.ended(3, lived_s=100.0)
    assert revivals.ranks == {3}
    assert revivals.take() == []


def test_an_elastic_run_has_a_least_and_a_most() -> None:
    assert Elastic.parse("2:8") == Elastic(2, 8)
    with pytest.raises(ConfigurationError):
        Elastic.parse("0:8")


def test_replicas_of_several_processes_are_no_elastic_run() -> None:
    """A worker that comes is one process, and would be a part of a replica."""
    session: Any = SimpleNamespace(spec=parse_method("ad_psgd"), options={}, processes=2)
    with pytest.raises(ConfigurationError, match="replicas of 2 processes cannot"):
        check_elastic(session)
