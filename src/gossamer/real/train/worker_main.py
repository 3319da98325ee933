"""What a worker process of `gossamer train` runs, whoever started it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gossamer.errors import ConfigurationError, Error, PeerLost
from gossamer.methods.method import blamed_method
from gossamer.real.launch.environment import connect, discover
from gossamer.real.lost_peer import server_lost
from gossamer.real.train.replay import EventOrder
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.training import Training
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.transports.local import LocalTransport
from gossamer.real.transports.transport import Stopped, Transport

JOB_VARIABLE = "GOSSAMER_JOB"
INTERRUPTED = 130
REFUSED = 2
"""The exit code of a worker whose input, a user's own code among it, cannot be used."""
_START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
import sys
from importlib import import_module
sys.exit(import_module({module!r}).main())
"""


def program_of(module: str) -> tuple[str, ...]:
    """The command that runs `main` of a module of ours. Until that handles Ctrl-C, while torch is
    imported, Ctrl-C ends the process without a traceback, which each worker would print."""
    return (sys.executable, "-c", _START.format(module=module))


def main() -> int:
    try:
        request = TrainRequest.from_json(os.environ[JOB_VARIABLE])
    except ConfigurationError as error:
        # A file of the user's that says something else here than to the process that started this.
        place = Path(json.loads(os.environ[JOB_VARIABLE])["folder"])
        with contextlib.closing(WorkerLog(place, discover().rank)) as log:
            log.write("failure", {"sentence": str(error), "time": time.time()})
        return REFUSED
    transport = connect() or LocalTransport()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_worker(request, transport, WorkerLog(request.place, transport.rank))


def run_worker(
    request: TrainRequest, transport: Transport, log: WorkerLog,
    on_failure: Callable[[str], None] = lambda sentence: None,
) -> int:  # fmt: skip
    """Run one worker. Returns its exit code. If it fails, its log says why, and `on_failure` gets
    the same sentence."""
    torch.set_num_threads(request.settings.threads)
    order = EventOrder(request.place, transport.rank) if request.is_recorded else None
    try:
        with blamed_method(request.settings.method.method, is_worker=True):
            _kind_of(request)(request, transport, log, order).run()
    except (KeyboardInterrupt, Stopped):
        return INTERRUPTED
    except (Error, OSError) as error:
        sentence = _sentence(error, request, transport.size)
        on_failure(sentence)
        try:
            log.write("failure", {"sentence": sentence, "time": time.time()})
        except OSError:
            print(sentence, file=sys.stderr, flush=True)
        return REFUSED if isinstance(error, ConfigurationError) else 1
    finally:
        for kept in (log, order):
            with contextlib.suppress(OSError):
                if kept is not None:
                    kept.close()
    return 0


def _kind_of(request: TrainRequest) -> type[Training]:
    if request.settings.method.shape.machines == 1:
        return Training
    # Imported here, because what it needs of PyTorch takes long to import.
    from gossamer.real.train.stage_training import StageTraining

    return StageTraining


def _sentence(error: Error | OSError, request: TrainRequest, size: int) -> str:
    if isinstance(error, OSError):
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{type(error).__name__}: {error}"
        place = error.filename or request.place
        return f"there is no room for more in {place}: make some, or choose other --runs"
    spec = request.settings.method
    if not isinstance(error, PeerLost) or not spec.method.has_server:
        return str(error)
    return str(server_lost(error, size, spec.servers) or error)


if __name__ == "__main__":
    sys.exit(main())
