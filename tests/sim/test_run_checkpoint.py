"""A run that was cut at random events and resumed is the run without interruption, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import Callback, simulate
from gossamer.config.faults import read_fault
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, Unfinished
from gossamer.methods import METHODS
from gossamer.pending import Pending
from gossamer.runs.result import Result
from gossamer.sim.checkpoint.file import RunCheckpoint
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.checkpoint.state import TensorState, tensors_of
from gossamer.sim.engine import NullEngine
from gossamer.sim.memory import shapes
from gossamer.sim.simulation import Simulation
from support import cluster_of, digits, only_here
from tiers import only

FAULTS = ("slow 1=3", "kill 3@0.05s", "pause 2@0.03s+0.05s", "drop 0.05")
FAST = ("ad_psgd", "diloco", "downpour+onebit")
COMPRESSED = (
    "downpour+onebit", "all_reduce+powersgd", "all_reduce+topk:share=0.1",
    "diloco:period=4,fragments=2,delay=1+topk:share=0.1,bits=2", "all_reduce+terngrad",
    "all_reduce+dgc", "async_diloco:period=4+int4", "d_psgd@0.5@all_reduce+int2",
)  # fmt: skip
"""Residuals, momenta, the Q of PowerSGD, and what clients know are kept; a phase, too."""


def settings_of(method: str, **choices: Any) -> Settings:
    """Everything that has a state: a schedule, a clip, momentum, faults, evaluations."""
    cluster = cluster_of(5).changed(faults=[read_fault(fault) for fault in FAULTS])
    choices = {
        "seed": 3, "epochs": 0.6, "batch": 16, "evaluations": 4, "clip": 1.0,
        "schedule": "cosine", "optimiser": "sgd:momentum=0.9,weight_decay=1e-3", **choices,
    }  # fmt: skip
    return make_settings(digits(), method, cluster, **choices)


def in_pieces(settings: Settings, cuts: list[int], path: Path, **more: Any) -> Result:
    """Run with an end after each of these numbers of events, each piece from the file alone."""
    for cut in cuts:
        with pytest.raises(Unfinished):
            Simulation(
                settings, piece=RunPiece(path, events=cut, resumes=path.exists()), **more
            ).run()
    return Simulation(settings, piece=RunPiece(path, resumes=path.exists()), **more).run()


def essence(result: Result) -> tuple[Any, ...]:
    """All that a run tells, but for the wall time."""
    summary = {name: value for name, value in result.summary.items() if name != "wall_seconds"}
    return json.dumps(summary, default=str), json.dumps(result.history, default=str)


def random_cuts(name: str, events: int, count: int) -> list[int]:
    return sorted(random.Random(name).sample(range(1, events), count))


IN_PIECES = [name for name, method in METHODS.items() if not method.acts_by_losses]


def test_a_method_that_acts_by_losses_is_refused_in_pieces(tmp_path: Path) -> None:
    """Its events cannot be made again without the values that decided them."""
    with pytest.raises(ConfigurationError, match="cannot be made in pieces"):
        Simulation(settings_of("pbt"), piece=RunPiece(tmp_path / "run"))


@pytest.mark.parametrize("name", only(FAST, [*IN_PIECES, *COMPRESSED]))
def test_a_run_in_pieces_is_the_run_in_one(name: str, tmp_path: Path) -> None:
    """Events, parameters, rows and summary agree, wherever the run was cut."""
    settings = settings_of(name)
    whole = Simulation(settings).run()
    found = in_pieces(settings, random_cuts(name, whole.events, 2), tmp_path / "run")
    assert essence(found) == essence(whole)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", only(("push_sum",), IN_PIECES))
def test_without_values_the_same_events_are_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is too large to be computed again has only shapes until its bits are back."""
    settings = settings_of(name, epochs=0.4)
    whole = Simulation(settings).run()
    monkeypatch.setattr(shapes, "MOST_HELD_BYTES", 0)
    found = in_pieces(settings, random_cuts(name, whole.events, 1), tmp_path / "run")
    assert essence(found) == essence(whole)


