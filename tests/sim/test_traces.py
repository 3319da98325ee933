"""Recorded computations that outlive their process."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.sim import engine as engines
from gossamer.sim.engine import VectorEngine
from gossamer.sim.traces import trace_cache
from gossamer.sim.traces.graph_text import read_graph
from gossamer.sim.traces.model_fingerprint import model_fingerprint
from gossamer.sim.traces.trace_cache import CACHE, cache_folder, cached_bytes, forget_traces
from gossamer.tasks import Task, make_task
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.task import cross_entropy

Given = tuple[Tensor, Tensor, Tensor, Tensor]


def small_task(layers: Callable[[], nn.Module]) -> Task:
    data = make_task("digits-mlp").train.first(64)
    return Task.of(layers, cross_entropy, (data.inputs, data.targets))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 10))


def single() -> nn.Module:
    return nn.Linear(64, 10)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def flat(task: Task, seed: int = 0) -> FlatModel:
    return FlatModel(task, torch.device("cpu"), seed=seed)


def given(model: FlatModel, rows: int = 2) -> Given:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(len(model.task.train), (rows, 3), generator=generator)
    points = model.initial + 0.1 * torch.randn(rows, model.layout.total, generator=generator)
    return points, model.initial_buffers.repeat(rows, 1), batches, torch.arange(rows)


def results(engine: VectorEngine, of: Given) -> list[Tensor]:
    found = engine.evaluate(*of)
    assert engine.notices == []
    return [found.gradients, found.losses, found.buffers]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, which no recording of another test has reached."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    forget_traces()
    yield tmp_path / "cache"
    forget_traces()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each computation that was recorded."""
    made: list[int] = []
    record = engines.record

    def counted(*arguments: object) -> object:
        made.append(1)
        return record(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(engines, "record", counted)
    return made


def test_a_recording_from_disk_gives_the_same_bits_at_once(
    folder: Path, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds the recording of an earlier one uses it from the first gradient on, for
    other seeds too, and computes the bits that it would have computed without."""
    task = small_task(normed)
    results(VectorEngine(flat(task), trace_after=0), given(flat(task)))
    assert cached_bytes(folder)[0] == len(recordings) == 1
    forget_traces()  # as another process
    for seed in (0, 1):
        model = flat(task, seed)
        kept = results(VectorEngine(model, trace_after=99), given(model))
        assert len(recordings) == 1
        monkeypatch.setenv(CACHE, "off")
        forget_traces()
        without = results(VectorEngine(model, trace_after=99), given(model))
        assert all(map(torch.equal, kept, without))
        monkeypatch.setenv(CACHE, str(folder))


@pytest.mark.parametrize("damage", [b"", b"{}", b"no recording"])
def test_a_damaged_file_counts_as_missing_and_is_written_again(
    folder: Path, recordings: list[int], damage: bytes
) -> None:
    """Whatever stands in the cache, a run computes the same; the next one finds a good file."""
    model = flat(small_task(single))
    first = results(VectorEngine(model, trace_after=0), given(model))
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage or good.replace(b"aten.mean", b"aten.amax"))
    forget_traces()
    again = results(VectorEngine(model, trace_after=0), given(model))
    assert all(map(torch.equal, first, again))
    assert len(recordings) == 2
    assert file.read_bytes() == good


def test_only_the_user_reads_and_writes_the_cache(folder: Path) -> None:
    """The folder and its files are the user's alone; a folder that others may write, or a link in
    the place of a file, is not used."""
    model = flat(small_task(single))
    results(VectorEngine(model, trace_after=0), given(model))
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.stem
    elsewhere = file.rename(folder.parent / "elsewhere")
    file.symlink_to(elsewhere)
    assert trace_cache._read_file(key) is None  # pyright: ignore[reportPrivateUsage]
    file.unlink()
    elsewhere.rename(file)
    assert trace_cache._read_file(key) is not None  # pyright: ignore[reportPrivateUsage]
    folder.chmod(0o777)
    assert trace_cache._read_file(key) is None  # pyright: ignore[reportPrivateUsage]


def test_files_that_were_not_used_for_long_make_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has a largest size, and the file that was used last is never the one that goes."""
    model = flat(small_task(single))
    engine = VectorEngine(model, trace_after=0)
    results(engine, given(model, 1))
    (first,) = folder.iterdir()
    os.utime(first, (1, 1))
    monkeypatch.setattr(trace_cache, "_MOST_BYTES", int(1.5 * first.stat().st_size))
    monkeypatch.setattr(trace_cache, "_LARGEST_SHARE", 1)
    results(engine, given(model, 2))
    assert not first.exists()
    assert cached_bytes(folder)[0] == 1


def test_off_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GOSSAMER_CACHE=off` neither writes nor reads; else the folder is where XDG says."""
    monkeypatch.setenv(CACHE, "off")
    model = flat(small_task(single))
    results(VectorEngine(model, trace_after=0), given(model))
    assert cache_folder() is None
    assert not folder.exists()
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert cache_folder() == folder / "gossamer"


def test_models_share_a_recording_only_if_their_code_is_known_and_equal() -> None:
    """Layers of torch with equal options have one recording whatever their weights; another option,
    a frozen weight of another value, or code of the user's own has not."""

    def described(layers: Callable[[], nn.Module], seed: int = 0) -> str | None:
        return model_fingerprint(flat(small_task(layers), seed))

    def frozen() -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 10), nn.Linear(10, 10))
        made[0].requires_grad_(False)
        return made

    def dropping(share: float) -> nn.Module:
        return nn.Sequential(nn.Dropout(share), nn.Linear(64, 10))

    assert described(normed) == described(normed, 1) is not None
    assert described(lambda: dropping(0.1)) != described(lambda: dropping(0.2))
    assert described(frozen) == described(frozen) != described(frozen, 1)
    assert described(Own) is None
    own_loss = Task.of(normed, lambda output, _: output.sum(), (torch.ones(4, 64), torch.ones(4)))
    assert model_fingerprint(flat(own_loss)) is None


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"steps": [["os.system", ["ls"], {}]], "outputs": [0, 0, 0]}',
        '{"steps": [["aten.__class__.mro", [], {}]], "outputs": [0, 0, 0]}',
        '{"steps": [["argument"]], "outputs": [0]}',
        '{"steps": [["argument"]], "outputs": [0, 1, 2]}',
    ],
)
def test_text_names_operations_of_torch_and_nothing_else(text: str) -> None:
    """Whatever else a text asks for is refused before anything is called."""
    with pytest.raises(ValueError, match=r"no recording|no operation"):
        read_graph(text, {})
