"""Measure single operators by size, and fit the efficiency curves of a device's data sheet to them.

    python tools/operator_sweep.py measure --device cuda --out sweep.json   # under a minute
    python tools/operator_sweep.py fit sweep.json --hardware h200           # and how well they fit

No model is measured: products of matrices, convolutions with both gradients, attention, operators
that move memory, and what it takes to start an operator at all. On a GPU the time of the device is
taken from CUDA graphs, and the time of the host from chains of tiny operators.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.plan.hardware.device import Curves, Device, Efficiency, find_device
from gossamer.plan.hardware.operators import MATRIX_KINDS, Operator, StepTally, kind_of
from gossamer.plan.hardware.roofline import operator_seconds

Call = Callable[[], object]
aten = torch.ops.aten
PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "bf16")}
_ROUND_S = {"cpu": 0.02, "cuda": 0.004}


# ---------------------------------------------------------------------- the operators


def operators(device: torch.device, precision: str) -> Iterator[tuple[str, Call]]:
    """The operators to measure, each with a label."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    most = 8192 if is_gpu else 1024
    sides = [2**power for power in range(4, 14) if 2**power <= most]
    shapes = [(side, side, side) for side in sides]
    rows = (16, 128, 1024, 8192) if is_gpu else (8, 64, 512)
    shapes += [(m, n, k) for m in rows for n, k in ((10, 84), (64, 576), (512, 512), (2048, 512))]
    shapes += [(n, k, m) for m in rows[1:] for n, k in ((10, 84), (64, 576), (512, 512))]
    for m, n, k in shapes:
        a, b = new(m, k), new(k, n)
        yield f"mm {m} {n} {k}", lambda a=a, b=b: torch.mm(a, b)
    crowds = ((64, 64, 64, 32), (512, 64, 64, 32), (4096, 64, 64, 32)) if is_gpu else (
        (16, 64, 64, 32), (64, 64, 64, 32), (64, 64, 32, 64))  # fmt: skip
    for crowd, m, n, k in crowds:
        a, b = new(crowd, m, k), new(crowd, k, n)
        yield f"bmm {crowd} {m} {n} {k}", lambda a=a, b=b: torch.bmm(a, b)
    yield from _convolutions(new, is_gpu)
    yield from _moves(new, is_gpu)
    yield from _attention(new, is_gpu)


