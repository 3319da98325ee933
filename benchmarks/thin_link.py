"""ResNet-18 on two hosts with a thin link between them: milliseconds per step, beside DDP's.

    sudo .venv/bin/python benchmarks/thin_link.py           about four minutes
    ... --write docs/benchmarks/thin-link.json              keeps the figures, with a table beside

Two network namespaces (namespaces.py) hold one worker each, started by torchrun as on a cluster.
Each variant is run so often, in turns with the others; a step's time is that of the slower worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import tell
from namespaces import Hosts, hosts, why_not
from real_loops import Ddp, Joined, Plain
from real_models import Problem

from gossamer.real.join.joined_worker import join

PLAIN, DDP = "no communication", "DDP"
VARIANTS = (PLAIN, DDP, "all_reduce", "all_reduce:overlap=false", "local_sgd:period=4",
            "pull_gossip", "ad_psgd")  # fmt: skip
WORKERS = 2
WARM_UP, STEPS = 3, 12
LIMIT_S = 300
_FIRST_PORT = 29500


def be_worker(variant: str, answer: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    problem = Problem("resnet18", rank, torch.device("cpu"), 0.01)
    with contextlib.ExitStack() as stack:
        loop = Plain(problem)
        if variant == DDP:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            loop = Ddp(problem)
        elif variant != PLAIN:
            worker = join(problem.module, problem.optimizer, variant, seed=0, steps=100)
            loop = Joined(problem, stack.enter_context(worker))
        for _ in range(WARM_UP):
            loop.step()
        began = time.perf_counter()
        for _ in range(STEPS):
            loop.step()
        seconds = (time.perf_counter() - began) / STEPS
    answer.with_suffix(f".{rank}").write_text(str(seconds))


def measure(made: Hosts, variant: str, port: int) -> float:
    """Milliseconds of a step of the slower worker."""
    answer = made.folder / f"answer-{port}"
    started = [
        made.start(
            host,
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(WORKERS),
                "--nproc-per-node", "1", "--node-rank", str(host), "--master-addr", "node0",
                "--master-port", str(port), __file__, "--be", variant, str(answer),
            ],
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            output=subprocess.PIPE,
        )
        for host in range(WORKERS)
    ]  # fmt: skip
    for process in started:
        written, _ = process.communicate(timeout=LIMIT_S)
        if process.returncode != 0:
            raise RuntimeError(f"{variant} failed:\n{written}")
    made.started.clear()
    times = [answer.with_suffix(f".{rank}").read_text() for rank in range(WORKERS)]
    return 1e3 * max(map(float, times))


def as_markdown(found: dict[str, Any]) -> str:
    rows = [
        f"| {name if name in (PLAIN, DDP) else f'`{name}`'} | {case['milliseconds']:.0f} "
        f"({case['least']:.0f}-{case['most']:.0f}) | "
        f"{found['variants'][DDP]['milliseconds'] / case['milliseconds']:.2f} |"
        for name, case in found["variants"].items()
    ]
    return "\n".join([
        f"ResNet-18, 11.2M parameters, batch 16, on two hosts with {found['mbit']:g} Mbit/s between"
        f" them; median (least-most) of {found['rounds']} runs of {STEPS} steps.",
        "", "| | ms a step | speed over DDP's |", "|---|---|---|", *rows, "",
        f"Machine: {found['machine']}.", "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--be", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        be_worker(arguments.be[0], Path(arguments.be[1]))
        return
    reason = why_not()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with hosts(WORKERS, arguments.mbit) as made:
        ports = iter(range(_FIRST_PORT, _FIRST_PORT + 1000))
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                times[variant].append(measure(made, variant, next(ports)))
                print(f"{variant:28} {times[variant][-1]:.0f} ms", flush=True)
    found: dict[str, Any] = {
        "mbit": arguments.mbit, "rounds": arguments.rounds,
        "machine": f"{os.cpu_count()} cores, torch {torch.__version__}, 1 thread per worker",
        "variants": {
            variant: {
                "milliseconds": statistics.median(found), "least": min(found), "most": max(found),
            }
            for variant, found in times.items()
        },
    }  # fmt: skip
    tell(found, as_markdown, arguments)


if __name__ == "__main__":
    main()
