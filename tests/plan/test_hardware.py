"""Data sheets: operators counted on fake tensors, rooflines, traces, and what fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gossamer import Task
from gossamer.commands.cli import app
from gossamer.commands.work.step_costs import cost
from gossamer.config.cluster import Cluster, Compute, clusters, load_cluster
from gossamer.config.price import Price
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS, parse_method
from gossamer.plan.cost.workload import workload_of
from gossamer.plan.hardware.chrome_trace import read_trace
from gossamer.plan.hardware.device import DEVICES, HostCosts, find_device, read_device
from gossamer.plan.hardware.estimate import estimate
from gossamer.plan.hardware.operators import PRECISIONS, step_work
from gossamer.plan.hardware.roofline import layer_seconds, step_seconds
from gossamer.plan.hardware.room import Room
from gossamer.plan.hardware.sheet import SheetChoices, sheet
from gossamer.tasks.flat_model import model_size
from held_copies import held_copies
from support import bowl, build, cluster_of
from tiers import only, wide


def wide_layers(width: int = 64) -> Task:
    """Two layers whose operations one can count by hand."""
    data = torch.randn(32, width), torch.randint(4, (32,))
    return Task.of(
        lambda: nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 4, bias=False)),
        nn.CrossEntropyLoss(), data, optimiser="adamw", name="wide",
    )  # fmt: skip


def test_the_operations_of_a_step_are_those_of_its_products() -> None:
    """2 N in out forward, the same by the weights, and by the input but for the first layer."""
    work = step_work(wide_layers(), 8)
    first, second = 2 * 8 * 64 * 64, 2 * 8 * 64 * 4
    assert work.flops == 2 * first + 3 * second
    assert work.is_fake


class Shortcut(nn.Module):
    """A layer beside which its input goes on unchanged, through a module that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(64, 64, bias=False), nn.Sequential()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(inputs)) + self.beside(inputs)


def test_operations_belong_to_their_layers_on_the_way_back_too() -> None:
    """Each product is twice that of its forward pass there, once for the first layer."""
    data = torch.randn(8, 64), torch.randint(64, (8,))
    task = Task.of(
        lambda: nn.Sequential(Shortcut(), nn.Sequential(Shortcut(), Shortcut())),
        nn.CrossEntropyLoss(), data, name="shortcuts",
    )  # fmt: skip
    work, product = step_work(task, 8), 2 * 8 * 64 * 64
    for name, backward in (("0.inner", 1), ("1.0.inner", 2), ("1.1.inner", 2)):
        own = [one for one in work.gradient if one.layer == name]
        flops = [sum(o.flops for o in own if o.is_backward == back) for back in (False, True)]
        assert flops == [product, backward * product], name


@pytest.mark.parametrize("device", only(("h200", "cpu-core"), DEVICES))
def test_the_times_of_the_layers_add_up_to_the_step(device: str) -> None:
    """Operations, too; waiting for the host and the optimiser have rows of their own."""
    work = step_work(wide_layers(), 16)
    whole = step_seconds(work, find_device(device), "fp32")
    rows = layer_seconds(work, find_device(device), "fp32")
    assert [one.name for one in rows[:2]] == ["0", "1"]
    assert sum(one.total_s for one in rows) == pytest.approx(whole.total_s)
    assert sum(one.flops for one in rows) == work.flops


def test_an_optimiser_on_a_cpu_goes_through_the_tensors_one_by_one() -> None:
    """Small ones stay in its caches between two operators; a GPU takes all at once."""
    work = step_work(wide_layers(), 8)
    update = tuple(dataclasses.replace(one, moved_bytes=1e8) for one in work.update)
    one, many = (
        dataclasses.replace(work, update=update, tensors=n) for n in ((1000,), (10,) * 100)
    )
    whole, parts = (step_seconds(w, find_device("cpu-core"), "fp32").update_s for w in (one, many))
    assert parts < whole / 3
    free = dataclasses.replace(find_device("h200"), host=HostCosts())
    assert step_seconds(one, free, "fp32") == step_seconds(many, free, "fp32")


def test_the_size_of_a_model_counts_parameters_slots_and_what_is_fixed() -> None:
    """AdamW has two vectors; buffers are never trained."""
    size = model_size(wide_layers())
    assert (size.model_bytes, size.slots) == (4 * (64 * 64 + 64 * 4), 2)
    assert size.worker_bytes == 4 * size.model_bytes


@wide
def test_the_peak_grows_with_the_batch_by_the_activations() -> None:
    """Twice the samples never need less, and parameters are in it once."""
    one, more = step_work(wide_layers(), 256), step_work(wide_layers(), 512)
    assert one.size == more.size
    assert more.peak_bytes - one.peak_bytes >= 256 * 64 * 4  # the input of the second layer


