"""What the processes of a replica send to each other: batches, activations and their gradients."""

from __future__ import annotations

import time
from typing import Any

from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.pipelines.replica_processes import ReplicaProcesses
from gossamer.real.worker import RealWorker
from gossamer.worker import Message, Tag


class StageLinks:
    """The words `send` and `receive` of this process's worker, with stages for ranks."""

    def __init__(self, worker: RealWorker, driver: Driver, places: ReplicaProcesses) -> None:
        self._worker, self._driver, self._places = worker, driver, places
        self.waited_s = 0.0
        """How long this process has waited for others of its replica."""

    @property
    def stage(self) -> int:
        return self._places.stage

    @property
    def stages(self) -> int:
        return self._places.machines

    def send(self, stage: int, value: Any, tag: Tag) -> None:
        self._worker.send(self._places.group[stage], value, tag=tag)

    def receive(self, stage: int, tag: Tag) -> Pending[Message]:
        return self._worker.receive(tag, source=self._places.group[stage])

    def wait(self, receive: Pending[Message]) -> Any:
        began = time.monotonic()
        self._driver.wait(receive, "pipeline")
        self.waited_s += time.monotonic() - began
        return receive.result().payload
