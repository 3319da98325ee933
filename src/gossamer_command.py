"""Where the command `gossamer` begins: outside of the package, whose import takes seconds.

Ctrl-C while PyTorch is being imported would else be a traceback, out of whatever line was at hand.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from types import FrameType

_INTERRUPTED = 130
_WITH_JOBS = ("compare", "advise", "lab", "reproduce")
_begun: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


def main() -> None:
    """Import the package, then run the command; Ctrl-C is one word from the first moment on."""
    try:
        _main()
    finally:
        _end()


def _main() -> None:
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    if _has_jobs(sys.argv[1:]):
        _begun.append(_begin())
    # What is imported stays, and to go through it in search of garbage takes a sixth of a second.
    gc.disable()
    from gossamer.commands.cli import main as command

    gc.freeze()
    gc.enable()
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command(*_begun)


def _has_jobs(words: list[str]) -> bool:
    """Whether the command will start processes, as far as one can see before it reads its options.

    Where this errs the command takes as long as it would, and some seconds of another core.
    """
    if sys.platform != "linux" or not words or words[0] not in _WITH_JOBS:
        return False
    text = " ".join(words)
    is_script = any(word.endswith(".py") for word in words)
    is_single = "--jobs 1" in text or "--jobs=1" in text or len(os.sched_getaffinity(0)) == 1
    return not (is_script or is_single or "--help" in words)


def _begin() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that forks for jobs, so that it imports PyTorch while this one does."""
    ours, theirs = socket.socketpair()
    words = ["-m", "gossamer.script.fork_server", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *words, "gossamer.commands.work.pool_process"],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return process, ours


def _end() -> None:
    for process, connection in _begun:
        connection.close()
        process.kill()
        process.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing has begun that would have to be tidied up, and an exception that comes out of a
    # half-imported library may be anything.
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    _end()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
