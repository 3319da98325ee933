"""Tasks of one's own: what `Task.of` takes, how a model is called, and by what it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import Metric, Task, make_task, own_code, simulate, tasks
from gossamer.errors import ConfigurationError
from gossamer.runs.statistics import measure
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.tasks.data import Data, leaves
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.own_task import try_out
from support import cluster_of

SAMPLES = 40


def numbers(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def linear() -> nn.Module:
    return nn.Linear(6, 2)


class Listed(Dataset[Any]):
    """A map-style dataset of whatever items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Table(Listed):
    """As a table of Hugging Face's `datasets`: rows are dictionaries, and it names its columns."""

    @property
    def column_names(self) -> list[str]:
        return list(self.items[0])


class Framed(Listed):
    """As a table of pandas."""

    iloc = None


def rows_of(inputs: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    return [
        {"text": "words", "first": row[:3].tolist(), "second": row[3:].numpy(), "label": int(label)}
        for row, label in zip(inputs, targets, strict=True)
    ]


def sources() -> dict[str, Any]:
    inputs, targets = numbers()
    pairs = list(zip(inputs, targets.tolist(), strict=True))
    return {
        "tensors": (inputs, targets),
        "numpy": (inputs.double().numpy(), targets.to(torch.int32).numpy()),
        "columns": {"x": inputs, "labels": targets},
        "pairs": Listed(pairs),
        "lists": Listed([[row.numpy(), label] for row, label in pairs]),
        "data": Data(inputs, targets),
    }


@pytest.mark.parametrize("kind", sources())
def test_samples_of_every_kind_become_the_same_tensors(kind: str) -> None:
    """In their order, of single precision, with classes of 64 bits."""
    task = Task.of(linear, nn.CrossEntropyLoss(), sources()[kind], sources()[kind])
    inputs, targets = numbers()
    (own,) = leaves(task.train.inputs)
    assert torch.equal(own, inputs)
    assert torch.equal(task.train.targets, targets)
    assert (own.dtype, task.train.targets.dtype) == (torch.float32, torch.int64)
    assert task.has_accuracy


@pytest.mark.parametrize("make", [Table, Listed])
def test_rows_by_name_leave_texts_behind(make: type[Listed]) -> None:
    """Numbers become inputs by name, the column called label the targets."""
    inputs, targets = numbers()
    task = Task.of(linear, nn.CrossEntropyLoss(), make(rows_of(inputs, targets)))
    whole = torch.cat([task.train.inputs["first"], task.train.inputs["second"]], 1)
    assert set(task.train.inputs) == {"first", "second"}
    assert {tuple(row) for row in whole.tolist()} <= {tuple(row) for row in inputs.tolist()}
    assert len(task.train) + len(task.test) == SAMPLES
    assert len(task.test) == SAMPLES // 10


def test_columns_can_be_named() -> None:
    """One input column of a table is handed over alone."""
    table = Table(rows_of(*numbers()))
    task = Task.of(linear, nn.CrossEntropyLoss(), table, inputs=("second",), targets="label")
    assert task.train.inputs.shape[1:] == (3,)


def test_a_limit_takes_some_of_all_samples() -> None:
    """The same ones every time, and not the first, which may be all of one class."""
    source = (torch.arange(100.0).unsqueeze(1), torch.arange(100))
    first, second = (Task.of(linear, nn.CrossEntropyLoss(), source, source, limit=20) for _ in "ab")
    assert first.train.targets.tolist() == second.train.targets.tolist()
    assert len(first.train) == len(first.test) == 20
    assert first.train.targets.max() > 50


REFUSED: dict[str, tuple[Any, str]] = {
    "unequal lengths": ((torch.zeros(3, 2), torch.zeros(2)), "as many targets as inputs"),
    "unequal shapes": (Listed([(torch.zeros(2), 0), (torch.zeros(3), 1)]), "pad or crop"),
    "an iterator": (iter([1, 2]), "can only be iterated"),
    "nothing": (None, "must be a pair"),
    "an empty dataset": (Listed([]), "is empty"),
    "no targets": ({"x": torch.zeros(3), "z": torch.zeros(3)}, "none is called"),
    "several tables": ({"train": Table([{}]), "test": Table([{}])}, "such as tables\\['train'\\]"),
    "a table of pandas": (Framed([]), "give arrays of it"),
    "texts": (Listed([("words", 0), ("words", 1)]), "cannot be read as numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_samples_that_cannot_be_used_are_refused(case: str) -> None:
    source, sentence = REFUSED[case]
    with pytest.raises(ConfigurationError, match=sentence):
        Task.of(linear, nn.CrossEntropyLoss(), source, source)


def test_a_dataset_that_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it is read, with the limit that would fit."""
    monkeypatch.setattr("gossamer.tasks.samples._MOST_BYTES", 1000)
    with pytest.raises(ConfigurationError, match="give limit="):
        Task.of(linear, nn.CrossEntropyLoss(), Listed([(torch.zeros(100), 0)] * 9))


# ---------------------------------------------------------------------- models and losses


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Named(nn.Module):
    """Takes its inputs by name, computes its own loss, and returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, first: Tensor, second: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.layer(first) - self.layer(second)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss, logits)


def named_task(**more: Any) -> Task:
    inputs, targets = numbers()
    source = {"first": inputs[:, :3], "second": inputs[:, 3:], "labels": targets}
    return Task.of(Named, None, source, source, **more)


def test_inputs_by_name_and_a_loss_of_the_models_own_are_vectorised() -> None:
    """All workers' gradients together are those of one after the other, traced or not."""
    model = FlatModel(named_task(), torch.device("cpu"), seed=0)
    engines = VectorEngine(model), VectorEngine(model, trace_after=0), LoopEngine(model)
    points = model.initial + 0.1 * torch.arange(3.0).unsqueeze(1)
    batches = torch.arange(12).view(3, 4)
    found = [
        engine.evaluate(points, model.initial_buffers.repeat(3, 1), batches, torch.arange(3))
        for engine in engines
    ]
    assert engines[0].notices == engines[1].notices == []
    for one in found[:2]:
        torch.testing.assert_close(one.gradients, found[2].gradients, rtol=1e-4, atol=1e-6)


def test_a_module_is_copied_with_its_weights() -> None:
    """Every seed begins where it stands, and it is left as it is."""
    model = linear()
    kept = model.weight.detach().clone()
    task = Task.of(model, nn.CrossEntropyLoss(), numbers(), numbers())
    starts = [FlatModel(task, torch.device("cpu"), seed=seed).initial for seed in (1, 2)]
    assert torch.equal(*starts)
    simulate(task, "all_reduce", cluster_of(2), epochs=1, evaluations=1)
    assert torch.equal(model.weight, kept)


class Undecided(nn.Module):
    """Its way through depends on the data, which cannot be batched."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) if inputs.sum() > 0 else self.layer(-inputs)


def test_what_cannot_be_vectorised_runs_and_says_which_line_is_to_blame() -> None:
    """One notice, with the file and the line of the user's own."""
    task = Task.of(Undecided, nn.CrossEntropyLoss(), numbers(), numbers())
    result = simulate(task, "all_reduce", cluster_of(2), epochs=1, evaluations=1)
    (notice,) = result.notices
    assert "cannot be vectorised" in notice
    assert f"{Path(__file__).name}, line" in notice


# ---------------------------------------------------------------------- metrics


def surprise(output: Output, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits, targets, reduction="none").exp()


def test_a_metric_of_ones_own_has_a_column_and_a_direction() -> None:
    """Runs are judged by it: the history says its name and that low values are better."""
    task = named_task(metric=surprise, better="low")
    result = simulate(task, "all_reduce", cluster_of(2), epochs=20, learning_rate=0.1)
    first, last = result.history[0], result.history[-1]
    assert last["surprise"] < first["surprise"]
    assert last["worker_surprise"] == pytest.approx(last["surprise"], rel=0.2)
    assert last["accuracy"] is None
    key = measure([result.history])
    assert (key, key.is_lower_better) == ("surprise", True)


def test_a_metric_of_parts_is_that_of_the_whole() -> None:
    """A model that returns objects is evaluated in portions; their mean is by samples."""
    whole, parts = (
        simulate(
            named_task(metric="accuracy", test_batch=size), "all_reduce", cluster_of(2), epochs=1,
            evaluations=1,
        )
        for size in (256, 7)
    )  # fmt: skip
    assert parts.accuracy == pytest.approx(whole.accuracy)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["loss", "two words", ""])
def test_a_metric_needs_a_name_that_no_column_has(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be named"):
        Metric(name, surprise)


def test_targets_of_minus_100_do_not_count() -> None:
    """As for torch's losses: half of the tokens that count are right."""
    targets = torch.tensor([[1, 0, -100, -100]])
    logits = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    for layout in (logits, logits.transpose(1, 2).repeat(1, 1, 1)):
        accuracy = Task.of(linear, None, numbers()).metric
        assert accuracy is not None
        assert accuracy.of(layout, targets) == 0.5


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_language_model_is_judged_by_the_words_that_its_loss_is_of(ahead: int) -> None:
    """A causal model shifts the targets itself; the accuracy follows its loss."""
    words = torch.tensor([[1, 2, 0, 1, -100], [2, 0, 1, 2, 0]])
    right = nn.functional.one_hot(words.clamp_min(0).roll(-ahead, 1), 3).float()
    kept = words.shape[1] - ahead
    loss = nn.functional.cross_entropy(right[:, :kept].flatten(0, 1), words[:, ahead:].flatten())
    accuracy = Task.of(linear, None, numbers()).metric
    assert accuracy is not None
    for told in ({"logits": right, "loss": loss}, SimpleNamespace(logits=right, loss=loss)):
        assert accuracy.of(told, words) == 1.0


# ---------------------------------------------------------------------- by name

FILE = """
from pathlib import Path
import torch
from torch import nn
from beside import WIDTH
from gossamer import Task

def make(width: int = WIDTH, scale=1.0, data: Path | None = None):
    inputs = scale * torch.arange(40.0).view(20, 2)
    pair = (inputs, torch.arange(20) % 2)
    return Task.of(lambda: nn.Linear(2, width), nn.CrossEntropyLoss(), pair, title=str(data))

ready = make()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_tasks.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("WIDTH = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *own_code.sys.path])
    yield tmp_path
    for name in ("own_tasks", "beside"):
        own_code.sys.modules.pop(name, None)


def test_a_file_names_a_task(folder: Path) -> None:
    """The object is a Task or a function whose options are its arguments, by their annotations or
    the types of their defaults; --data is the one called so."""
    task = make_task("own_tasks.py:make:width=5,scale=0.5", data=folder)
    assert FlatModel(task, torch.device("cpu"), seed=0).layout.total == 15
    assert float(task.train.inputs.max()) < 20
    assert task.title == str(folder)
    assert task.name == "make"
    assert task.place == "own_tasks.py, line 8"
    assert make_task("own_tasks.py:ready").title == "None"
    elsewhere = own_code.absolute(task.spec)
    assert elsewhere == f"{folder}/own_tasks.py:make:width=5,scale=0.5"
    assert make_task(elsewhere).title == "None"


def test_a_module_names_a_task(folder: Path) -> None:
    """By its dotted name, from the folder one is in."""
    package = folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(FILE)
    assert make_task("pack.own:make:width=3").name == "make"


def test_a_file_that_has_changed_is_read_again(folder: Path) -> None:
    """In a notebook one edits the file and goes on."""
    before = make_task("own_tasks.py:ready")
    assert make_task("own_tasks.py:ready").train is before.train
    (folder / "own_tasks.py").write_text(FILE.replace("view(20, 2)", "view(20, 2) + 1000"))
    assert float(make_task("own_tasks.py:ready").train.inputs.min()) >= 1000


def test_an_installed_package_brings_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, under a plain name."""
    point = EntryPoint("brought", "own_tasks:make", tasks.GROUP)
    monkeypatch.setattr(tasks, "entry_points", lambda group: {"brought": point})
    assert make_task("brought:width=4").name == "brought"
    with pytest.raises(ConfigurationError, match="did you mean 'brought'"):
        make_task("broght")


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("my.py:task", True),
        ("a/b:task", True),
        ("pack.mod:task", True),
        ("digits-mlp:w=1.5", False),
    ],
)
def test_a_slash_or_a_dot_before_the_colon_makes_a_name_ones_own(name: str, is_own: bool) -> None:
    assert own_code.is_own(name) == is_own


def test_numpy_arrays_of_images_train(folder: Path) -> None:
    """A regression is judged by its loss."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(30, 1, 4, 4))
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1))  # noqa: E731
    task = Task.of(model, nn.MSELoss(), (images, images.mean((1, 2, 3))[:, None]))
    try_out(task)
    assert task.metric is None
    assert simulate(task, "all_reduce", cluster_of(2), epochs=2).loss < 2
