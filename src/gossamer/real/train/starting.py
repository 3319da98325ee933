"""How a program of our own is started as a worker."""

from __future__ import annotations

import sys

_START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
import sys
from importlib import import_module
sys.exit(import_module({module!r}).main())
"""


def program_of(module: str) -> tuple[str, ...]:
    """Runs `main` of a module. Until that handles Ctrl-C, while torch is imported, one ends the
    process without a traceback, which each worker would print."""
    return (sys.executable, "-c", _START.format(module=module))
