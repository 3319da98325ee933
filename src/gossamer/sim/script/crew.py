"""The processes that run a script, one for each simulated worker, and the memory they share."""

from __future__ import annotations

import contextlib
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, ScriptFailed
from gossamer.groups import Groups
from gossamer.replica import Layout
from gossamer.script.channel import VARIABLE, Channel, ChannelClosed, Said
from gossamer.script.fork_server import ForkServer
from gossamer.script.memory import MemoryPlan, ModelMemory
from gossamer.sim.script.script_settings import Script

_PATIENCE = 0.5
"""Seconds after which a wait looks whether it was interrupted."""
_REFUSED = 2


@dataclass
class Member:
    """One process."""

    rank: int
    channel: Channel
    process: int = 0
    unanswered: int = 0
    """What it was told to do and has not said to be done."""
    status: int | None = None
    """How it ended, once it has."""
    is_needed: bool = True
    """It was not killed by the simulation, and its loop is not over."""
    has_joined: bool = False
    hello: Said | None = None
    answer: Said | None = None
    """What it said when it had done the last of that."""

    def tell(self, kind: str, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        # Who is gone is noticed when it is waited for.
        with contextlib.suppress(ChannelClosed):
            self.channel.send(kind, values, **more)

    def order(self, kind: str, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Tell it to do something, which it will say to be done."""
        self.unanswered += 1
        self.tell(kind, values, **more)


@dataclass(frozen=True)
class ScriptModel:
    """What the simulator knows of the model of a script."""

    layout: Layout
    initial: Tensor
    initial_buffers: Tensor


class Crew:
    """All processes of one run."""

    def __init__(
        self, server: ForkServer, script: Script, ranks: Sequence[int], size: int, *,
        seed: int, method: str | None, threads: int, outputs: Path,
    ) -> None:  # fmt: skip
        """`outputs` is a folder for what the processes print."""
        self._server = server
        self._script = script
        self.is_interrupted: Callable[[], bool] = lambda: False
        self.members: list[Member] = []
        self.host: Member | None = None
        """The process with the servers' optimisers."""
        self.memory: ModelMemory | None = None
        self.notices: list[str] = []
        outputs.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            self._start(rank, size, seed, method, threads, outputs)

    def _start(
        self, rank: int, size: int, seed: int, method: str | None, threads: int, outputs: Path
    ) -> None:
        channel, theirs = Channel.pair()
        variables = {
            "GOSSAMER_RANK": str(rank), "GOSSAMER_SIZE": str(size),
            "GOSSAMER_LOCAL_RANK": str(rank), "GOSSAMER_LOCAL_SIZE": str(size),
            "GOSSAMER_STORE": "127.0.0.1:1", "GOSSAMER_SEED": str(seed), VARIABLE: "1",
            "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip
        if method is not None:
            variables["GOSSAMER_METHOD"] = method
        with (
            theirs,
            (outputs / f"worker-{rank}.out").open("wb") as out,
            (outputs / f"worker-{rank}.err").open("wb") as err,
        ):
            number = self._server.start(
                self._script.command, variables, threads, theirs, out.fileno(), err.fileno()
            )
        self.members.append(Member(rank, channel, number))

    # ------------------------------------------------------------------ the beginning

    def meet(self) -> Said:
        """Wait until all have called `join`; what worker 0 says of its model and optimiser."""
        for member in self.members:
            member.hello = self.next(member)
            member.has_joined = True
        first = self.members[0].hello
        assert first is not None
        for member in self.members[1:]:
            assert member.hello is not None
            if member.hello["digest"] != first["digest"]:
                raise ConfigurationError(
                    f"the model of worker {member.rank} is another than that of worker 0; names "
                    "and shapes of parameters and buffers must be the same on all workers"
                )
        return first

    def welcome(self, groups: Groups) -> ModelMemory:
        """Everyone gets the memory and goes on to its `with`."""
        assert self.members[0].hello is not None
        plan = MemoryPlan.from_json(self.members[0].hello["plan"])
        self.memory = ModelMemory(plan)
        values = {"plan": plan.to_json(), "groups": groups}
        for member in self.members:
            member.tell("welcome", values, files=[self.memory.file])
        return self.memory

    def begin(self, *, has_host: bool) -> ScriptModel:
        """Everyone starts from the model of worker 0."""
        memory, first = self.memory, self.members[0]
        assert memory is not None
        assert first.hello is not None
        ready = [self._ready(member) for member in self.members]
        self.notices += ready[0]["notices"]
        for name in ("statistics", "counters"):
            for member in self.members[1:]:
                memory.raw(name, member.rank).copy_(memory.raw(name, first.rank))
        memory.value[:] = memory.value[first.rank].clone()
        memory.served.copy_(memory.value[first.rank])
        for member in self.members[1:]:
            member.tell("begin", raw=ready[0].raw)
        if has_host:
            channel, theirs = Channel.pair()
            with theirs:
                first.tell("begin", files=[theirs.fileno()])
                self.host = Member(-1, channel, first.process, unanswered=1)
            self.wait_until_done(self.host)
        else:
            first.tell("begin")
        shapes = tuple(torch.Size(shape) for shape in first.hello["shapes"])
        names = tuple(str(number) for number in range(len(shapes)))
        layout = Layout(names, shapes, tuple(shape.numel() for shape in shapes))
        statistics = memory.raw("statistics", first.rank).clone()
        kind: torch.dtype = getattr(torch, first.hello["statistics_type"])
        return ScriptModel(layout, memory.value[first.rank].clone(), statistics.view(kind))

    def _ready(self, member: Member) -> Said:
        while (said := self.next(member)).kind != "ready":
            if said.kind != "report":  # of a model that nobody has trained yet
                raise ConfigurationError(
                    f"worker {member.rank} asked for batches before `with gossamer.join(...)`; go "
                    "over worker.shard(loader) inside of it"
                )
        return said

    # ------------------------------------------------------------------ messages

    def next(self, member: Member) -> Said:
        """The next message of a process, but for what it says to be done."""
        while True:
            said = self._receive(member)
            if said.kind == "done":
                member.unanswered -= 1
                member.answer = said
                continue
            if said.kind == "failed":
                raise self._failure(member, said)
            return said

    def wait_until_done(self, member: Member) -> Said | None:
        """Until it has done all that it was told to do; what it said last."""
        while member.unanswered:
            said = self._receive(member)
            if said.kind == "failed":
                raise self._failure(member, said)
            assert said.kind == "done", f"expected done, got {said.kind}"
            member.unanswered -= 1
            member.answer = said
        return member.answer

    def _receive(self, member: Member) -> Said:
        channels = [member.channel, self._server.channel]
        while True:
            found = select.select(channels, [], [], 0 if self._server.has_news else _PATIENCE)[0]
            if self.is_interrupted():
                raise KeyboardInterrupt
            if member.channel in found:
                try:
                    return member.channel.receive()
                except ChannelClosed:
                    self._wait_for_end(member)
            if self._server.channel in found or self._server.has_news:
                self._notice_end()

    def _notice_end(self) -> None:
        try:
            news = self._server.ended()
        except ChannelClosed:
            raise ScriptFailed("the process that forks the workers was ended", 1) from None
        if news is None:
            return
        process, status = news
        for member in self.members:
            if member.process == process:
                member.status = status
                if member.is_needed:
                    raise self._early_end(member)

    def _wait_for_end(self, member: Member) -> None:
        """Its end of the channel is closed, so its end is near."""
        if member is self.host:
            raise ScriptFailed("the process with the servers' optimisers has ended", 1)
        while member.status is None:
            self._notice_end()
        raise self._early_end(member)

    def drained(self, member: Member) -> list[Said]:
        """What a process whose loop is over still says, up to its end."""
        said: list[Said] = []
        is_open, member.is_needed = True, False
        while True:
            channels = [self._server.channel, *([member.channel] if is_open else [])]
            is_waiting = member.status is None and not self._server.has_news
            found = select.select(channels, [], [], _PATIENCE if is_waiting else 0)[0]
            if self.is_interrupted():
                raise KeyboardInterrupt
            if member.channel in found:
                try:
                    said.append(member.channel.receive())
                except ChannelClosed:
                    is_open = False
            elif member.status is not None:
                return self._checked(member, said)
            if self._server.channel in found or self._server.has_news:
                self._notice_end()

    def _checked(self, member: Member, said: list[Said]) -> list[Said]:
        """A script may fail behind its loop, too."""
        for one in said:
            if one.kind == "failed":
                raise self._failure(member, one)
        if member.status:
            raise self._early_end(member)
        return said

    # ------------------------------------------------------------------ failures

    def _failure(self, member: Member, said: Said) -> Exception:
        if member is self.host:
            return ConfigurationError(said["text"])
        who = f"worker {member.rank}"
        if said["is_refused"]:
            return ConfigurationError(f"{said['place']}: {said['text']}")
        if said["is_exit"]:
            when = "before it joined"
            if member.has_joined:
                when = "before its loop was over" if member.is_needed else "behind its loop"
            status = said["status"] or _REFUSED
            return ScriptFailed(f"{who} left the script {when}: {said['what']}", status)
        text = f": {said['text']}" if said["text"] else ""
        hint = _on_gpu(said["text"])
        return ScriptFailed(
            f"{who} failed at {said['place']}: {said['what']}{text}{hint}", said["status"]
        )

    def _early_end(self, member: Member) -> Exception:
        """What is to be said of a process that has ended before its time."""
        while select.select([member.channel], [], [], 0)[0]:
            try:
                said = member.channel.receive()
            except ChannelClosed:
                break
            if said.kind == "failed":
                return self._failure(member, said)
        status, name = member.status or 0, self._script.path
        if status < 0:
            known = {one.value: one.name for one in signal.Signals}
            by = known.get(-status, f"signal {-status}")
            return ScriptFailed(f"worker {member.rank} was ended by {by}", 128 - status)
        if not member.has_joined:
            return ScriptFailed(
                f"{name} ended without calling gossamer.join; couple its training loop with "
                "`with gossamer.join(model, optimizer) as worker`",
                status or _REFUSED,
            )
        when = "before its loop was over" if member.is_needed else "behind its loop"
        return ScriptFailed(
            f"worker {member.rank} ended {when}, with exit code {status}",
            status or _REFUSED,
        )

    # ------------------------------------------------------------------ the end

    def kill(self, rank: int) -> None:
        """The simulation lets this worker die."""
        member = self.members[rank]
        member.is_needed = False
        self._server.kill(member.process)

    def close(self) -> None:
        """No process is left behind."""
        with contextlib.suppress(ChannelClosed):
            self._server.sweep()
        for member in (*self.members, *([self.host] if self.host else [])):
            member.channel.close()
        if self.memory is not None:
            self.memory.close()


def _on_gpu(text: str) -> str:
    if "CUDA" not in text and "NVIDIA" not in text:
        return ""
    return (
        "; in virtual time scripts run on the CPU, because a forked process cannot use a GPU; "
        "choose the device by torch.cuda.is_available()"
    )
