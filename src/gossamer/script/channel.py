"""Messages between the coordinator of a simulation and a process that runs a user's script.

A message is a kind, a few plain values as JSON, and perhaps bytes and open files beside them.
Nothing is pickled. Who sends when is fixed: a process runs only when it is told to, and whatever it
says the coordinator reads at moments of virtual time that depend on nothing but the run. So the
order in which processes happen to finish their computing changes nothing.

    the coordinator                           a script's process, in this order
    ---------------                           ---------------------------------
                      <-- hello               it has called `join`: which model, which optimiser
    welcome           -->                     the memory that both see
                      <-- ready
    resume            -->                     compute at this point
                      <-- batch, consensus,   asked or told between two steps
                          share, report
                      <-- begun               the model computes: the coordinator goes on meanwhile
                      <-- step                the gradient is there
    descend, ...      --> done                what the replica's own optimiser does
    resume            -->                     and so on, until
                      <-- end                 the loop is over
    final             -->                     the output model
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.errors import ConfigurationError, Error

VARIABLE = "GOSSAMER_SIMULATION"
"""In the environment of a script's process, and of what that process starts."""
_LENGTHS = struct.Struct("<II")
_MOST_FILES = 8


class ChannelClosed(Error):
    """The other end is gone."""

    def __init__(self) -> None:
        super().__init__("the simulation that this script took part in is over")


@dataclass(frozen=True, slots=True)
class Said:
    """One message."""

    kind: str
    values: Mapping[str, Any]
    raw: bytes = b""
    files: Sequence[int] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """This end, and the other as a socket that can be handed on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()

    def send(
        self, kind: str, values: Mapping[str, Any] | None = None, raw: bytes = b"",
        files: Sequence[int] = (),
    ) -> None:  # fmt: skip
        text = json.dumps([kind, values or {}]).encode()
        whole = _LENGTHS.pack(len(text), len(raw)) + text + raw
        try:
            if files:
                # The files go with the first byte, the rest as it fits.
                socket.send_fds(self.connection, [whole[:1]], files)
                self.connection.sendall(whole[1:])
            else:
                self.connection.sendall(whole)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosed from None

    def receive(self) -> Said:
        """Wait for the next message."""
        try:
            first, files, *_ = socket.recv_fds(self.connection, 1, _MOST_FILES)
            if not first:
                raise ChannelClosed
            head = first + self._exactly(_LENGTHS.size - 1)
            length, more = _LENGTHS.unpack(head)
            kind, values = json.loads(self._exactly(length))
            return Said(kind, values, self._exactly(more) if more else b"", files)
        except ConnectionResetError:
            raise ChannelClosed from None

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self.connection.recv(count)
            if not part:
                raise ChannelClosed
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class ScriptProcess:
    """What a script's process knows of the simulation that drives it."""

    channel: Channel | None = None
    has_joined = False
    has_ended = False
    """Its coupled loop is over in good order."""

    @classmethod
    def of_environment(cls) -> Channel | None:
        """The way to the coordinator, if this process is driven by one."""
        if VARIABLE not in os.environ:
            return None
        if cls.channel is None:
            raise ConfigurationError(
                "gossamer.join was called in a program that a simulated script has started, and "
                "only the script itself takes part; train in the script"
            )
        return cls.channel
