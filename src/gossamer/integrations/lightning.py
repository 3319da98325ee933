"""Lightning's Trainer on coupled workers."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch.strategies import (  # pyright: ignore[reportMissingImports]
    SingleDeviceStrategy,
)
from torch.utils import _pytree as pytree

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import rank


class JoinedStrategy(SingleDeviceStrategy):  # pyright: ignore[reportUntypedBaseClass]
    """A strategy that trains with the others by a method.

        trainer = lightning.Trainer(strategy=JoinedStrategy("ad_psgd"), max_epochs=3)

    Training batches are shared out; validation during `fit` is of the output model, on all of its
    data. Decisions, such as those of EarlyStopping, and means with `sync_dist` are made with
    the others. After `fit` the model is the output. Worker 0 writes checkpoints and logs; a
    checkpoint from before the end holds its own model.
    """

    strategy_name = "gossamer"

    def __init__(
        self, method: str | MethodSpec | None = None, steps: int | None = None, **named: Any
    ) -> None:
        super().__init__(**named)
        self._method, self._steps = method, steps
        self._visit = contextlib.ExitStack()
        self.global_rank = rank()
        self.worker: JoinedWorker | None = None
        """The coupled worker, while and after `fit` runs."""

    @property
    def is_global_zero(self) -> bool:
        return rank() == 0

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not self.optimizers:
            return  # nothing is trained
        if len(self.optimizers) != 1:
            raise ConfigurationError(
                f"JoinedStrategy trains with one optimiser, got {len(self.optimizers)} from "
                "configure_optimizers; give it all parameters, in groups"
            )
        steps = self._steps or (trainer.max_steps if trainer.max_steps > 0 else 1000)
        worker = join(self.lightning_module, self.optimizers[0], self._method, steps=steps)
        self.worker = worker.open()
        self.optimizers = [worker.optimizer]
        # A strategy is not told which loader is for training, so the source of that one is changed.
        source = trainer.fit_loop._data_source
        plain = source.dataloader
        source.dataloader = lambda: pytree.tree_map(self._part, plain())

    def _part(self, loader: Any) -> Any:
        assert self.worker is not None
        return self.worker.shard(loader)

    # ------------------------------------------------------------------ what workers share

    def _opened(self) -> JoinedWorker | None:
        """The worker, while it is coupled."""
        return self.worker if self.worker is not None and self.worker.is_open else None

    def reduce(self, tensor: Any, *args: Any, **named: Any) -> Any:
        """The mean, which is what metrics with `sync_dist` ask for."""
        worker = self._opened()
        return tensor if worker is None else worker.mean(tensor, name="reduce")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        worker = self._opened()
        if worker is None:
            return decision
        if all:
            return not worker.any(not decision, name="all")
        return worker.any(decision, name="any")

    # ------------------------------------------------------------------ the loop

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if (worker := self._opened()) is not None:
            self._visit.enter_context(worker.consensus())

    def on_validation_end(self) -> None:
        self._visit.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.worker is not None:
            self.worker.close()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._visit.close()
        if self.worker is not None:
            self.worker.__exit__(type(exception), exception, None)
