"""What descends on the servers of a simulation of scripts: other instances of the user's optimiser.

Nobody but the script can make one, so worker 0's process forks when its loop begins. The fork never
sees the loop; it keeps the twins of the optimiser, one for each server, and descends where it is
told to. It does not end with worker 0, for a simulated server is a machine of its own.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.servers import server_replica
from gossamer.real.join.virtual.virtual_session import VirtualSession
from gossamer.real.replicas import PublishedReplica, WindowReplica
from gossamer.real.session import Session
from gossamer.script.channel import Channel, ChannelClosed, Said
from gossamer.script.memory import file_of, tensor_of


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a schedule may change, of every group, as far as it is plain values."""
    return [
        {key: _plain(value) for key, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in cast("tuple[Any, ...]", value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(one) for one in cast(Any, value)] if isinstance(value, tuple) else value


def fork_server_host(
    file: int, session: VirtualSession, worker: LoopReplica, binding: ModuleBinding,
    optimizer: torch.optim.Optimizer,
) -> None:  # fmt: skip
    """Returns in the worker's process only."""
    with warnings.catch_warnings():
        # That threads do not survive a fork is known: nothing of the script's runs in it.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        os.close(file)
        return
    status = 1
    try:
        os.setsid()  # what ends worker 0 does not end its servers
        session.channel.close()
        torch.set_num_threads(1)
        host = ServerHost(session, worker, binding, optimizer)
        host.serve(Channel(socket.socket(fileno=file)))
        status = 0
    finally:
        os._exit(status)


class ServerHost:
    """The optimisers of all servers."""

    def __init__(
        self, session: VirtualSession, worker: LoopReplica, binding: ModuleBinding,
        optimizer: torch.optim.Optimizer,
    ) -> None:  # fmt: skip
        self._memory = session.memory
        self._optimizer = optimizer
        self._slices = session.addresses.slices
        self._replicas: list[PublishedReplica] = []

        def make(number: int) -> PublishedReplica:
            end = session.size + number
            return server_replica(cast(Session, session), end, worker, binding, optimizer)

        self._make = make

    def serve(self, channel: Channel) -> None:
        try:
            # What cannot be made of the user's optimiser is refused in the first answer.
            self._replicas = [self._make(number) for number in range(len(self._slices))]
            channel.send("done")
            while True:
                said = channel.receive()
                values = self._do(said)
                files = [values.pop("file")] if "file" in values else []
                channel.send("done", values, files=files)
                for file in files:
                    os.close(file)
        except ConfigurationError as error:
            channel.send("failed", {"text": str(error)})
        except ChannelClosed:
            return

    def _do(self, said: Said) -> dict[str, Any]:
        number = said["server"]
        replica, part = self._replicas[number], self._slices[number]
        if "options" in said.values:
            self._follow(said["options"])
        if said.kind == "descend":
            replica.descend_(self._memory.pushed[part], share=said["share"])
        elif not isinstance(replica, LoopReplica | WindowReplica):
            raise AssertionError(f"no optimiser to {said.kind}")
        elif said.kind == "state":
            return {"file": file_of(replica.optimiser_state())}
        elif said.kind == "load":
            replica.load_optimiser_state_(tensor_of(said.files[0], self._memory.served.dtype))
        elif said.kind == "reset":
            replica.reset_optimiser_()
        return {}

    def _follow(self, options: list[dict[str, Any]]) -> None:
        """The schedule of the worker that these come from."""
        groups = self._optimizer.param_groups
        if len(options) != len(groups):
            raise ConfigurationError(
                "a parameter group was added while training, which the servers of a simulated "
                "script do not hear of; give the optimizer all groups before gossamer.join, with "
                "the learning rate 0 until their time"
            )
        for group, told in zip(groups, options, strict=True):
            for key, value in told.items():
                group[key] = tuple(value) if isinstance(value, list) else value
