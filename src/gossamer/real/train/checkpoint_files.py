"""Checkpoints on disk: one folder each, two files for each worker, and a manifest written last.

checkpoint/STEP/RANK.safetensors   parameters, optimiser, memory of the method; of servers, too
checkpoint/STEP/RANK.json          step, weight, versions, place in the data, random state, metrics
checkpoint/STEP/manifest.json      there only if the files of all living workers are

Every file is written beside its place and renamed, so whatever kills a run at whatever moment, a
checkpoint with a manifest is whole. Checksums find what disks have done to it since.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.files import replace_bytes

Facts = dict[str, Any]
Say = Callable[[str], None]
_FORMAT = 2
_KEPT = 2
"""How many checkpoints are kept; the one before the newest is for a disk that fails."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole."""

    path: Path
    size: int
    """How many workers the run has; those that had died have no files."""
    facts: Mapping[int, Facts]
    """By rank."""

    @property
    def step(self) -> int:
        return int(self.path.name)

    def source_of(self, rank: int) -> int:
        """The worker whose state this one goes on from: itself, or another if it had died."""
        return rank if rank in self.facts else min(self.facts)

    def tensors_of(self, rank: int) -> dict[str, Tensor]:
        return safetensors.torch.load_file(_tensors(self.path, self.source_of(rank)))


def _tensors(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.safetensors"


def _facts(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


# ---------------------------------------------------------------------- writing


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Write one worker's part. The facts come last: if they are there, so are the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    data = safetensors.torch.save(dict(tensors))
    replace_bytes(_tensors(folder, rank), data)
    whole = {**facts, "format": _FORMAT, "tensors": _sum_of(data)}
    replace_bytes(_facts(folder, rank), json.dumps(whole).encode())


def _sum_of(data: bytes) -> str:
    return f"{len(data)} bytes, crc32 {zlib.crc32(data):08x}"


def complete(folder: Path, living: Collection[int], ends: Collection[int], size: int) -> bool:
    """Make the checkpoint valid if the parts of all living workers and of the servers `ends` are
    there; the last worker to write sees that."""
    if any(not _facts(folder, rank).exists() for rank in living):
        return False
    texts = {rank: _facts(folder, rank).read_bytes() for rank in sorted(living)}
    held = {end for text in texts.values() for end in json.loads(text)["servers"]}
    if any(str(end) not in held for end in ends):
        return False
    sums = {str(rank): _sum_of(text) for rank, text in texts.items()}
    manifest = {"format": _FORMAT, "size": size, "facts": sums}
    replace_bytes(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    return True


def prune(parent: Path) -> None:
    """Keep the two newest valid checkpoints, and what is newer. Workers write them in order, so an
    older one that is unfinished has lost a writer and stays unfinished."""
    folders = _newest_first(parent)
    valid = [folder for folder in folders if (folder / MANIFEST).exists()]
    for folder in folders[folders.index(valid[0]) :] if valid else ():
        if folder not in valid[:_KEPT]:
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint."""
    # The manifest goes first, because half a folder must never look whole.
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _newest_first(parent: Path) -> list[Path]:
    found = [path for path in parent.glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


# ---------------------------------------------------------------------- reading


def newest(parent: Path, say: Say | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; `say` hears of those damaged or unfinished."""
    for folder in _newest_first(parent):
        try:
            return read(folder)
        except ConfigurationError as error:
            if say is not None:
                say(f"{error}; it is skipped")
    return None


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint and check all of it: a run must not go on from damaged files."""
    if not (folder / MANIFEST).exists():
        raise ConfigurationError(f"the checkpoint {folder} is unfinished")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        facts: dict[int, Facts] = {}
        for rank, expected in manifest["facts"].items():
            text = _facts(folder, rank).read_bytes()
            facts[int(rank)] = json.loads(text)
            found = (_sum_of(text), _sum_of(_tensors(folder, rank).read_bytes()))
            if found != (expected, facts[int(rank)]["tensors"]):
                raise ValueError(f"the files of worker {rank} have changed since")
        size = int(manifest["size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"the checkpoint {folder} is damaged ({error})") from None
    if not facts or any(one.get("format") != _FORMAT for one in facts.values()):
        raise ConfigurationError(f"the checkpoint {folder} is of another version of Gossamer")
    return Checkpoint(folder, size, facts)


def forget_newer(parent: Path, than: Checkpoint) -> None:
    """Delete newer checkpoints, which a run that goes on from this one will write again."""
    for folder in _newest_first(parent):
        if int(folder.name) > than.step:
            remove(folder)
