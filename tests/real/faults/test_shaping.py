"""Shaped links take their time, and the transport behind them keeps all of its laws."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from gossamer.config.faults import Fault
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.faults.shaped_links import ShapedTransport
from gossamer.real.launch import environment
from gossamer.real.transports.conformance.group import SCENARIOS
from gossamer.real.transports.local import LocalTransport
from programs import PROGRAMS, answers_of
from tiers import looks_at, only

ABOUT_TIME = [
    "scenario_a_slow_card_slows_its_own_reads_only",
    "scenario_messages_of_one_worker_queue_on_its_card",
    "scenario_what_others_add_queues_on_the_card_it_comes_to",
    "scenario_an_average_goes_there_and_back",
    "scenario_a_sum_takes_the_time_of_a_ring",
]
STOPPING = "scenario_stopping_ends_all_waiting"
TOGETHER = [law.name for law in SCENARIOS.values() if not law.apart]
DEATHS = [
    "scenario_a_death_is_noticed_and_survived",
    "scenario_a_death_amid_additions_loses_nothing_of_the_others",
]
FEW = [name for name in TOGETHER if any(word in name for word in ("whole", "overlap", "mean"))]
"""Laws that have nothing to do with time, and that every `make test` looks at."""
LEFT = [name for name in TOGETHER if name not in FEW]
GROUPS: dict[str, list[Any]] = {
    kind: [
        [kind, "slow", 3, ABOUT_TIME],
        [kind, "late", 3, [STOPPING]],
        [kind, "quick", 3, FEW],
        [kind, "quick", 3, LEFT],
        *([kind, "quick", SCENARIOS[name].size, [name]] for name in DEATHS if kind == "shm"),
    ]
    for kind in ("shm", "torch")
}


@pytest.fixture(scope="module", params=only(["shm"], GROUPS))
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every group of one transport has been run; what became of it, by scenario."""
    wide_ones = [group for group in GROUPS[request.param] if group[-1] == LEFT]
    groups = looks_at(request, wide_ones, GROUPS[request.param])
    program = PROGRAMS / "shaped_groups.py"
    found = answers_of(program, json.dumps(groups), places=tmp_path_factory)
    return {
        name: answer
        for (*_, names), answer in zip(groups, found, strict=True)
        for name in names
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    only([*ABOUT_TIME, STOPPING, *FEW, *DEATHS], [*ABOUT_TIME, STOPPING, *TOGETHER, *DEATHS]),
)
def test_shaped_links_keep_the_law(name: str, answers: dict[str, Any]) -> None:
    """Everybody passed the scenario and ended well; victims, and only they, were killed."""
    if name not in answers:
        pytest.skip("deaths are looked at on shared memory")
    said = "\n".join(answers[name]["written"])
    victims = SCENARIOS[name].victims if name in SCENARIOS else frozenset[int]()
    for rank, end in enumerate(answers[name]["ends"]):
        assert end == (-signal.SIGKILL if rank in victims else 0), said
        assert rank in victims or f"passed {name}\n" in answers[name]["written"][rank], said


@pytest.mark.parametrize("asked", [None, FaultPlan((Fault("slow", worker=0, amount=4.0),))])
def test_without_shaped_links_nothing_stands_in_the_way(
    asked: FaultPlan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport is the bare one, also where other faults are asked for."""
    bare = LocalTransport()
    assert _connected(bare, asked, monkeypatch) is bare


def test_where_they_are_asked_for_all_goes_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the transport, under its name."""
    found = _connected(LocalTransport(), FaultPlan(bandwidth=1e6), monkeypatch)
    assert isinstance(found, ShapedTransport)
    assert found.name == "alone"


def _connected(
    bare: LocalTransport, asked: FaultPlan | None, monkeypatch: pytest.MonkeyPatch
) -> object:
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOSSAMER_FAULTS", "" if asked is None else asked.to_json())
    monkeypatch.setattr(environment, "_connected", lambda chosen, here: bare)
    return environment.connect()
