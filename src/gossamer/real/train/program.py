"""What a worker process of `gossamer train` runs: `python -m gossamer.real.train.program`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from gossamer.real.launch.environment import connect
from gossamer.real.train.job import Diary, Job
from gossamer.real.train.worker import work
from gossamer.real.transports.local import LocalTransport


def main() -> int:
    job = Job.from_json(os.environ["GOSSAMER_JOB"])
    transport = connect() or LocalTransport()
    signal.signal(signal.SIGINT, _interrupted)
    return work(job, transport, Diary(job.folder, transport.rank))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
