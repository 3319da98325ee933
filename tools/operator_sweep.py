"""Measure single operators by size, and fit the efficiency curves of a device's data sheet to them.

    python tools/operator_sweep.py measure --device cuda --out sweep.json   # under a minute
    python tools/operator_sweep.py fit sweep.json --hardware h200           # the curves, and how well

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

from gossamer.plan.hardware.operators import StepTally

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
    cases = ((2, 8, 128, 64), (8, 8, 256, 64), (32, 8, 512, 64)) if is_gpu else (
        (1, 4, 64, 32), (2, 8, 128, 64), (2, 8, 256, 64))  # fmt: skip
    for n, heads, length, width in cases:
        parts = [new(n, heads, length, width).requires_grad_() for _ in range(3)]

        def forward(parts: list[Tensor] = parts) -> object:
            with torch.no_grad():
                return functional.scaled_dot_product_attention(*parts, is_causal=True)

        def both(parts: list[Tensor] = parts) -> object:
            made = functional.scaled_dot_product_attention(*parts, is_causal=True)
            return torch.autograd.grad(made, parts, made.detach())

        yield f"attention {n} {heads} {length} {width}", forward
        yield f"attention both {n} {heads} {length} {width}", both


def _moves(new: Callable[..., Tensor], is_gpu: bool) -> Iterator[tuple[str, Call]]:
    powers = (12, 15, 18, 20, 22, 24, 26, 28) if is_gpu else (8, 10, 12, 14, 16, 18, 20, 22, 24)
    for power in powers:
        a, b = new(2**power), new(2**power)
        rows = a.view(-1, 64)
        yield f"add {2**power}", lambda a=a, b=b: a + b
        yield f"relu {2**power}", lambda a=a: torch.relu(a)
        yield f"gelu {2**power}", lambda a=a: functional.gelu(a)
        yield f"softmax {2**power}", lambda rows=rows: torch.softmax(rows, -1)
        if power > 12:
            image = a.view(-1, 16, 16, 16)
            wide = a.view(-1, 128)
            scale, mean = new(16).float(), new(16).float().abs()
            yield (
                f"batch norm {2**power}",
                lambda i=image, s=scale, m=mean: aten.native_batch_norm(
                    i, s, s, m, m, True, 0.1, 1e-5
                ),
            )
            yield f"layer norm {2**power}", lambda wide=wide: functional.layer_norm(wide, (128,))


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
    """What the host does: chains of tiny layers, whose numbers cost nothing, and chains of views."""
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
    for _ in range(20):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measuring.add_argument("--out", type=Path, default=Path("sweep.json"))
    given = parser.parse_args()
    measure(torch.device(given.device), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
