"""A user's module and optimiser seen as one flat replica.

The module's parameters are views of one flat buffer. Where nobody else changes a worker's
parameters that buffer is the published window itself: peers only read it, and reading disturbs
nobody. Where others do (AD-PSGD), or where the gradient is taken elsewhere than at the replica,
the buffer is private and refreshed at each step, because a change between forward and backward
would silently mix two points; the optimiser then works on the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gossamer.errors import ConfigurationError
from gossamer.real.join.descent import Descent
from gossamer.real.join.gradient import LoopGradient, joined
from gossamer.replica import Layout

Views = list[Tensor]


def _keep() -> None:
    """Memory that lasts for as long as somebody holds it need not be given back."""


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class Binding:
    """Moves one module's parameters between the user's loop and a flat window."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], *, is_server: bool = False
    ) -> None:
        if not parameters:
            raise ConfigurationError("the model has no trainable parameters; nothing to couple")
        self.is_server = is_server
        self.parameters = [parameter for _, parameter in parameters]
        self.layout = Layout.of(parameters)
        self.dtype = self.parameters[0].dtype
        for parameter in self.parameters:
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        first = self.parameters[0]
        self.is_alike = all(
            p.dtype == first.dtype and p.device == first.device for p in self.parameters
        )
        """One type, one place: then one flat buffer can hold them all."""
        self.device = first.device
        self.home = self.device if self.is_alike else torch.device("cpu")
        """Where a vector of them all belongs."""
        self.is_uniform = self.is_alike and self.device.type == "cpu"
        """Alike, and where the window is."""
        self._sizes = list(self.layout.sizes)
        self._flat: Tensor | None = None
        self._token = LoopGradient.of(self)
        self._factors: dict[float, Tensor] = {}
        """A tensor multiplies in half the time that torch needs to make one of a number."""
        self._private: Tensor | None = None
        self._own: Views = [parameter.data for parameter in self.parameters]
        """Where the parameters lay before; they lie there again in the end."""
        self._places: Views = []
        """The parameters' memory as plain tensors; to torch a change there is one of theirs."""
        self._plain: Views | None = None
        """This step's `.grad`s, once they have been looked at and found plain."""
        self._lent: tuple[Sequence[Tensor], Callable[[], None]] | None = None
        """A combined gradient that stands for this step's where it lies, and whom to tell when it
        is no longer needed there."""
        self._window_views: Views = []
        self._private_views: Views = []

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self.layout.names, self.parameters, strict=True))

    def initial(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).to("cpu", self.dtype) for p in self.parameters])

    def let_gpu_finish(self) -> None:
        """What was asked of it may still be to do; in other streams than this thread's, too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attach(self, window: Tensor, *, is_private: bool) -> None:
        """From now on the module trains coupled to this window."""
        self._window = window
        self.is_uniform = self.is_alike and self.device == window.device
        self._window_views = self._views(window)
        if is_private or not self.is_uniform:
            self.make_private()
        else:
            self._point(self._window_views)

    @property
    def is_private(self) -> bool:
        return self._private is not None or not self.is_uniform

    def make_private(self) -> None:
        if not self.is_uniform or self._private is not None:
            return  # parameters on another device, or of several types, are private as they are
        self._private = self._window.clone()
        self._private_views = self._views(self._private)
        self._point(self._private_views)

    def _views(self, flat: Tensor) -> Views:
        """Each with a storage of its own: whoever saves a parameter saves its whole storage, and
        that of a window may be all the memory that processes share."""
        pieces = zip(flat.split(list(self.layout.sizes)), self.layout.shapes, strict=True)
        return [torch.from_dlpack(piece).view(shape) for piece, shape in pieces]

    def _point(self, views: Views) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._places = [parameter.detach() for parameter in self.parameters]

    def is_in_place(self, number: int) -> bool:
        """Whether a parameter lies where the module was pointed to."""
        return (
            not self.is_uniform
            or self.parameters[number].data_ptr() == self._places[number].data_ptr()
        )

    def note_move(self) -> None:
        """The window has changed, which to torch is not the parameters' memory: where it is, a
        graph from before must not be gone back through."""
        if not self.is_server and not self.is_private:
            increment_version(self.parameters)

    def load(self, flat: Tensor) -> None:
        """Put a point into the module, for the next forward pass."""
        if self._private is not None:
            self._private.copy_(flat)
        elif self.is_uniform:
            self._window.copy_(flat)
        else:
            with torch.no_grad():
                pieces = self.layout.unpack(flat).values()
                for parameter, piece in zip(self.parameters, pieces, strict=True):
                    parameter.data.copy_(piece)

    def restore(self, point: Views, *, is_private: bool) -> None:
        """Undo a visit of another point."""
        if self._private is not None and not is_private:
            self._private = None
            self._point(self._window_views)
            return
        with torch.no_grad():
            for parameter, value in zip(self.parameters, point, strict=True):
                parameter.data.copy_(value)

    def flat_gradient(self) -> Tensor:
        """All `.grad`s as one new vector; a parameter without one counts as zero."""
        self.take_lent()
        if self._flat is None:
            pieces = [
                self._window.new_zeros(p.numel()) if p.grad is None
                else _dense(p.grad.detach()).reshape(-1).to(self._window.device, self.dtype)
                for p in self.parameters
            ]  # fmt: skip
            self._flat = joined(pieces)
        return self._flat

    def cut(self, flat: Tensor) -> Views:
        pieces = zip(flat.split(self._sizes), self.layout.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]

    def write_gradient(self, target: Sequence[Tensor], scale: float) -> None:
        gradients = self._plain_gradients()
        if gradients is None or target[0].device != self.device:
            self._write_any_gradient(target, scale)
        elif target[0].is_cuda:
            # A kernel for all of them together: starting one each takes longer than its work.
            together = cast(Any, torch)
            together._foreach_copy_(list(target), gradients)
            if scale != 1.0:
                together._foreach_mul_(list(target), scale)
        else:
            factor = self._factors.get(scale)
            if factor is None:
                factor = self._factors[scale] = torch.tensor(scale)
            for gradient, place in zip(gradients, target, strict=True):
                torch.mul(gradient, factor, out=place)

    def _write_any_gradient(self, target: Sequence[Tensor], scale: float) -> None:
        self.write_part(range(len(self.parameters)), target, scale)

    def write_part(self, numbers: range, target: Sequence[Tensor], scale: float) -> None:
        """The gradients of some parameters, whatever they are like."""
        for number, place in zip(numbers, target, strict=True):
            gradient = self.parameters[number].grad
            if gradient is None:
                place.zero_()
            else:
                place.copy_(_dense(gradient.detach()))
                if scale != 1.0:
                    place.mul_(scale)

    def cut_part(self, numbers: range, flat: Tensor) -> Views:
        pieces = flat.split([self._sizes[number] for number in numbers])
        shapes = [self.layout.shapes[number] for number in numbers]
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def new_gradient(self) -> LoopGradient:
        self._give_back()
        self._flat = self._plain = None
        self._token.edition += 1
        return self._token

    def let_go(self) -> None:
        """Of this step's gradients: where one is freed before the next is made, it is made in the
        same memory, which is still in the cache."""
        self._give_back()
        self._plain = None

    def gradient_places(self, edition: int) -> Views | None:
        """The `.grad`s, to be written over; None where they are not plain vectors of ours."""
        if edition != self._token.edition or not self.is_uniform:
            return None
        places = self._plain_gradients()
        if places is not None:
            self._flat = None
        return places

    def lend_gradient(
        self, edition: int, pieces: Sequence[Tensor], give_back: Callable[[], None]
    ) -> bool:
        """See `Scattered.lend`: to descend along a gradient it need not be copied."""
        if self.gradient_places(edition) is None:
            return False
        self._lent = (pieces, give_back)
        return True

    def borrow(self, pieces: Sequence[Tensor]) -> bool:
        """Let a mean that lies elsewhere stand for this step's gradient, if it can."""
        if not self.is_uniform or self._plain_gradients() is None:
            return False
        self._lent = (pieces, _keep)
        return True

    def take_lent(self) -> None:
        """What was lent into the `.grad`s: somebody wants more of it than to descend."""
        if self._lent is not None:
            (pieces, _), places = self._lent, self._plain
            assert places is not None
            cast(Any, torch)._foreach_copy_(places, list(pieces))
            self._give_back()

    def _give_back(self) -> None:
        if self._lent is not None:
            (_, give_back), self._lent = self._lent, None
            give_back()

    def _plain_gradients(self) -> Views | None:
        """All `.grad`s, where every parameter has one that is as plain as itself."""
        self.take_lent()
        if self._plain is not None:
            return self._plain
        plain: Views = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or gradient.requires_grad:
                return None
            if gradient.dtype != self.dtype or gradient.device != self.device:
                return None
            if not gradient.is_contiguous():
                return None
            plain.append(gradient)
        self._plain = plain
        return plain

    def set_gradient(self, flat: Tensor, *, is_sparse: bool = False) -> None:
        """As the `.grad`s; `is_sparse` for an optimiser that takes rows only."""
        self._give_back()
        self._plain = None
        pieces = flat.split(self._sizes)
        for parameter, piece, shape in zip(
            self.parameters, pieces, self.layout.shapes, strict=True
        ):
            if parameter.grad is None and not self.is_server and not piece.any():
                continue  # nobody used it: an optimiser would decay its weights
            view = piece.view(shape)
            is_fitting = self.is_uniform and flat.dtype == self.dtype and flat.device == self.device
            own = view if is_fitting else view.to(parameter.device, parameter.dtype)
            parameter.grad = own.to_sparse(1) if is_sparse else own

    def descend(
        self, descent: Descent, guard: AbstractContextManager[None], at: Tensor | None = None
    ) -> None:
        """One step of the user's optimiser on the window; or `at` another point, and the window
        moves by as much."""
        if not self.is_uniform:
            self._descend_elsewhere(descent, guard, at)
            return
        if at is not None:
            self._descend_apart(descent, guard, at)
            return
        places = self._places if self._private is None else self._window_views
        with guard:
            if descent.descend_at(places, None if self._lent is None else self._lent[0]):
                return
            self.take_lent()
            if self._private is None:
                descent.step()
            else:
                self._step_there(descent, self._window_views)

    def _step_there(self, descent: Descent, views: Views) -> None:
        self._point(views)
        try:
            descent.step()
        finally:
            self._point(self._window_views if self._private is None else self._private_views)

    def _descend_apart(
        self, descent: Descent, guard: AbstractContextManager[None], at: Tensor
    ) -> None:
        """In memory that nobody sees."""
        there = joined([at])
        views = self._views(there)
        if not descent.descend_at(views, None if self._lent is None else self._lent[0]):
            self.take_lent()
            self._step_there(descent, views)
        with guard:
            self._window.add_(there.sub_(at))
        self.note_move()

    def _descend_elsewhere(
        self, descent: Descent, guard: AbstractContextManager[None], at: Tensor | None
    ) -> None:
        """The optimiser must work where the parameters are: step there and publish the change."""
        with guard:
            self.load(self._window if at is None else at)
            before = self.initial()
            descent.step()
            self._window.add_(self.initial().sub_(before))

    def detach(self, output: Tensor) -> None:
        """The module owns its memory again and holds the given model."""
        self._point(self._own)
        with torch.no_grad():
            for parameter, piece in zip(
                self.parameters, self.layout.unpack(output).values(), strict=True
            ):
                parameter.data.copy_(piece.view_as(parameter))
