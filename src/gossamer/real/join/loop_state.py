"""What a coupled loop adds to its worker's checkpoint, and how it goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.server import OwnOptimiserReplica
from gossamer.real.worker import RealWorker


def state_of_loop(
    worker: RealWorker, replica: LoopReplica,
    servers: Mapping[int, LoopReplica | OwnOptimiserReplica],
) -> dict[str, Any]:  # fmt: skip
    return {
        "step": worker.step,
        "weight": replica.weight,
        "version": replica.version,
        "memory": {name: tensor.clone() for name, tensor in replica.memory.items()},
        "value": replica.snapshot(),
        "random": json.dumps(worker.rng.getstate()),
        "servers": {str(end): server.state_dict() for end, server in servers.items()},
    }


def resume_loop(state: dict[str, Any], worker: RealWorker, replica: LoopReplica) -> None:
    """All but the values and the servers, which are there before anybody can reach them."""
    worker.step = int(state["step"])
    replica.version = int(state["version"])
    replica.memory = {name: tensor.clone() for name, tensor in state["memory"].items()}
    if state["weight"] != 1.0:
        replica.weight = float(state["weight"])
    version, numbers, spare = json.loads(state["random"])
    worker.rng.setstate((version, tuple(numbers), spare))
