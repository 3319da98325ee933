"""Hugging Face's Trainer on coupled workers."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from transformers import Trainer  # pyright: ignore[reportMissingImports]

from gossamer.errors import ConfigurationError
from gossamer.integrations.reduction import opened
from gossamer.integrations.single_process import check_single_process, check_whole_batches
from gossamer.methods import MethodSpec
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import rank, size


class JoinedTrainer(Trainer):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """A `Trainer` that trains with the others by a method.

        trainer = JoinedTrainer(model, arguments, train_dataset=..., method="ad_psgd")
        trainer.train()

    The training batches are shared out; evaluations are of the output model, on all of their data.
    If a callback stops one worker after one, as EarlyStoppingCallback does, all stop.
    After `train()` the model is the output on every worker. Worker 0 writes to `output_dir`, and
    each other worker to a folder `worker-RANK` there. What is saved before the end is a worker's
    own model. `train()` can be called once.
    """

    def __init__(self, *args: Any, method: str | MethodSpec | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        check_single_process("transformers", self.args.world_size)
        if self.args.load_best_model_at_end:
            raise ConfigurationError(
                "JoinedTrainer ends with the method's output, and load_best_model_at_end would put "
                "one worker's own checkpoint in its place; leave it out"
            )
        self._method = method
        self.worker: JoinedWorker | None = None
        """The coupled worker, once training has begun."""
        if rank() > 0:
            self.args.output_dir = os.path.join(self.args.output_dir or ".", f"worker-{rank()}")
            self.args.disable_tqdm = True

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.worker is None:
            # Trainer asks for the loader first, and counts its steps by it.
            model: Any = self.model
            self.worker = join(
                model, self.create_optimizer(), self._method, seed=self.args.seed,
                steps=self._expected_steps(loader),
            )  # fmt: skip
            check_whole_batches("Trainer", self.worker)
            self.worker.open()
            self.optimizer = self.worker.optimizer
        return self.worker.shard(loader)

    def _expected_steps(self, loader: Any) -> int:
        arguments = self.args
        if arguments.max_steps > 0:
            return arguments.max_steps
        batches = len(loader) / size() / arguments.gradient_accumulation_steps
        return max(1, round(batches * arguments.num_train_epochs))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if self.worker is not None:
            raise ConfigurationError("JoinedTrainer.train() was called twice; make a new trainer")
        if resume_from_checkpoint:
            raise ConfigurationError(
                "JoinedTrainer cannot resume, because a Trainer's checkpoint lacks what the method"
                " remembers; load the model and begin anew"
            )
        try:
            output = super().train(None, *args, **named)
        except BaseException:
            if self.worker is not None:
                self.worker.__exit__(*sys.exc_info())
            raise
        if self.worker is not None:
            self.worker.close()
        return output

    def evaluate(self, *args: Any, **named: Any) -> Any:
        context = contextlib.nullcontext() if self.worker is None else self.worker.consensus()
        with context:
            found = super().evaluate(*args, **named)
        if self.is_in_train and (worker := opened(self.worker)) is not None:
            # Callbacks have looked at the metrics now, and if one worker stops, all do.
            stops = self.control.should_training_stop
            self.control.should_training_stop = worker.any(stops, name="stop")
        return found
