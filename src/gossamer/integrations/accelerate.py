"""Hugging Face's Accelerate on coupled workers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from gossamer.errors import ConfigurationError
from gossamer.integrations.reduction import opened, reduced
from gossamer.integrations.single_process import check_single_process, check_whole_batches
from gossamer.methods import MethodSpec
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import rank


class JoinedAccelerator(Accelerator):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """An `Accelerator` that trains with the others by a method.

        accelerator = JoinedAccelerator(method="ad_psgd", gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ...
        accelerator.end_training()

    The first `prepare` that is given a model and an optimiser joins them and shares out the batches
    of its first loader. Other loaders are left as they are, so evaluations are of all their data,
    and `gather` returns what it is given. `reduce` and the trigger are of all workers.
    `end_training()` leaves the loop: the model is the output then.
    """

    def __init__(
        self, *args: Any, method: str | MethodSpec | None = None, steps: int = 1000, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        check_single_process("accelerate", self.num_processes)
        self._method, self._steps = method, steps
        self.worker: JoinedWorker | None = None
        """The coupled worker, once the model is prepared."""

    def prepare(self, *args: Any, **named: Any) -> Any:
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if self.worker is not None or not models or not optimizers:
            return super().prepare(*args, **named)
        if len(models) > 1 or len(optimizers) > 1:
            raise ConfigurationError(
                f"JoinedAccelerator.prepare() takes one model and one optimiser, got {len(models)} "
                f"and {len(optimizers)}"
            )
        models[0].to(self.device)  # parameters may not be moved once they are joined
        worker = join(models[0], optimizers[0], self._method, steps=self._steps)
        check_whole_batches("Accelerate", worker)
        self.worker = worker.open()
        loaders = [one for one in args if isinstance(one, DataLoader)][:1]

        def coupled(one: Any) -> Any:
            if one is optimizers[0]:
                return worker.optimizer
            return worker.shard(one) if any(one is loader for loader in loaders) else one

        return super().prepare(*(coupled(one) for one in args), **named)

    def end_training(self) -> None:
        if self.worker is not None:
            self.worker.close()
        super().end_training()

    # ------------------------------------------------------------------ what workers share

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        worker = opened(self.worker)
        if worker is None or reduction == "none":
            return super().reduce(tensor, reduction, scale)
        caller = inspect.stack(0)[1]
        place = f"{caller.filename}:{caller.lineno}"
        parts, shape = pytree.tree_flatten(tensor)
        found = [
            reduced(worker, part, reduction, f"{place}/{number}")
            for number, part in enumerate(parts)
        ]
        return pytree.tree_unflatten(found, shape)

    def check_trigger(self) -> bool:
        """Whether any worker has called `set_trigger`, to stop together."""
        worker, own = opened(self.worker), super().check_trigger()
        return own if worker is None else worker.any(own, name="trigger")

    @property
    def is_main_process(self) -> bool:
        return rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        return rank() == 0
