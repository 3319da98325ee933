"""A loop's gradient in parts, each reduced while backward still makes the next ones.

`gradient.buckets()` of a method's text comes true here: a hook on every parameter says when its
gradient is there, and a part whose last one has come is handed to the method, in the middle of the
user's backward pass. What follows may spoil that: the loop clips its gradients, runs backward again
or leaves the step out. So each worker remembers what it sent, and in `step()` all tell each other
whether it is still so. If for one of them it is not, the parts are reduced again as they are
now, and from then on everything goes in one piece, when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, ProtocolError
from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.join.binding import Binding
from gossamer.real.join.gradient import LoopGradient
from gossamer.real.transports.transport import Transport
from gossamer.worker import Gradient

_BYTES = 4 << 20
"""Of a part, at least: small enough that little is left to do when backward has ended."""
_LOOK = 1 << 14
"""Numbers of one gradient that are compared in a step: torch does not count changes by `.data`."""


class Buckets:
    """The parts of one worker's gradients."""

    def __init__(
        self, binding: Binding, transport: Transport, driver: Driver, go_on: Callable[[], None], *,
        is_agreed: bool,
    ) -> None:  # fmt: skip
        """`go_on` runs the method on, to where it wants the next part; `is_agreed`: all workers
        can send parts."""
        self._binding = binding
        self._transport = transport
        self._driver = driver
        self._go_on = go_on
        self.is_accumulating = False
        """Backward passes add up to a gradient that is not complete yet."""
        ranges = _ranges(binding)
        self._parts = [LoopGradient.part(binding, numbers) for numbers in ranges]
        for number, part in enumerate(self._parts):
            part.is_continued = number > 0
            part.confirmed, part.check_look = self._confirmed, self._check_look
        self._part_of = {number: at for at, part in enumerate(ranges) for number in part}
        self._hooks: list[Any] = []
        self._is_first = True
        self._turns = cycle(range(len(binding.parameters)))
        self._waiting: list[Gradient] = []
        """The parts that were promised to the method for this step."""
        self._started: list[_Started] = []
        self._arrivals: dict[int, tuple[Tensor, int]] = {}
        """By parameter: its gradient when it came, and which of its versions that was."""
        self._copies: dict[int, Tensor] = {}
        self._is_complete = False
        if is_agreed:
            self._listen()

    def _listen(self) -> None:
        for number, parameter in enumerate(self._binding.parameters):
            hook = partial(self._arrived, number)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Gradients come in one piece from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget()

    def _forget(self) -> None:
        self._waiting, self._arrivals, self._copies = [], {}, {}

    # ------------------------------------------------------------------ the method's side

    def gradient(self) -> Gradient:
        """What the method awaits next."""
        if not self._hooks and not self._started:
            return Gradient("gradient")  # always in one piece: there is nothing to forget
        if self.conclude():
            # It leaves its means for later, so nothing is left to hide behind backward.
            self.close()
        self._forget()
        self._started = []
        return _InParts(self) if self._hooks else Gradient("gradient")

    def promise(self) -> Sequence[Pending[Tensor]]:
        """Those who want parts get them as they come."""
        self._waiting = [Gradient("gradient") for _ in self._parts]
        self._missing = [len(part.numbers) for part in self._parts]
        self._sent = 0
        self._is_complete = False
        self._looked_at = next(self._turns)
        self._is_changed = False
        self._failure: BaseException | None = None
        self._verdict: Pending[Tensor] | None = None
        return self._waiting

    # ------------------------------------------------------------------ the loop's side

    def _arrived(self, number: int, parameter: nn.Parameter) -> None:
        """Backward has made this parameter's gradient."""
        gradient = parameter.grad
        if not self._waiting or self.is_accumulating or gradient is None:
            return
        if self._failure is not None:
            return  # `step()` says so
        if self._is_sent(number):
            self._is_changed = True  # a second backward pass
        elif not gradient.is_sparse and not gradient.requires_grad:
            if number not in self._arrivals:
                self._missing[self._part_of[number]] -= 1
            self._arrivals[number] = (gradient, gradient._version)
            if self._is_first or number == self._looked_at:
                self._copies[number] = self._sample(gradient).clone()
            self._send()

    def _is_sent(self, number: int) -> bool:
        return self._part_of[number] < self._sent

    def _sample(self, gradient: Tensor) -> Tensor:
        """As bytes: what is no number is not even equal to itself."""
        flat = gradient.detach().reshape(-1)
        return (flat if self._is_first else flat[:_LOOK]).view(torch.uint8)

    def _send(self) -> None:
        try:
            while self._sent < len(self._parts) and not self._missing[self._sent]:
                self._hand_over()
                self._go_on()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Not through the user's backward pass: `step()` raises it.
            self._failure = error

    def _hand_over(self) -> None:
        part = self._parts[self._sent]
        self._sent += 1
        self._waiting[self._sent - 1].resolve(part)

    def complete(self, *, is_changed: bool) -> None:
        """The loop makes its step: what has not been handed over is as it is now. `is_changed`:
        gradients have been unscaled, which torch does not count as a change."""
        if not self._waiting:
            return
        if self._failure is not None:
            raise self._failure
        self._is_changed = self._is_changed or is_changed or self._has_changed()
        self._is_first, self._is_complete = False, True
        while self._sent < len(self._parts):
            self._hand_over()

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

    # ------------------------------------------------------------------ reductions

    def _confirmed(self, reduce: Callable[[], Pending[Tensor]]) -> Pending[Tensor]:
        """A reduction whose result counts only if what went into it has not changed since."""
        started = _Started(reduce)
        started.mean.settle = partial(self._settle, started)
        self._started.append(started)
        return started.mean

    def conclude(self) -> bool:
        """Before anything takes the place of the gradients: whether a mean was still awaited."""
        is_open = any(not started.mean.done for started in self._started)
        if is_open:
            self._conclude()
        return is_open

    def _conclude(self) -> None:
        """All parts are on their way: does everybody's gradient still stand?"""
        if not self._is_complete:
            raise ProtocolError(
                "the mean of a gradient's part was awaited before the gradient, whose other parts "
                "are still to come; await the gradient first"
            )
        if self._verdict is None:
            changed = torch.tensor([float(self._is_changed)])
            self._verdict = self._transport.all_reduce(changed, range(self._transport.size))
        self._driver.wait(self._verdict, "buckets", is_booked=False)
        if float(self._verdict.result()) > 0.0 and self._hooks:
            self.close()
            for started in self._started:
                started.do_again()

    def _check_look(self) -> None:
        """Of what was made of a part nobody would know whether it still stands."""
        if not self._is_complete:
            raise ProtocolError(
                "a part of a gradient can only be reduced as it is before the gradient is there; "
                "await the gradient first, or do not ask for its buckets"
            )

    def _settle(self, started: _Started) -> None:
        self._conclude()
        self._driver.wait(started.reduced, "buckets", is_booked=False)
        started.settle()


