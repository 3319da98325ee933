"""Groups of processes that take turns, so that the noise of a machine hits all of them alike.

Every variant is a group of its own, started as a user would start it. While one group works the
others are stopped (SIGSTOP): their background threads and launchers cost it nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_HERE = Path(__file__).resolve().parent
_PATIENCE_S = 300.0
_END_S = 10.0
_LEAD_S = 0.15
"""Of every phase, before the clock starts."""


@dataclass(frozen=True)
class Variant:
    """One way of coupling workers."""

    name: str
    kind: str
    method: str = ""
    transport: str = ""
    is_synchronous: bool = False
    reduction: str = "auto"
    """GOSSAMER_REDUCTION of the torch transport."""
    checkout: Path = _HERE.parent
    """Where `src/gossamer` and the program of the workers are taken from."""


class Group:
    """The p processes of one variant."""

    def __init__(
        self, variant: Variant, size: int, model: str = "mlp", device: str = "cpu",
        rate: float = 0.01,
    ) -> None:  # fmt: skip
        self.variant, self.size = variant, size
        self._server = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._server.getsockname()[1]}"
        options = ["--model", model, "--device", device, "--rate", str(rate)]
        if variant.method:
            options += ["--method", variant.method]
        script = str(variant.checkout / "benchmarks" / "real_worker.py")
        worker = [sys.executable, script, variant.kind, address, *options]
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._processes = self._start(worker)
        self._lines: list[tuple[socket.socket, TextIO]] = []
        self._pids: list[int] = []

    def _start(self, worker: list[str]) -> list[subprocess.Popen[Any]]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(self.variant.checkout / "src")
        size, transport = self.size, self.variant.transport
        command, variables = worker, [environment]
        if transport == "mpi":
            mpirun = find_mpirun()
            assert mpirun is not None
            command = [mpirun, "-n", str(size), "--oversubscribe", "--bind-to", "none", *worker]
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        elif transport:
            command = [sys.executable, "-m", "gossamer", "run", "-n", str(size),
                       "--transport", transport, "--", *worker]  # fmt: skip
            environment |= {"GOSSAMER_REDUCTION": self.variant.reduction}
        else:
            variables = [
                environment | {"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)
            ]
        return [
            subprocess.Popen(
                command, env=own, stdin=subprocess.DEVNULL, stdout=self._output,
                stderr=self._output, start_new_session=True,
            )
            for own in variables
        ]  # fmt: skip

    def meet(self) -> None:
        """Wait until every process is ready."""
        found: dict[int, tuple[socket.socket, TextIO, int]] = {}
        self._server.settimeout(0.5)
        until = time.monotonic() + _PATIENCE_S
        while len(found) < self.size:
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"{self.variant.name} ended early:\n{self.last_words()}")
            if time.monotonic() > until:
                raise RuntimeError(f"{self.variant.name} did not start:\n{self.last_words()}")
            with contextlib.suppress(TimeoutError):
                line, _ = self._server.accept()
                line.settimeout(_PATIENCE_S)
                text = line.makefile("r")
                hello = json.loads(text.readline())
                found[hello["rank"]] = (line, text, hello["pid"])
        for rank in range(self.size):
            line, text, pid = found[rank]
            self._lines.append((line, text))
            self._pids.append(pid)

    def last_words(self) -> str:
        self._output.seek(0)
        return self._output.read()[-3000:]

    def tell(self, order: dict[str, Any]) -> None:
        for line, _ in self._lines:
            line.sendall((json.dumps(order) + "\n").encode())

    def hear(self, rank: int) -> dict[str, Any]:
        answer = self._lines[rank][1].readline()
        if not answer:
            raise RuntimeError(f"{self.variant.name}: worker {rank} is gone:\n{self.last_words()}")
        return json.loads(answer)

    def do(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """All workers at once; their answers by rank."""
        self.tell(order)
        return [self.hear(rank) for rank in range(self.size)]

    def signal(self, number: signal.Signals) -> None:
        """To all workers, and to what has launched them."""
        for pid in {*self._pids, *(process.pid for process in self._processes)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def dismiss(self) -> None:
        """Let the processes go; `with` waits for them."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.tell({"do": "quit"})

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing outlives the benchmark, whatever went wrong."""
        self.dismiss()
        until = time.monotonic() + (_END_S if error is None else 1.0)
        for process in self._processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line, text in self._lines:
            text.close()
            line.close()
        self._server.close()
        self._output.close()


@contextlib.contextmanager
def together(groups: Sequence[Group]) -> Generator[None]:
    """Groups that have all started and stand still."""
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(group)
        for group in groups:
            group.meet()
        for group in groups:
            group.signal(signal.SIGSTOP)
        yield
        for group in groups:
            group.dismiss()


@contextlib.contextmanager
def awake(group: Group) -> Generator[None]:
    group.signal(signal.SIGCONT)
    yield
    group.signal(signal.SIGSTOP)


class Turns:
    """Phases of one group after the other; speed in steps per second."""

    def __init__(self, seconds: float, sleep: float = 0.0) -> None:
        self._seconds = seconds
        self._sleep = sleep
        self._rates: dict[str, float] = {}
        self._exchanges: dict[str, float] = {}
        """Started per step and worker."""
        self._slowest: dict[str, list[float]] = {}
        """The slowest worker's share of the mean speed of its group."""

    def phase(self, group: Group) -> float:
        """Of all workers together; of worker 0 where worker 1 is slow."""
        name = group.variant.name
        order: dict[str, Any] = {"do": "run", "sleep": self._sleep}
        if group.variant.is_synchronous:
            # A time limit would let one begin a step that another does not make.
            rate = self._rates.get(name, 0.0)
            order["steps"] = max(2, round(rate * self._seconds))
            order["lead_steps"] = max(1, round(rate * _LEAD_S))
        else:
            order |= {"seconds": self._seconds, "lead_seconds": _LEAD_S}
        with awake(group):
            answers = group.do(order)
        rates = [answer["steps"] / answer["seconds"] for answer in answers]
        self._rates[name] = rates[0]
        steps = sum(answer["steps"] for answer in answers)
        self._slowest.setdefault(name, []).append(min(rates) * len(rates) / sum(rates))
        self._exchanges[name] = sum(answer["exchanges"] for answer in answers) / steps
        return rates[0] if self._sleep else sum(rates)

    def warm_up(self, group: Group) -> None:
        """For as long as two phases: one of a synchronous group begins with two steps only."""
        until = time.monotonic() + 2 * self._seconds
        while time.monotonic() < until:
            self.phase(group)

    def ratios(
        self, plain: Group, others: Sequence[Group], rounds: int
    ) -> dict[str, dict[str, Any]]:
        """Every phase of a variant stands between two of the plain loop."""
        for group in (plain, *others):
            self.warm_up(group)
        found: dict[str, list[float]] = {group.variant.name: [] for group in others}
        speeds: list[float] = [self.phase(plain)]
        for _ in range(rounds):
            for group in others:
                rate = self.phase(group)
                before = speeds[-1]
                speeds.append(self.phase(plain))
                found[group.variant.name].append(2 * rate / (before + speeds[-1]))
        steps = statistics.median(speeds) / (1 if self._sleep else plain.size)
        return {
            name: {
                **spread(ratios),
                "exchanges_per_step": self._exchanges[name],
                "plain_steps_per_second": steps,
                "slowest_over_mean": statistics.median(self._slowest[name]),
            }
            for name, ratios in found.items()
        }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"over_plain": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def find_mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
