"""Lightning's Trainer on coupled workers."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import (  # pyright: ignore[reportMissingImports]
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (  # pyright: ignore[reportMissingImports]
    _ResultMetric,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import _pytree as pytree

from gossamer.errors import ConfigurationError
from gossamer.integrations.reduction import opened, reduced
from gossamer.integrations.single_process import check_whole_batches
from gossamer.methods import MethodSpec
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import rank


class JoinedStrategy(SingleDeviceStrategy):  # pyright: ignore[reportUntypedBaseClass]
    """A strategy that trains with the others by a method.

        trainer = lightning.Trainer(strategy=JoinedStrategy("ad_psgd"), max_epochs=3)

    Training batches are shared out; validation during `fit` is of the output model, on all of its
    data. EarlyStopping's decisions and what is logged with `sync_dist` are made together.
    After `fit` the model is the output. Worker 0 logs, and writes checkpoints of its own model.
    """

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

    @property
    def is_distributed(self) -> bool:
        """Lightning leaves `sync_dist` out where this does not hold."""
        return opened(self.worker) is not None

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
        module: Any = self.lightning_module
        worker = join(module, self.optimizers[0], self._method, steps=steps)
        check_whole_batches("Lightning", worker)
        self.worker = worker.open()
        self.optimizers = [worker.optimizer]
        # A strategy is not told which loader is for training, so that loader's source is changed.
        trainer._accelerator_connector.use_distributed_sampler = False
        source = trainer.fit_loop._data_source
        plain = source.dataloader
        source.dataloader = lambda: pytree.tree_map(worker.shard, plain())

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """What metrics with `sync_dist` ask for."""
        worker = opened(self.worker)
        return tensor if worker is None else reduced(worker, tensor, reduce_op, _asker())

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if (worker := opened(self.worker)) is None:
            return decision
        if all:
            return min(worker.gather(bool(decision), name=_asker()))
        return worker.any(decision, name=_asker())

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if (worker := opened(self.worker)) is not None:
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


def _asker() -> str:
    """Which metric or callback asks the strategy, and where; Lightning does not say."""
    frames = inspect.stack(0)[2:]
    place = f"{frames[0].function}:{frames[0].lineno}"
    for frame in frames:
        one: Any = frame.frame.f_locals.get("self")
        if isinstance(one, _ResultMetric):
            return f"{one.meta.fx}/{one.meta.name}/{one.meta.dataloader_idx}/{place}"
        if isinstance(one, Callback):
            return f"{one.state_key}/{place}"
    return place
