"""A process that has imported torch once, and forks for every Python program that a test starts.

A fresh interpreter needs two seconds of a core until torch is there; a fork needs a hundredth of
that. `Program` is `subprocess.Popen` for such programs. There is one server for all processes of
pytest: it is started when it is first asked for, or by the process that distributes the tests, and
ends with it. It also starts the workers of our own launcher and the processes that fork for scripts
and for jobs: `popen` takes the place of `subprocess.Popen` there. A test that is about the start
itself, or about parents and children, carries the mark `fresh_interpreters`.

                   Program (a connection)              the server              the program
    a test ------- arguments, variables, files ----->  fork  ----------------> runs as __main__
           <------ process id, later the status -----  waitpid <-------------- ends
           ------- (closed without a status) ------->  kills it
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SET_DEATH_SIGNAL = 1
_MOST_FILES = 250
_VARIABLES = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Before a test changes its own. Scripts in virtual time go through sets in the same order in every
run."""
_STARTS_FOR_TORCHRUN = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)
_ADDRESS = "TESTS_FORK_SERVER"
_IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed", "matplotlib.figure", "pytest", "gossamer",
    "gossamer.commands.cli",
    "gossamer.real.train.worker_main", "gossamer.real.transports.shm",
    "gossamer.real.transports.torch", "gossamer.real.transports.conformance.group",
)  # fmt: skip
"""What programs need; torch's optimisers import `torch._dynamo` at their first step. Not what uses
mpi4py: its import begins MPI."""


# ---------------------------------------------------------------------- in a test


class _Server:
    """That of this process, once somebody has asked for it; forks use that of their parent."""

    process: subprocess.Popen[bytes] | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None
    address: str | None = os.environ.get(_ADDRESS)

    @classmethod
    def start(cls) -> None:
        """Also for the processes that this one starts."""
        cls.folder = tempfile.TemporaryDirectory()
        cls.address = os.environ[_ADDRESS] = f"{cls.folder.name}/forks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(cls.address)
            listener.listen(64)
            cls.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), cls.address],
                stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True,
                env=_VARIABLES,
            )  # fmt: skip

    @classmethod
    def connect(cls) -> socket.socket:
        if cls.address is None:
            cls.start()
            assert cls.address is not None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(cls.address)
        return connection

    @classmethod
    def close(cls) -> None:
        """It ends when nobody holds the other end of its standard input any more."""
        if cls.process is not None and cls.folder is not None:
            cls.process.communicate()
            cls.folder.cleanup()
            cls.process = cls.folder = cls.address = None
            os.environ.pop(_ADDRESS, None)


start = _Server.start
close = _Server.close


