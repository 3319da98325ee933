"""One worker of `reality.py`: `reality_worker.py JOB.json`, started by `gossamer run`.

Trains like a worker of `gossamer train`, on a task whose gradient mostly sleeps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from gossamer import Task, make_task
from gossamer.real.launch.environment import connect
from gossamer.real.train.job import Diary, Job
from gossamer.real.train.training import Training
from gossamer.real.transports.local import LocalTransport


def sleepy(task: Task, seconds: float, jitter: float, slept: list[float]) -> Task:
    """The same task, each training batch of which takes that much time without using a core."""
    rng = random.Random(f"{os.environ.get('GOSSAMER_RANK')}")

    def augment(inputs: Tensor, key: Tensor) -> Tensor:
        began = time.monotonic()
        time.sleep(max(0.1 * seconds, rng.gauss(seconds, jitter * seconds)))
        slept.append(time.monotonic() - began)
        return inputs

    return dataclasses.replace(task, augment=augment)


def main(path: Path) -> None:
    given = json.loads(path.read_text())
    job = Job(**given["job"])
    torch.set_num_threads(1)
    slept: list[float] = []
    task = sleepy(make_task(job.task), given["seconds"], given["jitter"], slept)
    transport = connect() or LocalTransport()
    diary = Diary(job.folder, transport.rank)
    try:
        Training(job, task, transport, diary).run()
    finally:
        if len(slept) > 1:
            diary.write("slept", {"mean": statistics.mean(slept), "sd": statistics.stdev(slept)})
        diary.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
