"""What callbacks hear in a user's loop, on groups of forked processes; prints JSON.

    python tests/programs/callback_groups.py '[["case_of_hearing", 3, "pull_gossip"]]'

The groups are run as those of `join_groups.py`, with the cases of this file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import torch

import gossamer
import join_groups
from gossamer.errors import RunFailed
from join_cases import digest, net, train

STEPS = 12


class Heard(gossamer.Callback):
    """Keeps everything; complains of a call that comes in the middle of another."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[Any]]] = []
        self.threads: dict[str, set[int]] = {}
        self.seconds: list[float] = []
        self._is_speaking = threading.Lock()

    def _hear(self, event: str, *facts: Any) -> None:
        assert self._is_speaking.acquire(blocking=False), "two calls at once"
        time.sleep(1e-4)  # long enough for another thread to come in between
        self.events.append((event, list(facts)))
        self.threads.setdefault(event, set()).add(threading.get_ident())
        self._is_speaking.release()

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        assert loss is None
        self.seconds.append(seconds)
        self._hear("step", worker, step)

    def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
        self._hear("exchange", worker, peer, age)

    def on_staleness(self, end: int, staleness: int, seconds: float) -> None:
        self._hear("staleness", end, staleness)

    def on_drop(self, end: int, seconds: float) -> None:
        self._hear("drop", end)

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        self._hear("membership", worker, is_alive)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._hear("end", summary)

    def told(self, event: str) -> list[list[Any]]:
        return [facts for kind, facts in self.events if kind == event]


def joined(rank: int, *callbacks: gossamer.Callback) -> gossamer.JoinedWorker:
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return gossamer.join(model, optimizer, callbacks=callbacks)


def case_of_hearing(rank: int) -> dict[str, Any]:
    heard = Heard()
    worker = joined(rank, heard)
    with worker:
        train(worker, STEPS)
        assert not heard.told("end")
    assert heard.seconds == sorted(heard.seconds)
    own = {threading.get_ident()}
    assert heard.threads["step"] == heard.threads["end"] == own
    assert heard.events[-1][0] == "end"
    kinds = ("step", "exchange", "staleness", "drop", "membership", "end")
    return {"digest": digest(worker.model), **{kind: heard.told(kind) for kind in kinds}}


def case_of_silence(rank: int) -> dict[str, Any]:
    """The same loop without callbacks."""
    worker = joined(rank)
    with worker:
        train(worker, STEPS)
    return {"digest": digest(worker.model)}


def case_of_a_death(rank: int) -> dict[str, Any]:
    heard = Heard()
    worker = joined(rank, heard)
    with worker:
        train(worker, 2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 100
        while not heard.told("membership") and time.monotonic() < until:
            time.sleep(0.005)
        train(worker, 2, 2)
    return {"membership": heard.told("membership"), "living": heard.told("end")[0][0]["living"]}


def case_of_asking(rank: int) -> dict[str, Any]:
    """A callback that looks at the output model waits for what only the receiving thread can
    bring, while that thread has exchanges to tell."""

    class Asking(Heard):
        def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
            with coupled.consensus():
                super().on_step(worker, step, seconds, loss)

    asking = Asking()
    coupled = joined(rank, asking)
    with coupled:
        train(coupled, STEPS)
    return {"steps": len(asking.told("step")), "exchanges": len(asking.told("exchange"))}


def case_of_errors(rank: int) -> dict[str, Any]:
    """Everybody's callback raises, unless nobody is left to exchange with."""

    class Broken(gossamer.Callback):
        def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
            raise LookupError("no exchange rate")

    try:
        with joined(rank, Broken()) as worker:
            train(worker, 200)
    except RunFailed as error:
        return {"said": str(error), "cause": type(error.__cause__).__name__}
    assert worker.coupling.session.router.live == {rank}
    return {}


def case_of_a_failing_step(rank: int) -> dict[str, Any]:
    class Broken(Heard):
        def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
            if step == 3:
                raise LookupError("three is enough")
            super().on_step(worker, step, seconds, loss)

    broken = Broken()
    try:
        with joined(rank, broken) as worker:
            train(worker, STEPS)
    except LookupError as error:
        kinds = Counter(kind for kind, _ in broken.events)
        return {"said": str(error), "steps": kinds["step"], "ends": kinds["end"]}
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    join_groups.main(globals())
