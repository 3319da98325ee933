"""The replicas of scripts: rows of memory that a script's process sees, too.

The user's own optimiser descends, in the worker's process: nobody else can make one. A descent is
an order to that process, which the coordinator waits for when somebody looks at the row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.script.memory import file_of, tensor_of
from gossamer.sim.kernel import Kernel
from gossamer.sim.replica_matrix import ReplicaStore, SimulatedReplica
from gossamer.sim.script.crew import Crew, Member


class ScriptStore(ReplicaStore):
    """The rows of all workers, or the range of one server."""

    def __init__(
        self, crew: Crew, parameters: Tensor, members: Sequence[Member], kernel: Kernel
    ) -> None:
        """`members` hold the optimisers of the rows; a centre that nobody descends has none."""
        super().__init__(len(parameters), parameters[0], make_optimiser("sgd"), kernel=kernel)
        self.parameters = parameters
        self._crew = crew
        self._members = members

    def value(self, row: int) -> Tensor:
        if self._members and self._members[row].unanswered:
            self._crew.wait_until_done(self._members[row])
        return self.parameters[row]

    def flush(self) -> None:
        for row in range(len(self.parameters)):
            self.value(row)

    def order(self, row: int, kind: str, values: Mapping[str, Any], **more: Any) -> None:
        """Nothing else is under way in this row when the process begins."""
        self.writable(row)
        self._members[row].order(kind, values, **more)

    def answer(self, row: int, kind: str, values: Mapping[str, Any], **more: Any) -> Sequence[int]:
        """The same, at once; the files that it gives back."""
        self.order(row, kind, values, **more)
        said = self._crew.wait_until_done(self._members[row])
        assert said is not None
        return said.files


class ScriptReplica(SimulatedReplica):
    """A row of the store, as a method sees it."""

    __slots__ = ("_descent", "_own", "_point", "_told")

    def __init__(
        self, store: ScriptStore, row: int, learning_rate: Callable[[float], float],
        on_descend: Callable[[SimulatedReplica, Sequence[int]], None], descent: Tensor,
        point: Tensor | None = None, own: Callable[[], Tensor | None] = lambda: None,
        told: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:  # fmt: skip
        """`descent` and `point` are what the process reads; `own` is the gradient that its loop has
        computed last, which need not be sent back; `told` is what each order says besides."""
        super().__init__(store, row, learning_rate, on_descend)
        self._descent = descent
        self._point = point
        self._own = own
        self._told = told

    @property
    def _script_store(self) -> ScriptStore:
        assert isinstance(self.store, ScriptStore)
        return self.store

    def _sent(self, gradient: Tensor, at: Tensor | None) -> dict[str, Any]:
        self.store.value(self.row)  # what was sent before has been read
        is_given = gradient is not self._own()
        if is_given:
            self._descent.copy_(gradient)
        has_point = at is not None and self._point is not None
        if at is not None and self._point is not None:
            self._point.copy_(at)
        return {"is_given": is_given, "has_point": has_point, **self._told()}

    def descend_(
        self, gradient: Tensor, *, read: int | Sequence[int] = (), at: Tensor | None = None,
        share: float = 1.0,
    ) -> None:  # fmt: skip
        self._on_descend(self, (read,) if isinstance(read, int) else read)
        self._script_store.order(self.row, "descend", {**self._sent(gradient, at), "share": share})
        self.store.versions[self.row] += 1

    def clipped(self, gradient: Tensor) -> Tensor:
        self._script_store.answer(self.row, "clip", self._sent(gradient, None))
        return self._descent.clone()

    def penalised(self, gradient: Tensor, at: Tensor) -> Tensor:
        self._script_store.answer(self.row, "penalise", self._sent(gradient, at))
        return self._descent.clone()

    def tune_(self, factors: Mapping[str, float]) -> None:
        if factors:
            raise ConfigurationError(
                "the optimiser of a script in virtual time is not tuned; simulate its task, or "
                "couple the script's own workers by `gossamer run`"
            )

    def optimiser_state(self) -> Tensor:
        files = self._script_store.answer(self.row, "state", self._told())
        return tensor_of(files[0], self.store.parameters.dtype)

    def load_optimiser_state_(self, state: Tensor) -> None:
        file = file_of(state.to(self.store.parameters.dtype))
        try:
            self._script_store.answer(self.row, "load", self._told(), files=[file])
        finally:
            os.close(file)

    def reset_optimiser_(self) -> None:
        self._script_store.answer(self.row, "reset", self._told())
