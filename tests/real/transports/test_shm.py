"""The shared-memory transport keeps the laws of every transport, and its memory leaves no trace."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from gossamer.errors import ConfigurationError
from gossamer.real.transports.conformance.group import SCENARIOS, Scenario
from gossamer.real.transports.shm import ShmTransport, create_segments
from programs import PROGRAMS, answers_of

TOGETHER = [law.name for law in SCENARIOS.values() if not law.apart]
GROUPS = [(3, TOGETHER)] + [(law.size, [law.name]) for law in SCENARIOS.values() if law.apart]


def run_groups(
    places: pytest.TempPathFactory, groups: Sequence[tuple[int, Sequence[str]]],
    values_on: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """By one program; what its processes said, by scenario."""
    program = PROGRAMS / "shm_groups.py"
    found = answers_of(program, json.dumps(groups), values_on, places=places)
    return {
        name: answer
        for (_, names), answer in zip(groups, found, strict=True)
        for name in names
    }  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_groups(tmp_path_factory, GROUPS)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Main memory in the place of a GPU's; everything else is what runs on one."""
    return run_groups(tmp_path_factory, GROUPS, "gpu")


@pytest.mark.parametrize("law", SCENARIOS.values(), ids=lambda law: law.name)
def test_processes_that_share_a_gpu_keep_the_law(law: Scenario, on_gpu: dict[str, Any]) -> None:
    """Windows in its memory, and values that are added up there, change none of the laws."""
    check(law, on_gpu[law.name])


@pytest.mark.parametrize("law", SCENARIOS.values(), ids=lambda law: law.name)
def test_shared_memory_keeps_the_law(law: Scenario, answers: dict[str, Any]) -> None:
    """Every survivor passed the scenario and ended well; victims, and only they, were killed."""
    check(law, answers[law.name])


def check(law: Scenario, answer: dict[str, Any]) -> None:
    said = "\n".join(answer["written"])
    for rank in range(law.size):
        if rank in law.victims:
            assert answer["ends"][rank] == -signal.SIGKILL, said
        else:
            assert f"passed {law.name}\n" in answer["written"][rank], said
            assert answer["ends"][rank] == 0, said


def test_shared_memory_has_no_name() -> None:
    """It lives in no folder, so no death of anybody can leave it behind."""
    segments = create_segments(2)
    try:
        assert len(segments.fds) == 3
        links = [os.readlink(f"/proc/self/fd/{file}") for file in segments.fds]
        assert all(link.startswith("/memfd:") for link in links)
    finally:
        segments.close()


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand the transport says which variables it wants and who sets them."""
    for name in ("GOSSAMER_RANK", "GOSSAMER_SIZE", "GOSSAMER_STORE", "GOSSAMER_SHM_FDS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"GOSSAMER_SHM_FDS.*gossamer run"):
        ShmTransport.from_environment()
