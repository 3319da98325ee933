"""Makes a worker die with its launcher, and then becomes the worker's command by `exec`.

The launcher executes this file and does not import it, so that it starts within milliseconds. The
settings survive the `exec`. To make them between fork and exec is not safe in a launcher that has
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1
_NOT_FOUND = 127


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        # The launcher died before the signal was set up.
        sys.exit(1)
    # Ignored signals stay ignored after exec. Python ignores SIGPIPE, and a shell's `&` SIGINT.
    for name in ("SIGINT", "SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(_NOT_FOUND)


if __name__ == "__main__":
    main()
