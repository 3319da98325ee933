"""A Chrome trace of one real step, as torch's profiler exports it: its time, layer by layer.

    with torch.profiler.profile(with_stack=True, with_modules=True) as profiler:
        one_step()
    profiler.export_chrome_trace("step.json")

Operators and modules are spans of the host's threads. A kernel of a GPU belongs to the operator
that started it (`External id`), and an operator of the backward pass to the module whose forward
operator has the same `Sequence number`. Without modules the operators stand for themselves.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gossamer.config.cluster import Compute
from gossamer.errors import ConfigurationError
from gossamer.quantities import show_percent, show_seconds

_MODULE = "nn.Module: "
_MOST_LAYERS = 8


@dataclass(frozen=True)
class TracedStep:
    """What the trace says of one step."""

    path: str
    seconds: float
    forward_share: float
    layers: dict[str, float]
    """Seconds by layer, from long to short."""

    def compute(self, usual: Compute) -> Compute:
        """One step of one batch: what a sample adds, no single trace says."""
        return dataclasses.replace(
            usual, seconds=self.seconds, per_sample=0.0, unoverlapped_seconds=0.0,
            forward_share=self.forward_share,
        )  # fmt: skip

    def layer_rows(self) -> list[dict[str, Any]]:
        """The seconds of each layer, from long to short."""
        return [{"layer": name, "seconds": took} for name, took in self.layers.items()]

    def sentences(self) -> list[str]:
        total = sum(self.layers.values())
        longest = ", ".join(
            f"{name} {show_percent(round(took / total, 3))}"
            for name, took in list(self.layers.items())[:_MOST_LAYERS]
        )
        return [
            f"one step of {self.path}: {show_seconds(self.seconds)}, of which "
            f"{show_percent(round(self.forward_share, 3))} before the backward pass; longest: "
            f"{longest}",
            "a trace tells the time of its own batch only; give none with --batch, or estimate "
            "with --hardware",
        ]


@dataclass(frozen=True)
class _Span:
    name: str
    begin: float
    end: float
    thread: Any
    arguments: Mapping[str, Any]


def read_trace(path: Path) -> TracedStep:
    """The step in a file, which may be compressed; a damaged one is refused with what is wrong."""
    events = _events(path)
    operators = _spans(events, "cpu_op", path)
    kernels = _spans(events, "kernel", path)
    if not operators:
        raise ConfigurationError(
            f"trace {path} has no operators; export one step of torch.profiler.profile with "
            "export_chrome_trace"
        )
    steps = [
        one for one in _spans(events, "user_annotation", path)
        if one.name.startswith("ProfilerStep")
    ]  # fmt: skip
    whole = (
        max(steps, key=lambda one: one.begin)  # the first steps of a profile warm up
        if steps
        else _Span("", min(o.begin for o in operators),
                   max(o.end for o in (*operators, *kernels)), None, {})
    )  # fmt: skip
    operators = [one for one in operators if whole.begin <= one.begin <= whole.end]
    kernels = [one for one in kernels if whole.begin <= one.begin <= whole.end]
    seconds = 1e-6 * (whole.end - whole.begin)
    if not operators or not seconds > 0:
        raise ConfigurationError(f"the step in trace {path} is empty; trace one whole step")
    backward = [one.begin for one in operators if "ackward" in one.name]
    forward = (min(backward) - whole.begin) / (whole.end - whole.begin) if backward else 1 / 3
    layers = _by_layer(operators, kernels, _spans(events, "python_function", path))
    ordered = dict(sorted(layers.items(), key=lambda entry: -entry[1]))
    return TracedStep(str(path), seconds, min(0.99, max(0.0, forward)), ordered)


def _events(path: Path) -> list[Mapping[str, Any]]:
    try:
        raw = path.read_bytes()
        told: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except FileNotFoundError:
        raise ConfigurationError(f"trace {path} does not exist") from None
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"trace {path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigurationError(f"trace {path} is damaged, it is no JSON: {error}") from None
    found = told.get("traceEvents") if isinstance(told, dict) else told
    if not isinstance(found, list):
        raise ConfigurationError(
            f"trace {path} has no list of traceEvents; export it by export_chrome_trace"
        )
    events = cast(list[Any], found)
    return [cast(Mapping[str, Any], one) for one in events if isinstance(one, Mapping)]


def _spans(events: Sequence[Mapping[str, Any]], category: str, path: Path) -> list[_Span]:
    found: list[_Span] = []
    for event in events:
        if event.get("cat") != category or event.get("ph") != "X":
            continue
        begin, lasts = cast(tuple[Any, Any], (event.get("ts"), event.get("dur", 0)))
        are_numbers = all(type(one) in (int, float) for one in (begin, lasts))
        if not are_numbers or lasts < 0 or not math.isfinite(begin + lasts):
            raise ConfigurationError(
                f"trace {path} is damaged: {event.get('name')!r} begins at {begin!r} and lasts "
                f"{lasts!r} us; both must be numbers, and no time is below 0 or endless"
            )
        arguments = event.get("args")
        known = cast(Mapping[str, Any], arguments) if isinstance(arguments, Mapping) else {}
        name = str(event.get("name", ""))
        found.append(_Span(name, float(begin), begin + lasts, event.get("tid"), known))
    return sorted(found, key=lambda one: (one.begin, -one.end))


def _by_layer(
    operators: Sequence[_Span], kernels: Sequence[_Span], functions: Sequence[_Span]
) -> dict[str, float]:
    """Seconds by layer: of kernels where the trace has any, else of the outermost operators."""
    modules = [one for one in functions if one.name.startswith(_MODULE)]
    of_sequence: dict[int, str] = {}
    outermost: list[tuple[_Span, str]] = []
    until: dict[Any, float] = {}
    for one in operators:
        number = one.arguments.get("Sequence number")
        where = _inside(one, modules)
        if isinstance(number, int) and where and "ackward" not in one.name:
            of_sequence.setdefault(number, where)
        layer = where or of_sequence.get(cast(int, number), "") or _plain(one.name)
        if one.begin >= until.get(one.thread, -1.0):
            until[one.thread] = one.end
            outermost.append((one, layer))
    layers: dict[str, float] = {}
    if kernels:
        of_operator = {one.arguments.get("External id"): layer for one, layer in outermost}
        for kernel in kernels:
            layer = of_operator.get(kernel.arguments.get("External id"), _plain(kernel.name))
            layers[layer] = layers.get(layer, 0.0) + 1e-6 * (kernel.end - kernel.begin)
        return layers
    for one, layer in outermost:
        layers[layer] = layers.get(layer, 0.0) + 1e-6 * (one.end - one.begin)
    return layers


def _inside(one: _Span, modules: Sequence[_Span]) -> str:
    """The innermost module of the same thread around an operator."""
    at = bisect_right(modules, one.begin, key=lambda module: module.begin)
    for module in reversed(modules[:at]):
        if module.thread == one.thread and module.end >= one.end:
            return module.name.removeprefix(_MODULE)
    return ""


def _plain(name: str) -> str:
    """The name of an operator, without what autograd says around it."""
    short = name.removeprefix("autograd::engine::evaluate_function: ")
    return re.sub(r"^aten::", "", short)[:40]
