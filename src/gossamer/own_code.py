"""What users bring in files of their own: how it is named, imported and blamed.

`my.py:name` is an object in a file, `package.module:name` one in a module; every other name is
built in, or an entry point of an installed package. A file is imported by its path, with its folder
on the path of imports, as `python my.py` would have it. Nothing is pickled: a worker imports the
same file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gossamer.errors import ConfigurationError, Error, unknown_name
from gossamer.specs import parse_spec

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_SITES = ("/site-packages/", "/dist-packages/")
_loaded: dict[Path, tuple[int, int, ModuleType]] = {}
_loading: list[Path] = []


def is_file(where: str) -> bool:
    """Whether the part of a name before its first colon is a path."""
    return where.endswith(".py") or "/" in where


def is_own(name: str) -> bool:
    """Whether a name, or a spec that begins with it, stands for something of the user's."""
    where = name.partition(":")[0]
    return is_file(where) or "." in where


def parse_reference(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """As `parse_spec`, for what may be the user's own: the name is then `my.py:name`."""
    where, _, rest = text.partition(":")
    if not is_own(text):
        return parse_spec(text, kind)
    name = rest.partition(":")[0].strip()
    if not name:
        return where, {}
    _, options = parse_spec(rest, f"{kind} of {where}:")
    return f"{where}:{name}", options


def absolute(spec: str) -> str:
    """The same spec for a process that runs in another folder."""
    where, colon, rest = spec.partition(":")
    return f"{Path(where).absolute()}{colon}{rest}" if is_own(spec) and is_file(where) else spec


def is_importing() -> bool:
    """Whether a user's file is being imported now: what it calls then is not under a main guard."""
    return bool(_loading)


def check_main_guard(function: str) -> None:
    """Refuse to start workers while a user's file is imported: each would start further ones."""
    if is_importing():
        raise ConfigurationError(
            f"{function} was called while {calling_place().partition(',')[0]} was imported; put "
            'the call below if __name__ == "__main__":'
        )


def load_object(reference: str, kind: str, expected: str) -> object:
    """The object that `my.py:name` or `package.module:name` stands for."""
    where, _, name = reference.partition(":")
    module = _load_file(Path(where), kind) if is_file(where) else _load_module(where, kind)
    known = [key for key, value in vars(module).items() if _is_theirs(key, value, module)]
    if not name:
        raise ConfigurationError(
            f"{kind} {reference!r} names no object in it; write {where}:NAME, where NAME is "
            f"{expected}" + (f", such as {', '.join(known[:6])}" if known else "")
        )
    if not hasattr(module, name):
        raise ConfigurationError(
            str(unknown_name(f"{kind} in {where}:", name, known))
            if known
            else f"{where} defines nothing, so it has no {kind} {name!r}"
        )
    return getattr(module, name)


def reference_to(value: object, kind: str) -> str:
    """The name by which another process can import an object that was made in Python."""
    for module in (sys.modules["__main__"], *list(sys.modules.values())):
        file = getattr(module, "__file__", None)
        if file is None or _is_library(file):
            continue
        for name, own in list(vars(module).items()):
            if own is value:
                return f"{Path(file).absolute()}:{name}"
    raise ConfigurationError(
        f"workers cannot import this {kind}: it is no global name of a file; put it into one, and "
        f"give it as 'my.py:NAME', or make it a global of the script that calls"
    )


def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """What installed packages bring, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def load_entry_point(point: importlib.metadata.EntryPoint, kind: str) -> object:
    """The object that an installed package brings."""
    with blamed(f"{kind} {point.name} ({point.value})"):
        return point.load()


def _is_theirs(key: str, value: object, module: ModuleType) -> bool:
    """Leaves out what the file has imported."""
    if key.startswith("_") or isinstance(value, ModuleType):
        return False
    return getattr(value, "__module__", module.__name__) in (module.__name__, None) or not (
        inspect.isfunction(value) or inspect.isclass(value)
    )


def _load_file(path: Path, kind: str) -> ModuleType:
    place = path.expanduser().absolute()
    try:
        status = place.stat()
    except OSError:
        beside = [str(path.with_name(one.name)) for one in sorted(place.parent.glob("*.py"))]
        found = unknown_name("file", str(path), beside) if beside else None
        hint = (
            str(found).rpartition("; ")[2] if found else f"there is no .py file in {place.parent}"
        )
        raise ConfigurationError(f"{kind} file {str(path)!r} does not exist; {hint}") from None
    if place.is_dir():
        raise ConfigurationError(
            f"{kind} file {str(path)!r} is a folder; write the path of a .py file"
        )
    stamp = (status.st_mtime_ns, status.st_size)
    if place in _loaded and _loaded[place][:2] == stamp:
        return _loaded[place][2]
    name = f"{place.stem}_{hashlib.blake2b(str(place).encode(), digest_size=4).hexdigest()}"
    # The folder of the file comes first, as for `python my.py`.
    if str(place.parent) not in sys.path:
        sys.path.insert(0, str(place.parent))
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{kind} file {str(path)!r} is no Python file; rename it to .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    _loading.append(place)
    try:
        with blamed(f"{kind} file {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.pop()
    _loaded[place] = (*stamp, module)
    return module


def _load_module(name: str, kind: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with blamed(f"{kind} module {name}", passing=ModuleNotFoundError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"{kind} module {name}: {told(error)}") from error
        raise ConfigurationError(
            f"{kind} module {name!r} was not found; run in the folder that has it, install it, or "
            "give a path such as my.py:name"
        ) from None


# ---------------------------------------------------------------------- who is to blame


@contextmanager
def blamed(what: str, *, passing: type[Exception] = Error) -> Generator[None]:
    """Around a user's code: its error is one sentence that names its file and line."""
    try:
        yield
    except (Error, passing) as error:
        place = place_in(error)
        if not place or not isinstance(error, ConfigurationError) or ", line " in str(error):
            raise
        raise ConfigurationError(f"{what}: {place}: {error}") from error
    except SystemExit as end:
        raise ConfigurationError(
            f"{what}: {place_in(end)}: it ends the program by exit({end.code!r}); leave that out, "
            "or put it under `if __name__ == '__main__'`"
        ) from end
    except Exception as error:
        raise ConfigurationError(f"{what}: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error of the user's code as a sentence: where it was raised, and what it says."""
    if isinstance(error, SyntaxError) and error.filename:
        text = f" in {error.text.strip()!r}" if error.text else ""
        return f"{shown(error.filename)}, line {error.lineno}: {error.msg}{text}"
    said = " ".join(str(error).split())
    said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    place = place_in(error)
    return f"{place}: {said}" if place else said


def place_in(error: BaseException) -> str:
    """The last line of the user's own that an error came through; empty where it came from none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_library(frame.filename)]
    return f"{shown(theirs[-1].filename)}, line {theirs[-1].lineno}" if theirs else ""


def place_of(value: object) -> str:
    """Where a function or a class is defined; empty where that is not known."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(value))  # type: ignore[arg-type]
        line = inspect.getsourcelines(inspect.unwrap(value))[1]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""
    return f"{shown(source)}, line {line}" if source else ""


def calling_place() -> str:
    """The line of the user's own that is being run; empty where there is none."""
    stack = inspect.stack(0)
    theirs: Iterable[str] = (
        f"{shown(frame.filename)}, line {frame.lineno}"
        for frame in stack
        if not _is_library(frame.filename)
    )
    return next(iter(theirs), "")


def _is_library(file: str) -> bool:
    is_installed = any(site in file for site in _SITES)
    # What dataclasses write for their classes comes from "<string>".
    return is_installed or file.startswith((_PACKAGE, "<frozen", "<string>", *_LIBRARIES))


def shown(file: str) -> str:
    """A path as short as it can be from here."""
    try:
        near = os.path.relpath(file)
    except ValueError:
        return file
    return file if near.startswith("..") or file.startswith("<") else near
