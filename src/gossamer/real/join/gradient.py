"""The gradient of a user's loop, whole or in buckets, and its all-reduce in place.

The gradient lies in the parameters' `.grad`. A method gets a `LoopGradient` that stands for it, and
an all-reduce of that one replaces the `.grad`s by their means, so that nothing is copied.

A method may also ask for `gradient.buckets()`. A hook on every parameter says when its gradient is
there, and a bucket is handed to the method as soon as it is complete, in the middle of the user's
backward pass. The loop may still change the gradient afterwards: it may clip, run backward again or
leave the step out. So each worker remembers what it sent, and in `step()` all workers vote on
whether what they sent is still the gradient. The states of a bucket:

    promised ---- backward has made its gradients ----> handed over ---- all_reduce ----> started
        |                                                    ^                               |
        +------------- step(): they are as they are ---------+           a mean is awaited: vote
                                                                               |             |
                                         nobody has changed anything: finished +             |
          somebody has: all are cancelled, and started again as they are now ----------------+
          (from then on, gradients are reduced in one piece: `close`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, ProtocolError
from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.transports.buffers import joined
from gossamer.real.transports.transport import Transport
from gossamer.real.worker import reduced_copy
from gossamer.worker import Gradient

_BYTES = 4 << 20
"""The least size of a bucket: small enough that little is left to do after backward."""
_LOOK = 1 << 14
"""Numbers of one gradient that are compared in a step: torch does not count changes by `.data`."""


class LoopGradient(Tensor):
    """Stands for the gradients of some parameters. It becomes a vector only if somebody looks at
    it, so that a method which only reduces it or descends along it needs no copy."""

    binding: ModuleBinding
    numbers: range
    """Which parameters."""
    kept: Sequence[Tensor] | None = None
    """The gradients themselves, where they are no longer the `.grad`s."""
    check_look: Callable[[], None] | None = None
    """Raises an error if it is too early to look."""
    looked_at: Tensor | None = None
    """The loop's gradient as one vector, once somebody has looked at it."""

    @staticmethod
    def of(
        binding: ModuleBinding, numbers: range, kept: Sequence[Tensor] | None = None
    ) -> LoopGradient:
        gradient = torch.empty(0).as_subclass(LoopGradient)
        gradient.binding, gradient.numbers, gradient.kept = binding, numbers, kept
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.cat and (whole := _put_together(args[0])) is not None:
            return whole
        flat = [_flat(value) for value in args]
        options = {name: _flat(value) for name, value in (kwargs or {}).items()}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*flat, **options)

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        numbers, binding = self.numbers, self.binding
        return sum(binding.layout.sizes[numbers.start : numbers.stop]) * binding.dtype.itemsize

    @property
    def is_first(self) -> bool:
        """Whether this is the first bucket of a gradient, which holds the last parameters."""
        return self.numbers.stop == len(self.binding.parameters)

    @property
    def is_whole(self) -> bool:
        return len(self.numbers) == len(self.binding.parameters)

    def vector(self) -> Tensor:
        """The gradients in one piece."""
        if self.kept is not None:
            return joined([piece.reshape(-1) for piece in self.kept])
        if self.check_look is not None:
            self.check_look()
        if not self.is_whole:
            return joined([piece.reshape(-1) for piece in self.pieces()])
        if self.looked_at is None:
            self.looked_at = _vector(self.binding)
        return self.looked_at

    def pieces(self) -> Sequence[Tensor]:
        """What an all-reduce replaces: the `.grad`s of these parameters themselves, or a copy of
        each that is not there or is not a plain tensor like its parameter."""
        binding, numbers = self.binding, self.numbers
        if self.kept is not None:
            return self.kept
        if not binding.is_alike:
            # Parameters of several types, or in several places, are reduced as pieces of a vector.
            return binding.cut(_vector(binding))[numbers.start : numbers.stop]
        found: list[Tensor] = []
        for parameter in binding.parameters[numbers.start : numbers.stop]:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter.detach())
            elif gradient.is_sparse or gradient.requires_grad or gradient.dtype != binding.dtype:
                gradient = _dense(gradient.detach()).to(binding.dtype, copy=True)
            found.append(gradient)
        return found


