"""Processes that share one GPU: first whether all is right, then how fast, as ratios within a run.

    PYTHONPATH=src python benchmarks/real_gpu.py --json OUT.json        four minutes on one GPU
    PYTHONPATH=src python benchmarks/real_gpu.py --sections conformance --json OUT.json
    PYTHONPATH=src python benchmarks/real_gpu.py --device cpu --quick --json OUT.json

Every section runs in a process of its own with its own limit, so that one that hangs costs only
itself, and the results so far are written after each. How ratios are made: `real.py`. Synchronous
methods are given numbers of steps and not times, so that all of their workers make equally many.
What processes happen to get when they start, cores and memory, they keep for as long as they live,
and there it moves a ratio by a tenth: `--draws` measures with new ones so many times, and gives the
median of the draws' medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_conformance import DEATHS
from real_conductor import Group, Turns, Variant, together

from real import DDP, EXCHANGES, LONELY, PLAIN, exchange, overhead, straggling

LIMIT_S = 230.0
"""Of all sections together; what does not fit any more is left out, and said."""
METHODS = (
    Variant("pull_gossip", "join", "pull_gossip", "shm"),
    Variant("ad_psgd", "join", "ad_psgd", "shm"),
    Variant("all_reduce", "join", "all_reduce", "shm", True),
    Variant("easgd", "join", "easgd", "shm"),
    Variant("sync_server", "join", "sync_server", "shm", True),
    Variant("push_sum", "join", "push_sum", "shm", True),
    Variant("DDP with Gloo", "ddp", is_synchronous=True),
)
SECONDS = {"mlp": 0.3, "resnet18": 0.5, "resnet18-128": 0.7}
ROUNDS = 3
_SCRIPT = Path(__file__).with_name("gpu_conformance.py")
_CLEANING_S = 20.0


class Plan:
    """What is measured, on what, and how often."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device: str = given.device
        self.rounds: int = 1 if given.quick else given.rounds
        self.draws: int = given.draws
        self.seconds = {model: 0.1 if given.quick else time for model, time in SECONDS.items()}
        chosen = given.methods.split(",") if given.methods else [each.name for each in METHODS]
        self.methods = [each for each in METHODS if each.name in chosen]
        if given.quick:
            self.methods = self.methods[:3]

    @property
    def sections(self) -> dict[str, tuple[float, Callable[[], dict[str, Any]]]]:
        """By name: the most seconds for `ROUNDS`, and the work; what matters most first."""
        return {
            "conformance": (120.0, self.conformance),
            "mlp p=2": (60.0, lambda: self.coupled("mlp", 2)),
            "resnet18 p=2": (75.0, lambda: self.coupled("resnet18", 2)),
            "exchange": (40.0, self.exchange),
            "straggler": (45.0, self.straggler),
            "mlp p=4": (90.0, lambda: self.coupled("mlp", 4)),
            "resnet18 p=4": (90.0, lambda: self.coupled("resnet18", 4)),
            "resnet18-128 p=2": (100.0, lambda: self.coupled("resnet18-128", 2)),
            "resnet18-128 p=4": (110.0, lambda: self.coupled("resnet18-128", 4)),
        }

    def conformance(self) -> dict[str, Any]:
        """Every case, in two waves: more processes than that would only wait for the GPU."""
        sums = [(f"reduce p={size}", "reduce", size) for size in (2, 3, 4)]
        others = [("windows", "windows", 3)]
        others += [(f"{size} averages", f"averages/{size}", 3) for size in ("small", "large")]
        others += [(name, f"survive/{name}", 3) for name in DEATHS]
        others += [
            (f"train {variant.method}", f"train/{variant.method}", 2)
            for variant in METHODS
            if variant.kind == "join"
        ]
        found = self._wave(sums) | self._wave(others)
        return {"passed": all(case["passed"] for case in found.values()), "cases": found}

    def _wave(self, cases: Sequence[tuple[str, str, int]]) -> dict[str, Any]:
        started: dict[str, subprocess.Popen[str]] = {}
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as place:
            try:
                for name, case, size in cases:
                    folder = Path(place) / name
                    folder.mkdir()
                    started[name] = self._start(case, size, folder)
                for name, _, size in cases:
                    said, _ = started[name].communicate()
                    found[name] = _judged(name, size, Path(place) / name, said)
            finally:
                for process in started.values():
                    process.terminate()
        return found

    def _start(self, case: str, size: int, folder: Path) -> subprocess.Popen[str]:
        run = "from gossamer.commands.cli import main; main()"
        command = [
            sys.executable, "-c", run, "run", "-n", str(size), "--transport", "shm",
            "--tolerate-deaths", "--deadline", "50", str(_SCRIPT), case, self.device, str(folder),
        ]  # fmt: skip
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def coupled(self, model: str, size: int) -> dict[str, Any]:
        """Speed over the plain loop."""

        def draw() -> dict[str, Any]:
            variants = (PLAIN, *self.methods)
            plain, *others = groups = [Group(v, size, model, self.device) for v in variants]
            with together(groups):
                return Turns(self.seconds[model]).ratios(plain, others, self.rounds)

        return _over_all([draw() for _ in range(self.draws)])

    def exchange(self) -> dict[str, Any]:
        """Milliseconds for a replica of 45 MB, and what the library takes of a step."""
        flat = Group(EXCHANGES[0], 2, "mlp", self.device)
        lonely = Group(LONELY, 2, "mlp", self.device)
        with together([flat, lonely]):
            times = exchange(flat, 10 * self.rounds)
            return {
                "milliseconds": times,
                "lerp_over_average": times["lerp"] / times["average"],
                "lerp_over_pull": times["lerp"] / times["pull"],
                "step_overhead_us": overhead(lonely, 2 * self.rounds),
            }

    def straggler(self) -> dict[str, Any]:
        """Worker 0's speed beside one that sleeps four steps' time after each step."""

        def draw() -> dict[str, Any]:
            variants = (PLAIN, *self.methods[:3], DDP)
            plain, *others = groups = [Group(v, 2, "mlp", self.device) for v in variants]
            with together(groups):
                return straggling(plain, others, self.seconds["mlp"], self.rounds)

        found = [draw() for _ in range(self.draws)]
        return found[0] | {"variants": _over_all([one["variants"] for one in found])}