class _InParts(Gradient):
    """The gradient of the next batch; a method may take it in one piece all the same."""

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Buckets) -> None:
        super().__init__("gradient")
        self._buckets = buckets

    def buckets(self) -> Sequence[Pending[Tensor]]:
        return self._buckets.promise()


class _Started:
    """One part's reduction."""

    def __init__(self, reduce: Callable[[], Pending[Tensor]]) -> None:
        self._reduce = reduce
        self.reduced = reduce()
        self.mean: Pending[Tensor] = Pending("all_reduce")

    def do_again(self) -> None:
        self.reduced = self._reduce()

    def settle(self) -> None:
        try:
            self.mean.resolve(self.reduced.result())
        except Exception as error:
            self.mean.fail(error)
        # The mean refers to itself through this, and its memory is to go with its last user.
        self.mean.settle = None


def can_send_parts(binding: Binding, transport: Transport) -> bool:
    """Whether this worker can; all must do alike."""
    is_here = binding.is_alike and binding.device.type == "cpu"
    return transport.reduces_meanwhile and is_here and len(_ranges(binding)) > 1


def _ranges(binding: Binding) -> list[range]:
    """The parameters of each part, in the order in which backward comes to them: last first."""
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
    elif end:  # what has no numbers is no part of its own
        found[-1] = range(found[-1].stop)
    return found
