"""Files of one's own on the command line: what they bring, and one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import gossamer
from gossamer.own_code import told
from tiers import wide

ROOT = Path(__file__).resolve().parents[2]
TASKS = """
import torch
from torch import nn
from gossamer import Task

class Net(nn.Module):
    calls = 0
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(6, width)
    def forward(self, x):
        return self.layer(x)

class Third(Net):
    def forward(self, x):
        Third.calls += 1
        if Third.calls > 6:
            raise ValueError("in the third batch")
        return super().forward(x)

PAIR = torch.randn(80, 6, generator=torch.manual_seed(0)), torch.arange(80) % 4
LOSS = nn.CrossEntropyLoss()
good = Task.of(Net, LOSS, PAIR, PAIR)
third = Task.of(Third, LOSS, PAIR, PAIR)
def make(width: int = 4): return Task.of(lambda: Net(width), LOSS, PAIR, PAIR)
def vector(): return Task.of(Net, nn.CrossEntropyLoss(reduction="none"), PAIR)
def narrow(): return Task.of(Net, LOSS, (torch.randn(9, 5), torch.arange(9) % 4))
def detached(): return Task.of(Net, lambda out, y: out.detach().mean().requires_grad_(), PAIR)
def cut_off(): return Task.of(Net, lambda out, y: out.detach().mean(), PAIR)
def nothing(): pass
def needs(width): return Task.of(lambda: Net(width), LOSS, PAIR)
def exits(): raise SystemExit(3)
def stream(): return Task.of(Net, LOSS, ((x, y) for x, y in zip(*PAIR)))
def moved(): return Task.of(lambda: Net().to("cuda:9"), LOSS, PAIR)
def no_model(): return Task.of(lambda: 3, LOSS, PAIR)
def frozen(): return Task.of(lambda: Net().requires_grad_(False), LOSS, PAIR)
def raises(): return Task.of(Net, LOSS, open("nowhere.pt"))
def by_name(): return Task.of(Net, LOSS, {"pixels": PAIR[0], "labels": PAIR[1]})
def surprise(out, y): return nn.functional.cross_entropy(out, y, reduction="none").exp()
def judged(): return Task.of(Net, LOSS, PAIR, PAIR, metric=surprise, better="low")
class Talker(Net):
    def forward(self, x):
        print("a shape:", x.shape)
        return super().forward(x)

def talks(): return Task.of(Talker, LOSS, PAIR)
def up(): return Task.of(Net, LOSS, PAIR, metric=surprise, better="up")
def a(): return Task.of(Net, LOSS, PAIR, batch=0)
number = 3
"""
METHODS = """
import gossamer

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0, staleness="0")
async def alone(w, x, *, beta: float = 0.5):
    '''Workers that never meet.'''
    for _ in w.steps():
        x.descend_(await w.gradient(x))

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0)
async def lazy(w, x):
    for _ in w.steps():
        pass

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0)
async def early(w, x):
    return

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0)
async def raises(w, x):
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if t == 2:
            raise KeyError("at the third step")

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=1)
async def untrue(w, x):
    for _ in w.steps():
        x.add_(0.1 * x.snapshot())
        x.descend_(await w.gradient(x))

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0)
async def shorter(w, x):
    for _ in w.steps():
        gradient = await w.gradient(x)
        x.descend_(gradient[:-1])

@gossamer.method(keeps_mean=True, waits_for="nobody", models_per_step=0)
async def foreign(w, x):
    import asyncio
    for _ in w.steps():
        await asyncio.sleep(0)
        x.descend_(await w.gradient(x))

