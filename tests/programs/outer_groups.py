"""Jobs of `gossamer train` whose processes another launcher has started, without the seconds that
it takes.

A program of its own, so that torch is imported once and every worker is a fork of it, with the
variables that torchrun would have set:

    python tests/programs/outer_groups.py '[{"method": "d_psgd"}]'
    python tests/programs/outer_groups.py train.py all_reduce ad_psgd

Each case is killed whole once it has a checkpoint and resumed; the answer is one object per case. A
script, which keeps its checkpoints in a folder beside it, is run to its end, too.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from gossamer.commands.cli import main
from gossamer.real.train import checkpoint_files as checkpoint
from gossamer.real.transports.conformance.group import store_apart, watch
from programs import GROUP_LIMIT_S, run_program


@dataclass(frozen=True)
class Case:
    """A run that dies at its first checkpoint."""

    method: str
    workers: int = 2
    epochs: float = 1.0
    every: str = "10steps"
    resumes_with: int | None = None
    """So many workers instead."""


@dataclass(frozen=True)
class Told:
    """What came of a case."""

    cut: dict[str, Any]
    """Versions and weights in the checkpoint that the run went on from, by worker and replica."""
    ends: list[int]
    out: list[str]
    """What each worker printed in the resumed run, its last words included."""
    final: dict[str, Any]
    """As `cut`, of the last checkpoint."""
    left: list[str]
    """Hidden files in the run folder."""

    @property
    def summary(self) -> dict[str, Any]:
        """What worker 0 printed as JSON; where the run is kept is said after it."""
        lines = self.out[0].splitlines()
        return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def run_cases(cases: Sequence[Case]) -> list[Told]:
    """In a process of its own, gone afterwards with all that it started."""
    printed = run_program(__file__, json.dumps([asdict(case) for case in cases]))
    return [Told(**answer) for answer in json.loads(printed)]


def run_script(script: Path, methods: Sequence[str]) -> list[list[str]]:
    """What worker 0 printed with each method: without an interruption, resumed, and resumed with
    one worker more."""
    return json.loads(run_program(__file__, str(script), *methods))


# ---------------------------------------------------------------------- in the program


def become_worker(rank: int, size: int, port: int, log: Path, body: Callable[[], None]) -> None:
    """Never returns: the process ends as the program ends."""
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(
            TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True", RANK=str(rank),
            WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        body()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        else:
            code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def torchruns_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run(
    size: int, place: Path, body: Callable[[], None], is_due: Callable[[], bool] = lambda: False
) -> tuple[list[int], list[str]]:
    """How the workers ended and what they wrote; all are killed when it is due."""
    with store_apart(torchruns_store) as port:
        logs = [place / f"{rank}.txt" for rank in range(size)]
        pids: dict[int, int] = {}
        for rank in range(size):
            if (pid := os.fork()) == 0:
                become_worker(rank, size, port, logs[rank], body)
            pids[pid] = rank
        ends = watch(pids, GROUP_LIMIT_S, is_due=is_due)
    return ends, [log.read_text() for log in logs]


def train(*arguments: str) -> Callable[[], None]:
    def body() -> None:
        sys.argv = ["gossamer", "train", *arguments]
        main()

    return body


def replicas(folder: Path) -> dict[str, Any]:
    found = checkpoint.newest(folder / "checkpoint", lambda sentence: None)
    assert found is not None
    return {str(rank): facts["replicas"] for rank, facts in found.facts.items()}


def tell(case: Case) -> Told:
    with tempfile.TemporaryDirectory() as name:
        place, runs = Path(name), Path(name) / "runs"
        slow = [f"--slow={rank}=6" for rank in range(case.workers)]
        first = [
            "--method", case.method, "--epochs", str(case.epochs), "--evaluations", "1",
            "--checkpoint-every", case.every, "--runs", str(runs), *slow,
        ]  # fmt: skip
        killed, written = run(
            case.workers, place, train(*first),
            lambda: any(runs.glob("*/checkpoint/*/manifest.json")),
        )  # fmt: skip
        assert killed == [-signal.SIGKILL] * case.workers, written
        (folder,) = runs.iterdir()
        cut = replicas(folder)
        size = case.resumes_with or case.workers
        ends, out = run(size, place, train("--resume", str(folder), "--json"))
        left = [path.name for path in folder.glob(".*")]
        return Told(cut, ends, out, replicas(folder), left)


def tell_of_script(script: Path, method: str) -> list[str]:
    """What worker 0 of two printed: never interrupted, killed and started again; and worker 0 of
    three, who go on before the last epoch of these."""

    def body() -> None:
        os.chdir(place)
        os.environ["GOSSAMER_METHOD"] = method
        runpy.run_path(str(script), run_name="__main__")

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        ends, whole = run(2, place, body)
        assert ends == [0, 0], whole
        kept = place / "checkpoints"
        shutil.rmtree(kept)

        def is_due() -> bool:
            return all(any(kept.glob(f"[2-5]/{rank}-of-2.pt")) for rank in range(2))

        ends, killed = run(2, place, body, is_due)
        assert ends == [-signal.SIGKILL] * 2, killed
        ends, resumed = run(2, place, body)
        assert ends == [0, 0], resumed
        shutil.rmtree(kept / "6")
        ends, more = run(3, place, body)
        assert ends == [0, 0, 0], more
        return [whole[0], resumed[0], more[0]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1].endswith(".py"):
        print(json.dumps([tell_of_script(Path(sys.argv[1]), method) for method in sys.argv[2:]]))
    else:
        print(json.dumps([asdict(tell(Case(**text))) for text in json.loads(sys.argv[1])]))
