"""Worker 0 of a script, alone, before the run: which model it joins, how long a step takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.errors import ConfigurationError, ScriptFailed
from gossamer.script.fork_server import ForkServer
from gossamer.sim.script.crew import Crew, Member
from gossamer.sim.script.script_settings import Script

_WARM, _TIMED = 3, 8
"""Steps before those that are timed, and how many are."""


@dataclass(frozen=True)
class Scouted:
    """What worker 0 of a script says."""

    method: str
    steps: int
    learning_rate: float
    optimiser: str
    seconds_per_step: float | None
    """Alone on the machine, if it was measured."""


def scout(
    server: ForkServer, script: Script, size: int, *, seed: int, method: str | None, threads: int,
    outputs: Path, is_timed: bool,
) -> Scouted:  # fmt: skip
    """Run the script up to its `join`, or for some steps more, and end it there."""
    crew = Crew(
        server, script, [0], size, seed=seed, method=method, threads=threads, outputs=outputs
    )
    try:
        hello = crew.meet()
        seconds = _time_steps(crew) if is_timed else None
        return Scouted(
            hello["method"], hello["steps"], hello["learning_rate"], hello["optimiser"], seconds
        )
    finally:
        crew.close()


def _time_steps(crew: Crew) -> float:
    """Each worker computes as fast as this one does alone; evaluating does not count."""
    crew.welcome(())
    crew.begin(has_host=False)
    member = crew.members[0]
    times: list[float] = []
    try:
        for _ in range(_WARM + _TIMED):
            seconds = _one_step(crew, member)
            if seconds is None:
                break
            times.append(seconds)
    except ScriptFailed:
        if not times:
            raise
    if not times:
        raise ConfigurationError(
            "--compute measured needs a step to time, and the loop of worker 0 made none; see that "
            "its loader has batches"
        )
    return median(times[_WARM:] or times)


def _one_step(crew: Crew, member: Member) -> float | None:
    alone: dict[str, Any] = {"batches": [], "pass": "", "main": 0, "weight": 1.0, "training": [0]}
    member.tell("resume", {"is_elsewhere": False, "pace": [1, 1.0], **alone})
    began = time.perf_counter()
    position = 0
    while True:
        said = crew.next(member)
        if said.kind == "batch":
            member.tell("position", {"position": position})
            position += 1
        elif said.kind == "claim":
            member.tell("claimed", {"value": said["proposal"]})
        elif said.kind == "share":
            member.tell("shared", {"lengths": [len(said.raw)], "live": [0]}, raw=said.raw)
        elif said.kind == "consensus":
            # What is evaluated there costs no virtual time.
            member.tell("output")
        elif said.kind == "begun":
            began = time.perf_counter()
        elif said.kind == "step":
            seconds = time.perf_counter() - began
            member.order("descend", {"is_given": False, "has_point": False, "share": 1.0})
            crew.wait_until_done(member)
            return seconds
        elif said.kind == "end":
            return None
