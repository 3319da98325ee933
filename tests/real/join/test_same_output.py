"""Who leaves a coupled loop holds the model that everyone else holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from programs import PROGRAMS, answers_of

TRANSPORTS = ("shm", "torch")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of four workers on each transport."""
    program = PROGRAMS / "join_groups.py"
    asked = [("case_of_leaving", 4, "ad_psgd", transport) for transport in TRANSPORTS]
    found = answers_of(program, json.dumps(asked), places=tmp_path_factory)
    return dict(zip(TRANSPORTS, found, strict=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everyone_leaves_with_the_same_model(groups: dict[str, Any], transport: str) -> None:
    """Averages that are under way when a loop ends are over before anybody reads the result."""
    found = groups[transport]
    assert found["ends"] == [0] * 4, found["written"]
    assert len({answer["digest"] for answer in found["answers"]}) == 1
