"""What a worker process of `gossamer probe` runs: `python -m gossamer.plan.probe.program`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from gossamer.errors import Error, PeerLost
from gossamer.plan.probe.conductor import Progress, conduct, take_part
from gossamer.plan.probe.findings import Inquiry
from gossamer.real.launch.environment import connect
from gossamer.real.train.job import Diary
from gossamer.real.transports.local import LocalTransport

FOLDER = "GOSSAMER_PROBE_FOLDER"
INQUIRY = "GOSSAMER_PROBE"
_INTERRUPTED = 130


def main() -> int:
    inquiry = Inquiry.from_json(os.environ[INQUIRY])
    transport = connect() or LocalTransport()
    signal.signal(signal.SIGINT, _interrupted)
    if transport.rank != 0:
        try:
            take_part(transport, inquiry)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except PeerLost:
            return 0  # worker 0 says what happened; this one has nothing to add
        except Error:
            return 1  # worker 0 was told why
        return 0
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    diary = Diary(os.environ[FOLDER], 0)
    try:
        diary.write("findings", conduct(transport, inquiry, _progress(diary)).as_dict())
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Error as error:
        diary.write("failure", {"sentence": str(error)})
    finally:
        diary.close()
    return 0


def _progress(diary: Diary) -> Progress:
    return lambda share, what: diary.write("progress", {"share": share, "what": what})


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
