"""What a simulated worker knows of its run, and how it talks to the coordinator.

It stands where `gossamer.real.session.Session` stands on real workers: the replica, the servers and
the output model ask it what they ask that one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.groups import Grouping, Groups
from gossamer.methods import MethodSpec
from gossamer.observe.run_observer import RunObserver
from gossamer.optim.optimisers import Optimiser
from gossamer.payload import decode, encode
from gossamer.real.addresses import Addresses
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.shared_values import SharedValue, SharedValues
from gossamer.real.output_model import Contribution, Untrained
from gossamer.real.replicas import Place
from gossamer.real.transports.transport import Store
from gossamer.replica import cut
from gossamer.script.channel import Channel, Said
from gossamer.script.memory import MemoryPlan, ModelMemory


class VirtualSession:
    """One simulated worker, as its own process knows it."""

    def __init__(
        self, channel: Channel, spec: MethodSpec, model: nn.Module, binding: ModuleBinding,
        optimizer: torch.optim.Optimizer, observer: RunObserver, steps: int,
    ) -> None:  # fmt: skip
        self.rank, self.size = (int(os.environ[f"GOSSAMER_{one}"]) for one in ("RANK", "SIZE"))
        self.spec, self.method = spec, spec.method
        self.channel = channel
        self.observer, self.metrics = observer, observer.metrics
        self._process = os.getpid()
        self.main = 0
        """The worker that does what is done once."""
        self.store = cast(Store, SimpleNamespace(agree=self._agree, get=self._get))
        # Nobody asks this process for anything but the coordinator.
        self.router = SimpleNamespace(offer=_nothing)
        self.notices: Sequence[str] = ()
        """What the user must be told; the command says it."""
        self.steps_made = 0
        self._grants: list[int] = []
        self._granted_of = ""
        self.used = 0
        """How many of the batches that came with the last point the loop has taken."""
        self.samples = 0
        """In the batches that the loop has taken since its last step."""
        self.samples_of_pass = 0
        self.pace = (1, 0.0)
        """The samples for which the time of the gradient was drawn that the loop computes, and that
        time in virtual seconds."""
        self.training: frozenset[int] = frozenset(range(self.size))
        """Who made steps when this worker's gradient began."""
        self._meet(model, binding, optimizer, steps)

    def _meet(
        self, model: nn.Module, binding: ModuleBinding, optimizer: torch.optim.Optimizer, steps: int
    ) -> None:
        own, layout = Untrained.of(model), binding.layout
        parts = [f"{name} {tuple(shape)}" for name, shape in zip(
            layout.names, layout.shapes, strict=True
        )]  # fmt: skip
        parts += [f"{name} {tuple(b.shape)}" for name, b in model.named_buffers()]
        self._statistics_type = own.statistics.dtype
        plan = MemoryPlan(
            self.size, layout.total, name_of(binding.dtype),
            own.statistics.nbytes, own.counters.nbytes,
        )  # fmt: skip
        self.say("hello", {
            "digest": hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest(),
            "plan": plan.to_json(), "shapes": [list(shape) for shape in layout.shapes],
            "steps": steps, "method": str(self.spec), "optimiser": type(optimizer).__name__,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "statistics_type": name_of(own.statistics.dtype),
        })  # fmt: skip
        told = self.next("welcome")
        groups: Groups = tuple(tuple(group) for group in told["groups"])
        self.grouping = Grouping(self.rank, self.size, groups)
        self.group = self.grouping.group if groups else ()
        self.options: Mapping[str, Any] = self.spec.resolve(self.grouping.ends, steps)
        self.is_synchronous = self.method.is_synchronous(self.options)
        self.is_trained_itself = self.method.is_trained_itself(self.grouping.ends, self.options)
        slices = cut(layout.sizes, self.spec.servers) if self.method.has_server else ()
        self.addresses = Addresses(self.size, slices, layout)
        self.memory = ModelMemory(MemoryPlan.from_json(told["plan"]), told.files[0])

    # ------------------------------------------------------------------ as on real workers

    @property
    def present(self) -> int:
        """How many workers there are: in virtual time a loop has all of them from the start."""
        return self.size

    @property
    def is_lowest(self) -> bool:
        return self.rank == self.main

    def place(self, end: int) -> Place:
        if end < self.size:
            return Place(self.memory.value[end])
        return Place(self.memory.served[self.addresses.slices[end - self.size]])

    def optimiser(self, chosen: Optimiser) -> Optimiser:
        return self.spec.optimiser(chosen, self.grouping.ends, is_synchronous=self.is_synchronous)

    def momentum(self, own: float) -> float:
        return self.spec.momentum(own, self.grouping.ends, is_synchronous=self.is_synchronous)

    def last_words(self, lost: PeerLost) -> PeerLost:
        return lost

    def summary(self) -> dict[str, Any]:
        return {"steps": self.steps_made}

    # ------------------------------------------------------------------ messages

    def say(self, kind: str, values: Mapping[str, Any] | None = None, raw: bytes = b"") -> None:
        if not self.is_here:
            raise ConfigurationError(
                "the worker was used in a process that the script has forked, and only the one "
                "that called gossamer.join takes part; use the worker there"
            )
        self.channel.send(kind, values, raw)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that has joined."""
        return os.getpid() == self._process

    def next(self, kind: str) -> Said:
        said = self.channel.receive()
        assert said.kind == kind, f"expected {kind}, got {said.kind}"
        return said

    def ask(self, kind: str, values: Mapping[str, Any], answer: str) -> Said:
        self.say(kind, values)
        return self.next(answer)

    def given_output(self) -> Contribution:
        """What the coordinator has put into this worker's row."""
        statistics = self.memory.raw("output_statistics", self.rank).clone()
        return Contribution(
            self.memory.output[self.rank].clone(), 1.0, statistics.view(self._statistics_type),
            self.memory.raw("output_counters", self.rank).clone(),
        )  # fmt: skip

    def publish_buffers(self, model: nn.Module) -> None:
        plan = self.memory.plan
        if plan.statistics or plan.counters:
            own = Untrained.of(model)
            self.memory.raw("statistics", self.rank).copy_(own.statistics.view(torch.uint8))
            self.memory.raw("counters", self.rank).copy_(own.counters)

    # ------------------------------------------------------------------ batches

    def grant(self, batches: list[int], name: str) -> None:
        """These batches of that pass come with the next point."""
        self._grants, self._granted_of, self.used = batches, name, 0

    def take(self, epoch: str) -> int:
        if self._granted_of == epoch and self.used < len(self._grants):
            self.used += 1
            return self._grants[self.used - 1]
        said = self.ask("batch", {"pass": epoch, "used": self.used}, "position")
        if self._granted_of != epoch:
            self.grant([], epoch)
        return said["position"]

    def took(self, samples: int, of: int) -> None:
        self.samples += samples
        self.samples_of_pass = of

    def _agree(self, key: str, proposal: str) -> str:
        return self.ask("claim", {"key": key, "proposal": proposal}, "claimed")["value"]

    def _get(self, key: str) -> str | None:
        return self.ask("claim", {"key": key, "proposal": None}, "claimed")["value"]


def _nothing(*_: object) -> None:
    pass


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class VirtualValues(SharedValues):
    """The values that loops share, which the coordinator passes on; with a synchronous method when
    all have made the call."""

    def __init__(self, session: VirtualSession) -> None:
        super().__init__(session.rank, session.size, is_synchronous=session.is_synchronous)
        self._session = session

    def _ask(self, own: SharedValue, **values: Any) -> Said:
        told = {"word": own.word, "name": own.name, **values}
        self._session.say("share", told, encode(own))
        return self._session.next("shared")

    def _matched(self, own: SharedValue, place: str) -> Mapping[int, list[Any]]:
        said = _values_of(self._ask(own, place=place))
        self._check_words(own, said)
        return {one.rank: [one.value] for one in said}

    def _exchange(
        self, own: SharedValue, *, is_heard: bool
    ) -> tuple[Sequence[SharedValue], Sequence[int]]:
        answer = self._ask(own, is_heard=is_heard)
        return _values_of(answer), answer["live"]


def _values_of(said: Said) -> list[SharedValue]:
    found: list[SharedValue] = []
    at = 0
    for length in said["lengths"]:
        found.append(decode(said.raw[at : at + length]))
        at += length
    return found
