"""The first door: users keep their loop, and `worker.step()` runs the method between its steps."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.observe.callbacks import Callback
from gossamer.observe.observer import SECOND
from gossamer.observe.run_observer import RunObserver
from gossamer.real.join.balance import LoopShares
from gossamer.real.join.checkpoints.loop_checkpoints import restore_loop, save_loop
from gossamer.real.join.checks import (
    check_apart,
    check_joinable,
    check_method,
    check_no_mesh,
    check_one_optimiser,
    is_alone,
    keep_report,
    reported,
)
from gossamer.real.join.joined_optimizer import JoinedOptimizer, ScaledGradients, check_scaler
from gossamer.real.join.learning.lessons import LearningWords
from gossamer.real.join.loader import Passes, shard_of
from gossamer.real.join.loop_session import LoopSession
from gossamer.real.join.recalibration import BATCHES
from gossamer.real.join.scaling.large_batch_words import LargeBatchWords
from gossamer.real.join.servers import momentum_left_out
from gossamer.real.join.several_optimizers import parts_of, taken_together
from gossamer.real.join.shared_values import SharedWords
from gossamer.real.launch.console import say
from gossamer.real.launch.environment import connect, discover
from gossamer.real.transports.transport import Transport
from gossamer.replica import trainable
from gossamer.script.channel import ScriptProcess
from gossamer.specs import check_range

T = TypeVar("T")


def join(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: str | MethodSpec | None = None,
    *,
    seed: int | None = None,
    steps: int = 1000,
    transport: str | Transport | None = None,
    callbacks: Sequence[Callback] = (),
    statistics_batches: int = BATCHES,
    mesh: Any = None,
    example: Any = None,
) -> JoinedWorker:
    """Couple a training loop with those of the other workers.

    Which workers there are is decided outside: by `gossamer run`, torchrun, mpirun or srun. Under
    plain `python` there is one, and the loop is exactly what it was. A method given at the start,
    by `gossamer run --method` or GOSSAMER_METHOD, goes before the one given here. `steps` is about
    how many steps the loop will make: methods with a period choose one that suits. Every worker
    starts from the model of worker 0.

    Several optimisers, and several models, are given as lists. `worker.step()` makes the steps of
    all optimisers, `worker.step(optimizer=one)` that of one.

    `statistics_batches` is how many of its batches each worker keeps, at most, to recompute
    BatchNorm's statistics for the output model, which is not the one that it trains; with 0 the
    output has the mean of the workers' statistics.

    `mesh` is the part of a device mesh over which FSDP2 or DTensors have sharded the model: an
    island. The islands are coupled then, shard by shard. With `stages=` in the method the loop
    calls `worker.through_stages`, and `example` is a batch as it enters the model.

    `callbacks` hear of what happens in this process: its worker's steps, exchanges, stale and
    dropped gradients, the servers' that live here, deaths of other workers, and the end. Steps and
    the end are told in the thread of the loop; all else may come from another thread, such as the
    one that receives. No two calls overlap.
    """
    chosen = os.environ.get("GOSSAMER_METHOD", method)
    spec = None if chosen is None else parse_method(chosen)
    model, optimizer = taken_together(model, optimizer)
    check_joinable(model, optimizer)
    check_range("statistics_batches", statistics_batches, 0)
    own = int(os.environ.get("GOSSAMER_SEED", "0")) if seed is None else seed
    simulation = ScriptProcess.of_environment()
    if simulation is not None:
        check_no_mesh(mesh)
        from gossamer.real.join.virtual.virtual_worker import virtual_worker

        return virtual_worker(
            simulation, model, optimizer, spec, own, steps,
            RunObserver(discover().size, callbacks=callbacks), statistics_batches,
        )  # fmt: skip
    alone = is_alone(transport)
    if not alone:
        check_method(spec)
        check_one_optimiser(optimizer, trainable(model))
    connected = connect(transport) if transport is None or isinstance(transport, str) else transport
    if connected is None or alone or spec is None:
        return JoinedWorker(model, optimizer, spec, None, own, RunObserver(1, callbacks=callbacks))
    return coupled(
        connected, model, optimizer, spec, seed=own, steps=steps, callbacks=callbacks,
        statistics_batches=statistics_batches, mesh=mesh, example=example,
    )  # fmt: skip


def coupled(
    transport: Transport, model: nn.Module, optimizer: torch.optim.Optimizer, spec: MethodSpec, *,
    seed: int = 0, steps: int = 1000, callbacks: Sequence[Callback] = (),
    statistics_batches: int = BATCHES, mesh: Any = None, example: Any = None,
) -> JoinedWorker:  # fmt: skip
    """Couple a loop that `join` has checked, over a transport of any size."""
    if mesh is not None or spec.shape.machines > 1:
        from gossamer.real.join.divided.stage_loop import joined_part

        return joined_part(
            transport, model, optimizer, spec, mesh, example, seed=seed, steps=steps,
            callbacks=callbacks,
        )  # fmt: skip
    check_apart(trainable(model))
    observer = RunObserver(transport.size, [transport.rank], callbacks=callbacks)
    coupling = LoopSession(
        transport, spec, model, optimizer, observer, seed=seed, steps=steps,
        statistics_batches=statistics_batches,
    )  # fmt: skip
    is_synchronous = coupling.session.is_synchronous
    notices = momentum_left_out(spec, optimizer, is_synchronous=is_synchronous)
    return JoinedWorker(model, optimizer, spec, coupling, seed, observer, notices)


@dataclass
class JoinedWorker(SharedWords, LearningWords, LargeBatchWords):
    """What a user's loop works with. With one worker it touches nothing."""

    model: nn.Module
    own_optimizer: torch.optim.Optimizer
    """The user's."""
    method: MethodSpec | None
    coupling: LoopSession | None
    seed: int
    observer: RunObserver
    notices: Sequence[str] = ()
    """Sentences that the user must be told; worker 0 prints them when the loop begins."""
    _is_accumulating: bool = field(default=False, init=False)
    _was_open: bool = field(default=False, init=False)
    _is_open: bool = field(default=False, init=False)
    _passes: Passes = field(default_factory=Passes, init=False)

    def __post_init__(self) -> None:
        if self.coupling is not None and self.coupling.shares is not None:
            self._passes = self.coupling.shares
        self._passes.accounts = None if self.coupling is None else self.coupling.accounts
        self.optimizer = JoinedOptimizer(
            self.own_optimizer, self._make_step, is_coupled=self.coupling is not None
        )
        """Stands for the user's optimiser wherever something else makes its steps: its `step()` is
        `step()` of this worker."""
        is_coupled, parts = self.coupling is not None, parts_of(self.own_optimizer)
        self.optimizers = [self.optimizer] if len(parts) == 1 else [
            JoinedOptimizer(part, self._make_step, is_coupled=is_coupled) for part in parts
        ]  # fmt: skip
        """The same for each of several optimisers: a step of one is `step(optimizer=that one)`."""
        for one in (self.optimizer, *self.optimizers):
            one.family = (self.optimizer, *self.optimizers)

    @property
    def rank(self) -> int:
        return 0 if self.coupling is None else self.coupling.session.rank

    @property
    def size(self) -> int:
        return 1 if self.coupling is None else self.coupling.session.present

    @property
    def is_main(self) -> bool:
        """Whether this worker does what is done once: printing, saving."""
        return self.coupling is None or self.coupling.session.is_lowest

    @property
    def is_open(self) -> bool:
        """Whether the loop has begun and not ended."""
        return self._is_open

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __enter__(self) -> JoinedWorker:
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._is_open = False
            if self.coupling is not None:
                self.coupling.abandon()
            self.observer.callbacks.close()

    def open(self) -> JoinedWorker:
        """Begin the coupled loop, as entering the `with` does; `close()` ends it. If the script
        ends without `close()`, the other workers see this worker die."""
        if self._was_open:
            raise ConfigurationError(
                "this worker has been used already; do all training in one "
                "`with gossamer.join(...)`"
            )
        self._was_open = True
        if self.coupling is not None:
            with self.coupling.last_words():
                self.coupling.begin()
            for notice in self.notices if self.rank == 0 else ():
                say(notice)
        else:
            self.observer.callbacks.begin(time.monotonic_ns())
        self._is_open = True
        return self

    def close(self) -> None:
        """End the coupled loop, as leaving the `with` does: wait for the others, then hold the
        output model. A second call does nothing."""
        if not self._was_open:
            self._open_for("close")
        if not self._is_open:
            return
        self._is_open = False
        if self.coupling is not None:
            with self.coupling.last_words():
                self.coupling.finish()
        self.observer.ended(self._summary())

    def _summary(self) -> dict[str, Any]:
        """What this worker did, by the names of the summary of `gossamer train`."""
        seconds = self.observer.callbacks.seconds(time.monotonic_ns())
        own = self.observer.metrics.workers[self.rank]
        own.lasted_ns = round(seconds * SECOND)
        return {
            "method": None if self.method is None else str(self.method),
            "rank": self.rank,
            "workers": self.size,
            "seed": self.seed,
            "seconds": seconds,
            "notices": list(self.notices),
            **({"steps": own.steps} if self.coupling is None else self.coupling.summary()),
        }

    def _open_for(self, what: str) -> None:
        if not self._is_open:
            raise ConfigurationError(
                f"worker.{what}() was called outside of `with gossamer.join(...) as worker`; "
                "move it inside, or between worker.open() and worker.close()"
            )

    def step(
        self, scaler: Any = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:  # fmt: skip
        """Instead of `optimizer.step()`. A gradient scaler (AMP) is given along; `scaler.update()`
        stays the loop's. The `.grad`s hold this worker's gradient before it and nothing of use
        afterwards: where gradients are combined, the mean may never pass through them.

        With `optimizer`, one of several, it is a step of the method in which only that one's
        parameters descend: the gradients of the others count as zero and are kept."""
        joined = self.optimizer if optimizer is None else self._joined(optimizer)
        if scaler is None:
            self._make_step(joined.optimizer)
            return
        self._open_for("step")
        check_scaler(scaler, joined)
        if not self._is_accumulating:
            scaler.step(joined)

    def _joined(self, optimizer: torch.optim.Optimizer) -> JoinedOptimizer:
        for one in self.optimizers:
            if optimizer is one or optimizer is one.optimizer:
                return one
        raise ConfigurationError(
            f"worker.step(optimizer=...) got a {type(optimizer).__name__} that was not joined; give"
            " it one of those that gossamer.join was given"
        )

    def _make_step(self, own: torch.optim.Optimizer, scaled: ScaledGradients | None = None) -> None:
        if not self._is_open:
            self._open_for("step")
        if self._is_accumulating:
            return
        self._tell_step()
        if self.coupling is None:
            for part in parts_of(own) if scaled is None else ():
                part.step()
            if scaled is not None:
                scaled.step_alone()
            return
        if scaled is not None:
            scaled.unscale()
        with self.coupling.last_words():
            if own is self.own_optimizer:
                self.coupling.step(skips_infinite=scaled is not None)
            else:
                self.coupling.step_alone(own, skips_infinite=scaled is not None)

    def _tell_step(self) -> None:
        # A schedule over this optimiser must not complain that it makes no steps.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        now_ns, coupling = time.monotonic_ns(), self.coupling
        rank = 0 if coupling is None else coupling.session.rank
        self.observer.computed(rank, (now_ns, now_ns), 0, 0, None)

    def through_stages(
        self, inputs: Any, targets: Any, loss: Callable[[Any, Any], Tensor]
    ) -> Tensor:
        """Make the gradient of a batch for `step()`, and return its loss: with `stages=` through
        the stages of this replica, elsewhere by `loss(model(inputs), targets).backward()`."""
        self.own_optimizer.zero_grad()
        (found := loss(self.model(inputs), targets)).backward()
        return found.detach()

    @contextlib.contextmanager
    def accumulate(self) -> Generator[None]:
        """Inside, `step()` and clipping do nothing: gradients add up over several batches."""
        self._accumulate(True)
        try:
            yield
        finally:
            self._accumulate(False)

    def _accumulate(self, is_accumulating: bool) -> None:
        self._is_accumulating = is_accumulating
        if self.coupling is not None and self._is_open:
            self.coupling.gradients.is_accumulating = is_accumulating

    def clip_grad_norm_(self, max_norm: float, scope: str = "local") -> Tensor | None:
        """Clip this worker's gradient now ("local"; returns its norm), or the combined one when it
        is applied ("global"; for methods that combine gradients). Call it before `step()`."""
        if scope not in ("local", "global"):
            raise ConfigurationError(f"scope must be 'local' or 'global', got {scope!r}")
        if self._is_accumulating:
            return None
        if scope == "local" or self.coupling is None:
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._open_for("clip_grad_norm_")
        method = self.coupling.session.method
        if method.server is not None:
            raise ConfigurationError(
                f"{method.name} combines gradients on its servers, each of which "
                "sees a slice; clip with scope='local'"
            )
        self.coupling.replica.clip = max_norm
        return None

    def shard(self, loader: Iterable[T]) -> Iterable[T]:
        """This worker's part of a loader's batches, each batch to one worker.

        Synchronous methods get equal numbers of batches; with asynchronous ones whoever is ready
        takes the next batch, so that fast workers do more. With `balance=speed` each worker's batch
        is as large as it is fast.
        """
        session = None if self.coupling is None else self.coupling.session
        if session is not None and isinstance(self._passes, LoopShares):
            return self._passes.shard(loader, session, self.seed)
        return shard_of(loader, session, self.seed, self._passes)

    def _shared(self, word: str, name: str, value: Any, source: int) -> Any:
        self._open_for(word)
        if self.coupling is None:
            return [value] if word == "gather" else value
        caller = inspect.stack(0)[2]
        place = f"{os.path.basename(caller.filename)}:{caller.lineno}"
        with self.coupling.last_words():
            return self.coupling.shared.call(word, name, value, source, place)

    @contextlib.contextmanager
    def consensus(self) -> Generator[nn.Module]:
        """Inside, the model is the method's output: the mean of workers, the centre, the server's.
        No other worker need do the same; training goes on from where it was. With a synchronous
        method it is the output after the steps that this worker has made, for which it waits for
        slower workers; those that are ahead, as workers of local SGD may be within a period, give
        what they have. With an asynchronous one it is what every worker and server holds when it is
        asked, each of them whole. Its BatchNorm statistics are its own, recomputed on batches that
        this worker has trained on.
        """
        if self.coupling is None or (self._was_open and not self._is_open):
            yield self.model  # alone, or after the end, it is the output already
            return
        self._open_for("consensus")
        with contextlib.ExitStack() as stack:
            with self.coupling.last_words():
                stack.enter_context(self.coupling.output.in_place())
            yield self.model

    def report(self, **values: float) -> None:
        """Tell the run what was measured: `worker.report(loss=0.31, accuracy=0.9)`.

        The report of the main worker counts, so no loop need ask who calls it. In virtual time
        the reports are the curve of the run, by which `gossamer compare` ranks. On real workers and
        alone callbacks hear of it; under `gossamer run --output folder` it is a line in its folder.
        """
        row: dict[str, Any] = {**reported(values), "worker": self.rank}
        self.tell_loss(row)
        own = self.observer.metrics.workers[self.rank]
        row |= {"steps": own.steps, "seconds": self.observer.callbacks.seconds(time.monotonic_ns())}
        self.observer.evaluated(row)
        if self.is_main:
            keep_report(row)

    def recalibrate(
        self, batches: Iterable[Any], forward: Callable[[Any], object] | None = None
    ) -> None:
        """Recompute BatchNorm's statistics of the output model on these batches.

        Needed only where the loop does not call `model(...)` itself in training mode, or where the
        batches that it trained on are not to be used. In the loop: on the first of these for every
        output from now on. Inside `consensus()`, or after the end: at once. A batch is passed as
        `forward(batch)`, or else to the model: its first part, or by name if it is a mapping.
        """
        if self.coupling is None:
            return  # alone, the statistics are those of the model that is trained
        if not self._was_open:
            self._open_for("recalibrate")
        output = self.coupling.output
        output.recalibration.take(batches, forward)
        if self._was_open and (not self._is_open or output.is_visiting):
            output.recalibration.recompute(warns=True)

    def save(self, folder: Path | str, number: int, *, keep: int = 2, **others: Any) -> None:
        """Write this worker's part of a checkpoint: models, optimisers, the coupling, random states
        and what else the loop gives by name (`scheduler=scheduler`). All workers save under the
        same number, from 1 on, best after a pass over the data; the newest `keep` are kept."""
        check_range("number", number, 1)
        check_range("keep", keep, 1)
        self._open_for("save")
        save_loop(self, Path(folder), number, keep, others)

    def restore(self, folder: Path | str, **others: Any) -> int:
        """Before the loop begins: load the newest checkpoint that all workers have written, and
        return its number, or 0 if there is none. Another number of workers begins with the mean of
        the models, where the others were in the data, and with a method that begins anew."""
        return restore_loop(self, Path(folder), others)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Of a checkpoint of other workers: how often each loader was gone over."""
        self._passes.before = [one for one in state.get("passes", []) if isinstance(one, int)]

    def state_dict(self) -> dict[str, Any]:
        """What the coupling adds to this worker's checkpoint, taken between two steps.

        It holds this worker's own replica, the method's memory (velocities, gradients not yet
        sent), push-sum weight, versions, random state, the number of the step, how often each
        sharded loader was gone over, and the servers that live in this process. Every worker saves,
        in a file of its own, `model.state_dict()` (the statistics of BatchNorm are its own),
        `optimizer.state_dict()`, this, and what else the loop has. Save at the same step on all
        workers, best between two passes; what asynchronous workers have on the way then is lost.
        """
        state: dict[str, Any] = {"method": str(self.method), "rank": self.rank, "size": self.size}
        if self.coupling is not None:
            self._open_for("state_dict")
            state |= {**self.coupling.state_dict(), "passes": self._passes.state()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, before the `with`; not the model or the optimiser."""
        if self._was_open:
            late = "worker.load_state_dict() comes too late; call it before `with worker`"
            raise ConfigurationError(late)
        mine = {"method": str(self.method), "rank": self.rank, "size": self.size}
        for name, value in mine.items():
            if state.get(name) != value:
                raise ConfigurationError(
                    f"the checkpoint is of {name} {state.get(name)!r}, this worker's {name} is "
                    f"{value!r}; each worker saves and loads its own"
                )
        if self.coupling is not None:
            self.coupling.loaded = state
            self._passes.before = list(state["passes"])
        self.observer.callbacks.steps[self.rank] = int(state.get("step", 0))
