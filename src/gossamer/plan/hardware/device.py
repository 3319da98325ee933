"""Devices by their data sheets, and how operators use them.

A data sheet says what a device can do at most; how much of that an operator gets depends on its
kind and its size. The curves below were fitted by `tools/operator_sweep.py` to single operators, on
the two devices that are named there, and to no model. Devices that were not measured take the curve
of their kind.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.plan.hardware.operators import PRECISIONS
from gossamer.quantities import bytes_per_second, size_in_bytes


@dataclass(frozen=True)
class Efficiency:
    """How operators of one kind use a device."""

    share: float
    """What large operators get of the peak, or of the bandwidth where an operator moves memory."""
    half_side: float = 0.0
    """An operator whose smallest side has this length gets half of that."""
    half_flops: float = 0.0
    """A product of so many operations gets half of that."""

    def reached(self, side: float, flops: float = 1.0) -> float:
        """The share that an operator of this size gets."""
        return self.share * side / (side + self.half_side) * flops / (flops + self.half_flops)


@dataclass(frozen=True)
class Curves:
    """How operators use a kind of device."""

    kinds: Mapping[str, Efficiency]
    """Products by kind and precision (`matmul bf16`), of the peak; others of the bandwidth: what
    they take on top of moving their bytes."""
    ladder: tuple[tuple[float, float], ...]
    """For operators that move memory: bytes, and the share of the bandwidth that they get; between
    two rungs the share follows the logarithm of the bytes."""
    start_s: float
    """What the device takes for the smallest operator."""
    error: float
    """Nine of ten measured steps of six models took at most so much more or less than estimated, as
    a share of the time that they took (docs/cost.md)."""


@dataclass(frozen=True)
class HostCosts:
    """What the processor takes to start things in eager mode."""

    operator_s: float = 0.0
    """For each operator."""
    view_s: float = 0.0
    """For one that moves nothing."""
    step_s: float = 0.0
    """For a backward pass, however short it is."""
    update_s: float = 0.0
    """For an optimiser's step, however few parameters there are."""
    tensor_s: float = 0.0
    """For each vector of each parameter tensor on top of that."""


@dataclass(frozen=True)
class Device:
    """What the data sheet says, and what it does not."""

    name: str
    title: str
    flops: Mapping[str, float]
    """Operations per second by precision, dense, a multiplication with its addition being two."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes; 0 where workers share the memory of a host."""
    curves: Curves
    is_gpu: bool = True
    """A GPU computes while the host starts the next operators; on a CPU one follows the other."""
    host: HostCosts = HostCosts()
    workspace: float = 0.0
    """What libraries take of the memory in the same allocator."""

    def nearest(self, precision: str) -> str:
        """This precision, or the next better one that the device multiplies in."""
        better = PRECISIONS[PRECISIONS.index(precision) :: -1]
        return next(one for one in better if one in self.flops)

    def peak(self, precision: str) -> float:
        return self.flops[self.nearest(precision)]


# ---------------------------------------------------------------------- the table

_GPU = Curves(
    kinds={
        "batch norm": Efficiency(0.0769, 2, 0),
        "softmax": Efficiency(0.8806, 0, 0),
        "layer norm": Efficiency(0.5914, 4, 0),
        "function": Efficiency(1.6106, 0, 0),
        "attention fp32": Efficiency(0.8308, 2, 1.07e09),
        "attention bf16": Efficiency(0.6032, 16, 1.98e09),
        "convolution fp32": Efficiency(0.4293, 16, 1.34e08),
        "convolution tf32": Efficiency(0.3116, 64, 4.94e08),
        "convolution bf16": Efficiency(0.3056, 32, 1.98e09),
        "matmul fp32": Efficiency(0.6623, 8, 1.34e08),
        "matmul tf32": Efficiency(0.5491, 0, 9.89e08),
        "matmul bf16": Efficiency(0.6755, 8, 9.9e08),
    },
    ladder=(
        (2620000.0, 1.344),
        (10500000.0, 1.778),
        (41900000.0, 1.248),
        (168000000.0, 0.876),
        (671000000.0, 0.895),
        (2680000000.0, 0.898),
    ),
    start_s=1.23e-06,
    error=0.55,
)
_CPU = Curves(
    kinds={
        "function": Efficiency(0.4714, 0, 0),
        "batch norm": Efficiency(0.1548, 0, 0),
        "pooling": Efficiency(0.0965, 4, 0),
        "softmax": Efficiency(0.5677, 32, 0),
        "layer norm": Efficiency(1.063, 128, 0),
        "convolution fp32": Efficiency(0.7976, 4, 8.19e06),
        "attention fp32": Efficiency(0.3833, 16, 5.12e05),
        "matmul fp32": Efficiency(0.4209, 8, 0),
    },
    ladder=(
        (41000.0, 2.741),
        (164000.0, 4.113),
        (655000.0, 3.995),
        (2620000.0, 2.384),
        (10500000.0, 2.17),
        (41900000.0, 1.126),
        (168000000.0, 0.118),
    ),
    start_s=1.02e-06,
    error=0.25,
)
_EAGER = HostCosts(operator_s=22e-6, view_s=1.1e-6, update_s=100e-6, tensor_s=1.5e-6)
_ALONE = HostCosts(operator_s=2e-6, view_s=0.9e-6, tensor_s=6.7e-6)