async def bare(w, x):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "methods.py").write_text(METHODS)
    (tmp_path / "broken.py").write_text("import gossamer\ntask = gossamer.Task.of(\n    3,,\n)\n")
    (tmp_path / "uses.py").write_text("import broken\n")
    (tmp_path / "failing.py").write_text("import gossamer\n\nmodel = unheard_of\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD_TASKS = {
    "nowhere.py:task": "task file 'nowhere.py' does not exist; did you mean 'broken.py'?",
    "task.py:good": "task file 'task.py' does not exist; did you mean 'tasks.py'?",
    "tasks.py": "names no object in it; write tasks.py:NAME",
    "tasks.py:god": "unknown task in tasks.py: 'god'; did you mean 'good'?",
    "tasks.py:number": "is an object of type int, expected a Task or a function",
    "tasks.py:nothing": "(tasks.py, line {def nothing}) returns nothing, expected a Task",
    "tasks.py:make:widht=3": "unknown tasks.py:make option 'widht'; did you mean 'width'?",
    "tasks.py:make:width=wide": "tasks.py:make: width must be a whole number, got 'wide'",
    "tasks.py:good:width=3": "is a Task and takes no options, got 'width'",
    "tasks.py:vector": "line {def vector}) must be one number, got a tensor of shape (2,)",
    "tasks.py:narrow": "tasks.py, line {return self.layer}: RuntimeError: mat1 and mat2 shapes",
    "tasks.py:detached": "does not depend on the model",
    "tasks.py:cut_off": "Net (tasks.py, line {def cut_off}) does not depend on the model",
    "tasks.py:needs": "needs width; write tasks.py:needs:width=VALUE, or give width a default",
    "tasks.py:exits": "tasks.py, line {def exits}: it ends the program by exit(3)",
    "tasks.py:stream": "task tasks.py:stream: tasks.py, line {def stream}: train must say how many",
    "tasks.py:moved": "tasks.py, line {def moved}: ",
    "uses.py:task": "task file uses.py: broken.py, line 3: invalid syntax in '3,,'",
    "tasks.py:no_model": "makes a int, expected a torch.nn.Module",
    "tasks.py:frozen": "has no parameter to train",
    "tasks.py:raises": "task tasks.py:raises: tasks.py, line {def raises}: FileNotFoundError",
    "tasks.py:by_name": "tasks.py, line {class Net}) takes x, and the task gives it 'pixels'",
    "tasks.py:third": "tasks.py, line {raise ValueError}: ValueError: in the third batch",
    # Neither a place in what dataclasses generate, nor a picture in the place of ":a:".
    "tasks.py:up": "task tasks.py:up: tasks.py, line {def up}: metric surprise: better must be",
    "tasks.py:a": "task tasks.py:a: tasks.py, line {def a(}: batch must be a finite number above 0",
    "broken.py:task": "task file broken.py: broken.py, line 3: invalid syntax in '3,,'",
    "failing.py:task": "failing.py, line 3: NameError: name 'unheard_of' is not defined",
    "no.such.module:task": "task module 'no.such.module' was not found",
}
BAD_METHODS = {
    "methods.py:alon": "unknown method in methods.py: 'alon'; did you mean 'alone'?",
    "methods.py:bare": "methods.py:bare (methods.py, line {async def bare}) has no row of promises",
    "methods.py:lazy": "method lazy (methods.py, line {async def lazy}-1): worker",
    "methods.py:early": "early (methods.py, line {async def early}-1): no worker asked for a",
    "methods.py:raises": "methods.py, line {raise KeyError}: KeyError: 'at the third step'",
    "methods.py:shorter": "descend_ was given a gradient of shape",
    "methods.py:foreign": "awaited None: not a Worker's word; await what w.gradient",
    "methods.py:alone:bta=1": "unknown alone option 'bta'; did you mean 'beta'?",
    "methods.py:alone:beta=much": "alone: beta must be a number, got 'much'",
}


def with_lines(sentence: str, file: str) -> str:
    """With the number of the line that holds a text in place of {text}; a decorator is before."""

    def number(found: re.Match[str]) -> str:
        before, _, _ = file.partition(found[1])
        return str(before.count("\n") + 1 - bool(found[2]))

    return re.sub(r"\{(.+?)\}(-1)?", number, sentence)


def refused(*arguments: str) -> str:
    """The last line of what a command says that ends with exit code 2; there is no traceback."""
    said = gossamer(*arguments)
    assert said.status == 2, said
    assert "Traceback" not in said.err
    return said.err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_bad_task_is_one_sentence_with_its_place(name: str) -> None:
    sentence = refused("simulate", "--task", name, "--epochs", "1", "--runs", "none")
    assert sentence.startswith("error: ")
    assert with_lines(BAD_TASKS[name], TASKS) in sentence


@pytest.mark.parametrize("name", BAD_METHODS)
def test_a_bad_method_is_one_sentence_with_its_place(name: str) -> None:
    sentence = refused("simulate", "--method", name, "--epochs", "1", "--runs", "none")
    assert sentence.startswith("error: ")
    assert with_lines(BAD_METHODS[name], METHODS) in sentence


def test_own_tasks_and_methods_are_compared() -> None:
    """--method may be repeated, and the page is written like any other."""
    said = gossamer(
        "compare", "--task", "tasks.py:make:width=5", "--method", "methods.py:alone:beta=0.25",
        "--method", "all_reduce", "--epochs", "1", "--seeds", "1", "--lr", "0.01", "--json",
        "--workers", "2",
    )  # fmt: skip
    assert said.status == 0, said.err
    labels = {row["method"] for row in said.json["ranking"]}
    assert labels == {"methods.py:alone:beta=0.25", "all_reduce"}
    (page,) = Path("runs").glob("*-compare-make/report.html")
    assert "methods.py:alone" in page.read_text(encoding="utf-8")
    for kept in page.parent.glob("*/config.json"):
        assert json.loads(kept.read_text())["forms"]["device"] == "cpu"


