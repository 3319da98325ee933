"""The operators of one training step, counted without computing any of them.

The step runs once on fake tensors, which have shapes and no numbers. A dispatch mode sees every
operator that a real step would run, forward, backward and in the optimiser; torch's own formulas
(`torch.utils.flop_counter`) count its operations, and the tensors that live at that moment are the
memory that a real step would need.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import Optimiser, make_optimiser
from gossamer.own_code import told
from gossamer.tasks import Task
from gossamer.tasks.data import Data, leaves, mapped
from gossamer.tasks.flat_model import ModelSize, blamed_on, checked_loss, fake_model, size_of

PRECISIONS = ("fp32", "tf32", "bf16")
MATRIX_KINDS = ("matmul", "convolution", "attention")
"""Kinds whose time follows from their operations; that of all others follows from their bytes."""
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_FUNCTIONS = (
    "gelu", "silu", "tanh", "sigmoid", "exp", "log", "pow", "sqrt", "div", "nll_loss", "softplus",
    "mish",
)  # fmt: skip
_SLOW_MOVES = {
    "batch norm": ("batch_norm",),
    "layer norm": ("layer_norm", "group_norm"),
    "softmax": ("softmax", "logsumexp"),
    "pooling": ("max_pool", "avg_pool"),
    "function": _FUNCTIONS,
}
"""Operators on each number that take longer than to move it, by words in their names."""
_FREE = ("prim.", "aten.empty", "aten.new_empty", "aten.lift", "aten._unsafe_view", "aten.resize")
_FREE_WORDS = ("detach", "empty_like")


@dataclass(frozen=True)
class Operator:
    """One operator of a step, with what its time follows from."""

    name: str
    kind: str
    """matmul, convolution, attention, move, one that takes longer than a move (batch norm, layer
    norm, softmax, function), or view, which moves nothing."""
    is_backward: bool
    flops: float
    smallest: int
    """The smallest of the three sizes of a product of matrices, the channels of a batch norm, or
    the last size of anything else: short sides leave units idle."""
    moved_bytes: float
    """What it reads and writes."""
    is_half: bool = False
    """Whether its numbers have 16 bits."""
    layer: str = ""
    """The innermost module that it belongs to, by its name in the model; empty for none."""


@dataclass(frozen=True)
class StepWork:
    """Everything that one step does."""

    batch: int
    size: ModelSize
    gradient: tuple[Operator, ...]
    """Forward and backward."""
    update: tuple[Operator, ...]
    """The optimiser, counted on the parameters as one vector."""
    tensors: tuple[int, ...]
    """The numbers in each parameter tensor, each of which a user's optimiser looks at."""
    peak_bytes: int
    """The most that lives at one moment of a step: state, gradients and activations."""
    is_fake: bool
    """False if the model could not run on fake tensors, so that the step was computed."""

    @property
    def activation_bytes(self) -> int:
        """What a step needs beside the lasting state and a gradient."""
        return max(0, self.peak_bytes - self.size.worker_bytes)

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.gradient)


def step_work(
    task: Task, batch: int, *, optimiser: str | Optimiser | None = None, precision: str = "fp32"
) -> StepWork:
    """The work of one step of a task with a batch of this size."""
    chosen = make_optimiser(optimiser or task.optimiser)
    try:
        with fake_model(task) as module, blamed_on(task):
            return _counted(module, task, batch, chosen, precision)
    except ConfigurationError:
        raise
    except Exception as error:
        # Data-dependent shapes, `.item()` and the like: the step is computed once for real.
        why = error
    try:
        with blamed_on(task):
            module = task.make_model()
            return _counted(module, task, batch, chosen, precision)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"a step of task {task.name} can neither be counted on fake tensors ({told(why)}) nor "
            f"computed here ({told(error)}); give a Chrome trace of a real step with --trace"
        ) from error