def _over_all(draws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several draws, for each variant: the median of their medians, the least and the most."""
    found: dict[str, Any] = {}
    for name, first in draws[0].items():
        rows = [draw[name] for draw in draws]
        medians = [row["over_plain"] for row in rows]
        found[name] = first | {
            "over_plain": statistics.median(medians),
            "least": min(row["least"] for row in rows), "most": max(row["most"] for row in rows),
            "draws": medians,
            "plain_steps_per_second": statistics.median(
                row["plain_steps_per_second"] for row in rows
            ),
        }  # fmt: skip
    return found


def _judged(name: str, size: int, folder: Path, said: str) -> dict[str, Any]:
    """One case, from what its processes wrote; those that were to die wrote nothing."""
    wrote = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    expected = set(range(size)) - ({1} if name in DEATHS else set())
    passed = set(wrote) == expected and all(one["passed"] for one in wrote.values())
    digests = {one["digest"] for one in wrote.values() if "digest" in one}
    passed = passed and len(digests) <= 1
    found: dict[str, Any] = {"passed": passed, "workers": wrote}
    return found if passed else found | {"said": said[-3000:]}


def run_section(name: str, limit_s: float, arguments: Sequence[str]) -> dict[str, Any]:
    """In a process of its own, which ends all that it started when its time is over."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "found.json"
        command = [sys.executable, __file__, *arguments, "--only", name, "--json", str(answer)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                try:
                    said, _ = process.communicate(timeout=_CLEANING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    said, _ = process.communicate()
        seconds = time.perf_counter() - began
        if not answer.exists():
            return {"failed": said[-3000:], "seconds": seconds}
        return {"found": json.loads(answer.read_text()), "seconds": seconds}


def tell(name: str, section: dict[str, Any]) -> None:
    print(f"{name} ({section['seconds']:.0f} s)", flush=True)
    if "failed" in section:
        print(f"  failed: {section['failed'][-1500:]}", flush=True)
        return
    found = section["found"]
    if name == "conformance":
        for case, result in found["cases"].items():
            verdict = "passed" if result["passed"] else f"FAILED {json.dumps(result)[-1500:]}"
            print(f"  {case:28} {verdict}", flush=True)
    elif name == "exchange":
        print(f"  {json.dumps(found)}", flush=True)
    else:
        for variant, row in found.get("variants", found).items():
            plain = row["plain_steps_per_second"]
            draws = " ".join(f"{median:.2f}" for median in row["draws"])
            print(f"  {variant:16} {row['over_plain']:.2f} ({row['least']:.2f}-{row['most']:.2f}) "
                  f"of {plain:.0f}/s; draws {draws}", flush=True)  # fmt: skip


def _end(number: int, frame: object) -> None:
    """As an exception, so that all that was started is ended on the way out."""
    sys.exit("its time was over")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sections", help="some of them, separated by commas")
    parser.add_argument("--limit", type=float, default=LIMIT_S)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--methods", help="some of them, separated by commas")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sections = Plan(arguments).sections
    if arguments.only:
        signal.signal(signal.SIGTERM, _end)
        arguments.json.write_text(json.dumps(sections[arguments.only][1]()))
        return
    until = time.monotonic() + arguments.limit
    passed_on = ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    passed_on += ["--draws", str(arguments.draws)]
    passed_on += ["--methods", arguments.methods] if arguments.methods else []
    passed_on += ["--quick"] if arguments.quick else []
    longer = arguments.draws * max(1.0, arguments.rounds / ROUNDS)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    report: dict[str, Any] = {
        "machine": f"{machine}, torch {torch.__version__}, {os.cpu_count()} cores",
        "sections": {},
    }
    chosen = arguments.sections.split(",") if arguments.sections else list(sections)
    for name in chosen:
        limit_s = min(longer * sections[name][0], until - time.monotonic())
        if limit_s < 15.0:
            report["sections"][name] = {"failed": "no time was left for it", "seconds": 0.0}
        else:
            report["sections"][name] = run_section(name, limit_s, passed_on)
        tell(name, report["sections"][name])
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
