"""The program of a worker of `gossamer probe`: `python -m gossamer.plan.probe.program`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gossamer.errors import Error, PeerLost
from gossamer.plan.probe.conductor import conduct, take_part
from gossamer.plan.probe.findings import Inquiry
from gossamer.real.launch.environment import connect
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.train.worker_main import INTERRUPTED
from gossamer.real.transports.local import LocalTransport

FOLDER = "GOSSAMER_PROBE_FOLDER"
INQUIRY = "GOSSAMER_PROBE"


def main() -> int:
    inquiry = Inquiry.from_json(os.environ[INQUIRY])
    transport = connect() or LocalTransport()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if transport.rank != 0:
        try:
            take_part(transport, inquiry)
        except KeyboardInterrupt:
            return INTERRUPTED
        except PeerLost:
            return 0  # worker 0 reports the loss
        except Error:
            return 1  # worker 0 was told why
        return 0
    log = WorkerLog(Path(os.environ[FOLDER]), 0)
    try:
        found = conduct(
            transport, inquiry,
            lambda share, what: log.write("progress", {"share": share, "what": what}),
        )  # fmt: skip
        log.write("findings", found.as_dict())
    except KeyboardInterrupt:
        return INTERRUPTED
    except Error as error:
        log.write("failure", {"sentence": str(error)})
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
