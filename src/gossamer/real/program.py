"""What a worker process of `gossamer train` runs: `python -m gossamer.real.program`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch

from gossamer.errors import Error
from gossamer.real.environment import connect
from gossamer.real.job import Diary, Job
from gossamer.real.lone import LoneTransport
from gossamer.real.training import Training
from gossamer.real.transport import Stopped
from gossamer.tasks import Task, make_task


def main() -> int:
    job = Job.from_json(os.environ["GOSSAMER_JOB"])
    torch.set_num_threads(job.threads)
    transport = connect() or LoneTransport()
    diary = Diary(job.folder, transport.rank)
    signal.signal(signal.SIGINT, _interrupted)
    try:
        Training(job, _task(job), transport, diary).run()
    except (KeyboardInterrupt, Stopped):
        return 130
    except Error as error:
        print(f"worker {transport.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        diary.close()
    return 0


def _task(job: Job) -> Task:
    return make_task(job.task, data=None if job.data is None else Path(job.data))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
