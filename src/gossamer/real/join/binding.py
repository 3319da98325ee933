"""A user's module as one flat vector of parameters.

The module's parameters are views of one flat buffer. Where nobody else changes a worker's
parameters, that buffer is the published window itself: peers only read it. Where others change it
(AD-PSGD), or where the gradient is taken at another point than the replica, the buffer is private
and is refreshed at each step, because a change between forward and backward would silently mix two
points. The optimiser then works on the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gossamer.errors import ConfigurationError
from gossamer.real.transports.buffers import joined
from gossamer.replica import Layout

Views = list[Tensor]
Step = Callable[[], object]
"""One step of the user's optimiser."""


class ModuleBinding:
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
        """Whether all have one type and one device, so that one flat buffer can hold them."""
        self.device = first.device
        self.home = self.device if self.is_alike else torch.device("cpu")
        """The device of a vector of all parameters."""
        self.is_uniform = self.is_alike and self.device.type == "cpu"
        """Whether the parameters are alike, and on the device of the window."""
        self.is_private = not self.is_uniform
        """Whether the module trains elsewhere than in the window."""
        self._sizes = list(self.layout.sizes)
        self._private: Tensor | None = None
        self._own: Views = [parameter.data for parameter in self.parameters]
        """The memory in which the parameters lay before, and lie again in the end."""
        self.places: Views = []
        """The parameters' memory, where the module was pointed to, as plain tensors."""
        self._window_views: Views = []
        self._private_views: Views = []

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self.layout.names, self.parameters, strict=True))

    def initial(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).to("cpu", self.dtype) for p in self.parameters])

    def let_gpu_finish(self) -> None:
        """Wait for all work that was given to the GPU, in whatever stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attach(self, window: Tensor, *, is_private: bool) -> None:
        """From now on the module trains coupled to this window."""
        self.window = window
        self.is_uniform = self.is_alike and self.device == window.device
        self.is_private = not self.is_uniform
        self._window_views = self._views(window)
        if is_private or not self.is_uniform:
            self.make_private()
        else:
            self._point(self._window_views)

    def make_private(self) -> None:
        if self.is_private:
            return  # as are all parameters on another device, or of several types
        self.is_private = True
        self._private = self.window.clone()
        self._private_views = self._views(self._private)
        self._point(self._private_views)

    def _views(self, flat: Tensor) -> Views:
        """Views that have a storage of their own each: saving a parameter saves its whole storage,
        and that of a window may be all the memory that processes share."""
        pieces = zip(flat.split(list(self.layout.sizes)), self.layout.shapes, strict=True)
        return [torch.from_dlpack(piece).view(shape) for piece, shape in pieces]

    def _point(self, views: Views) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.places = [parameter.detach() for parameter in self.parameters]

    def note_move(self) -> None:
        """Torch does not know that the window is the parameters' memory. Where it is, tell torch
        that they have changed, so that it refuses a backward pass through an older graph."""
        if not self.is_server and not self.is_private:
            increment_version(self.parameters)

    def load(self, flat: Tensor) -> None:
        """Put a point into the module, for the next forward pass."""
        if self._private is not None:
            self._private.copy_(flat)
        elif self.is_uniform:
            self.window.copy_(flat)
        else:
            with torch.no_grad():
                pieces = self.layout.unpack(flat).values()
                for parameter, piece in zip(self.parameters, pieces, strict=True):
                    parameter.data.copy_(piece)

    def restore(self, point: Views, *, is_private: bool) -> None:
        """Put the parameters back to where they were before a visit of another point."""
        if self._private is not None and not is_private:
            self._private, self.is_private = None, False
            self._point(self._window_views)
            return
        with torch.no_grad():
            for parameter, value in zip(self.parameters, point, strict=True):
                parameter.data.copy_(value)

    def cut(self, flat: Tensor) -> Views:
        pieces = zip(flat.split(self._sizes), self.layout.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]

    def set_gradient(self, pieces: Sequence[Tensor], *, is_sparse: bool = False) -> None:
        """Set the `.grad`s; `is_sparse` for an optimiser that takes sparse gradients only."""
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            if parameter.grad is None and not self.is_server and not piece.any():
                continue  # no batch used the parameter, and an optimiser would decay its weights
            own = piece.to(parameter.device, parameter.dtype)
            parameter.grad = own.to_sparse(1) if is_sparse else own

    def descend(
        self, step: Step, guard: AbstractContextManager[None], at: Tensor | None = None
    ) -> None:
        """Make one step of the user's optimiser on the window; or `at` another point, and move the
        window by as much."""
        if not self.is_uniform:
            self._descend_elsewhere(step, guard, at)
            return
        if at is not None:
            self._descend_apart(step, guard, at)
            return
        with guard:
            if self._private is None:
                step()
            else:
                self._step_there(step, self._window_views)

    def _step_there(self, step: Step, views: Views) -> None:
        self._point(views)
        try:
            step()
        finally:
            self._point(self._window_views if self._private is None else self._private_views)

    def _descend_apart(self, step: Step, guard: AbstractContextManager[None], at: Tensor) -> None:
        """Make the step at another point, in memory that nobody sees."""
        there = joined([at])
        self._step_there(step, self._views(there))
        with guard:
            self.window.add_(there.sub_(at))
        self.note_move()

    def _descend_elsewhere(
        self, step: Step, guard: AbstractContextManager[None], at: Tensor | None
    ) -> None:
        """The optimiser must work where the parameters are: step there and publish the change."""
        with guard:
            self.load(self.window if at is None else at)
            before = self.initial()
            step()
            self.window.add_(self.initial().sub_(before))

    def detach(self, output: Tensor) -> None:
        """The module owns its memory again and holds the given model."""
        self._point(self._own)
        with torch.no_grad():
            for parameter, piece in zip(
                self.parameters, self.layout.unpack(output).values(), strict=True
            ):
                parameter.data.copy_(piece.view_as(parameter))


def lay_out_state(optimizer: Any) -> None:
    """Lay the optimiser's vectors out in memory as their parameters, which have moved: fused
    kernels go through both from the first number to the last and ignore strides."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        own = cast("dict[str, Any]", state)
        for name, value in own.items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                like = torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device)
                own[name] = like.copy_(value)
