"""Where the command `gossamer` begins: outside of the package, whose import takes seconds.

Ctrl-C while PyTorch is being imported would else be a traceback, out of whatever line was at hand.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Import the package, then run the command; Ctrl-C is one word from the first moment on."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    from gossamer.commands.cli import main as command

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing has begun that would have to be tidied up, and an exception that comes out of a
    # half-imported library may be anything.
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
