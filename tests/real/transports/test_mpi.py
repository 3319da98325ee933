"""The MPI transport keeps the laws of every transport, on mapped and on distant windows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from gossamer.real.transports.conformance.group import SCENARIOS, Scenario
from programs import LIMIT_S, PROGRAMS
from tiers import wide

SOURCE = Path(gossamer.__file__).parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")
TOGETHER = [law.name for law in SCENARIOS.values() if not law.apart]
APART = [law for law in SCENARIOS.values() if law.apart and not law.victims]
# Of deaths there is no law here: MPI ends the whole job when a process dies (test_deaths.py).
OWN = [
    "scenario_results_leave_no_circles_behind",
    "scenario_an_addition_outside_of_a_window_is_refused",
    "scenario_half_precision_and_empty_windows",
    "scenario_places_and_addresses",
    "scenario_there_is_no_choice_of_reductions",
    "scenario_who_has_left_the_sums_is_not_waited_for",
]
WINDOWS = [
    "scenario_a_read_sees_what_the_owner_wrote",
    "scenario_no_addition_is_lost_under_contention",
    "scenario_an_average_makes_both_equal_and_keeps_the_sum",
    "scenario_averages_that_overlap_keep_the_sum",
]
REDUCTIONS = [law.name for law in SCENARIOS.values() if "reduce" in law.name and not law.apart]

pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")


def run(size: int, names: list[str], mapped: str) -> tuple[int, str]:
    """One group under mpirun: its exit code and what it wrote."""
    command = [str(MPIRUN), "-n", str(size), sys.executable, str(PROGRAMS / "mpi_groups.py")]
    running = subprocess.Popen(
        [*command, mapped, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{SOURCE}:{PROGRAMS}",
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
    )
    try:
        written, _ = running.communicate(timeout=LIMIT_S)
    finally:
        end_session(running.pid)
    return running.returncode, written


def end_session(leader: int) -> None:
    """End what a command has left: mpirun gives its processes groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass  # ended by itself meanwhile


def check(size: int, names: list[str], mapped: str) -> None:
    code, written = run(size, names, mapped)
    for name in names:
        assert written.count(f"passed {name}") == size, written
    assert code == 0, written


def test_mpi_keeps_the_laws_of_every_transport() -> None:
    """All of them in one job of three processes, and those of MPI alone."""
    check(3, TOGETHER + OWN, "mapped")


@wide
def test_windows_that_are_not_mapped_keep_their_laws() -> None:
    """What happens between hosts: values travel by Get, Put and Accumulate."""
    check(3, WINDOWS + REDUCTIONS + OWN, "distant")


@wide
@pytest.mark.parametrize("law", APART, ids=lambda law: law.name)
def test_mpi_stops_and_closes_cleanly(law: Scenario) -> None:
    """Whoever stops or closes early hangs nobody, and all end with code 0."""
    check(law.size, [law.name], "mapped")


@wide
def test_a_process_that_fails_ends_the_job() -> None:
    """Its error is shown, the others do not wait for it, and the exit code says so."""
    code, written = run(3, ["scenario_a_process_fails_while_the_others_wait"], "mapped")
    assert code != 0
    assert "a bug in somebody's program" in written
    assert "passed" not in written
