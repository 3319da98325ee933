"""What can go wrong, in one tree.

Error
├── ConfigurationError      bad input: one sentence, exit code 2, nothing half-written
├── PeerLost                a peer that an operation needs is gone
│   └── ServerLost          and it kept a server, without which no worker can continue
├── Late                    an operation did not finish within its deadline
├── Stalled                 nobody can continue: who waits for what, since when
├── ProtocolError           a method broke a rule of the Worker's operations
├── RunFailed               a worker's own code raised; carries the worker and the time
│   └── ScriptFailed        and it was a script's: the command ends with the script's own exit code
├── Unfinished              the time of a piece of a run is over; its checkpoint is written
└── RunOver                 the samples are processed: this gradient is not computed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class Error(Exception):
    """Base of every error that Gossamer raises on purpose."""


class ConfigurationError(Error):
    """The input cannot be used; the message says what to change."""


class PeerLost(Error):
    """A peer died, or stayed unreachable for longer than the deadline."""

    def __init__(self, peer: int, reason: str = "it died") -> None:
        super().__init__(f"worker {peer} is lost: {reason}")
        self.peer = peer


class ServerLost(PeerLost):
    """A server died with the worker's process that it lives in."""

    def __init__(self, server: int, worker: int) -> None:
        super().__init__(worker)
        self.args = (
            f"server {server} is lost with the process of worker {worker}, which kept it; "
            "no method goes on without its server",
        )


class Late(Error):
    """`within(seconds)` ran out before the operation finished."""


class Stalled(Error):
    """No event is left and some workers still wait; the message names them."""


class ProtocolError(Error):
    """A method used the Worker's operations in a forbidden order."""


class RunFailed(Error):
    """A worker's code raised; the original error is the cause."""


class ScriptFailed(RunFailed):
    """A script that is run in virtual time ended before its time."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Unfinished(Error):
    """The time that a run was given is over. Its checkpoint says where it goes on."""

    def __init__(self, checkpoint: Path, samples: int) -> None:
        super().__init__(f"unfinished after {samples} samples; it goes on from {checkpoint}")
        self.checkpoint = checkpoint
        self.samples = samples


class RunOver(Error):
    """All samples of the run are processed, so the requested gradient is not computed.

    It ends the method. A method that still holds something for others catches it.
    """

    def __init__(self) -> None:
        super().__init__("the run is over: all of its samples are processed")


def unknown_name(kind: str, got: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}"
    return ConfigurationError(f"unknown {kind} {got!r}; {hint}")
