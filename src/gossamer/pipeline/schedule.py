"""The order in which the machines of a pipeline work on the micro-batches of a step.

The model is cut into chunks, one after the other; a machine holds one chunk, or several. A schedule
is a list of actions for each machine: the forward pass of a chunk for a micro-batch, its backward
pass, or the two halves of the backward pass, by the input and by the weights. Synchronous schedules
change time and memory, never the gradient.

GPipe and 1F1B are written here. The others are read from PyTorch's own tables, and its 1F1B is not,
because that table numbers the forward passes of the last machine from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

from gossamer.errors import ConfigurationError, unknown_name


class Pass(Enum):
    """What a machine does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of the backward pass, one after the other."""
    BY_INPUT = "I"
    """The gradient by the input, which the machine before waits for."""
    BY_WEIGHTS = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one chunk for one micro-batch."""

    kind: Pass
    chunk: int
    microbatch: int
    is_with_next: bool = field(default=False, compare=False)
    """Whether it begins only when the action after it could begin, too, because both overlap."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """For each machine of a pipeline its actions in order, and the machine of each chunk."""

    name: str
    microbatches: int
    machines: tuple[tuple[Action, ...], ...]
    machine_of: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.machine_of)

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must have ended before; of the other machines their results arrive."""
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind is Pass.FORWARD:
            if chunk:
                yield Action(Pass.FORWARD, chunk - 1, microbatch)
        elif kind is Pass.BY_WEIGHTS:
            yield Action(Pass.BY_INPUT, chunk, microbatch)
        else:
            yield Action(Pass.FORWARD, chunk, microbatch)
            if chunk + 1 < self.chunks:
                yield Action(self.backward_of(chunk + 1, microbatch), chunk + 1, microbatch)

    def backward_of(self, chunk: int, microbatch: int) -> Pass:
        """Whether this backward pass is done in one or in two halves."""
        return Pass.BY_INPUT if (chunk, microbatch) in self._halved else Pass.BACKWARD

    @cached_property
    def _halved(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (one.chunk, one.microbatch)
            for actions in self.machines
            for one in actions
            if one.kind is Pass.BY_INPUT
        )

    def check(self) -> None:
        """Refuse a table in which something is missing, done twice, or waited for in a circle."""
        found: dict[tuple[int, int], str] = {}
        for machine, actions in enumerate(self.machines):
            for one in actions:
                place = one.chunk, one.microbatch
                is_here = self.machine_of[one.chunk] == machine
                found[place] = found.get(place, "") + (one.kind.value if is_here else "?")
        for chunk in range(self.chunks):
            for microbatch in range(self.microbatches):
                passes = found.pop((chunk, microbatch), "")
                if passes not in ("FB", "FIW"):
                    raise ConfigurationError(
                        f"schedule {self.name}: chunk {chunk} has the passes {passes or 'none'} "
                        f"for micro-batch {microbatch}, expected FB or FIW"
                    )
        if found:
            raise ConfigurationError(
                f"schedule {self.name}: {next(iter(found))} is no chunk and micro-batch of it"
            )
        if sum(map(len, self.machines)) != len(list(self.in_an_order())):
            raise ConfigurationError(f"schedule {self.name}: its machines wait for each other")

    def in_an_order(self) -> Iterator[Action]:
        """The actions in an order in which each comes after those that it needs; those that can
        never begin are left out."""
        done: set[Action] = set()
        next_of = [0] * len(self.machines)
        is_stuck = False
        while not is_stuck:
            is_stuck = True
            for machine, actions in enumerate(self.machines):
                while next_of[machine] < len(actions):
                    action = actions[next_of[machine]]
                    if not done.issuperset(self.needs(action)):
                        break
                    done.add(action)
                    next_of[machine] += 1
                    is_stuck = False
                    yield action


SYNCHRONOUS = {
    "gpipe": "all forward passes, then all backward passes (Huang et al. 2019)",
    "1f1b": "one forward, one backward: as few activations as there are machines behind",
    "interleaved": "1F1B with several chunks a machine: a smaller bubble (Narayanan et al. 2021)",
    "looped_bfs": "several chunks a machine, breadth first (Lamy-Poirier 2023)",
    "zero_bubble": "interleaved, with the backward pass in two halves (Qi et al. 2024)",
    "zbv": "two chunks a machine in a V, the backward pass in two halves (Qi et al. 2024)",
    "dualpipev": "two chunks a machine in a V, from both ends at once (DeepSeek-AI 2024)",
}
"""The schedules that end before the parameters change."""

_TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_IN_A_V = ("zbv", "dualpipev")


def chunks_per_machine(name: str) -> int:
    """How many chunks of the model a machine holds in this schedule, unless one asks for more."""
    return 2 if name in _TORCH_NAMES else 1


def places_of(name: str, machines: int, chunks: int) -> tuple[int, ...]:
    """The machine of each chunk: in a loop over the machines, or there and back."""
    if name in _IN_A_V:
        return (*range(machines), *reversed(range(machines)))
    return tuple(chunk % machines for chunk in range(machines * chunks))


@lru_cache(maxsize=64)
def make_schedule_of(
    name: str, machines: int, microbatches: int, chunks: int = 0
) -> PipelineSchedule:
    """A synchronous schedule; `chunks` are those that each machine holds (0: as is usual)."""
    if name not in SYNCHRONOUS:
        raise unknown_name("pipeline", name, SYNCHRONOUS)
    if machines < 1 or microbatches < 1:
        raise ConfigurationError(
            f"pipeline {name}: stages and microbatches must be at least 1, got {machines} and "
            f"{microbatches}"
        )
    usual = chunks_per_machine(name)
    chunks = chunks or usual
    if (usual == 1 and chunks != 1) or (name in _IN_A_V and chunks != 2) or chunks < usual:
        allowed = "2 or more" if usual == 2 and name not in _IN_A_V else str(usual)
        raise ConfigurationError(
            f"pipeline {name}: a machine holds {allowed} chunks of the model, got {chunks}"
        )
    if name == "gpipe":
        order = tuple(_gpipe(stage, microbatches) for stage in range(machines))
    elif name == "1f1b":
        order = tuple(_one_f_one_b(stage, machines, microbatches) for stage in range(machines))
    else:
        order = _from_torch(name, machines, microbatches, chunks)
    schedule = PipelineSchedule(name, microbatches, order, places_of(name, machines, chunks))
    schedule.check()
    return schedule


def _gpipe(stage: int, microbatches: int) -> tuple[Action, ...]:
    return tuple(
        Action(kind, stage, microbatch)
        for kind in (Pass.FORWARD, Pass.BACKWARD)
        for microbatch in range(microbatches)
    )


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """A stage makes as many forward passes ahead as there are stages behind it, then one forward
    and one backward pass in turn."""
    ahead = min(stages - 1 - stage, microbatches)
    actions = [Action(Pass.FORWARD, stage, number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            actions.append(Action(Pass.FORWARD, stage, ahead + number))
        actions.append(Action(Pass.BACKWARD, stage, number))
    return tuple(actions)


def _from_torch(
    name: str, machines: int, microbatches: int, chunks: int
) -> tuple[tuple[Action, ...], ...]:
    """PyTorch's table, without the actions that are no work. Of an overlapped pair one action comes
    after the other, and the first waits for what either needs."""
    try:
        from torch.distributed.pipelining import _schedule_visualizer as tables
    except ImportError:
        raise ConfigurationError(
            f"pipeline {name} is read from a table of PyTorch that this version does not have; "
            "choose gpipe or 1f1b"
        ) from None
    try:
        ranks: Sequence[Sequence[Any]] = tables.get_schedule_ops(
            _TORCH_NAMES[name], machines, microbatches, chunks
        )
    except (ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"pipeline {name} cannot be made of {machines} stages, {microbatches} micro-batches "
            f"and {chunks} chunks a machine: {error or 'PyTorch refuses it'}; choose another number"
        ) from None
    return tuple(
        tuple(
            Action(
                Pass(part.computation_type.value), part.stage_index, part.microbatch_index or 0,
                is_with_next=bool(one.sub_actions) and part is one.sub_actions[0],
            )
            for one in actions if one is not None
            for part in (one.sub_actions or (one,))
            if part.computation_type.value in ("F", "B", "I", "W")
        )
        for actions in ranks
    )  # fmt: skip