def _convolutions(new: Callable[..., Tensor], is_gpu: bool) -> Iterator[tuple[str, Call]]:
    batches = (16, 128, 1024) if is_gpu else (2, 8, 32)
    for n in batches:
        for ins, outs, side, kernel in (
            (1, 6, 28, 5), (3, 16, 32, 3), (16, 16, 32, 3), (32, 32, 16, 3), (64, 64, 8, 3),
            (64, 64, 32, 3), (128, 128, 16, 3), (256, 256, 8, 3), (512, 512, 4, 3),
            (64, 128, 16, 1), (256, 512, 4, 1), (6, 16, 14, 5),
        ):  # fmt: skip
            if not is_gpu and n * ins * outs * side * side * kernel * kernel > 1.5e9:
                continue
            x, w = new(n, ins, side, side), new(outs, ins, kernel, kernel)
            pad = [kernel // 2] * 2
            label = f"{n} {ins} {outs} {side} {kernel}"

            def forward(x: Tensor = x, w: Tensor = w, pad: list[int] = pad) -> object:
                return aten.convolution(x, w, None, [1, 1], pad, [1, 1], False, [0, 0], 1)

            yield f"conv {label}", forward
            made = new(n, outs, side, side)
            for part, mask in (("input", [True, False, False]), ("weight", [False, True, False])):

                def backward(
                    x: Tensor = x, w: Tensor = w, pad: list[int] = pad, made: Tensor = made,
                    mask: list[bool] = mask,
                ) -> object:  # fmt: skip
                    return aten.convolution_backward(
                        made, x, w, None, [1, 1], pad, [1, 1], False, [0, 0], 1, mask
                    )

                yield f"conv {part} {label}", backward


def _attention(new: Callable[..., Tensor], is_gpu: bool) -> Iterator[tuple[str, Call]]:
    cases = ((2, 8, 128, 64), (32, 8, 512, 64), (64, 16, 1024, 64)) if is_gpu else (
        (1, 4, 64, 32), (2, 8, 128, 64), (2, 8, 256, 64))  # fmt: skip
    for n, heads, length, width in cases:
        label = f"attention {n} {heads} {length} {width}"
        yield from _with_backward(label, new(n, heads, length, width), _attend)


def _attend(part: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(part, part, part, is_causal=True)


def _moves(new: Callable[..., Tensor], is_gpu: bool) -> Iterator[tuple[str, Call]]:
    powers = (12, 15, 18, 20, 22, 24, 26, 28) if is_gpu else (8, 10, 12, 14, 16, 18, 20, 22, 24)
    for power in powers:
        a, b = new(2**power), new(2**power)
        yield f"add {2**power}", lambda a=a, b=b: a + b
        yield f"relu {2**power}", lambda a=a: torch.relu(a)
        yield f"gelu {2**power}", lambda a=a: functional.gelu(a)
    for power in [one for one in powers if one >= 16][::2]:
        flat = new(2**power)
        for width in (64, 1024, 16384):
            if 2**power >= width:
                rows = flat.view(-1, width)
                yield f"softmax {2**power} {width}", lambda rows=rows: torch.softmax(rows, -1)
        for channels, side in ((16, 16), (64, 8), (512, 4)):
            image = flat.view(-1, channels, side, side)
            yield from _with_backward(f"batch norm {2**power} {channels}", image, _batch_norm)
            yield from _with_backward(f"pooling {2**power} {channels}", image, _pool)
        for width in (128, 512, 2048):
            wide = flat.view(-1, width)
            yield from _with_backward(f"layer norm {2**power} {width}", wide, _layer_norm)


def _pool(image: Tensor) -> Tensor:
    return functional.max_pool2d(image, 2)


def _batch_norm(image: Tensor) -> Tensor:
    weight = torch.ones(image.shape[1], device=image.device, requires_grad=True)
    return functional.batch_norm(image, None, None, weight, weight, training=True)


def _layer_norm(wide: Tensor) -> Tensor:
    weight = torch.ones(wide.shape[1], device=wide.device, dtype=wide.dtype, requires_grad=True)
    return functional.layer_norm(wide, weight.shape, weight, weight)


def _with_backward(
    label: str, given: Tensor, call: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Call]]:
    """A forward pass, and a forward with a backward pass."""
    given = given.detach().requires_grad_()

    def forward() -> object:
        with torch.no_grad():
            return call(given)

    def both() -> object:
        made = call(given)
        return torch.autograd.grad(made, given, made.detach())

    yield label, forward
    yield f"both, {label}", both


# ---------------------------------------------------------------------- measuring


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Call, device: torch.device, *, has_graph: bool) -> float:
    """The least seconds of one call over a few rounds; on a GPU those of the device alone."""
    run, inside = call, 1
    call()
    wait(device)
    if device.type == "cuda" and has_graph:
        inside = 10
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inside):
                call()
        run = graph.replay
        run()
        wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    repeats = max(1, min(1000, round(_ROUND_S[device.type] / (time.perf_counter() - began))))
    found: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        wait(device)
        found.append((time.perf_counter() - began) / repeats / inside)
    return min(found)


def counted(call: Call) -> list[dict[str, Any]]:
    tally = StepTally([])
    found, _ = tally.watch(call)
    return [dataclasses.asdict(one) for one in found]


def chains(device: torch.device) -> Iterator[dict[str, Any]]:
    """What the host does: chains of tiny layers, whose numbers cost nothing, and of views."""
    for name, (shape, make) in _TINY.items():
        x = torch.randn(*shape, device=device)
        for length in (1, 4, 32):
            torch.manual_seed(0)
            chain = nn.Sequential(*(layer for _ in range(length) for layer in make())).to(device)

            def step(chain: nn.Module = chain, x: Tensor = x) -> None:
                chain.zero_grad(set_to_none=True)
                chain(x).sum().backward()

            yield _host_row(f"{length} of {name}", step, device)
    x = torch.randn(4, 8, device=device)

    def views() -> None:
        y = x.detach().requires_grad_()
        for _ in range(128):
            y = y.t()

    yield _host_row("128 views", views, device)
    for count in (4, 64):
        tensors = [torch.zeros(8, device=device, requires_grad=True) for _ in range(count)]
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        for name, slots, optimiser in (
            ("sgd", 1, torch.optim.SGD(tensors, 1e-3, momentum=0.9)),
            ("adamw", 2, torch.optim.AdamW(tensors, 1e-3)),
        ):
            row = {"label": f"{name} on {count} tensors", "tensors": count, "slots": slots}
            yield row | {"seconds": host_seconds(optimiser.step, device)}


