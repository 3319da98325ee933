"""What a loop may ask for because many workers together make a large batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from gossamer.errors import ConfigurationError

if TYPE_CHECKING:
    from gossamer.real.join.joined_worker import JoinedWorker

Gather = Callable[[Tensor], Sequence[Tensor]]


class LargeBatchWords:
    """`scale_lr` and `synchronise_batch_norm` of a joined worker."""

    def scale_lr(
        self, rule: Literal["workers", "square_root"] = "workers", *, warmup: int = 0
    ) -> LinearLR | None:
        """Multiply the learning rates by the number of workers (Goyal et al. 2017) or its square
        root (Krizhevsky 2014; it suits Adam). With one worker nothing changes.

        With `warmup` they begin where they were and rise over so many steps: call `step()` of the
        scheduler that is returned after each `worker.step()`. Other schedulers are made afterwards,
        because they remember the rates that they found.
        """
        worker = cast("JoinedWorker", self)
        if rule not in ("workers", "square_root"):
            raise ConfigurationError(
                f"worker.scale_lr() takes 'workers' or 'square_root', got {rule!r}"
            )
        if warmup < 0:
            raise ConfigurationError(f"warmup must be at least 0 steps, got {warmup}")
        groups = worker.own_optimizer.param_groups
        if any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "worker.scale_lr() comes too late: a scheduler has been made already and remembers "
                "the rates as they were; call it before"
            )
        factor = worker.size if rule == "workers" else worker.size**0.5
        for group in groups if worker.size > 1 else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
        if not warmup:
            return None
        return LinearLR(worker.optimizer, start_factor=1.0 / factor, total_iters=warmup)

    def synchronise_batch_norm(self, model: nn.Module | None = None) -> int:
        """Let every BatchNorm of the joined model, or of a part of it, normalise by the batches of
        all workers together; return how many layers there are. All workers must then run the same
        layers in the same order, forward and backward, so the method must be a synchronous one.
        In evaluation, and outside of the loop, layers are what they were."""
        worker = cast("JoinedWorker", self)
        if worker.coupling is not None and not worker.coupling.session.is_synchronous:
            raise ConfigurationError(
                f"{worker.method} does not keep its workers in step, so they have no common batch "
                "to normalise; choose a synchronous method, or leave BatchNorm as it is"
            )

        def gather(value: Tensor) -> Sequence[Tensor]:
            return worker.gather(value) if worker.size > 1 and worker.is_open else (value,)

        layers = [
            one
            for one in (model or worker.model).modules()
            if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        ]
        for layer in layers:
            vars(layer)["gather"] = gather
            object.__setattr__(layer, "__class__", SynchronisedBatchNorm)
        return len(layers)


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
    """BatchNorm over the batches of all workers; unequal batches count by their samples."""

    gather: Gather

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected a batch of channels, got {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """Shape [batch, channel, ...] to the same."""
        # Without gradients a worker may be alone here, as when it recomputes statistics.
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        normalised, mean, variance, count = _Normalised.apply(input, self.eps, self.gather)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                seen = cast(Tensor, self.num_batches_tracked).add_(1)
                share = self.momentum or 1.0 / float(seen)
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * (count / (count - 1).clamp_min(1)), share)
        if not self.affine:
            return normalised
        shape = (1, -1, *([1] * (input.dim() - 2)))
        return normalised * self.weight.view(shape) + self.bias.view(shape)


class _Normalised(torch.autograd.Function):
    """The input less the mean over all workers, over the deviation over all workers.

    The gradient is that of the sum of all workers' losses, whose mean the workers then take, so it
    is that of one batch which holds all of theirs.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, gather: Gather) -> tuple[Tensor, ...]:
        channels, own = input.shape[1], input.transpose(0, 1).flatten(1).double()
        count = own.new_full((1,), own.shape[1])
        said = gather(torch.cat([own.sum(1), own.square().sum(1), count]))
        total = torch.stack(list(said)).sum(0).to(own)
        mean = total[:channels] / total[-1]
        variance = (total[channels:-1] / total[-1] - mean.square()).clamp_min(0.0)
        shape = (1, channels, *([1] * (input.dim() - 2)))
        scale = (variance + eps).rsqrt().to(input.dtype).view(shape)
        normalised = (input - mean.to(input.dtype).view(shape)) * scale
        ctx.save_for_backward(normalised, scale)
        ctx.count, ctx.gather = total[-1], gather
        found = (mean.to(input.dtype), variance.to(input.dtype), total[-1].to(input.dtype))
        ctx.mark_non_differentiable(*found)
        return normalised, *found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale = ctx.saved_tensors
        gradient, channels = gradients[0], normalised.shape[1]
        flat = gradient.transpose(0, 1).flatten(1).double()
        along = flat * normalised.transpose(0, 1).flatten(1)
        said = ctx.gather(torch.cat([flat.sum(1), along.sum(1)]))
        total = (torch.stack(list(said)).sum(0).to(flat) / ctx.count).to(gradient.dtype)
        shape = scale.shape
        mean, slope = total[:channels].view(shape), total[channels:].view(shape)
        return scale * (gradient - mean - normalised * slope), None, None
