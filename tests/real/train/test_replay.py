"""A recorded asynchronous run, executed again, ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command_line import gossamer
from gossamer.config.cluster import Cluster
from gossamer.config.faults import Fault
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.train.replay import read_order, replay
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.train import train
from gossamer.runs.result import digest_of
from tiers import every, wide

WORKERS = 3


def recorded(folder: Path, method: str, workers: int = WORKERS, **choices: object):
    folder.mkdir()
    result = train(
        "digits-logistic", method, workers, folder=folder, record=True, seed=3,
        **{"epochs": 1, **choices},
    )  # fmt: skip
    return result, TrainRequest.from_json((folder / "job.json").read_text())


def replayed(folder: Path, job: TrainRequest, workers: int = WORKERS) -> str:
    turns = read_order(folder, workers)
    return digest_of(replay(job, workers, turns))


ASYNCHRONOUS = [
    name for name, method in METHODS.items()
    if name != "hogwild" and not method.is_synchronous(method.defaults())
]  # fmt: skip


@pytest.mark.parametrize(
    "method",
    every(3, ["ad_psgd", "ad_psgd:most=inf", "pull_gossip", "downpour:servers=2", "all_reduce"]),
)
def test_a_replay_reaches_the_same_parameters(tmp_path: Path, method: str) -> None:
    """Bit for bit, whatever order the machine happened to choose; the result has the whole model,
    and is shown in one line."""
    result, job = recorded(tmp_path / "run", method)
    assert replayed(tmp_path / "run", job) == result.parameters_digest
    model = job.settings.task.make_model()
    model.load_state_dict(result.state_dict())
    loaded = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert digest_of(loaded) == result.parameters_digest
    assert repr(result).startswith(f"<Result: {result.method} on {job.settings.task.name}, ")
    assert len(repr(result)) < 250


@pytest.mark.parametrize(
    "method", every(4, ["all_reduce", "easgd:synchronous=true", "local_sgd", "ssp"])
)
def test_one_worker_can_be_replayed(tmp_path: Path, method: str) -> None:
    """Whoever is alone waits for nobody, in the replay neither."""
    result, job = recorded(tmp_path / "run", method, 1)
    assert replayed(tmp_path / "run", job, 1) == result.parameters_digest


@pytest.mark.slow
@pytest.mark.parametrize("method", ASYNCHRONOUS)
def test_every_asynchronous_method_can_be_replayed(tmp_path: Path, method: str) -> None:
    """Whatever the method exchanges, the recorded order decides it."""
    result, job = recorded(tmp_path / "run", method)
    assert replayed(tmp_path / "run", job) == result.parameters_digest


@wide
def test_another_order_gives_other_parameters(tmp_path: Path) -> None:
    """What is recorded matters: if in the first half the first worker's steps come before
    everybody else's, other bits come out than if they come after, so one of the two is not the
    recorded run.

    Two neighbouring turns swapped would not do: those of workers that do not read each other
    commute. The second half stays, so that all work is still handed out at the same turn.
    """
    _, job = recorded(tmp_path / "run", "pull_gossip", epochs=4)
    turns = read_order(tmp_path / "run", WORKERS)
    assert all(turn[1] in ("start", "run") for turn in turns[: len(turns) // 2])
    first, rest = turns[: len(turns) // 2], turns[len(turns) // 2 :]
    starts = [turn for turn in turns if turn[1] == "start"]
    steps = [turn for turn in first if turn[1] == "run"]
    rest = [turn for turn in rest if turn[1] != "start"]
    digests = {
        digest_of(replay(job, WORKERS, [*starts, *ordered, *rest]))
        for ordered in (
            sorted(steps, key=lambda turn: turn[3]), sorted(steps, key=lambda turn: -turn[3])
        )
    }  # fmt: skip
    assert len(digests) == 2


def test_a_record_with_a_hole_is_refused(tmp_path: Path) -> None:
    """A run that was cut short says so instead of ending somewhere."""
    (tmp_path / "order").mkdir()
    turns = [(number, "run" if number else "start", 0, number % WORKERS) for number in range(30)]
    orders = [tmp_path / "order" / f"{rank}.jsonl" for rank in range(WORKERS)]
    for rank, order in enumerate(orders):
        order.write_text("".join(f"{json.dumps(t[:3])}\n" for t in turns if t[3] == rank))
    assert read_order(tmp_path, WORKERS) == turns
    order = orders[1]
    lines = order.read_text().splitlines()
    order.write_text("\n".join(lines[:5] + lines[6:]) + "\n")
    with pytest.raises(ConfigurationError, match="lacks turn 16"):
        read_order(tmp_path, WORKERS)
    order.write_text("\n".join(lines)[:-3])
    with pytest.raises(ConfigurationError, match="middle of a line"):
        read_order(tmp_path, WORKERS)
    order.unlink()
    with pytest.raises(ConfigurationError, match="no order of events of worker 1"):
        read_order(tmp_path, WORKERS)


@pytest.mark.parametrize(
    ("method", "choices", "reason"),
    [
        ("hogwild", {}, "without any order"),
        ("ad_psgd", {"transport": "torch"}, "shared memory only"),
        ("ad_psgd", {"faults": FaultPlan((Fault("kill", 1.0, worker=0),))}, "--kill"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_a_reason(
    tmp_path: Path, method: str, choices: dict[str, object], reason: str
) -> None:
    """Before any worker starts."""
    with pytest.raises(ConfigurationError, match=f"cannot be recorded.*{reason}"):
        recorded(tmp_path / "run", method, **choices)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_command_compares_the_bits(tmp_path: Path) -> None:
    """`gossamer train --record`, then `gossamer replay RUN`: exit code 0 and the same digest, or 1
    and another one."""
    options = ["--method", "pull_gossip", "--task", "digits-logistic", "-n", "2", "--epochs", "1"]
    made = gossamer("train", *options, "--record", "--runs", str(tmp_path / "a"), "--json")
    assert made.status == 0, made.err
    (folder,) = (tmp_path / "a").iterdir()
    again = gossamer("replay", str(folder), "--json")
    assert again.status == 0, again.err
    assert again.json["same"] is True
    assert again.json["parameters_digest"] == made.json["parameters_digest"]
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "parameters_digest": "0"}))
    assert gossamer("replay", str(folder)).status == 1


JOB = json.loads(
    TrainRequest(
        make_settings("digits-logistic", "ad_psgd", Cluster(workers=2)), Path("x"), is_recorded=True
    ).to_json()
)
FINISHED = {"ended": "finished", "workers": 2, "parameters_digest": "0"}


@pytest.mark.parametrize(
    ("summary", "job", "sentence"),
    [
        (None, JOB, "holds no summary.json; give the folder of a finished"),
        ([], JOB, "summary.json is damaged; record the run again"),
        ({"ended": "interrupted"}, JOB, "ended without parameters to compare with: interrupted"),
        (FINISHED | {"parameters_digest": None, "ended": "failed"}, JOB, "compare with: failed;"),
        (FINISHED, None, "is not the folder of a run of `gossamer train`"),
        (FINISHED, JOB | {"of_another_version": 1}, "job.json cannot be read"),
        (FINISHED, JOB | {"is_recorded": False}, "was not recorded; start the run with"),
        (FINISHED, JOB, "holds no order of events of worker 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    tmp_path: Path, summary: object, job: object, sentence: str
) -> None:
    """A folder of something else, of a run that did not end, or of another version."""
    for name, content in (("summary.json", summary), ("job.json", job)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    refused = gossamer("replay", str(tmp_path))
    assert refused.status == 2
    assert sentence in " ".join(refused.err.split())
