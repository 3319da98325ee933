"""Servers that survive: each has a standby, which runs the same text on the same messages.

    workers ── messages ──▶ primary ── the log ──▶ standby
       ▲                       │  ◀── receipts ───────┘
       └────── answers ────────┘

The text of a server acts by nothing but its messages, the time and who is alive. The primary writes
all of it into the log before its text sees it, so the standby comes to the same parameters and to
the same everything else that the text keeps. With a bound of 0 (synchronous) the text sees a
message when the standby has it, and nothing that has had an effect is ever lost. With a bound of L
(asynchronous) the text is at most L messages ahead, which is what a death may lose.

When a worker learns that the primary is dead it sends the standby what has not been answered. Its
messages are numbered, so the standby applies none of them twice and repeats the answers that it has
given already. A server without a text of its own (a centre, shared parameters) is memory that
workers add to; they add to both memories.
"""

from gossamer.standby.client import Client
from gossamer.standby.logged_server import Primary, Standby

__all__ = ["Client", "Primary", "Standby", "bound_of"]


def bound_of(standby: str) -> int | None:
    """How many messages a death may lose, from the text of the option; None without standbys."""
    if not standby:
        return None
    return 0 if standby == "sync" else int(standby)