_TINY: dict[str, tuple[tuple[int, ...], Callable[[], list[nn.Module]]]] = {
    "linear, tanh": ((4, 8), lambda: [nn.Linear(8, 8), nn.Tanh()]),
    "convolution, norm, relu": (
        (4, 4, 8, 8), lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()],
    ),
    "norm, linear, gelu": ((4, 4, 8), lambda: [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()]),
}  # fmt: skip


def _host_row(label: str, call: Call, device: torch.device) -> dict[str, Any]:
    kinds = [one["kind"] for one in counted(call)]
    return {
        "label": label, "started": sum(kind != "view" for kind in kinds),
        "views": sum(kind == "view" for kind in kinds), "seconds": host_seconds(call, device),
    }  # fmt: skip


def host_seconds(call: Call, device: torch.device) -> float:
    until = time.perf_counter() + 0.7
    while time.perf_counter() < until:
        call()
    wait(device)
    rounds: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(30):
            call()
        wait(device)
        rounds.append((time.perf_counter() - began) / 30)
    return statistics.median(rounds)


def measure(device: torch.device, out: Path) -> None:
    torch.set_num_threads(1)
    kind = device.type
    made: dict[str, Any] = {
        "torch": torch.__version__, "kind": kind, "rows": [],
        "device": torch.cuda.get_device_name() if kind == "cuda" else "CPU, 1 thread",
    }  # fmt: skip
    made["rows"] += list(chains(device))
    for precision in PRECISIONS[kind]:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for label, call in operators(device, precision):
            if precision == "tf32" and not label.startswith(("mm", "bmm", "conv")):
                continue
            try:
                took = seconds_of(call, device, has_graph="both" not in label)
            except RuntimeError as error:
                print(f"{label}: left out, {str(error).splitlines()[0]}", flush=True)
                continue
            made["rows"].append(
                {"label": label, "precision": precision, "seconds": took,
                 "operators": counted(call)}
            )  # fmt: skip
        out.write_text(json.dumps(made))
        print(f"{precision}: {len(made['rows'])} rows", flush=True)


# ---------------------------------------------------------------------- fitting


def fit(path: Path, name: str) -> None:
    """Print curves for `device.py`, and by how much they miss the operators they were fitted to."""
    made = json.loads(path.read_text())
    device = find_device(name)
    print(f"# {made['device']}, torch {made['torch']}")
    cases: list[Case] = []
    for row in made["rows"]:
        if "operators" not in row:
            continue
        for one in row["operators"]:
            if one["kind"] != "view":
                one["kind"] = kind_of(None, one["name"])  # kinds may have been drawn finer since
        found = [Operator(**one) for one in row["operators"]]
        # Of the backward passes on a GPU the host's time is known, too: they have no graph.
        if not device.is_gpu or "both" not in row["label"] or row["seconds"] > _HOST_S:
            cases.append((row["precision"], found, row["seconds"], row["label"]))
    moves = [case for case in cases if case[3].split()[0] in ("add", "relu")]
    start_s = min(seconds for _, _, seconds, _ in moves)
    ladder = _ladder(moves, device, start_s)
    curves = Curves(kinds={}, ladder=ladder, start_s=start_s, error=0.0)
    print(f"ladder={tuple((float(f'{size:.3g}'), round(share, 3)) for size, share in ladder)}")
    print(f"start_s={start_s:.3g}")
    kinds = [*dict.fromkeys(one.kind for case in cases for one in case[1] if one.kind != "view")]
    for kind in sorted(set(kinds) - {"move"}, key=lambda kind: kind in MATRIX_KINDS):
        is_product = kind in MATRIX_KINDS
        for precision in dict.fromkeys(case[0] for case in cases) if is_product else ("",):
            own = [
                case for case in cases
                if (not precision or case[0] == precision)
                and any(one.kind == kind for one in case[1])
            ]  # fmt: skip
            if not own:
                continue
            key = f"{kind} {precision}".strip()
            found, errors = _best(own, key, device, curves, is_product=is_product)
            curves = dataclasses.replace(curves, kinds={**curves.kinds, key: found})
            print(f'"{key}": Efficiency({found.share}, {found.half_side:.4g}, '
                  f"{found.half_flops:.3g}),  # {len(own)} operators; of ten, five are within "
                  f"{100 * errors[len(errors) // 2]:.0f} % and nine within "
                  f"{100 * errors[9 * len(errors) // 10]:.0f} %")  # fmt: skip
    _print_host([row for row in made["rows"] if "operators" not in row], device, start_s)