@pytest.mark.wide
@pytest.mark.parametrize(
    "choices",
    [{"engine": "loop"}, {"optimiser": "adamw"}, {"optimiser": "yellowfin"}, {"batch": 7}],
    ids=str,
)
@pytest.mark.parametrize("method", ["all_reduce:stale=1", "dc_asgd:adaptive=true,shared=true"])
def test_engines_optimisers_and_options_are_restored(
    method: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    """What keeps more state than plain descent goes on with it."""
    settings = settings_of(method, **choices)
    whole = Simulation(settings).run()
    cuts = random_cuts(f"{method}{choices}", whole.events, 3)
    assert essence(in_pieces(settings, cuts, tmp_path / "run")) == essence(whole)


@pytest.mark.wide
def test_groups_are_restored(tmp_path: Path) -> None:
    """The leaders' gradients, which their members still compute, go on too."""
    settings = make_settings(digits(), "ad_psgd:groups=2", cluster_of(6), epochs=0.6, batch=16)
    whole = Simulation(settings).run()
    cuts = random_cuts("groups", whole.events, 4)
    assert essence(in_pieces(settings, cuts, tmp_path / "run")) == essence(whole)


def test_callbacks_hear_of_every_moment_once(tmp_path: Path) -> None:
    """Events that are made again were told before."""

    class Heard(Callback):
        def __init__(self) -> None:
            self.said: list[Any] = []

        def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
            self.said.append((worker, step, seconds, loss))

        def on_evaluation(self, row: dict[str, Any]) -> None:
            self.said.append(row["loss"])

    settings = settings_of("local_sgd", epochs=0.4)
    alone, apart = Heard(), Heard()
    whole = Simulation(settings, callbacks=[alone]).run()
    in_pieces(settings, [whole.events // 2], tmp_path / "run", callbacks=[apart])
    assert apart.said == alone.said


def test_tensors_in_local_variables_and_in_half_an_expression_are_found() -> None:
    """A coroutine that waits holds them where no name leads."""
    waiting: Pending[torch.Tensor] = Pending("test")
    held = torch.ones(3)

    async def method(local: torch.Tensor) -> torch.Tensor:
        return (local * 2) + await waiting

    coroutine = method(held)
    coroutine.send(None)
    found = tensors_of([coroutine], [])
    coroutine.close()
    assert sorted(float(one.sum()) for one in found) == [3.0, 6.0]


def test_shared_memory_stays_shared() -> None:
    """Whoever held a part of another tensor holds a part of the restored one."""
    base = torch.arange(12.0).reshape(3, 4)
    state = TensorState.of([base, base[1], base[1]])
    again = torch.empty(3, 4, device="meta")
    row = again[1]
    state.give([again, row, row], torch.device("cpu"))
    again[1, 0] = 100
    assert row.tolist() == [100, 5, 6, 7]


def test_a_method_that_acts_by_values_is_refused(tmp_path: Path) -> None:
    """Its events cannot be made again without its gradients."""

    async def wary(w: Any, x: Any) -> None:
        for _ in w.steps():
            gradient = await w.gradient(x)
            x.descend_(gradient)
            if float(gradient.norm()) > 0:
                await w.sleep(0.001)

    settings = make_settings(digits(), only_here(wary), cluster_of(2), epochs=0.2, batch=16)
    with pytest.raises(ConfigurationError, match="acts by the values of tensors"):
        in_pieces(settings, [20], tmp_path / "run")


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """One sentence says which setting differs, or that the file is damaged."""
    path = tmp_path / "run"
    with pytest.raises(Unfinished):
        Simulation(settings_of("ensemble"), piece=RunPiece(path, events=9)).run()
    with pytest.raises(ConfigurationError, match=r"has clip=1\.0, got 2\.0"):
        Simulation(settings_of("ensemble", clip=2.0), piece=RunPiece(path, resumes=True))
    data = path.read_bytes()
    path.write_bytes(data[:-5] + b"wrong")
    with pytest.raises(ConfigurationError, match="or is damaged"):
        RunCheckpoint.read(path)
    path.write_bytes(data[:100])
    with pytest.raises(ConfigurationError, match="or is damaged"):
        RunCheckpoint.read(path)
    with pytest.raises(ConfigurationError, match="nothing to resume"):
        RunCheckpoint.read(tmp_path / "none")


def test_the_same_call_in_python_goes_on(tmp_path: Path) -> None:
    """`simulate(checkpoint=...)` ends after its minutes, and resumes when it is called again."""
    path = tmp_path / "run.safetensors"

    def once(minutes: float) -> Result:
        return simulate(
            digits(), "push_gossip", cluster_of(3), epochs=0.3, batch=16, checkpoint=path,
            minutes=minutes,
        )  # fmt: skip

    with pytest.raises(Unfinished):
        once(1e-9)
    assert path.exists()
    assert once(5).epochs >= 0.3


def test_a_run_for_time_only_holds_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are those of a run that has them."""
    settings = settings_of("easgd", engine="none")
    with_values = Simulation(settings).run()
    monkeypatch.setattr(shapes, "MOST_HELD_BYTES", 0)
    simulation = Simulation(settings)
    assert isinstance(simulation.engine, NullEngine)
    assert simulation.world.workers.parameters.is_meta
    assert simulation.run().digest == with_values.digest