def _counted(
    module: nn.Module, task: Task, batch: int, optimiser: Optimiser, precision: str
) -> StepWork:
    size = size_of(module, optimiser)
    module.train()
    sample = _batch_of(task, batch)
    lasting = [*module.parameters(), *module.buffers(), *leaves(sample.inputs)]
    tally = StepTally(lasting)

    def gradient() -> None:
        inputs = sample.inputs
        if task.augment is not None:
            inputs = task.augment(inputs, torch.zeros((), dtype=torch.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            made = Data(inputs, sample.targets, sample.labels_as)
            loss = checked_loss(task, made.call(module), sample.targets)
        loss.backward()

    operators, peak = tally.watch(gradient)
    element = next(p for p in module.parameters() if p.requires_grad)
    numbers = size.model_bytes // element.element_size()
    shapes = [one.shape for one in module.parameters() if one.requires_grad]
    update, temporary = _update(numbers, optimiser.suited(shapes), element)
    return StepWork(
        batch, size, operators, update,
        tensors=tuple(map(math.prod, shapes)),
        peak_bytes=max(
            peak + size.optimiser_bytes, size.worker_bytes + temporary
        ),
        is_fake=_is_fake(element),
    )  # fmt: skip


def _update(numbers: int, optimiser: Optimiser, like: Tensor) -> tuple[tuple[Operator, ...], int]:
    """The operators of one descent of the whole model as one vector, and its temporary bytes.

    A model that was made for real is not descended for real, as that would double its memory.
    """
    with torch.no_grad():
        made = like.new_empty if _is_fake(like) else partial(torch.empty, device="meta")
        shape = (1, numbers)
        parameters, gradients = made(shape), made(shape)
        state = {slot: made(shape) for slot in optimiser.slots if slot != "tuner"}
        if "tuner" in optimiser.slots:
            # Its few scalars are read back, which tensors without numbers cannot do: a descent
            # reads and writes each of its vectors once.
            moved = 2.0 * (len(optimiser.slots) + 1) * numbers * like.element_size()
            return (Operator("tuned", "move", True, 0.0, 0, moved),), 0
        tally = StepTally([parameters, gradients, *state.values()])
        operators, peak = tally.watch(
            lambda: optimiser.descend_(parameters, gradients, state, [1], 0.1)
        )
        held = (2 + len(state)) * parameters.nbytes
    return operators, max(0, peak - held)


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter) or hasattr(tensor, "fake_mode")


def _batch_of(task: Task, batch: int) -> Data:
    """A batch with the shapes of the task's data, however few samples there are."""
    first = task.train.first(1)

    def repeated(tensor: Tensor) -> Tensor:
        return torch.zeros((batch, *tensor.shape[1:]), dtype=tensor.dtype)

    return Data(mapped(first.inputs, repeated), mapped(first.targets, repeated), first.labels_as)


# ---------------------------------------------------------------------- the tally


class StepTally(TorchDispatchMode):
    """Records the operators that run under it, and the most bytes that live at one time."""

    def __init__(self, lasting: Sequence[Tensor]) -> None:
        """`lasting` lives before the first operator."""
        super().__init__()
        self.operators: list[Operator] = []
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0
        self._tracker = ModuleTracker()
        self._layers: dict[int, str] = {}
        """The layer of each operator that has a gradient, by autograd's number of it."""
        for tensor in lasting:
            self._hold(tensor)

    def watch(self, step: Callable[[], object]) -> tuple[tuple[Operator, ...], int]:
        """Run a step under this mode; its operators, and the most bytes that lived."""
        self.peak_bytes = self._bytes
        with ExitStack() as stack:
            stack.enter_context(self._tracker)
            stack.enter_context(self)
            step()
        return tuple(self.operators), self.peak_bytes

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given = kwargs or {}
        made = func(*args, **given)
        inputs = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        for one in outputs:
            self._hold(one)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        name = str(func)
        if not name.startswith(_FREE):
            self._count(func, name, args, given, made, inputs, outputs)
        return made

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live and self._live[key]() is storage:
            return

        def freed(_: object) -> None:
            self._bytes -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, freed)
        self._bytes += size

    def _count(
        self, func: Any, name: str, args: tuple[Any, ...], given: dict[str, Any], made: Any,
        inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    ) -> None:  # fmt: skip
        kind = kind_of(func, name)
        flops = _flops(func, args, given, made)
        moved = 0.0 if kind == "view" else sum(map(_touched, (*inputs, *outputs)))
        is_half = any(one.dtype in (torch.bfloat16, torch.float16) for one in inputs)
        layer = self._layer()
        for part, share, smallest in _parts(name, args, outputs):
            done, touched = flops * share, moved * share
            self.operators.append(
                Operator(part, kind, self._tracker.is_bw, done, smallest, touched, is_half, layer)
            )

    def _layer(self) -> str:
        """In the backward pass that of the forward operator whose gradient this is."""
        engine = cast(Any, torch._C)  # pyright: ignore[reportPrivateUsage]
        node = engine._current_autograd_node()
        if node is not None:
            return self._layers.get(node._sequence_nr(), "")
        # The names of modules begin with that of the model's class.
        within = [name.partition(".")[2] for name in self._tracker.parents if name != "Global"]
        layer = max(within, key=lambda name: name.count(".") + bool(name), default="")
        self._layers.setdefault(engine._autograd._get_sequence_nr() - 1, layer)
        return layer


