"""The first door: keep your loop. The method's coroutine runs between the user's own steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.real.binding import Binding
from gossamer.real.coupling import Coupling
from gossamer.real.environment import connect
from gossamer.real.sharding import shard_of
from gossamer.real.transport import Transport
from gossamer.replica import trainable

T = TypeVar("T")


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: str | MethodSpec | None = None,
    *,
    seed: int | None = None,
    steps: int = 1000,
    transport: str | Transport | None = None,
) -> JoinedWorker:
    """Couple a training loop with those of the other workers.

    Which workers there are is decided outside: by `gossamer run`, torchrun, mpirun or srun. Under
    plain `python` there is one, and the loop is exactly what it was. `steps` is about how many
    steps the loop will make: methods with a period choose one that suits. Every worker starts from
    the model of worker 0.
    """
    chosen = method if method is not None else os.environ.get("GOSSAMER_METHOD")
    if chosen is None:
        raise ConfigurationError(
            "no method was given; write join(model, optimizer, method='ad_psgd') or start with "
            "gossamer run --method ad_psgd"
        )
    spec = parse_method(chosen)
    if hasattr(model, "_orig_mod"):
        raise ConfigurationError(
            "the model is already compiled; join the plain module first and compile it afterwards"
        )
    connected = connect(transport) if transport is None or isinstance(transport, str) else transport
    given = int(os.environ.get("GOSSAMER_SEED", "0")) if seed is None else seed
    coupling = None
    if connected is not None and connected.size > 1:
        binding = Binding(trainable(model))
        coupling = Coupling(connected, spec, model, binding, optimizer, given, steps)
    return JoinedWorker(model, optimizer, spec, coupling, given)


@dataclass
class JoinedWorker:
    """What a user's loop holds on to. With one worker it touches nothing."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    method: MethodSpec
    coupling: Coupling | None
    seed: int

    def __post_init__(self) -> None:
        self._is_accumulating = False
        self._is_open = False

    @property
    def rank(self) -> int:
        return 0 if self.coupling is None else self.coupling.rank

    @property
    def size(self) -> int:
        return 1 if self.coupling is None else self.coupling.size

    @property
    def is_main(self) -> bool:
        """Whether this worker does what is done once: printing, saving."""
        return self.coupling is None or self.coupling.is_main

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __enter__(self) -> JoinedWorker:
        if self.coupling is not None:
            self.coupling.begin()
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        if self.coupling is None:
            return
        if error is None:
            self.coupling.finish()
        else:
            self.coupling.abandon()

    def step(self, scaler: Any = None) -> None:
        """Instead of `optimizer.step()`. A gradient scaler (AMP) is given along; `scaler.update()`
        stays the loop's."""
        if not self._is_open:
            raise ConfigurationError(
                "worker.step() was called outside of `with gossamer.join(...) as worker`; "
                "move the loop inside"
            )
        if self._is_accumulating:
            return
        if self.coupling is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self.coupling.step(skips_infinite=scaler is not None)
        elif scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)

    @contextlib.contextmanager
    def accumulate(self) -> Generator[None]:
        """Inside, `step()` does nothing: gradients add up over several batches."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def clip_grad_norm_(self, max_norm: float, scope: str = "local") -> None:
        """Clip this worker's gradient now ("local"), or the combined one when it is applied
        ("global"; for methods that combine gradients). Call it before `step()`."""
        if scope not in ("local", "global"):
            raise ConfigurationError(f"scope must be 'local' or 'global', got {scope!r}")
        if scope == "local" or self.coupling is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self.coupling.replica.clip = max_norm

    def shard(self, loader: Iterable[T]) -> Iterable[T]:
        """This worker's part of a loader's batches, each batch to one worker.

        Synchronous methods get equal numbers of batches; with asynchronous ones whoever is ready
        takes the next batch, so that fast workers do more.
        """
        return shard_of(loader, self.coupling, self.seed)

    @contextlib.contextmanager
    def consensus(self) -> Generator[nn.Module]:
        """Inside, the model is the method's output: the mean of workers, the centre, the server's.

        No other worker need do the same; training goes on from where it was.
        """
        if self.coupling is None:
            yield self.model
            return
        with self.coupling.output_in_place():
            yield self.model

    def state_dict(self) -> dict[str, Any]:
        """This worker's part of a checkpoint, beside the model's and the optimiser's own."""
        state: dict[str, Any] = {"method": str(self.method), "rank": self.rank, "size": self.size}
        if self.coupling is not None:
            state |= self.coupling.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first step. The model and the optimiser are loaded by their own."""
        for name, mine in (("method", str(self.method)), ("size", self.size)):
            if state.get(name) != mine:
                raise ConfigurationError(
                    f"the checkpoint is of {name} {state.get(name)!r}, this run has {mine!r}"
                )
        if self.coupling is not None:
            self.coupling.load_state_dict(state)
