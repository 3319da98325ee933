"""Recordings that are kept between runs, because making one takes as long as hundreds of uses.

Each is a file in the user's cache directory, which only the user may read or write. It is named by
a digest of everything that the recording depends on. A file that is damaged, or that is not the
user's own, counts as missing and is written again; so processes need no lock. Files that were not
used for the longest time go when all together are too large.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.fx import GraphModule

from gossamer.sim.traces.graph_text import Unwritable, read_graph, write_graph
from gossamer.sim.traces.model_fingerprint import model_fingerprint
from gossamer.tasks.data import Tensors, leaves
from gossamer.tasks.flat_model import FlatModel

CACHE = "GOSSAMER_CACHE"
"""The environment variable that says where recordings are kept; `off` keeps none."""
_MOST_BYTES = 64 << 20
_LARGEST_SHARE = 4
"""A file may have this part of it, so that one model does not take the room of all others."""
_SUFFIX = ".trace"

_known: dict[str, Callable[..., Any]] = {}
"""What this process has made or read, by the digest of what it depends on."""


class TraceCache:
    """The recordings of one model."""

    def __init__(self, model: FlatModel) -> None:
        self._described = model_fingerprint(model)
        self._device = model.device

    def find(self, arguments: tuple[Tensors, ...], *facts: object) -> Callable[..., Any] | None:
        """The computation for arguments of these shapes, if it was recorded before. `facts` say
        what else it depends on."""
        key = self._key(arguments, facts)
        if key is None:
            return None
        if key not in _known and (raw := _read_file(key)) is not None:
            try:
                _known[key] = _replay(*_opened(raw, key, self._device), arguments)
            except (ValueError, SafetensorError):
                return None
        return _known.get(key)

    def keep(
        self, recorded: GraphModule, arguments: tuple[Tensors, ...], *facts: object
    ) -> Callable[..., Any]:
        """Keep a computation that was recorded with arguments of these shapes; return it."""
        key = self._key(arguments, facts)
        if key is None:
            return recorded
        try:
            text, constants = write_graph(recorded)
        except Unwritable:
            _known[key] = recorded
            return recorded
        _write_file(key, _closed(text, constants, key))
        _known[key] = _replay(text, constants, arguments)
        return _known[key]

    def _key(self, arguments: tuple[Tensors, ...], facts: tuple[object, ...]) -> str | None:
        if self._described is None:
            return None
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves(arguments)]
        whole = f"{self._described}\n{facts}\n{_structure(arguments)}\n{shapes}"
        return hashlib.blake2b(whole.encode(), digest_size=20).hexdigest()


def cache_folder() -> Path | None:
    """Where recordings are kept; None where the user wants none."""
    asked = os.environ.get(CACHE, "")
    if asked == "off":
        return None
    if asked:
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification wants relative paths to be ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "gossamer"


def cached_bytes(folder: Path) -> tuple[int, int]:
    """How many recordings a folder has, and their bytes."""
    sizes = [size for _, _, size in _entries(folder)]
    return len(sizes), sum(sizes)


def why_unusable(folder: Path) -> str:
    """Why nothing can be kept in a folder; empty where it can, or where it would be made."""
    try:
        kept = folder.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(kept.st_mode):
        return "is no folder"
    if not _is_own(kept):
        return "belongs to another user, or others may write there"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written"


def forget_traces() -> None:
    """Let this process forget what it has made and read; files stay."""
    _known.clear()


def _replay(
    text: str, constants: dict[str, Tensor], arguments: tuple[Tensors, ...]
) -> Callable[..., Any]:
    module = read_graph(text, constants)
    if all(isinstance(one, Tensor) for one in arguments):
        return module
    return lambda *given: module(*leaves(given))


def _structure(tree: Tensors) -> str:
    """The names and the places of the tensors in a tree."""
    if isinstance(tree, Tensor):
        return "*"
    if isinstance(tree, Sequence):
        return f"({','.join(_structure(part) for part in tree)})"
    return f"({','.join(f'{name}:{_structure(part)}' for name, part in tree.items())})"


# ---------------------------------------------------------------------- files


def _closed(text: str, constants: dict[str, Tensor], key: str) -> bytes:
    """The content of a file: a digest of the rest and the key, the text, and the tensors."""
    # Of several that are views of one tensor the file holds each: it refuses shared memory.
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in constants.items()}
    rest = text.encode() + b"\n" + save(tensors)
    return _sum(key, rest) + b"\n" + rest


def _opened(raw: bytes, key: str, device: torch.device) -> tuple[str, dict[str, Tensor]]:
    """The inverse of `_closed`; whatever has been changed raises `ValueError`."""
    checked, _, rest = raw.partition(b"\n")
    if checked != _sum(key, rest):
        raise ValueError("a damaged recording")
    text, _, tensors = rest.partition(b"\n")
    return text.decode(), {name: one.to(device) for name, one in load(tensors).items()}


def _sum(key: str, rest: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + rest, digest_size=20).hexdigest().encode()


def _read_file(key: str) -> bytes | None:
    folder = cache_folder()
    if folder is None or why_unusable(folder):
        return None
    path = folder / f"{key}{_SUFFIX}"
    try:
        # A link, or what another user has put there, is not ours to read.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            kept = os.fstat(descriptor)
            if not (stat.S_ISREG(kept.st_mode) and _is_own(kept)) or kept.st_size > _MOST_BYTES:
                return None
            raw = file.read()
        os.utime(path)  # its last use
    except OSError:
        return None
    return raw


def _write_file(key: str, raw: bytes) -> None:
    """Write a file at once and remove old ones. A cache that cannot be written is no error."""
    folder = cache_folder()
    if folder is None or len(raw) > _MOST_BYTES // _LARGEST_SHARE:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why_unusable(folder):
            return
        # The name is random and the mode 0600.
        descriptor, made = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            os.replace(made, folder / f"{key}{_SUFFIX}")
        except BaseException:
            os.unlink(made)
            raise
        _make_room(folder)
    except OSError:
        pass


def _is_own(kept: os.stat_result) -> bool:
    """Whether it belongs to this user, and nobody else may write it."""
    uid = getattr(os, "getuid", lambda: kept.st_uid)()
    return kept.st_uid == uid and not kept.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make_room(folder: Path) -> None:
    entries = sorted(_entries(folder), reverse=True)
    total = 0
    for _, path, size in entries:
        total += size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[tuple[float, Path, int]]:
    """The last use, the path and the size of each recording."""
    found: list[tuple[float, Path, int]] = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            kept = path.lstat()
        except OSError:
            continue  # another process was faster
        found.append((kept.st_mtime, path, kept.st_size))
    return found
