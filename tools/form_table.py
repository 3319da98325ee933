"""Measure the forms of convolutions on this machine and write their rows of the shipped table.

    PYTHONPATH=src python tools/form_table.py --device cuda --write src/gossamer/sim/forms/table.json

Rows of other kinds of device stay as they are. Forward, both gradients and what is needed to bring
tensors into a form's layout are timed together; on a GPU as one CUDA graph, as a run replays them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gossamer.sim.forms.convolution import FORMS, ConvolutionForm, Geometry
from gossamer.sim.forms.table import device_kind
from gossamer.tasks.precision import rounding_as

Shape = tuple[int, int, int, int, int, int, int]
"""Workers, samples, inputs, outputs, height of the output, height of the kernel, stride."""

_SMALL = ((3, 8, 16, 3, 1), (8, 16, 8, 3, 1))
_LENET = ((1, 6, 28, 5, 1), (6, 16, 10, 5, 1))
_NARROW = ((3, 16, 32, 3, 1), (16, 16, 32, 3, 1), (16, 32, 16, 3, 2), (32, 32, 16, 3, 1),
           (64, 64, 8, 3, 1))  # fmt: skip
_WIDE = ((3, 64, 32, 3, 1), (64, 64, 32, 3, 1), (64, 128, 16, 3, 2), (64, 128, 16, 1, 2),
         (128, 128, 16, 3, 1), (256, 256, 8, 3, 1), (512, 512, 4, 3, 1))  # fmt: skip
SHAPES: dict[str, list[Shape]] = {
    "cuda": [
        *((workers, 32, *layer) for workers in (16, 128) for layer in _LENET),
        *((16, samples, *layer) for samples in (32, 128) for layer in _NARROW),
        *((workers, 16, *layer) for workers in (8, 32) for layer in _WIDE),
    ],
    "cpu": [
        *((workers, 16, *layer) for workers in (4, 16, 64) for layer in (*_SMALL, *_LENET)),
        *((workers, 16, *layer) for workers in (4, 16) for layer in _NARROW),
    ],
}
PRECISIONS = {"cuda": ("bf16", "tf32", "fp32"), "cpu": ("fp32",)}


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with its dimensions in memory in the order of another's."""
    order = sorted(range(tensor.dim()), key=lambda at: -like.stride(at))
    back = [order.index(at) for at in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def work_of(form: ConvolutionForm, shape: Shape, precision: str, device: torch.device):  # noqa: ANN201
    workers, samples, inputs, outputs, height, kernel, stride = shape
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    geometry = Geometry((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
    size = height * stride
    weights = torch.randn(workers, outputs, inputs, kernel, kernel, device=device, dtype=dtype)
    given = torch.randn(workers, samples, inputs, size, size, device=device, dtype=dtype)
    made = form.forward(given, weights, geometry)
    given, gradient = laid_out(given, made), laid_out(torch.randn_like(made), made)

    def work() -> None:
        form.forward(given, weights, geometry)
        form.weight_gradient(gradient, given, weights, geometry)
        if inputs > 3:  # the first layer's images need no gradient
            form.input_gradient(gradient, given, weights, geometry)

    return work


def replayed(work: Callable[[], None]) -> Callable[[], None]:
    """The work as one CUDA graph."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], None], device: torch.device) -> float:
    is_cuda = device.type == "cuda"
    work = replayed(work) if is_cuda else work
    times: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(5 if is_cuda else 1):
            work()
        if is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * (2e5 if is_cuda else 1e6))
    # What else a CPU does comes on top; the first call on it is one that warms up.
    return statistics.median(times) if is_cuda else min(times)


def measured(shape: Shape, precision: str, device: torch.device) -> dict[str, object]:
    workers, samples, inputs, outputs, height, kernel, _ = shape
    times: dict[str, float] = {}
    with rounding_as(precision, device), torch.no_grad():
        for name, form in FORMS.items():
            times[name] = round(microseconds(work_of(form, shape, precision, device), device), 1)
    return {
        "device": device_kind(device),
        "operation": "convolution",
        "precision": precision,
        "shape": {
            "workers": workers, "samples": samples, "inputs": inputs, "outputs": outputs,
            "pixels": height * height, "taps": kernel * kernel,
        },
        "form": min(times, key=lambda name: times[name]),
        "microseconds": times,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)  # as simulated runs have them
    kept = json.loads(arguments.write.read_text()) if arguments.write.exists() else {"rows": []}
    rows = [row for row in kept["rows"]
            if row["device"] != device_kind(device) or row["operation"] != "convolution"]  # fmt: skip
    for precision in PRECISIONS[device.type]:
        for shape in SHAPES[device.type]:
            rows.append(measured(shape, precision, device))
            print(rows[-1], flush=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.write.write_text('{"rows": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
