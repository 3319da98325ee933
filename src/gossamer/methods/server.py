"""A parameter server that waits for nobody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.payload import payload
from gossamer.replica import Replica
from gossamer.worker import Worker


@payload
@dataclass(frozen=True, slots=True)
class Push:
    """An accrued gradient and the version it was computed from; no gradient is a plain fetch."""

    gradient: Tensor | None
    read: int


@payload
@dataclass(frozen=True, slots=True)
class Parameters:
    """The server's answer to a fetch."""

    value: Tensor
    version: int


async def downpour(w: Worker, x: Replica, *, n_push: int = 1, n_fetch: int = 1) -> None:
    """Dean et al. 2012, Downpour SGD. Promises: nobody waits for another worker."""
    accrued: Tensor | None = None
    fresh = await w.request(w.server, Push(None, 0), tag="push")
    x.assign_(fresh.value)
    for t in w.steps():
        grad = await w.gradient(x)
        accrued = grad if accrued is None else accrued + grad
        pushes, fetches = (t + 1) % n_push == 0, (t + 1) % n_fetch == 0
        if not fetches:
            x.descend_(grad)  # the local copy moves on until the next fetch
        message = Push(accrued if pushes else None, fresh.version)
        if fetches:
            fresh = await w.request(w.server, message, tag="push")  # the fetch rides on the push
            x.assign_(fresh.value)
        elif pushes:
            w.send(w.server, message, tag="push")
        if pushes:
            accrued = None
    if accrued is not None:
        await w.send(w.server, Push(accrued, fresh.version), tag="push")


async def downpour_server(w: Worker, x: Replica) -> None:
    """Apply every gradient as it comes; answer with the parameters after it."""
    while True:
        message = await w.receive("push")
        if message.payload.gradient is not None:
            x.descend_(message.payload.gradient, read=message.payload.read)
        if message.reply_to:
            w.reply(message, Parameters(x.snapshot(), x.version))