@pytest.mark.parametrize("name", only(("h200", "cpu-core"), DEVICES))
def test_twice_the_device_never_takes_longer(name: str) -> None:
    """More operations and bytes a second shorten every step; a better precision does not lengthen
    its products."""
    device, work = DEVICES[name], step_work(wide_layers(), 16)
    double = dataclasses.replace(
        device, bandwidth=2 * device.bandwidth,
        flops={key: 2 * value for key, value in device.flops.items()},
    )  # fmt: skip
    for precision in PRECISIONS:
        assert (
            0
            < step_seconds(work, double, precision).total_s
            <= step_seconds(work, device, precision).total_s
        )


@wide
def test_an_estimate_keeps_its_time_at_its_own_batch() -> None:
    """fixed + per_sample * batch is the time that was estimated there."""
    found = estimate(wide_layers(), find_device("cpu-core"), batch=16)
    assert found.compute(Compute()).mean_seconds(16) == pytest.approx(found.time.gradient_s)
    assert found.compute(Compute()).per_sample >= 0


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bandwidth = '1TB'", "must name a device"),
        ("like = 'h100'\nflops = {fp32 = -1}", "above 0"),
        ("like = 'h100'\nflops = {tf32 = 1e12}", "at least fp32"),
        ("like = 'h100'\nbandwidth = 0", "must be a bandwidth"),
        ("like = 'h100'\nmemory = '-1GB'", "must be a size"),
        ("like = 'h100'\nspeed = 1", "unknown key"),
        ("like = ", "cannot be read"),
    ],
)
def test_impossible_devices_are_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_device(path)


def event(
    name: str, at: float, lasts: Any, category: str = "cpu_op", **more: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": lasts, "tid": 1, **more}


def test_a_trace_gives_the_step_its_forward_share_and_its_layers(tmp_path: Path) -> None:
    """An operator of the backward pass belongs to the module of its sequence number."""
    events = [
        event("nn.Module: Linear_0", 0, 40, "python_function"),
        event("aten::linear", 0, 30, args={"Sequence number": 5}),
        event("autograd::engine::evaluate_function: AddmmBackward0", 40, 60,
              args={"Sequence number": 5}),
    ]  # fmt: skip
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path)
    assert found.seconds == pytest.approx(100e-6)
    assert found.forward_share == pytest.approx(0.4)
    assert found.layers == {"Linear_0": pytest.approx(90e-6)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("{}", "no list of traceEvents"),
        ('{"traceEvents": []}', "no operators"),
        (json.dumps([event("aten::mm", 0, -5)]), "damaged"),
        (json.dumps([event("aten::mm", 0, "soon")]), "damaged"),
        (json.dumps([event("aten::mm", 1e308, 1e308)]), "damaged"),
        (json.dumps([event("aten::mm", 0, 0)]), "empty"),
    ],
)
def test_damaged_traces_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        read_trace(path)


# ---------------------------------------------------------------------- what fits

FAST = ("all_reduce", "d_psgd", "easgd", "diloco:period=4", "push_sum")
SPECS = [
    *(name for name in METHODS if name not in ("diloco",)), "diloco:period=4", "bmuf:period=4",
    "all_reduce:stale=2", "d_psgd:topology=complete", "push_sum:topology=exponential",
    "push_sum:overlap=1", "softsync:overlap=true", "downpour:overlap=true",
    "downpour:n_push=3,n_fetch=3",
]  # fmt: skip


@pytest.mark.parametrize("method", only(FAST, SPECS))
def test_no_worker_holds_more_models_than_its_method_promises(method: str) -> None:
    """And the promise is no more than two models above what is held: it is what `advise` refuses
    by. Partners at random (push_gossip) may be luckier than that."""
    run = build(bowl(50), method, cluster_of(4), steps=14, engine="loop", seed=3)
    spec = run.settings.method
    promised = spec.method.promises.memory(4, run.settings.method_options())
    held = held_copies(run, every=1 if spec.name == "push_gossip" else 5)
    assert held <= promised
    if spec.name != "push_gossip":
        assert promised - held <= 2


def test_what_does_not_fit_says_by_how_much() -> None:
    """The refusal names what is needed, what there is, and the difference."""
    task, small = wide_layers(), Compute(memory=100e3)
    room = Room.of(task, Cluster(workers=4, compute=small), 16)
    need = room.need("all_reduce")
    assert need.total == room.size.worker_bytes + room.activation_bytes + room.size.model_bytes
    refusal = room.refusal("d_psgd")
    assert "a worker needs" in refusal
    assert "too few" in refusal
    plenty = dataclasses.replace(room, cluster=Cluster(workers=4, compute=Compute(memory=1e9)))
    assert plenty.refusal("d_psgd") == ""
    assert dataclasses.replace(room, cluster=Cluster(workers=4)).refusal("d_psgd") == ""


