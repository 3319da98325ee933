"""The values that loops share, in virtual time: they mean what they mean on real workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scripts
from command_line import gossamer
from gossamer.script.fork_server import ForkServer
from scripts import HEAD, cluster_of, printed, run, written

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "early_stopping.py"
SHARE = """
import json
from torch.optim.lr_scheduler import ReduceLROnPlateau
plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
told = []
with gossamer.join(model, optimizer, method="all_reduce", steps=16) as worker:
    for epoch in range(6):
        total = torch.zeros(2)
        for batch, wanted in worker.shard(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), wanted)
            loss.backward()
            if epoch == 1:
                worker.mean(loss, name="in the step")
            worker.step()
            total += torch.tensor([float(loss.detach()), 1.0])
        mean = worker.mean(total)
        plateau.step(float(mean[0]))
        told.append([
            *mean.tolist(), [one.tolist() for one in worker.gather(total)],
            worker.broadcast(f"from {worker.rank}", source=2), optimizer.param_groups[0]["lr"],
        ])
        if worker.any(worker.rank == 1 and epoch == 3):
            break
print("told", json.dumps(told), flush=True)
"""
wide = pytest.mark.wide


@pytest.mark.parametrize("method", ["all_reduce", pytest.param("local_sgd:period=4", marks=wide)])
def test_synchronous_workers_share_the_bits_of_real_ones(
    method: str, tmp_path: Path, server: ForkServer
) -> None:
    """Means, gathered and broadcast values, the plateau's rates and the common end are the same,
    also where a call stands between the gradient and the step, and one worker is slow."""
    script = written(tmp_path, HEAD, SHARE)
    run(server, script, method, cluster_of(3, slow=["0=4"]))
    told = [printed(script, rank)[-1] for rank in range(3)]
    assert len(set(told)) == 1
    found = json.loads(told[0].removeprefix("told "))
    assert len(found) == 4
    assert found[-1][-1] < found[0][-1]
    said = gossamer("run", "-n", "3", "--method", method, script)
    lines = {line[4:] for line in said.out.splitlines() if "told" in line}
    assert lines == set(told), said.err


@wide
def test_who_dies_is_left_out_and_nobody_waits_for_it(tmp_path: Path, server: ForkServer) -> None:
    """It is in the first means and not in the last ones."""
    script = written(tmp_path, HEAD, SHARE)
    result = run(server, script, "all_reduce", cluster_of(3, kill=["2@0.1s"]))
    assert result.living == 2
    zero, one = (json.loads(printed(script, r)[-1].removeprefix("told ")) for r in (0, 1))
    assert zero == one
    counts = [len(row[2]) for row in zero]
    assert (counts[0], counts[-1]) == (3, 2)
    assert zero[-1][3] == "from 0"


STOP = """
made = 0
with gossamer.join(model, optimizer, steps=200) as worker:
    while made < 200:
        for batch, wanted in worker.shard(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), wanted)
            loss.backward()
            worker.step()
            made += 1
            seen = worker.mean(float(worker.rank))
            if stops := worker.any(worker.rank == 3 and made >= 20):
                break
        if stops:
            break
print(made, seen)
"""


@pytest.mark.parametrize(
    ("method", "cores"),
    [
        ("ad_psgd", [{0, 1}]),
        pytest.param("ad_psgd", [{0}, {0, 1}], marks=wide),
        pytest.param("downpour", [{0}, {0, 1}], marks=wide),
    ],
)
def test_asynchronous_workers_wait_for_nobody_and_stop_within_a_step(
    method: str, cores: list[set[int]], tmp_path: Path, server: ForkServer
) -> None:
    """The slow worker holds nobody up, and the run is the same on one core and on two."""
    script = written(tmp_path, HEAD, STOP)
    cluster = cluster_of(4, slow=["0=4"])
    digests: set[tuple[str, ...]] = set()
    for some in cores:
        before = scripts.use_cores(server, some)
        try:
            result = run(server, script, method, cluster)
        finally:
            scripts.use_cores(server, before)
        told = [printed(script, rank)[-1] for rank in range(4)]
        digests.add((result.digest, result.parameters_digest, *told))
    assert len(digests) == 1
    made = [int(line.split()[0]) for line in told]
    assert made[3] == 20
    assert made[0] <= 20 / 4 + 2
    assert max(made) <= 22
    assert told[1].split()[1] == "1.5"


@wide
@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd"])
def test_the_example_of_early_stopping_stops_for_all(
    method: str, tmp_path: Path, server: ForkServer
) -> None:
    """Before its 60 epochs, at a smaller rate; synchronous workers at the same loss and epoch."""
    script = written(tmp_path, EXAMPLE.read_text(encoding="utf-8"))
    result = run(server, script, method, cluster_of(4, slow=["0=4"]))
    ends = [printed(script, rank)[-1].partition(": ")[2] for rank in range(4)]
    assert result.epochs < 30
    assert any(not end.endswith("rate 0.2") for end in ends)
    if method == "all_reduce":
        assert len(set(ends)) == 1