def _print_host(rows: list[dict[str, Any]], device: Device, start_s: float) -> None:
    """Fit what the host takes, to chains and to optimisers."""
    on_top = 0.0 if device.is_gpu else start_s  # the host of a CPU computes, too
    # Of the other chains a CPU's own time to start an operator is known from their curves.
    chains = [
        row for row in rows
        if "started" in row and (device.is_gpu or "linear, tanh" in row["label"]
                                 or "views" in row["label"])
    ]  # fmt: skip
    views = next(row for row in chains if row["label"] == "128 views")
    view_s = views["seconds"] / views["views"]

    def chain_error(step_s: float, operator_s: float) -> float:
        return sum(
            abs(math.log(
                (step_s + row["started"] * (operator_s + on_top) + row["views"] * view_s)
                / row["seconds"]
            ))
            for row in chains if row is not views
        )  # fmt: skip

    grid = [1e-6 * 1.1**step for step in range(70)]
    step_s, operator_s = min(((s, o) for s in grid for o in grid), key=lambda so: chain_error(*so))

    def update_error(update_s: float, tensor_s: float) -> float:
        return sum(
            abs(math.log(
                (update_s + row["tensors"] * (1 + row["slots"]) * tensor_s) / row["seconds"]
            ))
            for row in rows if "tensors" in row
        )  # fmt: skip

    found = ((u, s) for u in grid for s in grid)
    update_s, tensor_s = min(found, key=lambda us: update_error(*us))
    print(
        f'"operator_s": {operator_s:.3g}, "view_s": {view_s:.3g}, "step_s": {step_s:.3g}, '
        f'"update_s": {update_s:.3g}, "tensor_s": {tensor_s:.3g}'
    )
    for row in rows:
        print("#", row)


Case = tuple[str, list[Operator], float, str]
_HOST_S = 1e-3


def _ladder(moves: list[Case], device: Device, start_s: float) -> tuple[tuple[float, float], ...]:
    """The share of the bandwidth by the bytes that are moved."""
    by_size: dict[float, list[float]] = {}
    for precision, found, seconds, _ in moves:
        if precision == "fp32" and seconds > 1.3 * start_s:
            # Both of the operators of one number of elements make one rung.
            size = 2.0 ** round(math.log2(found[0].moved_bytes / 2.5))
            share = found[0].moved_bytes / (seconds - start_s) / device.bandwidth
            by_size.setdefault(2.5 * size, []).append(share)
    return tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))


def _best(
    cases: list[Case], key: str, device: Device, curves: Curves, *, is_product: bool
) -> tuple[Efficiency, list[float]]:
    """The efficiency with the least mean of absolute logarithms, over a grid; and the errors."""

    def errors(use: Efficiency) -> list[float]:
        known = dataclasses.replace(curves, kinds={**curves.kinds, key: use})
        trial = dataclasses.replace(device, curves=known)
        return [
            abs(math.log(sum(operator_seconds(o, trial, precision) for o in found) / seconds))
            for precision, found, seconds, _ in cases
        ]

    peak = device.peak(key.rpartition(" ")[2]) if is_product else 0.0
    halves = [0.0, *(2.0**power for power in range(12))]
    # A product of so many operations takes as long as the device needs for 1 us to 64 us.
    works = [0.0, *(peak * 1e-6 * 2.0**power for power in range(7))] if is_product else [0.0]
    shares = [round(0.01 * 1.12**step, 4) for step in range(45)]
    grid = [Efficiency(s, h, w) for s in shares for h in halves for w in works]
    best = min(grid, key=lambda use: sum(errors(use)))
    finer = [dataclasses.replace(best, share=round(best.share * (0.9 + 0.02 * step), 4))
             for step in range(11)]  # fmt: skip
    best = min(finer, key=lambda use: sum(errors(use)))
    return best, sorted(math.exp(error) - 1 for error in errors(best))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measuring.add_argument("--out", type=Path, default=Path("sweep.json"))
    fitting = commands.add_parser("fit")
    fitting.add_argument("path", type=Path)
    fitting.add_argument("--hardware", default="cpu-core")
    given = parser.parse_args()
    if given.command == "fit":
        fit(given.path, given.hardware)
        return 0
    measure(torch.device(given.device), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
