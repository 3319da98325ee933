"""How jobs and answers travel between processes: as pickles in which tasks and methods are named.

A task holds functions and data, a method holds functions; neither is pickled with a job. A method
travels as its spec. A task travels once to each process, and jobs and answers refer to it by
a number.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

from gossamer.methods import MethodSpec, parse_method
from gossamer.runs.result import Result
from gossamer.tasks import Task, make_task


def pack(value: object, number_of: Callable[[Task], int]) -> bytes:
    """Write a value. `number_of` gives the number of a task that occurs in it."""
    file = io.BytesIO()
    _Packer(file, number_of).dump(value)
    return file.getvalue()


def unpack(data: bytes, tasks: Mapping[int, Task]) -> Any:
    """Read a value. The task of each number is the one in `tasks`."""
    return _Unpacker(io.BytesIO(data), tasks).load()


def pack_task(task: Task) -> bytes:
    """Write a task: its spec where it was made by name, otherwise the object with its data."""
    if task.spec:
        return pickle.dumps((task.spec, task.data))
    data = pickle.dumps(task)
    if b"__main__" in data:
        raise pickle.PicklingError("it has functions of the program that is running")
    return data


def unpack_task(data: bytes) -> Task:
    found = pickle.loads(data)
    return found if isinstance(found, Task) else make_task(found[0], data=found[1])


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number_of: Callable[[Task], int]) -> None:
        super().__init__(file)
        self._number_of = number_of

    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, Task):
            return self._number_of(obj)
        return str(obj) if isinstance(obj, MethodSpec) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Result):
            # The settings travel too: their task is known on the other side.
            own = {name: tensor.clone() for name, tensor in obj.state.items()}
            return _again, (type(obj), (), {**obj.__dict__, "state": own})
        if isinstance(obj, BaseException):
            # Some errors make their message from other arguments than those that they keep.
            return _again, (type(obj), obj.args, obj.__dict__)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tasks: Mapping[int, Task]) -> None:
        super().__init__(file)
        self._tasks = tasks

    def persistent_load(self, pid: Any) -> Any:
        return self._tasks[pid] if isinstance(pid, int) else parse_method(pid)


def _again(kind: type[Any], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    made: Any = cast(Any, kind).__new__(kind)
    if arguments:
        made.args = arguments
    made.__dict__.update(attributes)
    return made