_ROWS = (
    # NVIDIA A100 Tensor Core GPU data sheet (2021), column A100 80GB SXM.
    Device(
        "a100", "NVIDIA A100 SXM 80 GB", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
        2.039e12, 80e9, _GPU, workspace=17.0e6, host=_EAGER,
    ),
    # NVIDIA H100 Tensor Core GPU data sheet, column SXM; its tensor figures are with sparsity, of
    # which a dense product gets half.
    Device(
        "h100", "NVIDIA H100 SXM 80 GB", {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12},
        3.35e12, 80e9, _GPU, workspace=67.1e6, host=_EAGER,
    ),
    # NVIDIA H200 Tensor Core GPU data sheet, column SXM; halved in the same way.
    Device(
        "h200", "NVIDIA H200 SXM 141 GB", {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12},
        4.8e12, 141e9, _GPU, workspace=67.1e6, host=_EAGER,
    ),
    # NVIDIA HGX B200 specifications for eight GPUs, divided by eight: 620 TFLOP/s in FP32, 18 and
    # 36 PFLOP/s in TF32 and BF16 with sparsity, 64 TB/s, 1.44 TB.
    Device(
        "b200", "NVIDIA B200 SXM 180 GB", {"fp32": 77.5e12, "tf32": 1.125e15, "bf16": 2.25e15},
        8.0e12, 180e9, _GPU, workspace=67.1e6, host=_EAGER,
    ),
    # NVIDIA Ada GPU Architecture whitepaper (2022), appendix A: FP32, and tensor figures without
    # sparsity that accumulate in FP32.
    Device(
        "rtx4090", "NVIDIA GeForce RTX 4090 24 GB",
        {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12},
        1.008e12, 24e9, _GPU, workspace=17.0e6, host=_EAGER,
    ),
    # NVIDIA V100 data sheet (SXM2, 16 GB): 15.7 TFLOP/s in FP32; its tensor units know neither TF32
    # nor BF16.
    Device(
        "v100", "NVIDIA V100 SXM2 16 GB", {"fp32": 15.7e12}, 900e9, 16e9, _GPU, workspace=17.0e6,
        host=_EAGER,
    ),
    # NVIDIA T4 Tensor Core GPU data sheet: 8.1 TFLOP/s in FP32; its tensor units know neither TF32
    # nor BF16.
    Device(
        "t4", "NVIDIA T4 16 GB", {"fp32": 8.1e12}, 320e9, 16e9, _GPU, workspace=17.0e6, host=_EAGER,
    ),
    # AMD's page of the Ryzen 7 7840U: 8 cores of Zen 4 at 3.3 GHz, which finish 32 operations in
    # FP32 a cycle; two channels of DDR5-5600.
    Device(
        "laptop-cpu", "8 cores of a laptop (AMD Ryzen 7 7840U)", {"fp32": 8 * 3.3e9 * 32},
        89.6e9, 16e9, _CPU, is_gpu=False, host=_ALONE,
    ),
    # One core of Zen 5 (AMD EPYC 9005), 64 operations in FP32 a cycle at 4 GHz; what one core gets
    # of the memory is our measurement (`tools/operator_sweep.py`).
    Device(
        "cpu-core", "one core of a server (AMD EPYC 9005)", {"fp32": 4.0e9 * 64},
        40e9, 0.0, _CPU, is_gpu=False, host=_ALONE,
    ),
)  # fmt: skip
DEVICES: dict[str, Device] = {device.name: device for device in _ROWS}


# ---------------------------------------------------------------------- devices of one's own


def find_device(name: str) -> Device:
    """A device of the table by name, or a TOML file by path."""
    if name.endswith(".toml"):
        return read_device(Path(name))
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return DEVICES[name]


def read_device(path: Path) -> Device:
    """A device from a file: `like` names one of the table, and every other key replaces a figure
    of it."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"device file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"device file {path} cannot be read: {error}") from None
    like = told.pop("like", None)
    if not isinstance(like, str):
        raise ConfigurationError(
            f"device file {path} must name a device of the table that it resembles, such as "
            f'like = "h100"; there are {", ".join(DEVICES)}'
        )
    base = find_device(like)
    values: dict[str, Any] = {"name": path.stem, "title": path.stem}
    for key, value in told.items():
        if key not in _KEYS:
            raise unknown_name(f"key of device file {path}:", key, _KEYS)
        values[key] = _KEYS[key](value, f"{path}: {key}")
    return dataclasses.replace(base, **values)


def _title(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{where} must be a text, got {value!r}")
    return value


def _peaks(value: object, where: str) -> dict[str, float]:
    """Operations per second by precision."""
    if not isinstance(value, Mapping) or "fp32" not in value:
        raise ConfigurationError(
            f"{where} must be a table with at least fp32, such as {{ fp32 = 67e12 }}, got {value!r}"
        )
    found: dict[str, float] = {}
    for name, peak in value.items():  # pyright: ignore[reportUnknownVariableType]
        if name not in PRECISIONS:
            raise unknown_name(f"precision of {where}", str(name), PRECISIONS)
        is_number = isinstance(peak, int | float) and not isinstance(peak, bool)
        if not is_number or not 0 < peak < float("inf"):
            raise ConfigurationError(
                f"{where}: {name} must be operations per second above 0, got {peak!r}"
            )
        found[str(name)] = float(peak)
    return found


_KEYS: Mapping[str, Any] = {
    "title": _title, "flops": _peaks, "bandwidth": bytes_per_second, "memory": size_in_bytes,
}  # fmt: skip