class Program(subprocess.Popen[Any]):
    """`python PROGRAM`, `python -m MODULE` or `python -c TEXT`, as a fork of the server."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        pass_fds, folder, variables = rest[3:6]
        pipes = rest[9:15]
        # A place that was not redirected is the caller's own.
        files = [own if own != -1 else place for place, own in enumerate((pipes[0], *pipes[3::2]))]
        asked = {
            "arguments": [os.fspath(part) for part in args[1:]],
            "variables": dict(os.environ if variables is None else variables),
            "folder": os.fspath(folder or Path.cwd()),
            "places": [0, 1, 2, *pass_fds],
            "has_own_session": rest[20],
        }
        text = json.dumps(asked).encode()
        self._connection = _Server.connect()
        socket.send_fds(self._connection, [struct.pack("<q", len(text))], [*files, *pass_fds])
        self._connection.sendall(text)
        number, (self._end,), *_ = socket.recv_fds(self._connection, 8, 1)
        (self.pid,) = struct.unpack("<q", number)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags == os.WNOHANG and not select.select([self._end], [], [], 0)[0]:
            return 0, 0
        (status,) = struct.unpack("<q", _exactly(self._connection, 8))
        self._connection.close()
        os.close(self._end)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, *_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def popen(args: Sequence[str], **choices: Any) -> subprocess.Popen[Any]:
    """A process, by a fork where the command is a Python program that may import torch.

    What the launcher puts in front of a worker's command ties the worker's life to the launcher's;
    here the connection does that.
    """
    command = list(args)
    if len(command) > 5 and command[3].endswith("die_with_launcher.py"):
        command = command[5:]
    is_python = command[0] == sys.executable and len(command) > 1
    if is_python and command[1] == "-u":  # as torchrun starts its workers
        del command[1]
        choices["env"] = {**(choices.get("env") or os.environ), "PYTHONUNBUFFERED": "1"}
    if is_python and (command[1] in ("-m", "-c") or not command[1].startswith("-")):
        return Program(command, **choices)
    return subprocess.Popen(args, **choices)


def forks_workers(forks: bool = True) -> None:
    """Whether this process starts workers and other fork servers by forks."""
    forking = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    for name in ("gossamer.real.launch.process", "gossamer.script.fork_server"):
        module: Any = importlib.import_module(name)
        module.subprocess = forking if forks else subprocess


# ---------------------------------------------------------------------- in the server


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end is gone")
        data += part
    return data


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in forks only: with what the fork is to be."""
    running: dict[int, socket.socket] = {}
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    sources = selectors.DefaultSelector()
    for source in (0, listener, wake):
        sources.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in sources.select():
            if key.fileobj == 0:
                os._exit(0)
            elif key.fileobj is wake:
                wake.recv(1 << 12)
                _tell_ends(running, sources)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                head, files, *_ = socket.recv_fds(connection, 8, _MOST_FILES)
                asked = json.loads(_exactly(connection, *struct.unpack("<q", head)))
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    sources.close()
                    for ours in (listener, wake, waker, connection, *running.values()):
                        ours.close()
                    return asked, files
                for file in files:
                    os.close(file)
                end = os.pidfd_open(pid)
                with contextlib.suppress(OSError):
                    socket.send_fds(connection, [struct.pack("<q", pid)], [end])
                os.close(end)
                running[pid] = connection
                sources.register(connection, selectors.EVENT_READ, pid)
            elif key.data in running:
                # Nobody waits for its end any more: nobody needs it any more.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
                sources.unregister(key.fileobj)


def _tell_ends(running: dict[int, socket.socket], sources: selectors.BaseSelector) -> None:
    for pid in list(running):
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            connection = running.pop(pid)
            with contextlib.suppress(KeyError):
                sources.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("<q", status))
            connection.close()


def _become(asked: dict[str, Any], files: list[int], server: int) -> None:
    """What a fresh interpreter would be at the first line of the program."""
    if asked["has_own_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    # Out of the way first: a file may stand where another one has to go.
    above = max(asked["places"]) + 1
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(apart, asked["places"], strict=True):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    tempfile.tempdir = None  # of the variables that the server had
    for stream in (sys.stdout, sys.stderr):
        is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or stream is sys.stderr
        stream.reconfigure(line_buffering=stream.isatty(), write_through=is_unbuffered)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    first, *others = asked["arguments"]
    beside = os.getcwd() if first in ("-m", "-c") else str(Path(first).resolve().parent)
    named = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    sys.path[:] = [beside, *named, *(folder for folder in sys.path if folder not in named)]
    sys.argv = others if first == "-m" else asked["arguments"]
    if first == "-c":
        sys.argv = [first, *others[1:]]


def _main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    _Server.address = sys.argv[2]
    for name in _IMPORTED:
        importlib.import_module(name)
    forks_workers()
    end_fork = importlib.import_module("gossamer.script.fork_server").end_fork
    del sys.path[0]
    gc.collect()
    gc.freeze()
    server = os.getpid()
    asked, files = _serve(listener)
    _become(asked, files, server)
    program, status = os.getpid(), 0
    try:
        if asked["arguments"][0] == "-m":
            # It runs as a module of its own beside the one that is imported.
            sys.modules.pop(sys.argv[0], None)
            if sys.argv[0] == "torch.distributed.run":
                importlib.import_module(_STARTS_FOR_TORCHRUN).Popen = popen
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif asked["arguments"][0] == "-c":
            exec(asked["arguments"][1], {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # What a program has forked ends in the ordinary way, and MPI must be told of that.
    if os.getpid() == program and "mpi4py" not in sys.modules:
        threading._shutdown()
        end_fork(status)
    sys.exit(status)


if __name__ == "__main__":
    # As a module of its own, so that programs which import it find what is set here.
    importlib.import_module("fork_server")._main()