def test_a_server_on_a_workers_machine_takes_its_room() -> None:
    """Parameters and the optimiser's state of its range."""
    room = Room.of(wide_layers(), Cluster(workers=4), 16)
    own, beside = (
        room.need(parse_method(f"downpour:placement={place}")).copies
        for place in ("own", "workers")
    )
    assert beside - own == 3


@wide
def test_cost_writes_a_cluster_that_says_what_it_was_made_of(tmp_path: Path) -> None:
    """With the error of the estimate beside it; the file is read back by everybody."""
    path = tmp_path / "cluster.toml"
    said = CliRunner().invoke(
        app,
        ["cost", "--task", "digits-mlp", "--hardware", "h100", "--workers", "16", "--bandwidth",
         "25Gbit", "--methods", "all_reduce", "--out", str(path), "--runs", "none"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "nine of ten measured steps" in " ".join(said.output.split())
    cluster = load_cluster(path)
    assert (cluster.workers, cluster.network.bandwidth) == (16, 3.125e9)
    assert cluster.compute.memory == 80e9


PRESETS = list(clusters())


@pytest.mark.parametrize("preset", only(("halos-geo-16", "home-dsl-8"), PRESETS))
def test_everything_else_of_a_cluster_stands_in_the_file_too(preset: str, tmp_path: Path) -> None:
    """Sites, racks, slow workers, prices: only the steps are those of the device."""
    price = Price(2.0, ((1, 5.0),), egress_per_gb=0.1, watts=300.0)
    where = dataclasses.replace(load_cluster(preset), price=price)
    made = sheet(bowl(), where, workload_of(bowl()), SheetChoices(hardware="cpu-core"))
    path = tmp_path / "cluster.toml"
    path.write_text(made.text("a task"))
    found, expected = (six_digits(one.as_dict()) for one in (load_cluster(path), made.cluster))
    assert {**found, "name": ""} == {**expected, "name": ""}
    kept = six_digits(where.as_dict())
    for part in found.keys() - {"name", "title", "compute"}:
        assert found[part] == kept[part], part


def six_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: six_digits(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [six_digits(one) for one in value]
    return f"{value:.5g}" if type(value) in (int, float) else value


def test_a_precision_that_a_device_has_not_is_told() -> None:
    """The time is that of the peak it has."""
    t4 = find_device("t4")
    assert t4.peak("bf16") == t4.peak("fp32")
    assert (
        "at its peak in fp32"
        in estimate(wide_layers(), t4, batch=4, precision="bf16").sentences()[0]
    )


def test_a_size_alone_may_be_too_large() -> None:
    """Without a task everything but the activations is known."""
    with pytest.raises(ConfigurationError, match="a worker needs 400 GB and has 24 GB"):
        cost(None, ["all_reduce"], workers=[8], model_bytes="100GB", memory="24GB")


def test_cost_leaves_out_what_does_not_fit() -> None:
    """And names what would be missing."""
    said = CliRunner().invoke(
        app,
        ["cost", "--task", "digits-mlp", "--memory", "110kB", "--workers", "8", "--methods",
         "all_reduce d_psgd", "--runs", "none", "--json"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert told["layer_times"] == []
    refused = told["refused"]
    assert list(refused) == ["d_psgd"]
    assert "too few" in refused["d_psgd"]


@pytest.mark.parametrize("chosen", [("--hardware", "h100"), ("--trace", "step.json")])
def test_layers_have_the_times_of_the_sheet_or_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, str]
) -> None:
    """On the console and in JSON; a trace needs no task for that."""
    monkeypatch.chdir(tmp_path)
    events = [event("aten::mm", 0, 30), event("aten::relu", 30, 10)]
    Path("step.json").write_text(json.dumps({"traceEvents": events}))
    model = ("--task", "none", "--model-bytes", "1MB") if chosen[0] == "--trace" else ()
    said = CliRunner().invoke(
        app,
        ["cost", *model, *chosen, "--workers", "4", "--methods", "all_reduce", "--layers",
         "--runs", "none", "--json"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)["layer_times"]
    if chosen[0] == "--trace":
        assert [(row["layer"], row["seconds"]) for row in rows] == [
            ("mm", pytest.approx(30e-6)), ("relu", pytest.approx(10e-6)),
        ]  # fmt: skip
    else:
        assert [row["layer"] for row in rows[:3]] == ["0", "1", "2"]
        assert all(row["operations"] >= 0 and row["seconds"] > 0 for row in rows)