def _vector(binding: ModuleBinding) -> Tensor:
    """All `.grad`s as one new vector; a parameter without one counts as zero."""
    window = binding.window
    return joined([
        window.new_zeros(p.numel()) if p.grad is None
        else _dense(p.grad.detach()).reshape(-1).to(window.device, binding.dtype)
        for p in binding.parameters
    ])  # fmt: skip


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _put_together(values: Sequence[Any]) -> LoopGradient | None:
    """The buckets of all parameters, in order, are the whole gradient, without any copy."""
    parts = [value for value in values if isinstance(value, LoopGradient)]
    numbers = [number for part in parts for number in part.numbers]
    if len(parts) != len(values) or any(part.check_look is not None for part in parts):
        return None
    binding = parts[0].binding
    if numbers != list(range(len(binding.parameters))):
        return None
    kept: list[Tensor] | None = None
    if any(part.kept is not None for part in parts):
        kept = []
        for part in parts:
            kept += part.pieces()
    return LoopGradient.of(binding, range(len(numbers)), kept)


def _flat(value: Any) -> Any:
    if isinstance(value, LoopGradient):
        return value.vector()
    if isinstance(value, list | tuple):
        return type(value)(_flat(one) for one in cast("Sequence[Any]", value))
    return value


class LoopGradients:
    """The gradients of one worker's loop."""

    def __init__(
        self, binding: ModuleBinding, transport: Transport, driver: Driver,
        go_on: Callable[[], None], *, has_buckets: bool,
    ) -> None:  # fmt: skip
        """`go_on` continues the method to where it wants the next bucket; `has_buckets` says that
        all workers can reduce in buckets."""
        self._binding = binding
        self._transport = transport
        self._driver = driver
        self._go_on = go_on
        self.is_accumulating = False
        """Backward passes add up to a gradient that is not complete yet."""
        self._whole = LoopGradient.of(binding, range(len(binding.parameters)))
        ranges = bucket_ranges(binding)
        self._buckets = [LoopGradient.of(binding, numbers) for numbers in ranges]
        for bucket in self._buckets:
            bucket.check_look = self._check_look
        self._bucket_of = {number: at for at, part in enumerate(ranges) for number in part}
        self._hooks: list[Any] = []
        self._is_first = True
        self._turns = cycle(range(len(binding.parameters)))
        self._promised: list[Gradient] = []
        """The buckets that were promised to the method for this step."""
        self._started: list[_Reduction] = []
        self._arrivals: dict[int, tuple[Tensor, int]] = {}
        """By parameter: its gradient when it came, and which of its versions that was."""
        self._copies: dict[int, Tensor] = {}
        self._is_complete = False
        if has_buckets:
            for number, parameter in enumerate(binding.parameters):
                hook = partial(self._arrived, number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """From now on gradients come in one piece."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget()

    def _forget(self) -> None:
        self._promised, self._arrivals, self._copies = [], {}, {}

    # ------------------------------------------------------------------ the method's side

    def next(self) -> Gradient:
        """The gradient that the method awaits next."""
        if self._started:
            if self.conclude():
                # The method awaits means in a later step, so there is nothing to overlap with.
                self.close()
            self._started = [one for one in self._started if not one.mean.done]
            for one in self._started:
                one.part_from_loop()
        if self._promised:
            self._forget()
        self._whole.looked_at = None
        return _NextGradient(self)

    def promise(self, whole: Gradient) -> Sequence[Pending[Tensor]]:
        """The method wants the buckets of its next gradient as they come."""
        if not self._hooks:
            return [whole]
        self._promised = [Gradient("gradient") for _ in self._buckets]
        self._missing = [len(bucket.numbers) for bucket in self._buckets]
        self._sent = 0
        self._is_complete = False
        self._looked_at = next(self._turns)
        self._is_changed = False
        self._failure: BaseException | None = None
        self._vote: tuple[Pending[None], Tensor] | None = None
        return self._promised

    def reduce(self, gradient: Tensor, members: Sequence[int]) -> Pending[Tensor]:
        """The loop's gradient becomes its mean over the members, in place."""
        if not isinstance(gradient, LoopGradient):
            return reduced_copy(self._transport, gradient, members)
        reduction = _Reduction(self._transport, gradient, members)
        # A bucket counts only if the vote says that nobody has changed it.
        is_bucket = gradient.check_look is not None
        finish = partial(self._finish, reduction, is_bucket=is_bucket)
        if is_bucket or not reduction.under_way.done:
            self._started.append(reduction)
            reduction.mean.settle = finish
        else:
            reduction.finish()
        return reduction.mean

    def _finish(self, reduction: _Reduction, *, is_bucket: bool) -> None:
        if is_bucket:
            self._conclude()
        under_way = reduction.under_way
        if under_way.settle is not None and not under_way.done:
            under_way.settle()
        if not under_way.done:
            self._driver.block(under_way)
        reduction.finish()

    # ------------------------------------------------------------------ the loop's side

    def _arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Backward has made this parameter's gradient."""
        gradient = parameter.grad
        if not self._promised or self.is_accumulating or gradient is None:
            return
        if self._failure is not None:
            return  # `step()` raises it
        if self._is_sent(number):
            self._is_changed = True  # a second backward pass
        elif not gradient.is_sparse and not gradient.requires_grad:
            if number not in self._arrivals:
                self._missing[self._bucket_of[number]] -= 1
            self._arrivals[number] = (gradient, gradient._version)
            if self._is_first or number == self._looked_at:
                self._copies[number] = self._sample(gradient).clone()
            self._send()

    def _is_sent(self, number: int) -> bool:
        return self._bucket_of[number] < self._sent

    def _sample(self, gradient: Tensor) -> Tensor:
        """The first numbers as bytes, because NaN is not equal to itself."""
        flat = gradient.detach().reshape(-1)
        return (flat if self._is_first else flat[:_LOOK]).view(torch.uint8)

    def _send(self) -> None:
        try:
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._hand_over()
                self._go_on()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # It must not pass through the user's backward pass, so `step()` raises it.
            self._failure = error

    def _hand_over(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        self._promised[self._sent - 1].resolve(bucket)

    def complete(self, *, is_changed: bool = False) -> LoopGradient:
        """The loop makes its step. Returns its gradient; buckets that the method has not got yet
        are handed over. `is_changed` says that gradients have been unscaled, which torch does not
        count as a change."""
        self._whole.looked_at = None
        if not self._promised:
            return self._whole
        if self._failure is not None:
            raise self._failure
        self._is_changed = self._is_changed or is_changed or self._has_changed()
        self._is_first, self._is_complete = False, True
        while self._sent < len(self._buckets):
            self._hand_over()
        return self._whole

    def _has_changed(self) -> bool:
        parameters = self._binding.parameters
        sent = {number: come for number, come in self._arrivals.items() if self._is_sent(number)}
        for number, (gradient, version) in sent.items():
            if parameters[number].grad is not gradient or gradient._version != version:
                return True
        for number, (gradient, _) in sent.items():
            copy = self._copies.get(number)
            if copy is not None and not torch.equal(self._sample(gradient), copy):
                if self._is_first:
                    return True
                raise ConfigurationError(
                    f"the gradient of parameter {self._binding.layout.names[number]} was changed "
                    "through .data between backward and worker.step(), after it had been sent to "
                    "the other workers, and perhaps in steps before; change the .grad "
                    "itself in place (p.grad.clamp_(...)), or use all_reduce:overlap=false"
                )
        return False

    # ------------------------------------------------------------------ the vote

    def conclude(self) -> bool:
        """Take the vote before anything replaces the `.grad`s, if the mean of a bucket is still
        awaited. Returns whether one was."""
        is_open = bool(self._promised) and any(not one.mean.done for one in self._started)
        if is_open:
            self._conclude()
        return is_open

    def _conclude(self) -> None:
        """All buckets are on their way: let all workers vote on whether anybody has changed one."""
        if not self._is_complete:
            raise ProtocolError(
                "the mean of a gradient's part was awaited before the gradient, whose other parts "
                "are still to come; await the gradient first"
            )
        if self._vote is None:
            changed = torch.tensor([float(self._is_changed)])
            vote = self._transport.all_reduce([changed], range(self._transport.size))
            self._vote = (vote, changed)
        vote, changed = self._vote
        self._driver.wait(vote, "buckets", is_booked=False)
        vote.result()
        if float(changed) > 0.0 and self._hooks:
            self.close()
            for reduction in self._started:
                reduction.start_again()

    def _check_look(self) -> None:
        """A value computed from a bucket could not be taken back after the vote."""
        if not self._is_complete:
            raise ProtocolError(
                "a part of a gradient can only be reduced as it is before the gradient is there; "
                "await the gradient first, or do not ask for its buckets"
            )


class _NextGradient(Gradient):
    """The gradient of the loop's next batch."""

    def __init__(self, gradients: LoopGradients) -> None:
        super().__init__("gradient")
        self._gradients = gradients

    def buckets(self) -> Sequence[Pending[Tensor]]:
        return self._gradients.promise(self)


class _Reduction:
    """One all-reduce of a gradient."""

    def __init__(
        self, transport: Transport, gradient: LoopGradient, members: Sequence[int]
    ) -> None:
        self._transport = transport
        self._gradient = gradient
        self._members = members
        self.mean: Pending[Tensor] = Pending("all_reduce")
        self._start()

    def _start(self) -> None:
        self._tensors = self._gradient.pieces()
        self.under_way = self._transport.all_reduce(self._tensors, self._members)
        self.mean.on_cancel = self.under_way.cancel

    def start_again(self) -> None:
        self.under_way.cancel()
        self._start()

    def part_from_loop(self) -> None:
        """The loop goes on before the mean is there, so it gets copies as its `.grad`s."""
        gradient = self._gradient
        for number, tensor in zip(gradient.numbers, self._tensors, strict=True):
            parameter = gradient.binding.parameters[number]
            if parameter.grad is tensor:
                parameter.grad = tensor.clone()

    def finish(self) -> None:
        try:
            self.under_way.result()
        except Exception as error:
            self.mean.fail(error)
        else:
            self.mean.resolve(self._result())
        # The mean refers to itself through these, which would keep its memory alive.
        self.mean.settle = self.mean.on_cancel = None

    def _result(self) -> LoopGradient:
        numbers, binding = self._gradient.numbers, self._gradient.binding
        parameters = binding.parameters
        pairs = zip(numbers, self._tensors, strict=True)
        # The result must not hold the `.grad`s: if one is freed before the next is made, the next
        # gets the same memory, which is still in the cache.
        are_those_of_loop = all(parameters[number].grad is tensor for number, tensor in pairs)
        if are_those_of_loop and self._gradient.is_whole:
            self._gradient.looked_at = None
            return self._gradient
        return LoopGradient.of(binding, numbers, None if are_those_of_loop else self._tensors)


def can_send_buckets(binding: ModuleBinding, transport: Transport) -> bool:
    """Whether this worker can reduce in buckets; all workers must do the same."""
    is_here = binding.is_alike and binding.device.type == "cpu"
    return transport.reduces_meanwhile and is_here and len(bucket_ranges(binding)) > 1


def bucket_ranges(binding: ModuleBinding) -> list[range]:
    """The parameters of each bucket, in the order in which backward comes to them: last first."""
    size = binding.dtype.itemsize
    found: list[range] = []
    end, held = len(binding.parameters), 0
    for number in reversed(range(end)):
        held += binding.layout.sizes[number] * size
        if held >= _BYTES:
            found.append(range(number, end))
            end, held = number, 0
    if held or not found:
        found.append(range(end))
    elif end:  # parameters without numbers get no bucket of their own
        found[-1] = range(found[-1].stop)
    return found
