"""Frameworks that drive a coupled loop, where they are installed (the extra `frameworks`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.integrations.single_process import check_single_process
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.tasks import make_task
from gossamer.tasks.flat_model import FlatModel
from programs import PROGRAMS
from tiers import wide

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "accelerate": "accelerate_loop",
    "lightning": "lightning_fit",
    "transformers": "hf_trainer",
}
BATCHES = {"accelerate": 128, "lightning": 128, "transformers": 64}
"""What each example trains on: its batches of two epochs, on all workers together."""
LINE = re.compile(
    r"worker (\d) of (\d): (\d+) steps, gradients of at most (\S+), loss (\S+), model (\S+)"
)
CASES = [
    (library, workers, method)
    for library in EXAMPLES
    for workers, method in ((1, "all_reduce"), (2, "all_reduce"), (2, "downpour"), (2, "ad_psgd"))
]


def run(library: str, workers: int, method: str) -> list[tuple[str, ...]]:
    """What each worker of the example tells at its end."""
    pytest.importorskip(library)
    program = ROOT / "examples" / "integrations" / f"{EXAMPLES[library]}.py"
    return LINE.findall(printed(program, workers, method))


def printed(program: Path, workers: int, method: str) -> str:
    """What all workers of a program print."""
    started = subprocess.run(
        [sys.executable, "-m", "gossamer", "run", "-n", str(workers), str(program), method],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    return started.stdout


@pytest.mark.parametrize(
    ("library", "workers", "method"),
    [case if case[1:] == (2, "all_reduce") else pytest.param(*case, marks=wide) for case in CASES],
)
def test_a_framework_clips_accumulates_and_ends_with_one_model(
    library: str, workers: int, method: str
) -> None:
    """A step to four batches, clipped to the norm that was asked for; then all hold the output."""
    found = run(library, workers, method)
    assert len(found) == workers
    assert len({line[4:] for line in found}) == 1
    for line in found:
        assert float(line[3]) == pytest.approx(0.25, rel=1e-3)
    made = [int(line[2]) for line in found]
    if method == "all_reduce":
        assert made == [BATCHES[library] // 4 // workers] * workers
    else:  # whoever is ready takes the next batches, and an epoch may end with fewer than four
        assert sum(made) <= BATCHES[library] // 4 + 2 * workers


@wide
def test_metrics_of_lightning_are_reduced_as_they_ask_and_apart_from_each_other() -> None:
    """A sum is the sum, a mean the mean, a maximum the maximum. Asynchronous workers use what the
    others last said of the same metric."""
    pytest.importorskip("lightning")
    program = PROGRAMS / "lightning_metrics.py"
    for line in printed(program, 2, "all_reduce").splitlines():
        assert line.endswith("24 steps, 240.0 1.5 200.0")  # an epoch of 8 steps; 10 and 20 in each
    for line in printed(program, 2, "ad_psgd").splitlines():
        total, mean, most = (float(word) for word in line.split()[-3:])
        assert 1.0 <= mean <= 2.0, line
        assert most in (100.0, 200.0), line
        assert total % 10.0 == 0.0, line
        assert total >= 40.0, line


def test_processes_that_a_framework_couples_itself_are_refused() -> None:
    """They would be coupled twice; the sentence names the remedy."""
    check_single_process("accelerate", 1)
    with pytest.raises(ConfigurationError, match="start the script with `gossamer run`"):
        check_single_process("accelerate", 2)


@wide
def test_a_model_of_transformers_is_a_task() -> None:
    """Its own loss, its mask and its labels; two workers learn what one would."""
    pytest.importorskip("transformers")
    task = make_task(f"{ROOT}/examples/integrations/hf_task.py:task:width=16")
    ranking = gossamer.compare(
        task, ["all_reduce", "ad_psgd"], gossamer.Cluster(workers=2), learning_rates=[1e-2],
        seeds=1, epochs=4, target=0.8, jobs=1, progress=False,
    )  # fmt: skip
    assert all(row["seconds_to_target"] is not None for row in ranking.table())


def tiny_models(transformers: Any) -> list[Any]:
    """As they come, with dropout in attention too; two heads share keys in the second."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 30}
    llama = transformers.LlamaConfig(**small, intermediate_size=16, num_key_value_heads=1)
    bert = transformers.BertConfig(**small, intermediate_size=16)
    return [
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=30)
        ),
        transformers.LlamaForCausalLM(llama),
        transformers.BertForMaskedLM(bert),
    ]


@wide
def test_models_of_transformers_are_evaluated_together() -> None:
    """With masks; recorded too, they are the loop up to rounding. Causal ones are judged by the
    next word, as their own loss is."""
    words = (torch.arange(40)[:, None] + 3 * torch.arange(9)) % 30
    mask = torch.ones_like(words)
    mask[::2, 7:] = 0
    data = {"input_ids": words, "attention_mask": mask, "labels": words.clone()}
    for made in tiny_models(pytest.importorskip("transformers")):
        task = gossamer.Task.of(made.train(), None, data)
        model = FlatModel(task, torch.device("cpu"), seed=0)
        given = (
            model.initial + 0.1 * torch.randn(2, model.layout.total),
            model.initial_buffers.repeat(2, 1),
            torch.randint(30, (2, 4)),
            torch.arange(2),
        )
        engine = VectorEngine(model, trace_after=1)
        theirs = LoopEngine(model).evaluate(*given).gradients
        for _ in range(3):
            ours = engine.evaluate(*given).gradients
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert not engine.notices
        logits = functional.one_hot((words + 3) % 30, 30).float()
        told = SimpleNamespace(logits=logits, loss=made.loss_function(logits, words, 30))
        assert task.metric is not None
        assert task.metric.of(told, words) == (0.0 if "Masked" in type(made).__name__ else 1.0)