def test_what_a_model_prints_is_not_among_the_results() -> None:
    """With --json standard output is one object, whatever the user's own code says."""
    said = gossamer(
        "simulate", "--task", "tasks.py:talks", "--epochs", "1", "--workers", "2", "--runs", "none",
        "--json",
    )  # fmt: skip
    assert said.json["ended"] == "finished"
    assert "a shape:" in said.err


def test_methods_are_ranked_by_a_metric_of_ones_own() -> None:
    """Its name heads the column, a target is one of its values, and low values are better."""
    said = gossamer(
        "compare", "--task", "tasks.py:judged", "--methods", "all_reduce ad_psgd", "--epochs", "30",
        "--seeds", "1", "--lr", "0.03", "--workers", "2", "--target", "4.2", "--json",
    )  # fmt: skip
    assert said.status == 0, said.err
    assert " surprise " in said.err
    for row in said.json["ranking"]:
        has_arrived = row["seconds_to_target"] is not None
        assert has_arrived == (row["surprise"] <= 4.2), row
    assert any(row["seconds_to_target"] for row in said.json["ranking"])
    (page,) = Path("runs").glob("*/report.html")
    assert '"score": "surprise", "lower_is_better": true' in page.read_text(encoding="utf-8")


def test_real_workers_import_own_tasks_and_methods() -> None:
    """By their path, wherever the workers run; the run folder says from which files."""
    said = gossamer(
        "train", "--task", "tasks.py:good", "--method", "methods.py:alone", "--workers", "2",
        "--epochs", "1", "--json",
    )  # fmt: skip
    assert said.status == 0, said.err
    assert said.json["method"] == "methods.py:alone"
    assert sum(said.json["steps_by_worker"].values()) >= 2
    (job,) = Path("runs").glob("*/job.json")
    settings = json.loads(job.read_text())["settings"]
    assert settings["task"] == f"{Path.cwd()}/tasks.py:good"
    assert settings["method"] == f"{Path.cwd()}/methods.py:alone"


@pytest.mark.parametrize(
    ("task", "method", "sentence"),
    [
        (
            "tasks.py:third",
            "all_reduce",
            "tasks.py, line {raise ValueError}: ValueError: in the third",
        ),
        pytest.param(
            "tasks.py:good",
            "methods.py:raises",
            "line {raise KeyError}: KeyError: 'at the third",
            marks=wide,
        ),
        pytest.param("tasks.py:good", "methods.py:foreign", "not a Worker's word", marks=wide),
        pytest.param(
            "tasks.py:good", "methods.py:lazy", "without asking for a gradient", marks=wide
        ),
    ],
)
def test_what_fails_on_real_workers_is_told_with_its_place(
    task: str, method: str, sentence: str
) -> None:
    """Exit code 2, as in virtual time, and no worker goes on."""
    said = refused(
        "train", "--task", task, "--method", method, "--workers", "2", "--runs", "none",
        "--epochs", "20",
    )  # fmt: skip
    assert with_lines(sentence, METHODS if method.startswith("methods") else TASKS) in said


def test_a_method_is_checked_against_its_row() -> None:
    """The exit code is 1 if a promise is broken, and the table says which."""
    said = gossamer("check-method", "methods.py:untrue", "--json")
    assert said.status == 1
    broken = {one["promise"] for one in said.json["promises"] if one["is_kept"] is False}
    assert {"keeps the mean", "models sent per step", "plain training with one worker"} <= broken
    assert "a seed fixes the run" not in broken
    assert "keeps the mean" in said.err


@wide
def test_a_method_that_keeps_its_row_passes_the_check() -> None:
    said = gossamer("check-method", "methods.py:alone")
    assert said.status == 0, said.out
    assert "BROKEN" not in said.out


@pytest.mark.parametrize(
    "example", ["07_own_images", pytest.param("08_own_transformer", marks=wide)]
)
def test_an_example_gets_a_ranking_from_the_command_line(example: str) -> None:
    """A CNN on images, and a transformer with masks and a loss of its own."""
    said = gossamer(
        "compare", "--task", str(ROOT / "examples" / f"{example}.py:task"), "--methods",
        "all_reduce ad_psgd", "--epochs", "1", "--seeds", "1", "--lr", "0.01", "--runs", "none",
        "--json", "--evaluations", "2",
    )  # fmt: skip
    assert said.status == 0, said.err
    assert [row["accuracy"] > 0.2 for row in said.json["ranking"]] == [True, True]


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert told(KeyError()) == "KeyError"
