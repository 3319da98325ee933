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

from gossamer.plan.hardware.device import Device, Efficiency, find_device
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
        for width in (128, 512, 2048):
            wide = flat.view(-1, width)
            yield from _with_backward(f"layer norm {2**power} {width}", wide, _layer_norm)


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
    x = torch.randn(4, 8, device=device)
    for length in (1, 8, 64):
        torch.manual_seed(0)
        layers = [layer for _ in range(length) for layer in (nn.Linear(8, 8), nn.Tanh())]
        chain = nn.Sequential(*layers).to(device)

        def step(chain: nn.Module = chain) -> None:
            chain.zero_grad(set_to_none=True)
            chain(x).sum().backward()

        def views(count: int = 4 * length) -> None:
            y = x.detach().requires_grad_()
            for _ in range(count):
                y = y.t()

        for what, call in (("layers", step), ("views", views)):
            found = counted(call)
            took = host_seconds(call, device)
            yield {
                "label": f"chain of {length} {what}", "host": True, "seconds": took,
                "started": sum(one["kind"] != "view" for one in found),
                "views": sum(one["kind"] == "view" for one in found),
            }  # fmt: skip
    tensors = [torch.zeros(8, device=device, requires_grad=True) for _ in range(64)]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    for name, optimiser in (
        ("sgd", torch.optim.SGD(tensors, 1e-3, momentum=0.9)),
        ("adamw", torch.optim.AdamW(tensors, 1e-3)),
    ):
        yield {
            "label": f"{name} on 64 tensors", "host": True, "optimiser": name,
            "seconds": host_seconds(optimiser.step, device), "tensors": 64,
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
    print(f"{made['device']}, torch {made['torch']}, for {device.title}")
    rows = [row for row in made["rows"] if not row.get("host")]
    for one in (one for row in rows for one in row["operators"] if one["kind"] != "view"):
        one["kind"] = kind_of(None, one["name"])  # kinds may have been drawn finer since
    cases = [
        (
            row["precision"],
            [Operator(**one) for one in row["operators"]],
            row["seconds"],
            row["label"],
        )
        for row in rows
    ]
    moves = [case for case in cases if case[3].split()[0] in ("add", "relu")]
    start_s = min(seconds for _, _, seconds, _ in moves)
    curves = dataclasses.replace(
        device.curves, start_s=start_s, ladder=_ladder(moves, device, start_s)
    )
    device = dataclasses.replace(device, curves=curves)
    ceilings = {
        kind: _ceiling(cases, kind, device)
        for kind in ("batch norm", "layer norm", "softmax", "function")
    }
    curves = dataclasses.replace(curves, ceilings=ceilings)
    device = dataclasses.replace(device, curves=curves)
    products: dict[str, Efficiency] = {}
    for kind in MATRIX_KINDS:
        for precision in dict.fromkeys(case[0] for case in cases):
            own = [
                case for case in cases
                if case[0] == precision and any(one.kind == kind for one in case[1])
            ]  # fmt: skip
            if own:
                found, error = _best(own, kind, precision, device)
                products[f"{kind} {precision}"] = found
                print(f'"{kind} {precision}": {found},  # {len(own)} operators, typical error '
                      f"{100 * error:.0f} %")  # fmt: skip
    print(f"ladder = {tuple((f'{size:.3g}', round(share, 3)) for size, share in curves.ladder)}")
    print(f"ceilings = { {kind: round(value, 3) for kind, value in ceilings.items()} }")
    print(f"start_s = {start_s:.3g}")
    for row in made["rows"]:
        if row.get("host"):
            print(row)


Case = tuple[str, list[Operator], float, str]


def _ladder(moves: list[Case], device: Device, start_s: float) -> tuple[tuple[float, float], ...]:
    by_size: dict[float, list[float]] = {}
    for precision, found, seconds, _ in moves:
        moved = found[0].moved_bytes
        if precision == "fp32" and seconds > 1.5 * start_s:
            by_size.setdefault(moved, []).append(moved / (seconds - start_s) / device.bandwidth)
    return tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))


def _ceiling(cases: list[Case], kind: str, device: Device) -> float:
    """Of operators that take much longer than to start."""
    start_s = device.curves.start_s
    return statistics.median(
        found[0].moved_bytes / (seconds - start_s) / device.bandwidth
        for _, found, seconds, _ in cases
        if len(found) == 1 and found[0].kind == kind and seconds > 10 * start_s
    )


def _best(cases: list[Case], kind: str, precision: str, device: Device) -> tuple[Efficiency, float]:
    """The curve with the least mean of absolute logarithms, over a grid."""
    best = (math.inf, Efficiency(1.0, 0.0))
    halves = [0.0, *(2.0 ** (power / 2) for power in range(21))]
    shares = [round(0.02 * 1.06**step, 4) for step in range(72)]
    for half in halves:
        for share in shares:
            use = Efficiency(share, half)
            curves = dataclasses.replace(device.curves, products={kind: use})
            trial = dataclasses.replace(device, curves=curves)
            error = 0.0
            for _, found, seconds, _ in cases:
                predicted = sum(operator_seconds(one, trial, precision) for one in found)
                error += abs(math.log(predicted / seconds))
            if error < best[0]:
                best = error, use
    return best[1], math.exp(best[0] / len(cases)) - 1


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
