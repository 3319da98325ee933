"""One worker's part of a job of `gossamer train`, whoever started its process."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gossamer.errors import Error, PeerLost
from gossamer.methods import parse_method
from gossamer.real.event_order import Recorder
from gossamer.real.lost_peer import server_lost
from gossamer.real.train.job import Diary, Job
from gossamer.real.train.training import Training
from gossamer.real.transports.transport import Stopped, Transport
from gossamer.tasks import Task, make_task


def work(
    job: Job, transport: Transport, diary: Diary,
    on_failure: Callable[[str], None] = lambda sentence: None,
) -> int:  # fmt: skip
    """One worker's part of a job, as an exit code; why it gave up stands in its diary, and
    `on_failure` is told."""
    torch.set_num_threads(job.threads)
    recorder = Recorder(Path(job.folder), transport.rank) if job.is_recorded else None
    try:
        Training(job, _task(job), transport, diary, recorder).run()
    except (KeyboardInterrupt, Stopped):
        return 130
    except (Error, OSError) as error:
        sentence = _sentence(error, job, transport.size)
        on_failure(sentence)
        try:
            diary.write("failure", {"sentence": sentence, "time": time.time()})
        except OSError:
            print(sentence, file=sys.stderr, flush=True)
        return 1
    finally:
        for kept in (diary, recorder):
            with contextlib.suppress(OSError):
                if kept is not None:
                    kept.close()
    return 0


def _sentence(error: Error | OSError, job: Job, size: int) -> str:
    if isinstance(error, OSError):
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{type(error).__name__}: {error}"
        place = error.filename or job.folder
        return f"there is no room for more in {place}: make some, or choose other --runs"
    spec = parse_method(job.method)
    if not isinstance(error, PeerLost) or not spec.method.has_server:
        return str(error)
    return str(server_lost(error, size, spec.servers) or error)


def _task(job: Job) -> Task:
    return make_task(job.task, data=None if job.data is None else Path(job.data))