def kind_of(func: Any, name: str) -> str:
    """What kind of operator this is, which decides what its time follows from."""
    plain = name.removeprefix("aten.").partition(".")[0]
    if plain in _MATMULS:
        return "matmul"
    if "convolution" in plain:
        return "convolution"
    if "scaled_dot_product" in plain:
        return "attention"
    if getattr(func, "is_view", False) or any(word in plain for word in _FREE_WORDS):
        return "view"
    for kind, words in _SLOW_MOVES.items():
        if any(word in plain for word in words):
            return kind
    return "move"


def _flops(func: Any, args: tuple[Any, ...], given: dict[str, Any], made: Any) -> float:
    """Count by torch's own formulas; attention on the CPU has none, and is counted as on GPUs."""
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **given, out_val=made))
    name = str(func)
    if "flash_attention_for_cpu_backward" in name:
        shapes = [cast(Tensor, one).shape for one in args[:4]]
        return float(flop_counter.sdpa_backward_flop_count(*shapes))
    if "flash_attention_for_cpu" in name:
        shapes = [cast(Tensor, one).shape for one in args[:3]]
        return float(flop_counter.sdpa_flop_count(*shapes))
    return 0.0


def _touched(tensor: Tensor) -> float:
    """The bytes of a tensor; an expanded one has fewer than its shape says."""
    return float(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _parts(
    name: str, args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> Iterator[tuple[str, float, int]]:
    """An operator's products: its name, its share of the operations, its smallest size.

    The backward pass of a convolution is two products: one for each gradient that is asked for.
    """
    if name.startswith("aten.convolution_backward"):
        gradient, image, weight, mask = args[0], args[1], args[2], args[10]
        outs, ins, kernel = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
        places = gradient.shape[0] * math.prod(gradient.shape[2:])
        sizes = {
            "input": (min(ins, outs * kernel, image.numel() // ins), mask[0]),
            "weight": (min(outs, ins * kernel, places), mask[1]),
        }
        asked = [(part, smallest) for part, (smallest, wanted) in sizes.items() if wanted]
        for part, smallest in asked:
            yield f"convolution_backward, {part}", 1 / len(asked), smallest
        return
    plain = name.removeprefix("aten.").partition(".")[0]
    if plain == "convolution":
        weight, made = args[1], outputs[0]
        inner = math.prod(weight.shape[1:])
        yield plain, 1.0, min(weight.shape[0], inner, made.numel() // made.shape[1])
    elif plain in _MATMULS:
        first, second = [one for one in args if isinstance(one, Tensor)][-2:]
        yield plain, 1.0, min(*first.shape[-2:], second.shape[-1])
    elif "scaled_dot_product" in plain:
        query = next(one for one in args if isinstance(one, Tensor))
        yield plain.lstrip("_"), 1.0, min(query.shape[-2:])
    else:
        # A row of a softmax or of a layer norm, or a channel of a batch norm, is one unit's work.
        image = next((one for one in outputs if one.dim() > 1), None)
        side = 1 if "batch_norm" in plain or "group_norm" in plain else -1
        yield plain, 1.0, image.shape[side] if image is not None else 0
