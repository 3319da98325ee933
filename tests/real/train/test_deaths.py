"""Workers of `gossamer train` die by SIGKILL, any of them, and the others go on.

The pause of the survivors is measured inside of them, as the longest time between two steps.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from gossamer.methods import METHODS
from launching import wait_until
from real_mpi import end_session, finish, needs_mpirun, session_of, start, under_mpirun
from tiers import every, only, wide
from train_groups import Group, Ran, run_groups

DATA = 1437
EPOCHS = 5
BATCH = 16
WORKERS = 4
PAUSE_S = 5.0
METHODS_THAT_GO_ON = ("pull_gossip", "ad_psgd", "push_gossip", "local_sgd", "d_psgd", "all_reduce")
# Long and gentle enough for the accuracy to say something about deaths only.
CHOICES = {"epochs": EPOCHS, "evaluations": 1, "batch": BATCH, "learning_rate": 0.06}
# On a busy machine one of four may do nearly all of the work while the others wait for a core; what
# they hold is then hardly trained, and so is the mean. Who sleeps a little leaves room for all.
SLEEP_S = 0.004


def check_survivors(group: Group, run: Ran, victim: int, processed: int = 0) -> None:
    """`processed`: how many samples the victim is known to have processed."""
    expected = [-signal.SIGKILL if rank == victim else 0 for rank in range(group.workers)]
    assert run.ends == expected, (group, run.ends, run.written)
    assert run.summary["living"] == group.workers - 1
    assert run.summary["accuracy"] > 0.9, group
    assert run.summary["longest_step_gap_seconds"] < PAUSE_S, group
    by_survivors = sum(
        steps for rank, steps in run.summary["steps_by_worker"].items() if int(rank) != victim
    )
    assert by_survivors * BATCH + processed >= EPOCHS * DATA, group


@pytest.mark.parametrize("transport", only(["shm"], ["shm", "torch"]))
def test_survivors_of_a_death_finish_the_run(transport: str) -> None:
    """One of four dies in the middle, rank 0 too; all samples of the budget are processed."""
    died_at = 25
    groups = [
        Group(
            method,
            WORKERS,
            transport,
            choices=CHOICES,
            dies=(number % WORKERS, died_at),
            sleeps=SLEEP_S,
        )
        for number, method in enumerate(METHODS_THAT_GO_ON)
    ]
    for group, run in zip(groups, run_groups(groups), strict=True):
        assert group.dies is not None
        check_survivors(group, run, group.dies[0], (died_at - 1) * BATCH)


@pytest.mark.parametrize("moments", [(3,), pytest.param((1, 2, 4, 5), marks=wide)])
def test_what_a_dead_worker_had_leased_is_processed_by_others(moments: tuple[int, ...]) -> None:
    """Whichever batch of its lease it dies over; what may have been done already is counted."""
    groups = [
        Group("pull_gossip", 3, choices=CHOICES, dies=(1, at), sleeps=SLEEP_S) for at in moments
    ]
    for group, run in zip(groups, run_groups(groups), strict=True):
        assert group.dies is not None
        check_survivors(group, run, 1, (group.dies[1] - 1) * BATCH)
        assert run.summary["repeated_samples"] == 4 * BATCH


@pytest.mark.parametrize("transport", only(["shm"], ["shm", "torch"]))
def test_the_death_of_a_server_ends_the_run_at_once(transport: str) -> None:
    """Nobody can go on without it; the sentence says which server, in whose process."""
    methods = ("sync_server", "ssp", "hogwild", "easgd")
    groups = [
        Group(method, 3, transport, choices=CHOICES, dies=(0, 10), sleeps=0.005)
        for method in methods
    ] + [Group("downpour:servers=2", 3, transport, choices=CHOICES, dies=(1, 10), sleeps=0.005)]
    for group, run in zip(groups, run_groups(groups), strict=True):
        assert group.dies is not None
        victim = group.dies[0]
        assert METHODS[group.method.partition(":")[0]].has_server
        assert [end for rank, end in enumerate(run.ends) if rank != victim] == [1, 1], group
        sentence = f"server {victim} is lost with the process of worker {victim}, which kept it"
        assert run.failure is not None
        assert run.failure.startswith(sentence), group
        assert run.after_death is not None
        assert run.after_death < PAUSE_S, group


WITH_STANDBYS = (
    "sync_server", "ssp", "easgd", "downpour:n_push=2,n_fetch=2", "dc_asgd", "hogwild", "softsync",
    "bounded_delay", "async_diloco", "decoupled_diloco", "backup_workers", "staleness_aware",
)  # fmt: skip


@pytest.mark.parametrize("transport", only(["shm"], ["shm", "torch"]))
@pytest.mark.parametrize(
    "methods", [WITH_STANDBYS[:3], pytest.param(WITH_STANDBYS[3:], marks=wide)]
)
def test_a_standby_goes_on_when_the_process_of_a_server_dies(
    transport: str, methods: tuple[str, ...]
) -> None:
    """Within two seconds, with every sample of the budget processed and nothing lost."""
    groups = [
        Group(f"{method}{',' if ':' in method else ':'}standby=sync", 3, transport,
              choices=CHOICES, dies=(0, 10), sleeps=SLEEP_S)
        for method in methods
    ]  # fmt: skip
    for group, run in zip(groups, run_groups(groups), strict=True):
        assert run.ends == [-signal.SIGKILL, 0, 0], (group, run.written)
        assert run.summary["living"] == 2
        assert "lost_updates" not in run.summary
        assert run.summary["longest_step_gap_seconds"] < 2.0, group
        assert run.summary["accuracy"] > 0.8, group
        by_survivors = sum(
            steps for rank, steps in run.summary["steps_by_worker"].items() if int(rank)
        )
        assert by_survivors * BATCH + 9 * BATCH >= EPOCHS * DATA, group


@pytest.mark.parametrize("method", every(2, ["pull_gossip", "ad_psgd:topology=ring"]))
def test_a_stopped_worker_stops_nobody_who_waits_for_nobody(method: str) -> None:
    """It goes on only when each of the others has made twenty steps without it; the exchanges that
    it had been asked for are made then, and all samples are processed."""
    epochs = 12  # who waits a moment for the stopped one must still find batches afterwards
    choices = {**CHOICES, "epochs": epochs}
    group = Group(method, 4, "torch", choices=choices, stops=(2, 5, 20), sleeps=SLEEP_S)
    (run,) = run_groups([group])
    assert run.ends == [0, 0, 0, 0], (run.ends, run.written)
    assert run.summary["living"] == 4
    assert sum(run.summary["steps_by_worker"].values()) * BATCH >= epochs * DATA


@wide
@needs_mpirun
def test_mpi_ends_the_whole_job_when_a_process_dies(tmp_path: Path) -> None:
    """That is the engine's way: mpirun ends the others and says so with its exit code."""
    command = under_mpirun(
        2, "-m", "gossamer", "train", "--epochs", "2000", "--runs", str(tmp_path)
    )
    running = start(command)
    try:
        wait_until(lambda: bool(list(tmp_path.glob("*/metrics.jsonl"))))
        workers = {pid: rank for pid in session_of(running.pid) if (rank := mpi_rank(pid))}
        assert sorted(workers.values()) == ["0", "1"]
        os.kill(next(pid for pid, rank in workers.items() if rank == "1"), signal.SIGKILL)
    except BaseException:
        end_session(running.pid)
        running.communicate()
        raise
    status, _, _ = finish(running)
    assert status != 0


def mpi_rank(pid: int) -> str | None:
    """Of a worker's own process; what it has started inherits the variable, but MPI starts none."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = b"OMPI_COMM_WORLD_RANK="
    return next((v[len(name) :].decode() for v in variables if v.startswith(name)), None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deaths_at_random_times_block_nobody() -> None:
    """Also inside of a window's lock, where AD-PSGD on shared memory spends much of its time."""
    draw = random.Random(0)
    groups = [
        Group(
            "ad_psgd", WORKERS, choices={**CHOICES, "epochs": 40, "seed": seed},
            killed=(draw.randrange(WORKERS), draw.uniform(0.05, 0.5)),
        )
        for seed in range(10)
    ]  # fmt: skip
    for group, run in zip(groups, run_groups(groups, limit_s=800), strict=True):
        assert group.killed is not None
        victim = group.killed[0]
        assert run.ends[victim] == -signal.SIGKILL, "it had ended before; make the run longer"
        assert [end for rank, end in enumerate(run.ends) if rank != victim] == [0, 0, 0]
        assert run.summary["accuracy"] > 0.9
        assert run.summary["longest_step_gap_seconds"] < PAUSE_S
